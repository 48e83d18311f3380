// fused/step.hpp: what a step of a whole model has before its first layer and behind its last: the
// caller's rows, the embedding, gathered rows of the n-gram tables, features for a draft, and the
// logits with the best token, agreed over ranks. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/engram.hpp"
#include "fused/exchange.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kStepWindow = 128;  // positions of a row's window, its own among them
inline constexpr int kMaxBlockRows = 8;  // of a request of a draft, all of which a row sees
inline constexpr int kMaxTables = 4;     // layers whose experts are chosen by the token
inline constexpr int kTableExperts = 6;  // of each token
// A place of a row's window without a key. Not -1, which is the slot of a row of padding:
// attention tells the keys that the step writes by their slots.
inline constexpr std::int32_t kNoKey = -2;

// The caller's arrays (kernels.h), and the model's limits: what is outside them becomes padding.
// Rows are those of one request after another, `tokens` each. One of three kinds:
//   a target step   token_ids, positions, request_idx, slots, history and state_slots
//   a draft         anchors, prefixes and slots: an anchor, then mask tokens, at the positions from
//                   the request's prefix on
//   a hosted step   what `hosted` names
struct HostedInput {
  const std::int64_t* token_ids;  // [T]
  const std::int64_t* positions;  // [T]
  const std::int64_t* slots;      // [T]; of page 0: padding
  const std::int64_t* requests;   // [batch_size]; NULL: not hosted
  std::int32_t* history;          // [num_requests, 3]; NULL: no n-gram memory
  bool decodes;                   // the row's token goes into the history
  int num_requests, num_window_slots;
  const std::int64_t* window_slots;  // of full slots; NULL: the same
  std::uint16_t* hidden;             // bf16 [T, width], made NaN
  int width;
};
struct StepInput {
  ExchangePort port;  // an abort that came before the step is told in its status words
  int num_rows, tokens, batch_size;
  const std::int32_t* token_ids;    // [T]
  const std::int32_t* positions;    // [T]
  const std::int32_t* request_idx;  // [T]
  const std::int32_t* slots;        // [T]
  const std::int32_t* history;      // [batch_size, 3]; NULL: no n-gram memory
  const std::int32_t* state_slots;  // [batch_size]
  const std::int32_t* anchors;      // [batch_size]; NULL: no draft
  const std::int32_t* prefixes;     // [batch_size]
  HostedInput hosted;
  const std::int32_t* page_table;
  int page_table_stride, table_pages, most_pages;  // of a request's table; of one request
  int vocab, num_pages, page_size, num_state_slots, image_token, mask_token;
  // V4. Experts of each token, i32 [vocab, kTableExperts], NULL behind the last; positions of an
  // entry of which a row sees all, num_entries at most (0: there are no such layers).
  const std::int32_t* expert_tables[kMaxTables];
  int entry_ratio, num_entries;
};

// The same as kernels may use it, and what each row sees.
struct StepArrays {
  std::int32_t* token_ids;   // [T]
  std::int32_t* positions;   // [T]
  std::int32_t* slots;       // [T]; -1: padding
  std::int32_t* kv_slots;    // [T] where the window's key of the row is stored; -1: nowhere
  std::uint8_t* image_rows;  // [T]
  // [T, window_of(in)] slots of the window's keys, kNoKey at the end. A draft's row sees the
  // positions before its request's first row, then all rows of the request.
  std::int32_t* window_idx;
  std::int32_t* history;      // [T, 3], a request's at its number
  std::int32_t* state_slots;  // [T], the same
  std::int64_t* anchors;      // [T], the same; of a draft
  // [T, page_stride_of(in)], the same: pages up to a row's position, wherever the caller's lie.
  std::int32_t* page_table;
  // [T, kMixStride]: the weights with which the exchange of the embedding makes four equal streams
  // and takes the first of them.
  float* mix;
  std::int32_t* expert_ids[kMaxTables];  // [T, kTableExperts] of the tables
  std::int32_t* entry_slots;             // [T, num_entries] slots in the pool, -1 at the end
};

constexpr int page_stride_of(const StepInput& in) {
  return in.table_pages < in.most_pages ? in.table_pages : in.most_pages;
}
constexpr int window_of(const StepInput& in) {
  return kStepWindow + (in.anchors != nullptr ? in.tokens : 0);
}

// A row is padding where its slot is -1, where its request is not the one that its place says, or
// where the request's pages up to its position are not all there. Ends before the next kernel.
cudaError_t launch_step_rows(const StepInput& in, const StepArrays& out, cudaStream_t stream);

// Rows of a hosted draft (kernels.h), `tokens` a request.
struct DraftInput {
  ExchangePort port;
  int num_rows, tokens;
  const std::int64_t* token_ids;  // [T]
  const std::int64_t* positions;  // [T]
  const std::int32_t* key_slots;  // [T]; of page 0: padding
  const std::int32_t* window;     // [T, window_stride]; below 0: none
  int window_stride, num_window_slots, page_size, vocab;
  std::int64_t max_positions;
  std::uint16_t* hidden;  // bf16 [T, width], made NaN
  int width;
};
// Of `out` token_ids, positions, slots, kv_slots, image_rows (none is), mix, and window_idx
// [T, kStepWindow + tokens]. Ends before the next kernel.
cudaError_t launch_draft_rows(const DraftInput& in, const StepArrays& out, cudaStream_t stream);

// Publishes each row's embedding, where this rank has it, and zeros elsewhere, for
// launch_exchange_norm of `index`. embed bf16 [vocab_local, hidden], 8-byte aligned.
struct EmbedParams {
  ExchangePort port;
  int index;
  int num_rows, hidden, vocab_local;
  const std::int32_t* token_ids;
  const std::uint16_t* embed;
};
cudaError_t launch_embed(const EmbedParams& params, cudaStream_t stream);

// Rows of n-gram tables whose columns lie on all ranks in equal shares, gathered by packets: what
// launch_engram_lookup leaves where one device sees every share.
inline constexpr int kMaxGathered = 4;
struct EngramGatherParams {
  ExchangePort port;
  int index;
  int num_tables;
  // Of each table: rows, token_ids, history, token_map, multipliers, primes, image_token, pad_token
  // and, of share 0, this rank's part of the table (4-byte aligned). Out: codes and scale.
  EngramParams tables[kMaxGathered];
};
// Packets of a box.
constexpr std::int64_t engram_gather_packets(int num_tables, int num_rows, int tp_size) {
  return std::int64_t{num_tables} * num_rows * (24 / tp_size) * ((256 + 8) / 12);
}
cudaError_t launch_engram_gather(const EngramGatherParams& params, cudaStream_t stream);

// Means of the streams of each row (stages/draft.hpp). The kernels before have ended then, and the
// next one starts when this has.
struct FeatureParams {
  int num_rows, hidden;
  const std::uint16_t* residual;  // bf16 [T, 4, hidden]
  std::uint16_t* out;             // bf16, row t's at out + t * pitch
  std::int64_t pitch;
};
cudaError_t launch_features(const FeatureParams& params, cudaStream_t stream);

// Logits from the two parts of the head's product (launch_compress_product): rounded to bf16, sent
// to every rank with the best of each row. Always an exchange, so that steps take as many of them
// whatever is asked for.
struct HeadParams {
  ExchangePort port;
  int index;
  int num_rows;                    // of the product
  int num_logit_rows;              // 0: nothing is wanted
  const std::int32_t* logit_rows;  // [num_logit_rows] rows of the product; NULL: 0, 1 ..
  int vocab_local;                 // a multiple of 4
  const float* partial;            // [2, num_rows, vocab_local]
  uint4* best;                     // scratch [num_logit_rows, head_chunks(vocab_local)]
  std::uint32_t* tickets;          // [num_logit_rows], zeroed once
  // Out, the same on every rank; NULL: not wanted. After a fault NaN and -1.
  float* logits;         // [num_logit_rows, tp_size * vocab_local]
  std::int32_t* argmax;  // [num_logit_rows] lowest id on ties
};
inline constexpr int kHeadChunk = 1536;  // ids of a block
constexpr int head_chunks(int vocab_local) { return (vocab_local + kHeadChunk - 1) / kHeadChunk; }
// Packets of a box: six logits each, then a row's best.
constexpr std::int64_t head_packets(int num_logit_rows, int vocab_local) {
  return num_logit_rows * (std::int64_t{head_chunks(vocab_local)} * (kHeadChunk / 6) + 1) + 1;
}
cudaError_t launch_head(const HeadParams& params, cudaStream_t stream);

// What an engine with a head of its own takes of a step: the last x, and the streams. After a fault
// NaN. Of a draft's layers: what the last of them mixes, before its norm.
struct LeaveParams {
  ExchangePort port;
  int num_rows, hidden;           // hidden a multiple of 8
  const std::uint16_t* x;         // bf16 [T, hidden]
  const std::uint16_t* residual;  // bf16 [T, 4, hidden]
  std::uint16_t* out_hidden;      // bf16 [T, hidden], 16-byte aligned as the next; NULL as well
  std::uint16_t* out_streams;     // bf16 [T, 4, hidden]; NULL: not wanted
  const float* mix;  // [T, kMixStride]; not NULL: its first four make out_hidden of the streams
};
cudaError_t launch_leave(const LeaveParams& params, cudaStream_t stream);

// Logits of this rank's ids alone, as fp32 of their bf16 values: what proposals begin with.
struct BaseParams {
  int num_rows, vocab_local;  // a multiple of 4
  const float* partial;       // as HeadParams
  float* out;                 // [num_rows, vocab_local]
};
cudaError_t launch_base(const BaseParams& params, cudaStream_t stream);

// What proposals for an engine begin with: the norm of its draft's last rows, and copies of the
// noise's offset as it is now and of the anchors, 0 for what is no token. The copies alone where
// `in` is NULL, as for V4, whose rows launch_exchange_mix combines and norms.
struct NormParams {
  ExchangePort port;
  int num_rows;               // hidden 5120
  const std::uint16_t* in;    // bf16 [T, hidden]
  const std::uint16_t* gain;  // bf16 [hidden]
  float eps;
  std::uint16_t* out;          // bf16 [T, hidden]
  const std::int64_t* offset;  // one word; NULL: 0
  std::int64_t* own_offset;
  int num_anchors, vocab;       // at most 256
  const std::int64_t* anchors;  // [num_anchors]
  std::int64_t* own_anchors;    // [num_anchors]
};
cudaError_t launch_norm(const NormParams& params, cudaStream_t stream);

// Every rank's columns of fp32 rows to every rank: rank r has those from r * vocab_local on.
struct GatherParams {
  ExchangePort port;
  int index;
  int num_rows, tokens, vocab_local;  // a request's rows one after another, `tokens` each
  const float* temperatures;          // [num_rows / tokens]; rows of a 0 are left alone
  float* rows;                        // [num_rows, tp_size * vocab_local]
};
// Packets of a box, three values each.
constexpr std::int64_t gather_packets(int num_rows, int vocab_local) {
  return num_rows * ((std::int64_t{vocab_local} + 767) / 768 * 256);
}
cudaError_t launch_gather(const GatherParams& params, cudaStream_t stream);

// out[i] = in[i], `count` of them.
cudaError_t launch_tokens(const std::int64_t* in, std::int32_t* out, int count,
                          cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
