// The norm in double precision, on rows worked out by hand.
#include "reference/norm.hpp"

#include <cmath>

#include "check.hpp"
#include "reference/format.hpp"

namespace reference = lowlat::reference;

TEST_CASE(divides_by_the_root_mean_square) {
  // mean(1, 49) = 25: the row over 5, times the gain.
  const std::uint16_t x[4] = {reference::to_bf16(1.0), reference::to_bf16(-7.0),
                              reference::to_bf16(3.0), reference::to_bf16(3.0)};
  const std::uint16_t gain[2] = {reference::to_bf16(5.0), reference::to_bf16(10.0)};
  std::uint16_t y[4] = {};
  reference::rms_norm(y, x, gain, 2, 2, 0.0);
  CHECK_EQ(reference::from_bf16(y[0]), 1.0);
  CHECK_EQ(reference::from_bf16(y[1]), -14.0);
  CHECK_EQ(reference::from_bf16(y[2]), 5.0);
  CHECK_EQ(reference::from_bf16(y[3]), 10.0);
}

TEST_CASE(epsilon_is_under_the_root) {
  const std::uint16_t x[1] = {reference::to_bf16(3.0)}, gain[1] = {reference::to_bf16(1.0)};
  std::uint16_t y[1] = {};
  reference::rms_norm(y, x, gain, 1, 1, 16.0);  // 3 / sqrt(9 + 16) = 0.6
  CHECK_EQ(y[0], reference::to_bf16(0.6));
  const std::uint16_t zero[1] = {0};
  reference::rms_norm(y, zero, gain, 1, 1, 1e-20);
  CHECK_EQ(y[0], 0);
}

TEST_CASE(head_norm_has_no_weight_and_takes_each_row_alone) {
  const std::uint16_t x[4] = {reference::to_bf16(1.0), reference::to_bf16(-7.0),
                              reference::to_bf16(3.0), reference::to_bf16(0.0)};
  std::uint16_t y[4] = {};
  reference::head_norm(y, x, 2, 2, 0.0);
  CHECK_EQ(y[0], reference::to_bf16(0.2));
  CHECK_EQ(y[1], reference::to_bf16(-1.4));
  CHECK_EQ(y[2], reference::to_bf16(3.0 / std::sqrt(4.5)));
  reference::head_norm(y, x, 2, 2, 75.0);  // 1 / sqrt(25 + 75)
  CHECK_EQ(y[0], reference::to_bf16(0.1));
}
