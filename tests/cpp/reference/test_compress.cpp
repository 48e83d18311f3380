// What the compressors mean, by hand.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/compress.hpp"
#include "reference/format.hpp"

namespace {

namespace reference = lowlat::reference;
using Codes = std::vector<std::uint16_t>;

constexpr int kDim = 512;

Codes codes_of(const std::vector<double>& values) {
  Codes codes;
  for (const double v : values) codes.push_back(reference::to_bf16(v));
  return codes;
}

}  // namespace

TEST_CASE(pooling_is_a_softmax_of_two) {
  CHECK_EQ(reference::pool_pair(4.0, 7.0, 2.0, 7.0), 3.0);
  CHECK_NEAR(reference::pool_pair(4.0, std::log(3.0), 8.0, 0.0), 5.0, 1e-14);
  CHECK_NEAR(reference::pool_pair(4.0, 0.0, 8.0, std::log(3.0)), 7.0, 1e-14);
  CHECK_EQ(reference::pool_pair(4.0, -1e5, 8.0, 1e5), 8.0);
}

TEST_CASE(latent_rounds_then_norms) {
  // 3 (1 + 2^-8 + tiny) rounds to 3.015625 before its square is taken.
  std::vector<double> c(kDim, 1.0);
  for (int i = 0; i < kDim; i += 2) c[i] = 3.01171876;
  Codes got(kDim);
  reference::compressed_latent(got.data(), c.data(), Codes(kDim, 0x4380).data(), 1e-20);  // 256
  const double norm = std::sqrt((3.015625 * 3.015625 + 1.0) / 2.0);
  CHECK_EQ(got[0], reference::to_bf16(256.0 * 3.015625 / norm));
  CHECK_EQ(got[1], reference::to_bf16(256.0 / norm));
}

TEST_CASE(latent_of_small_values_is_still_normed) {
  Codes got(kDim);
  const std::vector<double> c(kDim, 0x1p-30);
  reference::compressed_latent(got.data(), c.data(), Codes(kDim, 0x4040).data(), 1e-20);
  // 2^-60 is far above 1e-20's 2^-66.4; the norm is 1 / sqrt(1 + 1e-20 * 2^60).
  CHECK_EQ(got[0], reference::to_bf16(3.0 / std::sqrt(1.0 + 1e-20 * 0x1p60)));
}

TEST_CASE(ratio_1_keeps_every_token_and_ratio_2_every_pair) {
  // H = 1: wkv alternates 1 and -1, so every c is +-x and every latent +-1; four bits keep 1.
  std::vector<double> wkv(kDim);
  for (int i = 0; i < kDim; ++i) wkv[i] = i % 2 == 0 ? 1.0 : -1.0;
  const Codes gain = codes_of(std::vector<double>(kDim, 6.0));
  const Codes x = codes_of({2.0, 5.0, 3.0});
  std::vector<float> kv(3 * kDim, -1.0f);
  reference::compress(kv.data(), x.data(), codes_of(wkv).data(), nullptr, gain.data(), 3, 1, 1,
                      1e-20);
  for (int i = 0; i < 448; ++i) {
    for (int t = 0; t < 3; ++t) CHECK_EQ(kv[t * kDim + i], i % 2 == 0 ? 6.0f : -6.0f);
  }
  // Entry 2 turned at position 2: (6, -6) by 2 radians in the first pair.
  CHECK_NEAR(kv[2 * kDim + 448], 6.0 * std::cos(2.0) + 6.0 * std::sin(2.0), 0.4);
  CHECK_NEAR(kv[2 * kDim + 449], 6.0 * std::sin(2.0) - 6.0 * std::cos(2.0), 0.8);

  // Ratio 2 over (2, 5): scores 0 and huge by sign of the channel, so even channels take 5.
  std::vector<double> wgate(kDim);
  for (int i = 0; i < kDim; ++i) wgate[i] = i % 2 == 0 ? 100.0 : -100.0;
  reference::compress(kv.data(), x.data(), codes_of(wkv).data(), codes_of(wgate).data(),
                      gain.data(), 3, 1, 2, 1e-20);
  // c = (5, -2) in turn; 6 (5, -2) / sqrt(14.5) in bf16 = (7.875, -3.15625). 7.875 / 6 = 1.3125 is
  // halfway between 1.25, the even code, and 1.375; 6.3 -> 6 and 2.525 -> 3.
  CHECK_EQ(kv[0], 7.5f);
  CHECK_EQ(kv[1], -3.75f);
  CHECK_EQ(kv[447], -3.75f);
}
