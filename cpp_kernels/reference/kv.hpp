// reference/kv: what a stored key-value row of 584 bytes means: 448 e4m3 codes, 64 bf16 (low byte
// first), 7 ue8m0 scales of 64 codes each, one byte of padding.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// kv f32 [rows, 512] -> u8 [rows, 584]; padding 0. Scale of a group: 2^ceil(log2(max(1e-4, amax) /
// 448)).
void kv_pack(std::uint8_t* out, const float* kv, std::int64_t rows);
// u8 [rows, 584] -> f32 [rows, 512], exact; values beyond fp32 are not in rows that kv_pack makes.
void kv_unpack(float* kv, const std::uint8_t* in, std::int64_t rows);

}  // namespace lowlat::reference
