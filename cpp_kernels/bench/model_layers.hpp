// bench/model_layers.hpp: models of a few plain V4.1 layers through the C ABI, to time a layer of a
// schedule that runs whole steps: the time of a step of more layers less that of one of fewer.
//
// Layer 0 owns the compressed keys and the selection that the others, plain layers, read. Weights
// are random, the caches as empty as they began: a plain layer gathers as many keys whatever they
// are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/model_config.hpp"
#include "lowlat/kernels.h"

namespace lowlat::bench {

inline void must(lowlat_status status) {
  if (status != LOWLAT_OK) throw std::runtime_error(lowlat_last_error());
}

// Sizes of tiny layers, every rule of the real ones in them.
inline lowlat_model_config tiny_layers(int tp_size, int tp_rank, int num_layers, int rows) {
  lowlat_model_config c = v41_rules();
  c.hidden = 128;
  c.num_layers = num_layers;
  c.vocab = 128;
  c.num_heads = 8;
  c.q_lora = 64;
  c.o_groups = 4;
  c.o_lora = 64;
  c.window = 16;
  c.num_experts = 16;
  c.moe_intermediate = 128;
  c.index_heads = 2;
  c.index_topk = 32;
  for (int i = 0; i < num_layers; ++i) c.layers[i] = {1, 0, 0, -1, -1, 0};
  c.tp_rank = tp_rank;
  c.tp_size = tp_size;
  c.widths[c.num_widths++] = rows;
  c.max_batch = 1;
  c.max_rows = std::max(rows, 16);
  c.page_size = 64;
  c.num_pages = 4;
  c.state_ring = 8;
  c.wait_budget_ns = 10'000'000'000ull;
  return c;
}

// All ranks of a model on the platform scalar, and one step of `rows` rows of one request.
class ScalarLayers {
 public:
  ScalarLayers(int tp_size, int num_layers, int rows) : rows_(rows), ranks_(tp_size) {
    for (int r = 0; r < tp_size; ++r) {
      const lowlat_model_config config = tiny_layers(tp_size, r, num_layers, rows);
      lowlat_model* model = nullptr;
      must(lowlat_model_create("scalar", &config, &model));
      ranks_[r].model.reset(model);
      bind(ranks_[r]);
    }
    for (Rank& rank : ranks_) {
      for (int peer = 0; peer < tp_size; ++peer) {
        if (&ranks_[peer] == &rank) continue;
        lowlat_peer_handle handle;
        must(lowlat_peer_export(ranks_[peer].model.get(), &handle));
        must(lowlat_peer_import(rank.model.get(), peer, &handle));
      }
      must(lowlat_model_ready(rank.model.get()));
    }
    const lowlat_model_config config = tiny_layers(tp_size, 0, num_layers, rows);
    for (int page = 0; page < config.num_pages; ++page) page_table_.push_back(page);
    // Past the selection's size, so that a row sees as many keys as it may.
    const int start = config.num_pages * config.page_size - rows;
    for (int row = 0; row < rows; ++row) {
      tokens_.push_back((7 * row + 3) % config.vocab);
      positions_.push_back(start + row);
      request_.push_back(0);
      slots_.push_back(start + row);
    }
  }

  // One step on every rank, by the persistent schedule or one stage after another; the argmax of
  // every row, of rank 0.
  std::vector<std::int32_t> run(bool plain) {
    const std::int32_t history[3] = {1, 2, 3}, state_slot = 0;
    for (Rank& rank : ranks_) {
      lowlat_step step{};
      step.struct_bytes = sizeof step;
      step.mode = LOWLAT_TARGET_VERIFY;
      step.num_rows = rows_;
      step.batch_size = 1;
      step.tokens_per_request = rows_;
      step.page_table_stride = static_cast<std::int32_t>(page_table_.size());
      step.token_ids = tokens_.data();
      step.positions = positions_.data();
      step.request_idx = request_.data();
      step.slots = slots_.data();
      step.page_table = page_table_.data();
      step.history = history;
      step.state_slots = &state_slot;
      step.num_logit_rows = rows_;
      rank.argmax.assign(rows_, -1);
      step.argmax = rank.argmax.data();
      must(plain ? lowlat_plain_step_launch(rank.model.get(), &step, nullptr)
                 : lowlat_step_launch(rank.model.get(), &step, nullptr));
    }
    for (Rank& rank : ranks_) must(lowlat_synchronize(rank.model.get(), kBudgetNs));
    for (const Rank& rank : ranks_) {
      if (rank.argmax != ranks_[0].argmax) throw std::runtime_error("ranks have other tokens");
    }
    return ranks_[0].argmax;
  }
  // Bytes of the weights of rank 0's layer `layer`.
  double layer_bytes(int layer) {
    const std::string start = "layers." + std::to_string(layer) + ".";
    double sum = 0.0;
    lowlat_model* model = ranks_[0].model.get();
    for (int i = 0; i < lowlat_model_num_tensors(model); ++i) {
      const lowlat_tensor_spec spec = spec_of(model, i);
      if (spec.role == LOWLAT_WEIGHT && std::string(spec.name).rfind(start, 0) == 0) {
        sum += static_cast<double>(ranks_[0].memory[i].size());
      }
    }
    return sum;
  }

 private:
  static constexpr std::uint64_t kBudgetNs = 60'000'000'000ull;
  struct Destroy {
    void operator()(lowlat_model* model) const { lowlat_model_destroy(model); }
  };
  struct Rank {
    std::vector<std::vector<std::uint8_t>> memory;  // one a tensor
    std::vector<std::int32_t> argmax;
    std::unique_ptr<lowlat_model, Destroy> model;  // goes first
  };

  static lowlat_tensor_spec spec_of(lowlat_model* model, int tensor_idx) {
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    must(lowlat_model_tensor(model, tensor_idx, &spec));
    return spec;
  }

  // The same values on every rank, so that what is not sharded is equal.
  static std::vector<std::uint8_t> values(const lowlat_tensor_spec& spec) {
    static constexpr int kBytes[] = {1, 4, 8, 4, 2, 1, 1, 1};
    std::size_t count = 1;
    for (std::uint32_t d = 0; d < spec.ndim; ++d) count *= spec.shape[d];
    std::vector<std::uint8_t> out(count * kBytes[spec.dtype], 0);
    if (spec.role == LOWLAT_POOL) return out;
    const std::string name = spec.name;
    const double columns = spec.ndim > 1 ? static_cast<double>(spec.shape[spec.ndim - 1]) : 1.0;
    const bool gain = name.find("norm") != std::string::npos;
    std::uint64_t state = 0xcbf2'9ce4'8422'2325ull;
    for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3ull;
    const auto bits = [&] {
      std::uint64_t z = state += 0x9e37'79b9'7f4a'7c15ull;
      z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
      return z ^ z >> 31;
    };
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t z = bits();
      float value = static_cast<float>(static_cast<std::int32_t>(z >> 32)) * 0x1p-31f;
      value = gain ? 1.0f + 0.1f * value : value * static_cast<float>(1.7 / std::sqrt(columns));
      std::uint32_t word;
      std::memcpy(&word, &value, 4);
      switch (spec.dtype) {
        case LOWLAT_F32: std::memcpy(&out[4 * i], &word, 4); break;
        case LOWLAT_BF16: {
          const auto half = static_cast<std::uint16_t>((word + 0x8000u) >> 16);
          std::memcpy(&out[2 * i], &half, 2);
          break;
        }
        // Magnitudes below two.
        case LOWLAT_E4M3: out[i] = static_cast<std::uint8_t>(z & 0xbf); break;
        case LOWLAT_FP4X2: out[i] = static_cast<std::uint8_t>(z); break;
        case LOWLAT_UE8M0: out[i] = static_cast<std::uint8_t>(123 - z % 2); break;
        default: break;
      }
    }
    return out;
  }

  static void bind(Rank& rank) {
    const int num = lowlat_model_num_tensors(rank.model.get());
    for (int i = 0; i < num; ++i) {
      const lowlat_tensor_spec spec = spec_of(rank.model.get(), i);
      rank.memory.push_back(values(spec));
      const lowlat_tensor tensor = dense_tensor(spec, rank.memory.back().data());
      must(lowlat_model_bind(rank.model.get(), spec.name, &tensor));
    }
  }

  int rows_;
  std::vector<Rank> ranks_;
  std::vector<std::int32_t> tokens_, positions_, request_, slots_, page_table_;
};

}  // namespace lowlat::bench
