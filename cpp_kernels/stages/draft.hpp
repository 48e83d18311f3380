// stages/draft.hpp: the DSpark draft's own parts: target features, Markov logits, choice of a
// proposal.
//
// Ranges are arguments, and no output element depends on the range, on the other requests or on who
// calls.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/argmax.hpp"
#include "stages/format.hpp"
#include "stages/linear.hpp"
#include "stages/philox.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// A temperature above 0 divides as max(temperature, 1e-5); 0 is greedy and never divides.
LOWLAT_DEVICE float clamp_temperature(float temperature) { return plat::max(temperature, 1e-5f); }

// Feature of one row: out[h] = bf((R0 + R1 + R2 + R3) * 0.25), fp32, streams ascending.
// residual bf16 [4, hidden]; out bf16 [hidden]. The block calls, threads split h; no sync.
template <class Block = OneThread>
LOWLAT_DEVICE void draft_feature(std::uint16_t* out, const std::uint16_t* residual, int hidden) {
  for (int h = Team<Block>::thread_idx(); h < hidden; h += Block::kNumThreads) {
    float sum = from_bf16(residual[h]);
    for (int stream = 1; stream < 4; ++stream) sum += from_bf16(residual[stream * hidden + h]);
    out[h] = to_bf16(sum * 0.25f);
  }
}

// z[v] = base[v] + bf(w1[prev] . w2[v]) for every request and v in [begin, end), the rank's own
// numbering of its vocabulary rows. w2 bf16 [rows, rank]; embedding fp32
// [batch_size, rank] holding w1's bf16 rows of the previous tokens; base and out_z fp32, one
// request's row `pitch` after the other's (they may be the same memory). scratch: rank floats, of
// one thread. The block calls, as linear_in_chains(), because a rank is any number; no sync.
template <class Block = OneThread>
LOWLAT_DEVICE void markov_logits(float* out_z, const float* base, std::int64_t pitch,
                                 const float* embedding, const Bf16Weights& w2, int batch_size,
                                 int rank, int begin, int end, float* scratch) {
  linear_in_chains<Block>(embedding, rank, batch_size, rank, w2, begin, end, scratch,
                          [=](int b, int v, float bias) {
                            out_z[b * pitch + v] = base[b * pitch + v] + round_bf16(bias);
                          });
}

// The best of z[0..n), whose first id is first_id, in every thread: argmax of z where temperature
// is 0, else of z / max(temperature, 1e-5) + gumbel(uniform(id)). `uniform` maps an id to (0, 1];
// PhiloxNoise is the server's, and each thread works with a copy of it. Shards and tiles are joined
// with best_of. The block calls, threads take four neighbouring ids in turn, which share one Philox
// call; syncs as BlockBest.
template <class Block, class Uniform>
LOWLAT_DEVICE Best draft_select(const float* z, int n, std::int32_t first_id, float temperature,
                                Uniform uniform, typename BlockBest<Block>::Scratch& scratch) {
  if (temperature == 0.0f) return argmax<Block>(z, n, first_id, scratch);
  const float tau = clamp_temperature(temperature);
  constexpr int kRun = 4;
  Best best = kNoBest;
  // Runs begin at multiples of four of the id, so the first may begin before the row does.
  const int first_run = -(first_id % kRun);
  for (int begin = first_run + kRun * Team<Block>::thread_idx(); begin < n;
       begin += kRun * Block::kNumThreads) {
    for (int i = begin < 0 ? 0 : begin; i < begin + kRun && i < n; ++i) {
      best = best_of(best, {z[i] / tau + gumbel(uniform(first_id + i)), first_id + i});
    }
  }
  return BlockBest<Block>::run(best, scratch);
}
// One thread calls.
template <class Uniform>
LOWLAT_DEVICE Best draft_select(const float* z, int n, std::int32_t first_id, float temperature,
                                Uniform&& uniform) {
  BlockBest<OneThread>::Scratch scratch;
  return draft_select<OneThread>(z, n, first_id, temperature, uniform, scratch);
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
