// host/op/rope_tables.hpp: radians a position, pair by pair. Both models have the same two tables.
#pragma once

#include "platform/scalar.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {

// Of layers without a compressed set.
inline scalar::stages::RopeTable window_rope_table() {
  return scalar::stages::rope_table(10000.0f, {});
}

// Of layers with one.
inline scalar::stages::RopeTable compressed_rope_table() {
  constexpr double kBase = 160000.0;
  const auto ramp = scalar::stages::yarn_ramp(kBase, 16.0, 32.0, 1.0, 65536.0);
  return scalar::stages::rope_table(static_cast<float>(kBase), ramp);
}

}  // namespace lowlat::host
