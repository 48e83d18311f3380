// reference/format: the stored number formats in double precision, by search over their values and not
// by bit tricks, so that they check the stages' conversions and share nothing with them.
#pragma once
#include <cstdint>

namespace lowlat::reference {

double from_bf16(std::uint16_t code);
std::uint16_t to_bf16(double v);  // one rounding from double, nearest-even
double round_bf16(double v);
double from_e4m3(std::uint8_t code);
std::uint8_t to_e4m3(double v);  // saturates at 448
double from_e2m1(std::uint8_t code);
std::uint8_t to_e2m1(double v);  // saturates at 6
double from_ue8m0(std::uint8_t code);
std::uint8_t ue8m0_ceil(double v);  // of v rounded to fp32: smallest power of two >= it

}  // namespace lowlat::reference
