// bench/measure_exchange.cu: an exchange of partial sums between GPUs, checked and timed; the
// program behind `lowlat bench exchange`.
//
// Chains of layers in a CUDA graph: output projections of V4.1-Flash whose last product publishes,
// and the kernel that sums, mixes and norms. The exchange is what that takes beyond the same chain
// with products that store their sums and no receiver. It has no floor in bytes: one hop between
// the GPUs is 1.3 us.
#include "bench/exchange_ranks.hpp"
#include "bench/machine.cuh"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 8, kReplays = 50;

// Replays give the same bits on all ranks, each time.
void check(Report& report, int tp_size, int rows) {
  ExchangeRanks ranks(tp_size, rows, 1);
  ranks.capture(true, true, true);
  std::vector<std::uint16_t> first;
  int different = 0;
  for (int i = 0; i < kReplays && !ranks.faulted(); ++i) {
    ranks.each([](ExchangeRank& rank) { rank.begin(); });
    ranks.each([&](ExchangeRank& rank) {
      rank.wait();
      const std::vector<std::uint16_t> got = rank.result();
      if (first.empty()) first = got;
      different += got != first ? 1 : 0;
    });
  }
  const std::string at = " T=" + std::to_string(rows);
  report.check("no wait expired" + at, !ranks.faulted());
  report.check(std::to_string(kReplays) + " replays, all ranks equal" + at, different == 0,
               std::to_string(different) + " differ");
}

void measure(Report& report, const Words& words, int rows) {
  ExchangeRanks ranks(words.tp, rows, kLayers);
  double bytes = 0.0;
  for (const auto* w : {&ranks.rank(0).weights[0].wo_a, &ranks.rank(0).weights[0].wo_b}) {
    bytes += static_cast<double>(w->codes.size() + w->scales.size());
  }
  ranks.capture(false, false, false);
  const Spread without = ranks.time(words.repeats);
  ranks.capture(true, true, true);
  const Spread with = ranks.time(words.repeats);
  report.check("no wait expired in the chain T=" + std::to_string(rows), !ranks.faulted());
  const auto figure = [&](const char* name, const Spread& us, double num_bytes, const char* about) {
    report.figure({name, "v41", words.schedule, words.tp, words.gpus, rows, us, words.repeats,
                   num_bytes, about});
  };
  figure("products", without, bytes, "wo_a and wo_b, sums stored");
  figure("products and exchange", with, bytes, "the same, published and received");
  // The spread of a difference: as far apart as the two can be.
  figure("exchange",
         {with.median - without.median, with.low - without.high, with.high - without.low}, 0.0,
         "the difference of the two");
}

std::string wrong_exchange(const Words& words) {
  if (words.tp != words.gpus || (words.tp != 2 && words.tp != 4)) {
    return "the exchange is timed between GPUs, one a rank: --tp 2 --gpus 2, or 4 and 4";
  }
  for (const int rows : words.rows) {
    if (rows <= fused::kHopRows) {
      return "the exchange alone is timed with --rows from 9 on, not " + std::to_string(rows) +
             "; fewer go by packets, inside whole layers";
    }
  }
  return "";
}

int measure_all(const Words& words, Report& report) {
  const std::string why = first_of({wrong_kind(words, "v41", "fused"), wrong_exchange(words)});
  return on_machine(report, words.gpus, why, [&](const Machine&) {
    for (const int rows : words.rows) {
      check(report, words.tp, rows);
      if (!report.all_good()) return 1;
      measure(report, words, rows);
    }
    return report.all_good() ? 0 : 1;
  });
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
