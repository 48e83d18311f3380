// bench_layer_v4: times whole V4-Flash layers, TP4's share (or TP2's) on one GPU, its mailboxes
// looped back: chains of four layers of one ratio in one CUDA graph.
//
//   bench_layer_v4 [tp2] [marlin] [whole] LENGTH [rows..]
//
// "marlin": as SGLang has them, experts in Marlin's tiles and attention's output as it is to wo_a.
// "whole": whole layers alone, in the order that is served.
//
// Exit code 1: a failure.
#include "bench/layer_v4_case.cuh"
// The model comes first.
#include "bench/layer_stamps.hpp"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4;

struct Case {
  const char* name;
  fused::LayerParts parts;
};

// What the words in front say.
struct How {
  bool marlin, whole;
};

template <int kTp>
void run_ratio(const HostWeights& host, const HostV4& v4, int ratio, int rows, int length,
               const How& how) {
  const int tokens = rows % 6 == 0 ? 6 : 1;
  PooledChainOf<kTp> chain(host, v4, kLayers, ratio, rows / tokens, tokens, length);
  if (how.marlin) chain.layers.bind_as_engine();
  std::vector<Case> cases = {{"attention half", {true, false, true}}, {"layer", {}}};
  // Other orders, and the last exchange by sixteen blocks a row.
  using fused::BesideOrder;
  for (const auto& [name, order] : {std::pair{"q first", BesideOrder::q_first},
                                    {"q last", BesideOrder::q_last},
                                    {"pool end", BesideOrder::pool_end},
                                    {"query first", BesideOrder::query_first},
                                    {"q end", BesideOrder::q_end},
                                    {"keys, q end", BesideOrder::keys_q_end},
                                    {"entries, q end", BesideOrder::entries_q_end},
                                    {"entries, q last", BesideOrder::entries_q_last},
                                    {"query, entries", BesideOrder::entries_query_first}}) {
    if (ratio == 0 || (ratio == 128 && order > BesideOrder::pool_end)) continue;
    if (ratio == 4 && order == BesideOrder::pool_end) continue;
    cases.push_back({name, {}});
    cases.back().parts.beside_order = order;
  }
  cases.push_back({"sixteen blocks", {}});
  cases.back().parts.few_exchange_blocks = false;
  if (how.whole) cases = {{"layer", {}}};
  std::vector<std::uint16_t> want[3];  // of halves, layers, layers by another summation
  for (const Case& c : cases) {
    chain.layers.recover();
    chain.layers.reset();
    Graph graph([&](cudaStream_t stream) { chain.launch(c.parts, stream); });
    std::vector<std::uint16_t> first;
    bool finite = true;
    int different = 0;
    for (int i = 0; i < 4; ++i) {
      chain.layers.reset();
      graph.replay();
      graph.wait();
      const std::vector<std::uint16_t> result = chain.layers.take();
      if (i == 0) first = result;
      different += result != first ? 1 : 0;
      auto& same = want[!c.parts.experts ? 0 : c.parts.few_exchange_blocks ? 1 : 2];
      if (same.empty()) same = result;
      different += result != same ? 1 : 0;
      finite = finite && all_finite(result);
      if (chain.mail.faulted()) {
        chain.mail.print_status();
        break;
      }
    }
    const bool good = finite && different == 0 && !chain.mail.faulted();
    if (chain.mail.faulted()) {
      verdict(false, "ratio %d T=%d %s: faulted", ratio, rows, c.name);
      chain.mail.recover();
      continue;
    }
    const Times times = time_of(graph, 60);
    const double distinct = distinct_experts(chain.layers.ids.take(), kLayers, rows);
    verdict(good,
            "V4 ratio %-3d length %d T=%-2d %-16s a layer: median %7.2f us  10th %7.2f  90th %7.2f"
            "  experts %.1f%s",
            ratio, length, rows, c.name, times.median_us / kLayers, times.low_us / kLayers,
            times.high_us / kLayers, distinct, chain.mail.faulted() ? "  FAULTED" : "");
    if (kStamps) {
      chain.layers.stamps.zero();
      graph.replay();
      graph.wait();
      print_stamps(chain.layers.stamps.take(), 2);
    }
  }
}

template <int kTp>
void run_rows(int length, const std::vector<int>& rows, const How& how) {
  Random random(1);
  const HostWeights host(64 / kTp, 8 / kTp, random);
  const HostV4 v4(random);
  for (const int r : rows) {
    for (const int ratio : {0, 128, 4}) run_ratio<kTp>(host, v4, ratio, r, length, how);
  }
}

bool run(Rest& rest) {
  const bool two = rest.take("tp2");
  const How how = {rest.take("marlin"), rest.take("whole")};
  const int length = rest.number(1, 1 << 20);
  const std::vector<int> rows = rest.rows();
  two ? run_rows<2>(length, rows, how) : run_rows<4>(length, rows, how);
  return true;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::checked(argc, argv, "bench_layer_v4 [tp2] [marlin] [whole] LENGTH [rows..]",
                                lowlat::bench::run);
}
