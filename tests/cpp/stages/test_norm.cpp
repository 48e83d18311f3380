// The norm stage: by hand, against the reference, awkward rows.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/norm.hpp"
#include "stages/norm.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Norm = stages::RmsNorm<lowlat::scalar::plat::Block<256>>;
using lowlat::testing::Random;

std::vector<std::uint16_t> norm(const std::vector<std::uint16_t>& x,
                                const std::vector<std::uint16_t>& gain, float eps) {
  std::vector<float> row(x.size());
  stages::expand_bf16(row.data(), x.data(), static_cast<int>(x.size()));
  std::vector<std::uint16_t> out(x.size(), 0x7fc0);
  Norm::Scratch scratch;
  Norm::run(out.data(), row.data(), gain.data(), static_cast<int>(x.size()), eps, scratch);
  return out;
}

}  // namespace

TEST_CASE(scale_by_hand) {
  const float x[2] = {1.0f, -7.0f};
  Norm::Scratch scratch;
  CHECK_EQ(Norm::scale(x, 2, 0.0f, scratch), 0.2f);  // 1 / sqrt(25)
  const float zero[2] = {};
  CHECK_NEAR(Norm::scale(zero, 2, 1e-20f, scratch), 1e10, 1e3);
}

TEST_CASE(agrees_with_the_reference_within_one_place) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const std::int64_t n = random.integer(1, 700);
    const auto x = random.bf16(n, std::exp(4.0 * random.normal())), gain = random.bf16(n);
    const auto got = norm(x, gain, 1e-20f);
    std::vector<std::uint16_t> want(n);
    reference::rms_norm(want.data(), x.data(), gain.data(), 1, n, 1e-20);
    // Same sign always, so neighbouring values are neighbouring codes.
    for (std::int64_t i = 0; i < n; ++i) CHECK(std::abs(got[i] - want[i]) <= 1);
  }
}

TEST_CASE(unrounded_values_round_to_the_rounded_ones) {
  Random random(9);
  const auto gain = random.bf16(130);
  std::vector<float> x = random.f32(130);
  std::vector<std::uint16_t> rounded(130);
  Norm::Scratch scratch;
  Norm::run(rounded.data(), x.data(), gain.data(), 130, 1e-6f, scratch);
  Norm::run(x.data(), x.data(), gain.data(), 130, 1e-6f, scratch);  // in place
  int exact = 0;
  for (int i = 0; i < 130; ++i) {
    CHECK_EQ(stages::to_bf16(x[i]), rounded[i]);
    exact += stages::round_bf16(x[i]) == x[i] ? 1 : 0;
  }
  CHECK(exact < 20);
}

TEST_CASE(awkward_rows) {
  const std::vector<std::uint16_t> one(4, 0x3f80);
  const std::vector<std::uint16_t> zeros = {0x0000, 0x8000, 0x0000, 0x8000};
  CHECK(norm(zeros, one, 1e-20f) == zeros);
  CHECK(norm({0x4040, 0x4040, 0x4040, 0x4040}, one, 1e-20f) == one);  // all equal: 1 each
  // Subnormal rows lie far below epsilon: x * 1e10.
  const auto out = norm({0x0001, 0x0001, 0x0001, 0x0001}, one, 1e-20f);
  CHECK_NEAR(reference::from_bf16(out[0]) / (std::ldexp(1.0, -133) * 1e10), 1.0, 4e-3);
}

TEST_CASE(without_a_weight_by_hand) {
  const float x[3] = {1.0f, -7.0f, 5.0f};
  std::uint16_t out[3] = {0x7fc0, 0x7fc0, 0x7fc0};
  Norm::Scratch scratch;
  Norm::run(out, x, 3, 0.0f, scratch);  // mean square 25
  CHECK_EQ(out[0], reference::to_bf16(0.2));
  CHECK_EQ(out[1], reference::to_bf16(-1.4));
  CHECK_EQ(out[2], reference::to_bf16(1.0));
  const float zero[2] = {};
  Norm::run(out, zero, 2, 1e-6f, scratch);
  CHECK_EQ(out[0], 0);
}

TEST_CASE(without_a_weight_agrees_with_the_reference_within_one_place) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const std::int64_t n = random.integer(1, 700);
    const auto x = random.bf16(n, std::exp(4.0 * random.normal()));
    std::vector<float> row(n);
    stages::expand_bf16(row.data(), x.data(), static_cast<int>(n));
    std::vector<std::uint16_t> got(n, 0x7fc0), want(n);
    Norm::Scratch scratch;
    Norm::run(got.data(), row.data(), static_cast<int>(n), 1e-6f, scratch);
    reference::head_norm(want.data(), x.data(), 1, n, 1e-6);
    for (std::int64_t i = 0; i < n; ++i) CHECK(std::abs(got[i] - want[i]) <= 1);
  }
}
