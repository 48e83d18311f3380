// bench_step: whole steps by the fused kernels, against the resident schedule on the same weights,
// and their time. See step_case.cuh.
//
//   bench_step check [rows..]        eight layers of every kind and a draft: logits, tokens,
//                                    features (by the draft's tokens) and all caches; replays, bit
//                                    for bit
//   bench_step hosted                the same of steps for an engine that keeps caches and head,
//                                    with experts in both layouts
//   bench_step time [rows..]         all of the model's layers, a CUDA graph of one step
//   bench_step server [rows..]       the same of steps, and of drafts, for an engine: wo_a in bf16,
//                                    and experts in the checkpoint's layout, then in Marlin's
//   bench_step fault                 an abort of steps in flight; of several ranks also one that
//                                    never comes
//   bench_step once [rows..]         a step and a draft without a comparison, for a sanitizer
//   bench_step processes N [rows..]  eight layers and a draft, and hosted steps, by a process a
//                                    rank, which exchange handles: replays, every rank's results
//                                    equal
//
// Of V4.1-Flash, or with "v4" in front of all that follows of V4-Flash. Elsewhere before the rows
// "loop N", one rank of N whose peers are itself (N 4 where nothing is said), or "ranks N", N ranks
// with a device each. N is 2 or 4.
#include <chrono>
#include <cstdlib>

#include "bench/processes.hpp"
#include "bench/program.hpp"
#include "bench/step_team.cuh"

namespace lowlat::bench {
namespace {

void check(std::uint32_t kind, const Places& places, const std::vector<int>& widths) {
  const lowlat_model_config config = config_of(kind, false, 3);
  AllWeights weights(places);
  const auto begin = std::chrono::steady_clock::now();
  Team fused("fused", places, config, weights);
  Team resident("persistent", places, config, weights);
  std::printf("made in %.1f s; own bytes %.1f and %.1f MB a rank\n",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
              static_cast<double>(lowlat_model_own_bytes(fused.first().model())) * 1e-6,
              static_cast<double>(lowlat_model_own_bytes(resident.first().model())) * 1e-6);
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
  replay_widths(fused, 1000);
}

void hosted(std::uint32_t kind, const Places& places) {
  lowlat_model_config config = config_of(kind, false, 3);
  config.num_pages = kPagesOfRequest;
  compare_hosting(places, config);
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  AllWeights draft_weights(places);
  Team fused_draft("fused", places, config, draft_weights, Host::proposals);
  Team resident_draft("persistent", places, config, draft_weights, Host::proposals);
  for (const int batch : {1, 4, 8}) {
    compare_proposals(fused_draft, resident_draft, batch, false);
    compare_proposals(fused_draft, resident_draft, batch, true);
  }
}

enum class Timed { step, tokens_only, draft, both };
const char* words_of(Timed timed) {
  switch (timed) {
    case Timed::step: return "";
    case Timed::tokens_only: return ", tokens only";
    case Timed::draft: return ", the draft behind it";
    case Timed::both: break;
  }
  return ", step and draft together";
}

// A layer's experts are 3.6 GB at two ranks, so 40 of them do not fit.
WeightRules rules_to_time(const Places& places) {
  return {.by_score = true, .expert_layers = places.tp_size == 2 ? 12 : 0};
}

// Prints what a graph's replay takes; false where a rank has a fault, which it prints too.
bool time_graph(Team& team, TeamGraph& graph, const Places& places, int rows, const char* what) {
  // Ranks time four steps in a row each time.
  const Spread us = graph.time(places.looped ? 30 : 12);
  const std::string fault = team.fault();
  std::printf("%d layers, TP%d on %d GPU, T=%-2d%s: %.3f ms (10th %.3f, 90th %.3f)%s\n",
              team.config().num_layers, places.tp_size, places.size(), rows, what, us.median * 1e-3,
              us.low * 1e-3, us.high * 1e-3, fault.c_str());
  std::fflush(stdout);
  failures += fault.empty() ? 0 : 1;
  return fault.empty();
}

// A draft's layers and proposals behind steps of `widths`, as an engine launches them.
void time_hosted_drafts(std::uint32_t kind, const Places& places, const std::vector<int>& widths,
                        Host host) {
  lowlat_model_config config = config_of(kind, true, 3);
  config.num_pages = 1;
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  AllWeights weights(places, rules_to_time(places));
  Team fused("fused", places, config, weights, host);
  for (const int rows : widths) {
    const Case of = case_of(rows, kPosition);
    if (of.tokens != 6) continue;
    const auto drafts = fused.all([&](Rank& rank) { return rank.hosted_draft_of(of); });
    std::vector<lowlat_proposal> proposals;
    fused.each([&](Rank& rank, int r) {
      proposals.push_back(rank.proposal_of(drafts[static_cast<std::size_t>(r)]));
    });
    TeamGraph graph(fused, [&](Rank& rank, int r, cudaStream_t stream) {
      const auto at = static_cast<std::size_t>(r);
      must(lowlat_hosted_draft_launch(rank.model(), &drafts[at], stream));
      must(lowlat_propose_launch(rank.model(), &proposals[at], stream));
    });
    const char* what = has_marlin(host) ? ", hosted draft behind it, Marlin's experts"
                                        : ", hosted draft behind it, the checkpoint's experts";
    if (!time_graph(fused, graph, places, rows, what)) return;
  }
}

// Steps as an engine launches them: one after the other, so that the device has room.
void time_hosted(std::uint32_t kind, const Places& places, const std::vector<int>& widths) {
  lowlat_model_config config = config_of(kind, true, 3);
  config.num_pages = kPagesOfRequest;
  for (const auto& [host, what] : {std::pair{Host::steps, ", hosted, the checkpoint's experts"},
                                   {Host::marlin_steps, ", hosted, Marlin's experts"}}) {
    AllWeights weights(places, rules_to_time(places));
    Team fused("fused", places, config, weights, host);
    for (const int rows : widths) {
      const Case of = case_of(rows, kPosition);
      const auto steps = fused.all([&](Rank& rank) { return rank.hosted_of(of, 1); });
      fused.run(lowlat_hosted_step_launch, steps);
      const std::vector<float> results = fused.first().hosted_results(steps[0]);
      expect(std::all_of(results.begin(), results.end(), [](float v) { return std::isfinite(v); }),
             "finite results");
      TeamGraph graph(fused, [&](Rank& rank, int r, cudaStream_t stream) {
        must(lowlat_hosted_step_launch(rank.model(), &steps[static_cast<std::size_t>(r)], stream));
      });
      if (!time_graph(fused, graph, places, rows, what)) return;
    }
  }
  for (const Host host : {Host::draft, Host::marlin_draft}) {
    time_hosted_drafts(kind, places, widths, host);
  }
}

void time_steps(std::uint32_t kind, const Places& places, const std::vector<int>& widths) {
  const lowlat_model_config config = config_of(kind, true, 3);
  AllWeights weights(places, rules_to_time(places));
  Team fused("fused", places, config, weights);
  for (const int rows : widths) {
    for (const Timed timed : {Timed::step, Timed::tokens_only, Timed::draft, Timed::both}) {
      const Case of = case_of(rows, kPosition);
      const bool with_draft = timed == Timed::draft || timed == Timed::both;
      const bool with_step = timed != Timed::draft;
      if (with_draft && of.tokens != 6) continue;
      if (timed == Timed::tokens_only && !places.looped) continue;  // the same but for one copy
      const auto steps = fused.all([&](Rank& rank) {
        lowlat_step step = rank.step_of(of, 1);
        if (timed == Timed::tokens_only) step.logits = nullptr;
        return step;
      });
      std::vector<lowlat_draft> drafts;
      fused.each([&](Rank& rank, int r) {
        drafts.push_back(draft_of(rank, steps[static_cast<std::size_t>(r)], of, false));
      });
      fused.run(lowlat_step_launch, steps);
      if (timed == Timed::step) {
        const auto begin = std::chrono::steady_clock::now();
        must(lowlat_step_launch(fused.first().model(), &steps[0], nullptr));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        fused.each([&](Rank& rank, int r) {
          if (r > 0) {
            must(lowlat_step_launch(rank.model(), &steps[static_cast<std::size_t>(r)], nullptr));
          }
        });
        fused.each(
            [](Rank& rank, int) { must(lowlat_synchronize(rank.model(), Team::kBudgetNs)); });
        std::printf("%d layers, T=%-2d, launched without a graph: %.3f ms of the host a rank\n",
                    config.num_layers, rows, took.count() * 1e3);
      }
      TeamGraph graph(fused, [&](Rank& rank, int r, cudaStream_t stream) {
        const auto at = static_cast<std::size_t>(r);
        if (with_step) must(lowlat_step_launch(rank.model(), &steps[at], stream));
        if (with_draft) must(lowlat_draft_launch(rank.model(), &drafts[at], stream));
      });
      if (!time_graph(fused, graph, places, rows, words_of(timed))) return;
    }
  }
}

// Steps in flight when the first rank's host aborts, and a rank that never launches its step.
void fault(std::uint32_t kind, const Places& places) {
  lowlat_model_config config = config_of(kind, false, 0);
  AllWeights weights(places);
  {
    Team team("fused", places, config, weights);
    expect(abort_ends_steps(team), "an abort");
  }
  if (places.looped) return;
  config.wait_budget_ns = 200'000'000;
  Team team("fused", places, config, weights);
  expect(dead_rank_is_named(team), "a rank that never comes");
}

void once(std::uint32_t kind, const Places& places, const std::vector<int>& widths) {
  lowlat_model_config config = config_of(kind, false, 3);
  config.wait_budget_ns = 60'000'000'000;  // a sanitizer is slow
  AllWeights weights(places);
  Team team("fused", places, config, weights);
  for (const int rows : widths) {
    const Case of = case_of(rows, kPosition);
    const auto steps = team.all([&](Rank& rank) { return rank.step_of(of, 1); });
    team.run(lowlat_step_launch, steps);
    if (of.tokens != 6) continue;
    std::vector<lowlat_draft> drafts;
    team.each([&](Rank& rank, int r) {
      drafts.push_back(draft_of(rank, steps[static_cast<std::size_t>(r)], of, false));
    });
    team.run(lowlat_draft_launch, drafts);
  }
}

// A rank of this process whose peers are other processes', ready; NULL when one of those is gone.
std::unique_ptr<Rank> join(const Processes& processes, int tp_rank,
                           const lowlat_model_config& config, Weights& weights, Host host) {
  auto rank = std::make_unique<Rank>("nvidia:" + std::to_string(tp_rank) + ":fused", config,
                                     weights, host, kVocab);
  lowlat_peer_handle own;
  must(lowlat_peer_export(rank->model(), &own));
  const auto handles = processes.gather(tp_rank, own);
  if (handles.empty()) return nullptr;
  for (int peer = 0; peer < processes.size(); ++peer) {
    if (peer == tp_rank) continue;
    must(lowlat_peer_import(rank->model(), peer, &handles[static_cast<std::size_t>(peer)]));
  }
  if (processes.gather(tp_rank, 1).empty()) return nullptr;
  rank->ready();
  return rank;
}

enum class Replays { equal, different, alone };  // alone: a peer is gone

// A hundred replays of all ranks together; what take() gives is looked at ten times, and is the
// same on every rank.
template <class Take>
Replays replay_together(const Processes& processes, int tp_rank, const Rank& rank, Graph& graph,
                        const std::string& what, Take take) {
  const auto state = [&] { return status_of(rank.model()).state; };
  std::vector<double> times;
  int different = 0;
  std::uint64_t first = 0;
  for (int i = 0; i < 100; ++i) {
    if (processes.gather(tp_rank, i).empty()) return Replays::alone;
    const auto begin = std::chrono::steady_clock::now();
    graph.replay();
    wait_for(graph.stream(), kRanksBudget,
             [&] { std::printf("rank %d: state %u\n", tp_rank, state()); });
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count());
    // Compressed keys and pending halves are there from the second time on.
    if (i < 2 || i % 10 != 9) continue;
    const auto all = processes.gather(tp_rank, digest(take()));
    if (all.empty()) return Replays::alone;
    if (first == 0) first = all[0];
    for (const std::uint64_t other : all) different += other != first ? 1 : 0;
  }
  const bool healthy = different == 0 && state() == 0;
  verdict(healthy,
          "rank %d of %d processes, %s: of 10 of 100 replays %d differ, state %u; median %.2f ms "
          "with the host's part",
          tp_rank, processes.size(), what.c_str(), different, state(), spread_of(times).median);
  return healthy ? Replays::equal : Replays::different;
}

// One rank of the form with a process a rank: what it computes is what the others do, in steps and
// drafts of its own, and in steps of an engine.
int run_process(std::uint32_t kind, const Processes& processes, int tp_rank,
                const std::vector<int>& widths) {
  use_device(tp_rank);
  lowlat_model_config config = config_of(kind, false, 3);
  config.tp_size = processes.size();
  config.tp_rank = tp_rank;
  bool good = true;
  {
    Weights weights({}, tp_rank);
    const auto rank = join(processes, tp_rank, config, weights, Host::none);
    if (rank == nullptr) return 1;
    for (const int rows : widths) {
      const Case of = case_of(rows, kPosition);
      const lowlat_step step = rank->step_of(of, 1);
      const lowlat_draft draft = draft_of(*rank, step, of, false);
      Graph graph([&](cudaStream_t stream) {
        must(lowlat_step_launch(rank->model(), &step, stream));
        if (of.tokens == 6) must(lowlat_draft_launch(rank->model(), &draft, stream));
      });
      const auto take = [&] {
        std::vector<float> result = rank->logits(step);
        if (of.tokens != 6) return result;
        const auto tokens =
            rank->take(draft.draft_tokens, static_cast<std::size_t>(of.requests) * 5);
        result.insert(result.end(), tokens.begin(), tokens.end());
        return result;
      };
      const Replays ended =
          replay_together(processes, tp_rank, *rank, graph, "T=" + std::to_string(rows), take);
      if (ended == Replays::alone) return 1;
      good = good && ended == Replays::equal;
    }
    // Nobody's region goes while another's kernels may still store into it.
    if (processes.gather(tp_rank, 1).empty()) return 1;
  }
  config.num_pages = kPagesOfRequest;
  Weights weights({}, tp_rank);  // an engine's are in other dtypes
  const auto rank = join(processes, tp_rank, config, weights, Host::steps);
  if (rank == nullptr) return 1;
  for (const int rows : widths) {
    const lowlat_hosted_step step = rank->hosted_of(case_of(rows, kPosition), 1);
    Graph graph([&](cudaStream_t stream) {
      must(lowlat_hosted_step_launch(rank->model(), &step, stream));
    });
    const Replays ended =
        replay_together(processes, tp_rank, *rank, graph, "hosted, T=" + std::to_string(rows),
                        [&] { return rank->hosted_results(step); });
    if (ended == Replays::alone) return 1;
    good = good && ended == Replays::equal;
  }
  return !processes.gather(tp_rank, 1).empty() && good ? 0 : 1;
}

constexpr char kUsage[] =
    "bench_step check|hosted|time|server|once|fault [v4] [loop N|ranks N] [rows..]\n"
    "       bench_step processes [v4] N [rows..]";

bool run(Rest& rest) {
  const std::string what = rest.take();
  const std::uint32_t kind = rest.take("v4") ? LOWLAT_V4 : LOWLAT_V41;
  Places places = {4, true};
  if (what == "processes" || rest.take("ranks")) {
    places = {rest.ranks(), false};
  } else if (rest.take("loop")) {
    places = {rest.ranks(), true};
  }
  const std::vector<int> widths = rest.rows({6, 1, 12, 48});
  if (what == "check") {
    check(kind, places, widths);
  } else if (what == "time") {
    time_steps(kind, places, widths);
  } else if (what == "server") {
    time_hosted(kind, places, widths);
  } else if (what == "hosted") {
    hosted(kind, places);
  } else if (what == "once") {
    once(kind, places, widths);
  } else if (what == "fault") {
    fault(kind, places);
  } else if (what == "processes") {  // forks before CUDA begins
    failures += Processes::run(places.tp_size, [&](const Processes& processes, int rank) {
      return run_process(kind, processes, rank, widths);
    });
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::checked(argc, argv, lowlat::bench::kUsage, lowlat::bench::run);
}
