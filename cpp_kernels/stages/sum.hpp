// stages/sum.hpp: sums over a block and dot products, each in one declared order.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

namespace lowlat::LOWLAT_PLATFORM::stages {

// Sum (or maximum) over the block. All threads call, all get the same value; syncs before and
// after, so the scratch is free again on return.
template <class Block>
struct BlockSum {
  static constexpr int kNumWarps = Block::kNumThreads / plat::kWarpLanes;
  struct Scratch {
    float partial[kNumWarps];
  };

  LOWLAT_DEVICE static float run(float value, Scratch& scratch) {
    value = plat::warp_sum(value);
    if constexpr (kNumWarps == 1) {
      return value;
    } else {
      const int thread_idx = plat::thread_idx(), warp_idx = thread_idx / plat::kWarpLanes;
      if (thread_idx % plat::kWarpLanes == 0) scratch.partial[warp_idx] = value;
      plat::block_sync();
      float total = 0.0f;
      for (int i = 0; i < kNumWarps; ++i) total += scratch.partial[i];
      plat::block_sync();
      return total;
    }
  }
};

// One thread's dot product of n fp32 pairs: 16 partial sums (element i goes to sum i mod 16, each
// ascending, multiply then add), then pairwise 8, 4, 2, 1. Sixteen independent chains keep a CPU's
// vector units busy and the order is the same on every machine.
LOWLAT_DEVICE float dot(const float* a, const float* b, int n) {
  constexpr int kLanes = 16;
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
      for (int i = plat::thread_idx(); i < n; i += Block::kNumThreads) sum += a[i] * b[i];
      return BlockSum<Block>::run(sum, scratch);
    }
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
