// bench/plain_layers.hpp: plain V4.1-Flash layers by the resident schedule, through the C ABI, on
// any platform: a model of one rank whose sizes are a share's, its sums going round through its own
// mailbox. For programs that time them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bench/model_calls.hpp"
#include "bench/model_config.hpp"
#include "lowlat/kernels.h"

namespace lowlat::bench {

inline constexpr int kResidentPosition = 4000;  // of a step's first row
inline constexpr std::uint64_t kResidentBudgetNs = 10'000'000'000;

// `sizes` with so many plain layers. Contexts are of kResidentPosition tokens, so a row attends to
// its window and to what is selected.
inline lowlat_model_config resident_config(lowlat_model_config sizes, int num_layers) {
  lowlat_model_config c = sizes;
  set_plain_layers(c, num_layers);
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

class PlainLayers {
 public:
  // fill(model, tensor's number, spec, data) gives a weight its values.
  template <class Fill>
  PlainLayers(const char* platform, const lowlat_model_config& config, Fill fill)
      : config_(config) {
    must(lowlat_model_create(platform, &config_, &model_));
    try {
      for (int i = 0; i < lowlat_model_num_tensors(model_); ++i) bind(i, fill);
      must(lowlat_model_ready(model_));
    } catch (...) {
      lowlat_model_destroy(model_);
      throw;
    }
  }
  ~PlainLayers() { lowlat_model_destroy(model_); }
  PlainLayers(const PlainLayers&) = delete;
  PlainLayers& operator=(const PlainLayers&) = delete;

  lowlat_model* model() const { return model_; }
  int vocab() const { return config_.vocab; }

  // A verify step of requests of six rows, else a decode step.
  lowlat_step step_of(int rows) {
    const int per_request = rows % 6 == 0 ? 6 : 1, batch = rows / per_request;
    const int stride = config_.num_pages / config_.max_batch;
    StepRows all(stride, config_.page_size);
    for (int q = 0; q < batch; ++q) {
      for (int p = 0; p < stride; ++p) all.pages.push_back(q * stride + p);
      all.state.push_back(q);
      for (int i = 0; i < per_request; ++i) {
        all.add((q * 977 + i * 131 + 7) % config_.vocab, kResidentPosition + i);
      }
    }
    return all.step(per_request, [&](const auto& values) { return placed(values); });
  }

  // Throws where a wait of the steps so far has expired.
  void require_no_fault() const {
    if (status_of(model_).state != 0) throw std::runtime_error("a wait expired");
  }

 private:
  template <class Fill>
  void bind(int tensor_idx, Fill& fill) {
    const lowlat_tensor_spec spec = spec_of(model_, tensor_idx);
    lowlat_tensor tensor = dense_tensor(spec, nullptr);
    must(lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE,
                            static_cast<std::uint64_t>(bytes_of(spec)), &tensor.data));
    if (spec.role == LOWLAT_WEIGHT) fill(model_, tensor_idx, spec, tensor.data);
    must(lowlat_model_bind(model_, spec.name, &tensor));
  }
  const std::int32_t* placed(const std::vector<std::int32_t>& values) {
    void* memory = nullptr;
    must(lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE, values.size() * sizeof values[0],
                            &memory));
    must(lowlat_model_write(model_, memory, values.data(), values.size() * sizeof values[0]));
    return static_cast<const std::int32_t*>(memory);
  }

  lowlat_model_config config_;
  lowlat_model* model_ = nullptr;
};

// Random values from the host, where a platform has no kernel that fills: pieces of one pattern,
// small enough that no layer overflows.
class HostFill {
 public:
  void operator()(lowlat_model* model, int tensor_idx, const lowlat_tensor_spec& spec, void* data) {
    const std::vector<std::uint8_t>& pattern = pattern_of(spec.dtype);
    const auto bytes = static_cast<std::uint64_t>(bytes_of(spec));
    // Not the same for every tensor; whole values.
    std::uint64_t from = static_cast<std::uint64_t>(tensor_idx) * 4096 % pattern.size();
    for (std::uint64_t at = 0; at < bytes;) {
      const std::uint64_t piece = std::min<std::uint64_t>(pattern.size() - from, bytes - at);
      must(lowlat_model_write(model, static_cast<std::uint8_t*>(data) + at, pattern.data() + from,
                              piece));
      at += piece;
      from = 0;
    }
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{16} << 20;

  const std::vector<std::uint8_t>& pattern_of(std::uint32_t dtype) {
    std::vector<std::uint8_t>& out = patterns_[dtype];
    if (!out.empty()) return out;
    out.resize(kBytes);
    std::uint64_t state = dtype + 1;
    const auto next = [&] {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      return static_cast<std::uint32_t>(state >> 33);
    };
    for (std::size_t i = 0; i < kBytes; i += 4) {
      const std::uint32_t bits = next();
      for (std::size_t b = 0; b < 4; ++b) {
        const auto byte = static_cast<std::uint8_t>(bits >> 8 * b);
        // Of bf16 and fp32 the last byte is sign and exponent: sizes of 2^-7 to 2^-5.
        const bool last = dtype == LOWLAT_BF16 ? b % 2 == 1 : b == 3;
        switch (dtype) {
          case LOWLAT_F32:
          case LOWLAT_BF16:
            out[i + b] = last ? static_cast<std::uint8_t>((byte & 0x80u) | 0x3cu) : byte;
            break;
          case LOWLAT_E4M3: out[i + b] = byte & 0xbfu; break;
          case LOWLAT_FP4X2: out[i + b] = byte; break;
          case LOWLAT_UE8M0: out[i + b] = static_cast<std::uint8_t>(118u + byte % 3u); break;
          default: out[i + b] = 0; break;
        }
      }
    }
    return out;
  }

  std::vector<std::uint8_t> patterns_[8];
};

// Microseconds of a step, ascending, by the host's clock: of `repeats` times `steps` that are
// launched one after another and then waited for.
inline std::vector<double> step_times(PlainLayers& layers, int rows, int steps, int repeats) {
  const lowlat_step step = layers.step_of(rows);
  std::vector<double> out;
  for (int i = 0; i <= repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int s = 0; s < steps; ++s) must(lowlat_step_launch(layers.model(), &step, nullptr));
    must(lowlat_synchronize(layers.model(), kResidentBudgetNs));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (i > 0) out.push_back(took.count() / steps);  // the first one fetches code and tables
  }
  layers.require_no_fault();
  std::sort(out.begin(), out.end());
  return out;
}

// A layer's share of the difference between steps of `few` and of `extra` layers more, from times
// as step_times gives them; `share` of the way from the shortest to the longest.
inline double layer_us(const std::vector<double>& few, const std::vector<double>& many, int extra,
                       double share) {
  const auto at = static_cast<std::size_t>(share * static_cast<double>(few.size() - 1));
  return (many[at] - few[at]) / extra;
}

}  // namespace lowlat::bench
