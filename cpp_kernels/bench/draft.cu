// draft: the five proposals of a draft, and their acceptance, at true shapes: checked, then timed.
//
//   bench_draft check [2]     R = 1, 2, 4 ranks on one GPU (2: ranks on two GPUs); results, faults
//   bench_draft time          one GPU: TP4's share with its mailboxes looped back, and TP1
//   bench_draft time 2        TP2 on two GPUs
//   bench_draft profile [2]   where the time of a step goes, from clocks in each block
//
// Times are of a CUDA graph of six launches, weights and logits rotated past the second-level
// cache; the floor is the bytes at the bandwidth of a plain read of 1 GiB in the same run.
// Exit code 1: a failure.
#include "bench/draft_accept_case.cuh"
#include "bench/draft_checks.cuh"

namespace lowlat::bench {
namespace {

int failures = 0;

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
  const DraftWeights fits(65536, 21, false);
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
    }
  } else {
    for (const int batch : {1, 2, 8}) check_case(weights, setup_of(kVocab, 2, 2, batch), "greedy");
    check_case(weights, setup_of(kVocab, 2, 2, 2, two, true), "sampled and greedy", 2);
    check_case(weights, setup_of(kVocab, 2, 2, 8, eight, true), "sampled and greedy");
    check_case(weights, setup_of(kVocab, 4, 2, 2, two, true), "sampled and greedy");
  }
  check_case(fits, setup_of(65536, 2, devices, 2, two), "a rank 1 ms late", 2, 1);
  const bool faults[] = {check_ties_and_nan(devices), check_tags(fits, devices),
                         check_replays(fits, devices, 1000), check_missing_rank(fits, devices)};
  for (const bool good : faults) failures += good ? 0 : 1;
  if (devices == 2) return;
  for (const int batch : {1, 2, 8}) failures += check_accept(batch, 5, kVocab, batch) ? 0 : 1;
  failures += check_accept(8, 7, 2500, 41) && check_accept(3, 1, 1000, 42) ? 0 : 1;
}

// ------------------------------------------------------------------------------------ times

__global__ void __launch_bounds__(512)
    read_all(const uint4* src, std::size_t n, std::uint32_t* out) {
  std::uint32_t sum = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = i + k * step < n ? __ldcs(src + i + k * step) : make_uint4(0, 0, 0, 0);
    }
    for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x1234'5678) *out = sum;
}
double bandwidth() {
  cuda_must(cudaSetDevice(0), "set device");
  const Buffer<std::uint32_t> data(std::size_t{1} << 28), out(1);
  Graph graph([&](cudaStream_t stream) {
    read_all<<<528, 512, 0, stream>>>(reinterpret_cast<const uint4*>(data.get()), data.size() / 4,
                                      out.get());
  });
  return static_cast<double>(data.size()) * 4 / (time_of(graph, 20).median_us * 1e-6);
}

double floor_us(const DraftSetup& setup, double rate) {
  const double shard = static_cast<double>(setup.vocab) / setup.ranks;
  const double bytes = shard * 2 * fused::kMarkovRank +
                       setup.batch * fused::kDraftSteps * (4.0 * shard + 2 * fused::kMarkovRank);
  return bytes / rate * 1e6;
}

constexpr int kTimedLaunches = 6;

void print_times(const char* name, const DraftSetup& setup, std::vector<double> times, double rate,
                 std::uint32_t state) {
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2], bytes_us = floor_us(setup, rate);
  std::printf(
      "%-24s TP%d B=%d%s: median %6.2f us  low %6.2f  high %6.2f  bytes %5.2f us (%.2f of "
      "it)  state %u\n",
      name, setup.ranks, setup.batch, setup.share_logits ? " shared logits" : "", median,
      times[times.size() / 10], times[times.size() * 9 / 10], bytes_us, bytes_us / median, state);
  std::fflush(stdout);
}

void time_group(const DraftWeights& weights, DraftSetup setup, const char* name, double rate) {
  setup.launches = kTimedLaunches;
  setup.sets = 3;
  DraftGroup group(setup, weights);
  group.capture();
  std::vector<double> times;
  std::vector<cudaEvent_t> begin(setup.ranks), end(setup.ranks);
  for (int r = 0; r < setup.ranks; ++r) {
    group.on(r);
    cuda_must(cudaEventCreate(&begin[r]), "event");
    cuda_must(cudaEventCreate(&end[r]), "event");
  }
  for (int i = 0; i < 55; ++i) {
    for (int r = 0; r < setup.ranks; ++r) {
      // Several replays in a row, so that the ranks' starts do not count.
      group.replay_one(r);
      cuda_must(cudaEventRecord(begin[r], group.rank(r).graph->stream()), "record");
      for (int j = 0; j < 4; ++j) group.replay_one(r);
      cuda_must(cudaEventRecord(end[r], group.rank(r).graph->stream()), "record");
    }
    double longest = 0.0;
    for (int r = 0; r < setup.ranks; ++r) {
      group.on(r);
      group.rank(r).graph->wait();
      float ms = 0.0f;
      cuda_must(cudaEventElapsedTime(&ms, begin[r], end[r]), "elapsed");
      longest = std::max(longest, ms * 1e3 / 4 / kTimedLaunches);
    }
    if (i >= 5) times.push_back(longest);
  }
  print_times(name, setup, times, rate, group.rank(0).status()[0]);
  for (int r = 0; r < setup.ranks; ++r) {
    cudaEventDestroy(begin[r]);
    cudaEventDestroy(end[r]);
  }
}

// One rank of four: what it sends to the others lands in its own memory, where it looks for what
// they would send.
struct Loopback {
  static constexpr int kRanks = 4;
  DraftSetup setup;
  DraftRank rank;
  Loopback(const DraftWeights& weights, const DraftSetup& whole)
      : setup(alone(whole)), rank(setup, weights, 0, 0) {}

  // The same shard, as the whole vocabulary of one rank.
  static DraftSetup alone(DraftSetup setup) {
    setup.vocab /= kRanks;
    setup.ranks = 1;
    return setup;
  }
  fused::DraftProposalsParams params(int launch) const {
    fused::DraftProposalsParams p = {};
    p.port = rank.region.port(kDraftBudgetNs, 0);
    p.port.box_packets /= 2 * kRanks;
    for (int r = 0; r < kRanks; ++r) {
      p.port.boxes[r] = static_cast<char*>(p.port.boxes[0]) + r * p.port.box_packets * 16;
      p.port.abort_words[r] = p.port.abort_words[0];
    }
    p.port.tp_size = kRanks;
    p.exchange_index = launch * fused::kDraftExchanges;
    p.batch_size = setup.batch;
    p.vocab_shard = setup.vocab;
    p.w1 = rank.w1;
    p.w2 = rank.w2[launch % setup.sets].get();
    p.base = rank.base[launch % setup.sets].get();
    p.base_pitch = p.vocab_shard;
    p.anchors = rank.anchors.get();
    p.anchor_pitch = 1;
    p.tokens = rank.tokens.get();
    if (!setup.temperatures.empty()) {
      p.temperatures = rank.temperatures.get();
      p.noise_key = kNoiseKey;
      p.noise_offset = rank.offset.get();
    }
    if (rank.stamped) p.stamps = rank.stamps.get();
    return p;
  }
  void launch(int launches, cudaStream_t stream) const {
    cuda_must(fused::launch_begin_step(rank.region.step_epoch(), launches * fused::kDraftExchanges,
                                       nullptr, stream),
              "begin step");
    for (int i = 0; i < launches; ++i) {
      cuda_must(fused::launch_draft_proposals(params(i), setup.blocks, setup.programmatic, stream),
                "draft proposals");
    }
  }
};

void time_loopback(const DraftWeights& weights, DraftSetup setup, const char* name, double rate) {
  setup.sets = 6;
  const Loopback loop(weights, setup);
  Graph graph([&](cudaStream_t stream) { loop.launch(kTimedLaunches, stream); });
  const Times times = time_of(graph, 50);
  std::vector<double> each(10, times.median_us / kTimedLaunches);
  each.front() = each[1] = times.low_us / kTimedLaunches;
  each.back() = times.high_us / kTimedLaunches;
  print_times(name, setup, each, rate, loop.rank.status()[0]);
}

void time_all(int devices) {
  const DraftWeights weights(kVocab, 11, false);
  const double rate = bandwidth();
  std::printf("read of 1 GiB: %.2f TB/s\n", rate * 1e-12);
  const auto temperatures = [](int batch) { return std::vector<float>(batch, 1.0f); };
  for (const int batch : {1, 2, 4, 8}) {
    for (const bool sampled : {false, true}) {
      for (const bool share : {false, true}) {
        if (share && !sampled) continue;
        DraftSetup setup = setup_of(kVocab, devices == 2 ? 2 : 4, devices, batch,
                                    sampled ? temperatures(batch) : std::vector<float>{}, share);
        setup.blocks = fused::kMaxDraftBlocks;
        const char* name = sampled ? "sampled" : "greedy";
        if (devices == 2) {
          time_group(weights, setup, name, rate);
        } else if (!share) {
          time_loopback(weights, setup, sampled ? "sampled, looped back" : "greedy, looped back",
                        rate);
        }
      }
    }
  }
  if (devices == 2) return;
  time_group(weights, setup_of(kVocab, 1, 1, 1), "greedy", rate);
  for (const int batch : {1, 2, 8}) {
    time_accept(batch, true);
    time_accept(batch, false);
  }
}

// Medians over blocks of the time between stamps, in each step, of one launch in mid graph.
void print_stamps(const std::vector<std::uint64_t>& stamps, int blocks, const char* name) {
  static const char* const kParts[] = {"row", "products", "block", "send", "prepare", "hear"};
  std::printf("profile %s: us, median over blocks (most)\n", name);
  std::uint64_t first = ~std::uint64_t{0};
  for (int block = 0; block < blocks; ++block) {
    first = std::min(
        first, stamps[static_cast<std::size_t>(block) * fused::kDraftSteps * fused::kDraftStamps]);
  }
  for (int step = 0; step < fused::kDraftSteps; ++step) {
    for (int part = 0; part < fused::kDraftStamps; ++part) {
      std::vector<double> spans;
      for (int block = 0; block < blocks; ++block) {
        const std::size_t at =
            (static_cast<std::size_t>(block) * fused::kDraftSteps + step) * fused::kDraftStamps +
            part;
        const std::uint64_t before = step == 0 && part == 0 ? first : stamps[at - 1];
        spans.push_back(static_cast<double>(stamps[at] - before) * 1e-3);
      }
      std::sort(spans.begin(), spans.end());
      std::printf("  %s %.2f (%.2f)", kParts[part], spans[spans.size() / 2], spans.back());
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

void profile_all(int devices) {
  const DraftWeights weights(kVocab, 11, false);
  for (const bool sampled : {false, true}) {
    for (const int batch : {1, 8}) {
      DraftSetup setup = setup_of(kVocab, devices == 2 ? 2 : 4, devices, batch,
                                  sampled ? std::vector<float>(batch, 1.0f) : std::vector<float>{});
      setup.blocks = fused::kMaxDraftBlocks;
      setup.launches = 3;
      setup.sets = 3;
      char name[64];
      std::snprintf(name, sizeof name, "TP%d B=%d %s", setup.ranks, batch,
                    sampled ? "sampled" : "greedy");
      if (devices == 2) {
        DraftGroup group(setup, weights);
        for (int r = 0; r < 2; ++r) group.rank(r).stamped = true;
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

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const int devices = argc > 2 && std::string(argv[2]) == "2" ? 2 : 1;
  if (what == "check") {
    check_all(devices);
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
  }
  if (what == "time") {
    time_all(devices);
    return 0;
  }
  if (what == "profile") {
    profile_all(devices);
    return 0;
  }
  std::fprintf(stderr, "usage: bench_draft check [2] | time [2] | profile [2]\n");
  return 2;
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
