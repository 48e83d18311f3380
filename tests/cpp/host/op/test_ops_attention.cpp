// sparse_attention and compress as operations: scalar against reference by the declared bounds,
// rows that do not depend on their neighbours, and every refusal by name.
#include <algorithm>
#include <cmath>
#include <limits>

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
using Ids = std::vector<std::int32_t>;

struct AttentionCase {
  std::int64_t T, h, S, s, E, n;
};

Ids random_ids(Random& random, std::int64_t count, std::int64_t rows) {
  Ids ids(count);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(-1, rows - 1));
  return ids;
}

OpCall attention(const AttentionCase& c, Random& random) {
  OpCall call(op_named(lowlat::host::ops_attention(), "sparse_attention"));
  call.set("q", LOWLAT_BF16, {c.T, c.h, 512}, random.bf16(c.T * c.h * 512))
      .set("swa", LOWLAT_U8, {c.S, 584}, random.kv_rows(c.S))
      .set("swa_idx", LOWLAT_I32, {c.T, c.s}, random_ids(random, c.T * c.s, c.S))
      .set("extra", LOWLAT_U8, {c.E, 584}, random.kv_rows(c.E))
      .set("extra_idx", LOWLAT_I32, {c.T, c.n}, random_ids(random, c.T * c.n, c.E))
      .set("sink", LOWLAT_F32, {c.h}, random.f32(c.h));
  return call;
}

OpCall compressor(std::int64_t length, std::int64_t hidden, std::int64_t ratio, Random& random) {
  OpCall call(op_named(lowlat::host::ops_attention(), "compress"));
  const double scale = 1.0 / std::sqrt(static_cast<double>(hidden));
  call.set("x", LOWLAT_BF16, {length, hidden}, random.bf16(length * hidden))
      .set("wkv", LOWLAT_BF16, {512, hidden}, random.bf16(512 * hidden, scale))
      .set("norm", LOWLAT_BF16, {512}, random.bf16(512))
      .set_number("ratio", ratio);
  if (ratio == 2) call.set("wgate", LOWLAT_BF16, {512, hidden}, random.bf16(512 * hidden, scale));
  return call;
}

OpCall compressor_v4(std::int64_t length, std::int64_t hidden, std::int64_t ratio, Random& random) {
  OpCall call(op_named(lowlat::host::ops_attention(), "compress", "v4"), "v4");
  const double scale = 1.0 / std::sqrt(static_cast<double>(hidden));
  const std::int64_t width = ratio == 4 ? 1024 : 512;
  call.set("x", LOWLAT_BF16, {length, hidden}, random.bf16(length * hidden))
      .set("wkv", LOWLAT_BF16, {width, hidden}, random.bf16(width * hidden, scale))
      .set("wgate", LOWLAT_BF16, {width, hidden}, random.bf16(width * hidden, scale))
      .set("ape", LOWLAT_F32, {ratio, width}, random.f32(ratio * width))
      .set("norm", LOWLAT_BF16, {512}, random.bf16(512))
      .set_number("ratio", ratio);
  return call;
}

}  // namespace

TEST_CASE(attention_is_within_its_bound) {
  Random random(20);
  for (const AttentionCase& c :
       {AttentionCase{1, 1, 128, 128, 1, 0}, AttentionCase{6, 2, 140, 133, 60, 40},
        AttentionCase{48, 1, 150, 16, 90, 24}, AttentionCase{1, 8, 128, 128, 600, 512}}) {
    const OpCall call = attention(c, random);
    const auto got = call.run<std::uint16_t>("scalar");
    const auto want = call.run<std::uint16_t>("reference");
    REQUIRE(got.size() == static_cast<std::size_t>(c.T * c.h * 512));
    CHECK(rel_l2(values_of(got), values_of(want)) <= 5e-4);
  }
}

TEST_CASE(attention_takes_no_window_rows_at_all) {
  Random random(21);
  const auto o = attention({2, 1, 0, 4, 0, 0}, random).run<std::uint16_t>("scalar");
  CHECK(o == std::vector<std::uint16_t>(2 * 512, 0));
}

TEST_CASE(attention_refuses_by_name) {
  const AttentionCase shape{2, 2, 10, 4, 6, 3};
  const auto refusal = [&](auto&& change) {
    Random random(22);
    OpCall call = attention(shape, random);
    CHECK_EQ(call.refusal(), "");
    change(call);
    return call.refusal();
  };
  const auto ids = [&](const char* name, std::int64_t width, std::int32_t bad) {
    return refusal([&](OpCall& call) {
      Ids values(2 * width, 0);
      values[width + 1] = bad;
      call.set(name, LOWLAT_I32, {2, width}, values);
    });
  };
  CHECK_EQ(ids("swa_idx", 4, 10), "swa_idx[1, 1] is 10; needed -1 .. 9 (S = 10)");
  CHECK_EQ(ids("swa_idx", 4, -2), "swa_idx[1, 1] is -2; needed -1 .. 9 (S = 10)");
  CHECK_EQ(ids("extra_idx", 3, 6), "extra_idx[1, 1] is 6; needed -1 .. 5 (E = 6)");
  for (const std::uint16_t code : {0x7fc0, 0x7f80, 0xff80}) {
    CHECK(begins_with(refusal([&](OpCall& call) {
                        std::vector<std::uint16_t> q(2 * 2 * 512, 0);
                        q[700] = code;
                        call.set("q", LOWLAT_BF16, {2, 2, 512}, q);
                      }),
                      "q[0, 1, 188] is "));
  }
  for (const float sink : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    CHECK(begins_with(refusal([&](OpCall& call) {
                        call.set("sink", LOWLAT_F32, {2}, std::vector<float>{0.0f, sink});
                      }),
                      "sink[1] is "));
  }
  CHECK_EQ(refusal([&](OpCall& call) {
             const float none = -std::numeric_limits<float>::infinity();
             call.set("sink", LOWLAT_F32, {2}, std::vector<float>{none, none});
           }),
           "");
  // A NaN code, the NaN scale, and an infinity in the bf16 part; also where no index leads.
  struct Poison {
    int byte;
    std::uint8_t code;
  };
  for (const Poison& poison : {Poison{3, 0xff}, Poison{577, 255}, Poison{449, 0x7f}}) {
    CHECK(begins_with(refusal([&](OpCall& call) {
                        std::vector<std::uint8_t> rows(6 * 584, 0);
                        rows[5 * 584 + poison.byte] = poison.code;
                        if (poison.byte == 449) rows[5 * 584 + 448] = 0x80;
                        call.set("extra", LOWLAT_U8, {6, 584}, rows);
                      }),
                      "extra row 5 "));
  }
  CHECK(begins_with(refusal([](OpCall& call) { call.remove("sink"); }), "sink "));
}

TEST_CASE(compress_is_within_its_bound) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    Random random(30 + seed);
    const std::int64_t ratio = 1 + seed % 2, length = seed == 0 ? 1 : ratio * (seed + 1) + seed / 4;
    const OpCall call = compressor(length, 32 * (seed + 1), ratio, random);
    const auto got = call.run<float>("scalar"), want = call.run<float>("reference");
    REQUIRE(got.size() == static_cast<std::size_t>(length / ratio * 512));
    CHECK(rel_l2(values_of(got), values_of(want)) <= 4e-2);
  }
}

TEST_CASE(compress_of_half_a_pair_is_empty) {
  Random random(40);
  CHECK(compressor(1, 32, 2, random).run<float>("scalar").empty());
}

TEST_CASE(compressed_entries_do_not_depend_on_later_tokens) {
  Random random(41);
  OpCall call = compressor(9, 64, 2, random);
  const auto x = random.bf16(9 * 64);
  const auto whole = call.set("x", LOWLAT_BF16, {9, 64}, x).run<float>("scalar");
  const std::vector<std::uint16_t> begin(x.begin(), x.begin() + 4 * 64);
  const auto part = call.set("x", LOWLAT_BF16, {4, 64}, begin).run<float>("scalar");
  REQUIRE(part.size() == 2 * 512);
  CHECK(std::equal(part.begin(), part.end(), whole.begin()));
}

TEST_CASE(compress_refuses_by_name) {
  Random random(42);
  OpCall call = compressor(4, 32, 2, random);
  for (const std::int64_t ratio : {0, 3, 4, 128, -1}) {
    CHECK_EQ(call.set_number("ratio", ratio).refusal(),
             "ratio is " + std::to_string(ratio) + "; v41 has ratios 1 and 2 only");
  }
  CHECK(begins_with(call.set_number("ratio", 1).refusal(), "wgate is given"));
  CHECK(begins_with(call.set_number("ratio", 2).remove("wgate").refusal(), "wgate is missing"));
  CHECK_EQ(call.set_number("ratio", 1).refusal(), "");
  std::vector<std::uint16_t> x(4 * 32, 0);
  CHECK(begins_with(call.set("x", LOWLAT_BF16, {0, 32}, x).refusal(), "x has 0 rows"));
  x[33] = 0x7fc0;
  CHECK(begins_with(call.set("x", LOWLAT_BF16, {4, 32}, x).refusal(), "x[1, 1] is "));
}

TEST_CASE(attention_means_the_same_in_both_models) {
  Random random(77);
  const OpCall call = attention({3, 2, 40, 128, 30, 7}, random);
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(call.of("v4").run<std::uint16_t>(platform) == call.run<std::uint16_t>(platform));
  }
}

TEST_CASE(v4_compress_is_within_its_bound) {
  struct Case {
    std::int64_t length, hidden, ratio;
  };
  for (const Case& c :
       {Case{4, 32, 4}, Case{23, 96, 4}, Case{48, 64, 4}, Case{128, 32, 128}, Case{300, 16, 128}}) {
    Random random(60 + static_cast<std::uint32_t>(c.length));
    const OpCall call = compressor_v4(c.length, c.hidden, c.ratio, random);
    const auto got = call.run<float>("scalar"), want = call.run<float>("reference");
    REQUIRE(got.size() == static_cast<std::size_t>(c.length / c.ratio * 512));
    CHECK_NEAR(rel_l2(values_of(got), values_of(want)), 0.0, 4e-3);
    for (const float v : got) CHECK_EQ(static_cast<float>(lowlat::reference::round_bf16(v)), v);
  }
}

TEST_CASE(v4_compress_of_less_than_a_block_is_empty) {
  Random random(61);
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(compressor_v4(3, 32, 4, random).run<float>(platform).empty());
    CHECK(compressor_v4(127, 16, 128, random).run<float>(platform).empty());
  }
}

TEST_CASE(v4_compressed_entries_do_not_depend_on_later_tokens) {
  Random random(62);
  OpCall call = compressor_v4(15, 64, 4, random);
  const auto x = random.bf16(15 * 64);
  const auto whole = call.set("x", LOWLAT_BF16, {15, 64}, x).run<float>("scalar");
  const std::vector<std::uint16_t> begin(x.begin(), x.begin() + 8 * 64);
  const auto part = call.set("x", LOWLAT_BF16, {8, 64}, begin).run<float>("scalar");
  REQUIRE(part.size() == 2 * 512);
  CHECK(std::equal(part.begin(), part.end(), whole.begin()));
}

TEST_CASE(v4_compress_refuses_by_name) {
  Random random(63);
  OpCall call = compressor_v4(8, 32, 4, random);
  CHECK_EQ(call.refusal(), "");
  for (const std::int64_t ratio : {0, 1, 2, 8, -4}) {
    CHECK_EQ(call.set_number("ratio", ratio).refusal(),
             "ratio is " + std::to_string(ratio) + "; v4 has ratios 4 and 128 only");
  }
  CHECK_EQ(call.set_number("ratio", 128).refusal(), "wkv has 1024 rows; needed 512 at ratio 128");
  call.set_number("ratio", 4);
  CHECK_EQ(call.set("ape", LOWLAT_F32, {8, 1024}, random.f32(8 * 1024)).refusal(),
           "ape has 8 rows; needed 4 at ratio 4");
  CHECK(begins_with(call.set("ape", LOWLAT_F32, {4, 512}, random.f32(4 * 512)).refusal(),
                    "ape has shape [4, 512]"));
  CHECK(begins_with(call.remove("ape").refusal(), "ape is missing"));
  std::vector<float> ape(4 * 1024);
  ape[1030] = std::nanf("");
  CHECK(begins_with(call.set("ape", LOWLAT_F32, {4, 1024}, ape).refusal(), "ape[1, 6] is nan"));
  call = compressor_v4(8, 32, 4, random);
  CHECK(begins_with(call.remove("wgate").refusal(), "wgate is missing"));
  CHECK(begins_with(compressor_v4(8, 32, 4, random)
                        .set("wgate", LOWLAT_BF16, {512, 32}, random.bf16(512 * 32))
                        .refusal(),
                    "wgate has shape [512, 32]"));
  CHECK(begins_with(compressor_v4(8, 32, 4, random)
                        .set("x", LOWLAT_BF16, {0, 32}, std::vector<std::uint16_t>{})
                        .refusal(),
                    "x has 0 rows"));
}
