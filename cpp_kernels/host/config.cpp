// What a model configuration must hold, and one rank's sizes of it.
#include <algorithm>
#include <cmath>
#include <string>

#include "host/model.hpp"
#include "host/peer.hpp"
#include "stages/pool_state.hpp"

namespace lowlat::host {

namespace stages = lowlat::scalar::stages;
namespace {

constexpr int kMaxBatch = 64;

class Reasons {
 public:
  explicit Reasons(const lowlat_model_config& config) : c_(config), v4_(config.kind == LOWLAT_V4) {}

  std::string all() {
    sizes();
    if (!text_.empty()) return text_;  // the rest divides by what is checked here
    parallel();
    layers();
    engram();
    draft();
    steps();
    return text_;
  }

 private:
  void need(bool ok, const std::string& reason) {
    if (ok) return;
    if (!text_.empty()) text_ += '\n';
    text_ += reason;
  }
  void equal(std::int64_t seen, std::int64_t needed, const char* name) {
    need(seen == needed, std::string(name) + " is " + std::to_string(seen) +
                             "; these kernels need " + std::to_string(needed));
  }
  void range(std::int64_t seen, std::int64_t low, std::int64_t high, const std::string& name) {
    need(low <= seen && seen <= high, name + " is " + std::to_string(seen) + "; needed " +
                                          std::to_string(low) + " .. " + std::to_string(high));
  }
  void multiple(std::int64_t seen, std::int64_t of, const std::string& name) {
    need(of > 0 && seen % of == 0,
         name + " is " + std::to_string(seen) + "; needed a multiple of " + std::to_string(of));
  }
  static constexpr std::int64_t kMost = 1 << 24;

  void sizes() {
    range(c_.kind, LOWLAT_V41, LOWLAT_V4, "kind");
    range(c_.hidden, 1, kMost, "hidden");
    range(c_.num_layers, 1, LOWLAT_MAX_LAYERS, "num_layers");
    range(c_.vocab, 1, kMost, "vocab");
    range(c_.num_heads, 1, kMost, "num_heads");
    range(c_.q_lora, 1, kMost, "q_lora");
    range(c_.o_groups, 1, kMost, "o_groups");
    range(c_.o_lora, 1, kMost, "o_lora");
    range(c_.window, 1, kMost, "window");
    range(c_.moe_intermediate, 1, kMost, "moe_intermediate");
    range(c_.num_experts, 1, kMost, "num_experts");
    range(c_.experts_per_token, 1, c_.num_experts, "experts_per_token");
    equal(c_.head_dim, shape::kHeadDim, "head_dim");
    equal(c_.rope_dim, shape::kRopeDim, "rope_dim");
    equal(c_.scale_block, v4_ ? 128 : 32, "scale_block");
    range(c_.sinkhorn_iters, 1, 1000, "sinkhorn_iters");
    need(c_.norm_eps >= 0.0f && c_.hc_eps >= 0.0f, "norm_eps and hc_eps must not be negative");
    need(c_.swiglu_limit > 0.0f, "swiglu_limit must be above 0");
    need(c_.rope_theta > 1.0 && c_.compress_rope_theta > 1.0,
         "rope_theta and compress_rope_theta must be above 1");
    need(c_.yarn_factor >= 1.0 && c_.yarn_beta_fast > 0.0 && c_.yarn_beta_slow > 0.0 &&
             c_.yarn_original_positions > 0.0,
         "yarn_factor must be at least 1, the other yarn fields above 0");
    range(c_.max_positions, 1, std::int64_t{1} << 31, "max_positions");
    range(c_.tp_size, 1, Region::kMaxTpSize, "tp_size");
    range(c_.tp_rank, 0, c_.tp_size - 1, "tp_rank");
  }

  void parallel() {
    const std::string by = " over tp_size " + std::to_string(c_.tp_size);
    multiple(c_.hidden, c_.scale_block, "hidden");
    multiple(c_.q_lora, c_.scale_block, "q_lora");
    multiple(c_.vocab, 4 * c_.tp_size, "vocab" + by);
    multiple(c_.num_heads, c_.o_groups, "num_heads over o_groups");
    multiple(c_.num_heads, c_.tp_size, "num_heads" + by);
    multiple(c_.o_groups, c_.tp_size, "o_groups" + by);
    multiple(c_.moe_intermediate, std::int64_t{c_.scale_block} * c_.tp_size,
             "moe_intermediate" + by);
    multiple(c_.o_lora, c_.scale_block, "o_lora");
  }

  void layers() {
    bool indexed = false;
    for (int i = 0; i < c_.num_layers; ++i) {
      const lowlat_layer& layer = c_.layers[i];
      const std::string name = "layers[" + std::to_string(i) + "].";
      range(layer.hash_gate, 0, v4_ ? 1 : 0, name + "hash_gate");
      if (v4_) {
        pooled(layer, i, name);
        indexed |= layer.ratio == stages::kOverlapRatio;
        continue;
      }
      need(layer.ratio == 0 || layer.ratio == 1 || layer.ratio == 2,
           name + "ratio is " + std::to_string(layer.ratio) + "; needed 0, 1 or 2");
      if (layer.ratio == 0) {
        need(layer.kv_source == -1 && layer.index_source == -1 && layer.candidate_source == -1,
             name + "kv_source, index_source and candidate_source must be -1 at ratio 0");
        continue;
      }
      indexed = true;
      const auto source = [&](std::int32_t from, const char* what) {
        const bool inside = 0 <= from && from <= i;
        need(inside,
             name + what + " is " + std::to_string(from) + "; needed 0 .. " + std::to_string(i));
        return inside;
      };
      if (source(layer.kv_source, "kv_source")) {
        const lowlat_layer& owner = c_.layers[layer.kv_source];
        need(owner.kv_source == layer.kv_source && owner.ratio == layer.ratio,
             name + "kv_source " + std::to_string(layer.kv_source) +
                 " owns no pool of the same ratio");
      }
      if (source(layer.index_source, "index_source")) {
        const lowlat_layer& owner = c_.layers[layer.index_source];
        need(owner.index_source == layer.index_source && owner.kv_source == layer.kv_source,
             name + "index_source " + std::to_string(layer.index_source) +
                 " selects from another pool");
      }
      if (layer.candidate_source != -1) {
        need(0 <= layer.candidate_source && layer.candidate_source < i &&
                 layer.candidate_source == c_.candidate_layer && layer.index_source == i &&
                 layer.kv_source == c_.layers[layer.candidate_source].kv_source,
             name + "candidate_source is " + std::to_string(layer.candidate_source) +
                 "; needed candidate_layer, before an index source of the same pool");
      }
    }
    if (v4_) equal(c_.candidate_layer, -1, "candidate_layer");
    if (!indexed) return;
    equal(c_.index_dim, shape::kIndexDim, "index_dim");
    range(c_.index_heads, 1, kMost, "index_heads");
    range(c_.index_topk, 1, kMost, "index_topk");
    if (v4_ || c_.candidate_layer == -1) return;
    range(c_.candidate_layer, 0, c_.num_layers - 1, "candidate_layer");
    range(c_.candidate_blocks, 1, kMost, "candidate_blocks");
    range(c_.candidate_block_size, 1, kMost, "candidate_block_size");
  }

  // V4: a compressed layer owns its keys, at ratio 4 its selection too.
  void pooled(const lowlat_layer& layer, int layer_idx, const std::string& name) {
    need(layer.ratio == 0 || layer.ratio == stages::kOverlapRatio ||
             layer.ratio == stages::kBlockRatio,
         name + "ratio is " + std::to_string(layer.ratio) + "; needed 0, 4 or 128");
    equal(layer.kv_source, layer.ratio == 0 ? -1 : layer_idx, (name + "kv_source").c_str());
    equal(layer.index_source, layer.ratio == stages::kOverlapRatio ? layer_idx : -1,
          (name + "index_source").c_str());
    equal(layer.candidate_source, -1, (name + "candidate_source").c_str());
    equal(layer.engram, -1, (name + "engram").c_str());
  }

  void engram() {
    range(c_.num_engrams, 0, v4_ ? 0 : LOWLAT_MAX_ENGRAMS, "num_engrams");
    if (v4_ || c_.num_engrams <= 0 || c_.num_engrams > LOWLAT_MAX_ENGRAMS) return;
    multiple(c_.engram_head_dim, 32, "engram_head_dim");
    range(c_.engram_head_dim, 32, kMost, "engram_head_dim");
    multiple(shape::kEngramColumns, c_.tp_size,
             "the 24 Engram columns over tp_size " + std::to_string(c_.tp_size) + ": their number");
    range(c_.engram_pad_token, 0, c_.vocab - 1, "engram_pad_token");
    for (int table = 0; table < c_.num_engrams; ++table) {
      const std::string name = "[" + std::to_string(table) + "]";
      for (const auto& size : c_.engram_primes[table]) {
        for (const std::int64_t prime : size)
          range(prime, 1, std::int64_t{1} << 40, "engram_primes" + name);
      }
      for (const std::int64_t m : c_.engram_multipliers[table]) {
        need(m > 0, "engram_multipliers" + name + " must be above 0");
      }
    }
    for (int i = 0; i < c_.num_layers; ++i) {
      range(c_.layers[i].engram, -1, c_.num_engrams - 1,
            "layers[" + std::to_string(i) + "].engram");
    }
  }

  void draft() {
    range(c_.num_draft_stages, 0, LOWLAT_MAX_DRAFT_STAGES, "num_draft_stages");
    if (c_.num_draft_stages <= 0 || c_.num_draft_stages > LOWLAT_MAX_DRAFT_STAGES) return;
    range(c_.draft_block, 1, 64, "draft_block");
    range(c_.draft_mask_token, 0, c_.vocab - 1, "draft_mask_token");
    range(c_.markov_rank, 1, kMost, "markov_rank");
    range(c_.draft_experts, 1, kMost, "draft_experts");
    range(c_.draft_experts_per_token, 1, c_.draft_experts, "draft_experts_per_token");
    for (int i = 0; i < c_.num_draft_stages; ++i) {
      range(c_.draft_target_layers[i], 0, c_.num_layers - 1,
            "draft_target_layers[" + std::to_string(i) + "]");
    }
  }

  void steps() {
    range(c_.max_batch, 1, kMaxBatch, "max_batch");
    // Elements of one buffer are counted in 32 bits.
    std::int64_t widest = 5 * std::int64_t{c_.hidden};
    const auto widen = [&](std::int64_t elements) { widest = std::max(widest, elements); };
    widen(c_.num_heads / c_.tp_size * std::int64_t{shape::kHeadDim});
    widen(shape::kEngramColumns * std::int64_t{c_.engram_head_dim});
    widen(c_.num_draft_stages * std::int64_t{c_.hidden});
    widen(c_.index_heads * std::int64_t{shape::kIndexDim});
    widen(c_.o_groups / c_.tp_size * std::int64_t{c_.o_lora});
    widen(std::max(c_.experts_per_token, c_.draft_experts_per_token));
    const std::int64_t most_rows = std::min<std::int64_t>(1 << 20, 0x7fff'ffff / widest);
    range(c_.max_rows, c_.max_batch, most_rows, "max_rows");
    if (c_.num_draft_stages > 0) {
      range(c_.max_rows, std::int64_t{c_.max_batch} * c_.draft_block, most_rows,
            "max_rows (of a draft of max_batch requests)");
    }
    range(c_.num_widths, 0, LOWLAT_MAX_WIDTHS, "num_widths");
    for (int i = 0; i < c_.num_widths && i < LOWLAT_MAX_WIDTHS; ++i) {
      range(c_.widths[i], i == 0 ? 1 : c_.widths[i - 1] + 1, c_.max_rows,
            "widths[" + std::to_string(i) + "] (ascending)");
    }
    // An entry lies in the page of its tokens.
    const int longest_entry = v4_ ? stages::kBlockRatio : 2;
    range(c_.page_size, longest_entry, 1 << 16, "page_size");
    multiple(c_.page_size, longest_entry, "page_size");
    range(c_.num_pages, 1, (std::int64_t{1} << 31) / (c_.page_size > 0 ? c_.page_size : 1) - 1,
          "num_pages");
    const int step_rows = c_.num_draft_stages > 0 ? c_.draft_block + 1 : 1;
    // A step must leave what the next one reads, whose first row may be this one's second: of V4.1
    // the token before it, of V4's ratio 4 the six candidates before this step.
    constexpr int kCandidates = 2 * stages::kOverlapRatio;
    const int needed = v4_ ? std::max(kCandidates, step_rows + kCandidates - 2) : 1 + step_rows;
    range(c_.state_ring, needed, v4_ ? 1 << 12 : 1 << 16, "state_ring");
    need((c_.state_ring & (c_.state_ring - 1)) == 0,
         "state_ring is " + std::to_string(c_.state_ring) + "; needed a power of two");
    need(c_.wait_budget_ns > 0, "wait_budget_ns is 0; every wait needs a budget");
  }

  const lowlat_model_config& c_;
  const bool v4_;
  std::string text_;
};

}  // namespace

std::string config_reasons(const lowlat_model_config& config) { return Reasons(config).all(); }

shape::RuntimeShape runtime_shape(const lowlat_model_config& c) {
  const bool has_draft = c.num_draft_stages > 0, has_candidates = c.candidate_layer >= 0;
  const bool v4 = c.kind == LOWLAT_V4;
  const bool indexed = std::any_of(c.layers, c.layers + c.num_layers,
                                   [](const lowlat_layer& l) { return l.index_source >= 0; });
  shape::RuntimeShape s{};
  s.kHidden = c.hidden;
  s.kNumLayers = c.num_layers;
  s.kVocab = c.vocab;
  s.kQLora = c.q_lora;
  s.kOLora = c.o_lora;
  s.kWindow = c.window;
  s.kScaleBlock = c.scale_block;
  s.kSinkhornIters = c.sinkhorn_iters;
  s.kNumExperts = c.num_experts;
  s.kExpertsPerToken = c.experts_per_token;
  s.kCompressWidth =
      v4 ? stages::PoolLayout{stages::kOverlapRatio, shape::kHeadDim}.width() : 2 * shape::kHeadDim;
  s.kIndexCompressWidth =
      v4 ? stages::PoolLayout{stages::kOverlapRatio, shape::kIndexDim}.width() : 0;
  s.kIndexHeads = indexed ? c.index_heads : 0;
  s.kIndexTopk = indexed ? c.index_topk : 0;
  s.kCandidateLayer = c.candidate_layer;
  s.kCandidateBlocks = has_candidates ? c.candidate_blocks : 0;
  s.kCandidateBlockSize = has_candidates ? c.candidate_block_size : 0;
  s.kNumEngrams = c.num_engrams;
  s.kEngramDim = c.num_engrams > 0 ? c.engram_head_dim : 0;
  s.kEngramPadToken = c.engram_pad_token;
  s.kImageToken = c.image_token;
  s.kNumDraftStages = c.num_draft_stages;
  s.kDraftBlock = has_draft ? c.draft_block : 0;
  s.kDraftMaskToken = c.draft_mask_token;
  s.kMarkovRank = has_draft ? c.markov_rank : 0;
  s.kDraftExperts = has_draft ? c.draft_experts : 0;
  s.kDraftExpertsPerToken = has_draft ? c.draft_experts_per_token : 0;
  s.kNormEps = c.norm_eps;
  s.kHcEps = c.hc_eps;
  s.kSwigluLimit = c.swiglu_limit;
  s.kRoutedScaling = c.routed_scaling;
  s.kTpRank = c.tp_rank;
  s.kTpSize = c.tp_size;
  s.kVocabLocal = c.vocab / c.tp_size;
  s.kNumHeadsLocal = c.num_heads / c.tp_size;
  s.kGroupsLocal = c.o_groups / c.tp_size;
  s.kGroupInput = c.num_heads / c.o_groups * c.head_dim;
  s.kIntermediateLocal = c.moe_intermediate / c.tp_size;
  s.kEngramColumnsLocal = shape::kEngramColumns / c.tp_size;
  s.kMaxBatch = c.max_batch;
  s.kMaxRows = c.max_rows;
  s.kPageSize = c.page_size;
  s.kNumPages = c.num_pages;
  s.kStateRing = c.state_ring;
  // A row may attend to every entry of ratio 128, and there are no more than the cache holds.
  const std::int64_t blocks =
      v4 ? std::int64_t{c.num_pages} * c.page_size / stages::kBlockRatio : 0;
  s.kMaxEntries = static_cast<int>(std::max(blocks, std::int64_t{s.kIndexTopk}));
  return s;
}

}  // namespace lowlat::host
