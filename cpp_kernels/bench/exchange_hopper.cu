// exchange_hopper: checks the exchange of partial sums between GPUs, published from the output
// projection and received by the kernel that sums, mixes and norms. One rank's share of a
// V4.1-Flash layer on each.
//
//   exchange_hopper check [N]       one process, devices 0 .. N - 1 (2): results against float64,
//                                   ranks bitwise equal, a slow rank, a rank that never comes; on
//                                   fewer devices all ranks on one, at 12 rows alone: of 48 the
//                                   receivers leave a late rank's products no multiprocessor
//   exchange_hopper processes [N]   the same by a process a rank, which exchange handles
// measure_exchange.cu times it.
//
// Exit code 1: a failure.
#include "bench/exchange_ranks.hpp"
#include "bench/processes.hpp"
#include "bench/program.hpp"
#include "reference/hc.hpp"

namespace lowlat::bench {
namespace {

void check_ranks(int tp_size, int rows, bool on_one) {
  ExchangeRanks ranks(tp_size, rows, 1, on_one);
  // The partial sums alone, for float64.
  std::vector<double> sum;
  ranks.each([&](ExchangeRank& rank) {
    rank.launch(false, false, false, nullptr);
    cuda_must(cudaDeviceSynchronize(), "synchronize");
    const std::vector<float> partial = rank.act.partial.take();
    sum.resize(partial.size());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
  });
  for (const bool early : {false, true}) {
    ranks.capture(true, true, early);
    int different = 0;
    std::vector<std::uint16_t> first;
    for (int i = 0; i < 300; ++i) {
      ranks.each([&](ExchangeRank& rank) {
        // Now and then a rank is late by a millisecond.
        if (i % 50 == 10 && rank.rank == i / 50 % tp_size) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        rank.begin();
      });
      ranks.each([&](ExchangeRank& rank) {
        rank.wait();
        const std::vector<std::uint16_t> result = rank.result();
        if (first.empty()) first = result;
        if (result == first) return;
        ++different;
        std::printf("replay %d: rank %d is not as the first\n", i, rank.rank);
      });
    }
    verdict(different == 0 && !ranks.faulted(), "T=%d 300 replays, ranks bitwise equal%s", rows,
            early ? ", early" : "");
  }
  // Against float64.
  ranks.on(0);
  const ExchangeRank& rank = ranks.rank(0);
  const std::vector<float> mix = rank.act.mix.take();
  const std::vector<std::uint16_t> got = rank.act.residual[1].take();
  double difference = 0.0, size = 0.0;
  for (int row = 0; row < rows; ++row) {
    std::vector<std::uint16_t> y(kHidden), want(4 * kHidden);
    for (int i = 0; i < kHidden; ++i) y[i] = bf16(sum[static_cast<std::size_t>(row) * kHidden + i]);
    reference::hc_post(want.data(), &rank.residual[static_cast<std::size_t>(row) * 4 * kHidden],
                       y.data(), &mix[static_cast<std::size_t>(row) * fused::kMixStride + 4],
                       &mix[static_cast<std::size_t>(row) * fused::kMixStride + 8], 1, kHidden);
    for (int i = 0; i < 4 * kHidden; ++i) {
      const double a = reference::from_bf16(got[static_cast<std::size_t>(row) * 4 * kHidden + i]);
      const double b = reference::from_bf16(want[i]);
      difference += (a - b) * (a - b);
      size += b * b;
    }
  }
  const double error = std::sqrt(difference / size);
  verdict(error <= 4e-3, "T=%d residual against float64: rel_l2 %.2e", rows, error);
}

// The last rank never comes: the first says whom it waited for; the late one leaves at once.
void check_missing_rank(int tp_size, bool on_one) {
  // Of two layers the products of the second have their places while the first exchange waits. Four
  // ranks of one device have none left then for the products of a rank that begins last, which the
  // others name. Of one layer the late rank finds all that it waits for.
  const int layers = on_one && tp_size > 2 ? 1 : 2;
  ExchangeRanks ranks(tp_size, 12, layers, on_one);
  ranks.capture(true, true, true);
  ExchangeRank& late = ranks.rank(tp_size - 1);
  ranks.each([&](ExchangeRank& rank) {
    if (&rank != &late) rank.begin();
  });
  bool named = false, ended = true;
  std::string states;
  ranks.each([&](ExchangeRank& rank) {
    if (&rank == &late) return;
    rank.wait();
    const std::uint32_t* words = rank.status();
    named = named || (words[0] == 1u && words[2] == 3u && words[3] == late.rank * 1u);
    ended = ended && words[0] != 0u;
    states += "; rank " + std::to_string(rank.rank) + ": state " + std::to_string(words[0]) +
              " stage " + std::to_string(words[2]) + " peer " +
              std::to_string(static_cast<int>(words[3]));
  });
  verdict(named && ended, "a missing rank is named%s", states.c_str());
  ranks.on(late.rank);
  cudaEvent_t begin, end;
  cuda_must(cudaEventCreate(&begin), "event");
  cuda_must(cudaEventCreate(&end), "event");
  // Its peers have sent the first exchange and gone: the second ends by the abort word.
  cuda_must(cudaEventRecord(begin, late.graph->stream()), "record");
  late.begin();
  cuda_must(cudaEventRecord(end, late.graph->stream()), "record");
  late.wait();
  float ms = 0.0f;
  cuda_must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
  verdict(ms < 100.0f, "the late rank ends before its own budget: after %.3f ms, state %u", ms,
          late.status()[0]);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// One rank of the form with a process a rank.
int run_process(const Processes& processes, int tp_rank) {
  constexpr int kRows = 12;
  use_device(tp_rank);
  host::cuda::ExchangeRegion region(tp_rank, processes.size(), kRows, kHidden);
  if (!open_peers(processes, tp_rank, region)) return 1;
  ExchangeRank rank(region, tp_rank, processes.size(), kRows, 4);
  rank.capture(true, true, true);
  if (processes.gather(tp_rank, 1).empty()) return 1;
  int different = 0;
  for (int i = 0; i < 200; ++i) {
    rank.begin();
    rank.wait();
    const auto all = processes.gather(tp_rank, digest(rank.act.x.take()));
    if (all.empty()) return 1;
    for (const std::uint64_t other : all) different += other != all[0] ? 1 : 0;
  }
  const bool good = different == 0 && rank.status()[0] == 0;
  verdict(good, "rank %d of %d processes: 200 replays, %d differ, state %u", tp_rank,
          processes.size(), different, rank.status()[0]);
  // Nobody unmaps what another still uses.
  return !processes.gather(tp_rank, good ? 1 : 0).empty() && good ? 0 : 1;
}

void check(int tp_size) {
  int devices = 0;
  cuda_must(cudaGetDeviceCount(&devices), "devices");
  const bool on_one = devices < tp_size;
  if (on_one) std::printf("%d ranks as streams of one GPU\n", tp_size);
  check_ranks(tp_size, 12, on_one);
  if (!on_one) check_ranks(tp_size, 48, on_one);
  check_missing_rank(tp_size, on_one);
}

int ranks_of(Rest& rest) { return rest.empty() ? 2 : rest.ranks(); }

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  using namespace lowlat::bench;
  return checked(
      argc, argv, "exchange_hopper check|processes [2|4]",
      {{"check", [](Rest& rest) { check(ranks_of(rest)); }},
       {"processes", [](Rest& rest) { failures += Processes::run(ranks_of(rest), run_process); }}});
}
