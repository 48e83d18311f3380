// A model inside another engine: what hosting adds to a configuration, the engine's caches, and the
// checks of hosted launches.
#include <algorithm>
#include <cstring>
#include <deque>
#include <string_view>

#include "host/checks.hpp"
#include "host/model.hpp"
#include "platform/scalar.hpp"
// The platform comes before every stage.
#include "stages/kv.hpp"
#include "stages/pool_state.hpp"

namespace lowlat::host {

namespace stages = lowlat::scalar::stages;

std::string hosting_reasons(const lowlat_model_config& config, const lowlat_hosting& hosting) {
  std::string text;
  const auto need = [&](bool ok, const std::string& reason) {
    if (!ok) text += (text.empty() ? "" : "\n") + reason;
  };
  const auto is_flag = [&](std::int32_t value, const char* name) {
    need(value == 0 || value == 1,
         std::string(name) + " is " + std::to_string(value) + "; needed 0 or 1");
  };
  is_flag(hosting.bf16_wo_a, "bf16_wo_a");
  is_flag(hosting.proposals, "proposals");
  is_flag(hosting.stages, "stages");
  need(hosting.expert_layout == LOWLAT_ROW_MAJOR || hosting.expert_layout == LOWLAT_MARLIN,
       "expert_layout is " + std::to_string(hosting.expert_layout) + "; needed " +
           std::to_string(LOWLAT_ROW_MAJOR) + " (row-major) or " + std::to_string(LOWLAT_MARLIN) +
           " (Marlin)");
  // Tiles of 64 rows; the rows of w2 are the hidden size.
  need(hosting.expert_layout != LOWLAT_MARLIN || config.hidden % 64 == 0,
       "hidden is " + std::to_string(config.hidden) + "; Marlin's tiles need a multiple of 64");
  need(hosting.proposals == 0 || config.num_draft_stages > 0,
       "proposals is 1, but num_draft_stages is 0");
  need(hosting.stages == 0 || hosting.proposals != 0, "stages is 1, but proposals is 0");
  return text;
}

namespace {

constexpr std::string_view kIndexPool = "kv.index.", kStagePool = "mtp.";

// Rows that a pool's first dimension must have.
std::int64_t rows_needed(const std::string& name, const lowlat_model_config& config,
                         const lowlat_pools& pools) {
  const std::size_t dot = name.rfind('.');
  const std::string kind = name.substr(0, dot);
  if (name.starts_with(kStagePool)) return pools.num_window_pages;
  const int ratio = config.layers[std::stoi(name.substr(dot + 1))].ratio;
  if (kind == "kv.swa") return pools.num_window_pages;
  if (kind == "kv.extra") return pools.num_pages;
  if (kind == "kv.index" || kind == "kv.index_scales") {
    const std::int64_t entries = std::int64_t{pools.num_pages} * (config.page_size / ratio);
    return (entries + stages::kIndexSlotsPerPage - 1) / stages::kIndexSlotsPerPage;
  }
  if (config.kind == LOWLAT_V41) return std::int64_t{pools.num_requests} * config.state_ring;
  const stages::PoolLayout layout{ratio, shape::kHeadDim};
  const std::int64_t ring = stages::pool_ring_rows(layout, config.state_ring);
  return ring * (layout.overlaps() ? pools.num_window_pages : pools.num_requests);
}

void require_count(std::int64_t seen, std::int64_t most, const char* name) {
  if (1 <= seen && seen <= most) return;
  throw invalid(std::string(name) + " is " + std::to_string(seen) + "; needed 1 .. " +
                std::to_string(most));
}

}  // namespace

void Model::require_own(const char* call) const {
  if (is_hosted()) {
    throw Error(LOWLAT_UNSUPPORTED, std::string(call) +
                                        " of this kind is for a model that keeps its caches; this "
                                        "one is hosted (lowlat_hosted_create)");
  }
  require_ready(call);
}

void Model::bind_pools(const lowlat_pools& pools) {
  require_struct(pools, "lowlat_pools");
  if (!is_hosted() || (proposes_only() && !has_hosted_stages())) {
    throw invalid("this model has no pools to bind: it is not hosted, or proposes only");
  }
  require_ready("lowlat_pools_bind");
  const std::int64_t most_pages = (std::int64_t{1} << 31) / config_.page_size - 1;
  require_count(pools.num_pages, most_pages, "num_pages");
  require_count(pools.num_window_pages, most_pages, "num_window_pages");
  require_count(pools.num_requests, std::int64_t{1} << 24, "num_requests");
  if (shape_.kNumEngrams > 0 && !proposes_only()) {
    require_pointers({{pools.history, "history"}});
  }
  if (pools.num_tensors > 0) {
    require_pointers({{pools.names, "names"}, {pools.tensors, "tensors"}});
  }
  const bool split = pools.split_index != 0;
  if (split && (pools.split_index != 1 || config_.kind != LOWLAT_V41)) {
    throw invalid("split_index is " + std::to_string(pools.split_index) +
                  "; needed 0, or 1 of a model of V4.1");
  }
  std::vector<std::pair<const TensorSlot*, void*>> found;
  std::string missing;
  const auto take = [&](const TensorSlot& slot) {
    const lowlat_tensor* tensor = nullptr;
    for (int i = 0; i < pools.num_tensors; ++i) {
      if (pools.names[i] != nullptr && slot.name == pools.names[i]) tensor = pools.tensors + i;
    }
    if (tensor == nullptr) {
      missing += (missing.empty() ? "" : "\n") + ("pool " + slot.name + " is not given");
      return;
    }
    require_struct(*tensor, "lowlat_tensor");
    check_tensor(slot, *tensor);
    const std::int64_t needed = rows_needed(slot.name, config_, pools);
    if (tensor->shape[0] < needed) {
      throw invalid("pool " + slot.name + " has " + std::to_string(tensor->shape[0]) +
                    " rows; needed " + std::to_string(needed));
    }
    found.emplace_back(&slot, tensor->data);
  };
  std::deque<TensorSlot> halves;
  for (const TensorSlot& slot : tensors_) {
    if (slot.spec.role != LOWLAT_POOL) continue;
    if (!split || !slot.name.starts_with(kIndexPool)) {
      take(slot);
      continue;
    }
    const int layer = std::stoi(slot.name.substr(kIndexPool.size()));
    TensorSlot& codes = halves.emplace_back(slot);
    codes.spec.layout = LOWLAT_ROW_MAJOR;
    codes.spec.shape[1] = stages::kIndexSlotsPerPage * stages::kIndexDataBytes;
    TensorSlot& scales = halves.emplace_back(codes);
    scales.name = "kv.index_scales." + std::to_string(layer);
    scales.spec.shape[1] = stages::kIndexSlotsPerPage * stages::kIndexScaleBytes;
    scales.set = [this, layer](void* data) {
      weights_.layers[layer].kv_index_scales = static_cast<std::uint8_t*>(data);
    };
    take(codes);
    take(scales);
  }
  if (!missing.empty()) throw invalid(missing);
  for (auto& layer : weights_.layers) layer.kv_index_scales = nullptr;
  for (const auto& [slot, data] : found) slot->set(data);
  pools_ = pools;
  pools_.names = nullptr;
  pools_.tensors = nullptr;
  has_pools_ = true;
  move_pools();
}

void Model::require_built(std::int64_t num_rows) const {
  const int* const end = config_.widths + config_.num_widths;
  if (std::find(config_.widths, end, num_rows) != end) return;
  throw Error(LOWLAT_UNSUPPORTED, std::to_string(num_rows) + " rows were not built");
}

void Model::check_hosted(const lowlat_hosted_step& step) const {
  require_struct(step, "lowlat_hosted_step");
  if (!is_hosted() || hosting_.proposals != 0) {
    throw Error(LOWLAT_UNSUPPORTED, "a hosted step needs a hosted model with layers");
  }
  if (!has_pools_) throw invalid("a hosted step before lowlat_pools_bind");
  if (step.mode != LOWLAT_DECODE && step.mode != LOWLAT_TARGET_VERIFY) {
    throw Error(LOWLAT_UNSUPPORTED,
                "mode is " + std::to_string(step.mode) + "; hosted steps decode or verify");
  }
  require_count(step.batch_size, shape_.kMaxBatch, "batch_size");
  require_count(step.tokens_per_request, step.mode == LOWLAT_DECODE ? 1 : shape_.kMaxRows,
                "tokens_per_request");
  require_built(std::int64_t{step.batch_size} * step.tokens_per_request);
  require_count(step.num_table_pages, step.page_table_stride, "num_table_pages");
  require_pointers({{step.token_ids, "token_ids"},
                    {step.positions, "positions"},
                    {step.slots, "slots"},
                    {step.requests, "requests"},
                    {step.page_table, "page_table"},
                    {step.hidden, "hidden"}});
  if (step.features != nullptr && shape_.kNumDraftStages == 0) {
    throw invalid("features are asked of a model without draft stages");
  }
  if (reads_arrays_) check_hosted_arrays(step);
}

// Of rows that are no padding: what a device would take as padding is refused by name here.
void Model::check_hosted_arrays(const lowlat_hosted_step& step) const {
  const std::int64_t page_size = config_.page_size;
  const std::int64_t slots = pools_.num_pages * page_size;
  const std::int64_t positions = std::min(
      {step.num_table_pages * page_size, shape_.kNumPages * page_size, config_.max_positions});
  const int num_rows = step.batch_size * step.tokens_per_request;
  require_values(step.slots, num_rows, 0, slots - 1, "slots");
  for (int t = 0; t < num_rows; ++t) {
    if (step.slots[t] < page_size) continue;
    const int request = t / step.tokens_per_request;
    const std::string row = " of row " + std::to_string(t);
    require_values(step.token_ids + t, 1, 0, shape_.kVocab - 1, ("token_ids" + row).c_str());
    require_values(step.positions + t, 1, 0, positions - 1, ("positions" + row).c_str());
    require_values(step.requests + request, 1, 0, pools_.num_requests - 1,
                   ("requests" + row).c_str());
    const std::int32_t* pages = step.page_table + std::int64_t{request} * step.page_table_stride;
    const std::int64_t last = step.positions[t] / page_size;
    require_values(pages, last + 1, 0, pools_.num_pages - 1, ("page_table" + row).c_str());
    if (step.slots[t] != pages[last] * page_size + step.positions[t] % page_size) {
      throw invalid("slots[" + std::to_string(t) + "] is " + std::to_string(step.slots[t]) +
                    "; the page table puts position " + std::to_string(step.positions[t]) +
                    " elsewhere");
    }
  }
}

void Model::launch_hosted(const lowlat_hosted_step& step, void* stream) {
  require_ready("a hosted step");
  check_hosted(step);
  start_hosted(step, stream);
}

void Model::check_hosted(const lowlat_hosted_draft& draft) const {
  require_struct(draft, "lowlat_hosted_draft");
  if (!has_hosted_stages()) {
    throw Error(LOWLAT_UNSUPPORTED, "a hosted draft needs a model that was hosted with stages");
  }
  if (!has_pools_) throw invalid("a hosted draft before lowlat_pools_bind");
  require_count(draft.batch_size, shape_.kMaxBatch, "batch_size");
  const std::int64_t num_rows = std::int64_t{draft.batch_size} * shape_.kDraftBlock;
  require_built(num_rows);
  const int window = shape_.kWindow + shape_.kDraftBlock;
  if (draft.window_stride < window) {
    throw invalid("window_stride is " + std::to_string(draft.window_stride) + "; needed " +
                  std::to_string(window) + " or more");
  }
  require_pointers({{draft.token_ids, "token_ids"},
                    {draft.positions, "positions"},
                    {draft.key_slots, "key_slots"},
                    {draft.window, "window"},
                    {draft.hidden, "hidden"}});
  if (!reads_arrays_) return;
  // Of rows that are no padding, as check_hosted_arrays().
  const std::int64_t slots = std::int64_t{pools_.num_window_pages} * config_.page_size;
  require_values(draft.key_slots, num_rows, 0, slots - 1, "key_slots");
  for (std::int64_t t = 0; t < num_rows; ++t) {
    if (draft.key_slots[t] < config_.page_size) continue;
    const std::string row = " of row " + std::to_string(t);
    require_values(draft.token_ids + t, 1, 0, shape_.kVocab - 1, ("token_ids" + row).c_str());
    require_values(draft.positions + t, 1, 0, config_.max_positions - 1,
                   ("positions" + row).c_str());
    const std::int32_t* seen = draft.window + t * draft.window_stride;
    for (int i = 0; i < window; ++i) {
      if (seen[i] >= 0) require_values(seen + i, 1, 0, slots - 1, ("window" + row).c_str());
    }
  }
}

void Model::launch_hosted(const lowlat_hosted_draft& draft, void* stream) {
  require_ready("a hosted draft");
  check_hosted(draft);
  start_hosted(draft, stream);
}

void Model::check_proposal(const lowlat_proposal& proposal) const {
  require_struct(proposal, "lowlat_proposal");
  if (hosting_.proposals == 0) {
    throw Error(LOWLAT_UNSUPPORTED, "proposals need a model that was hosted for them");
  }
  require_count(proposal.batch_size, shape_.kMaxBatch, "batch_size");
  require_built(std::int64_t{proposal.batch_size} * shape_.kDraftBlock);
  require_pointers({{proposal.hidden, "hidden"},
                    {proposal.anchors, "anchors"},
                    {proposal.draft_tokens, "draft_tokens"}});
  if (proposal.temperature == nullptr) return;
  require_pointers({{proposal.noise_offset, "noise_offset"}});
  for (int i = 0; reads_arrays_ && i < proposal.batch_size; ++i) {
    if (proposal.temperature[i] >= 0.0f) continue;
    throw invalid("temperature[" + std::to_string(i) + "] is " +
                  std::to_string(proposal.temperature[i]) + "; needed 0 or more");
  }
}

void Model::launch_proposal(const lowlat_proposal& proposal, void* stream) {
  require_ready("a proposal");
  check_proposal(proposal);
  start_proposal(proposal, stream);
}

}  // namespace lowlat::host
