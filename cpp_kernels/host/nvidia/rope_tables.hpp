// host/nvidia/rope_tables.hpp: rotary frequencies for kernels, made by the host as on every platform.
#pragma once

namespace lowlat::host::cuda {

// Radians a position, pair by pair.
struct RopeFrequencies {
  float values[32];
};

// Of layers with a compressed set, or without.
RopeFrequencies rope_frequencies(bool compressed);

}  // namespace lowlat::host::cuda
