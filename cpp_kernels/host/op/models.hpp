// host/op/models.hpp: the numbers that an operation takes from the model, not from its arrays.
#pragma once

#include <cstdint>
#include <string_view>

#include "platform/scalar.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {

inline constexpr std::int64_t kMaxPositions = 1048576;
inline constexpr int kCandidateBlock = 8;  // positions of a candidate block (v41)

// What differs between the models.
struct ModelRules {
  double norm_eps;    // of every RMS norm and of the hyper-connections' statistic
  int scale_block;    // rows and columns of a block-fp8 weight that share a scale
  int draft_experts;  // experts a token of a draft stage; 6 of a target layer in both
};

// `model` is "v4" or "v41": the registry has refused any other.
inline const ModelRules& model_rules(std::string_view model) {
  static constexpr ModelRules kV4 = {1e-6, 128, 6};
  static constexpr ModelRules kV41 = {1e-20, 32, 3};
  return model == "v4" ? kV4 : kV41;
}

// Radians a position in layers with a compressed set, the same in both models.
inline scalar::stages::RopeTable compressed_rope_table() {
  constexpr double kBase = 160000.0;
  const auto ramp = scalar::stages::yarn_ramp(kBase, 16.0, 32.0, 1.0, 65536.0);
  return scalar::stages::rope_table(static_cast<float>(kBase), ramp);
}

}  // namespace lowlat::host
