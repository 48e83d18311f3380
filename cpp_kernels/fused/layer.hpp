// fused/layer.hpp: one plain decoder layer of V4.1-Flash on one rank as a chain of kernels:
// attention sublayer, exchange, mixture of experts, exchange (of few rows by the experts' own
// blocks). Compressor and index, where a layer has them, stand in its chain (layer_beside.hpp); the
// keys of another layer's are an input here. Every C++ compiler reads it.
//
// Rows       1 .. 48 (kMaxFusedRows). Ranks 2 or 4, as MoeShape says, each on a device of its own,
//            or one whose mailboxes are looped back to it.
// Order      launch_layer_begin, launch_layer_input (or a kernel of the caller that sends x), then
//            layers 0, 1 and on, on one stream; the next step begins when this one's kernels have
//            ended. Capturable; nothing is allocated.
// Residency  kernels are launched before their predecessors have ended and wait for packets or at
//            gates while they hold their multiprocessors' memory. That cannot starve whom they wait
//            for: a kernel is launched when every block of its predecessor has begun (only then may
//            all of them have let it start), so all blocks of all earlier kernels are resident or
//            over, and no block ever waits for one of a later kernel. Inside a kernel blocks wait
//            for each other in a cluster (resident together), and in the output projection of few
//            rows and the experts (one block a multiprocessor; the launch refuses a device that
//            cannot hold them). The experts leave idle_sms multiprocessors to the statistics, whose
//            blocks wait for nobody.
// Ranks      of one process capture their steps (or launch one alone) on every device before the
//            first of them waits for another: a kernel's first use loads its code, which may wait
//            for kernels that run.
// Faults     every wait has the port's budget; see exchange_hop.cuh, exchange_gate.cuh and moe.cuh.
//            After one, residual and x of the step are NaN on every rank that saw it; before the
//            next step call layer_recover() (device idle) on all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "fused/attention.hpp"
#include "fused/exchange.hpp"
#include "fused/exchange_mix.hpp"
#include "fused/front.hpp"
#include "fused/index.hpp"
#include "fused/layer_beside.hpp"
#include "fused/mix.hpp"
#include "fused/moe.hpp"
#include "fused/oproj.hpp"
#include "fused/place.hpp"

namespace lowlat::nvidia::fused {

// One layer on one rank. Pointers are device memory; formats as the structs of each kernel say.
struct PlainLayer {
  Fp8Weights wq_a, wkv, wq_b, wo_a, wo_b;
  const std::uint16_t* q_norm;
  const std::uint16_t* kv_norm;
  const std::uint16_t* ffn_norm;  // bf16 [H]
  const std::uint16_t*
      next_norm;  // bf16 [H]: attn_norm of the layer after this one, or the last norm
  const float* sink;
  RopeFrequencies rope;
  HyperWeights attn_hc, ffn_hc;
  // V4, whose layers combine by statistics that the exchange before makes: attn_hc of the layer
  // after this one (of the last: any). attn_hc is read of few rows, for post and comb alone.
  HyperWeights next_hc;
  // V4: wo_a takes attention's output as it is, as in a draft's layers and where an engine hands
  // wo_a over in bf16; else quantised.
  bool plain_o;
  // V4's hash layers: i32 [T, 6], the experts of each row's token. NULL: routed by scores.
  const std::int32_t* hash_ids;
  lowlat::fused::MoeWeights experts;
  // Stored keys, and which of them each row sees.
  KvPages window, extra;
  const std::int32_t* window_idx;  // [T, num_window]
  const std::int32_t* extra_idx;   // [T, num_extra]
  int num_window, num_extra;
  int extra_ratio;  // see attention.hpp
  // Kernels that write the extra set or select from it, during the launch; NULL: all is there.
  const BesideLayer* beside;
  // True: n-gram memory is applied to this layer's result (launch_engram_apply). It waits at the
  // gate kLayerExchanged, sends x and opens the gate kLayerDone instead of the last exchange.
  bool memory_follows;
};

// What a rank's layers share. All of it lies in one piece of device memory, see layer_memory().
struct LayerMemory {
  std::uint16_t* residual[2];  // bf16 [T, 4, H]: a layer starts and ends with [0]
  std::uint16_t* x;            // bf16 [T, H]: normed, of the experts
  HopBuffers packets;
  ExchangePort* port;           // a copy of the step's, for kernels
  std::uint32_t** abort_words;  // [kMaxRanks], the port's
  std::uint32_t* gates;         // [layers][kLayerGates], 128 bytes each
  int num_gate_words;
  void* experts;  // workspace
  // Of more than kHopRows rows.
  std::uint16_t *qa, *kv, *q, *o;
  std::uint8_t *x_codes, *latent_codes, *u_codes;
  float *x_scale, *latent_scale, *qa_squares, *o_scale, *u_scale, *turns;
  // Statistics: of each sublayer.
  float* mix_partial[2];
  float* mix[2];
  std::int64_t bytes;  // of it all
};
// Of a layer's kLayerGates: that of its result; the first that no kernel of a plain layer uses, for
// kernels beside it; that of the last exchange where memory_follows; and that of the n-gram
// product, of the layer that begins with its result.
inline constexpr int kLayerDone = 9, kLayerFreeGate = 10, kLayerExchanged = 15, kLayerMemory = 17;
// The exchange before layer 1 where a caller counts its layers from 1, as of an embedding.
inline constexpr int kLayerEmbedIndex = 1;

// A gate of a layer, 0 when the step begins. number: one of the above.
Gate layer_gate(const LayerMemory& memory, int layer_idx, int number, std::uint32_t blocks);

// Where an index beside the layer finds the query latent of a step of `num_rows` rows, and its
// gate.
void set_index_latent(const LayerMemory& memory, FusedModel model, int num_rows, int layer_idx,
                      IndexParams* index);

// `base` NULL: for the bytes alone. max_rows: of the widest step. Aligned to 256 bytes.
LayerMemory layer_memory(void* base, lowlat::fused::MoeShape shape, int tp_size, int max_rows,
                         int num_layers);

// Makes the memory ready, once: zeros, the workspace of the experts, the port's copy. The caller
// waits for the stream before another uses the memory.
cudaError_t layer_init(const LayerMemory& memory, lowlat::fused::MoeShape shape,
                       const ExchangePort& port, cudaStream_t stream);
// After a fault, on every rank, the device idle and the ranks' words and epochs agreed: as
// layer_init, but for the residual and x.
cudaError_t layer_recover(const LayerMemory& memory, lowlat::fused::MoeShape shape,
                          const ExchangePort& port, cudaStream_t stream);

// A step of one rank.
struct LayerStep {
  LayerMemory memory;
  ExchangePort port;
  lowlat::fused::MoeShape shape;
  int num_rows;
  const std::int32_t* positions;  // [T]
  const std::int32_t* kv_slots;   // [T]; -1: a row of padding
  float norm_eps, hc_eps;
  int sinkhorn_iters;
  std::int32_t* expert_ids;  // [T, 6] of the layer that runs, or NULL
  // [T] not 0: a row of an image's token, whose router takes gate_bias_vl; NULL: none is.
  const std::uint8_t* image_rows;
};

// V4: the gate of the x that a layer begins with.
Gate layer_x_gate(const LayerStep& step, int layer_idx);

// The step's first kernel. num_exchanges: of the last step, two a layer.
cudaError_t launch_layer_begin(const LayerStep& step, std::uint64_t* step_epoch,
                               std::uint64_t num_exchanges, cudaStream_t stream);

// The step's first x, bf16 [T, H] normed and in memory.x: to what the first layer reads.
cudaError_t launch_layer_input(const LayerStep& step, cudaStream_t stream);
// V4: from memory.residual[0], by the first layer's statistics and norm.
cudaError_t launch_layer_input(const LayerStep& step, const HyperWeights& attn_hc,
                               const std::uint16_t* attn_norm, cudaStream_t stream);
// V4, layers counted from 1: from exchange kLayerEmbedIndex, whose sum and `zeros` (bf16
// [T, 4, H]) become the streams by memory.mix[1].
cudaError_t launch_layer_embedding(const LayerStep& step, const std::uint16_t* zeros,
                                   const HyperWeights& attn_hc, const std::uint16_t* attn_norm,
                                   cudaStream_t stream);

// When the first statistics take their place on the device: before [q_a, kv] or after attention.
enum class MixPlace { measured, first, after_attention };

// Which kernels a layer holds and how they share the device. The default is the layer; anything
// else is for measurements and tests.
struct LayerParts {
  bool attention = true, experts = true, second_statistics = true;
  // Blocks of the first statistics; multiprocessors that the experts leave to the second, which
  // have as many blocks (a power of two). 0: what was measured best. idle_sms stays what it is for
  // all steps between two layer_init or layer_recover.
  int mix_blocks = 0, idle_sms = 0;
  MixPlace mix_place = MixPlace::measured;
  // Called before each launch, with its HopKernel: another kernel, or a wait, may go there.
  const std::function<void(HopKernel)>* between = nullptr;
  BesideOrder beside_order = BesideOrder::measured;
  // V4's last exchange, of more than one row: by few blocks (ExchangeMixParams::few_blocks).
  bool few_exchange_blocks = true;
  // V4.1: the experts' own blocks do the last exchange, where they can (moe_ends_layer); there is
  // no HopKernel::second_exchange then.
  bool experts_exchange = true;
};

// One layer: layer_idx counts from 0 within the step (exchanges 2 layer_idx and the next). Returns
// cudaErrorInvalidValue for sizes that were not built and for a device that cannot hold the
// experts' grid at once.
cudaError_t launch_plain_layer(const PlainLayer& layer, const LayerStep& step, int layer_idx,
                               const LayerParts& parts, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
