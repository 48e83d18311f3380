// fused/mix.hpp: the statistics of the hyper-connections in pieces, so that they run beside the
// main chain: blocks of any kernel that starts after a residual is there add pieces of the 24 dot
// products and of the sum of squares, then some of them make the parameters of a row each. Every
// C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange_gate.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kMixPartLength = 512;  // elements of a row that one piece covers
inline constexpr int kMixStride = 32;       // floats a row

// Pieces of a row of 4 hidden values.
constexpr int mix_parts(int hidden) { return 4 * hidden / kMixPartLength; }

struct MixParams {
  const std::uint16_t* residual;  // bf16 [T, 4 hidden]
  const float* fn;                // [24, 4 hidden], aligned to 16 bytes; NULL: nothing to do
  const float* base;              // [24]
  const float* scale;             // [3]
  float norm_eps, hc_eps;
  int sinkhorn_iters;
  int hidden, num_rows;
  float* partial;  // [mix_parts, T, kMixStride]: 24 dot products, the sum of squares, unused
  // Out: [T, kMixStride]: pre[4], post[4], comb[4][4] (8 + 4 in + out), unused.
  float* mix;
  // Its own gate between pieces and parameters (word not NULL, blocks mix_parts), and that of the
  // parameters (blocks num_rows).
  Gate parts, done;
};

// The statistics as a kernel of their own; the residual is there at `before`.
cudaError_t launch_mix(const MixParams& params, const Gate& before, bool programmatic,
                       cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
