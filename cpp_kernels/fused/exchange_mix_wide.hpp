// fused/exchange_mix_wide.hpp: exchange_mix.hpp's kernel for clusters that have several rows each.
// Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include "fused/exchange_mix.hpp"

namespace lowlat::nvidia::fused {

// launch_exchange_mix calls it, where there are more rows than clusters.
cudaError_t launch_exchange_mix_wide(const ExchangeMixParams& params, bool programmatic,
                                     cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
