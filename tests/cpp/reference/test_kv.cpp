// Stored key-value rows in double precision: scales, codes and bytes worked out by hand.
#include "reference/kv.hpp"

#include <vector>

#include "check.hpp"

namespace reference = lowlat::reference;

TEST_CASE(packs_scales_codes_and_bytes) {
  std::vector<float> kv(512);
  kv[64] = 448.0f;           // group 1: scale 1
  kv[65] = -1.0625f;         // tie of 1 and 1.125: to even
  kv[128] = 448.5f;          // group 2: scale 2
  kv[192] = 1e-4f;           // group 3: the least scale, 2^-22
  kv[448] = 1.0f + 0x1p-8f;  // a tie of bf16
  kv[449] = -3.140625f;
  std::vector<std::uint8_t> row(584, 9);
  reference::kv_pack(row.data(), kv.data(), 1);
  CHECK_EQ(row[576], 105);
  CHECK_EQ(row[577], 127);
  CHECK_EQ(row[578], 128);
  CHECK_EQ(row[579], 105);
  CHECK_EQ(row[583], 0);
  CHECK_EQ(row[64], 0x7e);
  CHECK_EQ(row[65], 0xb8);
  CHECK_EQ(row[128], 0x76);  // 224.25 -> 224
  CHECK_EQ(row[192], 0x7d);  // 1e-4 * 2^22 = 419.43, between 416 and 448
  CHECK_EQ(row[448], 0x80);
  CHECK_EQ(row[449], 0x3f);
  CHECK_EQ(row[450], 0x49);
  CHECK_EQ(row[451], 0xc0);
}

TEST_CASE(unpacks_what_is_stored) {
  std::vector<std::uint8_t> row(2 * 584);
  std::uint8_t* second = &row[584];
  second[0] = 0xb9;    // -1.125
  second[576] = 130;   // * 8
  second[447] = 0x01;  // 2^-9
  second[582] = 117;   // * 2^-10
  second[510] = 0x80;  // bf16 1 at element 479
  second[511] = 0x3f;
  std::vector<float> kv(1024, 5.0f);
  reference::kv_unpack(kv.data(), row.data(), 2);
  CHECK_EQ(kv[0], 0.0f);
  CHECK_EQ(kv[512], -9.0f);
  CHECK_EQ(kv[512 + 447], 0x1p-19f);
  CHECK_EQ(kv[512 + 479], 1.0f);
  CHECK_EQ(kv[512 + 480], 0.0f);
}
