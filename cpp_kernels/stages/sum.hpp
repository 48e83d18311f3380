// stages/sum.hpp: sums over a block and dot products, each in one declared order.
//
// A dot product of a linear is 16 chains joined pairwise, on every platform: one thread keeps all
// 16 (dot), or 16 lanes keep one each (DotTeam). The bits are the same. Statistics over a row
// (BlockDot) are split over all threads of the block; their order depends on the block.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Sum over the block: of each warp's lanes, then warps ascending. The block calls, all threads get
// the same value; syncs before and after, so the scratch is free again on return. One warp needs
// neither scratch nor sync.
template <class Block>
struct BlockSum {
  static constexpr int kNumWarps = Team<Block>::kNumWarps;
  struct Scratch {
    float partial[kNumWarps];
  };

  LOWLAT_DEVICE static float run(float value, Scratch& scratch) {
    value = Team<Block>::warp_sum(value);
    if constexpr (kNumWarps == 1) {
      return value;
    } else {
      if (Team<Block>::lane() == 0) scratch.partial[Team<Block>::warp_idx()] = value;
      Team<Block>::sync();
      float total = 0.0f;
      for (int i = 0; i < kNumWarps; ++i) total += scratch.partial[i];
      Team<Block>::sync();
      return total;
    }
  }
};

// Maximum over the block, NaN left out; otherwise as BlockSum, whose scratch it takes.
template <class Block>
struct BlockMax {
  using Scratch = typename BlockSum<Block>::Scratch;

  LOWLAT_DEVICE static float run(float value, Scratch& scratch) {
    value = Team<Block>::warp_max(value);
    if constexpr (Team<Block>::kNumWarps == 1) {
      return value;
    } else {
      if (Team<Block>::lane() == 0) scratch.partial[Team<Block>::warp_idx()] = value;
      Team<Block>::sync();
      float most = scratch.partial[0];
      for (int i = 1; i < Team<Block>::kNumWarps; ++i) {
        most = most != most ? scratch.partial[i] : plat::max(scratch.partial[i], most);
      }
      Team<Block>::sync();
      return most;
    }
  }
};

inline constexpr int kDotLanes = 16;

// One thread's dot product of n fp32 pairs: 16 partial sums (element i goes to sum i mod 16, each
// ascending, multiply then add), then pairwise 8, 4, 2, 1. Sixteen independent chains keep a CPU's
// vector units busy and the order is the same on every machine.
LOWLAT_DEVICE float dot(const float* a, const float* b, int n) {
  constexpr int kLanes = kDotLanes;
  float acc[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) acc[lane] += a[i + lane] * b[i + lane];
  }
  for (int lane = 0; lane < kLanes && i + lane < n; ++lane) acc[lane] += a[i + lane] * b[i + lane];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) acc[lane] += acc[lane + half];
  }
  return acc[0];
}

// Elements of a lane whose values a team asks for before it adds the first: a device's memory takes
// hundreds of cycles to answer, and the sums are in order all the same.
inline constexpr int kDotAhead = 8;

// Sixteen neighbouring lanes that share one dot product, in the order of dot(): a lane keeps the
// chain of its number. A block has kNum teams. All lanes of a warp call together, with equal n;
// nothing is synced. Not for one thread alone, which calls dot().
template <class Block>
struct DotTeam {
  static constexpr int kNum = Team<Block>::kNumThreads / kDotLanes;

  LOWLAT_DEVICE static int idx() { return Team<Block>::thread_idx() / kDotLanes; }
  LOWLAT_DEVICE static int lane() { return Team<Block>::thread_idx() % kDotLanes; }
  // The sum of the 16 chains, in every lane.
  LOWLAT_DEVICE static float join(float chain) {
    for (int half = kDotLanes / 2; half > 0; half /= 2) {
      chain += plat::warp_shuffle_xor(chain, half);
    }
    return chain;
  }
  LOWLAT_DEVICE static float run(const float* a, const float* b, int n) {
    float chain = 0.0f;
    int i = lane();
    for (; i + (kDotAhead - 1) * kDotLanes < n; i += kDotAhead * kDotLanes) {
      float left[kDotAhead], right[kDotAhead];
      for (int ahead = 0; ahead < kDotAhead; ++ahead) {
        left[ahead] = a[i + ahead * kDotLanes];
        right[ahead] = b[i + ahead * kDotLanes];
      }
      for (int ahead = 0; ahead < kDotAhead; ++ahead) chain += left[ahead] * right[ahead];
    }
    for (; i < n; i += kDotLanes) chain += a[i] * b[i];
    return join(chain);
  }
};

// Dot product of n fp32 pairs over the block. All threads call, all get the same value; syncs as
// BlockSum does. One thread alone adds in the order of dot().
template <class Block>
struct BlockDot {
  using Scratch = typename BlockSum<Block>::Scratch;

  LOWLAT_DEVICE static float run(const float* a, const float* b, int n, Scratch& scratch) {
    if constexpr (Block::kNumThreads == 1) {
      return dot(a, b, n);
    } else {
      float sum = 0.0f;
      for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) sum += a[i] * b[i];
      return BlockSum<Block>::run(sum, scratch);
    }
  }
};

// Groups of `size` values, a power of two, each with the largest magnitude of its members:
// neighbouring lanes share a group. value(g, i) is member i of group g; use(g, amax, begin, step)
// is called by each lane of the group for its members begin, begin + step, ..., with
// amax = max(floor, |value|), a NaN left out. The block calls; no sync. The result does not depend
// on who calls.
template <class Block, class Value, class Use>
LOWLAT_DEVICE void for_groups(int num_groups, int size, float floor, Value&& value, Use&& use) {
  if constexpr (Team<Block>::kAlone) {
    for (int g = 0; g < num_groups; ++g) {
      float amax = floor;
      for (int i = 0; i < size; ++i) amax = plat::max(plat::abs(value(g, i)), amax);
      use(g, amax, 0, 1);
    }
  } else {
    const int width = size < Team<Block>::kLanes ? size : Team<Block>::kLanes;
    const int num_teams = Team<Block>::kNumThreads / width;
    const int team_idx = Team<Block>::thread_idx() / width;
    const int begin = Team<Block>::thread_idx() % width;
    for (int first = 0; first < num_groups; first += num_teams) {
      const int g = first + team_idx;
      float amax = floor;
      for (int i = begin; g < num_groups && i < size; i += width) {
        amax = plat::max(plat::abs(value(g, i)), amax);
      }
      for (int half = width / 2; half > 0; half /= 2) {
        amax = plat::max(plat::warp_shuffle_xor(amax, half), amax);
      }
      if (g < num_groups) use(g, amax, begin, width);
    }
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
