// Planted: the residual drawn from p, and a draw that stops at >= instead of >.
#include "reference/accept.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"

namespace {

struct Outcome {
  std::int64_t accepted, next;
  double margin;
};

Outcome run(const std::vector<std::int64_t>& draft, const std::vector<float>& target,
            const std::vector<float>& draft_logits, double temperature,
            const std::vector<float>& coins) {
  const auto g = static_cast<std::int64_t>(draft.size());
  Outcome out{-1, -1, -1.0};
  lowlat::reference::accept(&out.accepted, &out.next, &out.margin, draft.data(), target.data(),
                            draft_logits.data(), temperature, coins.data(), g,
                            static_cast<std::int64_t>(target.size()) / (g + 1));
  return out;
}
float ln(double p) { return static_cast<float>(std::log(p)); }

}  // namespace

TEST_CASE(greedy_by_hand) {
  const std::vector<float> target = {0, 5, 5, 1, 0, 2};  // argmax 1 (a tie), 2
  CHECK_EQ(run({1}, target, {}, 0.0, {0.0f, 0.0f}).accepted, 1);
  CHECK_EQ(run({1}, target, {}, 0.0, {0.0f, 0.0f}).next, 2);
  CHECK_EQ(run({2}, target, {}, 0.0, {0.0f, 0.0f}).accepted, 0);
  CHECK_EQ(run({2}, target, {}, 0.0, {0.0f, 0.0f}).next, 1);
  CHECK_EQ(run({2}, target, {}, 0.0, {0.0f, 0.0f}).margin, HUGE_VAL);
}

TEST_CASE(sampling_by_hand) {
  const std::vector<float> target = {ln(0.2), ln(0.3), ln(0.5), ln(0.25), ln(0.25), ln(0.5)};
  const std::vector<float> q = {ln(0.8), ln(0.1), ln(0.1)};
  Outcome out = run({0}, target, q, 1.0, {0.2f, 0.3f});  // 0.16 < 0.2; then p of the bonus row
  CHECK_EQ(out.accepted, 1);
  CHECK_EQ(out.next, 1);
  CHECK_NEAR(out.margin, 0.04, 1e-6);
  out = run({0}, target, q, 1.0, {0.5f, 0.3f});  // 0.4 > 0.2; residual 0, 0.2, 0.4
  CHECK_EQ(out.accepted, 0);
  CHECK_EQ(out.next, 1);
  CHECK_NEAR(out.margin, 0.02, 1e-6);  // 0.2 against 0.18
  CHECK_EQ(run({0}, target, q, 1.0, {0.5f, 0.4f}).next, 2);
  // At 0.5 the probabilities square: 0.04 / 0.38 against 0.64 / 0.66.
  CHECK_EQ(run({0}, target, q, 0.5, {0.10f, 0.0f}).accepted, 1);
  CHECK_EQ(run({0}, target, q, 0.5, {0.11f, 0.0f}).accepted, 0);
}

TEST_CASE(nothing_left_gives_the_last_id_and_no_mass_is_never_drawn) {
  // The draft was drawn where neither side has mass, and elsewhere both agree.
  const std::vector<float> row = {0.0f, 0.0f, -INFINITY, -INFINITY};
  std::vector<float> target = row;
  target.insert(target.end(), {-INFINITY, 0.0f, -INFINITY, 0.0f});
  CHECK_EQ(run({2}, target, row, 1.0, {0.0f, 0.0f}).accepted, 0);
  CHECK_EQ(run({2}, target, row, 1.0, {0.0f, 0.0f}).next, 3);
  CHECK_EQ(run({0}, target, row, 1.0, {0.0f, 0.0f}).next, 1);
  CHECK_EQ(run({0}, target, row, 1.0, {0.0f, 0.5f}).next, 3);
}
