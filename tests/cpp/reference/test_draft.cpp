// Planted: the bias left unrounded, the clamp of the temperature left out and the anchor used at
// every step.
#include "reference/draft.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace {

using lowlat::reference::draft_feature;
using lowlat::reference::markov_draft;
using lowlat::reference::to_bf16;

}  // namespace

TEST_CASE(feature_is_the_mean_of_the_streams) {
  const std::uint16_t residual[8] = {to_bf16(1.0), to_bf16(3e38),  to_bf16(2.0), to_bf16(3e38),
                                     to_bf16(4.0), to_bf16(-3e38), to_bf16(8.0), to_bf16(-3e38)};
  std::uint16_t f[2];
  draft_feature(f, residual, 1, 2);
  CHECK_EQ(f[0], to_bf16(3.75));
  CHECK_EQ(f[1], to_bf16(0.0));
}

TEST_CASE(a_chain_by_hand) {
  // Three ids, rank 1. w1 = 1, 2, -1; w2 = 1, 2, 4: from id 0 the biases are 1, 2, 4; from 2 they
  // are -1, -2, -4; from 1 they are 2, 4, 8.
  const std::uint16_t w1[3] = {to_bf16(1.0), to_bf16(2.0), to_bf16(-1.0)};
  const std::uint16_t w2[3] = {to_bf16(1.0), to_bf16(2.0), to_bf16(4.0)};
  const float base[9] = {0.0f, 0.0f, 0.0f, 0.5f, 2.0f, 0.0f, 0.0f, 4.0f, 0.0f};
  const std::vector<float> uniform(9, 0.5f);
  std::int64_t tokens[3];
  float logits[9];
  double margin[3];
  markov_draft(tokens, logits, margin, base, w1, w2, 0, 0.0, uniform.data(), 3, 3, 1);
  CHECK_EQ(tokens[0], 2);  // 1, 2, 4
  CHECK_EQ(tokens[1], 1);  // -0.5, 0, -4
  CHECK_EQ(tokens[2], 1);  // 2, 8, 8: the lower id
  CHECK_EQ(logits[4], 0.0f);
  CHECK_EQ(logits[8], 8.0f);
  CHECK_EQ(margin[0], 2.0);
  CHECK_EQ(margin[2], 0.0);
}

TEST_CASE(the_bias_is_a_bf16_tensor) {
  const std::uint16_t w1[2] = {to_bf16(1.0), to_bf16(0x1p-9)};
  const std::uint16_t w2[2] = {to_bf16(1.0), to_bf16(1.0)};
  const float base = 0x1p-20f, uniform = 0.5f;
  std::int64_t token;
  float logit;
  double margin;
  markov_draft(&token, &logit, &margin, &base, w1, w2, 0, 0.0, &uniform, 1, 1, 2);
  CHECK_EQ(logit, 1.0f + 0x1p-20f);  // 1 + 2^-9 is 1 in bf16
  CHECK_EQ(margin, HUGE_VAL);
}

TEST_CASE(noise_counts_at_temperature_only_and_that_is_at_least_1e_5) {
  const std::uint16_t zero[2] = {};
  const float base[2] = {0x1p-17f, 0.0f};
  const float uniform[2] = {0.5f, 0.1f};  // Gumbel 0.3665 and 2.2504
  std::int64_t token;
  float logits[2];
  double margin;
  markov_draft(&token, logits, &margin, base, zero, zero, 0, 0.0, uniform, 1, 2, 1);
  CHECK_EQ(token, 0);
  markov_draft(&token, logits, &margin, base, zero, zero, 0, 1e-12, uniform, 1, 2, 1);
  CHECK_EQ(token, 1);
  CHECK_NEAR(margin, 2.2503673 - 0.3665129 - 0x1p-17 / 1e-5, 1e-6);
}
