// bench/exchange_pair.hpp: two ranks that exchange the partial sums of TP2's output projections,
// each on its GPU: products, publishing or not, and the kernel that receives. For programs that
// check and time the exchange. More rows than kHopRows: fewer come by packets from kernels that are
// not in the chain.
#pragma once

#include <memory>

#include "bench/attn_layer.hpp"
#include "bench/report.hpp"
#include "host/nvidia/exchange_region.hpp"

namespace lowlat::bench {

inline constexpr int kRanks = 2, kHeads = 32, kGroups = 4;
inline constexpr std::uint64_t kBudgetNs = 200'000'000;

struct Rank {
  int rank, rows;
  std::vector<DeviceWeights> weights;
  Activations act;
  host::cuda::ExchangeRegion region;
  std::vector<std::uint16_t> residual;
  std::unique_ptr<Graph> graph;

  // On the current device. Weights differ between ranks where they are sharded, inputs nowhere.
  Rank(int tp_rank, int num_rows, int layers)
      : rank(tp_rank),
        rows(num_rows),
        act(num_rows, kHeads, kGroups),
        region(tp_rank, kRanks, num_rows, kHidden),
        residual(act.count(4 * kHidden)) {
    Random whole(3), shard(100 + static_cast<std::uint64_t>(tp_rank));
    HostWeights host(kHeads, kGroups, whole);
    host.wo_a = HostFp8(std::int64_t{kGroups} * 1024, 4096, 127 - 11, shard);
    host.wo_b = HostFp8(kHidden, std::int64_t{kGroups} * 1024, 127 - 12, shard);
    for (int i = 0; i < layers; ++i) weights.emplace_back(host);
    Random input(7);
    for (auto& v : residual) v = bf16(input.normal());
    act.residual[0].put(residual);
    act.residual[1].put(residual);
    // Parameters as a layer's statistics give them; the same on every rank.
    std::vector<float> mix(act.mix.size());
    for (auto& v : mix) v = static_cast<float>(0.1 + 0.4 * input.uniform());
    act.mix.put(mix);
    // An attention output of about one, another on each rank.
    std::vector<std::uint16_t> o(act.o.size());
    for (auto& v : o) v = static_cast<std::uint16_t>(0x3800 + (shard.bits() & 0x83ff));
    act.o.put(o);
    act.o_scale.put(std::vector<float>(act.o_scale.size(), 1.0f));
  }

  void launch(bool published, bool exchange, bool early, cudaStream_t stream) {
    const fused::ExchangePort port = region.port(kBudgetNs, 0);
    const int layers = static_cast<int>(weights.size());
    cuda_must(fused::launch_begin_step(region.step_epoch(), layers, nullptr, 0, stream),
              "begin step");
    for (int i = 0; i < layers; ++i) {
      const fused::OprojParams oproj = act.oproj(weights[i], port, i, published);
      cuda_must(fused::launch_oproj_a(oproj, true, stream), "wo_a");
      cuda_must(fused::launch_oproj_b(oproj, true, stream), "wo_b");
      if (!exchange) continue;
      cuda_must(fused::launch_exchange_norm(act.exchange(weights[i], port, i, i % 2, early),
                                            kHidden, true, stream),
                "exchange");
    }
  }
  void capture(bool published, bool exchange, bool early) {
    graph = std::make_unique<Graph>(
        [&](cudaStream_t stream) { launch(published, exchange, early, stream); });
  }
  void begin() {
    act.residual[0].put(residual);
    act.x.poison();
    // The graph's stream does not wait for the one that fills.
    cuda_must(cudaDeviceSynchronize(), "inputs");
    graph->replay();
  }
  const std::uint32_t* status() const {
    return static_cast<const std::uint32_t*>(region.port(kBudgetNs, 0).status);
  }
};

// One process: both ranks, each on its device.
struct Pair {
  std::unique_ptr<Rank> ranks[kRanks];
  explicit Pair(int rows, int layers) {
    for (int r = 0; r < kRanks; ++r) {
      cuda_must(cudaSetDevice(r), "set device");
      ranks[r] = std::make_unique<Rank>(r, rows, layers);
    }
    for (int r = 0; r < kRanks; ++r) {
      cuda_must(cudaSetDevice(r), "set device");
      ranks[r]->region.open(1 - r, ranks[1 - r]->region.handle());
      ranks[r]->region.probe(1 - r);
    }
    for (int r = 0; r < kRanks; ++r) ranks[r]->region.probed_by(1 - r, kBudgetNs);
  }
  void capture(bool published, bool exchange, bool early) {
    for (int r = 0; r < kRanks; ++r) {
      cuda_must(cudaSetDevice(r), "set device");
      ranks[r]->capture(published, exchange, early);
    }
  }
  // Microseconds a layer, of the longer rank. Several replays in a row, so that the ranks' starts
  // do not count.
  Spread time(int repeats) {
    constexpr int kInARow = 4;
    std::vector<double> times;
    cudaEvent_t begin[kRanks], end[kRanks];
    for (int r = 0; r < kRanks; ++r) {
      cuda_must(cudaSetDevice(r), "set device");
      cuda_must(cudaEventCreate(&begin[r]), "event");
      cuda_must(cudaEventCreate(&end[r]), "event");
    }
    for (int i = 0; i < repeats + 5; ++i) {
      for (int r = 0; r < kRanks; ++r) {
        cuda_must(cudaSetDevice(r), "set device");
        ranks[r]->graph->replay();
        cuda_must(cudaEventRecord(begin[r], ranks[r]->graph->stream()), "record");
        for (int j = 0; j < kInARow; ++j) ranks[r]->graph->replay();
        cuda_must(cudaEventRecord(end[r], ranks[r]->graph->stream()), "record");
      }
      double longest = 0.0;
      for (int r = 0; r < kRanks; ++r) {
        cuda_must(cudaSetDevice(r), "set device");
        ranks[r]->graph->wait();
        float ms = 0.0f;
        cuda_must(cudaEventElapsedTime(&ms, begin[r], end[r]), "elapsed");
        const auto layers = static_cast<double>(ranks[r]->weights.size());
        longest = std::max(longest, ms * 1e3 / kInARow / layers);
      }
      if (i >= 5) times.push_back(longest);
    }
    for (int r = 0; r < kRanks; ++r) {
      cudaEventDestroy(begin[r]);
      cudaEventDestroy(end[r]);
    }
    return spread_of(times);
  }
  bool faulted() const { return ranks[0]->status()[0] != 0 || ranks[1]->status()[0] != 0; }
};

}  // namespace lowlat::bench
