// bench/read_rate.cuh: the plain read whose rate floors are made with.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace lowlat::bench {

// n of sixteen bytes, once each, past the caches. out: never written, so that the reads are needed.
static __global__ void __launch_bounds__(512)
    read_for_rate(const uint4* src, std::size_t n, std::uint32_t* out) {
  std::uint32_t sum = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = i + k * step < n ? __ldcs(src + i + k * step) : make_uint4(0, 0, 0, 0);
    }
    for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x1234'5678) *out = sum;
}

}  // namespace lowlat::bench
