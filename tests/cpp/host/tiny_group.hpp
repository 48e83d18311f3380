// A small model of each kind with every sort of layer, random weights, on one or more ranks of one
// process.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/model_calls.hpp"
#include "bench/model_config.hpp"
#include "check.hpp"
#include "lowlat/kernels.h"

namespace lowlat::testing {

// splitmix64 over a counter: the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-24f; }  // [0, 1)
  float normal() {  // good enough: a sum of uniforms
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  std::uint64_t state_;
};

inline std::uint64_t name_seed(const std::string& name) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (const unsigned char c : name) h = (h ^ c) * 0x100000001b3ull;
  return h;
}

// What the two small models share.
inline lowlat_model_config tiny_base(int tp_size, int tp_rank) {
  lowlat_model_config c = bench::published_rules();
  c.vocab = 128;
  c.num_heads = 4;
  c.o_groups = 4;
  c.window = 16;
  c.num_experts = 8;
  c.index_heads = 2;
  c.index_topk = 8;
  c.num_draft_stages = 3;
  c.draft_block = 5;
  c.draft_mask_token = 126;
  c.markov_rank = 16;
  c.draft_experts = 4;
  c.draft_experts_per_token = 3;
  c.tp_rank = tp_rank;
  c.tp_size = tp_size;
  c.widths[c.num_widths++] = 1;
  c.widths[c.num_widths++] = 2;
  c.widths[c.num_widths++] = 6;
  c.widths[c.num_widths++] = 12;
  c.max_batch = 2;
  c.max_rows = 64;
  c.wait_budget_ns = 60'000'000'000ull;
  return c;
}

inline lowlat_model_config tiny_v41(int tp_size, int tp_rank) {
  lowlat_model_config c = tiny_base(tp_size, tp_rank);
  c.kind = LOWLAT_V41;
  c.hidden = 64;
  c.num_layers = 10;
  c.q_lora = 32;
  c.o_lora = 32;
  c.experts_per_token = 6;
  c.moe_intermediate = 128;
  c.candidate_layer = 6;
  c.candidate_blocks = 3;
  c.candidate_block_size = 8;
  c.scale_block = 32;
  c.norm_eps = 1e-20f;
  const int ratios[10] = {0, 0, 2, 2, 2, 2, 1, 1, 1, 1};
  const int kv[10] = {-1, -1, 2, 2, 4, 4, 6, 6, 6, 6};
  const int index[10] = {-1, -1, 2, 2, 4, 4, 6, 6, 8, 8};
  const int engram[10] = {-1, 0, -1, -1, 1, -1, -1, -1, -1, -1};
  for (int i = 0; i < 10; ++i) {
    c.layers[i] = {ratios[i], kv[i], index[i], i == 8 ? 6 : -1, engram[i], 0};
  }
  c.num_engrams = 2;
  c.engram_head_dim = 32;
  c.engram_pad_token = 2;
  c.image_token = 125;
  const int primes[48] = {31,  37,  41,  43,  47,  53,  59,  61,  67,  71,  73,  79,
                          83,  89,  97,  101, 103, 107, 109, 113, 127, 131, 137, 139,
                          149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199,
                          211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271};
  for (int i = 0; i < 48; ++i) c.engram_primes[i / 24][i / 8 % 3][i % 8] = primes[i];
  for (int t = 0; t < 2; ++t) {
    for (int s = 0; s < 4; ++s) c.engram_multipliers[t][s] = 1000003 + 2 * (17 * t + 5 * s);
  }
  for (int i = 0; i < 3; ++i) c.draft_target_layers[i] = 7 + i;
  c.page_size = 16;
  c.num_pages = 16;
  c.state_ring = 8;
  return c;
}

inline lowlat_model_config tiny_v4(int tp_size, int tp_rank) {
  lowlat_model_config c = tiny_base(tp_size, tp_rank);
  c.kind = LOWLAT_V4;
  c.hidden = 128;
  c.num_layers = 5;
  c.q_lora = 128;
  c.o_lora = 128;
  c.experts_per_token = 3;
  c.moe_intermediate = 128 * tp_size;  // a scale block on every rank
  c.candidate_layer = -1;
  c.scale_block = 128;
  c.norm_eps = 1e-6f;
  const int ratios[5] = {0, 4, 128, 4, 128};
  for (int i = 0; i < 5; ++i) {
    c.layers[i] = {ratios[i], ratios[i] > 0 ? i : -1, ratios[i] == 4 ? i : -1, -1, -1, i < 2};
  }
  c.image_token = -1;
  for (int i = 0; i < 3; ++i) c.draft_target_layers[i] = 2 + i;
  c.page_size = 128;
  c.num_pages = 8;
  c.state_ring = 16;
  return c;
}

// kind: lowlat_model_kind.
inline lowlat_model_config tiny_config(std::uint32_t kind, int tp_size, int tp_rank) {
  return kind == LOWLAT_V4 ? tiny_v4(tp_size, tp_rank) : tiny_v41(tp_size, tp_rank);
}

struct Rank {
  lowlat_model* model = nullptr;
  std::vector<std::vector<std::uint8_t>> memory;  // one a tensor; off the host, what it began as
  std::vector<void*> bound;                       // one a tensor

  ~Rank() { lowlat_model_destroy(model); }
};

// Fills a rank's shard so that all ranks hold parts of one whole tensor.
inline void fill(const lowlat_tensor_spec& spec, int tp_size, int tp_rank,
                 const lowlat_model_config& config, std::vector<std::uint8_t>& out) {
  std::int64_t whole[LOWLAT_MAX_DIMS] = {}, first[LOWLAT_MAX_DIMS] = {};
  std::int64_t count = 1;
  const std::string name = spec.name;
  for (std::uint32_t d = 0; d < spec.ndim; ++d) {
    whole[d] = spec.shape[d];
    count *= spec.shape[d];
    if (static_cast<int>(d) == spec.shard_dim) {
      whole[d] *= tp_size;
      first[d] = spec.shape[d] * tp_rank;
    }
  }
  if (name.find("engram.embed") != std::string::npos) {
    // Ranks hold different numbers of rows; the row's id in the whole table seeds it.
    const int table = name.find("layers.1.") == 0 ? 0 : 1;
    first[0] = 0;
    for (int column = 0; column < 24 / tp_size * tp_rank; ++column) {
      first[0] += config.engram_primes[table][column / 8][column % 8];
    }
  }
  const int bytes = bench::kDtypeBytes[spec.dtype];
  out.assign(static_cast<std::size_t>(count * bytes), 0);
  if (spec.role == LOWLAT_POOL) return;
  const bool gain =
      name.find("norm") != std::string::npos || name.find("_weight") != std::string::npos;
  const double fan_in = spec.ndim > 1 ? static_cast<double>(whole[spec.ndim - 1]) : 1.0;
  const bool plain_normal = name == "embed.weight" || name.find(".ape") != std::string::npos;
  const int scale_block =
      spec.ndim == 3 ? 32 : config.scale_block;  // of a K of an expert, else fp8
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, global = 0, stride = 1;
    for (int d = static_cast<int>(spec.ndim) - 1; d >= 0; --d) {
      global += (rest % spec.shape[d] + first[d]) * stride;
      rest /= spec.shape[d];
      stride *= whole[d];
    }
    Random random(name_seed(name) + static_cast<std::uint64_t>(global) * 0x2545f4914f6cdd1dull);
    const bool drawn = spec.dtype == LOWLAT_F32 || spec.dtype == LOWLAT_BF16;
    float value = drawn ? random.normal() : 0.0f;
    if (gain) {
      value = 1.0f + 0.1f * value;
    } else if (name.find("_scale") != std::string::npos) {
      value = 0.5f + 0.1f * value;
    } else if (spec.ndim > 1 && !plain_normal) {
      value *= static_cast<float>(1.0 / std::sqrt(fan_in));
    }
    switch (spec.dtype) {
      case LOWLAT_F32: std::memcpy(&out[i * 4], &value, 4); break;
      case LOWLAT_BF16: {
        std::uint32_t word;
        std::memcpy(&word, &value, 4);
        const auto half = static_cast<std::uint16_t>((word + 0x8000u) >> 16);
        std::memcpy(&out[i * 2], &half, 2);
        break;
      }
      case LOWLAT_I32: {  // the experts of a token
        const auto id = static_cast<std::int32_t>(random.bits() % config.num_experts);
        std::memcpy(&out[i * 4], &id, 4);
        break;
      }
      case LOWLAT_I64: {  // the token map
        const std::int64_t id = static_cast<std::int64_t>(random.bits() % 90);
        std::memcpy(&out[i * 8], &id, 8);
        break;
      }
      case LOWLAT_E4M3: {
        auto code = static_cast<std::uint8_t>(random.bits() & 0xffu);
        if ((code & 0x7fu) > 0x3fu) code &= 0xbfu;  // |value| below 2
        out[i] = code;
        break;
      }
      case LOWLAT_FP4X2: out[i] = static_cast<std::uint8_t>(random.bits() & 0xffu); break;
      case LOWLAT_UE8M0: {
        // About 1 / sqrt(K), with K of the codes that the scale belongs to.
        const int power = static_cast<int>(std::lround(std::log2(std::sqrt(fan_in * scale_block))));
        out[i] = static_cast<std::uint8_t>(127 - power - static_cast<int>(random.bits() % 2));
        break;
      }
      default: break;
    }
  }
}

using bench::dense_tensor;

class TinyGroup {
 public:
  // platform_of(rank): the word that lowlat_model_create takes.
  template <class Edit, class PlatformOf>
  TinyGroup(std::uint32_t kind, int tp_size, Edit edit, PlatformOf platform_of)
      : tp_size_(tp_size), ranks_(tp_size) {
    for (int r = 0; r < tp_size; ++r) {
      lowlat_model_config config = tiny_config(kind, tp_size, r);
      edit(config);
      config_ = config;
      ranks_[r] = std::make_unique<Rank>();
      const std::string platform = platform_of(r);
      on_host_ = platform == "scalar";
      must(lowlat_model_create(platform.c_str(), &config, &ranks_[r]->model));
      bind_all(r, config);
    }
    for (int r = 0; r < tp_size; ++r) {
      for (int peer = 0; peer < tp_size; ++peer) {
        if (peer == r) continue;
        lowlat_peer_handle handle;
        must(lowlat_peer_export(ranks_[peer]->model, &handle));
        must(lowlat_peer_import(ranks_[r]->model, peer, &handle));
      }
      must(lowlat_model_ready(ranks_[r]->model));
    }
  }
  template <class Edit>
  TinyGroup(std::uint32_t kind, int tp_size, Edit edit)
      : TinyGroup(kind, tp_size, edit, [](int) { return "scalar"; }) {}
  TinyGroup(std::uint32_t kind, int tp_size)
      : TinyGroup(kind, tp_size, [](lowlat_model_config&) {}) {}

  lowlat_model* model(int rank) { return ranks_[rank]->model; }
  int tp_size() const { return tp_size_; }
  const lowlat_model_config& config() const { return config_; }

  static void must(lowlat_status status) {
    if (status == LOWLAT_OK) return;
    throw std::runtime_error(std::string("status ") + std::to_string(status) + ": " +
                             lowlat_last_error());
  }

  // The bound memory of a rank's tensor; nothing may run.
  std::vector<std::uint8_t>& memory(int rank, const std::string& name) {
    for (int i = 0; i < lowlat_model_num_tensors(model(rank)); ++i) {
      if (spec(rank, i).name == name) return ranks_[rank]->memory[i];
    }
    throw std::runtime_error("no tensor " + name);
  }
  // What a rank's tensor holds now, on any platform; nothing may run.
  std::vector<std::uint8_t> fetch(int rank, const std::string& name) {
    for (int i = 0; i < lowlat_model_num_tensors(model(rank)); ++i) {
      if (spec(rank, i).name != name) continue;
      std::vector<std::uint8_t> out(ranks_[rank]->memory[i].size());
      must(lowlat_model_read(model(rank), out.data(), ranks_[rank]->bound[i], out.size()));
      return out;
    }
    throw std::runtime_error("no tensor " + name);
  }
  // Names of the pools of rank 0.
  std::vector<std::string> pools() {
    std::vector<std::string> names;
    for (int i = 0; i < lowlat_model_num_tensors(model(0)); ++i) {
      if (spec(0, i).role == LOWLAT_POOL) names.emplace_back(spec(0, i).name);
    }
    return names;
  }
  // Everything that steps have stored so far in another group of the same configuration.
  void take_pools(TinyGroup& from) {
    for (int r = 0; r < tp_size_; ++r) {
      for (const std::string& name : pools()) memory(r, name) = from.memory(r, name);
    }
  }

  // launch(model) on every rank, then every rank's end.
  template <class Launch>
  void run(Launch launch) {
    for (int r = 0; r < tp_size_; ++r) must(launch(model(r), r));
    for (int r = 0; r < tp_size_; ++r) must(lowlat_synchronize(model(r), 100'000'000'000ull));
  }

 private:
  void bind_all(int r, const lowlat_model_config& config) {
    Rank& rank = *ranks_[r];
    const int num = lowlat_model_num_tensors(rank.model);
    rank.memory.resize(num);
    for (int i = 0; i < num; ++i) {
      const lowlat_tensor_spec spec = this->spec(r, i);
      // Drawn once a program: most tests make several groups.
      static std::map<std::string, std::vector<std::uint8_t>> drawn;
      std::string place = std::to_string(config.kind) + "/" + std::to_string(r) + "/" +
                          std::to_string(config.tp_size) + "/" + spec.name;
      for (std::uint32_t d = 0; d < spec.ndim; ++d) {
        place += '/';
        place += std::to_string(spec.shape[d]);
      }
      const auto [weights, is_new] = drawn.try_emplace(place);
      if (is_new) fill(spec, config.tp_size, r, config, weights->second);
      rank.memory[i] = weights->second;
      void* data = rank.memory[i].data();
      if (!on_host_) {
        const std::size_t bytes = rank.memory[i].size();
        must(lowlat_model_alloc(rank.model, LOWLAT_MEMORY_DEVICE, bytes, &data));
        must(lowlat_model_write(rank.model, data, rank.memory[i].data(), bytes));
      }
      rank.bound.push_back(data);
      const lowlat_tensor tensor = dense_tensor(spec, data);
      must(lowlat_model_bind(rank.model, spec.name, &tensor));
    }
  }

  lowlat_tensor_spec spec(int rank, int tensor_idx) {
    lowlat_tensor_spec out{};
    out.struct_bytes = sizeof out;
    must(lowlat_model_tensor(model(rank), tensor_idx, &out));
    return out;
  }

  int tp_size_;
  bool on_host_ = true;
  lowlat_model_config config_{};
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// A step's arrays. Request r owns pages r * pages_per_request and on, in an order that is not
// ascending.
struct StepArrays {
  std::vector<std::int32_t> token_ids, positions, request_idx, slots, page_table, history,
      state_slots;
  int batch_size = 0, tokens_per_request = 0, stride, page_size;

  explicit StepArrays(const lowlat_model_config& config)
      : stride(config.num_pages / config.max_batch), page_size(config.page_size) {}

  // Adds `tokens` of a request that begin at `start`; `all` is the request's whole text. Its first
  // `shared_pages` pages are request 0's.
  void add(int request, const std::vector<std::int32_t>& all, int start, int count,
           int shared_pages = 0) {
    const int row = batch_size++;
    for (int i = 0; i < stride; ++i) {
      page_table.push_back((i < shared_pages ? 0 : request) * stride + (i * 3 + 1) % stride);
    }
    for (int i = 0; i < count; ++i) {
      const int position = start + i;
      token_ids.push_back(all[position]);
      positions.push_back(position);
      request_idx.push_back(row);
      slots.push_back(page_table[row * stride + position / page_size] * page_size +
                      position % page_size);
    }
    for (int i = 3; i >= 1; --i) history.push_back(start - i >= 0 ? all[start - i] : 0);
    state_slots.push_back(request);
    tokens_per_request = count;
  }
  // A request that is only there to fill a width.
  void pad(int count) {
    const int row = batch_size++;
    for (int i = 0; i < stride; ++i) page_table.push_back(-1);
    for (int i = 0; i < count; ++i) {
      token_ids.push_back(0);
      positions.push_back(0);
      request_idx.push_back(row);
      slots.push_back(-1);
    }
    for (int i = 0; i < 3; ++i) history.push_back(0);
    state_slots.push_back(row);
    tokens_per_request = count;
  }
  lowlat_step step(lowlat_step_mode mode) const {
    lowlat_step s{};
    s.struct_bytes = sizeof s;
    s.mode = mode;
    s.num_rows = static_cast<int>(token_ids.size());
    s.batch_size = batch_size;
    s.tokens_per_request = mode == LOWLAT_EXTEND ? 0 : tokens_per_request;
    s.page_table_stride = stride;
    s.token_ids = token_ids.data();
    s.positions = positions.data();
    s.request_idx = request_idx.data();
    s.slots = slots.data();
    s.page_table = page_table.data();
    s.history = history.data();
    s.state_slots = state_slots.data();
    s.num_logit_rows = s.num_rows;
    return s;
  }
};

}  // namespace lowlat::testing
