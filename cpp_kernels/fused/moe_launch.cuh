// fused/moe_launch.cuh: how the kernels of the mixture-of-experts region are launched. Host side.
#pragma once

#include "fused/moe_parts.cuh"
// The parts come first.
#include <cuda_runtime_api.h>

namespace lowlat::nvidia::fused {

namespace moe {

using lowlat::fused::MoeLayout;
using lowlat::fused::MoeShape;

// A block an SM that is not to stay idle, of `kernel` with layout L and what else it takes.
// cudaErrorInvalidValue where the device cannot hold them at once.
template <class L, class... More>
cudaError_t launch(void (*kernel)(MoeArgs, Rules, More...), const MoeArgs& args, const Rules& rules,
                   cudaStream_t stream, bool overlapped, const More&... more) {
  int device = 0, num_sms = 0, max_smem = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  num_sms -= args.idle_sms;
  if (num_sms < kScorers || num_sms > L::kMaxGrid || max_smem < L::kSmemBytes) {
    return cudaErrorInvalidValue;
  }
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute edge = {};
  edge.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  edge.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_sms));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kSmemBytes;
  config.stream = stream;
  config.attrs = &edge;
  config.numAttrs = overlapped ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args, rules, more...);
}

namespace wide {

inline constexpr int kBandColumns = 64;  // of y, a block's

// Of moe_wide_mxfp4_sm90: as the functions of fused/moe.hpp.
std::size_t workspace_bytes(MoeShape shape);
cudaError_t init(MoeShape shape, void* workspace, cudaStream_t stream);
cudaError_t launch(MoeShape shape, const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                   bool overlapped);

}  // namespace wide
}  // namespace moe
}  // namespace lowlat::nvidia::fused
