// fused/front_quant.cuh: scales of quantised activations and norms in few instructions: kernels
// that run once through their code are as long as it is.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "platform/nvidia_sm90_fp8.cuh"

namespace lowlat::nvidia::fused {

struct PowerScale {
  float scale, inverse;
};

// The smallest power of two not below amax / 448, as stages::activation_scale without its division:
// 448 is 1.75 * 2^8, so the exponent grows by one where the fraction is beyond .75. amax is at
// least 1e-10 here; the same for a key's group with its floor of 1e-4.
LOWLAT_DEVICE std::uint32_t power_code(float amax) {
  return ((plat::float_bits(amax) + 0x1f'ffffu) >> 23) - 8u;
}
LOWLAT_DEVICE PowerScale power_scale(float amax) {
  const std::uint32_t code = power_code(plat::max(amax, 1e-10f));
  return {plat::bits_float(code << 23), plat::bits_float((254u - code) << 23)};
}

// 1 / sqrt(v), within a unit in the last place: the approximation and one Newton step.
LOWLAT_DEVICE float quick_rsqrt(float v) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y * plat::fma(-0.5f * v * y, y, 1.5f);
}

// Cosine and sine of a position's angle. Not inlined: large angles take much code.
LOWLAT_DEVICE __noinline__ float2 turn_by(float angle) {
  return make_float2(plat::cos(angle), plat::sin(angle));
}

// A value rounded to bf16.
LOWLAT_DEVICE float quick_bf16(float v) { return sm90::low_bf16(sm90::to_bf16_pair(v, 0.0f)); }

}  // namespace lowlat::nvidia::fused
