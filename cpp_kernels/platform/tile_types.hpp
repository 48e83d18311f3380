// platform/tile_types.hpp: what a warp's matrix product is made of, the same on every platform.
//
// A tile is C[16, 16] += A[16, 128] B[16, 128]^T by one warp of 64 lanes, bf16 values, fp32 sums.
// Lane l holds of both factors row l % 16 and there the 32 values that l / 16 numbers; which of the
// 128 those are does not matter as long as A and B agree.
//
// Platforms include this file; platform/contract.hpp says what the functions do.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "a platform includes this file"
#endif

#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::plat {

inline constexpr int kTileSide = 16;                      // rows of either factor
inline constexpr int kTileRun = 32;                       // values of K that a lane holds
inline constexpr int kTileParts = 4;                      // lanes that share a row
inline constexpr int kTileDepth = kTileParts * kTileRun;  // values of K

// As they are stored: 32 values of 4, 8, 16 or 32 bits, the first in the lowest bits.
template <int kWords>
struct TileCodes {
  std::uint32_t words[kWords];
};
// As a product takes them: bf16, the even one in a word's low half.
struct TileRun {
  std::uint32_t words[kTileRun / 2];
};
// A lane's sums: C[4 (l / 16) + i, l % 16].
struct TileSums {
  static constexpr int kNum = 4;
  float sums[kNum] = {};
};

}  // namespace lowlat::LOWLAT_PLATFORM::plat
