// fused/attention_wide.hpp: attention of more than kHopRows rows whose blocks have several tiles of
// keys, see attention.hpp.
#pragma once

#include "fused/attention.hpp"

namespace lowlat::nvidia::fused {

// launch_sparse_attention of 9 .. 48 rows, whose sizes it has checked; blocks_per_row 2 .. 16.
cudaError_t launch_attention_wide(const AttentionParams& params, int blocks_per_row,
                                  bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
