// fused/moe_launch.cuh: how the kernels of the mixture-of-experts region are launched. Host side.
#pragma once

#include "fused/moe_parts.cuh"
// The parts come first.
#include <cuda_runtime_api.h>

namespace lowlat::nvidia::fused {

namespace moe {

using lowlat::fused::MoeShape;

inline constexpr int kLineBytes = 128;

// A row-major matrix of bytes for tensor copies of boxes of so many rows and bytes.
struct BoxedMatrix {
  const std::uint8_t* data;
  std::int64_t rows;
  int row_bytes, box_rows, box_bytes;  // a row's and a box's are multiples of 16
  // A box lies as [lines of 128 bytes][rows][128], its 16-byte units exchanged so that eight rows'
  // reads of 16 bytes find different banks, and coordinates are {0, row, line}. Otherwise it lies
  // as [rows][bytes], and coordinates are {word of 4 bytes, row, 0}.
  bool in_lines;
};
inline cudaError_t tile_map(const BoxedMatrix& m, CUtensorMap* out) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const auto rows = static_cast<cuuint64_t>(m.rows),
             row_bytes = static_cast<cuuint64_t>(m.row_bytes);
  const auto box_rows = static_cast<cuuint32_t>(m.box_rows),
             box_bytes = static_cast<cuuint32_t>(m.box_bytes);
  const cuuint64_t sizes[3] = {m.in_lines ? kLineBytes : row_bytes / 4, rows,
                               m.in_lines ? row_bytes / kLineBytes : 1};
  const cuuint64_t strides[2] = {row_bytes, m.in_lines ? kLineBytes : rows * row_bytes};
  const cuuint32_t box[3] = {m.in_lines ? kLineBytes : box_bytes / 4, box_rows,
                             m.in_lines ? box_bytes / kLineBytes : 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult made = encode(
      out, m.in_lines ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 3,
      const_cast<std::uint8_t*>(m.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      m.in_lines ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
// All of them, to as many maps.
template <std::size_t N>
cudaError_t tile_maps(const BoxedMatrix (&matrices)[N], CUtensorMap* out) {
  cudaError_t status = cudaSuccess;
  for (std::size_t i = 0; i < N && status == cudaSuccess; ++i) {
    status = tile_map(matrices[i], out + i);
  }
  return status;
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

namespace tiles {

// Of moe_region_mxfp4_sm90 on Marlin's tiles; its workspace and sizes are the checkpoint's.
cudaError_t launch(MoeShape shape, const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                   bool overlapped);
// See moe_box_column and moe_tile_order.
int column_of(MoeShape shape, int position);
bool sends_positions(MoeShape shape);

}  // namespace tiles
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
