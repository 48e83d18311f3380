// index_query, index_key, index_select and candidate_blocks as operations: scalar against reference
// by the declared bounds, and every refusal by name.
#include <limits>
#include <string>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "random_values.hpp"
#include "reference/fp4.hpp"

namespace {

using lowlat::testing::begins_with;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
using lowlat::testing::rel_l2;
using lowlat::testing::values_of;
using Ids = std::vector<std::int32_t>;
using Counts = std::vector<std::int64_t>;

OpCall operation(const char* name) { return OpCall(op_named(lowlat::host::ops_index(), name)); }

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
