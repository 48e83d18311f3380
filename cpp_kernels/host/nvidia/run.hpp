// host/nvidia/run.hpp: the door between the table of operations and CUDA. Includes no CUDA header,
// and is there in builds with CUDA only (LOWLAT_HAVE_CUDA).
#pragma once

#include "host/op/registry.hpp"

namespace lowlat::host {

// Runs a checked call on the first device and fills its outputs. Throws OpError for a size that the
// kernels have not, LOWLAT_UNSUPPORTED where no device can run them, LOWLAT_FAULT when CUDA fails.
void run_on_nvidia(const OpSpec& op, const OpArgs& args);

}  // namespace lowlat::host
