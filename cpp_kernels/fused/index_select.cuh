// fused/index_select.cuh: the k best of a row's numbers by one block, exactly, and where entries of
// a selection lie.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_place.cuh"
#include "stages/select.hpp"

namespace lowlat::nvidia::fused {

// What a block of kThreads_ threads selects from, kScores numbers at most. Everything loops over
// shared memory instead of registers, so that the code is short: it runs once. A thread's pieces
// of four are its own until the selection is placed.
template <int kThreads_, int kScores, int kBins_>
struct SelectShared {
  static constexpr int kThreads = kThreads_, kWarps = kThreads / plat::kWarpLanes;
  static constexpr int kStripe = 4 * kThreads;  // scores from a thread's piece of four to its next
  static constexpr int kPieces = kScores / (4 * plat::kWarpLanes);  // of a warp
  static constexpr int kPiecesOfLane = kPieces / plat::kWarpLanes;
  static constexpr int kBins = kBins_, kBinsOfThread = kBins / kThreads;
  static constexpr int kList = plat::kWarpLanes;
  static_assert(kWarps <= plat::kWarpLanes && kScores % kStripe == 0);
  static_assert(kPieces % plat::kWarpLanes == 0 && kBins % kThreads == 0);
  alignas(16) float score[kScores];  // NaN: none (a NaN that comes counts as -infinity)
  alignas(16) std::uint32_t bins[kBins];
  alignas(16) std::uint32_t counts[kPieces];  // above << 16 | ties, of a warp's piece
  std::uint32_t low[kWarps], high[kWarps], sums[kWarps];
  float list[kList];  // the scores of the bin where the threshold is
  std::uint32_t listed, ticket;
};

// Taken: scores above `score` and, of those equal to it, the first `ties`.
struct SelectThreshold {
  float score;
  std::uint32_t ties;
};

// What stages::score_order came from.
LOWLAT_DEVICE float score_of_order(std::uint32_t order) {
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

// visit(number, four) of a thread's pieces of n scores.
template <class Shared, class Visit>
LOWLAT_DEVICE void visit_pieces(Shared& shared, int n, Visit visit) {
#pragma unroll 1
  for (int number = 4 * plat::thread_idx(); number < n; number += Shared::kStripe) {
    visit(number, *reinterpret_cast<float4*>(shared.score + number));
  }
}
// visit(score) of those that are not below `low` nor above `high`.
template <class Shared, class Visit>
LOWLAT_DEVICE void visit_scores(Shared& shared, int n, float low, float high, Visit visit) {
  visit_pieces(shared, n, [&](int, const float4& four) {
    for (const float v : {four.x, four.y, four.z, four.w}) {
      if (v >= low && v <= high) visit(v);
    }
  });
}

// Numbers over the block: the least of `low` and the largest of `high`. Syncs.
template <class Shared>
LOWLAT_DEVICE void block_bounds(Shared& shared, float& low, float& high) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const std::uint32_t least = __reduce_min_sync(plat::kAllLanes, stages::score_order(low));
  const std::uint32_t most = __reduce_max_sync(plat::kAllLanes, stages::score_order(high));
  if (lane_idx == 0) shared.low[warp_idx] = least, shared.high[warp_idx] = most;
  plat::block_sync();
  const int warp = lane_idx % Shared::kWarps;
  low = score_of_order(__reduce_min_sync(plat::kAllLanes, shared.low[warp]));
  high = score_of_order(__reduce_max_sync(plat::kAllLanes, shared.high[warp]));
}

// Scores into shared memory; `most` and `least` are the thread's.
template <class Shared>
LOWLAT_DEVICE void load_scores(Shared& shared, const float* scores, int n, float& most,
                               float& least) {
  visit_pieces(shared, n,
               [&](int number, const float4&) { copy_16(shared.score + number, scores + number); });
  wait_for_copies();
  visit_pieces(shared, n, [&](int number, float4& four) {
    float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (v[e] != v[e]) v[e] = -INFINITY;
      if (number + e >= n) v[e] = NAN;
      most = fmaxf(most, v[e]);
      least = fminf(least, v[e]);
    }
    four = make_float4(v[0], v[1], v[2], v[3]);
  });
}
// The same of what the row's blocks have found.
template <class Shared>
LOWLAT_DEVICE void load_found(Shared& shared, const uint2* found, int n, float& most,
                              float& least) {
  visit_pieces(shared, n, [&](int number, float4& four) {
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = number + e < n ? plat::bits_float(__ldcg(&found[number + e].x)) : NAN;
      most = fmaxf(most, v[e]);
      least = fminf(least, v[e]);
    }
    four = make_float4(v[0], v[1], v[2], v[3]);
  });
}

// The threshold of the k best of n > k scores: a histogram of equal steps of the score finds
// the step where the k-th is; commonly a handful of scores are in it, and each warp ranks those. If
// it has more than 32, it is divided again. All threads of the block call.
template <class Shared>
LOWLAT_DEVICE SelectThreshold threshold_of(Shared& shared, int n, int k, float most, float least) {
  constexpr int kBins = Shared::kBins, kOfThread = Shared::kBinsOfThread;
  constexpr int kOfWarp = kOfThread * plat::kWarpLanes;
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      shared.bins[i * Shared::kThreads + plat::thread_idx()] = 0u;
    }
  };
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  // Every thread's largest is one of kThreads scores that are not below the least of them.
  float low = n >= Shared::kStripe && k <= Shared::kThreads ? most : least, high = most;
  auto missing = static_cast<std::uint32_t>(k);
  clear();
  if (thread_idx == 0) shared.listed = 0u;
  block_bounds(shared, low, high);
#pragma unroll 1
  for (;;) {
    // Infinite bounds, or a range that overflows: one bin, whose finite members are next.
    const float per_score = static_cast<float>(kBins) / (high - low);
    const bool divides = per_score > 0.0f && per_score < 3e38f;
    const auto bin_of = [&](float v) {
      return divides   ? min(static_cast<std::uint32_t>((v - low) * per_score), kBins - 1u)
             : v > low ? 1u
                       : 0u;
    };
    visit_scores(shared, n, low, high,
                 [&](float v) { atomicAdd_block(&shared.bins[bin_of(v)], 1u); });
    plat::block_sync();
    // Warps, lanes and a lane's bins count from the top.
    std::uint32_t sum = 0u;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      sum += shared.bins[kBins - kOfWarp * (warp_idx + 1) + i * plat::kWarpLanes + lane_idx];
    }
    sum = __reduce_add_sync(plat::kAllLanes, sum);
    if (lane_idx == 0) shared.sums[warp_idx] = sum;
    plat::block_sync();
    // The warp's bins, then the lane's, then the bin, where the sum reaches what is missing.
    const auto reaches = [&](std::uint32_t before, std::uint32_t own) {
      return before < missing && missing <= before + own;
    };
    std::uint32_t own = lane_idx < Shared::kWarps ? shared.sums[lane_idx] : 0u;
    std::uint32_t before = lanes_before(own, lane_idx);
    int found = __ffs(static_cast<int>(__ballot_sync(plat::kAllLanes, reaches(before, own)))) - 1;
    missing -= __shfl_sync(plat::kAllLanes, before, found);
    const int top = kBins - 1 - kOfWarp * found - kOfThread * lane_idx;
    std::uint32_t of_bin[kOfThread];
    own = 0u;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) own += of_bin[i] = shared.bins[top - i];
    before = lanes_before(own, lane_idx);
    found = __ffs(static_cast<int>(__ballot_sync(plat::kAllLanes, reaches(before, own)))) - 1;
    std::uint32_t here = 0u, bin = 0u, above = 0u;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (reaches(before, of_bin[i])) {
        here = of_bin[i], bin = static_cast<std::uint32_t>(top - i), above = before;
      }
      before += of_bin[i];
    }
    here = __shfl_sync(plat::kAllLanes, here, found);
    bin = __shfl_sync(plat::kAllLanes, bin, found);
    missing -= __shfl_sync(plat::kAllLanes, above, found);
    const bool listed = here <= static_cast<std::uint32_t>(Shared::kList);
    float bin_low = INFINITY, bin_high = -INFINITY;
    visit_scores(shared, n, low, high, [&](float v) {
      if (bin_of(v) != bin) return;
      if (listed) shared.list[atomicAdd_block(&shared.listed, 1u)] = v;
      bin_low = fminf(bin_low, v);
      bin_high = fmaxf(bin_high, v);
    });
    plat::block_sync();
    if (listed) {
      const float mine = lane_idx < static_cast<int>(here) ? shared.list[lane_idx] : NAN;
      std::uint32_t greater = 0u, equal = 0u;
#pragma unroll 1
      for (int i = 0; i < static_cast<int>(here); ++i) {
        const float other = __shfl_sync(plat::kAllLanes, mine, i);
        greater += other > mine ? 1u : 0u;
        equal += other == mine ? 1u : 0u;
      }
      const int lane = __ffs(static_cast<int>(__ballot_sync(
                           plat::kAllLanes, greater < missing && missing <= greater + equal))) -
                       1;
      return {__shfl_sync(plat::kAllLanes, mine, lane),
              missing - __shfl_sync(plat::kAllLanes, greater, lane)};
    }
    clear();
    block_bounds(shared, bin_low, bin_high);
    if (bin_low == bin_high) return {bin_low, missing};
    low = bin_low, high = bin_high;
  }
}

// put(place, number, score) for every taken score of n; places ascend with the numbers. All threads
// of the block call.
template <class Shared, class Put>
LOWLAT_DEVICE void place_selection(Shared& shared, int n, const SelectThreshold& threshold,
                                   Put put) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  // above << 16 | ties of a score.
  const auto count = [&](float v) {
    return v > threshold.score ? 0x1'0000u : v == threshold.score ? 1u : 0u;
  };
  const auto count_of = [&](const float4& four) {
    return count(four.x) + count(four.y) + count(four.z) + count(four.w);
  };
  // Whole warps go through the pieces.
  constexpr int kOfLane = Shared::kPiecesOfLane;
  const int all = (n + 4 * plat::kWarpLanes - 1) / (4 * plat::kWarpLanes);
  const auto piece_of = [&](int number) {
    return number < n ? *reinterpret_cast<const float4*>(shared.score + number)
                      : make_float4(NAN, NAN, NAN, NAN);
  };
#pragma unroll 1
  for (int piece = warp_idx; piece < Shared::kPieces; piece += Shared::kWarps) {
    std::uint32_t sum = 0u;
    if (piece < all) {
      sum = __reduce_add_sync(plat::kAllLanes,
                              count_of(piece_of(4 * (piece * plat::kWarpLanes + lane_idx))));
    }
    if (lane_idx == 0) shared.counts[piece] = sum;
  }
  plat::block_sync();
  // So many pieces a lane: sums before each.
  std::uint32_t sums[kOfLane + 1] = {};
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) sums[i + 1] = sums[i] + shared.counts[kOfLane * lane_idx + i];
  const std::uint32_t base = lanes_before(sums[kOfLane], lane_idx);
#pragma unroll 1
  for (int piece = warp_idx; piece < all; piece += Shared::kWarps) {
    std::uint32_t part = sums[0];
#pragma unroll
    for (int i = 1; i < kOfLane; ++i) part = piece % kOfLane == i ? sums[i] : part;
    std::uint32_t place = __shfl_sync(plat::kAllLanes, base + part, piece / kOfLane);
    const int number = 4 * (piece * plat::kWarpLanes + lane_idx);
    const float4 four = piece_of(number);
    const std::uint32_t own = count_of(four);
    if (!__any_sync(plat::kAllLanes, own != 0u)) continue;
    place += lanes_before(own, lane_idx);
    int e = 0;
    for (const float v : {four.x, four.y, four.z, four.w}) {
      const std::uint32_t here = count(v), ties = place & 0xffffu;
      if (here == 0x1'0000u || (here == 1u && ties < threshold.ties)) {
        put(static_cast<int>((place >> 16) + min(ties, threshold.ties)), number + e, v);
      }
      place += here;
      ++e;
    }
  }
}

// A row's candidates: which entries they are, and where these lie in the pool.
struct RowCandidates {
  int count;
  const std::int32_t* blocks;  // of the row, or NULL: all entries
  const std::int32_t* page_row;
  int shift;

  LOWLAT_DEVICE int entry(int number) const {
    return blocks != nullptr
               ? __ldcg(blocks + number / kIndexBlock) * kIndexBlock + number % kIndexBlock
               : number;
  }
  LOWLAT_DEVICE std::int32_t slot(int entry) const {
    return (__ldg(page_row + (entry >> shift)) << shift) + (entry & ((1 << shift) - 1));
  }
};
LOWLAT_DEVICE RowCandidates candidates_of(const IndexParams& params, int row) {
  RowCandidates out;
  out.count = min(index_count(params.rows, params.ratio, row), params.max_entries);
  out.blocks = nullptr;
  out.page_row = params.pages.page_table +
                 static_cast<std::int64_t>(row / params.rows.tokens) * params.pages.stride;
  out.shift = 31 - __clz(params.pages.per_page);
  if (params.blocks != nullptr) {
    out.count = index_candidates(out.count);
    out.blocks = params.blocks + static_cast<std::int64_t>(row) * kIndexMaxBlocks;
  }
  return out;
}

}  // namespace lowlat::nvidia::fused
