// fused/draft.hpp: the draft's five proposals as one launch a GPU. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kDraftSteps = 5;     // gamma
inline constexpr int kMarkovRank = 256;   // columns of w1 and w2
inline constexpr int kMaxDraftBatch = 8;  // requests of one launch
// Blocks of one rank. 128 and not all of a part's: shards of 32320 and 64640 ids are 16 and 32
// tiles of 16 ids a block then, as many as its warps hold, and 128 threads ask for a rank's
// packets.
inline constexpr int kMaxDraftBlocks = 128;
// Exchanges that a launch takes from the step: one a proposal, and one that ends shared logits.
inline constexpr int kDraftExchanges = kDraftSteps + 1;

// An engine's draft sampler maps to this as follows (SGLang's names): draft_tokens is tokens,
// step_logits is logits[tp_rank] (whole where share_logits; else the ranks' parts are still to be
// gathered), step_temperatures is temperatures, noise.key and noise.offset are noise_key and
// noise_offset, anchor_tokens is anchors with its stride. greedy_draft: temperatures and
// noise_offset NULL. The streams' collapse, the norm and the head come before and give base. A
// batch above kMaxDraftBatch is not served, by any rank.
//
// See draft.cu for the formulas. Pointers are device memory unless they say otherwise; an array is
// the same on all ranks where nothing names a rank. Shards are equal: rank r holds ids
// r * vocab_shard .. + vocab_shard - 1, and the vocabulary is tp_size * vocab_shard.
struct DraftProposalsParams {
  ExchangePort port;   // box_packets >= draft_packets(blocks, batch_size)
  int exchange_index;  // of this step: the first of kDraftExchanges
  int batch_size;      // B, 1 .. kMaxDraftBatch
  int vocab_shard;     // V / tp_size, a multiple of 4
  // bf16 [V, 256], whole on every rank, and [V / tp_size, 256]. Aligned to 16 bytes, as base is.
  const std::uint16_t* w1;
  const std::uint16_t* w2;
  const float* base;            // fp32 [B * 5, V / tp_size]: this rank's part of the logits
  std::int64_t base_pitch;      // elements from a row of base to the next, a multiple of 4
  const std::int64_t* anchors;  // [B]: the token before the first proposal
  std::int64_t anchor_pitch;    // elements from an anchor to the next
  const float* temperatures;    // fp32 [B], 0 is greedy; NULL: all greedy
  std::uint64_t noise_key;      // of Philox; not read where all are greedy
  std::int64_t* noise_offset;   // NULL: as 0 and left alone; else counted up by one at the end
  std::int64_t* tokens;         // out [B, 5]
  // Rank r's fp32 [B, 5, V] as this device sees it, aligned to 16 bytes, or NULL. This rank stores
  // the z of its own ids in each that is given, for requests whose temperature is not 0 and for no
  // other.
  float* logits[kMaxRanks];
  // All ranks have all arrays, or (false) each at most its own. True: when a rank's launch has
  // ended, its own array is whole; false: it holds the rank's own ids.
  bool share_logits;
  std::uint64_t* stamps;  // NULL, or clocks [blocks, 6, kDraftStamps] for the bench
};

// Stamps of a block, thread 0's clock. First: at its start, when its inputs are there, when its
// noise is made, when its weights are in order (two unused). Then of each step: when the row is
// asked for, the products are done, the block's best is known, the packets are sent, the logits
// stored and the next base asked for, and all packets are here.
inline constexpr int kDraftStamps = 6;

// Packets of a box that a launch uses: each is there for several readers apart.
inline constexpr int kDraftCopies = 4;
constexpr int draft_packets(int blocks, int batch_size) {
  return kDraftCopies * blocks * ((batch_size + 1) / 2);
}

// Launches on `blocks` blocks of the current device, the same number on every rank, 1 ..
// kMaxDraftBlocks; all must be resident at once, one a multiprocessor. No allocation, no
// synchronisation; may be captured. The step's begin (launch_begin_step) came before in the stream.
// Programmatic: the weights are asked for before the kernel before it has ended.
// cudaErrorInvalidValue for sizes that are not allowed, cudaErrorCooperativeLaunchTooLarge where
// the blocks are not resident together.
cudaError_t launch_draft_proposals(const DraftProposalsParams& params, int blocks,
                                   bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
