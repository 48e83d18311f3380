// stages/rope.hpp: rotary position embedding of 64 dimensions, interleaved pairs, in fp32.
//
// Frequencies, angles, cosines and sines are all fp32, as the serving table is built: at far
// positions the rounding of the angle is part of the meaning. Amplitude 1; YaRN changes frequencies
// only.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cmath>
#include <cstdint>

#include "shape/runtime_shape.hpp"
#include "stages/format.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kRopeDim = shape::kRopeDim;
inline constexpr int kRopePairs = kRopeDim / 2;

// Pairs below `low` keep their frequency, pairs from `high` on have it divided by `factor`, and
// between them the two are mixed. factor 1 is no YaRN.
struct YarnRamp {
  float factor = 1.0f;
  int low = 0;
  int high = 1;
};

// The ramp of a configuration, made by the host, once. beta_fast and beta_slow are turns over
// `original_positions`; for base 160000, 32, 1 and 65536 it is 15 .. 25.
inline YarnRamp yarn_ramp(double base, double factor, double beta_fast, double beta_slow,
                          double original_positions) {
  constexpr double kTwoPi = 6.283185307179586;
  const auto pair_with_turns = [&](double turns) {
    return kRopePairs * std::log(original_positions / (turns * kTwoPi)) / std::log(base);
  };
  YarnRamp ramp;
  ramp.factor = static_cast<float>(factor);
  const int low = static_cast<int>(std::floor(pair_with_turns(beta_fast)));
  const int high = static_cast<int>(std::ceil(pair_with_turns(beta_slow)));
  ramp.low = low < 0 ? 0 : low;
  ramp.high = high > kRopeDim - 1 ? kRopeDim - 1 : high;
  if (ramp.high <= ramp.low) ramp.high = ramp.low + 1;  // a step
  return ramp;
}

// Radians a position, pair by pair. Made once at build time; one thread calls.
struct RopeTable {
  float values[kRopePairs];
};

LOWLAT_DEVICE RopeTable rope_table(float base, YarnRamp yarn) {
  RopeTable table;
  for (int i = 0; i < kRopePairs; ++i) {
    const float f = 1.0f / plat::pow(base, static_cast<float>(2 * i) / kRopeDim);
    if (yarn.factor == 1.0f) {
      table.values[i] = f;
      continue;
    }
    const float place = static_cast<float>(i - yarn.low) / static_cast<float>(yarn.high - yarn.low);
    const float ramp = plat::min(plat::max(place, 0.0f), 1.0f);
    table.values[i] = f / yarn.factor * ramp + f * (1.0f - ramp);
  }
  return table;
}

// Cosine and sine of each pair at one position: made once a row, used for all its heads.
struct RopeTurn {
  float cos[kRopePairs];
  float sin[kRopePairs];
};

LOWLAT_DEVICE float rope_angle(const RopeTable& table, int pair, std::int64_t position) {
  return static_cast<float>(position) * table.values[pair];
}
// The block calls, threads split the pairs; no sync.
template <class Block>
LOWLAT_DEVICE void rope_turn(RopeTurn& out, const RopeTable& table, std::int64_t position) {
  for (int i = Team<Block>::thread_idx(); i < kRopePairs; i += Block::kNumThreads) {
    const float angle = rope_angle(table, i, position);
    out.cos[i] = plat::cos(angle);
    out.sin[i] = plat::sin(angle);
  }
}
// One thread calls.
LOWLAT_DEVICE RopeTurn rope_turn(const RopeTable& table, std::int64_t position) {
  RopeTurn turn;
  rope_turn<OneThread>(turn, table, position);
  return turn;
}
// The turn back: of the attention output, at the query's position. One thread calls.
LOWLAT_DEVICE RopeTurn rope_inverse(RopeTurn turn) {
  for (float& s : turn.sin) s = -s;
  return turn;
}

// (a, b) -> (a cos - b sin, a sin + b cos) in place, each product and each sum rounded to fp32.
LOWLAT_DEVICE void rope_pair(float& a, float& b, float cos, float sin) {
  const float turned = a * cos - b * sin;
  b = a * sin + b * cos;
  a = turned;
}

// Turns 64 values in place. The block calls, threads split the pairs; no sync, no scratch. A turn
// that was made once and a table with a position give the same bits.
template <class Block>
struct Rope {
  // fp32 values, unrounded.
  LOWLAT_DEVICE static void rotate(float* x, const RopeTurn& turn) {
    for (int i = Team<Block>::thread_idx(); i < kRopePairs; i += Block::kNumThreads) {
      rope_pair(x[2 * i], x[2 * i + 1], turn.cos[i], turn.sin[i]);
    }
  }
  LOWLAT_DEVICE static void rotate(float* x, const RopeTable& table, std::int64_t position) {
    for (int i = Team<Block>::thread_idx(); i < kRopePairs; i += Block::kNumThreads) {
      const float angle = rope_angle(table, i, position);
      rope_pair(x[2 * i], x[2 * i + 1], plat::cos(angle), plat::sin(angle));
    }
  }
  // bf16 values, turned in fp32 and rounded once.
  LOWLAT_DEVICE static void rotate(std::uint16_t* x, const RopeTurn& turn) {
    rotate_heads(x, 1, 0, turn);
  }
  // As many as a block has threads for: head h's 64 values are x[h * stride ..].
  LOWLAT_DEVICE static void rotate_heads(std::uint16_t* x, int num_heads, std::int64_t stride,
                                         const RopeTurn& turn) {
    for (int i = Team<Block>::thread_idx(); i < num_heads * kRopePairs; i += Block::kNumThreads) {
      const int pair = i % kRopePairs;
      std::uint16_t* values = x + i / kRopePairs * stride + 2 * pair;
      float a = from_bf16(values[0]), b = from_bf16(values[1]);
      rope_pair(a, b, turn.cos[pair], turn.sin[pair]);
      values[0] = to_bf16(a);
      values[1] = to_bf16(b);
    }
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
