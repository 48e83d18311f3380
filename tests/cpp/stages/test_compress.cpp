// Compressed keys: pooling, norm, RoPE and the four-bit round trip, by hand and by the reference.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/compress.hpp"
#include "stages/compress.hpp"

namespace {

using lowlat::testing::Random;
namespace plat = lowlat::scalar::plat;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Compressed = stages::CompressedKey<plat::Block<256>>;
using Codes = std::vector<std::uint16_t>;

constexpr int kDim = 512;
constexpr float kEps = 1e-20f;

Codes latent(std::vector<float> c, const Codes& gain) {
  Codes out(kDim, 0xa5a5u);
  Compressed::Scratch scratch;
  Compressed::latent(out.data(), c.data(), gain.data(), kEps, scratch);
  return out;
}

stages::RopeTable rope() {
  return stages::rope_table(160000.0f, stages::yarn_ramp(160000.0, 16.0, 32.0, 1.0, 65536.0));
}

std::vector<float> entry(const Codes& latent, std::int64_t position) {
  std::vector<float> out(kDim, std::nanf(""));
  Compressed::entry(out.data(), latent.data(), stages::rope_turn(rope(), position));
  return out;
}

// A latent of zeros but for the given (channel, value).
Codes sparse_latent(std::initializer_list<std::pair<int, double>> values) {
  Codes codes(kDim, 0);
  for (const auto& [channel, value] : values) codes[channel] = reference::to_bf16(value);
  return codes;
}

}  // namespace

TEST_CASE(pooling_weighs_by_the_scores) {
  CHECK_EQ(stages::pool_pair(4.0f, 7.0f, 2.0f, 7.0f), 3.0f);
  // Weights 1 and 1/3: (4 + 8/3) / (4/3) = 5 with the larger score on the even side, 7 on the odd.
  const float ln3 = std::log(3.0f);
  CHECK_NEAR(stages::pool_pair(4.0f, ln3, 8.0f, 0.0f), 5.0, 1e-6);
  CHECK_NEAR(stages::pool_pair(4.0f, 0.0f, 8.0f, ln3), 7.0, 1e-6);
  // Scores that no exponential holds.
  CHECK_EQ(stages::pool_pair(4.0f, -3e38f, 8.0f, 3e38f), 8.0f);
  CHECK_EQ(stages::pool_pair(4.0f, 500.0f, 8.0f, -500.0f), 4.0f);
  CHECK_EQ(stages::pool_pair(-0.0f, 1.0f, 0.0f, 1.0f), 0.0f);
}

TEST_CASE(pooling_agrees_with_the_reference) {
  Random random(8);
  for (int i = 0; i < 20000; ++i) {
    const std::vector<float> v = random.f32(4, i % 3 == 0 ? 20.0 : 1.0);
    const double want = reference::pool_pair(v[0], v[1], v[2], v[3]);
    CHECK_NEAR(stages::pool_pair(v[0], v[1], v[2], v[3]), want,
               4e-7 * std::max(std::abs(v[0]), std::abs(v[2])));
  }
}

TEST_CASE(latent_norms_to_the_gain) {
  // All equal: each is its own root mean square.
  const Codes one(kDim, reference::to_bf16(1.0));
  for (const float value : {1e-8f, 3.0f, 1e15f}) {
    CHECK(latent(std::vector<float>(kDim, value), one) == one);
  }
  CHECK(latent(std::vector<float>(kDim, 0.0f), one) == Codes(kDim, 0));
  // 3 and -4 in turn: root mean square sqrt(12.5).
  std::vector<float> c(kDim);
  for (int i = 0; i < kDim; ++i) c[i] = i % 2 == 0 ? 3.0f : -4.0f;
  const Codes got = latent(c, Codes(kDim, reference::to_bf16(2.0)));
  CHECK_EQ(got[0], reference::to_bf16(6.0 / std::sqrt(12.5)));
  CHECK_EQ(got[1], reference::to_bf16(-8.0 / std::sqrt(12.5)));
}

TEST_CASE(latent_rounds_before_the_statistic) {
  // So values that round to the same bf16 give the same latent, whatever was rounded away.
  Random random(9);
  const Codes gain = random.bf16(kDim);
  for (int seed = 0; seed < 200; ++seed) {
    std::vector<float> c = random.f32(kDim), rounded = c;
    for (float& v : rounded) v = static_cast<float>(reference::round_bf16(v));
    CHECK(latent(c, gain) == latent(rounded, gain));
  }
}

TEST_CASE(entry_at_position_0_is_the_four_bit_round_trip) {
  const std::vector<float> got =
      entry(sparse_latent({{0, 6.0}, {1, 2.5}, {2, -0.25}, {16, 7.0}, {448, 6.0}, {511, 6.0}}), 0);
  CHECK_EQ(got[0], 6.0f);
  CHECK_EQ(got[1], 2.0f);
  CHECK_EQ(got[2], 0.0f);
  CHECK(!std::signbit(got[2]));
  CHECK_EQ(got[16], 6.75f);
  CHECK_EQ(got[447], 0.0f);
  CHECK_EQ(got[448], 6.0f);
  CHECK_EQ(got[511], 6.0f);
}

TEST_CASE(entry_turns_the_last_64_before_four_bits) {
  // Pair 0 turns one radian a position: 6 (cos 1, sin 1) = (3.2418, 5.0488), in bf16 (3.234375,
  // 5.0625). 5.0625 / 6 = 0.84375 is halfway between 0.8125 and 0.875, the even code; codes 4
  // and 6. Without the bf16 rounding it were 0.8125.
  const std::vector<float> got = entry(sparse_latent({{0, 6.0}, {448, 6.0}}), 1);
  CHECK_EQ(got[0], 6.0f);
  CHECK_EQ(got[448], 3.5f);
  CHECK_EQ(got[449], 5.25f);
  // Pair 31 turns 5.68052904e-07 a position: 0.5956 at 1048575, so 6 (cos, sin) = (4.966, 3.366);
  // 0.8276 -> 0.8125, codes 6 and 4.
  const std::vector<float> far = entry(sparse_latent({{510, 6.0}}), 1048575);
  CHECK_EQ(far[510], 4.875f);
  CHECK_EQ(far[511], 3.25f);
}

TEST_CASE(entries_agree_with_the_reference) {
  Random random(10);
  int wrong = 0;
  for (const std::int64_t position : {0, 1, 2, 47, 65535, 65536, 1048575}) {
    for (int seed = 0; seed < 30; ++seed) {
      const Codes codes = random.bf16(kDim, seed % 3 == 0 ? 1e-4 : 1.0);
      const std::vector<float> got = entry(codes, position);
      double want[kDim];
      reference::compressed_entry(want, codes.data(), position);
      // Outside RoPE nothing is left open; inside, fp32 may fall on the other side of a tie.
      for (int i = 0; i < 448; ++i) CHECK_EQ(static_cast<double>(got[i]), want[i]);
      for (int i = 448; i < kDim; ++i) wrong += static_cast<double>(got[i]) != want[i] ? 1 : 0;
    }
  }
  std::printf("compressed entries: %d of %d turned values differ\n", wrong, 7 * 30 * 64);
  CHECK(wrong <= 7 * 30 * 64 / 100);
}

TEST_CASE(latents_agree_with_the_reference) {
  Random random(11);
  int wrong = 0;
  for (int seed = 0; seed < 100; ++seed) {
    const std::vector<float> c = random.f32(kDim, std::pow(10.0, seed % 9 - 4));
    const Codes gain = random.bf16(kDim);
    const Codes got = latent(c, gain);
    Codes want(kDim);
    const std::vector<double> values(c.begin(), c.end());
    reference::compressed_latent(want.data(), values.data(), gain.data(), kEps);
    for (int i = 0; i < kDim; ++i) {
      CHECK(std::abs(got[i] - want[i]) <= 1);
      wrong += got[i] != want[i] ? 1 : 0;
    }
  }
  CHECK(wrong <= 100);  // of 51,200: ties of one bf16 step
}
