// fused/front_wide.cuh: products of more than sixteen rows, whose weights wait in shared memory, by
// wgmma: e4m3 codes on both sides, or f16 values with them.
//
// A block has 64 weight rows and kK of their K and asks for all of them before its input is there.
// The warp groups split K; each makes 64 rows of all tokens, so that few registers hold sums, two
// warp groups' sums and not eight warps' are added, and the loop is short. kBlocks blocks of a
// cluster split the whole K and meet in the block that owns the row. A group of K that shares its
// scales is summed by itself and then multiplied by them.
//
// Weights come by bulk copies and go to wgmma from registers. Copied by cp.async into the form that
// wgmma reads from shared memory, they took the multiprocessor's loads from the kernels that still
// ran there: 8 us a layer.
//
// Rounding       of codes wgmma keeps about 14 bits of a group's sum; groups are added in fp32
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

// kHalves: the tokens are f16 values instead of codes, and a weight's code is expanded to f16 when
// it is used. kPasses: the tokens come in so many parts, one after the other, in the memory of one.
template <int kGroup_, int kK_, int kTiles_, int kBlocks_, int kOwned_, bool kHalves = false,
          int kPasses = 1>
struct WideProduct {
  // Of K and of weight rows, that share a scale.
  static constexpr int kGroup = kGroup_;
  static constexpr int kRows = 64, kK = kK_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr int kOwned = kOwned_, kTokens = kTiles * kTileTokens;
  static constexpr int kAllTokens = kPasses * kTokens;
  static constexpr int kWarpsAPart = 4, kParts = kProductWarps / kWarpsAPart;  // warp groups
  static constexpr int kScales = kK / kGroup, kSteps = kScales / kParts;
  static constexpr int kScaleRows = kRows < kGroup ? 1 : kRows / kGroup;
  static constexpr int kBytes = kHalves ? 2 : 1;  // of a token's value
  static constexpr int kPitch = 8 * kK * kBytes;  // of eight tokens
  // A row's pitch of 16 more than a multiple of 128 bytes: the words of eight rows that a warp
  // reads lie in different banks.
  static constexpr int kWeightPitch = kK + 16;
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kTokenBytes = kTokens * kK * (kHalves ? 2 : 1);
  static constexpr int kSumBytes = kParts * kTokens * kSumPitch * 4;
  static constexpr int kStepsAGroup = kGroup / kStep;
  static constexpr int ahead() {
    int count = kSteps;
    while (kSteps % count != 0 || 4 * (kTiles + kStepsAGroup * kBytes) * count > 64) --count;
    return count;
  }
  static constexpr int kAhead = ahead();
  static_assert(kGroup % kStep == 0 && kK % (kGroup * kParts) == 0);
  static_assert(kOwned % 4 == 0 && kOwned * kBlocks == kRows);

  // Written by each block of the cluster. A block that owns all its rows has it over the weights.
  struct Owned {
    float sums[kBlocks][kAllTokens][kOwned];
  };
  struct Nothing {};
  static_assert(kBlocks > 1 || (kPasses == 1 && sizeof(Owned) <= kRows * kWeightPitch));

  struct Shared {
    alignas(128) unsigned char weights[kRows * kWeightPitch];
    // Codes, then, when they are used up, the warp groups' sums [group][token][row].
    alignas(128) unsigned char tokens[kTokenBytes > kSumBytes ? kTokenBytes : kSumBytes];
    alignas(16) std::conditional_t<(kBlocks > 1), Owned, Nothing> owned;
    alignas(16) float token_scale[kScales][kAllTokens];
    float scale[kScaleRows][kScales];
    std::uint64_t barrier;        // of the weights
    std::uint64_t owned_barrier;  // of what the cluster sends
  };

  // Where a token's 16 bytes from k on lie.
  LOWLAT_DEVICE static unsigned char* token_codes(Shared& shared, int token, int k) {
    return shared.tokens + token / 8 * kPitch + k * (8 * kBytes) + token % 8 * 16;
  }

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
  }

  // Copies values [token, stride] (in bytes) and scales [kK / kGroup, padded] from their block's
  // first K on: of a pass the values, of the first also all scales. All threads call; run() waits
  // for them.
  LOWLAT_DEVICE static void load_tokens(Shared& shared, const std::uint8_t* values, int stride,
                                        const float* scale, int padded, int num_rows,
                                        int pass = 0) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    // A warp takes a line of four tokens at a time. Blocks that want the same begin at different
    // ones, so that they do not all ask the same part of the cache.
    constexpr int kLines = kK * kBytes / 128, kAll = 2 * kTiles * kLines;
    static_assert(kK * kBytes % 128 == 0);
    const int shift = static_cast<int>(blockIdx.x) / kBlocks * kProductWarps % kAll;
#pragma unroll 1
    for (int turn = warp_idx; turn < kAll; turn += kProductWarps) {
      const int i = turn + shift < kAll ? turn + shift : turn + shift - kAll;
      const int token = i % (2 * kTiles) * 4 + lane_idx / 8;
      const int byte = i / (2 * kTiles) * 128 + lane_idx % 8 * 16;
      const int row = pass * kTokens + token;
      if (row < num_rows) {
        copy_16(token_codes(shared, token, byte / kBytes),
                values + static_cast<std::int64_t>(row) * stride + byte);
      }
    }
    if (pass > 0) return;
    constexpr int kScalePieces = kAllTokens / 4;
    for (int i = plat::thread_idx(); i < kScales * kScalePieces; i += kProductThreads) {
      const int group = i / kScalePieces, token = i % kScalePieces * 4;
      if (token < padded) {
        copy_16(&shared.token_scale[group][token], scale + group * padded + token);
      }
    }
  }

  // The block's part of all sums goes to the owners' `owned`. All threads of the cluster call,
  // after load() and the tokens of the first pass; `load_pass(pass)` asks for those of the others.
  // On return the owned sums are there.
  template <class LoadPass>
  LOWLAT_DEVICE static void run(Shared& shared, int num_rows, Stamps& stamps,
                                const LoadPass& load_pass) {
#pragma unroll 1
    for (int pass = 0; pass < kPasses && pass * kTokens < num_rows; ++pass) {
      if (pass > 0) {
        plat::block_sync();  // the sums of the pass before have been read
        load_pass(pass);
      }
      wait_for_copies();
      sm90::fence_async_shared();
      plat::block_sync();
      if (pass == 0) stamps.mark(StampStage::read);
      multiply_pass(shared, pass);
      if (kBlocks > 1 && pass == 0) sm90::cluster_wait();  // the others run: all have arrived
      const int left = num_rows - pass * kTokens;
      send_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch>(
          reinterpret_cast<const float*>(shared.tokens), owned_of(shared).sums,
          &shared.owned_barrier, left < kTokens ? left : kTokens, pass * kTokens);
    }
    stamps.mark(StampStage::compute);
    wait_for_sums<kRows, kBlocks, kOwned>(&shared.owned_barrier);
    stamps.mark(StampStage::sum);
  }
  LOWLAT_DEVICE static void run(Shared& shared, int num_rows, Stamps& stamps) {
    static_assert(kPasses == 1);
    run(shared, num_rows, stamps, [](int) {});
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
  // The warp groups' sums of a pass, in the place of its tokens.
  LOWLAT_DEVICE static void multiply_pass(Shared& shared, int pass) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    const int group = warp_idx / kWarpsAPart, warp = warp_idx % kWarpsAPart;
    const int g = lane_idx / 4, t = lane_idx % 4;
    float sum[4 * kTiles] = {};
    const int first = group * kSteps;
    const unsigned char* row =
        shared.weights + (warp * 16 + g) * kWeightPitch + first * kGroup + (kHalves ? 2 : 4) * t;
    const sm90::CodeColumns b = sm90::code_columns(shared.tokens, kPitch) + first * kGroup * kBytes;
    wait_for_weights(&shared.barrier, 0);
    const float* weight_scale = shared.scale[warp * kScaleRows / kWarpsAPart] + first;
    const auto add = [&](const float (&part)[4 * kTiles], int step) {
      const float own = weight_scale[step];
      const float* scales = shared.token_scale[first + step] + pass * kTokens + 2 * t;
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
      constexpr int kFragments = kStepsAGroup * kBytes;  // of a group
      constexpr int kDepth = kStep / kBytes;             // of a fragment
      std::uint32_t a[kAhead * kFragments][4];
#pragma unroll
      for (int i = 0; i < kAhead * kFragments; ++i) {
        const unsigned char* from = row + step * kGroup + i * kDepth;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          a[i][j] = fragment(from + j % 2 * 8 * kWeightPitch + j / 2 * (kDepth / 2));
        }
      }
      sm90::codes_fence();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const sm90::CodeColumns columns = b + (step + i) * kGroup * kBytes;
#pragma unroll
        for (int k = 0; k < kFragments; ++k) {
          const auto& rows = a[i * kFragments + k];
          if (k == 0) {
            multiply<false>(part[i], rows, columns);
          } else {
            multiply<true>(part[i], rows, columns + k * kStep);
          }
        }
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
  LOWLAT_DEVICE static void multiply(float (&sum)[4 * kTiles], const std::uint32_t (&rows)[4],
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
