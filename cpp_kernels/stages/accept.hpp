// stages/accept.hpp: the acceptance rule over one request's verify rows.
//
// One thread calls; nothing here syncs. Every sum over the vocabulary is fp32 in id order: tiles of
// 1024 ids are summed from 0 and carried, so that ranks and runs agree bit for bit.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/argmax.hpp"
#include "stages/draft.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

struct Accepted {
  std::int32_t num_drafts;  // accepted drafts, 0 .. num_drafts of the call
  std::int32_t next;        // the bonus or residual token
};

inline constexpr int kAcceptTile = 1024;

// Greedy: drafts are accepted while they are the argmax of the row before them; next is the argmax
// of the row after the last accepted one. draft [num_drafts]; target_logits [num_drafts + 1,
// vocab].
LOWLAT_DEVICE Accepted accept_greedy(const std::int32_t* draft, const float* target_logits,
                                     int num_drafts, int vocab) {
  for (int i = 0;; ++i) {
    const Best best = argmax(target_logits + static_cast<std::int64_t>(i) * vocab, vocab);
    if (i == num_drafts || draft[i] != best.id) return {i, best.id};
  }
}

// out[v] = softmax(logits / tau), fp32.
LOWLAT_DEVICE void softmax_row(float* out, const float* logits, int vocab, float tau) {
  float most = logits[0] / tau;
  for (int v = 1; v < vocab; ++v) most = plat::max(most, logits[v] / tau);
  float total = 0.0f;
  for (int start = 0; start < vocab; start += kAcceptTile) {
    float tile = 0.0f;
    for (int v = start; v < vocab && v < start + kAcceptTile; ++v) {
      out[v] = plat::exp(logits[v] / tau - most);
      tile += out[v];
    }
    total += tile;
  }
  for (int v = 0; v < vocab; ++v) out[v] /= total;
}

// The smallest id whose running sum of `mass` exceeds coin * total; vocab - 1 when the total is 0.
LOWLAT_DEVICE std::int32_t inverse_cdf(const float* mass, int vocab, float coin) {
  float total = 0.0f;
  for (int start = 0; start < vocab; start += kAcceptTile) {
    float tile = 0.0f;
    for (int v = start; v < vocab && v < start + kAcceptTile; ++v) tile += mass[v];
    total += tile;
  }
  const float threshold = coin * total;
  float carry = 0.0f;
  for (int start = 0; start < vocab; start += kAcceptTile) {
    float tile = 0.0f;
    for (int v = start; v < vocab && v < start + kAcceptTile; ++v) {
      tile += mass[v];
      if (carry + tile > threshold) return v;
    }
    carry += tile;
  }
  return vocab - 1;
}

// Sampling: draft i is accepted while 0 < q <= 1 and coin * q < p, with p and q the target's and
// the draft's probabilities of it at max(temperature, 1e-5). At the first refusal next is drawn
// from max(p - q, 0) of that row (a q that is no probability counts as 0), after the last draft
// from p of the bonus row. draft_logits [num_drafts, vocab] are the logits that the drafts were
// drawn from; coins [num_drafts + 1] in [0, 1), the last one for the draw. scratch: 2 * vocab
// floats.
LOWLAT_DEVICE Accepted accept_sampled(const std::int32_t* draft, const float* target_logits,
                                      const float* draft_logits, int num_drafts, int vocab,
                                      float temperature, const float* coins, float* scratch) {
  const float tau = clamp_temperature(temperature);
  float* p = scratch;
  float* q = scratch + vocab;
  for (int i = 0; i < num_drafts; ++i) {
    const std::int64_t start = static_cast<std::int64_t>(i) * vocab;
    softmax_row(p, target_logits + start, vocab, tau);
    softmax_row(q, draft_logits + start, vocab, tau);
    const float p_draft = p[draft[i]], q_draft = q[draft[i]];
    if (0.0f < q_draft && q_draft <= 1.0f && coins[i] * q_draft < p_draft) continue;
    for (int v = 0; v < vocab; ++v) {
      const float valid_q = q[v] >= 0.0f && q[v] <= 1.0f ? q[v] : 0.0f;
      p[v] = plat::max(p[v] - valid_q, 0.0f);
    }
    return {i, inverse_cdf(p, vocab, coins[num_drafts])};
  }
  softmax_row(p, target_logits + static_cast<std::int64_t>(num_drafts) * vocab, vocab, tau);
  return {num_drafts, inverse_cdf(p, vocab, coins[num_drafts])};
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
