// bench/resident_case.cuh: steps of a model by the resident schedule, for the programs that time
// them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bench/plain_layers.hpp"
#include "host/nvidia/device.hpp"

namespace lowlat::bench {

static __device__ std::uint64_t resident_mixed(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// Random values of a dtype, small enough that no layer overflows.
static __global__ void fill_dtype(void* out, std::uint32_t dtype, std::int64_t count,
                                  std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t bits =
        resident_mixed(seed + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    const float value = (static_cast<float>(bits >> 40) * 0x1p-24f - 0.5f) * 0.05f;
    switch (dtype) {
      case LOWLAT_F32: static_cast<float*>(out)[i] = value; break;
      case LOWLAT_BF16:
        static_cast<std::uint16_t*>(out)[i] =
            static_cast<std::uint16_t>(__float_as_uint(value) >> 16);
        break;
      case LOWLAT_E4M3: static_cast<std::uint8_t*>(out)[i] = bits & 0xbfu; break;
      case LOWLAT_FP4X2: static_cast<std::uint8_t*>(out)[i] = bits & 0xffu; break;
      case LOWLAT_UE8M0: static_cast<std::uint8_t*>(out)[i] = 118u + bits % 3u; break;
      default: break;
    }
  }
}

// TP4's share of V4.1-Flash with random weights.
class ResidentShard : public PlainLayers {
 public:
  using Launch = lowlat_status (*)(lowlat_model*, const lowlat_step*, void*);

  explicit ResidentShard(int num_layers)
      : PlainLayers("nvidia:0", resident_config(v41_sizes<4>(), num_layers), fill) {}

  std::vector<float> logits(int rows, Launch launch) {
    lowlat_step step = step_of(rows);
    step.num_logit_rows = rows;
    std::vector<float> out(static_cast<std::size_t>(rows) * vocab());
    void* memory = nullptr;
    must(lowlat_model_alloc(model(), LOWLAT_MEMORY_DEVICE, out.size() * sizeof out[0], &memory));
    step.logits = static_cast<float*>(memory);
    must(launch(model(), &step, nullptr));
    must(lowlat_synchronize(model(), kResidentBudgetNs));
    must(lowlat_model_read(model(), out.data(), memory, out.size() * sizeof out[0]));
    return out;
  }

  // Microseconds of each of so many replays, ascending.
  std::vector<double> times(int rows, Launch launch, int repeats) {
    const lowlat_step step = step_of(rows);
    const host::cuda::Stream stream;
    const host::cuda::Graph graph(stream.get(),
                                  [&] { must(launch(model(), &step, stream.get())); });
    cudaEvent_t begin, end;
    host::cuda::check(cudaEventCreate(&begin), "event");
    host::cuda::check(cudaEventCreate(&end), "event");
    std::vector<double> out;
    for (int i = 0; i < repeats + 3; ++i) {
      host::cuda::check(cudaEventRecord(begin, stream.get()), "record");
      graph.launch(stream.get());
      host::cuda::check(cudaEventRecord(end, stream.get()), "record");
      stream.wait();
      float ms = 0.0f;
      host::cuda::check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
      if (i >= 3) out.push_back(ms * 1e3);  // the first ones fetch code and tables
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    require_no_fault();
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  static void fill(lowlat_model*, int tensor_idx, const lowlat_tensor_spec& spec, void* data) {
    fill_dtype<<<1024, 256>>>(data, spec.dtype, count_of(spec),
                              static_cast<std::uint64_t>(tensor_idx) << 40);
    host::cuda::check(cudaGetLastError(), "fill");
    host::cuda::check(cudaDeviceSynchronize(), "fill");
  }
};

// Between the logits of a step by the resident schedule alone and with the fused experts, which
// round in their own way: rel_l2 of each row, ascending.
inline std::vector<double> logit_errors(ResidentShard& shard, int rows) {
  const auto want = shard.logits(rows, lowlat_plain_step_launch);
  const auto got = shard.logits(rows, lowlat_step_launch);
  std::vector<double> errors;
  for (std::size_t first = 0; first < want.size();
       first += static_cast<std::size_t>(shard.vocab())) {
    double error = 0.0, norm = 0.0;
    for (std::size_t i = first; i < first + static_cast<std::size_t>(shard.vocab()); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    errors.push_back(std::sqrt(error / norm));
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}
inline constexpr double kLogitBound = 0.05;  // of the median row; eight layers carry errors on

}  // namespace lowlat::bench
