// Four-bit quantisation: the scale rules and codes by hand, ties, ends, and the reference.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/fp4.hpp"
#include "stages/fp4.hpp"

namespace {

using lowlat::testing::Random;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;

// A group that begins with these values; the rest is zero.
std::vector<float> group(std::vector<float> values, int n) {
  values.resize(n, 0.0f);
  return values;
}
std::vector<float> latent(std::vector<float> values) {
  std::vector<float> x = group(std::move(values), 16);
  stages::fp4_round_trip_latent(x.data());
  return x;
}
std::vector<float> index(std::vector<float> values) {
  std::vector<float> x = group(std::move(values), 32);
  stages::fp4_round_trip_index(x.data());
  return x;
}

void check_begins(const std::vector<float>& got, const std::vector<float>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    CHECK_EQ(got[i], want[i]);
    CHECK_EQ(std::signbit(got[i]), std::signbit(want[i]));
  }
}

// bf16 values of every size, some groups all zero or on exact ties.
std::vector<float> bf16_values(Random& random, int n) {
  std::vector<float> x(n);
  const double scale = std::ldexp(1.0, static_cast<int>(random.integer(-20, 12)));
  const std::int64_t kind = random.integer(0, 4);
  for (float& v : x) {
    double value = scale * random.normal();
    if (kind == 0) value = 0.0;
    if (kind == 1) value = scale * 0.25 * static_cast<double>(random.integer(-24, 24));
    v = static_cast<float>(reference::round_bf16(value));
  }
  return x;
}

}  // namespace

TEST_CASE(latent_codes_go_to_the_even_one_on_ties) {
  // amax 6: scale 1. Ties 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 -> 0, 1, 1, 2, 2, 4, 4.
  check_begins(latent({6.0f, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}),
               {6.0f, 0.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f});
  check_begins(latent({-6.0f, -0.25f, -0.75f, -2.5f, -0.0f}), {-6.0f, 0.0f, -1.0f, -2.0f, 0.0f});
}

TEST_CASE(latent_scale_is_an_e4m3_within_its_ends) {
  // 7 / 6 = 1.1667 -> 1.125; 7 / 1.125 = 6.2 -> 6.
  check_begins(latent({7.0f}), {6.75f});
  // 1.0625 is halfway between 1 and 1.125, and 1 is even: amax 6.375 -> 6.
  check_begins(latent({6.375f}), {6.0f});
  // Above 6 * 448 it saturates, below 6 * 2^-9 the scale stays.
  check_begins(latent({4000.0f, -3000.0f, 448.0f}), {2688.0f, -2688.0f, 448.0f});
  check_begins(latent({0x1p-10f, 0x1p-11f, 0x1.8p-11f}), {0x1p-10f, 0.0f, 0x1p-10f});
  check_begins(latent({}), {0.0f, 0.0f});
}

TEST_CASE(index_scale_is_the_power_of_two_that_holds_the_largest) {
  check_begins(index({6.0f, 5.0f, 2.5f}), {6.0f, 4.0f, 2.0f});
  // 6.03125 / 6 is over 1: scale 2, and 6.03125 / 2 = 3.02 -> 3.
  check_begins(index({6.03125f, 7.0f, -5.0f, 0.5f}), {6.0f, 8.0f, -4.0f, 0.0f});
  check_begins(index({0x1p-130f, -0x1p-127f}), {0.0f, -0x1p-127f});
  check_begins(index({}), {0.0f});
}

TEST_CASE(stored_keys_have_a_larger_least_scale) {
  std::uint8_t codes[16];
  const std::vector<float> zero(32, 0.0f);
  // 1e-4 / 6 = 1.67e-5 -> 2^-15.
  CHECK_EQ(stages::fp4_pack_index(codes, zero.data()), 112);
  for (const std::uint8_t code : codes) CHECK_EQ(code, 0);
  std::vector<float> x = group({6.0f, -0.5f, 1.0f, 4.0f}, 32);
  CHECK_EQ(stages::fp4_pack_index(codes, x.data()), 127);
  CHECK_EQ(codes[0], 0x97);  // 6 is code 7 in the low nibble, -0.5 is code 9
  CHECK_EQ(codes[1], 0x62);
  float back[32];
  stages::expand_fp4(back, codes, 0.5f, 32);
  CHECK_EQ(back[0], 3.0f);
  CHECK_EQ(back[1], -0.25f);
  CHECK_EQ(back[3], 2.0f);
}

TEST_CASE(agrees_bit_for_bit_with_the_reference) {
  Random random(6);
  for (int seed = 0; seed < 3000; ++seed) {
    std::vector<float> x = bf16_values(random, 16);
    std::vector<double> want(x.begin(), x.end());
    stages::fp4_round_trip_latent(x.data());
    reference::fp4_round_trip_latent(want.data(), 16);
    for (int i = 0; i < 16; ++i) CHECK_EQ(static_cast<double>(x[i]), want[i]);

    std::vector<float> y = bf16_values(random, 32);
    std::vector<double> wanted(y.begin(), y.end());
    stages::fp4_round_trip_index(y.data());
    reference::fp4_round_trip_index(wanted.data(), 32);
    for (int i = 0; i < 32; ++i) CHECK_EQ(static_cast<double>(y[i]), wanted[i]);
  }
}

TEST_CASE(stored_rows_agree_bit_for_bit_with_the_reference) {
  Random random(7);
  for (int seed = 0; seed < 1000; ++seed) {
    std::vector<float> x;
    for (int g = 0; g < 4; ++g) {
      for (const float v : bf16_values(random, 32)) x.push_back(v);
    }
    std::uint8_t got[68], want[68];
    float back[128];
    for (int g = 0; g < 4; ++g) {
      got[64 + g] = stages::fp4_pack_index(got + 16 * g, &x[32 * g]);
      stages::expand_fp4(back + 32 * g, got + 16 * g, stages::from_ue8m0(got[64 + g]), 32);
    }
    const std::vector<double> values(x.begin(), x.end());
    reference::fp4_pack_index(want, values.data());
    for (int i = 0; i < 68; ++i) CHECK_EQ(got[i], want[i]);
    double wanted[128];
    reference::fp4_unpack_index(wanted, want);
    for (int i = 0; i < 128; ++i) CHECK_EQ(static_cast<double>(back[i]), wanted[i]);
  }
}
