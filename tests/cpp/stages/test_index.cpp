// The index: queries, stored keys and scores, by hand and by the reference.
#include <cmath>
#include <cstdio>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/fp4.hpp"
#include "reference/index.hpp"
#include "stages/index.hpp"
#include "stages/select.hpp"

namespace {

using lowlat::testing::Random;
namespace plat = lowlat::scalar::plat;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Block = plat::Block<256>;
using Codes = std::vector<std::uint16_t>;

constexpr int kDim = 128;

stages::RopeTurn turn(std::int64_t position) {
  const auto ramp = stages::yarn_ramp(160000.0, 16.0, 32.0, 1.0, 65536.0);
  return stages::rope_turn(stages::rope_table(160000.0f, ramp), position);
}

std::vector<float> query(std::vector<float> heads, std::int64_t position) {
  stages::index_query<Block>(heads.data(), static_cast<int>(heads.size()) / kDim, turn(position));
  return heads;
}

std::vector<float> floats(const Codes& codes) {
  std::vector<float> values;
  for (const std::uint16_t code : codes) values.push_back(stages::from_bf16(code));
  return values;
}

std::vector<std::uint8_t> key(std::vector<float> x, const Codes& gain, std::int64_t position) {
  std::vector<std::uint8_t> row(68, 0xa5u);
  stages::IndexKey<Block>::Scratch scratch;
  stages::IndexKey<Block>::run(stages::IndexFlat<std::uint8_t>{row.data()}.row(0), x.data(),
                               gain.data(), 1e-20f, turn(position), scratch);
  return row;
}

std::vector<float> scores(const std::vector<float>& queries, const std::vector<float>& weights,
                          const std::vector<std::uint8_t>& rows, int begin, int end) {
  std::vector<float> out(rows.size() / 68, 99.0f);
  stages::index_scores<Block>(
      out.data(), queries.data(), weights.data(), static_cast<int>(weights.size()),
      stages::IndexFlat<const std::uint8_t>{rows.data()}, stages::AllPositions{}, begin, end);
  return out;
}

}  // namespace

TEST_CASE(weights_are_scaled_by_both_roots) {
  // 128^-0.5 * 32^-0.5 = 2^-6.
  CHECK_EQ(stages::index_weight(reference::to_bf16(3.0), 32), 3.0f / 64.0f);
  CHECK_NEAR(stages::index_weight(reference::to_bf16(1.0), 4), std::pow(512.0, -0.5), 1e-8);
}

TEST_CASE(query_turns_its_second_half_only) {
  std::vector<float> x(kDim, 0.0f);
  x[0] = 6.0f, x[1] = 2.5f, x[64] = 6.0f;
  const std::vector<float> still = query(x, 0);
  CHECK_EQ(still[0], 6.0f);
  CHECK_EQ(still[1], 2.0f);
  CHECK_EQ(still[64], 6.0f);
  // One radian: (3.2418, 5.0488) -> bf16 -> scale 1: 3 and 5 (a tie: 5.0625 is over it) -> 6.
  const std::vector<float> turned = query(x, 1);
  CHECK_EQ(turned[0], 6.0f);
  CHECK_EQ(turned[1], 2.0f);
  CHECK_EQ(turned[64], 3.0f);
  CHECK_EQ(turned[65], 6.0f);
}

TEST_CASE(query_agrees_with_the_reference) {
  Random random(12);
  int wrong = 0, total = 0;
  for (const std::int64_t position : {0, 1, 47, 65535, 1048575}) {
    for (int seed = 0; seed < 60; ++seed) {
      const int heads = seed % 3 + 1;
      const Codes codes = random.bf16(heads * kDim, seed % 2 == 0 ? 1.0 : 1e-20);
      const std::vector<float> got = query(floats(codes), position);
      Codes want(codes.size());
      reference::index_query(want.data(), codes.data(), heads, position);
      for (int i = 0; i < heads * kDim; ++i, ++total) {
        CHECK_EQ(stages::round_bf16(got[i]), got[i]);
        if (i % kDim < 64) CHECK_EQ(stages::to_bf16(got[i]), want[i]);
        wrong += stages::to_bf16(got[i]) != want[i] ? 1 : 0;
      }
    }
  }
  std::printf("index queries: %d of %d values differ\n", wrong, total);
  CHECK(wrong <= total / 1000);
}

TEST_CASE(key_is_normed_then_packed) {
  // Every value 2: normed to 1, times gain 6 = 6: code 7 everywhere, scale 1.
  const std::vector<std::uint8_t> row =
      key(std::vector<float>(kDim, 2.0f), Codes(kDim, reference::to_bf16(6.0)), 0);
  for (int i = 0; i < 64; ++i) CHECK_EQ(row[i], 0x77);
  for (int i = 64; i < 68; ++i) CHECK_EQ(row[i], 127);
  // A quarter turn would swap signs; at position 3 pair 0 is (6 cos 3 - 6 sin 3, 6 sin 3 + 6 cos 3)
  // = (-6.787, -5.093): over 6, so scale 2: -3.39 -> -3, -2.55 -> -3.
  const std::vector<std::uint8_t> turned =
      key(std::vector<float>(kDim, 2.0f), Codes(kDim, reference::to_bf16(6.0)), 3);
  CHECK_EQ(turned[0], 0x77);
  CHECK_EQ(turned[32], 0xdd);
  CHECK_EQ(turned[66], 128);
}

TEST_CASE(key_rounds_before_the_statistic) {
  Random random(15);
  for (int seed = 0; seed < 300; ++seed) {
    const Codes gain = random.bf16(kDim);
    const std::vector<float> x = random.f32(kDim);
    std::vector<float> rounded = x;
    for (float& v : rounded) v = static_cast<float>(reference::round_bf16(v));
    CHECK(key(x, gain, 9) == key(rounded, gain, 9));
  }
}

TEST_CASE(key_of_zeros_is_zero) {
  const std::vector<std::uint8_t> row =
      key(std::vector<float>(kDim, 0.0f), Codes(kDim, reference::to_bf16(1.0)), 5);
  for (int i = 0; i < 64; ++i) CHECK_EQ(row[i] & 0x77, 0);  // either zero: turning may sign it
  for (int i = 64; i < 68; ++i) CHECK_EQ(row[i], 112);      // 2^-15 >= 1e-4 / 6
}

TEST_CASE(key_agrees_with_the_reference) {
  Random random(13);
  int wrong = 0;
  for (const std::int64_t position : {0, 2, 65535, 1048575}) {
    const Codes wk = random.bf16(kDim * 512, 0.05), gain = random.bf16(kDim);
    for (int seed = 0; seed < 20; ++seed) {
      const Codes latent = random.bf16(512);
      std::vector<float> x(kDim);
      const std::vector<float> input = floats(latent), weights = floats(wk);
      for (int n = 0; n < kDim; ++n) {
        x[n] = stages::dot(input.data(), weights.data() + n * 512, 512);
      }
      const std::vector<std::uint8_t> got = key(x, gain, position);
      std::uint8_t want[68];
      reference::index_key(want, latent.data(), wk.data(), gain.data(), position, 1e-20);
      for (int i = 0; i < 68; ++i) wrong += got[i] != want[i] ? 1 : 0;
    }
  }
  std::printf("index keys: %d of %d bytes differ\n", wrong, 80 * 68);
  CHECK(wrong <= 80 * 68 / 100);
}

TEST_CASE(scores_are_weighted_sums_of_what_is_positive) {
  // Key 0 is 1 everywhere, key 1 is -1 in its first half. Head 0 is 1 everywhere, head 1 is 1 in
  // the first half: matches (128, 64) and (0, -64).
  std::vector<std::uint8_t> rows(2 * 68);
  for (int i = 0; i < 64; ++i) rows[i] = 0x22, rows[68 + i] = i < 32 ? 0xaa : 0x22;
  for (int group = 0; group < 4; ++group) rows[64 + group] = 127, rows[68 + 64 + group] = 127;
  std::vector<float> heads(2 * kDim, 1.0f);
  for (int i = 64; i < kDim; ++i) heads[kDim + i] = 0.0f;
  const std::vector<float> got = scores(heads, {0.5f, -2.0f}, rows, 0, 2);
  CHECK_EQ(got[0], 0.5f * 128.0f - 2.0f * 64.0f);
  CHECK_EQ(got[1], 0.0f);
}

TEST_CASE(scores_agree_with_the_reference_and_with_any_range) {
  Random random(14);
  for (int seed = 0; seed < 50; ++seed) {
    const int heads = static_cast<int>(random.integer(1, 32)), n = 40;
    const auto rows = random.index_rows(n);
    const Codes codes = random.bf16(heads * kDim);
    const std::vector<float> weights = random.f32(heads);
    const std::vector<float> whole = scores(floats(codes), weights, rows, 0, n);
    const std::vector<double> want =
        reference::index_scores(codes.data(), weights.data(), heads, rows.data(), n);
    for (int i = 0; i < n; ++i) {
      double size = 0.0;  // sum of the terms' magnitudes
      for (int h = 0; h < heads; ++h) {
        const float alone[] = {std::abs(weights[h])};
        size += reference::index_scores(codes.data() + h * kDim, alone, 1, &rows[68 * i], 1)[0];
      }
      // A match is a sum of 128 terms that may cancel; what is left is bounded by their sizes.
      CHECK_NEAR(whole[i], want[i], 2e-6 * size + 1e-5 * std::sqrt(heads));
    }
    const int cut = static_cast<int>(random.integer(0, n - 1));
    const std::vector<float> part = scores(floats(codes), weights, rows, cut, cut + 1);
    CHECK_EQ(part[cut], whole[cut]);
    if (cut > 0) CHECK_EQ(part[cut - 1], 99.0f);
  }
}
