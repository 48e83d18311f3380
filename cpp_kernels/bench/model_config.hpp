// bench/model_config.hpp: configurations of models (lowlat_model_config) as the published ones have
// them, for programs and tests that make models of other sizes or depths.
#pragma once

#include <cstdint>

#include "lowlat/kernels.h"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::bench {

// What no size changes, the same in both models.
inline lowlat_model_config published_rules() {
  lowlat_model_config c{};
  c.struct_bytes = sizeof c;
  c.head_dim = shape::kHeadDim;
  c.rope_dim = shape::kRopeDim;
  c.index_dim = shape::kIndexDim;
  c.sinkhorn_iters = 20;
  c.hc_eps = 1e-6f;
  c.swiglu_limit = 10.0f;
  c.routed_scaling = 1.5f;
  c.rope_theta = 10000.0;
  c.compress_rope_theta = 160000.0;
  c.yarn_factor = 16.0;
  c.yarn_beta_fast = 32.0;
  c.yarn_beta_slow = 1.0;
  c.yarn_original_positions = 65536.0;
  c.max_positions = 1048576;
  c.candidate_layer = -1;
  c.image_token = -1;
  return c;
}

inline lowlat_model_config v41_rules() {
  lowlat_model_config c = published_rules();
  c.kind = LOWLAT_V41;
  c.experts_per_token = shape::Dsv41Flash<1>::kExpertsPerToken;
  c.scale_block = shape::Dsv41Flash<1>::kScaleBlock;
  c.norm_eps = 1e-20f;
  return c;
}
inline lowlat_model_config v4_rules() {
  lowlat_model_config c = published_rules();
  c.kind = LOWLAT_V4;
  c.experts_per_token = shape::Dsv4Flash<1>::kExpertsPerToken;
  c.scale_block = shape::Dsv4Flash<1>::kScaleBlock;
  c.norm_eps = 1e-6f;
  return c;
}

// What follows `rules` in sizes, of a shape's rank as a model of its own.
template <class Shape>
lowlat_model_config sizes_of(lowlat_model_config rules) {
  lowlat_model_config c = rules;
  c.hidden = Shape::kHidden;
  c.vocab = Shape::kVocabLocal;
  c.num_heads = Shape::kNumHeadsLocal;
  c.q_lora = Shape::kQLora;
  c.o_groups = Shape::kGroupsLocal;
  c.o_lora = Shape::kOLora;
  c.window = Shape::kWindow;
  c.num_experts = Shape::kNumExperts;
  c.moe_intermediate = Shape::kIntermediateLocal;
  c.index_heads = Shape::kIndexHeads;
  c.index_topk = Shape::kIndexTopk;
  return c;
}
// Layers of the published models; of kShare ranks, one rank's part.
template <int kShare>
lowlat_model_config v41_sizes() {
  return sizes_of<shape::Dsv41Flash<kShare>>(v41_rules());
}
template <int kShare>
lowlat_model_config v4_sizes() {
  return sizes_of<shape::Dsv4Flash<kShare>>(v4_rules());
}

// So many layers of V4.1: two of a window alone, one that selects, users of what it selects; no
// n-gram memory.
inline void set_plain_layers(lowlat_model_config& config, int num_layers) {
  config.num_layers = num_layers;
  for (int i = 0; i < num_layers; ++i) {
    config.layers[i] =
        i < 2 ? lowlat_layer{0, -1, -1, -1, -1, 0} : lowlat_layer{2, 2, 2, -1, -1, 0};
  }
  config.candidate_layer = -1;
  config.num_engrams = 0;
}

}  // namespace lowlat::bench
