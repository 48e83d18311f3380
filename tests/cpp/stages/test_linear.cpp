// The linear stages: quantised activations, weights of every kind, the same bits for any rows and
// ranges.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/linear.hpp"
#include "stages/linear.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using lowlat::testing::Random;

std::vector<std::uint8_t> codes(Random& random, std::size_t n) {
  std::vector<std::uint8_t> out(n);
  for (std::uint8_t& code : out) code = reference::to_e4m3(100.0 * random.normal());
  return out;
}

template <class Weights>
std::vector<float> run(const std::vector<float>& x, int num_rows, int k, const Weights& weights,
                       int n, int begin, int end) {
  std::vector<float> y(num_rows * n, -7.0f), w_row(k);
  stages::linear(x.data(), k, num_rows, k, weights, begin, end, w_row.data(),
                 [&](int t, int out, float v) { y[t * n + out] = v; });
  return y;
}

}  // namespace

TEST_CASE(activation_scale_is_the_least_power_that_fits) {
  CHECK_EQ(stages::activation_scale(448.0f), 1.0f);
  CHECK_EQ(stages::activation_scale(450.0f), 2.0f);
  CHECK_EQ(stages::activation_scale(224.0f), 0.5f);
  CHECK_EQ(stages::activation_scale(0.0f), 0x1p-42f);
  CHECK_EQ(stages::activation_scale(1e-20f), 0x1p-42f);
}

TEST_CASE(quantised_activations_are_bitwise_the_reference) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const int group = seed % 2 == 0 ? 32 : 128, n = group * 5;
    std::vector<std::uint16_t> x = random.bf16(n, std::exp(5.0 * random.normal()));
    for (int i = 0; i < 20; ++i) {
      std::uint16_t& code = x[random.integer(0, n - 1)];
      code = static_cast<std::uint16_t>(random.integer(0, 0x7f00));  // any positive magnitude
    }
    for (std::uint16_t& code : x) {
      if (std::abs(reference::from_bf16(code)) > 1e30) code = 0x8000;
    }
    std::vector<double> want(n);
    reference::quantize_activation(want.data(), x.data(), n, group);
    std::vector<float> got(n);
    stages::quantize_row(got.data(), x.data(), n, group);
    for (int i = 0; i < n; ++i) CHECK_EQ(got[i], want[i]);
  }
}

TEST_CASE(block_weights_take_their_blocks_scale) {
  // Scale of block (r, c) is 2^(r + 2 c), as fp32 and as ue8m0: row 33 lies in block row 1.
  std::vector<std::uint8_t> w(64 * 96, 0x38);
  const float f32[6] = {1, 4, 16, 2, 8, 32};
  const std::uint8_t ue8m0[6] = {127, 129, 131, 128, 130, 132};
  std::vector<float> row(96);
  stages::E4m3Weights<stages::ScaleF32>{w.data(), 96, {f32, 3}, 32}.expand(row.data(), 33, 96);
  CHECK(row[0] == 2.0f && row[31] == 2.0f && row[32] == 8.0f && row[95] == 32.0f);
  std::vector<float> same(96);
  stages::E4m3Weights<stages::ScaleUe8m0>{w.data(), 96, {ue8m0, 3}, 32}.expand(same.data(), 33, 96);
  CHECK(same == row);
}

TEST_CASE(wo_a_weights_fit_bf16) {
  // e4m3 times a power of two: what the bf16 o-projection calls exact.
  for (int code = 0; code < 0x7f; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    float v;
    stages::expand_e4m3(&v, &bits, stages::from_ue8m0(100), 1);
    CHECK_EQ(stages::round_bf16(v), v);
  }
}

TEST_CASE(agrees_with_the_reference) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    const int rows = 5, n = 64, k = 160;
    const std::vector<std::uint16_t> x = random.bf16(rows * k);
    const std::vector<std::uint8_t> w = codes(random, n * k);
    std::vector<float> scale(2 * 5);
    for (float& s : scale) s = std::ldexp(1.0f, static_cast<int>(random.integer(-9, 0)));
    std::vector<float> xq(rows * k);
    for (int t = 0; t < rows; ++t) stages::quantize_row(&xq[t * k], &x[t * k], k, 32);
    const std::vector<float> y =
        run(xq, rows, k, stages::E4m3Weights<stages::ScaleF32>{w.data(), k, {scale.data(), 5}, 32},
            n, 0, n);
    std::vector<std::uint16_t> want(rows * n);
    reference::block_linear(want.data(), x.data(), w.data(), scale.data(), rows, n, k, 32);
    std::vector<double> got;
    for (const float v : y) got.push_back(stages::round_bf16(v));
    CHECK_NEAR(lowlat::testing::rel_l2(got, lowlat::testing::values_of(want)), 0.0, 1e-3);
  }
}

TEST_CASE(bits_do_not_depend_on_rows_or_ranges) {
  Random random(9);
  const int n = 40, k = 96, stride = 128;
  const std::vector<std::uint16_t> w = random.bf16(n * stride);
  const stages::Bf16Weights weights{w.data(), stride};
  const std::vector<float> x = random.f32(48 * k);
  const std::vector<float> all = run(x, 48, k, weights, n, 0, n);
  for (const int t : {0, 17, 47}) {
    const std::vector<float> row(x.begin() + t * k, x.begin() + (t + 1) * k);
    const std::vector<float> one = run(row, 1, k, weights, n, 13, 29);
    for (int out = 0; out < n; ++out) {
      CHECK_EQ(one[out], out >= 13 && out < 29 ? all[t * n + out] : -7.0f);
    }
  }
}
