// host/nvidia/model.hpp: a model on a CUDA device.
#pragma once

#include <memory>
#include <string>

#include "host/model.hpp"

namespace lowlat::host::cuda {

// `platform` is "nvidia" or "nvidia:N". Throws LOWLAT_UNSUPPORTED where there is no driver, no such
// device or no kernel for it.
std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting);

}  // namespace lowlat::host::cuda
