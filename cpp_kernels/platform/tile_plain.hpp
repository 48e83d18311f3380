// platform/tile_plain.hpp: tiles without a matrix unit, for the platforms that have none: what the
// unit's instructions do, value by value. Products are exact; 32 of them and the sum so far are
// added in double precision and rounded once.
//
// Include it after the platform's arithmetic and shuffles. tile_multiply() is for warps of 64.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "a platform includes this file"
#endif

#include <cstdint>

#include "platform/tile_types.hpp"

namespace lowlat::LOWLAT_PLATFORM::plat {

LOWLAT_DEVICE void tile_order() {}
LOWLAT_DEVICE void tile_arrived() {}
template <int kWords>
LOWLAT_DEVICE TileCodes<kWords> tile_load(const void* src) {
  return *static_cast<const TileCodes<kWords>*>(src);
}
LOWLAT_DEVICE std::uint32_t tile_scale(const std::uint8_t* src) { return *src; }
LOWLAT_DEVICE TileRun tile_bf16(const TileCodes<16>& codes) {
  TileRun run;
  for (int i = 0; i < kTileRun / 2; ++i) run.words[i] = codes.words[i];
  return run;
}
LOWLAT_DEVICE TileRun tile_values(const TileCodes<32>& values) {
  TileRun run;
  for (int i = 0; i < kTileRun / 2; ++i) {
    run.words[i] = values.words[2 * i] >> 16 | (values.words[2 * i + 1] & 0xffff'0000u);
  }
  return run;
}

// The upper half of magnitude * 2^(scale - 127), which has at most eight bits, under a sign.
LOWLAT_DEVICE std::uint32_t tile_code(float magnitude, bool negative, std::uint32_t scale) {
  const std::uint32_t bits = float_bits(magnitude * bits_float(scale << 23));
  return bits >> 16 | (negative ? 0x8000u : 0u);
}
LOWLAT_DEVICE TileRun tile_e4m3(const TileCodes<8>& codes, std::uint32_t scale) {
  TileRun run = {};
  for (int i = 0; i < kTileRun; ++i) {
    const std::uint32_t code = codes.words[i / 4] >> 8 * (i % 4) & 0xffu;
    const std::uint32_t exponent = code >> 3 & 15u, mantissa = code & 7u;
    // The field's 1 is 2^-6, and so is its 0, without the leading bit.
    const float unit = bits_float((exponent == 0u ? 118u : 117u + exponent) << 23);
    float magnitude = static_cast<float>(exponent == 0u ? mantissa : mantissa + 8u) * unit;
    if ((code & 0x7fu) == 0x7fu) magnitude = bits_float(0x7fc0'0000u);
    run.words[i / 2] |= tile_code(magnitude, code >= 0x80u, scale) << 16 * (i % 2);
  }
  return run;
}
LOWLAT_DEVICE TileRun tile_fp4(const TileCodes<4>& codes, std::uint32_t scale) {
  TileRun run = {};
  for (int i = 0; i < kTileRun; ++i) {
    const std::uint32_t code = codes.words[i / 8] >> 4 * (i % 8) & 15u, magnitude = code & 7u;
    // In halves: 0, 1, 2, 3, 4, 6, 8, 12.
    const std::uint32_t halves =
        magnitude < 2u ? magnitude : (2u + (magnitude & 1u)) << (magnitude / 2u - 1u);
    run.words[i / 2] |= tile_code(0.5f * static_cast<float>(halves), code >= 8u, scale)
                        << 16 * (i % 2);
  }
  return run;
}

LOWLAT_DEVICE void tile_multiply(TileSums& c, const TileRun& a, const TileRun& b) {
  const int lane = thread_idx() % kWarpLanes;
  const auto value = [](std::uint32_t word, int half) {
    return static_cast<double>(bits_float(half == 0 ? word << 16 : word & 0xffff'0000u));
  };
  constexpr int kWords = 4;  // a lane's part of 32 products
  for (int first = 0; first < kTileRun / 2; first += kWords) {
    double sums[TileSums::kNum];
    for (int i = 0; i < TileSums::kNum; ++i) sums[i] = c.sums[i];
    for (int part = 0; part < kTileParts; ++part) {
      for (int word = first; word < first + kWords; ++word) {
        const std::uint32_t column =
            warp_shuffle(b.words[word], kTileSide * part + lane % kTileSide);
        for (int i = 0; i < TileSums::kNum; ++i) {
          const int row_idx = TileSums::kNum * (lane / kTileSide) + i;
          const std::uint32_t row = warp_shuffle(a.words[word], kTileSide * part + row_idx);
          for (int half = 0; half < 2; ++half) sums[i] += value(row, half) * value(column, half);
        }
      }
    }
    for (int i = 0; i < TileSums::kNum; ++i) c.sums[i] = static_cast<float>(sums[i]);
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::plat
