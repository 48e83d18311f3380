// Planted: weights from score + bias, the draft's sum rule for the target, a softplus without the
// branch at 20 (logits of 100 overflow), ties to the highest id, v4's log1p as log(1 + e), its NaN
// as infinity and a hash layer's sum without 1e-20 each fail a case.
#include <algorithm>
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/gate.hpp"

#include "check.hpp"
#include "random_values.hpp"

namespace {

using lowlat::scalar::stages::gate_hash;
using lowlat::scalar::stages::gate_score;
using lowlat::scalar::stages::gate_select;
using lowlat::scalar::stages::GateRule;
using lowlat::scalar::stages::GateSum;

struct Chosen {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Chosen choose(const std::vector<float>& logits, const std::vector<float>& bias, int k,
              GateSum sum_rule, GateRule rule = GateRule::v41) {
  const int n = static_cast<int>(logits.size());
  Chosen out{std::vector<std::int32_t>(k, -7), std::vector<float>(k, NAN)};
  std::vector<float> scratch(2 * n);
  gate_select(out.ids.data(), out.weights.data(), logits.data(), bias.data(), n, k, sum_rule, 1.5f,
              scratch.data(), rule);
  return out;
}

}  // namespace

TEST_CASE(scores_are_roots_of_softplus) {
  CHECK_NEAR(gate_score(0.0f), 0.83255461115769775635, 1e-7);  // sqrt(ln 2)
  CHECK_NEAR(gate_score(1.0f), 1.1459763050, 1e-6);            // sqrt(ln(1 + e))
  CHECK_NEAR(gate_score(20.0f), 4.47213595523, 1e-6);
  CHECK_EQ(gate_score(100.0f), 10.0f);
  CHECK_EQ(gate_score(3e38f), std::sqrt(3e38f));
  CHECK_NEAR(gate_score(-30.0f) / 3.05902320502e-7, 1.0, 1e-6);  // e^-15
  CHECK_EQ(gate_score(-3000.0f), 0.0f);
}

TEST_CASE(the_bias_ranks_and_does_not_weigh) {
  // Scores 10, 9, 8, 7, 6, 5 without the bias; with it experts 5, 4, 0 lead.
  const std::vector<float> logits = {100.0f, 81.0f, 64.0f, 49.0f, 36.0f, 25.0f};
  const Chosen chosen = choose(logits, {0, 0, 0, 0, 20.0f, 40.0f}, 3, GateSum::target);
  CHECK(chosen.ids == std::vector<std::int32_t>({5, 4, 0}));
  CHECK_NEAR(chosen.weights[0], 5.0 / 21.0 * 1.5, 1e-7);
  CHECK_NEAR(chosen.weights[1], 6.0 / 21.0 * 1.5, 1e-7);
  CHECK_NEAR(chosen.weights[2], 10.0 / 21.0 * 1.5, 1e-7);
}

TEST_CASE(ties_go_to_the_lowest_id) {
  const Chosen all =
      choose(std::vector<float>(12, 0.5f), std::vector<float>(12, 0.0f), 6, GateSum::target);
  CHECK(all.ids == std::vector<std::int32_t>({0, 1, 2, 3, 4, 5}));
  for (const float w : all.weights) CHECK_NEAR(w, 0.25, 1e-7);
  std::vector<float> logits(9, 1.0f);
  logits[4] = logits[7] = 2.0f;
  CHECK(choose(logits, std::vector<float>(9, 0.0f), 3, GateSum::draft).ids ==
        std::vector<std::int32_t>({4, 7, 0}));
}

TEST_CASE(every_expert_may_be_chosen_even_at_minus_infinity) {
  const std::vector<float> bias = {-INFINITY, -INFINITY, 0.0f, -INFINITY, -INFINITY, -INFINITY};
  CHECK(choose(std::vector<float>(6, 1.0f), bias, 6, GateSum::target).ids ==
        std::vector<std::int32_t>({2, 0, 1, 3, 4, 5}));
}

TEST_CASE(a_nan_rank_counts_as_infinity) {
  std::vector<float> bias(6, 0.0f);
  bias[3] = NAN;
  bias[5] = INFINITY;
  const Chosen chosen = choose(std::vector<float>(6, 1.0f), bias, 3, GateSum::target);
  CHECK(chosen.ids == std::vector<std::int32_t>({3, 5, 0}));
  // Equal to infinity and not above it: the lower id goes first.
  bias[3] = INFINITY;
  bias[5] = NAN;
  CHECK(choose(std::vector<float>(6, 1.0f), bias, 3, GateSum::target).ids ==
        std::vector<std::int32_t>({3, 5, 0}));
}

TEST_CASE(target_and_draft_differ_where_the_sum_vanishes) {
  // Scores of e^-50, about 1.9e-22: the target's 1e-20 outweighs their sum, a draft divides by it.
  const std::vector<float> logits(6, -100.0f), bias(6, 0.0f);
  const double score = gate_score(-100.0f);
  CHECK(score > 1e-22 && score < 3e-22);
  CHECK_NEAR(choose(logits, bias, 3, GateSum::draft).weights[0], 0.5, 1e-6);
  CHECK_NEAR(choose(logits, bias, 3, GateSum::target).weights[0],
             1.5 * score / (3.0 * score + 1e-20), 1e-6);
  // And at a sum of exactly 0 both give 0, not NaN.
  for (const GateSum rule : {GateSum::draft, GateSum::target}) {
    CHECK_EQ(choose(std::vector<float>(6, -3000.0f), bias, 3, rule).weights[2], 0.0f);
  }
}

TEST_CASE(agrees_with_sorting_in_double_precision) {
  lowlat::testing::Random random(7);
  for (int seed = 0; seed < 200; ++seed) {
    const int n = static_cast<int>(random.integer(6, 400));
    const std::vector<float> logits = random.f32(n, 3.0), bias = random.f32(n, 0.2);
    std::vector<double> score(n), rank(n), sorted;
    for (int e = 0; e < n; ++e) {
      score[e] = std::sqrt(std::log1p(std::exp(static_cast<double>(logits[e]))));
      rank[e] = score[e] + bias[e];
    }
    sorted = rank;
    std::sort(sorted.rbegin(), sorted.rend());
    const Chosen chosen = choose(logits, bias, 6, GateSum::target);
    double sum = 0.0;
    for (const std::int32_t id : chosen.ids) sum += score[id];
    for (int slot = 0; slot < 6; ++slot) {
      CHECK_NEAR(rank[chosen.ids[slot]], sorted[slot], 1e-5);
      CHECK_NEAR(chosen.weights[slot] / (score[chosen.ids[slot]] / sum * 1.5), 1.0, 1e-6);
      for (int other = 0; other < slot; ++other) CHECK(chosen.ids[slot] != chosen.ids[other]);
    }
  }
}

TEST_CASE(scores_of_v4_are_the_same_roots) {
  const auto score = [](float z) { return gate_score(z, GateRule::v4); };
  CHECK_NEAR(score(0.0f), 0.83255461115769775635, 1e-7);
  CHECK_EQ(score(100.0f), 10.0f);
  CHECK_EQ(score(3e38f), std::sqrt(3e38f));
  CHECK_EQ(score(-3000.0f), 0.0f);
  CHECK_EQ(score(-30.0f), std::sqrt(std::exp(-30.0f)));  // 1 + e is 1, so e itself
  for (float z = -80.0f; z <= 40.0f; z += 0.37f) {
    CHECK_NEAR(score(z) / std::sqrt(std::log1p(std::exp(static_cast<double>(z)))), 1.0, 5e-7);
  }
}

TEST_CASE(a_nan_rank_of_v4_comes_after_every_number) {
  std::vector<float> bias = {0.0f, NAN, 0.0f, -INFINITY, -1e29f, 0.0f};
  const std::vector<float> logits(6, 1.0f);
  const auto ids = choose(logits, bias, 6, GateSum::draft, GateRule::v4).ids;
  CHECK(ids == std::vector<std::int32_t>({0, 2, 5, 4, 1, 3}));
  CHECK(choose(logits, bias, 3, GateSum::draft, GateRule::v4).ids ==
        std::vector<std::int32_t>({0, 2, 5}));
}

TEST_CASE(hash_layers_weigh_what_the_table_chose) {
  // Scores 10 .. 5 in any order keep that order.
  const float logits[6] = {25.0f, 81.0f, 64.0f, 100.0f, 49.0f, 36.0f};
  const double scores[6] = {5, 9, 8, 10, 7, 6};
  float weights[6];
  gate_hash(weights, logits, 6, 1.5f, GateRule::v4);
  for (int slot = 0; slot < 6; ++slot) CHECK_NEAR(weights[slot], scores[slot] / 45 * 1.5, 1e-7);
  // Scores of e^-40 = 4e-18: 1e-20 counts beside their sum.
  const float low[6] = {-80, -80, -80, -80, -80, -80};
  gate_hash(weights, low, 6, 1.5f, GateRule::v4);
  const double score = std::exp(-40.0);
  CHECK_NEAR(weights[5] / (1.5 * score / (6.0 * score + 1e-20)), 1.0, 1e-5);
  CHECK(weights[5] < 0.24995f);
  const float none[6] = {-3000, -3000, -3000, -3000, -3000, -3000};
  gate_hash(weights, none, 6, 1.5f, GateRule::v4);
  CHECK_EQ(weights[0], 0.0f);
}
