// stages/select.hpp: the best of many scores as a set, in ascending order of position.
//
// Equal scores go to the lower position, so that the result is one set on every rank, in every
// batch and at every chunk of a prompt, and whoever calls. The block calls select_top and
// candidate_blocks; both sync at the end, after which the scratch is free.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Candidates 0 .. n-1 are positions 0 .. n-1.
struct AllPositions {
  LOWLAT_DEVICE int operator()(int candidate_idx) const { return candidate_idx; }
};

// Candidates are the positions of published blocks: blocks ascend and only the last may reach past
// `count`, so candidates ascend too.
struct BlockPositions {
  const std::int32_t* blocks;  // [max_blocks] ascending, -1 at the end; each begins below count
  int max_blocks;
  int block_size;
  int count;  // positions that exist

  LOWLAT_DEVICE int size() const {
    int num_blocks = 0;
    while (num_blocks < max_blocks && blocks[num_blocks] >= 0) ++num_blocks;
    if (num_blocks == 0) return 0;
    const int past = (blocks[num_blocks - 1] + 1) * block_size - count;
    return num_blocks * block_size - (past > 0 ? past : 0);
  }
  LOWLAT_DEVICE int operator()(int candidate_idx) const {
    return blocks[candidate_idx / block_size] * block_size + candidate_idx % block_size;
  }
};

// Order of scores as unsigned numbers: -0 and +0 are equal, NaN is below everything.
LOWLAT_DEVICE std::uint32_t score_order(float score) {
  if (score != score) return 0u;
  const std::uint32_t bits = plat::float_bits(score + 0.0f);  // -0 + 0 is +0
  return (bits & 0x8000'0000u) != 0u ? ~bits : bits | 0x8000'0000u;
}

struct SelectScratch {
  static constexpr int kMaxWarps = plat::kWarpLanes == 1 ? 1 : 1024 / plat::kWarpLanes;
  std::uint32_t histogram[256];
  std::uint32_t above[kMaxWarps], ties[kMaxWarps];  // of each warp's part of the scores
};

// The k-th largest order of scores, and how many scores of that order are among the k best.
struct SelectThreshold {
  std::uint32_t order, num_ties;
};

// The digit of 0..255 at which the histogram, summed from 255 down, reaches num_missing, which is
// left as what is missing at that digit; in every thread. Each warp looks for itself: a lane sums
// neighbouring bins, and the sums are added over the lanes.
template <class Block>
LOWLAT_DEVICE std::uint32_t select_digit(const std::uint32_t (&histogram)[256],
                                         std::uint32_t& num_missing) {
  std::uint32_t digit = 255u;
  if constexpr (Team<Block>::kAlone) {
    while (histogram[digit] < num_missing) num_missing -= histogram[digit--];
    return digit;
  } else {
    constexpr int kLanes = Team<Block>::kLanes;
    constexpr std::uint32_t kBins = 256u / kLanes;
    const int lane = Team<Block>::lane();
    digit -= kBins * static_cast<std::uint32_t>(lane);
    std::uint32_t own = 0u;
    for (std::uint32_t i = 0u; i < kBins; ++i) own += histogram[digit - i];
    std::uint32_t sum = own;  // of this lane and those before it
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const bool has = lane >= distance;
      const std::uint32_t before = plat::warp_shuffle(sum, has ? lane - distance : lane);
      if (has) sum += before;
    }
    const bool here = sum - own < num_missing && num_missing <= sum;
    std::uint32_t missing = num_missing - (sum - own);
    if (here) {
      while (histogram[digit] < missing) missing -= histogram[digit--];
    }
    // The only lane: bits below it are those of all the lanes before.
    const std::uint64_t found = plat::warp_ballot(here);
    const int finder = plat::popcount(found - 1u);
    num_missing = plat::warp_shuffle(missing, finder);
    return plat::warp_shuffle(digit, finder);
  }
}

// The threshold of the k best of n > k > 0 scores, by four passes of eight bits; in every thread.
// The block calls; syncs inside.
template <class Block>
LOWLAT_DEVICE SelectThreshold select_threshold(const float* scores, int n, int k,
                                               SelectScratch& scratch) {
  std::uint32_t threshold = 0u;                               // from its upper bits down
  std::uint32_t num_missing = static_cast<std::uint32_t>(k);  // to be taken at its upper bits
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = Team<Block>::thread_idx(); bin < 256; bin += Block::kNumThreads) {
      scratch.histogram[bin] = 0u;
    }
    Team<Block>::sync();
    for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) {
      const std::uint32_t order = score_order(scores[i]);
      // (x >> 24) >> 8 and not x >> 32, which is undefined: at the first pass all take part.
      if ((order >> shift) >> 8 != (threshold >> shift) >> 8) continue;
      std::uint32_t& bin = scratch.histogram[order >> shift & 0xffu];
      if constexpr (Team<Block>::kAlone) {
        ++bin;
      } else {
        plat::atomic_add<plat::Scope::block>(&bin, 1u);
      }
    }
    Team<Block>::sync();
    threshold |= select_digit<Block>(scratch.histogram, num_missing) << shift;
    Team<Block>::sync();
  }
  return {threshold, num_missing};
}

// out_positions[0 .. k-1]: positions of the k best of scores[0 .. n-1], ascending; all of them when
// n <= k; -1 at the end. position_of ascends. A block counts and places by warps: each has a part
// of the scores, whose places follow from the counts of the parts before it.
template <class Block = OneThread, class PositionOf>
LOWLAT_DEVICE void select_top(std::int32_t* out_positions, const float* scores, int n, int k,
                              const PositionOf& position_of, SelectScratch& scratch) {
  using Threads = Team<Block>;
  const int num_all = n < k ? n : k;
  for (int i = num_all + Threads::thread_idx(); i < k; i += Block::kNumThreads) {
    out_positions[i] = -1;
  }
  if (n <= k) {
    for (int i = Threads::thread_idx(); i < n; i += Block::kNumThreads) {
      out_positions[i] = position_of(i);
    }
    Threads::sync();
    return;
  }
  if (k <= 0) return;
  const SelectThreshold threshold = select_threshold<Block>(scores, n, k, scratch);
  constexpr int kLanes = Threads::kLanes, kNumWarps = Threads::kNumWarps;
  static_assert(kNumWarps <= SelectScratch::kMaxWarps);
  const int per_warp = ((n + kNumWarps - 1) / kNumWarps + kLanes - 1) / kLanes * kLanes;
  const int begin = Threads::warp_idx() * per_warp;
  const int end = begin + per_warp < n ? begin + per_warp : n;
  // put(i, is_tie, above, ties) of every score of the part that may be taken, with how many above
  // the threshold, and at it, the part has before i. Gives both of the whole part.
  struct Counts {
    std::uint32_t above, ties;
  };
  const auto walk = [&](auto&& put) {
    std::uint32_t num_above = 0u, num_ties = 0u;
    for (int first = begin; first < end; first += kLanes) {
      const int i = first + Threads::lane();
      const std::uint32_t order = i < end ? score_order(scores[i]) : 0u;
      const bool is_above = i < end && order > threshold.order;
      const bool is_tie = i < end && order == threshold.order;
      const std::uint64_t above = Threads::warp_ballot(is_above);
      const std::uint64_t ties = Threads::warp_ballot(is_tie);
      if (is_above || is_tie) {
        put(i, is_tie, num_above + static_cast<std::uint32_t>(Threads::lanes_before(above)),
            num_ties + static_cast<std::uint32_t>(Threads::lanes_before(ties)));
      }
      num_above += static_cast<std::uint32_t>(plat::popcount(above));
      num_ties += static_cast<std::uint32_t>(plat::popcount(ties));
    }
    return Counts{num_above, num_ties};
  };
  std::uint32_t above_before = 0u, ties_before = 0u;
  if constexpr (kNumWarps > 1) {
    const Counts counts = walk([](int, bool, std::uint32_t, std::uint32_t) {});
    if (Threads::lane() == 0) {
      scratch.above[Threads::warp_idx()] = counts.above;
      scratch.ties[Threads::warp_idx()] = counts.ties;
    }
    Threads::sync();
    for (int w = 0; w < Threads::warp_idx(); ++w) {
      above_before += scratch.above[w];
      ties_before += scratch.ties[w];
    }
  }
  walk([&](int i, bool is_tie, std::uint32_t above, std::uint32_t ties) {
    const std::uint32_t tie_idx = ties_before + ties;
    if (is_tie && tie_idx >= threshold.num_ties) return;
    // Ties past the last that is taken take no place.
    const std::uint32_t taken = tie_idx < threshold.num_ties ? tie_idx : threshold.num_ties;
    out_positions[above_before + above + taken] = position_of(i);
  });
  Threads::sync();
}

// out_blocks[0 .. k-1]: the best blocks of block_size positions by their largest score, the block
// of the newest position (count - 1) before all others; ascending, -1 at the end; all when there
// are no more than k. block_scores: scratch of count / block_size floats. k >= 1. One thread takes
// the largest of a block of positions: there are enough of them.
template <class Block = OneThread>
LOWLAT_DEVICE void candidate_blocks(std::int32_t* out_blocks, const float* scores, int count,
                                    int block_size, int k, float* block_scores,
                                    SelectScratch& scratch) {
  using Threads = Team<Block>;
  const int num_blocks = (count + block_size - 1) / block_size;
  if (num_blocks <= k) {
    for (int i = Threads::thread_idx(); i < k; i += Block::kNumThreads) {
      out_blocks[i] = i < num_blocks ? i : -1;
    }
    Threads::sync();
    return;
  }
  // The newest block takes a place whatever its scores; the others, all of them whole, compete for
  // what is left.
  const int newest = num_blocks - 1;
  for (int i = Threads::thread_idx(); i < newest; i += Block::kNumThreads) {
    const float* block = scores + i * block_size;
    float best = block[0];
    for (int j = 1; j < block_size; ++j) best = plat::max(block[j], best);
    block_scores[i] = best;
  }
  Threads::sync();
  if (Threads::leads()) out_blocks[k - 1] = newest;
  select_top<Block>(out_blocks, block_scores, newest, k - 1, AllPositions{}, scratch);
  Threads::sync();
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
