// host/op/models.hpp: the numbers that an operation takes from the model, not from its arrays.
#pragma once

#include <cstdint>
#include <string_view>

#include "platform/scalar.hpp"
#include "stages/gate.hpp"
#include "stages/hc.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {

inline constexpr std::int64_t kMaxPositions = 1048576;
inline constexpr int kCandidateBlock = 8;  // positions of a candidate block (v41)

// What differs between the models.
struct ModelRules {
  double norm_eps;                           // of the RMS norms and the hyper-connections
  int scale_block;                           // rows and columns of a block-fp8 weight's scale
  int draft_experts;                         // experts a token of a draft stage
  scalar::stages::HcStatistic hc_statistic;  // of the norm after a combine
  scalar::stages::GateRule gate_rule;
  scalar::stages::GateSum target_gate_sum;  // a draft's is GateSum::draft in both
};

inline constexpr ModelRules kV4Rules = {1e-6,
                                        128,
                                        6,
                                        scalar::stages::HcStatistic::unrounded,
                                        scalar::stages::GateRule::v4,
                                        scalar::stages::GateSum::draft};
inline constexpr ModelRules kV41Rules = {1e-20,
                                         32,
                                         3,
                                         scalar::stages::HcStatistic::rounded,
                                         scalar::stages::GateRule::v41,
                                         scalar::stages::GateSum::target};

// `model` is "v4" or "v41": the registry has refused any other.
inline const ModelRules& model_rules(std::string_view model) {
  return model == "v4" ? kV4Rules : kV41Rules;
}

// Radians a position in layers with a compressed set, the same in both models.
inline scalar::stages::RopeTable compressed_rope_table() {
  constexpr double kBase = 160000.0;
  const auto ramp = scalar::stages::yarn_ramp(kBase, 16.0, 32.0, 1.0, 65536.0);
  return scalar::stages::rope_table(static_cast<float>(kBase), ramp);
}

}  // namespace lowlat::host
