// fused/front_tall.cuh: products of more than sixteen rows with 128 or 64 weight rows a block,
// tokens of f16 values (kBytes 2) or e4m3 codes (1) under scales of 128 values and e4m3 weights, by
// mma.
//
// A block has kRows weight rows and kK of their K and asks for all of them before its input is
// there. A warp has sixteen of the rows, all of the block's K and all tokens, so that a weight is
// expanded once and the block has no sums of warps to add; of 64 rows two warps have the halves of
// each group of K. Tokens come in chunks of one group of K, in a ring of kSlots; blocks that want
// the same tokens begin at different chunks. kBlocks blocks of a cluster split the whole K and meet
// in the block that owns the row.
//
// Two blocks have room on a multiprocessor: clusters of eight that have one each do not all fit, as
// parts of the chip with fewer than sixteen multiprocessors hold one.
//
// Determinism    all sums have an order that the block's number fixes: group, block
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/front_product.cuh"

namespace lowlat::nvidia::fused {

template <int kGroup_, int kRows_, int kK_, int kTiles_, int kBlocks_, int kSlots_, int kBytes_ = 2>
struct TallProduct {
  static constexpr int kThreads = kProductThreads;
  static constexpr int kGroup = kGroup_, kRows = kRows_, kK = kK_, kTiles = kTiles_;
  static constexpr int kBlocks = kBlocks_, kSlots = kSlots_, kOwned = kRows / kBlocks;
  static constexpr int kTokens = kTiles * kTileTokens, kChunks = kK / kGroup;
  // As Product's, and so are those of codes; f16 tokens' pieces of 16 bytes change places instead,
  // see piece_place.
  static constexpr int kWeightPitch = kK + 32;
  static constexpr int kBytes = kBytes_;               // of a token's value
  static constexpr int kTokenBytes = kBytes * kGroup;  // of its chunk
  static constexpr int kTokenPitch = kBytes == 1 ? kTokenBytes + 32 : kTokenBytes;
  static_assert(kBytes == 1 || kBytes == 2);
  static constexpr int kSumPitch = kRows + 4;
  // Warps side by side, and parts of a group's K.
  static constexpr int kRowWarps = kRows / 16, kParts = kProductWarps / kRowWarps;
  static constexpr int kSteps = kGroup / kStep / kParts;  // of a warp, a group
  static_assert(kRowWarps * kParts == kProductWarps && kSteps * kParts * kStep == kGroup);
  static_assert(kRows % 16 == 0 && kGroup % kRows == 0 && kK % kGroup == 0);
  static_assert(kSlots <= kChunks && kOwned % 4 == 0);

  struct Shared {
    union {
      alignas(128) unsigned char weights[kRows * kWeightPitch];
      // When they are used up.
      alignas(16) float sums[kParts][kTokens][kSumPitch];
    };
    union {
      alignas(128) unsigned char tokens[kSlots][kTokens * kTokenPitch];
      // When all blocks of the cluster have used theirs up.
      alignas(16) float owned[kBlocks][kTokens][kOwned];
    };
    alignas(16) float token_scale[kChunks][kTokens];
    float scale[kChunks];
    std::uint64_t barrier;        // of the weights
    std::uint64_t owned_barrier;  // of what the cluster sends
  };

  using Tokens = StoredTokens;

  // Asks for the weights, whose rows share their scales. All threads call.
  LOWLAT_DEVICE static void load(Shared& shared, const ProductWeights& weights, int num_rows) {
    const int thread_idx = plat::thread_idx();
    if (thread_idx == 0) {
      sm90::barrier_init(&shared.barrier, 1);
      sm90::barrier_init(&shared.owned_barrier, 1);
      sm90::fence_barrier_init();
      sm90::barrier_arrive_expect(&shared.barrier, kRows * kK);
      sm90::barrier_arrive_expect(&shared.owned_barrier, kBlocks * kOwned * num_rows * 4);
    }
    plat::block_sync();
    ask_for_rows<kWeightPitch, kProductWarps>(
        shared.weights, kRows, kK, &shared.barrier, 0,
        [&](int row) { return weights.codes + row * weights.stride; });
    if (thread_idx < kChunks) {
      shared.scale[thread_idx] = stages::from_ue8m0(__ldg(weights.scales + thread_idx));
    }
  }

  // Asks for the first chunks. All threads call; run() waits for them.
  LOWLAT_DEVICE static void load_tokens(Shared& shared, const Tokens& tokens) {
    constexpr int kScalePieces = kTokens / 4;
    for (int i = plat::thread_idx(); i < kChunks * kScalePieces; i += kProductThreads) {
      const int group = i / kScalePieces, token = i % kScalePieces * 4;
      if (token < tokens.padded) {
        copy_16(&shared.token_scale[group][token], tokens.scale + group * tokens.padded + token);
      }
    }
#pragma unroll 1
    for (int number = 0; number < kSlots; ++number) load_chunk(shared, tokens, number);
  }

  // The block's part of all sums goes to the owners' `owned`. All threads of the cluster call,
  // after load() and load_tokens(). On return the owned sums are there.
  LOWLAT_DEVICE static void run(Shared& shared, const Tokens& tokens, Stamps& stamps) {
    multiply(shared, tokens, stamps);
    stamps.mark(StampStage::compute);
    sm90::cluster_wait();
    send_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch>(
        shared.sums[0][0], shared.owned, &shared.owned_barrier, tokens.num_rows, 0);
    wait_for_sums<kRows, kBlocks, kOwned>(&shared.owned_barrier);
    stamps.mark(StampStage::sum);
  }

  // The sum of an owned row, after run().
  LOWLAT_DEVICE static float sum(const Shared& shared, int token, int owned_row) {
    return owned_sum(shared.owned, token, owned_row);
  }

 private:
  // The chunk of K that a block takes as its number `number`.
  LOWLAT_DEVICE static int chunk_of(int number) {
    return (static_cast<int>(blockIdx.x) / kBlocks + number) % kChunks;
  }
  // Of an odd token of f16 values the halves of 128 bytes change places, so that two tokens and
  // four pieces lie in all banks.
  LOWLAT_DEVICE static int piece_place(int token, int piece) {
    return kBytes == 1 ? piece : piece ^ (token & 1) << 2;
  }

  // Asks for a chunk, as one group of copies.
  LOWLAT_DEVICE static void load_chunk(Shared& shared, const Tokens& tokens, int number) {
    constexpr int kPieces = kTokenBytes / 16;
    unsigned char* const slot = shared.tokens[number % kSlots];
    const std::uint8_t* const from = tokens.values + chunk_of(number) * kTokenBytes;
#pragma unroll 1
    for (int i = plat::thread_idx(); i < tokens.num_rows * kPieces; i += kProductThreads) {
      const int token = i / kPieces, piece = i % kPieces;
      copy_16(slot + token * kTokenPitch + 16 * piece_place(token, piece),
              from + static_cast<std::int64_t>(token) * tokens.stride + 16 * piece);
    }
    commit_copies();
  }

  // The block's sums, in the place of the weights.
  LOWLAT_DEVICE static void multiply(Shared& shared, const Tokens& tokens, Stamps& stamps) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    const int g = lane_idx / 4, t = lane_idx % 4;
    const int row_tile = warp_idx % kRowWarps, part_idx = warp_idx / kRowWarps;
    const int first_k = part_idx * kSteps * kStep;  // in a group
    const unsigned char* const rows =
        shared.weights + (row_tile * 16 + g) * kWeightPitch + first_k + 8 * t;
    float sum[kTiles][4] = {};
    wait_for_weights(&shared.barrier, 0);
#pragma unroll 1
    for (int number = 0; number < kChunks; ++number) {
      wait_for_copies_but<kSlots - 1>();
      plat::block_sync();
      if (number == 0) stamps.mark(StampStage::read);
      const int group = chunk_of(number);
      const unsigned char* const row = rows + group * kGroup;
      const unsigned char* const column = shared.tokens[number % kSlots] + g * kTokenPitch;
      float part[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 low = *reinterpret_cast<const uint2*>(row + step * kStep);
        const uint2 high = *reinterpret_cast<const uint2*>(row + 8 * kWeightPitch + step * kStep);
        std::uint32_t a[2][4];
        place_codes(a[0], low.x, high.x);
        place_codes(a[1], low.y, high.y);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const unsigned char* const eight = column + n * kTileTokens * kTokenPitch;
          std::uint32_t b[4];
          if constexpr (kBytes == 1) {
            CodeActivations<kGroup, true>::expand(
                b, *reinterpret_cast<const uint2*>(eight + first_k + step * kStep + 8 * t));
          } else {
            HalfActivations<kGroup, true>::expand(
                b, *reinterpret_cast<const uint4*>(
                       eight + 16 * piece_place(g, (first_k + step * kStep) / 8 + t)));
          }
          sm90::mma_f16(part[n], a[0], b[0], b[1]);
          sm90::mma_f16(part[n], a[1], b[2], b[3]);
        }
      }
      const float own = shared.scale[group];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 two =
            *reinterpret_cast<const float2*>(&shared.token_scale[group][n * kTileTokens + 2 * t]);
        const float even = own * two.x, odd = own * two.y;
        sum[n][0] = plat::fma(part[n][0], even, sum[n][0]);
        sum[n][1] = plat::fma(part[n][1], odd, sum[n][1]);
        sum[n][2] = plat::fma(part[n][2], even, sum[n][2]);
        sum[n][3] = plat::fma(part[n][3], odd, sum[n][3]);
      }
      if constexpr (kSlots < kChunks) {
        if (number + kSlots < kChunks) {
          plat::block_sync();  // the slot's values are used up
          load_chunk(shared, tokens, number + kSlots);
          continue;
        }
      }
      commit_copies();  // of none, so that each turn has a group
    }
    plat::block_sync();  // weights and tokens are used up
    sm90::cluster_arrive_relaxed();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = &shared.sums[part_idx][n * kTileTokens + 2 * t][row_tile * 16 + g];
      to[0] = sum[n][0];
      to[kSumPitch] = sum[n][1];
      to[8] = sum[n][2];
      to[kSumPitch + 8] = sum[n][3];
    }
    plat::block_sync();
  }
};

}  // namespace lowlat::nvidia::fused
