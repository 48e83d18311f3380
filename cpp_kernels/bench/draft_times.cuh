// bench/draft_times.cuh: what the programs that time the draft's proposals share: one rank looped
// back, the bytes of a launch, and the times of a group.
#pragma once

#include "bench/draft_case.cuh"
#include "bench/peers.hpp"

namespace lowlat::bench {

inline constexpr int kTimedLaunches = 6;  // of a replay

// What a launch must read: w2's shard once, and of each proposal the logits and a row of w1.
inline double draft_bytes(const DraftSetup& setup) {
  const double shard = static_cast<double>(setup.vocab) / setup.ranks;
  return shard * 2 * fused::kMarkovRank +
         setup.batch * fused::kDraftSteps * (4.0 * shard + 2 * fused::kMarkovRank);
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
                                       nullptr, 0, stream),
              "begin step");
    for (int i = 0; i < launches; ++i) {
      cuda_must(fused::launch_draft_proposals(params(i), setup.blocks, setup.programmatic, stream),
                "draft proposals");
    }
  }
};

// Microseconds a launch, of the longest rank.
inline Spread times_of(DraftGroup& group, int repeats) {
  const Spread us = time_of_ranks(
      group.setup().ranks, repeats, [&](int r) { group.on(r); },
      [&](int r) -> Graph& { return *group.rank(r).graph; },
      [&](int r) { group.rank(r).graph->wait(); });
  return {us.median / kTimedLaunches, us.low / kTimedLaunches, us.high / kTimedLaunches};
}

}  // namespace lowlat::bench
