// persistent/units.hpp: the work of a layer in pieces between two hand-offs, each for the rows of a
// step on one rank. A unit composes stages and touches no peer. The persistent schedule strings
// units into its kernels with tagged exchanges between them; the plain path runs the same units one
// by one.
//
// A unit is made by one or more blocks: each gets a Share and does its part, and nobody may read
// what a unit wrote before a hand-off, but the block that has the row. On scalar there is one
// block, the rank's thread. Units that are given a row are the affair of one block. All threads of
// a block call; a unit syncs at its end.
//
// Every row's result depends on that row and the cache alone, so rows may come in any grouping:
// decode, verify or prompt chunks; and it does not depend on the number of blocks.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include <cstdint>
#include <type_traits>

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

// One block's part of a unit.
struct Share {
  int idx, num;               // of the rank's blocks
  const BlockMemory* memory;  // this block's
};

// What differs between a target layer and a draft stage.
struct LayerCall {
  const LayerWeights& weights;
  const stages::RopeTable& rope;
  int layer_idx;
  int num_experts, experts_per_token;
  stages::GateSum gate_sum;
  bool quantized_o;  // wo_a takes block-fp8 input

  LOWLAT_DEVICE bool owns_pool() const {
    return weights.plan.ratio > 0 && weights.plan.kv_source == layer_idx;
  }
  LOWLAT_DEVICE bool selects() const {
    return weights.plan.ratio > 0 && weights.plan.index_source == layer_idx;
  }
};

LOWLAT_DEVICE LayerCall target_call(const Rank& rank, int layer_idx) {
  const LayerWeights& weights = rank.weights->layers[layer_idx];
  return {weights,
          weights.plan.ratio == 0 ? rank.window_rope : rank.compressed_rope,
          layer_idx,
          rank.shape.kNumExperts,
          rank.shape.kExpertsPerToken,
          rank.rules->target_gate_sum,
          rank.rules->quantized_o && weights.wo_a_bf16 == nullptr};
}
LOWLAT_DEVICE LayerCall draft_call(const Rank& rank, int stage_idx) {
  return {
      rank.weights->stages[stage_idx],  rank.window_rope,       stage_idx, rank.shape.kDraftExperts,
      rank.shape.kDraftExpertsPerToken, stages::GateSum::draft, false};
}

// ------------------------------------------------------------------ small helpers

LOWLAT_DEVICE stages::E4m3Weights<stages::ScaleUe8m0> fp8_rows(const Fp8Weight& w, int k,
                                                               int block) {
  return {w.codes, k, {w.scales, k / block}, block};
}
LOWLAT_DEVICE stages::Fp4Weights fp4_rows(const Fp4Weight& w, int expert, int n, int k) {
  const std::int64_t first = static_cast<std::int64_t>(expert) * n;
  return {w.codes + first * (k / 2), k / 2, w.scales + first * (k / 32), k / 32};
}
// The same of a matrix [E, n, k] in Marlin's tiles, from row first_row of the expert on.
LOWLAT_DEVICE stages::Fp4Weights marlin_rows(const Fp4Weight& w, int expert, int n, int k,
                                             int first_row) {
  const std::int64_t first = static_cast<std::int64_t>(expert) * n;
  return {w.codes + first * (k / 2), 0, w.scales + first * (k / 32), 0, n, first_row};
}
// An expert's three matrices.
struct Expert {
  stages::Fp4Weights w1, w3, w2;
};
LOWLAT_DEVICE Expert expert_rows(const Rank& rank, const LayerWeights& w, int expert) {
  const int hidden = rank.shape.kHidden, inner = rank.shape.kIntermediateLocal;
  const int tiled = rank.weights->marlin_inner;
  if (plat::kMarlinExperts && tiled > 0) {
    return {marlin_rows(w.w1, expert, 2 * tiled, hidden, 0),
            marlin_rows(w.w1, expert, 2 * tiled, hidden, tiled),
            marlin_rows(w.w2, expert, hidden, tiled, 0)};
  }
  return {fp4_rows(w.w1, expert, inner, hidden), fp4_rows(w.w3, expert, inner, hidden),
          fp4_rows(w.w2, expert, hidden, inner)};
}

// What linear_into() reads first of the weight rows row_begin .. row_end - 1 of k values in
// `row_bytes` bytes each; `together` of the sink.
LOWLAT_DEVICE Early early_rows(const Share& share, const void* rows, std::int64_t row_bytes,
                               int row_begin, int row_end, int together = 1) {
  if constexpr (Threads::kAlone) {
    return {};
  } else {
    const int first = row_begin + share.idx * stages::DotTeam<Block>::kNum * together;
    if (rows == nullptr || first >= row_end) return {};
    return {static_cast<const std::uint8_t*>(rows) + first * row_bytes, row_bytes, row_end - first,
            together};
  }
}

// body(i) for the items of 0 .. n - 1 that are the share's.
template <class Body>
LOWLAT_DEVICE void for_share(const Share& share, int n, Body&& body) {
  for (int i = share.idx; i < n; i += share.num) body(i);
}

// stages::linear over the share's part of the weight rows row_begin .. row_end - 1. No sync.
template <class Weights, class Sink>
LOWLAT_DEVICE void linear_into(const Share& share, const float* x, std::int64_t x_stride,
                               int num_rows, int k, const Weights& weights, int row_begin,
                               int row_end, Sink&& sink) {
  if constexpr (Threads::kAlone) {
    stages::linear(x, x_stride, num_rows, k, weights, row_begin, row_end, share.memory->w_row,
                   sink);
  } else {
    constexpr int kStep =
        stages::DotTeam<Block>::kNum * stages::rows_together<std::remove_cvref_t<Sink>>();
    for (int begin = row_begin + share.idx * kStep; begin < row_end; begin += share.num * kStep) {
      const int end = begin + kStep < row_end ? begin + kStep : row_end;
      stages::linear<Block>(x, x_stride, num_rows, k, weights, begin, end, nullptr, sink);
    }
  }
}

// Where a linear's results go, at out[t * pitch + n]: as bf16, as fp32 of their bf16 value, or in
// fp32 as they are. Told at run time, so that a kernel holds the product once and not for each use:
// code that runs once a layer costs its fetch.
struct LinearOut {
  std::uint16_t* bf16;
  float* f32;
  std::int64_t pitch;
  bool rounded;

  LOWLAT_DEVICE void operator()(int t, int n, float y) const {
    if (bf16 != nullptr) {
      bf16[t * pitch + n] = stages::to_bf16(y);
    } else {
      f32[t * pitch + n] = rounded ? stages::round_bf16(y) : y;
    }
  }
};
LOWLAT_DEVICE LinearOut as_bf16(std::uint16_t* out, std::int64_t pitch) {
  return {out, nullptr, pitch, false};
}
LOWLAT_DEVICE LinearOut as_rounded(float* out, std::int64_t pitch) {
  return {nullptr, out, pitch, true};
}
LOWLAT_DEVICE LinearOut as_f32(float* out, std::int64_t pitch) {
  return {nullptr, out, pitch, false};
}

LOWLAT_UNIT void linear_fp8(const Share& share, const float* x, std::int64_t x_stride, int num_rows,
                            int k, const Fp8Weight& w, int block, int row_begin, int row_end,
                            const LinearOut& out) {
  linear_into(share, x, x_stride, num_rows, k, fp8_rows(w, k, block), row_begin, row_end, out);
}
LOWLAT_UNIT void linear_bf16(const Share& share, const float* x, std::int64_t x_stride,
                             int num_rows, int k, const std::uint16_t* w, int row_begin,
                             int row_end, const LinearOut& out) {
  linear_into(share, x, x_stride, num_rows, k, stages::Bf16Weights{w, k}, row_begin, row_end, out);
}

// The other small pieces that many units have.
LOWLAT_UNIT void quantize(float* out, const std::uint16_t* x, int n, int group) {
  stages::quantize_row<Block>(out, x, n, group);
}
LOWLAT_UNIT void expand(float* out, const std::uint16_t* x, int n) {
  stages::expand_bf16<Block>(out, x, n);
}
// out bf16 [n] = norm of x fp32 [n]; gain NULL: none. Syncs at the end; out may be what x was
// expanded from.
LOWLAT_UNIT void norm_row(std::uint16_t* out, const float* x, const std::uint16_t* gain, int n,
                          float eps) {
  using Norm = stages::RmsNorm<Block>;
  LOWLAT_SHARED(Norm::Scratch, scratch);
  if (gain == nullptr) {
    Norm::run(out, x, n, eps, scratch);
  } else {
    Norm::run(out, x, gain, n, eps, scratch);
  }
  plat::block_sync();
}

LOWLAT_DEVICE std::int32_t within(std::int32_t value, std::int32_t count) {
  return 0 <= value && value < count ? value : 0;
}

// The pool page of a request's logical page, -1 where the cache has none for it.
LOWLAT_DEVICE std::int32_t page_of(const Rank& rank, const Rows& rows, int request,
                                   std::int64_t page_idx) {
  const std::int32_t page =
      rows.page_table[request * std::int64_t{rows.page_table_stride} + page_idx];
  return page < rank.pools.num_pages ? page : -1;
}
// The full slot of a position of a request, -1 where the cache has no page for it.
LOWLAT_DEVICE std::int32_t slot_of(const Rank& rank, const Rows& rows, int request,
                                   std::int64_t position) {
  const int page_size = rank.shape.kPageSize;
  const std::int32_t page = page_of(rank, rows, request, position / page_size);
  return page < 0 ? -1 : static_cast<std::int32_t>(page * page_size + position % page_size);
}
LOWLAT_DEVICE std::int32_t checked_slot(const Rank& rank, std::int32_t slot) {
  return slot < std::int64_t{rank.pools.num_pages} * rank.shape.kPageSize ? slot : -1;
}
// Where the window's key of a full slot lies, -1 where it has none.
LOWLAT_DEVICE std::int32_t window_slot(const Rank& rank, std::int32_t slot) {
  const Pools& pools = rank.pools;
  if (slot < 0 || pools.window_slots == nullptr) return slot;
  const std::int64_t at = pools.window_slots[slot];
  return at < std::int64_t{pools.num_window_pages} * rank.shape.kPageSize
             ? static_cast<std::int32_t>(at)
             : -1;
}

// Stored index keys of one request by entry, through its page table.
template <int kDataBytes>
struct RequestIndexRows {
  stages::IndexPaged<const std::uint8_t, kDataBytes> pool;
  const std::int32_t* page_table;
  int entries_per_page, num_pages;
  LOWLAT_DEVICE stages::IndexRow<const std::uint8_t, kDataBytes> row(std::int64_t entry) const {
    const std::int64_t page = within(page_table[entry / entries_per_page], num_pages);
    return pool.row(page * entries_per_page + entry % entries_per_page);
  }
};

// visit(request, begin, end) of each request: its rows begin .. end - 1 of the step, without the
// padding before and behind. Requests that only pad are not visited.
template <class Visit>
LOWLAT_DEVICE void for_each_request(const Rows& rows, Visit&& visit) {
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

// ------------------------------------------------------------------ rows of a forward

// The arrays of a forward as the units read them: the rank's own, which take_row() fills.
LOWLAT_DEVICE Rows target_rows(const Rank& rank, const TargetStep& call) {
  const Buffers& b = rank.buffers;
  if (call.is_hosted()) {
    const lowlat_hosted_step& step = call.hosted;
    return {call.num_rows(),      step.batch_size,   b.row_token,     b.row_position,
            b.row_request,        b.row_slot,        step.page_table, step.page_table_stride,
            step.num_table_pages, b.request_history, b.request_state, 0};
  }
  const lowlat_step& step = call.step;
  return {step.num_rows,          step.batch_size, b.row_token,      b.row_position,
          b.row_request,          b.row_slot,      step.page_table,  step.page_table_stride,
          step.page_table_stride, step.history,    step.state_slots, 0};
}
LOWLAT_DEVICE Rows draft_rows(const Rank& rank, const lowlat_draft& draft) {
  const Buffers& b = rank.buffers;
  return {draft.batch_size * rank.shape.kDraftBlock,
          draft.batch_size,
          b.row_token,
          b.row_position,
          b.row_request,
          b.row_slot,
          draft.page_table,
          draft.page_table_stride,
          draft.page_table_stride,
          nullptr,
          nullptr,
          rank.shape.kDraftBlock};
}
LOWLAT_DEVICE Rows draft_rows(const Rank& rank, const lowlat_hosted_draft& draft) {
  const Buffers& b = rank.buffers;
  const int block = rank.shape.kDraftBlock;
  return {draft.batch_size * block,
          draft.batch_size,
          b.row_token,
          b.row_position,
          b.row_request,
          b.row_slot,
          nullptr,
          0,
          0,
          nullptr,
          nullptr,
          block,
          draft.window,
          draft.window_stride};
}
LOWLAT_DEVICE Rows draft_rows(const Rank& rank, const DraftStep& call) {
  return call.is_hosted() ? draft_rows(rank, call.hosted) : draft_rows(rank, call.draft);
}

// One row of the caller's arrays. What a model has not (a device's arrays are not looked at by the
// host) is taken as padding, or as 0: such a row's results mean nothing, and no memory but the
// step's own is touched.
LOWLAT_UNIT void take_row(const Rank& rank, const Rows& rows, int row_idx, std::int32_t token,
                          std::int32_t position, std::int32_t request, std::int32_t slot) {
  if (Threads::leads()) {
    const auto& s = rank.shape;
    const Buffers& b = rank.buffers;
    const std::int64_t positions =
        (rows.table_pages < s.kNumPages ? rows.table_pages : s.kNumPages) *
        std::int64_t{s.kPageSize};
    const bool whole =
        0 <= position && position < positions && 0 <= request && request < rows.batch_size;
    b.row_token[row_idx] = within(token, s.kVocab);
    b.row_position[row_idx] = whole ? position : 0;
    b.row_request[row_idx] = within(request, rows.batch_size);
    b.row_slot[row_idx] = whole ? checked_slot(rank, slot) : -1;
  }
  plat::block_sync();
}
// A slot of kv.swa as an engine gives it; -1 for one that is none.
LOWLAT_DEVICE std::int32_t given_window_slot(const Rank& rank, std::int32_t slot) {
  const bool known = slot < std::int64_t{rank.pools.num_window_pages} * rank.shape.kPageSize;
  return known && slot >= 0 ? slot : -1;
}
// A value of 64 bits as the rows keep it; -1 for one that no model has.
LOWLAT_DEVICE std::int32_t narrowed(std::int64_t value) {
  return 0 <= value && value <= 0x7fff'ffff ? static_cast<std::int32_t>(value) : -1;
}
// What a hosted step says of one request: its ring, and the tokens before its first row. Where the
// step is one of decoding, the row's own token follows them.
LOWLAT_DEVICE void take_request(const Rank& rank, const lowlat_hosted_step& step, int request,
                                std::int32_t token, bool padded) {
  const auto& s = rank.shape;
  const std::int32_t place = within(narrowed(step.requests[request]), rank.pools.num_requests);
  rank.buffers.request_state[request] = place;
  if (s.kNumEngrams == 0) return;
  constexpr int kBefore = stages::kEngramShifts - 1;
  std::int32_t* kept = rank.pools.history + std::int64_t{place} * kBefore;
  std::int32_t* out = rank.buffers.request_history + request * kBefore;
  for (int i = 0; i < kBefore; ++i) {
    const bool known = 0 <= kept[i] && kept[i] < s.kVocab;
    out[i] = known ? kept[i] : within(s.kImageToken, s.kVocab);
  }
  if (step.mode != LOWLAT_DECODE || padded) return;
  for (int i = 0; i + 1 < kBefore; ++i) kept[i] = out[i + 1];
  kept[kBefore - 1] = token;
}
// What a step that does not end leaves: no number that could be taken for a result.
LOWLAT_DEVICE void spoil_row(std::uint16_t* hidden, std::int64_t width, int row_idx) {
  constexpr std::uint16_t kNan = 0x7fc0;
  spread(width, [&](std::int64_t h) { hidden[row_idx * width + h] = kNan; });
}
LOWLAT_DEVICE void spoil_row(const Rank& rank, const lowlat_hosted_step& step, int row_idx) {
  spoil_row(step.hidden, rank.shape.kHidden, row_idx);
}
// Values of a row that a hosted draft leaves.
LOWLAT_DEVICE std::int64_t draft_width(const Rank& rank) {
  return std::int64_t{rank.shape.kHidden} * (rank.rules->own_pre ? shape::kNumStreams : 1);
}
LOWLAT_DEVICE void spoil_row(const Rank& rank, const lowlat_hosted_draft& draft, int row_idx) {
  spoil_row(draft.hidden, draft_width(rank), row_idx);
}
LOWLAT_UNIT void take_target_row(const Rank& rank, const Rows& rows, const TargetStep& call,
                                 int row_idx) {
  if (!call.is_hosted()) {
    const lowlat_step& step = call.step;
    take_row(rank, rows, row_idx, step.token_ids[row_idx], step.positions[row_idx],
             step.request_idx[row_idx], step.slots[row_idx]);
    return;
  }
  const lowlat_hosted_step& step = call.hosted;
  spoil_row(rank, step, row_idx);
  const int request = row_idx / step.tokens_per_request;
  const std::int32_t slot = narrowed(step.slots[row_idx]);
  const std::int32_t taken = slot < rank.shape.kPageSize ? -1 : slot;
  take_row(rank, rows, row_idx, narrowed(step.token_ids[row_idx]),
           narrowed(step.positions[row_idx]), request, taken);
  if (row_idx % step.tokens_per_request == 0 && Threads::leads()) {
    take_request(rank, step, request, rank.buffers.row_token[row_idx],
                 rank.buffers.row_slot[row_idx] < 0);
  }
  plat::block_sync();
}
// Rows of the draft blocks: the anchor, then mask tokens, at the positions that follow the prefix.
LOWLAT_UNIT void take_draft_row(const Rank& rank, const Rows& rows, const lowlat_draft& draft,
                                int row_idx) {
  const int block = rank.shape.kDraftBlock;
  const int request = row_idx / block, place = row_idx % block;
  take_row(rank, rows, row_idx, place == 0 ? draft.anchors[request] : rank.shape.kDraftMaskToken,
           draft.prefixes[request] + place, request, draft.slots[row_idx]);
}
LOWLAT_UNIT void take_draft_row(const Rank& rank, const Rows& rows,
                                const lowlat_hosted_draft& draft, int row_idx) {
  spoil_row(rank, draft, row_idx);
  if (Threads::leads()) {
    const Buffers& b = rank.buffers;
    const std::int32_t position = narrowed(draft.positions[row_idx]);
    const std::int32_t slot = given_window_slot(rank, draft.key_slots[row_idx]);
    const bool whole =
        0 <= position && position < rank.config->max_positions && slot >= rank.shape.kPageSize;
    b.row_token[row_idx] = within(narrowed(draft.token_ids[row_idx]), rank.shape.kVocab);
    b.row_position[row_idx] = whole ? position : 0;
    b.row_request[row_idx] = row_idx / rows.block_rows;
    b.row_slot[row_idx] = whole ? slot : -1;
  }
  plat::block_sync();
}
LOWLAT_DEVICE void take_draft_row(const Rank& rank, const Rows& rows, const DraftStep& call,
                                  int row_idx) {
  if (call.is_hosted()) {
    take_draft_row(rank, rows, call.hosted, row_idx);
  } else {
    take_draft_row(rank, rows, call.draft, row_idx);
  }
}

// ------------------------------------------------------------------ hyper-connections

// residual = post * y + comb^T residual, of one row.
LOWLAT_UNIT void mix_in(const Rank& rank, int row_idx, const stages::HcParams& params) {
  const int hidden = rank.shape.kHidden;
  std::uint16_t* residual =
      rank.buffers.residual + std::int64_t{row_idx} * shape::kNumStreams * hidden;
  stages::hc_post<Block>(residual, residual, rank.buffers.y + std::int64_t{row_idx} * hidden,
                         params.post, params.comb, hidden, 0, hidden);
  plat::block_sync();
}

// The sums behind the statistics of residual rows, as they are now: of each row's products with
// `weights` [num_outputs, 4 H], and of its squares. Row i of num_rows is row_ids[i] of num_all, or
// i. One thread takes a row after the other; blocks take a sum each, because a row's weights are
// two megabytes.
LOWLAT_UNIT void mix_sums(const Rank& rank, const Share& share, const HcWeights& weights,
                          int num_outputs, int num_rows, const std::int32_t* row_ids, int num_all) {
  const auto& s = rank.shape;
  const int n = shape::kNumStreams * s.kHidden;
  const auto residual_of = [&](int i) {
    const std::int64_t row_idx = row_ids == nullptr ? i : within(row_ids[i], num_all);
    return rank.buffers.residual + row_idx * n;
  };
  if constexpr (Threads::kAlone) {
    float* row = share.memory->wide_f32;
    for (int i = 0; i < num_rows; ++i) {
      float* sums = rank.buffers.mix_sums + i * kMixPitch;
      expand(row, residual_of(i), n);
      for (int output = 0; output < num_outputs; ++output) {
        sums[output] = stages::dot(weights.fn + std::int64_t{output} * n, row, n);
      }
      sums[stages::kHcOutputs] = stages::dot(row, row, n);
    }
  } else {
    using Sum = stages::BlockSum<Block>;
    LOWLAT_SHARED(Sum::Scratch, scratch);
    for_share(share, num_rows * (num_outputs + 1), [&](int item) {
      const int i = item / (num_outputs + 1), output = item % (num_outputs + 1);
      const std::uint16_t* row = residual_of(i);
      const float* fn = weights.fn + std::int64_t{output} * n;
      const bool squares = output == num_outputs;
      float sum = 0.0f;
      constexpr int kAhead = stages::kDotAhead, kStep = Threads::kNumThreads;
      int at = Threads::thread_idx();
      for (; at + (kAhead - 1) * kStep < n; at += kAhead * kStep) {
        float left[kAhead], right[kAhead];
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          right[ahead] = stages::from_bf16(row[at + ahead * kStep]);
          left[ahead] = squares ? right[ahead] : fn[at + ahead * kStep];
        }
        for (int ahead = 0; ahead < kAhead; ++ahead) sum += left[ahead] * right[ahead];
      }
      for (; at < n; at += kStep) {
        const float right = stages::from_bf16(row[at]);
        sum += (squares ? right : fn[at]) * right;
      }
      sum = Sum::run(sum, scratch);
      const int place = squares ? stages::kHcOutputs : output;
      if (Threads::leads()) rank.buffers.mix_sums[i * kMixPitch + place] = sum;
    });
  }
}

// out_mix[num_outputs], in every thread, of row i of mix_sums().
LOWLAT_DEVICE void mix_of(const Rank& rank, int i, float* out_mix, int num_outputs) {
  const auto& s = rank.shape;
  const float* sums = rank.buffers.mix_sums + i * kMixPitch;
  const float mean_sq =
      sums[stages::kHcOutputs] / static_cast<float>(shape::kNumStreams * s.kHidden);
  const float scale = plat::rsqrt(mean_sq + s.kNormEps);
  for (int output = 0; output < num_outputs; ++output) out_mix[output] = scale * sums[output];
}

// params of one row, from mix_sums().
LOWLAT_UNIT void mix_stats(const Rank& rank, int row_idx, const HcWeights& weights,
                           stages::HcParams& out) {
  const auto& s = rank.shape;
  float mix[stages::kHcOutputs];
  mix_of(rank, row_idx, mix, stages::kHcOutputs);
  stages::HcStats<Block>::params(out, mix, weights.base, weights.scale, s.kHcEps, s.kSinkhornIters);
  plat::block_sync();
}

// x[out_row] of residual row row_idx, by the mean of squares that `statistic` names.
LOWLAT_UNIT void combine_norm(const Rank& rank, const Share& share, std::int64_t row_idx,
                              std::int64_t out_row, const float* pre, const std::uint16_t* gain,
                              stages::HcStatistic statistic) {
  const auto& s = rank.shape;
  using Norm = stages::RmsNorm<Block>;
  LOWLAT_SHARED(Norm::Scratch, scratch);
  stages::hc_combine_norm<Block>(rank.buffers.x + out_row * s.kHidden,
                                 rank.buffers.residual + row_idx * shape::kNumStreams * s.kHidden,
                                 pre, gain, s.kHidden, s.kNormEps, share.memory->wide_f32, scratch,
                                 statistic);
  plat::block_sync();
}

// x of one row in the two forms that linears take.
LOWLAT_UNIT void prepare_x(const Rank& rank, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const std::int64_t first = std::int64_t{row_idx} * s.kHidden;
  quantize(b.x_q + first, b.x + first, s.kHidden, s.kScaleBlock);
  expand(b.x_f32 + first, b.x + first, s.kHidden);
  plat::block_sync();
}

// Statistics of a layer's attention from mix_sums(), x of one row, and the row's turn.
LOWLAT_UNIT void enter_attention(const Rank& rank, const Share& share, const Rows& rows,
                                 int row_idx, const LayerCall& call) {
  const Buffers& b = rank.buffers;
  stages::HcParams& params = b.hc_attn[row_idx];
  mix_stats(rank, row_idx, call.weights.hc_attn, params);
  combine_norm(rank, share, row_idx, row_idx,
               rank.rules->own_pre ? params.pre : b.pre + row_idx * shape::kNumStreams,
               call.weights.attn_norm, rank.rules->hc_statistic);
  stages::rope_turn<Block>(b.turn[row_idx], call.rope, rows.positions[row_idx]);
  prepare_x(rank, row_idx);
}

// The attention's y of one row into the streams.
LOWLAT_UNIT void leave_attention(const Rank& rank, int row_idx) {
  mix_in(rank, row_idx, rank.buffers.hc_attn[row_idx]);
}

// Statistics of the ffn from mix_sums(); then its x of one row.
LOWLAT_UNIT void enter_ffn(const Rank& rank, const Share& share, int row_idx,
                           const LayerWeights& w) {
  const stages::HcParams& before = rank.buffers.hc_attn[row_idx];
  stages::HcParams& params = rank.buffers.hc_ffn[row_idx];
  mix_stats(rank, row_idx, w.hc_ffn, params);
  combine_norm(rank, share, row_idx, row_idx, rank.rules->own_pre ? params.pre : before.pre,
               w.ffn_norm, rank.rules->hc_statistic);
  prepare_x(rank, row_idx);
}

// The ffn's y into the streams, and what the next attention or the head combines with.
LOWLAT_UNIT void leave_ffn(const Rank& rank, int row_idx) {
  const stages::HcParams& params = rank.buffers.hc_ffn[row_idx];
  mix_in(rank, row_idx, params);
  if (rank.rules->own_pre) return;
  spread(shape::kNumStreams, [&](std::int64_t k) {
    rank.buffers.pre[row_idx * shape::kNumStreams + k] = params.pre[k];
  });
  plat::block_sync();
}

// ------------------------------------------------------------------ ends of the stack

// partial of one row: the embedding where this rank owns the token, else 0.
LOWLAT_UNIT void embed_partial(const Rank& rank, const Rows& rows, int row_idx) {
  const auto& s = rank.shape;
  float* out = rank.buffers.partial + std::int64_t{row_idx} * s.kHidden;
  const int local = rows.token_ids[row_idx] - s.kTpRank * s.kVocabLocal;
  if (local >= 0 && local < s.kVocabLocal) {
    expand(out, rank.weights->embed + std::int64_t{local} * s.kHidden, s.kHidden);
  } else {
    spread(s.kHidden, [&](std::int64_t h) { out[h] = 0.0f; });
  }
  plat::block_sync();
}

// Four equal streams from y, and the pre that makes the first combine take stream 0.
LOWLAT_UNIT void spread_streams(const Rank& rank, int row_idx) {
  const int hidden = rank.shape.kHidden;
  const std::uint16_t* y = rank.buffers.y + std::int64_t{row_idx} * hidden;
  for (int k = 0; k < shape::kNumStreams; ++k) {
    std::uint16_t* stream =
        rank.buffers.residual + (std::int64_t{row_idx} * shape::kNumStreams + k) * hidden;
    spread(hidden, [&](std::int64_t h) { stream[h] = y[h]; });
    if (Threads::leads()) {
      rank.buffers.pre[row_idx * shape::kNumStreams + k] = k == 0 ? 1.0f : 0.0f;
    }
  }
  plat::block_sync();
}

// x_f32[i] of row `row_idx` of the last layer: combine, norm. `hc` is used where combines have
// their own weights, whose mix_sums() are row i's; the mean of squares is over the rounded sums in
// both models.
LOWLAT_UNIT void enter_head(const Rank& rank, const Share& share, const std::uint16_t* norm,
                            const HcWeights& hc, int row_idx, int i) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  float* pre = b.pre + std::int64_t{row_idx} * shape::kNumStreams;
  if (rank.rules->own_pre) {
    float mix[shape::kNumStreams];
    mix_of(rank, i, mix, shape::kNumStreams);
    if (Threads::leads()) {
      stages::HcStats<Block>::pre(pre, mix, hc.base, hc.scale[0], s.kHcEps);
    }
    plat::block_sync();
  }
  combine_norm(rank, share, row_idx, i, pre, norm, stages::HcStatistic::rounded);
  const std::int64_t first = std::int64_t{i} * s.kHidden;
  expand(b.x_f32 + first, b.x + first, s.kHidden);
  plat::block_sync();
}

// logits_local of rows 0 .. num_rows - 1 of x_f32, this rank's vocabulary, bf16 values.
LOWLAT_UNIT void head_logits(const Rank& rank, const Share& share, int num_rows) {
  const auto& s = rank.shape;
  linear_bf16(share, rank.buffers.x_f32, s.kHidden, num_rows, s.kHidden, rank.weights->head, 0,
              s.kVocabLocal, as_rounded(rank.buffers.logits_local, s.kVocabLocal));
}

// ------------------------------------------------------------------ Engram

// engram_e of one row: the columns that this rank holds; the others are left for the gather.
LOWLAT_UNIT void engram_lookup(const Rank& rank, const Rows& rows, const LayerWeights& layer,
                               int row_idx) {
  const auto& s = rank.shape;
  const int table = layer.plan.engram;
  const int first_column = s.kTpRank * s.kEngramColumnsLocal;
  const int request = rows.request_idx[row_idx];
  int request_row = 0;
  while (request_row < row_idx && rows.request_idx[row_idx - request_row - 1] == request) {
    ++request_row;
  }
  std::int32_t history[stages::kEngramShifts - 1];
  for (int i = 0; i < stages::kEngramShifts - 1; ++i) {
    history[i] =
        within(rows.history[std::int64_t{request} * (stages::kEngramShifts - 1) + i], s.kVocab);
  }
  std::int64_t tokens[stages::kEngramShifts];
  stages::engram_window(tokens, rows.token_ids + row_idx - request_row, request_row, history);
  using Ids = std::int64_t[stages::kEngramColumns];
  LOWLAT_SHARED(Ids, ids);
  stages::engram_hash<Block>(ids, tokens, rows.positions[row_idx], rank.weights->token_map,
                             rank.config->engram_multipliers[table],
                             &rank.config->engram_primes[table][0][0], s.kImageToken,
                             s.kEngramPadToken);
  plat::block_sync();
  stages::engram_lookup<Block>(
      rank.buffers.engram_e + std::int64_t{row_idx} * shape::kEngramColumns * s.kEngramDim, ids,
      first_column, first_column + s.kEngramColumnsLocal, layer.engram.embed.codes,
      layer.engram.embed.scales, layer.engram.first_row, s.kEngramDim);
  plat::block_sync();
}

// engram_q of one row, from the gathered engram_e.
LOWLAT_UNIT void engram_quantize(const Rank& rank, int row_idx) {
  const int columns = shape::kEngramColumns * rank.shape.kEngramDim;
  const std::int64_t first = std::int64_t{row_idx} * columns;
  quantize(rank.buffers.engram_q + first, rank.buffers.engram_e + first, columns,
           rank.shape.kScaleBlock);
  plat::block_sync();
}

// engram_kv of every row.
LOWLAT_UNIT void engram_project(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerWeights& layer) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int columns = shape::kEngramColumns * s.kEngramDim;
  linear_fp8(share, b.engram_q, columns, rows.num_rows, columns, layer.engram.wkv, s.kScaleBlock, 0,
             5 * s.kHidden, as_bf16(b.engram_kv, 5 * s.kHidden));
}

// residual += gate * value of one row; rows of image tokens stay.
LOWLAT_UNIT void engram_apply(const Rank& rank, const Rows& rows, const LayerWeights& layer,
                              int row_idx) {
  const auto& s = rank.shape;
  if (rows.token_ids[row_idx] == s.kImageToken) return;
  using Apply = stages::EngramApply<Block>;
  LOWLAT_SHARED(Apply::Scratch, scratch);
  Apply::run(rank.buffers.residual + std::int64_t{row_idx} * shape::kNumStreams * s.kHidden,
             rank.buffers.engram_kv + std::int64_t{row_idx} * 5 * s.kHidden, layer.engram.q_weight,
             layer.engram.k_weight, s.kHidden, s.kNormEps, scratch);
  plat::block_sync();
}

// ------------------------------------------------------------------ attention front

// out[t][0 .. half): values of every row's compressor, then as many scores where there is a wgate.
LOWLAT_UNIT void project_compressor(const Rank& rank, const Share& share, const Rows& rows,
                                    const CompressorWeights& w, float* out, std::int64_t pitch,
                                    int half) {
  const int hidden = rank.shape.kHidden;
  const auto project = [&](const std::uint16_t* weight, int column) {
    linear_bf16(share, rank.buffers.x_f32, hidden, rows.num_rows, hidden, weight, 0, half,
                as_f32(out + column, pitch));
  };
  project(w.wkv, 0);
  if (w.wgate != nullptr) project(w.wgate, half);
}

// Everything that an attention projects from x: q_lora, the window's key, compressors' rows.
LOWLAT_UNIT void project_x(const Rank& rank, const Share& share, const Rows& rows,
                           const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  linear_fp8(share, b.x_q, s.kHidden, rows.num_rows, s.kHidden, w.wq_a, s.kScaleBlock, 0, s.kQLora,
             as_bf16(b.q_lora, s.kQLora));
  linear_fp8(share, b.x_q, s.kHidden, rows.num_rows, s.kHidden, w.wkv, s.kScaleBlock, 0,
             shape::kHeadDim, as_rounded(b.kv, shape::kHeadDim));
  if (!call.owns_pool()) return;
  if (!rank.rules->pooled_keys) {
    project_compressor(rank, share, rows, w.compressor, b.compress, s.kCompressWidth,
                       shape::kHeadDim);
    return;
  }
  const stages::PoolLayout layout{w.plan.ratio, shape::kHeadDim};
  project_compressor(rank, share, rows, w.compressor, b.compress, layout.width(),
                     layout.half_width());
  if (w.plan.index_source < 0) return;
  const stages::PoolLayout index_layout{w.plan.ratio, shape::kIndexDim};
  project_compressor(rank, share, rows, w.indexer.compressor, b.index_compress,
                     index_layout.width(), index_layout.half_width());
}

// q_lora_q of one row: normed, as a block-fp8 linear sees it.
LOWLAT_UNIT void norm_q_lora(const Rank& rank, const Share& share, const LayerWeights& w,
                             int row_idx) {
  const auto& s = rank.shape;
  std::uint16_t* row = rank.buffers.q_lora + std::int64_t{row_idx} * s.kQLora;
  float* wide = share.memory->wide_f32;
  expand(wide, row, s.kQLora);
  plat::block_sync();
  norm_row(row, wide, w.q_norm, s.kQLora, s.kNormEps);
  quantize(rank.buffers.q_lora_q + std::int64_t{row_idx} * s.kQLora, row, s.kQLora, s.kScaleBlock);
  plat::block_sync();
}

// kv fp32 [512] (bf16 values in) to a stored row: norm, RoPE, pack. Nothing is rounded in between.
LOWLAT_UNIT void store_kv(float* kv, const std::uint16_t* gain, float eps,
                          const stages::RopeTurn& turn, stages::KvRow<std::uint8_t> out_row) {
  using Norm = stages::RmsNorm<Block>;
  LOWLAT_SHARED(Norm::Scratch, scratch);
  Norm::run(kv, kv, gain, shape::kHeadDim, eps, scratch);
  plat::block_sync();
  stages::Rope<Block>::rotate(kv + shape::kHeadDim - shape::kRopeDim, turn);
  plat::block_sync();
  stages::KvPack<Block>::run(out_row, kv);
  plat::block_sync();
}

LOWLAT_DEVICE stages::KvPaged<std::uint8_t> window_pool(const Rank& rank, const LayerWeights& w) {
  const int page_size = rank.shape.kPageSize;
  return {w.kv_swa, page_size, stages::kv_page_bytes(page_size)};
}

// Norms, rotates and stores the window key of one row, where it has a slot.
LOWLAT_UNIT void write_window_kv(const Rank& rank, const Rows& rows, const LayerCall& call,
                                 int row_idx) {
  const Buffers& b = rank.buffers;
  const std::int32_t slot = window_slot(rank, rows.slots[row_idx]);
  if (slot < 0) return;
  store_kv(b.kv + std::int64_t{row_idx} * shape::kHeadDim, call.weights.kv_norm,
           rank.shape.kNormEps, b.turn[row_idx], window_pool(rank, call.weights).row(slot));
}

// V4: entries of the blocks that end in this step, of one compressor and of the share's requests.
// Candidates are the step's own projections in `step` and, of older tokens, the ring's in `state`;
// then the ring takes what later steps need. store(t, c): the entry that row t completes, c fp32
// [layout.dim], pooled, the callee's to use.
template <class Store>
LOWLAT_DEVICE void pool_entries(const Rank& rank, const Share& share, const Rows& rows,
                                const CompressorWeights& w, const stages::PoolLayout& layout,
                                const float* step, float* state, Store&& store) {
  const auto& s = rank.shape;
  const std::int64_t width = layout.width();
  const int ring = stages::pool_ring_rows(layout, s.kStateRing);
  for_each_request(rows, [&](int request, int begin, int end) {
    if (request % share.num != share.idx) return;
    const auto ring_row = [&](std::int64_t position) {
      const std::int64_t row =
          layout.overlaps()
              ? stages::overlap_state_row(window_slot(rank, slot_of(rank, rows, request, position)),
                                          s.kPageSize, ring)
              : stages::block_state_row(within(rows.state_slots[request], rank.pools.num_requests),
                                        position, ring);
      return state + width * (row > 0 ? row : 0);
    };
    const stages::PoolRows<decltype(ring_row)> candidates{step + begin * width,
                                                          rows.positions[begin], width, ring_row};
    using Entry = stages::PoolEntry<Block>;
    LOWLAT_SHARED(Entry::Scratch, scratch);
    float* c = share.memory->wide_f32;
    for (int t = begin; t < end; ++t) {
      const std::int64_t position = rows.positions[t];
      if (rows.slots[t] < 0 || (position + 1) % layout.ratio != 0) continue;
      Entry::run(c, layout, w.ape, position / layout.ratio, candidates, 0, layout.dim, scratch);
      store(t, c);
      plat::block_sync();
    }
    // After the last candidate was read: a row of the ring may be one.
    const std::int64_t length = std::int64_t{rows.positions[end - 1]} + 1;
    for (int t = begin; t < end; ++t) {
      if (rows.slots[t] < 0 ||
          !stages::writes_pool_state(layout, ring, s.kPageSize, rows.positions[t], length)) {
        continue;
      }
      float* out = ring_row(rows.positions[t]);
      spread(width, [&](std::int64_t i) { out[i] = step[t * width + i]; });
    }
    plat::block_sync();
  });
}

// V4's layers that own a compressed pool: entries, at ratio 4 the index keys too.
LOWLAT_UNIT void write_pooled(const Rank& rank, const Share& share, const Rows& rows,
                              const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int ratio = w.plan.ratio;
  LOWLAT_SHARED(stages::RopeTurn, turn);
  const auto make_turn = [&](int t) {
    stages::rope_turn<Block>(turn, call.rope, rows.positions[t] - (ratio - 1));
    plat::block_sync();
  };
  const int entries_per_page = s.kPageSize / ratio;
  const stages::KvPaged<std::uint8_t> pool{w.kv_extra, entries_per_page,
                                           stages::kv_page_bytes(entries_per_page)};
  pool_entries(rank, share, rows, w.compressor, {ratio, shape::kHeadDim}, b.compress, w.kv_state,
               [&](int t, float* c) {
                 using Key = stages::PooledKey<Block>;
                 LOWLAT_SHARED(Key::Scratch, scratch);
                 make_turn(t);
                 Key::entry(c, w.compressor.norm, s.kNormEps, turn, scratch);
                 stages::KvPack<Block>::run(pool.row(rows.slots[t] / ratio), c);
               });
  if (w.plan.index_source < 0) return;
  const stages::IndexPaged<std::uint8_t, stages::kIndexFp8DataBytes> index_pool{
      w.kv_index, stages::kIndexFp8PageBytes};
  pool_entries(rank, share, rows, w.indexer.compressor, {ratio, shape::kIndexDim}, b.index_compress,
               w.kv_index_state, [&](int t, float* c) {
                 using Key = stages::IndexKeyFp8<Block>;
                 LOWLAT_SHARED(Key::Scratch, scratch);
                 make_turn(t);
                 Key::run(index_pool.row(rows.slots[t] / ratio), c, w.indexer.compressor.norm,
                          s.kNormEps, turn, scratch);
               });
}

// V4.1's ratio 2: values, then scores, of a row's request at a position, in its ring.
LOWLAT_DEVICE float* pair_state(const Rank& rank, const Rows& rows, const LayerWeights& w,
                                int row_idx, std::int64_t position) {
  const auto& s = rank.shape;
  const std::int64_t request =
      within(rows.state_slots[rows.request_idx[row_idx]], rank.pools.num_requests);
  return w.kv_state + (request * s.kStateRing + position % s.kStateRing) * 2 * shape::kHeadDim;
}

// Keeps the first half of a pair for its second, which may come in a later step: a unit after the
// one that reads the ring. Of rows that would share a cell the last one writes.
LOWLAT_UNIT void keep_pair(const Rank& rank, const Rows& rows, const LayerCall& call, int row_idx) {
  const auto& s = rank.shape;
  if (rows.slots[row_idx] < 0 || rows.positions[row_idx] % 2 != 0) return;
  const int later = row_idx + s.kStateRing;
  if (later < rows.num_rows && rows.request_idx[later] == rows.request_idx[row_idx] &&
      rows.slots[later] >= 0) {
    return;
  }
  const float* row = rank.buffers.compress + std::int64_t{row_idx} * s.kCompressWidth;
  float* cell = pair_state(rank, rows, call.weights, row_idx, rows.positions[row_idx]);
  spread(2 * shape::kHeadDim, [&](std::int64_t i) { cell[i] = row[i]; });
  plat::block_sync();
}

// V4.1's layers that own a compressed pool, one row: pooling, latent, entry, index key. A row at
// ratio 2 takes its pair's first half from the step where it is there, else from the ring.
LOWLAT_UNIT void write_latent(const Rank& rank, const Share& share, const Rows& rows,
                              const LayerCall& call, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int ratio = w.plan.ratio, t = row_idx;
  if (rows.slots[t] < 0) return;
  const std::int64_t position = rows.positions[t];
  float* kv = b.compress + std::int64_t{t} * s.kCompressWidth;
  if (ratio == 2) {
    if (position % 2 == 0) return;  // the pair's first half waits for its second
    const bool in_step =
        t > 0 && rows.request_idx[t - 1] == rows.request_idx[t] && rows.slots[t - 1] >= 0;
    const float* even =
        in_step ? kv - s.kCompressWidth : pair_state(rank, rows, w, t, position - 1);
    spread(shape::kHeadDim, [&](std::int64_t d) {
      kv[d] = stages::pool_pair(even[d], even[shape::kHeadDim + d], kv[d], kv[shape::kHeadDim + d]);
    });
    plat::block_sync();
  }
  const stages::IndexPaged<std::uint8_t> index_pool{w.kv_index, stages::kIndexPageBytes,
                                                    w.kv_index_scales};
  const int entries_per_page = s.kPageSize / ratio;
  const stages::KvPaged<std::uint8_t> pool{w.kv_extra, entries_per_page,
                                           stages::kv_page_bytes(entries_per_page)};
  const std::int64_t entry_slot = rows.slots[t] / ratio;
  LOWLAT_SHARED(stages::RopeTurn, turn);
  stages::rope_turn<Block>(turn, call.rope, position - (ratio - 1));
  plat::block_sync();
  using Compressed = stages::CompressedKey<Block>;
  LOWLAT_SHARED(Compressed::Scratch, scratch);
  std::uint16_t* latent = share.memory->latent;
  Compressed::latent(latent, kv, w.compressor.norm, s.kNormEps, scratch);
  Compressed::entry(kv, latent, turn);
  stages::KvPack<Block>::run(pool.row(entry_slot), kv);

  using Key = float[shape::kIndexDim];
  LOWLAT_SHARED(Key, key);
  float* wide = share.memory->wide_f32;
  expand(wide, latent, shape::kHeadDim);
  plat::block_sync();
  linear_bf16({0, 1, share.memory}, wide, shape::kHeadDim, 1, shape::kHeadDim, w.indexer.wk, 0,
              shape::kIndexDim, as_f32(key, 0));
  plat::block_sync();
  using IndexKey = stages::IndexKey<Block>;
  LOWLAT_SHARED(IndexKey::Scratch, key_scratch);
  IndexKey::run(index_pool.row(entry_slot), key, w.indexer.k_norm, s.kNormEps, turn, key_scratch);
}

// Entries and index keys of the rows that complete one, where a layer owns the pool.
LOWLAT_UNIT void write_compressed(const Rank& rank, const Share& share, const Rows& rows,
                                  const LayerCall& call) {
  if (rank.rules->pooled_keys) {
    write_pooled(rank, share, rows, call);
  } else {
    for_share(share, rows.num_rows, [&](int t) { write_latent(rank, share, rows, call, t); });
  }
}

// q as projected; index sources: index queries and head weights too, as projected.
LOWLAT_UNIT void project_q(const Rank& rank, const Share& share, const Rows& rows,
                           const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int width = s.kNumHeadsLocal * shape::kHeadDim;
  linear_fp8(share, b.q_lora_q, s.kQLora, rows.num_rows, s.kQLora, call.weights.wq_b, s.kScaleBlock,
             0, width, as_bf16(b.q, width));
  if (call.owns_pool() && !rank.rules->pooled_keys && call.weights.plan.ratio == 2) {
    for_share(share, rows.num_rows, [&](int t) { keep_pair(rank, rows, call, t); });
  }
  if (!call.selects()) return;
  const int index_width = s.kIndexHeads * shape::kIndexDim;
  linear_fp8(share, b.q_lora_q, s.kQLora, rows.num_rows, s.kQLora, call.weights.indexer.wq_b,
             s.kScaleBlock, 0, index_width, as_rounded(b.index_q, index_width));
  linear_bf16(share, b.x_f32, s.kHidden, rows.num_rows, s.kHidden,
              call.weights.indexer.weights_proj, 0, s.kIndexHeads,
              as_f32(b.index_w, s.kIndexHeads));
}

// Index sources: the query of one row, ready for scores.
LOWLAT_UNIT void finish_index_query(const Rank& rank, const Share& share, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int width = s.kIndexHeads * shape::kIndexDim;
  float* query = b.index_q + std::int64_t{row_idx} * width;
  float* weights = b.index_w + std::int64_t{row_idx} * s.kIndexHeads;
  if (!rank.rules->pooled_keys) {
    spread(s.kIndexHeads, [&](std::int64_t head) {
      weights[head] = stages::index_weight(stages::to_bf16(weights[head]), s.kIndexHeads);
    });
    stages::index_query<Block>(query, s.kIndexHeads, b.turn[row_idx]);
    return;
  }
  // Scores are of the codes; their scales go into the weights.
  const BlockMemory& own = *share.memory;
  stages::index_query_fp8<Block>(own.index_codes, own.index_scales, query, s.kIndexHeads,
                                 b.turn[row_idx]);
  spread(width, [&](std::int64_t i) { query[i] = stages::from_e4m3(own.index_codes[i]); });
  spread(s.kIndexHeads, [&](std::int64_t head) {
    weights[head] = stages::index_weight(weights[head], s.kIndexHeads, own.index_scales[head]);
  });
  plat::block_sync();
}

// ------------------------------------------------------------------ selection

// Entries that a row may select from: a padded row sees none, as its request has no pages.
LOWLAT_DEVICE int entries_seen(const Rows& rows, int row_idx, int ratio) {
  return rows.slots[row_idx] < 0 ? 0 : (rows.positions[row_idx] + 1) / ratio;
}

// use(position_of, num_candidates) of a row: all entries, or those of its candidate blocks.
template <class Use>
LOWLAT_DEVICE void with_candidates(const Rank& rank, const Rows& rows, const LayerCall& call,
                                   int row_idx, Use&& use) {
  const auto& s = rank.shape;
  const int count = entries_seen(rows, row_idx, call.weights.plan.ratio);
  if (call.weights.plan.candidate_source < 0) {
    use(stages::AllPositions{}, count);
    return;
  }
  const stages::BlockPositions candidates{
      rank.buffers.candidates + std::int64_t{row_idx} * s.kCandidateBlocks, s.kCandidateBlocks,
      s.kCandidateBlockSize, count};
  use(candidates, candidates.size());
}

// Scores of up to kScoreRows rows from `first` on, from the stored keys of the pool's owner.
// kDataBytes: of a stored key.
template <int kDataBytes>
LOWLAT_DEVICE void score_entries_of(const Rank& rank, const Share& share, const Rows& rows,
                                    const LayerCall& call, int first) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const lowlat_layer& plan = call.weights.plan;
  const LayerWeights& source = rank.weights->layers[plan.kv_source];
  for (int t = first; t < rows.num_rows && t < first + kScoreRows; ++t) {
    const RequestIndexRows<kDataBytes> keys{
        {source.kv_index,
         stages::kIndexSlotsPerPage * std::int64_t{kDataBytes + stages::kIndexScaleBytes},
         source.kv_index_scales},
        rows.page_table + std::int64_t{rows.request_idx[t]} * rows.page_table_stride,
        s.kPageSize / plan.ratio,
        rank.pools.num_pages};
    const float* query = b.index_q + std::int64_t{t} * s.kIndexHeads * shape::kIndexDim;
    const float* weights = b.index_w + std::int64_t{t} * s.kIndexHeads;
    float* scores = b.scores + (t - first) * Buffers::score_pitch(s);
    with_candidates(rank, rows, call, t, [&](const auto& position_of, int n) {
      // Rows begin at different shares, so that short ones do not all fall to the first.
      const int chunk = Threads::kAlone ? n : 4 * stages::DotTeam<Block>::kNum;
      for (int begin = (share.idx + t) % share.num * chunk; begin < n; begin += share.num * chunk) {
        stages::index_scores<Block>(scores, query, weights, s.kIndexHeads, keys, position_of, begin,
                                    begin + chunk < n ? begin + chunk : n);
      }
    });
  }
}
LOWLAT_UNIT void score_entries(const Rank& rank, const Share& share, const Rows& rows,
                               const LayerCall& call, int first) {
  if (rank.rules->pooled_keys) {
    score_entries_of<stages::kIndexFp8DataBytes>(rank, share, rows, call, first);
  } else {
    score_entries_of<stages::kIndexDataBytes>(rank, share, rows, call, first);
  }
}

// selected (and candidates on the candidate layer) of the rows that have scores.
LOWLAT_UNIT void select_entries(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerCall& call, int first) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  LOWLAT_SHARED(stages::SelectScratch, scratch);
  const int rest = rows.num_rows - first;
  for_share(share, rest < kScoreRows ? rest : kScoreRows, [&](int i) {
    const std::int64_t t = first + i;
    const float* scores = b.scores + i * Buffers::score_pitch(s);
    with_candidates(rank, rows, call, first + i, [&](const auto& position_of, int n) {
      if (call.weights.plan.candidate_source < 0 && call.layer_idx == s.kCandidateLayer) {
        stages::candidate_blocks<Block>(
            b.candidates + t * s.kCandidateBlocks, scores, n, s.kCandidateBlockSize,
            s.kCandidateBlocks, b.block_scores + i * Buffers::block_score_pitch(s), scratch);
      }
      stages::select_top<Block>(b.selected + t * s.kIndexTopk, scores, n, s.kIndexTopk, position_of,
                                scratch);
    });
  });
}

// ------------------------------------------------------------------ attention back

// Heads of a row that a block takes together: one thread expands each key once for all of them.
LOWLAT_DEVICE int heads_together(const Rank& rank) {
  return Threads::kAlone ? rank.shape.kNumHeadsLocal : 1;
}

// The slots of a row's window and of its compressed entries, in the block's memory.
struct AttentionKeys {
  int num_window, num_extra;
};
LOWLAT_DEVICE AttentionKeys list_keys(const Rank& rank, const Share& share, const Rows& rows,
                                      const LayerCall& call, int row_idx) {
  const auto& s = rank.shape;
  const lowlat_layer& plan = call.weights.plan;
  const int request = rows.request_idx[row_idx];
  AttentionKeys keys{0, 0};
  if (rows.slots[row_idx] < 0) return keys;
  std::int32_t* window_ids = share.memory->window_ids;
  std::int32_t* entry_ids = share.memory->entry_ids;
  if constexpr (plat::kHostedDrafts) {
    if (rows.window != nullptr) {
      keys.num_window = s.kWindow + rows.block_rows;
      const std::int32_t* seen = rows.window + std::int64_t{row_idx} * rows.window_stride;
      spread(keys.num_window,
             [&](std::int64_t i) { window_ids[i] = given_window_slot(rank, seen[i]); });
      return keys;
    }
  }
  // Context, then (draft) the whole block; (target) up to and with the row itself.
  const int block_row = rows.block_rows > 0 ? row_idx - row_idx % rows.block_rows : 0;
  const std::int64_t last =
      rows.block_rows > 0 ? std::int64_t{rows.positions[block_row]} - 1 : rows.positions[row_idx];
  const std::int64_t first = last + 1 > s.kWindow ? last + 1 - s.kWindow : 0;
  const int context = static_cast<int>(last + 1 - first);
  spread(context, [&](std::int64_t i) {
    window_ids[i] = window_slot(rank, slot_of(rank, rows, request, first + i));
  });
  spread(rows.block_rows,
         [&](std::int64_t i) { window_ids[context + i] = rows.slots[block_row + i]; });
  keys.num_window = context + rows.block_rows;
  if (plan.ratio > 0) {
    const int entries_per_page = s.kPageSize / plan.ratio;
    const auto slot = [&](std::int32_t entry) {
      const std::int32_t page = page_of(rank, rows, request, entry / entries_per_page);
      return page < 0 ? -1 : page * entries_per_page + entry % entries_per_page;
    };
    if (plan.index_source < 0) {  // nothing selects: every entry that is whole
      keys.num_extra = entries_seen(rows, row_idx, plan.ratio);
      spread(keys.num_extra, [&](std::int64_t entry) {
        entry_ids[entry] = slot(static_cast<std::int32_t>(entry));
      });
    } else {
      const std::int32_t* selected = rank.buffers.selected + std::int64_t{row_idx} * s.kIndexTopk;
      keys.num_extra = s.kIndexTopk;
      spread(keys.num_extra,
             [&](std::int64_t i) { entry_ids[i] = selected[i] < 0 ? -1 : slot(selected[i]); });
    }
  }
  plat::block_sync();
  return keys;
}

// Attention of the share's heads: q is normed where the model does and rotated, attended, rotated
// back, and left in o_f32 as wo_a takes it.
LOWLAT_UNIT void attend(const Rank& rank, const Share& share, const Rows& rows,
                        const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const lowlat_layer& plan = call.weights.plan;
  const stages::KvPaged<const std::uint8_t> window{call.weights.kv_swa, s.kPageSize,
                                                   stages::kv_page_bytes(s.kPageSize)};
  const int entries_per_page = plan.ratio == 0 ? 1 : s.kPageSize / plan.ratio;
  const stages::KvPaged<const std::uint8_t> extra{
      plan.ratio == 0 ? nullptr : rank.weights->layers[plan.kv_source].kv_extra, entries_per_page,
      stages::kv_page_bytes(entries_per_page)};
  LOWLAT_SHARED(stages::RopeTurn, back);
  const int together = heads_together(rank), groups = s.kNumHeadsLocal / together;
  const int width = together * shape::kHeadDim;
  for_share(share, rows.num_rows * groups, [&](int item) {
    const int t = item / groups, first_head = item % groups * together;
    const std::int64_t at = (std::int64_t{t} * s.kNumHeadsLocal + first_head) * shape::kHeadDim;
    std::uint16_t* o = b.q + at;
    for (int head = 0; head < together; ++head) {
      std::uint16_t* q = o + head * shape::kHeadDim;
      if (rank.rules->head_norm) {
        expand(share.memory->wide_f32, q, shape::kHeadDim);
        plat::block_sync();
        norm_row(q, share.memory->wide_f32, nullptr, shape::kHeadDim, s.kNormEps);
      }
      stages::Rope<Block>::rotate(q + shape::kHeadDim - shape::kRopeDim, b.turn[t]);
    }
    if (Threads::leads()) back = stages::rope_inverse(b.turn[t]);
    const AttentionKeys keys = list_keys(rank, share, rows, call, t);
    plat::block_sync();
    stages::SparseAttention<Block>::run(o, o, together,
                                        stages::KeySet<stages::KvPaged<const std::uint8_t>>{
                                            share.memory->window_ids, keys.num_window, window},
                                        stages::KeySet<stages::KvPaged<const std::uint8_t>>{
                                            share.memory->entry_ids, keys.num_extra, extra},
                                        call.weights.attn_sink + first_head,
                                        share.memory->attention_memory);
    for (int head = 0; head < together; ++head) {
      stages::Rope<Block>::rotate(o + (head + 1) * shape::kHeadDim - shape::kRopeDim, back);
    }
    plat::block_sync();
    if (call.quantized_o) {
      quantize(b.o_f32 + at, o, width, s.kScaleBlock);
    } else {
      expand(b.o_f32 + at, o, width);
    }
    plat::block_sync();
  });
}

// u from the attention output: each group through its own wo_a.
LOWLAT_UNIT void project_groups(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int width = s.kNumHeadsLocal * shape::kHeadDim, out_width = s.kGroupsLocal * s.kOLora;
  for (int group = 0; group < s.kGroupsLocal; ++group) {
    const float* x = b.o_f32 + group * s.kGroupInput;
    const int begin = group * s.kOLora, end = begin + s.kOLora;
    if (call.weights.wo_a_bf16 != nullptr) {
      linear_bf16(share, x, width, rows.num_rows, s.kGroupInput, call.weights.wo_a_bf16, begin, end,
                  as_bf16(b.u, out_width));
    } else {
      linear_fp8(share, x, width, rows.num_rows, s.kGroupInput, call.weights.wo_a, s.kScaleBlock,
                 begin, end, as_bf16(b.u, out_width));
    }
  }
}

// u_q of one row.
LOWLAT_UNIT void quantize_groups(const Rank& rank, int row_idx) {
  const auto& s = rank.shape;
  const int width = s.kGroupsLocal * s.kOLora;
  const std::int64_t first = std::int64_t{row_idx} * width;
  quantize(rank.buffers.u_q + first, rank.buffers.u + first, width, s.kScaleBlock);
  plat::block_sync();
}

// This rank's part of the o-projection, fp32 and unrounded, into a sink.
template <class Sink>
LOWLAT_DEVICE void project_out(const Rank& rank, const Share& share, const Rows& rows,
                               const LayerCall& call, Sink&& sink) {
  const auto& s = rank.shape;
  const int width = s.kGroupsLocal * s.kOLora;
  linear_into(share, rank.buffers.u_q, width, rows.num_rows, width,
              fp8_rows(call.weights.wo_b, width, s.kScaleBlock), 0, s.kHidden, sink);
}

// ------------------------------------------------------------------ experts

// What x is multiplied with before the experts are known: the router's rows (but in hash layers,
// where few are needed) and the shared expert's first two.
LOWLAT_UNIT void project_ffn(const Rank& rank, const Share& share, const Rows& rows,
                             const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  if (w.plan.hash_gate == 0) {
    linear_bf16(share, b.x_f32, s.kHidden, rows.num_rows, s.kHidden, w.gate, 0, call.num_experts,
                as_f32(b.gate_logits, call.num_experts));
  }
  const int inner = s.kIntermediateLocal;
  const auto up = [&](const Fp8Weight& weight, std::uint16_t* out) {
    linear_fp8(share, b.x_q, s.kHidden, rows.num_rows, s.kHidden, weight, s.kScaleBlock, 0, inner,
               as_bf16(out, inner));
  };
  up(w.shared_w1, b.shared_gate);
  up(w.shared_w3, b.shared_up);
}

// Hash layers: the experts of a row's token, and the weights that the router gives them.
LOWLAT_UNIT void route_by_token(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerCall& call, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int slots = call.experts_per_token;
  const std::int32_t* chosen = call.weights.tid2eid + std::int64_t{rows.token_ids[row_idx]} * slots;
  float* logits = b.gate_logits + std::int64_t{row_idx} * call.num_experts;
  const Share whole{0, 1, share.memory};  // one row is one block's
  for (int slot = 0; slot < slots; ++slot) {
    linear_bf16(whole, b.x_f32 + std::int64_t{row_idx} * s.kHidden, s.kHidden, 1, s.kHidden,
                call.weights.gate, chosen[slot], chosen[slot] + 1, as_f32(logits, 0));
  }
  plat::block_sync();
  if (Threads::leads()) {
    float* weights = b.expert_weights + std::int64_t{row_idx} * slots;
    for (int slot = 0; slot < slots; ++slot) {
      b.expert_ids[std::int64_t{row_idx} * slots + slot] = chosen[slot];
      weights[slot] = logits[chosen[slot]];
    }
    stages::gate_hash(weights, weights, slots, s.kRoutedScaling, rank.rules->gate_rule);
  }
  plat::block_sync();
}

// What a router that is another kernel's must know of a row's token.
LOWLAT_UNIT void note_row(const Rank& rank, const Rows& rows, const LayerCall& call, int row_idx) {
  const Buffers& b = rank.buffers;
  const std::int32_t token = rows.token_ids[row_idx];
  if (Threads::leads()) b.image_rows[row_idx] = token == rank.shape.kImageToken ? 1 : 0;
  if (call.weights.plan.hash_gate == 0) return;
  const int slots = call.experts_per_token;
  spread(slots, [&](std::int64_t slot) {
    b.expert_ids[std::int64_t{row_idx} * slots + slot] =
        call.weights.tid2eid[std::int64_t{token} * slots + slot];
  });
}

// A row's best experts by the router's scores.
LOWLAT_UNIT void route_by_score(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerCall& call, int row_idx) {
  const Buffers& b = rank.buffers;
  const std::int64_t first = std::int64_t{row_idx} * call.experts_per_token;
  const bool image =
      call.weights.gate_bias_vl != nullptr && rows.token_ids[row_idx] == rank.shape.kImageToken;
  using Best = stages::BlockBest<Block>;
  LOWLAT_SHARED(Best::Scratch, scratch);
  stages::gate_select<Block>(b.expert_ids + first, b.expert_weights + first,
                             b.gate_logits + std::int64_t{row_idx} * call.num_experts,
                             image ? call.weights.gate_bias_vl : call.weights.gate_bias,
                             call.num_experts, call.experts_per_token, call.gate_sum,
                             rank.shape.kRoutedScaling, share.memory->gate_scratch,
                             rank.rules->gate_rule, scratch);
}

// The router of one row, and the shared expert's middle.
LOWLAT_UNIT void route(const Rank& rank, const Share& share, const Rows& rows,
                       const LayerCall& call, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  if (call.weights.plan.hash_gate != 0) {
    route_by_token(rank, share, rows, call, row_idx);
  } else {
    route_by_score(rank, share, rows, call, row_idx);
  }
  const std::int64_t first = std::int64_t{row_idx} * s.kIntermediateLocal;
  spread(s.kIntermediateLocal, [&](std::int64_t i) {
    b.shared_gate[first + i] =
        stages::shared_swiglu(b.shared_gate[first + i], b.shared_up[first + i], s.kSwigluLimit);
  });
  plat::block_sync();
  quantize(b.shared_h_q + first, b.shared_gate + first, s.kIntermediateLocal, s.kScaleBlock);
  plat::block_sync();
}

// body(expert, pairs, num_pairs, begin, end) over the share's tiles of n weight rows, `together` of
// them each, of every expert that has pairs.
template <class Body>
LOWLAT_DEVICE void for_expert_tiles(const Share& share, const LayerCall& call, int n, int together,
                                    Body&& body) {
  const int step = Threads::kAlone ? n : together;
  const std::int32_t* offsets = share.memory->pair_offsets;
  int tile = share.num - share.idx;  // counts the tiles of all experts
  for (int expert = 0; expert < call.num_experts; ++expert) {
    const int num_pairs = offsets[expert + 1] - offsets[expert];
    if (num_pairs == 0) continue;
    for (int begin = 0; begin < n; begin += step, ++tile) {
      if (tile % share.num != 0) continue;
      body(expert, share.memory->pairs + offsets[expert], num_pairs, begin,
           begin + step < n ? begin + step : n);
    }
  }
}

// expert_h: every routed (row, slot) through its expert's first two products on this rank; and
// shared_y, the shared expert's output. Each block lists the pairs for itself.
LOWLAT_UNIT void run_experts_up(const Rank& rank, const Share& share, const Rows& rows,
                                const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const LayerWeights& w = call.weights;
  const int inner = s.kIntermediateLocal;
  stages::group_pairs<Block>(share.memory->pair_offsets, share.memory->pairs, b.expert_ids,
                             rows.num_rows, call.experts_per_token, call.num_experts);
  plat::block_sync();
  for_expert_tiles(share, call, inner, stages::gate_up_rows<Block>(),
                   [&](int expert, const std::int32_t* pairs, int num_pairs, int begin, int end) {
                     const Expert rows_of = expert_rows(rank, w, expert);
                     stages::expert_gate_up<Block>(b.expert_h, b.x_f32, rows_of.w1, rows_of.w3,
                                                   pairs, num_pairs, call.experts_per_token,
                                                   s.kHidden, inner, begin, end, s.kSwigluLimit,
                                                   share.memory->w_row);
                   });
  linear_fp8(share, b.shared_h_q, inner, rows.num_rows, inner, w.shared_w2, s.kScaleBlock, 0,
             s.kHidden, as_bf16(b.shared_y, s.kHidden));
}

// expert_d: the third product of the same pairs, which the block has listed.
LOWLAT_UNIT void run_experts_down(const Rank& rank, const Share& share, const LayerCall& call) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int inner = s.kIntermediateLocal;
  for_expert_tiles(share, call, s.kHidden, stages::down_rows<Block>(),
                   [&](int expert, const std::int32_t* pairs, int num_pairs, int begin, int end) {
                     stages::expert_down<Block>(b.expert_d, b.expert_h,
                                                expert_rows(rank, call.weights, expert).w2, pairs,
                                                num_pairs, b.expert_weights, inner, s.kHidden,
                                                begin, end, share.memory->w_row);
                   });
}

// partial of one row: what this rank adds to the sum over ranks.
LOWLAT_UNIT void moe_row(const Rank& rank, const LayerCall& call, int row_idx) {
  const int hidden = rank.shape.kHidden, slots = call.experts_per_token;
  const Buffers& b = rank.buffers;
  stages::expert_sum<Block>(b.partial + std::int64_t{row_idx} * hidden,
                            b.expert_d + std::int64_t{row_idx} * slots * hidden,
                            b.shared_y + std::int64_t{row_idx} * hidden, slots, hidden, 0, hidden);
  plat::block_sync();
}

// ------------------------------------------------------------------ draft

// features[row][which] of a target's row: the mean of the streams, where the draft wants them as
// they enter layer `layer_idx` (kNumLayers: as they leave the last).
LOWLAT_UNIT void take_features(const Rank& rank, int row_idx, int layer_idx) {
  const auto& s = rank.shape;
  for (int which = 0; which < s.kNumDraftStages; ++which) {
    const int wanted =
        rank.config->draft_target_layers[which] + (rank.rules->late_features ? 1 : 0);
    if (wanted != layer_idx) continue;
    stages::draft_feature<Block>(
        rank.buffers.features + (std::int64_t{row_idx} * s.kNumDraftStages + which) * s.kHidden,
        rank.buffers.residual + std::int64_t{row_idx} * shape::kNumStreams * s.kHidden, s.kHidden);
  }
}

// Context keys of committed rows of the last target step, in five units: the features as a linear
// sees them; their projection; x of the draft; the keys of every stage; and these into its cache.
LOWLAT_UNIT void inject_features(const Rank& rank, int row_idx) {
  const auto& s = rank.shape;
  const std::int64_t width = std::int64_t{s.kNumDraftStages} * s.kHidden;
  quantize(rank.buffers.feature_q + row_idx * width, rank.buffers.features + row_idx * width,
           static_cast<int>(width), s.kScaleBlock);
  plat::block_sync();
}
LOWLAT_UNIT void inject_project(const Rank& rank, const Share& share, int num_rows) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const int width = s.kNumDraftStages * s.kHidden;
  linear_fp8(share, b.feature_q, width, num_rows, width, rank.weights->main_proj, s.kScaleBlock, 0,
             s.kHidden, as_rounded(b.x_f32, s.kHidden));
}
LOWLAT_UNIT void inject_x(const Rank& rank, std::int32_t position, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const std::int64_t first = std::int64_t{row_idx} * s.kHidden;
  norm_row(b.x + first, b.x_f32 + first, rank.weights->main_norm, s.kHidden, s.kNormEps);
  quantize(b.x_q + first, b.x + first, s.kHidden, s.kScaleBlock);
  stages::rope_turn<Block>(b.turn[row_idx], rank.window_rope, position);
  plat::block_sync();
}
LOWLAT_UNIT void inject_kv(const Rank& rank, const Share& share, int num_rows) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  const std::int64_t pitch = std::int64_t{s.kNumDraftStages} * shape::kHeadDim;
  for (int stage = 0; stage < s.kNumDraftStages; ++stage) {
    linear_fp8(share, b.x_q, s.kHidden, num_rows, s.kHidden, rank.weights->stages[stage].wkv,
               s.kScaleBlock, 0, shape::kHeadDim,
               as_rounded(b.kv + stage * shape::kHeadDim, pitch));
  }
}
LOWLAT_UNIT void inject_keys(const Rank& rank, std::int32_t slot, int row_idx) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  for (int stage = 0; stage < s.kNumDraftStages; ++stage) {
    const LayerWeights& w = rank.weights->stages[stage];
    store_kv(b.kv + (std::int64_t{row_idx} * s.kNumDraftStages + stage) * shape::kHeadDim,
             w.kv_norm, s.kNormEps, b.turn[row_idx], window_pool(rank, w).row(slot));
  }
}

// The Markov embedding of a request's token before the next place.
LOWLAT_UNIT void markov_embed(const Rank& rank, int request, std::int32_t token) {
  const auto& s = rank.shape;
  expand(rank.buffers.markov_embedding + std::int64_t{request} * s.kMarkovRank,
         rank.weights->markov_embed + std::int64_t{within(token, s.kVocab)} * s.kMarkovRank,
         s.kMarkovRank);
  plat::block_sync();
}

// logits_local rows (request, place): base + Markov bias of the token chosen before, in place.
LOWLAT_UNIT void markov_logits(const Rank& rank, const Share& share, int batch_size, int place) {
  const auto& s = rank.shape;
  const Buffers& b = rank.buffers;
  float* z = b.logits_local + std::int64_t{place} * s.kVocabLocal;
  const std::int64_t pitch = std::int64_t{s.kDraftBlock} * s.kVocabLocal;
  const int step = Threads::kAlone ? s.kVocabLocal : 4 * stages::DotTeam<Block>::kNum;
  for (int begin = share.idx * step; begin < s.kVocabLocal; begin += share.num * step) {
    const int end = begin + step < s.kVocabLocal ? begin + step : s.kVocabLocal;
    stages::markov_logits<Block>(z, z, pitch, b.markov_embedding,
                                 stages::Bf16Weights{rank.weights->markov_head, s.kMarkovRank},
                                 batch_size, s.kMarkovRank, begin, end, share.memory->w_row);
  }
}

// This rank's best id of a request at a place, in every thread.
LOWLAT_DEVICE stages::Best markov_choice(const Rank& rank, const lowlat_draft& draft, int request,
                                         int place) {
  const auto& s = rank.shape;
  const stages::PhiloxNoise noise{
      draft.noise_key, static_cast<std::uint32_t>(draft.noise_row[request]),
      static_cast<std::uint32_t>(place),
      static_cast<std::uint32_t>(static_cast<std::uint64_t>(draft.noise_offset[request]))};
  using Best = stages::BlockBest<Block>;
  LOWLAT_SHARED(Best::Scratch, scratch);
  return stages::draft_select<Block>(
      rank.buffers.logits_local + (std::int64_t{request} * s.kDraftBlock + place) * s.kVocabLocal,
      s.kVocabLocal, s.kTpRank * s.kVocabLocal, draft.temperature[request], noise, scratch);
}

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
