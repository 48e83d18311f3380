// fused/layer.cu: memory and launches of a plain layer, see layer.hpp.
#include "fused/layer.hpp"

#include <cuda_runtime.h>

#include "fused/model.hpp"

namespace lowlat::nvidia::fused {
namespace {

using lowlat::fused::MoeShape;
constexpr int kHeadDim = shape::kHeadDim;
constexpr int kGateWords = 32;  // nobody shares a line

enum GateKind {
  gate_mix,
  gate_qkv,
  gate_q,
  gate_attention,
  gate_u,
  gate_x,
  // Not gates: the statistics' tickets.
  word_ticket,
  word_ffn_ticket,
  gate_ffn_mix,
  gate_done,
  gate_latent = kLayerExchanged + 1,
  // V4 of few rows, whose first statistics have a kernel of their own.
  gate_own_mix = kLayerMemory + 1,
  word_own_ticket,
  gate_keys,
  // V4, whose exchanges make the statistics: of the step's input, in its first layer.
  gate_input = word_ticket,
  gate_input_mix = word_ffn_ticket
};
static_assert(gate_done == kLayerDone && gate_done + 1 == kLayerFreeGate);
static_assert(gate_latent < kLayerMemory && gate_keys < kLayerGates);
static_assert(static_cast<int>(HopKernel::count) <= kLayerKernels);

// Multiprocessors that the experts leave to the statistics. Measured: two are as good at 6 and 8
// rows, and 25 % slower at 1, 12 and 24. One number for all widths, see MoeArgs::idle_sms.
constexpr int kIdleSms = 4;

// What of a shape ranks do not divide.
struct Sizes {
  FusedModel model;
  int hidden, q_lora, heads, groups;
};
Sizes sizes_of(MoeShape shape) {
  const auto model =
      shape == MoeShape::v4_tp2 || shape == MoeShape::v4_tp4 ? FusedModel::v4 : FusedModel::v41;
  return with_model(model, [&]<class M>() {
    return Sizes{model, M::kHidden, M::kQLora, M::kNumHeads, M::kNumGroups};
  });
}

Gate gate_of(const LayerStep& step, int layer_idx, GateKind kind, std::uint32_t blocks) {
  return layer_gate(step.memory, layer_idx, kind, blocks);
}

cudaError_t fill(const LayerMemory& memory, MoeShape shape, const ExchangePort& port,
                 bool activations, cudaStream_t stream) {
  auto* base = reinterpret_cast<unsigned char*>(memory.residual[0]);
  auto* rest = reinterpret_cast<unsigned char*>(memory.packets.x);
  cudaError_t error = cudaMemsetAsync(rest, 0, memory.bytes - (rest - base), stream);
  if (error == cudaSuccess && activations) error = cudaMemsetAsync(base, 0, rest - base, stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(memory.port, &port, sizeof port, cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(memory.abort_words, port.abort_words, sizeof port.abort_words,
                            cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) {
    error =
        static_cast<cudaError_t>(lowlat::fused::moe_workspace_init(shape, memory.experts, stream));
  }
  return error;
}

// What all exchanges of V4 have in common, for the statistics and the norm of what begins.
ExchangeMixParams mixing_exchange(const LayerStep& step, int index, const HyperWeights& next,
                                  const std::uint16_t* norm) {
  const LayerMemory& memory = step.memory;
  ExchangeMixParams out = {};
  out.port = step.port;
  out.exchange_index = index;
  out.num_rows = step.num_rows;
  out.next = next;
  out.gain = norm;
  out.norm_eps = step.norm_eps;
  out.hc_eps = step.hc_eps;
  out.sinkhorn_iters = step.sinkhorn_iters;
  out.x = memory.x;
  out.x_codes = memory.x_codes;
  out.x_scale = memory.x_scale;
  out.x_packets = memory.packets.x;
  return out;
}

// V4 of few rows: post and comb of a layer's first sublayer are made by a kernel of their own,
// beside attention; its exchanges then need four outputs of fn before x is there, not 24.
bool has_own_mix(const LayerStep& step) { return step.num_rows <= kHopRows; }

// What an exchange whose parameters nobody reads leaves them to.
float* unread_mix(const LayerStep& step, const ExchangeMixParams& params) {
  const bool is_few = static_cast<std::uint32_t>(step.num_rows) <= exchange_mix_clusters(params);
  return is_few ? nullptr : step.memory.mix_partial[1];
}

}  // namespace

Gate layer_gate(const LayerMemory& memory, int layer_idx, int number, std::uint32_t blocks) {
  Gate out = {};
  out.word = memory.gates + (layer_idx * kLayerGates + number) * kGateWords;
  out.blocks = blocks;
  out.port = memory.port;
  out.id = gate_place(layer_idx) + static_cast<std::uint32_t>(number);
  return out;
}

void set_index_latent(const LayerMemory& memory, FusedModel model, int num_rows, int layer_idx,
                      IndexParams* index) {
  index->qa = memory.qa;
  index->qa_squares = memory.qa_squares;
  index->qkv_done = layer_gate(memory, layer_idx, gate_qkv, front_qkv_blocks(model));
  if (num_rows <= kHopRows) return;
  index->latent_codes = memory.latent_codes;
  index->latent_scale = memory.latent_scale;
  index->qkv_done =
      layer_gate(memory, layer_idx, gate_latent, static_cast<std::uint32_t>(num_rows));
}

Gate layer_x_gate(const LayerStep& step, int layer_idx) {
  const std::uint32_t blocks = exchange_mix_blocks(step.num_rows);
  return layer_idx == 0 ? gate_of(step, 0, gate_input, blocks)
                        : gate_of(step, layer_idx - 1, gate_done, blocks);
}

LayerMemory layer_memory(void* base, MoeShape shape, int tp_size, int max_rows, int num_layers) {
  auto* const first = static_cast<unsigned char*>(base);
  std::int64_t used = 0;
  const auto take = [&]<class T>(T*& out, std::int64_t count) {
    out = reinterpret_cast<T*>(first + used);
    used += (count * static_cast<std::int64_t>(sizeof(T)) + 255) / 256 * 256;
  };
  const Sizes sizes = sizes_of(shape);
  const int hidden = sizes.hidden, q_lora = sizes.q_lora;
  const int heads = sizes.heads / tp_size, groups = sizes.groups / tp_size;
  const int group = activation_group(sizes.model);
  const std::int64_t rows = max_rows, padded = padded_rows(max_rows);
  LayerMemory out = {};
  for (auto& residual : out.residual) take(residual, rows * 4 * hidden);
  take(out.x, rows * hidden);
  unsigned char* packets = nullptr;
  take(packets, hop_bytes(hidden, q_lora, heads, groups));
  out.packets = hop_buffers(packets, hidden, q_lora, heads, groups);
  take(out.port, 1);
  take(out.abort_words, kMaxRanks);
  out.num_gate_words = num_layers * kLayerGates * kGateWords;
  take(out.gates, out.num_gate_words);
  unsigned char* experts = nullptr;
  take(experts, static_cast<std::int64_t>(lowlat::fused::moe_workspace_bytes(shape)));
  out.experts = experts;
  take(out.qa, rows * q_lora);
  take(out.kv, rows * kHeadDim);
  take(out.q, rows * heads * kHeadDim);
  take(out.o, rows * heads * kHeadDim);
  take(out.x_codes, rows * hidden);
  take(out.latent_codes, rows * q_lora);
  take(out.latent_scale, padded * (q_lora / group));
  take(out.u_codes, rows * groups * 1024);
  take(out.x_scale, padded * (hidden / group));
  take(out.qa_squares, padded * (q_lora / 16));
  take(out.o_scale, padded * heads * (kHeadDim / group));
  take(out.u_scale, padded * groups * (1024 / group));
  take(out.turns, rows * shape::kRopeDim);
  for (auto& partial : out.mix_partial) take(partial, rows * kMaxMixBlocks * kMixStride);
  for (auto& mix : out.mix) take(mix, rows * kMixStride);
  out.bytes = used;
  return out;
}

cudaError_t layer_init(const LayerMemory& memory, MoeShape shape, const ExchangePort& port,
                       cudaStream_t stream) {
  return fill(memory, shape, port, true, stream);
}

cudaError_t layer_recover(const LayerMemory& memory, MoeShape shape, const ExchangePort& port,
                          cudaStream_t stream) {
  return fill(memory, shape, port, false, stream);
}

cudaError_t launch_layer_begin(const LayerStep& step, std::uint64_t* step_epoch,
                               std::uint64_t num_exchanges, cudaStream_t stream) {
  return launch_begin_step(step_epoch, num_exchanges, step.memory.gates, step.memory.num_gate_words,
                           stream);
}

cudaError_t launch_layer_input(const LayerStep& step, cudaStream_t stream) {
  const Sizes sizes = sizes_of(step.shape);
  if (sizes.model == FusedModel::v4) return cudaErrorInvalidValue;
  return launch_send_x(step.memory.x, step.num_rows, sizes.hidden, step.memory.packets.x,
                       step.memory.x_codes, step.memory.x_scale, step.port.step_epoch, -1, stream);
}

cudaError_t launch_layer_input(const LayerStep& step, const HyperWeights& attn_hc,
                               const std::uint16_t* attn_norm, cudaStream_t stream) {
  if (sizes_of(step.shape).model != FusedModel::v4) return cudaErrorInvalidValue;
  ExchangeMixParams params = mixing_exchange(step, -1, attn_hc, attn_norm);
  params.residual_in = step.memory.residual[0];
  params.mix_out = has_own_mix(step) ? unread_mix(step, params) : step.memory.mix[0];
  params.done = gate_of(step, 0, gate_input, exchange_mix_blocks(step.num_rows));
  params.mix_done = gate_of(step, 0, gate_input_mix, static_cast<std::uint32_t>(step.num_rows));
  return launch_exchange_mix(params, false, stream);
}

cudaError_t launch_layer_embedding(const LayerStep& step, const std::uint16_t* zeros,
                                   const HyperWeights& attn_hc, const std::uint16_t* attn_norm,
                                   cudaStream_t stream) {
  if (sizes_of(step.shape).model != FusedModel::v4) return cudaErrorInvalidValue;
  ExchangeMixParams params = mixing_exchange(step, kLayerEmbedIndex, attn_hc, attn_norm);
  params.stage = ExchangeStage::embed_sum;
  params.receives = true;
  params.mix_in = step.memory.mix[1];
  params.residual_in = zeros;
  params.residual_out = step.memory.residual[0];
  params.mix_out = has_own_mix(step) ? unread_mix(step, params) : step.memory.mix[0];
  params.done = gate_of(step, 0, gate_done, exchange_mix_blocks(step.num_rows));
  params.mix_done = gate_of(step, 0, gate_ffn_mix, static_cast<std::uint32_t>(step.num_rows));
  return launch_exchange_mix(params, false, stream);
}

cudaError_t launch_plain_layer(const PlainLayer& layer, const LayerStep& step, int layer_idx,
                               const LayerParts& parts, cudaStream_t stream) {
  const Sizes sizes = sizes_of(step.shape);
  const FusedModel model = sizes.model;
  const bool is_v4 = model == FusedModel::v4;
  if (step.num_rows < 1 || step.num_rows > kMaxFusedRows || layer_idx < 0) {
    return cudaErrorInvalidValue;
  }
  if (is_v4 && (!parts.attention || layer.memory_follows)) return cudaErrorInvalidValue;
  const LayerMemory& memory = step.memory;
  const int rows = step.num_rows, tp_size = step.port.tp_size, hidden = sizes.hidden;
  const int heads = sizes.heads / tp_size, groups = sizes.groups / tp_size;
  const bool first = layer_idx == 0;
  const std::uint32_t exchange_blocks =
      is_v4 ? exchange_mix_blocks(rows) : exchange_norm_blocks(rows);
  const std::uint32_t mix_blocks = is_v4 ? static_cast<std::uint32_t>(rows) : 1;
  const auto gate = [&](GateKind kind, std::uint32_t blocks) {
    return gate_of(step, layer_idx, kind, blocks);
  };
  Hop hop = {memory.port, 2 * layer_idx, kernel_place(layer_idx)};
  // x of the layer before; the first layer's is there when its kernels start.
  const Gate before = is_v4   ? layer_x_gate(step, layer_idx)
                      : first ? Gate{}
                              : gate_of(step, layer_idx - 1, gate_done, exchange_blocks);
  cudaError_t error = cudaSuccess;
  const auto run = [&](HopKernel kernel, auto&& launch) {
    if (error != cudaSuccess) return;
    if (parts.between != nullptr) (*parts.between)(kernel);
    error = launch();
  };
  const auto beside_before = [&](HopKernel next) {
    if (error != cudaSuccess || layer.beside == nullptr) return;
    error = launch_beside(*layer.beside, next, parts.beside_order, parts.between, stream);
  };
  Gate x_ready = before, mix_done = {};
  const auto mixing = [&](int side, const HyperWeights& weights, GateKind ticket, GateKind done) {
    MixParams out = {};
    out.residual = memory.residual[side];
    out.fn = weights.fn;
    out.base = weights.base;
    out.scale = weights.scale;
    out.norm_eps = step.norm_eps;
    out.hc_eps = step.hc_eps;
    out.sinkhorn_iters = step.sinkhorn_iters;
    out.hidden = hidden;
    out.num_rows = rows;
    out.partial = memory.mix_partial[side];
    out.mix = memory.mix[side];
    out.ticket = gate(ticket, 0).word;
    out.before = side == 0 ? before : x_ready;
    out.done = gate(done, 1);
    out.hop = hop;
    out.hop.id += side == 0 ? 0 : 4;
    return out;
  };
  const auto exchanging = [&](int side, const std::uint16_t* norm) {
    ExchangeNormParams out = {};
    out.port = step.port;
    out.exchange_index = 2 * layer_idx + side;
    out.stage = side == 0 ? ExchangeStage::attention_sum : ExchangeStage::moe_sum;
    out.num_rows = rows;
    out.mix = memory.mix[side];
    out.norm_eps = step.norm_eps;
    out.gain = norm;
    out.residual_in = memory.residual[side];
    out.residual_out = memory.residual[1 - side];
    out.x = memory.x;
    out.x_codes = memory.x_codes;
    out.x_scale = memory.x_scale;
    out.x_packets = side == 1 || !parts.experts ? memory.packets.x : nullptr;
    out.kernel = hop.id + static_cast<std::uint32_t>(side == 0 ? HopKernel::exchange
                                                               : HopKernel::second_exchange);
    out.early = true;
    return out;
  };
  // V4: the end of sublayer `side`; `next` begins.
  const auto mixing_of = [&](int side, const HyperWeights& next, const std::uint16_t* norm) {
    ExchangeMixParams out = mixing_exchange(step, 2 * layer_idx + side, next, norm);
    out.stage = side == 0 ? ExchangeStage::attention_sum : ExchangeStage::moe_sum;
    out.receives = true;
    out.residual_in = memory.residual[side];
    out.residual_out = memory.residual[1 - side];
    out.mix_in = memory.mix[side];
    out.mix_out = memory.mix[1 - side];
    if (side == 0 && parts.experts) out.x_packets = nullptr, out.x_codes = nullptr;
    out.kernel = hop.id + static_cast<std::uint32_t>(side == 0 ? HopKernel::exchange
                                                               : HopKernel::second_exchange);
    return out;
  };
  if (parts.attention) {
    FrontParams front = {};
    front.model = model;
    front.num_rows = rows;
    front.num_heads = heads;
    front.norm_eps = step.norm_eps;
    front.hop = hop;
    front.packets = memory.packets;
    front.x_index = parts.experts || first ? 2 * layer_idx - 1 : 2 * layer_idx - 2;
    front.x_codes = memory.x_codes;
    front.x_scale = memory.x_scale;
    front.wq_a = layer.wq_a;
    front.wkv = layer.wkv;
    front.wq_b = layer.wq_b;
    front.q_norm = layer.q_norm;
    front.kv_norm = layer.kv_norm;
    front.positions = step.positions;
    front.kv_slots = step.kv_slots;
    front.rope = layer.rope;
    front.qa = memory.qa;
    front.qa_squares = memory.qa_squares;
    front.kv = memory.kv;
    front.latent_codes = memory.latent_codes;
    front.latent_scale = memory.latent_scale;
    front.turns = memory.turns;
    front.q = memory.q;
    front.kv_pages = layer.window;
    front.before = before;
    front.qkv_done = gate(gate_qkv, front_qkv_blocks(model));
    front.latent_done = gate(gate_latent, static_cast<std::uint32_t>(rows));
    front.keys_done = gate(gate_keys, front_key_blocks(rows));
    front.done = gate(gate_q, front_q_blocks(heads));
    const bool own_mix = is_v4 && has_own_mix(step);
    const MixParams mix = own_mix ? mixing(0, layer.attn_hc, word_own_ticket, gate_own_mix)
                                  : mixing(0, layer.attn_hc, word_ticket, gate_mix);
    mix_done = gate(gate_mix, mix_blocks);
    // The statistics take their place when attention has its own, whose clusters of few rows need
    // sixteen multiprocessors at once. The first layer's first kernel starts when what came before
    // has ended.
    const bool mix_first = !is_v4 && (first || parts.mix_place == MixPlace::first);
    const auto launch_statistics = [&](bool programmatic) {
      if (is_v4 && !own_mix) return;
      run(HopKernel::mix, [&] {
        const int blocks = parts.mix_blocks > 0 ? parts.mix_blocks : 32;
        return launch_mix(mix, blocks, false, programmatic, stream);
      });
    };
    if (mix_first) launch_statistics(!first);
    run(HopKernel::qkv, [&] { return launch_front_qkv(front, mix_first || !first, stream); });
    if (rows > kHopRows) {
      run(HopKernel::latent, [&] { return launch_front_latent(front, true, stream); });
    }
    beside_before(HopKernel::q);
    run(HopKernel::q, [&] { return launch_front_q(front, true, stream); });
    AttentionParams attention = {};
    attention.model = model;
    attention.plain_o = layer.plain_o;
    attention.norm_eps = step.norm_eps;
    attention.num_rows = rows;
    attention.num_heads = heads;
    attention.q = memory.q;
    attention.hop = hop;
    attention.packets = memory.packets;
    attention.sink = layer.sink;
    attention.positions = step.positions;
    attention.rope = layer.rope;
    attention.window = layer.window;
    attention.extra = layer.extra;
    attention.window_idx = layer.window_idx;
    attention.extra_idx = layer.extra_idx;
    attention.num_window = layer.num_window;
    attention.num_extra = layer.num_extra;
    attention.extra_ratio = layer.extra_ratio;
    attention.kv_slots = step.kv_slots;
    attention.o = memory.o;
    attention.o_scale = memory.o_scale;
    if (rows > kHopRows) {
      attention.before = front.done;
      attention.keys_done = front.keys_done;
    }
    if (layer.beside != nullptr) {
      const BesideLayer& beside = *layer.beside;
      attention.selected = beside_done(beside);
      attention.tagged = beside.index != nullptr && beside.index->hop.port != nullptr;
      if (beside.keys) attention.rows_done = beside.compress.done;
      // V4's entries may be stored after the selection.
      if (beside.index != nullptr && beside.pool != nullptr) {
        attention.rows_done =
            (beside.entry_pool != nullptr ? beside.entry_pool : beside.pool)->done;
      }
    }
    attention.done = gate(gate_attention, attention_blocks(attention));
    beside_before(HopKernel::attention);
    run(HopKernel::attention, [&] { return launch_sparse_attention(attention, true, stream); });
    if (!mix_first) launch_statistics(true);
    OprojParams oproj = {};
    oproj.model = model;
    oproj.num_rows = rows;
    oproj.num_groups = groups;
    oproj.hop = hop;
    oproj.packets = memory.packets;
    oproj.o = memory.o;
    oproj.o_scale = memory.o_scale;
    oproj.wo_a = layer.wo_a;
    oproj.wo_b = layer.wo_b;
    oproj.u_codes = memory.u_codes;
    oproj.u_scale = memory.u_scale;
    oproj.published = true;
    oproj.port = step.port;
    oproj.exchange_index = 2 * layer_idx;
    oproj.before = attention.done;
    oproj.u_done = gate(gate_u, oproj_a_blocks(model, rows, groups));
    if (oproj_is_few(oproj)) {
      run(HopKernel::oproj_a, [&] { return launch_oproj_few(oproj, true, stream); });
    } else {
      run(HopKernel::oproj_a, [&] { return launch_oproj_a(oproj, true, stream); });
      run(HopKernel::oproj_b, [&] { return launch_oproj_b(oproj, true, stream); });
    }
    const Gate done = gate(parts.experts ? gate_x : gate_done, exchange_blocks);
    x_ready = done;
    run(HopKernel::exchange, [&] {
      if (is_v4) {
        ExchangeMixParams exchange = mixing_of(0, layer.ffn_hc, layer.ffn_norm);
        if (parts.experts) exchange.later_fn = layer.next_hc.fn;
        exchange.before = before;
        exchange.mix_before = own_mix ? mix.done
                              : first ? gate_of(step, 0, gate_input_mix, mix_blocks)
                                      : gate_of(step, layer_idx - 1, gate_ffn_mix, mix_blocks);
        exchange.done = done;
        if (layer.beside != nullptr) exchange.x_read = beside_done(*layer.beside);
        exchange.mix_done = parts.experts ? mix_done : gate(gate_ffn_mix, mix_blocks);
        return launch_exchange_mix(exchange, true, stream);
      }
      ExchangeNormParams exchange = exchanging(0, layer.ffn_norm);
      exchange.mix_done = mix_done;
      exchange.done = done;
      return launch_exchange_norm(exchange, hidden, true, stream);
    });
  }
  if (error != cudaSuccess || !parts.experts) return error;
  Gate ffn_mix_done = {};
  const int idle = parts.idle_sms > 0 ? parts.idle_sms : kIdleSms;
  const bool second_statistics = parts.second_statistics && !is_v4;
  if (second_statistics) {
    const MixParams mix = mixing(1, layer.ffn_hc, word_ffn_ticket, gate_ffn_mix);
    ffn_mix_done = mix.done;
    run(HopKernel::mix,
        [&] { return launch_mix(mix, idle, true, !first || parts.attention, stream); });
  }
  lowlat::fused::MoeArgs experts = {};
  experts.rows = rows;
  experts.routing = layer.hash_ids != nullptr ? lowlat::fused::MoeRouting::table
                                              : lowlat::fused::MoeRouting::gate;
  experts.ids = layer.hash_ids;
  experts.x = memory.x;
  experts.image_rows = step.image_rows;
  experts.w = layer.experts;
  experts.out_ids = step.expert_ids;
  experts.fault = {memory.abort_words, step.port.status, step.port.tp_rank, tp_size,
                   step.port.budget_ns};
  experts.quads = step.port;
  experts.quads.kernel = hop.id + static_cast<std::uint32_t>(HopKernel::experts);
  experts.quads_index = 2 * layer_idx + 1;
  experts.before = x_ready;
  experts.workspace = memory.experts;
  experts.idle_sms = second_statistics ? idle : 0;
  ExchangeNormParams exchange = {};
  if (!is_v4) {
    exchange = exchanging(1, layer.next_norm);
    exchange.mix_done = ffn_mix_done;
    exchange.tile_order = lowlat::fused::moe_tile_order(step.shape, layer.experts.layout, rows);
    exchange.done = gate(gate_done, exchange_blocks);
    if (layer.memory_follows) {
      exchange.done = layer_gate(memory, layer_idx, kLayerExchanged, exchange_blocks);
      exchange.x_packets = nullptr;
    }
  }
  const bool ends_layer = parts.experts_exchange && lowlat::fused::moe_ends_layer(step.shape, rows);
  if (ends_layer) experts.exchange = exchange;
  run(HopKernel::experts, [&] {
    return static_cast<cudaError_t>(lowlat::fused::launch_moe_region(
        step.shape, experts, stream, !first || parts.attention || second_statistics));
  });
  if (ends_layer) return error;
  run(HopKernel::second_exchange, [&] {
    if (is_v4) {
      ExchangeMixParams mix = mixing_of(1, layer.next_hc, layer.next_norm);
      mix.few_blocks = parts.few_exchange_blocks && rows > 1;
      if (has_own_mix(step)) mix.mix_out = unread_mix(step, mix);
      mix.before = x_ready;
      mix.mix_before = mix_done;
      mix.done = gate(gate_done, exchange_blocks);
      mix.mix_done = gate(gate_ffn_mix, mix_blocks);
      return launch_exchange_mix(mix, true, stream);
    }
    return launch_exchange_norm(exchange, hidden, true, stream);
  });
  return error;
}

}  // namespace lowlat::nvidia::fused
