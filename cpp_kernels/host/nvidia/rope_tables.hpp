// host/nvidia/rope_tables.hpp: rotary frequencies for kernels, made by the host as on every
// platform.
#pragma once

#include "shape/runtime_shape.hpp"

namespace lowlat::host::cuda {

// Radians a position, pair by pair, of layers with a compressed set, or without.
void rope_frequencies(bool compressed, float (&out)[shape::kRopeDim / 2]);

}  // namespace lowlat::host::cuda
