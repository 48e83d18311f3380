// persistent/units.hpp: the work of a layer in pieces between two hand-offs, each for all rows of a
// step on one rank. A unit composes stages over rows and touches no peer. The persistent schedule
// strings units into its kernels with tagged exchanges between them; the plain path runs the same
// units one by one.
//
// One block runs a unit whole (on scalar that is the rank's thread). Every row's result depends on
// that row and the cache alone, so rows may come in any grouping: decode, verify or prompt chunks.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include <cstdint>

#include "persistent/rank.hpp"
#include "stages/compress.hpp"
#include "stages/draft.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"
#include "stages/index.hpp"
#include "stages/kv.hpp"
#include "stages/linear.hpp"
#include "stages/norm.hpp"
#include "stages/pool.hpp"
#include "stages/pool_state.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

using Block = plat::Block<256>;

// What differs between a target layer and a draft stage.
struct LayerCall {
  const LayerWeights& weights;
  const stages::RopeTable& rope;
  int layer_idx;
  int num_experts, experts_per_token;
  stages::GateSum gate_sum;
  bool quantized_o;  // wo_a takes block-fp8 input
};

inline LayerCall target_call(const Rank& rank, int layer_idx) {
  const LayerWeights& weights = rank.weights->layers[layer_idx];
  return {weights,
          weights.plan.ratio == 0 ? rank.window_rope : rank.compressed_rope,
          layer_idx,
          rank.shape.kNumExperts,
          rank.shape.kExpertsPerToken,
          rank.rules->target_gate_sum,
          rank.rules->quantized_o};
}
inline LayerCall draft_call(const Rank& rank, int stage_idx) {
  return {
      rank.weights->stages[stage_idx],  rank.window_rope,       stage_idx, rank.shape.kDraftExperts,
      rank.shape.kDraftExpertsPerToken, stages::GateSum::draft, false};
}

// ------------------------------------------------------------------ small helpers

inline stages::E4m3Weights<stages::ScaleUe8m0> fp8_rows(const Fp8Weight& w, int k, int block) {
  return {w.codes, k, {w.scales, k / block}, block};
}
inline stages::Fp4Weights fp4_rows(const Fp4Weight& w, int expert, int n, int k) {
  const std::int64_t first = static_cast<std::int64_t>(expert) * n;
  return {w.codes + first * (k / 2), k / 2, w.scales + first * (k / 32), k / 32};
}

// The full slot of a position of a request, -1 where the cache has no page for it.
inline std::int32_t slot_of(const Rows& rows, int request, std::int64_t position, int page_size) {
  const std::int32_t page =
      rows.page_table[request * std::int64_t{rows.page_table_stride} + position / page_size];
  return page < 0 ? -1 : static_cast<std::int32_t>(page * page_size + position % page_size);
}

// Stored index keys of one request by entry, through its page table.
template <int kDataBytes>
struct RequestIndexRows {
  stages::IndexPaged<const std::uint8_t, kDataBytes> pool;
  const std::int32_t* page_table;
  int entries_per_page;
  stages::IndexRow<const std::uint8_t, kDataBytes> row(std::int64_t entry) const {
    const std::int64_t page = page_table[entry / entries_per_page];
    return pool.row(page * entries_per_page + entry % entries_per_page);
  }
};

// visit(request, begin, end) of each request: its rows begin .. end - 1 of the step, without the
// padding before and behind. Requests that only pad are not visited.
template <class Visit>
inline void for_each_request(const Rows& rows, Visit&& visit) {
  for (int t = 0; t < rows.num_rows;) {
    const int request = rows.request_idx[t];
    int begin = -1, end = -1;
    for (; t < rows.num_rows && rows.request_idx[t] == request; ++t) {
      if (rows.slots[t] < 0) continue;
      if (begin < 0) begin = t;
      end = t + 1;
    }
    if (begin >= 0) visit(request, begin, end);
  }
}

inline void quantize_rows(float* out, const std::uint16_t* x, int num_rows, int n, int group) {
  for (int t = 0; t < num_rows; ++t) {
    stages::quantize_row(out + std::int64_t{t} * n, x + std::int64_t{t} * n, n, group);
  }
}

// ------------------------------------------------------------------ hyper-connections

// residual = post * y + comb^T residual, of one row.
inline void mix_in(Rank& rank, int row_idx, const stages::HcParams& params) {
  const int hidden = rank.shape.kHidden;
  std::uint16_t* residual =
      rank.buffers.residual + std::int64_t{row_idx} * shape::kNumStreams * hidden;
  stages::hc_post<Block>(residual, residual, rank.buffers.y + std::int64_t{row_idx} * hidden,
                         params.post, params.comb, hidden, 0, hidden);
}

// out_mix[num_outputs] of one row: `weights` against the residual as it is now.
inline void mix_row(Rank& rank, std::int64_t row_idx, const HcWeights& weights, float* out_mix,
                    int num_outputs) {
  const auto& s = rank.shape;
  const std::int64_t width = std::int64_t{shape::kNumStreams} * s.kHidden;
  stages::HcStats<Block>::Scratch scratch;
  stages::expand_bf16(rank.buffers.wide_f32, rank.buffers.residual + row_idx * width,
                      static_cast<int>(width));
  stages::HcStats<Block>::mix(out_mix, rank.buffers.wide_f32, weights.fn, s.kHidden, s.kNormEps,
                              scratch, num_outputs);
}

// params of one row, from the residual as it is now.
inline void mix_stats(Rank& rank, int row_idx, const HcWeights& weights, stages::HcParams& out) {
  const auto& s = rank.shape;
  float mix[stages::kHcOutputs];
  mix_row(rank, row_idx, weights, mix, stages::kHcOutputs);
  stages::HcStats<Block>::params(out, mix, weights.base, weights.scale, s.kHcEps, s.kSinkhornIters);
}

// x of one row: the sublayer's input.
inline void combine_norm(Rank& rank, int row_idx, const float* pre, const std::uint16_t* gain) {
  const auto& s = rank.shape;
  stages::RmsNorm<Block>::Scratch scratch;
  stages::hc_combine_norm<Block>(
      rank.buffers.x + std::int64_t{row_idx} * s.kHidden,
      rank.buffers.residual + std::int64_t{row_idx} * shape::kNumStreams * s.kHidden, pre, gain,
      s.kHidden, s.kNormEps, rank.buffers.wide_f32, scratch, rank.rules->hc_statistic);
}

// Statistics of a layer's attention, then x of one row.
inline void enter_attention(Rank& rank, int row_idx, const LayerWeights& w) {
  stages::HcParams& params = rank.buffers.hc_attn[row_idx];
  mix_stats(rank, row_idx, w.hc_attn, params);
  combine_norm(rank, row_idx,
               rank.rules->own_pre ? params.pre : rank.buffers.pre + row_idx * shape::kNumStreams,
               w.attn_norm);
}

// The attention's y into the streams; statistics of the ffn; then its x of one row.
inline void enter_ffn(Rank& rank, int row_idx, const LayerWeights& w) {
  const stages::HcParams& before = rank.buffers.hc_attn[row_idx];
  stages::HcParams& params = rank.buffers.hc_ffn[row_idx];
  mix_in(rank, row_idx, before);
  mix_stats(rank, row_idx, w.hc_ffn, params);
  combine_norm(rank, row_idx, rank.rules->own_pre ? params.pre : before.pre, w.ffn_norm);
}

// The ffn's y into the streams, and what the next attention or the head combines with.
inline void leave_ffn(Rank& rank, int row_idx) {
  const stages::HcParams& params = rank.buffers.hc_ffn[row_idx];
  mix_in(rank, row_idx, params);
  if (rank.rules->own_pre) return;
  for (int k = 0; k < shape::kNumStreams; ++k) {
    rank.buffers.pre[row_idx * shape::kNumStreams + k] = params.pre[k];
  }
}

// ------------------------------------------------------------------ ends of the stack

// partial[t] = the embedding where this rank owns the token, else 0.
inline void embed_partial(Rank& rank, const Rows& rows) {
  const auto& s = rank.shape;
  for (int t = 0; t < rows.num_rows; ++t) {
    float* out = rank.buffers.partial + std::int64_t{t} * s.kHidden;
    const int local = rows.token_ids[t] - s.kTpRank * s.kVocabLocal;
    if (local >= 0 && local < s.kVocabLocal) {
      stages::expand_bf16(out, rank.weights->embed + std::int64_t{local} * s.kHidden, s.kHidden);
    } else {
      for (int h = 0; h < s.kHidden; ++h) out[h] = 0.0f;
    }
  }
}

// Four equal streams from y, and the pre that makes the first combine take stream 0.
inline void spread_streams(Rank& rank, int row_idx) {
  const int hidden = rank.shape.kHidden;
  const std::uint16_t* y = rank.buffers.y + std::int64_t{row_idx} * hidden;
  for (int k = 0; k < shape::kNumStreams; ++k) {
    std::uint16_t* stream =
        rank.buffers.residual + (std::int64_t{row_idx} * shape::kNumStreams + k) * hidden;
    for (int h = 0; h < hidden; ++h) stream[h] = y[h];
    rank.buffers.pre[row_idx * shape::kNumStreams + k] = k == 0 ? 1.0f : 0.0f;
  }
}

// logits_local[i] of row `row_idx` for this rank's vocabulary: combine, norm, head, bf16 logits.
// After the last layer's post. num_rows rows of `row_ids` (NULL: 0, 1, ..). `hc` is used where
// combines have their own weights; the mean of squares is over the rounded sums in both models.
inline void head_logits(Rank& rank, const std::uint16_t* norm, const HcWeights& hc,
                        const std::int32_t* row_ids, int num_rows) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  for (int i = 0; i < num_rows; ++i) {
    const std::int64_t row_idx = row_ids != nullptr ? row_ids[i] : i;
    if (rank.rules->own_pre) {
      float mix[shape::kNumStreams];
      mix_row(rank, row_idx, hc, mix, shape::kNumStreams);
      stages::HcStats<Block>::pre(b.pre + row_idx * shape::kNumStreams, mix, hc.base, hc.scale[0],
                                  s.kHcEps);
    }
    stages::RmsNorm<Block>::Scratch scratch;
    std::uint16_t* x = b.x + std::int64_t{i} * s.kHidden;
    stages::hc_combine_norm<Block>(x, b.residual + row_idx * shape::kNumStreams * s.kHidden,
                                   b.pre + row_idx * shape::kNumStreams, norm, s.kHidden,
                                   s.kNormEps, b.wide_f32, scratch);
    stages::expand_bf16(b.x_f32 + std::int64_t{i} * s.kHidden, x, s.kHidden);
  }
  stages::linear(b.x_f32, s.kHidden, num_rows, s.kHidden,
                 stages::Bf16Weights{rank.weights->head, s.kHidden}, 0, s.kVocabLocal, b.w_row,
                 [&](int t, int n, float y) {
                   b.logits_local[std::int64_t{t} * s.kVocabLocal + n] = stages::round_bf16(y);
                 });
}

// ------------------------------------------------------------------ Engram

// engram_e[t]: the columns that this rank holds; the others are left for the gather.
inline void engram_lookup(Rank& rank, const Rows& rows, const LayerWeights& layer) {
  const auto& s = rank.shape;
  const int table = layer.plan.engram;
  const int first_column = s.kTpRank * s.kEngramColumnsLocal;
  int request_row = 0;
  for (int t = 0; t < rows.num_rows; ++t) {
    const int request = rows.request_idx[t];
    request_row = t > 0 && rows.request_idx[t - 1] == request ? request_row + 1 : 0;
    std::int64_t tokens[stages::kEngramShifts];
    stages::engram_window(tokens, rows.token_ids + t - request_row, request_row,
                          rows.history + std::int64_t{request} * (stages::kEngramShifts - 1));
    std::int64_t ids[stages::kEngramColumns];
    stages::engram_hash(ids, tokens, rows.positions[t], rank.weights->token_map,
                        rank.config->engram_multipliers[table],
                        &rank.config->engram_primes[table][0][0], s.kImageToken, s.kEngramPadToken);
    stages::engram_lookup(
        rank.buffers.engram_e + std::int64_t{t} * shape::kEngramColumns * s.kEngramDim, ids,
        first_column, first_column + s.kEngramColumnsLocal, layer.engram.embed.codes,
        layer.engram.embed.scales, layer.engram.first_row, s.kEngramDim);
  }
}

// residual += gate * value, from the gathered engram_e; rows of image tokens stay.
inline void engram_apply(Rank& rank, const Rows& rows, const LayerWeights& layer) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int columns = shape::kEngramColumns * s.kEngramDim;
  quantize_rows(b.engram_q, b.engram_e, rows.num_rows, columns, s.kScaleBlock);
  stages::linear(b.engram_q, columns, rows.num_rows, columns,
                 fp8_rows(layer.engram.wkv, columns, s.kScaleBlock), 0, 5 * s.kHidden, b.w_row,
                 [&](int t, int n, float y) {
                   b.engram_kv[std::int64_t{t} * 5 * s.kHidden + n] = stages::to_bf16(y);
                 });
  for (int t = 0; t < rows.num_rows; ++t) {
    if (rows.token_ids[t] == s.kImageToken) continue;
    stages::EngramApply<Block>::Scratch scratch;
    stages::EngramApply<Block>::run(b.residual + std::int64_t{t} * shape::kNumStreams * s.kHidden,
                                    b.engram_kv + std::int64_t{t} * 5 * s.kHidden,
                                    layer.engram.q_weight, layer.engram.k_weight, s.kHidden,
                                    s.kNormEps, scratch);
  }
}

// ------------------------------------------------------------------ attention front

// x in the two forms that linears take, and each row's turn.
inline void prepare_x(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  quantize_rows(b.x_q, b.x, rows.num_rows, s.kHidden, s.kScaleBlock);
  stages::expand_bf16(b.x_f32, b.x, rows.num_rows * s.kHidden);
  for (int t = 0; t < rows.num_rows; ++t) {
    b.turn[t] = stages::rope_turn(call.rope, rows.positions[t]);
  }
}

// q (RoPE applied) and the normed q_lora.
inline void project_q(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  stages::linear(b.x_q, s.kHidden, rows.num_rows, s.kHidden,
                 fp8_rows(w.wq_a, s.kHidden, s.kScaleBlock), 0, s.kQLora, b.w_row,
                 [&](int t, int n, float y) {
                   b.q_lora[std::int64_t{t} * s.kQLora + n] = stages::to_bf16(y);
                 });
  for (int t = 0; t < rows.num_rows; ++t) {
    std::uint16_t* row = b.q_lora + std::int64_t{t} * s.kQLora;
    stages::RmsNorm<Block>::Scratch scratch;
    stages::expand_bf16(b.wide_f32, row, s.kQLora);
    stages::RmsNorm<Block>::run(row, b.wide_f32, w.q_norm, s.kQLora, s.kNormEps, scratch);
  }
  quantize_rows(b.q_lora_q, b.q_lora, rows.num_rows, s.kQLora, s.kScaleBlock);
  const int width = s.kNumHeadsLocal * shape::kHeadDim;
  stages::linear(
      b.q_lora_q, s.kQLora, rows.num_rows, s.kQLora, fp8_rows(w.wq_b, s.kQLora, s.kScaleBlock), 0,
      width, b.w_row,
      [&](int t, int n, float y) { b.q[std::int64_t{t} * width + n] = stages::to_bf16(y); });
  for (int t = 0; t < rows.num_rows; ++t) {
    for (int head = 0; head < s.kNumHeadsLocal; ++head) {
      std::uint16_t* q = b.q + std::int64_t{t} * width + head * shape::kHeadDim;
      if (rank.rules->head_norm) {
        stages::RmsNorm<Block>::Scratch scratch;
        stages::expand_bf16(b.wide_f32, q, shape::kHeadDim);
        stages::RmsNorm<Block>::run(q, b.wide_f32, shape::kHeadDim, s.kNormEps, scratch);
      }
      stages::Rope<Block>::rotate(q + shape::kHeadDim - shape::kRopeDim, b.turn[t]);
    }
  }
}

// kv fp32 [512] (bf16 values in) to a stored row: norm, RoPE, pack. Nothing is rounded in between.
inline void store_kv(float* kv, const std::uint16_t* gain, float eps, const stages::RopeTurn& turn,
                     stages::KvRow<std::uint8_t> out_row) {
  stages::RmsNorm<Block>::Scratch scratch;
  const float scale = stages::RmsNorm<Block>::scale(kv, shape::kHeadDim, eps, scratch);
  for (int i = 0; i < shape::kHeadDim; ++i) kv[i] = kv[i] * scale * stages::from_bf16(gain[i]);
  stages::Rope<Block>::rotate(kv + shape::kHeadDim - shape::kRopeDim, turn);
  stages::KvPack<Block>::run(out_row, kv);
}

// Projects, norms, rotates and stores the window key of every row that has a slot.
inline void write_window_kv(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  stages::linear(b.x_q, s.kHidden, rows.num_rows, s.kHidden,
                 fp8_rows(call.weights.wkv, s.kHidden, s.kScaleBlock), 0, shape::kHeadDim, b.w_row,
                 [&](int t, int n, float y) {
                   b.kv[std::int64_t{t} * shape::kHeadDim + n] = stages::round_bf16(y);
                 });
  const stages::KvPaged<std::uint8_t> pool{call.weights.kv_swa, s.kPageSize,
                                           stages::kv_page_bytes(s.kPageSize)};
  for (int t = 0; t < rows.num_rows; ++t) {
    if (rows.slots[t] < 0) continue;
    store_kv(b.kv + std::int64_t{t} * shape::kHeadDim, call.weights.kv_norm, s.kNormEps, b.turn[t],
             pool.row(rows.slots[t]));
  }
}

// out[t][0 .. half): values of every row's compressor, then as many scores where there is a wgate.
inline void project_compressor(Rank& rank, const Rows& rows, const CompressorWeights& w, float* out,
                               std::int64_t pitch, int half) {
  const int hidden = rank.shape.kHidden;
  const auto project = [&](const std::uint16_t* weight, int column) {
    stages::linear(rank.buffers.x_f32, hidden, rows.num_rows, hidden,
                   stages::Bf16Weights{weight, hidden}, 0, half, rank.buffers.w_row,
                   [&](int t, int n, float y) { out[t * pitch + column + n] = y; });
  };
  project(w.wkv, 0);
  if (w.wgate != nullptr) project(w.wgate, half);
}

// V4: entries of the blocks that end in this step, of one compressor. Candidates are the step's own
// projections in `step` and, of older tokens, the ring's in `state`; then the ring takes what later
// steps need. store(t, c): the entry that row t completes, c fp32 [layout.dim], pooled, the
// callee's to use.
template <class Store>
inline void pool_entries(Rank& rank, const Rows& rows, const CompressorWeights& w,
                         const stages::PoolLayout& layout, float* step, float* state,
                         Store&& store) {
  const auto& s = rank.shape;
  const std::int64_t width = layout.width();
  const int ring = stages::pool_ring_rows(layout, s.kStateRing);
  project_compressor(rank, rows, w, step, width, layout.half_width());
  for_each_request(rows, [&](int request, int begin, int end) {
    const auto ring_row = [&](std::int64_t position) {
      return state +
             width * (layout.overlaps()
                          ? stages::overlap_state_row(slot_of(rows, request, position, s.kPageSize),
                                                      s.kPageSize, ring)
                          : stages::block_state_row(rows.state_slots[request], position, ring));
    };
    const stages::PoolRows<decltype(ring_row)> candidates{step + begin * width,
                                                          rows.positions[begin], width, ring_row};
    for (int t = begin; t < end; ++t) {
      const std::int64_t position = rows.positions[t];
      if (rows.slots[t] < 0 || (position + 1) % layout.ratio != 0) continue;
      typename stages::PoolEntry<Block>::Scratch scratch;
      stages::PoolEntry<Block>::run(rank.buffers.wide_f32, layout, w.ape, position / layout.ratio,
                                    candidates, 0, layout.dim, scratch);
      store(t, rank.buffers.wide_f32);
    }
    // After the last candidate was read: a row of the ring may be one.
    const std::int64_t length = std::int64_t{rows.positions[end - 1]} + 1;
    for (int t = begin; t < end; ++t) {
      if (rows.slots[t] < 0 ||
          !stages::writes_pool_state(layout, ring, s.kPageSize, rows.positions[t], length)) {
        continue;
      }
      float* out = ring_row(rows.positions[t]);
      for (std::int64_t i = 0; i < width; ++i) out[i] = step[t * width + i];
    }
  });
}

// V4's layers that own a compressed pool: entries, at ratio 4 the index keys too.
inline void write_pooled(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int ratio = w.plan.ratio;
  const auto first_turn = [&](int t) {
    return stages::rope_turn(call.rope, rows.positions[t] - (ratio - 1));
  };
  const int entries_per_page = s.kPageSize / ratio;
  const stages::KvPaged<std::uint8_t> pool{w.kv_extra, entries_per_page,
                                           stages::kv_page_bytes(entries_per_page)};
  pool_entries(rank, rows, w.compressor, {ratio, shape::kHeadDim}, b.compress, w.kv_state,
               [&](int t, float* c) {
                 stages::PooledKey<Block>::Scratch scratch;
                 stages::PooledKey<Block>::entry(c, w.compressor.norm, s.kNormEps, first_turn(t),
                                                 scratch);
                 stages::KvPack<Block>::run(pool.row(rows.slots[t] / ratio), c);
               });
  if (w.plan.index_source < 0) return;
  const stages::IndexPaged<std::uint8_t, stages::kIndexFp8DataBytes> index_pool{
      w.kv_index, stages::kIndexFp8PageBytes};
  pool_entries(rank, rows, w.indexer.compressor, {ratio, shape::kIndexDim}, b.index_compress,
               w.kv_index_state, [&](int t, float* c) {
                 stages::IndexKeyFp8<Block>::Scratch scratch;
                 stages::IndexKeyFp8<Block>::run(index_pool.row(rows.slots[t] / ratio), c,
                                                 w.indexer.compressor.norm, s.kNormEps,
                                                 first_turn(t), scratch);
               });
}

// V4.1's layers that own a compressed pool: projections, pooling, latent, entry, index key.
inline void write_latents(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int ratio = w.plan.ratio;
  project_compressor(rank, rows, w.compressor, b.compress, s.kCompressWidth, shape::kHeadDim);

  const int entries_per_page = s.kPageSize / ratio;
  const stages::KvPaged<std::uint8_t> pool{w.kv_extra, entries_per_page,
                                           stages::kv_page_bytes(entries_per_page)};
  const stages::IndexPaged<std::uint8_t> index_pool{w.kv_index, stages::kIndexPageBytes};
  for (int t = 0; t < rows.num_rows; ++t) {
    if (rows.slots[t] < 0) continue;
    const std::int64_t position = rows.positions[t];
    float* kv = b.compress + std::int64_t{t} * s.kCompressWidth;
    if (ratio == 2) {
      const float* score = kv + shape::kHeadDim;
      float* ring = w.kv_state + std::int64_t{rows.state_slots[rows.request_idx[t]]} *
                                     s.kStateRing * 2 * shape::kHeadDim;
      if (position % 2 == 0) {
        // The pair's first half waits for its second, which may come in a later step.
        float* cell = ring + position % s.kStateRing * 2 * shape::kHeadDim;
        for (int d = 0; d < shape::kHeadDim; ++d) {
          cell[d] = kv[d];
          cell[shape::kHeadDim + d] = score[d];
        }
        continue;
      }
      const float* even = ring + (position - 1) % s.kStateRing * 2 * shape::kHeadDim;
      for (int d = 0; d < shape::kHeadDim; ++d) {
        kv[d] = stages::pool_pair(even[d], even[shape::kHeadDim + d], kv[d], score[d]);
      }
    }
    const std::int64_t entry_slot = rows.slots[t] / ratio;
    const stages::RopeTurn turn =
        ratio == 1 ? b.turn[t] : stages::rope_turn(call.rope, position - (ratio - 1));
    stages::CompressedKey<Block>::Scratch scratch;
    stages::CompressedKey<Block>::latent(b.latent, kv, w.compressor.norm, s.kNormEps, scratch);
    stages::CompressedKey<Block>::entry(kv, b.latent, turn);
    stages::KvPack<Block>::run(pool.row(entry_slot), kv);

    float key[shape::kIndexDim];
    float* latent = b.wide_f32;
    stages::expand_bf16(latent, b.latent, shape::kHeadDim);
    stages::linear(latent, shape::kHeadDim, 1, shape::kHeadDim,
                   stages::Bf16Weights{w.indexer.wk, shape::kHeadDim}, 0, shape::kIndexDim, b.w_row,
                   [&](int, int n, float y) { key[n] = y; });
    stages::IndexKey<Block>::Scratch key_scratch;
    stages::IndexKey<Block>::run(index_pool.row(entry_slot), key, w.indexer.k_norm, s.kNormEps,
                                 turn, key_scratch);
  }
}

// Entries and index keys of the rows that complete one, where a layer owns the pool.
inline void write_compressed(Rank& rank, const Rows& rows, const LayerCall& call) {
  if (rank.rules->pooled_keys) {
    write_pooled(rank, rows, call);
  } else {
    write_latents(rank, rows, call);
  }
}

// Index sources: queries and head weights of every row.
inline void project_index_query(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int width = s.kIndexHeads * shape::kIndexDim;
  stages::linear(b.q_lora_q, s.kQLora, rows.num_rows, s.kQLora,
                 fp8_rows(call.weights.indexer.wq_b, s.kQLora, s.kScaleBlock), 0, width, b.w_row,
                 [&](int t, int n, float y) {
                   b.index_q[std::int64_t{t} * width + n] = stages::round_bf16(y);
                 });
  const bool fp8 = rank.rules->pooled_keys;
  stages::linear(b.x_f32, s.kHidden, rows.num_rows, s.kHidden,
                 stages::Bf16Weights{call.weights.indexer.weights_proj, s.kHidden}, 0,
                 s.kIndexHeads, b.w_row, [&](int t, int head, float y) {
                   b.index_w[std::int64_t{t} * s.kIndexHeads + head] =
                       fp8 ? y : stages::index_weight(stages::to_bf16(y), s.kIndexHeads);
                 });
  for (int t = 0; t < rows.num_rows; ++t) {
    float* query = b.index_q + std::int64_t{t} * width;
    if (!fp8) {
      stages::index_query<Block>(query, s.kIndexHeads, b.turn[t]);
      continue;
    }
    // Scores are of the codes; their scales go into the weights.
    stages::index_query_fp8<Block>(b.index_codes, b.index_scales, query, s.kIndexHeads, b.turn[t]);
    stages::expand_e4m3(query, b.index_codes, 1.0f, width);
    for (int head = 0; head < s.kIndexHeads; ++head) {
      float& weight = b.index_w[std::int64_t{t} * s.kIndexHeads + head];
      weight = stages::index_weight(weight, s.kIndexHeads, b.index_scales[head]);
    }
  }
}

// ------------------------------------------------------------------ selection

// selected[t] (and candidates[t] on the candidate layer), from the stored keys of the pool's owner.
// kDataBytes: of a stored key.
template <int kDataBytes>
inline void select_entries_of(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const lowlat_layer& plan = call.weights.plan;
  const LayerWeights& source = rank.weights->layers[plan.kv_source];
  const int entries_per_page = s.kPageSize / plan.ratio;
  for (int t = 0; t < rows.num_rows; ++t) {
    std::int32_t* selected = b.selected + std::int64_t{t} * s.kIndexTopk;
    // A padded row sees no entry: its request has no pages.
    const int count =
        rows.slots[t] < 0 ? 0 : static_cast<int>((rows.positions[t] + 1) / plan.ratio);
    const RequestIndexRows<kDataBytes> keys{
        {source.kv_index,
         stages::kIndexSlotsPerPage * std::int64_t{kDataBytes + stages::kIndexScaleBytes}},
        rows.page_table + std::int64_t{rows.request_idx[t]} * rows.page_table_stride,
        entries_per_page};
    const float* query = b.index_q + std::int64_t{t} * s.kIndexHeads * shape::kIndexDim;
    const float* weights = b.index_w + std::int64_t{t} * s.kIndexHeads;
    std::int32_t* blocks = b.candidates + std::int64_t{t} * s.kCandidateBlocks;
    stages::SelectScratch scratch;
    if (plan.candidate_source >= 0) {
      const stages::BlockPositions candidates{blocks, s.kCandidateBlocks, s.kCandidateBlockSize,
                                              count};
      const int num_candidates = candidates.size();
      stages::index_scores<Block>(b.scores, query, weights, s.kIndexHeads, keys, candidates, 0,
                                  num_candidates);
      stages::select_top(selected, b.scores, num_candidates, s.kIndexTopk, candidates, scratch);
    } else {
      const stages::AllPositions all;
      stages::index_scores<Block>(b.scores, query, weights, s.kIndexHeads, keys, all, 0, count);
      if (call.layer_idx == s.kCandidateLayer) {
        stages::candidate_blocks(blocks, b.scores, count, s.kCandidateBlockSize, s.kCandidateBlocks,
                                 b.block_scores, scratch);
      }
      stages::select_top(selected, b.scores, count, s.kIndexTopk, all, scratch);
    }
  }
}

inline void select_entries(Rank& rank, const Rows& rows, const LayerCall& call) {
  if (rank.rules->pooled_keys) {
    select_entries_of<stages::kIndexFp8DataBytes>(rank, rows, call);
  } else {
    select_entries_of<stages::kIndexDataBytes>(rank, rows, call);
  }
}

// ------------------------------------------------------------------ attention back

// q becomes the attention output of every row, rotated back.
inline void attend(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const lowlat_layer& plan = call.weights.plan;
  const stages::KvPaged<const std::uint8_t> window{call.weights.kv_swa, s.kPageSize,
                                                   stages::kv_page_bytes(s.kPageSize)};
  const int entries_per_page = plan.ratio == 0 ? 1 : s.kPageSize / plan.ratio;
  const stages::KvPaged<const std::uint8_t> extra{
      plan.ratio == 0 ? nullptr : rank.weights->layers[plan.kv_source].kv_extra, entries_per_page,
      stages::kv_page_bytes(entries_per_page)};
  for (int t = 0; t < rows.num_rows; ++t) {
    const int request = rows.request_idx[t];
    int num_window = 0, num_extra = 0;
    if (rows.slots[t] >= 0) {
      // Context, then (draft) the whole block; (target) up to and with the row itself.
      const std::int64_t last =
          rows.block_rows > 0 ? std::int64_t{rows.prefixes[request]} - 1 : rows.positions[t];
      const std::int64_t first = last + 1 > s.kWindow ? last + 1 - s.kWindow : 0;
      for (std::int64_t position = first; position <= last; ++position) {
        b.window_ids[num_window++] = slot_of(rows, request, position, s.kPageSize);
      }
      for (int i = 0; i < rows.block_rows; ++i) {
        b.window_ids[num_window++] = rows.slots[request * rows.block_rows + i];
      }
      if (plan.ratio > 0) {
        const std::int32_t* page_table =
            rows.page_table + std::int64_t{request} * rows.page_table_stride;
        const auto take = [&](std::int32_t entry) {
          b.entry_ids[num_extra++] =
              page_table[entry / entries_per_page] * entries_per_page + entry % entries_per_page;
        };
        if (plan.index_source < 0) {  // nothing selects: every entry that is whole
          const std::int32_t count = (rows.positions[t] + 1) / plan.ratio;
          for (std::int32_t entry = 0; entry < count; ++entry) take(entry);
        } else {
          const std::int32_t* selected = b.selected + std::int64_t{t} * s.kIndexTopk;
          for (int i = 0; i < s.kIndexTopk && selected[i] >= 0; ++i) take(selected[i]);
        }
      }
    }
    std::uint16_t* o = b.q + std::int64_t{t} * s.kNumHeadsLocal * shape::kHeadDim;
    stages::SparseAttention<Block>::run(
        o, o, s.kNumHeadsLocal,
        stages::KeySet<stages::KvPaged<const std::uint8_t>>{b.window_ids, num_window, window},
        stages::KeySet<stages::KvPaged<const std::uint8_t>>{b.entry_ids, num_extra, extra},
        call.weights.attn_sink, b.attention_memory);
    const stages::RopeTurn back = stages::rope_inverse(b.turn[t]);
    for (int head = 0; head < s.kNumHeadsLocal; ++head) {
      stages::Rope<Block>::rotate(o + (head + 1) * shape::kHeadDim - shape::kRopeDim, back);
    }
  }
}

// u_q from the attention output: each group through its own wo_a.
inline void project_groups(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int width = s.kNumHeadsLocal * shape::kHeadDim, out_width = s.kGroupsLocal * s.kOLora;
  if (call.quantized_o) {
    quantize_rows(b.o_f32, b.q, rows.num_rows, width, s.kScaleBlock);
  } else {
    stages::expand_bf16(b.o_f32, b.q, rows.num_rows * width);
  }
  for (int group = 0; group < s.kGroupsLocal; ++group) {
    stages::linear(b.o_f32 + group * s.kGroupInput, width, rows.num_rows, s.kGroupInput,
                   fp8_rows(call.weights.wo_a, s.kGroupInput, s.kScaleBlock), group * s.kOLora,
                   (group + 1) * s.kOLora, b.w_row, [&](int t, int n, float y) {
                     b.u[std::int64_t{t} * out_width + n] = stages::to_bf16(y);
                   });
  }
  quantize_rows(b.u_q, b.u, rows.num_rows, out_width, s.kScaleBlock);
}

// This rank's part of the o-projection, fp32 and unrounded, into a sink.
template <class Sink>
inline void project_out(Rank& rank, const Rows& rows, const LayerCall& call, Sink&& sink) {
  const auto& s = rank.shape;
  const int width = s.kGroupsLocal * s.kOLora;
  stages::linear(rank.buffers.u_q, width, rows.num_rows, width,
                 fp8_rows(call.weights.wo_b, width, s.kScaleBlock), 0, s.kHidden,
                 rank.buffers.w_row, sink);
}

// ------------------------------------------------------------------ experts

// Hash layers: the experts of each row's token, and the weights that the router gives them.
inline void route_by_token(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int slots = call.experts_per_token;
  for (int t = 0; t < rows.num_rows; ++t) {
    const std::int32_t* chosen = call.weights.tid2eid + std::int64_t{rows.token_ids[t]} * slots;
    for (int slot = 0; slot < slots; ++slot) {
      b.expert_ids[std::int64_t{t} * slots + slot] = chosen[slot];
      stages::linear(b.x_f32 + std::int64_t{t} * s.kHidden, s.kHidden, 1, s.kHidden,
                     stages::Bf16Weights{call.weights.gate, s.kHidden}, chosen[slot],
                     chosen[slot] + 1, b.w_row,
                     [&](int, int, float y) { b.gate_logits[slot] = y; });
    }
    stages::gate_hash(b.expert_weights + std::int64_t{t} * slots, b.gate_logits, slots,
                      s.kRoutedScaling, rank.rules->gate_rule);
  }
}

// Each row's best experts by the router's scores.
inline void route_by_score(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  stages::linear(
      b.x_f32, s.kHidden, rows.num_rows, s.kHidden,
      stages::Bf16Weights{call.weights.gate, s.kHidden}, 0, call.num_experts, b.w_row,
      [&](int t, int n, float y) { b.gate_logits[std::int64_t{t} * call.num_experts + n] = y; });
  for (int t = 0; t < rows.num_rows; ++t) {
    const bool image = call.weights.gate_bias_vl != nullptr && rows.token_ids[t] == s.kImageToken;
    stages::gate_select(b.expert_ids + std::int64_t{t} * call.experts_per_token,
                        b.expert_weights + std::int64_t{t} * call.experts_per_token,
                        b.gate_logits + std::int64_t{t} * call.num_experts,
                        image ? call.weights.gate_bias_vl : call.weights.gate_bias,
                        call.num_experts, call.experts_per_token, call.gate_sum, s.kRoutedScaling,
                        b.gate_scratch, rank.rules->gate_rule);
  }
}

// Router of every row; x_f32 must be prepared.
inline void route(Rank& rank, const Rows& rows, const LayerCall& call) {
  Buffers& b = rank.buffers;
  if (call.weights.plan.hash_gate != 0) {
    route_by_token(rank, rows, call);
  } else {
    route_by_score(rank, rows, call);
  }
  stages::group_pairs(b.pair_offsets, b.pairs, b.expert_ids, rows.num_rows, call.experts_per_token,
                      call.num_experts);
}

// expert_d: every routed (row, slot) through its expert's share on this rank.
inline void run_experts(Rank& rank, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int inner = s.kIntermediateLocal;
  for (int expert = 0; expert < call.num_experts; ++expert) {
    const std::int32_t* pairs = b.pairs + b.pair_offsets[expert];
    const int num_pairs = b.pair_offsets[expert + 1] - b.pair_offsets[expert];
    if (num_pairs == 0) continue;
    stages::expert_gate_up(b.expert_h, b.x_f32, fp4_rows(w.w1, expert, inner, s.kHidden),
                           fp4_rows(w.w3, expert, inner, s.kHidden), pairs, num_pairs,
                           call.experts_per_token, s.kHidden, inner, 0, inner, s.kSwigluLimit,
                           b.w_row);
    stages::expert_down(b.expert_d, b.expert_h, fp4_rows(w.w2, expert, s.kHidden, inner), pairs,
                        num_pairs, b.expert_weights, inner, s.kHidden, 0, s.kHidden, b.w_row);
  }
}

// shared_y: the shared expert's share on this rank; x_q must be prepared.
inline void run_shared_expert(Rank& rank, const Rows& rows, const LayerCall& call) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int inner = s.kIntermediateLocal;
  const auto up = [&](const Fp8Weight& weight, std::uint16_t* out) {
    stages::linear(
        b.x_q, s.kHidden, rows.num_rows, s.kHidden, fp8_rows(weight, s.kHidden, s.kScaleBlock), 0,
        inner, b.w_row,
        [&](int t, int n, float y) { out[std::int64_t{t} * inner + n] = stages::to_bf16(y); });
  };
  up(w.shared_w1, b.shared_gate);
  up(w.shared_w3, b.shared_up);
  for (std::int64_t i = 0; i < std::int64_t{rows.num_rows} * inner; ++i) {
    b.shared_gate[i] = stages::shared_swiglu(b.shared_gate[i], b.shared_up[i], s.kSwigluLimit);
  }
  quantize_rows(b.shared_h_q, b.shared_gate, rows.num_rows, inner, s.kScaleBlock);
  stages::linear(b.shared_h_q, inner, rows.num_rows, inner,
                 fp8_rows(w.shared_w2, inner, s.kScaleBlock), 0, s.kHidden, b.w_row,
                 [&](int t, int n, float y) {
                   b.shared_y[std::int64_t{t} * s.kHidden + n] = stages::to_bf16(y);
                 });
}

// out[H]: what one row of this rank adds to the sum over ranks.
inline void moe_row(Rank& rank, const LayerCall& call, int row_idx, float* out) {
  const int hidden = rank.shape.kHidden, slots = call.experts_per_token;
  stages::expert_sum(out, rank.buffers.expert_d + std::int64_t{row_idx} * slots * hidden,
                     rank.buffers.shared_y + std::int64_t{row_idx} * hidden, slots, hidden, 0,
                     hidden);
}

// ------------------------------------------------------------------ draft

// features[t][which] of a target's rows: the mean of the streams, where the draft wants them as
// they enter layer `layer_idx` (kNumLayers: as they leave the last).
inline void take_features(Rank& rank, const Rows& rows, int layer_idx) {
  const auto& s = rank.shape;
  for (int which = 0; which < s.kNumDraftStages; ++which) {
    const int wanted =
        rank.config->draft_target_layers[which] + (rank.rules->late_features ? 1 : 0);
    if (wanted != layer_idx) continue;
    for (int t = 0; t < rows.num_rows; ++t) {
      stages::draft_feature(
          rank.buffers.features + (std::int64_t{t} * s.kNumDraftStages + which) * s.kHidden,
          rank.buffers.residual + std::int64_t{t} * shape::kNumStreams * s.kHidden, s.kHidden);
    }
  }
}

// Context keys of committed rows of the last target step, into every stage's cache.
inline void inject_context(Rank& rank, const std::int32_t* slots, const std::int32_t* positions,
                           int num_rows) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int width = s.kNumDraftStages * s.kHidden;
  for (int t = 0; t < num_rows; ++t) {
    if (slots[t] < 0) continue;
    stages::quantize_row(b.feature_q, b.features + std::int64_t{t} * width, width, s.kScaleBlock);
    stages::linear(b.feature_q, width, 1, width,
                   fp8_rows(rank.weights->main_proj, width, s.kScaleBlock), 0, s.kHidden, b.w_row,
                   [&](int, int n, float y) { b.wide_f32[n] = stages::round_bf16(y); });
    stages::RmsNorm<Block>::Scratch scratch;
    stages::RmsNorm<Block>::run(b.x, b.wide_f32, rank.weights->main_norm, s.kHidden, s.kNormEps,
                                scratch);
    stages::quantize_row(b.x_q, b.x, s.kHidden, s.kScaleBlock);
    const stages::RopeTurn turn = stages::rope_turn(rank.window_rope, positions[t]);
    for (int stage = 0; stage < s.kNumDraftStages; ++stage) {
      const LayerWeights& w = rank.weights->stages[stage];
      stages::linear(b.x_q, s.kHidden, 1, s.kHidden, fp8_rows(w.wkv, s.kHidden, s.kScaleBlock), 0,
                     shape::kHeadDim, b.w_row,
                     [&](int, int n, float y) { b.kv[n] = stages::round_bf16(y); });
      const stages::KvPaged<std::uint8_t> pool{w.kv_swa, s.kPageSize,
                                               stages::kv_page_bytes(s.kPageSize)};
      store_kv(b.kv, w.kv_norm, s.kNormEps, turn, pool.row(slots[t]));
    }
  }
}

// Rows of the draft blocks: the anchor, then mask tokens, at the positions that follow the prefix.
inline Rows draft_rows(Rank& rank, const lowlat_draft& draft) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  const int block = s.kDraftBlock;
  for (int i = 0; i < draft.batch_size * block; ++i) {
    const int request = i / block, place = i % block;
    b.draft_ids[i] = place == 0 ? draft.anchors[request] : s.kDraftMaskToken;
    b.draft_positions[i] = draft.prefixes[request] + place;
    b.draft_requests[i] = request;
  }
  return {draft.batch_size * block,
          b.draft_ids,
          b.draft_positions,
          b.draft_requests,
          draft.slots,
          draft.page_table,
          draft.page_table_stride,
          nullptr,
          nullptr,
          block,
          draft.prefixes};
}

// logits_local row (request, place): base + Markov bias of the token chosen before, in place; then
// this rank's best id of each request, into `put(request, best)`.
template <class Put>
inline void markov_step(Rank& rank, const lowlat_draft& draft, int place, Put&& put) {
  const auto& s = rank.shape;
  Buffers& b = rank.buffers;
  for (int request = 0; request < draft.batch_size; ++request) {
    const std::int64_t token = place == 0 ? draft.anchors[request] : b.previous[request];
    stages::expand_bf16(b.markov_embedding + std::int64_t{request} * s.kMarkovRank,
                        rank.weights->markov_embed + token * s.kMarkovRank, s.kMarkovRank);
  }
  float* z = b.logits_local + std::int64_t{place} * s.kVocabLocal;
  const std::int64_t pitch = std::int64_t{s.kDraftBlock} * s.kVocabLocal;
  stages::markov_logits(z, z, pitch, b.markov_embedding,
                        stages::Bf16Weights{rank.weights->markov_head, s.kMarkovRank},
                        draft.batch_size, s.kMarkovRank, 0, s.kVocabLocal, b.w_row);
  for (int request = 0; request < draft.batch_size; ++request) {
    stages::PhiloxNoise noise{
        draft.noise_key, static_cast<std::uint32_t>(draft.noise_row[request]),
        static_cast<std::uint32_t>(place),
        static_cast<std::uint32_t>(static_cast<std::uint64_t>(draft.noise_offset[request]))};
    put(request, stages::draft_select(z + request * pitch, s.kVocabLocal, s.kTpRank * s.kVocabLocal,
                                      draft.temperature[request], noise));
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
