// Planted: base of another step, the greedy branch taken at temperature, and coins read with the
// pitch of the drafts each fail a case.
#include "host/op/registry.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "random_values.hpp"
#include "reference/accept.hpp"
#include "reference/draft.hpp"

namespace {

using lowlat::testing::begins_with;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
using lowlat::testing::rel_l2;
using lowlat::testing::values_of;

constexpr std::int64_t kSteps = 5;

// In [low, 1).
std::vector<float> uniforms(Random& random, std::size_t n, std::int64_t low) {
  std::vector<float> out(n);
  for (float& v : out) v = static_cast<float>(random.integer(low, (1 << 24) - 1)) * 0x1p-24f;
  return out;
}
std::vector<float> temperatures(Random& random, std::int64_t batch) {
  std::vector<float> out(batch);
  for (std::int64_t b = 1; b < batch; b += 2) {
    out[b] = static_cast<float>(random.integer(30, 150)) * 0.01f;
  }
  return out;
}

struct Draft {
  std::vector<float> base, temp, uniform;
  std::vector<std::uint16_t> w1, w2;
  std::vector<std::int64_t> anchor;
  std::int64_t batch, vocab, rank;

  Draft(Random& random, std::int64_t b, std::int64_t v, std::int64_t r)
      : base(random.f32(b * kSteps * v)),
        temp(temperatures(random, b)),
        uniform(uniforms(random, b * kSteps * v, 1)),
        w1(random.bf16(v * r)),
        w2(random.bf16(v * r, 1.0 / std::sqrt(static_cast<double>(r)))),
        batch(b),
        vocab(v),
        rank(r) {
    for (std::int64_t i = 0; i < b; ++i) anchor.push_back(random.integer(0, v - 1));
  }
  OpCall call() const {
    OpCall made(op_named(lowlat::host::ops_draft(), "markov_draft"));
    made.set("base", LOWLAT_F32, {batch, kSteps, vocab}, base);
    made.set("w1", LOWLAT_BF16, {vocab, rank}, w1);
    made.set("w2", LOWLAT_BF16, {vocab, rank}, w2);
    made.set("anchor", LOWLAT_I64, {batch}, anchor);
    made.set("temp", LOWLAT_F32, {batch}, temp);
    return made.set("uniform", LOWLAT_F32, {batch, kSteps, vocab}, uniform);
  }
};

struct Verify {
  std::vector<float> target, draft_logits, temp, coins;
  std::vector<std::int64_t> draft;
  std::int64_t batch, vocab;

  Verify(Random& random, std::int64_t b, std::int64_t v)
      : target(random.f32(b * (kSteps + 1) * v, 2.0)),
        temp(temperatures(random, b)),
        coins(uniforms(random, b * (kSteps + 1), 0)),
        batch(b),
        vocab(v) {
    // A draft near its target, so that all numbers of accepted drafts occur.
    draft_logits = random.f32(b * kSteps * v, 0.3);
    for (std::int64_t i = 0; i < b * kSteps; ++i) {
      const float* row = &target[(i / kSteps * (kSteps + 1) + i % kSteps) * v];
      for (std::int64_t id = 0; id < v; ++id) draft_logits[i * v + id] += row[id];
      const float* own = &draft_logits[i * v];
      draft.push_back(std::max_element(own, own + v) - own);
    }
  }
  OpCall call() const {
    OpCall made(op_named(lowlat::host::ops_draft(), "accept"));
    made.set("draft", LOWLAT_I64, {batch, kSteps}, draft);
    made.set("target_logits", LOWLAT_F32, {batch, kSteps + 1, vocab}, target);
    made.set("draft_logits", LOWLAT_F32, {batch, kSteps, vocab}, draft_logits);
    made.set("temp", LOWLAT_F32, {batch}, temp);
    return made.set("coins", LOWLAT_F32, {batch, kSteps + 1}, coins);
  }
};

}  // namespace

TEST_CASE(drafts_agree_with_the_reference_up_to_a_near_tie) {
  double worst = 0.0;
  int num_near = 0;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const Draft d(random, 1 + seed % 8, seed % 3 == 0 ? 512 : 77, 33);
    const auto tokens = d.call().run<std::int64_t>("scalar", "tokens");
    const auto want = d.call().run<std::int64_t>("reference", "tokens");
    const auto logits = d.call().run<float>("scalar", "logits");
    const auto want_logits = d.call().run<float>("reference", "logits");
    std::vector<double> compared, reference;
    for (std::int64_t b = 0; b < d.batch; ++b) {
      std::vector<std::int64_t> chain(kSteps);
      std::vector<float> z(kSteps * d.vocab);
      std::vector<double> margin(kSteps);
      const std::int64_t start = b * kSteps * d.vocab;
      lowlat::reference::markov_draft(chain.data(), z.data(), margin.data(), &d.base[start],
                                      d.w1.data(), d.w2.data(), d.anchor[b], d.temp[b],
                                      &d.uniform[start], kSteps, d.vocab, d.rank);
      for (std::int64_t s = 0; s < kSteps; ++s) {
        const std::int64_t row = start + s * d.vocab;
        double bias = 0.0;
        for (std::int64_t v = 0; v < d.vocab; ++v) {
          bias =
              std::max(bias, std::abs(static_cast<double>(want_logits[row + v] - d.base[row + v])));
          compared.push_back(logits[row + v]);
          reference.push_back(want_logits[row + v]);
        }
        const double tau = d.temp[b] == 0.0f ? 1.0 : d.temp[b];
        if (margin[s] <= 0x1p-7 * bias / tau) {
          ++num_near;
          break;
        }
        CHECK_EQ(tokens[b * kSteps + s], want[b * kSteps + s]);
      }
    }
    worst = std::max(worst, rel_l2(compared, reference));
  }
  std::printf("markov_draft logits rel_l2 %.2e, %d near ties\n", worst, num_near);
  CHECK(worst <= 3e-4);
  CHECK(num_near < 60);  // of 1350 steps: the exemption does not eat the test
}

TEST_CASE(drafts_are_refused_by_name) {
  Random random(5);
  const Draft d(random, 2, 20, 8);
  CHECK_EQ(d.call().refusal(), "");
  CHECK(begins_with(d.call().set<std::int64_t>("anchor", LOWLAT_I64, {2}, {0, 20}).refusal(),
                    "anchor[1] is 20; needed 0 .. 19"));
  CHECK(begins_with(d.call().set<float>("temp", LOWLAT_F32, {2}, {0.0f, -0.5f}).refusal(),
                    "temp[1] is -0.5"));
  CHECK(begins_with(d.call().set<float>("temp", LOWLAT_F32, {2}, {0.0f, NAN}).refusal(),
                    "temp[1] is nan"));
  std::vector<float> uniform = d.uniform;
  uniform[3] = 1.0f;  // a greedy request's: not used
  CHECK_EQ(d.call().set("uniform", LOWLAT_F32, {2, kSteps, 20}, uniform).refusal(), "");
  uniform[100] = 1.0f;
  CHECK(begins_with(d.call().set("uniform", LOWLAT_F32, {2, kSteps, 20}, uniform).refusal(),
                    "uniform[1, 0, 0] is 1; needed more than 0"));
  uniform[100] = 0.0f;
  CHECK(begins_with(d.call().set("uniform", LOWLAT_F32, {2, kSteps, 20}, uniform).refusal(),
                    "uniform[1, 0, 0] is 0; needed more than 0"));
}

TEST_CASE(acceptance_agrees_with_the_reference) {
  int num_near = 0, num_all = 0;
  std::vector<int> seen(kSteps + 1);
  for (std::uint32_t seed = 1; seed <= 200; ++seed) {
    Random random(seed);
    const Verify v(random, 1 + seed % 8, seed % 3 == 0 ? 512 : 16);
    const auto accepted = v.call().run<std::int64_t>("scalar", "accepted");
    const auto next = v.call().run<std::int64_t>("scalar", "next");
    const auto want_accepted = v.call().run<std::int64_t>("reference", "accepted");
    const auto want_next = v.call().run<std::int64_t>("reference", "next");
    for (std::int64_t b = 0; b < v.batch; ++b) {
      std::int64_t n, token;
      double margin;
      lowlat::reference::accept(&n, &token, &margin, &v.draft[b * kSteps],
                                &v.target[b * (kSteps + 1) * v.vocab],
                                &v.draft_logits[b * kSteps * v.vocab], v.temp[b],
                                &v.coins[b * (kSteps + 1)], kSteps, v.vocab);
      ++num_all;
      if (margin < 2e-6) {
        ++num_near;
        continue;
      }
      ++seen[want_accepted[b]];
      CHECK_EQ(accepted[b], want_accepted[b]);
      CHECK_EQ(next[b], want_next[b]);
    }
  }
  std::printf("accept: %d near ties of %d\n", num_near, num_all);
  CHECK(num_near * 50 < num_all);
  for (const int count : seen) CHECK(count > 0);
}

TEST_CASE(acceptance_is_refused_by_name) {
  Random random(6);
  const Verify v(random, 2, 16);
  CHECK_EQ(v.call().refusal(), "");
  std::vector<std::int64_t> draft = v.draft;
  draft[6] = 16;
  CHECK(begins_with(v.call().set("draft", LOWLAT_I64, {2, kSteps}, draft).refusal(),
                    "draft[1, 1] is 16; needed 0 .. 15"));
  std::vector<float> coins = v.coins;
  coins[7] = 1.0f;
  CHECK(begins_with(v.call().set("coins", LOWLAT_F32, {2, kSteps + 1}, coins).refusal(),
                    "coins[1, 1] is 1; needed at least 0 and less than 1"));
  OpCall wide = v.call();
  wide.set("target_logits", LOWLAT_F32, {2, kSteps + 2, 16}, random.f32(2 * 7 * 16));
  wide.set("coins", LOWLAT_F32, {2, kSteps + 2}, std::vector<float>(14, 0.5f));
  CHECK(begins_with(wide.refusal(), "target_logits and coins have 7 rows"));
  std::vector<float> target = v.target;
  target[17] = NAN;
  CHECK(
      begins_with(v.call().set("target_logits", LOWLAT_F32, {2, kSteps + 1, 16}, target).refusal(),
                  "target_logits[0, 1, 1] is nan"));
}

TEST_CASE(both_models_mean_the_same) {
  Random random(5);
  const OpCall drafted = Draft(random, 4, 77, 33).call();
  const OpCall verified = Verify(random, 4, 77).call();
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(drafted.of("v4").run<std::int64_t>(platform, "tokens") ==
          drafted.run<std::int64_t>(platform, "tokens"));
    CHECK(drafted.of("v4").run<float>(platform, "logits") ==
          drafted.run<float>(platform, "logits"));
    for (const char* name : {"accepted", "next"}) {
      CHECK(verified.of("v4").run<std::int64_t>(platform, name) ==
            verified.run<std::int64_t>(platform, name));
    }
  }
}
