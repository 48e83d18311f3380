// fused/index_pick.cuh: the best k of a row's scores by one block that has them in shared memory.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/stamps.cuh"
#include "stages/select.hpp"

namespace lowlat::nvidia::fused {

// What stages::score_order came from.
LOWLAT_DEVICE float score_of(std::uint32_t order) {
  return plat::bits_float((order & 0x8000'0000u) != 0u ? order ^ 0x8000'0000u : ~order);
}

// The sum of the lanes before this one.
LOWLAT_DEVICE std::uint32_t lanes_before(std::uint32_t own, int lane_idx) {
  std::uint32_t sum = own;
#pragma unroll
  for (int distance = 1; distance < plat::kWarpLanes; distance *= 2) {
    const std::uint32_t before = __shfl_up_sync(plat::kAllLanes, sum, distance);
    if (lane_idx >= distance) sum += before;
  }
  return sum - own;
}

// The k best of up to kMost scores, the lower number first among equals: a histogram of equal steps
// of the score finds the step where the k-th is; commonly a handful of scores are in it, and each
// warp ranks those. If it has more than 32, it is divided again. A thread has every kThreads-th
// score, so that a warp's ballots say where what it takes is placed. Loops over shared memory and
// not over registers, so that the code is short: it runs once.
template <int kThreads, int kMost, int kMostTaken>
struct Pick {
  static constexpr int kWarps = kThreads / plat::kWarpLanes, kBins = 2 * kThreads;
  static constexpr int kBinsOfWarp = kBins / kWarps;
  static constexpr int kTogether = 2;  // scores of a thread in a turn of a loop
  static constexpr int kTurn = kTogether * kThreads;
  static constexpr int kTurns = (kMost + kTurn - 1) / kTurn;
  static_assert(kWarps <= plat::kWarpLanes && kWarps % 4 == 0);
  static_assert(kTurns * kTogether <= plat::kWarpLanes);

  struct Shared {
    alignas(16) float score[kTurns * kTurn];
    alignas(16) std::uint32_t bins[kBins];
    alignas(16) std::uint8_t counts[kTurns * kTogether][kWarps];  // of what is taken for sure
    std::uint32_t low[kWarps], high[kWarps], sums[kWarps];
    // Of the bin where the threshold is: scores and their numbers.
    float list[plat::kWarpLanes];
    std::int32_t list_number[plat::kWarpLanes];
    std::uint32_t listed;
    std::int32_t last_tie;
    std::int32_t picked[kMostTaken];
  };

  // Before run(), with a barrier of the block between. All threads call.
  LOWLAT_DEVICE static void clear(Shared& shared) {
    *reinterpret_cast<uint2*>(shared.bins + 2 * plat::thread_idx()) = make_uint2(0u, 0u);
    if (plat::thread_idx() == 0) shared.listed = 0u;
  }

  // shared.picked: ascending numbers of the k best of n > k in shared.score, behind a barrier. All
  // threads call; ends with a barrier.
  LOWLAT_DEVICE static void run(Shared& shared, int n, int k, Stamps& stamps) {
    const int thread_idx = plat::thread_idx();
    const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
    // visit(i, number) of a thread's scores, some of them behind the last. Whole warps go through.
    const auto visit_all = [&](auto visit) {
#pragma unroll 1
      for (int i = 0; i * kThreads < n; i += kTogether) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) visit(i + j, (i + j) * kThreads + thread_idx);
      }
    };
    // NaN: none (a NaN that comes counts as -infinity).
    float most = -INFINITY, least = INFINITY;
    visit_all([&](int, int number) {
      float v = shared.score[number];
      if (number >= n || v != v) {
        v = number < n ? -INFINITY : NAN;
        shared.score[number] = v;
      }
      most = fmaxf(most, v);
      least = fminf(least, v);
    });
    // Every thread's largest is one of kThreads scores that are not below the least of them.
    float high = most, low = n >= kThreads && k <= kThreads ? most : least;
    const auto bounds_of_block = [&] {
      const std::uint32_t lower = __reduce_min_sync(plat::kAllLanes, stages::score_order(low));
      const std::uint32_t upper = __reduce_max_sync(plat::kAllLanes, stages::score_order(high));
      if (lane_idx == 0) shared.low[warp_idx] = lower, shared.high[warp_idx] = upper;
      plat::block_sync();
      const int warp = lane_idx % kWarps;
      low = score_of(__reduce_min_sync(plat::kAllLanes, shared.low[warp]));
      high = score_of(__reduce_max_sync(plat::kAllLanes, shared.high[warp]));
    };
    bounds_of_block();
    stamps.mark(StampStage::read);

    auto missing = static_cast<std::uint32_t>(k);
    int bin = 0;
    bool ties = false;  // those of the bin are equal and many
    float per_score = 0.0f;
    // Where bounds are infinite, or a range overflows, the lowest score's bin is the first one and
    // all others' the last (a product that is NaN becomes 0).
    const auto inside = [&](float v) {
      return min(__float2int_rz((v - low) * per_score), kBins - 1);
    };
#pragma unroll 1
    for (;;) {
      per_score = static_cast<float>(kBins) / (high - low);
      if (!(per_score > 0.0f && per_score < 3e38f)) per_score = INFINITY;
      visit_all([&](int, int number) {
        const float v = shared.score[number];
        if (v >= low && v <= high) atomicAdd_block(&shared.bins[inside(v)], 1u);
      });
      plat::block_sync();
      // Warps and lanes count from the top.
      const int first = kBins - kBinsOfWarp * (warp_idx + 1);
      const std::uint32_t sum = __reduce_add_sync(
          plat::kAllLanes, shared.bins[first + lane_idx] + shared.bins[first + 32 + lane_idx]);
      if (lane_idx == 0) shared.sums[warp_idx] = sum;
      plat::block_sync();
      std::uint32_t count = lane_idx < kWarps ? shared.sums[lane_idx] : 0u;
      std::uint32_t before = lanes_before(count, lane_idx);
      int found = __ffs(static_cast<int>(__ballot_sync(
                      plat::kAllLanes, before < missing && missing <= before + count))) -
                  1;
      missing -= __shfl_sync(plat::kAllLanes, before, found);
      const int top = kBins - 1 - kBinsOfWarp * found;
      const std::uint32_t upper = shared.bins[top - 2 * lane_idx];
      const std::uint32_t lower = shared.bins[top - 2 * lane_idx - 1];
      count = upper + lower;
      before = lanes_before(count, lane_idx);
      found = __ffs(static_cast<int>(
                  __ballot_sync(plat::kAllLanes, before < missing && missing <= before + count))) -
              1;
      const bool is_upper = missing <= before + upper;
      const std::uint32_t here = __shfl_sync(plat::kAllLanes, is_upper ? upper : lower, found);
      bin = __shfl_sync(plat::kAllLanes, top - 2 * lane_idx - (is_upper ? 0 : 1), found);
      missing -= __shfl_sync(plat::kAllLanes, is_upper ? before : before + upper, found);
      if (here <= static_cast<std::uint32_t>(plat::kWarpLanes)) break;
      // The bin is divided again, unless all of it is one score.
      float bin_low = INFINITY, bin_high = -INFINITY;
      visit_all([&](int, int number) {
        const float v = shared.score[number];
        if (v >= low && v <= high && inside(v) == bin) {
          bin_low = fminf(bin_low, v);
          bin_high = fmaxf(bin_high, v);
        }
      });
      plat::block_sync();  // bins and bounds have been read
      *reinterpret_cast<uint2*>(shared.bins + 2 * thread_idx) = make_uint2(0u, 0u);
      low = bin_low, high = bin_high;
      bounds_of_block();
      ties = low == high;
      if (ties) break;
    }
    stamps.mark(StampStage::compute);

    // The last one taken, by score and number: `last` and `last_number`.
    float last = low;
    int last_number = 0;
    const auto is_taken = [&](float v, int number) {
      return v > last || (v == last && number <= last_number);
    };
    // counts[i][warp] of counts_as(score, number), whole warps.
    const auto count_all = [&](auto counts_as) {
      visit_all([&](int i, int number) {
        const std::uint32_t all =
            __ballot_sync(plat::kAllLanes, counts_as(shared.score[number], number));
        if (lane_idx == 0) shared.counts[i][warp_idx] = static_cast<std::uint8_t>(__popc(all));
      });
    };
    // Of lane i: how many the warps before have in number i, and all in the numbers before i.
    const auto counted_before = [&] {
      std::uint32_t sum = 0, part = 0;
      const bool has = lane_idx < (n + kTurn - 1) / kTurn * kTogether;
#pragma unroll
      for (int j = 0; j < kWarps / 4; ++j) {
        const std::uint32_t four =
            has ? *reinterpret_cast<const std::uint32_t*>(&shared.counts[lane_idx][4 * j]) : 0u;
        sum = __dp4a(four, 0x0101'0101u, sum);
        const int bytes = min(max(warp_idx - 4 * j, 0), 4);
        const std::uint32_t mask = bytes == 4 ? ~0u : (1u << 8 * bytes) - 1u;
        part = __dp4a(four & mask, 0x0101'0101u, part);
      }
      return lanes_before(sum, lane_idx) + part;
    };
    const std::uint32_t lanes_below = (1u << lane_idx) - 1u;
    constexpr int kNone = 0x7fff'ffff;
    int member = kNone;  // of a lane: the number of one of the bin that is taken
    std::uint32_t base;
    if (!ties) {
      count_all([&](float v, int number) {
        const int of = v > high ? kBins : v >= low ? inside(v) : -1;
        if (of == bin) {
          const std::uint32_t at = atomicAdd_block(&shared.listed, 1u);
          shared.list[at] = v;
          shared.list_number[at] = number;
        }
        return of > bin;
      });
      plat::block_sync();
      base = counted_before();
      const int listed = static_cast<int>(shared.listed);
      const float score = lane_idx < listed ? shared.list[lane_idx] : NAN;
      const int number = lane_idx < listed ? shared.list_number[lane_idx] : kNone;
      std::uint32_t rank = lane_idx < listed ? 0u : ~0u;
#pragma unroll 1
      for (int i = 0; i < listed; ++i) {
        const float other = __shfl_sync(plat::kAllLanes, score, i);
        const int other_number = __shfl_sync(plat::kAllLanes, number, i);
        if (other > score || (other == score && other_number < number)) ++rank;
      }
      if (rank < missing) member = number;
      const int lane =
          __ffs(static_cast<int>(__ballot_sync(plat::kAllLanes, rank + 1u == missing))) - 1;
      last = __shfl_sync(plat::kAllLanes, score, lane);
      last_number = __shfl_sync(plat::kAllLanes, number, lane);
    } else {
      count_all([&](float v, int) { return v == last; });
      plat::block_sync();
      base = counted_before();
      visit_all([&](int i, int number) {
        const bool is_tie = shared.score[number] == last;
        const std::uint32_t equal = __ballot_sync(plat::kAllLanes, is_tie);
        const std::uint32_t place = __shfl_sync(plat::kAllLanes, base, i) +
                                    static_cast<std::uint32_t>(__popc(equal & lanes_below));
        if (is_tie && place + 1u == missing) shared.last_tie = number;
      });
      plat::block_sync();
      last_number = shared.last_tie;
      count_all(is_taken);
      plat::block_sync();
      base = counted_before();
    }
    stamps.mark(StampStage::sum);
    visit_all([&](int i, int number) {
      const bool taken = is_taken(shared.score[number], number);
      const std::uint32_t all = __ballot_sync(plat::kAllLanes, taken);
      const std::uint32_t members = __ballot_sync(plat::kAllLanes, member < number - lane_idx);
      const std::uint32_t place =
          __shfl_sync(plat::kAllLanes, base, i) +
          static_cast<std::uint32_t>(__popc(members) + __popc(all & lanes_below));
      if (taken) shared.picked[place] = number;
    });
    plat::block_sync();
  }
};

}  // namespace lowlat::nvidia::fused
