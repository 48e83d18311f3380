// stages/attention.hpp: sparse attention of one query row over gathered keys, with a sink.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>
#include <limits>

#include "stages/format.hpp"
#include "stages/kv.hpp"
#include "stages/sum.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr float kAttentionScale = 0.04419417382415922f;  // kKvDim^-0.5

// Keys of one query row, in the order of their ids; -1 is skipped. rows.row(id) gives an id's
// stored row: KvFlat or KvPaged when ids are slots, or a caller's own map.
template <class Rows>
struct KeySet {
  const std::int32_t* ids;
  int num_ids;
  Rows rows;
};

// o_h = sum_j e^(s_j - M) k_j / (sum_j e^(s_j - M) + e^(sink_h - M)),  s_j = scale * (q_h . k_j),
// over the keys of two sets, the first set first. Values are the keys themselves.
//
// Roundings: keys are exact in bf16 (e4m3 times a power of two); dot products, softmax,
// probabilities and sums in fp32; one rounding to bf16 at the end. Maxima are running ones, and
// pads are left out before keys are handed out, so that the result of a head depends on its query
// and the sequence of its keys only: not on other heads, other rows or where pads are.
//
// One thread takes kTile keys at a time, dot products by stages::dot. A block takes a head after
// the other: key number i is warp i % kNumWarps's, lanes split the dimensions, each warp has a
// maximum, a denominator and a sum of its own, and these are joined in the warps' order.
//
// The block calls, for any range of heads of one row; syncs inside and at the end, after which out
// is written and the memory is free again. A head without keys and sink gives 0. A sink of
// -infinity is none.
template <class Block>
struct SparseAttention {
  // 16 KB of keys stay in a CPU's first cache beside a query and an output of 2 KB each.
  static constexpr int kTile = 8;  // of one thread

  // Floats of `memory` for num_heads heads.
  LOWLAT_DEVICE static constexpr int memory_floats(int num_heads) {
    if constexpr (Team<Block>::kAlone) {
      return kTile * kKvDim + num_heads * (2 * kKvDim + kTile + 3);
    } else {
      return Team<Block>::kNumWarps * (kKvDim + 2);
    }
  }

  // q, out: bf16 [num_heads, kKvDim] (out may be q). sink: [num_heads].
  template <class FirstRows, class SecondRows>
  LOWLAT_DEVICE static void run(std::uint16_t* out, const std::uint16_t* q, int num_heads,
                                const KeySet<FirstRows>& first, const KeySet<SecondRows>& second,
                                const float* sink, float* memory) {
    if constexpr (Team<Block>::kAlone) {
      run_alone(out, q, num_heads, first, second, sink, memory);
    } else {
      for (int head = 0; head < num_heads; ++head) {
        run_head(out + head * kKvDim, q + head * kKvDim, first, second, sink[head], memory);
      }
    }
  }

 private:
  // ------------------------------------------------------------------ one thread
  template <class FirstRows, class SecondRows>
  LOWLAT_DEVICE static void run_alone(std::uint16_t* out, const std::uint16_t* q, int num_heads,
                                      const KeySet<FirstRows>& first,
                                      const KeySet<SecondRows>& second, const float* sink,
                                      float* memory) {
    const State state(memory, num_heads);
    for (int i = 0; i < num_heads * kKvDim; ++i) {
      state.query[i] = from_bf16(q[i]);
      state.sum[i] = 0.0f;
    }
    for (int head = 0; head < num_heads; ++head) {
      // The sink is a key with no value: it opens the running maximum and the denominator. One of
      // -infinity weighs nothing from the first key on, and without keys the sum is 0 anyway.
      state.top[head] = sink[head];
      state.weight[head] = 1.0f;
    }
    int num_keys = 0;
    gather(state, first, num_keys);
    gather(state, second, num_keys);
    if (num_keys > 0) add_tile(state, num_keys);
    for (int i = 0; i < num_heads * kKvDim; ++i) {
      // At least 1: what made the maximum is part of it.
      out[i] = to_bf16(state.sum[i] / state.weight[i / kKvDim]);
    }
  }

  struct State {
    LOWLAT_DEVICE State(float* memory, int heads)
        : num_heads(heads),
          key(memory),
          query(key + kTile * kKvDim),
          sum(query + heads * kKvDim),
          prob(sum + heads * kKvDim),
          top(prob + heads * kTile),
          weight(top + heads),
          rescale(weight + heads) {}
    int num_heads;
    float* key;      // [kTile, kKvDim]
    float* query;    // [heads, kKvDim]
    float* sum;      // [heads, kKvDim] of e^(s - top) * key
    float* prob;     // [heads, kTile] scores, then e^(s - top)
    float* top;      // [heads] largest score so far
    float* weight;   // [heads] sum of e^(s - top), the sink's included
    float* rescale;  // [heads] e^(old top - new top)
  };

  template <class Rows>
  LOWLAT_DEVICE static void gather(const State& state, const KeySet<Rows>& set, int& num_keys) {
    for (int i = 0; i < set.num_ids; ++i) {
      if (set.ids[i] < 0) continue;
      if (num_keys == kTile) {
        add_tile(state, kTile);
        num_keys = 0;
      }
      KvUnpack<Block>::run(state.key + num_keys * kKvDim, set.rows.row(set.ids[i]));
      ++num_keys;
    }
  }

  LOWLAT_DEVICE static void add_tile(const State& state, int num_keys) {
    for (int head = 0; head < state.num_heads; ++head) {
      float* prob = state.prob + head * kTile;
      for (int key = 0; key < num_keys; ++key) {
        prob[key] =
            dot(state.query + head * kKvDim, state.key + key * kKvDim, kKvDim) * kAttentionScale;
      }
    }
    for (int head = 0; head < state.num_heads; ++head) {
      state.rescale[head] =
          add_scores(state.prob + head * kTile, num_keys, state.top[head], state.weight[head]);
    }
    for (int head = 0; head < state.num_heads; ++head) {
      add_values(state.sum + head * kKvDim, state.key, state.prob + head * kTile,
                 state.rescale[head], num_keys);
    }
  }

  // sum = sum * rescale + prob[0] * key[0] + prob[1] * key[1] ..., in that order.
  LOWLAT_DEVICE static void add_values(float* sum, const float* key, const float* prob,
                                       float rescale, int num_keys) {
    if (num_keys == kTile) {  // the common case, with the sum in a register over the tile
      for (int d = 0; d < kKvDim; ++d) {
        float total = sum[d] * rescale;
        for (int j = 0; j < kTile; ++j) total += prob[j] * key[j * kKvDim + d];
        sum[d] = total;
      }
      return;
    }
    for (int d = 0; d < kKvDim; ++d) sum[d] *= rescale;
    for (int j = 0; j < num_keys; ++j) {
      for (int d = 0; d < kKvDim; ++d) sum[d] += prob[j] * key[j * kKvDim + d];
    }
  }

  // ------------------------------------------------------------------ both
  // Scores of a tile to e^(s - top) in place, top and weight brought up to date; gives what earlier
  // sums are multiplied with.
  LOWLAT_DEVICE static float add_scores(float* prob, int num_keys, float& top, float& weight) {
    float new_top = top;
    for (int key = 0; key < num_keys; ++key) new_top = plat::max(prob[key], new_top);
    const float rescale = plat::exp(top - new_top);
    weight *= rescale;
    for (int key = 0; key < num_keys; ++key) {
      prob[key] = plat::exp(prob[key] - new_top);
      weight += prob[key];
    }
    top = new_top;
    return rescale;
  }

  // ------------------------------------------------------------------ a block
  static constexpr int kLanes = Team<Block>::kLanes;
  static constexpr int kDims = kKvDim / kLanes;  // of a lane: lane + i * kLanes

  // What one warp has of one head.
  struct WarpState {
    float query[kDims], sum[kDims];
    float top, weight;
    int num_keys;  // of all warps' so far
  };

  template <class FirstRows, class SecondRows>
  LOWLAT_DEVICE static void run_head(std::uint16_t* out, const std::uint16_t* q,
                                     const KeySet<FirstRows>& first,
                                     const KeySet<SecondRows>& second, float sink, float* memory) {
    constexpr int kNumWarps = Team<Block>::kNumWarps;
    const int lane = Team<Block>::lane(), warp_idx = Team<Block>::warp_idx();
    WarpState state{{}, {}, -std::numeric_limits<float>::infinity(), 0.0f, 0};
    for (int i = 0; i < kDims; ++i) state.query[i] = from_bf16(q[lane + i * kLanes]);
    take(state, first);
    take(state, second);

    float* sums = memory;                       // [warps, kKvDim]
    float* tops = memory + kNumWarps * kKvDim;  // [warps]
    float* weights = tops + kNumWarps;          // [warps]
    for (int i = 0; i < kDims; ++i) {
      sums[warp_idx * kKvDim + lane + i * kLanes] = state.sum[i];
    }
    if (lane == 0) {
      tops[warp_idx] = state.top;
      weights[warp_idx] = state.weight;
    }
    Team<Block>::sync();
    float top = sink;
    for (int w = 0; w < kNumWarps; ++w) top = plat::max(tops[w], top);
    // A warp without keys has weight 0 and sum 0, and no maximum to scale by.
    const auto scale_of = [&](float of) { return of == top ? 1.0f : plat::exp(of - top); };
    float weight = scale_of(sink);
    for (int w = 0; w < kNumWarps; ++w) weight += weights[w] * scale_of(tops[w]);
    for (int d = Team<Block>::thread_idx(); d < kKvDim; d += Block::kNumThreads) {
      float sum = 0.0f;
      for (int w = 0; w < kNumWarps; ++w) sum += sums[w * kKvDim + d] * scale_of(tops[w]);
      out[d] = to_bf16(sum / weight);
    }
    Team<Block>::sync();
  }

  // The keys of a set that are the caller's warp's. All lanes look at the ids together.
  template <class Rows>
  LOWLAT_DEVICE static void take(WarpState& state, const KeySet<Rows>& set) {
    constexpr int kNumWarps = Team<Block>::kNumWarps;
    const int lane = Team<Block>::lane(), warp_idx = Team<Block>::warp_idx();
    for (int begin = 0; begin < set.num_ids; begin += kLanes) {
      const std::int32_t id = begin + lane < set.num_ids ? set.ids[begin + lane] : -1;
      const std::uint64_t valid = Team<Block>::warp_ballot(id >= 0);
      for (int i = 0; i < kLanes; ++i) {
        if ((valid >> i & 1u) == 0u) continue;
        if (state.num_keys++ % kNumWarps != warp_idx) continue;
        const std::uint32_t whose = plat::warp_shuffle(static_cast<std::uint32_t>(id), i);
        add_key(state, set.rows.row(static_cast<std::int32_t>(whose)));
      }
    }
  }

  template <class Row>
  LOWLAT_DEVICE static void add_key(WarpState& state, const Row& row) {
    float key[kDims], match = 0.0f;
    for (int i = 0; i < kDims; ++i) {
      key[i] = kv_value(row, Team<Block>::lane() + i * kLanes);
      match += state.query[i] * key[i];
    }
    const float score = Team<Block>::warp_sum(match) * kAttentionScale;
    const float top = plat::max(score, state.top);
    const auto scale_of = [&](float of) { return of == top ? 1.0f : plat::exp(of - top); };
    const float rescale = scale_of(state.top), prob = scale_of(score);
    state.top = top;
    state.weight = state.weight * rescale + prob;
    for (int i = 0; i < kDims; ++i) state.sum[i] = state.sum[i] * rescale + prob * key[i];
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
