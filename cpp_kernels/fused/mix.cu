// hc_mix_sm90: the statistics of the hyper-connections, for few rows.
//
// Math         m = fn·x / sqrt(mean x² + ε) of a row's 4H values x, by pieces of 512; pre, post and
//              comb from m (Sinkhorn with reciprocals good to a unit in the last place)
// Shapes       R [T,4,H] bf16 · fn [24,4H] fp32 · mix [T,32] fp32 · 1 ≤ T ≤ 48
// Rounding     none but fp32 sums
// Bytes        H = 5120: read 1.97 MB of fn and T·41 kB
// Floor        0.42 us at 4.65 TB/s
// Launch       a block of 256 threads a piece; fn is on its way before the residual is waited for
// Ordering     gates (exchange_gate.cuh): all pieces, then the blocks that make a row's parameters
// Determinism  fixed summation tree
// Meaning      reference/hc.cpp. Bound: pre, post, comb rel_l2 ≤ 2e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/front_launch.cuh"
#include "fused/mix.cuh"

namespace lowlat::nvidia::fused {
namespace {

struct MixLaunch {
  MixParams params;
  Gate before;
};

__global__ void __launch_bounds__(256) hc_mix_sm90(const __grid_constant__ MixLaunch launch) {
  extern __shared__ __align__(128) unsigned char memory[];
  sm90::launch_dependents();
  mix_block(*reinterpret_cast<MixShared*>(memory), launch.params, launch.before,
            static_cast<int>(blockIdx.x));
}

}  // namespace

cudaError_t launch_mix(const MixParams& params, const Gate& before, bool programmatic,
                       cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  return launch_kernel(hc_mix_sm90, dim3(mix_parts(params.hidden)), 256, sizeof(MixShared), 1,
                       programmatic, stream, MixLaunch{params, before});
}

}  // namespace lowlat::nvidia::fused
