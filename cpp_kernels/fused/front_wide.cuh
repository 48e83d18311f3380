// fused/front_wide.cuh: products of few rows whose weights wait in shared memory, e4m3 codes on both
// sides.
//
// A block has 64 weight rows and kK of their K and asks for all of them before its input is there.
// The warp groups split K; each makes 64 rows of all tokens by wgmma, which reads codes as they
// lie: registers hold sums alone, and the loop is short. kBlocks blocks of a cluster split the whole
// K and meet in the block that owns the row. A group of K that shares its scales is summed by
// itself and then multiplied by them, so a weight's code is never expanded.
//
// Rounding       wgmma keeps about 14 bits of a group's sum; groups are added in fp32
// Determinism    all sums have a fixed order: group, warp group, block
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>
#include <type_traits>

#include "fused/front_product.cuh"
#include "platform/nvidia_sm90_codes.cuh"

namespace lowlat::nvidia::fused {

template <int kGroup_, int kK_, int kTiles_, int kBlocks_, int kOwned_>
struct WideProduct {
  // Of K and of weight rows, that share a scale.
  static constexpr int kGroup = kGroup_;
  static constexpr int kRows = 64, kK = kK_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr int kOwned = kOwned_, kTokens = kTiles * kTileTokens;
  static constexpr int kWarpsAPart = 4, kParts = kProductWarps / kWarpsAPart;  // warp groups
  static constexpr int kScales = kK / kGroup, kSteps = kScales / kParts;
  static constexpr int kScaleRows = kRows < kGroup ? 1 : kRows / kGroup;
  static constexpr int kPitch = 8 * kK;  // bytes of eight rows
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kTokenBytes = kTokens * kK;
  static constexpr int kSumBytes = kParts * kTokens * kSumPitch * 4;
  static constexpr int ahead() {
    int count = kSteps;
    while (kSteps % count != 0 || 4 * kTiles * count > 48) --count;
    return count;
  }
  static constexpr int kAhead = ahead();
  static_assert(kGroup % kStep == 0 && kK % (kGroup * kParts) == 0);
  static_assert(kOwned % 4 == 0 && kOwned * kBlocks == kRows);

  // Written by each block of the cluster. A block that owns all its rows has it over the weights.
  struct Owned {
    float sums[kBlocks][kTokens][kOwned];
  };
  struct Nothing {};
  static_assert(kBlocks > 1 || sizeof(Owned) <= kRows * kK);

  struct Shared {
    alignas(128) unsigned char weights[kRows * kK];
    // Codes, then, when they are used up, the warp groups' sums [group][token][row].
    alignas(128) unsigned char tokens[kTokenBytes > kSumBytes ? kTokenBytes : kSumBytes];
    alignas(16) std::conditional_t<(kBlocks > 1), Owned, Nothing> owned;
    alignas(16) float token_scale[kScales][kTokens];
    float scale[kScaleRows][kScales];
    std::uint64_t owned_barrier;  // of what the cluster sends
  };

  // Where a token's 16 codes from k on lie.
  LOWLAT_DEVICE static unsigned char* token_codes(Shared& shared, int token, int k) {
    return shared.tokens + token / 8 * kPitch + k * 8 + token % 8 * 16;
  }

  // Asks for the weights and tells the cluster that this block runs. All threads call.
  LOWLAT_DEVICE static void load(Shared& shared, const ProductWeights& weights, int num_rows) {
    const int thread_idx = plat::thread_idx();
    if (thread_idx == 0) {
      sm90::barrier_init(&shared.owned_barrier, 1);
      sm90::fence_barrier_init();
      if (kBlocks > 1) {
        sm90::barrier_arrive_expect(&shared.owned_barrier, kBlocks * kOwned * num_rows * 4);
      }
    }
    if constexpr (kBlocks > 1) {
      plat::block_sync();
      sm90::cluster_arrive_relaxed();
    }
    // A warp has eight rows: its lanes take four pieces of 16 codes of each.
    static_assert(kRows == 8 * kProductWarps);
    const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
    const std::uint8_t* from =
        weights.codes + (warp_idx * 8 + lane_idx % 8) * weights.stride + lane_idx / 8 * 16;
    unsigned char* to = shared.weights + warp_idx * kPitch + lane_idx / 8 * 128 + lane_idx % 8 * 16;
#pragma unroll 4
    for (int k = 0; k < kK; k += 64) copy_16(to + 8 * k, from + k);
    for (int i = thread_idx; i < kScaleRows * kScales; i += kProductThreads) {
      const int row = i / kScales, step = i % kScales;
      shared.scale[row][step] =
          stages::from_ue8m0(__ldg(weights.scales + row * weights.scale_stride + step));
    }
  }

  // Copies codes [token, stride] and scales [kK / kGroup, padded] from their block's first K on. All
  // threads call; run() waits for them.
  LOWLAT_DEVICE static void load_tokens(Shared& shared, const std::uint8_t* codes, int stride,
                                        const float* scale, int padded, int num_rows) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    constexpr int kQuads = kK / 64;
#pragma unroll 4
    for (int i = warp_idx; i < kTiles * kQuads; i += kProductWarps) {
      const int token = i % kTiles * 8 + lane_idx % 8, k = i / kTiles * 64 + lane_idx / 8 * 16;
      if (token < num_rows) {
        copy_16(token_codes(shared, token, k),
                codes + static_cast<std::int64_t>(token) * stride + k);
      }
    }
    constexpr int kScalePieces = kTokens / 4;
    for (int i = plat::thread_idx(); i < kScales * kScalePieces; i += kProductThreads) {
      const int group = i / kScalePieces, token = i % kScalePieces * 4;
      if (token < padded) {
        copy_16(&shared.token_scale[group][token], scale + group * padded + token);
      }
    }
  }

  // The block's part of all sums goes to the owners' `owned`. All threads of the cluster call,
  // after load() and the tokens; on return the owned sums are there.
  LOWLAT_DEVICE static void run(Shared& shared, int num_rows, Stamps& stamps) {
    wait_for_copies();
    sm90::fence_async_shared();
    plat::block_sync();
    stamps.mark(StampStage::read);
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    const int group = warp_idx / kWarpsAPart, warp = warp_idx % kWarpsAPart;
    const int g = lane_idx / 4, t = lane_idx % 4;
    float sum[4 * kTiles] = {};
    const int first = group * kSteps;
    const sm90::CodeRows a = sm90::code_rows(shared.weights, kPitch) + first * kGroup;
    const sm90::CodeRows b = sm90::code_rows(shared.tokens, kPitch) + first * kGroup;
    const float* weight_scale = shared.scale[warp * kScaleRows / kWarpsAPart] + first;
    const auto add = [&](const float (&part)[4 * kTiles], int step) {
      const float own = weight_scale[step];
      const float* scales = shared.token_scale[first + step] + 2 * t;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 two = *reinterpret_cast<const float2*>(scales + n * kTileTokens);
        const float low = own * two.x, high = own * two.y;
        sum[4 * n] = plat::fma(part[4 * n], low, sum[4 * n]);
        sum[4 * n + 1] = plat::fma(part[4 * n + 1], high, sum[4 * n + 1]);
        sum[4 * n + 2] = plat::fma(part[4 * n + 2], low, sum[4 * n + 2]);
        sum[4 * n + 3] = plat::fma(part[4 * n + 3], high, sum[4 * n + 3]);
      }
    };
    // As many products under way as there are registers for.
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kAhead) {
      float part[kAhead][4 * kTiles] = {};
      sm90::codes_fence();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        multiply_group(part[i], a + (step + i) * kGroup, b + (step + i) * kGroup);
      }
      sm90::codes_commit();
      sm90::codes_wait();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add(part[i], step + i);
    }
    plat::block_sync();  // the tokens' codes are used up
    float* partial = reinterpret_cast<float*>(shared.tokens);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = partial + (group * kTokens + n * kTileTokens + 2 * t) * kSumPitch + warp * 16 + g;
      to[0] = sum[4 * n];
      to[kSumPitch] = sum[4 * n + 1];
      to[8] = sum[4 * n + 2];
      to[kSumPitch + 8] = sum[4 * n + 3];
    }
    plat::block_sync();
    stamps.mark(StampStage::compute);
    hand_over_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch>(
        partial, owned_of(shared).sums, &shared.owned_barrier, num_rows);
    stamps.mark(StampStage::sum);
  }

  LOWLAT_DEVICE static void multiply_group(float (&sum)[4 * kTiles], sm90::CodeRows a,
                                           sm90::CodeRows b) {
    sm90::multiply_codes<kTiles, false>(sum, a, b);
#pragma unroll
    for (int k = kStep; k < kGroup; k += kStep) {
      sm90::multiply_codes<kTiles, true>(sum, a + k, b + k);
    }
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
  LOWLAT_DEVICE static Owned& owned_of(Shared& shared) {
    if constexpr (kBlocks > 1) {
      return shared.owned;
    } else {
      return *reinterpret_cast<Owned*>(shared.weights);
    }
  }
};

}  // namespace lowlat::nvidia::fused
