// fused/mix.hpp: the statistics of the hyper-connections in pieces, so that they run beside the
// main chain: blocks of any kernel that starts after a residual is there add pieces of the 24 dot
// products and of the sum of squares; who needs the numbers adds the pieces. Every C++ compiler
// reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lowlat::nvidia::fused {

inline constexpr int kMixPartLength = 512;  // elements of a row that one piece covers
inline constexpr int kMixPartStride = 32;   // floats: 24 dot products, the sum of squares, unused

// Pieces of a row of 4 hidden values.
constexpr int mix_parts(int hidden) { return 4 * hidden / kMixPartLength; }

struct MixParams {
  const std::uint16_t* residual;  // bf16 [T, 4 hidden]
  const float* fn;                // [24, 4 hidden], aligned to 16 bytes
  float* partial;                 // [mix_parts, T, kMixPartStride]
  int hidden, num_rows;
};

// The pieces as a kernel of its own.
cudaError_t launch_mix_partial(const MixParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
