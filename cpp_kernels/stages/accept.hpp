// stages/accept.hpp: the acceptance rule over one request's verify rows.
//
// Every sum over the vocabulary is fp32 in id order: tiles of 1024 ids are summed from 0 and
// carried, so that ranks, runs and platforms agree bit for bit. A block gives each tile to one
// thread (a vocabulary has more than a hundred), and every thread carries.
//
// The block calls; every function syncs inside and at the end and gives its result in every thread.
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
LOWLAT_DEVICE constexpr int accept_tiles(int vocab) {
  return (vocab + kAcceptTile - 1) / kAcceptTile;
}

template <class Block>
struct Acceptance {
  using Threads = Team<Block>;
  struct Scratch {
    typename BlockMax<Block>::Scratch max;
    typename BlockBest<Block>::Scratch best;
    std::int32_t id;
  };
  // Floats that sampled() works in. One thread keeps no sums of tiles: it makes them in passing.
  LOWLAT_DEVICE static constexpr std::int64_t memory_floats(int vocab) {
    return 2 * std::int64_t{vocab} + (Threads::kAlone ? 0 : accept_tiles(vocab));
  }

  // Greedy: drafts are accepted while they are the argmax of the row before them; next is the
  // argmax of the row after the last accepted one. draft [num_drafts]; target_logits
  // [num_drafts + 1, vocab].
  LOWLAT_DEVICE static Accepted greedy(const std::int32_t* draft, const float* target_logits,
                                       int num_drafts, int vocab, Scratch& scratch) {
    for (int i = 0;; ++i) {
      const Best best = argmax<Block>(target_logits + static_cast<std::int64_t>(i) * vocab, vocab,
                                      0, scratch.best);
      if (i == num_drafts || draft[i] != best.id) return {i, best.id};
    }
  }

  // out[v] = softmax(logits / tau), fp32. tiles: accept_tiles(vocab) floats, of a block.
  LOWLAT_DEVICE static void softmax(float* out, const float* logits, int vocab, float tau,
                                    float* tiles, Scratch& scratch) {
    float most = logits[0] / tau;
    for (int v = Threads::thread_idx(); v < vocab; v += Block::kNumThreads) {
      most = plat::max(logits[v] / tau, most);
    }
    most = BlockMax<Block>::run(most, scratch.max);
    for (int v = Threads::thread_idx(); v < vocab; v += Block::kNumThreads) {
      out[v] = plat::exp(logits[v] / tau - most);
    }
    Threads::sync();
    const float total = sum(out, vocab, tiles);
    for (int v = Threads::thread_idx(); v < vocab; v += Block::kNumThreads) out[v] /= total;
    Threads::sync();
  }

  // The smallest id whose running sum of `mass` exceeds coin * total; vocab - 1 when the total is
  // 0. No mass is negative, so running sums ascend, and the tile with that id is the first whose
  // own end is past the threshold.
  LOWLAT_DEVICE static std::int32_t inverse_cdf(const float* mass, int vocab, float coin,
                                                float* tiles, Scratch& scratch) {
    const float threshold = coin * sum(mass, vocab, tiles);
    if (Threads::leads()) {
      scratch.id = vocab - 1;
      float carry = 0.0f;
      for (int tile = 0; tile < accept_tiles(vocab); ++tile) {
        const float whole = Threads::kAlone ? tile_sum(mass, vocab, tile) : tiles[tile];
        if (carry + whole > threshold) {
          float running = 0.0f;
          int v = tile * kAcceptTile;
          do {
            running += mass[v++];
          } while (!(carry + running > threshold));
          scratch.id = v - 1;
          break;
        }
        carry += whole;
      }
    }
    Threads::sync();
    const std::int32_t id = scratch.id;
    Threads::sync();
    return id;
  }

  // Sampling: draft i is accepted while 0 < q <= 1 and coin * q < p, with p and q the target's and
  // the draft's probabilities of it at max(temperature, 1e-5). At the first refusal next is drawn
  // from max(p - q, 0) of that row (a q that is no probability counts as 0), after the last draft
  // from p of the bonus row. draft_logits [num_drafts, vocab] are the logits that the drafts were
  // drawn from; coins [num_drafts + 1] in [0, 1), the last one for the draw. memory:
  // memory_floats(vocab) floats.
  LOWLAT_DEVICE static Accepted sampled(const std::int32_t* draft, const float* target_logits,
                                        const float* draft_logits, int num_drafts, int vocab,
                                        float temperature, const float* coins, float* memory,
                                        Scratch& scratch) {
    const float tau = clamp_temperature(temperature);
    float* p = memory;
    float* q = memory + vocab;
    float* tiles = q + vocab;
    for (int i = 0; i < num_drafts; ++i) {
      const std::int64_t start = static_cast<std::int64_t>(i) * vocab;
      softmax(p, target_logits + start, vocab, tau, tiles, scratch);
      softmax(q, draft_logits + start, vocab, tau, tiles, scratch);
      const float p_draft = p[draft[i]], q_draft = q[draft[i]];
      Threads::sync();  // both are read before either is written again
      if (0.0f < q_draft && q_draft <= 1.0f && coins[i] * q_draft < p_draft) continue;
      for (int v = Threads::thread_idx(); v < vocab; v += Block::kNumThreads) {
        const float valid_q = q[v] >= 0.0f && q[v] <= 1.0f ? q[v] : 0.0f;
        p[v] = plat::max(p[v] - valid_q, 0.0f);
      }
      Threads::sync();
      return {i, inverse_cdf(p, vocab, coins[num_drafts], tiles, scratch)};
    }
    softmax(p, target_logits + static_cast<std::int64_t>(num_drafts) * vocab, vocab, tau, tiles,
            scratch);
    return {num_drafts, inverse_cdf(p, vocab, coins[num_drafts], tiles, scratch)};
  }

 private:
  LOWLAT_DEVICE static float tile_sum(const float* mass, int vocab, int tile) {
    const int begin = tile * kAcceptTile;
    const int end = begin + kAcceptTile < vocab ? begin + kAcceptTile : vocab;
    float total = 0.0f;
    for (int v = begin; v < end; ++v) total += mass[v];
    return total;
  }
  // Sum of mass[0 .. vocab), in every thread; a block leaves the sums of the tiles in `tiles`.
  LOWLAT_DEVICE static float sum(const float* mass, int vocab, float* tiles) {
    const int num_tiles = accept_tiles(vocab);
    float total = 0.0f;
    if constexpr (Threads::kAlone) {
      for (int tile = 0; tile < num_tiles; ++tile) total += tile_sum(mass, vocab, tile);
    } else {
      for (int tile = Threads::thread_idx(); tile < num_tiles; tile += Block::kNumThreads) {
        tiles[tile] = tile_sum(mass, vocab, tile);
      }
      Threads::sync();
      for (int tile = 0; tile < num_tiles; ++tile) total += tiles[tile];
    }
    return total;
  }
};

// One thread calls these: as Acceptance, with memory of 2 * vocab floats.
LOWLAT_DEVICE Accepted accept_greedy(const std::int32_t* draft, const float* target_logits,
                                     int num_drafts, int vocab) {
  Acceptance<OneThread>::Scratch scratch;
  return Acceptance<OneThread>::greedy(draft, target_logits, num_drafts, vocab, scratch);
}
LOWLAT_DEVICE std::int32_t inverse_cdf(const float* mass, int vocab, float coin) {
  Acceptance<OneThread>::Scratch scratch;
  return Acceptance<OneThread>::inverse_cdf(mass, vocab, coin, nullptr, scratch);
}
LOWLAT_DEVICE Accepted accept_sampled(const std::int32_t* draft, const float* target_logits,
                                      const float* draft_logits, int num_drafts, int vocab,
                                      float temperature, const float* coins, float* memory) {
  Acceptance<OneThread>::Scratch scratch;
  return Acceptance<OneThread>::sampled(draft, target_logits, draft_logits, num_drafts, vocab,
                                        temperature, coins, memory, scratch);
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
