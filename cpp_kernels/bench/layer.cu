// bench_layer: checks and times whole plain V4.1-Flash layers: attention half, exchange, mixture of
// experts, exchange, chained in one CUDA graph.
//
//   bench_layer tp4 [rows..]          TP4's share on one GPU, its four mailboxes looped back
//   bench_layer tp2 [rows..]          the same of TP2
//   bench_layer ranks N [rows..]      N ranks, 2 or 4, each on a device of its own
//   bench_layer processes N [rows..]  the same by a process a rank, which exchange handles
//
// Before the rows of all but the last "table": routed by given ids, the same in all cases. Or
// "whole": whole layers alone, without what their parts take. And "marlin" before either: experts
// in Marlin's tiles, as SGLang has them.
//
// Exit code 1: a failure.
#include "bench/layer_group.cuh"
#include "bench/layer_stamps.hpp"
#include "bench/processes.hpp"
#include "bench/program.hpp"

#include <memory>

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4;

struct Case {
  const char* name;
  fused::LayerParts parts;
  bool whole() const { return parts.attention && parts.experts && parts.second_statistics; }
};
constexpr fused::MixPlace kLater = fused::MixPlace::after_attention;
const Case kCases[] = {
    {"step's first kernels alone", {false, false, false}},
    {"attention half", {.experts = false}},
    {"attention half, statistics first", {.experts = false, .mix_place = fused::MixPlace::first}},
    {"attention half, statistics later", {.experts = false, .mix_place = kLater}},
    {"attention half, 16 of statistics", {.experts = false, .mix_blocks = 16}},
    {"attention half, 16 of them later", {.experts = false, .mix_blocks = 16, .mix_place = kLater}},
    {"attention half, 64 of statistics", {.experts = false, .mix_blocks = 64}},
    {"layer", {true, true, true}},
    {"layer, 1 idle", {.idle_sms = 1}},
    {"layer, 2 idle", {.idle_sms = 2}},
    {"layer, 4 idle", {.idle_sms = 4}},
    {"layer without second statistics", {true, true, false}},
    {"experts, exchange, statistics", {false, true, true}},
};

void print(const Case& c, int tp, int gpus, int rows, const Spread& us, double experts) {
  std::printf(
      "%-34s TP%d %d GPU T=%-2d a layer: median %7.2f us  low %7.2f  high %7.2f  experts %.1f\n",
      c.name, tp, gpus, rows, us.median, us.low, us.high, experts);
  std::fflush(stdout);
}

// Checks and times every case. One that faults says where, and the next begins anew.
template <int kTp>
void run_group(int gpus, int rows, const std::string& how, bool marlin, bool checks) {
  Group<kTp> group(gpus, kLayers, rows);
  if (marlin) group.each([&](int r) { group.rank(r).bind_as_engine(); });
  group.each([&](int r) { group.rank(r).by_table = how == "table"; });
  for (const Case& c : kCases) {
    if (how == "whole" && (!c.whole() || c.parts.idle_sms != 0)) continue;
    group.capture(c.parts);
    std::vector<std::uint16_t> first;
    int different = 0;
    for (int i = 0; i < (checks && c.whole() ? 100 : 3) && group.fault().empty(); ++i) {
      group.begin();
      group.replay();
      for (int r = 0; r < group.size(); ++r) {
        const std::vector<std::uint16_t> result = group.result(r);
        if (first.empty()) first = result;
        different += result != first ? 1 : 0;
      }
    }
    if (checks) {
      verdict(different == 0 && all_finite(first) && group.fault().empty(), "T=%d %s", rows,
              c.name);
    }
    const Spread us = group.time(60);
    if (!group.fault().empty()) {
      verdict(false, "T=%d %s%s", rows, c.name, group.fault().c_str());
      continue;
    }
    group.on(0);
    print(c, kTp, gpus, rows, us, distinct_experts(group.first().ids.take(), kLayers, rows));
    if (kStamps && c.parts.mix_blocks == 0 && c.parts.idle_sms == 0 &&
        c.parts.mix_place == fused::MixPlace::measured) {
      group.first().stamps.zero();
      group.replay();
      group.on(0);
      print_stamps(group.first().stamps.take(), 2);
    }
  }
}

// One rank of the form with a process a rank: what it computes is what the others do.
template <int kTp>
int run_process(const Processes& processes, int rank, const std::vector<int>& widths) {
  use_device(rank);
  for (const int rows : widths) {
    host::cuda::ExchangeRegion region(rank, kTp, rows, kHidden);
    if (!open_peers(processes, rank, region)) return 1;
    Layers<kTp> layers(sharded_weights<kTp>(rank), kLayers, rows,
                       region.port(Group<kTp>::kBudgetNs, 0), region.step_epoch(), rank);
    Graph graph([&](cudaStream_t stream) { layers.launch({}, stream); });
    const auto* words = static_cast<const std::uint32_t*>(layers.port.status);
    const auto say = [&] {
      std::printf("rank %d: state %u kernel %u stage %u peer %d\n", rank, words[0], words[1],
                  words[2], static_cast<int>(words[3]));
    };
    if (processes.gather(rank, 1).empty()) return 1;
    int different = 0;
    bool finite = true;
    for (int i = 0; i < 200; ++i) {
      layers.use_input(i % 5);
      layers.reset();
      cuda_must(cudaDeviceSynchronize(), "inputs");
      graph.replay();
      wait_for(graph.stream(), kRanksBudget, say);
      const std::vector<std::uint16_t> result = layers.take();
      finite = finite && all_finite(result);
      const auto all = processes.gather(rank, digest(result));
      if (all.empty()) return 1;
      for (const std::uint64_t other : all) different += other != all[0] ? 1 : 0;
    }
    cudaEvent_t from, to;
    cuda_must(cudaEventCreate(&from), "event");
    cuda_must(cudaEventCreate(&to), "event");
    std::vector<double> times;
    constexpr int kInARow = 4;
    for (int i = 0; i < 65; ++i) {
      if (processes.gather(rank, i).empty()) return 1;
      graph.replay();
      cuda_must(cudaEventRecord(from, graph.stream()), "record");
      for (int j = 0; j < kInARow; ++j) graph.replay();
      cuda_must(cudaEventRecord(to, graph.stream()), "record");
      wait_for(graph.stream(), kRanksBudget, say);
      float ms = 0.0f;
      cuda_must(cudaEventElapsedTime(&ms, from, to), "elapsed");
      if (i >= 5) times.push_back(ms * 1e3 / kInARow / kLayers);
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    const Spread us = spread_of(times);
    const bool good = different == 0 && finite && words[0] == 0;
    verdict(good,
            "rank %d of %d processes T=%d: 200 replays, %d differ; a layer %.2f us (%.2f to %.2f)",
            rank, kTp, rows, different, us.median, us.low, us.high);
    if (!good) say();
    // Nobody unmaps what another still uses.
    if (processes.gather(rank, good ? 1 : 0).empty() || !good) return 1;
  }
  return 0;
}

constexpr char kUsage[] =
    "bench_layer tp4|tp2|ranks N [marlin] [table|whole] [rows..]\n"
    "       bench_layer processes N [rows..]";

template <int kTp>
void run_ranks(const std::string& what, bool looped, Rest& rest) {
  if (what == "processes") {
    const std::vector<int> widths = rest.rows();
    failures += Processes::run(
        kTp, [&](const Processes& all, int rank) { return run_process<kTp>(all, rank, widths); });
    return;
  }
  const bool marlin = rest.take("marlin");
  const std::string how = rest.take("table") ? "table" : rest.take("whole") ? "whole" : "";
  bool checks = true;
  for (const int rows : rest.rows()) {
    run_group<kTp>(looped ? 1 : kTp, rows, how, marlin, checks);
    checks = !looped || how == "whole";
  }
}

bool run(Rest& rest) {
  const std::string what = rest.take();
  const bool looped = what == "tp4" || what == "tp2";
  if (!looped && what != "ranks" && what != "processes") return false;
  const int ranks = looped ? what[2] - '0' : rest.ranks();
  ranks == 2 ? run_ranks<2>(what, looped, rest) : run_ranks<4>(what, looped, rest);
  return true;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::checked(argc, argv, lowlat::bench::kUsage, lowlat::bench::run);
}
