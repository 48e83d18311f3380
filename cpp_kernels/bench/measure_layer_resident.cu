// bench/measure_layer_resident.cu: plain V4.1-Flash layers by the resident schedule, checked beside
// the fused one and timed; the program behind `lowlat bench layer --schedule persistent`.
//
// Two models that differ by four plain layers, of two or four ranks: one rank that is its own
// peers, on one GPU, or all of them with a GPU each. A figure is a quarter of the difference of
// their steps, each a CUDA graph, of the longest rank, at contexts of 4000 tokens. Compared are
// steps at 200, all of whose entries are selected: at 4000 random keys lie so close together that
// the last bit chooses. On one GPU all ranks run on parts of it too, and give the same logits.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bench/machine.cuh"
#include "bench/program.hpp"
#include "bench/step_team.cuh"
#include "shape/bytes.hpp"

namespace lowlat::bench {
namespace {

constexpr int kFew = 4, kExtra = 4, kLeastRows = 6;

lowlat_model_config plain_layers(int num_layers) {
  lowlat_model_config c = config_of(LOWLAT_V41, false, 0);
  set_plain_layers(c, num_layers);
  return c;
}

using Launch = lowlat_status (*)(lowlat_model*, const lowlat_step*, void*);
// One kernel a step. The other takes the fused kernels, or of this schedule's models their experts.
constexpr Launch kResident = lowlat_plain_step_launch, kFused = lowlat_step_launch;

// Logits of steps of other tokens, six rows or more together: a row whose experts are others by a
// last bit, as one may be, is not the median then.
std::vector<float> logits_of(Team& team, const Case& of, Launch launch) {
  std::vector<float> out;
  for (int salt = 0; salt * of.rows() < kLeastRows; ++salt) {
    const auto steps = team.all([&](Rank& rank) { return rank.step_of(of, salt); });
    team.run(launch, steps);
    const auto logits =
        team.agreed("logits of all ranks", steps,
                    [](Rank& rank, const lowlat_step& step) { return rank.logits(step); });
    out.insert(out.end(), logits.begin(), logits.end());
  }
  return out;
}

// The layers alone: no head, which both depths have.
Spread time_of(Team& team, const Case& of, int repeats) {
  auto steps = team.all([&](Rank& rank) { return rank.step_of(of, 1); });
  for (lowlat_step& step : steps) {
    step.num_logit_rows = 0;
    step.logits = nullptr;
    step.argmax = nullptr;
  }
  TeamGraph graph(team, [&](Rank& rank, int r, cudaStream_t stream) {
    must(kResident(rank.model(), &steps[static_cast<std::size_t>(r)], stream));
  });
  return graph.time(repeats);
}

// A layer's part of what the deeper steps take more. Differences of quantiles may lie in any order.
Spread share_of(const Spread& few, const Spread& many) {
  const double median = (many.median - few.median) / kExtra, low = (many.low - few.low) / kExtra,
               high = (many.high - few.high) / kExtra;
  return {median, std::min({median, low, high}), std::max({median, low, high})};
}

template <int kTp>
int run(const Words& words, Report& report) {
  const Places places{kTp, words.gpus == 1};
  // To compare, biases choose a row's experts; to time, its scores do, so that rows have others.
  AllWeights compared(places), timed(places, {.by_score = true});
  Team got_of("persistent", places, plain_layers(kFew + kExtra), compared);
  Team want_of("fused", places, plain_layers(kFew + kExtra), compared);
  Team few("persistent", places, plain_layers(kFew), timed);
  Team many("persistent", places, plain_layers(kFew + kExtra), timed);
  // All ranks on parts of the one GPU, which exchange for real, with the shards of the one that is
  // its own peers.
  const Places parts{kTp, false, true};
  AllWeights shared(parts);
  std::unique_ptr<Team> ranks;
  if (places.looped) {
    ranks = std::make_unique<Team>("persistent", parts, plain_layers(kFew + kExtra), shared);
  }
  for (const int rows : words.rows) {
    const std::string at = " T=" + std::to_string(rows);
    const Case brief = case_of(rows, kShort), of = case_of(rows, kPosition);
    const auto want = logits_of(want_of, brief, kFused), got = logits_of(got_of, brief, kResident);
    report.check("ranks equal, of either schedule" + at,
                 failures == 0 && got_of.fault().empty() && want_of.fault().empty(),
                 got_of.fault() + want_of.fault());
    if (ranks != nullptr) {
      const auto theirs = logits_of(*ranks, brief, kResident);
      report.check("ranks on parts of the GPU equal, and to one that is its own peers" + at,
                   failures == 0 && theirs == got && ranks->fault().empty(), ranks->fault());
    }
    const auto errors = errors_of(got, want, static_cast<std::size_t>(got_of.config().vocab));
    const std::string said = "rel_l2 of the median of " + std::to_string(errors.size()) + " rows " +
                             std::to_string(median(errors)) + ", of the worst " +
                             std::to_string(errors.back());
    report.check("logits near the fused schedule's" + at, median(errors) < bound_of(got_of, brief),
                 said);
    const Spread a = time_of(few, of, words.repeats), b = time_of(many, of, words.repeats);
    report.check("no wait expired" + at, few.fault().empty() && many.fault().empty(),
                 few.fault() + many.fault());
    using Shape = shape::Dsv41Flash<kTp>;
    report.figure({"layer", "v41", words.schedule, kTp, words.gpus, rows, share_of(a, b),
                   words.repeats,
                   shape::plain_layer_bytes<Shape>(rows) + rows * shape::row_kv_bytes<Shape>(),
                   "a share of steps of 8 and of 4 layers; bytes of evenly spread experts"});
  }
  return report.all_good() ? 0 : 1;
}

int measure_all(const Words& words, Report& report) {
  const std::string why = first_of(
      {wrong_kind(words, "v41", "persistent"), wrong_places(words), needless_stamps(words)});
  return on_machine(report, words.gpus, why, [&](const Machine&) {
    return words.tp == 2 ? run<2>(words, report) : run<4>(words, report);
  });
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
