// Stored rows: bytes as the reference's, addresses in flat and paged pools.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/kv.hpp"
#include "stages/kv.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using Bytes = std::vector<std::uint8_t>;
using lowlat::testing::Random;

}  // namespace

TEST_CASE(flat_rows_follow_each_other) {
  std::uint8_t base[1];
  const auto row = stages::KvFlat<std::uint8_t>{base}.row(3);
  CHECK_EQ(row.data - base, 3 * 584);
  CHECK_EQ(row.scales - base, 3 * 584 + 576);
  const auto key = stages::IndexFlat<std::uint8_t>{base}.row(3);
  CHECK_EQ(key.data - base, 3 * 68);
  CHECK_EQ(key.scales - base, 3 * 68 + 64);
  const auto fp8 = stages::IndexFlat<std::uint8_t, stages::kIndexFp8DataBytes>{base}.row(3);
  CHECK_EQ(fp8.data - base, 3 * 132);
  CHECK_EQ(fp8.scales - base, 3 * 132 + 128);
}

TEST_CASE(pages_hold_data_rows_then_scale_rows) {
  CHECK_EQ(stages::kv_page_bytes(256), 149760);
  CHECK_EQ(stages::kv_page_bytes(64), 37440);
  CHECK_EQ(stages::kv_page_bytes(2), 1728);
  std::uint8_t base[1];
  const stages::KvPaged<std::uint8_t> pool{base, 256, stages::kv_page_bytes(256)};
  CHECK_EQ(pool.row(0).data - base, 0);
  CHECK_EQ(pool.row(0).scales - base, 256 * 576);
  CHECK_EQ(pool.row(2 * 256 + 5).data - base, 2 * 149760 + 5 * 576);
  CHECK_EQ(pool.row(2 * 256 + 5).scales - base, 2 * 149760 + 256 * 576 + 5 * 8);
  // Far slots need 64 bits: 2^31 slots are more than 2^40 bytes.
  const std::int64_t slot = std::int64_t{1} << 31;
  CHECK_EQ(pool.row(slot).data - base, slot / 256 * 149760);
  const stages::IndexPaged<std::uint8_t> index{base, stages::kIndexPageBytes};
  CHECK_EQ(index.row(64 + 3).data - base, 4352 + 3 * 64);
  CHECK_EQ(index.row(64 + 3).scales - base, 4352 + 64 * 64 + 3 * 4);
  const stages::IndexPaged<std::uint8_t, stages::kIndexFp8DataBytes> fp8{
      base, stages::kIndexFp8PageBytes};
  CHECK_EQ(fp8.row(64 + 3).data - base, 8448 + 3 * 128);
  CHECK_EQ(fp8.row(64 + 3).scales - base, 8448 + 8192 + 3 * 4);
}

TEST_CASE(split_index_pages_have_codes_by_group_and_scales_apart) {
  std::vector<std::uint8_t> codes(3 * 4096), scales(3 * 256);
  const stages::IndexPaged<std::uint8_t> pool{codes.data(), stages::kIndexPageBytes, scales.data()};
  for (int slot = 0; slot < 3 * 64; ++slot) {
    const auto row = pool.row(slot);
    const int page = slot / 64, i = slot % 64;
    for (int group = 0; group < 4; ++group) {
      CHECK_EQ(row.group(group) - codes.data(), page * 4096 + (group * 64 + i) * 16);
      CHECK_EQ(&row.scale(group) - scales.data(), page * 256 + group * 64 + i % 16 * 4 + i / 16);
      for (int byte = 0; byte < 16; ++byte) ++row.group(group)[byte];
      ++row.scale(group);
    }
  }
  // Every byte belongs to one row.
  for (const auto& bytes : {codes, scales}) {
    for (const std::uint8_t touched : bytes) CHECK_EQ(touched, 1);
  }
}

TEST_CASE(no_two_rows_of_a_page_overlap) {
  for (const int slots : {1, 2, 32, 64, 128, 256}) {
    Bytes memory(stages::kv_page_bytes(slots) * 2);
    const stages::KvPaged<std::uint8_t> pool{memory.data(), slots, stages::kv_page_bytes(slots)};
    for (int slot = 0; slot < 2 * slots; ++slot) {
      const auto row = pool.row(slot);
      for (int i = 0; i < 576; ++i) ++row.data[i];
      for (int i = 0; i < 8; ++i) ++row.scales[i];
    }
    for (const std::uint8_t touched : memory) CHECK(touched <= 1);
  }
}

TEST_CASE(bytes_are_the_references_and_padding_is_left) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    std::vector<float> kv = random.f32(512, std::exp(4.0 * random.normal()));
    for (int i = 0; i < 50; ++i) {
      kv[random.integer(0, 511)] *= static_cast<float>(std::exp(8.0 * random.normal()));
    }
    kv[0] = -0.0f;
    kv[500] = 0x1p-149f;
    Bytes want(584), got(584, 0xa5);
    reference::kv_pack(want.data(), kv.data(), 1);
    stages::KvPack<Block>::run(stages::KvFlat<std::uint8_t>{got.data()}.row(0), kv.data());
    CHECK_EQ(got[583], 0xa5);
    got[583] = 0;
    CHECK(got == want);
    std::vector<float> back(512), same(512);
    reference::kv_unpack(back.data(), want.data(), 1);
    const stages::KvFlat<const std::uint8_t> rows{want.data()};
    stages::KvUnpack<Block>::run(same.data(), rows.row(0));
    CHECK(same == back);
  }
}

TEST_CASE(group_scales_by_hand) {
  std::vector<float> kv(512);
  kv[0] = 448.0f;
  kv[64] = -448.5f;
  kv[128] = 224.0f;
  Bytes row(584);
  stages::KvPack<Block>::run(stages::KvFlat<std::uint8_t>{row.data()}.row(0), kv.data());
  CHECK(row[576] == 127 && row[577] == 128 && row[578] == 126 && row[579] == 105);
  CHECK(row[0] == 0x7e && row[64] == 0xf6 && row[128] == 0x7e);
}
