// stages/pool.hpp: V4's compressed keys: a softmax over the tokens of a block, channel by channel.
//
//   ratio 4    entry n pools eight candidates: the overlap halves of tokens 4n-4 .. 4n-1, then the
//              own halves of tokens 4n .. 4n+3. Entry 0 has no tokens before it: kv 0, score
//              -FLT_MAX.
//   ratio 128  entry n pools tokens 128n .. 128n+127.
//   pool       s_i = score_i + ape_i;  c = sum e^(s_i - max s) kv_i / sum e^(s_i - max s)
//   key        c * rsqrt(mean(c^2) + eps) * gain, then RoPE of the last 64 dimensions at the
//              block's first position; of the attention's key the result to bf16, of the index's
//              key see IndexKeyFp8
//
// A token's projections are one row of fp32, unrounded and without ape, in the layer's buffer of
// the step and in the state ring (stages/pool_state.hpp) alike: [kv | kv of its own block | score |
// score of its own block] at ratio 4, where the first of each pair is for the overlap; [kv | score]
// at 128. V4.1's compressors are in stages/compress.hpp.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>
#include <limits>

#include "shape/runtime_shape.hpp"
#include "stages/format.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/rope.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kOverlapRatio = shape::kOverlapRatio;
inline constexpr int kBlockRatio = shape::kBlockRatio;
inline constexpr int kMaxPoolCandidates = kBlockRatio;
// Candidates of one partial softmax.
inline constexpr int kPoolPartial = 8;
static_assert(2 * kOverlapRatio == kPoolPartial && kBlockRatio % kPoolPartial == 0);

// What a ratio and a key's width say of the rows of projections. Members, not statics, so that the
// attention's keys and the index's share the stage.
struct PoolLayout {
  int ratio;  // kOverlapRatio or kBlockRatio
  int dim;    // of a key: kKvDim, or the index's

  LOWLAT_DEVICE constexpr bool overlaps() const { return ratio == kOverlapRatio; }
  LOWLAT_DEVICE constexpr int num_candidates() const { return overlaps() ? 2 * ratio : ratio; }
  // Floats of the values of a token, and as many of its scores and of a row of ape.
  LOWLAT_DEVICE constexpr int half_width() const { return overlaps() ? 2 * dim : dim; }
  LOWLAT_DEVICE constexpr int width() const { return 2 * half_width(); }
  // Position of candidate i of an entry; negative where the sequence has not begun.
  LOWLAT_DEVICE constexpr std::int64_t position(std::int64_t entry, int i) const {
    return entry * ratio - (overlaps() ? ratio : 0) + i;
  }
  // Where candidate i begins in its token's row, and its row of ape.
  LOWLAT_DEVICE constexpr int offset(int i) const { return overlaps() && i >= ratio ? dim : 0; }
  LOWLAT_DEVICE constexpr int ape_row(int i) const { return i % ratio; }
};

// Rows of one request's tokens while a step runs: the step's own from position `first` on, older
// ones where ring_row(position) says.
template <class RingRow>
struct PoolRows {
  const float* step;   // projections of the request's rows of the step, `width` floats each
  std::int64_t first;  // position of the first of them
  std::int64_t width;
  RingRow ring_row;  // const float*(std::int64_t position)

  LOWLAT_DEVICE const float* operator()(std::int64_t position) const {
    return position >= first ? step + (position - first) * width : ring_row(position);
  }
};

// c[d] of one entry for channels d in begin .. end - 1. rows(position) gives a token's projections
// and is asked for positions >= 0 only; ape: fp32 [ratio, half_width()].
//
// Order: partial softmaxes of 8 consecutive candidates, each with its own maximum, candidates
// ascending; then partials ascending, each scaled by e^(its maximum - the largest). One partial, as
// at ratio 4, is left as it is: e^0 is 1. The result depends on the candidates' rows and ape alone,
// whatever ranges, steps and chunks they came from. The block calls, threads split the channels;
// syncs inside and at the end.
template <class Block>
struct PoolEntry {
  struct Scratch {
    const float* rows[kMaxPoolCandidates];  // null: no such token
  };

  template <class Rows>
  LOWLAT_DEVICE static void run(float* out_c, const PoolLayout& layout, const float* ape,
                                std::int64_t entry, const Rows& rows, int begin, int end,
                                Scratch& scratch) {
    for (int i = Team<Block>::thread_idx(); i < layout.num_candidates(); i += Block::kNumThreads) {
      const std::int64_t position = layout.position(entry, i);
      scratch.rows[i] = position < 0 ? nullptr : rows(position) + layout.offset(i);
    }
    Team<Block>::sync();
    for (int d = begin + Team<Block>::thread_idx(); d < end; d += Block::kNumThreads) {
      out_c[d] = channel(layout, ape, d, scratch);
    }
    Team<Block>::sync();
  }

 private:
  struct Partial {
    float max, sum, weighted;
  };

  LOWLAT_DEVICE static float channel(const PoolLayout& layout, const float* ape, int d,
                                     const Scratch& scratch) {
    Partial partials[kMaxPoolCandidates / kPoolPartial];
    const int num_partials = layout.num_candidates() / kPoolPartial;
    float largest = -std::numeric_limits<float>::infinity();
    for (int p = 0; p < num_partials; ++p) {
      partials[p] = partial(layout, ape, d, p * kPoolPartial, scratch);
      largest = plat::max(largest, partials[p].max);
    }
    float sum = 0.0f, weighted = 0.0f;
    for (int p = 0; p < num_partials; ++p) {
      const float scale = plat::exp(partials[p].max - largest);
      sum += partials[p].sum * scale;
      weighted += partials[p].weighted * scale;
    }
    return weighted / sum;
  }

  LOWLAT_DEVICE static Partial partial(const PoolLayout& layout, const float* ape, int d, int first,
                                       const Scratch& scratch) {
    float values[kPoolPartial], scores[kPoolPartial];
    Partial out{-std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
    for (int j = 0; j < kPoolPartial; ++j) {
      const int i = first + j;
      const float* row = scratch.rows[i];
      const float* bias = ape + layout.ape_row(i) * layout.half_width() + layout.offset(i);
      values[j] = row == nullptr ? 0.0f : row[d];
      scores[j] = row == nullptr ? -std::numeric_limits<float>::max()
                                 : row[layout.half_width() + d] + bias[d];
      out.max = plat::max(out.max, scores[j]);
    }
    for (int j = 0; j < kPoolPartial; ++j) {
      const float weight = plat::exp(scores[j] - out.max);
      out.sum += weight;
      out.weighted += weight * values[j];
    }
    return out;
  }
};

template <class Block>
struct PooledKey {
  using Scratch = typename RmsNorm<Block>::Scratch;

  // c fp32 [dim] in place: normed, then the last 64 turned; nothing is rounded but to fp32. turn:
  // of the block's first position. gain: bf16 [dim]. The block calls; syncs inside and at the end;
  // the scratch is free on return.
  LOWLAT_DEVICE static void finish(float* c, int dim, const std::uint16_t* gain, float eps,
                                   const RopeTurn& turn, Scratch& scratch) {
    RmsNorm<Block>::run(c, c, gain, dim, eps, scratch);
    Team<Block>::sync();
    Rope<Block>::rotate(c + dim - kRopeDim, turn);
    Team<Block>::sync();
  }

  // The attention's key, c fp32 [kKvDim] in place: finished, then all of it to bf16, ready for
  // KvPack. As finish() otherwise.
  LOWLAT_DEVICE static void entry(float* c, const std::uint16_t* gain, float eps,
                                  const RopeTurn& turn, Scratch& scratch) {
    finish(c, kKvDim, gain, eps, turn, scratch);
    for (int i = Team<Block>::thread_idx(); i < kKvDim; i += Block::kNumThreads)
      c[i] = round_bf16(c[i]);
    Team<Block>::sync();
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
