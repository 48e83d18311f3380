#include "host/model.hpp"

#include <algorithm>
#include <cstring>

#include "host/checks.hpp"

namespace lowlat::host {
namespace {

// FNV-1a, 64 bits; the same function and constants as the dispatcher's digests.
class Digest {
 public:
  void bytes(const void* data, std::size_t n) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < n; ++i) state_ = (state_ ^ p[i]) * 0x100'0000'01b3ull;
  }
  template <class T>
  void value(const T& v) {
    bytes(&v, sizeof v);
  }
  std::uint64_t get() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf2'9ce4'8422'2325ull;
};

// Everything that ranks must agree on: the library's kernels and the configuration but for the
// rank.
std::uint64_t model_digest(lowlat_model_config config, const lowlat_hosting& hosting,
                           const char* catalogue) {
  config.tp_rank = 0;
  Digest digest;
  digest.value(LOWLAT_KERNELS_ABI_VERSION);
  digest.bytes(catalogue, std::strlen(catalogue));
  // In two pieces: the padding before the first double is nobody's, and differs from call to call.
  const auto* bytes = reinterpret_cast<const unsigned char*>(&config);
  const std::size_t first_double = offsetof(lowlat_model_config, rope_theta);
  digest.bytes(bytes, offsetof(lowlat_model_config, routed_scaling) + sizeof config.routed_scaling);
  digest.bytes(bytes + first_double, sizeof config - first_double);
  if (hosting.struct_bytes > 0) digest.value(hosting);
  return digest.get();
}

std::string dims_text(const std::int64_t* dims, std::uint32_t ndim) {
  std::string text = "[";
  for (std::uint32_t i = 0; i < ndim; ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

constexpr std::uint32_t kAbortedByHost = 3;  // a state of lowlat_status_words
constexpr const char* kDtypeNames[] = {"u8", "i32", "i64", "f32", "bf16", "e4m3", "ue8m0", "fp4x2"};
constexpr const char* kLayoutNames[] = {"row_major", "kv_paged", "index_paged", "marlin"};

template <std::size_t n>
std::string word(const char* const (&names)[n], std::uint32_t value) {
  return value < n ? names[value] : "number " + std::to_string(value);
}

}  // namespace

Model::Model(const lowlat_model_config& config, const lowlat_hosting* hosting, const char* platform,
             const char* catalogue, bool reads_arrays)
    : config_(config), platform_(platform), catalogue_(catalogue), reads_arrays_(reads_arrays) {
  require_struct(config, "lowlat_model_config");
  std::string reasons = config_reasons(config);
  if (!reasons.empty()) throw invalid(reasons);
  if (hosting != nullptr) {
    require_struct(*hosting, "lowlat_hosting");
    reasons = hosting_reasons(config, *hosting);
    if (!reasons.empty()) throw invalid(reasons);
    hosting_ = *hosting;
  }
  shape_ = runtime_shape(config_);
  pools_.num_pages = pools_.num_window_pages = config_.num_pages;
  pools_.num_requests = config_.max_batch;
  tensors_ = tensor_slots(config_, hosting_, shape_, weights_);
}

// Dtype, layout, shape, strides and memory of what is bound as `slot`.
void Model::check_tensor(const TensorSlot& slot, const lowlat_tensor& tensor) const {
  const lowlat_tensor_spec& spec = slot.spec;
  // The first dimension of a hosted pool is looked at by who knows how much of it is used.
  const std::uint32_t open = is_hosted() && spec.role == LOWLAT_POOL ? 1 : 0;
  const std::string who = "tensor " + slot.name + ": ";
  if (tensor.dtype != spec.dtype) {
    throw invalid(who + "dtype is " + word(kDtypeNames, tensor.dtype) + "; needed " +
                  word(kDtypeNames, spec.dtype));
  }
  if (tensor.layout != spec.layout) {
    throw invalid(who + "layout is " + word(kLayoutNames, tensor.layout) + "; needed " +
                  word(kLayoutNames, spec.layout));
  }
  if (tensor.ndim != spec.ndim || std::memcmp(tensor.shape + open, spec.shape + open,
                                              (spec.ndim - open) * sizeof *spec.shape) != 0) {
    const std::uint32_t seen =
        tensor.ndim < LOWLAT_MAX_DIMS ? tensor.ndim : std::uint32_t{LOWLAT_MAX_DIMS};
    throw invalid(who + "shape is " + dims_text(tensor.shape, seen) + "; needed " +
                  dims_text(spec.shape, spec.ndim) + " on rank " + std::to_string(config_.tp_rank) +
                  " of " + std::to_string(config_.tp_size));
  }
  std::int64_t contiguous = 1;
  for (int i = static_cast<int>(spec.ndim) - 1; i >= 0; --i) {
    if (spec.shape[i] != 1 && tensor.stride[i] != contiguous) {
      throw invalid(who + "stride[" + std::to_string(i) + "] is " +
                    std::to_string(tensor.stride[i]) + "; needed " + std::to_string(contiguous) +
                    " (contiguous rows)");
    }
    contiguous *= tensor.shape[i];
  }
  const std::size_t alignment = spec.dtype == LOWLAT_I64                               ? 8
                                : spec.dtype == LOWLAT_F32 || spec.dtype == LOWLAT_I32 ? 4
                                : spec.dtype == LOWLAT_BF16                            ? 2
                                                                                       : 1;
  if (tensor.data == nullptr) throw invalid(who + "data is NULL");
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % alignment != 0) {
    throw invalid(who + "data is not aligned to " + std::to_string(alignment) + " bytes");
  }
  check_memory(slot, tensor.data);
}

void Model::bind(const char* name, const lowlat_tensor& tensor) {
  require_struct(tensor, "lowlat_tensor");
  if (ready_) throw invalid("bind after lowlat_model_ready: addresses are sealed");
  if (name == nullptr) throw invalid("tensor name is NULL");
  for (TensorSlot& slot : tensors_) {
    if (slot.name != name) continue;
    if (is_hosted() && slot.spec.role == LOWLAT_POOL) {
      throw invalid("tensor " + slot.name + " is a pool; it comes by lowlat_pools_bind");
    }
    check_tensor(slot, tensor);
    slot.set(tensor.data);
    slot.bound = true;
    return;
  }
  throw invalid("tensor " + std::string(name) + ": this model has no such tensor on rank " +
                std::to_string(config_.tp_rank));
}

std::uint64_t Model::digest() const { return model_digest(config_, hosting_, catalogue_); }
std::uint64_t Model::catalogue_digest() const { return digest(); }

void Model::peer_import(int peer_rank, const lowlat_peer_handle& handle) {
  if (ready_) throw invalid("peer_import after lowlat_model_ready: addresses are sealed");
  if (peer_rank < 0 || peer_rank >= config_.tp_size || peer_rank == config_.tp_rank) {
    throw invalid("peer_rank is " + std::to_string(peer_rank) + "; needed another rank of 0 .. " +
                  std::to_string(config_.tp_size - 1));
  }
  open_peer(peer_rank, handle);
}

void Model::ready() {
  if (ready_) throw invalid("lowlat_model_ready was called before");
  std::string missing;
  const auto add = [&](const std::string& line) {
    missing += (missing.empty() ? "" : "\n") + line;
  };
  for (const TensorSlot& slot : tensors_) {
    if (slot.bound || (is_hosted() && slot.spec.role == LOWLAT_POOL)) continue;
    add("tensor " + slot.name + " is not bound");
  }
  for (int rank = 0; rank < config_.tp_size; ++rank) {
    if (!has_peer(rank)) add("rank " + std::to_string(rank) + "'s memory is not imported");
  }
  if (!missing.empty()) throw invalid(missing);
  check_tables();
  become_ready();
  ready_ = true;
}

// A hash layer's experts address weights, so a table is not believed.
void Model::check_tables() const {
  if (hosting_.proposals != 0) return;
  const std::int64_t count = std::int64_t{shape_.kVocab} * shape_.kExpertsPerToken;
  for (int i = 0; i < shape_.kNumLayers; ++i) {
    if (config_.layers[i].hash_gate == 0) continue;
    const std::string name = "layers." + std::to_string(i) + ".ffn.gate.tid2eid";
    std::vector<std::int32_t> table(static_cast<std::size_t>(count));
    read(table.data(), weights_.layers[i].tid2eid, table.size() * sizeof table[0]);
    require_values(table.data(), count, 0, shape_.kNumExperts - 1, name.c_str());
  }
}

void Model::require_ready(const char* call) const {
  if (!ready_) throw invalid(std::string(call) + " before lowlat_model_ready");
  if (status().state != 0u || is_aborted()) {
    throw Error(LOWLAT_FAULT, "this model had a fault or was aborted; make a new one");
  }
}

void Model::check_step(const lowlat_step& step, Schedule schedule) const {
  require_struct(step, "lowlat_step");
  const auto& s = shape_;
  if (step.mode > LOWLAT_EXTEND) throw invalid("mode is " + std::to_string(step.mode));
  if (step.num_rows < 1 || step.num_rows > s.kMaxRows) {
    throw invalid("num_rows is " + std::to_string(step.num_rows) + "; needed 1 .. " +
                  std::to_string(s.kMaxRows));
  }
  if (step.batch_size < 1 || step.batch_size > s.kMaxBatch) {
    throw invalid("batch_size is " + std::to_string(step.batch_size) + "; needed 1 .. " +
                  std::to_string(s.kMaxBatch));
  }
  if (step.mode != LOWLAT_EXTEND &&
      step.num_rows != std::int64_t{step.batch_size} * step.tokens_per_request) {
    throw invalid("num_rows is " + std::to_string(step.num_rows) +
                  "; needed batch_size * tokens_per_request = " +
                  std::to_string(std::int64_t{step.batch_size} * step.tokens_per_request));
  }
  if (schedule == Schedule::persistent) {
    bool built = step.mode != LOWLAT_EXTEND;
    if (built) {
      built = false;
      for (int i = 0; i < config_.num_widths; ++i) built |= config_.widths[i] == step.num_rows;
    }
    if (!built) {
      throw Error(LOWLAT_UNSUPPORTED,
                  step.mode == LOWLAT_EXTEND
                      ? "prompt rows run by the plain path (lowlat_plain_step_launch)"
                      : std::to_string(step.num_rows) + " rows were not built");
    }
  }
  if (step.page_table_stride < 1) throw invalid("page_table_stride must be above 0");
  if (step.num_logit_rows < 0 || step.num_logit_rows > step.num_rows) {
    throw invalid("num_logit_rows is " + std::to_string(step.num_logit_rows) + "; needed 0 .. " +
                  std::to_string(step.num_rows));
  }
  if (reads_arrays_) {
    check_step_arrays(step);
    return;
  }
  require_pointers({{step.token_ids, "token_ids"},
                    {step.positions, "positions"},
                    {step.request_idx, "request_idx"},
                    {step.slots, "slots"},
                    {step.page_table, "page_table"},
                    {step.state_slots, "state_slots"}});
  if (s.kNumEngrams > 0) require_pointers({{step.history, "history"}});
}

void Model::check_step_arrays(const lowlat_step& step) const {
  const auto& s = shape_;
  const std::int64_t slots = std::int64_t{s.kNumPages} * s.kPageSize;
  // No request has more tokens than the cache, whatever its page table repeats.
  const std::int64_t positions =
      std::min(step.page_table_stride, s.kNumPages) * std::int64_t{s.kPageSize};
  require_values(step.token_ids, step.num_rows, 0, s.kVocab - 1, "token_ids");
  require_values(step.positions, step.num_rows, 0,
                 (positions < config_.max_positions ? positions : config_.max_positions) - 1,
                 "positions");
  require_values(step.request_idx, step.num_rows, 0, step.batch_size - 1, "request_idx");
  require_values(step.slots, step.num_rows, -1, slots - 1, "slots");
  require_values(step.page_table, std::int64_t{step.batch_size} * step.page_table_stride, -1,
                 s.kNumPages - 1, "page_table");
  require_values(step.history, s.kNumEngrams > 0 ? 3 * std::int64_t{step.batch_size} : 0, 0,
                 s.kVocab - 1, "history");
  require_values(step.state_slots, step.batch_size, 0, s.kMaxBatch - 1, "state_slots");
  int first = -1;  // row with a slot of the request that is looked at
  for (int t = 0; t < step.num_rows; ++t) {
    const bool same = t > 0 && step.request_idx[t] == step.request_idx[t - 1];
    if (!same) first = -1;
    bool ascends = same || t == 0 || step.request_idx[t] > step.request_idx[t - 1];
    if (step.slots[t] >= 0) {
      ascends &= !same || step.positions[t] == step.positions[t - 1] + 1;
      ascends &= first < 0 || step.positions[t] - step.positions[first] == t - first;
      if (first < 0) first = t;
    }
    if (!ascends) {
      throw invalid("row " + std::to_string(t) +
                    ": a request's rows must be consecutive and their positions ascend by one");
    }
  }
  for (int t = 0; t < step.num_rows; ++t) {
    if (step.slots[t] < 0) continue;
    // The page table is what attention reads through: the row's own slot must be there, and every
    // page before it.
    const std::int32_t* pages =
        step.page_table + std::int64_t{step.request_idx[t]} * step.page_table_stride;
    const int last = step.positions[t] / s.kPageSize;
    if (step.slots[t] !=
        std::int64_t{pages[last]} * s.kPageSize + step.positions[t] % s.kPageSize) {
      throw invalid("slots[" + std::to_string(t) + "] is " + std::to_string(step.slots[t]) +
                    "; the page table puts position " + std::to_string(step.positions[t]) +
                    " elsewhere");
    }
    require_values(pages, last + 1, 0, s.kNumPages - 1, "page_table of a running request");
  }
  if (step.logit_rows != nullptr) {
    require_values(step.logit_rows, step.num_logit_rows, 0, step.num_rows - 1, "logit_rows");
  }
}

void Model::check_draft(const lowlat_draft& draft, Schedule schedule) const {
  require_struct(draft, "lowlat_draft");
  const auto& s = shape_;
  if (s.kNumDraftStages == 0) throw Error(LOWLAT_UNSUPPORTED, "this model has no draft");
  if (draft.num_inject_rows != 0 && draft.num_inject_rows != last_step_rows_) {
    throw invalid("num_inject_rows is " + std::to_string(draft.num_inject_rows) +
                  "; needed 0 or the last target step's " + std::to_string(last_step_rows_));
  }
  if (draft.num_inject_rows > 0) {
    require_pointers(
        {{draft.inject_slots, "inject_slots"}, {draft.inject_positions, "inject_positions"}});
  }
  if (draft.batch_size == 0) {
    if (reads_arrays_) check_inject_arrays(draft);
    return;
  }
  if (draft.batch_size < 0 || draft.batch_size > s.kMaxBatch) {
    throw invalid("batch_size is " + std::to_string(draft.batch_size) + "; needed 0 .. " +
                  std::to_string(s.kMaxBatch));
  }
  if (schedule == Schedule::persistent) {
    bool built = false;
    for (int i = 0; i < config_.num_widths; ++i) {
      built |= config_.widths[i] == draft.batch_size * (s.kDraftBlock + 1);
    }
    if (!built) {
      throw Error(LOWLAT_UNSUPPORTED,
                  "a draft of " + std::to_string(draft.batch_size) + " requests was not built");
    }
  }
  if (draft.page_table_stride < 1) throw invalid("page_table_stride must be above 0");
  require_pointers({{draft.anchors, "anchors"},
                    {draft.prefixes, "prefixes"},
                    {draft.slots, "slots"},
                    {draft.page_table, "page_table"},
                    {draft.noise_row, "noise_row"},
                    {draft.noise_offset, "noise_offset"},
                    {draft.temperature, "temperature"},
                    {draft.draft_tokens, "draft_tokens"}});
  if (reads_arrays_) check_draft_arrays(draft);
}

void Model::check_inject_arrays(const lowlat_draft& draft) const {
  const std::int64_t slots = std::int64_t{shape_.kNumPages} * shape_.kPageSize;
  require_values(draft.inject_slots, draft.num_inject_rows, -1, slots - 1, "inject_slots");
  require_values(draft.inject_positions, draft.num_inject_rows, 0, config_.max_positions - 1,
                 "inject_positions");
}

void Model::check_draft_arrays(const lowlat_draft& draft) const {
  check_inject_arrays(draft);
  const auto& s = shape_;
  const std::int64_t slots = std::int64_t{s.kNumPages} * s.kPageSize;
  const std::int64_t table = std::int64_t{draft.batch_size} * draft.page_table_stride;
  require_values(draft.anchors, draft.batch_size, 0, s.kVocab - 1, "anchors");
  require_values(draft.prefixes, draft.batch_size, 0,
                 std::int64_t{draft.page_table_stride} * s.kPageSize, "prefixes");
  require_values(draft.slots, std::int64_t{draft.batch_size} * s.kDraftBlock, -1, slots - 1,
                 "slots");
  require_values(draft.page_table, table, -1, s.kNumPages - 1, "page_table");
  require_values(draft.noise_row, draft.batch_size, 0, 0x7fff'ffff, "noise_row");
  for (int i = 0; i < draft.batch_size; ++i) {
    if (!(draft.temperature[i] >= 0.0f)) {
      throw invalid("temperature[" + std::to_string(i) + "] is " +
                    std::to_string(draft.temperature[i]) + "; needed 0 or more");
    }
    if (draft.temperature[i] > 0.0f && draft.draft_logits == nullptr) {
      throw invalid("draft_logits is NULL; a sampled row needs them for the acceptance rule");
    }
  }
}

void Model::launch_step(const lowlat_step& step, Schedule schedule, void* stream) {
  require_own("a step");
  check_step(step, schedule);
  start_step(step, schedule, stream);
  last_step_rows_ = step.num_rows;
}

void Model::launch_draft(const lowlat_draft& draft, Schedule schedule, void* stream) {
  require_own("a draft");
  check_draft(draft, schedule);
  start_draft(draft, schedule, stream);
}

void Model::launch_accept(const lowlat_accept& accept, void* stream) {
  require_own("an acceptance");
  require_struct(accept, "lowlat_accept");
  const auto& s = shape_;
  if (accept.batch_size < 1 || accept.batch_size > s.kMaxBatch || accept.num_drafts < 0 ||
      accept.vocab != s.kVocab) {
    throw invalid("batch_size is " + std::to_string(accept.batch_size) + ", num_drafts " +
                  std::to_string(accept.num_drafts) + ", vocab " + std::to_string(accept.vocab) +
                  "; needed 1 .. " + std::to_string(s.kMaxBatch) + ", 0 or more, and " +
                  std::to_string(s.kVocab));
  }
  if (accept.target_logits == nullptr || accept.temperature == nullptr ||
      accept.accepted == nullptr || accept.next_tokens == nullptr ||
      (accept.num_drafts > 0 && accept.draft_tokens == nullptr)) {
    throw invalid("draft_tokens, target_logits, temperature, accepted and next_tokens are needed");
  }
  for (int i = 0; reads_arrays_ && i < accept.batch_size; ++i) {
    const float temperature = accept.temperature[i];
    if (!(temperature >= 0.0f)) {
      throw invalid("temperature[" + std::to_string(i) + "] is " + std::to_string(temperature) +
                    "; needed 0 or more");
    }
    if (temperature > 0.0f &&
        (accept.coins == nullptr || (accept.num_drafts > 0 && accept.draft_logits == nullptr))) {
      throw invalid("a sampled row needs coins and draft_logits");
    }
  }
  start_accept(accept, stream);
}

void Model::synchronize(std::uint64_t budget_ns) {
  if (!ready_) throw invalid("lowlat_synchronize before lowlat_model_ready");
  if (!wait_idle(budget_ns)) {
    throw Error(LOWLAT_FAULT, "rank " + std::to_string(config_.tp_rank) +
                                  " is still running after " +
                                  std::to_string(budget_ns / 1'000'000) + " ms");
  }
  const lowlat_status_words words = status();
  if (words.state == 0) return;
  const std::string where =
      std::string(lowlat_stage_name(words.stage)) + ", epoch " + std::to_string(words.epoch);
  const std::string who = "rank " + std::to_string(config_.tp_rank);
  if (words.state == 1) {
    throw Error(LOWLAT_FAULT, who + " waited " +
                                  std::to_string(config_.wait_budget_ns / 1'000'000) +
                                  " ms for rank " + std::to_string(words.peer) + " in " + where);
  }
  throw Error(LOWLAT_FAULT, who + " was ended by " +
                                (words.state == 2 ? "rank " + std::to_string(words.peer)
                                                  : std::string("the host")) +
                                " in " + where);
}

void Model::read_status(lowlat_status_words& out) const {
  require_struct(out, "lowlat_status_words");
  out = status();
  // No launch that would say it runs, and none begins any more.
  if (out.state == 0u && is_aborted_by_host()) out.state = kAbortedByHost;
}

}  // namespace lowlat::host
