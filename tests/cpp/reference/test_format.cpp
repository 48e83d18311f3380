// The number formats in double precision: values written out by hand, ties, ends of the ranges.
#include "reference/format.hpp"

#include <cmath>
#include <limits>

#include "check.hpp"

namespace reference = lowlat::reference;

namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
}  // namespace

TEST_CASE(bf16_values) {
  CHECK_EQ(reference::from_bf16(0x3f80), 1.0);
  CHECK_EQ(reference::from_bf16(0xc049), -3.140625);
  CHECK_EQ(reference::from_bf16(0x0001), std::ldexp(1.0, -133));
  CHECK_EQ(reference::from_bf16(0x0080), std::ldexp(1.0, -126));
  CHECK_EQ(reference::from_bf16(0x7f7f), 0x1.fep127);
  CHECK_EQ(reference::from_bf16(0xff80), -kInf);
  CHECK(std::isnan(reference::from_bf16(0x7f81)));
  CHECK(std::signbit(reference::from_bf16(0x8000)));
}

TEST_CASE(bf16_rounds_once_to_even) {
  CHECK_EQ(reference::to_bf16(1.0 + 0x1p-8), 0x3f80);            // a tie: down to even
  CHECK_EQ(reference::to_bf16(1.0 + 0x3p-8), 0x3f82);            // a tie: up to even
  CHECK_EQ(reference::to_bf16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);  // not lost through fp32
  CHECK_EQ(reference::to_bf16(2.0 - 0x1p-10), 0x4000);           // into the next binade
  CHECK_EQ(reference::to_bf16(0x1p-134), 0x0000);                // half the least: to even
  CHECK_EQ(reference::to_bf16(0x1.8p-133), 0x0002);              // 1.5 of the least
  CHECK_EQ(reference::to_bf16(0x1.fcp-127), 0x007f);             // largest subnormal
  CHECK_EQ(reference::to_bf16(0x1.fep-127), 0x0080);             // a tie: the first normal
  CHECK_EQ(reference::to_bf16(0x1.fep127), 0x7f7f);
  CHECK_EQ(reference::to_bf16(0x1.ffp127), 0x7f80);  // the tie to infinity
  CHECK_EQ(reference::to_bf16(std::nextafter(0x1.ffp127, 0.0)), 0x7f7f);
  CHECK_EQ(reference::to_bf16(-0.0), 0x8000);
  CHECK_EQ(reference::to_bf16(-kInf), 0xff80);
  CHECK_EQ(reference::to_bf16(kNan) & 0x7fff, 0x7fc0);
  for (int code = 0; code < 0x7f80; ++code) {
    CHECK_EQ(reference::to_bf16(reference::from_bf16(static_cast<std::uint16_t>(code))), code);
  }
}

TEST_CASE(e4m3_values_and_rounding) {
  CHECK_EQ(reference::from_e4m3(0x38), 1.0);
  CHECK_EQ(reference::from_e4m3(0x01), std::ldexp(1.0, -9));
  CHECK_EQ(reference::from_e4m3(0x08), std::ldexp(1.0, -6));
  CHECK_EQ(reference::from_e4m3(0x7e), 448.0);
  CHECK_EQ(reference::from_e4m3(0xfe), -448.0);
  CHECK(std::isnan(reference::from_e4m3(0x7f)) && std::isnan(reference::from_e4m3(0xff)));
  CHECK_EQ(reference::to_e4m3(1e9), 0x7e);
  CHECK_EQ(reference::to_e4m3(-kInf), 0xfe);
  CHECK_EQ(reference::to_e4m3(kNan), 0x7f);
  CHECK_EQ(reference::to_e4m3(1.0625), 0x38);   // tie of 1 and 1.125
  CHECK_EQ(reference::to_e4m3(1.1875), 0x3a);   // tie of 1.125 and 1.25
  CHECK_EQ(reference::to_e4m3(0x1p-10), 0x00);  // tie of 0 and 2^-9
  CHECK_EQ(reference::to_e4m3(0x3p-10), 0x02);  // tie of 2^-9 and 2^-8
  CHECK_EQ(reference::to_e4m3(-0x1p-20), 0x80);
  for (int code = 0; code < 0x7f; ++code) {
    CHECK_EQ(reference::to_e4m3(reference::from_e4m3(static_cast<std::uint8_t>(code))), code);
  }
}

TEST_CASE(e2m1_values_and_rounding) {
  const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    CHECK_EQ(reference::from_e2m1(static_cast<std::uint8_t>(code)), values[code]);
    CHECK_EQ(reference::from_e2m1(static_cast<std::uint8_t>(code + 8)), -values[code]);
    CHECK_EQ(reference::to_e2m1(-values[code]), code + 8);
  }
  // Ties: to the even code.
  CHECK_EQ(reference::to_e2m1(0.25), 0);
  CHECK_EQ(reference::to_e2m1(0.75), 2);
  CHECK_EQ(reference::to_e2m1(1.25), 2);
  CHECK_EQ(reference::to_e2m1(1.75), 4);
  CHECK_EQ(reference::to_e2m1(2.5), 4);
  CHECK_EQ(reference::to_e2m1(3.5), 6);
  CHECK_EQ(reference::to_e2m1(5.0), 6);
  CHECK_EQ(reference::to_e2m1(100.0), 7);
}

TEST_CASE(ue8m0_values_and_ceiling) {
  CHECK_EQ(reference::from_ue8m0(127), 1.0);
  CHECK_EQ(reference::from_ue8m0(0), std::ldexp(1.0, -127));
  CHECK_EQ(reference::from_ue8m0(254), std::ldexp(1.0, 127));
  CHECK(std::isnan(reference::from_ue8m0(255)));
  CHECK_EQ(reference::ue8m0_ceil(1.0), 127);
  CHECK_EQ(reference::ue8m0_ceil(1.0000001), 128);
  CHECK_EQ(reference::ue8m0_ceil(1.00000001), 127);  // 1 in fp32
  CHECK_EQ(reference::ue8m0_ceil(1e-4 / 448.0), 105);
  CHECK_EQ(reference::ue8m0_ceil(0.75), 127);
}
