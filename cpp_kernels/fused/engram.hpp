// fused/engram.hpp: n-gram memory before a layer: ids by hash, rows of the tables, keys and value
// of each row, the gated addition to the streams, and the next sublayer's input. Every C++ compiler
// reads it. One struct serves all three kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange_hop.hpp"
#include "fused/index.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kEngramMaxShards = 8;
inline constexpr int kEngramWidth = 24 * 256;  // of a looked-up row

// The table of one layer, its columns in equal shares: this rank's memory, a peer's or the host's,
// as this device sees it.
struct EngramTable {
  const std::uint8_t* codes[kEngramMaxShards];   // e4m3 [rows, 256], 16-byte aligned
  const std::uint8_t* scales[kEngramMaxShards];  // ue8m0 [rows, 8], 8-byte aligned
  std::int64_t first_row[kEngramMaxShards];      // id of row 0 of a share
  int num_shards;                                // divides 24
};

struct EngramParams {
  StepRows rows;
  // Look-up: what depends on the step's tokens alone.
  const std::int32_t* token_ids;  // [T]
  const std::int32_t* history;    // [requests, 3], oldest first
  const std::int64_t* token_map;
  std::int64_t multipliers[4];
  std::int64_t primes[24];
  int image_token, pad_token;
  EngramTable table;
  std::uint8_t* codes;  // e4m3 [T, 6144]
  float* scale;         // [192, padded_rows(T)]
  // Product.
  Fp8Weights wkv;  // [5 * 5120, 6144]
  float* sums;     // [3, T, 5 * 5120]: parts of K
  int slots;       // of the ring of weights, 2 and more; 0: 4, or what fits. Each is 33 KB
  // Apply. R and the statistics that the exchange before used; in and out.
  std::uint16_t* residual;        // bf16 [T, 4, 5120]
  const float* mix;               // [T, kMixStride]
  const std::uint16_t* q_weight;  // bf16 [4, 5120]
  const std::uint16_t* k_weight;  // bf16 [4, 5120]
  const std::uint16_t* gain;      // bf16 [5120] of the sublayer's norm
  float norm_eps;
  std::uint16_t* x;       // bf16 [T, 5120]; NULL: not wanted
  std::uint8_t* x_codes;  // e4m3 [T, 5120]
  float* x_scale;         // [160, padded_rows(T)]
  // Up to kHopRows rows, where hop.port is not NULL: packets instead of x_codes and x_scale, with
  // the tag of exchange hop.index.
  Hop hop;
  void* x_packets;  // as HopBuffers::x
  // Of the codes; of the sums; of the residual (the exchange before); of x and the new residual.
  Gate lookup_done, product_done, before, done;
};

// Blocks that open lookup_done, product_done and done.
constexpr std::uint32_t engram_lookup_blocks(int num_rows) {
  return static_cast<std::uint32_t>(num_rows);
}
inline constexpr std::uint32_t kEngramProductBlocks = 132;
constexpr std::uint32_t engram_apply_blocks(int num_rows) {
  return static_cast<std::uint32_t>(8 * num_rows);
}

// V4.1-Flash's sizes. cudaErrorInvalidValue for what is out of range. All may be captured in a
// graph; nothing is allocated.
cudaError_t launch_engram_lookup(const EngramParams& params, bool programmatic,
                                 cudaStream_t stream);
// `started`, if not NULL, is recorded when all blocks have begun; a kernel that waits at
// product_done has to wait for it.
cudaError_t launch_engram_product(const EngramParams& params, bool programmatic,
                                  cudaStream_t stream, cudaEvent_t started = nullptr);
cudaError_t launch_engram_apply(const EngramParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
