// stages/compress.hpp: one entry of V4.1's compressed key set, from fp32 projections to what is
// stored.
//
//   ratio 2   c = bf(pool(kv, score of the pair's tokens))      stages: pool_pair
//   ratio 1   c = bf(kv)
//   latent    bf( c * rsqrt(mean(c^2) + eps) * gain )           CompressedKey::latent
//   entry     bf(RoPE of the last 64 dimensions at the group's first position), then every 16
//             channels through four bits and an e4m3 scale      CompressedKey::entry
//
// The projections come in as fp32, unrounded. The index key of the entry is made from the latent,
// before RoPE (stages/index.hpp).
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/fp4.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/rope.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Softmax pooling of two values by their scores; one channel, any thread. The even position first.
LOWLAT_DEVICE float pool_pair(float kv_even, float score_even, float kv_odd, float score_odd) {
  const float lesser = plat::exp(-plat::abs(score_even - score_odd));
  const float weight_even = score_even >= score_odd ? 1.0f : lesser;
  const float weight_odd = score_odd >= score_even ? 1.0f : lesser;
  return (kv_even * weight_even + kv_odd * weight_odd) / (1.0f + lesser);
}

template <class Block>
struct CompressedKey {
  using Scratch = typename RmsNorm<Block>::Scratch;

  // c: fp32 [kKvDim], pooled or projected; rounded to bf16 in place, which comes before the
  // statistic. out_latent: bf16 [kKvDim]. gain: bf16 [kKvDim]. The block calls; syncs inside and
  // at the end; the scratch is free on return.
  LOWLAT_DEVICE static void latent(std::uint16_t* out_latent, float* c, const std::uint16_t* gain,
                                   float eps, Scratch& scratch) {
    for (int i = Team<Block>::thread_idx(); i < kKvDim; i += Block::kNumThreads)
      c[i] = round_bf16(c[i]);
    Team<Block>::sync();
    RmsNorm<Block>::run(out_latent, c, gain, kKvDim, eps, scratch);
    Team<Block>::sync();
  }

  // out_entry: fp32 [kKvDim], ready for KvPack. turn: of the group's first position. The block
  // calls; syncs inside and at the end.
  LOWLAT_DEVICE static void entry(float* out_entry, const std::uint16_t* latent,
                                  const RopeTurn& turn) {
    for (int i = Team<Block>::thread_idx(); i < kKvDim; i += Block::kNumThreads) {
      out_entry[i] = from_bf16(latent[i]);
    }
    Team<Block>::sync();
    float* rotated = out_entry + kKvNopeDim;
    Rope<Block>::rotate(rotated, turn);
    Team<Block>::sync();
    for (int i = Team<Block>::thread_idx(); i < kRopeDim; i += Block::kNumThreads) {
      rotated[i] = round_bf16(rotated[i]);
    }
    Team<Block>::sync();
    constexpr int kNumGroups = kKvDim / kFp4LatentGroup;
    for (int group = Team<Block>::thread_idx(); group < kNumGroups; group += Block::kNumThreads) {
      fp4_round_trip_latent(out_entry + group * kFp4LatentGroup);
    }
    Team<Block>::sync();
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
