// Planted: the sign of the match ignored, an image token that blocks only itself and offsets that
// begin at the first prime.
#include "reference/engram.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace {

using lowlat::reference::engram_apply;
using lowlat::reference::engram_hash;
using lowlat::reference::engram_lookup;
using lowlat::reference::to_bf16;

}  // namespace

TEST_CASE(hash_by_hand) {
  const std::int64_t map[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, mult[4] = {1, 2, 4, 8};
  std::int64_t prime[24];
  for (int i = 0; i < 24; ++i) prime[i] = 50 + i;
  // Rows: all four count; position 1; an image token (9) two back.
  const std::int64_t token[3] = {5, 5, 5}, pos[3] = {3, 1, 77};
  const std::int64_t history[9] = {7, 2, 3, -1, -1, 3, 7, 9, 3};
  std::int64_t ids[72];
  engram_hash(ids, token, history, pos, map, mult, prime, 9, 3);
  // Products of row 0: 5, 6, 8, 56; of rows 1 and 2: 5, 6, then token 2: 8, 16.
  const std::int64_t mixed[3][3] = {{3, 11, 51}, {3, 11, 27}, {3, 11, 27}};
  for (int row = 0; row < 3; ++row) {
    std::int64_t offset = 0;
    for (int column = 0; column < 24; ++column) {
      CHECK_EQ(ids[row * 24 + column], offset + mixed[row][column / 8] % (50 + column));
      offset += 50 + column;
    }
  }
}

TEST_CASE(look_up_by_hand) {
  std::vector<std::uint8_t> codes(2 * 64, 0x38), scales = {127, 127, 130, 124};  // codes are 1
  codes[64 + 40] = 0xc4;                                                         // -3
  const std::vector<std::int64_t> ids(24, 1);
  std::vector<std::uint16_t> e(24 * 64);
  engram_lookup(e.data(), ids.data(), codes.data(), scales.data(), 1, 64);
  CHECK_EQ(e[0], to_bf16(8.0));
  CHECK_EQ(e[23 * 64 + 32], to_bf16(0.125));
  CHECK_EQ(e[23 * 64 + 40], to_bf16(-0.375));
}

TEST_CASE(apply_by_hand) {
  // hidden 32, width 96: e[0] = 1 alone, so key and value are wkv's first column. Stream 0's key is
  // all 1, stream 1's all -1, stream 2's 0, stream 3's 1 with a k_weight of 0; the value is 2.
  constexpr int kHidden = 32, kWidth = 96;
  std::vector<std::uint16_t> e(kWidth), residual(4 * kHidden, to_bf16(1.0)), out(4 * kHidden);
  e[0] = to_bf16(1.0);
  std::vector<std::uint8_t> wkv(5 * kHidden * kWidth);
  for (int n = 0; n < 5 * kHidden; ++n) {
    const std::uint8_t code[5] = {0x38, 0xb8, 0x00, 0x38, 0x40};
    wkv[n * kWidth] = code[n / kHidden];
  }
  const std::vector<float> scale(5 * 3, 1.0f);
  const std::vector<std::uint16_t> q(4 * kHidden, to_bf16(1.0));
  std::vector<std::uint16_t> k = q;
  for (int i = 3 * kHidden; i < 4 * kHidden; ++i) k[i] = 0;
  engram_apply(out.data(), residual.data(), e.data(), wkv.data(), scale.data(), q.data(), k.data(),
               1, kHidden, kWidth, 1e-20);
  // The match is 32 / sqrt(32).
  const double root = std::pow(32.0, 0.25);
  CHECK_EQ(out[0], to_bf16(1.0 + 2.0 / (1.0 + std::exp(-root))));
  CHECK_EQ(out[kHidden], to_bf16(1.0 + 2.0 / (1.0 + std::exp(root))));
  CHECK_EQ(out[2 * kHidden + 31], to_bf16(1.0 + 2.0 / (1.0 + std::exp(-1e-3))));
  CHECK_EQ(out[3 * kHidden], to_bf16(1.0 + 2.0 / (1.0 + std::exp(-1e-3))));
}
