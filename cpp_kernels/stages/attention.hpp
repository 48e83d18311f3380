// stages/attention.hpp: sparse attention of one query row over gathered keys, with a sink.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

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
// Roundings: keys are exact in bf16 (e4m3 times a power of two); dot products by stages::dot,
// softmax, probabilities and sums in fp32; one rounding to bf16 at the end. Keys are taken kTile at
// a time with a running maximum, pads left out before tiles are cut, so that the result of a head
// depends on its query and the sequence of its keys only: not on other heads, other rows or where
// pads are.
//
// The block calls, for any range of heads of one row; syncs inside and at the end, after which out
// is written and the memory is free again. A head without keys and sink gives 0. A sink of
// -infinity is none.
template <class Block>
struct SparseAttention {
  // 16 KB of keys stay in a CPU's first cache beside a query and an output of 2 KB each.
  static constexpr int kTile = 8;

  // Floats of `memory` for num_heads heads.
  LOWLAT_DEVICE static constexpr int memory_floats(int num_heads) {
    return kTile * kKvDim + num_heads * (2 * kKvDim + kTile + 3);
  }

  // q, out: bf16 [num_heads, kKvDim] (out may be q). sink: [num_heads].
  template <class FirstRows, class SecondRows>
  LOWLAT_DEVICE static void run(std::uint16_t* out, const std::uint16_t* q, int num_heads,
                                const KeySet<FirstRows>& first, const KeySet<SecondRows>& second,
                                const float* sink, float* memory) {
    const State state(memory, num_heads);
    for (int i = plat::thread_idx(); i < num_heads * kKvDim; i += Block::kNumThreads) {
      state.query[i] = from_bf16(q[i]);
      state.sum[i] = 0.0f;
    }
    for (int head = plat::thread_idx(); head < num_heads; head += Block::kNumThreads) {
      // The sink is a key with no value: it opens the running maximum and the denominator. One of
      // -infinity weighs nothing from the first key on, and without keys the sum is 0 anyway.
      state.top[head] = sink[head];
      state.weight[head] = 1.0f;
    }
    int num_keys = 0;
    gather(state, first, num_keys);
    gather(state, second, num_keys);
    if (num_keys > 0) add_tile(state, num_keys);
    plat::block_sync();
    for (int i = plat::thread_idx(); i < num_heads * kKvDim; i += Block::kNumThreads) {
      // At least 1: what made the maximum is part of it.
      out[i] = to_bf16(state.sum[i] / state.weight[i / kKvDim]);
    }
    plat::block_sync();
  }

 private:
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
    plat::block_sync();
    for (int i = plat::thread_idx(); i < state.num_heads * num_keys; i += Block::kNumThreads) {
      const int head = i / num_keys, key = i % num_keys;
      state.prob[head * kTile + key] =
          dot(state.query + head * kKvDim, state.key + key * kKvDim, kKvDim) * kAttentionScale;
    }
    plat::block_sync();
    for (int head = plat::thread_idx(); head < state.num_heads; head += Block::kNumThreads) {
      float* prob = state.prob + head * kTile;
      float top = state.top[head];
      for (int key = 0; key < num_keys; ++key) top = plat::max(prob[key], top);
      state.rescale[head] = plat::exp(state.top[head] - top);
      float weight = state.weight[head] * state.rescale[head];
      for (int key = 0; key < num_keys; ++key) {
        prob[key] = plat::exp(prob[key] - top);
        weight += prob[key];
      }
      state.top[head] = top;
      state.weight[head] = weight;
    }
    plat::block_sync();
    for (int head = 0; head < state.num_heads; ++head) {
      add_values(state.sum + head * kKvDim, state.key, state.prob + head * kTile,
                 state.rescale[head], num_keys);
    }
    plat::block_sync();
  }

  // sum = sum * rescale + prob[0] * key[0] + prob[1] * key[1] ..., in that order.
  LOWLAT_DEVICE static void add_values(float* sum, const float* key, const float* prob,
                                       float rescale, int num_keys) {
    if (num_keys == kTile) {  // the common case, with the sum in a register over the tile
      for (int d = plat::thread_idx(); d < kKvDim; d += Block::kNumThreads) {
        float total = sum[d] * rescale;
        for (int j = 0; j < kTile; ++j) total += prob[j] * key[j * kKvDim + d];
        sum[d] = total;
      }
      return;
    }
    for (int d = plat::thread_idx(); d < kKvDim; d += Block::kNumThreads) sum[d] *= rescale;
    for (int j = 0; j < num_keys; ++j) {
      for (int d = plat::thread_idx(); d < kKvDim; d += Block::kNumThreads) {
        sum[d] += prob[j] * key[j * kKvDim + d];
      }
    }
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
