// bench_step: whole steps of V4.1-Flash by the fused kernels, against the resident schedule on the
// same weights, and their time. See step_case.cuh.
//
//   bench_step check [rows..]   eight layers of every kind and a draft: logits, tokens, features
//                               (by the draft's tokens) and all caches; replays, bit for bit
//   bench_step hosted           the same of steps for an engine that keeps caches and head, with
//                               experts in both layouts
//   bench_step time [rows..]    the model's 40 layers, a CUDA graph of one step
//   bench_step fault            an abort of steps in flight
//   bench_step once [rows..]    a step and a draft without a comparison, for a sanitizer
#include <chrono>
#include <cstdlib>

#include "bench/step_case.cuh"

namespace lowlat::bench {
namespace {

void check(const std::vector<int>& widths) {
  const lowlat_model_config config = config_of(false, 3);
  Weights weights;
  const auto begin = std::chrono::steady_clock::now();
  Rank fused("nvidia:0:fused:loop", config, weights);
  Rank resident("nvidia:0:persistent:loop", config, weights);
  std::printf("made in %.1f s; own bytes %.1f and %.1f MB\n",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
              static_cast<double>(lowlat_model_own_bytes(fused.model())) * 1e-6,
              static_cast<double>(lowlat_model_own_bytes(resident.model())) * 1e-6);
  std::fflush(stdout);
  for (const int start : {kShort, kPosition}) {
    int position = start;
    for (const int rows : widths) {
      const Case of = case_of(rows, position);
      compare_step(fused, resident, of, rows);
      if (of.tokens == 6) compare_draft(fused, resident, of);
      position += of.tokens;
    }
    compare_pools(fused, resident, start == kShort ? 0.08 : 0.2);
  }
  replay(fused, case_of(6, 4500), 1000);
  replay(fused, case_of(24, 4500), 200);
}

void hosted() {
  lowlat_model_config config = config_of(false, 3);
  config.num_pages = kPagesOfRequest;
  compare_hosting(config);
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  Weights draft_weights;
  Rank fused_draft("nvidia:0:fused:loop", config, draft_weights, Host::proposals);
  Rank resident_draft("nvidia:0:persistent:loop", config, draft_weights, Host::proposals);
  for (const int batch : {1, 4, 8}) {
    compare_proposals(fused_draft, resident_draft, batch, false);
    compare_proposals(fused_draft, resident_draft, batch, true);
  }
}

enum class Timed { step, tokens_only, draft };

void time_steps(const std::vector<int>& widths) {
  const lowlat_model_config config = config_of(true, 3);
  Weights weights(true);
  Rank fused("nvidia:0:fused:loop", config, weights);
  for (const int rows : widths) {
    for (const Timed timed : {Timed::step, Timed::tokens_only, Timed::draft}) {
      const Case of = case_of(rows, kPosition);
      if (timed == Timed::draft && of.tokens != 6) continue;
      lowlat_step step = fused.step_of(of, 1);
      if (timed == Timed::tokens_only) step.logits = nullptr;
      const lowlat_draft draft = draft_of(fused, step, of, false);
      must(lowlat_step_launch(fused.model(), &step, nullptr));
      must(lowlat_synchronize(fused.model(), 10'000'000'000));
      if (timed == Timed::step) {
        const auto begin = std::chrono::steady_clock::now();
        must(lowlat_step_launch(fused.model(), &step, nullptr));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        must(lowlat_synchronize(fused.model(), 10'000'000'000));
        std::printf("40 layers, T=%-2d, launched without a graph: %.3f ms of the host\n", rows,
                    took.count() * 1e3);
      }
      Graph graph([&](cudaStream_t stream) {
        if (timed == Timed::draft) {
          must(lowlat_draft_launch(fused.model(), &draft, stream));
        } else {
          must(lowlat_step_launch(fused.model(), &step, stream));
        }
      });
      const Times times = time_of(graph, 30);
      lowlat_status_words words{};
      words.struct_bytes = sizeof words;
      must(lowlat_status_read(fused.model(), &words));
      std::printf("40 layers, T=%-2d%s: %.3f ms (10th %.3f, 90th %.3f)%s\n", rows,
                  timed == Timed::tokens_only ? ", tokens only"
                  : timed == Timed::draft     ? ", the draft behind it"
                                              : "",
                  times.median_us * 1e-3, times.low_us * 1e-3, times.high_us * 1e-3,
                  words.state == 0 ? "" : "  FAULTED");
      std::fflush(stdout);
      if (words.state != 0) {
        std::printf("state %u kernel %u stage %u epoch %llu\n", words.state, words.place,
                    words.stage, static_cast<unsigned long long>(words.epoch));
        ++failures;
        return;
      }
    }
  }
}

// Steps in flight when the model is aborted.
void fault() {
  const lowlat_model_config config = config_of(false, 0);
  Weights weights;
  Rank rank("nvidia:0:fused:loop", config, weights);
  const lowlat_step step = rank.step_of(case_of(6, kPosition), 1);
  for (int i = 0; i < 50; ++i) must(lowlat_step_launch(rank.model(), &step, nullptr));
  lowlat_abort(rank.model());
  const auto begin = std::chrono::steady_clock::now();
  const lowlat_status ended = lowlat_synchronize(rank.model(), 5'000'000'000);
  const double ms =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() * 1e3;
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  must(lowlat_status_read(rank.model(), &words));
  const auto logits = rank.logits(step);
  const auto plausible =
      std::count_if(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); });
  std::printf(
      "aborted: synchronize %d after %.2f ms, state %u kernel %u place %u, %lld plausible "
      "logits\n",
      ended, ms, words.state, words.kernel, words.place, static_cast<long long>(plausible));
  expect(ended == LOWLAT_FAULT && words.state == 3 && plausible == 0, "an abort");
}

void once(const std::vector<int>& widths) {
  lowlat_model_config config = config_of(false, 3);
  config.wait_budget_ns = 60'000'000'000;  // a sanitizer is slow
  Weights weights;
  Rank rank("nvidia:0:fused:loop", config, weights);
  for (const int rows : widths) {
    const Case of = case_of(rows, kPosition);
    const lowlat_step step = rank.step_of(of, 1);
    must(lowlat_step_launch(rank.model(), &step, nullptr));
    must(lowlat_synchronize(rank.model(), 120'000'000'000));
    if (of.tokens != 6) continue;
    const lowlat_draft draft = draft_of(rank, step, of, false);
    must(lowlat_draft_launch(rank.model(), &draft, nullptr));
    must(lowlat_synchronize(rank.model(), 120'000'000'000));
  }
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  std::vector<int> widths;
  for (int i = 2; i < argc; ++i) widths.push_back(std::atoi(argv[i]));
  if (widths.empty()) widths = {6, 1, 12, 48};
  if (what == "check") {
    check(widths);
  } else if (what == "time") {
    time_steps(widths);
  } else if (what == "hosted") {
    hosted();
  } else if (what == "once") {
    once(widths);
  } else if (what == "fault") {
    fault();
  } else {
    std::fprintf(stderr, "usage: bench_step check|hosted|time|once|fault [rows..]\n");
    return 2;
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 1;
  }
}
