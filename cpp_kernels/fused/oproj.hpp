// fused/oproj.hpp: the output projection of attention, published from its last product. Every C++
// compiler reads it. One struct serves all its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange.hpp"
#include "fused/front.hpp"

namespace lowlat::nvidia::fused {

struct OprojParams {
  FusedModel model;
  int num_rows;    // T, 1 .. 48
  int num_groups;  // of this rank: 8 / tp_size
  // Up to kHopRows rows: packets instead of o, o_scale, u_codes and u_scale.
  Hop hop;
  HopBuffers packets;
  const std::uint16_t* o;  // f16 [T, num_groups * 4096] under o_scale, see attention.hpp
  const float* o_scale;    // [num_groups * 4096 / group, padded_rows(T)]
  Fp8Weights wo_a;         // [num_groups * 1024, 4096]
  Fp8Weights wo_b;         // [H, num_groups * 1024], this rank's columns
  // Between the two kernels: e4m3 [T, num_groups * 1024] and [num_groups * 1024 / group,
  // padded_rows(T)].
  std::uint8_t* u_codes;
  float* u_scale;
  // Out: partial sums [T, H] of this rank. `published`: to every rank's mailbox.
  bool published;
  ExchangePort port;
  int exchange_index;
  float* partial;       // fp32 [T, H], where not published
  Gate before, u_done;  // of o; between the two kernels
};

// Blocks that open u_done: those that own outputs.
constexpr std::uint32_t oproj_a_blocks(FusedModel model, int num_rows, int num_groups) {
  const int of_group = model == FusedModel::v4 ? 64 : num_rows > 16 ? 128 : 32;
  return static_cast<std::uint32_t>(of_group * num_groups);
}

// Up to kHopRows rows of V4.1-Flash with two groups: one kernel for both products, so many blocks.
inline constexpr int kOprojFewGroups = 2, kOprojFewBlocks = 128;
constexpr bool oproj_is_few(const OprojParams& params) {
  return params.model == FusedModel::v41 && params.num_rows >= 1 && params.num_rows <= kHopRows &&
         params.num_groups == kOprojFewGroups;
}
// cudaErrorInvalidValue for other sizes, and for a device of fewer multiprocessors than blocks.
cudaError_t launch_oproj_few(const OprojParams& params, bool programmatic, cudaStream_t stream);

// V4.1-Flash's sizes (H 5120) or V4-Flash's (4096); num_groups 2 (TP4) or 4 (TP2), but where
// oproj_is_few. cudaErrorInvalidValue for others.
cudaError_t launch_oproj_a(const OprojParams& params, bool programmatic, cudaStream_t stream);
cudaError_t launch_oproj_b(const OprojParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
