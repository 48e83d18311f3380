// persistent/program.hpp: the resident schedule of one rank: rows in, layers, head, draft.
//
//   front   (K1)   Engram, features, statistics, combine and norm, q and kv projections, window and
//                  compressed KV writes
//   select  (K2i)  index scores and top-k, index sources only; begins after every front wrote its
//                  keys
//   back    (K2)   attention, o-projection published as its tiles fill; each row summed, mixed and
//                  normed as its packets arrive; experts, published row by row; their sum, and the
//                  sublayer's post
//
// A step may be cut at its experts: what runs them, this program or another schedule's kernels, is
// free, because x and the partial sums lie in the rank's buffers. And it may be cut between these
// kernels, each a launch of its own (target_front and so on): the boundary of two launches stands
// where the whole step has a hand-off, and makes what the first wrote visible to the second.
//
// Ordering     Inside a rank, hand-offs between its blocks (persistent/grid.hpp) and nothing else:
//              what a unit wrote is read after one, or by the block that has the row. Everything
//              that crosses ranks is an exchange (stages/exchange.hpp). Each rank runs the same
//              sequence of exchanges, so `epoch` is the same number on every rank, and between the
//              last read of an exchange and the first packet of the next there is a hand-off: the
//              exchange's rule of reuse speaks of a rank, and a rank is all of its blocks.
// Ends         Every exchange and every hand-off may report that the step is over; then the program
//              returns false at once, writes no further output, and the rank is not used again.
//
// Exchanges of a target step: embedding, two a layer, one an Engram layer, one for the argmax, or
// as many for the logits as they fill boxes. Of a draft: embedding, two a stage, one a proposal,
// those of the logits when they are asked for.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include "persistent/units.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

class Program {
 public:
  // One block's view of the launch; all blocks of the rank make one.
  LOWLAT_DEVICE Program(const Rank& rank, const Grid& grid)
      : rank_(rank),
        s_(rank.shape),
        b_(rank.buffers),
        grid_(grid),
        share_{grid.block_idx, grid.num_blocks, rank.blocks + grid.block_idx},
        epoch_(rank.progress->epoch),
        hand_offs_(rank.progress->hand_offs) {}

  // Packets of a box: what `rows` rows of one exchange take, and at least one row of the widest.
  static std::int64_t box_packets(const shape::RuntimeShape& s, int rows) {
    const std::int64_t draft_rows = std::int64_t{s.kMaxBatch} * s.kDraftBlock;
    const std::int64_t row_packets =
        most(stages::packets_of(s.kHidden), stages::packets_of(engram_words(s)));
    return most(most(rows, draft_rows) * row_packets, stages::packets_of(s.kVocabLocal));
  }

  LOWLAT_DEVICE bool target_step(const TargetStep& step) {
    const Rows rows = target_rows(rank_, step);
    if (!begin_target(step)) return false;
    for (int layer_idx = 0; layer_idx < s_.kNumLayers; ++layer_idx) {
      if (!layer(rows, target_call(rank_, layer_idx))) return false;
    }
    return head(step) && end();
  }

  // A target step whose experts are other kernels': between the cuts they find x and, in hash
  // layers, expert_ids, and leave every row's partial. Cut 0 begins the step, cut i takes the
  // partials of layer i - 1; each goes on to the experts of layer i, the last to the step's end.
  LOWLAT_DEVICE bool target_cut(const TargetStep& step, int cut) {
    const Rows rows = target_rows(rank_, step);
    if (!(cut == 0 ? begin_target(step) : sum_experts(rows.num_rows))) return false;
    if (cut == s_.kNumLayers) return head(step) && end();
    const LayerCall call = target_call(rank_, cut);
    if (!to_back(rows, call) || !attention(rows, call)) return false;
    each_row(rows.num_rows, [&](int t) { note_row(rank_, rows, call, t); });
    return end();
  }

  // A target step as launches: of each layer front, on index sources select, and back; then head.
  // The first front begins the step.
  LOWLAT_DEVICE bool target_front(const TargetStep& step, int layer_idx) {
    if (layer_idx == 0 && !begin_target(step)) return false;
    return front(target_rows(rank_, step), target_call(rank_, layer_idx)) && close();
  }
  LOWLAT_DEVICE bool target_select(const TargetStep& step, int layer_idx) {
    return select(target_rows(rank_, step), target_call(rank_, layer_idx)) && close();
  }
  LOWLAT_DEVICE bool target_back(const TargetStep& step, int layer_idx) {
    return back(target_rows(rank_, step), target_call(rank_, layer_idx)) && close();
  }
  LOWLAT_DEVICE bool target_head(const TargetStep& step) { return head(step) && end(); }

 private:
  LOWLAT_DEVICE bool begin_target(const TargetStep& step) {
    const Rows rows = target_rows(rank_, step);
    return embed(rows, KernelId::front, [&](int t) { take_target_row(rank_, rows, step, t); });
  }
  LOWLAT_DEVICE bool begin_draft(const lowlat_draft& draft) {
    const Rows rows = draft_rows(rank_, draft);
    return embed(rows, KernelId::draft, [&](int t) { take_draft_row(rank_, rows, draft, t); });
  }
  LOWLAT_DEVICE bool draft_head(const lowlat_draft& draft) {
    return local_logits(KernelId::draft, rank_.weights->draft_norm, rank_.weights->draft_hc_head,
                        draft_rows(rank_, draft).num_rows, nullptr, 0);
  }
  LOWLAT_DEVICE bool head(const TargetStep& call) {
    const Rows rows = target_rows(rank_, call);
    each_row(rows.num_rows, [&](int t) { take_features(rank_, t, s_.kNumLayers); });
    if (call.is_hosted()) return leave(call.hosted, rows.num_rows);
    const lowlat_step& step = call.step;
    const bool wanted = step.logits != nullptr || step.argmax != nullptr;
    if (step.num_logit_rows == 0 || !wanted) return true;
    if (!local_logits(KernelId::head, rank_.weights->norm, rank_.weights->hc_head,
                      step.num_logit_rows, step.logit_rows, rows.num_rows)) {
      return false;
    }
    if (step.logits == nullptr) {
      return agree_best(
          step.num_logit_rows, KernelId::head, stages::StageId::argmax_gather,
          [&](int i) { return best_of_row(b_.logits_local, i, s_.kVocabLocal, first_id()); },
          [&](int i, stages::Best best) { step.argmax[i] = best.id; });
    }
    if (!gather_logits(step.logits, step.num_logit_rows, KernelId::head,
                       stages::StageId::logits_gather)) {
      return false;
    }
    if (step.argmax == nullptr) return true;
    if (!hand_off(KernelId::head)) return false;
    each_row(step.num_logit_rows, [&](int i) {
      const stages::Best best = best_of_row(step.logits, i, s_.kVocab, 0);
      if (Threads::leads()) step.argmax[i] = best.id;
    });
    return true;
  }
  // What an engine with a head of its own takes. All that a row gives is the row's block's.
  LOWLAT_DEVICE bool leave(const lowlat_hosted_step& step, int num_rows) {
    if (!normed(KernelId::head, rank_.weights->norm, rank_.weights->hc_head, num_rows, nullptr,
                0)) {
      return false;
    }
    const auto give = [&](std::uint16_t* out, const std::uint16_t* rows, std::int64_t width,
                          int t) {
      if (out == nullptr) return;
      spread(width, [&](std::int64_t i) { out[t * width + i] = rows[t * width + i]; });
    };
    each_row(num_rows, [&](int t) {
      give(step.hidden, b_.x, s_.kHidden, t);
      give(step.features, b_.features, std::int64_t{s_.kNumDraftStages} * s_.kHidden, t);
      give(step.streams, b_.residual, std::int64_t{shape::kNumStreams} * s_.kHidden, t);
    });
    return true;
  }

 public:
  // After an end that was decided before the step began.
  LOWLAT_DEVICE void spoil(const TargetStep& call) {
    if (!call.is_hosted()) return;
    each_row(call.num_rows(), [&](int t) { spoil_row(rank_, call.hosted, t); });
  }

  // A draft's proposals without its layers. A request's words are the affair of one block.
  LOWLAT_DEVICE bool propose(const lowlat_proposal& call) {
    const int num_rows = call.batch_size * s_.kDraftBlock;
    each_row(call.batch_size, [&](int request) {
      if (!Threads::leads()) return;
      b_.request_anchor[request] = narrowed(call.anchors[request]);
      b_.request_temperature[request] =
          call.temperature == nullptr ? 0.0f : call.temperature[request];
      b_.request_noise_row[request] = request;
      b_.request_noise[request] = call.noise_offset == nullptr ? 0 : *call.noise_offset;
    });
    if (!proposal_logits(call, num_rows)) return false;
    lowlat_draft draft{};
    draft.batch_size = call.batch_size;
    draft.anchors = b_.request_anchor;
    draft.temperature = b_.request_temperature;
    draft.noise_row = b_.request_noise_row;
    draft.noise_offset = b_.request_noise;
    draft.noise_key = call.noise_key;
    draft.draft_tokens = b_.request_tokens;
    draft.draft_logits = call.draft_logits;
    if (!propose(draft)) return false;
    each_row(call.batch_size, [&](int request) {
      const std::int64_t first = std::int64_t{request} * s_.kDraftBlock;
      spread(s_.kDraftBlock,
             [&](std::int64_t i) { call.draft_tokens[first + i] = b_.request_tokens[first + i]; });
    });
    return end();
  }

  // A draft's layers without its context and its proposals.
  LOWLAT_DEVICE bool draft(const lowlat_hosted_draft& call) {
    const Rows rows = draft_rows(rank_, call);
    if (!embed(rows, KernelId::draft, [&](int t) { take_draft_row(rank_, rows, call, t); })) {
      return false;
    }
    for (int stage = 0; stage < s_.kNumDraftStages; ++stage) {
      if (!layer(rows, draft_call(rank_, stage))) return false;
    }
    const std::int64_t width = draft_width(rank_);
    constexpr int kStreams = shape::kNumStreams;
    each_row(rows.num_rows, [&](int t) {
      const std::uint16_t* residual = b_.residual + std::int64_t{t} * kStreams * s_.kHidden;
      std::uint16_t* out = call.hidden + t * width;
      if (rank_.rules->own_pre) {
        spread(width, [&](std::int64_t i) { out[i] = residual[i]; });
      } else {
        stages::hc_combine<Block>(residual, b_.pre + t * kStreams, s_.kHidden,
                                  [&](int h, float v) { out[h] = stages::to_bf16(v); });
      }
    });
    return end();
  }
  LOWLAT_DEVICE void spoil(const lowlat_hosted_draft& call) {
    each_row(call.batch_size * s_.kDraftBlock, [&](int t) { spoil_row(rank_, call, t); });
  }

  LOWLAT_DEVICE bool draft(const lowlat_draft& draft) {
    if (draft.num_inject_rows > 0 && !(inject(draft) && hand_off(KernelId::draft))) return false;
    if (draft.batch_size == 0) return end();
    if (!begin_draft(draft)) return false;
    const Rows rows = draft_rows(rank_, draft);
    for (int stage = 0; stage < s_.kNumDraftStages; ++stage) {
      if (!layer(rows, draft_call(rank_, stage))) return false;
    }
    return draft_head(draft) && propose(draft) && end();
  }

  // A draft as launches: inject where it has rows for it; of each stage front and back; propose.
  LOWLAT_DEVICE bool draft_inject(const lowlat_draft& draft) { return inject(draft) && close(); }
  LOWLAT_DEVICE bool draft_front(const lowlat_draft& draft, int stage) {
    return (stage > 0 || begin_draft(draft)) &&
           front(draft_rows(rank_, draft), draft_call(rank_, stage)) && close();
  }
  LOWLAT_DEVICE bool draft_back(const lowlat_draft& draft, int stage) {
    return back(draft_rows(rank_, draft), draft_call(rank_, stage)) && close();
  }
  LOWLAT_DEVICE bool draft_propose(const lowlat_draft& draft) {
    return draft_head(draft) && propose(draft) && close();
  }

  // The proposals alone, from logits_local of the block's rows.
  LOWLAT_DEVICE bool draft_proposals(const lowlat_draft& draft) { return propose(draft) && end(); }

  // The acceptance rule for every request; on every rank alike, no exchange.
  LOWLAT_DEVICE bool accept(const lowlat_accept& a) {
    using Acceptance = stages::Acceptance<Block>;
    LOWLAT_SHARED(Acceptance::Scratch, scratch);
    each_row(a.batch_size, [&](int request) {
      const std::int64_t row = std::int64_t{request} * (a.num_drafts + 1) * a.vocab;
      const std::int32_t* draft = a.draft_tokens + std::int64_t{request} * a.num_drafts;
      const stages::Accepted result =
          a.temperature[request] == 0.0f
              ? Acceptance::greedy(draft, a.target_logits + row, a.num_drafts, a.vocab, scratch)
              : Acceptance::sampled(draft, a.target_logits + row,
                                    a.draft_logits + std::int64_t{request} * a.num_drafts * a.vocab,
                                    a.num_drafts, a.vocab, a.temperature[request],
                                    a.coins + std::int64_t{request} * (a.num_drafts + 1),
                                    share_.memory->accept_scratch, scratch);
      if (Threads::leads()) {
        a.accepted[request] = result.num_drafts;
        a.next_tokens[request] = result.next;
      }
    });
    return true;
  }

 private:
  // Two bf16 values a word.
  LOWLAT_DEVICE static constexpr std::int64_t engram_words(const shape::RuntimeShape& s) {
    return std::int64_t{s.kEngramColumnsLocal} * s.kEngramDim / 2;
  }
  LOWLAT_DEVICE std::int32_t first_id() const { return s_.kTpRank * s_.kVocabLocal; }

  // Of the block's rows of 0 .. n - 1.
  template <class Body>
  LOWLAT_DEVICE void each_row(int n, Body&& body) {
    for_share(share_, n, body);
  }
  // The same, of bodies that may end the step.
  template <class Body>
  LOWLAT_DEVICE bool all_rows(int n, Body&& body) {
    bool whole = true;
    for_share(share_, n, [&](int t) { whole = whole && body(t); });
    return whole;
  }
  LOWLAT_UNIT bool hand_off(KernelId kernel, Early early = {}) {
    return persistent::hand_off(grid_, ++hand_offs_, rank_.port.fault,
                                static_cast<std::uint32_t>(kernel), epoch_, early);
  }
  // Weights that a stage begins with, whatever its input: for the hand-off before it.
  LOWLAT_DEVICE Early early(const Fp8Weight& weight, int rows, int k, int together = 1) const {
    return early_rows(share_, weight.codes, k, 0, rows, together);
  }
  LOWLAT_DEVICE Early early(const std::uint16_t* weight, int rows, int k) const {
    return early_rows(share_, weight, 2 * std::int64_t{k}, 0, rows);
  }
  // The next launch goes on from here. Every block has read the old numbers before it passed the
  // launch's first hand-off, which this block has passed too.
  LOWLAT_DEVICE bool end() { return hand_off(KernelId::front) && close(); }
  // The same where the launch has had a hand-off: what a boundary orders needs no second one.
  LOWLAT_DEVICE bool close() {
    if (grid_.block_idx == 0 && Threads::leads()) *rank_.progress = {epoch_, hand_offs_};
    return true;
  }

  LOWLAT_UNIT bool receive_row_sum(int row_idx, KernelId kernel, stages::StageId stage) {
    return stages::receive_sum<Block>(rank_.port, epoch_, row_idx * stages::packets_of(s_.kHidden),
                                      b_.y + std::int64_t{row_idx} * s_.kHidden, s_.kHidden,
                                      static_cast<std::uint32_t>(kernel), stage);
  }
  LOWLAT_UNIT void publish_partial(int row_idx) {
    stages::publish<Block>(rank_.port, epoch_, row_idx * stages::packets_of(s_.kHidden),
                           b_.partial + std::int64_t{row_idx} * s_.kHidden, s_.kHidden);
  }

  template <class Take>
  LOWLAT_DEVICE bool embed(const Rows& rows, KernelId kernel, Take&& take) {
    ++epoch_;
    each_row(rows.num_rows, [&](int t) {
      take(t);
      embed_partial(rank_, rows, t);
      publish_partial(t);
    });
    return all_rows(rows.num_rows,
                    [&](int t) {
                      if (!receive_row_sum(t, kernel, stages::StageId::embed_sum)) return false;
                      spread_streams(rank_, t);
                      return true;
                    }) &&
           hand_off(kernel);
  }

  // Look-up, gather and projection; what a row adds to its streams then lies in engram_kv.
  LOWLAT_UNIT bool engram(const Rows& rows, const LayerWeights& layer) {
    const std::int64_t words = engram_words(s_), row_packets = stages::packets_of(words);
    const std::int64_t columns = std::int64_t{shape::kEngramColumns} * s_.kEngramDim;
    if (!hand_off(KernelId::front)) return false;
    ++epoch_;
    each_row(rows.num_rows, [&](int t) {
      engram_lookup(rank_, rows, layer, t);
      const std::uint16_t* own = b_.engram_e + t * columns + s_.kTpRank * 2 * words;
      stages::publish_words<Block>(rank_.port, epoch_, t * row_packets, words, [&](std::int64_t i) {
        return own[2 * i] | static_cast<std::uint32_t>(own[2 * i + 1]) << 16;
      });
      plat::block_sync();
    });
    return all_rows(rows.num_rows,
                    [&](int t) {
                      const bool arrived = stages::receive_all<Block>(
                          rank_.port, epoch_, t * row_packets, words,
                          static_cast<std::uint32_t>(KernelId::front),
                          stages::StageId::engram_gather,
                          [&](int source, std::int64_t word, std::uint32_t bits) {
                            std::uint16_t* out =
                                b_.engram_e + t * columns + source * 2 * words + 2 * word;
                            out[0] = static_cast<std::uint16_t>(bits & 0xffffu);
                            out[1] = static_cast<std::uint16_t>(bits >> 16);
                          });
                      if (arrived) engram_quantize(rank_, t);
                      return arrived;
                    }) &&
           hand_off(KernelId::front) && (engram_project(rank_, share_, rows, layer), true) &&
           hand_off(KernelId::front);
  }

  // What a kernel wrote is there for the next after a hand-off, or after a launch's end.
  LOWLAT_UNIT bool layer(const Rows& rows, const LayerCall& call) {
    return to_back(rows, call) && back(rows, call);
  }
  LOWLAT_DEVICE bool to_back(const Rows& rows, const LayerCall& call) {
    return front(rows, call) && hand_off(KernelId::front) &&
           (!call.selects() || (select(rows, call) && hand_off(KernelId::select)));
  }

  LOWLAT_UNIT bool front(const Rows& rows, const LayerCall& call) {
    const LayerWeights& w = call.weights;
    const bool has_engram = w.plan.engram >= 0;
    if (has_engram && !engram(rows, w)) return false;
    each_row(rows.num_rows, [&](int t) {
      if (has_engram) engram_apply(rank_, rows, w, t);
      if (rows.block_rows == 0) take_features(rank_, t, call.layer_idx);
    });
    if (!hand_off(KernelId::front)) return false;
    mix_sums(rank_, share_, w.hc_attn, stages::kHcOutputs, rows.num_rows, nullptr, 0);
    if (!hand_off(KernelId::front)) return false;
    each_row(rows.num_rows, [&](int t) { enter_attention(rank_, share_, rows, t, call); });
    if (!hand_off(KernelId::front, early(w.wq_a, s_.kQLora, s_.kHidden))) return false;
    project_x(rank_, share_, rows, call);
    if (!hand_off(KernelId::front)) return false;
    each_row(rows.num_rows, [&](int t) {
      norm_q_lora(rank_, share_, w, t);
      write_window_kv(rank_, rows, call, t);
    });
    if (call.owns_pool()) write_compressed(rank_, share_, rows, call);
    const int q_rows = s_.kNumHeadsLocal * shape::kHeadDim;
    if (!hand_off(KernelId::front, early(w.wq_b, q_rows, s_.kQLora))) return false;
    project_q(rank_, share_, rows, call);
    return true;
  }

  LOWLAT_UNIT bool select(const Rows& rows, const LayerCall& call) {
    each_row(rows.num_rows, [&](int t) { finish_index_query(rank_, share_, t); });
    for (int first = 0; first < rows.num_rows; first += kScoreRows) {
      if (!hand_off(KernelId::select)) return false;
      score_entries(rank_, share_, rows, call, first);
      if (!hand_off(KernelId::select)) return false;
      select_entries(rank_, share_, rows, call, first);
    }
    return true;
  }

  LOWLAT_UNIT bool back(const Rows& rows, const LayerCall& call) {
    return attention(rows, call) && experts(rows, call);
  }

  // Attention, o-projection and its sum; afterwards every row's x is the ffn's.
  LOWLAT_UNIT bool attention(const Rows& rows, const LayerCall& call) {
    const auto kernel = KernelId::back;
    const LayerWeights& w = call.weights;
    const int o_rows = s_.kOLora, o_width = s_.kGroupsLocal * s_.kOLora;
    attend(rank_, share_, rows, call);
    const bool wide = w.wo_a_bf16 != nullptr;
    if (!hand_off(kernel, wide ? early(w.wo_a_bf16, o_rows, s_.kGroupInput)
                               : early(w.wo_a, o_rows, s_.kGroupInput))) {
      return false;
    }
    project_groups(rank_, share_, rows, call);
    if (!hand_off(kernel)) return false;
    each_row(rows.num_rows, [&](int t) { quantize_groups(rank_, t); });
    constexpr int kTogether = stages::rows_together<stages::PublishRows>();
    if (!hand_off(kernel, early(w.wo_b, s_.kHidden, o_width, kTogether))) return false;
    ++epoch_;
    project_out(rank_, share_, rows, call,
                stages::PublishRows{rank_.port, epoch_, s_.kHidden, pending()});
    if (!all_rows(rows.num_rows, [&](int t) {
          if (!receive_row_sum(t, kernel, stages::StageId::attention_sum)) return false;
          leave_attention(rank_, t);
          return true;
        })) {
      return false;
    }
    if (!hand_off(kernel)) return false;
    mix_sums(rank_, share_, call.weights.hc_ffn, stages::kHcOutputs, rows.num_rows, nullptr, 0);
    if (!hand_off(kernel)) return false;
    each_row(rows.num_rows, [&](int t) { enter_ffn(rank_, share_, t, call.weights); });
    return hand_off(kernel, w.plan.hash_gate != 0
                                ? early(w.shared_w1, s_.kIntermediateLocal, s_.kHidden)
                                : early(w.gate, call.num_experts, s_.kHidden));
  }

  LOWLAT_UNIT bool experts(const Rows& rows, const LayerCall& call) {
    const auto kernel = KernelId::back;
    project_ffn(rank_, share_, rows, call);
    if (!hand_off(kernel)) return false;
    each_row(rows.num_rows, [&](int t) { route(rank_, share_, rows, call, t); });
    // The routed experts' weights depend on the routing, the shared one's do not.
    const Fp8Weight& shared = call.weights.shared_w2;
    if (!hand_off(kernel, early(shared, s_.kHidden, s_.kIntermediateLocal))) return false;
    run_experts_up(rank_, share_, rows, call);
    if (!hand_off(kernel)) return false;
    run_experts_down(rank_, share_, call);
    if (!hand_off(kernel)) return false;
    each_row(rows.num_rows, [&](int t) { moe_row(rank_, call, t); });
    return sum_experts(rows.num_rows);
  }

  // The sum over ranks of every row's partial, which the row's block has made or an earlier launch,
  // and the ffn's post.
  LOWLAT_UNIT bool sum_experts(int num_rows) {
    ++epoch_;
    each_row(num_rows, [&](int t) { publish_partial(t); });
    return all_rows(num_rows, [&](int t) {
      if (!receive_row_sum(t, KernelId::back, stages::StageId::moe_sum)) return false;
      leave_ffn(rank_, t);
      return true;
    });
  }
  // A packet a row for each of the block's teams, see PublishRows.
  LOWLAT_DEVICE std::uint32_t (*pending()) [plat::kTaggedPayload] {
    if constexpr (Threads::kAlone) {
      return share_.memory->pending;
    } else {
      return share_.memory->pending + stages::DotTeam<Block>::idx() * s_.kMaxRows;
    }
  }

  // logits_local of a proposal's rows: what the draft's last layer left is mixed, where the model
  // has not done so, and normed.
  LOWLAT_DEVICE bool proposal_logits(const lowlat_proposal& call, int num_rows) {
    const ModelWeights& w = *rank_.weights;
    const auto kernel = KernelId::draft;
    const std::int64_t width = std::int64_t{s_.kHidden} * (rank_.rules->own_pre ? 4 : 1);
    if (rank_.rules->own_pre) {
      static_assert(shape::kNumStreams == 4);
      each_row(num_rows, [&](int t) {
        spread(width,
               [&](std::int64_t i) { b_.residual[t * width + i] = call.hidden[t * width + i]; });
      });
      return local_logits(kernel, w.draft_norm, w.draft_hc_head, num_rows, nullptr, 0);
    }
    each_row(num_rows, [&](int t) {
      float* wide = share_.memory->wide_f32;
      std::uint16_t* x = b_.x + t * width;
      expand(wide, call.hidden + t * width, s_.kHidden);
      plat::block_sync();
      norm_row(x, wide, w.draft_norm, s_.kHidden, s_.kNormEps);
      expand(b_.x_f32 + t * width, x, s_.kHidden);
      plat::block_sync();
    });
    if (!hand_off(kernel)) return false;
    head_logits(rank_, share_, num_rows);
    return hand_off(kernel);
  }

  // x, as a head takes it, of num_rows rows: of those that row_ids lists (checked against num_all),
  // or all. A row is its block's afterwards.
  LOWLAT_DEVICE bool normed(KernelId kernel, const std::uint16_t* norm, const HcWeights& hc,
                            int num_rows, const std::int32_t* row_ids, int num_all) {
    if (!hand_off(kernel)) return false;
    if (rank_.rules->own_pre) {
      mix_sums(rank_, share_, hc, shape::kNumStreams, num_rows, row_ids, num_all);
      if (!hand_off(kernel)) return false;
    }
    each_row(num_rows, [&](int i) {
      const int row_idx = row_ids == nullptr ? i : within(row_ids[i], num_all);
      enter_head(rank_, share_, norm, hc, row_idx, i);
    });
    return true;
  }
  // logits_local of the same rows.
  LOWLAT_DEVICE bool local_logits(KernelId kernel, const std::uint16_t* norm, const HcWeights& hc,
                                  int num_rows, const std::int32_t* row_ids, int num_all) {
    if (!normed(kernel, norm, hc, num_rows, row_ids, num_all)) return false;
    if (!hand_off(kernel, early(rank_.weights->head, s_.kVocabLocal, s_.kHidden))) return false;
    head_logits(rank_, share_, num_rows);
    return hand_off(kernel);
  }

  // The best of row i of `logits`, in every thread.
  LOWLAT_UNIT stages::Best best_of_row(const float* logits, int i, int vocab,
                                       std::int32_t first_id) {
    using Best = stages::BlockBest<Block>;
    LOWLAT_SHARED(Best::Scratch, scratch);
    return stages::argmax<Block>(logits + std::int64_t{i} * vocab, vocab, first_id, scratch);
  }

  // Full logits of `num_rows` rows of logits_local on every rank, as many at once as a box holds. A
  // row travels in pieces, so that all blocks have some.
  LOWLAT_UNIT bool gather_logits(float* out, int num_rows, KernelId kernel, stages::StageId stage) {
    const std::int64_t row_packets = stages::packets_of(s_.kVocabLocal);
    const std::int64_t piece_packets = Threads::kAlone ? row_packets : Block::kNumThreads;
    const auto num_pieces = static_cast<int>((row_packets + piece_packets - 1) / piece_packets);
    const std::int64_t piece_words = piece_packets * plat::kTaggedPayload;
    const auto at_once = static_cast<int>(rank_.port.box_packets / row_packets);
    for (int first = 0; first < num_rows; first += at_once) {
      if (first > 0 && !hand_off(kernel)) return false;
      ++epoch_;
      const int num = num_rows - first < at_once ? num_rows - first : at_once;
      const auto each_piece = [&](auto&& body) {
        return all_rows(num * num_pieces, [&](int item) {
          const int i = item / num_pieces;
          const std::int64_t word = item % num_pieces * piece_words;
          const std::int64_t rest = s_.kVocabLocal - word;
          return body(first + i, i * row_packets + item % num_pieces * piece_packets, word,
                      rest < piece_words ? rest : piece_words);
        });
      };
      each_piece([&](int row, std::int64_t packet, std::int64_t word, std::int64_t num_words) {
        stages::publish<Block>(rank_.port, epoch_, packet,
                               b_.logits_local + std::int64_t{row} * s_.kVocabLocal + word,
                               num_words);
        return true;
      });
      const bool arrived =
          each_piece([&](int row, std::int64_t packet, std::int64_t word, std::int64_t num_words) {
            float* out_row = out + std::int64_t{row} * s_.kVocab + word;
            return stages::receive_all<Block>(
                rank_.port, epoch_, packet, num_words, static_cast<std::uint32_t>(kernel), stage,
                [&](int source, std::int64_t i, std::uint32_t bits) {
                  out_row[std::int64_t{source} * s_.kVocabLocal + i] = plat::bits_float(bits);
                });
          });
      if (!arrived) return false;
    }
    return true;
  }

  // The best of every rank's best, for `count` choices: own(i) is this rank's, put(i, best) is
  // called by one thread with the winner, which is the same on every rank because all compare the
  // same candidates. A choice is one block's.
  template <class Own, class Put>
  LOWLAT_DEVICE bool agree_best(int count, KernelId kernel, stages::StageId stage, Own own,
                                Put put) {
    ++epoch_;
    each_row(count, [&](int i) {
      const stages::Best best = own(i);
      const std::uint32_t words[2] = {plat::float_bits(best.value),
                                      static_cast<std::uint32_t>(best.id)};
      stages::publish<Block>(rank_.port, epoch_, i, words, 2);
    });
    using Candidates = stages::Best[kMaxRanks];
    LOWLAT_SHARED(Candidates, candidates);
    return all_rows(count, [&](int i) {
      const bool arrived =
          stages::receive_all<Block>(rank_.port, epoch_, i, 2, static_cast<std::uint32_t>(kernel),
                                     stage, [&](int source, std::int64_t word, std::uint32_t bits) {
                                       if (word == 0) {
                                         candidates[source].value = plat::bits_float(bits);
                                       } else {
                                         candidates[source].id = static_cast<std::int32_t>(bits);
                                       }
                                     });
      if (!arrived) return false;
      if (Threads::leads()) {
        stages::Best winner = stages::kNoBest;
        for (int source = 0; source < s_.kTpSize; ++source) {
          winner = stages::best_of(winner, candidates[source]);
        }
        put(i, winner);
      }
      plat::block_sync();
      return true;
    });
  }

  // The context's keys of committed rows of the last target step.
  LOWLAT_UNIT bool inject(const lowlat_draft& draft) {
    const auto kernel = KernelId::draft;
    const int num_rows = draft.num_inject_rows;
    each_row(num_rows, [&](int t) { inject_features(rank_, t); });
    if (!hand_off(kernel)) return false;
    inject_project(rank_, share_, num_rows);
    if (!hand_off(kernel)) return false;
    each_row(num_rows, [&](int t) { inject_x(rank_, draft.inject_positions[t], t); });
    if (!hand_off(kernel)) return false;
    inject_kv(rank_, share_, num_rows);
    if (!hand_off(kernel)) return false;
    each_row(num_rows, [&](int t) {
      const std::int32_t slot = checked_slot(rank_, draft.inject_slots[t]);
      if (slot >= 0) inject_keys(rank_, slot, t);
    });
    return true;
  }

  // The proposals, one after another: each needs the token before it.
  LOWLAT_UNIT bool propose(const lowlat_draft& draft) {
    const auto kernel = KernelId::draft;
    for (int place = 0; place < s_.kDraftBlock; ++place) {
      each_row(draft.batch_size, [&](int request) {
        markov_embed(rank_, request, place == 0 ? draft.anchors[request] : b_.previous[request]);
      });
      if (!hand_off(kernel)) return false;
      markov_logits(rank_, share_, draft.batch_size, place);
      if (!hand_off(kernel)) return false;
      const bool agreed = agree_best(
          draft.batch_size, kernel, stages::StageId::draft_token_gather,
          [&](int request) { return markov_choice(rank_, draft, request, place); },
          [&](int request, stages::Best best) {
            b_.previous[request] = best.id;
            draft.draft_tokens[request * s_.kDraftBlock + place] = best.id;
          });
      if (!agreed) return false;
    }
    if (draft.draft_logits == nullptr) return true;
    if (!hand_off(kernel)) return false;
    return gather_logits(draft.draft_logits, draft.batch_size * s_.kDraftBlock, kernel,
                         stages::StageId::draft_logits_gather);
  }

  static constexpr int kMaxRanks = 64;

  const Rank& rank_;
  const shape::RuntimeShape& s_;
  const Buffers& b_;
  const Grid grid_;
  const Share share_;
  std::uint64_t epoch_;
  std::uint32_t hand_offs_;
};

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
