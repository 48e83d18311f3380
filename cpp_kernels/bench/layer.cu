// bench_layer: checks and times whole plain V4.1-Flash layers: attention half, exchange, mixture of
// experts, exchange, chained in one CUDA graph.
//
//   bench_layer tp4 [table] [rows..]   TP4's share on one GPU, its four mailboxes looped back;
//                                      table: routed by given ids, the same in all cases
//   bench_layer tp2 [rows..]           attention halves of TP2 on devices 0 and 1
//
// Exit code 1: a failure.
#include "bench/layer_case.cuh"
#include "bench/layer_stamps.hpp"
#include "host/nvidia/exchange_region.hpp"

#ifndef LOWLAT_STAMPS
#define LOWLAT_STAMPS 0
#endif

#include <chrono>
#include <memory>

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4;
int failures = 0;

struct Case {
  const char* name;
  fused::LayerParts parts;
  bool whole() const { return parts.attention && parts.experts && parts.second_statistics; }
};
constexpr fused::MixPlace kLater = fused::MixPlace::after_attention;
const Case kCases[] = {
    {"step's first kernels alone", {false, false, false}},
    {"attention half", {true, false, true}},
    {"attention half, statistics first", {true, false, true, 0, 0, fused::MixPlace::first}},
    {"attention half, statistics later", {true, false, true, 0, 0, kLater}},
    {"attention half, 16 of statistics", {true, false, true, 16}},
    {"attention half, 16 of them later", {true, false, true, 16, 0, kLater}},
    {"attention half, 64 of statistics", {true, false, true, 64}},
    {"layer", {true, true, true}},
    {"layer, 1 idle", {true, true, true, 0, 1}},
    {"layer, 2 idle", {true, true, true, 0, 2}},
    {"layer, 4 idle", {true, true, true, 0, 4}},
    {"layer without second statistics", {true, true, false}},
    {"experts, exchange, statistics", {false, true, true}},
};

void print(const Case& c, int tp, int rows, const Times& times, double experts, bool faulted) {
  std::printf("%-34s TP%d T=%-2d a layer: median %7.2f us  low %7.2f  high %7.2f  experts %.1f%s\n",
              c.name, tp, rows, times.median_us / kLayers, times.low_us / kLayers,
              times.high_us / kLayers, experts, faulted ? "  FAULTED" : "");
  std::fflush(stdout);
}

void report(bool good, const char* what, int rows) {
  failures += good ? 0 : 1;
  std::printf("%s T=%d %s\n", good ? "ok  " : "FAIL", rows, what);
  std::fflush(stdout);
}

bool all_finite(const std::vector<std::uint16_t>& codes) {
  bool finite = true;
  for (const std::uint16_t code : codes) finite &= (code & 0x7f80) != 0x7f80;
  return finite;
}

void run_tp4(const HostWeights& host, int rows, bool by_table, bool checks) {
  Mailboxes mail(rows, 4);
  Layers<4> layers(host, kLayers, rows, mail.looped(4), mail.step_epoch.get(), 0);
  layers.by_table = by_table;
  if (checks) {
    for (const Case& c : kCases) {
      Graph graph([&](cudaStream_t stream) { layers.launch(c.parts, stream); });
      for (int i = 0; i < 3; ++i) {
        if (i == 0) layers.recover();  // gates count the steps of one chain
        layers.reset();
        const auto begin = std::chrono::steady_clock::now();
        graph.replay();
        graph.wait();
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begin;
        std::printf("%-34s one replay %.2f ms", c.name, took.count());
        mail.print_status();
      }
      if (mail.faulted()) {
        mail.recover();
        layers.recover();
        ++failures;
        continue;
      }
      if (!c.whole()) continue;
      std::vector<std::uint16_t> first;
      int different = 0;
      for (int i = 0; i < 100; ++i) {
        layers.reset();
        graph.replay();
        graph.wait();
        const auto result = layers.take();
        if (i == 0) first = result;
        different += result != first ? 1 : 0;
      }
      report(different == 0 && all_finite(first) && !mail.faulted(), c.name, rows);
    }
  }
  for (const Case& c : kCases) {
    layers.recover();
    layers.reset();
    Graph graph([&](cudaStream_t stream) { layers.launch(c.parts, stream); });
    const Times times = time_of(graph, 60);
    print(c, 4, rows, times, distinct_experts(layers.ids.take(), kLayers, layers.rows),
          mail.faulted());
    if (LOWLAT_STAMPS != 0 && c.parts.mix_blocks == 0 && c.parts.idle_sms == 0 &&
        c.parts.mix_place == fused::MixPlace::measured) {
      layers.stamps.zero();
      graph.replay();
      graph.wait();
      print_stamps(layers.stamps.take(), 2);
    }
  }
}

void run_tp2(const HostWeights& host, int rows) {
  std::unique_ptr<host::cuda::ExchangeRegion> regions[2];
  std::unique_ptr<Layers<2>> ranks[2];
  const auto on = [](int device) { cuda_must(cudaSetDevice(device), "set device"); };
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r] = std::make_unique<host::cuda::ExchangeRegion>(r, 2, rows, kHidden);
  }
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r]->open(1 - r, regions[1 - r]->handle());
    regions[r]->probe(1 - r);
  }
  for (int r = 0; r < 2; ++r) regions[r]->probed_by(1 - r, 1'000'000'000);
  for (int r = 0; r < 2; ++r) {
    on(r);
    ranks[r] = std::make_unique<Layers<2>>(host, kLayers, rows, regions[r]->port(200'000'000, 0),
                                           regions[r]->step_epoch(), r);
  }
  const auto faulted = [&] {
    return *static_cast<std::uint32_t*>(ranks[0]->port.status) != 0u ||
           *static_cast<std::uint32_t*>(ranks[1]->port.status) != 0u;
  };
  for (const Case& c : kCases) {
    if (c.parts.experts) continue;  // refused by launch_plain_layer
    std::unique_ptr<Graph> graphs[2];
    cudaEvent_t begin[2], end[2];
    for (int r = 0; r < 2; ++r) {
      on(r);
      graphs[r] =
          std::make_unique<Graph>([&](cudaStream_t stream) { ranks[r]->launch(c.parts, stream); });
      cuda_must(cudaEventCreate(&begin[r]), "event");
      cuda_must(cudaEventCreate(&end[r]), "event");
    }
    for (int r = 0; r < 2; ++r) {
      on(r);
      ranks[r]->recover();
    }
    int different = 0;
    std::vector<std::uint16_t> first;
    for (int i = 0; i < 20; ++i) {
      for (int r = 0; r < 2; ++r) {
        on(r);
        ranks[r]->reset();
        graphs[r]->replay();
      }
      std::vector<std::uint16_t> result[2];
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->wait();
        result[r] = ranks[r]->take();
      }
      if (i == 0) first = result[0];
      if (faulted()) break;
      different += result[0] != result[1] || result[0] != first ? 1 : 0;
    }
    report(different == 0 && all_finite(first) && !faulted(), c.name, rows);
    if (faulted()) {
      for (int r = 0; r < 2; ++r) {
        const auto* words = static_cast<const std::uint32_t*>(ranks[r]->port.status);
        std::printf("rank %d: state %u kernel %u stage %u peer %d\n", r, words[0], words[1],
                    words[2], static_cast<int>(words[3]));
      }
      return;
    }
    std::vector<double> times;
    for (int i = 0; i < 45; ++i) {
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->replay();
        cuda_must(cudaEventRecord(begin[r], graphs[r]->stream()), "record");
        for (int j = 0; j < 2; ++j) graphs[r]->replay();
        cuda_must(cudaEventRecord(end[r], graphs[r]->stream()), "record");
      }
      double longest = 0.0;
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->wait();
        float ms;
        cuda_must(cudaEventElapsedTime(&ms, begin[r], end[r]), "elapsed");
        longest = std::max(longest, ms * 1e3 / 2);
      }
      if (i >= 5) times.push_back(longest);
    }
    std::sort(times.begin(), times.end());
    on(0);
    print(c, 2, rows, {times[20], times[4], times[36]},
          distinct_experts(ranks[0]->ids.take(), kLayers, ranks[0]->rows), faulted());
    for (int r = 0; r < 2; ++r) {
      cudaEventDestroy(begin[r]);
      cudaEventDestroy(end[r]);
    }
  }
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // a run that is killed shows where it stood
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "tp4" && what != "tp2") {
    std::fprintf(stderr, "usage: bench_layer tp4|tp2 [table] [rows..]\n");
    return 2;
  }
  std::vector<int> rows;
  const bool by_table = argc > 2 && std::string(argv[2]) == "table";
  for (int i = by_table ? 3 : 2; i < argc; ++i) rows.push_back(std::atoi(argv[i]));
  if (rows.empty()) rows = {6};
  Random random(1);
  const HostWeights host(what == "tp4" ? 16 : 32, what == "tp4" ? 2 : 4, random);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (what == "tp4") {
      run_tp4(host, rows[i], by_table, i == 0);
    } else {
      run_tp2(host, rows[i]);
    }
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
