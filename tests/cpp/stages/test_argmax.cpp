// Planted: `>=` for `>` in beats() lets the highest of equal ids win; without the NaN line a NaN
// never wins; both fail here.
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/argmax.hpp"

#include "check.hpp"

namespace {

using lowlat::scalar::stages::argmax;
using lowlat::scalar::stages::Best;
using lowlat::scalar::stages::best_of;
using lowlat::scalar::stages::kNoBest;

std::int32_t id_of(const std::vector<float>& values, std::int32_t first_id = 0) {
  return argmax(values.data(), static_cast<int>(values.size()), first_id).id;
}

}  // namespace

TEST_CASE(the_greatest_wins_and_ties_go_to_the_lowest_id) {
  CHECK_EQ(id_of({1.0f, 3.0f, 2.0f}), 1);
  CHECK_EQ(id_of({3.0f, 1.0f, 3.0f}), 0);
  CHECK_EQ(id_of({2.0f, 2.0f, 2.0f}, 40), 40);
  CHECK_EQ(id_of({-0.0f, 0.0f}), 0);
  CHECK_EQ(id_of({-INFINITY, -INFINITY}), 0);
  CHECK_EQ(id_of({1.0f, INFINITY, INFINITY}), 1);
  CHECK_EQ(id_of({-1e-45f, -1.0f}), 0);
}

TEST_CASE(a_nan_beats_everything_and_the_lowest_nan_beats_the_others) {
  CHECK_EQ(id_of({1.0f, NAN, INFINITY, NAN}), 1);
  CHECK_EQ(id_of({NAN, 1.0f}), 0);
}

TEST_CASE(nothing_gives_no_candidate) {
  CHECK_EQ(argmax(nullptr, 0).id, -1);
  const Best one = {-INFINITY, 7};
  CHECK_EQ(best_of(kNoBest, one).id, 7);
  CHECK_EQ(best_of(one, kNoBest).id, 7);
}

TEST_CASE(parts_joined_in_any_order_give_the_same) {
  const std::vector<float> values = {1.0f, 5.0f, NAN, 5.0f, 2.0f, NAN, 9.0f};
  for (int cut = 0; cut <= 7; ++cut) {
    const Best low = argmax(values.data(), cut, 0);
    const Best high = argmax(values.data() + cut, 7 - cut, cut);
    CHECK_EQ(best_of(low, high).id, 2);
    CHECK_EQ(best_of(high, low).id, 2);
  }
}
