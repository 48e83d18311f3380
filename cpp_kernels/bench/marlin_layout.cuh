// bench/marlin_layout.cuh: the checkpoint's experts laid as Marlin's tiles, on the device, by the
// words of fused/moe.hpp. Shared by the cases of the experts and of whole steps.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace lowlat::bench {

// Checkpoint rows of E x [N, K] (`first`, then as many of `second` where that is not nullptr) to
// the Marlin layout of fused/moe.hpp.
struct Rows {
  const std::uint8_t *first, *second;
  std::size_t num, bytes;  // of each, of a row
  __host__ __device__ std::size_t all() const { return second != nullptr ? 2 * num : num; }
  __host__ __device__ const std::uint8_t* row(std::size_t expert, std::size_t n) const {
    return n < num ? first + (expert * num + n) * bytes : second + (expert * num + n - num) * bytes;
  }
};
static __global__ void marlin_codes(std::uint32_t* dst, std::size_t n, Rows rows) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t tiles_of_n = rows.all() / 64, tiles_of_k = rows.bytes / 8;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    const std::size_t word = i % 128, tile = i / 128, tile_n = tile % tiles_of_n;
    const std::size_t tile_k = tile / tiles_of_n % tiles_of_k;
    const std::size_t expert = tile / tiles_of_n / tiles_of_k;
    const std::size_t w = word % 4, t = word / 4 % 4, g = word / 16;
    std::uint32_t out = 0;
    for (std::size_t nibble = 0; nibble < 8; ++nibble) {
      const std::size_t row = 64 * tile_n + 16 * w + g + nibble / 2 % 2 * 8;
      const std::size_t k = 16 * tile_k + 2 * t + nibble % 2 * 8 + nibble / 4;
      const std::uint32_t byte = rows.row(expert, row)[k / 2];
      out |= (byte >> k % 2 * 4 & 15u) << 4 * nibble;
    }
    dst[i] = out;
  }
}
static __global__ void marlin_scales(std::uint8_t* dst, std::size_t n, Rows rows) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    const std::size_t at = i % rows.all(), group = i / rows.all() % rows.bytes;
    const std::size_t expert = i / rows.all() / rows.bytes;
    const std::size_t in = at % 64, g = in / 8, w = in / 4 % 2 * 2 + in % 2, high = in / 2 % 2;
    dst[i] = rows.row(expert, at / 64 * 64 + 16 * w + 8 * high + g)[group];
  }
}

}  // namespace lowlat::bench
