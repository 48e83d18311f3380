// Planted: blocking only the image token itself, offsets that restart with each n-gram size, the
// sign of the match dropped and the value taken for key 0 each fail a case.
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/engram.hpp"

#include "check.hpp"
#include "random_values.hpp"

namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using Apply = stages::EngramApply<Block>;

std::uint16_t bf(double v) { return stages::to_bf16(static_cast<float>(v)); }

// The first three columns of each n-gram size would do; this gives all 24.
std::vector<std::int64_t> hash(const std::vector<std::int64_t>& newest_first, std::int64_t pos,
                               const std::vector<std::int64_t>& map,
                               const std::vector<std::int64_t>& multipliers,
                               const std::vector<std::int64_t>& primes, std::int64_t image_token) {
  std::int64_t tokens[4], ids[24];
  for (int i = 0; i < 4; ++i) tokens[i] = newest_first[i];
  stages::engram_hash(ids, tokens, pos, map.data(), multipliers.data(), primes.data(), image_token,
                      2);
  return {ids, ids + 24};
}

std::vector<std::int64_t> primes_after(std::int64_t start, int count) {
  std::vector<std::int64_t> found;
  while (static_cast<int>(found.size()) < count) {
    ++start;
    bool prime = true;
    for (std::int64_t d = 2; d * d <= start && prime; ++d) prime = start % d != 0;
    if (prime) found.push_back(start);
  }
  return found;
}

}  // namespace

TEST_CASE(ids_worked_by_hand) {
  const std::vector<std::int64_t> map = {0, 1, 2, 3, 4, 5, 6, 7}, mult = {1, 2, 4, 8};
  const std::vector<std::int64_t> primes(24, 10);
  // Products 5, 6, 8, 56: 5 ^ 6 = 3, ^ 8 = 11, ^ 56 = 51. Columns are 10 rows apart.
  const auto ids = hash({5, 3, 2, 7}, 100, map, mult, primes, -1);
  const std::int64_t residue[3] = {3, 1, 1};
  for (int column = 0; column < 24; ++column) {
    CHECK_EQ(ids[column], residue[column / 8] + 10 * column);
  }
}

TEST_CASE(offsets_are_the_primes_of_all_columns_before) {
  std::vector<std::int64_t> primes;
  for (int i = 0; i < 24; ++i) primes.push_back(100 + i);
  const auto ids = hash({0, 0, 0, 0}, 9, {0, 0, 0}, {3, 5, 7, 9}, primes, -1);
  std::int64_t sum = 0;
  for (int column = 0; column < 24; ++column) {
    CHECK_EQ(ids[column], sum);
    sum += primes[column];
  }
}

TEST_CASE(the_start_and_image_tokens_block_all_that_is_older) {
  const std::vector<std::int64_t> map = {10, 11, 12, 13, 14, 15, 16, 17}, mult = {3, 5, 7, 9};
  const std::vector<std::int64_t> primes(24, 1000003);
  constexpr std::int64_t kImage = 99;  // beyond the map: must not be looked up
  const auto run = [&](std::vector<std::int64_t> tokens, std::int64_t pos) {
    return hash(tokens, pos, map, mult, primes, kImage);
  };
  constexpr std::int64_t kUnread = -12345;
  CHECK(run({5, kUnread, kUnread, kUnread}, 0) == run({5, 2, 2, 2}, 50));
  CHECK(run({5, 4, kUnread, kUnread}, 1) == run({5, 4, 2, 2}, 50));
  CHECK(run({5, 4, 3, kUnread}, 2) == run({5, 4, 3, 2}, 50));
  CHECK(run({5, 4, 3, 6}, 3) == run({5, 4, 3, 6}, 1048575));
  CHECK(run({5, 4, 3, 6}, 3) != run({5, 4, 3, 2}, 3));
  CHECK(run({5, kImage, 3, 6}, 50) == run({5, 2, 2, 2}, 50));
  CHECK(run({5, 4, kImage, 6}, 50) == run({5, 4, 2, 2}, 50));
  CHECK(run({5, 4, 3, kImage}, 50) == run({5, 4, 3, 2}, 50));
  CHECK(run({kImage, 4, 3, 6}, 50) == run({2, 2, 2, 2}, 50));
}

TEST_CASE(the_published_layer) {
  // Layer 1: 24 successive primes above 15999999 and its multipliers.
  const std::vector<std::int64_t> primes = primes_after(15999999, 24);
  CHECK_EQ(primes[0], 16000057);
  CHECK_EQ(primes[1], 16000079);
  CHECK_EQ(primes[23], 16000463);
  std::int64_t num_rows = 0;
  for (const std::int64_t p : primes) num_rows += p;
  CHECK_EQ(num_rows, 384006168);
  const std::vector<std::int64_t> mult = {76632096046245, 4839876093313, 35959672319349,
                                          73987337458391};
  std::vector<std::int64_t> map(100);
  for (int i = 0; i < 100; ++i) map[i] = 99091 - 37 * i;
  const std::vector<std::int64_t> tokens = {11, 98, 45, 7};
  const auto ids = hash(tokens, 1048575, map, mult, primes, 129264);
  __extension__ typedef unsigned __int128 Wide;
  Wide mixed = static_cast<Wide>(map[11]) * static_cast<Wide>(mult[0]);
  Wide offset = 0;
  for (int column = 0; column < 24; ++column) {
    const int shift = column / 8 + 1;
    if (column % 8 == 0)
      mixed ^= static_cast<Wide>(map[tokens[shift]]) * static_cast<Wide>(mult[shift]);
    CHECK(static_cast<Wide>(ids[column]) == mixed % static_cast<Wide>(primes[column]) + offset);
    offset += static_cast<Wide>(primes[column]);
  }
}

TEST_CASE(a_window_takes_own_rows_first_and_then_the_history) {
  const std::int32_t tokens[4] = {10, 11, 12, 13}, history[3] = {7, 8, 9};
  const std::int64_t want[4][4] = {
      {10, 9, 8, 7}, {11, 10, 9, 8}, {12, 11, 10, 9}, {13, 12, 11, 10}};
  for (int row = 0; row < 4; ++row) {
    std::int64_t got[4];
    stages::engram_window(got, tokens, row, history);
    for (int shift = 0; shift < 4; ++shift) CHECK_EQ(got[shift], want[row][shift]);
  }
}

TEST_CASE(look_up_multiplies_by_the_groups_scale_and_keeps_to_its_columns) {
  constexpr int kDim = 64;
  std::vector<std::uint8_t> codes(3 * kDim, 0x38), scales = {127, 128, 120, 127, 0, 129};
  codes[1 * kDim + 5] = 0xfe;  // -448
  codes[2 * kDim + 1] = 0x01;  // 2^-9, at scale 2^-127
  std::vector<std::int64_t> ids(24, -1);
  ids[8] = 101;  // the shard begins at row 100
  ids[9] = 102;
  std::vector<std::uint16_t> out(24 * kDim, 0x7fc0);
  stages::engram_lookup(out.data(), ids.data(), 8, 10, codes.data(), scales.data(), 100, kDim);
  CHECK_EQ(out[8 * kDim], bf(0x1p-7));
  CHECK_EQ(out[8 * kDim + 5], bf(-3.5));
  CHECK_EQ(out[8 * kDim + 32], bf(1.0));
  CHECK_EQ(out[9 * kDim + 32], bf(4.0));
  CHECK_EQ(out[9 * kDim], 0x0040);  // 2^-127, a subnormal bf16
  CHECK_EQ(out[9 * kDim + 1], 0);   // 2^-136 is below half the smallest, 2^-133
  for (int i = 0; i < 24 * kDim; ++i) {
    if (i < 8 * kDim || i >= 10 * kDim) CHECK_EQ(out[i], 0x7fc0);
  }
}

TEST_CASE(gates_of_both_signs_and_of_nothing) {
  // 1 / (1 + e^-sqrt(2)) for a match of 2.
  CHECK_NEAR(Apply::gate(4.0f, 4.0f, 4.0f, 4, 1e-20f), 0.80442968, 1e-6);
  CHECK_NEAR(Apply::gate(-4.0f, 4.0f, 4.0f, 4, 1e-20f), 1.0 - 0.80442968, 1e-6);
  // Below 1e-6 the root is of 1e-6, with the sign of the match; 0 counts as positive.
  CHECK_NEAR(Apply::gate(0.0f, 4.0f, 4.0f, 4, 1e-20f), 0.50025, 1e-6);
  CHECK_NEAR(Apply::gate(1e-9f, 4.0f, 4.0f, 4, 1e-20f), 0.50025, 1e-6);
  CHECK_NEAR(Apply::gate(-1e-9f, 4.0f, 4.0f, 4, 1e-20f), 0.49975, 1e-6);
  CHECK_NEAR(Apply::gate(0.0f, 0.0f, 0.0f, 4, 1e-20f), 0.50025, 1e-6);
  CHECK_EQ(Apply::gate(1e9f, 4.0f, 4.0f, 4, 1e-20f), 1.0f);
}

TEST_CASE(streams_worked_by_hand) {
  // Four columns. Keys of streams 0 .. 3: 1, -1, 0, 1; the last one's q_weight is 0.
  std::vector<std::uint16_t> residual(16, bf(1.0)), kv(20, bf(1.0)), q(16, bf(1.0)), k(16, bf(1.0));
  for (int i = 4; i < 8; ++i) kv[i] = bf(-1.0);
  for (int i = 8; i < 12; ++i) kv[i] = 0;
  for (int i = 12; i < 16; ++i) q[i] = 0;
  kv[19] = bf(-256.0);  // the value of the last column
  Apply::Scratch scratch;
  Apply::run(residual.data(), kv.data(), q.data(), k.data(), 4, 1e-20f, scratch);
  CHECK_EQ(residual[0], bf(1.8046875));  // bf(1 + 0.80443)
  CHECK_EQ(residual[4], bf(1.1953125));  // bf(1 + 0.19557)
  CHECK_EQ(residual[8], bf(1.5));        // bf(1 + 0.50025)
  CHECK_EQ(residual[3], bf(1.0 - 256.0 * 0.80442968));
  CHECK_EQ(residual[7], bf(1.0 - 256.0 * 0.19557032));
  CHECK_EQ(residual[15], bf(1.0 - 256.0 * 0.50025));
}
