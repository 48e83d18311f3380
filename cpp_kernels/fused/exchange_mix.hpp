// fused/exchange_mix.hpp: the end of a sublayer and the beginning of the next where the next one's
// input is combined by its own statistics (V4): sum over ranks, hyper-connection, statistics, norm,
// quantisation in one kernel. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange.hpp"
#include "fused/mix.hpp"

namespace lowlat::nvidia::fused {

// Statistics of one sublayer.
struct HyperWeights {
  const float* fn;     // [24, 4 H]
  const float* base;   // [24]
  const float* scale;  // [3]
};

// See exchange_mix.cu for the formulas.
struct ExchangeMixParams {
  ExchangePort port;
  int exchange_index;   // of this step; the tag of x's packets too
  ExchangeStage stage;  // for the status words
  int num_rows;         // T, 1 .. 48
  bool receives;        // false: a step's first kernel, nothing is summed and the residual stays
  bool few_blocks;      // eight blocks a row instead of sixteen; receives
  const float* mix_in;  // [T, kMixStride] of mix.hpp: post and comb of the sublayer that ends
  const std::uint16_t* residual_in;  // bf16 [T, 4, H]
  HyperWeights next;                 // of the sublayer that begins
  // fn of the exchange after this one, which is asked for on its way to the second-level cache;
  // NULL: none. That one's blocks have a place late, and begin with it.
  const float* later_fn;
  const std::uint16_t* gain;  // bf16 [H] of its norm
  float norm_eps, hc_eps;
  int sinkhorn_iters;
  // Out.
  std::uint16_t* residual_out;  // bf16 [T, 4, H], not residual_in; unused where !receives
  // [T, kMixStride], not mix_in. NULL: not wanted, so that four outputs of fn are read instead of
  // 24; not of more rows than clusters.
  float* mix_out;
  std::uint16_t* x;  // bf16 [T, H]
  // As ExchangeNormParams, in groups of 128; x_packets NULL: not wanted.
  std::uint8_t* x_codes;  // more than kHopRows rows
  float* x_scale;
  void* x_packets;
  std::uint32_t kernel;  // of its stamps: Hop::id and HopKernel
  // Of residual_in, and of mix_in (word NULL: the ends of the kernels before); of residual_out and
  // x (exchange_mix_blocks); of mix_out (num_rows).
  Gate before, mix_before, done, mix_done;
  // Of a kernel beside the chain that reads x; word NULL: none.
  Gate x_read;
};

// Sixteen blocks (or eight) that share a row, or several where rows are many. Seven clusters of
// sixteen run at once: no more parts of the chip have sixteen multiprocessors. Of eight, eight.
inline constexpr int kMixCluster = 16, kMaxMixClusters = 7, kMaxSmallMixClusters = 8;
constexpr std::uint32_t exchange_mix_clusters(const ExchangeMixParams& params) {
  const int most = params.few_blocks ? kMaxSmallMixClusters : kMaxMixClusters;
  return static_cast<std::uint32_t>(params.num_rows < most ? params.num_rows : most);
}
// What opens `done`: a row counts as much as a cluster's blocks, by whichever it is made.
constexpr std::uint32_t exchange_mix_blocks(int num_rows) {
  return static_cast<std::uint32_t>(kMixCluster * num_rows);
}

// V4-Flash's sizes (H 4096); tp_size 1, 2 or 4. cudaErrorInvalidValue for what was not built.
cudaError_t launch_exchange_mix(const ExchangeMixParams& params, bool programmatic,
                                cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
