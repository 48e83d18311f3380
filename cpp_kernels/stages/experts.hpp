// stages/experts.hpp: routed MXFP4 experts (W4A16) with Marlin's roundings, and the shared expert's
// SwiGLU.
//
// Order of one call: group_pairs; then for every expert with pairs expert_gate_up over ranges of I
// and, when its h is whole, expert_down over ranges of H; then expert_sum over rows. The block
// calls each function; none syncs at its end, and a scratch is one thread's. Ranges and experts may
// be handed out to any blocks, because each output element is made by one product of its own row,
// in one order (linear()'s). So a row's result does not depend on the other rows, on the ranges or
// on who computed them. In a block 16 lanes (DotTeam) take a weight row, or its warps take tiles.
//
// A pair is one (row, slot): pair = row * slots + slot. Rounding, per pair: gate and up to bf16,
// clamp, silu to bf16, product to bf16 (h); down times weight to bf16 (d); a row's slots are added
// in fp32 in slot order and rounded to bf16.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/fp4.hpp"
#include "stages/sum.hpp"
#include "stages/tile.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// MXFP4 weight rows for linear() and the functions below: K/2 code bytes a row (even k in the low
// nibble) and K/32 ue8m0 bytes a row; or the rows from first_row on of a matrix of marlin_rows rows
// in the tiles of LOWLAT_MARLIN. Code times scale is exact.
struct Fp4Weights {
  const std::uint8_t* codes;
  std::int64_t code_stride;  // bytes from row to row
  const std::uint8_t* scales;
  std::int64_t scale_stride;  // bytes from row to row
  int marlin_rows = 0;        // 0: rows one after another
  int first_row = 0;

  LOWLAT_DEVICE float value(int row_idx, int i) const {
    if (plat::kMarlinExperts && marlin_rows > 0) return tile_value(first_row + row_idx, i);
    const std::uint8_t pair = codes[row_idx * code_stride + i / 2];
    return kFp4Pairs.value[pair][i % 2] * from_ue8m0(scales[row_idx * scale_stride + i / 32]);
  }
  // Not of Marlin's tiles, which no platform takes that multiplies tiles.
  LOWLAT_DEVICE TileWeights<4> tile_codes(int row_idx, int run) const {
    return {plat::tile_load<4>(codes + row_idx * code_stride + 16 * run),
            plat::tile_scale(scales + row_idx * scale_stride + run)};
  }
  LOWLAT_DEVICE static plat::TileRun tile_run(const TileWeights<4>& run) {
    return plat::tile_fp4(run.codes, run.scale);
  }
  // out[0..k) of one row; k is a multiple of 32.
  LOWLAT_DEVICE void expand(float* out, int row_idx, int k) const {
    if (plat::kMarlinExperts && marlin_rows > 0) {
      for (int i = 0; i < k; ++i) out[i] = tile_value(first_row + row_idx, i);
      return;
    }
    const std::uint8_t* code = codes + row_idx * code_stride;
    const std::uint8_t* scale_code = scales + row_idx * scale_stride;
    for (int group = 0; group < k / 32; ++group) {
      expand_fp4(out + 32 * group, code + 16 * group, from_ue8m0(scale_code[group]), 32);
    }
  }

 private:
  LOWLAT_DEVICE float tile_value(int n, int k) const {
    constexpr int kTileBytes = 512, kTileRows = 64, kTileDepth = 16;
    const int w = n / 16 % 4, high = n / 8 % 2, g = n % 8, t = k % 8 / 2;
    const int nibble = k / 8 % 2 + 2 * high + 4 * (k % 2);
    const std::int64_t tile =
        std::int64_t{k / kTileDepth} * (marlin_rows / kTileRows) + n / kTileRows;
    const std::uint8_t pair = codes[tile * kTileBytes + 4 * (16 * g + 4 * t + w) + nibble / 2];
    const int place = 8 * g + 4 * (w / 2) + w % 2 + 2 * high;
    const std::uint8_t scale =
        scales[std::int64_t{k / 32} * marlin_rows + n / kTileRows * kTileRows + place];
    return kFp4Pairs.value[pair][nibble % 2] * from_ue8m0(scale);
  }
};

// The clamped SwiGLU before any rounding of the product: g = min(gate, limit) has no lower clamp,
// u = clamp(up, +-limit). gate and up are bf16 values; a NaN stays one. `silu_to_bf16` is Marlin's.
LOWLAT_DEVICE float swiglu(float gate, float up, float limit, bool silu_to_bf16) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : (up < -limit ? -limit : up);
  const float silu = g / (1.0f + plat::exp(-g));
  return (silu_to_bf16 ? round_bf16(silu) : silu) * u;
}

// The shared expert: silu and product in fp32, one rounding.
LOWLAT_DEVICE std::uint16_t shared_swiglu(std::uint16_t gate, std::uint16_t up, float limit) {
  return to_bf16(swiglu(from_bf16(gate), from_bf16(up), limit, false));
}

// Pairs by expert: expert e has out_pairs[out_offsets[e] .. out_offsets[e + 1]), ascending.
// ids[num_rows * slots] are 0 .. num_experts - 1; out_offsets holds num_experts + 1 words. An
// expert may be listed twice in a row. The block calls; no sync.
//
// A block counts instead of scanning: a thread for each expert, and for each pair, looks at all
// pairs, so nothing waits for anything. That is for the rows of a step; a prompt's chunk costs
// (pairs + experts) * pairs / threads looks.
template <class Block = OneThread>
LOWLAT_DEVICE void group_pairs(std::int32_t* out_offsets, std::int32_t* out_pairs,
                               const std::int32_t* ids, int num_rows, int slots, int num_experts) {
  const int num_pairs = num_rows * slots;
  if constexpr (Team<Block>::kAlone) {
    for (int e = 0; e <= num_experts; ++e) out_offsets[e] = 0;
    for (int pair = 0; pair < num_pairs; ++pair) ++out_offsets[ids[pair] + 1];
    for (int e = 0; e < num_experts; ++e) out_offsets[e + 1] += out_offsets[e];
    // Placing moves each start to its end, which is the next expert's start: shift back afterwards.
    for (int pair = 0; pair < num_pairs; ++pair) out_pairs[out_offsets[ids[pair]]++] = pair;
    for (int e = num_experts; e > 0; --e) out_offsets[e] = out_offsets[e - 1];
    out_offsets[0] = 0;
  } else {
    for (int e = Team<Block>::thread_idx(); e <= num_experts; e += Block::kNumThreads) {
      int num_before = 0;
      for (int pair = 0; pair < num_pairs; ++pair) num_before += ids[pair] < e;
      out_offsets[e] = num_before;
    }
    for (int pair = Team<Block>::thread_idx(); pair < num_pairs; pair += Block::kNumThreads) {
      const std::int32_t id = ids[pair];
      int place = 0;
      for (int other = 0; other < num_pairs; ++other) {
        place += ids[other] < id || (ids[other] == id && other < pair);
      }
      out_pairs[place] = pair;
    }
  }
}

// Activation rows of an expert's pairs for one weight row: sums in the order of dot(), four pairs
// at a time. row(p) is the fp32 row of pair number p; put(p, sums) is called for every p by one
// lane of the team, sums[w] being the product with weights[w]. Not for one thread alone.
template <class Block, int kNumWeights, class Row, class Put>
LOWLAT_DEVICE void dot_pairs(const Fp4Weights* const (&weights)[kNumWeights], int row_idx,
                             bool exists, int n, int num_pairs, Row&& row, Put&& put) {
  using Dots = DotTeam<Block>;
  constexpr int kTile = 4;
  for (int first = 0; first < num_pairs; first += kTile) {
    const int num = num_pairs - first < kTile ? num_pairs - first : kTile;
    float chain[kTile][kNumWeights] = {};
    int i = Dots::lane();
    for (; i + (kDotAhead - 1) * kDotLanes < n; i += kDotAhead * kDotLanes) {
      float weight[kNumWeights][kDotAhead];
      for (int w = 0; w < kNumWeights; ++w) {
        for (int ahead = 0; ahead < kDotAhead; ++ahead) {
          weight[w][ahead] = weights[w]->value(row_idx, i + ahead * kDotLanes);
        }
      }
      for (int p = 0; p < kTile; ++p) {
        if (p >= num) break;
        const float* values = row(first + p) + i;
        for (int ahead = 0; ahead < kDotAhead; ++ahead) {
          const float v = values[ahead * kDotLanes];
          for (int w = 0; w < kNumWeights; ++w) chain[p][w] += v * weight[w][ahead];
        }
      }
    }
    for (; i < n; i += kDotLanes) {
      for (int w = 0; w < kNumWeights; ++w) {
        const float weight = weights[w]->value(row_idx, i);
        for (int p = 0; p < kTile; ++p) {
          if (p < num) chain[p][w] += row(first + p)[i] * weight;
        }
      }
    }
    for (int p = 0; p < kTile; ++p) {
      if (p >= num) break;
      for (int w = 0; w < kNumWeights; ++w) chain[p][w] = Dots::join(chain[p][w]);
      if (exists && Dots::lane() == p) put(first + p, chain[p]);
    }
  }
}

// Weight rows that a block takes together of the products below: a range that is a multiple of them
// leaves no thread without work. Down has the shorter rows, and takes four tiles of them.
template <class Block>
LOWLAT_DEVICE constexpr int gate_up_rows() {
  return multiplies_tiles<Block, Fp4Weights>() ? plat::kTileSide : DotTeam<Block>::kNum;
}
inline constexpr int kDownTiles = 4;
template <class Block>
LOWLAT_DEVICE constexpr int down_rows() {
  return multiplies_tiles<Block, Fp4Weights>() ? kDownTiles * plat::kTileSide
                                               : DotTeam<Block>::kNum;
}

// The pairs of an expert in tiles: use(t, of_tile, first) is called for pair first + t and row
// `of_tile` of the tiles, by one thread, when their sums are there.
template <class Block, int kTiles, class Row, class Use>
LOWLAT_DEVICE void tile_pairs(const Fp4Weights* const (&weights)[kTiles],
                              const int (&first_row)[kTiles], int last_row, int k, int num_pairs,
                              Row&& row, Use&& use) {
  using Tiles = TileTeam<Block, kTiles>;
  constexpr int kSide = plat::kTileSide;
  for (int first = 0; first < num_pairs; first += kSide) {
    const int rest = num_pairs - first, num = rest < kSide ? rest : kSide;
    Tiles::run(
        weights, first_row, last_row, [&](int t) { return row(first + t); }, num, k,
        tile_scratch<Block>());
    for (int i = Team<Block>::thread_idx(); i < Tiles::kSums; i += Block::kNumThreads) {
      if (i % kSide < num) use(i % kSide, i / kSide, first);
    }
  }
}

// h[pair][i] for the expert's pairs and i in [inner_begin, inner_end): out_h is fp32 holding bf16
// values, [pairs of the call, inner] (pitch `inner`, this rank's I). x is fp32 [rows, hidden]
// holding bf16 values. scratch: 2 * hidden floats, of one thread.
template <class Block = OneThread>
LOWLAT_DEVICE void expert_gate_up(float* out_h, const float* x, const Fp4Weights& w1,
                                  const Fp4Weights& w3, const std::int32_t* pairs, int num_pairs,
                                  int slots, int hidden, int inner, int inner_begin, int inner_end,
                                  float limit, float* scratch) {
  const auto row = [&](int p) { return x + static_cast<std::int64_t>(pairs[p] / slots) * hidden; };
  const auto put = [&](int p, int i, float gate, float up) {
    out_h[static_cast<std::int64_t>(pairs[p]) * inner + i] =
        round_bf16(swiglu(round_bf16(gate), round_bf16(up), limit, true));
  };
  if constexpr (Team<Block>::kAlone) {
    float* gate_row = scratch;
    float* up_row = scratch + hidden;
    for (int i = inner_begin; i < inner_end; ++i) {
      w1.expand(gate_row, i, hidden);
      w3.expand(up_row, i, hidden);
      for (int p = 0; p < num_pairs; ++p) {
        put(p, i, dot(row(p), gate_row, hidden), dot(row(p), up_row, hidden));
      }
    }
  } else if constexpr (multiplies_tiles<Block, Fp4Weights>()) {
    using Tiles = TileTeam<Block, 2>;
    const auto& scratch = tile_scratch<Block>();
    for (int base = inner_begin; base < inner_end; base += plat::kTileSide) {
      tile_pairs<Block, 2>({&w1, &w3}, {base, base}, inner_end - 1, hidden, num_pairs, row,
                           [&](int t, int of_tile, int first) {
                             if (base + of_tile >= inner_end) return;
                             put(first + t, base + of_tile, Tiles::sum(scratch, 0, of_tile, t),
                                 Tiles::sum(scratch, 1, of_tile, t));
                           });
    }
  } else {
    using Dots = DotTeam<Block>;
    for (int base = inner_begin; base < inner_end; base += Dots::kNum) {
      const int i = base + Dots::idx();
      const bool exists = i < inner_end;  // lanes stay together in the sums
      dot_pairs<Block, 2>({&w1, &w3}, exists ? i : base, exists, hidden, num_pairs, row,
                          [&](int p, const float (&sums)[2]) { put(p, i, sums[0], sums[1]); });
    }
  }
}

// d[pair][n] = bf(weight[pair] * h[pair] . w2[n]) for n in [out_begin, out_end): out_d is bf16
// [pairs of the call, hidden]. weights are fp32, one a pair. scratch: inner floats, of one thread.
template <class Block = OneThread>
LOWLAT_DEVICE void expert_down(std::uint16_t* out_d, const float* h, const Fp4Weights& w2,
                               const std::int32_t* pairs, int num_pairs, const float* weights,
                               int inner, int hidden, int out_begin, int out_end, float* scratch) {
  const auto row = [&](int p) { return h + std::int64_t{pairs[p]} * inner; };
  const auto put = [&](int p, int n, float sum) {
    const std::int64_t pair = pairs[p];
    out_d[pair * hidden + n] = to_bf16(weights[pair] * sum);
  };
  if constexpr (Team<Block>::kAlone) {
    for (int n = out_begin; n < out_end; ++n) {
      w2.expand(scratch, n, inner);
      for (int p = 0; p < num_pairs; ++p) put(p, n, dot(row(p), scratch, inner));
    }
  } else if constexpr (multiplies_tiles<Block, Fp4Weights>()) {
    constexpr int kSide = plat::kTileSide;
    using Tiles = TileTeam<Block, kDownTiles>;
    const auto& sums = tile_scratch<Block>();
    static_assert(kDownTiles == 4);
    for (int base = out_begin; base < out_end; base += kDownTiles * kSide) {
      tile_pairs<Block, kDownTiles>(
          {&w2, &w2, &w2, &w2}, {base, base + kSide, base + 2 * kSide, base + 3 * kSide},
          out_end - 1, inner, num_pairs, row, [&](int t, int of_tile, int first) {
            for (int tile = 0; tile < kDownTiles; ++tile) {
              const int n = base + tile * kSide + of_tile;
              if (n < out_end) put(first + t, n, Tiles::sum(sums, tile, of_tile, t));
            }
          });
    }
  } else {
    using Dots = DotTeam<Block>;
    for (int base = out_begin; base < out_end; base += Dots::kNum) {
      const int n = base + Dots::idx();
      const bool exists = n < out_end;
      dot_pairs<Block, 1>({&w2}, exists ? n : base, exists, inner, num_pairs, row,
                          [&](int p, const float (&sums)[1]) { put(p, n, sums[0]); });
    }
  }
}

// What leaves the rank for one row and n in [begin, end): out = bf(sum of the row's slots) +
// shared, added in fp32 and not rounded again: the sum over ranks is fp32 and rounds once. d: the
// row's [slots, hidden]; shared: bf16 [hidden], the shared expert's output; out: [hidden]. Threads
// split n.
template <class Block = OneThread>
LOWLAT_DEVICE void expert_sum(float* out, const std::uint16_t* d, const std::uint16_t* shared,
                              int slots, int hidden, int begin, int end) {
  for (int n = begin + Team<Block>::thread_idx(); n < end; n += Block::kNumThreads) {
    float sum = 0.0f;
    for (int slot = 0; slot < slots; ++slot) {
      sum += from_bf16(d[static_cast<std::int64_t>(slot) * hidden + n]);
    }
    out[n] = round_bf16(sum) + from_bf16(shared[n]);
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
