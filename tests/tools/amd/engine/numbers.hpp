// numbers.hpp: the small floating-point formats, and rounding to them.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "isa.hpp"

namespace amd {

inline float bits_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 float_bits(float value) { return std::bit_cast<u32>(value); }

// A format of `exponent` and `mantissa` bits. kIeee: all-ones exponents are infinities and NaNs.
// kFn: only all ones is NaN, no infinity. kFnuz: only the sign bit alone is NaN. kFinite: no NaN.
enum class Special : u8 { ieee, fn, fnuz, finite };
struct Format {
  int exponent, mantissa, bias;
  Special special;
  u32 sign_bit() const { return 1u << (exponent + mantissa); }
};
inline constexpr Format kHalf{5, 10, 15, Special::ieee};
inline constexpr Format kBfloat{8, 7, 127, Special::ieee};
inline constexpr Format kE4m3Fn{4, 3, 7, Special::fn};
inline constexpr Format kE5m2{5, 2, 15, Special::ieee};
inline constexpr Format kE4m3Fnuz{4, 3, 8, Special::fnuz};
inline constexpr Format kE5m2Fnuz{5, 2, 16, Special::fnuz};
inline constexpr Format kE2m1{2, 1, 1, Special::finite};
inline constexpr Format kE2m3{2, 3, 1, Special::finite};
inline constexpr Format kE3m2{3, 2, 3, Special::finite};

inline double decode(const Format& f, u32 bits) {
  const bool negative = (bits & f.sign_bit()) != 0;
  const int exponent = static_cast<int>(bits >> f.mantissa) & ((1 << f.exponent) - 1);
  const u32 mantissa = bits & ((1u << f.mantissa) - 1);
  const int top = (1 << f.exponent) - 1;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (f.special == Special::ieee && exponent == top) {
    if (mantissa != 0) return nan;
    return negative ? -std::numeric_limits<double>::infinity()
                    : std::numeric_limits<double>::infinity();
  }
  if (f.special == Special::fn && exponent == top && mantissa == (1u << f.mantissa) - 1) return nan;
  if (f.special == Special::fnuz && bits == f.sign_bit()) return nan;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa)
                    : std::ldexp(mantissa + (1u << f.mantissa), exponent - f.bias - f.mantissa);
  return negative ? -value : value;
}

inline double largest(const Format& f) {
  const int top = (1 << f.exponent) - 1;
  const double all = static_cast<double>((2 << f.mantissa) - 1);
  switch (f.special) {
    case Special::ieee: return std::ldexp(all, top - 1 - f.bias - f.mantissa);
    case Special::fn: return std::ldexp(all - 1, top - f.bias - f.mantissa);
    default: return std::ldexp(all, top - f.bias - f.mantissa);
  }
}

// The nearest, ties to even. Above the largest: infinity where the format has one, unless it
// saturates; else NaN, or the largest where it saturates. `stochastic`: 32 bits that are added
// below the last kept bit instead of rounding to nearest; negative: none.
inline u32 encode(const Format& f, double value, bool saturates, i64 stochastic = -1) {
  const u32 sign = std::signbit(value) ? f.sign_bit() : 0;
  const int top = (1 << f.exponent) - 1;
  const u32 nan = f.special == Special::ieee
                      ? static_cast<u32>(top) << f.mantissa | 1u << (f.mantissa - 1) | sign
                  : f.special == Special::fn ? sign | (f.sign_bit() - 1)
                                             : f.sign_bit();
  if (std::isnan(value)) return f.special == Special::finite ? f.sign_bit() - 1 : nan;
  const double magnitude = std::fabs(value);
  const auto beyond = [&]() -> u32 {
    if (saturates || f.special == Special::finite) {
      u32 code = 0;
      if (f.special == Special::ieee) code = (static_cast<u32>(top) << f.mantissa) - 1;
      if (f.special == Special::fn) code = f.sign_bit() - 2;
      if (f.special == Special::fnuz || f.special == Special::finite) code = f.sign_bit() - 1;
      return sign | code;
    }
    return f.special == Special::ieee ? sign | static_cast<u32>(top) << f.mantissa : nan;
  };
  if (std::isinf(magnitude)) {
    return f.special == Special::ieee && !saturates ? sign | static_cast<u32>(top) << f.mantissa
                                                    : beyond();
  }
  u32 code = 0;
  if (magnitude != 0) {
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent, 0.5 <= m < 1
    const int least = 1 - f.bias;
    const int place = std::max(exponent - 1, least) - f.mantissa;  // weight of the last bit
    const double scaled = std::ldexp(magnitude, -place);
    double kept = std::floor(scaled);
    const double rest = scaled - kept;
    if (stochastic >= 0) {
      if (rest + std::ldexp(static_cast<double>(stochastic), -32) >= 1.0) kept += 1;
    } else if (rest > 0.5 || (rest == 0.5 && std::fmod(kept, 2.0) != 0)) {
      kept += 1;
    }
    const double rounded = std::ldexp(kept, place);
    if (rounded > largest(f)) return beyond();
    if (rounded == 0) {
      code = 0;
    } else {
      int e = 0;
      std::frexp(rounded, &e);
      const int stored = std::max(e - 1, least);
      const u32 integer = static_cast<u32>(std::ldexp(rounded, f.mantissa - stored));
      code = integer >= (1u << f.mantissa)
                 ? static_cast<u32>(stored + f.bias) << f.mantissa | (integer - (1u << f.mantissa))
                 : integer;
    }
  }
  if (f.special == Special::fnuz && code == 0) return 0;  // no negative zero
  return sign | code;
}

inline float half_float(u32 bits) { return static_cast<float>(decode(kHalf, bits & 0xffff)); }
inline u32 float_half(double value) { return encode(kHalf, value, false); }
inline float bfloat_float(u32 bits) { return bits_float(bits << 16); }
inline u32 float_bfloat(float value) {
  const u32 bits = float_bits(value);
  if (std::isnan(value)) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

}  // namespace amd
