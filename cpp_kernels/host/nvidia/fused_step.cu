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
#include "fused/layer.hpp"
#include "fused/step.hpp"
#include "host/model.hpp"
#include "host/rope_frequencies.hpp"
#include "shape/dsv41_flash.hpp"

namespace lowlat::host::cuda {
namespace {

namespace fused = lowlat::nvidia::fused;
using Served = shape::Dsv41Flash<4>;

constexpr int kRows = fused::kMaxFusedRows;
constexpr auto kMoeShape = lowlat::fused::MoeShape::v41_tp4;
constexpr auto kDraftShape = lowlat::fused::MoeShape::v41_draft_tp4;
// See moe_weights.
static_assert(marlin_rows(Served::kIntermediateLocal) == Served::kIntermediateLocal);
constexpr int kIndexPageBytes = 64 * 68;
constexpr int kNumSms = 132;  // of an H100 and an H200 with SXM; the experts have 128 bands

// Numbers of a step's exchanges. The layers' are 2 k and 2 k + 1 of layer k, counted from 1, so
// that the embedding's is the second of layer 0. The first is of gathered n-gram rows.
constexpr int kGatherIndex = 0, kEmbedIndex = 1;
constexpr int first_index_behind(int num_layers) { return 2 * num_layers + 2; }

// Gates of the kernels beside a layer.
enum SideGate {
  gate_product = fused::kLayerFreeGate,
  gate_keys,
  gate_query,
  gate_scores,
  gate_select
};

fused::Fp8Weights view(const lowlat::persistent::Fp8Weight& w) { return {w.codes, w.scales}; }
fused::HyperWeights view(const lowlat::persistent::HcWeights& w) { return {w.fn, w.base, w.scale}; }

// As attention and the compressor's pools have it.
std::int64_t page_bytes(int slots) { return (slots * std::int64_t{584} + 575) / 576 * 576; }

}  // namespace

struct FusedStep::State {
  lowlat_model_config config;
  shape::RuntimeShape shape;
  lowlat::persistent::ModelWeights weights;
  lowlat_pools pools;
  const ResidentStep* resident;
  bool has_draft;  // a draft that the fused kernels serve

  std::vector<Memory> pieces;
  fused::LayerMemory memory;
  fused::ExchangePort port;
  std::uint64_t* step_epoch;
  fused::RopeFrequencies window_rope, compressed_rope;

  fused::StepArrays arrays;
  std::uint16_t* zeros;  // bf16 [rows, 4, hidden], what the embedding's exchange has as residual
  std::array<std::uint8_t*, fused::kMaxGathered> engram_codes;
  std::array<float*, fused::kMaxGathered> engram_scale;
  float* engram_sums;
  // Of the index; the last selection and the last candidate blocks are what later layers read.
  std::int64_t pitch;
  std::uint16_t* query;
  float *scores, *block_scores, *compress_sums;
  uint2* found;
  std::uint32_t* tickets;
  std::int32_t *entry_slots, *blocks;
  // Of the head.
  float* head_sums;
  uint4* head_best;
  std::uint32_t* head_tickets;
  // Of a draft.
  void* draft_experts;
  fused::InjectParams inject;
  std::int64_t* draft_tokens;

  Stream side;  // of the kernels beside the layers
  Event forked, projected, ended, joined;

  template <class T>
  T* take(std::int64_t count) {
    Memory& piece =
        pieces.emplace_back(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(T));
    check(cudaMemset(piece.data(), 0, piece.bytes()), "cudaMemset");
    return static_cast<T*>(piece.data());
  }

  const lowlat_layer& plan(int layer_idx) const { return config.layers[layer_idx]; }
  bool selects(int layer_idx) const {
    return layer_idx < config.num_layers && plan(layer_idx).ratio > 0 &&
           plan(layer_idx).index_source == layer_idx;
  }
  bool has_engram(int layer_idx) const {
    return layer_idx < config.num_layers && plan(layer_idx).engram >= 0;
  }
  bool gathers() const {
    for (int i = 0; i < config.num_layers; ++i) {
      if (has_engram(i)) return true;
    }
    return false;
  }
  int first_index() const { return gathers() ? kGatherIndex : kEmbedIndex; }

  // Entries of a request that a selection may have to look at.
  static std::int64_t max_entries(const shape::RuntimeShape& s, int stride, int ratio) {
    return std::int64_t{std::min(stride, s.kNumPages)} * s.kPageSize / ratio;
  }

  bool serves(int rows, int tokens, int table_pages) const;

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
      return gate(layer_idx - 1, fused::kLayerDone, fused::exchange_norm_blocks(rows));
    }
    fused::Hop hop(int layer_idx) const {
      if (!by_packets()) return {};
      return {s.memory.port, 2 * place(layer_idx),
              static_cast<std::uint32_t>(16 * place(layer_idx))};
    }
    int x_index(int layer_idx) const { return 2 * place(layer_idx) - 1; }

    fused::LayerStep layer_step() const;
    void begin() const;
    fused::StepInput input() const;
    void send_embedding() const;
    void receive_embedding(const std::uint16_t* gain, bool memory_follows) const;
    void set_weights(fused::PlainLayer& out, const lowlat::persistent::LayerWeights& w) const;
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
    void run() const;

   private:
    void take_rows() const;
    void leave() const;
    void layer(int layer_idx) const;
    void take_features(int layer_idx) const;
    fused::CompressParams compressor(int layer_idx) const;
    void begin_index(int layer_idx) const;
    void end_index(int layer_idx) const;
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
    void stage(int stage_idx) const;
    int propose() const;  // the last exchange
  };
};

// --------------------------------------------------------------------------------------- chain

fused::LayerStep FusedStep::State::Chain::layer_step() const {
  fused::LayerStep out = {};
  out.memory = s.memory;
  out.port = s.port;
  out.shape = kMoeShape;
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
  // The other branch begins here, whether it has work or not.
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

void FusedStep::State::Chain::receive_embedding(const std::uint16_t* gain,
                                                bool memory_follows) const {
  fused::ExchangeNormParams exchange = {};
  exchange.port = s.port;
  exchange.exchange_index = kEmbedIndex;
  exchange.stage = 1;  // StageId::embed_sum
  exchange.num_rows = rows;
  exchange.mix = s.memory.mix[1];
  exchange.norm_eps = s.shape.kNormEps;
  exchange.gain = gain;
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

void FusedStep::State::Chain::set_weights(fused::PlainLayer& out,
                                          const lowlat::persistent::LayerWeights& w) const {
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
}

void FusedStep::State::Chain::head_product(int num_layers) const {
  fused::CompressParams product = {};
  product.rows = step_rows();
  product.x = s.memory.x;
  product.matrices[0] = {s.weights.head, s.shape.kVocabLocal};
  product.partial = s.head_sums;
  product.x_done = x_gate(num_layers);
  check(fused::launch_compress_product(product, s.shape.kHidden, true, stream), "the head");
}

void FusedStep::State::Chain::end(int last_index) const {
  check(fused::launch_begin_step(s.step_epoch,
                                 static_cast<std::uint64_t>(last_index + 1 - s.first_index()),
                                 nullptr, 0, stream),
        "a step's end");
  // What is still beside the chain ends with the step.
  s.joined.record(s.side.get());
  s.joined.hold(stream);
}

// -------------------------------------------------------------------------------------- layers

void FusedStep::State::Target::run() const {
  begin();
  take_rows();
  send_embedding();
  const bool memory_first = s.has_engram(0);
  if (memory_first) begin_engram(0);
  receive_embedding(s.weights.layers[0].attn_norm, memory_first);
  if (memory_first) end_engram(0);
  for (int i = 0; i < s.config.num_layers; ++i) {
    take_features(i);
    layer(i);
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
  fused::PlainLayer out = {};
  set_weights(out, s.weights.layers[layer_idx]);
  out.next_norm = layer_idx + 1 < s.config.num_layers ? s.weights.layers[layer_idx + 1].attn_norm
                                                      : s.weights.norm;
  out.rope = plan.ratio == 0 ? s.window_rope : s.compressed_rope;
  out.window_idx = s.arrays.window_idx;
  out.num_window = fused::kStepWindow;
  if (plan.ratio > 0) {
    const int slots = s.shape.kPageSize / plan.ratio;
    out.extra = {s.weights.layers[plan.kv_source].kv_extra, page_bytes(slots), slots};
    out.extra_idx = s.entry_slots;
    out.num_extra = fused::kIndexTopk;
    // What is joined before a programmatic launch is waited for only by its end.
    out.extra_ends = s.selects(layer_idx);
  }
  out.memory_follows = s.has_engram(layer_idx + 1);
  return out;
}

void FusedStep::State::Target::layer(int layer_idx) const {
  const fused::PlainLayer plain = plain_layer(layer_idx);
  if (plain.memory_follows) begin_engram(layer_idx + 1);
  const bool selects = s.selects(layer_idx);
  if (selects) begin_index(layer_idx);
  const std::function<void(fused::HopKernel)> between = [&](fused::HopKernel kernel) {
    if (!selects) return;
    if (kernel == fused::HopKernel::q) s.projected.record(stream);
    if (kernel == fused::HopKernel::attention) end_index(layer_idx);
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

// Compressed keys, if the layer owns them, and the selection, on the branch beside the chain. None
// of its kernels waits for one of the chain that may still be without a place on the device, which
// they could keep from it: what needs x starts when x is there, what needs [q_a, kv] when these
// are, and attention is launched when the selection has ended.
fused::CompressParams FusedStep::State::Target::compressor(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const lowlat_layer& plan = s.plan(layer_idx);
  const auto& owner = s.weights.layers[plan.kv_source];
  const int ratio = plan.ratio, slots = s.shape.kPageSize / ratio;
  fused::CompressParams out = {};
  out.rows = step_rows();
  out.ratio = ratio;
  out.x = s.memory.x;
  if (plan.kv_source == layer_idx) {
    out.matrices[0] = {w.compressor.wkv, shape::kHeadDim};
    if (ratio == 2) out.matrices[1] = {w.compressor.wgate, shape::kHeadDim};
  }
  out.matrices[2] = {w.indexer.weights_proj, Served::kIndexHeads};
  out.partial = s.compress_sums;
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

void FusedStep::State::Target::begin_index(int layer_idx) const {
  const fused::CompressParams compress = compressor(layer_idx);
  const cudaStream_t side = s.side.get();
  s.forked.record(stream);
  s.forked.hold(side);
  check(fused::launch_compress_product(compress, s.shape.kHidden, false, side),
        "a compressor's product");
  if (s.plan(layer_idx).kv_source != layer_idx) return;
  check(fused::launch_compress_key(compress, true, side), "compressed keys");
}

void FusedStep::State::Target::end_index(int layer_idx) const {
  const auto& w = s.weights.layers[layer_idx];
  const lowlat_layer& plan = s.plan(layer_idx);
  const fused::CompressParams compress = compressor(layer_idx);
  const bool owns = plan.kv_source == layer_idx;
  const int ratio = plan.ratio;
  const cudaStream_t side = s.side.get();
  fused::IndexParams index = {};
  index.format = fused::IndexFormat::fp4;
  index.rows = compress.rows;
  index.ratio = ratio;
  index.pages = {s.arrays.page_table, table_pages(), s.shape.kPageSize / ratio};
  index.max_entries = static_cast<int>(max_entries(s.shape, table_pages(), ratio));
  index.keys = compress.keys;
  index.hop = hop(layer_idx);
  index.packets = s.memory.packets;
  index.x_index = x_index(layer_idx);
  index.wq = view(w.indexer.wq_b);
  index.q_norm = w.q_norm;
  index.norm_eps = s.shape.kNormEps;
  index.rope = s.compressed_rope;
  index.query = s.query;
  index.head_stride = fused::compress_width(compress);
  index.head_sums = s.compress_sums + index.head_stride - Served::kIndexHeads;
  index.scores = s.scores;
  index.pitch = s.pitch;
  index.block_scores = layer_idx == s.config.candidate_layer ? s.block_scores : nullptr;
  index.blocks = plan.candidate_source >= 0 ? s.blocks : nullptr;
  index.new_keys = owns;
  index.found = s.found;
  index.tickets = s.tickets;
  index.entry_slots = s.entry_slots;
  index.out_blocks = s.blocks;
  fused::set_index_latent(s.memory, fused::FusedModel::v41, index.rows.num_rows, layer_idx, &index);
  index.heads_done = compress.product_done;
  index.query_done = gate(layer_idx, gate_query, fused::kIndexQueryBlocks);
  index.scores_done = gate(layer_idx, gate_scores, fused::kIndexScoreBlocks);
  index.done = gate(layer_idx, gate_select, fused::index_select_blocks(index));

  if (owns) index.keys_done = compress.done;
  s.projected.hold(side);
  check(fused::launch_index_query(index, false, side), "index queries");
  check(fused::launch_index_scores(index, true, side), "index scores");
  check(fused::launch_index_select(index, true, side), "a selection");
  s.ended.record(side);
  if (layer_idx == s.config.candidate_layer) {
    check(fused::launch_index_blocks(index, true, side), "candidate blocks");
  }
  s.ended.hold(stream);
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
  out.before = gate(layer_idx - 1, fused::kLayerExchanged, fused::exchange_norm_blocks(rows));
  out.done = gate(layer_idx - 1, fused::kLayerDone, fused::engram_apply_blocks(rows));
  return out;
}

// The product streams beside the layer before.
void FusedStep::State::Target::begin_engram(int layer_idx) const {
  s.forked.record(stream);
  s.forked.hold(s.side.get());
  check(fused::launch_engram_product(engram(layer_idx), false, s.side.get()),
        "n-gram memory's product");
  s.ended.record(s.side.get());
}

void FusedStep::State::Target::end_engram(int layer_idx) const {
  s.ended.hold(stream);
  check(fused::launch_engram_apply(engram(layer_idx), false, stream), "n-gram memory");
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
      s.port,         rows,           s.shape.kHidden, s.memory.x, s.memory.residual[0],
      hosted->hidden, hosted->streams};
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
  receive_embedding(s.weights.stages[0].attn_norm, false);
  for (int i = 0; i < s.config.num_draft_stages; ++i) stage(i);
  head_product(s.config.num_draft_stages);
  end(propose());
}

void FusedStep::State::Draft::stage(int stage_idx) const {
  fused::PlainLayer plain = {};
  set_weights(plain, s.weights.stages[stage_idx]);
  plain.next_norm = stage_idx + 1 < s.config.num_draft_stages
                        ? s.weights.stages[stage_idx + 1].attn_norm
                        : s.weights.draft_norm;
  plain.rope = s.window_rope;
  plain.window_idx = s.arrays.window_idx;
  plain.num_window = fused::kStepWindow + tokens;
  fused::LayerStep own = layer_step();
  own.shape = kDraftShape;
  own.memory.experts = s.draft_experts;
  check(fused::launch_plain_layer(plain, own, place(stage_idx), {}, stream), "a draft's stage");
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
  fused::DraftProposalsParams params = {};
  params.port = s.port;
  params.exchange_index = first;
  params.batch_size = draft.batch_size;
  params.vocab_shard = s.shape.kVocabLocal;
  params.w1 = s.weights.markov_embed;
  params.w2 = s.weights.markov_head;
  params.base = base;
  params.base_pitch = s.shape.kVocabLocal;
  params.anchors = s.arrays.anchors;
  params.anchor_pitch = 1;
  params.tokens = s.draft_tokens;
  check(fused::launch_draft_proposals(params, fused::kMaxDraftBlocks, false, stream), "proposals");
  check(fused::launch_tokens(s.draft_tokens, draft.draft_tokens,
                             draft.batch_size * fused::kDraftSteps, stream),
        "a draft's tokens");
  return first + fused::kDraftSteps - 1;
}

// ------------------------------------------------------------------------------------- weights

void FusedStep::State::take_weights(const lowlat::persistent::ModelWeights& from) {
  weights = from;
  for (std::size_t i = 0; i < laid_wo_a.size(); ++i) weights.layers[i].wo_a = laid_wo_a[i];
}

// An engine may have expanded wo_a to bf16; its kernels read the codes it came from.
void FusedStep::State::lay_wo_a() {
  if (config.num_layers == 0 || weights.layers[0].wo_a_bf16 == nullptr) return;
  const int rows = shape.kGroupsLocal * shape.kOLora, columns = shape.kGroupInput;
  auto* const inexact = take<std::uint32_t>(1);
  for (int i = 0; i < config.num_layers; ++i) {
    auto* const codes = take<std::uint8_t>(std::int64_t{rows} * columns);
    auto* const scales = take<std::uint8_t>(std::int64_t{rows / 32} * (columns / 32));
    const fused::CodesParams params = {rows,  columns, weights.layers[i].wo_a_bf16,
                                       codes, scales,  inexact};
    check(fused::launch_codes(params, nullptr), "wo_a as codes");
    laid_wo_a.push_back({codes, scales});
  }
  std::uint32_t count = 0;
  check(cudaMemcpy(&count, inexact, sizeof count, cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (count > 0) {
    throw Error(LOWLAT_UNSUPPORTED,
                std::to_string(count) +
                    " values of attn.wo_a.weight are no e4m3 values under a power of two for each "
                    "32 x 32, as the fused schedule reads them (nvidia:persistent does without)");
  }
  take_weights(weights);
}

// --------------------------------------------------------------------------------------- class

std::string FusedStep::refusal(const lowlat_model_config& c, const shape::RuntimeShape& s,
                               int device) {
  std::string out;
  const auto add = [&](const std::string& reason) { out += (out.empty() ? "" : "; ") + reason; };
  if (c.kind != LOWLAT_V41) {
    add("kind is " + std::to_string(c.kind) + ", needed LOWLAT_V41");
    return out;
  }
  const auto need = [&](std::int64_t seen, std::int64_t needed, const char* name) {
    if (seen == needed) return;
    add(std::string(name) + " is " + std::to_string(seen) + ", needed " + std::to_string(needed));
  };
  need(c.tp_size, Served::kTpSize, "tp_size");
  need(c.hidden, Served::kHidden, "hidden");
  need(c.q_lora, Served::kQLora, "q_lora");
  need(c.num_heads, Served::kNumHeads, "num_heads");
  need(c.o_groups, Served::kNumGroups, "o_groups");
  need(c.o_lora, Served::kOLora, "o_lora");
  need(c.window, Served::kWindow, "window");
  need(c.num_experts, Served::kNumExperts, "num_experts");
  need(c.experts_per_token, Served::kExpertsPerToken, "experts_per_token");
  need(c.moe_intermediate, Served::kIntermediate, "moe_intermediate");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  if (sms < kNumSms) {
    add("the device has " + std::to_string(sms) + " SMs, needed " + std::to_string(kNumSms));
  }
  if (c.routed_scaling != 1.5f) add("routed_scaling is not 1.5");
  if (c.swiglu_limit != 10.0f) add("swiglu_limit is not 10");
  if (s.kVocabLocal % 16 != 0) add("vocab is no multiple of 16 on a rank");
  if (c.num_engrams > 0) need(c.engram_head_dim, Served::kEngramDim, "engram_head_dim");
  const bool indexed = s.kIndexTopk > 0;
  if (indexed) {
    need(c.index_heads, Served::kIndexHeads, "index_heads");
    need(c.index_topk, Served::kIndexTopk, "index_topk");
    // An index page has 64 rows; places are found by shifts.
    if (c.page_size < 128 || c.page_size > 256 || (c.page_size & (c.page_size - 1)) != 0) {
      add("page_size is " + std::to_string(c.page_size) + ", needed 128 or 256");
    }
  }
  if (c.candidate_layer >= 0) {
    need(c.candidate_blocks, fused::kIndexMaxBlocks, "candidate_blocks");
    need(c.candidate_block_size, fused::kIndexBlock, "candidate_block_size");
  }
  return out;
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
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.config = config;
  s.shape = shape;
  s.weights = weights;
  s.pools = pools;
  s.resident = &resident;
  s.has_draft =
      config.num_draft_stages == fused::kInjectStages && config.draft_block == fused::kDraftSteps &&
      config.markov_rank == fused::kMarkovRank && config.draft_experts == Served::kDraftExperts &&
      config.draft_experts_per_token == Served::kDraftExpertsPerToken;
  s.port = region.port(config.wait_budget_ns, kernel);
  s.step_epoch = region.step_epoch();
  const RopeFrequencies rope = rope_frequencies(config);
  std::ranges::copy(rope.window, s.window_rope.values);
  std::ranges::copy(rope.compressed, s.compressed_rope.values);

  constexpr std::int64_t kHidden = Served::kHidden;
  const int chain = config.num_layers + 1;
  const std::int64_t bytes =
      fused::layer_memory(nullptr, kMoeShape, config.tp_size, kRows, chain).bytes;
  s.memory =
      fused::layer_memory(s.take<std::uint8_t>(bytes), kMoeShape, config.tp_size, kRows, chain);
  check(fused::layer_init(s.memory, kMoeShape, s.port), "the layers' memory");

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
  s.zeros = s.take<std::uint16_t>(kRows * 4 * kHidden);
  for (int table = 0; table < config.num_engrams; ++table) {
    const auto at = static_cast<std::size_t>(table);
    s.engram_codes[at] = s.take<std::uint8_t>(std::int64_t{kRows} * fused::kEngramWidth);
    s.engram_scale[at] = s.take<float>(std::int64_t{kRows} * (fused::kEngramWidth / 32));
  }
  if (config.num_engrams > 0) s.engram_sums = s.take<float>(3 * kRows * 5 * kHidden);
  if (shape.kIndexTopk > 0) {
    const auto entries = static_cast<int>(std::min<std::int64_t>(
        State::max_entries(shape, shape.kNumPages, 1), fused::kIndexMaxEntries));
    s.pitch = std::max((entries + 63) / 64 * 64, fused::kIndexMaxBlocks * fused::kIndexBlock);
    s.query = s.take<std::uint16_t>(kRows * Served::kIndexHeads * shape::kIndexDim);
    s.scores = s.take<float>(kRows * s.pitch);
    s.block_scores = s.take<float>(kRows * s.pitch / fused::kIndexBlock);
    s.compress_sums = s.take<float>(2 * kRows * (2 * shape::kHeadDim + Served::kIndexHeads));
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
        static_cast<std::int64_t>(lowlat::fused::moe_workspace_bytes(kDraftShape)));
    check(static_cast<cudaError_t>(
              lowlat::fused::moe_workspace_init(kDraftShape, s.draft_experts, nullptr)),
          "the draft's experts");
    s.draft_tokens = s.take<std::int64_t>(fused::kMaxDraftBatch * fused::kDraftSteps);
    constexpr std::int64_t kWidth = fused::kInjectStages * kHidden;
    fused::InjectParams& inject = s.inject;
    inject.features = resident.features();
    inject.num_slots = std::int64_t{shape.kNumPages} * shape.kPageSize;
    inject.main_proj = view(weights.main_proj);
    inject.main_norm = weights.main_norm;
    inject.norm_eps = shape.kNormEps;
    inject.rope = s.window_rope;
    inject.feature_codes = s.take<std::uint8_t>(kRows * kWidth);
    inject.feature_scale = s.take<float>(kRows * kWidth / 32);
    inject.y = s.take<std::uint16_t>(kRows * kHidden);
    inject.x_codes = s.take<std::uint8_t>(kRows * kHidden);
    inject.x_scale = s.take<float>(kRows * kHidden / 32);
    inject.kv = s.take<std::uint16_t>(kRows * fused::kInjectStages * shape::kHeadDim);
    for (int i = 0; i < fused::kInjectStages; ++i) {
      const auto& w = weights.stages[i];
      inject.wkv[i] = view(w.wkv);
      inject.kv_norm[i] = w.kv_norm;
      inject.pages[i] = {w.kv_swa, page_bytes(shape.kPageSize), shape.kPageSize};
    }
  }
  s.lay_wo_a();
  check(cudaDeviceSynchronize(), "the step's memory");
  load_kernels();
}

// A kernel's first use loads its code, which may wait for kernels that run, such as one that waits
// for a peer whose code is still to be loaded. Capturing loads it, and runs nothing.
void FusedStep::load_kernels() const {
  const State& s = *state_;
  const Stream stream;
  std::int32_t* const nothing = s.arrays.token_ids;
  const auto capture = [&](const auto& call) {
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "a capture");
    launch(call, stream.get());
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.get(), &graph), "a capture");
    cudaGraphDestroy(graph);
  };
  for (int i = 0; i < s.config.num_widths && s.config.widths[i] <= kRows; ++i) {
    const int rows = s.config.widths[i];
    if (s.weights.head == nullptr) {
      lowlat_hosted_step step{};
      step.batch_size = rows;
      step.tokens_per_request = step.page_table_stride = step.num_table_pages = 1;
      capture(step);
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
    capture(step);
    lowlat_draft draft{};
    draft.num_inject_rows = rows;
    draft.inject_slots = draft.inject_positions = nothing;
    draft.batch_size = rows / (fused::kDraftSteps + 1);
    draft.page_table_stride = 1;
    draft.anchors = draft.prefixes = draft.slots = draft.page_table = nothing;
    draft.draft_tokens = nothing;
    if (serves(draft)) capture(draft);
  }
}

FusedStep::~FusedStep() = default;

bool FusedStep::State::serves(int rows, int tokens, int table_pages) const {
  // A compressor's ring has the halves of all of a request's rows and of the one before.
  return rows <= kRows &&
         (shape.kIndexTopk == 0 || (tokens < shape.kStateRing &&
                                    max_entries(shape, table_pages, 1) <= fused::kIndexMaxEntries));
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

void FusedStep::launch(const lowlat_step& step, cudaStream_t stream) const {
  State::Target{{*state_, stream, step.num_rows, step.tokens_per_request}, &step, nullptr}.run();
}

void FusedStep::launch(const lowlat_hosted_step& step, cudaStream_t stream) const {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  };
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

std::uint64_t FusedStep::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : state_->pieces) bytes += piece.bytes();
  return bytes;
}

}  // namespace lowlat::host::cuda
