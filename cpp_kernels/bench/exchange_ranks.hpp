// bench/exchange_ranks.hpp: ranks that exchange the partial sums of their output projections, each
// on its GPU or all on one: products, publishing or not, and the kernel that receives. For programs
// that check and time the exchange. More rows than kHopRows: fewer come by packets from kernels
// that are not in the chain.
#pragma once

#include <memory>

#include "bench/attn_layer.hpp"
#include "bench/peers.hpp"

namespace lowlat::bench {

// One rank's chain of layers, on the current device, which is the region's too.
struct ExchangeRank {
  static constexpr std::uint64_t kBudgetNs = 200'000'000;
  int rank, rows;
  std::vector<DeviceWeights> weights;
  Activations act;
  host::cuda::ExchangeRegion& region;
  std::vector<std::uint16_t> residual;
  std::unique_ptr<Graph> graph;

  // Weights differ between ranks where they are sharded, inputs nowhere.
  ExchangeRank(host::cuda::ExchangeRegion& own, int tp_rank, int tp_size, int num_rows, int layers)
      : rank(tp_rank),
        rows(num_rows),
        act(num_rows, 64 / tp_size, 8 / tp_size),
        region(own),
        residual(act.count(4 * kHidden)) {
    const int groups = 8 / tp_size;
    Random whole(3), shard(100 + static_cast<std::uint64_t>(tp_rank));
    HostWeights host(64 / tp_size, groups, whole);
    host.wo_a = HostFp8(std::int64_t{groups} * 1024, 4096, 127 - 11, shard);
    host.wo_b = HostFp8(kHidden, std::int64_t{groups} * 1024, 127 - 12, shard);
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
    // The graph's stream does not wait for the one that fills, which waits for no other rank's.
    cuda_must(cudaStreamSynchronize(nullptr), "inputs");
    graph->replay();
  }
  void wait() const {
    wait_for(graph->stream(), kRanksBudget, [&] {
      std::printf("rank %d: state %u stage %u peer %d\n", rank, status()[0], status()[2],
                  static_cast<int>(status()[3]));
    });
  }
  // Residual and x as one list.
  std::vector<std::uint16_t> result() const {
    std::vector<std::uint16_t> out = act.residual[1].take();
    const std::vector<std::uint16_t> x = act.x.take();
    out.insert(out.end(), x.begin(), x.end());
    return out;
  }
  const std::uint32_t* status() const {
    return static_cast<const std::uint32_t*>(region.port(kBudgetNs, 0).status);
  }
};

// One process: all ranks, each on its device, or `on_one`.
class ExchangeRanks {
 public:
  ExchangeRanks(int tp_size, int rows, int layers, bool on_one = false)
      : peers_(tp_size, rows, kHidden, on_one) {
    for (int r = 0; r < tp_size; ++r) {
      peers_.on(r);
      ranks_.push_back(std::make_unique<ExchangeRank>(peers_.of(r), r, tp_size, rows, layers));
    }
  }
  int size() const { return static_cast<int>(ranks_.size()); }
  void on(int r) const { peers_.on(r); }
  ExchangeRank& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }
  // act(rank), its device current.
  template <class Act>
  void each(Act act) {
    for (int r = 0; r < size(); ++r) {
      on(r);
      act(rank(r));
    }
  }
  void capture(bool published, bool exchange, bool early) {
    each([&](ExchangeRank& rank) { rank.capture(published, exchange, early); });
  }
  // Microseconds a layer, of the longest rank.
  Spread time(int repeats) {
    const Spread us = time_of_ranks(
        size(), repeats, [&](int r) { on(r); }, [&](int r) -> Graph& { return *rank(r).graph; },
        [&](int r) { rank(r).wait(); });
    const auto layers = static_cast<double>(rank(0).weights.size());
    return {us.median / layers, us.low / layers, us.high / layers};
  }
  bool faulted() {
    bool out = false;
    for (int r = 0; r < size(); ++r) out = out || rank(r).status()[0] != 0;
    return out;
  }

 private:
  Peers peers_;
  std::vector<std::unique_ptr<ExchangeRank>> ranks_;
};

}  // namespace lowlat::bench
