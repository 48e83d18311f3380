// The tensors of a model: names, dtypes and shapes on one rank, in the published names.
#include <initializer_list>

#include "host/model.hpp"
#include "platform/scalar.hpp"
// The platform comes before every stage.
#include "stages/kv.hpp"
#include "stages/pool_state.hpp"

namespace lowlat::host {

namespace stages = lowlat::scalar::stages;
namespace {

using lowlat::persistent::CompressorWeights;
using lowlat::persistent::Fp4Weight;
using lowlat::persistent::Fp8Weight;
using lowlat::persistent::HcWeights;
using lowlat::persistent::LayerWeights;
using lowlat::persistent::ModelWeights;

constexpr int kWhole = -1;  // not split over the ranks

class Builder {
 public:
  Builder(const lowlat_model_config& config, const lowlat_hosting& hosting,
          const shape::RuntimeShape& shape)
      : config_(config),
        hosted_(hosting.struct_bytes > 0),
        marlin_(hosting.expert_layout == LOWLAT_MARLIN),
        bf16_wo_a_(hosting.bf16_wo_a != 0),
        proposals_(hosting.proposals != 0),
        stages_(hosting.stages != 0),
        s_(shape),
        v4_(config.kind == LOWLAT_V4) {}

  std::vector<TensorSlot> build(ModelWeights& w) {
    w.marlin_inner = marlin_ ? marlin_rows(s_.kIntermediateLocal) : 0;
    if (proposals_) {
      if (stages_) {
        add_embedding(w);
        draft_stages(w);
      }
      add_head(w);
      proposals(w);
      return std::move(slots_);
    }
    add_embedding(w);
    if (!hosted_) add_head(w);
    add("norm.weight", w.norm, LOWLAT_BF16, {s_.kHidden}, kWhole);
    if (v4_) head_mix("hc_head", w.hc_head);
    if (s_.kNumEngrams > 0) add("engram.token_map", w.token_map, LOWLAT_I64, {s_.kVocab}, kWhole);
    for (int i = 0; i < s_.kNumLayers; ++i) {
      w.layers[i].plan = config_.layers[i];
      const std::string prefix = "layers." + std::to_string(i) + ".";
      layer(prefix, w.layers[i], s_.kNumExperts);
      if (!v4_) {
        add(prefix + "ffn.gate.bias_vl", w.layers[i].gate_bias_vl, LOWLAT_F32, {s_.kNumExperts},
            kWhole);
      }
      if (config_.layers[i].kv_source == i) {
        v4_ ? pooling(prefix, w.layers[i]) : compressor(prefix, w.layers[i]);
      }
      if (config_.layers[i].index_source == i) indexer(prefix, w.layers[i]);
      if (config_.layers[i].engram >= 0) engram(prefix, w.layers[i]);
      pools(i, w.layers[i]);
    }
    if (s_.kNumDraftStages > 0 && !hosted_) draft(w);
    return std::move(slots_);
  }

 private:
  void add_embedding(ModelWeights& w) {
    add("embed.weight", w.embed, LOWLAT_BF16, {s_.kVocabLocal, s_.kHidden}, 0);
  }
  void add_head(ModelWeights& w) {
    add("head.weight", w.head, LOWLAT_BF16, {s_.kVocabLocal, s_.kHidden}, 0);
  }

  template <class T>
  TensorSlot& add(const std::string& name, T*& target, lowlat_dtype dtype,
                  std::initializer_list<std::int64_t> dims, int shard_dim,
                  lowlat_tensor_role role = LOWLAT_WEIGHT,
                  lowlat_layout layout = LOWLAT_ROW_MAJOR) {
    TensorSlot slot;
    slot.name = name;
    slot.spec = {};
    slot.spec.struct_bytes = sizeof slot.spec;
    slot.spec.dtype = dtype;
    slot.spec.layout = layout;
    slot.spec.role = role;
    slot.spec.shard_dim = shard_dim;
    for (const std::int64_t dim : dims) slot.spec.shape[slot.spec.ndim++] = dim;
    slot.set = [&target](void* data) { target = static_cast<T*>(data); };
    return slots_.emplace_back(std::move(slot));
  }

  void fp8(const std::string& name, Fp8Weight& target, std::int64_t n, std::int64_t k,
           int shard_dim) {
    const std::int64_t block = s_.kScaleBlock;
    add(name + ".weight", target.codes, LOWLAT_E4M3, {n, k}, shard_dim);
    add(name + ".scale", target.scales, LOWLAT_UE8M0, {n / block, k / block}, shard_dim);
  }
  void fp4(const std::string& name, Fp4Weight& target, std::int64_t experts, std::int64_t n,
           std::int64_t k, int shard_dim) {
    add(name + ".weight", target.codes, LOWLAT_FP4X2, {experts, n, k / 2}, shard_dim);
    add(name + ".scale", target.scales, LOWLAT_UE8M0, {experts, n, k / shape::kFp4Group},
        shard_dim);
  }
  // Shares of a rank, so the published tensor has no dimension of theirs.
  void marlin(const std::string& name, Fp4Weight& target, std::int64_t experts, std::int64_t n,
              std::int64_t k) {
    add(name + ".weight", target.codes, LOWLAT_I32, {experts, k / 16, 2 * n}, kWhole, LOWLAT_WEIGHT,
        LOWLAT_MARLIN);
    add(name + ".scale", target.scales, LOWLAT_UE8M0, {experts, k / shape::kFp4Group, n}, kWhole,
        LOWLAT_WEIGHT, LOWLAT_MARLIN);
  }
  void hyper(const std::string& name, HcWeights& target) {
    add(name + "_fn", target.fn, LOWLAT_F32, {24, 4 * std::int64_t{s_.kHidden}}, kWhole);
    add(name + "_base", target.base, LOWLAT_F32, {24}, kWhole);
    add(name + "_scale", target.scale, LOWLAT_F32, {3}, kWhole);
  }

  void head_mix(const std::string& name, HcWeights& target) {
    add(name + "_fn", target.fn, LOWLAT_F32,
        {shape::kNumStreams, shape::kNumStreams * std::int64_t{s_.kHidden}}, kWhole);
    add(name + "_base", target.base, LOWLAT_F32, {shape::kNumStreams}, kWhole);
    add(name + "_scale", target.scale, LOWLAT_F32, {1}, kWhole);
  }

  // What every layer has, a draft's stages included.
  void layer(const std::string& prefix, LayerWeights& w, int num_experts) {
    const std::int64_t hidden = s_.kHidden, inner = s_.kIntermediateLocal;
    const std::int64_t groups_out = std::int64_t{s_.kGroupsLocal} * s_.kOLora;
    hyper(prefix + "hc_attn", w.hc_attn);
    hyper(prefix + "hc_ffn", w.hc_ffn);
    add(prefix + "attn_norm.weight", w.attn_norm, LOWLAT_BF16, {hidden}, kWhole);
    add(prefix + "ffn_norm.weight", w.ffn_norm, LOWLAT_BF16, {hidden}, kWhole);
    fp8(prefix + "attn.wq_a", w.wq_a, s_.kQLora, hidden, kWhole);
    fp8(prefix + "attn.wkv", w.wkv, shape::kHeadDim, hidden, kWhole);
    add(prefix + "attn.q_norm.weight", w.q_norm, LOWLAT_BF16, {s_.kQLora}, kWhole);
    add(prefix + "attn.kv_norm.weight", w.kv_norm, LOWLAT_BF16, {shape::kHeadDim}, kWhole);
    fp8(prefix + "attn.wq_b", w.wq_b, std::int64_t{s_.kNumHeadsLocal} * shape::kHeadDim, s_.kQLora,
        0);
    add(prefix + "attn.attn_sink", w.attn_sink, LOWLAT_F32, {s_.kNumHeadsLocal}, 0);
    if (bf16_wo_a_) {
      add(prefix + "attn.wo_a.weight", w.wo_a_bf16, LOWLAT_BF16, {groups_out, s_.kGroupInput}, 0);
    } else {
      fp8(prefix + "attn.wo_a", w.wo_a, groups_out, s_.kGroupInput, 0);
    }
    fp8(prefix + "attn.wo_b", w.wo_b, hidden, groups_out, 1);
    add(prefix + "ffn.gate.weight", w.gate, LOWLAT_BF16, {num_experts, hidden}, kWhole);
    if (w.plan.hash_gate != 0) {
      add(prefix + "ffn.gate.tid2eid", w.tid2eid, LOWLAT_I32, {s_.kVocab, s_.kExpertsPerToken},
          kWhole);
    } else {
      add(prefix + "ffn.gate.bias", w.gate_bias, LOWLAT_F32, {num_experts}, kWhole);
    }
    if (marlin_) {
      const std::int64_t tiled = marlin_rows(s_.kIntermediateLocal);
      marlin(prefix + "ffn.experts.w13", w.w1, num_experts, 2 * tiled, hidden);
      marlin(prefix + "ffn.experts.w2", w.w2, num_experts, hidden, tiled);
    } else {
      fp4(prefix + "ffn.experts.w1", w.w1, num_experts, inner, hidden, 1);
      fp4(prefix + "ffn.experts.w3", w.w3, num_experts, inner, hidden, 1);
      fp4(prefix + "ffn.experts.w2", w.w2, num_experts, hidden, inner, 2);
    }
    fp8(prefix + "ffn.shared_experts.w1", w.shared_w1, inner, hidden, 0);
    fp8(prefix + "ffn.shared_experts.w3", w.shared_w3, inner, hidden, 0);
    fp8(prefix + "ffn.shared_experts.w2", w.shared_w2, hidden, inner, 1);
  }

  // V4: a compressor of keys, and at ratio 4 another one for the keys of the index.
  void pooling(const std::string& prefix, LayerWeights& w) {
    pool(prefix + "attn.compressor", w.compressor, {w.plan.ratio, shape::kHeadDim});
    if (w.plan.index_source >= 0) {
      pool(prefix + "attn.indexer.compressor", w.indexer.compressor,
           {w.plan.ratio, shape::kIndexDim});
    }
  }
  void pool(const std::string& name, CompressorWeights& target, const stages::PoolLayout& layout) {
    const std::int64_t rows = layout.half_width();
    add(name + ".wkv.weight", target.wkv, LOWLAT_BF16, {rows, s_.kHidden}, kWhole);
    add(name + ".wgate.weight", target.wgate, LOWLAT_BF16, {rows, s_.kHidden}, kWhole);
    add(name + ".ape", target.ape, LOWLAT_F32, {layout.ratio, rows}, kWhole);
    add(name + ".norm.weight", target.norm, LOWLAT_BF16, {layout.dim}, kWhole);
  }

  void compressor(const std::string& prefix, LayerWeights& w) {
    const std::int64_t hidden = s_.kHidden;
    add(prefix + "attn.compressor.wkv.weight", w.compressor.wkv, LOWLAT_BF16,
        {shape::kHeadDim, hidden}, kWhole);
    if (w.plan.ratio == 2) {
      add(prefix + "attn.compressor.wgate.weight", w.compressor.wgate, LOWLAT_BF16,
          {shape::kHeadDim, hidden}, kWhole);
    }
    add(prefix + "attn.compressor.norm.weight", w.compressor.norm, LOWLAT_BF16, {shape::kHeadDim},
        kWhole);
    add(prefix + "attn.indexer.wk.weight", w.indexer.wk, LOWLAT_BF16,
        {shape::kIndexDim, shape::kHeadDim}, kWhole);
    add(prefix + "attn.indexer.k_norm.weight", w.indexer.k_norm, LOWLAT_BF16, {shape::kIndexDim},
        kWhole);
  }

  void indexer(const std::string& prefix, LayerWeights& w) {
    fp8(prefix + "attn.indexer.wq_b", w.indexer.wq_b,
        std::int64_t{s_.kIndexHeads} * shape::kIndexDim, s_.kQLora, kWhole);
    add(prefix + "attn.indexer.weights_proj.weight", w.indexer.weights_proj, LOWLAT_BF16,
        {s_.kIndexHeads, s_.kHidden}, kWhole);
  }

  void engram(const std::string& prefix, LayerWeights& w) {
    const std::int64_t dim = s_.kEngramDim;
    fp8(prefix + "engram.wkv", w.engram.wkv, 5 * std::int64_t{s_.kHidden},
        shape::kEngramColumns * dim, kWhole);
    add(prefix + "engram.q_weight", w.engram.q_weight, LOWLAT_BF16, {4, s_.kHidden}, kWhole);
    add(prefix + "engram.k_weight", w.engram.k_weight, LOWLAT_BF16, {4, s_.kHidden}, kWhole);
    // A rank holds the rows of its columns: as many as their primes say.
    const std::int64_t* primes = &config_.engram_primes[w.plan.engram][0][0];
    const int first_column = s_.kTpRank * s_.kEngramColumnsLocal;
    std::int64_t rows = 0;
    w.engram.first_row = 0;
    for (int column = 0; column < first_column + s_.kEngramColumnsLocal; ++column) {
      (column < first_column ? w.engram.first_row : rows) += primes[column];
    }
    add(prefix + "engram.embed.weight", w.engram.embed.codes, LOWLAT_E4M3, {rows, dim}, 0);
    add(prefix + "engram.embed.scale", w.engram.embed.scales, LOWLAT_UE8M0, {rows, dim / 32}, 0);
  }

  // Of a hosted model the engine says how many pages and rings there are, and states are rows.
  void state(const std::string& name, float*& target, std::int64_t rings, std::int64_t rows,
             std::initializer_list<std::int64_t> row) {
    TensorSlot& slot = add(name, target, LOWLAT_F32, {rings, rows}, kWhole, LOWLAT_POOL);
    auto& spec = slot.spec;
    if (hosted_) {
      spec.shape[0] = 0;
      spec.shape[1] = 1;
      for (const std::int64_t dim : row) spec.shape[1] *= dim;
    } else {
      for (const std::int64_t dim : row) spec.shape[spec.ndim++] = dim;
    }
  }

  void pools(int layer, LayerWeights& w) {
    const std::string number = std::to_string(layer);
    const std::int64_t pages = hosted_ ? 0 : s_.kNumPages;
    add("kv.swa." + number, w.kv_swa, LOWLAT_U8, {pages, stages::kv_page_bytes(s_.kPageSize)},
        kWhole, LOWLAT_POOL, LOWLAT_KV_PAGED);
    if (w.plan.kv_source != layer) return;
    const std::int64_t entries = s_.kPageSize / w.plan.ratio;
    add("kv.extra." + number, w.kv_extra, LOWLAT_U8, {pages, stages::kv_page_bytes(entries)},
        kWhole, LOWLAT_POOL, LOWLAT_KV_PAGED);
    if (w.plan.index_source >= 0) {
      const std::int64_t index_pages =
          (pages * entries + stages::kIndexSlotsPerPage - 1) / stages::kIndexSlotsPerPage;
      add("kv.index." + number, w.kv_index, LOWLAT_U8,
          {index_pages, v4_ ? stages::kIndexFp8PageBytes : stages::kIndexPageBytes}, kWhole,
          LOWLAT_POOL, LOWLAT_INDEX_PAGED);
    }
    if (v4_) {
      const stages::PoolLayout keys{w.plan.ratio, shape::kHeadDim};
      state("kv.state." + number, w.kv_state, keys.overlaps() ? pages : s_.kMaxBatch,
            stages::pool_ring_rows(keys, s_.kStateRing), {keys.width()});
      const stages::PoolLayout index_keys{w.plan.ratio, shape::kIndexDim};
      if (w.plan.index_source >= 0) {
        state("kv.index_state." + number, w.kv_index_state, pages, s_.kStateRing,
              {index_keys.width()});
      }
    } else if (w.plan.ratio == 2) {
      state("kv.state." + number, w.kv_state, s_.kMaxBatch, s_.kStateRing, {2, shape::kHeadDim});
    }
  }

  void draft_stages(ModelWeights& w) {
    const std::int64_t pages = hosted_ ? 0 : s_.kNumPages;
    for (int i = 0; i < s_.kNumDraftStages; ++i) {
      const std::string prefix = "mtp." + std::to_string(i) + ".";
      w.stages[i].plan = {0, -1, -1, -1, -1, 0};
      layer(prefix, w.stages[i], s_.kDraftExperts);
      add(prefix + "kv.swa", w.stages[i].kv_swa, LOWLAT_U8,
          {pages, stages::kv_page_bytes(s_.kPageSize)}, kWhole, LOWLAT_POOL, LOWLAT_KV_PAGED);
    }
  }

  void draft(ModelWeights& w) {
    const std::int64_t hidden = s_.kHidden;
    draft_stages(w);
    fp8("mtp.0.main_proj", w.main_proj, hidden, s_.kNumDraftStages * hidden, kWhole);
    add("mtp.0.main_norm.weight", w.main_norm, LOWLAT_BF16, {hidden}, kWhole);
    proposals(w);
  }

  // What the proposals need beside the head.
  void proposals(ModelWeights& w) {
    const std::int64_t hidden = s_.kHidden;
    const std::string last = "mtp." + std::to_string(s_.kNumDraftStages - 1) + ".";
    add(last + "norm.weight", w.draft_norm, LOWLAT_BF16, {hidden}, kWhole);
    if (v4_) head_mix(last + "hc_head", w.draft_hc_head);
    const std::string markov = last + "markov_head.";
    add(markov + (v4_ ? "markov_w1.weight" : "embed.weight"), w.markov_embed, LOWLAT_BF16,
        {s_.kVocab, s_.kMarkovRank}, kWhole);
    add(markov + (v4_ ? "markov_w2.weight" : "head.weight"), w.markov_head, LOWLAT_BF16,
        {s_.kVocabLocal, s_.kMarkovRank}, 0);
  }

  const lowlat_model_config& config_;
  const bool hosted_, marlin_, bf16_wo_a_, proposals_, stages_;
  const shape::RuntimeShape& s_;
  const bool v4_;
  std::vector<TensorSlot> slots_;
};

}  // namespace

std::vector<TensorSlot> tensor_slots(const lowlat_model_config& config,
                                     const lowlat_hosting& hosting,
                                     const shape::RuntimeShape& shape, ModelWeights& weights) {
  return Builder(config, hosting, shape).build(weights);
}

}  // namespace lowlat::host
