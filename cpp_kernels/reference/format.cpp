#include "reference/format.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lowlat::reference {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The code whose value is nearest to |v| among codes 0 .. last, whose values ascend; the even code
// on a tie; last beyond it.
template <class Decode>
std::uint8_t nearest_code(double magnitude, std::uint8_t last, Decode decode) {
  std::uint8_t code = 0;
  while (code < last && decode(static_cast<std::uint8_t>(code + 1)) <= magnitude) ++code;
  if (code == last) return code;
  const double below = magnitude - decode(code);
  const double above = decode(static_cast<std::uint8_t>(code + 1)) - magnitude;
  const bool up = above < below || (above == below && code % 2 == 1);
  return static_cast<std::uint8_t>(code + (up ? 1 : 0));
}

}  // namespace

double from_bf16(std::uint16_t code) {
  const int exponent = code / 128 % 256, mantissa = code % 128;
  const double sign = code >= 32768 ? -1.0 : 1.0;
  if (exponent == 255) return mantissa != 0 ? kNan : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, -133);
  return sign * std::ldexp(128 + mantissa, exponent - 134);
}

std::uint16_t to_bf16(double v) {
  const unsigned sign = std::signbit(v) ? 32768 : 0;
  if (std::isnan(v)) return static_cast<std::uint16_t>(sign + 0x7fc0);
  if (std::isinf(v)) return static_cast<std::uint16_t>(sign + 0x7f80);
  if (v == 0.0) return static_cast<std::uint16_t>(sign);
  // Steps of the binade that |v| lies in: 128 .. 255 of them, fewer below the normal numbers.
  const int exponent = std::max(std::ilogb(v), -126);
  const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(std::abs(v), 7 - exponent)));
  // 256 steps carry into the next binade, and 128 at the bottom are the first normal number: codes
  // count on through both.
  const unsigned code = static_cast<unsigned>(exponent + 126) * 128 + steps;
  return static_cast<std::uint16_t>(sign + std::min(code, 0x7f80u));
}

double round_bf16(double v) { return from_bf16(to_bf16(v)); }

double from_e4m3(std::uint8_t code) {
  const int exponent = code / 8 % 16, mantissa = code % 8;
  const double sign = code >= 128 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return kNan;
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

std::uint8_t to_e4m3(double v) {
  const unsigned sign = std::signbit(v) ? 128 : 0;
  if (std::isnan(v)) return static_cast<std::uint8_t>(sign + 0x7f);
  return static_cast<std::uint8_t>(sign + nearest_code(std::abs(v), 0x7e, from_e4m3));
}

double from_e2m1(std::uint8_t code) {
  const int exponent = code / 2 % 4, mantissa = code % 2;
  const double sign = code % 16 >= 8 ? -1.0 : 1.0;
  if (exponent == 0) return sign * 0.5 * mantissa;
  return sign * std::ldexp(2 + mantissa, exponent - 2);
}

std::uint8_t to_e2m1(double v) {
  const unsigned sign = std::signbit(v) ? 8 : 0;
  return static_cast<std::uint8_t>(sign + nearest_code(std::abs(v), 7, from_e2m1));
}

double from_ue8m0(std::uint8_t code) { return code == 255 ? kNan : std::ldexp(1.0, code - 127); }

std::uint8_t ue8m0_ceil(double v) {
  const double rounded = static_cast<float>(v);
  int exponent = std::ilogb(rounded);
  if (std::ldexp(1.0, exponent) < rounded) ++exponent;
  return static_cast<std::uint8_t>(exponent + 127);
}

}  // namespace lowlat::reference
