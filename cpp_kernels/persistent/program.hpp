// persistent/program.hpp: the resident schedule of one rank: front, select, back a layer, head,
// draft.
//
//   front   (K1)   previous sublayer's post, Engram, features, statistics, combine and norm, q and
//                  kv projections, window and compressed KV writes
//   select  (K2i)  index scores and top-k, index sources only; begins after every front wrote its
//                  keys
//   back    (K2)   attention, o-projection published as its tiles fill; each row summed, mixed and
//                  normed as its packets arrive; experts, published row by row; their sum
//
// Ordering     Keys that a front writes are read by select and back of the same rank alone; the
//              boundary between them (on scalar: program order, on a GPU: the launch) makes them
//              visible. Everything that crosses ranks is an exchange (stages/exchange.hpp). Each
//              rank runs the same sequence of exchanges, so `epoch` is the same number on every
//              rank.
// Ends         Every exchange may report that the step is over; then the program returns false at
//              once, writes no further output, and the rank is not used again.
//
// Exchanges of a target step: embedding, two a layer, one an Engram layer, one for the logits or
// the argmax. Of a draft: embedding, two a stage, one a proposal, one for the logits when they are
// asked for.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include "persistent/units.hpp"
#include "stages/accept.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

class Program {
 public:
  explicit Program(Rank& rank) : rank_(rank), s_(rank.shape), b_(rank.buffers) {}

  // Words of the longest message of one exchange, for sizing boxes.
  static std::int64_t box_packets(const shape::RuntimeShape& s, int max_step_rows) {
    const std::int64_t draft_rows = std::int64_t{s.kMaxBatch} * s.kDraftBlock;
    const std::int64_t rows = max_step_rows > draft_rows ? max_step_rows : draft_rows;
    std::int64_t row_packets = stages::packets_of(s.kHidden);
    const auto widen = [&](std::int64_t words) {
      const std::int64_t packets = stages::packets_of(words);
      row_packets = packets > row_packets ? packets : row_packets;
    };
    widen(s.kVocabLocal);
    widen(engram_words(s));
    return rows * row_packets;
  }

  bool target_step(const lowlat_step& step) {
    const Rows rows{
        step.num_rows,   step.token_ids,         step.positions, step.request_idx, step.slots,
        step.page_table, step.page_table_stride, step.history,   step.state_slots, 0,
        nullptr};
    if (!embed(rows, KernelId::front)) return false;
    for (int layer = 0; layer < s_.kNumLayers; ++layer) {
      const LayerCall call = target_call(rank_, layer);
      if (!front(rows, call, layer == 0)) return false;
      if (call.weights.plan.index_source == layer) select_entries(rank_, rows, call);
      if (!back(rows, call)) return false;
    }
    finish_layers(rows);
    take_features(rank_, rows, s_.kNumLayers);
    rank_.num_feature_rows = rows.num_rows;
    return head(step);
  }

  bool draft(const lowlat_draft& draft) {
    inject_context(rank_, draft.inject_slots, draft.inject_positions, draft.num_inject_rows);
    if (draft.batch_size == 0) return true;
    const Rows rows = draft_rows(rank_, draft);
    if (!embed(rows, KernelId::draft)) return false;
    for (int stage = 0; stage < s_.kNumDraftStages; ++stage) {
      const LayerCall call = draft_call(rank_, stage);
      if (!front(rows, call, stage == 0)) return false;
      if (!back(rows, call)) return false;
    }
    finish_layers(rows);
    head_logits(rank_, rank_.weights->draft_norm, rank_.weights->draft_hc_head, nullptr,
                rows.num_rows);
    return propose(draft);
  }

 private:
  // Two bf16 values a word.
  static std::int64_t engram_words(const shape::RuntimeShape& s) {
    return std::int64_t{s.kEngramColumnsLocal} * s.kEngramDim / 2;
  }

  bool receive_row_sum(int row_idx, KernelId kernel, stages::StageId stage) {
    return stages::receive_sum(rank_.port, rank_.epoch, row_idx * stages::packets_of(s_.kHidden),
                               b_.y + std::int64_t{row_idx} * s_.kHidden, s_.kHidden,
                               static_cast<std::uint32_t>(kernel), stage);
  }

  void publish_row(int row_idx, const float* values) {
    stages::publish(rank_.port, rank_.epoch, row_idx * stages::packets_of(s_.kHidden), values,
                    s_.kHidden);
  }

  bool embed(const Rows& rows, KernelId kernel) {
    embed_partial(rank_, rows);
    ++rank_.epoch;
    for (int t = 0; t < rows.num_rows; ++t) {
      publish_row(t, b_.partial + std::int64_t{t} * s_.kHidden);
    }
    for (int t = 0; t < rows.num_rows; ++t) {
      if (!receive_row_sum(t, kernel, stages::StageId::embed_sum)) return false;
      spread_streams(rank_, t);
    }
    return true;
  }

  bool engram(const Rows& rows, const LayerWeights& layer) {
    engram_lookup(rank_, rows, layer);
    ++rank_.epoch;
    const std::int64_t words = engram_words(s_), row_packets = stages::packets_of(words);
    const std::int64_t columns = std::int64_t{shape::kEngramColumns} * s_.kEngramDim;
    for (int t = 0; t < rows.num_rows; ++t) {
      const std::uint16_t* own = b_.engram_e + t * columns + s_.kTpRank * 2 * words;
      for (std::int64_t packet = 0; packet < row_packets; ++packet) {
        std::uint32_t payload[plat::kTaggedPayload] = {};
        for (int i = 0; i < plat::kTaggedPayload; ++i) {
          const std::int64_t word = packet * plat::kTaggedPayload + i;
          if (word < words) {
            payload[i] = own[2 * word] | static_cast<std::uint32_t>(own[2 * word + 1]) << 16;
          }
        }
        stages::publish_packet(rank_.port, rank_.epoch, t * row_packets + packet, payload);
      }
    }
    for (int t = 0; t < rows.num_rows; ++t) {
      const bool arrived = stages::receive_all(
          rank_.port, rank_.epoch, t * row_packets, words,
          static_cast<std::uint32_t>(KernelId::front), stages::StageId::engram_gather,
          [&](int source, std::int64_t word, std::uint32_t bits) {
            std::uint16_t* out = b_.engram_e + t * columns + source * 2 * words + 2 * word;
            out[0] = static_cast<std::uint16_t>(bits & 0xffffu);
            out[1] = static_cast<std::uint16_t>(bits >> 16);
          });
      if (!arrived) return false;
    }
    engram_apply(rank_, rows, layer);
    return true;
  }

  // But for the first layer, the output of the layer before still waits in y.
  bool front(const Rows& rows, const LayerCall& call, bool first) {
    const LayerWeights& w = call.weights;
    if (!first) finish_layers(rows);
    if (w.plan.engram >= 0 && !engram(rows, w)) return false;
    if (rows.block_rows == 0) take_features(rank_, rows, call.layer_idx);
    for (int t = 0; t < rows.num_rows; ++t) enter_attention(rank_, t, w);
    prepare_x(rank_, rows, call);
    write_window_kv(rank_, rows, call);
    if (w.plan.ratio > 0 && w.plan.kv_source == call.layer_idx) {
      write_compressed(rank_, rows, call);
    }
    project_q(rank_, rows, call);
    if (w.plan.ratio > 0 && w.plan.index_source == call.layer_idx) {
      project_index_query(rank_, rows, call);
    }
    return true;
  }

  bool back(const Rows& rows, const LayerCall& call) {
    const auto kernel = KernelId::back;
    attend(rank_, rows, call);
    project_groups(rank_, rows, call);
    ++rank_.epoch;
    project_out(rank_, rows, call,
                stages::PublishRows{rank_.port, rank_.epoch, s_.kHidden, b_.pending});
    for (int t = 0; t < rows.num_rows; ++t) {
      if (!receive_row_sum(t, kernel, stages::StageId::attention_sum)) return false;
      enter_ffn(rank_, t, call.weights);
    }
    quantize_rows(b_.x_q, b_.x, rows.num_rows, s_.kHidden, s_.kScaleBlock);
    stages::expand_bf16(b_.x_f32, b_.x, rows.num_rows * s_.kHidden);
    route(rank_, rows, call);
    run_shared_expert(rank_, rows, call);
    run_experts(rank_, call);
    ++rank_.epoch;
    for (int t = 0; t < rows.num_rows; ++t) {
      moe_row(rank_, call, t, b_.partial);
      publish_row(t, b_.partial);
    }
    for (int t = 0; t < rows.num_rows; ++t) {
      if (!receive_row_sum(t, kernel, stages::StageId::moe_sum)) return false;
    }
    return true;
  }

  void finish_layers(const Rows& rows) {
    for (int t = 0; t < rows.num_rows; ++t) leave_ffn(rank_, t);
  }

  // Full logits of `num_rows` rows of logits_local on every rank.
  bool gather_logits(float* out, int num_rows, KernelId kernel, stages::StageId stage) {
    ++rank_.epoch;
    const std::int64_t row_packets = stages::packets_of(s_.kVocabLocal);
    for (int i = 0; i < num_rows; ++i) {
      stages::publish(rank_.port, rank_.epoch, i * row_packets,
                      b_.logits_local + std::int64_t{i} * s_.kVocabLocal, s_.kVocabLocal);
    }
    for (int i = 0; i < num_rows; ++i) {
      const bool arrived =
          stages::receive_all(rank_.port, rank_.epoch, i * row_packets, s_.kVocabLocal,
                              static_cast<std::uint32_t>(kernel), stage,
                              [&](int source, std::int64_t word, std::uint32_t bits) {
                                out[std::int64_t{i} * s_.kVocab + source * s_.kVocabLocal + word] =
                                    plat::bits_float(bits);
                              });
      if (!arrived) return false;
    }
    return true;
  }

  // The best of every rank's best, for `count` choices: own(i) is this rank's, put(i, best) takes
  // the winner, which is the same on every rank because all compare the same candidates.
  template <class Own, class Put>
  bool agree_best(int count, KernelId kernel, stages::StageId stage, Own own, Put put) {
    ++rank_.epoch;
    for (int i = 0; i < count; ++i) {
      const stages::Best best = own(i);
      const std::uint32_t words[2] = {plat::float_bits(best.value),
                                      static_cast<std::uint32_t>(best.id)};
      stages::publish(rank_.port, rank_.epoch, i, words, 2);
    }
    for (int i = 0; i < count; ++i) {
      stages::Best winner = stages::kNoBest, candidate = stages::kNoBest;
      const bool arrived =
          stages::receive_all(rank_.port, rank_.epoch, i, 2, static_cast<std::uint32_t>(kernel),
                              stage, [&](int, std::int64_t word, std::uint32_t bits) {
                                if (word == 0) {
                                  candidate.value = plat::bits_float(bits);
                                } else {
                                  candidate.id = static_cast<std::int32_t>(bits);
                                  winner = stages::best_of(winner, candidate);
                                }
                              });
      if (!arrived) return false;
      put(i, winner);
    }
    return true;
  }

  bool head(const lowlat_step& step) {
    if (step.num_logit_rows == 0) return true;
    head_logits(rank_, rank_.weights->norm, rank_.weights->hc_head, step.logit_rows,
                step.num_logit_rows);
    if (step.logits != nullptr) {
      if (!gather_logits(step.logits, step.num_logit_rows, KernelId::head,
                         stages::StageId::logits_gather)) {
        return false;
      }
      if (step.argmax == nullptr) return true;
      for (int i = 0; i < step.num_logit_rows; ++i) {
        step.argmax[i] = stages::argmax(step.logits + std::int64_t{i} * s_.kVocab, s_.kVocab).id;
      }
      return true;
    }
    if (step.argmax == nullptr) return true;
    return agree_best(
        step.num_logit_rows, KernelId::head, stages::StageId::argmax_gather,
        [&](int i) {
          return stages::argmax(b_.logits_local + std::int64_t{i} * s_.kVocabLocal, s_.kVocabLocal,
                                s_.kTpRank * s_.kVocabLocal);
        },
        [&](int i, stages::Best best) { step.argmax[i] = best.id; });
  }

  // The proposals, one after another: each needs the token before it.
  bool propose(const lowlat_draft& draft) {
    for (int place = 0; place < s_.kDraftBlock; ++place) {
      stages::Best own[kMaxDraftBatch];
      markov_step(rank_, draft, place,
                  [&](int request, stages::Best best) { own[request] = best; });
      const bool agreed = agree_best(
          draft.batch_size, KernelId::draft, stages::StageId::draft_token_gather,
          [&](int request) { return own[request]; },
          [&](int request, stages::Best best) {
            b_.previous[request] = best.id;
            draft.draft_tokens[request * s_.kDraftBlock + place] = best.id;
          });
      if (!agreed) return false;
    }
    if (draft.draft_logits == nullptr) return true;
    return gather_logits(draft.draft_logits, draft.batch_size * s_.kDraftBlock, KernelId::draft,
                         stages::StageId::draft_logits_gather);
  }

 public:
  static constexpr int kMaxDraftBatch = 64;

 private:
  Rank& rank_;
  const shape::RuntimeShape& s_;
  Buffers& b_;
};

// The acceptance rule for every request; on every rank alike, no exchange.
inline void accept(const lowlat_accept& a, float* scratch) {
  for (int request = 0; request < a.batch_size; ++request) {
    const std::int64_t row = std::int64_t{request} * (a.num_drafts + 1) * a.vocab;
    const std::int32_t* draft = a.draft_tokens + std::int64_t{request} * a.num_drafts;
    const stages::Accepted result =
        a.temperature[request] == 0.0f
            ? stages::accept_greedy(draft, a.target_logits + row, a.num_drafts, a.vocab)
            : stages::accept_sampled(
                  draft, a.target_logits + row,
                  a.draft_logits + std::int64_t{request} * a.num_drafts * a.vocab, a.num_drafts,
                  a.vocab, a.temperature[request],
                  a.coins + std::int64_t{request} * (a.num_drafts + 1), scratch);
    a.accepted[request] = result.num_drafts;
    a.next_tokens[request] = result.next;
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
