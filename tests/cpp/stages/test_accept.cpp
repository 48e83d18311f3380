// Planted: drawing from p after a refusal, q not clamped to a probability, a coin of the wrong row
// and
// >= for > in the inverse CDF each fail a case.
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/accept.hpp"

#include "check.hpp"
#include "random_values.hpp"

namespace {

namespace stages = lowlat::scalar::stages;

// Logits whose softmax at temperature 1 is `p`; 0 gives -infinity.
std::vector<float> logits_of(const std::vector<double>& p) {
  std::vector<float> out;
  for (const double v : p) out.push_back(static_cast<float>(std::log(v)));
  return out;
}
std::vector<float> operator+(std::vector<float> a, const std::vector<float>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

stages::Accepted sampled(const std::vector<std::int32_t>& draft, const std::vector<float>& target,
                         const std::vector<float>& draft_logits, float temperature,
                         const std::vector<float>& coins) {
  const int g = static_cast<int>(draft.size());
  const int vocab = static_cast<int>(target.size()) / (g + 1);
  std::vector<float> scratch(2 * vocab);
  return stages::accept_sampled(draft.data(), target.data(), draft_logits.data(), g, vocab,
                                temperature, coins.data(), scratch.data());
}

void check_accepted(stages::Accepted got, int num_drafts, int next) {
  CHECK_EQ(got.num_drafts, num_drafts);
  CHECK_EQ(got.next, next);
}

}  // namespace

TEST_CASE(greedy_keeps_the_leading_argmaxes) {
  // Argmax of the three rows: 2, 0 (a tie of 0 and 3), 1.
  const std::vector<float> target = {0, 1, 5, 2, 7, 0, 1, 7, 0, 9, 1, 2};
  const auto run = [&](std::int32_t d1, std::int32_t d2) {
    const std::int32_t draft[2] = {d1, d2};
    return stages::accept_greedy(draft, target.data(), 2, 4);
  };
  check_accepted(run(2, 0), 2, 1);
  check_accepted(run(2, 3), 1, 0);  // equal logit, but not the lowest id
  check_accepted(run(1, 0), 0, 2);  // a later match does not count
  const std::vector<float> bonus_only = {0.0f, NAN, 9.0f};
  check_accepted(stages::accept_greedy(nullptr, bonus_only.data(), 0, 3), 0, 1);
}

TEST_CASE(a_draft_is_kept_while_coin_times_q_is_below_p) {
  const std::vector<float> p = logits_of({0.2, 0.3, 0.5}), q = logits_of({0.8, 0.1, 0.1});
  const std::vector<float> bonus = logits_of({0.1, 0.8, 0.1});
  // Draft 0: p / q is 0.25. Draft 2: p / q is 5, any coin keeps it.
  check_accepted(sampled({0}, p + bonus, q, 1.0f, {0.24f, 0.5f}), 1, 1);
  check_accepted(sampled({2}, p + bonus, q, 1.0f, {0.9999f, 0.95f}), 1, 2);
  // Refused: max(p - q, 0) is {0, 0.2, 0.4}; of 0.6 a third belongs to id 1.
  check_accepted(sampled({0}, p + bonus, q, 1.0f, {0.26f, 0.0f}), 0, 1);
  check_accepted(sampled({0}, p + bonus, q, 1.0f, {0.26f, 0.33f}), 0, 1);
  check_accepted(sampled({0}, p + bonus, q, 1.0f, {0.26f, 0.34f}), 0, 2);
  check_accepted(sampled({0}, p + bonus, q, 1.0f, {0.26f, 0x1.fffffep-1f}), 0, 2);
}

TEST_CASE(every_draft_has_its_own_row_and_coin) {
  const std::vector<float> p = logits_of({0.2, 0.3, 0.5}), q = logits_of({0.8, 0.1, 0.1});
  // Draft 2 passes at any coin; draft 0 passes at 0.2 and fails at 0.3.
  check_accepted(sampled({2, 0}, p + p + p, q + q, 1.0f, {0.99f, 0.2f, 0.1f}), 2, 0);
  check_accepted(sampled({2, 0}, p + p + p, q + q, 1.0f, {0.2f, 0.3f, 0.0f}), 1, 1);
  check_accepted(sampled({0, 2}, p + p + p, q + q, 1.0f, {0.3f, 0.0f, 0.99f}), 0, 2);
}

TEST_CASE(temperature_sharpens_both_sides_and_is_clamped) {
  // At 0.5 probabilities square: p {0.1, 0.9} -> {1, 81} / 82, q {0.5, 0.5} stays.
  const std::vector<float> p = logits_of({0.1, 0.9}), q = logits_of({0.5, 0.5});
  check_accepted(sampled({0}, p + p, q, 0.5f, {0.024f, 0.5f}), 1, 1);
  check_accepted(sampled({0}, p + p, q, 0.5f, {0.025f, 0.5f}), 0, 1);
  // At 1e-5 a difference of 1e-5 is one e-fold: 1 / (1 + e) = 0.2689.
  const std::vector<float> near = {0.0f, 1e-5f};
  check_accepted(sampled({}, near, {}, 1e-30f, {0.268f}), 0, 0);
  check_accepted(sampled({}, near, {}, 1e-30f, {0.270f}), 0, 1);
}

TEST_CASE(a_q_that_is_no_probability_refuses_and_counts_as_0) {
  const std::vector<float> p = logits_of({0.25, 0.75});
  const std::vector<float> q = {NAN, NAN};
  check_accepted(sampled({0}, p + p, q, 1.0f, {0.0f, 0.24f}), 0, 0);
  check_accepted(sampled({0}, p + p, q, 1.0f, {0.0f, 0.26f}), 0, 1);
  // The draft has no mass where it was drawn: refused even at coin 0.
  const std::vector<float> none = logits_of({0.0, 1.0});
  check_accepted(sampled({0}, p + p, none, 1.0f, {0.0f, 0.5f}), 0, 0);
}

TEST_CASE(inverse_cdf_takes_the_first_id_beyond_the_coin) {
  const float mass[5] = {0.0f, 0.5f, 0.0f, 0.25f, 0.0f};
  CHECK_EQ(stages::inverse_cdf(mass, 5, 0.0f), 1);  // ids without mass are not drawn
  CHECK_EQ(stages::inverse_cdf(mass, 5, 0.66f), 1);
  CHECK_EQ(stages::inverse_cdf(mass, 5, 0.67f), 3);
  CHECK_EQ(stages::inverse_cdf(mass, 5, 0x1.fffffep-1f), 3);
  const float even[2] = {0.5f, 0.5f};
  CHECK_EQ(stages::inverse_cdf(even, 2, 0.5f), 1);  // 0.5 does not exceed 0.5
  const float nothing[3] = {};
  CHECK_EQ(stages::inverse_cdf(nothing, 3, 0.0f), 2);
}

TEST_CASE(a_whole_vocabulary_is_summed_without_losing_its_tail) {
  // 129280 equal ids: the draw at coin c is id c * 129280, within a few hundredths of a percent.
  const std::vector<float> logits(129280, -3.0f);
  for (const float coin : {0.0f, 0.1f, 0.5f, 0.9f, 0.999f}) {
    const stages::Accepted got = sampled({}, logits, {}, 1.0f, {coin});
    CHECK_NEAR(got.next, coin * 129280.0, 30.0);
  }
}

TEST_CASE(what_leaves_the_rule_has_the_targets_distribution) {
  // Exact but for the grid: drafts weighed by q, both coins on a grid of cell midpoints.
  const std::vector<double> p = {0.1, 0.4, 0.2, 0.3}, q = {0.5, 0.1, 0.3, 0.1};
  const std::vector<float> target = logits_of(p) + logits_of({0.25, 0.25, 0.25, 0.25});
  const std::vector<float> draft_logits = logits_of(q);
  constexpr int kGrid = 100;
  std::vector<double> first(4);
  for (std::int32_t draft = 0; draft < 4; ++draft) {
    for (int i = 0; i < kGrid; ++i) {
      for (int j = 0; j < kGrid; ++j) {
        const stages::Accepted got = sampled(
            {draft}, target, draft_logits, 1.0f,
            {(static_cast<float>(i) + 0.5f) / kGrid, (static_cast<float>(j) + 0.5f) / kGrid});
        first[got.num_drafts == 1 ? draft : got.next] += q[draft] / kGrid / kGrid;
      }
    }
  }
  for (int id = 0; id < 4; ++id) CHECK_NEAR(first[id], p[id], 0.006);
}
