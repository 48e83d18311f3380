// bench/layer_group.cuh: chains of plain layers of all ranks of a group, each rank on its device,
// or one whose mailboxes are looped back to it. For the programs that time layers and the test that
// checks them.
#pragma once

#include <memory>

#include "bench/layer_case.cuh"
#include "bench/peers.hpp"

namespace lowlat::bench {

template <int kTp>
class Group {
 public:
  static constexpr std::uint64_t kBudgetNs = 200'000'000;

  // gpus: 1, the mailboxes of all ranks are rank 0's own, or as many as ranks. `same_everywhere`:
  // all ranks have the shards of rank 0, as one that is looped back is added up.
  Group(int gpus, int num_layers, int rows, bool same_everywhere = false) {
    const auto add = [&](int rank, fused::ExchangePort port, std::uint64_t* epoch) {
      const int shard = same_everywhere ? 0 : rank;
      port.budget_ns = kBudgetNs;
      ranks_.push_back(
          std::make_unique<Layers<kTp>>(weights(shard), num_layers, rows, port, epoch, shard));
    };
    if (gpus == 1) {
      mail_ = std::make_unique<Mailboxes>(rows, kTp);
      add(0, mail_->looped(kTp), mail_->step_epoch.get());
    } else {
      peers_ = std::make_unique<Peers>(kTp, rows, kHidden);
      for (int r = 0; r < kTp; ++r) {
        on(r);
        add(r, peers_->of(r).port(kBudgetNs, 0), peers_->of(r).step_epoch());
      }
    }
    graphs_.resize(ranks_.size());
  }

  // Attention's weights of a rank: what is sharded differs by rank.
  static const HostWeights& weights(int rank) {
    static std::vector<std::unique_ptr<HostWeights>> all(kTp);
    auto& own = all[static_cast<std::size_t>(rank)];
    if (own == nullptr) own = std::make_unique<HostWeights>(sharded_weights<kTp>(rank));
    return *own;
  }

  void on(int rank) const { use_device(mail_ ? 0 : rank); }
  Layers<kTp>& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }
  Layers<kTp>& first() { return rank(0); }
  Graph& graph(int r) { return *graphs_[static_cast<std::size_t>(r)]; }
  int size() const { return static_cast<int>(ranks_.size()); }
  Peers* peers() const { return peers_.get(); }
  template <class Do>
  void each(Do act) {
    for (int r = 0; r < size(); ++r) {
      on(r);
      act(r);
    }
  }

  void capture(const fused::LayerParts& parts) {
    each([&](int r) {
      graphs_[static_cast<std::size_t>(r)] =
          std::make_unique<Graph>([&](cudaStream_t stream) { rank(r).launch(parts, stream); });
    });
    recover();
  }
  // The inputs of a step; the devices are idle. The graphs' streams do not wait for the one that
  // fills.
  void begin() {
    each([&](int r) {
      rank(r).reset();
      cuda_must(cudaDeviceSynchronize(), "inputs");
    });
  }
  // Another input, the same for the same number, on all ranks.
  void begin(int input) {
    each([&](int r) { rank(r).use_input(input); });
    begin();
  }
  void wait(int r) {
    on(r);
    wait_for(graph(r).stream(), kRanksBudget, [&] { std::printf("%s\n", states().c_str()); });
  }
  void wait() {
    each([&](int r) { wait(r); });
  }
  // One step by the graphs.
  void replay() {
    each([&](int r) { graph(r).replay(); });
    wait();
  }
  // One step launched as it comes; the graphs' streams take it.
  void launch(const fused::LayerParts& parts) {
    each([&](int r) { rank(r).launch(parts, graph(r).stream()); });
    wait();
  }
  std::vector<std::uint16_t> result(int r) {
    on(r);
    return rank(r).take();
  }
  const std::uint32_t* status(int r) {
    return static_cast<const std::uint32_t*>(rank(r).port.status);
  }
  std::string states() {
    std::string out;
    for (int r = 0; r < size(); ++r) {
      const std::uint32_t* words = status(r);
      out += (r == 0 ? "rank " : "; rank ") + std::to_string(r) + ": state " +
             std::to_string(words[0]) + ", kernel " + std::to_string(words[1]) + ", stage " +
             std::to_string(words[2]) + ", peer " +
             std::to_string(static_cast<std::int32_t>(words[3]));
    }
    return out;
  }
  // "" or the states, where a rank has one.
  std::string fault() {
    for (int r = 0; r < size(); ++r) {
      if (status(r)[0] != 0u) return states();
    }
    return "";
  }
  // After a fault, and before steps that leave the statistics other multiprocessors.
  void recover() {
    each([&](int) { cuda_must(cudaDeviceSynchronize(), "a step"); });
    if (mail_ != nullptr) mail_->recover();
    if (peers_ != nullptr) peers_->recover();
    each([&](int r) { rank(r).recover(); });
  }

  // Microseconds a layer, of the longest rank.
  Spread time(int repeats) {
    const Spread us = time_of_ranks(
        size(), repeats, [&](int r) { on(r); }, [&](int r) -> Graph& { return graph(r); },
        [&](int r) { wait(r); });
    const int layers = first().num_layers;
    return {us.median / layers, us.low / layers, us.high / layers};
  }

 private:
  std::unique_ptr<Mailboxes> mail_;
  std::unique_ptr<Peers> peers_;
  std::vector<std::unique_ptr<Layers<kTp>>> ranks_;
  std::vector<std::unique_ptr<Graph>> graphs_;
};

}  // namespace lowlat::bench
