// What the index means, by hand.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"
#include "reference/index.hpp"

namespace {

namespace reference = lowlat::reference;
using Codes = std::vector<std::uint16_t>;

std::uint16_t code(double value) { return reference::to_bf16(value); }

}  // namespace

TEST_CASE(query_turns_its_second_half_only) {
  Codes x(128, 0), got(128);
  x[0] = code(6.0), x[1] = code(-2.5), x[64] = code(6.0);
  reference::index_query(got.data(), x.data(), 1, 1);
  CHECK_EQ(got[0], code(6.0));
  CHECK_EQ(got[1], code(-2.0));
  CHECK_EQ(got[64], code(3.0));  // 6 cos 1 = 3.24
  CHECK_EQ(got[65], code(6.0));  // 6 sin 1 = 5.049, 5.0625 in bf16: over the tie at 5
}

TEST_CASE(key_is_projected_normed_and_packed) {
  // wk row n takes channel n, so that the latent's first 128 values are the key.
  Codes wk(128 * 512, 0), latent(512, 0);
  for (int n = 0; n < 128; ++n) wk[n * 512 + n] = code(1.0), latent[n] = code(2.0);
  std::uint8_t row[68];
  reference::index_key(row, latent.data(), wk.data(), Codes(128, code(6.0)).data(), 0, 1e-20);
  for (int i = 0; i < 64; ++i) CHECK_EQ(row[i], 0x77);
  for (int i = 64; i < 68; ++i) CHECK_EQ(row[i], 127);
}

TEST_CASE(scores_are_weighted_sums_of_what_is_positive) {
  std::uint8_t rows[2 * 68];
  for (int i = 0; i < 64; ++i) rows[i] = 0x22, rows[68 + i] = 0xaa;  // 1 and -1
  for (int group = 0; group < 4; ++group) rows[64 + group] = 128, rows[68 + 64 + group] = 128;
  Codes query(2 * 128, code(1.0));
  for (int i = 128; i < 256; ++i) query[i] = code(-0.5);
  const float weights[] = {3.0f, 0.25f};
  const std::vector<double> got = reference::index_scores(query.data(), weights, 2, rows, 2);
  CHECK_EQ(got.at(0), 3.0 * 256.0);
  CHECK_EQ(got.at(1), 0.25 * 128.0);
}

TEST_CASE(fp8_query_is_turned_mixed_and_scaled) {
  Codes x(128, 0);
  x[0] = code(2.0);
  std::vector<std::uint8_t> codes(128);
  float scale = 0.0f;
  reference::index_query_fp8(codes.data(), &scale, x.data(), 1, 9);
  CHECK_EQ(scale, static_cast<float>(2.0 / std::sqrt(128.0) / 448.0));
  for (const std::uint8_t c : codes) CHECK_EQ(c, 0x7e);
  // Channel 65 at position 0: sign by bits 0 and 6 of i.
  x[0] = 0, x[65] = code(-1.0);
  reference::index_query_fp8(codes.data(), &scale, x.data(), 1, 0);
  for (unsigned i = 0; i < 128; ++i) {
    CHECK_EQ(codes[i], ((i & 1) + (i >> 6)) % 2 == 0 ? 0xfe : 0x7e);
  }
  reference::index_query_fp8(codes.data(), &scale, Codes(128, 0).data(), 1, 0);
  CHECK_EQ(scale, 1e-4f / 448.0f);
  for (const std::uint8_t c : codes) CHECK_EQ(c, 0);
}

TEST_CASE(fp8_keys_are_pooled_keys_mixed) {
  // H = 1, every weight but channel 0's is 0: the key is sqrt(128) there, 1 everywhere after.
  Codes x(5, code(1.0)), wkv(256, 0), wgate(256, 0);
  wkv[128] = code(7.0);
  const std::vector<float> ape(4 * 256);
  std::uint8_t row[132];
  reference::index_keys_fp8(row, x.data(), wkv.data(), wgate.data(), ape.data(),
                            Codes(128, code(1.0)).data(), 5, 1, 0.0);
  for (int i = 0; i < 128; ++i) CHECK_EQ(row[i], 0x7e);
  double values[128];
  reference::index_unpack_fp8(values, row);
  CHECK_NEAR(values[127], 1.0, 1e-7);
}

TEST_CASE(fp8_scores_are_weighted_sums_of_what_is_positive) {
  // Codes 1 and -1 under scales 2 and 0.5 (bytes low first).
  std::vector<std::uint8_t> rows(2 * 132, 0x38);
  for (int i = 0; i < 128; ++i) rows[132 + i] = 0xb8;
  const std::uint8_t scales[2][4] = {{0, 0, 0, 0x40}, {0, 0, 0, 0x3f}};
  for (int n = 0; n < 2; ++n) {
    for (int b = 0; b < 4; ++b) rows[132 * n + 128 + b] = scales[n][b];
  }
  std::vector<std::uint8_t> query(2 * 128, 0x38);
  for (int i = 128; i < 256; ++i) query[i] = 0xb0;  // -0.5
  const float weights[] = {3.0f, 0.25f};
  const std::vector<double> got =
      reference::index_scores_fp8(query.data(), weights, 2, rows.data(), 2);
  CHECK_EQ(got.at(0), 3.0 * 256.0);
  CHECK_EQ(got.at(1), 0.25 * 32.0);
}
