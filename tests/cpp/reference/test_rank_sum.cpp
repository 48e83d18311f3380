// The sum over ranks: its order and its fp32 sums show in the result.
#include "reference/rank_sum.hpp"

#include "check.hpp"

TEST_CASE(adds_in_rank_order_in_fp32) {
  // Columns: exact; 1 is lost in 2^24; it survives when the large ones cancel first.
  const float partial[9] = {1.0f, 0x1p24f, 0x1p24f, 2.0f, 1.0f, -0x1p24f, 4.0f, -0x1p24f, 1.0f};
  std::uint16_t y[3];
  lowlat::reference::rank_sum(y, partial, 3, 3);
  CHECK_EQ(y[0], 0x40e0);  // 7
  CHECK_EQ(y[1], 0x0000);
  CHECK_EQ(y[2], 0x3f80);
}

TEST_CASE(one_rank_is_rounded_only) {
  const float partial[2] = {-0.0f, 1.0f + 0x1p-8f};
  std::uint16_t y[2];
  lowlat::reference::rank_sum(y, partial, 1, 2);
  CHECK_EQ(y[0], 0x8000);
  CHECK_EQ(y[1], 0x3f80);
}
