// Operations that mix and norm rows: bounds, what differs between the models, and refusals.
// Planted: v41's epsilon and its rounded statistic for v4 each fail a case.
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

OpCall collapse(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  OpCall call(op("hc_head"), "v4");
  call.set("residual", LOWLAT_BF16, {rows, 4, hidden}, random.bf16(rows * 4 * hidden, scale));
  call.set("fn", LOWLAT_F32, {4, 4 * hidden}, random.f32(4 * 4 * hidden, 0.1));
  call.set("base", LOWLAT_F32, {4}, random.f32(4));
  call.set("scale", LOWLAT_F32, {1}, random.f32(1));
  return call;
}

OpCall heads(Random& random, std::int64_t rows, std::int64_t num_heads, std::int64_t dim,
             double scale) {
  OpCall call(op("head_norm"), "v4");
  call.set("x", LOWLAT_BF16, {rows, num_heads, dim}, random.bf16(rows * num_heads * dim, scale));
  return call;
}

void check_all(Random& random, std::int64_t rows, std::int64_t hidden, double scale) {
  for (const char* model : {"v4", "v41"}) {
    const OpCall call = stats(random, rows, hidden, scale).of(model);
    check_declared<float>(op("hc_stats"), call, "pre");
    check_declared<float>(op("hc_stats"), call, "post");
    check_declared<float>(op("hc_stats"), call, "comb");
    check_declared<std::uint16_t>(op("hc_combine_norm"),
                                  combine(random, rows, hidden, scale).of(model), "x");
    check_declared<std::uint16_t>(op("rms_norm"), norm(random, rows, hidden, scale).of(model), "y");
  }
  check_declared<std::uint16_t>(op("hc_post"), post(random, rows, hidden, scale), "residual");
  check_declared<std::uint16_t>(op("rank_sum"), sum(random, 1 + rows % 8, rows, hidden), "y");
  check_declared<std::uint16_t>(op("hc_head"), collapse(random, rows, hidden, scale), "h");
  check_declared<std::uint16_t>(op("head_norm"), heads(random, rows, 3, hidden, scale), "x");
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

TEST_CASE(epsilon_is_the_models) {
  // Rows of 2^-10: the mean square is 2^-20, beside which 1e-6 counts and 1e-20 does not.
  const double small = 1.0 / std::sqrt(1.0 + 1e-6 * 0x1p20);
  const std::vector<std::uint16_t> row(8, reference::to_bf16(0x1p-10)), one(8, 0x3f80);
  const std::vector<std::uint16_t> v4(8, reference::to_bf16(small));
  OpCall norm_call(op("rms_norm"));
  norm_call.set("x", LOWLAT_BF16, {1, 8}, row).set("gain", LOWLAT_BF16, {8}, one);
  OpCall head_call(op("head_norm"), "v4");
  head_call.set("x", LOWLAT_BF16, {1, 2, 4}, row);
  OpCall combine_call(op("hc_combine_norm"));
  combine_call.set("residual", LOWLAT_BF16, {1, 4, 2}, row)
      .set("pre", LOWLAT_F32, {1, 4}, std::vector<float>({0, 1, 0, 0}))
      .set("gain", LOWLAT_BF16, {2}, std::vector<std::uint16_t>(2, 0x3f80));
  OpCall stats_call(op("hc_stats"));
  stats_call.set("residual", LOWLAT_BF16, {1, 4, 2}, row)
      .set("fn", LOWLAT_F32, {24, 8}, std::vector<float>(192, 0.125f))
      .set("base", LOWLAT_F32, {24}, std::vector<float>(24))
      .set("scale", LOWLAT_F32, {3}, std::vector<float>(3, 1.0f));
  OpCall collapse_call(op("hc_head"), "v4");
  collapse_call.set("residual", LOWLAT_BF16, {1, 4, 2}, row)
      .set("fn", LOWLAT_F32, {4, 8}, std::vector<float>(32, 0.125f))
      .set("base", LOWLAT_F32, {4}, std::vector<float>(4))
      .set("scale", LOWLAT_F32, {1}, std::vector<float>(1, 8.0f));
  const auto gate = [](double m) { return 1.0 / (1.0 + std::exp(-m)) + 1e-6; };
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(norm_call.run<std::uint16_t>(platform) == one);
    CHECK(norm_call.of("v4").run<std::uint16_t>(platform) == v4);
    CHECK(head_call.run<std::uint16_t>(platform) == v4);
    CHECK_EQ(combine_call.run<std::uint16_t>(platform)[1], one[0]);
    CHECK_EQ(combine_call.of("v4").run<std::uint16_t>(platform)[1], v4[0]);
    CHECK_NEAR(stats_call.run<float>(platform, "pre")[0], gate(1.0), 1e-6);
    CHECK_NEAR(stats_call.of("v4").run<float>(platform, "pre")[0], gate(small), 1e-6);
    CHECK_EQ(collapse_call.run<std::uint16_t>(platform)[0],
             reference::to_bf16(4.0 * gate(8.0 * small) * 0x1p-10));
  }
}

TEST_CASE(closed_gates_of_the_head_leave_1e_6_of_each_stream) {
  std::vector<std::uint16_t> residual;
  for (const double v : {1.0, 2.0, 3.0, 4.0}) residual.push_back(reference::to_bf16(v));
  OpCall call(op("hc_head"), "v4");
  call.set("residual", LOWLAT_BF16, {1, 4, 1}, residual)
      .set("fn", LOWLAT_F32, {4, 4}, std::vector<float>(16))
      .set("base", LOWLAT_F32, {4}, std::vector<float>(4, -80.0f))
      .set("scale", LOWLAT_F32, {1}, std::vector<float>(1, 1.0f));
  for (const char* platform : {"scalar", "reference"}) {
    CHECK_EQ(call.run<std::uint16_t>(platform)[0], reference::to_bf16(1e-5));
  }
}

TEST_CASE(statistic_of_a_combine_is_the_models) {
  // v = 1 + 2^-8 - 2^-12 is 1 in bf16: over the rounded v the result is 1, over v it is 1 - 2^-8.
  std::vector<std::uint16_t> residual;
  for (const double v : {1.0, 0x1p-8, -0x1p-12, 0.0}) residual.push_back(reference::to_bf16(v));
  OpCall call(op("hc_combine_norm"));
  call.set("residual", LOWLAT_BF16, {1, 4, 1}, residual)
      .set("pre", LOWLAT_F32, {1, 4}, std::vector<float>(4, 1.0f))
      .set("gain", LOWLAT_BF16, {1}, std::vector<std::uint16_t>(1, 0x3f80));
  for (const char* platform : {"scalar", "reference"}) {
    CHECK_EQ(call.run<std::uint16_t>(platform)[0], reference::to_bf16(1.0));
    CHECK_EQ(call.of("v4").run<std::uint16_t>(platform)[0], reference::to_bf16(1.0 - 0x1p-8));
  }
}

TEST_CASE(a_row_does_not_depend_on_its_neighbours) {
  Random random(8);
  const std::int64_t rows = 5, hidden = 96;
  const auto residual = random.bf16(rows * 4 * hidden);
  const auto pre = random.f32(rows * 4), fn = random.f32(16 * hidden), base = random.f32(4);
  const auto gain = random.bf16(hidden);
  const auto run = [&](std::int64_t first, std::int64_t count) {
    const std::vector<std::uint16_t> some(residual.begin() + first * 4 * hidden,
                                          residual.begin() + (first + count) * 4 * hidden);
    OpCall combined(op("hc_combine_norm"), "v4");
    combined.set("residual", LOWLAT_BF16, {count, 4, hidden}, some)
        .set("pre", LOWLAT_F32, {count, 4},
             std::vector<float>(pre.begin() + first * 4, pre.begin() + (first + count) * 4))
        .set("gain", LOWLAT_BF16, {hidden}, gain);
    OpCall collapsed(op("hc_head"), "v4");
    collapsed.set("residual", LOWLAT_BF16, {count, 4, hidden}, some)
        .set("fn", LOWLAT_F32, {4, 4 * hidden}, fn)
        .set("base", LOWLAT_F32, {4}, base)
        .set("scale", LOWLAT_F32, {1}, std::vector<float>(1, 0.5f));
    OpCall normed(op("head_norm"), "v4");
    normed.set("x", LOWLAT_BF16, {count, 4, hidden}, some);
    auto all = combined.run<std::uint16_t>("scalar");
    for (const OpCall& call : {collapsed, normed}) {
      const auto more = call.run<std::uint16_t>("scalar");
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  };
  const auto together = run(0, rows);
  for (std::int64_t t = 0; t < rows; ++t) {
    const auto alone = run(t, 1);
    std::int64_t begin = 0;
    for (const std::int64_t width : {hidden, hidden, 4 * hidden}) {
      for (std::int64_t i = 0; i < width; ++i) {
        CHECK_EQ(together[begin * rows + t * width + i], alone[begin + i]);
      }
      begin += width;
    }
  }
}

TEST_CASE(post_and_rank_sum_mean_the_same_in_both_models) {
  Random random(7);
  for (const OpCall& call : {post(random, 3, 40, 1.0), sum(random, 4, 2, 33)}) {
    for (const char* platform : {"scalar", "reference"}) {
      CHECK(call.of("v4").run<std::uint16_t>(platform) == call.run<std::uint16_t>(platform));
    }
  }
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
  call = combine(random, 2, 8, 1e13);
  call.set("pre", LOWLAT_F32, {2, 4}, std::vector<float>({1, 1, 1, 1, 1, 1, 1e9f, 1}));
  CHECK_EQ(call.refusal(),
           "pre and residual of row 1 may combine to more than 1e17; needed smaller ones");
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
  call = collapse(random, 1, 8, 1.0);
  call.set("scale", LOWLAT_F32, {3}, std::vector<float>(3));
  CHECK_EQ(call.refusal(), "scale has shape [3]; needed [1], that is [1]");
  call = collapse(random, 1, 8, 1.0);
  call.set("fn", LOWLAT_F32, {24, 32}, std::vector<float>(24 * 32));
  CHECK(begins_with(call.refusal(), "fn has shape [24, 32]; needed [4,4H]"));
  CHECK_EQ(heads(random, 1, 0, 8, 1.0).refusal(), "h is 0; needed 1 or more");
  CHECK_EQ(heads(random, 1, 2, 0, 1.0).refusal(), "D is 0; needed 1 or more");
  CHECK(begins_with(heads(random, 1, 2, 4, 1e20).refusal(), "x[0, 0, 0] is"));
}
