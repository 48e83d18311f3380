// host/op/models.hpp: the numbers that an operation takes from the model, not from its arrays.
#pragma once

#include <cstdint>
#include <string_view>

#include "platform/scalar.hpp"
// The platform comes before every schedule.
#include "persistent/rules.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {

inline constexpr std::int64_t kMaxPositions = 1048576;
inline constexpr int kCandidateBlock = 8;  // positions of a candidate block (v41)

// What differs between the models: the arithmetic of a schedule, and what a configuration gives one.
struct ModelRules : scalar::persistent::ModelRules {
  double norm_eps;    // of the RMS norms and the hyper-connections
  int scale_block;    // rows and columns of a block-fp8 weight's scale
  int draft_experts;  // experts a token of a draft stage
};

inline constexpr ModelRules kV4Rules = {scalar::persistent::kV4Rules, 1e-6, 128, 6};
inline constexpr ModelRules kV41Rules = {scalar::persistent::kV41Rules, 1e-20, 32, 3};

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
