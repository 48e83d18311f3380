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

#include "bench/model_calls.hpp"
#include "bench/model_config.hpp"
#include "lowlat/kernels.h"

namespace lowlat::bench {

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
  ScalarLayers(int tp_size, int num_layers, int rows) : ranks_(tp_size) {
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
    rows_ = StepRows(config.num_pages, config.page_size);
    rows_.state = {0};
    rows_.history = {1, 2, 3};
    for (int page = 0; page < config.num_pages; ++page) rows_.pages.push_back(page);
    // Past the selection's size, so that a row sees as many keys as it may.
    const int start = config.num_pages * config.page_size - rows;
    for (int row = 0; row < rows; ++row) rows_.add((7 * row + 3) % config.vocab, start + row);
  }

  // One step on every rank, by the persistent schedule or one stage after another; the argmax of
  // every row, of rank 0.
  std::vector<std::int32_t> run(bool plain) {
    const int rows = static_cast<int>(rows_.tokens.size());
    for (Rank& rank : ranks_) {
      lowlat_step step = rows_.step(rows, [](const auto& values) { return values.data(); });
      step.num_logit_rows = rows;
      rank.argmax.assign(rows_.tokens.size(), -1);
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

  // The same values on every rank, so that what is not sharded is equal.
  static std::vector<std::uint8_t> values(const lowlat_tensor_spec& spec) {
    const auto count = static_cast<std::size_t>(count_of(spec));
    std::vector<std::uint8_t> out(static_cast<std::size_t>(bytes_of(spec)), 0);
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

  StepRows rows_{0, 0};
  std::vector<Rank> ranks_;
};

}  // namespace lowlat::bench
