// bench/step_team.cuh: whole steps and drafts of both models by the fused kernels, on one rank
// whose peers are itself or on ranks with a device each, and the same by the resident schedule to
// compare with. Shared by the bench and the GPU test.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>

#include "bench/peers.hpp"
#include "bench/program.hpp"
#include "bench/step_case.cuh"

namespace lowlat::bench {

inline void expect(bool good, const char* what) {
  failures += good ? 0 : 1;
  if (!good) std::printf("FAIL %s\n", what);
}

// Where the ranks of a model are: one rank of tp_size on device 0 whose peers are itself, or all of
// them, each on the device of its number, or all on device 0, each on a part of it, with equal
// shards.
struct Places {
  int tp_size;
  bool looped;
  bool on_one = false;
  int size() const { return looped ? 1 : tp_size; }
  int device_of(int rank) const { return on_one ? 0 : rank; }
};

// Weights of all ranks, each on its device, for all models of a configuration. Ranks of one device
// have those of one that is looped back, whose embedding every rank adds, and of theirs one alone.
class AllWeights {
 public:
  explicit AllWeights(const Places& places, WeightRules rules = {}) {
    if (places.on_one) {
      rules.embedding = places.tp_size;
      of_.push_back(std::make_unique<Weights>(rules));
      return;
    }
    for (int r = 0; r < places.size(); ++r) {
      of_.push_back(std::make_unique<Weights>(rules, places.looped ? -1 : r));
    }
  }
  Weights& of(int rank) { return *of_[std::min(static_cast<std::size_t>(rank), of_.size() - 1)]; }

 private:
  std::vector<std::unique_ptr<Weights>> of_;
};

// All ranks of a model.
class Team {
 public:
  static constexpr std::uint64_t kBudgetNs = 20'000'000'000;

  // schedule: what the platform's name says of it, fused or persistent.
  Team(const char* schedule, const Places& places, lowlat_model_config config, AllWeights& weights,
       Host host = Host::none)
      : places_(places) {
    config.tp_size = places.tp_size;
    // Of rank 0, whose embeddings the loop makes every rank's; others would be zeros.
    const bool first_alone = places.looped || places.on_one;
    const int tokens = first_alone ? kVocab / places.tp_size : kVocab;
    std::vector<lowlat_peer_handle> handles;
    for (int r = 0; r < places.size(); ++r) {
      use_device(places.device_of(r));
      config.tp_rank = r;
      const std::string platform = "nvidia:" + std::to_string(places.device_of(r)) + ":" +
                                   schedule + (places.looped ? ":loop" : "");
      ranks_.push_back(std::make_unique<Rank>(platform, config, weights.of(r), host, tokens));
      must(lowlat_peer_export(rank(r).model(), &handles.emplace_back()));
    }
    each([&](Rank& rank, int r) {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == r) continue;
        must(lowlat_peer_import(rank.model(), peer, &handles[static_cast<std::size_t>(peer)]));
      }
    });
    each([](Rank& rank, int) { rank.ready(); });
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }
  Rank& first() { return rank(0); }
  const lowlat_model_config& config() { return first().config(); }
  // act(rank, its number), its device current.
  template <class Act>
  void each(Act act) {
    for (int r = 0; r < size(); ++r) {
      on(r);
      act(rank(r), r);
    }
    use_device(0);
  }
  // Makes a rank's device current.
  void on(int rank) const { use_device(places_.device_of(rank)); }
  // What make(rank) is on every rank.
  template <class Make>
  auto all(Make make) {
    std::vector<decltype(make(first()))> out;
    each([&](Rank& rank, int) { out.push_back(make(rank)); });
    return out;
  }
  // Launches of every rank, then their end. launch_one is of the C ABI.
  template <class Call>
  void run(lowlat_status (*launch_one)(lowlat_model*, const Call*, void*),
           const std::vector<Call>& calls) {
    each([&](Rank& rank, int r) {
      must(launch_one(rank.model(), &calls[static_cast<std::size_t>(r)], nullptr));
    });
    each([](Rank& rank, int) { must(lowlat_synchronize(rank.model(), kBudgetNs)); });
  }
  // What take(rank, its call) gives; it must be the same on every rank.
  template <class Call, class Take>
  auto agreed(const char* what, const std::vector<Call>& calls, Take take) {
    const auto out = take(first(), calls[0]);
    for (int r = 1; r < size(); ++r) {
      const auto other = take(rank(r), calls[static_cast<std::size_t>(r)]);
      expect(other.size() == out.size() &&
                 std::memcmp(other.data(), out.data(), out.size() * sizeof(out[0])) == 0,
             what);
    }
    return out;
  }
  lowlat_status_words status(int r) { return status_of(rank(r).model()); }
  // "" or where every rank stands, if one has a fault.
  std::string fault() {
    std::string out;
    bool any = false;
    for (int r = 0; r < size(); ++r) {
      const lowlat_status_words words = status(r);
      any = any || words.state != 0;
      out += "; rank " + std::to_string(r) + ": state " + std::to_string(words.state) + " kernel " +
             std::to_string(words.place) + " stage " + std::to_string(words.stage) + " peer " +
             std::to_string(words.peer) + " epoch " + std::to_string(words.epoch);
    }
    return any ? out : "";
  }

 private:
  Places places_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Captured launches of every rank. launch(rank, its number, stream).
class TeamGraph {
 public:
  template <class Launch>
  TeamGraph(Team& team, Launch launch) : team_(team) {
    team.each([&](Rank& rank, int r) {
      graphs_.push_back(
          std::make_unique<Graph>([&](cudaStream_t stream) { launch(rank, r, stream); }));
    });
  }
  Graph& of(int rank) { return *graphs_[static_cast<std::size_t>(rank)]; }
  void replay() {
    team_.each([&](Rank&, int r) { of(r).replay(); });
  }
  void wait(int r) {
    wait_for(of(r).stream(), kRanksBudget, [&] { std::printf("%s\n", team_.fault().c_str()); });
  }
  void wait() {
    team_.each([&](Rank&, int r) { wait(r); });
  }
  // Microseconds of a replay, of the longest rank.
  Spread time(int repeats) {
    return time_of_ranks(
        team_.size(), repeats, [&](int r) { team_.on(r); }, [&](int r) -> Graph& { return of(r); },
        [&](int r) { wait(r); });
  }

 private:
  Team& team_;
  std::vector<std::unique_ptr<Graph>> graphs_;
};

// rel_l2 of each row, ascending; of a row that is no number: infinite. A NaN has no place in an
// order, and a sort by one may leave its array.
inline std::vector<double> errors_of(const std::vector<float>& got, const std::vector<float>& want,
                                     std::size_t width) {
  std::vector<double> out;
  for (std::size_t first = 0; first < want.size(); first += width) {
    double error = 0.0, norm = 0.0;
    for (std::size_t i = first; i < first + width; ++i) {
      error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
      norm += static_cast<double>(want[i]) * want[i];
    }
    const double row = std::sqrt(error / std::max(norm, 1e-30));
    out.push_back(std::isnan(row) ? INFINITY : row);
  }
  std::sort(out.begin(), out.end());
  return out;
}
inline double median(const std::vector<double>& sorted) {
  return sorted.empty() ? 0.0 : sorted[sorted.size() / 2];
}

inline std::vector<float> row_of(const Pool& pool, const std::uint8_t* bytes, std::int64_t row) {
  if (pool.spec.layout == LOWLAT_INDEX_PAGED && pool.spec.shape[1] == index_page(true)) {
    const std::uint8_t* page = bytes + row / 64 * index_page(true);
    float scale;
    std::memcpy(&scale, page + index_codes(true) + row % 64 * 4, 4);
    std::vector<float> out;
    for (int i = 0; i < 128; ++i) {
      out.push_back(scale * static_cast<float>(reference::from_e4m3(page[row % 64 * 128 + i])));
    }
    return out;
  }
  if (pool.spec.layout == LOWLAT_INDEX_PAGED) {
    std::uint8_t key[68];
    const std::uint8_t* page = bytes + row / 64 * index_page(false);
    std::memcpy(key, page + row % 64 * 64, 64);
    std::memcpy(key + 64, page + 64 * 64 + row % 64 * 4, 4);
    double values[128];
    reference::fp4_unpack_index(values, key);
    return {values, values + 128};
  }
  const std::int64_t page_bytes = pool.spec.shape[1], rows = page_bytes / 584;
  const std::uint8_t* page = bytes + row / rows * page_bytes;
  std::uint8_t stored[584];
  std::memcpy(stored, page + row % rows * 576, 576);
  std::memcpy(stored + 576, page + rows * 576 + row % rows * 8, 8);
  std::vector<float> out(512);
  reference::kv_unpack(out.data(), stored, 1);
  return out;
}

// Stored rows of the two: which differ, and by how much. All ranks store the same.
inline void compare_pools(Team& got, Team& want, double bound) {
  for (std::size_t i = 0; i < got.first().pools().size(); ++i) {
    const Pool& pool = got.first().pools()[i];
    const auto bytes = static_cast<std::size_t>(bytes_of(pool.spec));
    const auto stored_of = [&](Team& team) {
      const auto places = team.all([&](Rank& rank) { return rank.pools()[i].data; });
      return team.agreed(pool.name.c_str(), places, [&](Rank& rank, const void* data) {
        return rank.take(static_cast<const std::uint8_t*>(data), bytes);
      });
    };
    const auto a = stored_of(got), b = stored_of(want);
    const bool state = pool.spec.dtype == LOWLAT_F32;
    // A state's row: all behind rings and rows, or of a hosted model behind the rows.
    std::int64_t width = pool.spec.layout == LOWLAT_INDEX_PAGED ? 128 : 512;
    std::int64_t rows = pool.spec.shape[0] *
                        (pool.spec.layout == LOWLAT_INDEX_PAGED ? 64 : pool.spec.shape[1] / 584);
    if (state) {
      rows = pool.spec.shape[0] * (pool.spec.ndim > 2 ? pool.spec.shape[1] : 1);
      width = count_of(pool.spec) / rows;
    }
    // Most pages are as they were.
    const std::int64_t rows_of_page = rows / pool.spec.shape[0];
    const std::size_t page_bytes = bytes / static_cast<std::size_t>(pool.spec.shape[0]);
    std::vector<float> x, y;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::size_t at = static_cast<std::size_t>(row / rows_of_page) * page_bytes;
      if (row % rows_of_page == 0 && std::memcmp(&a[at], &b[at], page_bytes) == 0) {
        row += rows_of_page - 1;
        continue;
      }
      std::vector<float> p, q;
      if (state) {
        const auto* from = reinterpret_cast<const float*>(a.data()) + row * width;
        const auto* other = reinterpret_cast<const float*>(b.data()) + row * width;
        p.assign(from, from + width);
        q.assign(other, other + width);
      } else {
        p = row_of(pool, a.data(), row);
        q = row_of(pool, b.data(), row);
      }
      if (p == q) continue;
      x.insert(x.end(), p.begin(), p.end());
      y.insert(y.end(), q.begin(), q.end());
    }
    const auto errors = errors_of(x, y, static_cast<std::size_t>(width));
    std::printf("  %-14s %4zu of %lld rows differ, rel_l2 median %.1e worst %.1e\n",
                pool.name.c_str(), errors.size(), static_cast<long long>(rows), median(errors),
                errors.empty() ? 0.0 : errors.back());
    expect(median(errors) < bound && errors.size() < 500, pool.name.c_str());
  }
}

// V4's scales of 128 values and the codes of its attention's output pass a last bit on more
// strongly: the resident schedule with Marlin's experts is up to 6e-2 from the one without.
inline double bound_of(Team& team, const Case& of) {
  return of.position >= 512 ? 0.2 : team.config().kind == LOWLAT_V4 ? 0.08 : 0.04;
}

// One step on both, by launches.
inline void compare_step(Team& got, Team& want, const Case& of, int salt) {
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::int32_t>> best;
  for (Team* team : {&got, &want}) {
    const auto steps = team->all([&](Rank& rank) { return rank.step_of(of, salt); });
    team->run(lowlat_step_launch, steps);
    logits.push_back(
        team->agreed("logits of all ranks", steps,
                     [](Rank& rank, const lowlat_step& step) { return rank.logits(step); }));
    best.push_back(
        team->agreed("tokens of all ranks", steps, [&](Rank& rank, const lowlat_step& step) {
          return rank.take(step.argmax, static_cast<std::size_t>(of.rows()));
        }));
  }
  const auto vocab = static_cast<std::size_t>(got.config().vocab);
  const auto errors = errors_of(logits[0], logits[1], vocab);
  int differs = 0, wrong = 0;
  for (int row = 0; row < of.rows(); ++row) {
    differs += best[0][static_cast<std::size_t>(row)] != best[1][static_cast<std::size_t>(row)];
    const float* first = logits[0].data() + static_cast<std::size_t>(row) * vocab;
    wrong +=
        best[0][static_cast<std::size_t>(row)] != std::max_element(first, first + vocab) - first;
  }
  const bool good = median(errors) < bound_of(got, of) && wrong == 0;
  verdict(good,
          "step of %d requests of %d at %d: logits rel_l2 median %.2e worst %.2e, argmax "
          "differs %d, wrong %d",
          of.requests, of.tokens, of.position, median(errors), errors.back(), differs, wrong);
}

// One hosted step on both: what it leaves, and the tokens that decoding keeps.
inline void compare_hosted(Team& got, Team& want, const Case& of, int salt) {
  const auto rows = static_cast<std::size_t>(of.rows() - (of.requests > 1 ? 1 : 0));
  const auto hidden = static_cast<std::size_t>(got.config().hidden);
  const std::size_t widths[] = {hidden, 3 * hidden, 4 * hidden};
  std::vector<std::vector<float>> results[3];
  std::vector<std::vector<std::int32_t>> history;
  for (Team* team : {&got, &want}) {
    const auto steps = team->all([&](Rank& rank) { return rank.hosted_of(of, salt); });
    team->run(lowlat_hosted_step_launch, steps);
    const auto leaves = [&](Rank& rank, const lowlat_hosted_step& step, int which) {
      const std::uint16_t* outs[] = {step.hidden, step.features, step.streams};
      return rank.floats(outs[which], rows * widths[which]);
    };
    for (int i = 0; i < 3; ++i) {
      results[i].push_back(team->agreed(
          "what hosted steps leave", steps,
          [&](Rank& rank, const lowlat_hosted_step& step) { return leaves(rank, step, i); }));
    }
    history.push_back(
        team->agreed("histories of all ranks", steps,
                     [](Rank& rank, const lowlat_hosted_step&) { return rank.history(); }));
  }
  double medians[3];
  for (int i = 0; i < 3; ++i) {
    medians[i] = median(errors_of(results[i][0], results[i][1], widths[i]));
  }
  const bool kept = history[0] == history[1];
  const bool good = medians[0] < bound_of(got, of) && medians[1] < bound_of(got, of) &&
                    medians[2] < bound_of(got, of) && kept;
  verdict(good, "hosted step of %d requests of %d: rel_l2 medians %.2e %.2e %.2e%s", of.requests,
          of.tokens, medians[0], medians[1], medians[2], kept ? "" : ", other history");
}

// The layouts and schedules against the resident schedule with the checkpoint's experts.
inline void compare_hosting(const Places& places, const lowlat_model_config& config) {
  struct Hosting {
    const char* name;
    const char* schedule;
    Host host;
  };
  AllWeights weights(places);
  for (const Hosting& of :
       {Hosting{"fused", "fused", Host::steps},
        Hosting{"fused, Marlin's experts", "fused", Host::marlin_steps},
        Hosting{"resident, Marlin's experts", "persistent", Host::marlin_steps}}) {
    std::printf("%s\n", of.name);
    // First, since Marlin's layout is made of what this one is bound to.
    Team want("persistent", places, config, weights, Host::steps);
    Team got(of.schedule, places, config, weights, of.host);
    for (const int rows : {6, 1, 12, 48}) {
      compare_hosted(got, want, case_of(rows, kShort + rows), 1);
    }
    compare_hosted(got, want, {4, 1, kShort}, 2);
    compare_pools(got, want, 0.08);
  }
}

// Proposals of both for one batch: tokens, and logits of the requests that are sampled.
inline void compare_proposals(Team& got, Team& want, int batch, bool samples) {
  const auto rows = static_cast<std::size_t>(batch) * 5;
  const auto vocab = static_cast<std::size_t>(got.config().vocab);
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::int64_t>> tokens;
  std::vector<std::uint16_t> hidden;
  std::vector<std::int64_t> anchors;
  std::vector<float> temperatures;
  std::uint64_t state = 1234;
  // V4's are four streams.
  const std::size_t width =
      static_cast<std::size_t>(got.config().hidden) * (got.config().kind == LOWLAT_V4 ? 4 : 1);
  for (std::size_t i = 0; i < rows * width; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    hidden.push_back(static_cast<std::uint16_t>(0x3f00u | (state >> 33 & 0x80ffu)));
  }
  for (int q = 0; q < batch; ++q) {
    anchors.push_back(1000 * q + 17);
    temperatures.push_back(q % 2 == 0 ? 0.8f : 0.0f);
  }
  for (Team* team : {&got, &want}) {
    const auto calls = team->all([&](Rank& rank) {
      lowlat_proposal proposal{};
      proposal.struct_bytes = sizeof proposal;
      proposal.batch_size = batch;
      proposal.hidden = rank.place(hidden);
      proposal.anchors = rank.place(anchors);
      proposal.draft_tokens = rank.place(std::vector<std::int64_t>(rows, -7));
      if (!samples) return proposal;
      proposal.temperature = rank.place(temperatures);
      proposal.noise_offset = rank.place(std::vector<std::int64_t>{41});
      proposal.noise_key = 99;
      proposal.draft_logits = rank.place(std::vector<float>(rows * vocab, 0.0f));
      return proposal;
    });
    team->run(lowlat_propose_launch, calls);
    tokens.push_back(team->agreed(
        "proposals of all ranks", calls,
        [&](Rank& rank, const lowlat_proposal& of) { return rank.take(of.draft_tokens, rows); }));
    if (!samples) continue;
    const auto sampled = [&](Rank& rank, const lowlat_proposal& of) {
      const auto whole = rank.take(of.draft_logits, rows * vocab);
      std::vector<float> own;
      for (int q = 0; q < batch; q += 2) {
        const auto first = whole.begin() + static_cast<std::ptrdiff_t>(q * 5 * vocab);
        own.insert(own.end(), first, first + static_cast<std::ptrdiff_t>(5 * vocab));
      }
      return own;
    };
    logits.push_back(team->agreed("proposals' logits of all ranks", calls, sampled));
  }
  int differs = 0;
  for (std::size_t i = 0; i < rows; ++i) differs += tokens[0][i] != tokens[1][i];
  const auto errors = samples ? errors_of(logits[0], logits[1], vocab) : std::vector<double>{};
  const bool good = 5 * differs <= static_cast<int>(rows) && median(errors) < 0.01;
  verdict(good, "proposals of %d%s: tokens differ %d of %zu, logits rel_l2 median %.2e worst %.2e",
          batch, samples ? ", sampled" : "", differs, rows, median(errors),
          errors.empty() ? 0.0 : errors.back());
}

// A hosted draft's layers and proposals beside the model's own draft, both by the fused schedule:
// tokens, and to the bit the keys that both keep; of Marlin's experts, whose sums are in another
// order, those of the first stage.
inline void compare_hosted_draft(Team& hosted, Team& own, const Case& of, bool marlin = false) {
  const auto steps = own.all([&](Rank& rank) { return rank.step_of(of, 0); });
  own.run(lowlat_step_launch, steps);
  std::vector<lowlat_draft> drafts;
  own.each([&](Rank& rank, int r) {
    drafts.push_back(draft_of(rank, steps[static_cast<std::size_t>(r)], of, false));
    drafts.back().batch_size = 0;
  });
  own.run(lowlat_draft_launch, drafts);
  // visit(ours, its pages' bytes, the engine's first page of ours) of every pool of the draft.
  const auto each_pool = [&](auto visit) {
    own.each([&](Rank& rank, int r) {
      for (const Pool& pool : rank.pools()) {
        for (const Pool& other : hosted.rank(r).pools()) {
          if (other.name != pool.name) continue;
          const auto page = static_cast<std::size_t>(pool.spec.shape[1]);
          visit(static_cast<std::uint8_t*>(pool.data),
                static_cast<std::size_t>(pool.spec.shape[0]) * page,
                static_cast<std::uint8_t*>(other.data) + page);
        }
      }
    });
  };
  each_pool([](const std::uint8_t* ours, std::size_t bytes, std::uint8_t* theirs) {
    cuda_must(cudaMemcpy(theirs, ours, bytes, cudaMemcpyDeviceToDevice), "keys");
    cuda_must(cudaDeviceSynchronize(), "keys");
  });
  for (lowlat_draft& draft : drafts) {
    draft.num_inject_rows = 0;
    draft.batch_size = of.requests;
  }
  own.run(lowlat_draft_launch, drafts);
  const auto count = static_cast<std::size_t>(of.requests) * 5;
  const auto want = own.agreed(
      "a draft's tokens on all ranks", drafts,
      [&](Rank& rank, const lowlat_draft& of) { return rank.take(of.draft_tokens, count); });
  const auto blocks = hosted.all([&](Rank& rank) { return rank.hosted_draft_of(of); });
  hosted.run(lowlat_hosted_draft_launch, blocks);
  std::vector<lowlat_proposal> proposals;
  hosted.each([&](Rank& rank, int r) {
    proposals.push_back(rank.proposal_of(blocks[static_cast<std::size_t>(r)]));
  });
  hosted.run(lowlat_propose_launch, proposals);
  const auto got = hosted.agreed(
      "proposals of all ranks", proposals,
      [&](Rank& rank, const lowlat_proposal& of) { return rank.take(of.draft_tokens, count); });
  const std::size_t width =
      static_cast<std::size_t>(own.config().hidden) * (own.config().kind == LOWLAT_V4 ? 4 : 1);
  const auto left = hosted.agreed("what a hosted draft leaves", blocks,
                                  [&](Rank& rank, const lowlat_hosted_draft& of) {
                                    return rank.floats(of.hidden, count * width);
                                  });
  const bool finite =
      std::all_of(left.begin(), left.end(), [](float value) { return std::isfinite(value); });
  bool same_keys = true;
  int stage = 0;
  each_pool([&](const std::uint8_t* ours, std::size_t bytes, const std::uint8_t* theirs) {
    if (marlin && stage++ % hosted.config().num_draft_stages != 0) return;
    std::vector<std::uint8_t> a(bytes), b(bytes);
    cuda_must(cudaMemcpy(a.data(), ours, bytes, cudaMemcpyDeviceToHost), "keys");
    cuda_must(cudaMemcpy(b.data(), theirs, bytes, cudaMemcpyDeviceToHost), "keys");
    same_keys &= a == b;
  });
  int differs = 0;
  for (std::size_t i = 0; i < count; ++i) differs += got[i] != want[i];
  // The norm before the head adds its squares in another order.
  const bool good = 10 * differs <= static_cast<int>(count) && finite && same_keys;
  verdict(good, "hosted draft of %d requests%s: tokens differ %d of %zu%s%s", of.requests,
          marlin ? ", Marlin's experts" : "", differs, count, finite ? "" : ", not finite",
          same_keys ? "" : ", other keys");
}

inline void compare_draft(Team& got, Team& want, const Case& of) {
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::int32_t>> tokens;
  const auto count = static_cast<std::size_t>(of.requests) * 5;
  for (const auto& [team, with_logits] : {std::pair{&got, true}, {&want, true}, {&got, false}}) {
    const auto calls = team->all([&, sampled = with_logits](Rank& rank) {
      return draft_of(rank, rank.step_of(of, 0), of, sampled);
    });
    team->run(lowlat_draft_launch, calls);
    tokens.push_back(team->agreed("a draft's tokens on all ranks", calls,
                                  [&](Rank& rank, const lowlat_draft& draft) {
                                    return rank.take(draft.draft_tokens, count);
                                  }));
    if (!with_logits) continue;
    logits.push_back(team->agreed(
        "a draft's logits on all ranks", calls, [&](Rank& rank, const lowlat_draft& draft) {
          return rank.take(draft.draft_logits,
                           count * static_cast<std::size_t>(rank.config().vocab));
        }));
  }
  int differs = 0, greedy = 0;
  for (std::size_t i = 0; i < count; ++i) {
    differs += tokens[0][i] != tokens[1][i];
    greedy += tokens[0][i] != tokens[2][i];
  }
  const auto errors = errors_of(logits[0], logits[1], static_cast<std::size_t>(got.config().vocab));
  const bool good = median(errors) < bound_of(got, of) && greedy == 0;
  verdict(good,
          "draft of %d: logits rel_l2 median %.2e worst %.2e, tokens differ %d of %zu, "
          "without logits %d",
          of.requests, median(errors), errors.back(), differs, count, greedy);
}

inline std::uint64_t digest(const std::vector<float>& values) {
  std::uint64_t state = 0xcbf2'9ce4'8422'2325ull;
  for (const float v : values) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    state = (state ^ bits) * 0x100'0000'01b3ull;
  }
  return state;
}

// Captured steps with three inputs in turn give what they gave first.
inline void replay(Team& team, const Case& of, int count) {
  std::vector<std::vector<lowlat_step>> steps;
  std::vector<std::unique_ptr<TeamGraph>> graphs;
  for (int i = 0; i < 3; ++i) {
    steps.push_back(team.all([&](Rank& rank) { return rank.step_of(of, 5 + i); }));
    graphs.push_back(std::make_unique<TeamGraph>(team, [&](Rank& rank, int r, cudaStream_t stream) {
      must(lowlat_step_launch(rank.model(), &steps.back()[static_cast<std::size_t>(r)], stream));
    }));
  }
  // A layer's compressed keys and pending halves are there from the second time on. Each graph has
  // a stream of its own, and a model's steps follow each other.
  constexpr int kTurns = 3, kBegin = 2 * kTurns;
  std::vector<std::uint64_t> first;
  int different = 0;
  for (int i = 0; i < kBegin + kTurns + count; ++i) {
    const auto at = static_cast<std::size_t>(i % kTurns);
    graphs[at]->replay();
    graphs[at]->wait();
    if (i < kBegin) continue;
    bool same = true;
    team.each([&](Rank& rank, int r) {
      const std::uint64_t now = rank.digest_of_logits(steps[at][static_cast<std::size_t>(r)]);
      if (first.size() <= at) first.push_back(now);
      same = same && now == first[at];
    });
    different += same ? 0 : 1;
  }
  const std::string fault = team.fault();
  const bool good = different == 0 && first[0] != first[1] && fault.empty();
  verdict(good, "%d replays of %d rows, %d ranks: %d differ%s", count, of.rows(), team.size(),
          different, fault.c_str());
}

// A thousand of the least rows, and `others` of more.
inline void replay_widths(Team& team, int others) {
  for (const int rows : {6, 12, 24, 48})
    replay(team, case_of(rows, 4500), rows == 6 ? 1000 : others);
}

// What a fault leaves of a step: no number, and another launch is refused.
inline bool is_ended(Rank& rank, const lowlat_step& step) {
  const auto logits = rank.logits(step);
  const auto plausible =
      std::count_if(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); });
  const bool refused = lowlat_step_launch(rank.model(), &step, nullptr) == LOWLAT_FAULT;
  std::printf("%lld plausible logits, the next launch %s\n", static_cast<long long>(plausible),
              refused ? "is refused" : "IS TAKEN");
  return plausible == 0 && refused;
}

// Steps in flight when the first rank's host aborts: they end on all ranks, at once.
inline bool abort_ends_steps(Team& team) {
  const auto steps = team.all([](Rank& rank) { return rank.step_of(case_of(6, kPosition), 1); });
  for (int i = 0; i < 50; ++i) {
    team.each([&](Rank& rank, int r) {
      must(lowlat_step_launch(rank.model(), &steps[static_cast<std::size_t>(r)], nullptr));
    });
  }
  lowlat_abort(team.first().model());
  const auto begin = std::chrono::steady_clock::now();
  bool good = true;
  team.each([&](Rank& rank, int r) {
    good = lowlat_synchronize(rank.model(), 5'000'000'000) == LOWLAT_FAULT && good;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    const lowlat_status_words words = team.status(r);
    std::printf("aborted: rank %d after %.2f ms, state %u kernel %u place %u: ", r, took.count(),
                words.state, words.kernel, words.place);
    good = words.state >= 2 && (r > 0 || words.state == 3) && good;
    good = is_ended(rank, steps[static_cast<std::size_t>(r)]) && good;
  });
  return good;
}

// The last rank never launches its step: the others end at their deadline, and those whose wait it
// was name it; what it launches later ends at once.
inline bool dead_rank_is_named(Team& team) {
  const int dead = team.size() - 1;
  const auto steps = team.all([](Rank& rank) { return rank.step_of(case_of(6, kPosition), 1); });
  team.run(lowlat_step_launch, steps);
  const auto launch = [&](int r) {
    must(lowlat_step_launch(team.rank(r).model(), &steps[static_cast<std::size_t>(r)], nullptr));
  };
  bool good = true, named = false;
  const auto ended = [&](int r, const char* what) {
    const auto begin = std::chrono::steady_clock::now();
    good = lowlat_synchronize(team.rank(r).model(), 5'000'000'000) == LOWLAT_FAULT && good;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    const lowlat_status_words words = team.status(r);
    std::printf("%s: rank %d ended after %.1f ms, state %u place %u stage %u peer %d: ", what, r,
                took.count(), words.state, words.place, words.stage, words.peer);
    named = named || (words.state == 1 && words.peer == dead);
    good = (words.state == 2 || (words.state == 1 && words.peer == dead)) && good;
    good = is_ended(team.rank(r), steps[static_cast<std::size_t>(r)]) && good;
    return took.count();
  };
  for (int r = 0; r < dead; ++r) launch(r);
  for (int r = 0; r < dead; ++r) ended(r, "without a peer");
  launch(dead);
  const double budget_ms = static_cast<double>(team.config().wait_budget_ns) * 1e-6;
  good = ended(dead, "the late one") < budget_ms / 2 && good;
  return good && named;
}

}  // namespace lowlat::bench
