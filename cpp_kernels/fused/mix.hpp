// fused/mix.hpp: the statistics of the hyper-connections, by a few blocks beside the main chain: a
// sublayer's end needs them, its beginning does not. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange_gate.hpp"
#include "fused/exchange_hop.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kMixStride = 32;  // floats a row
inline constexpr int kMaxMixBlocks = 64;

struct MixParams {
  const std::uint16_t* residual;  // bf16 [T, 4 hidden]
  const float* fn;                // [24, 4 hidden], aligned to 16 bytes
  const float* base;              // [24]
  const float* scale;             // [3]
  float norm_eps, hc_eps;
  int sinkhorn_iters;
  int hidden, num_rows;  // hidden a multiple of 128; rows 1 .. 48
  float* partial;        // [kMaxMixBlocks, T, kMixStride]: 24 dot products, the sum of squares
  // Out: [T, kMixStride]: pre[4], post[4], comb[4][4] (8 + 4 in + out), unused.
  float* mix;
  std::uint32_t* ticket;  // device word, zeroed once, of this sublayer: the last block finishes
  Gate before, done;      // of the residual; of the parameters (blocks 1)
  Hop hop;                // of its stamps
  int stages;             // set by launch_mix
};

// `blocks`: a power of two up to kMaxMixBlocks. `alone`: a block takes all of a multiprocessor's
// memory (208 KB) and two blocks are enough; otherwise 60 KB. No block waits for another.
cudaError_t launch_mix(const MixParams& params, int blocks, bool alone, bool programmatic,
                       cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
