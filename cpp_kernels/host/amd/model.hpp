// host/amd/model.hpp: a model on an AMD GPU, by the HIP runtime. It never ran on one: docs/amd.md
// says what stands for that.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/amd/hip.hpp"
#include "host/model.hpp"

namespace lowlat::host::hip {

// `platform` is "amd" or "amd:N". Throws LOWLAT_UNSUPPORTED where there is no HIP runtime, no such
// device or no code object for it among `objects`, and for a hosted model.
std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting,
                                  const std::vector<CodeObject>& objects);

}  // namespace lowlat::host::hip
