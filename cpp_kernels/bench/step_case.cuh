// bench/step_case.cuh: one rank's model of either kind through the C ABI, with random weights and
// caches, and its steps, for what step_team.cuh compares and times. At true sizes but for the
// n-gram tables, which have a few thousand rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/attn_bench.hpp"
#include "bench/marlin_layout.cuh"
#include "bench/model_calls.hpp"
#include "bench/model_config.hpp"
#include "lowlat/kernels.h"
#include "reference/format.hpp"
#include "reference/fp4.hpp"
#include "reference/kv.hpp"

namespace lowlat::bench {

inline constexpr int kVocab = 129280;
// Short contexts, all of whose entries are selected, and long ones, where what is selected hangs on
// the last bits of scores that random keys bring close together.
inline constexpr int kShort = 200, kPosition = 4000, kPageSize = 256, kMaxBatch = 8,
                     kPagesOfRequest = 20, kPoolSeed = 4096;

static __device__ std::uint64_t mixed(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
static __device__ std::uint16_t bf16_of(float v) {
  return static_cast<std::uint16_t>(__float_as_uint(v) >> 16);
}

// Element i of a matrix of 4096 columns: an e4m3 code below 2 under its block's power of two.
static __device__ float coded(std::int64_t i, std::uint64_t bits, std::uint64_t seed) {
  const auto block = static_cast<std::uint64_t>(i / 4096 / 32 * 128 + i % 4096 / 32);
  const int exponent = static_cast<int>(bits >> 3 & 7u) - 7, fraction = bits & 7u;
  const float size = exponent > -7 ? (1.0f + 0.125f * fraction) * exp2f(exponent)
                                   : 0.125f * fraction * exp2f(-6.0f);
  const float scale = exp2f(-8.0f + static_cast<float>(mixed(seed + block) % 3u));
  return (bits & 0x80u ? -size : size) * scale;
}

// *sum += a number of all values and their places.
static __global__ void add_digest(const std::uint32_t* values, std::int64_t count,
                                  unsigned long long* sum) {
  unsigned long long own = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    own += mixed(static_cast<std::uint64_t>(i) << 32 | values[i]);
  }
  atomicAdd(sum, own);
}

enum class Kind { plain, gain, embedding, bias, wo_a, kv_pages, index_pages, index_pages_v4 };

// Bytes of an index page's codes and of the whole page, by model.
constexpr int index_codes(bool v4) { return 64 * (v4 ? 128 : 64); }
constexpr int index_page(bool v4) { return index_codes(v4) + 64 * 4; }

// Random values of a dtype. A sublayer, and n-gram memory, adds an eighth to the streams that the
// embedding made: what one of them does wrong shows. To compare, biases choose the experts: scores
// that lie as close as random ones would give a row others by the last bit of what came before, and
// that row would tell nothing. To time, scores do.
static __global__ void fill(void* out, std::uint32_t dtype, Kind kind, int page_rows,
                            std::int64_t count, int scale_code, float embedding,
                            std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t bits = mixed(seed + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    const float unit = static_cast<float>(bits >> 40) * 0x1p-24f - 0.5f;
    const float value = kind == Kind::gain        ? 1.0f + 0.4f * unit
                        : kind == Kind::embedding ? embedding * unit
                        : kind == Kind::bias      ? 40.0f * unit
                                                  : 0.05f * unit;
    auto* bytes = static_cast<std::uint8_t*>(out);
    switch (dtype) {
      case LOWLAT_F32: static_cast<float*>(out)[i] = value; break;
      case LOWLAT_BF16:
        static_cast<std::uint16_t*>(out)[i] =
            bf16_of(kind == Kind::wo_a ? coded(i, bits, seed) : value);
        break;
      // Six of each token, no two the same.
      case LOWLAT_I32: static_cast<std::int32_t*>(out)[i] = i % 6 * 42 + bits % 42u; break;
      case LOWLAT_I64: static_cast<std::int64_t*>(out)[i] = bits % 99092; break;
      case LOWLAT_E4M3: bytes[i] = bits & 0xbfu; break;
      case LOWLAT_FP4X2: bytes[i] = bits & 0xffu; break;
      case LOWLAT_UE8M0: bytes[i] = scale_code - 1 + bits % 3u; break;
      default: {
        if (kind == Kind::index_pages) {
          const bool code = i % index_page(false) < index_codes(false);
          bytes[i] = code ? bits & 0xffu : 124u + bits % 3u;
          break;
        }
        if (kind == Kind::index_pages_v4) {
          // Scales are floats between 2^-7 and 2^-6.
          const bool code = i % index_page(true) < index_codes(true);
          bytes[i] = code         ? bits & 0xbfu
                     : i % 4 == 3 ? 0x3cu
                     : i % 4 == 2 ? bits & 0x7fu
                                  : bits & 0xffu;
          break;
        }
        const std::int64_t page = (page_rows * std::int64_t{584} + 575) / 576 * 576;
        const std::int64_t place = i % page, of_row = place % 576;
        if (place >= page_rows * std::int64_t{576}) {
          bytes[i] = 125u + bits % 3u;
        } else if (of_row < 448) {
          bytes[i] = bits & 0xbfu;
        } else {
          bytes[i] = of_row % 2 == 0 ? bits & 0xffu : (bits & 0x80u) | 0x3fu;
        }
      }
    }
  }
}

// The layers that are published, or eight of every kind.
inline void add_layers_v41(lowlat_model_config& c, bool whole) {
  c.num_layers = whole ? 40 : 8;
  c.candidate_blocks = 2048;
  c.candidate_block_size = 8;
  const auto layer = [&](int i, int ratio, int kv, int index, int candidates, int engram) {
    c.layers[i] = {ratio, kv, index, candidates, engram, 0};
  };
  if (whole) {
    c.candidate_layer = 20;
    for (int i = 0; i < 40; ++i) {
      const int engram = i == 1 ? 0 : i == 14 ? 1 : -1;
      if (i < 2) {
        layer(i, 0, -1, -1, -1, engram);
      } else if (i < 20) {
        const int source = i < 8 ? 2 : i < 14 ? 8 : 14;
        layer(i, 2, source, source, -1, engram);
      } else {
        const int index = i / 4 * 4;
        layer(i, 1, 20, index, i == index && i > 20 ? 20 : -1, engram);
      }
    }
  } else {
    // Window only, n-gram memory, a ratio-2 source and its user, a ratio-1 source that publishes
    // blocks, its user, a selection by blocks, and n-gram memory before its user.
    c.candidate_layer = 4;
    layer(0, 0, -1, -1, -1, -1);
    layer(1, 0, -1, -1, -1, 0);
    layer(2, 2, 2, 2, -1, -1);
    layer(3, 2, 2, 2, -1, -1);
    layer(4, 1, 4, 4, -1, -1);
    layer(5, 1, 4, 4, -1, -1);
    layer(6, 1, 4, 6, 4, -1);
    layer(7, 1, 4, 6, -1, 1);
  }
  c.num_engrams = 2;
  c.engram_head_dim = 256;
  c.engram_pad_token = 2;
  c.image_token = 129264;
  for (int table = 0; table < 2; ++table) {
    for (int i = 0; i < 24; ++i) c.engram_primes[table][i / 8][i % 8] = 997 + 2 * i + table;
    for (int i = 0; i < 4; ++i) c.engram_multipliers[table][i] = 1'000'003 + 77 * i + table;
  }
}
// V4's first two have a window only, the first three their experts by the token.
inline void add_layers_v4(lowlat_model_config& c, bool whole) {
  c.num_layers = whole ? shape::Dsv4Flash<1>::kNumLayers : 8;
  for (int i = 0; i < c.num_layers; ++i) {
    const int ratio = i < 2 ? 0 : i % 2 == 0 ? 4 : 128;
    c.layers[i] = {ratio, ratio == 0 ? -1 : i, ratio == 4 ? i : -1, -1, -1, i < 3 ? 1 : 0};
  }
}

inline lowlat_model_config config_of(std::uint32_t kind, bool whole, int num_draft_stages) {
  const bool v4 = kind == LOWLAT_V4;
  lowlat_model_config c = v4 ? v4_sizes<1>() : v41_sizes<1>();
  v4 ? add_layers_v4(c, whole) : add_layers_v41(c, whole);
  c.num_draft_stages = num_draft_stages;
  c.draft_block = 5;
  c.draft_mask_token = 28799;
  c.markov_rank = 256;
  c.draft_experts = v4 ? 256 : 128;
  c.draft_experts_per_token = v4 ? 6 : 3;
  for (int i = 0; i < num_draft_stages; ++i) c.draft_target_layers[i] = c.num_layers - 3 + i;
  c.tp_size = 4;
  for (const int width : {1, 2, 3, 4, 5, 6, 7, 8, 12, 18, 24, 48}) c.widths[c.num_widths++] = width;
  c.max_batch = kMaxBatch;
  c.max_rows = 48;
  c.page_size = kPageSize;
  c.num_pages = kMaxBatch * kPagesOfRequest;
  c.state_ring = v4 ? 16 : 8;
  c.wait_budget_ns = 1'000'000'000;
  return c;
}

// What weights hold.
struct WeightRules {
  bool by_score = false;  // see fill(); and Marlin's tiles have contents of their own
  // Layers further on have the experts of this many before, where not 0: what a device has no room
  // for. A layer reads as many bytes.
  int expert_layers = 0;
  int embedding = 1;  // of a rank that is looped back: the embedding times this, a power of two
};

// Device memory of a rank's weights, by name, for all models of a configuration.
class Weights {
 public:
  // rank -1: of one that is looped back. What ranks share is the same on all of them. Where the sum
  // is not one of four equal parts, each part is twice as large, and the embedding four times.
  explicit Weights(const WeightRules& rules = {}, int rank = -1)
      : rules_(rules), rank_(std::max(rank, 0)), scale_shift_(rank < 0 ? 0 : 1) {}
  void* of(const lowlat_tensor_spec& spec, std::uint64_t seed) {
    const bool marlin = spec.layout == LOWLAT_MARLIN;
    const std::string name = key_of(spec.name);
    void*& data = memory_[marlin ? name + ", Marlin" : name];
    if (spec.shard_dim >= 0) seed += 10'000 * static_cast<std::uint64_t>(rank_);
    if (data == nullptr) {
      data = marlin && !rules_.by_score ? relaid(spec)
                                        : filled(marlin ? in_bytes(spec) : spec, seed,
                                                 rules_.by_score, scale_shift_, rules_.embedding);
    }
    return data;
  }
  bool are_to_time() const { return rules_.by_score; }
  // bf16 of codes and scales that a model has had by these names.
  void* expanded(const lowlat_tensor_spec& spec, int block) {
    const std::string name = spec.name;
    void*& data = memory_[name + ", expanded"];
    if (data != nullptr) return data;
    const auto rows = static_cast<std::size_t>(spec.shape[0]);
    const auto columns = static_cast<std::size_t>(spec.shape[1]),
               side = static_cast<std::size_t>(block);
    const auto host = [&](const std::string& from, std::size_t count) {
      std::vector<std::uint8_t> out(count);
      cuda_must(cudaMemcpy(out.data(), memory_.at(from), count, cudaMemcpyDeviceToHost), "codes");
      return out;
    };
    const auto codes = host(name, rows * columns);
    const auto scales =
        host(name.substr(0, name.rfind('.')) + ".scale", rows / side * (columns / side));
    std::vector<std::uint16_t> wide;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t column = 0; column < columns; ++column) {
        const std::uint8_t scale = scales[row / side * (columns / side) + column / side];
        wide.push_back(reference::to_bf16(reference::from_e4m3(codes[row * columns + column]) *
                                          reference::from_ue8m0(scale)));
      }
    }
    cuda_must(cudaMalloc(&data, wide.size() * 2), "memory");
    cuda_must(cudaMemcpy(data, wide.data(), wide.size() * 2, cudaMemcpyHostToDevice), "wo_a");
    return data;
  }
  static void* filled(const lowlat_tensor_spec& spec, std::uint64_t seed, bool by_score = false,
                      int scale_shift = 0, int embedding = 1) {
    void* data = nullptr;
    const std::int64_t bytes = bytes_of(spec);
    cuda_must(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "memory");
    const std::string name = spec.name;
    const bool gain = name.find("norm.weight") != std::string::npos;
    const bool out = name.find("wo_b") != std::string::npos;
    const bool down = name.find("w2") != std::string::npos;
    const bool ngrams = name.find("engram.embed") != std::string::npos;
    const int scale_code = out ? 125 + scale_shift : down ? 117 + scale_shift : ngrams ? 126 : 120;
    Kind kind = Kind::plain;
    if (name == "embed.weight") {
      kind = Kind::embedding;
    } else if (gain) {
      kind = Kind::gain;
    } else if (!by_score && name.find("gate.bias") != std::string::npos) {
      kind = Kind::bias;
    } else if (name.find("wo_a") != std::string::npos) {
      kind = Kind::wo_a;
    } else if (spec.layout == LOWLAT_KV_PAGED) {
      kind = Kind::kv_pages;
    } else if (spec.layout == LOWLAT_INDEX_PAGED) {
      kind = spec.shape[1] == index_page(true) ? Kind::index_pages_v4 : Kind::index_pages;
    }
    // Rows of a page by its bytes.
    const int rows = kind == Kind::kv_pages ? static_cast<int>(spec.shape[1] / 584) : 1;
    fill<<<1024, 256>>>(data, spec.dtype, kind, rows, count_of(spec), scale_code,
                        (scale_shift > 0 ? 13.6f : 3.4f) * static_cast<float>(embedding),
                        seed << 40);
    cuda_must(cudaGetLastError(), "fill");
    cuda_must(cudaDeviceSynchronize(), "fill");
    return data;
  }
  ~Weights() {
    for (auto& [name, data] : memory_) cudaFree(data);
  }

 private:
  std::string key_of(const std::string& name) const {
    const std::size_t end = name.find(".ffn.experts.");
    if (rules_.expert_layers == 0 || name.find("layers.") != 0 || end == std::string::npos) {
      return name;
    }
    const int layer_idx = std::atoi(name.c_str() + std::strlen("layers."));
    return "layers." + std::to_string(layer_idx % rules_.expert_layers) + name.substr(end);
  }

  // To time, tiles are drawn as they are: random codes in another order are random codes, and a
  // device has no room for both layouts of a whole model.
  static lowlat_tensor_spec in_bytes(lowlat_tensor_spec spec) {
    if (spec.dtype != LOWLAT_I32) return spec;
    spec.dtype = LOWLAT_FP4X2;
    spec.shape[spec.ndim - 1] *= 4;
    return spec;
  }
  // From the checkpoint's layout, in which a model has had them.
  void* relaid(const lowlat_tensor_spec& spec) {
    const std::string name = key_of(spec.name);
    const std::size_t at = name.find("w13");
    const auto source = [&](const char* matrix) {
      const std::string from =
          at == std::string::npos ? name : name.substr(0, at) + matrix + name.substr(at + 3);
      return static_cast<const std::uint8_t*>(memory_.at(from));
    };
    // Codes [E, K / 16, 2 N] words, scales [E, K / 32, N].
    const bool codes = spec.dtype == LOWLAT_I32;
    const auto all = static_cast<std::size_t>(spec.shape[2]) / (codes ? 2 : 1);
    const bool both = at != std::string::npos;
    const Rows rows = {source("w1"), both ? source("w3") : nullptr, both ? all / 2 : all,
                       static_cast<std::size_t>(spec.shape[1]) * (codes ? 8 : 1)};
    const auto bytes = static_cast<std::size_t>(bytes_of(spec));
    void* data = nullptr;
    cuda_must(cudaMalloc(&data, bytes), "memory");
    if (codes) {
      marlin_codes<<<1024, 256>>>(static_cast<std::uint32_t*>(data), bytes / 4, rows);
    } else {
      marlin_scales<<<1024, 256>>>(static_cast<std::uint8_t*>(data), bytes, rows);
    }
    cuda_must(cudaGetLastError(), "Marlin's layout");
    cuda_must(cudaDeviceSynchronize(), "Marlin's layout");
    return data;
  }

  WeightRules rules_;
  int rank_, scale_shift_;
  std::map<std::string, void*> memory_;
};

struct Pool {
  lowlat_tensor_spec spec;
  std::string name;
  void* data;
};

// What a step was given, and what came out.
struct Case {
  int requests, tokens, position;
  int rows() const { return requests * tokens; }
};
inline Case case_of(int rows, int position) {
  return rows % 6 == 0 ? Case{rows / 6, 6, position} : Case{rows, 1, position};
}

// Of a hosted model: page 0 is padding's, and the window's keys lie in pages of another order.
inline constexpr int kHostedPages = kMaxBatch * kPagesOfRequest + 1;
inline int hosted_window_page(int page) { return page * 3 % kHostedPages; }

// Who keeps caches and head: the model, or an engine with wo_a in bf16, for steps with experts in
// the checkpoint's layout or in Marlin's, which is made of the other, for proposals, or for a
// draft's layers too, in both layouts, whose wo_a in bf16 is made of the published one.
enum class Host { none, steps, marlin_steps, proposals, draft, marlin_draft };
constexpr bool has_marlin(Host host) {
  return host == Host::marlin_steps || host == Host::marlin_draft;
}
constexpr bool has_stages(Host host) { return host == Host::draft || host == Host::marlin_draft; }

// One rank's model, bound to weights and caches; ready with ready().
class Rank {
 public:
  // tokens: ids that steps may have.
  Rank(const std::string& platform, const lowlat_model_config& config, Weights& weights, Host host,
       int tokens)
      : config_(config), host_(host), num_tokens_(tokens) {
    const bool hosted = host != Host::none;
    if (hosted) {
      lowlat_hosting hosting{};
      hosting.struct_bytes = sizeof hosting;
      hosting.expert_layout = has_marlin(host) ? LOWLAT_MARLIN : LOWLAT_ROW_MAJOR;
      hosting.bf16_wo_a = 1;
      hosting.proposals = host == Host::proposals || has_stages(host) ? 1 : 0;
      hosting.stages = has_stages(host) ? 1 : 0;
      must(lowlat_hosted_create(platform.c_str(), &config_, &hosting, &model_));
    } else {
      must(lowlat_model_create(platform.c_str(), &config_, &model_));
    }
    for (int i = 0; i < lowlat_model_num_tensors(model_); ++i) {
      lowlat_tensor_spec spec = spec_of(model_, i);
      if (hosted && spec.role == LOWLAT_POOL) spec.shape[0] = rows_of(spec);
      lowlat_tensor tensor = dense_tensor(spec, nullptr);
      if (spec.role == LOWLAT_POOL) {
        // The same whatever the layout of the weights between them.
        tensor.data = Weights::filled(spec, kPoolSeed + pools_.size());
        pools_.push_back({spec, spec.name, tensor.data});
        caches_.push_back(tensor);
        if (hosted) continue;
      } else {
        const bool wide = has_stages(host) && !weights.are_to_time() && spec.dtype == LOWLAT_BF16 &&
                          std::string(spec.name).ends_with("attn.wo_a.weight");
        tensor.data = wide ? weights.expanded(spec, config_.scale_block)
                           : weights.of(spec, static_cast<std::uint64_t>(i) + 1);
      }
      must(lowlat_model_bind(model_, spec.name, &tensor));
    }
  }
  // The peers are there.
  void ready() {
    must(lowlat_model_ready(model_));
    if (host_ != Host::none && host_ != Host::proposals) bind_caches();
  }
  ~Rank() {
    lowlat_model_destroy(model_);
    for (Pool& pool : pools_) cudaFree(pool.data);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  lowlat_model* model() const { return model_; }
  const lowlat_model_config& config() const { return config_; }
  const std::vector<Pool>& pools() const { return pools_; }

  template <class T>
  T* place(const std::vector<T>& values) {
    void* memory = nullptr;
    const std::uint64_t bytes = values.size() * sizeof(T);
    must(lowlat_model_alloc(model_, LOWLAT_MEMORY_DEVICE, bytes, &memory));
    must(lowlat_model_write(model_, memory, values.data(), bytes));
    return static_cast<T*>(memory);
  }
  template <class T>
  std::vector<T> take(const T* from, std::size_t count) {
    std::vector<T> out(count);
    must(lowlat_model_read(model_, out.data(), from, count * sizeof(T)));
    return out;
  }

  // A verify step, or with one token a request a decode step; pages of requests are shuffled.
  lowlat_step step_of(const Case& of, int salt) {
    StepRows all(kPagesOfRequest, kPageSize);
    for (int q = 0; q < of.requests; ++q) {
      for (int p = 0; p < kPagesOfRequest; ++p) {
        all.pages.push_back((p * kMaxBatch + q) * 7 % (kMaxBatch * kPagesOfRequest));
      }
      all.state.push_back(kMaxBatch - 1 - q);
      for (int i = 0; i < 3; ++i) all.history.push_back((q * 31 + i * 7 + salt) % config_.vocab);
      for (int i = 0; i < of.tokens; ++i) {
        all.add((q * 977 + i * 13177 + salt * 7919 + 7) % num_tokens_, of.position + 11 * q + i);
      }
    }
    lowlat_step step = all.step(of.tokens, [&](const auto& values) { return place(values); });
    step.num_logit_rows = of.rows();
    step.logits = place(std::vector<float>(
        static_cast<std::size_t>(of.rows()) * static_cast<std::size_t>(config_.vocab), NAN));
    step.argmax = place(std::vector<std::int32_t>(static_cast<std::size_t>(of.rows()), -7));
    return step;
  }
  // The same for a hosted model; the last row is padding where there is more than one request.
  lowlat_hosted_step hosted_of(const Case& of, int salt) {
    std::vector<std::int64_t> tokens, positions, slots, requests;
    std::vector<std::int32_t> pages;
    for (int q = 0; q < of.requests; ++q) {
      for (int p = 0; p < kPagesOfRequest; ++p) {
        pages.push_back((p * kMaxBatch + q) * 7 % (kHostedPages - 1) + 1);
      }
      requests.push_back(kMaxBatch - 1 - q);
      for (int i = 0; i < of.tokens; ++i) {
        const int position = of.position + 11 * q + i;
        tokens.push_back((q * 977 + i * 13177 + salt * 7919 + 7) % num_tokens_);
        positions.push_back(position);
        slots.push_back(
            pages[static_cast<std::size_t>(q * kPagesOfRequest + position / kPageSize)] *
                kPageSize +
            position % kPageSize);
      }
    }
    if (of.requests > 1) slots.back() = 17;
    const auto rows = static_cast<std::size_t>(of.rows());
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    lowlat_hosted_step step{};
    step.struct_bytes = sizeof step;
    step.mode = of.tokens == 1 ? LOWLAT_DECODE : LOWLAT_TARGET_VERIFY;
    step.batch_size = of.requests;
    step.tokens_per_request = of.tokens;
    step.page_table_stride = step.num_table_pages = kPagesOfRequest;
    step.token_ids = place(tokens);
    step.positions = place(positions);
    step.slots = place(slots);
    step.requests = place(requests);
    step.page_table = place(pages);
    step.hidden = place(std::vector<std::uint16_t>(rows * hidden, 0x7fc0));
    if (config_.num_draft_stages > 0) {
      step.features = place(std::vector<std::uint16_t>(
          rows * hidden * static_cast<std::size_t>(config_.num_draft_stages), 0x7fc0));
    }
    step.streams = place(std::vector<std::uint16_t>(rows * hidden * 4, 0x7fc0));
    return step;
  }
  lowlat_proposal proposal_of(const lowlat_hosted_draft& draft) {
    std::vector<std::int64_t> anchors;
    for (int q = 0; q < draft.batch_size; ++q) anchors.push_back(100 + q);
    lowlat_proposal proposal{};
    proposal.struct_bytes = sizeof proposal;
    proposal.batch_size = draft.batch_size;
    proposal.hidden = draft.hidden;
    proposal.anchors = place(anchors);
    proposal.draft_tokens = place(std::vector<std::int64_t>(anchors.size() * 5, -7));
    return proposal;
  }
  // The block behind a step of `of`, as draft_of() has it: our page p is the engine's p + 1.
  lowlat_hosted_draft hosted_draft_of(const Case& of) {
    constexpr int kWindow = shape::Dsv41Flash<1>::kWindow, kSeen = kWindow + 5;
    std::vector<std::int64_t> tokens, positions;
    std::vector<std::int32_t> keys, window;
    for (int q = 0; q < of.requests; ++q) {
      const auto slot_of = [&](int position) {
        const int page = (position / kPageSize * kMaxBatch + q) * 7;
        return (page % (kMaxBatch * kPagesOfRequest) + 1) * kPageSize + position % kPageSize;
      };
      const int prefix = of.position + 11 * q + of.tokens, first = std::max(prefix - kWindow, 0);
      std::vector<std::int32_t> seen;
      for (int at = first; at < prefix + 5; ++at) seen.push_back(slot_of(at));
      seen.resize(kSeen, -1);
      for (int i = 0; i < 5; ++i) {
        tokens.push_back(i == 0 ? 100 + q : config_.draft_mask_token);
        positions.push_back(prefix + i);
        keys.push_back(slot_of(prefix + i));
        window.insert(window.end(), seen.begin(), seen.end());
      }
    }
    const auto width = static_cast<std::size_t>(config_.hidden) *
                       (config_.kind == LOWLAT_V4 ? std::size_t{4} : std::size_t{1});
    lowlat_hosted_draft draft{};
    draft.struct_bytes = sizeof draft;
    draft.batch_size = of.requests;
    draft.window_stride = kSeen;
    draft.hidden = place(std::vector<std::uint16_t>(tokens.size() * width, 0x7fc0));
    draft.token_ids = place(tokens);
    draft.positions = place(positions);
    draft.key_slots = place(keys);
    draft.window = place(window);
    return draft;
  }
  std::vector<float> floats(const std::uint16_t* from, std::size_t count) {
    std::vector<float> out;
    for (const std::uint16_t code : take(from, count)) {
      out.push_back(static_cast<float>(reference::from_bf16(code)));
    }
    return out;
  }
  // What a hosted step leaves: hidden states, features and streams of all rows but padding's.
  std::vector<float> hosted_results(const lowlat_hosted_step& step) {
    const int rows = step.batch_size * step.tokens_per_request - (step.batch_size > 1 ? 1 : 0);
    const auto width = static_cast<std::size_t>(rows) * static_cast<std::size_t>(config_.hidden);
    std::vector<float> out = floats(step.hidden, width);
    const auto stages = static_cast<std::size_t>(config_.num_draft_stages);
    for (const float v : floats(step.features, width * stages)) out.push_back(v);
    for (const float v : floats(step.streams, width * 4)) out.push_back(v);
    return out;
  }
  std::vector<std::int32_t> history() {
    return take(history_, static_cast<std::size_t>(3 * kMaxBatch));
  }
  void set_history(const std::vector<std::int32_t>& history) {
    must(lowlat_model_write(model_, history_, history.data(), sizeof history[0] * history.size()));
  }
  std::vector<float> logits(const lowlat_step& step) { return take(step.logits, num_logits(step)); }
  // A number of all bits of the logits, by the device that is current, which is this rank's: small
  // enough to look at each of a thousand replays.
  std::uint64_t digest_of_logits(const lowlat_step& step) {
    if (digest_ == nullptr) digest_ = place(std::vector<unsigned long long>{0});
    cuda_must(cudaMemset(digest_, 0, sizeof *digest_), "digest");
    add_digest<<<256, 256>>>(reinterpret_cast<const std::uint32_t*>(step.logits),
                             static_cast<std::int64_t>(num_logits(step)), digest_);
    cuda_must(cudaGetLastError(), "digest");
    return take(digest_, 1)[0];
  }

 private:
  std::size_t num_logits(const lowlat_step& step) const {
    return static_cast<std::size_t>(step.num_rows) * static_cast<std::size_t>(config_.vocab);
  }
  // Of a hosted model's pool.
  std::int64_t rows_of(const lowlat_tensor_spec& spec) const {
    const std::string name = spec.name;
    if (name.starts_with("mtp.")) return kHostedPages;
    const int ratio = config_.layers[std::stoi(name.substr(name.rfind('.') + 1))].ratio;
    if (spec.dtype == LOWLAT_F32) {
      // Rings of ratio 4 are of the window's pages.
      return ratio == 4     ? kHostedPages * std::int64_t{config_.state_ring}
             : ratio == 128 ? kMaxBatch * std::int64_t{config_.state_ring} * 16
                            : kMaxBatch * std::int64_t{config_.state_ring};
    }
    // Pages of 64 entries.
    if (spec.layout == LOWLAT_INDEX_PAGED) return kHostedPages * (kPageSize / ratio / 64);
    return kHostedPages;
  }
  void bind_caches() {
    std::vector<const char*> names;
    for (const Pool& pool : pools_) names.push_back(pool.name.c_str());
    std::vector<std::int64_t> window_slots;
    for (int page = 0; page < kHostedPages; ++page) {
      for (int i = 0; i < kPageSize; ++i) {
        window_slots.push_back(hosted_window_page(page) * kPageSize + i);
      }
    }
    std::vector<std::int32_t> history;
    for (int i = 0; i < 3 * kMaxBatch; ++i) history.push_back(i * 4099 % kVocab);
    history[4] = -1;  // an image
    history_ = place(history);
    lowlat_pools pools{};
    pools.struct_bytes = sizeof pools;
    pools.num_pages = pools.num_window_pages = kHostedPages;
    pools.num_requests = kMaxBatch;
    // Rows of a draft come with slots of their own.
    pools.window_slots = has_stages(host_) ? nullptr : place(window_slots);
    pools.history = history_;
    pools.num_tensors = static_cast<std::int32_t>(caches_.size());
    pools.names = names.data();
    pools.tensors = caches_.data();
    must(lowlat_pools_bind(model_, &pools));
  }

  lowlat_model_config config_;
  Host host_;
  int num_tokens_;
  lowlat_model* model_ = nullptr;
  std::int32_t* history_ = nullptr;
  unsigned long long* digest_ = nullptr;  // of digest_of_logits
  std::vector<Pool> pools_;
  std::vector<lowlat_tensor> caches_;  // the same
};

// A draft behind a step of `of`, whose rows are all committed; with_logits: as sampled rows need.
inline lowlat_draft draft_of(Rank& rank, const lowlat_step& step, const Case& of,
                             bool with_logits) {
  lowlat_draft draft{};
  draft.struct_bytes = sizeof draft;
  draft.num_inject_rows = step.num_rows;
  draft.inject_slots = step.slots;
  draft.inject_positions = step.positions;
  draft.batch_size = of.requests;
  draft.page_table_stride = step.page_table_stride;
  draft.page_table = step.page_table;
  const auto pages =
      rank.take(step.page_table, static_cast<std::size_t>(of.requests * kPagesOfRequest));
  std::vector<std::int32_t> anchors, prefixes, slots, rows;
  for (int q = 0; q < of.requests; ++q) {
    anchors.push_back(100 + q);
    const int prefix = of.position + 11 * q + of.tokens;
    prefixes.push_back(prefix);
    rows.push_back(q);
    for (int at = prefix; at < prefix + 5; ++at) {
      slots.push_back(pages[static_cast<std::size_t>(q * kPagesOfRequest + at / kPageSize)] *
                          kPageSize +
                      at % kPageSize);
    }
  }
  draft.anchors = rank.place(anchors);
  draft.prefixes = rank.place(prefixes);
  draft.slots = rank.place(slots);
  draft.noise_row = rank.place(rows);
  draft.noise_offset = rank.place(std::vector<std::int64_t>(rows.size(), 3));
  draft.temperature = rank.place(std::vector<float>(rows.size(), 0.0f));
  draft.draft_tokens = rank.place(std::vector<std::int32_t>(rows.size() * 5, -7));
  if (!with_logits) return draft;
  draft.draft_logits = rank.place(
      std::vector<float>(rows.size() * 5 * static_cast<std::size_t>(rank.config().vocab), NAN));
  return draft;
}

}  // namespace lowlat::bench
