// stages/norm.hpp: RMS norms of one row. A block takes a row; for short rows (a head, a key) a warp
// does.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/sum.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// out = bf( x * rsqrt(mean(x^2) + eps) * gain ) over one row of n values; the caller decides what x
// was rounded to before. The block calls; out may be x's buffer when Out is float. Syncs inside;
// the scratch is free on return.
template <class Block>
struct RmsNorm {
  using Scratch = typename BlockDot<Block>::Scratch;

  // 1 / sqrt(mean(x^2) + eps), in every thread.
  LOWLAT_DEVICE static float scale(const float* x, int n, float eps, Scratch& scratch) {
    const float mean_sq = BlockDot<Block>::run(x, x, n, scratch) / static_cast<float>(n);
    return plat::rsqrt(mean_sq + eps);
  }

  LOWLAT_DEVICE static void run(std::uint16_t* out, const float* x, const std::uint16_t* gain,
                                int n, float eps, Scratch& scratch) {
    apply(out, x, gain, n, scale(x, n, eps, scratch));
  }
  // Without a weight: V4's norm of each head of q.
  LOWLAT_DEVICE static void run(std::uint16_t* out, const float* x, int n, float eps,
                                Scratch& scratch) {
    const float s = scale(x, n, eps, scratch);
    for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads)
      out[i] = to_bf16(x[i] * s);
  }
  // Unrounded. Each thread reads and writes its own elements after the statistic; no sync at the
  // end.
  LOWLAT_DEVICE static void run(float* out, const float* x, const std::uint16_t* gain, int n,
                                float eps, Scratch& scratch) {
    const float s = scale(x, n, eps, scratch);
    for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) {
      out[i] = x[i] * s * from_bf16(gain[i]);
    }
  }

  // The last step of run, by a scale of the caller's. Each thread reads and writes its own
  // elements; no sync.
  LOWLAT_DEVICE static void apply(std::uint16_t* out, const float* x, const std::uint16_t* gain,
                                  int n, float s) {
    for (int i = Team<Block>::thread_idx(); i < n; i += Block::kNumThreads) {
      out[i] = to_bf16(x[i] * s * from_bf16(gain[i]));
    }
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
