// host/nvidia/linear.cuh: y = x W^T for few rows, any weights that stages/linear.hpp or
// stages/experts.hpp knows. A plain kernel: a block takes a weight row at a time.
#pragma once

#include "host/nvidia/common.cuh"
#include "stages/experts.hpp"
#include "stages/linear.hpp"

namespace lowlat::host::cuda {

inline constexpr int kNumWarps = kThreads / plat::kWarpLanes;
// Weights that one thread expands at a time: a multiple of every format's group, and of 128.
inline constexpr int kPart = 128;

// The same weights from column `first` on, a multiple of kPart.
LOWLAT_DEVICE stages::Bf16Weights columns_from(const stages::Bf16Weights& w, int first) {
  return {w.codes + first, w.stride};
}
LOWLAT_DEVICE stages::E4m3Weights<stages::ScaleF32> columns_from(
    const stages::E4m3Weights<stages::ScaleF32>& w, int first) {
  return {w.codes + first, w.stride, {w.scale.values + first / w.block, w.scale.stride}, w.block};
}
LOWLAT_DEVICE stages::Fp4Weights columns_from(const stages::Fp4Weights& w, int first) {
  return {w.codes + first / 2, w.code_stride, w.scales + first / 32, w.scale_stride};
}

// out fp32 [k]: row n. The block calls; the caller syncs.
template <class Weights>
LOWLAT_DEVICE void expand_weights(float* out, const Weights& weights, int n, int k) {
  for (int first = kPart * plat::thread_idx(); first < k; first += kPart * kThreads) {
    const int width = k - first < kPart ? k - first : kPart;
    columns_from(weights, first).expand(out + first, n, width);
  }
}

// A warp's dot product of n pairs, in every lane: lanes split n, then a tree.
LOWLAT_DEVICE float warp_dot(const float* a, const float* b, int n) {
  float sum = 0.0f;
  for (int i = plat::thread_idx() % plat::kWarpLanes; i < n; i += plat::kWarpLanes) {
    sum += a[i] * b[i];
  }
  return plat::warp_sum(sum);
}

// sink(t, n, y), by one lane. x fp32 [num_rows, k]. Shared memory: k floats.
template <class Weights, class Sink>
__global__ void linear_kernel(const float* x, int num_rows, int k, Weights weights, int num_outputs,
                              Sink sink) {
  extern __shared__ float shared[];
  const int warp = plat::thread_idx() / plat::kWarpLanes;
  const bool first_lane = plat::thread_idx() % plat::kWarpLanes == 0;
  for (int n = static_cast<int>(blockIdx.x); n < num_outputs; n += static_cast<int>(gridDim.x)) {
    expand_weights(shared, weights, n, k);
    plat::block_sync();
    for (int t = warp; t < num_rows; t += kNumWarps) {
      const float y = warp_dot(x + std::int64_t{t} * k, shared, k);
      if (first_lane) sink(t, n, y);
    }
    plat::block_sync();
  }
}

// Blocks of a grid that strides over weight rows; more would only wait.
inline constexpr int kMaxBlocks = 8 * 1024;

template <class Weights, class Sink>
void launch_linear(const DeviceCall& call, const float* x, int num_rows, int k,
                   const Weights& weights, int num_outputs, const Sink& sink) {
  constexpr int kMost = static_cast<int>(kMaxSharedBytes / sizeof(float));
  require(k <= kMost, "a row of weights has " + std::to_string(k) +
                          " columns; platform nvidia takes at most " + std::to_string(kMost));
  launch(call, linear_kernel<Weights, Sink>, dim3(std::min(num_outputs, kMaxBlocks)),
         static_cast<std::size_t>(k) * sizeof(float), x, num_rows, k, weights, num_outputs, sink);
}

// Sinks: rows of `pitch` elements.
struct StoreF32 {
  float* out;
  std::int64_t pitch;
  LOWLAT_DEVICE void operator()(int t, int n, float y) const { out[t * pitch + n] = y; }
};
struct StoreBf16 {
  std::uint16_t* out;
  std::int64_t pitch;
  LOWLAT_DEVICE void operator()(int t, int n, float y) const {
    out[t * pitch + n] = stages::to_bf16(y);
  }
};

// Rows as linear_kernel takes them, in memory of the call: bf16 as it is, or quantised a group.
float* expanded_rows(DeviceCall& call, const std::uint16_t* x, std::int64_t count);
float* quantized_rows(DeviceCall& call, const std::uint16_t* x, std::int64_t count, int group);

}  // namespace lowlat::host::cuda
