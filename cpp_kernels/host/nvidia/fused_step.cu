#include "host/nvidia/fused_step.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "fused/codes.hpp"
#include "fused/compress.hpp"
#include "fused/draft.hpp"
#include "fused/index.hpp"
#include "fused/inject.hpp"
#include "fused/layer_pooled.hpp"
#include "fused/step.hpp"
#include "host/model.hpp"
#include "host/nvidia/fused_base.hpp"
#include "host/rope_frequencies.hpp"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::host::cuda {
namespace {

namespace fused = lowlat::nvidia::fused;
// Sizes that ranks do not divide.
using V41 = shape::Dsv41Flash<1>;
using V4 = shape::Dsv4Flash<1>;

constexpr int kRows = fused::kMaxFusedRows;
// What was built of the experts for so many ranks: target layers' and a draft's stages'.
struct ExpertShapes {
  lowlat::fused::MoeShape target, draft;
};
ExpertShapes expert_shapes(std::uint32_t kind, int tp_size) {
  using enum lowlat::fused::MoeShape;
  if (kind == LOWLAT_V4) {
    return tp_size == 2 ? ExpertShapes{v4_tp2, v4_tp2} : ExpertShapes{v4_tp4, v4_tp4};
  }
  return tp_size == 2 ? ExpertShapes{v41_tp2, v41_draft_tp2} : ExpertShapes{v41_tp4, v41_draft_tp4};
}
// See moe_weights.
template <class... Shapes>
constexpr bool kUnpadded =
    ((marlin_rows(Shapes::kIntermediateLocal) == Shapes::kIntermediateLocal) && ...);
static_assert(kUnpadded<shape::Dsv41Flash<2>, shape::Dsv41Flash<4>, shape::Dsv4Flash<2>,
                        shape::Dsv4Flash<4>>);
constexpr int kIndexPageBytes = 64 * 68, kIndexPageBytesV4 = 64 * 132;
constexpr int kNumSms = 132;  // of an H100 and an H200 with SXM; the experts have 128 bands

// Numbers of a step's exchanges. The layers' are 2 k and 2 k + 1 of layer k, counted from 1, so
// that the embedding's is the second of layer 0. The first is of gathered n-gram rows.
constexpr int kGatherIndex = 0, kEmbedIndex = fused::kLayerEmbedIndex;
constexpr int first_index_behind(int num_layers) { return 2 * num_layers + 2; }

// Gates of the kernels beside a layer of V4.1 (V4's: layer_pooled.hpp).
enum SideGate {
  gate_product = fused::kLayerFreeGate,
  gate_keys,
  gate_query,
  gate_scores,
  gate_select
};

fused::Fp8Weights view(const lowlat::persistent::Fp8Weight& w) { return {w.codes, w.scales}; }
fused::HyperWeights view(const lowlat::persistent::HcWeights& w) { return {w.fn, w.base, w.scale}; }

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// As attention and the compressor's pools have it.
std::int64_t page_bytes(int slots) { return (slots * std::int64_t{584} + 575) / 576 * 576; }

}  // namespace

struct FusedStep::State : FusedBase {
  using FusedBase::FusedBase;

  lowlat_pools pools = {};
  const ResidentStep* resident = nullptr;
  ExpertShapes experts = {};
  bool has_draft = false;  // a draft that the fused kernels serve

  fused::LayerMemory memory = {};
  fused::RopeFrequencies window_rope = {}, compressed_rope = {};

  fused::StepArrays arrays = {};
  // bf16 [rows, 4, hidden], what the embedding's exchange has as residual.
  std::uint16_t* zeros = nullptr;
  std::array<std::uint8_t*, fused::kMaxGathered> engram_codes = {};
  std::array<float*, fused::kMaxGathered> engram_scale = {};
  float* engram_sums = nullptr;
  // Of the index; the last selection and the last candidate blocks are what later layers read.
  std::int64_t pitch = 0;
  std::uint16_t* query = nullptr;
  float *query_scale = nullptr, *scores = nullptr, *block_scores = nullptr;
  float* compress_sums = nullptr;
  uint2* found = nullptr;
  std::uint32_t* tickets = nullptr;
  std::int32_t *entry_slots = nullptr, *blocks = nullptr;
  // Of the head. V4: what the last exchange of a step and of a draft combines with.
  fused::HyperWeights head_hc = {}, draft_head_hc = {};
  float* head_sums = nullptr;
  uint4* head_best = nullptr;
  std::uint32_t* head_tickets = nullptr;
  // Of a draft.
  void* draft_experts = nullptr;
  fused::InjectParams inject = {};
  std::int64_t* draft_tokens = nullptr;

  Stream side;  // of n-gram memory's product
  Event forked, started, joined;

  bool is_v4() const { return config.kind == LOWLAT_V4; }
  fused::FusedModel model() const {
    return is_v4() ? fused::FusedModel::v4 : fused::FusedModel::v41;
  }
  const lowlat_layer& plan(int layer_idx) const { return config.layers[layer_idx]; }
  bool selects(int layer_idx) const {
    return layer_idx < config.num_layers && plan(layer_idx).ratio > 0 &&
           plan(layer_idx).index_source == layer_idx;
  }
  bool has_engram(int layer_idx) const {
    return layer_idx < config.num_layers && plan(layer_idx).engram >= 0;
  }
  // Whether a target's steps have work beside the chain: n-gram memory's.
  bool has_branch() const { return config.num_engrams > 0; }
  bool gathers() const {
    for (int i = 0; i < config.num_layers; ++i) {
      if (has_engram(i)) return true;
    }
    return false;
  }
  int first_index() const { return gathers() ? kGatherIndex : kEmbedIndex; }

  // Entries of a request, as many as its table of `stride` pages may hold. A selection may have to
  // look at all of the model's smallest ratio.
  static std::int64_t max_entries(const shape::RuntimeShape& s, int stride, int ratio) {
    return std::int64_t{std::min(stride, s.kNumPages)} * s.kPageSize / ratio;
  }
  int least_ratio() const { return is_v4() ? shape::kOverlapRatio : 1; }
  // Which of the tables of experts by token a layer has.
  int table_of(int layer_idx) const {
    int before = 0;
    for (int i = 0; i < layer_idx; ++i) before += plan(i).hash_gate != 0 ? 1 : 0;
    return before;
  }

  bool serves(int rows, int tokens, int table_pages) const;

  // Of hosted drafts alone, see of_stages.
  bool has_stages_alone() const { return config.num_layers == 0; }
  int num_chained() const {
    return has_stages_alone() ? config.num_draft_stages : config.num_layers;
  }
  lowlat::persistent::LayerWeights* chained() {
    return has_stages_alone() ? weights.stages : weights.layers;
  }

  // Pools are where the engine has them now; wo_a is where this step has laid it.
  void take_weights(const lowlat::persistent::ModelWeights& from);
  std::vector<lowlat::persistent::Fp8Weight> laid_wo_a;  // of each layer; empty: as bound
  void lay_wo_a();

  // What a target step and a draft have in common: rows, the embedding, chained layers, the head.
  struct Chain {
    const State& s;
    cudaStream_t stream;
    int rows, tokens;

    bool by_packets() const { return rows <= fused::kHopRows; }
    fused::StepRows step_rows() const { return {rows, tokens, s.arrays.positions, s.arrays.slots}; }
    // Layers of a chain are counted from 1; 0 is the embedding.
    static int place(int layer_idx) { return layer_idx + 1; }
    fused::Gate gate(int layer_idx, int number, std::uint32_t blocks) const {
      return fused::layer_gate(s.memory, place(layer_idx), number, blocks);
    }
    fused::Gate x_gate(int layer_idx) const {
      return gate(layer_idx - 1, fused::kLayerDone,
                  s.is_v4() ? fused::exchange_mix_blocks(rows) : fused::exchange_norm_blocks(rows));
    }
    fused::Hop hop(int layer_idx) const {
      if (!by_packets()) return {};
      return {s.memory.port, 2 * place(layer_idx), fused::kernel_place(place(layer_idx))};
    }
    int x_index(int layer_idx) const { return 2 * place(layer_idx) - 1; }

    fused::LayerStep layer_step() const;
    void begin() const;
    fused::StepInput input() const;
    void send_embedding() const;
    // For the first of `layers`.
    void receive_embedding(const lowlat::persistent::LayerWeights& first,
                           bool memory_follows) const;
    fused::PlainLayer layer_of(const lowlat::persistent::LayerWeights* layers, int num_layers,
                               int layer_idx) const;
    // Of a draft.
    void stage(int stage_idx) const;
    void head_product(int num_layers) const;
    // last_index: of the step's exchanges. The next step's first one takes the other box, whichever
    // kind it is.
    void end(int last_index) const;
  };

  // A target step's launches: of the model's own, or of an engine that hosts it. The other is NULL.
  struct Target : Chain {
    const lowlat_step* step;
    const lowlat_hosted_step* hosted;

    int table_pages() const {
      const int pages = step != nullptr ? step->page_table_stride : hosted->num_table_pages;
      return std::min(pages, s.shape.kNumPages);
    }
    // V4: of ratio 128, of which a row sees all.
    int num_blocks() const {
      return s.is_v4() ? static_cast<int>(max_entries(s.shape, table_pages(), shape::kBlockRatio))
                       : 0;
    }
    void run() const;

   private:
    void take_rows() const;
    void leave() const;
    void layer(int layer_idx) const;
    void pooled_layer(int layer_idx) const;
    void take_features(int layer_idx) const;
    fused::CompressParams product(int layer_idx) const;
    fused::PoolParams pooling(int layer_idx) const;
    fused::IndexParams selection(int layer_idx) const;
    fused::CompressParams compressor(int layer_idx) const;
    fused::IndexParams index(int layer_idx, const fused::CompressParams& compress) const;
    fused::EngramParams engram(int layer_idx) const;
    void begin_engram(int layer_idx) const;
    void end_engram(int layer_idx) const;
    void head() const;
    fused::PlainLayer plain_layer(int layer_idx) const;
  };

  // A draft's.
  struct Draft : Chain {
    const lowlat_draft& draft;

    void inject() const;
    void run() const;

   private:
    int propose() const;  // the last exchange
  };

  // A hosted draft's layers.
  struct HostedDraft : Chain {
    const lowlat_hosted_draft& draft;

    void run() const;
  };
};

// --------------------------------------------------------------------------------------- chain

fused::LayerStep FusedStep::State::Chain::layer_step() const {
  fused::LayerStep out = {};
  out.memory = s.memory;
  out.port = s.port;
  out.shape = s.experts.target;
  out.num_rows = rows;
  out.positions = s.arrays.positions;
  out.kv_slots = s.arrays.kv_slots;
  out.norm_eps = s.shape.kNormEps;
  out.hc_eps = s.shape.kHcEps;
  out.sinkhorn_iters = s.shape.kSinkhornIters;
  return out;
}

void FusedStep::State::Chain::begin() const {
  // The step before has added its exchanges, see end().
  check(fused::launch_layer_begin(layer_step(), s.step_epoch, 0, stream), "a step");
  // The other branch begins here.
  if (!s.has_branch()) return;
  s.forked.record(stream);
  s.forked.hold(s.side.get());
}

fused::StepInput FusedStep::State::Chain::input() const {
  fused::StepInput out = {};
  out.port = s.port;
  out.num_rows = rows;
  out.tokens = tokens;
  out.batch_size = rows / tokens;
  out.vocab = s.shape.kVocab;
  out.num_pages = s.pools.num_pages;
  out.most_pages = s.shape.kNumPages;
  out.page_size = s.shape.kPageSize;
  out.num_state_slots = s.pools.num_requests;
  out.image_token = s.shape.kImageToken;
  out.mask_token = s.shape.kDraftMaskToken;
  return out;
}

// The embedding's rows become four equal streams and x of the first layer.
void FusedStep::State::Chain::send_embedding() const {
  fused::EmbedParams params = {};
  params.port = s.port;
  params.index = kEmbedIndex;
  params.num_rows = rows;
  params.hidden = s.shape.kHidden;
  params.vocab_local = s.shape.kVocabLocal;
  params.token_ids = s.arrays.token_ids;
  params.embed = s.weights.embed;
  check(fused::launch_embed(params, stream), "the embedding");
}

void FusedStep::State::Chain::receive_embedding(const lowlat::persistent::LayerWeights& first,
                                                bool memory_follows) const {
  if (s.is_v4()) {
    check(fused::launch_layer_embedding(layer_step(), s.zeros, view(first.hc_attn), first.attn_norm,
                                        stream),
          "the embedding's sum");
    return;
  }
  fused::ExchangeNormParams exchange = {};
  exchange.port = s.port;
  exchange.exchange_index = kEmbedIndex;
  exchange.stage = fused::ExchangeStage::embed_sum;
  exchange.num_rows = rows;
  exchange.mix = s.memory.mix[1];
  exchange.norm_eps = s.shape.kNormEps;
  exchange.gain = first.attn_norm;
  exchange.residual_in = s.zeros;
  exchange.residual_out = s.memory.residual[0];
  exchange.x = s.memory.x;
  exchange.x_codes = s.memory.x_codes;
  exchange.x_scale = s.memory.x_scale;
  exchange.x_packets = memory_follows ? nullptr : s.memory.packets.x;
  exchange.done = gate(-1, memory_follows ? fused::kLayerExchanged : fused::kLayerDone,
                       fused::exchange_norm_blocks(rows));
  check(fused::launch_exchange_norm(exchange, s.shape.kHidden, false, stream),
        "the embedding's sum");
}

// What a layer of a chain has whatever lies beside it.
fused::PlainLayer FusedStep::State::Chain::layer_of(const lowlat::persistent::LayerWeights* layers,
                                                    int num_layers, int layer_idx) const {
  const bool is_target = layers == s.weights.layers, is_last = layer_idx + 1 == num_layers;
  const auto& w = layers[layer_idx];
  fused::PlainLayer out = {};
  out.wq_a = view(w.wq_a);
  out.wkv = view(w.wkv);
  out.wq_b = view(w.wq_b);
  out.wo_a = view(w.wo_a);
  out.wo_b = view(w.wo_b);
  out.q_norm = w.q_norm;
  out.kv_norm = w.kv_norm;
  out.ffn_norm = w.ffn_norm;
  out.sink = w.attn_sink;
  out.attn_hc = view(w.hc_attn);
  out.ffn_hc = view(w.hc_ffn);
  out.experts = moe_weights(w, s.weights.marlin_inner);
  out.window = {w.kv_swa, page_bytes(s.shape.kPageSize), s.shape.kPageSize};
  out.window_idx = s.arrays.window_idx;
  out.rope = s.window_rope;
  out.plain_o = !is_target || w.wo_a_bf16 != nullptr;
  const std::uint16_t* const last_norm = is_target ? s.weights.norm : s.weights.draft_norm;
  out.next_norm = is_last ? last_norm : layers[layer_idx + 1].attn_norm;
  if (!s.is_v4()) return out;
  const fused::HyperWeights& last_hc = is_target ? s.head_hc : s.draft_head_hc;
  out.next_hc = is_last ? last_hc : view(layers[layer_idx + 1].hc_attn);
  return out;
}

void FusedStep::State::Chain::head_product(int num_layers) const {
  s.launch_head_product(step_rows(), s.memory.x, s.head_sums, x_gate(num_layers), stream);
}

void FusedStep::State::Chain::end(int last_index) const {
  check(fused::launch_begin_step(s.step_epoch,
                                 static_cast<std::uint64_t>(last_index + 1 - s.first_index()),
                                 nullptr, 0, stream),
        "a step's end");
  // What is still beside the chain ends with the step.
  if (!s.has_branch()) return;
  s.joined.record(s.side.get());
  s.joined.hold(stream);
}

// -------------------------------------------------------------------------------------- layers

void FusedStep::State::Target::run() const {
  begin();
  take_rows();
  send_embedding();
  const bool memory_first = s.has_engram(0);
  if (memory_first) {
    s.forked.record(stream);  // behind the rows' gathering
    begin_engram(0);
  }
  receive_embedding(s.weights.layers[0], memory_first);
  if (memory_first) end_engram(0);
  // V4.1's features are of the streams as they enter a layer, V4's as they leave it.
  for (int i = 0; i < s.config.num_layers; ++i) {
    if (!s.is_v4()) take_features(i);
    layer(i);
    if (s.is_v4()) take_features(i);
  }
  const int behind = first_index_behind(s.config.num_layers);
  if (hosted != nullptr) {
    leave();
    end(behind - 1);
  } else {
    head();
    end(behind);
  }
}

void FusedStep::State::Target::take_rows() const {
  fused::StepInput in = input();
  const bool remembers = s.config.num_engrams > 0;
  if (step != nullptr) {
    in.token_ids = step->token_ids;
    in.positions = step->positions;
    in.request_idx = step->request_idx;
    in.slots = step->slots;
    in.page_table = step->page_table;
    in.page_table_stride = in.table_pages = step->page_table_stride;
    in.history = remembers ? step->history : nullptr;
    in.state_slots = step->state_slots;
  } else {
    in.hosted = {hosted->token_ids,
                 hosted->positions,
                 hosted->slots,
                 hosted->requests,
                 remembers ? s.pools.history : nullptr,
                 hosted->mode == LOWLAT_DECODE,
                 s.pools.num_requests,
                 s.pools.num_window_pages * s.shape.kPageSize,
                 s.pools.window_slots,
                 hosted->hidden,
                 s.shape.kHidden};
    in.page_table = hosted->page_table;
    in.page_table_stride = hosted->page_table_stride;
    in.table_pages = hosted->num_table_pages;
  }
  int tables = 0;
  for (int i = 0; i < s.config.num_layers; ++i) {
    if (s.plan(i).hash_gate != 0) in.expert_tables[tables++] = s.weights.layers[i].tid2eid;
  }
  in.entry_ratio = shape::kBlockRatio;
  in.num_entries = num_blocks();
  check(fused::launch_step_rows(in, s.arrays, stream), "a step's rows");
  if (!s.gathers()) return;
  fused::EngramGatherParams gather = {};
  gather.port = s.port;
  gather.index = kGatherIndex;
  for (int i = 0; i < s.config.num_layers; ++i) {
    if (s.has_engram(i)) gather.tables[gather.num_tables++] = engram(i);
  }
  check(fused::launch_engram_gather(gather, stream), "n-gram rows");
}

fused::PlainLayer FusedStep::State::Target::plain_layer(int layer_idx) const {
  const lowlat_layer& plan = s.plan(layer_idx);
  fused::PlainLayer out = layer_of(s.weights.layers, s.config.num_layers, layer_idx);
  if (plan.hash_gate != 0) out.hash_ids = s.arrays.expert_ids[s.table_of(layer_idx)];
  out.num_window = fused::kStepWindow;
  if (plan.ratio > 0) {
    const int slots = s.shape.kPageSize / plan.ratio;
    out.extra = {s.weights.layers[plan.kv_source].kv_extra, page_bytes(slots), slots};
    const bool all = plan.index_source < 0;
    out.rope = s.compressed_rope;
    out.extra_idx = all ? s.arrays.entry_slots : s.entry_slots;
    out.num_extra = all ? num_blocks() : fused::kIndexTopk;
    out.extra_ratio = all ? plan.ratio : 0;
  }
  out.memory_follows = s.has_engram(layer_idx + 1);
  return out;
}

// A layer of V4, with its pool and its index.
void FusedStep::State::Target::pooled_layer(int layer_idx) const {
  fused::PooledLayer out = {};
  out.plain = plain_layer(layer_idx);
  out.ratio = s.plan(layer_idx).ratio;
  out.tokens = tokens;
  out.slots = s.arrays.slots;
  if (out.ratio > 0) {
    out.compress = product(layer_idx);
    out.pool = pooling(layer_idx);
    if (s.selects(layer_idx)) out.index = selection(layer_idx);
  }
  check(fused::launch_pooled_layer(out, layer_step(), place(layer_idx), {}, stream), "a layer");
}

void FusedStep::State::Target::layer(int layer_idx) const {
  if (s.is_v4()) {
    pooled_layer(layer_idx);
    return;
  }
  fused::PlainLayer plain = plain_layer(layer_idx);
  fused::IndexParams index = {};
  fused::BesideLayer beside = {};
  if (s.selects(layer_idx)) {
    beside.hidden = s.shape.kHidden;
    beside.compress = compressor(layer_idx);
    beside.keys = s.plan(layer_idx).kv_source == layer_idx;
    index = this->index(layer_idx, beside.compress);
    beside.index = &index;
    plain.beside = &beside;
  }
  // Captured behind [q_a, kv], which as the exchange's first successor begins before that ends.
  if (plain.memory_follows) s.forked.record(stream);
  const std::function<void(fused::HopKernel)> between = [&](fused::HopKernel kernel) {
    if (plain.memory_follows && kernel == fused::HopKernel::q) begin_engram(layer_idx + 1);
  };
  fused::LayerParts parts;
  parts.between = &between;
  fused::LayerStep own = layer_step();
  own.image_rows =
      s.weights.layers[layer_idx].gate_bias_vl != nullptr ? s.arrays.image_rows : nullptr;
  check(fused::launch_plain_layer(plain, own, place(layer_idx), parts, stream), "a layer");
  if (plain.memory_follows) end_engram(layer_idx + 1);
}

// Of the streams as they enter the layer.
void FusedStep::State::Target::take_features(int layer_idx) const {
  std::uint16_t* const out = hosted != nullptr ? hosted->features : s.resident->features();
  for (int which = 0; which < s.config.num_draft_stages && out != nullptr; ++which) {
    if (s.config.draft_target_layers[which] != layer_idx) continue;
    const std::int64_t hidden = s.shape.kHidden;
    const fused::FeatureParams params = {rows, s.shape.kHidden, s.memory.residual[0],
                                         out + which * hidden, s.config.num_draft_stages * hidden};
    check(fused::launch_features(params, stream), "features");
  }
}

// Rows of x that a layer's compressor and index multiply, whichever it has.
fused::CompressParams FusedStep::State::Target::product(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const lowlat_layer& plan = s.plan(layer_idx);
  fused::CompressParams out = {};
  fused::Bf16Rows* next = out.matrices;
  if (plan.kv_source == layer_idx) {
    const bool overlaps = s.is_v4() && plan.ratio == shape::kOverlapRatio;
    const int halves = overlaps ? 2 : 1;
    *next++ = {w.compressor.wkv, halves * shape::kHeadDim};
    if (plan.ratio > 1) *next++ = {w.compressor.wgate, halves * shape::kHeadDim};
    if (overlaps) {
      *next++ = {w.indexer.compressor.wkv, 2 * shape::kIndexDim};
      *next++ = {w.indexer.compressor.wgate, 2 * shape::kIndexDim};
    }
  }
  if (s.selects(layer_idx)) *next = {w.indexer.weights_proj, s.shape.kIndexHeads};
  out.partial = s.compress_sums;
  return out;
}

// V4's entries and index keys.
fused::PoolParams FusedStep::State::Target::pooling(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const int ratio = s.plan(layer_idx).ratio, slots = s.shape.kPageSize / ratio;
  const int rings = s.shape.kStateRing / (2 * shape::kOverlapRatio);
  fused::PoolParams out = {};
  out.pages = {s.arrays.page_table, table_pages(), s.shape.kPageSize};
  out.ape = w.compressor.ape;
  out.norm = w.compressor.norm;
  out.index_ape = w.indexer.compressor.ape;
  out.index_norm = w.indexer.compressor.norm;
  out.state = w.kv_state;
  out.index_state = w.kv_index_state;
  out.state_slots = s.arrays.state_slots;
  out.ring = rings * (ratio == shape::kOverlapRatio ? 2 * ratio : ratio);
  out.window_slots = hosted != nullptr ? s.pools.window_slots : nullptr;
  out.num_window_slots = std::int64_t{s.pools.num_window_pages} * s.shape.kPageSize;
  out.norm_eps = s.shape.kNormEps;
  out.rope = s.compressed_rope;
  out.pool = {w.kv_extra, page_bytes(slots), slots};
  out.keys = {w.kv_index, kIndexPageBytesV4};
  return out;
}

// What a layer's index has whatever orders its kernels.
fused::IndexParams FusedStep::State::Target::selection(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const lowlat_layer& plan = s.plan(layer_idx);
  fused::IndexParams out = {};
  out.ratio = plan.ratio;
  out.pages = {s.arrays.page_table, table_pages(), s.shape.kPageSize / plan.ratio};
  out.max_entries = static_cast<int>(max_entries(s.shape, table_pages(), plan.ratio));
  out.keys = {s.weights.layers[plan.kv_source].kv_index,
              s.is_v4() ? kIndexPageBytesV4 : kIndexPageBytes};
  out.wq = view(w.indexer.wq_b);
  out.q_norm = w.q_norm;
  out.norm_eps = s.shape.kNormEps;
  out.rope = s.compressed_rope;
  out.query = s.query;
  out.query_scale = s.query_scale;
  out.scores = s.scores;
  out.pitch = s.pitch;
  out.found = s.found;
  out.tickets = s.tickets;
  out.entry_slots = s.entry_slots;
  return out;
}

// V4.1's compressed keys, if the layer owns them.
fused::CompressParams FusedStep::State::Target::compressor(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const lowlat_layer& plan = s.plan(layer_idx);
  const auto& owner = s.weights.layers[plan.kv_source];
  const int ratio = plan.ratio, slots = s.shape.kPageSize / ratio;
  fused::CompressParams out = product(layer_idx);
  out.rows = step_rows();
  out.ratio = ratio;
  out.x = s.memory.x;
  out.x_done = x_gate(layer_idx);
  out.hop = hop(layer_idx);
  out.state = w.kv_state;
  out.state_slots = s.arrays.state_slots;
  out.ring = s.shape.kStateRing;
  out.norm = w.compressor.norm;
  out.wk = w.indexer.wk;
  out.k_norm = w.indexer.k_norm;
  out.norm_eps = s.shape.kNormEps;
  out.rope = s.compressed_rope;
  out.pool = {owner.kv_extra, page_bytes(slots), slots};
  out.keys = {owner.kv_index, kIndexPageBytes};
  out.product_done = gate(layer_idx, gate_product, fused::compress_product_blocks(out));
  out.done = gate(layer_idx, gate_keys, fused::compress_key_blocks(rows));
  return out;
}

// Its selection.
fused::IndexParams FusedStep::State::Target::index(int layer_idx,
                                                   const fused::CompressParams& compress) const {
  const lowlat_layer& plan = s.plan(layer_idx);
  const bool owns = plan.kv_source == layer_idx;
  fused::IndexParams index = selection(layer_idx);
  index.format = fused::IndexFormat::fp4;
  index.rows = compress.rows;
  index.hop = hop(layer_idx);
  index.packets = s.memory.packets;
  index.x_index = x_index(layer_idx);
  index.head_stride = fused::compress_width(compress);
  index.head_sums = s.compress_sums + index.head_stride - s.shape.kIndexHeads;
  index.block_scores = layer_idx == s.config.candidate_layer ? s.block_scores : nullptr;
  index.blocks = plan.candidate_source >= 0 ? s.blocks : nullptr;
  index.new_keys = owns;
  index.out_blocks = s.blocks;
  fused::set_index_latent(s.memory, fused::FusedModel::v41, index.rows.num_rows, place(layer_idx),
                          &index);
  index.heads_done = compress.product_done;
  index.query_done = gate(layer_idx, gate_query, fused::kIndexQueryBlocks);
  index.scores_done = gate(layer_idx, gate_scores, fused::kIndexScoreBlocks);
  index.done = gate(layer_idx, gate_select, fused::index_done_blocks(index));
  if (owns) index.keys_done = compress.done;
  return index;
}

// ------------------------------------------------------------------------------- n-gram memory

// What is added to the streams before a layer.
fused::EngramParams FusedStep::State::Target::engram(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const int table = s.plan(layer_idx).engram;
  fused::EngramParams out = {};
  out.rows = step_rows();
  out.token_ids = s.arrays.token_ids;
  out.history = s.arrays.history;
  out.token_map = s.weights.token_map;
  std::copy_n(s.config.engram_multipliers[table], 4, out.multipliers);
  std::copy_n(&s.config.engram_primes[table][0][0], 24, out.primes);
  out.image_token = s.shape.kImageToken;
  out.pad_token = s.shape.kEngramPadToken;
  out.table.codes[0] = w.engram.embed.codes;
  out.table.scales[0] = w.engram.embed.scales;
  out.table.first_row[0] = w.engram.first_row;
  out.table.num_shards = 1;
  out.codes = s.engram_codes[static_cast<std::size_t>(table)];
  out.scale = s.engram_scale[static_cast<std::size_t>(table)];
  out.wkv = view(w.engram.wkv);
  out.sums = s.engram_sums;
  out.residual = s.memory.residual[0];
  out.mix = s.memory.mix[1];
  out.q_weight = w.engram.q_weight;
  out.k_weight = w.engram.k_weight;
  out.gain = w.attn_norm;
  out.norm_eps = s.shape.kNormEps;
  out.x = s.memory.x;
  out.x_codes = s.memory.x_codes;
  out.x_scale = s.memory.x_scale;
  if (by_packets()) {
    out.hop = hop(layer_idx);
    out.hop.index = x_index(layer_idx);
    out.x_packets = s.memory.packets.x;
  }
  out.product_done = gate(layer_idx, fused::kLayerMemory, fused::kEngramProductBlocks);
  out.before = gate(layer_idx - 1, fused::kLayerExchanged, fused::exchange_norm_blocks(rows));
  out.done = gate(layer_idx - 1, fused::kLayerDone, fused::engram_apply_blocks(rows));
  return out;
}

// The product streams beside the layer before. It waits for nothing once it runs, and what it adds
// to is the chain's by a gate: whoever waits there is launched when all of the product's blocks
// have begun (`started`), so that it never holds the place of one. The product's end would cost
// some 3 us more.
void FusedStep::State::Target::begin_engram(int layer_idx) const {
  s.forked.hold(s.side.get());
  check(fused::launch_engram_product(engram(layer_idx), false, s.side.get(), s.started.get()),
        "n-gram memory's product");
}

void FusedStep::State::Target::end_engram(int layer_idx) const {
  s.started.hold(stream);
  check(fused::launch_engram_apply(engram(layer_idx), true, stream), "n-gram memory");
}

// ---------------------------------------------------------------------------------------- head

void FusedStep::State::Target::head() const {
  const bool wanted =
      step->num_logit_rows > 0 && (step->logits != nullptr || step->argmax != nullptr);
  if (wanted) head_product(s.config.num_layers);
  fused::HeadParams params = {};
  params.port = s.port;
  params.index = first_index_behind(s.config.num_layers);
  params.num_rows = rows;
  params.num_logit_rows = wanted ? step->num_logit_rows : 0;
  params.logit_rows = step->logit_rows;
  params.vocab_local = s.shape.kVocabLocal;
  params.partial = s.head_sums;
  params.best = s.head_best;
  params.tickets = s.head_tickets;
  params.logits = step->logits;
  params.argmax = step->argmax;
  check(fused::launch_head(params, stream), "the logits");
}

void FusedStep::State::Target::leave() const {
  const fused::LeaveParams params = {
      s.port,          rows,   s.shape.kHidden, s.memory.x, s.memory.residual[0], hosted->hidden,
      hosted->streams, nullptr};
  check(fused::launch_leave(params, stream), "a step's results");
}

// --------------------------------------------------------------------------------------- draft

// The keys of committed rows of the last target step, `rows` of them.
void FusedStep::State::Draft::inject() const {
  fused::InjectParams params = s.inject;
  params.num_rows = rows;
  params.positions = draft.inject_positions;
  params.slots = draft.inject_slots;
  check(fused::launch_inject(params, stream), "a draft's context");
}

void FusedStep::State::Draft::run() const {
  begin();
  fused::StepInput in = input();
  in.anchors = draft.anchors;
  in.prefixes = draft.prefixes;
  in.slots = draft.slots;
  in.page_table = draft.page_table;
  in.page_table_stride = in.table_pages = draft.page_table_stride;
  check(fused::launch_step_rows(in, s.arrays, stream), "a draft's rows");
  if (s.first_index() == kGatherIndex) {
    // Nothing is gathered, but steps of both kinds begin with the same number.
    fused::HeadParams none = {};
    none.port = s.port;
    none.index = kGatherIndex;
    none.num_rows = rows;
    none.vocab_local = s.shape.kVocabLocal;
    check(fused::launch_head(none, stream), "a draft's begin");
  }
  send_embedding();
  receive_embedding(s.weights.stages[0], false);
  for (int i = 0; i < s.config.num_draft_stages; ++i) stage(i);
  head_product(s.config.num_draft_stages);
  end(propose());
}

void FusedStep::State::Chain::stage(int stage_idx) const {
  fused::PlainLayer plain = layer_of(s.weights.stages, s.config.num_draft_stages, stage_idx);
  plain.num_window = fused::kStepWindow + tokens;
  fused::LayerStep own = layer_step();
  own.shape = s.experts.draft;
  own.memory.experts = s.draft_experts;
  check(fused::launch_plain_layer(plain, own, place(stage_idx), {}, stream), "a draft's stage");
}

void FusedStep::State::HostedDraft::run() const {
  begin();
  const int width = s.shape.kHidden * (s.is_v4() ? shape::kNumStreams : 1);
  const fused::DraftInput in = {s.port,
                                rows,
                                tokens,
                                draft.token_ids,
                                draft.positions,
                                draft.key_slots,
                                draft.window,
                                draft.window_stride,
                                s.pools.num_window_pages * s.shape.kPageSize,
                                s.shape.kPageSize,
                                s.shape.kVocab,
                                s.config.max_positions,
                                draft.hidden,
                                width};
  check(fused::launch_draft_rows(in, s.arrays, stream), "a draft's rows");
  send_embedding();
  receive_embedding(s.weights.stages[0], false);
  for (int i = 0; i < s.config.num_draft_stages; ++i) stage(i);
  // V4.1's last exchange has the weights of the second sublayer's statistics.
  const fused::LeaveParams leave = {s.port,
                                    rows,
                                    s.shape.kHidden,
                                    s.memory.x,
                                    s.memory.residual[0],
                                    s.is_v4() ? nullptr : draft.hidden,
                                    s.is_v4() ? draft.hidden : nullptr,
                                    s.is_v4() ? nullptr : s.memory.mix[1]};
  check(fused::launch_leave(leave, stream), "a draft's results");
  end(first_index_behind(s.config.num_draft_stages) - 1);
}

int FusedStep::State::Draft::propose() const {
  float* const base = s.resident->logits_local();
  check(fused::launch_base({rows, s.shape.kVocabLocal, s.head_sums, base}, stream),
        "a draft's logits");
  const int first = first_index_behind(s.config.num_draft_stages);
  if (draft.draft_logits != nullptr) {
    // Sampled rows have noise of their own rows and offsets, and their logits go to every rank.
    s.resident->launch_proposals(draft, stream);
    return first - 1;
  }
  fused::DraftProposalsParams params =
      s.proposals(draft.batch_size, base, s.arrays.anchors, s.draft_tokens);
  params.exchange_index = first;
  check(fused::launch_draft_proposals(params, fused::kMaxDraftBlocks, false, stream), "proposals");
  check(fused::launch_tokens(s.draft_tokens, draft.draft_tokens,
                             draft.batch_size * fused::kDraftSteps, stream),
        "a draft's tokens");
  return first + fused::kDraftSteps - 1;
}

// ------------------------------------------------------------------------------------- weights

void FusedStep::State::take_weights(const lowlat::persistent::ModelWeights& from) {
  weights = from;
  for (std::size_t i = 0; i < laid_wo_a.size(); ++i) chained()[i].wo_a = laid_wo_a[i];
}

// An engine may have expanded wo_a to bf16; its kernels read the codes it came from.
void FusedStep::State::lay_wo_a() {
  if (num_chained() == 0 || chained()[0].wo_a_bf16 == nullptr) return;
  const int rows = shape.kGroupsLocal * shape.kOLora, columns = shape.kGroupInput;
  const int block = shape.kScaleBlock;
  auto* const inexact = take<std::uint32_t>(1);
  for (int i = 0; i < num_chained(); ++i) {
    auto* const codes = take<std::uint8_t>(std::int64_t{rows} * columns);
    auto* const scales = take<std::uint8_t>(std::int64_t{rows / block} * (columns / block));
    const fused::CodesParams params = {rows,  columns, block,  chained()[i].wo_a_bf16,
                                       codes, scales,  inexact};
    check(fused::launch_codes(params, nullptr), "wo_a as codes");
    laid_wo_a.push_back({codes, scales});
  }
  wait_for(nullptr, "wo_a as codes");
  std::uint32_t count = 0;
  check(cudaMemcpy(&count, inexact, sizeof count, cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (count > 0) {
    throw Error(
        LOWLAT_UNSUPPORTED,
        std::to_string(count) +
            " values of attn.wo_a.weight are no e4m3 values under a power of two for each " +
            std::to_string(block) + " x " + std::to_string(block) +
            ", as the published checkpoint has them and the fused schedule reads them");
  }
  take_weights(weights);
}

// --------------------------------------------------------------------------------------- class

std::string FusedStep::draft_refusal(const lowlat_model_config& c) {
  const bool is_v4 = c.kind == LOWLAT_V4;
  Reasons reasons;
  reasons.need(c.num_draft_stages, fused::kInjectStages, "num_draft_stages");
  reasons.need(c.draft_block, fused::kDraftSteps, "draft_block");
  reasons.need(c.markov_rank, fused::kMarkovRank, "markov_rank");
  reasons.need(c.draft_experts, is_v4 ? V4::kDraftExperts : V41::kDraftExperts, "draft_experts");
  reasons.need(c.draft_experts_per_token,
               is_v4 ? V4::kDraftExpertsPerToken : V41::kDraftExpertsPerToken,
               "draft_experts_per_token");
  return reasons.text();
}

std::string FusedStep::refusal(const lowlat_model_config& c, const shape::RuntimeShape& s,
                               int device) {
  Reasons reasons;
  const auto need_model = [&]<class M>() {
    reasons.need(c.hidden, M::kHidden, "hidden");
    reasons.need(c.q_lora, M::kQLora, "q_lora");
    reasons.need(c.num_heads, M::kNumHeads, "num_heads");
    reasons.need(c.o_groups, M::kNumGroups, "o_groups");
    reasons.need(c.o_lora, M::kOLora, "o_lora");
    reasons.need(c.window, M::kWindow, "window");
    reasons.need(c.num_experts, M::kNumExperts, "num_experts");
    reasons.need(c.experts_per_token, M::kExpertsPerToken, "experts_per_token");
    reasons.need(c.moe_intermediate, M::kIntermediate, "moe_intermediate");
    if (s.kIndexTopk == 0) return;
    reasons.need(c.index_heads, M::kIndexHeads, "index_heads");
    reasons.need(c.index_topk, M::kIndexTopk, "index_topk");
  };
  reasons.need_ranks(c.tp_size, {2, 4});
  const bool is_v4 = c.kind == LOWLAT_V4;
  is_v4 ? need_model.template operator()<V4>() : need_model.template operator()<V41>();
  reasons.need_sms(device, kNumSms);
  if (c.routed_scaling != 1.5f) reasons.add("routed_scaling is not 1.5");
  if (c.swiglu_limit != 10.0f) reasons.add("swiglu_limit is not 10");
  reasons.need_vocab(s);
  if (c.num_engrams > 0) reasons.need(c.engram_head_dim, V41::kEngramDim, "engram_head_dim");
  // An index page has 64 rows; places are found by shifts.
  if (is_v4) {
    reasons.need(c.page_size, 256, "page_size");
    const auto tables = std::count_if(c.layers, c.layers + c.num_layers,
                                      [](const lowlat_layer& l) { return l.hash_gate != 0; });
    if (tables > fused::kMaxTables) {
      reasons.add(std::to_string(tables) + " layers choose experts by the token, needed " +
                  std::to_string(fused::kMaxTables) + " at most");
    }
  } else if (s.kIndexTopk > 0 &&
             (c.page_size < 128 || c.page_size > 256 || (c.page_size & (c.page_size - 1)) != 0)) {
    reasons.add("page_size is " + std::to_string(c.page_size) + ", needed 128 or 256");
  }
  if (c.candidate_layer >= 0) {
    reasons.need(c.candidate_blocks, fused::kIndexMaxBlocks, "candidate_blocks");
    reasons.need(c.candidate_block_size, fused::kIndexBlock, "candidate_block_size");
  }
  return reasons.text();
}

int FusedStep::first_index() { return kEmbedIndex; }

lowlat_model_config FusedStep::of_stages(lowlat_model_config config) {
  config.num_layers = 0;
  config.num_engrams = 0;
  config.candidate_layer = -1;
  return config;
}

std::int64_t FusedStep::box_packets(const lowlat_model_config& c, const shape::RuntimeShape& s) {
  return std::max(
      {std::int64_t{kRows} * s.kHidden / 4, fused::head_packets(kRows, s.kVocabLocal),
       std::int64_t{fused::draft_packets(fused::kMaxDraftBlocks, fused::kMaxDraftBatch)},
       fused::engram_gather_packets(c.num_engrams, kRows, c.tp_size)});
}

FusedStep::FusedStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                     const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools,
                     const ExchangeRegion& region, const ResidentStep& resident,
                     std::uint32_t kernel)
    : state_(std::make_unique<State>(config, shape, weights, region, kernel)) {
  State& s = *state_;
  s.pools = pools;
  s.resident = &resident;
  s.experts = expert_shapes(config.kind, config.tp_size);
  // An engine that keeps the head runs its own draft.
  s.has_draft = weights.head != nullptr && draft_refusal(config).empty();
  const RopeFrequencies rope = rope_frequencies(config);
  std::ranges::copy(rope.window, s.window_rope.values);
  std::ranges::copy(rope.compressed, s.compressed_rope.values);

  const std::int64_t hidden = shape.kHidden;
  const int chain = std::max(config.num_layers, config.num_draft_stages) + 1;
  const auto memory_at = [&](void* base) {
    return fused::layer_memory(base, s.experts.target, config.tp_size, kRows, chain);
  };
  s.memory = memory_at(s.take<std::uint8_t>(memory_at(nullptr).bytes));
  check(fused::layer_init(s.memory, s.experts.target, s.port, nullptr), "the layers' memory");

  s.arrays.token_ids = s.take<std::int32_t>(kRows);
  s.arrays.positions = s.take<std::int32_t>(kRows);
  s.arrays.slots = s.take<std::int32_t>(kRows);
  s.arrays.kv_slots = s.take<std::int32_t>(kRows);
  s.arrays.image_rows = s.take<std::uint8_t>(kRows);
  s.arrays.window_idx = s.take<std::int32_t>(kRows * (fused::kStepWindow + fused::kMaxBlockRows));
  s.arrays.history = s.take<std::int32_t>(3 * kRows);
  s.arrays.state_slots = s.take<std::int32_t>(kRows);
  s.arrays.anchors = s.take<std::int64_t>(kRows);
  s.arrays.page_table = s.take<std::int32_t>(std::int64_t{kRows} * shape.kNumPages);
  s.arrays.mix = s.memory.mix[1];
  if (s.is_v4()) {
    for (std::int32_t*& ids : s.arrays.expert_ids) {
      ids = s.take<std::int32_t>(kRows * fused::kTableExperts);
    }
    s.arrays.entry_slots = s.take<std::int32_t>(
        kRows * State::max_entries(shape, shape.kNumPages, shape::kBlockRatio));
    if (!s.has_stages_alone()) s.head_hc = s.laid_head(weights.hc_head);
  }
  s.zeros = s.take<std::uint16_t>(kRows * 4 * hidden);
  for (int table = 0; table < config.num_engrams; ++table) {
    const auto at = static_cast<std::size_t>(table);
    s.engram_codes[at] = s.take<std::uint8_t>(std::int64_t{kRows} * fused::kEngramWidth);
    s.engram_scale[at] = s.take<float>(std::int64_t{kRows} * (fused::kEngramWidth / 32));
  }
  if (config.num_engrams > 0) s.engram_sums = s.take<float>(3 * kRows * 5 * hidden);
  if (shape.kIndexTopk > 0) {
    const auto entries = static_cast<int>(std::min<std::int64_t>(
        State::max_entries(shape, shape.kNumPages, s.least_ratio()), fused::kIndexMaxEntries));
    s.pitch = std::max((entries + 63) / 64 * 64, fused::kIndexMaxBlocks * fused::kIndexBlock);
    s.query = s.take<std::uint16_t>(kRows * shape.kIndexHeads * shape::kIndexDim);
    s.scores = s.take<float>(kRows * s.pitch);
    s.block_scores = s.take<float>(kRows * s.pitch / fused::kIndexBlock);
    s.query_scale = s.take<float>(std::int64_t{kRows} * shape.kIndexHeads);
    // What a token's compressors make, and its heads' weights.
    s.compress_sums =
        s.take<float>(std::int64_t{2} * kRows *
                      (shape.kCompressWidth + shape.kIndexCompressWidth + shape.kIndexHeads));
    s.found = s.take<uint2>(std::int64_t{kRows} * fused::index_found_count(entries));
    s.tickets = s.take<std::uint32_t>(2 * kRows);
    s.entry_slots = s.take<std::int32_t>(kRows * fused::kIndexTopk);
    s.blocks = s.take<std::int32_t>(kRows * fused::kIndexMaxBlocks);
  }
  s.head_sums = s.take<float>(std::int64_t{2} * kRows * shape.kVocabLocal);
  s.head_best = s.take<uint4>(kRows * fused::head_chunks(shape.kVocabLocal));
  s.head_tickets = s.take<std::uint32_t>(kRows);
  if (s.has_draft) {
    s.draft_experts = s.take<std::uint8_t>(
        static_cast<std::int64_t>(lowlat::fused::moe_workspace_bytes(s.experts.draft)));
    check(static_cast<cudaError_t>(
              lowlat::fused::moe_workspace_init(s.experts.draft, s.draft_experts, nullptr)),
          "the draft's experts");
    if (s.is_v4()) s.draft_head_hc = s.laid_head(weights.draft_hc_head);
  }
  if (s.has_draft && !s.has_stages_alone()) {
    s.draft_tokens = s.take<std::int64_t>(fused::kMaxDraftBatch * fused::kDraftSteps);
    const std::int64_t width = fused::kInjectStages * hidden;
    fused::InjectParams& inject = s.inject;
    inject.model = s.model();
    inject.features = resident.features();
    inject.num_slots = std::int64_t{shape.kNumPages} * shape.kPageSize;
    inject.main_proj = view(weights.main_proj);
    inject.main_norm = weights.main_norm;
    inject.norm_eps = shape.kNormEps;
    inject.rope = s.window_rope;
    inject.feature_codes = s.take<std::uint8_t>(kRows * width);
    inject.feature_scale = s.take<float>(kRows * width / 32);
    inject.y = s.take<std::uint16_t>(kRows * hidden);
    inject.x_codes = s.take<std::uint8_t>(kRows * hidden);
    inject.x_scale = s.take<float>(kRows * hidden / 32);
    inject.kv = s.take<std::uint16_t>(kRows * fused::kInjectStages * shape::kHeadDim);
    for (int i = 0; i < fused::kInjectStages; ++i) {
      const auto& w = weights.stages[i];
      inject.wkv[i] = view(w.wkv);
      inject.kv_norm[i] = w.kv_norm;
      inject.pages[i] = {w.kv_swa, page_bytes(shape.kPageSize), shape.kPageSize};
    }
  }
  s.lay_wo_a();
  wait_for(nullptr, "the step's memory");
  load_kernels();
}

void FusedStep::load_kernels() const {
  const State& s = *state_;
  std::int32_t* const nothing = s.arrays.token_ids;
  const auto load = [&](const auto& call) {
    load_kernels_of([&](cudaStream_t stream) { launch(call, stream); });
  };
  for (int i = 0; i < s.config.num_widths && s.config.widths[i] <= kRows; ++i) {
    const int rows = s.config.widths[i];
    if (s.has_stages_alone()) {
      lowlat_hosted_draft draft{};
      draft.batch_size = rows / fused::kDraftSteps;
      draft.window_stride = fused::kStepWindow + fused::kDraftSteps;
      if (serves(draft)) load(draft);
      continue;
    }
    if (s.weights.head == nullptr) {
      lowlat_hosted_step step{};
      step.batch_size = rows;
      step.tokens_per_request = step.page_table_stride = step.num_table_pages = 1;
      load(step);
      continue;
    }
    lowlat_step step{};
    step.num_rows = step.batch_size = rows;
    step.tokens_per_request = 1;
    step.page_table_stride = 1;
    step.token_ids = step.positions = step.request_idx = step.slots = nothing;
    step.page_table = step.history = step.state_slots = nothing;
    step.num_logit_rows = rows;
    step.logits = s.head_sums;
    step.argmax = nothing;
    load(step);
    lowlat_draft draft{};
    draft.num_inject_rows = rows;
    draft.inject_slots = draft.inject_positions = nothing;
    draft.batch_size = rows / (fused::kDraftSteps + 1);
    draft.page_table_stride = 1;
    draft.anchors = draft.prefixes = draft.slots = draft.page_table = nothing;
    draft.draft_tokens = nothing;
    if (serves(draft)) load(draft);
  }
}

FusedStep::~FusedStep() = default;

bool FusedStep::State::serves(int rows, int tokens, int table_pages) const {
  // A compressor's ring has the halves of all of a request's rows and of the one before; V4's the
  // candidates of an entry, the step's among them, and the step's other rows.
  const int before = is_v4() ? 2 * shape::kOverlapRatio - 1 : 1;
  return rows <= kRows &&
         (shape.kIndexTopk == 0 ||
          (tokens + before <= shape.kStateRing &&
           max_entries(shape, table_pages, least_ratio()) <= fused::kIndexMaxEntries));
}

bool FusedStep::serves(const lowlat_step& step) const {
  return step.mode != LOWLAT_EXTEND &&
         state_->serves(step.num_rows, step.tokens_per_request, step.page_table_stride);
}

bool FusedStep::serves(const lowlat_draft& draft) const {
  return state_->has_draft && draft.batch_size <= fused::kMaxDraftBatch;
}

bool FusedStep::serves(const lowlat_hosted_step& step) const {
  return state_->serves(step.batch_size * step.tokens_per_request, step.tokens_per_request,
                        step.num_table_pages);
}

bool FusedStep::serves(const lowlat_hosted_draft& draft) const {
  return state_->has_draft && draft.batch_size <= fused::kMaxDraftBatch;
}

void FusedStep::launch(const lowlat_step& step, cudaStream_t stream) const {
  State::Target{{*state_, stream, step.num_rows, step.tokens_per_request}, &step, nullptr}.run();
}

void FusedStep::launch(const lowlat_hosted_draft& draft, cudaStream_t stream) const {
  if (!aligned(draft.hidden)) throw invalid("hidden of a hosted draft must be aligned to 16 bytes");
  const int rows = draft.batch_size * fused::kDraftSteps;
  State::HostedDraft{{*state_, stream, rows, fused::kDraftSteps}, draft}.run();
}

void FusedStep::launch(const lowlat_hosted_step& step, cudaStream_t stream) const {
  if (!aligned(step.hidden) || !aligned(step.streams)) {
    throw invalid("hidden and streams of a hosted step must be aligned to 16 bytes");
  }
  State::Target{
      {*state_, stream, step.batch_size * step.tokens_per_request, step.tokens_per_request},
      nullptr,
      &step}
      .run();
}

void FusedStep::move_pools(const lowlat::persistent::ModelWeights& weights,
                           const lowlat_pools& pools) {
  state_->take_weights(weights);
  state_->pools = pools;
}

void FusedStep::launch(const lowlat_draft& draft, cudaStream_t stream) const {
  const State& s = *state_;
  if (draft.num_inject_rows > kRows) {
    // A prompt's rows, by the resident schedule.
    lowlat_draft context = draft;
    context.batch_size = 0;
    s.resident->launch(context, stream);
  } else if (draft.num_inject_rows > 0) {
    State::Draft{{s, stream, draft.num_inject_rows, 1}, draft}.inject();
  }
  if (draft.batch_size == 0) return;
  State::Draft{{s, stream, draft.batch_size * fused::kDraftSteps, fused::kDraftSteps}, draft}.run();
}

std::uint64_t FusedStep::bytes() const { return state_->bytes(); }

}  // namespace lowlat::host::cuda
