// stages/hc.hpp: hyper-connections over four residual streams: statistics, combine, post.
//
// One row at a time; a row's results depend on that row alone. `residual` is bf16 [4, hidden],
// stream-major.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "shape/runtime_shape.hpp"
#include "stages/format.hpp"
#include "stages/norm.hpp"
#include "stages/sum.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kHcStreams = shape::kNumStreams;
// Rows of fn: pre of each stream, post of each, and comb[j][k] at 8 + 4 j + k (j in, k out).
inline constexpr int kHcOutputs = kHcStreams * (2 + kHcStreams);

// What a sublayer does to the residual, for one row.
struct HcParams {
  float pre[kHcStreams];
  float post[kHcStreams];
  float comb[kHcStreams][kHcStreams];
};

LOWLAT_DEVICE float sigmoid(float v) { return 1.0f / (1.0f + plat::exp(-v)); }

// Doubly normalises the 4x4 logits in `comb` in place: row softmax + eps, a column pass, then
// num_iters - 1 times rows and columns; every quotient has eps in its divisor. One thread calls.
LOWLAT_DEVICE void hc_sinkhorn(float (&comb)[kHcStreams][kHcStreams], float eps, int num_iters) {
  for (auto& row : comb) {
    float top = row[0];
    for (int k = 1; k < kHcStreams; ++k) top = plat::max(top, row[k]);
    float sum = 0.0f;
    for (float& v : row) sum += v = plat::exp(v - top);
    for (float& v : row) v = v / sum + eps;
  }
  for (int iter = 0; iter < num_iters; ++iter) {
    if (iter > 0) {
      for (auto& row : comb) {
        float sum = 0.0f;
        for (const float v : row) sum += v;
        for (float& v : row) v /= sum + eps;
      }
    }
    for (int k = 0; k < kHcStreams; ++k) {
      float sum = 0.0f;
      for (int j = 0; j < kHcStreams; ++j) sum += comb[j][k];
      for (int j = 0; j < kHcStreams; ++j) comb[j][k] /= sum + eps;
    }
  }
}

// The same in 16 lanes: lane 4 j + k of every 16 holds comb[j][k] and gets its result, by the same
// operations in the same order. All lanes of a warp call.
LOWLAT_DEVICE float hc_sinkhorn_lanes(float v, float eps, int num_iters) {
  const int lane = plat::thread_idx() % plat::kWarpLanes;
  const int k = lane % kHcStreams, j = lane / kHcStreams % kHcStreams;
  const auto sum_over = [&](float own, int first, int step) {
    float sum = 0.0f;
    for (int i = 0; i < kHcStreams; ++i) sum += plat::warp_shuffle(own, first + i * step);
    return sum;
  };
  const int row = lane - k, column = lane - j * kHcStreams;
  float top = plat::warp_shuffle(v, row);
  for (int i = 1; i < kHcStreams; ++i) top = plat::max(top, plat::warp_shuffle(v, row + i));
  v = plat::exp(v - top);
  v = v / sum_over(v, row, 1) + eps;
  for (int iter = 0; iter < num_iters; ++iter) {
    if (iter > 0) v /= sum_over(v, row, 1) + eps;
    v /= sum_over(v, column, kHcStreams) + eps;
  }
  return v;
}

template <class Block>
struct HcStats {
  struct Scratch {
    typename BlockDot<Block>::Scratch sum;
    float mix[kHcOutputs];
  };

  // out_mix[num_outputs], the same in every thread: fn [num_outputs, 4 hidden] times the row, over
  // the row's RMS; 16 lanes an output. `row` is the residual row as fp32 [4 hidden] (expand_bf16).
  // The block calls; syncs inside; scratch is free on return. out_mix is each thread's own memory.
  LOWLAT_DEVICE static void mix(float* out_mix, const float* row, const float* fn, int hidden,
                                float norm_eps, Scratch& scratch, int num_outputs = kHcOutputs) {
    const int n = kHcStreams * hidden;
    const float scale = RmsNorm<Block>::scale(row, n, norm_eps, scratch.sum);
    if constexpr (Team<Block>::kAlone) {
      for (int i = 0; i < num_outputs; ++i) {
        out_mix[i] = scale * dot(fn + static_cast<std::int64_t>(i) * n, row, n);
      }
    } else {
      using Dots = DotTeam<Block>;
      for (int base = 0; base < num_outputs; base += Dots::kNum) {
        const int i = base + Dots::idx();
        const int output = i < num_outputs ? i : num_outputs - 1;
        const float y = Dots::run(fn + static_cast<std::int64_t>(output) * n, row, n);
        if (i < num_outputs && Dots::lane() == 0) scratch.mix[i] = y;
      }
      Team<Block>::sync();
      for (int i = 0; i < num_outputs; ++i) out_mix[i] = scale * scratch.mix[i];
      Team<Block>::sync();
    }
  }

  // out_pre[4], the weights of a combine, from mix()'s first four numbers; base[4]. One thread
  // calls: it is four numbers; no sync. V4's head has four outputs, these, with an fn, base and
  // scale of its own: mix with num_outputs 4, pre, then hc_combine_bf16 gives its h.
  LOWLAT_DEVICE static void pre(float* out_pre, const float* mix, const float* base, float scale,
                                float hc_eps) {
    for (int k = 0; k < kHcStreams; ++k) out_pre[k] = pre_of(mix[k], base[k], scale, hc_eps);
  }

  // The parameters from mix()'s 24 numbers; base[24], scale[3]. The block calls; the first warp
  // computes, a lane a number, and writes `out`; no sync.
  LOWLAT_DEVICE static void params(HcParams& out, const float* mix, const float* base,
                                   const float* scale, float hc_eps, int sinkhorn_iters) {
    const auto logit = [&](int i, float factor) { return mix[i] * factor + base[i]; };
    if constexpr (Team<Block>::kAlone) {
      pre(out.pre, mix, base, scale[0], hc_eps);
      for (int k = 0; k < kHcStreams; ++k) {
        out.post[k] = 2.0f * sigmoid(logit(kHcStreams + k, scale[1]));
      }
      for (int i = 0; i < kHcStreams * kHcStreams; ++i) {
        out.comb[i / kHcStreams][i % kHcStreams] = logit(2 * kHcStreams + i, scale[2]);
      }
      hc_sinkhorn(out.comb, hc_eps, sinkhorn_iters);
    } else {
      if (Team<Block>::warp_idx() != 0) return;
      const int lane = Team<Block>::lane(), i = lane % (kHcStreams * kHcStreams);
      const float v =
          hc_sinkhorn_lanes(logit(2 * kHcStreams + i, scale[2]), hc_eps, sinkhorn_iters);
      if (lane == i) out.comb[i / kHcStreams][i % kHcStreams] = v;
      if (lane >= kHcStreams) return;
      out.pre[lane] = pre_of(mix[lane], base[lane], scale[0], hc_eps);
      out.post[lane] = 2.0f * sigmoid(logit(kHcStreams + lane, scale[1]));
    }
  }

 private:
  LOWLAT_DEVICE static float pre_of(float mix, float base, float scale, float hc_eps) {
    return sigmoid(mix * scale + base) + hc_eps;
  }
};

// out[h] = sum_k pre[k] residual[k][h] in fp32: fma, k ascending, from 0. Unrounded
// (hc_combine_bf16 rounds). The block calls, threads split h; no sync. pre {1, 0, 0, 0} gives
// stream 0 exactly, which is V4.1's input of the first attention.
template <class Block, class Sink>
LOWLAT_DEVICE void hc_combine(const std::uint16_t* residual, const float* pre, int hidden,
                              Sink&& sink) {
  for (int h = Team<Block>::thread_idx(); h < hidden; h += Block::kNumThreads) {
    float acc = 0.0f;
    for (int k = 0; k < kHcStreams; ++k) {
      acc = plat::fma(from_bf16(residual[static_cast<std::int64_t>(k) * hidden + h]), pre[k], acc);
    }
    sink(h, acc);
  }
}

// The combined row rounded to bf16, as fp32 values: the head's h.
template <class Block>
LOWLAT_DEVICE void hc_combine_bf16(float* out, const std::uint16_t* residual, const float* pre,
                                   int hidden) {
  hc_combine<Block>(residual, pre, hidden, [&](int h, float v) { out[h] = round_bf16(v); });
}

// What the mean of squares of a combine's norm is over: V4.1 takes the sums rounded to bf16, V4 the
// sums before that. Both scale the rounded ones.
enum class HcStatistic { rounded, unrounded };

// Combine, then the norm. `row` is fp32 [hidden] of the caller's, in the block's shared memory; it
// holds the rounded sums on return. The block calls; syncs inside; scratch is free on return.
template <class Block>
LOWLAT_DEVICE void hc_combine_norm(std::uint16_t* out, const std::uint16_t* residual,
                                   const float* pre, const std::uint16_t* gain, int hidden,
                                   float eps, float* row, typename RmsNorm<Block>::Scratch& scratch,
                                   HcStatistic statistic = HcStatistic::rounded) {
  const bool rounded = statistic == HcStatistic::rounded;
  hc_combine<Block>(residual, pre, hidden,
                    [&](int h, float v) { row[h] = rounded ? round_bf16(v) : v; });
  Team<Block>::sync();
  const float scale = RmsNorm<Block>::scale(row, hidden, eps, scratch);
  if (!rounded) {
    for (int h = Team<Block>::thread_idx(); h < hidden; h += Block::kNumThreads) {
      row[h] = round_bf16(row[h]);
    }
  }
  RmsNorm<Block>::apply(out, row, gain, hidden, scale);
}

// out[k][h] = bf( post[k] y[h] + sum_j comb[j][k] residual[j][h] ): the product with stream 0
// rounded, then fma with post y, then fma with streams 1, 2, 3. out may be residual. The block
// calls, threads split begin .. end - 1 of hidden; no sync. `y` is bf16 [hidden], the summed
// sublayer output.
template <class Block>
LOWLAT_DEVICE void hc_post(std::uint16_t* out, const std::uint16_t* residual,
                           const std::uint16_t* y, const float* post,
                           const float (*comb)[kHcStreams], int hidden, int begin, int end) {
  for (int h = begin + Team<Block>::thread_idx(); h < end; h += Block::kNumThreads) {
    float r[kHcStreams];
    for (int j = 0; j < kHcStreams; ++j) {
      r[j] = from_bf16(residual[static_cast<std::int64_t>(j) * hidden + h]);
    }
    const float y_h = from_bf16(y[h]);
    for (int k = 0; k < kHcStreams; ++k) {
      float acc = comb[0][k] * r[0];
      acc = plat::fma(post[k], y_h, acc);
      for (int j = 1; j < kHcStreams; ++j) acc = plat::fma(comb[j][k], r[j], acc);
      out[static_cast<std::int64_t>(k) * hidden + h] = to_bf16(acc);
    }
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
