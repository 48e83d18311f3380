// The hyper-connection stages: the published Sinkhorn check, roundings by hand, the reference.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/hc.hpp"
#include "stages/hc.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using Codes = std::vector<std::uint16_t>;
using lowlat::testing::Random;

Codes bf16(const std::vector<double>& values) {
  Codes codes;
  for (const double v : values) codes.push_back(reference::to_bf16(v));
  return codes;
}

float combine_one(const Codes& residual, const float (&pre)[4]) {
  float result = -1.0f;
  stages::hc_combine<Block>(residual.data(), pre, 1, [&](int, float v) { result = v; });
  return result;
}

}  // namespace

TEST_CASE(sinkhorn_gives_the_published_matrix) {
  const double want[16] = {0.1282995, 0.4585734, 0.2065630, 0.2065631, 0.2065631, 0.1282995,
                           0.3325683, 0.3325681, 0.4585734, 0.2848267, 0.1282994, 0.1282996,
                           0.2065631, 0.1282995, 0.3325683, 0.3325681};
  float comb[4][4];
  for (int j = 0; j < 4; ++j) {
    for (int k = 0; k < 4; ++k) comb[j][k] = static_cast<float>((3 * j + 5 * k) % 7) / 4 - 0.5f;
  }
  stages::hc_sinkhorn(comb, 1e-6f, 20);
  for (int i = 0; i < 16; ++i) CHECK_NEAR(comb[i / 4][i % 4], want[i], 3e-7);
}

TEST_CASE(sinkhorn_of_one_pass_by_hand) {
  // Equal logits: softmax 0.25 + eps, columns of 1 + 4 eps over (that + eps).
  float comb[4][4] = {};
  stages::hc_sinkhorn(comb, 0.5f, 1);
  for (const auto& row : comb) {
    for (const float v : row) CHECK_EQ(v, 0.75f / 3.5f);
  }
}

TEST_CASE(sinkhorn_survives_extreme_logits) {
  float comb[4][4] = {{1e30f, 0, 0, 0}, {-1e30f, 0, 0, 0}, {1e30f, 1e30f, 0, 0}, {0, 0, 0, 0}};
  stages::hc_sinkhorn(comb, 1e-6f, 20);
  for (int k = 0; k < 4; ++k) {
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) {
      CHECK(std::isfinite(comb[j][k]) && comb[j][k] >= 0.0f);
      sum += comb[j][k];
    }
    CHECK_NEAR(sum, 1.0, 1e-4);
  }
}

TEST_CASE(combine_is_a_chain_of_fma_in_stream_order) {
  // (1 + 2^-7)(1 + 2^-17) = 1 + 2^-7 + 2^-17 + 2^-24: the last place survives only without a
  // rounding between product and sum.
  const Codes residual = bf16({-1.0, 1.0 + 0x1p-7, 0, 0});
  const float pre[4] = {1.0f, 1.0f + 0x1p-17f, 0, 0};
  CHECK_EQ(combine_one(residual, pre), 0x1p-7f + 0x1p-17f + 0x1p-24f);
  // Ascending: 2^24 swallows the 1 of stream 1 before stream 2 cancels it.
  const float ones[4] = {1, 1, 1, 1};
  CHECK_EQ(combine_one(bf16({0x1p24, 1, -0x1p24, 0}), ones), 0.0f);
  CHECK_EQ(combine_one(bf16({0x1p24, -0x1p24, 1, 0}), ones), 1.0f);
}

TEST_CASE(first_sublayer_takes_stream_0) {
  Random random(1);
  const Codes residual = random.bf16(4 * 64);
  const float pre[4] = {1, 0, 0, 0};
  std::vector<float> row(64);
  stages::hc_combine_bf16<Block>(row.data(), residual.data(), pre, 64);
  for (int h = 0; h < 64; ++h) CHECK_EQ(row[h], stages::from_bf16(residual[h]));
}

TEST_CASE(combine_norm_rounds_before_the_statistic) {
  const Codes residual = bf16({1, 3, 0x1p-9, 0, 0, 0, 0, -2}), gain = bf16({1, 1});
  const float pre[4] = {1, 1, 1, 1};
  Codes x(2);
  std::vector<float> row(2);
  stages::RmsNorm<Block>::Scratch scratch;
  stages::hc_combine_norm<Block>(x.data(), residual.data(), pre, gain.data(), 2, 0.0f, row.data(),
                                 scratch);
  CHECK_EQ(row[0], 1.0f);
  CHECK(x == bf16({1, 1}));
}

TEST_CASE(combine_norm_of_v4_takes_the_statistic_before_rounding) {
  // v = 1 + 2^-8 - 2^-12 is 1 in bf16. Over itself the root mean square is 1.0037, so 1 becomes
  // 0.9963 and rounds to 1 - 2^-8; over the rounded v it is 1.
  const Codes residual = bf16({1, 0x1p-8, -0x1p-12, 0}), gain = bf16({1});
  const float pre[4] = {1, 1, 1, 1};
  Codes x(1);
  float row = 0.0f;
  stages::RmsNorm<Block>::Scratch scratch;
  stages::hc_combine_norm<Block>(x.data(), residual.data(), pre, gain.data(), 1, 0.0f, &row,
                                 scratch, stages::HcStatistic::unrounded);
  CHECK_EQ(row, 1.0f);
  CHECK(x == bf16({1 - 0x1p-8}));
  stages::hc_combine_norm<Block>(x.data(), residual.data(), pre, gain.data(), 1, 0.0f, &row,
                                 scratch, stages::HcStatistic::rounded);
  CHECK(x == bf16({1}));
}

TEST_CASE(four_outputs_are_the_first_four_of_twenty_four) {
  Random random(9);
  const int hidden = 50;
  const Codes residual = random.bf16(4 * hidden);
  const auto fn = random.f32(96 * hidden, 0.5), base = random.f32(24), scale = random.f32(3);
  std::vector<float> row(4 * hidden);
  stages::expand_bf16(row.data(), residual.data(), 4 * hidden);
  using Stats = stages::HcStats<Block>;
  Stats::Scratch scratch;
  float all[24], some[5] = {0, 0, 0, 0, -7.0f}, pre[4];
  Stats::mix(all, row.data(), fn.data(), hidden, 1e-6f, scratch);
  Stats::mix(some, row.data(), fn.data(), hidden, 1e-6f, scratch, 4);
  for (int k = 0; k < 4; ++k) CHECK_EQ(some[k], all[k]);
  CHECK_EQ(some[4], -7.0f);
  stages::HcParams params;
  Stats::params(params, all, base.data(), scale.data(), 1e-6f, 20);
  Stats::pre(pre, some, base.data(), scale[0], 1e-6f);
  for (int k = 0; k < 4; ++k) CHECK_EQ(pre[k], params.pre[k]);
}

TEST_CASE(post_rounds_in_the_declared_order) {
  const Codes residual = bf16({1.0 + 0x1p-7, 0, 0, 0}), y = bf16({1.0 + 0x1p-7});
  const float post[4] = {-1, 0, 0, 0};
  const float comb[4][4] = {{1.0f + 0x1p-23f, 0, 0, 0}, {}, {}, {}};
  Codes out(4, 0x7fc0);
  stages::hc_post<Block>(out.data(), residual.data(), y.data(), post, comb, 1, 0, 1);
  // (1 + 2^-7)(1 + 2^-23) has a 2^-30 that the rounding of comb[0] R0 drops, before
  // post y is added; one fused chain would keep it.
  CHECK_EQ(stages::from_bf16(out[0]), 0x1p-23f);
}

TEST_CASE(post_mixes_in_place_and_by_ranges) {
  Random random(2);
  const int hidden = 96;
  Codes residual = random.bf16(4 * hidden), out(4 * hidden, 0x7fc0);
  const Codes y = random.bf16(hidden);
  const std::vector<float> post = random.f32(4), flat = random.f32(16);
  float comb[4][4];
  for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = flat[i];
  stages::hc_post<Block>(out.data(), residual.data(), y.data(), post.data(), comb, hidden, 0,
                         hidden);
  Codes want(4 * hidden);
  reference::hc_post(want.data(), residual.data(), y.data(), post.data(), flat.data(), 1, hidden);
  CHECK_NEAR(
      lowlat::testing::rel_l2(lowlat::testing::values_of(out), lowlat::testing::values_of(want)),
      0.0, 4e-3);
  stages::hc_post<Block>(residual.data(), residual.data(), y.data(), post.data(), comb, hidden, 40,
                         hidden);
  stages::hc_post<Block>(residual.data(), residual.data(), y.data(), post.data(), comb, hidden, 0,
                         40);
  CHECK(residual == out);
}

TEST_CASE(stats_agree_with_the_reference) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const std::int64_t hidden = random.integer(1, 200);
    const Codes residual = random.bf16(4 * hidden, std::exp(4.0 * random.normal()));
    const auto fn = random.f32(96 * hidden, 0.5), base = random.f32(24), scale = random.f32(3);
    float pre[4], post[4], comb[16];
    reference::hc_stats(pre, post, comb, residual.data(), fn.data(), base.data(), scale.data(), 1,
                        hidden, 1e-20, 1e-6, 20);
    using Stats = stages::HcStats<Block>;
    std::vector<float> row(4 * hidden);
    stages::expand_bf16(row.data(), residual.data(), static_cast<int>(4 * hidden));
    float mix[24];
    Stats::Scratch scratch;
    Stats::mix(mix, row.data(), fn.data(), static_cast<int>(hidden), 1e-20f, scratch);
    stages::HcParams got;
    Stats::params(got, mix, base.data(), scale.data(), 1e-6f, 20);
    for (int k = 0; k < 4; ++k) {
      CHECK_NEAR(got.pre[k], pre[k], 2e-5);
      CHECK_NEAR(got.post[k], post[k], 2e-5);
      for (int j = 0; j < 4; ++j) CHECK_NEAR(got.comb[j][k], comb[4 * j + k], 2e-5);
    }
  }
}
