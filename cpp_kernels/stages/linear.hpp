// stages/linear.hpp: y = x W^T for few rows: weights bf16, or e4m3 with a scale a block.
//
// Activations come as fp32 rows: a bf16 row expanded (expand_bf16), or what a block-fp8 linear sees
// of it (quantize_row). Results go, in fp32 and unrounded, to a sink, so that a caller may round,
// add, keep or publish them. A result depends on its own activation row and weight row alone, in
// one fixed order, so it is the same whatever rows and ranges are asked for together. The order is
// dot()'s, whoever calls: one thread, a warp or a block; but where the platform multiplies tiles, a
// block's is that of stages/tile.hpp.
//
// The block calls every function here; a launch or a loop hands out ranges of weight rows. No sync
// at the end.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>
#include <type_traits>

#include "stages/format.hpp"
#include "stages/sum.hpp"
#include "stages/tile.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Scale of a group of activations whose largest magnitude is amax: the smallest power of two with
// amax / scale <= 448, and never below that of 1e-10.
LOWLAT_DEVICE float activation_scale(float amax) {
  return from_ue8m0(ue8m0_ceil(plat::max(amax, 1e-10f) / kE4m3Max));
}

// out[i] = code * scale of each x[i], codes e4m3 and one scale a `group` of consecutive values: the
// dynamic activation quantisation of a block-fp8 linear. Both factors are exact, so nothing else is
// rounded. n is a multiple of group, a power of two.
template <class Block = OneThread>
LOWLAT_DEVICE void quantize_row(float* out, const std::uint16_t* x, int n, int group) {
  for_groups<Block>(
      n / group, group, 0.0f, [&](int g, int i) { return from_bf16(x[g * group + i]); },
      [&](int g, float amax, int begin, int step) {
        const float scale = activation_scale(amax);
        const float inverse = 1.0f / scale;  // exact: a power of two
        for (int i = g * group + begin; i < (g + 1) * group; i += step) {
          out[i] = from_e4m3(to_e4m3(from_bf16(x[i]) * inverse)) * scale;
        }
      });
}

// Block scales [N / block, K / block], row-major with `stride` elements a row of blocks.
struct ScaleF32 {
  const float* values;
  std::int64_t stride;
  LOWLAT_DEVICE float operator()(int block_row, int block_col) const {
    return values[block_row * stride + block_col];
  }
};
struct ScaleUe8m0 {
  const std::uint8_t* codes;
  std::int64_t stride;
  LOWLAT_DEVICE std::uint32_t tile_scale(int block_row, int block_col) const {
    return plat::tile_scale(codes + block_row * stride + block_col);
  }
  LOWLAT_DEVICE float operator()(int block_row, int block_col) const {
    return from_ue8m0(codes[block_row * stride + block_col]);
  }
};

// Sources of weight rows for linear(): expand(out, row_idx, k) writes a row as fp32 [k], and
// value(row_idx, i) is its element i; the two agree. Those of stages/tile.hpp take rows that begin
// at 16 bytes, and a power of two of 2^-117 .. 2^118 as a scale.
struct Bf16Weights {
  const std::uint16_t* codes;  // [N, K], `stride` elements a row
  std::int64_t stride;
  LOWLAT_DEVICE void expand(float* out, int row_idx, int k) const {
    expand_bf16(out, codes + row_idx * stride, k);
  }
  LOWLAT_DEVICE float value(int row_idx, int i) const {
    return from_bf16(codes[row_idx * stride + i]);
  }
  LOWLAT_DEVICE plat::TileCodes<16> tile_codes(int row_idx, int run) const {
    return plat::tile_load<16>(codes + row_idx * stride + plat::kTileRun * run);
  }
  LOWLAT_DEVICE static plat::TileRun tile_run(const plat::TileCodes<16>& run) {
    return plat::tile_bf16(run);
  }
};
template <class Scale>
struct E4m3Weights {
  const std::uint8_t* codes;  // [N, K], `stride` elements a row
  std::int64_t stride;
  Scale scale;
  int block;  // k is a multiple of it
  LOWLAT_DEVICE void expand(float* out, int row_idx, int k) const {
    const std::uint8_t* row = codes + row_idx * stride;
    for (int begin = 0; begin < k; begin += block) {
      expand_e4m3(out + begin, row + begin, scale(row_idx / block, begin / block), block);
    }
  }
  LOWLAT_DEVICE float value(int row_idx, int i) const {
    return kE4m3Values.value[codes[row_idx * stride + i]] * scale(row_idx / block, i / block);
  }
  // A block is a power of two, 32 values or more: no division in a loop.
  LOWLAT_DEVICE TileWeights<8> tile_codes(int row_idx, int run) const
    requires std::is_same_v<Scale, ScaleUe8m0>
  {
    const auto bits = [](int power) {
      return plat::popcount(static_cast<std::uint64_t>(power - 1));
    };
    return {plat::tile_load<8>(codes + row_idx * stride + plat::kTileRun * run),
            scale.tile_scale(row_idx >> bits(block), run >> bits(block / plat::kTileRun))};
  }
  LOWLAT_DEVICE static plat::TileRun tile_run(const TileWeights<8>& run) {
    return plat::tile_e4m3(run.codes, run.scale);
  }
};

// How many consecutive weight rows of one activation row a sink gets from one thread, in ascending
// order: a sink that packs values says so by kRowsTogether.
template <class Sink>
LOWLAT_DEVICE constexpr int rows_together() {
  if constexpr (requires { Sink::kRowsTogether; }) {
    return Sink::kRowsTogether;
  } else {
    return 1;
  }
}

// linear() in the order of dot(), on every platform: sink(t, n, y) as there.
//
// One thread: n outermost, ascending; w_row is scratch, fp32 [k], and each weight row is expanded
// once for all rows. A block: 16 lanes (DotTeam) take a weight row, or rows_together of them one
// after the other beginning at a multiple of that from row_begin; each value of it is made once for
// kLinearTile rows of x, and the lane numbered t % kLinearTile calls the sink for row t. w_row is
// not used.
inline constexpr int kLinearTile = 8;
template <class Block = OneThread, class Weights, class Sink>
LOWLAT_DEVICE void linear_in_chains(const float* x, std::int64_t x_stride, int num_rows, int k,
                                    const Weights& weights, int row_begin, int row_end,
                                    float* w_row, Sink&& sink) {
  if constexpr (Team<Block>::kAlone) {
    for (int n = row_begin; n < row_end; ++n) {
      weights.expand(w_row, n, k);
      for (int t = 0; t < num_rows; ++t) sink(t, n, dot(x + t * x_stride, w_row, k));
    }
  } else {
    using Dots = DotTeam<Block>;
    constexpr int kTogether = rows_together<std::remove_cvref_t<Sink>>();
    const int lane = Dots::lane();
    for (int base = row_begin; base < row_end; base += Dots::kNum * kTogether) {
      for (int place = 0; place < kTogether; ++place) {
        const int n = base + Dots::idx() * kTogether + place;
        const int row_idx = n < row_end ? n : row_end - 1;  // lanes stay together in the sums
        for (int first = 0; first < num_rows; first += kLinearTile) {
          const int rest = num_rows - first;
          const int num = rest < kLinearTile ? rest : kLinearTile;
          float chain[kLinearTile] = {};
          int i = lane;
          for (; i + (kDotAhead - 1) * kDotLanes < k; i += kDotAhead * kDotLanes) {
            float w[kDotAhead];
            for (int ahead = 0; ahead < kDotAhead; ++ahead) {
              w[ahead] = weights.value(row_idx, i + ahead * kDotLanes);
            }
            for (int t = 0; t < kLinearTile; ++t) {
              if (t >= num) break;
              const float* values = x + (first + t) * x_stride + i;
              float v[kDotAhead];
              for (int ahead = 0; ahead < kDotAhead; ++ahead) v[ahead] = values[ahead * kDotLanes];
              for (int ahead = 0; ahead < kDotAhead; ++ahead) chain[t] += v[ahead] * w[ahead];
            }
          }
          for (; i < k; i += kDotLanes) {
            const float w = weights.value(row_idx, i);
            const float* values = x + first * x_stride + i;
            for (int t = 0; t < kLinearTile; ++t) {
              if (t < num) chain[t] += values[t * x_stride] * w;
            }
          }
          for (int t = 0; t < kLinearTile; ++t) {
            if (t >= num) break;
            const float y = Dots::join(chain[t]);
            if (n < row_end && lane == t) sink(first + t, n, y);
          }
        }
      }
    }
  }
}

// The same in tiles: the block takes 16 weight rows, or 16 for each of rows_together.
template <class Block, class Weights, class Sink>
LOWLAT_DEVICE void linear_in_tiles(const float* x, std::int64_t x_stride, int num_rows, int k,
                                   const Weights& weights, int row_begin, int row_end,
                                   Sink&& sink) {
  constexpr int kTiles = rows_together<std::remove_cvref_t<Sink>>();
  constexpr int kSide = plat::kTileSide;
  using Tiles = TileTeam<Block, kTiles>;
  auto& scratch = tile_scratch<Block>();
  const Weights* sources[kTiles];
  int first_row[kTiles];
  for (int base = row_begin; base < row_end; base += kTiles * kSide) {
    for (int i = 0; i < kTiles; ++i) {
      sources[i] = &weights;
      first_row[i] = base + i * kSide;
    }
    for (int first = 0; first < num_rows; first += kSide) {
      const int rest = num_rows - first, num = rest < kSide ? rest : kSide;
      Tiles::run(
          sources, first_row, row_end - 1, [&](int t) { return x + (first + t) * x_stride; }, num,
          k, scratch);
      for (int i = Team<Block>::thread_idx(); i < Tiles::kSums; i += Block::kNumThreads) {
        const int team_idx = i / kSide, t = i % kSide;
        for (int place = 0; place < kTiles; ++place) {
          const int row = team_idx * kTiles + place, n = base + row;
          if (t >= num || n >= row_end) break;
          sink(first + t, n, Tiles::sum(scratch, row / kSide, row % kSide, t));
        }
      }
    }
  }
}

// sink(t, n, y): y = x[t] . W[n] in fp32 for every row t < num_rows and weight row n in
// row_begin .. row_end - 1, once each. x is fp32, x_stride floats a row, bf16 values where products
// are tiles; k is a multiple of 32 there.
template <class Block = OneThread, class Weights, class Sink>
LOWLAT_DEVICE void linear(const float* x, std::int64_t x_stride, int num_rows, int k,
                          const Weights& weights, int row_begin, int row_end, float* w_row,
                          Sink&& sink) {
  if constexpr (multiplies_tiles<Block, Weights>()) {
    linear_in_tiles<Block>(x, x_stride, num_rows, k, weights, row_begin, row_end, sink);
  } else {
    linear_in_chains<Block>(x, x_stride, num_rows, k, weights, row_begin, row_end, w_row, sink);
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
