// stages/draft.hpp: the DSpark draft's own parts: target features, Markov logits, choice of a
// proposal.
//
// One thread calls each; nothing here syncs; ranges are arguments, and no output element depends on
// the range or on the other requests.
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
// residual bf16 [4, hidden]; out bf16 [hidden].
LOWLAT_DEVICE void draft_feature(std::uint16_t* out, const std::uint16_t* residual, int hidden) {
  for (int h = 0; h < hidden; ++h) {
    float sum = from_bf16(residual[h]);
    for (int stream = 1; stream < 4; ++stream) sum += from_bf16(residual[stream * hidden + h]);
    out[h] = to_bf16(sum * 0.25f);
  }
}

// z[v] = base[v] + bf(w1[prev] . w2[v]) for every request and v in [begin, end), the rank's own
// numbering of its vocabulary rows. w2 bf16 [rows, rank]; embedding fp32
// [batch_size, rank] holding w1's bf16 rows of the previous tokens; base and out_z fp32, one
// request's row `pitch` after the other's (they may be the same memory). scratch: rank floats.
LOWLAT_DEVICE void markov_logits(float* out_z, const float* base, std::int64_t pitch,
                                 const float* embedding, const Bf16Weights& w2, int batch_size,
                                 int rank, int begin, int end, float* scratch) {
  linear(embedding, rank, batch_size, rank, w2, begin, end, scratch, [=](int b, int v, float bias) {
    out_z[b * pitch + v] = base[b * pitch + v] + round_bf16(bias);
  });
}

// The best of z[0..n), whose first id is first_id: argmax of z where temperature is 0, else of
// z / max(temperature, 1e-5) + gumbel(uniform(id)). `uniform` maps an id to (0, 1]; PhiloxNoise is
// the server's. Shards and tiles are joined with best_of.
template <class Uniform>
LOWLAT_DEVICE Best draft_select(const float* z, int n, std::int32_t first_id, float temperature,
                                Uniform&& uniform) {
  if (temperature == 0.0f) return argmax(z, n, first_id);
  const float tau = clamp_temperature(temperature);
  Best best = kNoBest;
  for (int i = 0; i < n; ++i) {
    best = best_of(best, {z[i] / tau + gumbel(uniform(first_id + i)), first_id + i});
  }
  return best;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
