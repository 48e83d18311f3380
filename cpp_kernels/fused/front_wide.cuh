// fused/front_wide.cuh: products of more than sixteen rows, whose weights wait in shared memory, by
// wgmma: e4m3 codes on both sides, or f16 values with them.
//
// A block has 64 weight rows and kK of their K and asks for all of them before its input is there.
// The warp groups split K; each makes 64 rows of all tokens, so that few registers hold sums, two
// warp groups' sums and not eight warps' are added, and the loop is short. kBlocks blocks of a
// cluster split the whole K and meet in the block that owns the row. A group of K that shares its
// scales is summed by itself and then multiplied by them.
//
// A warp group fetches the tokens of its own K, a chunk of it after the other, and multiplies what
// is there while the next chunks come. Blocks that want the same tokens begin at different chunks,
// so that they do not all ask the same part of the cache.
//
// Weights come by bulk copies and go to wgmma from registers. Copied by cp.async into the form that
// wgmma reads from shared memory, they took the multiprocessor's loads from the kernels that still
// ran there: 8 us a layer.
//
// Rounding       of codes wgmma keeps about 14 bits of a group's sum; groups are added in fp32
// Determinism    all sums have an order that the block's number fixes: group, warp group, block
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>
#include <type_traits>

#include "fused/front_product.cuh"
#include "platform/nvidia_sm90_codes.cuh"

namespace lowlat::nvidia::fused {

// kHalves: the tokens are f16 values instead of codes, and a weight's code is expanded to f16 when
// it is used. kSlots: chunks that have room at once (0: all). kRegisters: for products under way.
template <int kGroup_, int kK_, int kTiles_, int kBlocks_, int kOwned_, bool kHalves = false,
          int kSlots_ = 0, int kRegisters = 64>
struct WideProduct {
  // Of K and of weight rows, that share a scale.
  static constexpr int kGroup = kGroup_;
  static constexpr int kRows = 64, kK = kK_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr int kOwned = kOwned_, kTokens = kTiles * kTileTokens;
  static constexpr int kWarpsAPart = 4, kParts = kProductWarps / kWarpsAPart;  // warp groups
  static constexpr int kScales = kK / kGroup, kSteps = kScales / kParts;
  static constexpr int kScaleRows = kRows < kGroup ? 1 : kRows / kGroup;
  static constexpr int kBytes = kHalves ? 2 : 1;  // of a token's value
  // A row's pitch of 16 more than a multiple of 128 bytes: the words of eight rows that a warp
  // reads lie in different banks.
  static constexpr int kWeightPitch = kK + 16;
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kStepsAGroup = kGroup / kStep;
  // A chunk is of each token whole lines of 128 bytes of a warp group's K.
  static constexpr int kStepsALine = kGroup * kBytes < 128 ? 128 / (kGroup * kBytes) : 1;
  // Steps whose products are under way at once: as many as there are registers for.
  static constexpr int ahead() {
    int count = kSteps;
    while (kSteps % count != 0 || (kStepsALine % count != 0 && count % kStepsALine != 0) ||
           4 * (kTiles + kStepsAGroup * kBytes) * count > kRegisters) {
      --count;
    }
    return count;
  }
  static constexpr int kAhead = ahead();
  static constexpr int kChunkSteps = kStepsALine > kAhead ? kStepsALine : kAhead;
  static constexpr int kChunks = kSteps / kChunkSteps;
  static constexpr int kChunkBytes = kChunkSteps * kGroup * kBytes;  // of a token
  static constexpr int kPitch = 8 * kChunkBytes;                     // of eight tokens
  static constexpr int kSlots = kSlots_ == 0 ? kChunks : kSlots_;
  static constexpr int kTokenBytes = kParts * kSlots * kTokens * kChunkBytes;
  static constexpr int kSumBytes = kParts * kTokens * kSumPitch * 4;
  static_assert(kGroup % kStep == 0 && kK % (kGroup * kParts) == 0);
  static_assert(kSteps % kChunkSteps == 0 && kChunkSteps % kAhead == 0 && kChunkBytes % 128 == 0);
  static_assert(kSlots <= kChunks && kOwned % 4 == 0 && kOwned * kBlocks == kRows);

  // Written by each block of the cluster. A block that owns all its rows has it over the weights.
  struct Owned {
    float sums[kBlocks][kTokens][kOwned];
  };
  struct Nothing {};
  static_assert(kBlocks > 1 || sizeof(Owned) <= kRows * kWeightPitch);

  struct Shared {
    alignas(128) unsigned char weights[kRows * kWeightPitch];
    // Values [group][slot], then, when they are used up, the warp groups' sums [group][token][row].
    alignas(128) unsigned char tokens[kTokenBytes > kSumBytes ? kTokenBytes : kSumBytes];
    alignas(16) std::conditional_t<(kBlocks > 1), Owned, Nothing> owned;
    alignas(16) float token_scale[kScales][kTokens];
    float scale[kScaleRows][kScales];
    std::uint64_t barrier;        // of the weights
    std::uint64_t owned_barrier;  // of what the cluster sends
  };

  using Tokens = StoredTokens;

  // Asks for the weights and tells the cluster that this block runs. All threads call.
  LOWLAT_DEVICE static void load(Shared& shared, const ProductWeights& weights, int num_rows) {
    const int thread_idx = plat::thread_idx();
    const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
    if (thread_idx == 0) {
      sm90::barrier_init(&shared.barrier, 1);
      sm90::barrier_init(&shared.owned_barrier, 1);
      sm90::fence_barrier_init();
      sm90::barrier_arrive_expect(&shared.barrier, kRows * kK);
      if (kBlocks > 1) {
        sm90::barrier_arrive_expect(&shared.owned_barrier, kBlocks * kOwned * num_rows * 4);
      }
    }
    plat::block_sync();
    if constexpr (kBlocks > 1) sm90::cluster_arrive_relaxed();
    // A copy takes its addresses from registers of the whole warp, so lanes would take turns.
    if (lane_idx == 0) {
#pragma unroll 1
      for (int row = warp_idx; row < kRows; row += kProductWarps) {
        sm90::bulk_load(shared.weights + row * kWeightPitch, weights.codes + row * weights.stride,
                        kK, &shared.barrier, sm90::CacheHint::evict_first);
      }
    }
    __syncwarp();
    for (int i = thread_idx; i < kScaleRows * kScales; i += kProductThreads) {
      const int row = i / kScales, step = i % kScales;
      shared.scale[row][step] =
          stages::from_ue8m0(__ldg(weights.scales + row * weights.scale_stride + step));
    }
    plat::block_sync();  // a warp group reads scales that the other one has stored
  }

  // Asks for the first chunks, and whatever the calling thread has asked for by copy_16 before.
  // All threads call; run() waits for them.
  LOWLAT_DEVICE static void load_tokens(Shared& shared, const Tokens& tokens) {
    constexpr int kScalePieces = kTokens / 4, kOfGroup = kSteps * kScalePieces;
    const int group = group_idx();
    for (int i = thread_of_group(); i < kOfGroup; i += kGroupThreads) {
      const int step = group * kSteps + i / kScalePieces, token = i % kScalePieces * 4;
      if (token < tokens.padded) {
        copy_16(&shared.token_scale[step][token], tokens.scale + step * tokens.padded + token);
      }
    }
#pragma unroll 1
    for (int number = 0; number < kSlots; ++number) load_chunk(shared, tokens, number);
  }

  // The block's part of all sums goes to the owners' `owned`. All threads of the cluster call,
  // after load() and load_tokens(). On return the owned sums are there.
  LOWLAT_DEVICE static void run(Shared& shared, const Tokens& tokens, Stamps& stamps) {
    multiply(shared, tokens, stamps);
    if (kBlocks > 1) sm90::cluster_wait();  // the others run: all have arrived
    send_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch>(
        reinterpret_cast<const float*>(shared.tokens), owned_of(shared).sums, &shared.owned_barrier,
        tokens.num_rows, 0);
    stamps.mark(StampStage::compute);
    wait_for_sums<kRows, kBlocks, kOwned>(&shared.owned_barrier);
    stamps.mark(StampStage::sum);
  }

  // The sum of an owned row, after run().
  LOWLAT_DEVICE static float sum(Shared& shared, int token, int owned_row) {
    const Owned& owned = owned_of(shared);
    float total = owned.sums[0][token][owned_row];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) total += owned.sums[i][token][owned_row];
    return total;
  }

 private:
  static constexpr int kGroupThreads = kWarpsAPart * plat::kWarpLanes;
  LOWLAT_DEVICE static int group_idx() { return plat::thread_idx() / kGroupThreads; }
  LOWLAT_DEVICE static int thread_of_group() { return plat::thread_idx() % kGroupThreads; }
  LOWLAT_DEVICE static void sync_group() {
    static_assert(kParts == 2);
    if (group_idx() == 0) {
      asm volatile("bar.sync 1, %0;" ::"n"(kGroupThreads) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(kGroupThreads) : "memory");
    }
  }
  // The chunk of K that a block takes as its number `number`.
  LOWLAT_DEVICE static int chunk_of(int number) {
    return (static_cast<int>(blockIdx.x) / kBlocks + number) % kChunks;
  }
  LOWLAT_DEVICE static unsigned char* slot_of(Shared& shared, int number) {
    return shared.tokens + (group_idx() * kSlots + number % kSlots) * (kTokens * kChunkBytes);
  }

  // Asks for a chunk of the warp group's K, as one group of copies.
  LOWLAT_DEVICE static void load_chunk(Shared& shared, const Tokens& tokens, int number) {
    const int warp_idx = thread_of_group() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    // A warp takes 64 bytes of eight tokens at a time: eight lanes store 128 bytes in a row.
    constexpr int kAll = kTiles * (kChunkBytes / 64);
    unsigned char* const slot = slot_of(shared, number);
    const std::uint8_t* const from =
        tokens.values + (group_idx() * kChunks + chunk_of(number)) * kChunkBytes;
#pragma unroll 1
    for (int i = warp_idx; i < kAll; i += kWarpsAPart) {
      const int tile = i % kTiles, token = tile * kTileTokens + lane_idx % 8;
      const int byte = i / kTiles * 64 + lane_idx / 8 * 16;
      if (token < tokens.num_rows) {
        copy_16(slot + tile * kPitch + byte * 8 + lane_idx % 8 * 16,
                from + static_cast<std::int64_t>(token) * tokens.stride + byte);
      }
    }
    commit_copies();
  }

  // The warp groups' sums, in the place of the tokens.
  LOWLAT_DEVICE static void multiply(Shared& shared, const Tokens& tokens, Stamps& stamps) {
    const int warp = thread_of_group() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    const int g = lane_idx / 4, t = lane_idx % 4;
    float sum[4 * kTiles] = {};
    const unsigned char* const rows =
        shared.weights + (warp * 16 + g) * kWeightPitch + (kHalves ? 2 : 4) * t;
    const float* const weight_scales = shared.scale[warp * kScaleRows / kWarpsAPart];
    wait_for_weights(&shared.barrier, 0);
#pragma unroll 1
    for (int number = 0; number < kChunks; ++number) {
      wait_for_copies_but<kSlots - 1>();
      sm90::fence_async_shared();
      sync_group();
      if (number == 0) stamps.mark(StampStage::read);
      const int first = group_idx() * kSteps + chunk_of(number) * kChunkSteps;
      const sm90::CodeColumns b = sm90::code_columns(slot_of(shared, number), kPitch);
#pragma unroll 1
      for (int step = 0; step < kChunkSteps; step += kAhead) {
        multiply_steps(sum, rows + (first + step) * kGroup, b + step * kGroup * kBytes,
                       weight_scales + first + step, shared.token_scale[first + step] + 2 * t);
      }
      if constexpr (kSlots < kChunks) {
        if (number + kSlots < kChunks) {
          sync_group();  // the slot's values are used up
          load_chunk(shared, tokens, number + kSlots);
          continue;
        }
      }
      commit_copies();  // of none, so that each turn has a group
    }
    plat::block_sync();  // the tokens' values are used up
    float* partial = reinterpret_cast<float*>(shared.tokens);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to =
          partial + (group_idx() * kTokens + n * kTileTokens + 2 * t) * kSumPitch + warp * 16 + g;
      to[0] = sum[4 * n];
      to[kSumPitch] = sum[4 * n + 1];
      to[8] = sum[4 * n + 2];
      to[kSumPitch + 8] = sum[4 * n + 3];
    }
    plat::block_sync();
  }

  // kAhead steps: a weight row's codes from `row` on, columns `b`, and both sides' scales.
  LOWLAT_DEVICE static void multiply_steps(float (&sum)[4 * kTiles], const unsigned char* row,
                                           sm90::CodeColumns b, const float* weight_scale,
                                           const float* token_scale) {
    constexpr int kFragments = kStepsAGroup * kBytes;  // of a group
    constexpr int kDepth = kStep / kBytes;             // of a fragment
    float part[kAhead][4 * kTiles] = {};
    std::uint32_t a[kAhead * kFragments][4];
#pragma unroll
    for (int i = 0; i < kAhead * kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[i][j] = fragment(row + i * kDepth + j % 2 * 8 * kWeightPitch + j / 2 * (kDepth / 2));
      }
    }
    sm90::codes_fence();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const sm90::CodeColumns columns = b + i * kGroup * kBytes;
#pragma unroll
      for (int k = 0; k < kFragments; ++k) {
        const auto& rows = a[i * kFragments + k];
        if (k == 0) {
          multiply_fragment<false>(part[i], rows, columns);
        } else {
          multiply_fragment<true>(part[i], rows, columns + k * kStep);
        }
      }
    }
    sm90::codes_commit();
    sm90::codes_wait();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float own = weight_scale[i];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 two =
            *reinterpret_cast<const float2*>(token_scale + i * kTokens + n * kTileTokens);
        const float low = own * two.x, high = own * two.y;
        sum[4 * n] = plat::fma(part[i][4 * n], low, sum[4 * n]);
        sum[4 * n + 1] = plat::fma(part[i][4 * n + 1], high, sum[4 * n + 1]);
        sum[4 * n + 2] = plat::fma(part[i][4 * n + 2], low, sum[4 * n + 2]);
        sum[4 * n + 3] = plat::fma(part[i][4 * n + 3], high, sum[4 * n + 3]);
      }
    }
  }
  // A lane's part of a weight row: four codes, or two as f16.
  LOWLAT_DEVICE static std::uint32_t fragment(const unsigned char* from) {
    if constexpr (kHalves) {
      return sm90::e4m3_pair_to_f16(*reinterpret_cast<const std::uint16_t*>(from));
    } else {
      return *reinterpret_cast<const std::uint32_t*>(from);
    }
  }
  template <bool kAdd>
  LOWLAT_DEVICE static void multiply_fragment(float (&sum)[4 * kTiles],
                                              const std::uint32_t (&rows)[4],
                                              sm90::CodeColumns columns) {
    if constexpr (kHalves) {
      sm90::multiply_halves<kTiles, kAdd>(sum, rows, columns);
    } else {
      sm90::multiply_codes<kTiles, kAdd>(sum, rows, columns);
    }
  }
  LOWLAT_DEVICE static Owned& owned_of(Shared& shared) {
    if constexpr (kBlocks > 1) {
      return shared.owned;
    } else {
      return *reinterpret_cast<Owned*>(shared.weights);
    }
  }
};

}  // namespace lowlat::nvidia::fused
