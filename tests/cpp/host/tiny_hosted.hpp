// A tiny model inside another engine, on one or more ranks of one process: the weights of a
// TinyGroup in the engine's layouts, caches at other places, and the arrays of its steps. On any
// platform.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "host/tiny_group.hpp"

namespace lowlat::testing {

inline constexpr int kFirstPage = 2;     // of ours in the engine's pages; page 0 is padding's
inline constexpr int kWindowPages = 31;  // prime: every page of ours has another one
inline constexpr int kNumRequests = 9;
inline constexpr std::uint16_t kNan = 0x7fc0;

inline int window_page(int page) { return (page * 5 + 3) % kWindowPages; }
inline int request_row(int request) { return 3 + 2 * request; }

inline float bf16(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The published way to Marlin's tiles, as a permutation of 1024 nibbles and one of 64 scales.
inline std::vector<int> code_order() {
  std::vector<int> order;
  for (int lane = 0; lane < 32; ++lane) {
    std::array<int, 8> one{};
    int n = 0;
    for (const int block : {0, 1}) {
      for (const int row :
           {2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1}) {
        one[n++] = 16 * row + lane / 4 + 8 * block;
      }
    }
    for (int j = 0; j < 4; ++j) {
      for (const int place : {0, 2, 4, 6, 1, 3, 5, 7}) order.push_back(one[place] + 256 * j);
    }
  }
  return order;
}
inline std::vector<int> scale_order() {
  std::vector<int> order, swapped;
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) order.push_back(i + 8 * j);
  }
  for (int i = 0; i < 64; i += 4) {
    for (const int place : {0, 2, 1, 3}) swapped.push_back(order[i + place]);
  }
  return swapped;
}

struct Matrix {  // fp4 codes of [N, K], one a byte, and scales [N, K / 32]
  int n, k;
  std::vector<std::uint8_t> codes, scales;
};
inline void to_marlin(const Matrix& m, std::uint8_t* out_codes, std::uint8_t* out_scales) {
  static const std::vector<int> codes = code_order(), scales = scale_order();
  // [K, N] in blocks of 16 x 16, blocks of a row of blocks one after another.
  std::vector<std::uint8_t> blocks(m.codes.size());
  std::size_t at = 0;
  for (int bk = 0; bk < m.k / 16; ++bk) {
    for (int bn = 0; bn < m.n / 16; ++bn) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 16; ++n) blocks[at++] = m.codes[(bn * 16 + n) * m.k + bk * 16 + k];
      }
    }
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) {
    const auto code = [&](std::size_t place) {
      return blocks[place / 1024 * 1024 + codes[place % 1024]];
    };
    out_codes[i / 2] = static_cast<std::uint8_t>(code(i) | code(i + 1) << 4);
  }
  for (int group = 0; group < m.k / 32; ++group) {
    for (int n = 0; n < m.n; ++n) {
      const int row = n / 64 * 64 + scales[n % 64];
      out_scales[group * m.n + n] = m.scales[row * (m.k / 32) + group];
    }
  }
}

inline lowlat_model_config edited(lowlat_model_config config) {
  // A width that Marlin's tiles pad.
  if (config.kind == LOWLAT_V41) config.moe_intermediate = 96 * config.tp_size;
  return config;
}

// What of a model is hosted: its target, or its draft's layers and proposals.
enum class Part { target, draft };

class Hosted {
 public:
  // split: V4.1's index keys are two tensors, see lowlat_pools. platform_of(rank): the word that
  // lowlat_hosted_create takes.
  template <class PlatformOf>
  Hosted(TinyGroup& own, bool marlin, bool split, Part part, PlatformOf platform_of)
      : own_(own), config_(own.config()), ranks_(own.tp_size()), split_(split), part_(part) {
    if (part == Part::draft) {
      config_.num_widths = config_.max_batch;
      for (int i = 0; i < config_.num_widths; ++i) {
        config_.widths[i] = (i + 1) * config_.draft_block;
      }
    }
    for (int r = 0; r < own.tp_size(); ++r) {
      lowlat_model_config config = config_;
      config.tp_rank = r;
      lowlat_hosting hosting{};
      hosting.struct_bytes = sizeof hosting;
      hosting.expert_layout = marlin ? LOWLAT_MARLIN : LOWLAT_ROW_MAJOR;
      hosting.bf16_wo_a = config.kind == LOWLAT_V41 || part == Part::draft;
      hosting.proposals = hosting.stages = part == Part::draft;
      ranks_[r] = std::make_unique<Rank>();
      const std::string platform = platform_of(r);
      on_host_ = platform == "scalar";
      TinyGroup::must(lowlat_hosted_create(platform.c_str(), &config, &hosting, &ranks_[r]->model));
      bind_weights(r);
    }
    for (int r = 0; r < own.tp_size(); ++r) {
      for (int peer = 0; peer < own.tp_size(); ++peer) {
        if (peer == r) continue;
        lowlat_peer_handle handle;
        TinyGroup::must(lowlat_peer_export(ranks_[peer]->model, &handle));
        TinyGroup::must(lowlat_peer_import(ranks_[r]->model, peer, &handle));
      }
      TinyGroup::must(lowlat_model_ready(ranks_[r]->model));
      histories_.emplace_back(kNumRequests * 3, 0);
      bind_pools(r);
    }
  }

  explicit Hosted(TinyGroup& own, bool marlin, bool split = false, Part part = Part::target)
      : Hosted(own, marlin, split, part, [](int) { return "scalar"; }) {}

  lowlat_model* model(int r) { return ranks_[r]->model; }
  int tp_size() const { return own_.tp_size(); }
  // The tokens before each request's next, three a request. On the host they are the engine's own;
  // elsewhere put_history() gives them to it.
  std::vector<std::int32_t>& history(int r) { return histories_[r]; }
  void put_history(int r) {
    if (on_host_) return;
    TinyGroup::must(lowlat_model_write(model(r), bound_history_[r], histories_[r].data(),
                                       histories_[r].size() * sizeof(std::int32_t)));
  }
  // What a pool holds; nothing may run.
  std::vector<std::uint8_t> pool(int r, const std::string& name) {
    const std::size_t place = place_.at(name);
    std::vector<std::uint8_t> out = ranks_[r]->memory[place];
    if (!on_host_) {
      TinyGroup::must(lowlat_model_read(model(r), out.data(), ranks_[r]->bound[place], out.size()));
    }
    return out;
  }
  // The engine's own bytes of a pool, on the host.
  std::vector<std::uint8_t>& host_pool(int r, const std::string& name) {
    CHECK(on_host_);
    return ranks_[r]->memory[place_.at(name)];
  }
  bool is_split() const { return split_; }

  lowlat_tensor_spec spec(int r, int i) {
    lowlat_tensor_spec out{};
    out.struct_bytes = sizeof out;
    TinyGroup::must(lowlat_model_tensor(model(r), i, &out));
    return out;
  }

 private:
  // Values where a rank's model reaches them: as they lie on the host, or a copy.
  template <class T>
  T* placed(int r, std::vector<T>& values) {
    if (on_host_) return values.data();
    void* data = nullptr;
    const std::uint64_t bytes = values.size() * sizeof(T);
    TinyGroup::must(lowlat_model_alloc(model(r), LOWLAT_MEMORY_DEVICE, bytes, &data));
    TinyGroup::must(lowlat_model_write(model(r), data, values.data(), bytes));
    return static_cast<T*>(data);
  }

  // A pool's rows in this test's engine.
  std::int64_t rows_of(const std::string& name) const {
    if (name.starts_with("mtp.")) return kWindowPages;
    const std::size_t dot = name.rfind('.');
    const std::string kind = name.substr(0, dot);
    const int ratio = config_.layers[std::stoi(name.substr(dot + 1))].ratio;
    const int pages = config_.num_pages + kFirstPage;
    if (kind == "kv.swa") return kWindowPages;
    if (kind == "kv.extra") return pages;
    if (kind.starts_with("kv.index") && kind != "kv.index_state") {
      return (pages * (config_.page_size / ratio) + 63) / 64;
    }
    const bool paged = config_.kind == LOWLAT_V4 && ratio == 4;
    const int ring = config_.state_ring * (config_.kind == LOWLAT_V4 && ratio == 128 ? 16 : 1);
    return std::int64_t{paged ? kWindowPages : kNumRequests} * ring + 1;
  }

  void bind_pools(int r) {
    Rank& rank = *ranks_[r];
    std::vector<const char*> names;
    std::vector<lowlat_tensor> tensors;
    std::vector<std::string> kept;
    const int num = lowlat_model_num_tensors(rank.model);
    kept.reserve(2 * static_cast<std::size_t>(num));
    rank.memory.resize(2 * static_cast<std::size_t>(num));
    rank.bound.resize(rank.memory.size());
    const auto give = [&](const std::string& name, lowlat_tensor_spec one, std::size_t place) {
      one.shape[0] = rows_of(name);
      const int bytes = one.dtype == LOWLAT_F32 ? 4 : 1;
      rank.memory[place].assign(static_cast<std::size_t>(one.shape[0] * one.shape[1] * bytes), 0);
      place_[name] = place;
      kept.emplace_back(name);
      names.push_back(kept.back().c_str());
      rank.bound[place] = placed(r, rank.memory[place]);
      tensors.push_back(dense_tensor(one, rank.bound[place]));
    };
    for (int i = 0; i < num; ++i) {
      lowlat_tensor_spec one = spec(r, i);
      if (one.role != LOWLAT_POOL) continue;
      CHECK(one.shape[0] == 0);
      const std::string name = one.name;
      if (!split_ || !name.starts_with("kv.index.")) {
        give(name, one, static_cast<std::size_t>(i));
        continue;
      }
      one.layout = LOWLAT_ROW_MAJOR;
      one.shape[1] = 64 * 64;
      give(name, one, static_cast<std::size_t>(i));
      one.shape[1] = 64 * 4;
      give("kv.index_scales." + name.substr(9), one, static_cast<std::size_t>(num + i));
    }
    if (window_slots_.empty()) {
      window_slots_.assign((config_.num_pages + kFirstPage) * config_.page_size, -1);
      for (int page = 0; page < config_.num_pages; ++page) {
        for (int i = 0; i < config_.page_size; ++i) {
          window_slots_[(page + kFirstPage) * config_.page_size + i] =
              std::int64_t{window_page(page)} * config_.page_size + i;
        }
      }
    }
    lowlat_pools pools{};
    pools.struct_bytes = sizeof pools;
    pools.num_pages = config_.num_pages + kFirstPage;
    pools.num_window_pages = kWindowPages;
    pools.num_requests = kNumRequests;
    if (part_ == Part::target) {
      pools.window_slots = placed(r, window_slots_);
      bound_history_.push_back(placed(r, histories_[r]));
      pools.history = config_.num_engrams > 0 ? bound_history_[r] : nullptr;
    }
    pools.split_index = split_ ? 1 : 0;
    pools.num_tensors = static_cast<int>(names.size()) - 1;
    pools.names = names.data();
    pools.tensors = tensors.data();
    CHECK(lowlat_pools_bind(rank.model, &pools) == LOWLAT_INVALID);  // one is missing
    ++pools.num_tensors;
    const std::int64_t rows = tensors.back().shape[0];
    tensors.back().shape[0] = 1;
    CHECK(lowlat_pools_bind(rank.model, &pools) == LOWLAT_INVALID);  // one is short
    tensors.back().shape[0] = rows;
    TinyGroup::must(lowlat_pools_bind(rank.model, &pools));
  }

  Matrix expert(int r, const std::string& name, int e, int n, int k, int tiled_n, int tiled_k) {
    const auto& codes = own_.memory(r, name + ".weight");
    const auto& scales = own_.memory(r, name + ".scale");
    Matrix m{tiled_n, tiled_k, {}, {}};
    m.codes.assign(static_cast<std::size_t>(tiled_n) * tiled_k, 0);
    m.scales.assign(static_cast<std::size_t>(tiled_n) * tiled_k / 32, 127);
    for (int row = 0; row < n; ++row) {
      const std::size_t first = (static_cast<std::size_t>(e) * n + row);
      for (int i = 0; i < k; ++i) {
        m.codes[row * tiled_k + i] = codes[first * (k / 2) + i / 2] >> 4 * (i % 2) & 15;
      }
      for (int g = 0; g < k / 32; ++g) {
        m.scales[row * (tiled_k / 32) + g] = scales[first * (k / 32) + g];
      }
    }
    return m;
  }

  void bind(int r, int i, const lowlat_tensor_spec& one, std::vector<std::uint8_t> bytes) {
    ranks_[r]->memory[i] = std::move(bytes);
    const lowlat_tensor tensor = dense_tensor(one, placed(r, ranks_[r]->memory[i]));
    TinyGroup::must(lowlat_model_bind(model(r), one.name, &tensor));
  }

  void bind_weights(int r) {
    const int num = lowlat_model_num_tensors(model(r));
    ranks_[r]->memory.resize(num);
    const int hidden = config_.hidden, inner = config_.moe_intermediate / config_.tp_size;
    const int tiled = (inner + 63) / 64 * 64;
    const int num_experts = part_ == Part::draft ? config_.draft_experts : config_.num_experts;
    std::map<std::string, std::vector<std::uint8_t>> scales;
    for (int i = 0; i < num; ++i) {
      const lowlat_tensor_spec one = spec(r, i);
      const std::string name = one.name;
      if (one.role == LOWLAT_POOL) continue;
      if (one.layout == LOWLAT_MARLIN) {
        const std::string base = name.substr(0, name.rfind('.'));
        const bool down = base.find(".w2") != std::string::npos;
        const int n = down ? hidden : 2 * tiled, k = down ? tiled : hidden;
        const std::size_t code_bytes = static_cast<std::size_t>(n) * k / 2;
        std::vector<std::uint8_t> codes(code_bytes * num_experts);
        std::vector<std::uint8_t> powers(code_bytes / 16 * num_experts);
        for (int e = 0; e < num_experts; ++e) {
          Matrix m;
          if (down) {
            m = expert(r, base, e, hidden, inner, hidden, tiled);
          } else {
            const std::string prefix = base.substr(0, base.rfind('.'));
            m = expert(r, prefix + ".w1", e, inner, hidden, tiled, hidden);
            const Matrix up = expert(r, prefix + ".w3", e, inner, hidden, tiled, hidden);
            m.codes.insert(m.codes.end(), up.codes.begin(), up.codes.end());
            m.scales.insert(m.scales.end(), up.scales.begin(), up.scales.end());
            m.n = 2 * tiled;
          }
          to_marlin(m, &codes[code_bytes * e], &powers[code_bytes / 16 * e]);
        }
        bind(r, i, one, name.ends_with(".weight") ? codes : powers);
      } else if (one.dtype == LOWLAT_BF16 && name.find("wo_a.weight") != std::string::npos) {
        bind(r, i, one, expanded_wo_a(r, name));
      } else {
        bind(r, i, one, own_.memory(r, name));
      }
    }
  }

  // Codes times scales: exact in bf16.
  std::vector<std::uint8_t> expanded_wo_a(int r, const std::string& name) {
    const auto& codes = own_.memory(r, name);
    const std::string scale_name = name.substr(0, name.rfind('.')) + ".scale";
    const auto& scales = own_.memory(r, scale_name);
    const int block = config_.scale_block;
    const int columns = config_.num_heads / config_.o_groups * config_.head_dim;
    std::vector<std::uint8_t> out(codes.size() * 2);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const std::size_t row = i / columns, column = i % columns;
      const int power = scales[row / block * (columns / block) + column / block] - 127;
      const int code = codes[i] & 0x7f, exponent = code >> 3, mantissa = code & 7;
      const double value =
          exponent > 0 ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
      const auto f = static_cast<float>((codes[i] & 0x80 ? -1 : 1) * std::ldexp(value, power));
      std::uint32_t word;
      std::memcpy(&word, &f, 4);
      CHECK((word & 0xffffu) == 0);
      const auto half = static_cast<std::uint16_t>(word >> 16);
      std::memcpy(&out[2 * i], &half, 2);
    }
    return out;
  }

  TinyGroup& own_;
  lowlat_model_config config_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::vector<std::int32_t>> histories_;
  std::vector<std::int32_t*> bound_history_;
  std::vector<std::int64_t> window_slots_;
  std::map<std::string, std::size_t> place_;
  bool split_, on_host_ = true;
  Part part_;
};

// The hosted arrays of the same step; a request of StepArrays that pads is page 0's.
struct HostedArrays {
  std::vector<std::int64_t> token_ids, positions, slots, requests;
  std::vector<std::int32_t> page_table;
  std::vector<std::uint16_t> hidden, features, streams;
  lowlat_hosted_step step{};

  HostedArrays(const StepArrays& own, const lowlat_model_config& config, lowlat_step_mode mode) {
    const auto num_rows = own.token_ids.size();
    for (std::size_t t = 0; t < num_rows; ++t) {
      token_ids.push_back(own.token_ids[t]);
      positions.push_back(own.positions[t]);
      slots.push_back(own.slots[t] < 0 ? static_cast<std::int64_t>(t)
                                       : own.slots[t] + kFirstPage * own.page_size);
    }
    // Two more entries a request than its table has, as where rows have tables.
    for (int r = 0; r < own.batch_size; ++r) {
      requests.push_back(request_row(own.state_slots[r]));
      for (int i = 0; i < own.stride; ++i) {
        const int page = own.page_table[r * own.stride + i];
        page_table.push_back(page < 0 ? 0 : page + kFirstPage);
      }
      page_table.insert(page_table.end(), 2, 0x7fff'ffff);
    }
    hidden.assign(num_rows * config.hidden, 0);
    features.assign(num_rows * config.num_draft_stages * config.hidden, kNan);
    streams.assign(num_rows * 4 * config.hidden, kNan);
    step.struct_bytes = sizeof step;
    step.mode = mode;
    step.batch_size = own.batch_size;
    step.tokens_per_request = own.tokens_per_request;
    step.page_table_stride = own.stride + 2;
    step.num_table_pages = own.stride;
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.slots = slots.data();
    step.requests = requests.data();
    step.page_table = page_table.data();
    step.hidden = hidden.data();
    step.features = features.data();
    step.streams = streams.data();
  }
};

}  // namespace lowlat::testing
