// bench/resident_case.cuh: steps of a model by the resident schedule, for the programs that time
// them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bench/model_config.hpp"
#include "host/nvidia/device.hpp"
#include "lowlat/kernels.h"

namespace lowlat::bench {

inline constexpr int kResidentPosition = 4000;  // of a step's first row

inline void must_be_ok(lowlat_status status) {
  if (status != LOWLAT_OK) throw std::runtime_error(lowlat_last_error());
}

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

inline lowlat_model_config resident_config(int num_layers) {
  lowlat_model_config c = v41_sizes<4>();
  c.num_layers = num_layers;
  for (int i = 0; i < num_layers; ++i) {
    c.layers[i] = i < 2 ? lowlat_layer{0, -1, -1, -1, -1, 0} : lowlat_layer{2, 2, 2, -1, -1, 0};
  }
  c.tp_size = 1;
  for (const int width : {1, 2, 4, 6, 8, 12, 24, 48}) c.widths[c.num_widths++] = width;
  c.max_batch = 8;
  c.max_rows = 48;
  c.page_size = 256;
  c.num_pages = 8 * (kResidentPosition / 256 + 1);
  c.state_ring = 8;
  c.wait_budget_ns = 1'000'000'000;
  return c;
}

// A model of so many layers by the resident schedule: TP4's share of V4.1-Flash with random
// weights, its sums going round through its own mailbox.
class ResidentShard {
 public:
  using Launch = lowlat_status (*)(lowlat_model*, const lowlat_step*, void*);

  explicit ResidentShard(int num_layers) : config_(resident_config(num_layers)) {
    must_be_ok(lowlat_model_create("nvidia:0", &config_, &model_));
    for (int i = 0; i < lowlat_model_num_tensors(model_); ++i) bind(i);
    must_be_ok(lowlat_model_ready(model_));
  }
  ~ResidentShard() { lowlat_model_destroy(model_); }
  ResidentShard(const ResidentShard&) = delete;
  ResidentShard& operator=(const ResidentShard&) = delete;

  // A verify step of requests of six rows, else a decode step.
  lowlat_step step_of(int rows) {
    const int per_request = rows % 6 == 0 ? 6 : 1, batch = rows / per_request;
    const int stride = config_.num_pages / config_.max_batch;
    std::vector<std::int32_t> tokens, positions, requests, slots, pages, state;
    for (int q = 0; q < batch; ++q) {
      for (int p = 0; p < stride; ++p) pages.push_back(q * stride + p);
      state.push_back(q);
      for (int i = 0; i < per_request; ++i) {
        const int position = kResidentPosition + i;
        tokens.push_back((q * 977 + i * 131 + 7) % config_.vocab);
        positions.push_back(position);
        requests.push_back(q);
        slots.push_back((q * stride + position / config_.page_size) * config_.page_size +
                        position % config_.page_size);
      }
    }
    lowlat_step step{};
    step.struct_bytes = sizeof step;
    step.mode = per_request == 1 ? LOWLAT_DECODE : LOWLAT_TARGET_VERIFY;
    step.num_rows = rows;
    step.batch_size = batch;
    step.tokens_per_request = per_request;
    step.page_table_stride = stride;
    step.token_ids = placed(tokens);
    step.positions = placed(positions);
    step.request_idx = placed(requests);
    step.slots = placed(slots);
    step.page_table = placed(pages);
    step.state_slots = placed(state);
    return step;
  }

  std::vector<float> logits(int rows, Launch launch) {
    lowlat_step step = step_of(rows);
    step.num_logit_rows = rows;
    std::vector<float> out(static_cast<std::size_t>(rows) * config_.vocab);
    void* memory = nullptr;
    must_be_ok(
        lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE, out.size() * sizeof out[0], &memory));
    step.logits = static_cast<float*>(memory);
    must_be_ok(launch(model_, &step, nullptr));
    must_be_ok(lowlat_synchronize(model_, 10'000'000'000));
    must_be_ok(lowlat_model_read(model_, out.data(), memory, out.size() * sizeof out[0]));
    return out;
  }
  int vocab() const { return config_.vocab; }

  // Microseconds of each of so many replays, ascending.
  std::vector<double> times(int rows, Launch launch, int repeats) {
    const lowlat_step step = step_of(rows);
    const host::cuda::Stream stream;
    const host::cuda::Graph graph(stream.get(),
                                  [&] { must_be_ok(launch(model_, &step, stream.get())); });
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
    lowlat_status_words words{};
    words.struct_bytes = sizeof words;
    must_be_ok(lowlat_status_read(model_, &words));
    if (words.state != 0) throw std::runtime_error("a wait expired");
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  void bind(int tensor_idx) {
    static constexpr int kBytes[] = {1, 4, 8, 4, 2, 1, 1, 1};
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    must_be_ok(lowlat_model_tensor(model_, tensor_idx, &spec));
    lowlat_tensor tensor = dense_tensor(spec, nullptr);
    const std::int64_t count =
        std::accumulate(spec.shape, spec.shape + spec.ndim, std::int64_t{1}, std::multiplies<>());
    must_be_ok(lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE,
                                  static_cast<std::uint64_t>(count) * kBytes[spec.dtype],
                                  &tensor.data));
    if (spec.role == LOWLAT_WEIGHT) {
      fill_dtype<<<1024, 256>>>(tensor.data, spec.dtype, count,
                                static_cast<std::uint64_t>(tensor_idx) << 40);
      host::cuda::check(cudaGetLastError(), "fill");
      host::cuda::check(cudaDeviceSynchronize(), "fill");
    }
    must_be_ok(lowlat_model_bind(model_, spec.name, &tensor));
  }
  const std::int32_t* placed(const std::vector<std::int32_t>& values) {
    void* memory = nullptr;
    must_be_ok(lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE, values.size() * sizeof values[0],
                                  &memory));
    must_be_ok(lowlat_model_write(model_, memory, values.data(), values.size() * sizeof values[0]));
    return static_cast<const std::int32_t*>(memory);
  }

  lowlat_model_config config_;
  lowlat_model* model_ = nullptr;
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

// A layer's share of the difference between steps of `few` and of `extra` layers more, from times
// as ResidentShard::times gives them; `share` of the way from the shortest to the longest.
inline double layer_us(const std::vector<double>& few, const std::vector<double>& many, int extra,
                       double share) {
  const auto at = static_cast<std::size_t>(share * static_cast<double>(few.size() - 1));
  return (many[at] - few[at]) / extra;
}

}  // namespace lowlat::bench
