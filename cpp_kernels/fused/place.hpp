// fused/place.hpp: how status words and stamps name a kernel or a gate of a step, see
// lowlat_status_words.place. Every C++ compiler reads it.
#pragma once

#include <cstdint>

#include "lowlat/kernels.h"

namespace lowlat::nvidia::fused {

inline constexpr int kLayerKernels = LOWLAT_PLACE_KERNELS, kLayerGates = LOWLAT_PLACE_GATES;

// Of layer `layer_idx`'s first kernel (HopKernel) and first gate; the next ones follow.
constexpr std::uint32_t kernel_place(int layer_idx) {
  return static_cast<std::uint32_t>(kLayerKernels * layer_idx);
}
constexpr std::uint32_t gate_place(int layer_idx) {
  return LOWLAT_PLACE_GATE + static_cast<std::uint32_t>(kLayerGates * layer_idx);
}
// A step counts its layers from 1.
static_assert(kernel_place(LOWLAT_MAX_LAYERS + 1) <= LOWLAT_PLACE_GATE &&
                  gate_place(LOWLAT_MAX_LAYERS + 1) <= 2 * LOWLAT_PLACE_GATE,
              "a place tells gates from kernels");

}  // namespace lowlat::nvidia::fused
