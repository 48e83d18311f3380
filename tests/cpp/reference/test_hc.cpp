// Hyper-connections in double precision: the published Sinkhorn check and rows worked out by hand.
#include "reference/hc.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace reference = lowlat::reference;

namespace {

std::vector<std::uint16_t> bf16(const std::vector<double>& values) {
  std::vector<std::uint16_t> codes;
  for (const double v : values) codes.push_back(reference::to_bf16(v));
  return codes;
}

}  // namespace

TEST_CASE(sinkhorn_gives_the_published_matrix) {
  const double want[16] = {0.1282995, 0.4585734, 0.2065630, 0.2065631, 0.2065631, 0.1282995,
                           0.3325683, 0.3325681, 0.4585734, 0.2848267, 0.1282994, 0.1282996,
                           0.2065631, 0.1282995, 0.3325683, 0.3325681};
  double comb[16];
  for (int j = 0; j < 4; ++j) {
    for (int k = 0; k < 4; ++k) comb[4 * j + k] = (3 * j + 5 * k) % 7 / 4.0 - 0.5;
  }
  reference::hc_sinkhorn(comb, 1e-6, 20);
  for (int i = 0; i < 16; ++i) CHECK_NEAR(comb[i], want[i], 2e-7);
  for (int j = 0; j < 4; ++j) {
    CHECK_NEAR(comb[4 * j] + comb[4 * j + 1] + comb[4 * j + 2] + comb[4 * j + 3], 0.999999, 3e-7);
    CHECK_NEAR(comb[j] + comb[4 + j] + comb[8 + j] + comb[12 + j], 0.999999, 3e-7);
  }
}

TEST_CASE(stats_of_a_row_by_hand) {
  // hidden 1: x = (1, 2, 3, 4), mean square 7.5. fn's row i picks element i mod 4.
  const std::vector<std::uint16_t> residual = bf16({1, 2, 3, 4});
  std::vector<float> fn(96), base(24);
  for (int i = 0; i < 24; ++i) fn[i * 4 + i % 4] = 1.0f;
  base[6] = 0.5f;
  const float scale[3] = {1.0f, -2.0f, 0.0f};
  float pre[4], post[4], comb[16];
  reference::hc_stats(pre, post, comb, residual.data(), fn.data(), base.data(), scale, 1, 1, 1e-20,
                      1e-6, 20);
  for (int k = 0; k < 4; ++k) {
    const double m = (k + 1) / std::sqrt(7.5);
    CHECK_NEAR(pre[k], 1.0 / (1.0 + std::exp(-m)) + 1e-6, 1e-7);
    CHECK_NEAR(post[k], 2.0 / (1.0 + std::exp(2.0 * m - (k == 2 ? 0.5 : 0.0))), 1e-7);
  }
  for (const float v : comb) CHECK_NEAR(v, 0.25, 1e-6);  // scale 0: all logits equal
}

TEST_CASE(comb_is_stream_in_by_stream_out) {
  const std::vector<std::uint16_t> residual(4, 0);
  std::vector<float> fn(96), base(24);
  base[8 + 4 * 1 + 2] = 40.0f;  // from stream 1 to stream 2
  const float scale[3] = {1.0f, 1.0f, 1.0f};
  float pre[4], post[4], comb[16];
  reference::hc_stats(pre, post, comb, residual.data(), fn.data(), base.data(), scale, 1, 1, 1e-20,
                      1e-6, 20);
  for (int i = 0; i < 16; ++i) CHECK(i == 6 ? comb[i] > 0.8f : comb[i] < 0.5f);
}

TEST_CASE(combine_rounds_before_the_norm) {
  // v0 = 1 + 2^-9 rounds to 1 and v1 = 1, so both outputs are exactly 1; unrounded they would be
  // 1.001 and 0.999, and the second would round to 0.99609375 or 1.
  const std::vector<std::uint16_t> residual = bf16({1, 3, 0x1p-9, 0, 0, 0, 0, -2});
  const float pre[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const std::vector<std::uint16_t> gain = bf16({1, 1});
  std::uint16_t x[2];
  reference::hc_combine_norm(x, residual.data(), pre, gain.data(), 1, 2, 0.0, false);
  CHECK_EQ(reference::from_bf16(x[0]), 1.0);
  CHECK_EQ(reference::from_bf16(x[1]), 1.0);
}

TEST_CASE(combine_of_v4_norms_by_the_unrounded_sums) {
  // 1 + 2^-8 - 2^-12 is 1 in bf16 and 1.0037 in the statistic; epsilon is under the root.
  const std::vector<std::uint16_t> residual = bf16({1, 0x1p-8, -0x1p-12, 0}), gain = bf16({2});
  const float pre[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  std::uint16_t x[1];
  reference::hc_combine_norm(x, residual.data(), pre, gain.data(), 1, 1, 0.0, true);
  CHECK_EQ(reference::from_bf16(x[0]), 2.0 - 0x1p-7);
  reference::hc_combine_norm(x, residual.data(), pre, gain.data(), 1, 1, 3.0, true);
  CHECK_EQ(reference::from_bf16(x[0]), 1.0);  // 2 / sqrt(1.007 + 3) = 0.9991
}

TEST_CASE(head_by_hand) {
  // hidden 1: x = (1, 2, 3, 4), mean square 7.5; row k of fn takes element 3 - k.
  const std::vector<std::uint16_t> residual = bf16({1, 2, 3, 4, 0, 0, 0, 0});
  float fn[16] = {};
  for (int k = 0; k < 4; ++k) fn[4 * k + 3 - k] = 1.0f;
  const float base[4] = {0.0f, 0.5f, 0.0f, -1.0f};
  std::uint16_t h[2];
  reference::hc_head(h, residual.data(), fn, base, -2.0, 2, 1, 0.5, 1e-6);
  double want = 0.0;
  for (int k = 0; k < 4; ++k) {
    const double m = (4 - k) / std::sqrt(8.0);
    want += (1.0 / (1.0 + std::exp(2.0 * m - base[k])) + 1e-6) * (k + 1);
  }
  CHECK_EQ(h[0], reference::to_bf16(want));
  CHECK_EQ(h[1], 0);
  // Closed gates leave hc_eps of each stream.
  const float closed[4] = {-80.0f, -80.0f, -80.0f, -80.0f};
  reference::hc_head(h, residual.data(), fn, closed, 0.0, 1, 1, 0.5, 1e-6);
  CHECK_EQ(h[0], reference::to_bf16(1e-5));
}

TEST_CASE(post_mixes_column_k_into_stream_k) {
  const std::vector<std::uint16_t> residual = bf16({1, 2, 3, 4}), y = bf16({10});
  const float post[4] = {0.5f, 0.0f, 0.0f, 1.0f};
  float comb[16] = {};
  comb[4 * 0 + 1] = 2.0f;  // stream 0 into 1
  comb[4 * 3 + 0] = 1.0f;  // stream 3 into 0
  comb[4 * 2 + 3] = -1.0f;
  std::uint16_t out[4];
  reference::hc_post(out, residual.data(), y.data(), post, comb, 1, 1);
  CHECK_EQ(reference::from_bf16(out[0]), 9.0);
  CHECK_EQ(reference::from_bf16(out[1]), 2.0);
  CHECK_EQ(reference::from_bf16(out[2]), 0.0);
  CHECK_EQ(reference::from_bf16(out[3]), 7.0);
}
