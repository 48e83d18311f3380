// persistent/rank.hpp: everything one rank's schedule works with: shape, weights, buffers, ports,
// rows.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include <cstdint>
#include <initializer_list>

#include "lowlat/kernels.h"
#include "persistent/grid.hpp"
#include "persistent/rules.hpp"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"
#include "stages/accept.hpp"
#include "stages/attention.hpp"
#include "stages/engram.hpp"
#include "stages/exchange.hpp"
#include "stages/hc.hpp"
#include "stages/rope.hpp"
#include "stages/select.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

using lowlat::persistent::CompressorWeights;
using lowlat::persistent::EngramWeights;
using lowlat::persistent::Fp4Weight;
using lowlat::persistent::Fp8Weight;
using lowlat::persistent::HcWeights;
using lowlat::persistent::IndexerWeights;
using lowlat::persistent::LayerWeights;
using lowlat::persistent::ModelWeights;

// Kernels of the catalogue, in its order; status words carry the number.
enum class KernelId : std::uint32_t {
  front = 0,
  select = 1,
  back = 2,
  head = 3,
  draft = 4,
  plain = 5,
  count
};

// A target step as either kind of engine gives it: one of them has struct_bytes above 0.
struct TargetStep {
  lowlat_step step;
  lowlat_hosted_step hosted;  // of an engine that keeps caches and head

  LOWLAT_DEVICE bool is_hosted() const { return hosted.struct_bytes > 0; }
  LOWLAT_DEVICE int num_rows() const {
    return is_hosted() ? hosted.batch_size * hosted.tokens_per_request : step.num_rows;
  }
};

// Where the caches end, and what of them is an engine's own (lowlat_pools).
struct Pools {
  int num_pages, num_window_pages, num_requests;
  const std::int64_t* window_slots;  // NULL: a window slot is the full slot
  std::int32_t* history;             // of a hosted model
};

// The rows of one forward, of the target or of a draft block. Values are within the model's sizes:
// take_row() sees to it.
struct Rows {
  int num_rows, batch_size;
  const std::int32_t* token_ids;    // [num_rows]
  const std::int32_t* positions;    // [num_rows]
  const std::int32_t* request_idx;  // [num_rows]
  const std::int32_t* slots;        // [num_rows], -1: padding
  const std::int32_t* page_table;   // [batch, page_table_stride]
  int page_table_stride;
  int table_pages;  // entries of a request's table
  // Target only.
  const std::int32_t* history;      // [batch, 3]
  const std::int32_t* state_slots;  // [batch]
  int block_rows;  // draft only, else 0: a request's rows attend to its context and to all of these
  // Of a hosted draft, else NULL: what a row attends to, [num_rows, window_stride].
  const std::int32_t* window = nullptr;
  int window_stride = 0;
};

constexpr std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

inline constexpr int kMixPitch = stages::kHcOutputs + 1;

// Rows whose scores of entries are kept at once: the selection goes through a step in groups.
inline constexpr int kScoreRows = Threads::kAlone ? 1 : 8;

// What one block needs for itself while a unit runs. M rows of a step.
struct BlockMemory {
  float* wide_f32;             // [4 H, at least 512 and q_lora] a residual row, other single rows
  std::uint16_t* latent;       // bf16 [512]
  std::uint8_t* index_codes;   // e4m3 [index_heads, 128] of one row, V4
  float* index_scales;         // [index_heads] of one row, V4
  std::int32_t* window_ids;    // [window + draft_block]
  std::int32_t* entry_ids;     // [max entries]
  float* attention_memory;     // SparseAttention's, of the heads that are taken together
  float* gate_scratch;         // [2 E]
  std::int32_t* pair_offsets;  // [E + 1]
  std::int32_t* pairs;         // [M k]
  float* accept_scratch;       // Acceptance's, of V
  float* w_row;                // [2 * widest K] expanded weight rows, of one thread
  std::uint32_t (*pending)[plat::kTaggedPayload];  // [teams, M] of PublishRows

  // Assigns every member from carve(count, T*&): called once to count and once to place.
  template <class Carve>
  void lay_out(const shape::RuntimeShape& s, Carve&& carve) {
    const std::int64_t rows = s.kMaxRows, hidden = s.kHidden;
    carve(most(most(4 * hidden, shape::kHeadDim), s.kQLora), wide_f32);
    carve(shape::kHeadDim, latent);
    carve(std::int64_t{s.kIndexHeads} * shape::kIndexDim, index_codes);
    carve(s.kIndexHeads, index_scales);
    carve(s.kWindow + s.kDraftBlock, window_ids);
    carve(s.kMaxEntries, entry_ids);
    carve(stages::SparseAttention<Block>::memory_floats(Threads::kAlone ? s.kNumHeadsLocal : 1),
          attention_memory);
    carve(2 * s.max_experts(), gate_scratch);
    carve(s.max_experts() + 1, pair_offsets);
    carve(rows * s.max_experts_per_token(), pairs);
    carve(stages::Acceptance<Block>::memory_floats(s.kVocab), accept_scratch);
    std::int64_t widest = 0;
    if (Threads::kAlone) {
      for (const std::int64_t k :
           {4 * hidden, std::int64_t{s.kQLora}, std::int64_t{s.kGroupInput},
            s.kGroupsLocal * std::int64_t{s.kOLora}, std::int64_t{s.kIntermediateLocal},
            std::int64_t{shape::kEngramColumns} * s.kEngramDim, s.kNumDraftStages * hidden,
            std::int64_t{s.kMarkovRank}}) {
        widest = most(widest, k);
      }
    }
    carve(2 * widest, w_row);
    carve(rows * (Threads::kAlone ? 1 : Threads::kNumThreads / stages::kDotLanes), pending);
  }
};

// Memory of one rank that is not bound: every intermediate of a step of up to kMaxRows rows
// (targets) or kMaxBatch * kDraftBlock rows (drafts, never more). M rows, fp32 holds bf16 values
// where noted.
struct Buffers {
  std::int32_t* row_token;     // [M] the rows of the forward that runs, see Rows
  std::int32_t* row_position;  // [M]
  std::int32_t* row_request;   // [M]
  std::int32_t* row_slot;      // [M]
  // Of a hosted model's requests, for a step and for proposals.
  std::int32_t* request_state;      // [max_batch] which ring of the states
  std::int32_t* request_history;    // [max_batch, 3]
  std::int32_t* request_anchor;     // [max_batch]
  float* request_temperature;       // [max_batch]
  std::int32_t* request_noise_row;  // [max_batch]
  std::int64_t* request_noise;      // [max_batch]
  std::int32_t* request_tokens;     // [max_batch, draft_block]
  std::uint8_t* image_rows;    // [M] 1 where the token is an image's; for other kernels' experts
  std::uint16_t* residual;     // bf16 [M, 4, H]
  std::uint16_t* x;            // bf16 [M, H] input of a sublayer
  float* x_f32;                // [M, H] x, bf16 values
  float* x_q;                  // [M, H] x as a block-fp8 linear sees it
  std::uint16_t* q_lora;       // bf16 [M, q_lora]
  float* q_lora_q;             // [M, q_lora]
  float* kv;                   // [M, 512], of every draft stage where context is injected
  std::uint16_t* q;            // bf16 [M, heads_local, 512]; the attention output afterwards
  float* o_f32;                // [M, heads_local * 512]
  std::uint16_t* u;            // bf16 [M, groups_local * o_lora]
  float* u_q;                  // the same, as a block-fp8 linear sees it
  float* partial;              // [M, H] of one rank, before the sum over ranks
  std::uint16_t* y;            // bf16 [M, H] a sublayer's summed output
  stages::HcParams* hc_attn;   // [M]
  stages::HcParams* hc_ffn;    // [M]
  float* mix_sums;             // [M, kMixPitch] products of the streams, then their squares' sum
  float* pre;                  // [M, 4] what the next attention (V4.1) or the head combines with
  stages::RopeTurn* turn;      // [M] of the layer's frequencies at each row's position
  float* compress;             // [M, compress width] projections: values, then scores
  float* index_compress;       // [M, index compress width] the same of V4's index
  float* index_q;              // [M, index_heads, 128]
  float* index_w;              // [M, index_heads]
  std::int32_t* selected;      // [M, topk] entries, ascending, -1 at the end
  std::int32_t* candidates;    // [M, candidate_blocks]
  float* scores;               // [kScoreRows, positions of the cache]
  float* block_scores;         // [kScoreRows, positions / candidate_block_size + 1]
  float* gate_logits;          // [M, E]
  std::int32_t* expert_ids;    // [M, k]
  float* expert_weights;       // [M, k]
  float* expert_h;             // [M k, I_local] bf16 values
  std::uint16_t* expert_d;     // bf16 [M k, H]
  std::uint16_t* shared_gate;  // bf16 [M, I_local]; h afterwards
  std::uint16_t* shared_up;    // bf16 [M, I_local]
  float* shared_h_q;           // [M, I_local]
  std::uint16_t* shared_y;     // bf16 [M, H]
  std::uint16_t* engram_e;     // bf16 [M, 24 D]
  float* engram_q;             // [M, 24 D]
  std::uint16_t* engram_kv;    // bf16 [M, 5 H]
  std::uint16_t* features;     // bf16 [M, stages * H] of the last target step
  float* feature_q;            // [M, stages * H] as a block-fp8 linear sees them
  float* logits_local;         // [M, V_local]
  float* markov_embedding;     // [max_batch, R]
  std::int32_t* previous;      // [max_batch] last chosen token

  // Assigns every member, as BlockMemory's.
  template <class Carve>
  void lay_out(const shape::RuntimeShape& s, Carve&& carve) {
    const std::int64_t rows = s.kMaxRows, hidden = s.kHidden, batch = s.kMaxBatch;
    const std::int64_t heads = std::int64_t{s.kNumHeadsLocal} * shape::kHeadDim;
    const std::int64_t slots = s.max_experts_per_token(), experts = s.max_experts();
    const std::int64_t columns = std::int64_t{shape::kEngramColumns} * s.kEngramDim;
    carve(rows, row_token);
    carve(rows, row_position);
    carve(rows, row_request);
    carve(rows, row_slot);
    carve(batch, request_state);
    carve(batch * (stages::kEngramShifts - 1), request_history);
    carve(batch, request_anchor);
    carve(batch, request_temperature);
    carve(batch, request_noise_row);
    carve(batch, request_noise);
    carve(batch * most(1, s.kDraftBlock), request_tokens);
    carve(rows, image_rows);
    carve(rows * 4 * hidden, residual);
    carve(rows * hidden, x);
    carve(rows * hidden, x_f32);
    carve(rows * hidden, x_q);
    carve(rows * s.kQLora, q_lora);
    carve(rows * s.kQLora, q_lora_q);
    carve(rows * most(1, s.kNumDraftStages) * shape::kHeadDim, kv);
    carve(rows * heads, q);
    carve(rows * heads, o_f32);
    carve(rows * s.kGroupsLocal * s.kOLora, u);
    carve(rows * s.kGroupsLocal * s.kOLora, u_q);
    carve(rows * hidden, partial);
    carve(rows * hidden, y);
    carve(rows, hc_attn);
    carve(rows, hc_ffn);
    carve(rows * kMixPitch, mix_sums);
    carve(rows * 4, pre);
    carve(rows, turn);
    carve(rows * s.kCompressWidth, compress);
    carve(rows * s.kIndexCompressWidth, index_compress);
    carve(rows * s.kIndexHeads * shape::kIndexDim, index_q);
    carve(rows * s.kIndexHeads, index_w);
    carve(rows * s.kIndexTopk, selected);
    carve(rows * s.kCandidateBlocks, candidates);
    carve(kScoreRows * score_pitch(s), scores);
    carve(kScoreRows * block_score_pitch(s), block_scores);
    carve(rows * experts, gate_logits);
    carve(rows * slots, expert_ids);
    carve(rows * slots, expert_weights);
    carve(rows * slots * s.kIntermediateLocal, expert_h);
    carve(rows * slots * hidden, expert_d);
    carve(rows * s.kIntermediateLocal, shared_gate);
    carve(rows * s.kIntermediateLocal, shared_up);
    carve(rows * s.kIntermediateLocal, shared_h_q);
    carve(rows * hidden, shared_y);
    carve(rows * columns, engram_e);
    carve(rows * columns, engram_q);
    carve(rows * 5 * hidden, engram_kv);
    carve(rows * s.kNumDraftStages * hidden, features);
    carve(rows * s.kNumDraftStages * hidden, feature_q);
    carve(rows * s.kVocabLocal, logits_local);
    carve(batch * s.kMarkovRank, markov_embedding);
    carve(batch, previous);
  }

  // Distances of rows of scores.
  LOWLAT_DEVICE static constexpr std::int64_t score_pitch(const shape::RuntimeShape& s) {
    return std::int64_t{s.kNumPages} * s.kPageSize;
  }
  LOWLAT_DEVICE static constexpr std::int64_t block_score_pitch(const shape::RuntimeShape& s) {
    return s.kCandidateBlockSize > 0 ? score_pitch(s) / s.kCandidateBlockSize + 1 : 1;
  }
};

// Where a rank's sequence of exchanges and hand-offs stands; kept between launches.
struct Progress {
  std::uint64_t epoch;      // of the last exchange; the next one takes epoch + 1
  std::uint32_t hand_offs;  // the last hand-off's number
};

// Read only while a step runs. Pointers are in the platform's memory.
struct Rank {
  shape::RuntimeShape shape;
  const ModelRules* rules;
  const lowlat_model_config* config;
  const ModelWeights* weights;
  Pools pools;
  Buffers buffers;
  const BlockMemory* blocks;  // [blocks of the widest grid]
  Progress* progress;         // read when a launch begins, written when it has ended well
  stages::ExchangePort port;
  stages::RopeTable window_rope, compressed_rope;
};

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
