// host/op/models.hpp: the numbers that an operation takes from the model, not from its arrays.
// The rules are named in the words of the platform that was included before, else of the host's.
#pragma once

#include <cstdint>
#include <string_view>

#ifndef LOWLAT_PLATFORM
#include "platform/scalar.hpp"
#endif
// The platform comes before every schedule.
#include "persistent/rules.hpp"

namespace lowlat::LOWLAT_PLATFORM::models {

inline constexpr std::int64_t kTargetExperts = 6;  // a token, of a target layer

// What differs between the models: a schedule's arithmetic, and what its configuration says.
struct ModelRules : persistent::ModelRules {
  double norm_eps;    // of the RMS norms and the hyper-connections
  int scale_block;    // rows and columns of a block-fp8 weight's scale
  int draft_experts;  // experts a token of a draft stage
};

inline constexpr ModelRules kV4Rules = {persistent::kV4Rules, 1e-6, 128, 6};
inline constexpr ModelRules kV41Rules = {persistent::kV41Rules, 1e-20, 32, 3};

// `model` is "v4" or "v41": the registry has refused any other.
inline const ModelRules& model_rules(std::string_view model) {
  return model == "v4" ? kV4Rules : kV41Rules;
}

// The sum rule of a router that chooses k experts.
inline stages::GateSum gate_sum(std::string_view model, std::int64_t k) {
  return k == kTargetExperts ? model_rules(model).target_gate_sum : stages::GateSum::draft;
}

}  // namespace lowlat::LOWLAT_PLATFORM::models

namespace lowlat::host {

using LOWLAT_PLATFORM::models::gate_sum;
using LOWLAT_PLATFORM::models::kTargetExperts;
using LOWLAT_PLATFORM::models::model_rules;
using LOWLAT_PLATFORM::models::ModelRules;

inline constexpr std::int64_t kMaxPositions = 1048576;
inline constexpr int kCandidateBlock = 8;  // positions of a candidate block (v41)
inline constexpr double kHcEps = 1e-6;
inline constexpr int kSinkhornIters = 20;
inline constexpr float kRoutedScaling = 1.5f;
inline constexpr float kSwigluLimit = 10.0f;
inline constexpr std::int64_t kImageToken = 129264;  // of the published model
inline constexpr std::int64_t kPadToken = 2;         // what a blocked token counts as

}  // namespace lowlat::host
