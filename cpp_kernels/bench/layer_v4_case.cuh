// bench/layer_v4_case.cuh: whole V4-Flash layers of one rank, with compressors and index, with
// random contents: for the program that times them and the test that checks them.
#pragma once

#define LOWLAT_BENCH_V4
#include "bench/index_v4_case.cuh"
#include "bench/layer_case.cuh"
#include "fused/layer_pooled.hpp"

namespace lowlat::bench {

// Stored keys that a step's rows see and where it writes, by the step's page table.
struct HostContext {
  std::vector<std::uint8_t> window, pool;
  std::vector<std::int32_t> window_idx, entry_idx;
  int num_entries = 0;  // of entry_idx, a row: ratio 128, or fewer entries than a selection

  HostContext(const StepV4& step, Random& random) {
    const IndexSizes& sizes = step.sizes;
    const HostKeys some(sizes.rows(), random);
    window.resize(static_cast<std::size_t>(sizes.num_pages() * kPageBytes));
    for (int page = 0; page < sizes.num_pages(); ++page) {
      std::memcpy(&window[static_cast<std::size_t>(page * kPageBytes)],
                  &some.window[static_cast<std::size_t>(page % kNumPages * kPageBytes)],
                  kPageBytes);
    }
    const std::int64_t pool_bytes = StepV4::pool_page_bytes(sizes);
    pool.resize(step.pool.size());
    for (int page = 0; page < sizes.num_pages(); ++page) {
      for (int i = 0; i < sizes.per_page(); ++i) {
        const int from = (page * sizes.per_page() + i) % kSlots;
        const std::uint8_t* src =
            &some.extra[static_cast<std::size_t>(from / kSlotsPerPage * kPageBytes)];
        std::uint8_t* dst = &pool[static_cast<std::size_t>(page * pool_bytes)];
        std::memcpy(dst + i * 576, src + from % kSlotsPerPage * 576, 576);
        std::memcpy(dst + sizes.per_page() * 576 + i * 8,
                    src + kSlotsPerPage * 576 + from % kSlotsPerPage * 8, 8);
      }
    }
    num_entries = sizes.ratio == 128 ? (sizes.max_entries() + 7) / 8 * 8 : fused::kIndexTopk;
    for (int row = 0; row < sizes.rows(); ++row) {
      const std::int32_t* pages =
          &step.page_table[static_cast<std::size_t>(row / sizes.tokens * sizes.pages_of_request())];
      const int position = step.positions[row];
      for (int i = 0; i < kWindow; ++i) {
        const int at = position - (kWindow - 1) + i;
        window_idx.push_back(
            at < 0 ? -1 : pages[at / kPositionsOfPage] * kPositionsOfPage + at % kPositionsOfPage);
      }
      const int count = (position + 1) / sizes.ratio;
      for (int i = 0; i < num_entries; ++i) {
        entry_idx.push_back(i >= count ? -1
                                       : pages[i / sizes.per_page()] * sizes.per_page() +
                                             i % sizes.per_page());
      }
    }
  }
};
struct DeviceContext {
  Buffer<std::uint8_t> window, pool;
  Buffer<std::int32_t> window_idx, entry_idx;
  int num_entries;
  explicit DeviceContext(const HostContext& from)
      : window(from.window),
        pool(from.pool),
        window_idx(from.window_idx),
        entry_idx(from.entry_idx),
        num_entries(from.num_entries) {}
};

// A chain of layers of one ratio (0: none has a pool), of a rank of `kRanks` looped back to the
// one device. Rings, pools and stored keys are each layer's own.
template <int kRanks>
struct PooledChainOf {
  static constexpr int kTp = kRanks;
  int num_layers, ratio;
  IndexSizes sizes;  // of ratio 4 where there is no pool
  Mailboxes mail;
  Layers<kTp> layers;
  std::vector<DeviceV4> beside;
  std::vector<StepV4> states;
  std::vector<DeviceContext> contexts;
  Buffer<std::int32_t> hash_ids;
  bool hashes = false;  // routed by hash_ids

  PooledChainOf(const HostWeights& host, const HostV4& v4, int layers_in_chain, int pool_ratio,
                int requests, int tokens, int length, std::uint64_t budget_ns = 20'000'000)
      : num_layers(layers_in_chain),
        ratio(pool_ratio),
        sizes{requests, tokens, pool_ratio == 0 ? 4 : pool_ratio, length},
        mail(sizes.rows(), kTp, budget_ns),
        layers(host, num_layers, sizes.rows(), mail.looped(kTp), mail.step_epoch.get(), 0),
        hash_ids(static_cast<std::size_t>(sizes.rows()) * 6) {
    Random random(0);
    for (int i = 0; i < num_layers; ++i) {
      // The same for each layer: a step has one page table and one set of slots.
      random = Random(17);
      beside.emplace_back(v4);
      states.emplace_back(sizes, Draw::random, random);
      contexts.emplace_back(HostContext(states.back(), random));
    }
    std::vector<std::int32_t> ids(hash_ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(i % 6 * 42) + random.below(42);
    }
    hash_ids.put(ids);
  }

  fused::PooledLayer layer(int i) const {
    const DeviceContext& context = contexts[i];
    const StepV4& state = states[i];
    fused::PooledLayer out = {};
    out.plain = layers.layer(i);
    out.plain.window = {context.window.get(), kPageBytes, kSlotsPerPage};
    out.plain.window_idx = context.window_idx.get();
    out.plain.extra = {context.pool.get(), StepV4::pool_page_bytes(sizes), sizes.per_page()};
    out.plain.extra_idx = context.entry_idx.get();
    out.plain.num_extra = ratio == 0 ? 0 : context.num_entries;
    out.plain.extra_ratio = ratio == 128 ? ratio : 0;
    if (hashes) out.plain.hash_ids = hash_ids.get();
    out.ratio = ratio;
    out.tokens = sizes.tokens;
    out.slots = state.d_slots.get();
    out.compress = state.product(beside[i]);
    out.pool = state.pooling(beside[i]);
    out.pool.pool = out.plain.extra;
    out.index = state.index(beside[i]);
    return out;
  }
  fused::LayerStep step(int i) const {
    fused::LayerStep step = layers.step();
    step.positions = states[0].d_positions.get();
    step.kv_slots = states[0].d_slots.get();
    step.expert_ids = layers.ids.get() + static_cast<std::size_t>(i) * sizes.rows() * 6;
    return step;
  }
  void launch(const fused::LayerParts& parts, cudaStream_t stream) {
    cuda_must(fused::launch_layer_begin(step(0), layers.step_epoch, 2 * num_layers, stream),
              "begin");
    layers.launch_input(step(0), stream);
    for (int i = 0; i < num_layers; ++i) {
      cuda_must(fused::launch_pooled_layer(layer(i), step(i), i, parts, stream), "layer");
    }
  }
};
using PooledChain = PooledChainOf<4>;

}  // namespace lowlat::bench
