// Planted: weights of the ranks instead of the scores, and 1e-20 added for a draft too.
#include "reference/gate.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace {

using lowlat::reference::gate;
using lowlat::reference::gate_score;
using lowlat::reference::hash_gate;
using lowlat::reference::to_bf16;

}  // namespace

TEST_CASE(score_is_the_root_of_softplus) {
  CHECK_NEAR(gate_score(0.0), std::sqrt(std::log(2.0)), 1e-15);
  CHECK_NEAR(gate_score(100.0), 10.0, 1e-15);
  CHECK_EQ(gate_score(1e6), 1000.0);
  CHECK_NEAR(gate_score(-100.0) / std::exp(-50.0), 1.0, 1e-12);
  CHECK_EQ(gate_score(-1e6), 0.0);
}

TEST_CASE(worked_by_hand) {
  // One column, so that logits are the weights: scores 10, 9, 8, 7, 7, 5; the bias lifts 3 and 4.
  std::vector<std::uint16_t> w;
  for (const double z : {100.0, 81.0, 64.0, 49.0, 49.0, 25.0}) w.push_back(to_bf16(z));
  const float bias[6] = {0, 0, 0, 20.0f, 20.0f, 0};
  const std::uint16_t x[2] = {to_bf16(1.0), to_bf16(0.0)};
  std::int32_t ids[6];
  float weights[6];
  gate(ids, weights, x, w.data(), bias, 2, 1, 6, 3, true);
  const std::int32_t want[6] = {3, 4, 0, 3, 4, 0};
  for (int i = 0; i < 6; ++i) CHECK_EQ(ids[i], want[i]);
  CHECK_NEAR(weights[0], 7.0 / 24.0 * 1.5, 1e-7);
  CHECK_NEAR(weights[2], 10.0 / 24.0 * 1.5, 1e-7);
  CHECK_NEAR(weights[5], 0.5, 1e-7);  // all logits are 0 in the second row
}

TEST_CASE(only_the_target_adds_to_a_vanishing_sum) {
  const std::vector<std::uint16_t> w(6, to_bf16(-100.0));
  const float bias[6] = {};
  const std::uint16_t x = to_bf16(1.0);
  std::int32_t ids[6];
  float weights[6];
  gate(ids, weights, &x, w.data(), bias, 1, 1, 6, 6, true);
  CHECK_NEAR(weights[0], 0.25, 1e-7);
  gate(ids, weights, &x, w.data(), bias, 1, 1, 6, 6, false);
  const double score = std::exp(-50.0);
  CHECK_NEAR(weights[0], 1.5 * score / (6.0 * score + 1e-20), 1e-7);
  const std::vector<std::uint16_t> far(6, to_bf16(-1e6));
  gate(ids, weights, &x, far.data(), bias, 1, 1, 6, 6, true);
  CHECK_EQ(weights[5], 0.0f);
}

TEST_CASE(hash_layers_take_the_tables_experts) {
  std::vector<std::uint16_t> w;
  for (const double z : {100.0, 81.0, 64.0, 49.0, 36.0, 25.0, 16.0}) w.push_back(to_bf16(z));
  const std::int32_t table[3 * 6] = {0, 0, 0, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 2, 4, 6, 1, 3};
  const std::int64_t token[2] = {2, 1};
  const std::uint16_t x[2] = {to_bf16(1.0), to_bf16(-4.0)};
  std::int32_t ids[12];
  float weights[12];
  hash_gate(ids, weights, token, table, x, w.data(), 2, 1, 6);
  const std::int32_t want[12] = {0, 2, 4, 6, 1, 3, 6, 5, 4, 3, 2, 1};
  for (int i = 0; i < 12; ++i) CHECK_EQ(ids[i], want[i]);
  const double scores[6] = {10, 8, 6, 4, 9, 7};
  for (int i = 0; i < 6; ++i) CHECK_NEAR(weights[i], scores[i] / 44.0 * 1.5, 1e-7);
  // Row 1: logits -64, -100, ..: e^-32 leads, and 1e-20 is beside 1.3e-14.
  CHECK_NEAR(weights[6], 1.5 / (1.0 + std::exp(-18.0) + 1e-20 / std::exp(-32.0)), 1e-6);
  CHECK_NEAR(weights[7] / weights[6], std::exp(-18.0), 1e-12);
}
