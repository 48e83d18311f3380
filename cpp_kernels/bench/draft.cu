// draft: the five proposals of a draft, and their acceptance, at true shapes: checked, then timed.
//
//   bench_draft check [N]     1, 2, 4 ranks on one GPU (N 2, 4: on so many); results, faults
//   bench_draft time          one GPU: TP4's share with its mailboxes looped back, and TP1
//   bench_draft time N        TP2 or TP4 on as many GPUs
//   bench_draft small         a few ids, for compute-sanitizer
//   bench_draft profile [N]   where the time of a step goes, from clocks in each block
//
// Times are of a CUDA graph of six launches, weights and logits rotated past the second-level
// cache; the floor is the bytes at the bandwidth of a plain read of 2 GiB in the same run.
// Exit code 1: a failure.
#include "bench/draft_accept_case.cuh"
#include "bench/draft_checks.cuh"
#include "bench/draft_times.cuh"
#include "bench/machine.cuh"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

void check_case(const DraftWeights& weights, const DraftSetup& setup, const char* what,
                int times = 1, int late_rank = -1) {
  DraftGroup group(setup, weights);
  group.capture();
  for (int i = 0; i < times; ++i) {
    failures += check_draft(group, weights, what, late_rank) ? 0 : 1;
  }
}

void check_all(int devices) {
  const DraftWeights weights(kVocab, 11, false);
  const DraftWeights fits(65536, 21, false), few(32768, 31, false);
  const std::vector<float> two{0.7f, 0.0f}, noise{1e6f},
      eight{0.0f, 0.6f, 1.0f, 0.0f, 1e-7f, 2.0f, 0.3f, 1.0f};
  if (devices == 1) {
    check_case(weights, setup_of(kVocab, 1, 1, 1), "greedy", 2);
    check_case(weights, setup_of(kVocab, 1, 1, 2, two), "sampled and greedy", 2);
    for (const int ranks : {2, 4}) {
      check_case(weights, setup_of(kVocab, ranks, 1, 1), "greedy", 2);
      check_case(weights, setup_of(kVocab, ranks, 1, 2, two, true), "sampled and greedy", 2);
      check_case(fits, setup_of(65536, ranks, 1, 1), "greedy", 2);
      check_case(fits, setup_of(65536, ranks, 1, 1, noise, true), "noise alone", 3);
      check_case(fits, setup_of(65536, ranks, 1, 2, two, true), "sampled and greedy", 2);
      for (const int batch : {3, 4, 5, 6, 7, 8}) {
        check_case(fits, setup_of(65536, ranks, 1, batch), "greedy");
      }
      check_case(fits, setup_of(65536, ranks, 1, 8, eight, true), "sampled and greedy");
      check_case(few, setup_of(32768, ranks, 1, 1), "greedy");
      check_case(few, setup_of(32768, ranks, 1, 8, eight, true), "sampled and greedy");
    }
  } else {
    const int n = devices;
    for (const int batch : {1, 2, 8}) check_case(weights, setup_of(kVocab, n, n, batch), "greedy");
    check_case(weights, setup_of(kVocab, n, n, 2, two, true), "sampled and greedy", 2);
    check_case(weights, setup_of(kVocab, n, n, 8, eight, true), "sampled and greedy");
    if (n == 2) check_case(weights, setup_of(kVocab, 4, 2, 2, two, true), "sampled and greedy");
  }
  check_case(fits, setup_of(65536, 2, devices, 2, two), "a rank 1 ms late", 2, 1);
  const bool faults[] = {check_ties_and_nan(devices), check_tags(fits, devices),
                         check_replays(fits, devices, 1000), check_missing_rank(fits, devices)};
  for (const bool good : faults) failures += good ? 0 : 1;
  if (devices > 1) return;
  for (const int batch : {1, 2, 8}) failures += check_accept(batch, 5, kVocab, batch) ? 0 : 1;
  failures += check_accept(8, 7, 2500, 41) && check_accept(3, 1, 1000, 42) ? 0 : 1;
}

// ------------------------------------------------------------------------------------ times

void print_times(const char* name, const DraftSetup& setup, const Spread& us, double rate,
                 std::uint32_t state) {
  const double bytes_us = draft_bytes(setup) / rate * 1e6;
  std::printf(
      "%-24s TP%d B=%d%s: median %6.2f us  low %6.2f  high %6.2f  bytes %5.2f us (%.2f of "
      "it)  state %u\n",
      name, setup.ranks, setup.batch, setup.share_logits ? " shared logits" : "", us.median, us.low,
      us.high, bytes_us, bytes_us / us.median, state);
  std::fflush(stdout);
}

void time_group(const DraftWeights& weights, DraftSetup setup, const char* name, double rate) {
  setup.launches = kTimedLaunches;
  setup.sets = 3;
  DraftGroup group(setup, weights);
  group.capture();
  print_times(name, setup, times_of(group, 50), rate, group.rank(0).status()[0]);
}

void time_loopback(const DraftWeights& weights, DraftSetup setup, const char* name, double rate) {
  setup.sets = 6;
  const Loopback loop(weights, setup);
  Graph graph([&](cudaStream_t stream) { loop.launch(kTimedLaunches, stream); });
  const Times times = time_of(graph, 50);
  const Spread us = {times.median_us / kTimedLaunches, times.low_us / kTimedLaunches,
                     times.high_us / kTimedLaunches};
  print_times(name, setup, us, rate, loop.rank.status()[0]);
}

void time_all(int devices) {
  const DraftWeights weights(kVocab, 11, false);
  cuda_must(cudaSetDevice(0), "set device");
  const double rate = read_rate();
  std::printf("read of 2 GiB: %.2f TB/s\n", rate * 1e-12);
  const auto temperatures = [](int batch) { return std::vector<float>(batch, 1.0f); };
  for (const int batch : {1, 2, 4, 8}) {
    for (const bool sampled : {false, true}) {
      for (const bool share : {false, true}) {
        if (share && !sampled) continue;
        DraftSetup setup = setup_of(kVocab, devices > 1 ? devices : 4, devices, batch,
                                    sampled ? temperatures(batch) : std::vector<float>{}, share);
        setup.blocks = fused::kMaxDraftBlocks;
        const char* name = sampled ? "sampled" : "greedy";
        if (devices > 1) {
          time_group(weights, setup, name, rate);
        } else if (!share) {
          time_loopback(weights, setup, sampled ? "sampled, looped back" : "greedy, looped back",
                        rate);
        }
      }
    }
  }
  if (devices > 1) return;
  time_group(weights, setup_of(kVocab, 1, 1, 1), "greedy", rate);
  for (const int batch : {1, 2, 8}) {
    time_accept(batch, true);
    time_accept(batch, false);
  }
}

// Medians over blocks of the time between stamps, of one launch in mid graph; of the first from the
// earliest block's start.
void print_stamps(const std::vector<std::uint64_t>& stamps, int blocks, const char* name) {
  static const char* const kParts[2][fused::kDraftStamps] = {
      {"start", "inputs", "noise", "weights"},
      {"row", "products", "block", "send", "prepare", "hear"}};
  constexpr int kRow = fused::kDraftStamps, kOfBlock = (fused::kDraftSteps + 1) * kRow;
  std::printf("profile %s: us, median over blocks (most)\n", name);
  std::uint64_t first = ~std::uint64_t{0};
  for (int block = 0; block < blocks; ++block) {
    first = std::min(first, stamps[static_cast<std::size_t>(block) * kOfBlock]);
  }
  for (int step = -1; step < fused::kDraftSteps; ++step) {
    for (int part = 0; part < (step < 0 ? 4 : fused::kDraftStamps); ++part) {
      std::vector<double> spans;
      for (int block = 0; block < blocks; ++block) {
        const std::size_t at =
            static_cast<std::size_t>(block) * kOfBlock + (step + 1) * kRow + part;
        const std::size_t last = step == 0 && part == 0 ? at - 3 : at - 1;
        const std::uint64_t before = step < 0 && part == 0 ? first : stamps[last];
        spans.push_back(static_cast<double>(stamps[at] - before) * 1e-3);
      }
      std::sort(spans.begin(), spans.end());
      std::printf("  %s %.2f (%.2f)", kParts[step < 0 ? 0 : 1][part], spans[spans.size() / 2],
                  spans.back());
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

void profile_all(int devices) {
  const DraftWeights weights(kVocab, 11, false);
  for (const bool sampled : {false, true}) {
    for (const int batch : {1, 8}) {
      DraftSetup setup = setup_of(kVocab, devices > 1 ? devices : 4, devices, batch,
                                  sampled ? std::vector<float>(batch, 1.0f) : std::vector<float>{});
      setup.blocks = fused::kMaxDraftBlocks;
      setup.launches = 3;
      setup.sets = 3;
      char name[64];
      std::snprintf(name, sizeof name, "TP%d B=%d %s", setup.ranks, batch,
                    sampled ? "sampled" : "greedy");
      if (devices > 1) {
        DraftGroup group(setup, weights);
        for (int r = 0; r < setup.ranks; ++r) group.rank(r).stamped = true;
        group.capture();
        for (int i = 0; i < 4; ++i) group.replay();
        group.wait();
        group.on(0);
        print_stamps(group.rank(0).stamps.take(), setup.blocks, name);
      } else {
        Loopback loop(weights, setup);
        loop.rank.stamped = true;
        Graph graph([&](cudaStream_t stream) { loop.launch(3, stream); });
        for (int i = 0; i < 4; ++i) graph.replay();
        graph.wait();
        print_stamps(loop.rank.stamps.take(), setup.blocks, name);
      }
    }
  }
}

int devices_of(Rest& rest) { return rest.empty() ? 1 : rest.ranks(); }

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  using namespace lowlat::bench;
  return checked(argc, argv, "bench_draft check [2|4] | small | time [2|4] | profile [2|4]",
                 {{"check", [](Rest& rest) { check_all(devices_of(rest)); }},
                  {"small",
                   [](Rest&) {
                     failures += check_small() ? 0 : 1;
                     failures += check_accept(2, 2, 2500, 1) ? 0 : 1;
                   }},
                  {"time", [](Rest& rest) { time_all(devices_of(rest)); }},
                  {"profile", [](Rest& rest) { profile_all(devices_of(rest)); }}});
}
