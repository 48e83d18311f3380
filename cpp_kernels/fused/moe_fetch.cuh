// fused/moe_fetch.cuh: the two roles of moe.cuh that fill the ring: the producer's weights, the
// gatherers' columns.
#pragma once

#include "fused/moe_layout.cuh"

namespace lowlat::nvidia::fused {

namespace moe {

// ------------------------------------------------------------------------------------ producer

template <class L>
struct Producer {
  const Region<L>& r;
  int uses = 0;   // of the ring
  int tiles = 0;  // whose scales were fetched

  LOWLAT_DEVICE static void load(void* dst, const void* src, std::uint32_t bytes,
                                 std::uint64_t* full) {
    sm90::bulk_load(dst, src, bytes, full, sm90::CacheHint::evict_first);
  }

  // What does not depend on the routing, or on anything before this kernel.
  LOWLAT_DEVICE bool run_early() {
    const auto& w = r.a.w;
    auto& barriers = r.barriers;
    if (r.gates()) {
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(&barriers.gate_full, L::kGateRows * 2 * L::kHidden);
      }
      __syncwarp();
      if (r.lane < L::kGateRows) {
        load(r.slot(0) + r.lane * L::kGatePitch,
             w.gate + (static_cast<std::size_t>(r.block_idx) * L::kGateRows + r.lane) * L::kHidden,
             2 * L::kHidden, &barriers.gate_full);
      }
      // The router's rows and x decide when routing ends: nothing competes with them.
      if (!barrier_wait(&barriers.gate_full, 0, r.watch)) return false;
    }
    for (int n = 0; n < r.shared_tiles(); ++n) {
      if (n > 0 && !barrier_wait(&barriers.shared_done[n - 1], 0, r.watch)) return false;
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(
            &barriers.shared_full[n],
            2 * (L::kSharedRows * L::kHidden + static_cast<int>(sizeof(r.table.shared_scales[0]))));
      }
      __syncwarp();
      const int first = (n * r.num_blocks + r.block_idx) * L::kSharedRows;
      if (r.lane < 2 * L::kSharedRows) {
        load(r.slot(1) + r.lane * L::kSharedPitch,
             (r.lane < L::kSharedRows ? w.shared_w1 : w.shared_w3).codes +
                 static_cast<std::size_t>(first + r.lane % L::kSharedRows) * L::kHidden,
             L::kHidden, &barriers.shared_full[n]);
      } else if (r.lane < 2 * L::kSharedRows + 2) {
        const int up = r.lane % 2;
        constexpr int kRow = L::kHidden / L::kBlock;
        load(r.table.shared_scales[up],
             (up ? w.shared_w3 : w.shared_w1).scales +
                 static_cast<std::size_t>(first / L::kBlock) * kRow,
             kRow, &barriers.shared_full[n]);
      }
    }
    if (r.shared && r.block_idx < L::kBands && r.lane == 0) {
      constexpr std::uint32_t kBytes = L::kBandRows * L::kInner;
      sm90::barrier_arrive_expect(&barriers.band_full, kBytes);
      load(r.smem + L::kBandOffset,
           w.shared_w2.codes + static_cast<std::size_t>(r.block_idx) * kBytes, kBytes,
           &barriers.band_full);
    }
    __syncwarp();
    return true;
  }

  // kRows rows of kRow bytes to shared memory, 16 bytes a lane: a bulk copy costs 31 ns whatever
  // its length, so short rows are not worth one. Eight rows of 64 bytes a step.
  template <int kRows, int kRow, int kPitch>
  LOWLAT_DEVICE void load_rows(std::uint32_t dst, const unsigned char* src,
                               std::int64_t src_pitch) const {
    static_assert(kRows % 8 == 0 && kRow % 64 == 0);
    dst += r.lane / 4 * kPitch + r.lane % 4 * 16;
    src += r.lane / 4 * src_pitch + r.lane % 4 * 16;
#pragma unroll
    for (int row = 0; row < kRows; row += 8) {
#pragma unroll
      for (int i = 0; i < kRow; i += 64) {
        sm90::copy_piece(dst + row * kPitch + i, src + row * src_pitch + i,
                         sm90::CacheHint::evict_first);
      }
    }
  }
  // The columns of a chunk of x: rows of the entry's pairs.
  LOWLAT_DEVICE void load_columns(int slot, int entry, int chunk) const {
    constexpr int kPieces = 4 * L::kChunkGroups;
    const int first = r.table.first[entry], num = r.num_pairs(entry);
#pragma unroll 1
    for (int column = 0; column < num; ++column) {
      const unsigned char* src = r.row_pieces(r.table.sorted[first + column] / L::kSlots) +
                                 chunk * (L::kChunkGroups * L::kPieceRow);
      const std::uint32_t dst = r.slot_address(slot) + L::kColumnsOffset + column * 16;
#pragma unroll
      for (int k = 0; k < kPieces; k += plat::kWarpLanes) {
        const int i = k + r.lane;
        if (i < kPieces) {
          sm90::copy_piece(dst + i * 128, src + i * 16, sm90::CacheHint::evict_last);
        }
      }
    }
  }
  // After the lane's copies to a slot; every lane calls.
  LOWLAT_DEVICE void end_slot(int slot) const {
    sm90::barrier_arrive_copied(&r.barriers.full[slot]);
  }

  LOWLAT_DEVICE bool run_routed() {
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const int num_tiles = r.num_tiles();
    for (int n = 0, number; (number = r.routed_tile(n)) < num_tiles; ++n) {
      if (!load_tile(n, number / L::kTiles, number % L::kTiles)) return false;
    }
    if (r.block_idx >= L::kBands) return true;
    for (int entry = 0; entry < r.table.num_entries; ++entry) {
      const int slot = uses % L::kRing;
      if (!r.wait_free(uses)) return false;
      ++uses;
      if (r.lane == 0) sm90::barrier_arrive(&r.barriers.begun[slot]);
      load_band(slot, r.table.expert[entry]);
      end_slot(slot);
    }
    return true;
  }

 private:
  // Tile `tile` of an entry, the n-th of this block.
  LOWLAT_DEVICE bool load_tile(int n, int entry, int tile) {
    const auto& w = r.a.w;
    const int expert = r.table.expert[entry];
    if constexpr (L::kMarlin) {
      // [K / 16][2 I / 64][512] codes, [K / 32][2 I] scales: columns of tiles, w1's, then w3's.
      constexpr int kTilesOfK = 2 * L::kTiles * L::kTileBytes;
      const unsigned char* codes = w.w1.codes +
                                   static_cast<std::size_t>(expert) * L::kInner * L::kHidden +
                                   tile * L::kTileBytes;
      const unsigned char* scales =
          w.w1.scales + static_cast<std::size_t>(expert) * 2 * L::kInner * L::kScaleRow +
          tile * L::kTileValues;
#pragma unroll 1
      for (int use = 0; use < L::kUses; ++use) {
        const int slot = uses % L::kRing, up = use % L::kParts, chunk = use / L::kParts;
        if (!r.wait_free(uses)) return false;
        ++uses;
        load_tiles<L::kChunkGroups>(
            r.slot_address(slot), L::kChunkCodes,
            codes + static_cast<std::int64_t>(chunk) * 2 * L::kChunkGroups * kTilesOfK +
                up * L::kTiles * L::kTileBytes,
            kTilesOfK, scales + chunk * L::kChunkGroups * 2 * L::kInner + up * L::kInner,
            2 * L::kInner);
        if (uses == 1 && !barrier_wait(&r.barriers.rows_here, 0, r.watch)) return false;
        load_columns(slot, entry, chunk);
        end_slot(slot);
      }
    } else {
      auto& barriers = r.barriers;
      const std::size_t row = static_cast<std::size_t>(expert) * L::kInner + tile * L::kTileValues;
      const int buffer = n % L::kBuffers;
      if (n >= L::kBuffers &&
          !barrier_wait(&barriers.scales_empty[buffer], (n / L::kBuffers - 1) & 1, r.watch)) {
        return false;
      }
      if (r.lane == 0) sm90::barrier_arrive_expect(&barriers.scales_full[buffer], L::kTileScales);
      __syncwarp();
      tiles = n + 1;
      if (r.lane < 2) {
        load(r.smem + L::kScalesOffset + buffer * L::kTileScales + r.lane * (L::kTileScales / 2),
             (r.lane ? w.w3 : w.w1).scales + row * L::kScaleRow, L::kTileScales / 2,
             &barriers.scales_full[buffer]);
      }
      const std::size_t codes = row * (L::kHidden / 2);
#pragma unroll 1
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const int slot = uses % L::kRing;
        if (!r.wait_free(uses)) return false;
        ++uses;
        const std::uint32_t dst = r.slot_address(slot);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          load_rows<L::kTileValues, L::kChunkRow, L::kChunkPitch>(
              dst + up * L::kTileValues * L::kChunkPitch,
              (up ? w.w3 : w.w1).codes + codes + chunk * L::kChunkRow, L::kHidden / 2);
        }
        if (uses == 1 && !barrier_wait(&r.barriers.rows_here, 0, r.watch)) return false;
        load_columns(slot, entry, chunk);
        end_slot(slot);
      }
    }
    return true;
  }
  // This block's columns of an expert's w2.
  LOWLAT_DEVICE void load_band(int slot, int expert) const {
    const auto& w = r.a.w;
    if constexpr (L::kMarlin) {
      constexpr int kTilesOfK = L::kBands * L::kTileBytes;
      load_tiles<L::kInnerGroups>(
          r.slot_address(slot), L::kBandCodes,
          w.w2.codes + static_cast<std::size_t>(expert) * L::kHidden * L::kInnerRow +
              r.block_idx * L::kTileBytes,
          kTilesOfK,
          w.w2.scales + static_cast<std::size_t>(expert) * L::kHidden * L::kInnerGroups +
              r.block_idx * L::kBandRows,
          L::kHidden);
    } else {
      const std::size_t row =
          static_cast<std::size_t>(expert) * L::kHidden + r.block_idx * L::kBandRows;
      const unsigned char* codes = w.w2.codes + row * L::kInnerRow;
      constexpr bool kWhole = L::kInnerPitch == L::kInnerRow;
      std::uint64_t* full = &r.barriers.full[slot];
      if (r.lane == 0) {
        sm90::barrier_expect(full, L::kBandScales + (kWhole ? L::kBandCodes : 0));
        if (kWhole) load(r.slot(slot), codes, L::kBandCodes, full);
        load(r.slot(slot) + L::kBandCodes, w.w2.scales + row * L::kInnerGroups, L::kBandScales,
             full);
      }
      if constexpr (!kWhole) {
        load_rows<L::kBandRows, L::kInnerRow, L::kInnerPitch>(r.slot_address(slot), codes,
                                                              L::kInnerRow);
      }
    }
  }
  // Two tiles of 16 x 64 and 64 scales a group, one group after the other.
  template <int kGroups>
  LOWLAT_DEVICE void load_tiles(std::uint32_t dst, int scales_at, const unsigned char* codes,
                                std::int64_t code_pitch, const unsigned char* scales,
                                std::int64_t scale_pitch) const {
    codes += r.lane * 16;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      sm90::copy_piece(dst + i * L::kTileBytes + r.lane * 16, codes + i * code_pitch,
                       sm90::CacheHint::evict_first);
    }
#pragma unroll
    for (int i = 0; i < 4 * kGroups; i += plat::kWarpLanes) {
      const int piece = i + r.lane;
      if (piece < 4 * kGroups) {
        sm90::copy_piece(dst + scales_at + piece * 16,
                         scales + piece / 4 * scale_pitch + piece % 4 * 16,
                         sm90::CacheHint::evict_first);
      }
    }
  }

 public:
  // After a fault: copies under way must land before the block's memory is another's.
  LOWLAT_DEVICE void drain() const {
    constexpr int kTries = 1 << 12;  // some milliseconds; a copy takes microseconds
    const auto landed = [](std::uint64_t* barrier, int count) {
      for (int i = 0; count > 0 && i < kTries; ++i) {
        if (sm90::barrier_try_wait(barrier, (count - 1) & 1)) return;
      }
    };
#pragma unroll 1
    for (int slot = 0; slot < L::kRing; ++slot) {
      landed(&r.barriers.full[slot], (uses - slot + L::kRing - 1) / L::kRing);
    }
#pragma unroll 1
    for (int i = 0; i < L::kBuffers; ++i) {
      landed(&r.barriers.scales_full[i], (tiles - i + L::kBuffers - 1) / L::kBuffers);
    }
    landed(&r.barriers.gate_full, r.gates() ? 1 : 0);
    for (int n = 0; n < r.shared_tiles(); ++n) landed(&r.barriers.shared_full[n], 1);
    landed(&r.barriers.band_full, r.shared && r.block_idx < L::kBands ? 1 : 0);
  }
};

// ------------------------------------------------------------------------------------ gatherers

// Makes x ready for the routed products, and brings the columns of each use of the ring.
template <class L>
struct Gatherer {
  const Region<L>& r;
  // 0 .. kGatherers - 1: takes every kGatherers-th slot. A slot stays with one gatherer, which so
  // sees each of its phases.
  int which;

  // Eight elements that one lane's codes of two rows meet: neighbours, or four pairs eight apart.
  LOWLAT_DEVICE static uint4 load_octet(const std::uint16_t* src, int i) {
    if constexpr (L::kMarlin) {
      const auto* pair = reinterpret_cast<const std::uint32_t*>(src) + i / 4 * 16 + i % 4;
      return make_uint4(__ldcg(pair), __ldcg(pair + 4), __ldcg(pair + 8), __ldcg(pair + 12));
    } else {
      return __ldcg(reinterpret_cast<const uint4*>(src) + i);
    }
  }
  // The two terms of a chunk of a row of x, for all blocks.
  LOWLAT_DEVICE void split_row(int row, int chunk) const {
    constexpr int kOctets = L::kChunkK / 8,
                  kOwn = (kOctets + plat::kWarpLanes - 1) / plat::kWarpLanes;
    const std::uint16_t* src =
        r.a.x + static_cast<std::size_t>(row) * L::kHidden + chunk * L::kChunkK;
    uint4 eight[kOwn];
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int i = k * plat::kWarpLanes + r.lane;
      eight[k] = i < kOctets ? load_octet(src, i) : uint4{};
      const std::uint32_t words[4] = {eight[k].x, eight[k].y, eight[k].z, eight[k].w};
      amax = fmaxf(amax, pairs_amax<4>(words));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(plat::kAllLanes, amax, offset));
    }
    const std::uint32_t exponent = activation_exponent(amax);
    const float inverse = __uint_as_float((254u - exponent) << 23);
    unsigned char* dst = r.row_pieces(row) + chunk * (L::kChunkGroups * L::kPieceRow);
    // Which elements of a group meet which codes of a word: see codes().
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int i = k * plat::kWarpLanes + r.lane;
      const std::uint32_t words[4] = {eight[k].x, eight[k].y, eight[k].z, eight[k].w};
      float odd[4], even[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t from_odd = words[L::kMarlin ? j / 2 * 2 + 1 : j];
        const std::uint32_t from_even = words[L::kMarlin ? j / 2 * 2 : j];
        odd[j] = (L::kMarlin && j % 2 == 0 ? low_bf16(from_odd) : high_bf16(from_odd)) * inverse;
        even[j] = (L::kMarlin && j % 2 != 0 ? high_bf16(from_even) : low_bf16(from_even)) * inverse;
      }
      std::uint32_t parts[4];
      split_e4m3(odd, parts[0], parts[2]);
      split_e4m3(even, parts[1], parts[3]);
      transpose_quad(parts, r.lane % 4);
      if (i < kOctets) {
        store_packet(dst + i * 16, make_uint4(parts[0], parts[1], parts[2], parts[3]));
      }
    }
    __syncwarp();
    if (r.lane == 0) {
      fence_device();  // the scale says that all lanes' pieces are there
      store_word(r.row_scales(row) + chunk, (exponent + kFp4E4m3Shift) << 23);
    }
  }
  LOWLAT_DEVICE void split_rows() const {
    const int units = r.a.rows * L::kChunks;
    for (int unit = which * r.num_blocks + r.block_idx; unit < units;
         unit += L::kGatherers * r.num_blocks) {
      split_row(unit / L::kChunks, unit % L::kChunks);
    }
  }

  // Until all of x is there; its scales go to the table.
  LOWLAT_DEVICE bool wait_rows() const {
    const int num = r.a.rows * L::kChunks;
    for (int begin = 0; begin < num; begin += plat::kWarpLanes) {
      const int i = begin + r.lane < num ? begin + r.lane : begin;
      std::uint32_t word;
      for (int tries = 1;; ++tries) {
        word = load_word(r.row_scales(0) + i);
        if (__all_sync(plat::kAllLanes, word != kPoison)) break;
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kRowsEvent);
        if (__any_sync(plat::kAllLanes, late)) return false;
      }
      r.table.row_scales[0][i] = __uint_as_float(word);
    }
    fence_device();
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.rows_here);
    return true;
  }

  // One pair's h and its scales, on their way to a slot.
  struct Column {
    static constexpr int kPieces = 4 * L::kInnerGroups;
    static constexpr int kOwn = (kPieces + plat::kWarpLanes - 1) / plat::kWarpLanes;
    static constexpr int kOwnWords = (L::kInnerGroups + plat::kWarpLanes - 1) / plat::kWarpLanes;
    uint4 piece[kOwn];
    std::uint32_t word[kOwnWords];

    LOWLAT_DEVICE void load(const Region<L>& r, int pair) {
      const unsigned char* pieces = r.pair_pieces(pair);
      const std::uint32_t* scales = r.pair_scales(pair);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        piece[k] = load_packet(pieces + (i < kPieces ? i : 0) * 16);
      }
#pragma unroll
      for (int k = 0; k < kOwnWords; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        word[k] = load_word(scales + (i < L::kInnerGroups ? i : 0));
      }
    }
    // To column `column` of a slot, when all have arrived.
    LOWLAT_DEVICE bool store(const Region<L>& r, int pair, unsigned char* dst, int column) {
      for (int tries = 1;; ++tries) {
        bool all = true;
#pragma unroll
        for (int k = 0; k < kOwn; ++k) all = all && piece[k].w != kPoison;
#pragma unroll
        for (int k = 0; k < kOwnWords; ++k) all = all && word[k] != kPoison;
        if (__all_sync(plat::kAllLanes, all)) break;
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
        if (__any_sync(plat::kAllLanes, late)) return false;
        load(r, pair);
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        if (i < kPieces) {
          *reinterpret_cast<uint4*>(dst + L::kColumnsOffset + i * 128 + column * 16) = piece[k];
        }
      }
#pragma unroll
      for (int k = 0; k < kOwnWords; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        if (i < L::kInnerGroups) {
          reinterpret_cast<std::uint32_t*>(dst + L::kColumnScales)[i * kColumns + column] = word[k];
        }
      }
      return true;
    }
  };
  // The first of an entry's pairs are on their way kAhead of this warp's entries before their slots
  // are free; the others follow one by one.
  static constexpr int kAhead = Column::kOwn <= 3 ? 3 : 2;
  LOWLAT_DEVICE int next_own(int first_uses, int entry) const {
    while ((first_uses + entry) % L::kRing % L::kGatherers != which) ++entry;
    return entry;
  }
  LOWLAT_DEVICE int pair_of(int entry, int i) const {
    return r.table.sorted[r.table.first[entry] + i];
  }
  LOWLAT_DEVICE bool serve(Column& first, int first_uses, int entry) const {
    const int slot = (first_uses + entry) % L::kRing, num = r.num_pairs(entry);
    if (!barrier_wait(&r.barriers.begun[slot], entry / L::kRing & 1, r.watch)) return false;
    unsigned char* dst = r.slot(slot);
    if (!first.store(r, pair_of(entry, 0), dst, 0)) return false;
#pragma unroll 1
    for (int i = 1; i < num; ++i) {
      const int pair = pair_of(entry, i);
      first.load(r, pair);
      if (!first.store(r, pair, dst, i)) return false;
    }
    arrive(slot);
    return true;
  }
  // The columns are there for the products too, which read past the ordinary path.
  LOWLAT_DEVICE void arrive(int slot) const {
    sm90::fence_async_shared();
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.here[slot]);
  }

  LOWLAT_DEVICE bool run() const {
    split_rows();
    if (which == 0 && !wait_rows()) return false;
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    if (r.block_idx >= L::kBands) return true;
    const int first_uses = r.own_tiles() * L::kUses, num = r.table.num_entries;
    Column ahead[kAhead];
    int entry[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      entry[i] = next_own(first_uses, i == 0 ? 0 : entry[i - 1] + 1);
      if (entry[i] < num) ahead[i].load(r, pair_of(entry[i], 0));
    }
    for (;;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (entry[i] >= num) return true;
        if (!serve(ahead[i], first_uses, entry[i])) return false;
        entry[i] = next_own(first_uses, entry[(i + kAhead - 1) % kAhead] + 1);
        if (entry[i] < num) ahead[i].load(r, pair_of(entry[i], 0));
      }
    }
  }
};

}  // namespace moe
}  // namespace lowlat::nvidia::fused
