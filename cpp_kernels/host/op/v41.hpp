// host/op/v41.hpp: the numbers of V4.1 that an operation takes from the model, not from its arrays.
#pragma once

#include <cstdint>

#include "platform/scalar.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {

inline constexpr double kNormEps = 1e-20;
inline constexpr std::int64_t kMaxPositions = 1048576;
inline constexpr int kCandidateBlock = 8;  // positions of a candidate block

// Radians a position in layers with a compressed set.
inline scalar::stages::RopeTable compressed_rope_table() {
  constexpr double kBase = 160000.0;
  const auto ramp = scalar::stages::yarn_ramp(kBase, 16.0, 32.0, 1.0, 65536.0);
  return scalar::stages::rope_table(static_cast<float>(kBase), ramp);
}

}  // namespace lowlat::host
