// stages/format.hpp: stored number formats: bf16, e4m3fn, e2m1 and ue8m0, to and from fp32.
//
// One thread calls a conversion; nothing here touches memory order. All roundings are to nearest,
// ties to even.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>
#include <limits>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// bf16: the upper half of an fp32. NaN stays NaN (quiet), overflow goes to infinity.
LOWLAT_DEVICE std::uint16_t to_bf16(float v) {
  const std::uint32_t bits = plat::float_bits(v);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
LOWLAT_DEVICE float from_bf16(std::uint16_t code) {
  return plat::bits_float(static_cast<std::uint32_t>(code) << 16);
}
// bf(x) of the model reference: through bf16 and back.
LOWLAT_DEVICE float round_bf16(float v) { return from_bf16(to_bf16(v)); }

inline constexpr float kE4m3Max = 448.0f;

// e4m3fn, saturating at +-448; NaN becomes 0x7f with its sign.
LOWLAT_DEVICE std::uint8_t to_e4m3(float v) {
  const std::uint32_t bits = plat::float_bits(v);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80u);
  const std::uint32_t mag = bits & 0x7fff'ffffu;
  if (mag > 0x7f80'0000u) return sign | 0x7fu;
  if (mag >= 0x43e0'0000u) return sign | 0x7eu;  // 448 and more
  if (mag < 0x3c80'0000u) {                      // below 2^-6: steps of 2^-9, by an exact add
    const float steps = plat::bits_float(mag) * 512.0f;
    // steps < 8; adding 2^23 rounds to an integer, ties to even.
    const std::uint32_t code = plat::float_bits(steps + 8388608.0f) & 0xfu;
    return sign | static_cast<std::uint8_t>(code);
  }
  const std::uint32_t rounded = mag + 0x7'ffffu + (mag >> 20 & 1u);
  const std::uint32_t code = (rounded >> 20) - (120u << 3);  // exponent bias 127 -> 7
  return sign | static_cast<std::uint8_t>(code > 0x7eu ? 0x7eu : code);
}
LOWLAT_DEVICE float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t mag = code & 0x7fu;
  if (mag == 0x7fu) return plat::bits_float(sign | 0x7fc0'0000u);
  if (mag < 8u) {
    const float v = static_cast<float>(mag) * 0x1p-9f;
    return sign != 0u ? -v : v;
  }
  return plat::bits_float(sign | (mag + (120u << 3)) << 20);
}

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit; saturating at 6.
LOWLAT_DEVICE std::uint8_t to_e2m1(float v) {
  const std::uint8_t sign = plat::float_bits(v) >> 31 != 0u ? 8u : 0u;
  const float mag = plat::abs(v);
  // Upper ends of the codes' intervals; a tie belongs to the even code.
  std::uint8_t code = 7u;
  if (mag <= 0.25f)
    code = 0u;
  else if (mag < 0.75f)
    code = 1u;
  else if (mag <= 1.25f)
    code = 2u;
  else if (mag < 1.75f)
    code = 3u;
  else if (mag <= 2.5f)
    code = 4u;
  else if (mag < 3.5f)
    code = 5u;
  else if (mag <= 5.0f)
    code = 6u;
  return sign | code;
}
LOWLAT_DEVICE float from_e2m1(std::uint8_t code) {
  constexpr float kValue[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float v = kValue[code & 7u];
  return (code & 8u) != 0u ? -v : v;
}

// ue8m0: 2^(byte - 127); 255 is NaN. Byte 0 is the subnormal 2^-127.
LOWLAT_DEVICE float from_ue8m0(std::uint8_t code) {
  if (code == 0u) return plat::bits_float(0x0040'0000u);
  if (code == 255u) return plat::bits_float(0x7fc0'0000u);
  return plat::bits_float(static_cast<std::uint32_t>(code) << 23);
}
// Smallest power of two >= v for a positive normal v (exact powers stay).
LOWLAT_DEVICE std::uint8_t ue8m0_ceil(float v) {
  const std::uint32_t bits = plat::float_bits(v);
  return static_cast<std::uint8_t>((bits >> 23 & 0xffu) + ((bits & 0x7f'ffffu) != 0u ? 1u : 0u));
}

// Rows: out[i] = value of codes[i]. The block calls, threads split the elements; no sync.
template <class Block = OneThread>
LOWLAT_DEVICE void expand_bf16(float* out, const std::uint16_t* codes, int n) {
  for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) {
    out[i] = from_bf16(codes[i]);
  }
}

// The value of every e4m3 code: one load where a conversion is a dozen instructions.
struct E4m3Values {
  float value[256];
  constexpr E4m3Values() : value() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      // (1 + mantissa / 8) 2^(exponent - 7), or mantissa / 8 * 2^-6 where the exponent field is 0.
      float v = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8) * 0x1p-10f;
      for (int e = exponent == 0 ? 1 : exponent; e > 0; --e) v *= 2.0f;
      if ((code & 0x7f) == 0x7f) v = std::numeric_limits<float>::quiet_NaN();
      value[code] = code < 128 ? v : -v;
    }
  }
};
LOWLAT_TABLE E4m3Values kE4m3Values;

// out[i] = value(codes[i]) * scale. One thread calls.
LOWLAT_DEVICE void expand_e4m3(float* out, const std::uint8_t* codes, float scale, int n) {
  for (int i = 0; i < n; ++i) out[i] = kE4m3Values.value[codes[i]] * scale;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
