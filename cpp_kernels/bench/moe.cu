// bench/moe.cu: the mixture-of-experts region at true shapes: checked, then timed.
//
//   bench_moe [check] [time] [v41] [v4] [draft] [tp2] [marlin]
//             [gate|same|apart|last|table|fault ..] [ROWS..]
//   both parts, both models, all routings of the check, all row counts where none is named;
//   draft: of V4.1's draft stages; marlin: weights in that layout instead of the checkpoint's;
//   tp2: two ranks' share, not four's
//
// Times are of a CUDA graph of eight launches with different rows (and so different experts; one
// layer's experts are thirty times the L2), the floor is what the chosen experts' bytes take at the
// bandwidth that a plain read of 1 GiB reaches in the same run.
#include "bench/moe_case.cuh"
#include "bench/read_rate.cuh"

namespace {

using namespace lowlat::bench;

struct Times {
  double median, least, most;
};
// Microseconds of `enqueue`, captured once, over its `units`.
Times time_graph(int replays, int units, const std::function<void(cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t from, to;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue(stream);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CUDA(cudaGraphLaunch(exec, stream));
  std::vector<double> us;
  for (int i = 0; i < replays; ++i) {
    CUDA(cudaEventRecord(from, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaEventSynchronize(to));
    float ms = 0;
    CUDA(cudaEventElapsedTime(&ms, from, to));
    us.push_back(ms * 1e3 / units);
  }
  std::sort(us.begin(), us.end());
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaEventDestroy(from));
  CUDA(cudaEventDestroy(to));
  CUDA(cudaStreamDestroy(stream));
  return {us[us.size() / 2], us.front(), us.back()};
}

void time_case(const Layer& layer, int rows, bool region, double rate) {
  const Dims& d = layer.d;
  const std::size_t pairs = std::size_t(rows) * d.slots;
  std::set<std::int32_t> distinct;
  double experts = 0;
  for (int set = 0; set < kSets; ++set) {
    // Uniform routing: six of the experts for every row. The router's own choice is nearly so.
    std::vector<std::int32_t> ids(pairs);
    for (int t = 0; t < rows; ++t) {
      std::set<std::int32_t> row;
      for (std::uint64_t i = 0; static_cast<int>(row.size()) < d.slots; ++i) {
        row.insert(draw(40 + set, t * 1000 + i) % d.experts);
      }
      std::copy(row.begin(), row.end(), ids.begin() + std::size_t(t) * d.slots);
    }
    const std::size_t begin = std::size_t(set) * kMaxRows * d.slots;
    CUDA(cudaMemcpy(layer.ids.as<std::int32_t>() + begin, ids.data(), pairs * 4,
                    cudaMemcpyHostToDevice));
    std::vector<float> weights(pairs, 0.25f);
    CUDA(cudaMemcpy(layer.weights.as<float>() + begin, weights.data(), pairs * 4,
                    cudaMemcpyHostToDevice));
    if (region) {
      const MoeArgs args = layer.args(rows, MoeRouting::gate, set, true, false);
      CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, nullptr, false)));
      CUDA(cudaDeviceSynchronize());
      layer.require_healthy("timing");
      ids = read<std::int32_t>(layer.out_ids, begin, pairs);
    }
    experts += std::set<std::int32_t>(ids.begin(), ids.end()).size() / double(kSets);
  }
  const double bytes = experts * 3 * (layer.matrix + layer.scales) +
                       (region ? 3.0 * layer.matrix * 2 + 2.0 * d.experts * d.hidden : 0.0);
  const Times us = time_graph(60, kSets, [&](cudaStream_t stream) {
    for (int set = 0; set < kSets; ++set) {
      const MoeArgs args =
          layer.args(rows, region ? MoeRouting::gate : MoeRouting::given, set, region, region);
      CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, stream, true)));
    }
  });
  layer.require_healthy("timing");
  const double floor = bytes / rate * 1e6;
  std::printf(
      "%s %-8s T=%-2d median %7.2f us  min %7.2f  max %7.2f  bytes %6.1f MB  experts %5.1f  "
      "floor %6.2f  share %.3f  %.2f TB/s\n",
      d.name, region ? "region" : "products", rows, us.median, us.least, us.most, bytes * 1e-6,
      experts, floor, floor / us.median, bytes / us.median * 1e-6);
  std::fflush(stdout);
}

// Bytes a second of a plain read of 1 GiB.
double read_rate() {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const Buffer buffer(kBytes + 16);
  CUDA(cudaMemset(buffer.data, 1, buffer.bytes));
  int sms = 0;
  CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  double best = 0;
  for (const int blocks : {2, 4}) {
    const Times us = time_graph(15, 1, [&](cudaStream_t stream) {
      read_for_rate<<<sms * blocks, 512, 0, stream>>>(buffer.as<uint4>(), kBytes / 16,
                                                      buffer.as<std::uint32_t>() + kBytes / 4);
    });
    best = std::max(best, kBytes / us.median * 1e6);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  bool check = false, time = false, v41 = false, v4 = false, draft = false, marlin = false,
       tp2 = false;
  std::vector<int> rows;
  const std::set<std::string> all_routings = {"gate",  "same",  "apart", "last",
                                              "twice", "table", "fault"};
  std::set<std::string> routings;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const int number = std::atoi(argv[i]);
    if (number >= 1 && number <= kMaxRows) {
      rows.push_back(number);
    } else if (word == "check") {
      check = true;
    } else if (word == "time") {
      time = true;
    } else if (word == "v41") {
      v41 = true;
    } else if (word == "v4") {
      v4 = true;
    } else if (word == "draft") {
      draft = true;
    } else if (word == "tp2") {
      tp2 = true;
    } else if (word == "marlin") {
      marlin = true;
    } else if (all_routings.count(word) != 0) {
      routings.insert(word);
    } else {
      std::fprintf(stderr,
                   "bench_moe: %s; known: check, time, v41, v4, draft, tp2, marlin, gate, same, "
                   "apart, last, twice, table, fault, rows from 1 to 64\n",
                   argv[i]);
      return 2;
    }
  }
  if (!check && !time) check = time = true;
  if (!v41 && !v4 && !draft) v41 = v4 = true;
  if (routings.empty()) routings = all_routings;
  using lowlat::shape::Dsv41Flash;
  using lowlat::shape::Dsv41FlashDraft;
  using lowlat::shape::Dsv4Flash;
  int failed = 0, cases = 0;
  const double rate = time ? read_rate() : 1.0;
  if (time) std::printf("plain read of 1 GiB: %.2f TB/s\n", rate * 1e-12);
  const auto run = [&](const Dims& d) {
    const Layer layer(d, marlin ? MoeLayout::marlin : MoeLayout::checkpoint);
    CUDA(cudaDeviceSynchronize());
    if (check) {
      for (const int num : rows.empty() ? std::vector<int>{1, 2, 6, 8, 12, 24, 48} : rows) {
        std::vector<std::string> scenarios = {"gate", "same", "apart"};
        if (num == 6) scenarios.insert(scenarios.end(), {"last", "twice"});
        if (d.experts == Dsv4Flash<4>::kNumExperts) scenarios = {"gate", "table"};
        for (const std::string& scenario : scenarios) {
          if (routings.count(scenario) == 0) continue;
          ++cases;
          failed += check_case(layer, num, scenario, 200) ? 0 : 1;
        }
      }
      if (routings.count("fault") != 0) {
        ++cases;
        failed += check_fault(layer, rows.empty() ? 6 : rows.front()) ? 0 : 1;
      }
    }
    if (time) {
      for (const bool region : {true, false}) {
        for (const int num : rows.empty() ? std::vector<int>{1, 2, 4, 6, 8, 12, 24, 48} : rows) {
          time_case(layer, num, region, rate);
        }
      }
    }
  };
  if (v41 && tp2) run(dims<Dsv41Flash<2>>(MoeShape::v41_tp2, "v41 tp2"));
  if (v41 && !tp2) run(dims<Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  if (draft && tp2) run(dims<Dsv41FlashDraft<2>>(MoeShape::v41_draft_tp2, "draft tp2"));
  if (draft && !tp2) run(dims<Dsv41FlashDraft<4>>(MoeShape::v41_draft_tp4, "draft tp4"));
  if (v4 && tp2) run(dims<Dsv4Flash<2>>(MoeShape::v4_tp2, "v4 tp2 "));
  if (v4 && !tp2) run(dims<Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4 "));
  if (check) std::printf("%d of %d cases failed\n", failed, cases);
  return failed == 0 ? 0 : 1;
}
