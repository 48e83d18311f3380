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
// fp4 pairs [E, N, K / 2] with ue8m0 scales [E, N, K / 32]; or, of ModelWeights::marlin_inner above
// 0, LOWLAT_MARLIN's tiles.
struct Fp4Weight {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

// Of a sublayer: [24, 4 H], [24], [3]. Of V4's head: [4, 4 H], [4], [1].
struct HcWeights {
  const float* fn;
  const float* base;
  const float* scale;
};

// D is the key's width: 512, of V4's index 128. N is D, but 2 D at V4's ratio 4.
struct CompressorWeights {
  const std::uint16_t* wkv;    // bf16 [N, H]
  const std::uint16_t* wgate;  // bf16 [N, H], not at V4.1's ratio 1
  const float* ape;            // [ratio, N], V4
  const std::uint16_t* norm;   // bf16 [D]
};

// Of the index over compressed keys; what a layer does not have is NULL.
struct IndexerWeights {
  const std::uint16_t* wk;            // bf16 [128, 512], V4.1's kv sources
  const std::uint16_t* k_norm;        // bf16 [128], V4.1's kv sources
  CompressorWeights compressor;       // V4's ratio 4
  Fp8Weight wq_b;                     // [heads * 128, q_lora], index sources
  const std::uint16_t* weights_proj;  // bf16 [heads, H], index sources
};

// Of n-gram memory before a layer, D wide a column.
struct EngramWeights {
  Fp8Weight wkv;                  // [5 H, 24 D]
  const std::uint16_t* q_weight;  // bf16 [4, H]
  const std::uint16_t* k_weight;  // bf16 [4, H]
  Fp8Weight embed;                // [rows of this rank's columns, D], a scale per 32
  std::int64_t first_row;         // id of row 0 of `embed`
};

// A rank's part of a layer, and the caches that it writes; what it does not have is NULL.
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
  const std::uint16_t* wo_a_bf16;  // the same in bf16, or NULL
  Fp8Weight wo_b;                  // [H, groups_local * o_lora]
  CompressorWeights compressor;
  IndexerWeights indexer;
  EngramWeights engram;
  const std::uint16_t* gate;    // bf16 [E, H]
  const float* gate_bias;       // [E], not in hash layers
  const float* gate_bias_vl;    // [E], V4.1's target layers: rows of image tokens
  const std::int32_t* tid2eid;  // [V, k], hash layers: the experts of each token
  Fp4Weight w1, w3, w2;         // [E, I_local, H] twice, [E, H, I_local]; Marlin: both in w1
  Fp8Weight shared_w1, shared_w3, shared_w2;
  // Pools.
  std::uint8_t* kv_swa;           // KV_PAGED
  std::uint8_t* kv_extra;         // KV_PAGED, kv sources
  std::uint8_t* kv_index;         // INDEX_PAGED, V4.1's kv sources, V4's ratio 4
  std::uint8_t* kv_index_scales;  // of V4.1's where its pages are split (lowlat_pools), else NULL
  // Projections of tokens whose group or block is not whole, values, then scores. V4.1's ratio 2
  // [max_batch, ring, 2, 512]; V4's ratio 128 [max_batch, 16 ring, 1024], ratio 4 [num_pages, ring,
  // 2048].
  float* kv_state;
  float* kv_index_state;  // [num_pages, ring, 512], V4's ratio 4: the same of the index's keys
};

// A rank's part of a model.
struct ModelWeights {
  int marlin_inner;  // this rank's expert width as Marlin's tiles have it, 0: checkpoint layout
  const std::uint16_t* embed;     // bf16 [V_local, H]
  const std::uint16_t* head;      // bf16 [V_local, H]
  const std::uint16_t* norm;      // bf16 [H]
  HcWeights hc_head;              // V4
  const std::int64_t* token_map;  // [V]
  LayerWeights layers[LOWLAT_MAX_LAYERS];
  // Draft.
  LayerWeights stages[LOWLAT_MAX_DRAFT_STAGES];
  Fp8Weight main_proj;                // [H, features * H]
  const std::uint16_t* main_norm;     // bf16 [H]
  const std::uint16_t* draft_norm;    // bf16 [H]
  HcWeights draft_hc_head;            // V4
  const std::uint16_t* markov_embed;  // bf16 [V, R]
  const std::uint16_t* markov_head;   // bf16 [V_local, R]
};

}  // namespace lowlat::persistent
