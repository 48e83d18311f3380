// fused/moe_launch.cuh: how the kernels of the mixture-of-experts region are launched. Host side.
#pragma once

#include "fused/moe_parts.cuh"
// The parts come first.
#include <cuda_runtime_api.h>

namespace lowlat::nvidia::fused {

namespace moe {

using lowlat::fused::MoeLayout;
using lowlat::fused::MoeShape;

inline constexpr int kLineBytes = 128;

// [lines of a row][rows][128 bytes] of a row-major matrix, copied by boxes of so many rows and
// lines to places that eight rows' reads of 16 bytes find in different banks.
inline cudaError_t tile_map(const std::uint8_t* codes, int rows, int row_bytes, int box_rows,
                            int box_lines, CUtensorMap* out) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const cuuint64_t sizes[3] = {kLineBytes, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(row_bytes / kLineBytes)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), kLineBytes};
  const cuuint32_t box[3] = {kLineBytes, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_lines)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult made =
      encode(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<std::uint8_t*>(codes), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The maps of a launch whose boxes have so many rows and lines.
template <class L>
cudaError_t tile_maps(const MoeArgs& args, int box_rows, int box_lines, TileMaps* out) {
  constexpr int kRows = L::kExperts * L::kInner, kRowBytes = L::kHidden / 2;
  const cudaError_t status =
      tile_map(args.w.w1.codes, kRows, kRowBytes, box_rows, box_lines, &out->gate);
  if (status != cudaSuccess) return status;
  return tile_map(args.w.w3.codes, kRows, kRowBytes, box_rows, box_lines, &out->up);
}

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
