// rope, kv_pack and kv_unpack as operations: bounds and refusals.
#include <cmath>
#include <limits>

#include "check.hpp"
#include "host/op/declared.hpp"

namespace {

using lowlat::host::OpSpec;
using lowlat::testing::begins_with;
using lowlat::testing::check_declared;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;

OpSpec op(const char* name) { return op_named(lowlat::host::ops_rope_kv(), name); }

OpCall rope(Random& random, const std::vector<std::int64_t>& pos, std::int64_t heads,
            std::int64_t dim, std::int64_t yarn, std::int64_t inverse, double scale = 1.0) {
  const auto rows = static_cast<std::int64_t>(pos.size());
  OpCall call(op("rope"));
  call.set("x", LOWLAT_BF16, {rows, heads, dim}, random.bf16(rows * heads * dim, scale));
  call.set("pos", LOWLAT_I64, {rows}, pos);
  call.set_number("yarn", yarn).set_number("inverse", inverse);
  return call;
}

OpCall pack(const std::vector<float>& kv) {
  OpCall call(op("kv_pack"));
  call.set("kv", LOWLAT_F32, {static_cast<std::int64_t>(kv.size()) / 512, 512}, kv);
  return call;
}

OpCall unpack(const std::vector<std::uint8_t>& rows) {
  OpCall call(op("kv_unpack"));
  call.set("rows", LOWLAT_U8, {static_cast<std::int64_t>(rows.size()) / 584, 584}, rows);
  return call;
}

}  // namespace

TEST_CASE(rope_stays_within_the_declared_bound) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    std::vector<std::int64_t> pos(random.integer(1, 8));
    for (std::int64_t& p : pos) p = random.integer(0, 1048575);
    const OpCall call = rope(random, pos, random.integer(1, 3), random.integer(64, 200), seed & 1,
                             seed >> 1 & 1, std::exp(3.0 * random.normal()));
    check_declared<std::uint16_t>(op("rope"), call, "x");
  }
  Random random(100);
  for (const std::int64_t pos : {0, 1, 65535, 65536, 1048575}) {
    for (int form = 0; form < 4; ++form) {
      check_declared<std::uint16_t>(op("rope"),
                                    rope(random, {pos, pos}, 4, 512, form & 1, form >> 1), "x");
    }
  }
  check_declared<std::uint16_t>(op("rope"),
                                rope(random, std::vector<std::int64_t>(48, 77), 2, 128, 1, 0), "x");
}

TEST_CASE(kv_rows_are_bitwise) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    std::vector<float> kv = random.f32(512 * random.integer(1, 4), std::exp(3.0 * random.normal()));
    for (int i = 0; i < 40; ++i) {  // wide ranges inside a group
      kv[random.integer(0, 511)] *= static_cast<float>(std::exp(8.0 * random.normal()));
    }
    check_declared<std::uint8_t>(op("kv_pack"), pack(kv), "rows");
    check_declared<float>(op("kv_unpack"), unpack(pack(kv).run<std::uint8_t>("reference")), "kv");
  }
}

TEST_CASE(awkward_kv_rows_are_bitwise) {
  constexpr float kMax = 1e38f;  // kv_pack takes no more
  for (const float v : {0.0f, -0.0f, 1e-4f, 0x1p-149f, 448.0f, std::nextafter(448.0f, 500.0f), kMax,
                        -kMax, 0x1.8p-10f}) {
    const std::vector<float> kv(512, v);
    check_declared<std::uint8_t>(op("kv_pack"), pack(kv), "rows");
    check_declared<float>(op("kv_unpack"), unpack(pack(kv).run<std::uint8_t>("scalar")), "kv");
  }
  // Every code under the smallest, a middle and a large scale, and any padding byte.
  for (const int scale : {0, 127, 240}) {
    std::vector<std::uint8_t> row(584);
    for (int i = 0; i < 448; ++i) {
      row[i] = static_cast<std::uint8_t>((i & 0x7f) == 0x7f ? 0 : i & 0xff);
    }
    for (int i = 576; i < 584; ++i) row[i] = static_cast<std::uint8_t>(scale);
    check_declared<float>(op("kv_unpack"), unpack(row), "kv");
  }
}

TEST_CASE(refuses_by_name) {
  Random random(1);
  CHECK_EQ(rope(random, {1048576}, 1, 64, 0, 0).refusal(),
           "pos[0] is 1048576; needed 0 .. 1048575");
  CHECK_EQ(rope(random, {0, -1}, 1, 64, 0, 0).refusal(), "pos[1] is -1; needed 0 .. 1048575");
  CHECK_EQ(rope(random, {0}, 1, 64, 2, 0).refusal(), "yarn is 2; needed 0 .. 1");
  CHECK_EQ(rope(random, {0}, 1, 64, 0, -1).refusal(), "inverse is -1; needed 0 .. 1");
  CHECK_EQ(rope(random, {0}, 1, 63, 0, 0).refusal(), "D is 63; needed 64 or more");
  std::vector<float> kv(512);
  kv[5] = std::numeric_limits<float>::infinity();
  CHECK_EQ(pack(kv).refusal(),
           "kv[0, 5] is infinite; needed a finite value of magnitude 1e+38 or less");
  OpCall narrow(op("kv_pack"));
  narrow.set("kv", LOWLAT_F32, {1, 511}, std::vector<float>(511));
  CHECK_EQ(narrow.refusal(),
           "kv has shape [1, 511]; needed [T,512] with T = 1 (kv), that is [1, 512]");
  std::vector<std::uint8_t> rows(1168, 0);
  rows[584 + 3] = 0xff;
  CHECK(begins_with(unpack(rows).refusal(), "rows[1, 3] is 255, a code of nan"));
  rows[584 + 3] = 0x7e;
  rows[584 + 576] = 247;
  CHECK(begins_with(unpack(rows).refusal(), "rows[1, 3] is 126, with its scale beyond fp32"));
  rows[584 + 576] = 255;
  CHECK(begins_with(unpack(rows).refusal(), "rows[1, 576] is 255, a scale of nan"));
  rows[584 + 576] = 127;
  CHECK_EQ(unpack(rows).refusal(), "");
  rows[449] = 0x7f;
  rows[448] = 0x80;
  CHECK(begins_with(unpack(rows).refusal(), "rows[0, 449] is 127, of a bf16 that is nan"));
}

TEST_CASE(both_models_mean_the_same) {
  Random random(11);
  const OpCall turned = rope(random, {0, 65535, 1048575}, 2, 128, 1, 0);
  const OpCall packed = pack(random.f32(512 * 3));
  const OpCall unpacked = unpack(packed.run<std::uint8_t>("reference"));
  for (const char* platform : {"scalar", "reference"}) {
    CHECK(turned.of("v4").run<std::uint16_t>(platform) == turned.run<std::uint16_t>(platform));
    CHECK(packed.of("v4").run<std::uint8_t>(platform) == packed.run<std::uint8_t>(platform));
    CHECK(unpacked.of("v4").run<float>(platform) == unpacked.run<float>(platform));
  }
}
