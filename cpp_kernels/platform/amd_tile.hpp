// platform/amd_tile.hpp: the tiles of platform/tile_types.hpp in the matrix unit, as bf16, with
// weights of 8 and 4 bits expanded on the way to it. Every factor is exact, so nothing is rounded
// but the unit's fp32 sums, whose order no manual states.
//
// gfx950 expands two codes an instruction, under their scale, and adds 32 products an instruction.
// gfx942 adds 16, reads e4m3fn through its own format, in which every code but two means half as
// much, and looks fp4 up in a table that has the scale in it.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "platform/amd.hpp includes this file"
#endif

#include <cstdint>

#include "platform/amd_types.hpp"

namespace lowlat::amd::plat {

using TileVector = std::uint32_t __attribute__((ext_vector_type(4)));

LOWLAT_DEVICE void tile_order() { __builtin_amdgcn_sched_barrier(0); }
// vmcnt(0) lgkmcnt(0). After a flat store, as of a result before, a compiler waits for everything:
// here it costs nothing that the first product would not wait for, in a loop it would.
LOWLAT_DEVICE void tile_arrived() { __builtin_amdgcn_s_waitcnt(0x0070); }
// What a kernel finds by pointers in memory has no address space to its compiler, which then takes
// flat loads; those are counted with LDS's, and a wait for one is a wait for all.
template <class T>
LOWLAT_DEVICE const __attribute__((address_space(1))) T* tile_global(const void* src) {
  return (const __attribute__((address_space(1))) T*)src;
}
// Of 16 bytes each.
template <int kWords>
LOWLAT_DEVICE TileCodes<kWords> tile_load(const void* src) {
  TileCodes<kWords> codes;
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    const TileVector words = tile_global<TileVector>(src)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) codes.words[4 * i + j] = words[j];
  }
  return codes;
}

LOWLAT_DEVICE std::uint32_t tile_scale(const std::uint8_t* src) {
  return *tile_global<std::uint8_t>(src);
}

LOWLAT_DEVICE TileRun tile_bf16(const TileCodes<16>& codes) {
  return __builtin_bit_cast(TileRun, codes);
}

// The upper halves of two words, the first one below.
LOWLAT_DEVICE std::uint32_t tile_upper_halves(std::uint32_t low, std::uint32_t high) {
  return __builtin_amdgcn_perm(high, low, 0x07060302u);
}
LOWLAT_DEVICE TileRun tile_values(const TileCodes<32>& values) {
  TileRun run;
#pragma unroll
  for (int i = 0; i < kTileRun / 2; ++i) {
    run.words[i] = tile_upper_halves(values.words[2 * i], values.words[2 * i + 1]);
  }
  return run;
}

LOWLAT_DEVICE TileRun tile_e4m3(const TileCodes<8>& codes, std::uint32_t scale) {
  TileRun run;
#if defined(__gfx950__)
  const float by = __builtin_bit_cast(float, scale << 23);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t word = codes.words[i];
    run.words[2 * i] = __builtin_bit_cast(
        std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, by, false));
    run.words[2 * i + 1] = __builtin_bit_cast(
        std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, by, true));
  }
#else
  using F32x2 = float __attribute__((ext_vector_type(2)));
  const float twice = __builtin_bit_cast(float, (scale + 1u) << 23);
  const auto pair = [&](F32x2 halved) {
    const float low = halved.x * twice, high = halved.y * twice;
    return tile_upper_halves(__builtin_bit_cast(std::uint32_t, low),
                             __builtin_bit_cast(std::uint32_t, high));
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // 0x80 is -0 where it was stored and NaN here: cleared. Bytes whose low seven bits are 0 keep
    // no carry into their top bit.
    constexpr std::uint32_t kLow = 0x7f7f'7f7fu;
    const std::uint32_t bits = codes.words[i];
    const auto word = static_cast<int>(bits & (((bits & kLow) + kLow) | kLow));
    run.words[2 * i] = pair(__builtin_amdgcn_cvt_pk_f32_fp8(word, false));
    run.words[2 * i + 1] = pair(__builtin_amdgcn_cvt_pk_f32_fp8(word, true));
  }
#endif
  return run;
}

LOWLAT_DEVICE TileRun tile_fp4(const TileCodes<4>& codes, std::uint32_t scale) {
  TileRun run;
#if defined(__gfx950__)
  const float by = __builtin_bit_cast(float, scale << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t word = codes.words[i];
    run.words[4 * i] =
        __builtin_bit_cast(std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(word, by, 0));
    run.words[4 * i + 1] =
        __builtin_bit_cast(std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(word, by, 1));
    run.words[4 * i + 2] =
        __builtin_bit_cast(std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(word, by, 2));
    run.words[4 * i + 3] =
        __builtin_bit_cast(std::uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(word, by, 3));
  }
#else
  // The bf16 of 0 .. 6 times the scale, by magnitude: two a word, then their low bytes and their
  // high ones apart, as v_perm_b32 looks bytes up. 0 has no exponent that a scale could move.
  using U16x2 = std::uint16_t __attribute__((ext_vector_type(2)));
  const auto moved = [&](std::uint32_t two) {
    const auto by = static_cast<std::uint16_t>((scale - 127u) << 7);
    return __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(U16x2, two) + by);
  };
  const std::uint32_t two[4] = {moved(0x3f00'0000u) & 0xffff'0000u, moved(0x3fc0'3f80u),
                                moved(0x4040'4000u), moved(0x40c0'4080u)};
  const std::uint32_t low[2] = {__builtin_amdgcn_perm(two[1], two[0], 0x06040200u),
                                __builtin_amdgcn_perm(two[3], two[2], 0x06040200u)};
  const std::uint32_t high[2] = {__builtin_amdgcn_perm(two[1], two[0], 0x07050301u),
                                 __builtin_amdgcn_perm(two[3], two[2], 0x07050301u)};
  // Bytes of two words in turn: of their lower halves, of their upper ones.
  constexpr std::uint32_t kInTurn[2] = {0x0501'0400u, 0x0703'0602u};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t even = codes.words[i] & 0x0f0f'0f0fu;
    const std::uint32_t odd = codes.words[i] >> 4 & 0x0f0f'0f0fu;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t four = __builtin_amdgcn_perm(odd, even, kInTurn[half]);
      const std::uint32_t places = four & 0x0707'0707u;
      const std::uint32_t upper =
          __builtin_amdgcn_perm(high[1], high[0], places) | (four & 0x0808'0808u) << 4;
      const std::uint32_t lower = __builtin_amdgcn_perm(low[1], low[0], places);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        run.words[4 * i + 2 * half + pair] = __builtin_amdgcn_perm(upper, lower, kInTurn[pair]);
      }
    }
  }
#endif
  return run;
}

LOWLAT_DEVICE void tile_multiply(TileSums& c, const TileRun& a, const TileRun& b) {
  using F32x4 = float __attribute__((ext_vector_type(4)));
  auto sums = __builtin_bit_cast(F32x4, c);
#if defined(__gfx950__)
  using Factor = __bf16 __attribute__((ext_vector_type(8)));
#else
  using Factor = short __attribute__((ext_vector_type(4)));
#endif
  struct Factors {
    Factor of[sizeof(TileRun) / sizeof(Factor)];
  };
  const auto rows = __builtin_bit_cast(Factors, a), columns = __builtin_bit_cast(Factors, b);
#pragma unroll
  for (unsigned i = 0; i < sizeof(TileRun) / sizeof(Factor); ++i) {
#if defined(__gfx950__)
    sums = __builtin_amdgcn_mfma_f32_16x16x32_bf16(rows.of[i], columns.of[i], sums, 0, 0, 0);
#else
    sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(rows.of[i], columns.of[i], sums, 0, 0, 0);
#endif
  }
  c = __builtin_bit_cast(TileSums, sums);
}

}  // namespace lowlat::amd::plat
