// Planted: the bias left unrounded, the temperature not clamped, noise on a greedy row and the
// feature's scaling before its sum each fail a case.
#include <algorithm>
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/draft.hpp"

#include "check.hpp"
#include "random_values.hpp"

namespace {

namespace stages = lowlat::scalar::stages;

std::uint16_t bf(double v) { return stages::to_bf16(static_cast<float>(v)); }

}  // namespace

TEST_CASE(features_are_means_of_the_streams_in_order) {
  // Columns: plain; a tie, 1.001953125 -> 1 (even); an order that shows, (2^24 + 1) - 2^24 + 1;
  // a sum beyond bf16's range, which is why the factor comes after it.
  const std::uint16_t streams[16] = {bf(1.0), bf(1.0),       bf(0x1p24),  bf(2e38),   //
                                     bf(2.0), bf(1.0),       bf(1.0),     bf(-2e38),  //
                                     bf(3.0), bf(1.0),       bf(-0x1p24), bf(1e38),   //
                                     bf(4.0), bf(1.0078125), bf(1.0),     bf(1e38)};
  std::uint16_t out[4];
  stages::draft_feature(out, streams, 4);
  CHECK_EQ(out[0], bf(2.5));
  CHECK_EQ(out[1], bf(1.0));
  CHECK_EQ(out[2], bf(0.25));
  CHECK_NEAR(stages::from_bf16(out[3]) / 5e37, 1.0, 1e-2);
}

TEST_CASE(the_bias_is_rounded_and_the_sum_is_not) {
  // e . w2[0] = 1 + 2^-9 -> 1; e . w2[1] = 1 + 2^-7, which bf16 has.
  const float e[2] = {1.0f, 0x1p-9f};
  const std::uint16_t w2[4] = {bf(1.0), bf(1.0), bf(1.0), bf(4.0)};
  const float base[2] = {0x1p-12f, 0x1p-12f};
  float z[2], scratch[2];
  stages::markov_logits(z, base, 2, e, {w2, 2}, 1, 2, 0, 2, scratch);
  CHECK_EQ(z[0], 1.0f + 0x1p-12f);
  CHECK_EQ(z[1], 1.0078125f + 0x1p-12f);
}

TEST_CASE(logits_do_not_depend_on_the_batch_or_the_range) {
  lowlat::testing::Random random(2);
  constexpr int kBatch = 8, kRank = 40, kVocab = 96;
  const std::vector<float> e = random.f32(kBatch * kRank), base = random.f32(kBatch * kVocab);
  const std::vector<std::uint16_t> w2 = random.bf16(kVocab * kRank);
  std::vector<float> whole(kBatch * kVocab), scratch(kRank);
  stages::markov_logits(whole.data(), base.data(), kVocab, e.data(), {w2.data(), kRank}, kBatch,
                        kRank, 0, kVocab, scratch.data());
  for (const int b : {0, 3, 7}) {
    std::vector<float> alone(kVocab, NAN);
    for (int v = 0; v < kVocab; v += 5) {
      stages::markov_logits(alone.data(), &base[b * kVocab], kVocab, &e[b * kRank],
                            {w2.data(), kRank}, 1, kRank, v, std::min(v + 5, kVocab),
                            scratch.data());
    }
    for (int v = 0; v < kVocab; ++v) CHECK_EQ(alone[v], whole[b * kVocab + v]);
  }
}

TEST_CASE(greedy_rows_take_the_argmax_and_ask_for_no_noise) {
  const std::vector<float> z = {1.0f, 4.0f, 4.0f, -2.0f};
  int asked = 0;
  const auto noise = [&](std::int32_t) {
    ++asked;
    return 0.5f;
  };
  CHECK_EQ(stages::draft_select(z.data(), 4, 100, 0.0f, noise).id, 101);
  CHECK_EQ(asked, 0);
}

TEST_CASE(sampled_rows_add_gumbel_noise_to_the_tempered_logits) {
  // gumbel(0.5) = 0.3665 on all but id 2, which has gumbel(0.01) = 4.60.
  const std::vector<float> z = {2.0f, 0.0f, 0.0f, 0.0f};
  const auto noise = [](std::int32_t id) { return id == 2 ? 0.01f : 0.5f; };
  CHECK_EQ(stages::draft_select(z.data(), 4, 0, 1.0f, noise).id, 2);
  // At 0.4 the lead of 2 becomes 5, more than 4.60 - 0.37.
  CHECK_EQ(stages::draft_select(z.data(), 4, 0, 0.4f, noise).id, 0);
  const float best = stages::draft_select(z.data(), 4, 0, 0.4f, noise).value;
  CHECK_NEAR(best, 5.0 + 0.36651292058, 1e-5);
}

TEST_CASE(temperatures_below_1e_5_count_as_1e_5) {
  CHECK_EQ(stages::clamp_temperature(1e-9f), 1e-5f);
  CHECK_EQ(stages::clamp_temperature(0.7f), 0.7f);
  // A lead of 2^-17 is 0.76 at 1e-5: less than the noise of id 1 gains. Unclamped it would be huge.
  const std::vector<float> z = {0x1p-17f, 0.0f};
  const auto noise = [](std::int32_t id) { return id == 1 ? 0.1f : 0.5f; };
  CHECK_EQ(stages::draft_select(z.data(), 2, 0, 1e-12f, noise).id, 1);
}

TEST_CASE(an_id_whose_uniform_is_1_is_never_chosen_over_another) {
  const std::vector<float> z = {1e6f, -1e6f};
  const auto noise = [](std::int32_t id) { return id == 0 ? 1.0f : 0.5f; };
  CHECK_EQ(stages::draft_select(z.data(), 2, 0, 1.0f, noise).id, 1);
}

TEST_CASE(shards_joined_choose_what_one_scan_chooses) {
  lowlat::testing::Random random(5);
  const std::vector<float> z = random.f32(512);
  for (std::uint32_t step = 0; step < 5; ++step) {
    for (const float temperature : {0.0f, 0.8f}) {
      const auto noise = [step] { return stages::PhiloxNoise{42, 3, step, 7}; };
      const stages::Best whole = stages::draft_select(z.data(), 512, 0, temperature, noise());
      stages::Best joined = stages::kNoBest;
      for (int shard = 3; shard >= 0; --shard) {
        joined = stages::best_of(
            joined, stages::draft_select(&z[128 * shard], 128, 128 * shard, temperature, noise()));
      }
      CHECK_EQ(joined.id, whole.id);
      CHECK_EQ(joined.value, whole.value);
    }
  }
}

TEST_CASE(draws_follow_the_softmax) {
  // 40000 draws over 4 ids; upper 0.001 quantile of chi-square with 3 degrees of freedom: 16.27.
  const std::vector<float> z = {0.0f, 0.7f, -1.0f, 0.3f};
  constexpr int kDraws = 40000;
  double counts[4] = {}, total = 0.0, statistic = 0.0;
  for (int i = 0; i < kDraws; ++i) {
    stages::PhiloxNoise noise{11, 0, 0, static_cast<std::uint32_t>(i)};
    counts[stages::draft_select(z.data(), 4, 0, 0.5f, noise).id] += 1.0;
  }
  for (const float v : z) total += std::exp(v / 0.5);
  for (int id = 0; id < 4; ++id) {
    const double expected = kDraws * std::exp(z[id] / 0.5) / total;
    statistic += (counts[id] - expected) * (counts[id] - expected) / expected;
  }
  CHECK(statistic < 16.27);
}
