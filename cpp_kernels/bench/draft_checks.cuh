// bench/draft_checks.cuh: what the draft's proposals have to stand beyond ordinary inputs: ties and
// NaN, foreign packets, replays, a rank that does not come. Shared by the bench and the GPU test.
//
// Each function prints a line a finding and is true when all is as it has to be. `devices`: rank r
// runs on device r % devices.
#pragma once

#include <cinttypes>

#include "bench/draft_case.cuh"
#include "shape/dsv41_flash.hpp"

namespace lowlat::bench {

constexpr int kVocab = shape::Dsv41Flash<1>::kVocab;

inline bool report(bool good, const char* what) {
  std::printf("%s %s\n", good ? "ok  " : "FAIL", what);
  std::fflush(stdout);
  return good;
}

// As many blocks as fit with all ranks of a device at once.
inline DraftSetup setup_of(int vocab, int ranks, int devices, int batch,
                           std::vector<float> temperatures = {}, bool share = false) {
  DraftSetup setup;
  setup.vocab = vocab;
  setup.ranks = ranks;
  setup.devices = devices;
  setup.blocks = fused::kMaxDraftBlocks * devices / ranks;
  setup.batch = batch;
  setup.temperatures = std::move(temperatures);
  setup.share_logits = share;
  return setup;
}

// Every instance once, with few ids: what a tool that is a hundred times slower gets through.
inline bool check_small() {
  const DraftWeights weights(4096, 51, false);
  bool good = true;
  for (const int blocks : {2, 8, 16}) {
    DraftSetup setup = setup_of(4096, 1, 1, 3, {0.7f, 0.0f, 1.0f}, true);
    setup.blocks = blocks;
    setup.budget_ns = 20'000'000'000;
    DraftGroup group(setup, weights);
    group.capture();
    good &= check_draft(group, weights, "few ids");
  }
  return good;
}

// All z of a step equal on many ids: the lowest wins. A NaN wins over all, the lowest of several.
inline bool check_ties_and_nan(int devices) {
  const DraftWeights flat(4 * 532, 3, true);
  DraftGroup group(setup_of(4 * 532, 4, devices, 3), flat);
  for (int r = 0; r < 4; ++r) {
    group.on(r);
    std::vector<float> base = group.rank(r).base[0].take();
    for (float& v : base) v = std::round(v * 0.5f);
    for (int i = 0; i < 532; ++i) base[532 * 7 + i] = i % 2 == 0 ? -0.0f : 0.0f;
    group.rank(r).base[0].put(base);
  }
  group.capture();
  bool good = check_draft(group, flat, "ties");
  const float nan = std::nanf(""), infinity = HUGE_VALF;
  group.on(1);
  std::vector<float> base = group.rank(1).base[0].take();
  base[532 * 2 + 99] = base[532 * 2 + 77] = nan;                 // request 0, step 2
  base[532 * 5 + 11] = infinity;                                 // request 1, step 0
  for (int i = 0; i < 532; ++i) base[532 * 12 + i] = -infinity;  // request 2, step 2
  group.rank(1).base[0].put(base);
  group.on(3);
  base = group.rank(3).base[0].take();
  base[532 * 2 + 5] = nan;
  group.rank(3).base[0].put(base);
  group.replay();
  group.wait();
  const std::vector<std::int64_t> tokens = group.tokens();
  good &= report(!tokens.empty() && tokens[2] == 532 + 77 && tokens[5] == 532 + 11,
                 "the lowest NaN wins, and infinity over numbers");
  std::printf("     tokens %" PRId64 " %" PRId64 "\n", tokens.empty() ? -1 : tokens[2],
              tokens.empty() ? -1 : tokens[5]);
  // An anchor that is no token: all its logits are NaN, so the first proposal is id 0.
  for (int r = 0; r < 4; ++r) {
    group.on(r);
    group.rank(r).anchors.put({5, 4 * 532, -1});
  }
  group.replay();
  group.wait();
  const std::vector<std::int64_t> odd = group.tokens();
  return good &
         report(!odd.empty() && odd[5] == 0 && odd[10] == 0, "an anchor outside the vocabulary");
}

// Packets of other epochs in every place, and epochs that pass 2^32.
inline bool check_tags(const DraftWeights& weights, int devices) {
  bool good = true;
  for (const bool wrap : {false, true}) {
    DraftGroup group(setup_of(weights.vocab, 2, devices, 2, {0.8f, 0.0f}), weights);
    for (int r = 0; r < 2; ++r) {
      group.on(r);
      const fused::ExchangePort port = group.rank(r).region.port(kDraftBudgetNs, 0);
      // As if this place had been written an even number of exchanges ago.
      const std::uint64_t epoch = wrap ? (std::uint64_t{1} << 32) - 10 : 101;
      cuda_must(cudaMemcpy(group.rank(r).region.step_epoch(), &epoch, sizeof epoch,
                           cudaMemcpyHostToDevice),
                "set epoch");
      if (wrap) continue;
      std::vector<std::uint32_t> stale(static_cast<std::size_t>(2 * 2 * port.box_packets) * 4);
      for (std::size_t i = 0; i < stale.size(); i += 4) {
        stale[i] = stale[i + 1] = 0xffff'ffffu;
        stale[i + 3] = static_cast<std::uint32_t>(epoch) + 4;
      }
      cuda_must(cudaMemcpy(port.boxes[r], stale.data(), stale.size() * 4, cudaMemcpyHostToDevice),
                "stale packets");
    }
    group.capture();
    for (int i = 0; i < 3; ++i) {
      good &= check_draft(group, weights, wrap ? "epochs past 2^32" : "stale packets");
    }
  }
  return good;
}

// `replays` replays of a graph, whose noise and anchors follow from the one before, and as many
// launches.
inline bool check_replays(const DraftWeights& weights, int devices, int replays) {
  DraftSetup setup = setup_of(weights.vocab, 2, devices, 2, {1.0f, 0.0f}, true);
  setup.chained = true;
  DraftGroup group(setup, weights);
  group.capture();
  std::vector<std::int64_t> seen[2];
  int broken = 0;
  for (const bool eager : {false, true}) {
    for (int r = 0; r < 2; ++r) {
      group.on(r);
      group.rank(r).tokens.put({0, 0, 0, 0, 17, 0, 0, 0, 0, 4711});
      group.rank(r).offset.put({0});
      cuda_must(cudaDeviceSynchronize(), "synchronize");
    }
    for (int i = 0; i < replays; ++i) {
      if (eager) {
        for (int r = 0; r < 2; ++r) {
          group.on(r);
          group.launch(r, group.rank(r).graph->stream());
        }
      } else {
        group.replay(i % 200 == 7 ? i / 200 % 2 : -1);
      }
      group.wait();
      const auto tokens = group.tokens();
      broken += tokens.empty() ? 1 : 0;
      seen[eager ? 1 : 0].insert(seen[eager ? 1 : 0].end(), tokens.begin(), tokens.end());
    }
  }
  std::vector<std::int64_t> sorted = seen[0];
  std::sort(sorted.begin(), sorted.end());
  const auto different = std::unique(sorted.begin(), sorted.end()) - sorted.begin();
  std::printf("     %td different tokens of %zu, %d broken\n", different, seen[0].size(), broken);
  return report(broken == 0 && seen[0] == seen[1] && different > replays,
                "replays with other inputs each time equal as many launches");
}

// Rank 1 comes after rank 0 has met its deadline.
inline bool check_missing_rank(const DraftWeights& weights, int devices) {
  DraftGroup group(setup_of(weights.vocab, 2, devices, 2, {0.5f, 0.0f}, true), weights);
  group.capture();
  group.replay_one(0);
  const auto begin = std::chrono::steady_clock::now();
  group.rank(0).graph->wait();
  const double waited_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  const std::uint32_t* words = group.rank(0).status();
  const auto tokens = group.rank(0).tokens.take();
  const auto logits = group.rank(0).logits.take();
  bool plain = true;
  for (const std::int64_t token : tokens) plain = plain && token == 0;
  // Step 1 on: z of a row of NaN.
  const bool shows = std::isnan(logits[static_cast<std::size_t>(weights.vocab)]);
  std::printf("     state %u stage %u peer %u after %.1f ms\n", words[0], words[2], words[3],
              waited_ms);
  const bool named = report(
      words[0] == 1u && words[2] == 7u && words[3] == 1u && plain && shows && waited_ms < 500.0,
      "a missing rank is named, tokens are 0 and logits NaN");
  group.replay_one(1);
  const auto late = std::chrono::steady_clock::now();
  group.rank(1).graph->wait();
  const double late_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - late).count();
  std::printf("     late rank: state %u after %.2f ms\n", group.rank(1).status()[0], late_ms);
  return named & report(group.rank(1).status()[0] == 2u && late_ms < 25.0,
                        "the late rank ends by the abort word");
}

}  // namespace lowlat::bench
