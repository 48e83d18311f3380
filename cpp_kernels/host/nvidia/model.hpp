// host/nvidia/model.hpp: a model on a CUDA device.
#pragma once

#include <memory>
#include <string>

#include "host/model.hpp"

namespace lowlat::host::cuda {

// `platform` is "nvidia" and, after colons, in any order: a device's number; "fused" or
// "persistent", the schedule of target steps (left out: fused where it is built for the model);
// "loop", for measurements: a rank alone, whose peers are itself (ExchangeRegion::loop_back). Two
// schedules, or two numbers, are refused.
// Throws LOWLAT_UNSUPPORTED where there is no driver, no such device, no kernel for it, or no fused
// step where one is asked for.
std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting);

}  // namespace lowlat::host::cuda
