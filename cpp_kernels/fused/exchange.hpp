// fused/exchange.hpp: what the host hands over for an exchange of partial sums, and the kernel that
// receives them: sum over ranks, hyper-connection, norm, quantisation. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange_gate.hpp"
#include "fused/exchange_hop.hpp"
#include "fused/stamps.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxFusedRows = 48;

// One rank's view of the exchange memory. A rank's region, in its own device memory, zeroed before
// the first exchange: boxes [2][tp_size][box_packets] of 16 bytes, then its abort word. `boxes[r]`
// and `abort_words[r]` are rank r's, as this device sees them (peer access or an opened handle).
struct ExchangePort {
  void* boxes[kMaxRanks];
  std::uint32_t* abort_words[kMaxRanks];
  void* status;                     // stages::StatusWords, host memory that the device can write
  std::uint32_t* fault_claim;       // device word, 0: the first thread that reports takes it
  const std::uint64_t* step_epoch;  // device word: epoch of the step's exchange 0, from 1 on
  std::uint64_t budget_ns;          // of a wait for a peer; one for own kernels has twice that
  std::int64_t box_packets;         // max_rows * hidden / 4
  std::int32_t tp_rank, tp_size;
  std::uint32_t kernel;  // index of the catalogue's line, for the status words
  StampSink stamps;      // .stamps NULL: none
};

// The step's first kernel: *step_epoch += num_exchanges of the last step (and over the numbers
// whose low half is about to wrap), words[0 .. num_words) = 0 (gates and tickets; NULL: none). All
// later kernels of the step may read them; the next step starts after this one's last kernel has
// ended.
cudaError_t launch_begin_step(std::uint64_t* step_epoch, std::uint64_t num_exchanges,
                              std::uint32_t* words, int num_words, cudaStream_t stream);

// What an exchange ends: stages::StageId by the same numbers, for code without a platform.
enum class ExchangeStage : std::uint32_t { embed_sum = 1, attention_sum = 3, moe_sum = 4 };

// See exchange.cu for the formulas.
struct ExchangeNormParams {
  ExchangePort port;
  int exchange_index;   // of this step
  ExchangeStage stage;  // for the status words
  int num_rows;         // T, 1 .. 48
  const float* mix;     // [T, kMixStride]: pre, post, comb of mix.hpp
  float norm_eps;
  const std::uint16_t* gain;         // bf16 [H] of the norm
  const std::uint16_t* residual_in;  // bf16 [T, 4, H]
  std::uint16_t* residual_out;       // bf16 [T, 4, H], not residual_in
  std::uint16_t* x;                  // bf16 [T, H]; NULL: not wanted
  // More than kHopRows rows: e4m3 [T, H] and [H / 32, padded_rows(T)], powers of two. Otherwise
  // packets (HopBuffers::x) with this exchange's epoch as the tag, or NULL: not wanted.
  std::uint8_t* x_codes;
  float* x_scale;
  void* x_packets;
  std::uint32_t kernel;  // of its stamps: Hop::id and HopKernel
  // Gates: the statistics; the kernel after which this one may poll for packets (its inputs are
  // complete then too: the product that is published, or the one before it); this one's results.
  Gate mix_done, before, done;
  // Without gates. True: polls before the kernel before it has ended. Right only where the
  // publishing kernel lets its successor start after its own wait, so that residual_in and mix are
  // complete.
  bool early;
  // The quads hold a sum of experts in Marlin's order (lowlat::fused::moe_tile_order).
  bool tile_order;
};

// Makes the packets of a step's first x, where no exchange of this step does: x bf16 [T, H]
// quantised in groups of 32, for FrontParams::x_index = index. Hidden 5120.
// More rows go to codes and scale as ExchangeNormParams has them. T 1 .. 48.
cudaError_t launch_send_x(const std::uint16_t* x, int num_rows, int hidden, void* packets,
                          std::uint8_t* codes, float* scale, const std::uint64_t* step_epoch,
                          int index, cudaStream_t stream);

// Activation scales lie [K / group, padded rows], so that a product reads those of its tokens as
// one piece.
constexpr int padded_rows(int num_rows) { return (num_rows + 7) / 8 * 8; }

// A row is divided over so many blocks.
inline constexpr int kSlicesPerRow = 8;
// Blocks that open `done`.
constexpr std::uint32_t exchange_norm_blocks(int num_rows) {
  return static_cast<std::uint32_t>(kSlicesPerRow * num_rows);
}

// hidden 5120 (V4.1; V4's is exchange_mix.hpp); tp_size 1, 2 or 4. cudaErrorInvalidValue for what
// was not built.
cudaError_t launch_exchange_norm(const ExchangeNormParams& params, int hidden, bool programmatic,
                                 cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
