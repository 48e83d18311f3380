// hc_mix_partial_sm90: pieces of the hyper-connections' statistics, for few rows.
//
// Math         of 512 of a row's 4H values x: Σ fn[i]·x for the 24 rows of fn, and Σ x²
// Shapes       R [T,4,H] bf16 · fn [24,4H] fp32 · partial [4H/512,T,32] fp32 · 1 ≤ T ≤ 48
// Rounding     none but fp32 sums
// Bytes        H = 5120: read 1.97 MB of fn and T·41 kB
// Floor        0.42 us at 4.65 TB/s
// Launch       a block of 256 threads a piece; fn is on its way before the residual is waited for
// Ordering     none between blocks
// Determinism  fixed summation tree
// Meaning      reference/hc.cpp; with the sum of mix.cuh: pre, post, comb rel_l2 ≤ 2e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/front_launch.cuh"
#include "fused/mix.cuh"

namespace lowlat::nvidia::fused {
namespace {

__global__ void __launch_bounds__(256)
    hc_mix_partial_sm90(const __grid_constant__ MixParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<MixShared*>(memory);
  sm90::launch_dependents();
  mix_load(shared, params, static_cast<int>(blockIdx.x));
  sm90::wait_for_predecessors();
  mix_compute(shared, params, static_cast<int>(blockIdx.x));
}

}  // namespace

cudaError_t launch_mix_partial(const MixParams& params, bool programmatic, cudaStream_t stream) {
  return launch_kernel(hc_mix_partial_sm90, dim3(mix_parts(params.hidden)), 256, sizeof(MixShared),
                       1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused
