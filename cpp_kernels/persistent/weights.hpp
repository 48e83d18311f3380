// persistent/weights.hpp: what one rank's tensors are called inside a schedule. Pointers only; the
// engine owns the memory and lowlat_model_bind checked dtype, shape and layout.
#pragma once

#include <cstdint>

#include "lowlat/kernels.h"

namespace lowlat::persistent {

// e4m3 [N, K] with ue8m0 scales [N / block, K / block].
struct Fp8Weight {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};
// fp4 pairs [E, N, K / 2] with ue8m0 scales [E, N, K / 32].
struct Fp4Weight {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

struct HcWeights {
  const float* fn;     // [24, 4 H]
  const float* base;   // [24]
  const float* scale;  // [3]
};

struct CompressorWeights {
  const std::uint16_t* wkv;    // bf16 [512, H]
  const std::uint16_t* wgate;  // bf16 [512, H], ratio 2 only
  const std::uint16_t* norm;   // bf16 [512]
};

struct IndexerWeights {
  const std::uint16_t* wk;            // bf16 [128, 512], kv sources
  const std::uint16_t* k_norm;        // bf16 [128], kv sources
  Fp8Weight wq_b;                     // [heads * 128, q_lora], index sources
  const std::uint16_t* weights_proj;  // bf16 [heads, H], index sources
};

struct EngramWeights {
  Fp8Weight wkv;                  // [5 H, 24 D]
  const std::uint16_t* q_weight;  // bf16 [4, H]
  const std::uint16_t* k_weight;  // bf16 [4, H]
  Fp8Weight embed;                // [rows of this rank's columns, D], a scale per 32
  std::int64_t first_row;         // id of row 0 of `embed`
};

struct LayerWeights {
  lowlat_layer plan;
  HcWeights hc_attn, hc_ffn;
  const std::uint16_t* attn_norm;  // bf16 [H]
  const std::uint16_t* ffn_norm;   // bf16 [H]
  Fp8Weight wq_a;                  // [q_lora, H]
  Fp8Weight wkv;                   // [512, H]
  const std::uint16_t* q_norm;     // bf16 [q_lora]
  const std::uint16_t* kv_norm;    // bf16 [512]
  Fp8Weight wq_b;                  // [heads_local * 512, q_lora]
  const float* attn_sink;          // [heads_local]
  Fp8Weight wo_a;                  // [groups_local * o_lora, group_input]
  Fp8Weight wo_b;                  // [H, groups_local * o_lora]
  CompressorWeights compressor;
  IndexerWeights indexer;
  EngramWeights engram;
  const std::uint16_t* gate;  // bf16 [E, H]
  const float* gate_bias;     // [E]
  const float* gate_bias_vl;  // [E], target layers: rows of image tokens
  Fp4Weight w1, w3, w2;       // [E, I_local, H] twice, [E, H, I_local]
  Fp8Weight shared_w1, shared_w3, shared_w2;
  // Pools.
  std::uint8_t* kv_swa;    // KV_PAGED
  std::uint8_t* kv_extra;  // KV_PAGED, kv sources
  std::uint8_t* kv_index;  // INDEX_PAGED, kv sources
  float* kv_state;         // [max_batch, ring, 2, 512], ratio 2 sources: kv, then score
};

struct ModelWeights {
  const std::uint16_t* embed;     // bf16 [V_local, H]
  const std::uint16_t* head;      // bf16 [V_local, H]
  const std::uint16_t* norm;      // bf16 [H]
  const std::int64_t* token_map;  // [V]
  LayerWeights layers[LOWLAT_MAX_LAYERS];
  // Draft.
  LayerWeights stages[LOWLAT_MAX_DRAFT_STAGES];
  Fp8Weight main_proj;                // [H, features * H]
  const std::uint16_t* main_norm;     // bf16 [H]
  const std::uint16_t* draft_norm;    // bf16 [H]
  const std::uint16_t* markov_embed;  // bf16 [V, R]
  const std::uint16_t* markov_head;   // bf16 [V_local, R]
};

}  // namespace lowlat::persistent
