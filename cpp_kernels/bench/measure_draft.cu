// bench/measure_draft.cu: the five proposals of a draft, checked and timed; the program behind
// `lowlat bench draft`.
//
// Six launches in a CUDA graph, weights and logits rotated past the caches; a figure is the graph's
// time over six. One GPU: one rank of four, what it sends to the others lands in its own memory; it
// is checked as two ranks on the one GPU. Else a GPU a rank. Rows are those of the verify step, six
// a request.
#include "bench/draft_checks.cuh"
#include "bench/draft_times.cuh"
#include "bench/machine.cuh"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

constexpr int kRowsOfRequest = fused::kDraftSteps + 1;

void measure(Report& report, const Words& words, const DraftWeights& weights,
             const DraftWeights& checked, int batch, bool sampled) {
  const std::vector<float> temperatures(sampled ? batch : 0, 1.0f);
  const int rows = batch * kRowsOfRequest;
  const std::string what = sampled ? "draft sampled" : "draft";
  {
    DraftGroup group(
        setup_of(checked.vocab, std::max(words.gpus, 2), words.gpus, batch, temperatures, sampled),
        checked);
    group.capture();
    report.check(what + " against float64 T=" + std::to_string(rows),
                 check_draft(group, checked, what.c_str()));
  }
  DraftSetup setup = setup_of(kVocab, words.tp, words.gpus, batch, temperatures);
  setup.blocks = fused::kMaxDraftBlocks;
  setup.launches = kTimedLaunches;
  Spread us;
  std::string fault;
  const auto look = [&](const std::uint32_t* words) {
    if (words[0] == 0) return;
    fault = "state " + std::to_string(words[0]) + ", kernel " + std::to_string(words[1]) +
            ", stage " + std::to_string(words[2]) + ", peer " + std::to_string(words[3]);
  };
  if (words.gpus == 1) {
    setup.sets = 6;
    const Loopback loop(weights, setup);
    Graph graph([&](cudaStream_t stream) { loop.launch(kTimedLaunches, stream); });
    const Times times = time_of(graph, words.repeats);
    us = {times.median_us / kTimedLaunches, times.low_us / kTimedLaunches,
          times.high_us / kTimedLaunches};
    look(loop.rank.status());
  } else {
    setup.sets = 3;
    DraftGroup group(setup, weights);
    group.capture();
    us = times_of(group, words.repeats);
    for (int r = 0; r < words.tp; ++r) look(group.rank(r).status());
  }
  report.check("no wait expired T=" + std::to_string(rows), fault.empty(), fault);
  report.figure({what, "v41", words.schedule, words.tp, words.gpus, rows, us, words.repeats,
                 draft_bytes(setup), "five proposals a request"});
}

std::string wrong_draft(const Words& words) {
  const bool spread = words.gpus == words.tp && (words.tp == 2 || words.tp == 4);
  if (!spread && (words.gpus != 1 || words.tp != Loopback::kRanks)) {
    return "the draft is timed with --tp 4 --gpus 1, or with a GPU for each of 2 or 4 ranks";
  }
  for (const int rows : words.rows) {
    if (rows % kRowsOfRequest != 0 || rows / kRowsOfRequest > fused::kMaxDraftBatch) {
      return "--rows of the draft are six a request, 6 to 48, not " + std::to_string(rows);
    }
  }
  return "";
}

int measure_all(const Words& words, Report& report) {
  const std::string why = first_of({wrong_kind(words, "v41", "fused"), wrong_draft(words)});
  return on_machine(report, words.gpus, why, [&](const Machine&) {
    const DraftWeights weights(kVocab, 11, false);
    // Two ranks of one GPU have half of its blocks each: half of the vocabulary fits.
    const DraftWeights half(65536, 21, false);
    const DraftWeights& checked = words.gpus == 1 ? half : weights;
    for (const int rows : words.rows) {
      for (const bool sampled : {false, true}) {
        measure(report, words, weights, checked, rows / kRowsOfRequest, sampled);
        if (!report.all_good()) return 1;
      }
    }
    return 0;
  });
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
