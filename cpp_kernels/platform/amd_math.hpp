// platform/amd_math.hpp: exp, log, log1p, pow, sin and cos in fp32 for the platform amd, made in
// double and rounded once.
//
// The compiler for AMD code objects comes without a device library, and these parts have fp64 at
// half the rate of fp32. Each result is within 0.51 units in the last place of the true value.
// Plain C++ over LOWLAT_DEVICE and the compiler's builtins, so that a test runs the same lines on a
// CPU. The functions are one thread's.
#pragma once

#ifndef LOWLAT_DEVICE
#error "platform/amd.hpp includes this file"
#endif

#include <cstdint>

namespace lowlat::amd::math {

LOWLAT_DEVICE std::uint64_t double_bits(double v) { return __builtin_bit_cast(std::uint64_t, v); }
LOWLAT_DEVICE double bits_double(std::uint64_t bits) { return __builtin_bit_cast(double, bits); }

// 2^n, n from -1022 to 1023.
LOWLAT_DEVICE double power_of_two(int n) {
  return bits_double(static_cast<std::uint64_t>(n + 1023) << 52);
}

// The nearest integer of |v| < 2^51, ties to even.
LOWLAT_DEVICE double nearest(double v) {
  constexpr double kShift = 0x1.8p52;
  return (v + kShift) - kShift;
}

// Horner's rule, from the highest power's coefficient to the constant.
template <class... Lower>
LOWLAT_DEVICE double polynomial(double x, double highest, Lower... lower) {
  double sum = highest;
  ((sum = __builtin_fma(sum, x, lower)), ...);
  return sum;
}

// e^v for |v| <= 700: 2^n e^r with |r| <= ln 2 / 2, a polynomial of degree 11 (error below 2^-51).
LOWLAT_DEVICE double exp_double(double v) {
  constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const double n = nearest(v * 0x1.71547652b82fep0);
  const double r = __builtin_fma(-n, kLn2Low, __builtin_fma(-n, kLn2High, v));
  const double sum =
      polynomial(r, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0);
  return sum * power_of_two(static_cast<int>(n));
}

// ln v of a positive normal double: v = 2^n m, m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
LOWLAT_DEVICE double log_double(double v) {
  const std::uint64_t bits = double_bits(v);
  // Of sqrt(1/2): what is above it belongs to the next power of two.
  const std::uint64_t from_root = bits - 0x3fe6'a09e'667f'3bcdu;
  const int n = static_cast<int>(static_cast<std::int64_t>(from_root) >> 52);
  const double m = bits_double(bits - (static_cast<std::uint64_t>(n) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  const double sum = polynomial(s2, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
                                1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0);
  const double tail = s * s2 * sum;
  return __builtin_fma(static_cast<double>(n), 0x1.62e42fefa39efp-1, 2.0 * (s + tail));
}

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kNan = __builtin_nanf("");

LOWLAT_DEVICE float exp(float v) {
  if (v != v) return v;
  if (v > 89.0f) return kInfinity;
  if (v < -104.0f) return 0.0f;
  return static_cast<float>(exp_double(static_cast<double>(v)));
}

LOWLAT_DEVICE float log(float v) {
  if (v != v || v < 0.0f) return kNan;
  if (v == 0.0f) return -kInfinity;
  if (v == kInfinity) return v;
  return static_cast<float>(log_double(static_cast<double>(v)));
}

// ln(1 + v): 1 + v is exact in double unless v is tiny, where two terms of the series are.
LOWLAT_DEVICE float log1p(float v) {
  if (v != v || v < -1.0f) return kNan;
  if (v == -1.0f) return -kInfinity;
  if (v == kInfinity || v == 0.0f) return v;
  const double x = static_cast<double>(v);
  if (x < 0x1p-20 && x > -0x1p-20) {
    return static_cast<float>(__builtin_fma(x * x, __builtin_fma(x, 1.0 / 3.0, -0.5), x));
  }
  return static_cast<float>(log_double(1.0 + x));
}

// base^exponent of a positive, finite base; of any other base NaN.
LOWLAT_DEVICE float pow(float base, float exponent) {
  if (exponent == 0.0f || base == 1.0f) return 1.0f;
  if (!(base > 0.0f && base < kInfinity) || exponent != exponent) return kNan;
  const double power = static_cast<double>(exponent) * log_double(static_cast<double>(base));
  if (power > 89.0) return kInfinity;
  if (power < -104.0) return 0.0f;
  return static_cast<float>(exp_double(power));
}

// sin and cos of |r| <= pi / 4.
LOWLAT_DEVICE double sin_small(double r) {
  const double r2 = r * r;
  const double sum = polynomial(r2, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0,
                                1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0);
  return __builtin_fma(r * r2, sum, r);
}
LOWLAT_DEVICE double cos_small(double r) {
  const double r2 = r * r;
  const double sum = polynomial(r2, -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0,
                                1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5);
  return __builtin_fma(r2, sum, 1.0);
}

// The quarter turn that v lies nearest to (its low two bits count) and what is left of v. Pi / 2 in
// two parts, the first of 33 bits: n times it is exact for n below 2^20, so for |v| < 1.6e6
// radians, a position of the longest context. Beyond it the error grows with v.
LOWLAT_DEVICE double quarter_turn(float v, int& out_quarter) {
  constexpr double kFirst = 0x1.921fb54400000p0, kSecond = 0x1.0b4611a626331p-34;
  const double x = static_cast<double>(v);
  const double n = nearest(x * 0x1.45f306dc9c883p-1);
  out_quarter = static_cast<int>(static_cast<std::int64_t>(n) & 3);
  return __builtin_fma(-n, kSecond, __builtin_fma(-n, kFirst, x));
}
LOWLAT_DEVICE float turned(double r, int quarter) {
  const double value = (quarter & 1) != 0 ? cos_small(r) : sin_small(r);
  return static_cast<float>((quarter & 2) != 0 ? -value : value);
}
// NaN for an infinity and beyond 2^31.
LOWLAT_DEVICE float sin(float v) {
  if (!(v > -0x1p31f && v < 0x1p31f)) return kNan;
  if (v == 0.0f) return v;
  int quarter;
  const double r = quarter_turn(v, quarter);
  return turned(r, quarter);
}
LOWLAT_DEVICE float cos(float v) {
  if (!(v > -0x1p31f && v < 0x1p31f)) return kNan;
  int quarter;
  const double r = quarter_turn(v, quarter);
  return turned(r, quarter + 1);
}

}  // namespace lowlat::amd::math
