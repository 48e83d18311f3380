// fused/moe.cu: launches and instances of moe_region_mxfp4_sm90.
#include "fused/moe.cuh"

#include <cuda_runtime_api.h>

#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::fused {
namespace {

namespace moe = lowlat::nvidia::fused::moe;
namespace stages = lowlat::nvidia::stages;

struct Device {
  int num_sms, max_smem;
};

cudaError_t current_device(Device* out) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&out->num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&out->max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// [chunks][rows][128 bytes] of a row-major matrix, copied by boxes of a tile's rows and all chunks
// to places that eight rows' reads of 16 bytes find in different banks.
cudaError_t tile_map(const std::uint8_t* codes, int rows, int row_bytes, CUtensorMap* out) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const auto chunks = static_cast<cuuint64_t>(row_bytes / 128);
  const cuuint64_t sizes[3] = {128, static_cast<cuuint64_t>(rows), chunks};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), 128};
  const cuuint32_t box[3] = {128, moe::kTileRows, static_cast<cuuint32_t>(chunks)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult made =
      encode(out, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<std::uint8_t*>(codes), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class L>
cudaError_t launch(const MoeArgs& args, const moe::Rules& rules, cudaStream_t stream,
                   bool overlapped) {
  Device device;
  cudaError_t status = current_device(&device);
  if (status != cudaSuccess) return status;
  device.num_sms -= args.idle_sms;
  if (device.num_sms < moe::kBands || device.num_sms > L::kMaxGrid ||
      device.max_smem < L::kSmemBytes) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = moe::moe_region_mxfp4_sm90<L>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
  if (status != cudaSuccess) return status;
  moe::TileMaps maps;
  constexpr int kRows = L::kExperts * L::kInner;
  status = tile_map(args.w.w1.codes, kRows, L::kHidden / 2, &maps.gate);
  if (status == cudaSuccess) status = tile_map(args.w.w3.codes, kRows, L::kHidden / 2, &maps.up);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute edge = {};
  edge.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  edge.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(device.num_sms));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kSmemBytes;
  config.stream = stream;
  config.attrs = &edge;
  config.numAttrs = overlapped ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args, rules, maps);
}

// Warps that multiply. Eight and twenty are slower (docs/bench), but two ranks' bands of V4.1 leave
// the ring too short for sixteen.
template <class S>
constexpr int kConsumers = S::kHidden > 4096 && S::kTpSize == 2 ? 8 : 16;
// Up to so many rows, several launches of eight rows beat one that gathers rows: measured for V4.1
// (5120 columns) at 12 and 24 rows; for V4 they do not.
template <class S>
constexpr int kSplitRows = S::kHidden > 4096 ? 24 : 8;

// The two kernels of a shape: up to 8 rows, and up to 64. Their workspaces lie one after the other.
template <class S>
struct Instances {
  using Few = moe::Layout<S, false, kConsumers<S>>;
  using Many = moe::Layout<S, true, kConsumers<S>>;
  static constexpr std::size_t kManyOffset = (Few::kWorkspaceBytes + 255) / 256 * 256;
  static constexpr std::size_t kBytes = kManyOffset + Many::kWorkspaceBytes;

  static cudaError_t run(MoeArgs args, const moe::Rules& rules, cudaStream_t stream,
                         bool overlapped) {
    if (args.rows <= kSplitRows<S>) return split(args, rules, stream, overlapped);
    args.workspace = static_cast<unsigned char*>(args.workspace) + kManyOffset;
    return launch<Many>(args, rules, stream, overlapped);
  }
  // Launches of at most eight rows, as equal as can be.
  static cudaError_t split(const MoeArgs& args, moe::Rules rules, cudaStream_t stream,
                           bool overlapped) {
    const int parts = (args.rows + Few::kMaxRows - 1) / Few::kMaxRows;
    const int part_rows = (args.rows + parts - 1) / parts;
    for (int row = 0; row < args.rows; row += part_rows) {
      MoeArgs part = args;
      part.rows = args.rows - row < part_rows ? args.rows - row : part_rows;
      const auto skip = [row](auto*& pointer, int width) {
        if (pointer != nullptr) pointer += static_cast<std::size_t>(row) * width;
      };
      skip(part.x, Few::kHidden);
      skip(part.image_rows, 1);
      skip(part.ids, Few::kSlots);
      skip(part.weights, Few::kSlots);
      skip(part.out_ids, Few::kSlots);
      skip(part.out_weights, Few::kSlots);
      skip(part.out, Few::kHidden);
      if (row > 0) part.before = {};  // the workspace is the launch's before
      rules.first_row = row;
      const cudaError_t status = launch<Few>(part, rules, stream, overlapped || row > 0);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
  static cudaError_t init(void* workspace, cudaStream_t stream) {
    auto* bytes = static_cast<unsigned char*>(workspace);
    cudaError_t status = cudaMemsetAsync(workspace, 0, kBytes, stream);
    if (status == cudaSuccess) {
      status = cudaMemsetAsync(bytes + Few::kHiddenOffset, 0xff, 2 * Few::kHiddenBytes, stream);
    }
    if (status == cudaSuccess) {
      status = cudaMemsetAsync(bytes + kManyOffset + Many::kHiddenOffset, 0xff,
                               2 * Many::kHiddenBytes, stream);
    }
    return status;
  }
  static std::int64_t box_packets(int rows) {
    return static_cast<std::int64_t>(rows) * moe::kBands * Few::kPacketsPerBand;
  }
};

// Calls `f` with the instances of a shape.
template <class F>
auto with_shape(MoeShape shape, F f) {
  switch (shape) {
    case MoeShape::v41_tp2: return f(Instances<shape::Dsv41Flash<2>>());
    case MoeShape::v4_tp2: return f(Instances<shape::Dsv4Flash<2>>());
    case MoeShape::v4_tp4: return f(Instances<shape::Dsv4Flash<4>>());
    case MoeShape::v41_draft_tp4: return f(Instances<shape::Dsv41FlashDraft<4>>());
    case MoeShape::v41_tp4: break;
  }
  return f(Instances<shape::Dsv41Flash<4>>());
}

}  // namespace

std::size_t moe_workspace_bytes(MoeShape shape) {
  return with_shape(shape, [](auto instances) { return decltype(instances)::kBytes; });
}

int moe_workspace_init(MoeShape shape, void* workspace, void* stream) {
  return with_shape(shape, [&](auto instances) {
    return static_cast<int>(instances.init(workspace, static_cast<cudaStream_t>(stream)));
  });
}

std::int64_t moe_box_packets(MoeShape shape, int rows) {
  return with_shape(shape, [&](auto instances) { return instances.box_packets(rows); });
}

int launch_moe_region(MoeShape shape, const MoeArgs& args, void* stream, bool overlapped) {
  if (args.rows < 1 || args.rows > 64) return cudaErrorInvalidValue;
  const bool v4 = shape == MoeShape::v4_tp2 || shape == MoeShape::v4_tp4;
  // The routers of V4 and of drafts divide by 1 where a sum is 0; a hash layer's and V4.1's target
  // add 1e-20.
  const bool target =
      (!v4 && shape != MoeShape::v41_draft_tp4) || args.routing == MoeRouting::table;
  const moe::Rules rules = {v4 ? stages::GateRule::v4 : stages::GateRule::v41,
                            target ? stages::GateSum::target : stages::GateSum::draft, 0};
  return with_shape(shape, [&](auto instances) {
    return static_cast<int>(
        instances.run(args, rules, static_cast<cudaStream_t>(stream), overlapped));
  });
}

}  // namespace lowlat::fused
