// platform/amd_mfma.hpp: C[16, 16] += A[16, k] B[16, k]^T by one wave, in the matrix unit, of codes
// on both sides: e4m3fn, or fp4 with a ue8m0 scale for every 32. Sums are fp32, in the unit's own
// order, so what uses them is declared with a bound. The schedule's products have bf16 values on
// one side and are platform/amd_tile.hpp's (docs/adr/0007-matrix-unit-on-amd.md says why).
//
// A and B are row-major and anywhere in memory that has 16-byte rows. Lane l takes row l % 16 of
// both and, of every stretch of the unit's depth, the part l / 16; which value of the stretch is
// in which lane does not matter as long as A and B agree, but a scale belongs to the 32 values of
// its own lane. Which lane holds which element of C is the unit's layout, see row() and col().
//
// gfx950 has twice the depth, reads e4m3fn as it is stored and knows fp4. gfx942 has neither: its
// fp8 is another format, in which every code but two means half as much, and fp4 is expanded.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/amd.hpp first"
#endif

#include <cstdint>

namespace lowlat::amd::mfma {

using F32x4 = float __attribute__((ext_vector_type(4)));
using I16x4 = short __attribute__((ext_vector_type(4)));
using U32x4 = std::uint32_t __attribute__((ext_vector_type(4)));
using I32x8 = int __attribute__((ext_vector_type(8)));

LOWLAT_DEVICE int lane() { return plat::thread_idx() % plat::kWarpLanes; }

// The accumulators of one lane.
struct Tile {
  F32x4 sums = {0.0f, 0.0f, 0.0f, 0.0f};

  LOWLAT_DEVICE static int row(int i) { return 4 * (lane() / 16) + i; }
  LOWLAT_DEVICE static int col() { return lane() % 16; }
};

// Eight e4m3fn codes as the unit reads them.
LOWLAT_DEVICE std::int64_t fp8_operand(const std::uint8_t* codes) {
  const auto bits = *reinterpret_cast<const std::uint64_t*>(codes);
#if defined(__gfx950__)
  return static_cast<std::int64_t>(bits);
#else
  // 0x80 is -0 where it was stored and NaN to this unit: cleared. Bytes whose low seven bits are 0
  // keep no carry into their top bit.
  constexpr std::uint64_t kLow = 0x7f7f'7f7f'7f7f'7f7fu;
  const std::uint64_t has_magnitude = (bits & kLow) + kLow;
  return static_cast<std::int64_t>(bits & (has_magnitude | kLow));
#endif
}

// Codes e4m3fn without scales; k is a multiple of 32. No code is NaN, which
// gfx942 would take for 480.
LOWLAT_DEVICE void multiply_fp8(Tile& tile, const std::uint8_t* a, std::int64_t a_stride,
                                const std::uint8_t* b, std::int64_t b_stride, int k) {
  const std::uint8_t* a_row = a + lane() % 16 * a_stride;
  const std::uint8_t* b_row = b + lane() % 16 * b_stride;
#if defined(__gfx950__)
  constexpr float kHalves = 1.0f;
#else
  constexpr float kHalves = 4.0f;  // both factors were halved
#endif
  F32x4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 8 * (lane() / 16); first < k; first += 32) {
    sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(fp8_operand(a_row + first),
                                                      fp8_operand(b_row + first), sums, 0, 0, 0);
  }
  tile.sums += sums * kHalves;
}

// The bf16 of an fp4 code times 2^(scale - 127), exact where that is a normal number.
LOWLAT_DEVICE std::uint16_t fp4_to_bf16(std::uint32_t code, std::uint32_t scale) {
  const std::uint32_t magnitude = code & 7u;
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6: above 0.5 a bit of mantissa below two of exponent.
  const std::uint32_t exponent = magnitude < 2u ? 126u : 126u + (magnitude >> 1);
  const std::uint32_t mantissa = magnitude < 2u ? 0u : (magnitude & 1u) << 6;
  const std::uint32_t bits = (exponent + scale - 127u) << 7 | mantissa;
  return static_cast<std::uint16_t>((code & 8u) << 12 | (magnitude == 0u ? 0u : bits));
}

// Codes fp4, two a byte (the even k in the low nibble), and a ue8m0 scale for every 32 of a row,
// from 2 to 252; k is a multiple of 128, strides of codes and of scales in bytes.
LOWLAT_DEVICE void multiply_fp4(Tile& tile, const std::uint8_t* a, std::int64_t a_stride,
                                const std::uint8_t* a_scales, std::int64_t a_scale_stride,
                                const std::uint8_t* b, std::int64_t b_stride,
                                const std::uint8_t* b_scales, std::int64_t b_scale_stride, int k) {
  const int row = lane() % 16, part = lane() / 16;
  a += row * a_stride;
  b += row * b_stride;
  a_scales += row * a_scale_stride;
  b_scales += row * b_scale_stride;
#if defined(__gfx950__)
  constexpr int kFp4 = 4;  // of the instruction's formats
  for (int group = part; group < k / 32; group += 4) {
    const auto a_codes = *reinterpret_cast<const U32x4*>(a + 16 * group);
    const auto b_codes = *reinterpret_cast<const U32x4*>(b + 16 * group);
    I32x8 a_operand = {}, b_operand = {};
    for (int i = 0; i < 4; ++i) {
      a_operand[i] = static_cast<int>(a_codes[i]);
      b_operand[i] = static_cast<int>(b_codes[i]);
    }
    tile.sums = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        a_operand, b_operand, tile.sums, kFp4, kFp4, 0, a_scales[group], 0, b_scales[group]);
  }
#else
  for (int first = 4 * part; first < k; first += 16) {
    I16x4 a_operand, b_operand;
    const std::uint32_t a_codes = *reinterpret_cast<const std::uint16_t*>(a + first / 2);
    const std::uint32_t b_codes = *reinterpret_cast<const std::uint16_t*>(b + first / 2);
    for (int i = 0; i < 4; ++i) {
      a_operand[i] = static_cast<short>(fp4_to_bf16(a_codes >> 4 * i & 15u, a_scales[first / 32]));
      b_operand[i] = static_cast<short>(fp4_to_bf16(b_codes >> 4 * i & 15u, b_scales[first / 32]));
    }
    tile.sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a_operand, b_operand, tile.sums, 0, 0, 0);
  }
#endif
}

}  // namespace lowlat::amd::mfma
