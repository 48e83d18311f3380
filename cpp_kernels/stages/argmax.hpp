// stages/argmax.hpp: the greatest of many values, with one rule for ties and NaN.
//
// Parts of a row are reduced apart, by thread, tile or rank, and joined with best_of in any order:
// the rule is a total order, so the result is the same.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// A candidate. id -1 is no candidate; everything beats it.
struct Best {
  float value;
  std::int32_t id;
};
inline constexpr Best kNoBest = {0.0f, -1};

// A NaN beats every number; then the greater value; then the lower id. +0 and -0 are equal.
LOWLAT_DEVICE bool beats(Best a, Best b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0 && b.id < 0;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.id < b.id;
}
LOWLAT_DEVICE Best best_of(Best a, Best b) { return beats(b, a) ? b : a; }

// The best of every thread's, in every thread. The block calls; syncs before and after, so the
// scratch is free again on return. One warp needs neither scratch nor sync.
template <class Block>
struct BlockBest {
  static constexpr int kNumWarps = Team<Block>::kNumWarps;
  struct Scratch {
    Best partial[kNumWarps];
  };

  LOWLAT_DEVICE static Best run(Best best, Scratch& scratch) {
    for (int half = Team<Block>::kLanes / 2; half > 0; half /= 2) {
      const float value = plat::warp_shuffle_xor(best.value, half);
      const auto id = plat::warp_shuffle_xor(static_cast<std::uint32_t>(best.id), half);
      best = best_of(best, {value, static_cast<std::int32_t>(id)});
    }
    if constexpr (kNumWarps > 1) {
      if (Team<Block>::lane() == 0) scratch.partial[Team<Block>::warp_idx()] = best;
      Team<Block>::sync();
      best = scratch.partial[0];
      for (int i = 1; i < kNumWarps; ++i) best = best_of(best, scratch.partial[i]);
      Team<Block>::sync();
    }
    return best;
  }
};

// The best of values[0..n), whose first id is first_id, in every thread. n = 0 gives kNoBest. The
// block calls; syncs as BlockBest.
template <class Block>
LOWLAT_DEVICE Best argmax(const float* values, int n, std::int32_t first_id,
                          typename BlockBest<Block>::Scratch& scratch) {
  Best best = kNoBest;
  for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) {
    best = best_of(best, {values[i], first_id + i});
  }
  return BlockBest<Block>::run(best, scratch);
}
// One thread calls.
LOWLAT_DEVICE Best argmax(const float* values, int n, std::int32_t first_id = 0) {
  BlockBest<OneThread>::Scratch scratch;
  return argmax<OneThread>(values, n, first_id, scratch);
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
