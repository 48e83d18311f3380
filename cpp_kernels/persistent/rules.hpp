// persistent/rules.hpp: where the arithmetic of the two models differs. Sizes are in the shape;
// which layer does what is in its plan.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include "stages/gate.hpp"
#include "stages/hc.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

struct ModelRules {
  stages::HcStatistic hc_statistic;  // of the norm after a combine
  stages::GateRule gate_rule;
  stages::GateSum target_gate_sum;  // a draft's is GateSum::draft in both
  // A combine takes the weights of its own sublayer's statistics; else those of the sublayer
  // before, and of the head those of the last ffn. Own ones have a head with an fn of its own.
  bool own_pre;
  bool head_norm;    // each head of q is normed before it is rotated
  bool quantized_o;  // the target's wo_a takes block-fp8 input; else, and of every draft, bf16
  // Compressed keys pool whole blocks (stages/pool.hpp); else stages/compress.hpp.
  bool pooled_keys;
  bool late_features;  // features are taken after a target layer; else before it
};

inline constexpr ModelRules kV41Rules = {
    .hc_statistic = stages::HcStatistic::rounded,
    .gate_rule = stages::GateRule::v41,
    .target_gate_sum = stages::GateSum::target,
    .own_pre = false,
    .head_norm = false,
    .quantized_o = false,
    .pooled_keys = false,
    .late_features = false,
};
inline constexpr ModelRules kV4Rules = {
    .hc_statistic = stages::HcStatistic::unrounded,
    .gate_rule = stages::GateRule::v4,
    .target_gate_sum = stages::GateSum::draft,
    .own_pre = true,
    .head_norm = true,
    .quantized_o = true,
    .pooled_keys = true,
    .late_features = true,
};

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
