// host/nvidia/linear.cuh: y = x W^T for few rows: the stage over ranges of weight rows.
#pragma once

#include "host/nvidia/common.cuh"
#include "stages/linear.hpp"

namespace lowlat::host::cuda {

// Weight rows that a block takes at a time.
inline constexpr int kRowsOfBlock = stages::DotTeam<Block>::kNum;

// sink(t, n, y) of every row t and weight row n, once each. x fp32 [num_rows, k].
template <class Weights, class Sink>
__global__ void linear_kernel(const float* x, int num_rows, int k, Weights weights, int num_outputs,
                              Sink sink) {
  const int begin = kRowsOfBlock * static_cast<int>(blockIdx.x);
  const int end = begin + kRowsOfBlock < num_outputs ? begin + kRowsOfBlock : num_outputs;
  stages::linear<Block>(x, k, num_rows, k, weights, begin, end, nullptr, sink);
}

template <class Weights, class Sink>
void launch_linear(const DeviceCall& call, const float* x, int num_rows, int k,
                   const Weights& weights, int num_outputs, const Sink& sink) {
  launch(call, linear_kernel<Weights, Sink>, dim3((num_outputs + kRowsOfBlock - 1) / kRowsOfBlock),
         x, num_rows, k, weights, num_outputs, sink);
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
