// stages/fp4.hpp: four-bit values: expansion, and quantisation with either of two kinds of scale.
//
// One thread calls: a group is 16 or 32 values, and a row has as many groups as a block has
// threads for it. Nothing here touches memory order. Codes are e2m1, nearest-even after a true
// division by the scale; a round trip gives +0 for either zero, a stored code keeps its sign.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// The two values of every code byte, low nibble first.
struct Fp4Pairs {
  float value[256][2];
  constexpr Fp4Pairs() : value() {
    constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int byte = 0; byte < 256; ++byte) {
      for (int half = 0; half < 2; ++half) {
        const int code = byte >> 4 * half & 15;
        value[byte][half] = code < 8 ? kMagnitude[code] : -kMagnitude[code - 8];
      }
    }
  }
};
LOWLAT_TABLE Fp4Pairs kFp4Pairs;

// out[i] = value(code i) * scale of n codes, two a byte, the even index in the low nibble.
LOWLAT_DEVICE void expand_fp4(float* out, const std::uint8_t* codes, float scale, int n) {
  for (int i = 0; i < n; i += 2) {
    const float* pair = kFp4Pairs.value[codes[i / 2]];
    out[i] = pair[0] * scale;
    out[i + 1] = pair[1] * scale;
  }
}

inline constexpr int kFp4LatentGroup = 16;  // values that share an e4m3 scale
inline constexpr int kFp4IndexGroup = 32;   // values that share a ue8m0 scale
// Least amax: of the round trip (the smallest normal scale) and of stored index keys.
inline constexpr float kFp4AmaxMin = 0x1.8p-124f;  // 6 * 2^-126
inline constexpr float kFp4KeyAmaxMin = 1e-4f;

LOWLAT_DEVICE float fp4_amax(const float* x, int n) {
  float amax = 0.0f;
  for (int i = 0; i < n; ++i) amax = plat::max(plat::abs(x[i]), amax);
  return amax;
}

// x[0..15] to what four bits and an e4m3 scale keep of them: scale = e4m3(amax / 6 within
// 2^-9 .. 448).
LOWLAT_DEVICE void fp4_round_trip_latent(float* x) {
  const float ideal = fp4_amax(x, kFp4LatentGroup) / 6.0f;
  const float scale = from_e4m3(to_e4m3(plat::min(plat::max(ideal, 0x1p-9f), kE4m3Max)));
  for (int i = 0; i < kFp4LatentGroup; ++i) x[i] = from_e2m1(to_e2m1(x[i] / scale)) * scale + 0.0f;
}

// The ue8m0 scale of x[0..31]: the smallest power of two >= max(amax, amax_min) / 6.
LOWLAT_DEVICE std::uint8_t fp4_index_scale(const float* x, float amax_min) {
  return ue8m0_ceil(plat::max(fp4_amax(x, kFp4IndexGroup), amax_min) / 6.0f);
}

// x[0..31] to what four bits and a ue8m0 scale keep of them; exact in bf16.
LOWLAT_DEVICE void fp4_round_trip_index(float* x) {
  const float scale = from_ue8m0(fp4_index_scale(x, kFp4AmaxMin));
  for (int i = 0; i < kFp4IndexGroup; ++i) x[i] = from_e2m1(to_e2m1(x[i] / scale)) * scale + 0.0f;
}

// x[0..31] as 16 bytes (the even index in the low nibble) and their scale, which is returned.
LOWLAT_DEVICE std::uint8_t fp4_pack_index(std::uint8_t* codes, const float* x) {
  const std::uint8_t scale_code = fp4_index_scale(x, kFp4KeyAmaxMin);
  const float scale = from_ue8m0(scale_code);
  for (int i = 0; i < kFp4IndexGroup; i += 2) {
    const int low = to_e2m1(x[i] / scale), high = to_e2m1(x[i + 1] / scale);
    codes[i / 2] = static_cast<std::uint8_t>(low | high << 4);
  }
  return scale_code;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
