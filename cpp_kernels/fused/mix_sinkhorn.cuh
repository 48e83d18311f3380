// fused/mix_sinkhorn.cuh: the Sinkhorn passes of the hyper-connections in one thread's registers.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

namespace lowlat::nvidia::fused {

LOWLAT_DEVICE float approximate_reciprocal(float v) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// stages::hc_sinkhorn with reciprocals good to one unit in the last place, all 16 numbers in
// registers: forty dependent passes are latency and nothing else. One thread calls.
LOWLAT_DEVICE void sinkhorn(float (&comb)[4][4], float eps, int num_iters) {
#pragma unroll
  for (auto& row : comb) {
    float top = row[0];
#pragma unroll
    for (int k = 1; k < 4; ++k) top = plat::max(top, row[k]);
#pragma unroll
    for (float& v : row) v = plat::exp(v - top);
    const float inverse = approximate_reciprocal((row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
    for (float& v : row) v = plat::fma(v, inverse, eps);
  }
#pragma unroll 1
  for (int iter = 0; iter < num_iters; ++iter) {
    if (iter > 0) {
#pragma unroll
      for (auto& row : comb) {
        const float inverse = approximate_reciprocal((row[0] + row[1]) + (row[2] + row[3]) + eps);
#pragma unroll
        for (float& v : row) v *= inverse;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float inverse =
          approximate_reciprocal((comb[0][k] + comb[1][k]) + (comb[2][k] + comb[3][k]) + eps);
#pragma unroll
      for (int j = 0; j < 4; ++j) comb[j][k] *= inverse;
    }
  }
}

}  // namespace lowlat::nvidia::fused
