// stages/gate.hpp: the router: scores of all experts, the k best and their weights, for one row;
// or the weights of experts that the token's id has chosen.
//
// The logits z = x gate^T come in as fp32, as the bf16 linear stage leaves them. A block, or a warp
// for each of a few rows, selects; a hash layer's row is a handful of numbers, so one thread takes
// it.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/argmax.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// What a sum of selected scores near 0 does. `target`: 1e-20 is added (V4.1's target layers, V4's
// hash layers). `draft`: divides by 1 when the sum is not positive (every draft, V4's target).
enum class GateSum { target, draft };

// Whose arithmetic of a score and of a NaN: the two models' routers are different code.
enum class GateRule { v41, v4 };

// sqrt(softplus(z)). v41: softplus(z) = z > 20 ? z : log1p(exp(z)). v4: max(z, 0) + log1p(e) with
// e = exp(-|z|) and log1p from u = 1 + e, whose rounding the quotient undoes.
LOWLAT_DEVICE float gate_score(float z, GateRule rule = GateRule::v41) {
  if (rule == GateRule::v41) return plat::sqrt(z > 20.0f ? z : plat::log1p(plat::exp(z)));
  const float e = plat::exp(-plat::abs(z));
  const float u = 1.0f + e;
  const float log1p = u == 1.0f ? e : e * plat::log(u) / (u - 1.0f);
  return plat::sqrt(plat::max(z, 0.0f) + log1p);
}

// What the scores of a row's experts are divided by: their sum, in their order. One thread calls.
LOWLAT_DEVICE float gate_total(const float* scores, int k, GateSum sum_rule) {
  float total = 0.0f;
  for (int slot = 0; slot < k; ++slot) total += scores[slot];
  if (sum_rule == GateSum::target) return total + 1e-20f;
  return total <= 0.0f ? 1.0f : total;
}

// Scores to weights in place: score / total * scaling. One thread calls.
LOWLAT_DEVICE void gate_weights(float* weights, int k, GateSum sum_rule, float scaling) {
  const float total = gate_total(weights, k, sum_rule);
  for (int slot = 0; slot < k; ++slot) weights[slot] = weights[slot] / total * scaling;
}

// out_ids[k], out_weights[k] in selection order: highest score + bias first, ties to the lowest id,
// a NaN counts as +infinity (v41) or -1e30 (v4). The bias ranks only; the weights are score / sum *
// scaling, summed in selection order. bias may differ by row (image tokens have their own).
// 1 <= k <= num_experts. The block calls, threads split the experts, each round is a maximum over
// the block; syncs inside and at the end, after which the scratches are free: memory holds
// 2 * num_experts floats.
template <class Block>
LOWLAT_DEVICE void gate_select(std::int32_t* out_ids, float* out_weights, const float* logits,
                               const float* bias, int num_experts, int k, GateSum sum_rule,
                               float scaling, float* memory, GateRule rule,
                               typename BlockBest<Block>::Scratch& scratch) {
  using Threads = Team<Block>;
  float* score = memory;
  float* rank = memory + num_experts;
  const float nan_rank = rule == GateRule::v41 ? plat::bits_float(0x7f80'0000u) : -1e30f;
  for (int e = Threads::thread_idx(); e < num_experts; e += Block::kNumThreads) {
    score[e] = gate_score(logits[e], rule);
    const float sum = score[e] + bias[e];
    rank[e] = sum != sum ? nan_rank : sum;
  }
  Threads::sync();
  for (int slot = 0; slot < k; ++slot) {
    Best best = kNoBest;
    for (int e = Threads::thread_idx(); e < num_experts; e += Block::kNumThreads) {
      if (rank[e] == rank[e]) best = best_of(best, {rank[e], e});
    }
    best = BlockBest<Block>::run(best, scratch);
    if (Threads::leads()) {
      out_ids[slot] = best.id;
      out_weights[slot] = score[best.id];
    }
    // Taken, which only the expert's own thread needs to know. No rank is NaN of itself, and one of
    // -infinity is a legal candidate.
    if (best.id % Block::kNumThreads == Threads::thread_idx()) {
      rank[best.id] = plat::bits_float(0x7fc0'0000u);
    }
  }
  if (Threads::leads()) gate_weights(out_weights, k, sum_rule, scaling);
  Threads::sync();
}
// One thread calls.
LOWLAT_DEVICE void gate_select(std::int32_t* out_ids, float* out_weights, const float* logits,
                               const float* bias, int num_experts, int k, GateSum sum_rule,
                               float scaling, float* memory, GateRule rule = GateRule::v41) {
  BlockBest<OneThread>::Scratch scratch;
  gate_select<OneThread>(out_ids, out_weights, logits, bias, num_experts, k, sum_rule, scaling,
                         memory, rule, scratch);
}

// out_weights[k] of the experts that a hash layer's table names for the row's token; slot_logits[k]
// are theirs alone, in the table's order. No bias, nothing is ranked. One thread calls.
LOWLAT_DEVICE void gate_hash(float* out_weights, const float* slot_logits, int k, float scaling,
                             GateRule rule) {
  for (int slot = 0; slot < k; ++slot) out_weights[slot] = gate_score(slot_logits[slot], rule);
  gate_weights(out_weights, k, GateSum::target, scaling);
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
