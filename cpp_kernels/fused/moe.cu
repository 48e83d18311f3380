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

template <class L>
cudaError_t launch(const MoeArgs& args, const moe::Rules& rules, cudaStream_t stream,
                   bool overlapped) {
  Device device;
  cudaError_t status = current_device(&device);
  if (status != cudaSuccess) return status;
  device.num_sms -= args.idle_sms;
  if (device.num_sms < moe::kScorers || device.num_sms > L::kMaxGrid ||
      device.max_smem < L::kSmemBytes) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = moe::moe_region_mxfp4_sm90<L>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
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
  return cudaLaunchKernelEx(&config, kernel, args, rules);
}

// The two kernels of a shape: up to 8 rows, and up to 64. Their workspaces lie one after the other.
template <class S, MoeLayout kLayout>
struct Instances {
  using Few = moe::Layout<S, 8, kLayout>;
  using Many = moe::Layout<S, 64, kLayout>;
  static constexpr std::size_t kManyOffset = (Few::kWorkspaceBytes + 255) / 256 * 256;
  static constexpr std::size_t kBytes = kManyOffset + Many::kWorkspaceBytes;

  static cudaError_t run(MoeArgs args, const moe::Rules& rules, cudaStream_t stream,
                         bool overlapped) {
    if (args.rows <= Few::kMaxRows) return launch<Few>(args, rules, stream, overlapped);
    args.workspace = static_cast<unsigned char*>(args.workspace) + kManyOffset;
    return launch<Many>(args, rules, stream, overlapped);
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
    return static_cast<std::int64_t>(rows) * Few::kBands * Few::kPacketsPerBand;
  }
};

template <class S>
using Checkpoint = Instances<S, MoeLayout::checkpoint>;
template <class S>
using Marlin = Instances<S, MoeLayout::marlin>;

// Calls `f` with the instances of a shape and a layout that exist.
template <class F>
auto with_shape(MoeShape shape, MoeLayout layout, F f) {
  using V41 = shape::Dsv41Flash<4>;
  using V4 = shape::Dsv4Flash<4>;
  const bool marlin = layout == MoeLayout::marlin;
  switch (shape) {
    case MoeShape::v41_tp2: return f(Checkpoint<shape::Dsv41Flash<2>>());
    case MoeShape::v4_tp2: return f(Checkpoint<shape::Dsv4Flash<2>>());
    case MoeShape::v4_tp4: return marlin ? f(Marlin<V4>()) : f(Checkpoint<V4>());
    case MoeShape::v41_tp4: break;
  }
  return marlin ? f(Marlin<V41>()) : f(Checkpoint<V41>());
}

// One workspace serves both layouts: what is made ready lies at the same places.
template <class S>
constexpr bool kAlike = Checkpoint<S>::kManyOffset == Marlin<S>::kManyOffset;
static_assert(kAlike<shape::Dsv41Flash<4>> && kAlike<shape::Dsv4Flash<4>>);

}  // namespace

std::size_t moe_workspace_bytes(MoeShape shape) {
  std::size_t most = 0;
  for (const MoeLayout layout : {MoeLayout::checkpoint, MoeLayout::marlin}) {
    const std::size_t bytes =
        with_shape(shape, layout, [](auto instances) { return decltype(instances)::kBytes; });
    most = bytes > most ? bytes : most;
  }
  return most;
}

int moe_workspace_init(MoeShape shape, void* workspace, void* stream) {
  return with_shape(shape, MoeLayout::checkpoint, [&](auto instances) {
    return static_cast<int>(instances.init(workspace, static_cast<cudaStream_t>(stream)));
  });
}

std::int64_t moe_box_packets(MoeShape shape, MoeLayout layout, int rows) {
  return with_shape(shape, layout, [&](auto instances) { return instances.box_packets(rows); });
}

int launch_moe_region(MoeShape shape, const MoeArgs& args, void* stream, bool overlapped) {
  if (args.rows < 1 || args.rows > 64) return cudaErrorInvalidValue;
  // Its kernels are complete and end as an illegal instruction on the device: not found yet why.
  if (args.w.layout == MoeLayout::marlin) return cudaErrorNotSupported;
  const bool v4 = shape == MoeShape::v4_tp2 || shape == MoeShape::v4_tp4;
  // V4's router divides by 1 where a sum is 0; a hash layer's and V4.1's target add 1e-20.
  const bool target = !v4 || args.routing == MoeRouting::table;
  const moe::Rules rules = {v4 ? stages::GateRule::v4 : stages::GateRule::v41,
                            target ? stages::GateSum::target : stages::GateSum::draft};
  return with_shape(shape, args.w.layout, [&](auto instances) {
    return static_cast<int>(
        instances.run(args, rules, static_cast<cudaStream_t>(stream), overlapped));
  });
}

}  // namespace lowlat::fused
