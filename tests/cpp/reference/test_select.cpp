// What the selections mean, by hand.
#include "check.hpp"
#include "reference/select.hpp"

namespace {

using Ids = std::vector<std::int32_t>;
namespace reference = lowlat::reference;

}  // namespace

TEST_CASE(selects_the_best_the_lower_among_equals_ascending) {
  CHECK(reference::select_top({1.0, 5.0, -2.0, 4.0, 3.0}, 3) == Ids({1, 3, 4}));
  CHECK(reference::select_top({2.0, 2.0, 2.0}, 2) == Ids({0, 1}));
  CHECK(reference::select_top({-0.0, 0.0}, 1) == Ids({0}));
  CHECK(reference::select_top({2.0}, 3) == Ids({0}));
  CHECK(reference::select_top({}, 3).empty());
  CHECK(reference::select_top(std::vector<double>(200, 1.0), 3) == Ids({0, 1, 2}));
}

TEST_CASE(ranks_blocks_by_their_best_and_the_newest_first) {
  const std::vector<double> scores = {9.0, 0.0, 1.0, 1.0, 2.0, 5.0, -7.0};
  CHECK(reference::candidate_blocks(scores, 2, 1) == Ids({3}));
  CHECK(reference::candidate_blocks(scores, 2, 2) == Ids({0, 3}));
  CHECK(reference::candidate_blocks(scores, 2, 9) == Ids({0, 1, 2, 3}));
  CHECK(reference::candidate_blocks({}, 2, 2).empty());
}
