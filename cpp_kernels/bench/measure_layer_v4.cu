// bench/measure_layer_v4.cu: V4-Flash's layers of every kind, checked and timed; the program behind
// `lowlat bench layer --model v4`.
//
// A rank's share on one GPU, its mailboxes looped back: a chain of layers of one ratio in one CUDA
// graph, each with weights, pools and rings of its own, 8K positions of context; a figure is the
// graph's time over the number of layers.
#include "bench/layer_v4_case.cuh"
// The model comes first.
#include "bench/machine.cuh"
#include "bench/program.hpp"
#include "shape/bytes.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4, kReplays = 20, kLength = 8180;

// What a layer must read: each weight once, of the chosen experts, and stored keys.
template <int kTp>
double layer_bytes(const PooledChainOf<kTp>& chain) {
  using Shape = ModelOf<kTp>;
  const int rows = chain.sizes.rows();
  const double distinct = distinct_experts(chain.layers.ids.take(), kLayers, rows);
  double sum = shape::plain_layer_bytes<Shape>(0) + distinct * shape::expert_weight_bytes<Shape>() +
               rows * Shape::kWindow * shape::kKvRowBytes;
  const double requests = chain.sizes.requests;
  if (chain.ratio == 4) {
    sum += shape::overlap_layer_bytes<Shape>(0) - shape::plain_layer_bytes<Shape>(0) +
           requests * shape::index_kv_bytes(kLength) +
           rows * Shape::kIndexTopk * shape::kKvRowBytes;
  } else if (chain.ratio == 128) {
    sum += shape::block_layer_bytes<Shape>(0) - shape::plain_layer_bytes<Shape>(0) +
           requests * shape::block_kv_bytes(kLength);
  }
  return sum;
}

// Kernels run one by one and replayed steps give the same bits, and nothing faulted.
template <class Chain>
bool check(Report& report, Chain& chain, Graph& graph, const std::string& at) {
  const std::function<void(fused::HopKernel)> wait = [](fused::HopKernel) {
    cuda_must(cudaDeviceSynchronize(), "kernel");
  };
  fused::LayerParts alone;
  alone.between = &wait;
  const auto run = [&](bool one_by_one) {
    chain.layers.reset();
    // The graph's stream does not wait for the one that fills.
    cuda_must(cudaDeviceSynchronize(), "inputs");
    if (one_by_one) {
      chain.launch(alone, graph.stream());
    } else {
      graph.replay();
    }
    cuda_must(cudaDeviceSynchronize(), "step");
    return chain.layers.take();
  };
  const std::vector<std::uint16_t> first = run(true);
  int different = 0;
  for (int i = 0; i < kReplays && !chain.mail.faulted(); ++i) different += run(false) != first;
  report.check("no wait expired" + at, !chain.mail.faulted());
  report.check("residual and x finite" + at, all_finite(first));
  report.check(std::to_string(kReplays) + " replays equal kernels one by one" + at, different == 0,
               std::to_string(different) + " differ");
  return !chain.mail.faulted();
}

template <int kTp>
int run(const Words& words, Report& report) {
  Random random(1);
  const HostWeights host(64 / kTp, 8 / kTp, random);
  const HostV4 beside(random);
  for (const int rows : words.rows) {
    for (const int ratio : {0, 4, 128}) {
      const std::string name = "layer of ratio " + std::to_string(ratio);
      const int tokens = rows % 6 == 0 ? 6 : 1;
      PooledChainOf<kTp> chain(host, beside, kLayers, ratio, rows / tokens, tokens, kLength);
      Graph graph([&](cudaStream_t stream) { chain.launch({}, stream); });
      if (!check(report, chain, graph, " T=" + std::to_string(rows) + ", " + name)) return 1;
      const Times times = time_of(graph, words.repeats);
      const Spread us = {times.median_us / kLayers, times.low_us / kLayers,
                         times.high_us / kLayers};
      report.figure({name, "v4", words.schedule, kTp, 1, rows, us, words.repeats,
                     layer_bytes(chain), "chain of 4 layers, 8K positions"});
    }
  }
  return report.all_good() ? 0 : 1;
}

int measure_all(const Words& words, Report& report) {
  const std::string many = words.gpus == 1 ? "" : "V4's layers are timed on one GPU: --gpus 1";
  const std::string why = first_of(
      {wrong_kind(words, "v4", "fused"), many, wrong_places(words), needless_stamps(words)});
  return on_machine(report, words.gpus, why, [&](const Machine&) {
    return words.tp == 2 ? run<2>(words, report) : run<4>(words, report);
  });
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
