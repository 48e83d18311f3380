// fused/index_place.cuh: where index queries lie between the kernels of the index, rounding to four
// bits, and how many entries a row sees.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/front_quant.cuh"
#include "fused/index.hpp"
#include "stages/fp4.hpp"
#include "stages/index.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kIndexDim = shape::kIndexDim;
inline constexpr int kFp4IndexHeads = 32, kFp8IndexHeads = 64;

// Keys are the M side of the products and 32 heads the N side; lane 4 g + t of a warp has the 32
// channels of group t of keys g and g + 8, in eight steps of four channels. So a step's columns are
// cores [half of the four][head][group][two channels] of nvidia_sm90_products.cuh. e4m3 channels
// follow each other; eight e2m1 codes of a word expand to the pairs (0,4) (1,5) (2,6) (3,7).
inline constexpr int kIndexAlongHeads = 8 * 2 * 128;  // bytes from eight heads to the next eight
constexpr int index_query_place(int head, int channel, bool fp8 = false) {
  const int group = channel / 32, i = channel % 32;
  const int pair = fp8 ? i / 2 : i / 8 * 4 + i % 4;  // of the lane's sixteen
  const int element = fp8 ? i % 2 : i % 8 / 4;
  return head / 8 * (kIndexAlongHeads / 2) + pair * 64 + head % 8 * 8 + group * 2 + element;
}

// The ue8m0 code of the smallest power of two not below amax / 6, of a normal amax; its value and
// one over it.
LOWLAT_DEVICE std::uint32_t fp4_scale_code(float amax) { return stages::ue8m0_ceil(amax / 6.0f); }
LOWLAT_DEVICE PowerScale fp4_scale(std::uint32_t code) {
  return {plat::bits_float(code << 23), plat::bits_float((254u - code) << 23)};
}

// |v| <= 6 to the nearest e2m1 value, ties to the even code: steps of 0.5 below 2, of 1 below 4,
// of 2 above.
LOWLAT_DEVICE float fp4_round(float v) {
  const float size = plat::abs(v);
  const float per_step = size < 2.0f ? 2.0f : size < 4.0f ? 1.0f : 0.5f;
  const float step = size < 2.0f ? 0.5f : size < 4.0f ? 1.0f : 2.0f;
  return plat::min(plat::max(rintf(v * per_step) * step, -6.0f), 6.0f);
}
// The code of such a value; a zero keeps its sign.
LOWLAT_DEVICE std::uint32_t fp4_code(float rounded) {
  // 0, 0.5: bits of the exponent field are of no use; 1 .. 6 are exponent and first fraction bit.
  const std::uint32_t bits = plat::float_bits(rounded), sign = bits >> 31 << 3;
  const float size = plat::abs(rounded);
  if (size < 1.0f) return sign | (size > 0.0f ? 1u : 0u);
  return sign | (((bits & 0x7fff'ffffu) >> 22) - (127u << 1) + 2u);
}

// Entries that a row sees.
LOWLAT_DEVICE int index_count(const StepRows& rows, int ratio, int row) {
  const int slot = __ldg(rows.slots + row), position = __ldg(rows.positions + row);  // at once
  return slot < 0 ? 0 : (position + 1) / ratio;
}
// Of so many entries, those in published blocks: the newest block is always one of them.
LOWLAT_DEVICE int index_candidates(int count) {
  constexpr int kMost = kIndexMaxBlocks * kIndexBlock;
  const int missing = (kIndexBlock - count % kIndexBlock) % kIndexBlock;
  return count + missing <= kMost ? count : kMost - missing;
}

}  // namespace lowlat::nvidia::fused
