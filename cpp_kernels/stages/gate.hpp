// stages/gate.hpp: the router: scores of all experts, the k best and their weights, for one row.
//
// One thread calls a row; nothing here syncs. The logits z = x gate^T come in as fp32, as the bf16
// linear stage leaves them.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/argmax.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// What a sum of selected scores near 0 does: the target adds 1e-20, a draft divides by 1 when the
// sum is not positive.
enum class GateSum { target, draft };

// V4.1's score: sqrt(softplus(z)), softplus(z) = z > 20 ? z : log1p(exp(z)).
LOWLAT_DEVICE float gate_score(float z) {
  return plat::sqrt(z > 20.0f ? z : plat::log1p(plat::exp(z)));
}

// out_ids[k], out_weights[k] in selection order: highest score + bias first, ties to the lowest id,
// a NaN counts as +infinity. The bias ranks only; the weights are score / sum * scaling, summed in
// selection order. bias may differ by row (image tokens have their own). 1 <= k <= num_experts;
// scratch holds 2 * num_experts floats and is free on return.
LOWLAT_DEVICE void gate_select(std::int32_t* out_ids, float* out_weights, const float* logits,
                               const float* bias, int num_experts, int k, GateSum sum_rule,
                               float scaling, float* scratch) {
  float* score = scratch;
  float* rank = scratch + num_experts;
  const float infinity = plat::bits_float(0x7f80'0000u);
  for (int e = 0; e < num_experts; ++e) {
    score[e] = gate_score(logits[e]);
    const float sum = score[e] + bias[e];
    rank[e] = sum != sum ? infinity : sum;
  }
  float total = 0.0f;
  for (int slot = 0; slot < k; ++slot) {
    Best best = kNoBest;
    for (int e = 0; e < num_experts; ++e) {
      bool taken = false;  // a rank of -infinity is a legal candidate, so no mark in `rank`
      for (int earlier = 0; earlier < slot; ++earlier) taken = taken || out_ids[earlier] == e;
      if (!taken) best = best_of(best, {rank[e], e});
    }
    out_ids[slot] = best.id;
    total += score[best.id];
  }
  if (sum_rule == GateSum::target) {
    total += 1e-20f;
  } else if (total <= 0.0f) {
    total = 1.0f;
  }
  for (int slot = 0; slot < k; ++slot) {
    out_weights[slot] = score[out_ids[slot]] / total * scaling;
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
