#include "platform/scalar.hpp"
// The platform comes before every stage.
#include "host/plain.hpp"

#include <cstring>

namespace lowlat::host {

namespace plat = scalar::plat;
namespace stages = scalar::stages;
namespace persistent = scalar::persistent;

std::int64_t PlainProgram::staging_words(const shape::RuntimeShape& s) {
  std::int64_t row_words = s.kHidden;
  const auto widen = [&](std::int64_t words) { row_words = words > row_words ? words : row_words; };
  widen(s.kVocabLocal);
  widen(std::int64_t{s.kEngramColumnsLocal} * s.kEngramDim / 2);
  return row_words * s.kMaxRows;
}

// Afterwards staged(r) holds rank r's words, until the exchange after the next.
bool PlainProgram::exchange(const std::uint32_t* words, std::int64_t num_words,
                            stages::StageId stage) {
  ++epoch_;
  Region& own = *regions_[s_.kTpRank];
  std::memcpy(own.staging(epoch_), words, static_cast<std::size_t>(num_words) * sizeof *words);
  plat::store_release<plat::Scope::system>(&own.arrived.value, epoch_);
  for (int peer = 0; peer < s_.kTpSize; ++peer) {
    const std::uint32_t* arrived = &regions_[peer]->arrived.value;
    const bool here = stages::wait_or_report(
        rank_.port.fault, static_cast<std::uint32_t>(persistent::KernelId::plain), stage, peer,
        epoch_,
        [&] { return plat::load_acquire<plat::Scope::system>(arrived) - epoch_ <= 0x7fff'ffffu; });
    if (!here) return false;
  }
  return true;
}

// y = the sum over ranks of `partial`, rounded once.
bool PlainProgram::sum_rows(int num_rows, stages::StageId stage) {
  const std::int64_t words = std::int64_t{num_rows} * s_.kHidden;
  if (!exchange(reinterpret_cast<const std::uint32_t*>(b_.partial), words, stage)) return false;
  stages::rank_sum<persistent::Block>(
      b_.y, s_.kTpSize, 0, static_cast<int>(words),
      [&](int source, int i) { return plat::bits_float(staged(source)[i]); });
  return true;
}

bool PlainProgram::gather_logits(float* out, int num_rows, stages::StageId stage) {
  const std::int64_t words = std::int64_t{num_rows} * s_.kVocabLocal;
  if (!exchange(reinterpret_cast<const std::uint32_t*>(b_.logits_local), words, stage)) {
    return false;
  }
  for (int source = 0; source < s_.kTpSize; ++source) {
    for (int i = 0; i < num_rows; ++i) {
      std::memcpy(out + std::int64_t{i} * s_.kVocab + source * s_.kVocabLocal,
                  staged(source) + std::int64_t{i} * s_.kVocabLocal,
                  static_cast<std::size_t>(s_.kVocabLocal) * sizeof *out);
    }
  }
  return true;
}

// A whole layer: y of the sublayer before is already in the residual, and so is this layer's after.
bool PlainProgram::layer(const Rows& rows, const LayerCall& call) {
  const auto& w = call.weights;
  const int num_rows = rows.num_rows;

  if (w.plan.engram >= 0) {
    for (int t = 0; t < num_rows; ++t) persistent::engram_lookup(rank_, rows, w, t);
    // This rank's columns of every row, packed; then every rank's back in their places.
    const std::int64_t row = std::int64_t{shape::kEngramColumns} * s_.kEngramDim;
    const std::int64_t own = std::int64_t{s_.kEngramColumnsLocal} * s_.kEngramDim;
    std::vector<std::uint32_t> packed(static_cast<std::size_t>(num_rows * own / 2));
    for (int t = 0; t < num_rows; ++t) {
      std::memcpy(packed.data() + t * own / 2, b_.engram_e + t * row + s_.kTpRank * own,
                  static_cast<std::size_t>(own) * sizeof *b_.engram_e);
    }
    if (!exchange(packed.data(), num_rows * own / 2, stages::StageId::engram_gather)) return false;
    for (int source = 0; source < s_.kTpSize; ++source) {
      for (int t = 0; t < num_rows; ++t) {
        std::memcpy(b_.engram_e + t * row + source * own, staged(source) + t * own / 2,
                    static_cast<std::size_t>(own) * sizeof *b_.engram_e);
      }
    }
    for (int t = 0; t < num_rows; ++t) persistent::engram_quantize(rank_, t);
    persistent::engram_project(rank_, share_, rows, w);
    for (int t = 0; t < num_rows; ++t) persistent::engram_apply(rank_, rows, w, t);
  }
  for (int t = 0; t < num_rows; ++t) {
    if (rows.block_rows == 0) persistent::take_features(rank_, t, call.layer_idx);
  }
  persistent::mix_sums(rank_, share_, w.hc_attn, stages::kHcOutputs, num_rows, nullptr, 0);
  for (int t = 0; t < num_rows; ++t) persistent::enter_attention(rank_, share_, rows, t, call);
  persistent::project_x(rank_, share_, rows, call);
  for (int t = 0; t < num_rows; ++t) {
    persistent::norm_q_lora(rank_, share_, w, t);
    persistent::write_window_kv(rank_, rows, call, t);
  }
  if (call.owns_pool()) persistent::write_compressed(rank_, share_, rows, call);
  persistent::project_q(rank_, share_, rows, call);
  if (call.selects()) {
    for (int t = 0; t < num_rows; ++t) persistent::finish_index_query(rank_, share_, t);
    for (int first = 0; first < num_rows; first += persistent::kScoreRows) {
      persistent::score_entries(rank_, share_, rows, call, first);
      persistent::select_entries(rank_, share_, rows, call, first);
    }
  }
  persistent::attend(rank_, share_, rows, call);
  persistent::project_groups(rank_, share_, rows, call);
  for (int t = 0; t < num_rows; ++t) persistent::quantize_groups(rank_, t);
  persistent::project_out(rank_, share_, rows, call, [&](int t, int n, float y) {
    b_.partial[std::int64_t{t} * s_.kHidden + n] = y;
  });
  if (!sum_rows(num_rows, stages::StageId::attention_sum)) return false;

  for (int t = 0; t < num_rows; ++t) persistent::leave_attention(rank_, t);
  persistent::mix_sums(rank_, share_, w.hc_ffn, stages::kHcOutputs, num_rows, nullptr, 0);
  for (int t = 0; t < num_rows; ++t) persistent::enter_ffn(rank_, share_, t, w);
  persistent::project_ffn(rank_, share_, rows, call);
  for (int t = 0; t < num_rows; ++t) persistent::route(rank_, share_, rows, call, t);
  persistent::run_experts_up(rank_, share_, rows, call);
  persistent::run_experts_down(rank_, share_, call);
  for (int t = 0; t < num_rows; ++t) persistent::moe_row(rank_, call, t);
  if (!sum_rows(num_rows, stages::StageId::moe_sum)) return false;
  for (int t = 0; t < num_rows; ++t) persistent::leave_ffn(rank_, t);
  return true;
}

bool PlainProgram::target_step(const lowlat_step& step) {
  const persistent::TargetStep call{step, {}};
  const Rows rows = persistent::target_rows(rank_, call);
  for (int t = 0; t < rows.num_rows; ++t) {
    persistent::take_target_row(rank_, rows, call, t);
    persistent::embed_partial(rank_, rows, t);
  }
  if (!sum_rows(rows.num_rows, stages::StageId::embed_sum)) return false;
  for (int t = 0; t < rows.num_rows; ++t) persistent::spread_streams(rank_, t);
  for (int i = 0; i < s_.kNumLayers; ++i) {
    if (!layer(rows, persistent::target_call(rank_, i))) return false;
  }
  for (int t = 0; t < rows.num_rows; ++t) persistent::take_features(rank_, t, s_.kNumLayers);
  const bool wanted = step.logits != nullptr || step.argmax != nullptr;
  if (step.num_logit_rows == 0 || !wanted) return true;

  head(rank_.weights->norm, rank_.weights->hc_head, step.num_logit_rows, step.logit_rows,
       rows.num_rows);
  if (step.logits != nullptr) {
    if (!gather_logits(step.logits, step.num_logit_rows, stages::StageId::logits_gather)) {
      return false;
    }
  } else if (!exchange(reinterpret_cast<const std::uint32_t*>(b_.logits_local),
                       std::int64_t{step.num_logit_rows} * s_.kVocabLocal,
                       stages::StageId::argmax_gather)) {
    return false;
  }
  if (step.argmax == nullptr) return true;
  for (int i = 0; i < step.num_logit_rows; ++i) {
    stages::Best best = stages::kNoBest;
    for (int source = 0; source < s_.kTpSize; ++source) {
      const auto* shard = reinterpret_cast<const float*>(staged(source));
      best = stages::best_of(best, stages::argmax(shard + std::int64_t{i} * s_.kVocabLocal,
                                                  s_.kVocabLocal, source * s_.kVocabLocal));
    }
    step.argmax[i] = best.id;
  }
  return true;
}

// logits_local of the rows that row_ids lists, or of all num_rows.
void PlainProgram::head(const std::uint16_t* norm, const lowlat::persistent::HcWeights& hc,
                        int num_rows, const std::int32_t* row_ids, int num_all) {
  if (rank_.rules->own_pre) {
    persistent::mix_sums(rank_, share_, hc, shape::kNumStreams, num_rows, row_ids, num_all);
  }
  for (int i = 0; i < num_rows; ++i) {
    persistent::enter_head(rank_, share_, norm, hc, row_ids != nullptr ? row_ids[i] : i, i);
  }
  persistent::head_logits(rank_, share_, num_rows);
}

// Context keys of the committed rows of the last target step.
void PlainProgram::inject(const lowlat_draft& draft) {
  const int num_rows = draft.num_inject_rows;
  for (int t = 0; t < num_rows; ++t) persistent::inject_features(rank_, t);
  persistent::inject_project(rank_, share_, num_rows);
  for (int t = 0; t < num_rows; ++t) persistent::inject_x(rank_, draft.inject_positions[t], t);
  persistent::inject_kv(rank_, share_, num_rows);
  for (int t = 0; t < num_rows; ++t) {
    if (draft.inject_slots[t] >= 0) persistent::inject_keys(rank_, draft.inject_slots[t], t);
  }
}

bool PlainProgram::draft(const lowlat_draft& draft) {
  inject(draft);
  if (draft.batch_size == 0) return true;
  const Rows rows = persistent::draft_rows(rank_, draft);
  for (int t = 0; t < rows.num_rows; ++t) {
    persistent::take_draft_row(rank_, rows, draft, t);
    persistent::embed_partial(rank_, rows, t);
  }
  if (!sum_rows(rows.num_rows, stages::StageId::embed_sum)) return false;
  for (int t = 0; t < rows.num_rows; ++t) persistent::spread_streams(rank_, t);
  for (int stage = 0; stage < s_.kNumDraftStages; ++stage) {
    if (!layer(rows, persistent::draft_call(rank_, stage))) return false;
  }
  head(rank_.weights->draft_norm, rank_.weights->draft_hc_head, rows.num_rows, nullptr, 0);
  for (int place = 0; place < s_.kDraftBlock; ++place) {
    for (int request = 0; request < draft.batch_size; ++request) {
      persistent::markov_embed(rank_, request,
                               place == 0 ? draft.anchors[request] : b_.previous[request]);
    }
    persistent::markov_logits(rank_, share_, draft.batch_size, place);
    std::vector<std::uint32_t> candidates(2 * static_cast<std::size_t>(draft.batch_size));
    for (int request = 0; request < draft.batch_size; ++request) {
      const stages::Best best = persistent::markov_choice(rank_, draft, request, place);
      candidates[2 * request] = plat::float_bits(best.value);
      candidates[2 * request + 1] = static_cast<std::uint32_t>(best.id);
    }
    if (!exchange(candidates.data(), static_cast<std::int64_t>(candidates.size()),
                  stages::StageId::draft_token_gather)) {
      return false;
    }
    for (int request = 0; request < draft.batch_size; ++request) {
      stages::Best best = stages::kNoBest;
      for (int source = 0; source < s_.kTpSize; ++source) {
        const std::uint32_t* words = staged(source) + 2 * request;
        best = stages::best_of(best,
                               {plat::bits_float(words[0]), static_cast<std::int32_t>(words[1])});
      }
      b_.previous[request] = best.id;
      draft.draft_tokens[request * s_.kDraftBlock + place] = best.id;
    }
  }
  if (draft.draft_logits == nullptr) return true;
  return gather_logits(draft.draft_logits, draft.batch_size * s_.kDraftBlock,
                       stages::StageId::draft_logits_gather);
}

}  // namespace lowlat::host
