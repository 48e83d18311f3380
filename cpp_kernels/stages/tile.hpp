// stages/tile.hpp: products of a block with few rows of x, where the platform multiplies tiles
// (plat::kTileProducts).
//
// The block takes 16 weight rows, or several such tiles side by side, and 16 rows of x at a time.
// Its warps split K: every warp multiplies stretches of 128 in turn, then the block adds what its
// warps have, ascending. Every factor is exact in bf16, products are exact, sums are fp32: a
// stretch's in the order of the platform's unit. So a result depends on its two rows, on K and on
// the block's size alone, as with dot(), but its last bits are not dot()'s.
//
// Weights are a source with
//   tile_codes(row_idx, run)   values 32 run .. 32 run + 31 of a row as they are stored
//   tile_run(codes)            the same as a product takes them
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>
#include <utility>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Weights that a source hands to tiles: codes of kWords words a run, and the run's scale.
template <int kWords>
struct TileWeights {
  plat::TileCodes<kWords> codes;
  std::uint32_t scale;
};

template <class Weights>
concept TileSource = requires(const Weights& weights) { weights.tile_codes(0, 0); };

// Whether a team's products with these weights are tiles.
template <class Block, class Weights>
LOWLAT_DEVICE constexpr bool multiplies_tiles() {
  return plat::kTileProducts && !Team<Block>::kAlone && TileSource<Weights>;
}

// body(0) .. body(kNum - 1) without a loop: what they index stays in registers.
template <int kNum, class Body>
LOWLAT_DEVICE void each(Body&& body) {
  [&]<int... kAt>(std::integer_sequence<int, kAt...>) {
    (body(kAt), ...);
  }(std::make_integer_sequence<int, kNum>{});
}

// The sums of every warp of a block: one memory for all of its products.
inline constexpr int kMostTiles = 4;
template <class Block>
struct TileScratch {
  float part[Team<Block>::kNumWarps * kMostTiles][plat::kTileSide * plat::kTileSide];
};
template <class Block>
LOWLAT_DEVICE TileScratch<Block>& tile_scratch() {
  LOWLAT_SHARED(TileScratch<Block>, scratch);
  return scratch;
}

// kTiles tiles of 16 weight rows each, times up to 16 rows of x.
template <class Block, int kTiles>
struct TileTeam {
  static constexpr int kSums = plat::kTileSide * plat::kTileSide;
  static_assert(kTiles <= kMostTiles);
  using Scratch = TileScratch<Block>;

  // Every warp's sums, into the scratch. Row r of tile i is row first_row[i] + r of weights[i], or
  // last_row where that is past it. x_row(t) is fp32 [k] of row t < num_rows, bf16 values; k is a
  // multiple of 32. The block calls; syncs before it writes, so that sums may be read up to the
  // next call, and at the end.
  template <class Weights, class XRow>
  LOWLAT_DEVICE static void run(const Weights* const (&weights)[kTiles],
                                const int (&first_row)[kTiles], int last_row, XRow&& x_row,
                                int num_rows, int k, Scratch& scratch) {
    using Threads = Team<Block>;
    const int row = Threads::lane() % plat::kTileSide, part = Threads::lane() / plat::kTileSide;
    const float* x = x_row(row < num_rows ? row : num_rows - 1);
    int weight_row[kTiles];
    for (int i = 0; i < kTiles; ++i) {
      const int own = first_row[i] + row;
      weight_row[i] = own < last_row ? own : last_row;
    }
    plat::TileSums sums[kTiles];
    // What one stretch takes: kAhead of them are on their way while one is multiplied.
    struct Stretch {
      decltype(weights[0]->tile_codes(0, 0)) codes[kTiles];
      plat::TileCodes<plat::kTileRun> x;
    };
    const auto load = [&](Stretch& out, int run) {
      plat::tile_order();
      out.x = plat::tile_load<plat::kTileRun>(x + plat::kTileRun * run);
      each<kTiles>([&](int i) { out.codes[i] = weights[i]->tile_codes(weight_row[i], run); });
    };
    // As many as leave registers for everything else: a stretch has up to 60 words.
    constexpr int kAhead = sizeof(Stretch) <= 42 * sizeof(std::uint32_t) ? 3 : 2;
    constexpr int kNumWarps = Threads::kNumWarps;
    const int num_runs = k / plat::kTileRun, whole = num_runs / plat::kTileParts;
    const int warp_idx = Threads::warp_idx(), num = (whole - warp_idx + kNumWarps - 1) / kNumWarps;
    // Of the warp's stretches, numbered from 0.
    const auto run_of = [&](int idx) {
      return (warp_idx + idx * kNumWarps) * plat::kTileParts + part;
    };
    Stretch ahead[kAhead];
    int idx = 0;
    if (num < kAhead) {
      each<kAhead>([&](int i) {
        if (i < num) load(ahead[i], run_of(i));
      });
    } else {
      // Without a condition, and all of them awaited with the first: a compiler knows in the loop
      // what is on its way, and waits for no more than it needs.
      each<kAhead>([&](int i) { load(ahead[i], run_of(i)); });
      plat::tile_arrived();
      do {
        each<kAhead>([&](int i) {
          plat::tile_order();
          const plat::TileRun values = plat::tile_values(ahead[i].x);
          plat::TileRun rows[kTiles];
          each<kTiles>([&](int j) { rows[j] = weights[j]->tile_run(ahead[i].codes[j]); });
          // At the end the last one again, which no branch has to leave out.
          const int next = idx + i + kAhead;
          load(ahead[i], run_of(next < num ? next : num - 1));
          each<kTiles>([&](int j) { plat::tile_multiply(sums[j], rows[j], values); });
        });
        idx += kAhead;
      } while (idx + kAhead <= num);
    }
    each<kAhead>([&](int i) {
      if (idx + i >= num) return;
      const plat::TileRun values = plat::tile_values(ahead[i].x);
      each<kTiles>([&](int j) {
        plat::tile_multiply(sums[j], weights[j]->tile_run(ahead[i].codes[j]), values);
      });
    });
    if (num_runs % plat::kTileParts != 0 && whole % kNumWarps == warp_idx) {
      // Fewer than four runs are left: lanes past them have zeros.
      const int run = whole * plat::kTileParts + part;
      const bool exists = run < num_runs;
      const auto or_zero = [&](plat::TileRun values) {
        for (std::uint32_t& word : values.words) word = exists ? word : 0u;
        return values;
      };
      Stretch last;
      load(last, exists ? run : num_runs - 1);
      const plat::TileRun values = or_zero(plat::tile_values(last.x));
      each<kTiles>([&](int i) {
        plat::tile_multiply(sums[i], or_zero(weights[i]->tile_run(last.codes[i])), values);
      });
    }
    Threads::sync();
    each<kTiles>([&](int i) {
      each<plat::TileSums::kNum>([&](int j) {
        const int of_tile = plat::TileSums::kNum * part + j;
        scratch.part[Threads::warp_idx() * kTiles + i][of_tile * plat::kTileSide + row] =
            sums[i].sums[j];
      });
    });
    Threads::sync();
  }

  // What run() left of a weight row of a tile and row t of x, in any thread.
  LOWLAT_DEVICE static float sum(const Scratch& scratch, int tile, int row, int t) {
    const int at = row * plat::kTileSide + t;
    float total = scratch.part[tile][at];
    for (int warp = 1; warp < Team<Block>::kNumWarps; ++warp) {
      total += scratch.part[warp * kTiles + tile][at];
    }
    return total;
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
