// Planted: one rounding instead of two in the routed SwiGLU, a lower clamp on the gate, the nibbles
// swapped, slots added in another order and the weight applied after the rounding each fail a case.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/experts.hpp"

#include "check.hpp"
#include "random_values.hpp"

namespace {

namespace stages = lowlat::scalar::stages;

// Random MXFP4 rows [n, k].
struct Rows {
  std::vector<std::uint8_t> codes, scales;
  std::int64_t k;

  Rows(lowlat::testing::Random& random, std::int64_t n, std::int64_t columns)
      : codes(n * columns / 2), scales(n * columns / 32), k(columns) {
    for (auto& code : codes) code = static_cast<std::uint8_t>(random.integer(0, 255));
    for (auto& code : scales) code = static_cast<std::uint8_t>(random.integer(120, 125));
  }
  stages::Fp4Weights view() const { return {codes.data(), k / 2, scales.data(), k / 32}; }
};

}  // namespace

TEST_CASE(fp4_rows_expand_low_nibble_first) {
  std::vector<std::uint8_t> codes(64, 0), scales = {127, 130, 0, 120};  // two rows of 64
  codes[0] = 0x71;   // column 0 is 0.5, column 1 is 6
  codes[16] = 0x9c;  // column 32 is -2, column 33 is -0.5; scale 8
  codes[32] = 0x0f;  // row 1: column 0 is -6 at scale 2^-127
  codes[63] = 0x20;  // row 1: column 63 is 1 at scale 2^-7
  float row[64];
  const stages::Fp4Weights w = {codes.data(), 32, scales.data(), 2};
  w.expand(row, 0, 64);
  CHECK_EQ(row[0], 0.5f);
  CHECK_EQ(row[1], 6.0f);
  CHECK_EQ(row[32], -16.0f);
  CHECK_EQ(row[33], -4.0f);
  CHECK_EQ(row[2], 0.0f);
  w.expand(row, 1, 64);
  CHECK_EQ(row[0], -0x1.8p-125f);
  CHECK_EQ(row[63], 0x1p-7f);
  const float all[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int byte = 0; byte < 256; ++byte) {
    CHECK_EQ(stages::kFp4Pairs.value[byte][0], all[byte % 16]);
    CHECK_EQ(stages::kFp4Pairs.value[byte][1], all[byte / 16]);
  }
}

TEST_CASE(swiglu_clamps_the_gate_from_above_only) {
  CHECK_NEAR(stages::swiglu(50.0f, 1.0f, 10.0f, false), 10.0 / (1.0 + std::exp(-10.0)), 1e-6);
  CHECK_NEAR(stages::swiglu(-32.0f, 1.0f, 10.0f, false) / (-32.0 / (1.0 + std::exp(32.0))), 1.0,
             1e-6);
  CHECK_NEAR(stages::swiglu(1.0f, 99.0f, 10.0f, false), 10.0 / (1.0 + std::exp(-1.0)), 1e-6);
  CHECK_NEAR(stages::swiglu(1.0f, -99.0f, 10.0f, false), -10.0 / (1.0 + std::exp(-1.0)), 1e-6);
  CHECK_EQ(stages::swiglu(-1e30f, 1.0f, 10.0f, true), -0.0f);
  CHECK(std::isnan(stages::swiglu(NAN, 1.0f, 10.0f, true)));
  CHECK(std::isnan(stages::swiglu(1.0f, NAN, 10.0f, true)));
}

TEST_CASE(routed_rounds_silu_first_and_shared_does_not) {
  // silu(1) = 0.7310586; its bf16 is 187/256. Times 129/128: 188.46/256 rounds to 188, while
  // 0.7310586 * 129/128 is 188.61/256 and rounds to 189.
  const std::uint16_t one = stages::to_bf16(1.0f), up = stages::to_bf16(129.0f / 128.0f);
  CHECK_EQ(stages::round_bf16(stages::swiglu(1.0f, 129.0f / 128.0f, 10.0f, true)), 188.0f / 256.0f);
  CHECK_EQ(stages::from_bf16(stages::shared_swiglu(one, up, 10.0f)), 189.0f / 256.0f);
}

TEST_CASE(pairs_are_grouped_by_expert_in_ascending_order) {
  const std::int32_t ids[8] = {3, 0, 3, 1, 0, 3, 4, 0};  // four rows of two slots
  std::int32_t offsets[6], pairs[8];
  stages::group_pairs(offsets, pairs, ids, 4, 2, 5);
  const std::int32_t want_offsets[6] = {0, 3, 4, 4, 7, 8};
  const std::int32_t want_pairs[8] = {1, 4, 7, 3, 0, 2, 5, 6};
  for (int i = 0; i < 6; ++i) CHECK_EQ(offsets[i], want_offsets[i]);
  for (int i = 0; i < 8; ++i) CHECK_EQ(pairs[i], want_pairs[i]);
  stages::group_pairs(offsets, pairs, ids, 0, 2, 5);
  for (int i = 0; i < 6; ++i) CHECK_EQ(offsets[i], 0);
}

TEST_CASE(one_expert_worked_by_hand) {
  // hidden = inner = 32. Row 0 of w1 is all ones: the gate is 32, clamped to 10, silu 10 (bf16).
  // Row 0 of w3 has one 3: up = 3, h = 30. Row 5 of w2 has 0.5 first: 15, times 0.26 is 3.9.
  constexpr int kSize = 32;
  std::vector<std::uint8_t> w1(512), w3(512), w2(512), scales(32, 127);
  for (int j = 0; j < 16; ++j) w1[j] = 0x22;
  w3[3] = 0x50;
  w2[5 * 16] = 0x01;
  std::vector<float> x(kSize, 1.0f), h(2 * kSize, NAN), scratch(2 * kSize);
  std::vector<std::uint16_t> d(2 * kSize, 0x7fc0);
  const std::int32_t pairs[1] = {1};  // row 0, slot 1
  const float weights[2] = {NAN, 0.26f};
  const auto view = [&](const std::vector<std::uint8_t>& codes) {
    return stages::Fp4Weights{codes.data(), 16, scales.data(), 1};
  };
  stages::expert_gate_up(h.data(), x.data(), view(w1), view(w3), pairs, 1, 2, kSize, kSize, 0,
                         kSize, 10.0f, scratch.data());
  CHECK(std::isnan(h[0]));  // slot 0 is another expert's
  CHECK_EQ(h[kSize], 30.0f);
  for (int i = 1; i < kSize; ++i) CHECK_EQ(h[kSize + i], 0.0f);
  stages::expert_down(d.data(), h.data(), view(w2), pairs, 1, weights, kSize, kSize, 0, kSize,
                      scratch.data());
  CHECK_EQ(d[0], 0x7fc0);
  CHECK_EQ(stages::from_bf16(d[kSize + 5]), 3.90625f);  // bf(3.9)
  CHECK_EQ(stages::from_bf16(d[kSize + 4]), 0.0f);
}

TEST_CASE(the_weight_comes_before_the_rounding) {
  // h . w2 = 257/256, half way between 1 and 129/128. Times 1.5 it is 385.5/256, which rounds to
  // 193/128; rounded to 1 first it would be 1.5.
  std::vector<float> h(32, 0.0f), scratch(32);
  h[0] = 1.0f;
  h[1] = 1.0f / 256.0f;
  const std::vector<std::uint8_t> codes(16, 0x22), scale(1, 127);
  const std::int32_t pair = 0;
  const float weight = 1.5f;
  std::uint16_t d = 0x7fc0;
  stages::expert_down(&d, h.data(), {codes.data(), 16, scale.data(), 1}, &pair, 1, &weight, 32, 1,
                      0, 1, scratch.data());
  CHECK_EQ(stages::from_bf16(d), 193.0f / 128.0f);
}

TEST_CASE(slots_are_added_in_order_and_the_shared_expert_after_the_rounding) {
  const auto bf = [](float v) { return stages::to_bf16(v); };
  // (2^24 + 1) - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1.
  const std::uint16_t d[6] = {bf(0x1p24f),  bf(0x1p24f),  bf(1.0f),
                              bf(-0x1p24f), bf(-0x1p24f), bf(1.0f)};
  const std::uint16_t shared[2] = {bf(0.5f), bf(0.0078125f)};
  float out[2] = {NAN, NAN};
  stages::expert_sum(out, d, shared, 3, 2, 0, 2);
  CHECK_EQ(out[0], 0.5f);
  CHECK_EQ(out[1], 1.0078125f);
  // 1 + 2^-9 rounds to 1 before the shared 2^-7 comes on.
  const std::uint16_t two[2] = {bf(1.0f), bf(0x1p-9f)};
  stages::expert_sum(out, two, shared + 1, 2, 1, 0, 1);
  CHECK_EQ(out[0], 1.0078125f);
}

TEST_CASE(a_row_does_not_depend_on_others_or_on_ranges) {
  lowlat::testing::Random random(3);
  constexpr int kHidden = 96, kInner = 64, kNumRows = 48, kSlots = 6, kNumExperts = 8;
  std::vector<Rows> w1, w3, w2;
  for (int e = 0; e < kNumExperts; ++e) {
    w1.emplace_back(random, kInner, kHidden);
    w3.emplace_back(random, kInner, kHidden);
    w2.emplace_back(random, kHidden, kInner);
  }
  std::vector<float> x = random.f32(kNumRows * kHidden), weights;
  for (float& v : x) v = stages::round_bf16(v);
  std::vector<std::int32_t> ids;
  for (int pair = 0; pair < kNumRows * kSlots; ++pair) {
    ids.push_back((pair / kSlots * 3 + pair) % kNumExperts);
    weights.push_back(0.1f + 0.01f * static_cast<float>(pair % 17));
  }
  const auto run = [&](int first_row, int num_rows, int step) {
    const int num_pairs = num_rows * kSlots;
    std::vector<std::int32_t> offsets(kNumExperts + 1), pairs(num_pairs);
    std::vector<float> h(num_pairs * kInner, NAN), scratch(2 * kHidden);
    std::vector<std::uint16_t> d(num_pairs * kHidden, 0x7fc0);
    stages::group_pairs(offsets.data(), pairs.data(), &ids[first_row * kSlots], num_rows, kSlots,
                        kNumExperts);
    for (int e = 0; e < kNumExperts; ++e) {
      const std::int32_t* own = pairs.data() + offsets[e];
      const int num_own = offsets[e + 1] - offsets[e];
      for (int i = 0; i < kInner; i += step) {
        stages::expert_gate_up(h.data(), &x[first_row * kHidden], w1[e].view(), w3[e].view(), own,
                               num_own, kSlots, kHidden, kInner, i, std::min(i + step, kInner),
                               10.0f, scratch.data());
      }
      for (int n = 0; n < kHidden; n += step) {
        stages::expert_down(d.data(), h.data(), w2[e].view(), own, num_own,
                            &weights[first_row * kSlots], kInner, kHidden, n,
                            std::min(n + step, kHidden), scratch.data());
      }
    }
    return d;
  };
  const std::vector<std::uint16_t> whole = run(0, kNumRows, kHidden);
  for (const int row : {0, 17, 47}) {
    const std::vector<std::uint16_t> alone = run(row, 1, 7);
    CHECK_EQ(std::memcmp(alone.data(), &whole[row * kSlots * kHidden], alone.size() * 2), 0);
  }
}
