// host/rope_frequencies.hpp: the rotary frequencies of a model's layers, made once on the host, so
// that every platform turns by the same bits.
#pragma once

#include "lowlat/kernels.h"
#include "shape/runtime_shape.hpp"

namespace lowlat::host {

// Radians a position, pair by pair.
struct RopeFrequencies {
  float window[shape::kRopeDim / 2];      // of layers without a compressed set, and of drafts
  float compressed[shape::kRopeDim / 2];  // of the others
};
RopeFrequencies rope_frequencies(const lowlat_model_config& config);

}  // namespace lowlat::host
