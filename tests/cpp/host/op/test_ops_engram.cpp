// Planted: history read newest first, keys and value exchanged and the look-up's scale taken from
// the next group each fail a case.
#include "host/op/registry.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "random_values.hpp"
#include "reference/format.hpp"

namespace {

using lowlat::testing::begins_with;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
using lowlat::testing::rel_l2;
using lowlat::testing::values_of;

using Numbers = std::vector<std::int64_t>;

Numbers numbers(Random& random, std::size_t n, std::int64_t low, std::int64_t high) {
  Numbers out(n);
  for (auto& v : out) v = random.integer(low, high);
  return out;
}

OpCall hash_call(Random& random, std::int64_t rows, std::int64_t vocab) {
  OpCall call(op_named(lowlat::host::ops_engram(), "engram_hash"));
  call.set("token", LOWLAT_I64, {rows}, numbers(random, rows, 0, vocab - 1));
  call.set("history", LOWLAT_I64, {rows, 3}, numbers(random, rows * 3, 0, vocab - 1));
  call.set("pos", LOWLAT_I64, {rows}, numbers(random, rows, 0, 6));
  call.set("map", LOWLAT_I64, {vocab}, numbers(random, vocab, 0, 99091));
  call.set<std::int64_t>("mult", LOWLAT_I64, {4},
                         {67716810739261, 51510806800915, 30921347202721, 82619226485591});
  call.set("prime", LOWLAT_I64, {3, 8}, numbers(random, 24, 16000477, 16000889));
  return call.set_number("image_token", 1);
}

OpCall lookup_call(Random& random, std::int64_t rows, std::int64_t num_rows, std::int64_t dim) {
  OpCall call(op_named(lowlat::host::ops_engram(), "engram_lookup"));
  std::vector<std::uint8_t> codes(num_rows * dim), scales(num_rows * dim / 32);
  for (auto& code : codes) {
    code = static_cast<std::uint8_t>(random.integer(0, 126) | random.integer(0, 1) << 7);
  }
  for (auto& code : scales) code = static_cast<std::uint8_t>(random.integer(0, 240));
  call.set("table", LOWLAT_U8, {num_rows, dim}, codes);
  call.set("table_scale", LOWLAT_U8, {num_rows, dim / 32}, scales);
  return call.set("ids", LOWLAT_I64, {rows, 24}, numbers(random, rows * 24, 0, num_rows - 1));
}

OpCall apply_call(Random& random, std::int64_t rows, std::int64_t hidden, std::int64_t dim,
                  double spread) {
  OpCall call(op_named(lowlat::host::ops_engram(), "engram_apply"));
  const std::int64_t width = 24 * dim;
  call.set("residual", LOWLAT_BF16, {rows, 4, hidden}, random.bf16(rows * 4 * hidden));
  call.set("e", LOWLAT_BF16, {rows, width}, random.bf16(rows * width));
  std::vector<std::uint8_t> wkv(5 * hidden * width);
  for (auto& code : wkv) code = lowlat::reference::to_e4m3(100.0 * random.normal());
  std::vector<float> scale(wkv.size() / 1024);
  for (float& v : scale) v = std::ldexp(1.0f, static_cast<int>(random.integer(-12, -11)));
  call.set("wkv", LOWLAT_U8, {5 * hidden, width}, wkv);
  call.set("wkv_scale", LOWLAT_F32, {5 * hidden / 32, width / 32}, scale);
  call.set("q_weight", LOWLAT_BF16, {4, hidden}, random.bf16(4 * hidden, spread));
  return call.set("k_weight", LOWLAT_BF16, {4, hidden}, random.bf16(4 * hidden, spread));
}

}  // namespace

TEST_CASE(hash_is_the_references_bit_for_bit) {
  for (std::uint32_t seed = 1; seed <= 50; ++seed) {
    Random random(seed);
    const OpCall call = hash_call(random, seed % 2 == 0 ? 48 : 1, 3 + 2 * seed);
    CHECK(call.run<std::int64_t>("scalar") == call.run<std::int64_t>("reference"));
  }
}

TEST_CASE(hash_refuses_what_it_would_read) {
  const auto call = [] {
    Random random(3);
    OpCall made = hash_call(random, 2, 9);
    made.set<std::int64_t>("pos", LOWLAT_I64, {2}, {1, 100});
    made.set<std::int64_t>("history", LOWLAT_I64, {2, 3}, {-5, 777, 4, 5, 6, 7});
    return made.set<std::int64_t>("token", LOWLAT_I64, {2}, {8, 1});
  };
  // Entries of history before position 0 are not read, so -5 and 777 are nobody's business.
  CHECK_EQ(call().refusal(), "");
  CHECK(begins_with(call().set<std::int64_t>("pos", LOWLAT_I64, {2}, {2, 100}).refusal(),
                    "history[0, 1] is 777"));
  CHECK(begins_with(call().set<std::int64_t>("pos", LOWLAT_I64, {2}, {-1, 0}).refusal(),
                    "pos[0] is -1"));
  CHECK(begins_with(call().set<std::int64_t>("token", LOWLAT_I64, {2}, {9, 1}).refusal(),
                    "token[0] is 9; needed 0 .. 8"));
  CHECK_EQ(call()
               .set<std::int64_t>("token", LOWLAT_I64, {2}, {9, 1})
               .set_number("image_token", 9)
               .refusal(),
           "");
  CHECK_EQ(call()
               .remove("image_token")
               .set<std::int64_t>("token", LOWLAT_I64, {2}, {129264, 1})
               .refusal(),
           "");
  CHECK(begins_with(call().set("map", LOWLAT_I64, {2}, Numbers{0, 1}).refusal(), "map has 2"));
  CHECK(begins_with(call().set("prime", LOWLAT_I64, {3, 8}, Numbers(24, 0)).refusal(),
                    "prime[0, 0] is 0"));
  CHECK(begins_with(call().set("mult", LOWLAT_I64, {4}, Numbers{1, 1, 1, 0}).refusal(),
                    "mult[3] is 0"));
  // The largest product that fits is 2^63 - 1.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  Numbers map(9, 7);
  CHECK_EQ(call()
               .set("map", LOWLAT_I64, {9}, map)
               .set("mult", LOWLAT_I64, {4}, Numbers(4, kMost / 7))
               .refusal(),
           "");
  CHECK(begins_with(call()
                        .set("map", LOWLAT_I64, {9}, map)
                        .set("mult", LOWLAT_I64, {4}, Numbers(4, kMost / 7 + 1))
                        .refusal(),
                    "map and mult"));
}

TEST_CASE(look_up_is_the_references_bit_for_bit) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    const OpCall call = lookup_call(random, seed % 2 == 0 ? 48 : 6, 50, 32 * (1 + seed % 3));
    CHECK(call.run<std::uint16_t>("scalar") == call.run<std::uint16_t>("reference"));
  }
  Random random(1);
  OpCall call = lookup_call(random, 2, 50, 32);
  Numbers ids(48, 49);
  CHECK_EQ(call.set("ids", LOWLAT_I64, {2, 24}, ids).refusal(), "");
  ids[25] = 50;
  CHECK(begins_with(call.set("ids", LOWLAT_I64, {2, 24}, ids).refusal(), "ids[1, 1] is 50"));
}

TEST_CASE(apply_agrees_with_the_reference) {
  double worst = 0.0;
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    Random random(seed);
    const double spreads[4] = {1.0, 1e-4, 3.0, 0.1};
    const OpCall call =
        apply_call(random, seed % 2 == 0 ? 12 : 1, 32 * (1 + seed % 4), 32, spreads[seed % 4]);
    worst = std::max(worst, rel_l2(values_of(call.run<std::uint16_t>("scalar")),
                                   values_of(call.run<std::uint16_t>("reference"))));
  }
  std::printf("engram_apply residual rel_l2 %.2e\n", worst);
  CHECK(worst <= 3e-4);
}

TEST_CASE(apply_of_a_zero_look_up_changes_nothing) {
  Random random(4);
  OpCall call = apply_call(random, 3, 64, 32, 1.0);
  call.set("e", LOWLAT_BF16, {3, 768}, std::vector<std::uint16_t>(3 * 768, 0x8000));
  const auto residual = random.bf16(3 * 4 * 64);
  call.set("residual", LOWLAT_BF16, {3, 4, 64}, residual);
  CHECK(call.run<std::uint16_t>("scalar") == residual);
  CHECK(call.run<std::uint16_t>("reference") == residual);
  std::vector<std::uint16_t> bad = residual;
  bad[65] = 0x7f80;
  CHECK(begins_with(call.set("residual", LOWLAT_BF16, {3, 4, 64}, bad).refusal(),
                    "residual[0, 1, 1] is infinite"));
}
