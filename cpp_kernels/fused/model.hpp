// fused/model.hpp: the models whose attention sublayers have fused kernels, and what differs
// between them. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::nvidia::fused {

// V4-Flash's target layers: scales of 128 by 128 blocks, heads of q normed, attention's output
// quantised for wo_a, and a sublayer's input combined by its own statistics.
enum class FusedModel : std::uint8_t { v41, v4 };

// launch.operator()<M>() with the model's shape, as sizes that ranks do not divide are read from.
template <class Launch>
auto with_model(FusedModel model, Launch launch) {
  if (model == FusedModel::v4) return launch.template operator()<shape::Dsv4Flash<1>>();
  return launch.template operator()<shape::Dsv41Flash<1>>();
}

// Values of an activation that share a scale.
constexpr int activation_group(FusedModel model) {
  return model == FusedModel::v4 ? shape::Dsv4Flash<1>::kScaleBlock
                                 : shape::Dsv41Flash<1>::kScaleBlock;
}

}  // namespace lowlat::nvidia::fused
