// The index: queries, stored keys and scores, by hand and by the reference.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/fp4.hpp"
#include "reference/index.hpp"
#include "reference/pool.hpp"
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

constexpr int kFp8 = stages::kIndexFp8DataBytes;

struct Fp8Query {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
};

Fp8Query fp8_query(std::vector<float> heads, std::int64_t position) {
  Fp8Query out{std::vector<std::uint8_t>(heads.size(), 0xa5),
               std::vector<float>(heads.size() / kDim, std::nanf(""))};
  stages::index_query_fp8<Block>(out.codes.data(), out.scales.data(), heads.data(),
                                 static_cast<int>(out.scales.size()), turn(position));
  return out;
}

std::vector<std::uint8_t> fp8_key(std::vector<float> c, const Codes& gain, float eps,
                                  std::int64_t position) {
  std::vector<std::uint8_t> row(132, 0xa5u);
  stages::IndexKeyFp8<Block>::Scratch scratch;
  stages::IndexKeyFp8<Block>::run(stages::IndexFlat<std::uint8_t, kFp8>{row.data()}.row(0),
                                  c.data(), gain.data(), eps, turn(position), scratch);
  return row;
}

float scale_of(const std::vector<std::uint8_t>& row) {
  return std::bit_cast<float>(row[128] | row[129] << 8 | row[130] << 16 |
                              static_cast<std::uint32_t>(row[131]) << 24);
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

TEST_CASE(fp8_weights_fold_the_scale_of_the_codes_in) {
  // 128^-0.5 * 32^-0.5 = 2^-6; the projection is not rounded to bf16.
  CHECK_EQ(stages::index_weight(3.0f, 32, 0.25f), 3.0f / 256.0f);
  const float fine = 1.0f + 0x1p-20f;
  CHECK_EQ(stages::index_weight(fine, 32, 1.0f), fine / 64.0f);
  CHECK_NEAR(stages::index_weight(1.0f, 64, 1.0f), std::pow(8192.0, -0.5), 1e-9);
}

TEST_CASE(hadamard_is_sylvesters_and_its_own_inverse) {
  // A unit vector gives a row of the matrix: signs by the ones that i and j share.
  for (const int j : {0, 1, 2, 37, 64, 127}) {
    std::vector<float> x(kDim, 0.0f);
    x[j] = 1.0f;
    stages::hadamard<Block>(x.data());
    for (unsigned i = 0; i < kDim; ++i) {
      const double sign = std::popcount(i & static_cast<unsigned>(j)) % 2 == 0 ? 1.0 : -1.0;
      CHECK_NEAR(x[i], sign / std::sqrt(128.0), 1e-8);
    }
  }
  Random random(21);
  const std::vector<float> x = random.f32(kDim);
  std::vector<float> twice = x;
  stages::hadamard<Block>(twice.data());
  stages::hadamard<Block>(twice.data());
  for (int i = 0; i < kDim; ++i) CHECK_NEAR(twice[i], x[i], 2e-6);
}

TEST_CASE(fp8_codes_and_scale_by_hand) {
  std::vector<float> x(kDim, 0.0f);
  std::uint8_t codes[kDim];
  x[3] = -448.0f, x[4] = 224.0f, x[5] = 1.0f, x[6] = 0x1p-10f, x[7] = 0x1.8p-10f;
  CHECK_EQ(stages::index_fp8(codes, x.data()), 1.0f);
  CHECK_EQ(codes[0], 0x00);
  CHECK_EQ(codes[3], 0xfe);
  CHECK_EQ(codes[4], 0x76);
  CHECK_EQ(codes[5], 0x38);
  CHECK_EQ(codes[6], 0x00);  // half of the least subnormal: the even code
  CHECK_EQ(codes[7], 0x01);
  // Nothing is larger than 1e-4: the scale stays, codes shrink.
  std::fill(x.begin(), x.end(), 0.0f);
  CHECK_EQ(stages::index_fp8(codes, x.data()), 1e-4f / 448.0f);
  x[0] = 0.5e-4f;
  CHECK_EQ(stages::index_fp8(codes, x.data()), 1e-4f / 448.0f);
  CHECK_EQ(codes[0], 0x76);
  // The largest always saturates, whatever rounds.
  Random random(22);
  for (int seed = 0; seed < 200; ++seed) {
    std::vector<float> values = random.f32(kDim, std::exp(4.0 * random.normal()));
    const float scale = stages::index_fp8(codes, values.data());
    const auto largest = std::max_element(
        values.begin(), values.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    if (std::abs(*largest) < 1e-4f) continue;
    CHECK_EQ(scale, std::abs(*largest) / 448.0f);
    CHECK_EQ(codes[largest - values.begin()] & 0x7f, 0x7e);
  }
}

TEST_CASE(fp8_query_turns_before_hadamard) {
  // Channel 64 alone at position 1: (cos 1, sin 1) at 64 and 65, so that i without bit 0 has their
  // sum and i with it their difference, over sqrt(128), signed by bit 6.
  std::vector<float> x(kDim, 0.0f);
  x[64] = 1.0f;
  const Fp8Query got = fp8_query(x, 1);
  const double sum = (std::cos(1.0) + std::sin(1.0)) / std::sqrt(128.0);
  const double difference = (std::cos(1.0) - std::sin(1.0)) / std::sqrt(128.0);
  CHECK_NEAR(got.scales[0], sum / 448.0, 1e-9);
  for (int i = 0; i < kDim; ++i) {
    const double want = (i % 2 == 0 ? sum : difference) * (i < 64 ? 1.0 : -1.0);
    CHECK_EQ(got.codes[i], reference::to_e4m3(want / got.scales[0]));
  }
}

TEST_CASE(fp8_query_agrees_with_the_reference) {
  Random random(23);
  int wrong = 0, total = 0;
  for (const std::int64_t position : {0, 1, 47, 65535, 1048575}) {
    for (int seed = 0; seed < 60; ++seed) {
      const int heads = seed % 3 + 1;
      const Codes q = random.bf16(heads * kDim, seed % 4 == 0 ? 1e-20 : 1.0);
      const Fp8Query got = fp8_query(floats(q), position);
      std::vector<std::uint8_t> codes(heads * kDim);
      std::vector<float> scales(heads);
      reference::index_query_fp8(codes.data(), scales.data(), q.data(), heads, position);
      for (int h = 0; h < heads; ++h) CHECK_NEAR(got.scales[h] / scales[h], 1.0, 5e-7);
      for (int i = 0; i < heads * kDim; ++i, ++total) {
        CHECK(std::abs(got.codes[i] - codes[i]) <= 1);
        wrong += got.codes[i] != codes[i] ? 1 : 0;
      }
    }
  }
  std::printf("fp8 index queries: %d of %d codes differ\n", wrong, total);
  CHECK(wrong <= total / 1000);
}

TEST_CASE(fp8_heads_and_rows_are_independent) {
  Random random(24);
  const std::vector<float> heads = floats(random.bf16(3 * kDim));
  const Fp8Query all = fp8_query(heads, 77);
  const Fp8Query last = fp8_query({heads.begin() + 2 * kDim, heads.end()}, 77);
  CHECK(std::equal(last.codes.begin(), last.codes.end(), all.codes.begin() + 2 * kDim));
  CHECK_EQ(last.scales[0], all.scales[2]);
}

TEST_CASE(fp8_key_is_normed_turned_and_mixed) {
  // Channel 0 alone: its norm is sqrt(128), times gain 3; Hadamard gives 3 everywhere.
  std::vector<float> c(kDim, 0.0f);
  c[0] = 5.0f;
  const Codes gain(kDim, reference::to_bf16(3.0));
  const std::vector<std::uint8_t> row = fp8_key(c, gain, 0.0f, 12);
  CHECK_NEAR(scale_of(row), 3.0 / 448.0, 1e-8);
  for (int i = 0; i < kDim; ++i) CHECK_EQ(row[i], 0x7e);
  // Nothing is rounded before the statistic, and epsilon counts.
  const std::vector<std::uint8_t> small = fp8_key(std::vector<float>(kDim, 1e-3f), gain, 1e-6f, 0);
  CHECK_NEAR(scale_of(small), 3.0 * std::sqrt(0.5) * std::sqrt(128.0) / 448.0, 1e-7);
  const std::vector<std::uint8_t> zero = fp8_key(std::vector<float>(kDim, 0.0f), gain, 1e-6f, 5);
  CHECK_EQ(scale_of(zero), 1e-4f / 448.0f);
  for (int i = 0; i < kDim; ++i) CHECK_EQ(zero[i] & 0x7f, 0);
}

TEST_CASE(fp8_scores_are_codes_then_the_scale_of_the_key) {
  // Key 0 is 1 everywhere under 0.5, key 1 is -1 in its first half under 3. Heads: 1 everywhere,
  // and 1 in the first half: matches (128, 64) and (0, -64).
  std::vector<std::uint8_t> rows(2 * 132, 0x38);
  for (int i = 0; i < 64; ++i) rows[132 + i] = 0xb8;
  const float scales[] = {0.5f, 3.0f};
  for (int n = 0; n < 2; ++n) {
    const auto bits = std::bit_cast<std::uint32_t>(scales[n]);
    for (int b = 0; b < 4; ++b) rows[132 * n + 128 + b] = static_cast<std::uint8_t>(bits >> 8 * b);
  }
  std::vector<float> heads(2 * kDim, 1.0f);
  for (int i = 64; i < kDim; ++i) heads[kDim + i] = 0.0f;
  const float weights[] = {0.5f, -2.0f};
  float got[2];
  stages::index_scores<Block>(got, heads.data(), weights, 2,
                              stages::IndexFlat<const std::uint8_t, kFp8>{rows.data()},
                              stages::AllPositions{}, 0, 2);
  CHECK_EQ(got[0], 0.5f * (0.5f * 128.0f - 2.0f * 64.0f));
  CHECK_EQ(got[1], 0.0f);
}

TEST_CASE(fp8_scores_agree_with_the_reference_and_with_any_range) {
  Random random(25);
  for (int seed = 0; seed < 30; ++seed) {
    const int heads = static_cast<int>(random.integer(1, 64)), n = 30;
    const auto rows = random.index_fp8_rows(n), codes = random.e4m3(heads * kDim, 150.0);
    const std::vector<float> weights = random.f32(heads);
    std::vector<float> query(heads * kDim), whole(n), part(n, 99.0f);
    stages::expand_e4m3(query.data(), codes.data(), 1.0f, heads * kDim);
    const stages::IndexFlat<const std::uint8_t, kFp8> keys{rows.data()};
    stages::index_scores<Block>(whole.data(), query.data(), weights.data(), heads, keys,
                                stages::AllPositions{}, 0, n);
    const auto want =
        reference::index_scores_fp8(codes.data(), weights.data(), heads, rows.data(), n);
    for (int i = 0; i < n; ++i) {
      double size = 0.0;  // of the terms of the dots, which may cancel
      for (int h = 0; h < heads; ++h) {
        double terms = 0.0, key[kDim];
        reference::index_unpack_fp8(key, &rows[132 * i]);
        for (int d = 0; d < kDim; ++d) terms += std::abs(key[d] * query[h * kDim + d]);
        size += std::abs(weights[h]) * terms;
      }
      CHECK_NEAR(whole[i], want[i], 1e-6 * size);
    }
    const int cut = static_cast<int>(random.integer(1, n - 1));
    stages::index_scores<Block>(part.data(), query.data(), weights.data(), heads, keys,
                                stages::AllPositions{}, cut, cut + 1);
    CHECK_EQ(part[cut], whole[cut]);
    CHECK_EQ(part[cut - 1], 99.0f);
  }
}

TEST_CASE(paged_fp8_keys_score_as_flat_ones) {
  Random random(26);
  const int n = 100;
  const auto rows = random.index_fp8_rows(n);
  std::vector<std::uint8_t> pages(2 * stages::kIndexFp8PageBytes, 0xa5);
  const stages::IndexPaged<std::uint8_t, kFp8> pool{pages.data(), stages::kIndexFp8PageBytes};
  for (int i = 0; i < n; ++i) {
    std::copy_n(&rows[132 * i], 128, pool.row(i).data);
    std::copy_n(&rows[132 * i + 128], 4, pool.row(i).scales);
  }
  const std::vector<float> query = random.f32(kDim), weight = {1.5f};
  std::vector<float> flat(n), paged(n);
  stages::index_scores<Block>(flat.data(), query.data(), weight.data(), 1,
                              stages::IndexFlat<const std::uint8_t, kFp8>{rows.data()},
                              stages::AllPositions{}, 0, n);
  stages::index_scores<Block>(
      paged.data(), query.data(), weight.data(), 1,
      stages::IndexPaged<const std::uint8_t, kFp8>{pages.data(), stages::kIndexFp8PageBytes},
      stages::AllPositions{}, 0, n);
  CHECK(flat == paged);
}
