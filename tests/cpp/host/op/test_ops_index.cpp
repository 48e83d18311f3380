// index_query, index_key, index_select and candidate_blocks as operations: scalar against reference
// by the declared bounds, and every refusal by name.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "random_values.hpp"
#include "reference/format.hpp"
#include "reference/fp4.hpp"
#include "reference/index.hpp"

namespace {

using lowlat::testing::begins_with;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
using lowlat::testing::rel_l2;
using lowlat::testing::values_of;
using Ids = std::vector<std::int32_t>;
using Counts = std::vector<std::int64_t>;

OpCall operation(const char* name, const char* model = "v41") {
  return OpCall(op_named(lowlat::host::ops_index(), name, model), model);
}

Counts integers(Random& random, std::int64_t n, std::int64_t first, std::int64_t last) {
  Counts values(n);
  for (std::int64_t& v : values) v = random.integer(first, last);
  return values;
}

OpCall query(std::int64_t T, std::int64_t h, Random& random) {
  OpCall call = operation("index_query");
  call.set("q", LOWLAT_BF16, {T, h, 128}, random.bf16(T * h * 128))
      .set("pos", LOWLAT_I64, {T}, integers(random, T, 0, 1048575));
  return call;
}

OpCall key(std::int64_t T, Random& random) {
  OpCall call = operation("index_key");
  call.set("latent", LOWLAT_BF16, {T, 512}, random.bf16(T * 512))
      .set("wk", LOWLAT_BF16, {128, 512}, random.bf16(128 * 512, 0.05))
      .set("norm", LOWLAT_BF16, {128}, random.bf16(128))
      .set("pos", LOWLAT_I64, {T}, integers(random, T, 0, 1048575));
  return call;
}

OpCall select(std::int64_t T, std::int64_t h, std::int64_t N, std::int64_t k, Random& random) {
  OpCall call = operation("index_select");
  call.set("iq", LOWLAT_BF16, {T, h, 128}, random.bf16(T * h * 128))
      .set("ik", LOWLAT_U8, {N, 68}, random.index_rows(N))
      .set("weights", LOWLAT_F32, {T, h}, random.f32(T * h))
      .set("count", LOWLAT_I64, {T}, integers(random, T, 0, N))
      .set_number("k", k);
  return call;
}

OpCall blocks(std::int64_t T, std::int64_t N, std::int64_t k, Random& random) {
  OpCall call = operation("candidate_blocks");
  call.set("score", LOWLAT_F32, {T, N}, random.f32(T * N))
      .set("count", LOWLAT_I64, {T}, integers(random, T, 0, N))
      .set_number("k", k);
  return call;
}

OpCall query_v4(std::int64_t T, std::int64_t h, Random& random) {
  OpCall call = operation("index_query", "v4");
  call.set("q", LOWLAT_BF16, {T, h, 128}, random.bf16(T * h * 128))
      .set("pos", LOWLAT_I64, {T}, integers(random, T, 0, 1048575));
  return call;
}

OpCall key_v4(std::int64_t L, std::int64_t H, Random& random) {
  OpCall call = operation("index_key", "v4");
  const double scale = 1.0 / std::sqrt(static_cast<double>(H));
  call.set("x", LOWLAT_BF16, {L, H}, random.bf16(L * H))
      .set("wkv", LOWLAT_BF16, {256, H}, random.bf16(256 * H, scale))
      .set("wgate", LOWLAT_BF16, {256, H}, random.bf16(256 * H, scale))
      .set("ape", LOWLAT_F32, {4, 256}, random.f32(4 * 256))
      .set("norm", LOWLAT_BF16, {128}, random.bf16(128));
  return call;
}

OpCall select_v4(std::int64_t T, std::int64_t h, std::int64_t N, std::int64_t k, Random& random) {
  OpCall call = operation("index_select", "v4");
  call.set("iq", LOWLAT_U8, {T, h, 128}, random.e4m3(T * h * 128, 150.0))
      .set("ik", LOWLAT_U8, {N, 132}, random.index_fp8_rows(N))
      .set("weights", LOWLAT_F32, {T, h}, random.f32(T * h))
      .set("count", LOWLAT_I64, {T}, integers(random, T, 0, N))
      .set_number("k", k);
  return call;
}

// Values of codes, and of V4's stored rows.
std::vector<double> e4m3_values(const std::vector<std::uint8_t>& codes) {
  std::vector<double> values;
  for (const std::uint8_t code : codes) values.push_back(lowlat::reference::from_e4m3(code));
  return values;
}
std::vector<double> unpacked_v4(const std::vector<std::uint8_t>& rows) {
  std::vector<double> values(rows.size() / 132 * 128);
  for (std::size_t i = 0; i < rows.size() / 132; ++i) {
    lowlat::reference::index_unpack_fp8(&values[128 * i], &rows[132 * i]);
  }
  return values;
}

std::string words(const Ids& ids) {
  std::string text;
  for (const std::int32_t id : ids) text += std::to_string(id) + " ";
  return text;
}

// Values of stored rows.
std::vector<double> unpacked(const std::vector<std::uint8_t>& rows) {
  std::vector<double> values(rows.size() / 68 * 128);
  for (std::size_t i = 0; i < rows.size() / 68; ++i) {
    lowlat::reference::fp4_unpack_index(&values[128 * i], &rows[68 * i]);
  }
  return values;
}

// Two heads' keys and a query whose scores are the entry number mod 5, by the first channel alone.
OpCall counted(std::int64_t N, const Counts& count, std::int64_t k) {
  // e2m1 codes of 0, 1, 2, 3, 4.
  constexpr std::uint8_t kCodes[5] = {0, 2, 4, 5, 6};
  std::vector<std::uint8_t> rows(N * 68, 0);
  for (std::int64_t n = 0; n < N; ++n) {
    rows[n * 68] = kCodes[n % 5];
    for (int group = 0; group < 4; ++group) rows[n * 68 + 64 + group] = 127;
  }
  const auto T = static_cast<std::int64_t>(count.size());
  std::vector<std::uint16_t> iq(T * 128, 0);
  for (std::int64_t t = 0; t < T; ++t) iq[t * 128] = 0x3f80;
  OpCall call = operation("index_select");
  call.set("iq", LOWLAT_BF16, {T, 1, 128}, iq)
      .set("ik", LOWLAT_U8, {N, 68}, rows)
      .set("weights", LOWLAT_F32, {T, 1}, std::vector<float>(T, 0.5f))
      .set("count", LOWLAT_I64, {T}, count)
      .set_number("k", k);
  return call;
}

}  // namespace

TEST_CASE(queries_and_keys_are_within_their_bounds) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    Random random(50 + seed);
    const std::int64_t T = seed == 0 ? 48 : seed;
    const OpCall q = query(T, seed % 4 + 1, random);
    CHECK(rel_l2(values_of(q.run<std::uint16_t>("scalar")),
                 values_of(q.run<std::uint16_t>("reference"))) <= 1e-1);
    const OpCall k = key(T, random);
    CHECK(rel_l2(unpacked(k.run<std::uint8_t>("scalar")),
                 unpacked(k.run<std::uint8_t>("reference"))) <= 1e-1);
  }
}

TEST_CASE(selects_by_score_then_position) {
  for (const char* platform : {"scalar", "reference"}) {
    // Scores 0 1 2 3 4 0 1 2 3 4 0 1, halved.
    CHECK_EQ(words(counted(12, {12, 9, 3, 0}, 4).run<std::int32_t>(platform)),
             words({3, 4, 8, 9, 2, 3, 4, 8, 0, 1, 2, -1, -1, -1, -1, -1}));
    // Of equal scores 2 at entries 2 and 7 only the lower is taken.
    CHECK_EQ(words(counted(12, {12}, 5).run<std::int32_t>(platform)), words({2, 3, 4, 8, 9}));
  }
}

TEST_CASE(selects_in_candidate_blocks_only) {
  for (const char* platform : {"scalar", "reference"}) {
    OpCall call = counted(12, {12, 7}, 3);
    call.set("blocks", LOWLAT_I32, {2, 3}, Ids{0, 2, -1, 1, -1, -1}).set_number("block", 4);
    // Row 0 sees 0..3 and 8..11, row 1 4..6: scores 0 1 2 3 | 3 4 0 1 and 4 0 1.
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({3, 8, 9, 4, 5, 6}));
    call.set("blocks", LOWLAT_I32, {2, 3}, Ids{-1, -1, -1, 0, -1, -1});
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({-1, -1, -1, 1, 2, 3}));
  }
}

TEST_CASE(selections_agree_with_the_reference) {
  // Random scores lie far apart beside fp32's error: no seed here comes near a tie.
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    Random random(70 + seed);
    const std::int64_t T = seed % 4 + 1, N = 40 + 7 * seed;
    OpCall call = select(T, seed % 8 + 1, N, 16, random);
    CHECK_EQ(words(call.run<std::int32_t>("scalar")), words(call.run<std::int32_t>("reference")));
    OpCall pool = blocks(T, N, 6, random);
    const Ids published = pool.run<std::int32_t>("scalar");
    CHECK_EQ(words(published), words(pool.run<std::int32_t>("reference")));
    // The model's chain: what one layer publishes restricts the next.
    call.set("count", LOWLAT_I64, {T}, Counts(T, N)).set("blocks", LOWLAT_I32, {T, 6}, published);
    CHECK_EQ(words(call.run<std::int32_t>("scalar")), words(call.run<std::int32_t>("reference")));
  }
}

TEST_CASE(the_newest_block_is_always_a_candidate) {
  OpCall call = operation("candidate_blocks");
  std::vector<float> score(20, 1.0f);
  score[19] = -5.0f, score[18] = -5.0f, score[17] = -5.0f, score[16] = -5.0f;
  for (const char* platform : {"scalar", "reference"}) {
    call.set("score", LOWLAT_F32, {1, 20}, score)
        .set("count", LOWLAT_I64, {1}, Counts{20})
        .set_number("k", 2);
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({0, 2}));  // blocks of 8
    call.set_number("block", 4);
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({0, 4}));
    call.remove("block").set("count", LOWLAT_I64, {1}, Counts{9});
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({0, 1}));
  }
}

TEST_CASE(queries_and_keys_refuse_by_name) {
  Random random(90);
  OpCall q = query(2, 1, random), k = key(2, random);
  CHECK_EQ(q.refusal(), "");
  CHECK_EQ(k.refusal(), "");
  for (const std::int64_t pos : {std::int64_t{-1}, std::int64_t{1048576}}) {
    const std::string want =
        "pos[1] is " + std::to_string(pos) + "; needed 0 .. 1048575 (1048576 positions)";
    CHECK_EQ(q.set("pos", LOWLAT_I64, {2}, Counts{0, pos}).refusal(), want);
    CHECK_EQ(k.set("pos", LOWLAT_I64, {2}, Counts{0, pos}).refusal(), want);
  }
  std::vector<std::uint16_t> bad(512 * 2, 0);
  bad[130] = 0x7f80;
  bad.resize(256);
  CHECK(begins_with(query(2, 1, random).set("q", LOWLAT_BF16, {2, 1, 128}, bad).refusal(),
                    "q[1, 0, 2] is "));
  CHECK(begins_with(query(2, 1, random).remove("pos").refusal(), "pos "));
  bad.resize(128);
  bad[5] = 0xffff;
  CHECK(begins_with(key(2, random).set("norm", LOWLAT_BF16, {128}, bad).refusal(), "norm[5] is "));
}

TEST_CASE(selections_refuse_by_name) {
  const auto refusal = [](auto&& change) {
    OpCall call = counted(12, {12, 7}, 3);
    CHECK_EQ(call.refusal(), "");
    change(call);
    return call.refusal();
  };
  for (const std::int64_t k : {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1} << 40}) {
    CHECK(begins_with(refusal([&](OpCall& call) { call.set_number("k", k); }), "k is "));
  }
  for (const std::int64_t count : {13, -1}) {
    CHECK_EQ(refusal([&](OpCall& call) { call.set("count", LOWLAT_I64, {2}, Counts{0, count}); }),
             "count[1] is " + std::to_string(count) + "; needed 0 .. 12 (N = 12)");
  }
  CHECK(begins_with(refusal([](OpCall& call) {
                      call.set("weights", LOWLAT_F32, {2, 1},
                               std::vector<float>{0.0f, std::numeric_limits<float>::infinity()});
                    }),
                    "weights[1, 0] is "));
  CHECK(begins_with(refusal([](OpCall& call) {
                      std::vector<std::uint8_t> rows(12 * 68, 0);
                      rows[3 * 68 + 66] = 255;
                      call.set("ik", LOWLAT_U8, {12, 68}, rows);
                    }),
                    "ik[3, 66] is 255"));
  const auto with_blocks = [&](const Ids& ids, std::int64_t size) {
    return refusal([&](OpCall& call) {
      call.set("blocks", LOWLAT_I32, {2, 2}, ids).set_number("block", size);
    });
  };
  CHECK_EQ(with_blocks({0, 2, 1, -1}, 4), "");
  CHECK(begins_with(with_blocks({0, 3, 1, -1}, 4), "blocks[0, 1] is 3; needed -1 .. 2"));
  CHECK(begins_with(with_blocks({0, 2, 2, -1}, 4), "blocks[1, 0] is 2; needed -1 .. 1"));
  CHECK(begins_with(with_blocks({0, -2, 1, -1}, 4), "blocks[0, 1] is -2"));
  CHECK(begins_with(with_blocks({1, 0, 1, -1}, 4), "blocks[0, 1] is 0 after 1"));
  CHECK(begins_with(with_blocks({1, 1, 1, -1}, 4), "blocks[0, 1] is 1 after 1"));
  CHECK(begins_with(with_blocks({-1, 1, 1, -1}, 4), "blocks[0, 1] is 1 after -1"));
  CHECK(begins_with(with_blocks({0, 2, 1, -1}, 0), "block is 0"));
}

TEST_CASE(candidate_blocks_refuse_by_name) {
  Random random(91);
  OpCall call = blocks(2, 20, 3, random);
  CHECK_EQ(call.refusal(), "");
  CHECK(begins_with(call.set("count", LOWLAT_I64, {2}, Counts{0, 21}).refusal(), "count[1] is 21"));
  CHECK(begins_with(blocks(2, 20, 0, random).refusal(), "k is 0"));
  CHECK(begins_with(blocks(2, 20, 3, random).set_number("block", -8).refusal(), "block is -8"));
  std::vector<float> score(40, 0.0f);
  score[21] = std::numeric_limits<float>::quiet_NaN();
  CHECK(begins_with(blocks(2, 20, 3, random).set("score", LOWLAT_F32, {2, 20}, score).refusal(),
                    "score[1, 1] is "));
}

TEST_CASE(v4_queries_and_keys_are_within_their_bounds) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    Random random(150 + seed);
    const std::int64_t T = seed == 0 ? 48 : seed;
    const OpCall q = query_v4(T, seed % 4 + 1, random);
    CHECK_NEAR(rel_l2(e4m3_values(q.run<std::uint8_t>("scalar", "iq")),
                      e4m3_values(q.run<std::uint8_t>("reference", "iq"))),
               0.0, 1e-1);
    CHECK_NEAR(
        rel_l2(values_of(q.run<float>("scalar", "qs")), values_of(q.run<float>("reference", "qs"))),
        0.0, 1e-6);
    const OpCall k = key_v4(4 + 5 * seed, 16 * (seed + 1), random);
    const auto got = k.run<std::uint8_t>("scalar"), want = k.run<std::uint8_t>("reference");
    REQUIRE(got.size() == (4 + 5 * seed) / 4 * 132 && got.size() == want.size());
    CHECK_NEAR(rel_l2(unpacked_v4(got), unpacked_v4(want)), 0.0, 1e-1);
  }
  Random random(149);
  CHECK(key_v4(3, 16, random).run<std::uint8_t>("scalar").empty());
}

TEST_CASE(v4_rows_do_not_depend_on_their_neighbours) {
  Random random(148);
  const auto x = random.bf16(20 * 32);
  OpCall call = key_v4(20, 32, random);
  const auto whole = call.set("x", LOWLAT_BF16, {20, 32}, x).run<std::uint8_t>("scalar");
  const std::vector<std::uint16_t> begin(x.begin(), x.begin() + 9 * 32);
  const auto part = call.set("x", LOWLAT_BF16, {9, 32}, begin).run<std::uint8_t>("scalar");
  REQUIRE(part.size() == 2 * 132);
  CHECK(std::equal(part.begin(), part.end(), whole.begin()));
}

TEST_CASE(v4_selects_by_score_then_position) {
  // Scores by the first channel and the key's scale: codes 1, scales 0 1 2 3 4 0 1 ...
  std::vector<std::uint8_t> rows(12 * 132, 0), iq(128, 0);
  constexpr std::uint8_t kScales[5][2] = {
      {0, 0}, {0x80, 0x3f}, {0, 0x40}, {0x40, 0x40}, {0x80, 0x40}};
  for (int n = 0; n < 12; ++n) {
    rows[132 * n] = 0x38;
    rows[132 * n + 130] = kScales[n % 5][0], rows[132 * n + 131] = kScales[n % 5][1];
  }
  iq[0] = 0x38;
  OpCall call = operation("index_select", "v4");
  call.set("iq", LOWLAT_U8, {1, 1, 128}, iq)
      .set("ik", LOWLAT_U8, {12, 132}, rows)
      .set("weights", LOWLAT_F32, {1, 1}, std::vector<float>{0.5f})
      .set("count", LOWLAT_I64, {1}, Counts{12})
      .set_number("k", 5);
  for (const char* platform : {"scalar", "reference"}) {
    call.set("count", LOWLAT_I64, {1}, Counts{12});
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({2, 3, 4, 8, 9}));
    call.set("count", LOWLAT_I64, {1}, Counts{3});
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({0, 1, 2, -1, -1}));
    call.set("count", LOWLAT_I64, {1}, Counts{0});
    CHECK_EQ(words(call.run<std::int32_t>(platform)), words({-1, -1, -1, -1, -1}));
  }
}

TEST_CASE(v4_selections_agree_with_the_reference) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    Random random(170 + seed);
    const OpCall call = select_v4(seed % 4 + 1, seed % 8 + 1, 40 + 7 * seed, 16, random);
    CHECK_EQ(words(call.run<std::int32_t>("scalar")), words(call.run<std::int32_t>("reference")));
  }
}

TEST_CASE(v4_codes_of_a_query_select_as_the_query_does) {
  // The model's chain: index_query's scale goes into the weights.
  Random random(147);
  const OpCall q = query_v4(3, 4, random);
  std::vector<float> weights = random.f32(12);
  const auto scales = q.run<float>("scalar", "qs");
  for (int i = 0; i < 12; ++i) weights[i] *= scales[i];
  OpCall call = select_v4(3, 4, 50, 8, random);
  call.set("iq", LOWLAT_U8, {3, 4, 128}, q.run<std::uint8_t>("scalar", "iq"))
      .set("ik", LOWLAT_U8, {8, 132}, key_v4(35, 48, random).run<std::uint8_t>("scalar"))
      .set("weights", LOWLAT_F32, {3, 4}, weights)
      .set("count", LOWLAT_I64, {3}, Counts{8, 5, 0})
      .set_number("k", 4);
  CHECK_EQ(words(call.run<std::int32_t>("scalar")), words(call.run<std::int32_t>("reference")));
}

TEST_CASE(v4_index_refuses_by_name) {
  Random random(190);
  CHECK_EQ(query_v4(2, 1, random).refusal(), "");
  CHECK_EQ(query_v4(2, 1, random).set("pos", LOWLAT_I64, {2}, Counts{0, 1048576}).refusal(),
           "pos[1] is 1048576; needed 0 .. 1048575 (1048576 positions)");
  CHECK_EQ(key_v4(9, 8, random).refusal(), "");
  CHECK_EQ(key_v4(9, 8, random)
               .set("wkv", LOWLAT_BF16, {512, 8}, random.bf16(512 * 8))
               .set("wgate", LOWLAT_BF16, {512, 8}, random.bf16(512 * 8))
               .set("ape", LOWLAT_F32, {4, 512}, random.f32(4 * 512))
               .refusal(),
           "wkv has 512 rows; needed 256 at ratio 4");
  CHECK_EQ(key_v4(9, 8, random).set("ape", LOWLAT_F32, {3, 256}, random.f32(3 * 256)).refusal(),
           "ape has 3 rows; needed 4 at ratio 4");
  CHECK(begins_with(key_v4(9, 8, random)
                        .set("norm", LOWLAT_BF16, {128}, std::vector<std::uint16_t>(128, 0x7fc0))
                        .refusal(),
                    "norm[0] is nan"));
  const auto refusal = [&](auto&& change) {
    OpCall call = select_v4(2, 1, 6, 3, random);
    CHECK_EQ(call.refusal(), "");
    change(call);
    return call.refusal();
  };
  CHECK(
      begins_with(refusal([](OpCall& call) { call.set("blocks", LOWLAT_I32, {2, 1}, Ids{0, 0}); }),
                  "blocks is no input of index_select"));
  CHECK(begins_with(refusal([](OpCall& call) {
                      std::vector<std::uint8_t> iq(256, 0);
                      iq[130] = 0xff;
                      call.set("iq", LOWLAT_U8, {2, 1, 128}, iq);
                    }),
                    "iq[1, 0, 2] is nan"));
  CHECK_EQ(refusal([](OpCall& call) {
             std::vector<std::uint16_t> iq(256, 0);
             call.set("iq", LOWLAT_BF16, {2, 1, 128}, iq);
           }),
           "iq is bf16; needed u8 (e4m3)");
  const auto with_row_byte = [&](int at, std::uint8_t byte, std::uint8_t before) {
    return refusal([&](OpCall& call) {
      std::vector<std::uint8_t> rows(6 * 132, 0);
      rows[3 * 132 + at] = byte, rows[3 * 132 + at - 1] = before;
      call.set("ik", LOWLAT_U8, {6, 132}, rows);
    });
  };
  CHECK_EQ(with_row_byte(7, 0x7f, 0),
           "ik[3, 7] is 127, a code that is no number; needed a finite value");
  CHECK(begins_with(with_row_byte(131, 0x7f, 0x80), "ik[3, 128] begins a scale that is nan"));
  CHECK(begins_with(with_row_byte(131, 0xff, 0xc0), "ik[3, 128] begins a scale that is nan"));
  CHECK_EQ(with_row_byte(131, 0x7f, 0x7f), "");
  CHECK(begins_with(refusal([](OpCall& call) {
                      call.set("ik", LOWLAT_U8, {6, 68}, std::vector<std::uint8_t>(6 * 68));
                    }),
                    "ik has shape [6, 68]; needed [N,132]"));
}
