// What four-bit quantisation means, by hand.
#include <cmath>

#include "check.hpp"
#include "reference/fp4.hpp"

namespace reference = lowlat::reference;

TEST_CASE(a_latent_group_has_an_e4m3_scale) {
  double x[32] = {7.0, -0.4, 0.5};  // 7 / 6 -> 1.125: 6.2, -0.36, 0.44 -> 6, -0.5, 0.5
  x[16] = 4000.0;                   // the second group saturates
  reference::fp4_round_trip_latent(x, 32);
  CHECK_EQ(x[0], 6.75);
  CHECK_EQ(x[1], -0.5625);
  CHECK_EQ(x[2], 0.5625);
  CHECK_EQ(x[16], 2688.0);
}

TEST_CASE(an_index_group_has_a_power_of_two) {
  double x[32] = {7.0, 5.0, -0.25, 3.5};  // 7 / 6 -> 2: 3.5, 2.5, -0.125, 1.75 -> 4, 2, 0, 2
  reference::fp4_round_trip_index(x, 32);
  CHECK_EQ(x[0], 8.0);
  CHECK_EQ(x[1], 4.0);
  CHECK_EQ(x[2], 0.0);
  CHECK(!std::signbit(x[2]));
  CHECK_EQ(x[3], 4.0);
}

TEST_CASE(a_stored_row_holds_even_indexes_in_low_nibbles) {
  double x[128] = {6.0, -0.5};
  x[32] = 1.5;  // 1.5 / 6 = 2^-2
  std::uint8_t row[68];
  reference::fp4_pack_index(row, x);
  CHECK_EQ(row[0], 0x97);
  CHECK_EQ(row[16], 0x07);
  CHECK_EQ(row[64], 127);
  CHECK_EQ(row[65], 125);
  CHECK_EQ(row[66], 112);  // 2^-15 >= 1e-4 / 6
  double back[128];
  reference::fp4_unpack_index(back, row);
  CHECK_EQ(back[0], 6.0);
  CHECK_EQ(back[1], -0.5);
  CHECK_EQ(back[32], 1.5);
  CHECK_EQ(back[127], 0.0);
}
