// bench/draft_accept_case.cuh: the acceptance rule of all requests, checked against
// reference/ and timed. Shared by the bench and the GPU test.
#pragma once

#include <cmath>

#include "bench/attn_bench.hpp"
#include "fused/draft_accept.hpp"
#include "reference/accept.hpp"

namespace lowlat::bench {

// Logits of a draft and of a target that agrees with it in part; drafts are its likeliest. Where
// it does not agree, p is a share of q between none and all, so that coins decide.
struct AcceptCase {
  int batch, num_drafts, vocab;
  std::vector<float> host_target, host_draft, host_temperatures, host_coins;
  std::vector<std::int64_t> host_drafts;
  Buffer<float> target, draft, temperatures, coins;
  Buffer<std::int64_t> drafts, accepted, next;
  Buffer<std::uint8_t> workspace;

  AcceptCase(int num_requests, int g, int num_ids, std::uint64_t seed)
      : batch(num_requests), num_drafts(g), vocab(num_ids) {
    Random random(seed);
    const auto row = [&](const std::vector<float>& of, int i) {
      return of.begin() + static_cast<std::int64_t>(i) * vocab;
    };
    host_target.resize(static_cast<std::size_t>(batch) * (g + 1) * vocab);
    host_draft.resize(static_cast<std::size_t>(batch) * g * vocab);
    for (float& v : host_draft) v = 2.0f * random.normal();
    for (int b = 0; b < batch; ++b) {
      host_temperatures.push_back(b % 4 == 1 ? 0.0f : b % 4 == 2 ? 0.3f : 1.0f);
      for (int i = 0; i <= g; ++i) host_coins.push_back(static_cast<float>(random.uniform()));
      const int agree = random.below(g + 2);
      for (int i = 0; i <= g; ++i) {
        float* to = &host_target[static_cast<std::size_t>(b * (g + 1) + i) * vocab];
        for (int v = 0; v < vocab; ++v) to[v] = 2.0f * random.normal();
        if (i == g) continue;
        const auto from = row(host_draft, b * g + i);
        const auto best = static_cast<std::int64_t>(std::max_element(from, from + vocab) - from);
        // The draft is its likeliest; a target that agrees has it on top too. The other ids of both
        // weigh alike, so that at temperature T two logits T ln(share) apart have that share.
        host_drafts.push_back(best);
        const auto share = static_cast<float>(random.uniform());
        to[best] = i < agree ? 14.0f : from[best] + host_temperatures.back() * std::log(share);
      }
    }
    target = Buffer<float>(host_target);
    draft = Buffer<float>(host_draft);
    temperatures = Buffer<float>(host_temperatures);
    coins = Buffer<float>(host_coins);
    drafts = Buffer<std::int64_t>(host_drafts);
    accepted = Buffer<std::int64_t>(static_cast<std::size_t>(batch));
    next = Buffer<std::int64_t>(static_cast<std::size_t>(batch));
    workspace = Buffer<std::uint8_t>(nvidia::fused::kAcceptWorkspaceBytes);
    workspace.zero();
  }
  nvidia::fused::DraftAcceptParams params() const {
    return {batch,          num_drafts,         vocab,       drafts.get(),   target.get(),
            draft.get(),    temperatures.get(), coins.get(), accepted.get(), next.get(),
            workspace.get()};
  }
};

// True: equal to reference/ wherever its nearest comparison is not within the declared bound, and
// again in replays.
inline bool check_accept(int batch, int num_drafts, int vocab, std::uint64_t seed) {
  constexpr double kBound = 2e-6;  // docs/numerics.md, accept
  AcceptCase data(batch, num_drafts, vocab, seed);
  Graph graph([&](cudaStream_t stream) {
    cuda_must(nvidia::fused::launch_draft_accept(data.params(), stream), "draft accept");
  });
  std::vector<std::int64_t> want_accepted(batch), want_next(batch);
  std::vector<double> margin(batch);
  parallel(batch, [&](std::int64_t b) {
    const std::int64_t g = num_drafts;
    reference::accept(&want_accepted[b], &want_next[b], &margin[b], &data.host_drafts[b * g],
                      &data.host_target[b * (g + 1) * vocab], &data.host_draft[b * g * vocab],
                      data.host_temperatures[b], &data.host_coins[b * (g + 1)], g, vocab);
  });
  int wrong = 0, near = 0, unsteady = 0;
  std::int64_t kept = 0;
  std::vector<std::int64_t> first;
  for (int i = 0; i < 20; ++i) {
    data.accepted.poison();
    data.next.poison();
    graph.replay();
    graph.wait();
    std::vector<std::int64_t> got = data.accepted.take();
    const std::vector<std::int64_t> next = data.next.take();
    got.insert(got.end(), next.begin(), next.end());
    if (i == 0) first = got;
    unsteady += got != first ? 1 : 0;
  }
  for (int b = 0; b < batch; ++b) {
    const bool equal = first[b] == want_accepted[b] && first[batch + b] == want_next[b];
    kept += first[b];
    if (!equal) ++(margin[b] < kBound ? near : wrong);
  }
  const bool good = wrong == 0 && unsteady == 0;
  std::printf("%s accept B=%d g=%d V=%d: wrong %d, near %d, replays that differ %d, kept %lld\n",
              good ? "ok  " : "FAIL", batch, num_drafts, vocab, wrong, near, unsteady,
              static_cast<long long>(kept));
  std::fflush(stdout);
  return good;
}

inline void time_accept(int batch, bool greedy) {
  const AcceptCase data(batch, 5, 129280, 5);
  nvidia::fused::DraftAcceptParams params = data.params();
  if (greedy) params.temperatures = nullptr;
  constexpr int kLaunches = 8;
  Graph graph([&](cudaStream_t stream) {
    for (int i = 0; i < kLaunches; ++i) {
      cuda_must(nvidia::fused::launch_draft_accept(params, stream), "draft accept");
    }
  });
  const Times times = time_of(graph, 30);
  std::printf("accept %-8s B=%d: median %6.2f us  low %6.2f  high %6.2f (logits in the cache)\n",
              greedy ? "greedy" : "mixed", batch, times.median_us / kLaunches,
              times.low_us / kLaunches, times.high_us / kLaunches);
  std::fflush(stdout);
}

}  // namespace lowlat::bench
