// fused/moe_wide_fetch.cuh: the two roles of moe_wide.cuh that fill the ring: the producer's
// weights, the gatherers' columns.
#pragma once

#include "fused/moe_wide_layout.cuh"
#include "fused/moe_wide_route.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

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
    if (r.lane < (L::kMarlin ? 4 : 3)) sm90::tensor_prefetch(&r.maps.maps[r.lane]);
    if (r.gates()) {
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(&barriers.gate_full, L::kScoreRows * 2 * L::kGateK);
      }
      __syncwarp();
      if (r.lane < L::kScoreRows) {
        const int expert = r.score_group() * L::kScoreRows + r.lane;
        load(r.slot(0) + r.lane * L::kGatePitch,
             w.gate + static_cast<std::size_t>(expert) * L::kHidden + r.score_part() * L::kGateK,
             2 * L::kGateK, &barriers.gate_full);
      }
      // The router's rows and x decide when routing ends: nothing competes with them.
      if (!barrier_wait(&barriers.gate_full, 0, r.watch)) return false;
    }
    if (r.shared_tiles() > 0) load_shared_tile(0);
    return true;
  }
  // The n-th of this block, when the one before is over.
  LOWLAT_DEVICE void load_shared_tile(int n) const {
    const auto& w = r.a.w;
    std::uint64_t* full = &r.barriers.shared_full[n];
    if (r.lane == 0) {
      sm90::barrier_arrive_expect(full, 2 * (L::kSharedRows * L::kHidden +
                                             static_cast<int>(sizeof(r.table.shared_scales[0]))));
    }
    __syncwarp();
    const int first = r.shared_tile(n) * L::kSharedRows;
    if (r.lane < 2 * L::kSharedRows) {
      load(r.slot(0) + L::kSharedAt + r.lane * L::kSharedPitch,
           (r.lane < L::kSharedRows ? w.shared_w1 : w.shared_w3).codes +
               static_cast<std::size_t>(first + r.lane % L::kSharedRows) * L::kHidden,
           L::kHidden, full);
    } else if (r.lane < 2 * L::kSharedRows + 2) {
      const int up = r.lane % 2;
      constexpr int kRow = L::kHidden / L::kBlock;
      load(r.table.shared_scales[up],
           (up ? w.shared_w3 : w.shared_w1).scales +
               static_cast<std::size_t>(first / L::kBlock) * kRow,
           kRow, full);
    }
  }
  // A box of one of the maps; one lane calls.
  LOWLAT_DEVICE void load_box(unsigned char* dst, int map, int x, int y, int z,
                              std::uint64_t* full) const {
    sm90::tensor_load(dst, &r.maps.maps[map], x, y, z, full, sm90::CacheHint::evict_first);
  }
  LOWLAT_DEVICE bool run_routed() {
    // Not early: it waits for consumers, who wait at the kernel's gate with the whole block.
    for (int n = 1; n < r.shared_tiles(); ++n) {
      if (!barrier_wait(&r.barriers.shared_done[n - 1], 0, r.watch)) return false;
      load_shared_tile(n);
    }
    if (!barrier_wait(&r.barriers.entries, 0, r.watch)) return false;
    const int num_tiles = r.num_tiles();
    for (int n = 0, number; (number = r.routed_tile(n)) < num_tiles; ++n) {
      const int expert = r.table.expert[number / L::kTiles];
      if (!load_tile(n, expert, number % L::kTiles)) return false;
    }
    // A batch is drawn while the one before is filled: the answer takes a microsecond.
    std::uint32_t next = draw();
    for (int i = 0; i < r.shared_uses(); ++i) {
      if (!load_shared_rows(i)) return false;
    }
    const int num_batches = r.num_batches();
    for (int n = 0;; ++n) {
      const int batch = static_cast<int>(__shfl_sync(plat::kAllLanes, next, 0) - kPoison);
      const bool more = batch < num_batches;
      if (more) next = draw();
      if (r.lane == 0) {
        r.table.batches[n % L::kKeptBatches] = more ? batch : -1;
        sm90::barrier_arrive(&r.barriers.batches[n % L::kKeptBatches]);
      }
      __syncwarp();
      if (!more) return true;
      const int expert = r.table.expert[r.batch_entry(batch)], band = r.batch_band(batch);
#pragma unroll 1
      for (int i = 0; i < L::kBatchUses; ++i) {
        if (!load_band(band + i % L::kWarpGroups, expert, i / L::kWarpGroups)) return false;
      }
    }
  }

 private:
  // Asks for the number of a batch, in lane 0.
  LOWLAT_DEVICE std::uint32_t draw() const { return r.lane == 0 ? take_word(r.drawn(), 1) : 0; }
  // A use of the ring: `ask(slot, full)` by one lane, of copies of so many bytes.
  template <class Ask>
  LOWLAT_DEVICE bool fill_slot(std::uint32_t bytes, const Ask& ask) {
    const int slot = L::slot_of(uses);
    if (!r.wait_free(uses)) return false;
    ++uses;
    if (r.lane == 0) {
      std::uint64_t* full = &r.barriers.full[slot];
      sm90::barrier_arrive_expect(full, bytes);
      ask(r.slot(slot), full);
    }
    __syncwarp();
    return true;
  }
  // kTiles' tile `tile` of an expert, the n-th of this block.
  LOWLAT_DEVICE bool load_tile(int n, int expert, int tile) {
    if constexpr (L::kMarlin) {
      // [K / 16][2 I / 64][512] codes, [K / 32][2 I] scales: columns of tiles, w1's, then w3's.
#pragma unroll 1
      for (int use = 0; use < L::kUses; ++use) {
        const int column = use % L::kParts * L::kTiles + tile;
        const int group = expert * (L::kHidden / 32) + use / L::kParts * L::kChunkGroups;
        const auto ask = [&](unsigned char* slot, std::uint64_t* full) {
          load_box(slot, 0, column * (L::kTileBytes / 4), 2 * group, 0, full);
          load_box(slot + L::kChunkCodes, 1, column * (L::kTileValues / 4), group, 0, full);
        };
        if (!fill_slot(L::kChunkBytes, ask)) return false;
      }
    } else {
      const auto& w = r.a.w;
      auto& barriers = r.barriers;
      const int row = expert * L::kInner + tile * L::kTileValues;
      const int buffer = n % L::kBuffers;
      if (n >= L::kBuffers &&
          !barrier_wait(&barriers.scales_empty[buffer], (n / L::kBuffers - 1) & 1, r.watch)) {
        return false;
      }
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(&barriers.scales_full[buffer], L::kUseRows * L::kScaleRow);
      }
      __syncwarp();
      tiles = n + 1;
      unsigned char* scales = r.smem + L::kScalesOffset + buffer * L::kTileScales;
      // Two copies: with one a row, 128 bytes of V4's, the region took an eighth longer.
      if (r.lane < 2) {
        constexpr int kBytes = L::kTileValues * L::kScaleRow;
        load(scales + r.lane * kBytes,
             (r.lane != 0 ? w.w3 : w.w1).scales + static_cast<std::size_t>(row) * L::kScaleRow,
             kBytes, &barriers.scales_full[buffer]);
      }
#pragma unroll 1
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const auto ask = [&](unsigned char* slot, std::uint64_t* full) {
          load_box(slot, 0, 0, row, chunk * L::kLines, full);
          load_box(slot + L::kChunkCodes / 2, 1, 0, row, chunk * L::kLines, full);
        };
        if (!fill_slot(L::kChunkCodes, ask)) return false;
      }
    }
    return true;
  }
  // Rows of this block's band of the shared expert's w2.
  LOWLAT_DEVICE bool load_shared_rows(int use) {
    constexpr int kBytes = L::kSharedUseRows * L::kInner;
    const auto ask = [&](unsigned char* slot, std::uint64_t* full) {
      load(slot,
           r.a.w.shared_w2.codes +
               static_cast<std::size_t>(r.block_idx * L::kSharedUses + use) * kBytes,
           kBytes, full);
    };
    return fill_slot(kBytes, ask);
  }
  // A band's columns of an expert's w2, a part of K.
  LOWLAT_DEVICE bool load_band(int band, int expert, int part) {
    const auto& w = r.a.w;
    const auto ask = [&](unsigned char* slot, std::uint64_t* full) {
      if constexpr (L::kMarlin) {
        const int group = expert * L::kInnerGroups + part * L::kPartGroups;
        load_box(slot, 2, band * (L::kTileBytes / 4), 2 * group, 0, full);
        load_box(slot + L::kBandCodes, 3, band * (L::kBandRows / 4), group, 0, full);
      } else {
        const int row = expert * L::kHidden + band * L::kBandRows;
        if constexpr (L::kBandWhole) {
          load(slot, w.w2.codes + static_cast<std::size_t>(row) * L::kInnerRow, L::kBandCodes,
               full);
        } else if constexpr (L::kBandInLines) {
          load_box(slot, 2, 0, row, part * (L::kPartRow / kLineBytes), full);
        } else {
          load_box(slot, 2, part * (L::kPartRow / 4), row, 0, full);
        }
        load(slot + L::kBandCodes, w.w2.scales + static_cast<std::size_t>(row) * L::kInnerGroups,
             L::kBandScales, full);
      }
    };
    return fill_slot(L::kBandBytes, ask);
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
      const int first = (slot + L::kRing - L::kFirstSlot) % L::kRing;  // use in that slot
      landed(&r.barriers.full[slot], (uses - first + L::kRing - 1) / L::kRing);
    }
#pragma unroll 1
    for (int i = 0; i < L::kBuffers; ++i) {
      landed(&r.barriers.scales_full[i], (tiles - i + L::kBuffers - 1) / L::kBuffers);
    }
    landed(&r.barriers.gate_full, r.gates() ? 1 : 0);
    for (int n = 0; n < r.shared_tiles(); ++n) landed(&r.barriers.shared_full[n], 1);
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
    if (r.shared) {
      // And as the shared expert sees it.
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        uint4 eight_of = eight[k];
        if (L::kMarlin && i < kOctets) eight_of = __ldcg(reinterpret_cast<const uint4*>(src) + i);
        const std::uint32_t pairs[4] = {eight_of.x, eight_of.y, eight_of.z, eight_of.w};
        const std::uint32_t own =
            activation_exponent(lanes_max<L::kBlock / 8>(pairs_amax<4>(pairs)));
        const float to_codes = __uint_as_float((254u - own) << 23);
        std::uint16_t codes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
              : "=h"(codes[j])
              : "f"(high_bf16(pairs[j]) * to_codes), "f"(low_bf16(pairs[j]) * to_codes));
        }
        if (i >= kOctets) continue;
        const int octet = chunk * kOctets + i, in_group = row % kColumns;
        *reinterpret_cast<uint2*>(r.shared_x(row / kColumns) + octet / 8 * 512 + in_group * 64 +
                                  octet % 4 * 16 + octet / 4 % 2 * 8) =
            make_uint2(codes[0] | static_cast<std::uint32_t>(codes[1]) << 16,
                       codes[2] | static_cast<std::uint32_t>(codes[3]) << 16);
        if (octet % 4 == 0) {
          r.shared_x_scales(
              row /
              kColumns)[octet / 8 * 16 + in_group / 2 * 4 + octet / 4 % 2 * 2 + in_group % 2] =
              static_cast<unsigned char>(own);
        }
      }
    }
    if (r.lane == 0) {
      const std::uint32_t scale = (exponent + kFp4E4m3Shift) << 23;
      store_packet(r.row_scale(row, chunk), make_uint4(scale, scale, scale, scale));
    }
    r.add_done(r.rows_done());
  }
  LOWLAT_DEVICE void split_rows() const {
    const int units = r.a.rows * L::kChunks;
    for (int unit = which * r.num_blocks + r.block_idx; unit < units;
         unit += L::kGatherers * r.num_blocks) {
      split_row(unit / L::kChunks, unit % L::kChunks);
    }
  }

  // h of the shared expert as its second product sees it, when it is there.
  LOWLAT_DEVICE bool quantize_hidden() const {
    if (!r.shared) return true;
    const int units = r.a.rows * L::kHiddenSpans;
    for (int unit = which * r.num_blocks + r.block_idx; unit < units;
         unit += L::kGatherers * r.num_blocks) {
      const int row = unit / L::kHiddenSpans;
      const int octet = unit % L::kHiddenSpans * plat::kWarpLanes + r.lane;
      const bool mine = octet < L::kInner / 8;
      uint4 chunk = {};
      for (int tries = 1;; ++tries) {
        if (mine) chunk = load_packet(r.shared_hidden(row) + octet * 16);
        if (__all_sync(plat::kAllLanes, chunk.w != kPoison)) break;
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
        if (__any_sync(plat::kAllLanes, late)) return false;
      }
      const std::uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      const std::uint32_t exponent =
          activation_exponent(lanes_max<L::kBlock / 8>(pairs_amax<4>(pairs)));
      const float inverse = __uint_as_float((254u - exponent) << 23);
      std::uint32_t codes[4];  // of elements i and i + 4
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint16_t both;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(both)
            : "f"(high_bf16(pairs[i]) * inverse), "f"(low_bf16(pairs[i]) * inverse));
        codes[i] = both;
      }
      const std::uint32_t first = codes[0] | codes[1] << 16, second = codes[2] | codes[3] << 16;
      const int in_group = row % kColumns, half = octet / 4 % 2;
      if (mine) {
        *reinterpret_cast<uint2*>(r.shared_h(row / kColumns) + octet / 8 * 512 + in_group * 64 +
                                  octet % 4 * 16 + half * 8) =
            make_uint2(__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531));
      }
      if (mine && octet % 4 == 0) {
        unsigned char* scales = r.shared_h_scales(row / kColumns) + octet / 8 * 16;
        scales[in_group / 2 * 4 + half * 2 + in_group % 2] = static_cast<unsigned char>(exponent);
      }
      r.add_done(r.hidden_done());
    }
    return true;
  }

  // Pieces of one column, kGroups groups from `src` on, to column pair `column` of a slot.
  template <int kGroups>
  LOWLAT_DEVICE void copy_column(std::uint32_t slot, const unsigned char* src, int column) const {
    const std::uint32_t dst = slot + L::kColumnsOffset + column * 32;
#pragma unroll
    for (int k = 0; k < 4 * kGroups; k += plat::kWarpLanes) {
      const int i = k + r.lane;
      // Of a group, high and low terms at odd and at even elements.
      const int part = i % 4, at = i / 4 * L::kGroupBytes + part % 2 * 128 + part / 2 * 16;
      if (i < 4 * kGroups) sm90::copy_piece(dst + at, src + i * 16, sm90::CacheHint::evict_last);
    }
  }
  LOWLAT_DEVICE bool gather_rows(int own_tiles) const {
    // By then the shared expert's h is there, or nearly, and the ring is full.
    constexpr int kQuantizeAt = 3;
    for (int n = 0; n < own_tiles; ++n) {
      if (n == kQuantizeAt && !quantize_hidden()) return false;
      const int entry = r.routed_tile(n) / L::kTiles;
      const int first = r.table.first[entry], num = r.num_pairs(entry);
      // The rows of the entry's pairs, and this lane's of them.
      int rows[L::kEntryPairs];
#pragma unroll
      for (int k = 0; k < L::kEntryPairs; ++k) {
        rows[k] = r.table.sorted[first + (k < num ? k : 0)] / L::kSlots;
      }
      const int own_row = r.table.sorted[first + (r.lane < num ? r.lane : 0)] / L::kSlots;
      for (int i = 0; i < L::kUses; ++i) {
        const int use = n * L::kUses + i, slot = L::slot_of(use), chunk = i / L::kParts;
        if (slot % L::kGatherers != which) continue;
        if (!r.wait_free(use)) return false;
        const std::uint32_t dst = r.slot_address(slot);
#pragma unroll
        for (int k = 0; k < L::kEntryPairs; ++k) {
          if (k >= num) break;
          copy_column<L::kChunkGroups>(
              dst, r.row_pieces(rows[k]) + chunk * (L::kChunkGroups * L::kPieceRow), k);
        }
        if (r.lane < num) {
          sm90::copy_piece(dst + L::kColumnScales + r.lane * 16, r.row_scale(own_row, chunk),
                           sm90::CacheHint::evict_last);
        }
        sm90::barrier_arrive_copied(&r.barriers.full[slot]);
      }
    }
    return own_tiles > kQuantizeAt || quantize_hidden();
  }
  // Entries whose h is complete, in order from one that is waited for: the number of the first that
  // is not, or that was not looked at; -1 when it is late.
  LOWLAT_DEVICE int wait_entries(int first) const {
    constexpr int kLooks = 3;  // at so many times 32 entries
    for (int tries = 1;; ++tries) {
      std::uint32_t done[kLooks];
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        const int entry = first + i * plat::kWarpLanes + r.lane;
        done[i] = entry < r.table.num_entries ? load_word(r.entry_done(entry)) : kPoison;
      }
      int ready = first;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        const std::uint32_t not_all = __ballot_sync(plat::kAllLanes, done[i] != counted(L::kTiles));
        if (ready == first + i * plat::kWarpLanes) {
          ready += not_all == 0 ? plat::kWarpLanes : __ffs(static_cast<int>(not_all)) - 1;
        }
      }
      if (ready > first) {
        fence_device();
        return ready;
      }
      const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
      if (__any_sync(plat::kAllLanes, late)) return -1;
    }
  }
  LOWLAT_DEVICE bool gather_pairs(int first_use) const {
    // The shared expert's uses have no columns.
    for (int i = 0; i < r.shared_uses(); ++i, ++first_use) {
      const int slot = L::slot_of(first_use);
      if (slot % L::kGatherers != which) continue;
      if (!r.wait_free(first_use)) return false;
      sm90::barrier_arrive_copied(&r.barriers.full[slot]);
    }
    int ready = 0;
    for (int n = 0;; ++n, first_use += L::kBatchUses) {
      int batch = 0;
      if (!r.wait_batch(n, &batch)) return false;
      if (batch < 0) return true;
      const int entry = r.batch_entry(batch);
      const int first = r.table.first[entry], num = r.num_pairs(entry);
      const int own_pair = r.table.sorted[first + (r.lane < num ? r.lane : 0)];
      while (ready >= 0 && entry >= ready) ready = wait_entries(ready);
      if (ready < 0) return false;
#pragma unroll 1
      for (int k = 0; k < L::kBatchUses; ++k) {
        const int use = first_use + k, slot = L::slot_of(use), part = k / L::kWarpGroups;
        if (slot % L::kGatherers != which) continue;
        if (!r.wait_free(use)) return false;
        const std::uint32_t dst = r.slot_address(slot);
#pragma unroll 1
        for (int i = 0; i < num; ++i) {
          const int pair = __shfl_sync(plat::kAllLanes, own_pair, i);
          copy_column<L::kPartGroups>(
              dst, r.pair_pieces(pair) + part * (L::kPartGroups * L::kPieceRow), i);
          if (r.lane < L::kScaleWords / 4) {
            sm90::copy_piece(dst + L::kColumnScales + i * (L::kScaleWords * 4) + r.lane * 16,
                             r.pair_scales(pair, part) + r.lane * 4, sm90::CacheHint::evict_last);
          }
        }
        sm90::barrier_arrive_copied(&r.barriers.full[slot]);
      }
    }
  }

  LOWLAT_DEVICE bool run() const {
    split_rows();
    make_table(r, 1 + which);
    // All rows' columns are there before the table is. It is waited for first, so that a block that
    // is never heard is reported for its scores.
    if (!barrier_wait(&r.barriers.table, 0, r.watch) || !r.wait_rows()) return false;
    const int own_tiles = r.own_tiles();
    return gather_rows(own_tiles) && gather_pairs(own_tiles * L::kUses);
  }
};

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused
