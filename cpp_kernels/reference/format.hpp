// reference/format: the stored number formats in double precision, by their values (a search over
// the codes, or scaling and rounding to an integer) and not by bit tricks, so that they check the
// stages' conversions and share nothing with them.
#pragma once
#include <cstdint>

namespace lowlat::reference {

double from_bf16(std::uint16_t code);
std::uint16_t to_bf16(double v);  // one rounding from double, nearest-even; overflow is infinity
double round_bf16(double v);
double from_e4m3(std::uint8_t code);
std::uint8_t to_e4m3(double v);  // saturates at 448; NaN is 0x7f with its sign
double from_e2m1(std::uint8_t code);
std::uint8_t to_e2m1(double v);  // saturates at 6
double from_ue8m0(std::uint8_t code);
// Of v rounded to fp32: smallest power of two >= it. For v within 2^-127 .. 2^127.
std::uint8_t ue8m0_ceil(double v);

}  // namespace lowlat::reference
