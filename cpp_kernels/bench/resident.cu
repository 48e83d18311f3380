// bench_resident: checks and times plain V4.1-Flash layers by the resident schedule: a rank's share
// of TP4 on one GPU, its sums going round through its own mailbox. One kernel a step, and the step
// that is cut at its experts for their fused region, against each other.
//
//   bench_resident [rows..]    rows of a step, 6 unless given
//
// Two models that differ by four plain layers, each captured into a graph; a layer is a quarter of
// the difference. Contexts are 4000 tokens long, so every row attends to its window and to 512
// selected entries. Weights are random, a layer's 1.8 GB of them no cache holds.
#include "bench/program.hpp"
#include "bench/resident_case.cuh"

#include <cstdio>
#include <cstdlib>

namespace lowlat::bench {
namespace {

constexpr int kExtraLayers = 4, kRepeats = 40;

void compare(ResidentShard& shard, int rows) {
  const std::vector<double> errors = logit_errors(shard, rows);
  verdict(errors[errors.size() / 2] < kLogitBound,
          "logits with fused experts, T=%-2d: rel_l2 median %.2e worst %.2e", rows,
          errors[errors.size() / 2], errors.back());
}

bool run(Rest& rest) {
  const std::vector<int> widths = rest.rows();
  ResidentShard few(4), many(4 + kExtraLayers);
  for (const int rows : widths) {
    compare(many, rows);
    for (const auto& [name, launch] :
         {std::pair<const char*, ResidentShard::Launch>{"resident", lowlat_plain_step_launch},
          std::pair<const char*, ResidentShard::Launch>{"fused experts", lowlat_step_launch}}) {
      const auto a = few.times(rows, launch, kRepeats), b = many.times(rows, launch, kRepeats);
      const auto layer = [&](double share) { return layer_us(a, b, kExtraLayers, share); };
      std::printf(
          "%-14s plain V4.1 layer, TP4 shard, T=%-2d  median %8.1f us  low %8.1f  high %8.1f"
          "  (steps of 4 and 8 layers: %.1f and %.1f us)\n",
          name, rows, layer(0.5), layer(0.1), layer(0.9), a[a.size() / 2], b[b.size() / 2]);
      std::fflush(stdout);
    }
  }
  return true;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::checked(argc, argv, "bench_resident [rows..]", lowlat::bench::run);
}
