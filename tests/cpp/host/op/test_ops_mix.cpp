// hc_stats, hc_combine_norm, hc_post, rms_norm and rank_sum as operations: bounds and refusals.
#include <cmath>
#include <limits>

#include "check.hpp"
#include "host/op/declared.hpp"

namespace {

using lowlat::host::OpSpec;
using lowlat::testing::begins_with;
using lowlat::testing::check_declared;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
namespace reference = lowlat::reference;

OpSpec op(const char* name) { return op_named(lowlat::host::ops_mix(), name); }

OpCall stats(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  OpCall call(op("hc_stats"));
  call.set("residual", LOWLAT_BF16, {rows, 4, hidden}, random.bf16(rows * 4 * hidden, scale));
  call.set("fn", LOWLAT_F32, {24, 4 * hidden}, random.f32(24 * 4 * hidden, 0.1));
  call.set("base", LOWLAT_F32, {24}, random.f32(24));
  call.set("scale", LOWLAT_F32, {3}, random.f32(3));
  return call;
}

OpCall combine(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  OpCall call(op("hc_combine_norm"));
  call.set("residual", LOWLAT_BF16, {rows, 4, hidden}, random.bf16(rows * 4 * hidden, scale));
  call.set("pre", LOWLAT_F32, {rows, 4}, random.f32(rows * 4));
  call.set("gain", LOWLAT_BF16, {hidden}, random.bf16(hidden));
  return call;
}

OpCall post(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  OpCall call(op("hc_post"));
  call.set("residual", LOWLAT_BF16, {rows, 4, hidden}, random.bf16(rows * 4 * hidden, scale));
  call.set("y", LOWLAT_BF16, {rows, hidden}, random.bf16(rows * hidden, scale));
  call.set("post", LOWLAT_F32, {rows, 4}, random.f32(rows * 4));
  call.set("comb", LOWLAT_F32, {rows, 4, 4}, random.f32(rows * 16));
  return call;
}

OpCall norm(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  OpCall call(op("rms_norm"));
  call.set("x", LOWLAT_BF16, {rows, hidden}, random.bf16(rows * hidden, scale));
  call.set("gain", LOWLAT_BF16, {hidden}, random.bf16(hidden));
  return call;
}

OpCall sum(Random& random, std::int64_t ranks, std::int64_t rows, std::int64_t hidden) {
  OpCall call(op("rank_sum"));
  call.set("partial", LOWLAT_F32, {ranks, rows, hidden}, random.f32(ranks * rows * hidden));
  return call;
}

void check_all(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  const OpCall call = stats(random, rows, hidden, scale);
  check_declared<float>(op("hc_stats"), call, "pre");
  check_declared<float>(op("hc_stats"), call, "post");
  check_declared<float>(op("hc_stats"), call, "comb");
  check_declared<std::uint16_t>(op("hc_combine_norm"), combine(random, rows, hidden, scale), "x");
  check_declared<std::uint16_t>(op("hc_post"), post(random, rows, hidden, scale), "residual");
  check_declared<std::uint16_t>(op("rms_norm"), norm(random, rows, hidden, scale), "y");
  check_declared<std::uint16_t>(op("rank_sum"), sum(random, 1 + rows % 8, rows, hidden), "y");
}

}  // namespace

TEST_CASE(random_inputs_stay_within_the_declared_bounds) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const std::int64_t hidden = 32 * random.integer(1, 4);
    check_all(random, random.integer(1, 6), hidden, std::exp(3.0 * random.normal()));
  }
  Random random(1000);
  check_all(random, 48, 128, 1.0);
  check_all(random, 64, 33, 1.0);
  check_all(random, 1, 5120, 1.0);
}

TEST_CASE(zeros_stay_zero) {
  const std::vector<std::uint16_t> zeros(8, 0);
  OpCall call(op("rms_norm"));
  call.set("x", LOWLAT_BF16, {2, 4}, zeros);
  call.set("gain", LOWLAT_BF16, {4}, std::vector<std::uint16_t>(4, 0x3f80));
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(call.run<std::uint16_t>(platform) == zeros);
  }
  // All-zero streams: the mix is 0, so pre, post and comb come from base alone.
  Random random(3);
  OpCall still = stats(random, 1, 8, 0.0);
  still.set("base", LOWLAT_F32, {24}, std::vector<float>(24));
  CHECK_NEAR(still.run<float>("scalar", "pre")[3], 0.500001, 1e-7);
  CHECK_EQ(still.run<float>("scalar", "post")[0], 1.0f);
  CHECK_NEAR(still.run<float>("scalar", "comb")[5], 0.25, 1e-6);
}

TEST_CASE(saturated_gates_and_extreme_logits_are_finite) {
  Random random(4);
  for (const float scale : {1e3f, -1e3f, 1e15f}) {
    OpCall call = stats(random, 3, 32, 1.0);
    call.set("scale", LOWLAT_F32, {3}, std::vector<float>(3, scale));
    for (const char* name : {"pre", "post", "comb"}) {
      for (const float v : call.run<float>("scalar", name)) CHECK(std::isfinite(v) && v >= 0.0f);
    }
  }
}

TEST_CASE(subnormal_and_largest_residuals_stay_within_the_bounds) {
  Random random(5);
  for (const double scale : {1e-39, 1e-30, 1e-12, 1e13}) check_all(random, 2, 64, scale);
}

TEST_CASE(refuses_what_is_not_finite_or_too_large_by_name) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Random random(6);
  OpCall call = stats(random, 2, 8, 1.0);
  call.set("base", LOWLAT_F32, {24}, std::vector<float>(24, kNan));
  CHECK(begins_with(call.refusal(), "base[0] is nan"));
  call = stats(random, 2, 8, 1e20);
  CHECK(begins_with(call.refusal(), "residual["));
  call = combine(random, 2, 8, 1.0);
  call.set("gain", LOWLAT_BF16, {8}, std::vector<std::uint16_t>(8, 0x7fc0));
  CHECK(begins_with(call.refusal(), "gain[0] is nan"));
  call = post(random, 2, 8, 1.0);
  call.set("comb", LOWLAT_F32, {2, 4, 4}, std::vector<float>(32, 1e16f));
  CHECK(begins_with(call.refusal(), "comb[0, 0, 0] is 1e+16"));
  call = norm(random, 2, 8, 1.0);
  call.set("x", LOWLAT_BF16, {2, 8}, std::vector<std::uint16_t>(16, 0xff80));
  CHECK(begins_with(call.refusal(), "x[0, 0] is infinite"));
  call = norm(random, 2, 8, 1.0);
  call.set("gain", LOWLAT_BF16, {7}, random.bf16(7));
  CHECK(begins_with(call.refusal(), "gain has shape [7]; needed [H] with H = 8 (x)"));
  call.set("x", LOWLAT_BF16, {1, 0}, std::vector<std::uint16_t>());
  call.set("gain", LOWLAT_BF16, {0}, std::vector<std::uint16_t>());
  CHECK_EQ(call.refusal(), "H is 0; needed 1 or more");
  CHECK(begins_with(sum(random, 0, 1, 4).refusal(), "partial has R = 0 ranks"));
  CHECK(begins_with(sum(random, 65, 1, 4).refusal(), "partial has R = 65 ranks"));
}
