// bench_resident_stages: where the time of a plain V4.1-Flash layer goes in the resident schedule:
// of each stage between two hand-offs how long blocks compute and how long they wait for the
// others. Built with LOWLAT_STAMPS=1, which adds two reads of a clock to a hand-off.
//
//   bench_resident_stages [rows..]    rows of a step, 6 unless given
//
// A rank's share of TP4 on one GPU, as bench_resident. The last layer of a step of six, median of
// kSteps steps. `period` is from the hand-off before to this one, of which the median block
// computes `computes`, the longest `longest`; the rest is waiting, for the longest block and for
// the hand-off.
#include <cstdio>
#include <cstdlib>

#include "platform/nvidia.hpp"
// The platform comes first.
#include "bench/program.hpp"
#include "bench/resident_case.cuh"
#include "host/nvidia/step.hpp"
#include "persistent/grid.hpp"

namespace lowlat::bench {
namespace {

using nvidia::persistent::HandOffStamp;
using nvidia::persistent::kStampedHandOffs;

constexpr int kLayers = 6, kSteps = 30;

// Stages of a plain layer in the order of persistent/program.hpp; each ends with a hand-off. The
// last one's sum is followed by the step's end, or by the next layer's first hand-off.
constexpr const char* kStages[] = {
    "sums of mixing (attention)",
    "combine, norm, quantise",
    "q_a and kv projections",
    "q norm, window KV",
    "q projection",
    "attention",
    "o-projection by groups",
    "quantise",
    "o-projection, sum over ranks, post",
    "sums of mixing (ffn)",
    "combine, norm, quantise",
    "gate and shared expert's up",
    "routing",
    "experts up",
    "experts down",
    "rows of experts, sum over ranks, post",
};
constexpr int kNumStages = static_cast<int>(std::size(kStages));

struct Stage {
  double period_us, computes_us, longest_us;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Of the last hand-offs of a step whose stamps these are.
std::vector<Stage> stages_of(const std::vector<HandOffStamp>& stamps, int num_blocks) {
  const auto row = [&](std::uint32_t number) {
    return stamps.data() + number % kStampedHandOffs * static_cast<std::size_t>(num_blocks);
  };
  // The newest row is the step's end.
  std::uint32_t last = 0;
  for (std::uint32_t n = 0; n < kStampedHandOffs; ++n) {
    if (row(n)->leave_ns > row(last)->leave_ns) last = n;
  }
  last += kStampedHandOffs;
  std::vector<Stage> out;
  for (std::uint32_t n = last - kNumStages + 1; n <= last; ++n) {
    const HandOffStamp *before = row(n - 1), *now = row(n);
    std::vector<double> computes, period;
    for (int b = 0; b < num_blocks; ++b) {
      computes.push_back(1e-3 * static_cast<double>(now[b].arrive_ns - before[b].leave_ns));
      period.push_back(1e-3 * static_cast<double>(now[b].leave_ns - before[b].leave_ns));
    }
    out.push_back(
        {median(period), median(computes), *std::max_element(computes.begin(), computes.end())});
  }
  return out;
}

void look(ResidentShard& shard, int rows, int num_blocks) {
  const std::size_t count = kStampedHandOffs * static_cast<std::size_t>(num_blocks);
  const host::cuda::Memory memory(count * sizeof(HandOffStamp));
  host::cuda::check(cudaMemset(memory.data(), 0, memory.bytes()), "cudaMemset");
  const auto unstamped = shard.times(rows, lowlat_plain_step_launch, kSteps);
  host::cuda::stamp_hand_offs(memory.data());
  std::vector<std::vector<Stage>> steps;
  std::vector<double> stamped;
  std::vector<HandOffStamp> stamps(count);
  for (int i = 0; i < kSteps; ++i) {
    stamped.push_back(shard.times(rows, lowlat_plain_step_launch, 1).front());
    host::cuda::check(cudaMemcpy(stamps.data(), memory.data(), memory.bytes(), cudaMemcpyDefault),
                      "cudaMemcpy");
    steps.push_back(stages_of(stamps, num_blocks));
  }
  host::cuda::stamp_hand_offs(nullptr);
  std::printf("T=%d: a step of %d layers takes %.1f us, with stamps %.1f us\n", rows, kLayers,
              median(unstamped), median(stamped));
  std::printf("%-40s %10s %10s %10s %10s\n", "stage of the last layer", "period", "computes",
              "longest", "waits");
  Stage sum{};
  for (int s = 0; s < kNumStages; ++s) {
    const auto of = [&](double Stage::* member) {
      std::vector<double> values;
      for (const auto& step : steps) values.push_back(step[static_cast<std::size_t>(s)].*member);
      return median(values);
    };
    const Stage one{of(&Stage::period_us), of(&Stage::computes_us), of(&Stage::longest_us)};
    std::printf("%-40s %10.1f %10.1f %10.1f %10.1f\n", kStages[s], one.period_us, one.computes_us,
                one.longest_us, one.period_us - one.computes_us);
    sum.period_us += one.period_us;
    sum.computes_us += one.computes_us;
    sum.longest_us += one.longest_us;
  }
  std::printf("%-40s %10.1f %10.1f %10.1f %10.1f\n\n", "layer", sum.period_us, sum.computes_us,
              sum.longest_us, sum.period_us - sum.computes_us);
  std::fflush(stdout);
}

bool run(Rest& rest) {
  const std::vector<int> widths = rest.rows();
  ResidentShard shard(kLayers);
  int num_blocks = 0;  // one a multiprocessor
  host::cuda::check(cudaDeviceGetAttribute(&num_blocks, cudaDevAttrMultiProcessorCount, 0),
                    "cudaDeviceGetAttribute");
  for (const int rows : widths) look(shard, rows, num_blocks);
  return true;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::checked(argc, argv, "bench_resident_stages [rows..]", lowlat::bench::run);
}
