// What V4's compressors mean, by hand.
#include "reference/pool.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace {

namespace reference = lowlat::reference;
using Codes = std::vector<std::uint16_t>;

Codes codes_of(const std::vector<double>& values) {
  Codes codes;
  for (const double v : values) codes.push_back(reference::to_bf16(v));
  return codes;
}

// Ratio 4, dim 64, H = 1: x is the value itself. Every channel's overlap half is -x, its own half x
// (channel 1's 2 x); scores are 0 but for ape.
std::vector<double> overlapping(const std::vector<double>& x, const std::vector<float>& ape) {
  std::vector<double> wkv(128), wgate(128, 0.0);
  for (int d = 0; d < 64; ++d) wkv[d] = -1.0, wkv[64 + d] = d == 1 ? 2.0 : 1.0;
  return reference::pooled_keys(codes_of(x).data(), codes_of(wkv).data(), codes_of(wgate).data(),
                                ape.data(), Codes(64, 0x3f80).data(),
                                static_cast<std::int64_t>(x.size()), 1, 4, 64, 0.0);
}

// Of entry 0 pair 0 is not turned; of entry n it is by 4 n.
double pair_norm(const std::vector<double>& keys, int n) {
  return std::hypot(keys[64 * n], keys[64 * n + 1]);
}

}  // namespace

TEST_CASE(the_first_entry_pools_its_own_four_alone) {
  const std::vector<double> keys = overlapping({1.0, 2.0, 3.0, 6.0, 9.0}, std::vector<float>(512));
  REQUIRE(keys.size() == 64);
  // c = 3, and 6 in channel 1: root mean square 3 sqrt(67 / 64).
  CHECK_NEAR(keys[0], 1.0 / std::sqrt(67.0 / 64.0), 1e-12);
  CHECK_NEAR(keys[1], 2.0 / std::sqrt(67.0 / 64.0), 1e-12);
}

TEST_CASE(later_entries_pool_eight) {
  // Means: of -1 -2 -3 -6 and 4 4 8 12, (-12 + 28) / 8 = 2; in channel 1 (-12 + 56) / 8 = 5.5.
  const std::vector<double> keys =
      overlapping({1.0, 2.0, 3.0, 6.0, 4.0, 4.0, 8.0, 12.0}, std::vector<float>(512));
  REQUIRE(keys.size() == 128);
  const double norm = std::sqrt((63.0 * 4.0 + 5.5 * 5.5) / 64.0);
  // The turn keeps the norm but for the rounding of its cosine and sine to fp32.
  CHECK_NEAR(pair_norm(keys, 1), std::hypot(2.0, 5.5) / norm, 1e-6);
  // Turned at position 4, the block's first.
  CHECK_NEAR(keys[64], (2.0 * std::cos(4.0) - 5.5 * std::sin(4.0)) / norm, 1e-6);
}

TEST_CASE(ape_is_of_the_place_in_the_own_block) {
  // A huge ape of place 2's overlap half leaves token 2 alone to entry 1, and place 3's own half
  // token 3 to entry 0: values -3 and 6 (12 in channel 1).
  std::vector<float> ape(4 * 128);
  for (int d = 0; d < 64; ++d) ape[2 * 128 + d] = 500.0f, ape[3 * 128 + 64 + d] = 400.0f;
  const std::vector<double> keys = overlapping({1.0, 2.0, 3.0, 6.0, 4.0, 4.0, 8.0, 12.0}, ape);
  CHECK_NEAR(keys[0], 1.0 / std::sqrt(67.0 / 64.0), 1e-12);
  CHECK_NEAR(keys[64 + 2], -(std::cos(4.0 * 0.687656022) - std::sin(4.0 * 0.687656022)), 1e-6);
}

TEST_CASE(blocks_of_128_weigh_by_their_scores) {
  // H = 2: values from x_0 and scores from x_1. Token 5 has score ln 9 and value 3, the others 0
  // and 1: (127 + 27) / 136 in every channel, normed to 1 but for epsilon.
  std::vector<double> x(2 * 130, 0.0), wkv(2 * 512), wgate(2 * 512);
  for (int t = 0; t < 130; ++t) x[2 * t] = t == 5 ? 3.0 : 1.0;
  for (int d = 0; d < 512; ++d) wkv[2 * d] = 1.0, wgate[2 * d + 1] = 1.0;
  std::vector<float> ape(128 * 512);
  for (int d = 0; d < 512; ++d) ape[5 * 512 + d] = std::log(9.0f);
  std::vector<float> kv(512);
  const double eps = 1.0;
  reference::compress_pooled(kv.data(), codes_of(x).data(), codes_of(wkv).data(),
                             codes_of(wgate).data(), ape.data(), Codes(512, 0x4040).data(), 130, 2,
                             128, eps);
  const double c = 154.0 / 136.0;
  for (int i = 0; i < 448; ++i) {
    CHECK_EQ(kv[i], reference::round_bf16(3.0 * c / std::sqrt(c * c + eps)));
  }
}
