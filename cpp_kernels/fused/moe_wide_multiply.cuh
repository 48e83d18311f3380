// fused/moe_wide_multiply.cuh: the role of moe_wide.cuh that multiplies: router, routing, shared
// expert, routed experts.
#pragma once

#include "fused/moe_wide_layout.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

// ------------------------------------------------------------------------------------ consumers

// A barrier of the consumers; every one of them comes, also after a fault.
template <class L>
LOWLAT_DEVICE void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers * plat::kWarpLanes) : "memory");
}

template <class L>
struct Consumer {
  const Region<L>& r;
  int warp;
  int g = 0, t = 0;  // place in the fragments
  int sums = 0;      // of the partial buffers
  // x of this warp's slice, of eight rows, in the order of pairs.
  static constexpr int kPairs = L::kRun / 2;  // of a run
  std::uint32_t x[L::kSliceBlocks][kPairs];

  LOWLAT_DEVICE const uint4* group_x(int group) const {
    const int row = group * kColumns + g;
    return reinterpret_cast<const uint4*>(
        r.a.x + static_cast<std::size_t>(row < r.a.rows ? row : r.a.rows - 1) * L::kHidden +
        warp * L::kSlice + t * L::kRun);
  }
  LOWLAT_DEVICE void load_block(int block, const uint4* src) {
#pragma unroll
    for (int i = 0; i < L::kRun / 8; ++i) {
      std::uint32_t pairs[4];
      pair_bf16(__ldcg(src + block * (L::kBlockK / 8) + i), pairs);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[block][4 * i + k] = pairs[k];
    }
  }
  LOWLAT_DEVICE void load_x() {
    const uint4* src = group_x(0);
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) load_block(block, src);
  }
  // After group `group` comes another: its blocks of x follow as this one's are done. nullptr: one
  // group is all.
  LOWLAT_DEVICE const uint4* next_group_x(int group) const {
    const int num = r.num_groups();
    if (L::kMaxRows <= kColumns || num == 1) return nullptr;
    return group_x(group + 1 < num ? group + 1 : 0);
  }

  // A free buffer of partial sums, or nullptr.
  LOWLAT_DEVICE float* begin_sums() const {
    const int buffer = sums % L::kBuffers;
    if (sums >= L::kBuffers &&
        !barrier_wait(&r.barriers.sums_empty[buffer], (sums / L::kBuffers - 1) & 1, r.watch)) {
      return nullptr;
    }
    return r.partial(buffer);
  }
  LOWLAT_DEVICE void end_sums() {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_full[sums % L::kBuffers]);
    ++sums;
  }
  // Gives a slice's sums of eight columns by sixteen rows to the finisher.
  LOWLAT_DEVICE bool hand_over(const float (&acc)[4]) {
    float* dst = begin_sums();
    if (dst == nullptr) return false;
    dst += (warp * kColumns + 2 * t) * 2 * L::kSharedRows + g;
    dst[0] = acc[0];
    dst[L::kSharedRows] = acc[2];
    dst[2 * L::kSharedRows] = acc[1];
    dst[3 * L::kSharedRows] = acc[3];
    end_sums();
    return true;
  }
  LOWLAT_DEVICE void arrive(std::uint64_t* barrier) const {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(barrier);
  }

  LOWLAT_DEVICE bool run_gate() {
    if (!barrier_wait(&r.barriers.gate_full, 0, r.watch)) return false;
    const int row = g < L::kGateRows ? g : L::kGateRows - 1;  // other rows: computed, not used
    const std::uint32_t address =
        r.slot_address(0) + row * L::kGatePitch + (warp * L::kSlice + t * L::kRun) * 2;
    for (int group = 0; group < r.num_groups(); ++group) {
      const uint4* next = next_group_x(group);
      float acc[2][4] = {};
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t src = address + block * L::kBlockK * 2 + half * 32;
          const uint4 low[2] = {smem_load16(src), smem_load16(src + 16)};
          const uint4 high[2] = {};
          multiply_bf16(acc[(block + half) & 1], low, high, x[block] + 8 * half);
        }
        if (next != nullptr) load_block(block, next);
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0])) return false;
    }
    arrive(&r.barriers.gate_done);
    return true;
  }

  // Gate rows, then up rows; x as the block-fp8 linear sees it.
  LOWLAT_DEVICE bool run_shared_tile(int n) {
    if (!barrier_wait(&r.barriers.shared_full[n], 0, r.watch)) return false;
    const std::uint32_t low_address =
        r.slot_address(0) + L::kSharedAt + g * L::kSharedPitch + warp * L::kSlice + t * L::kRun;
    const std::uint32_t high_address = low_address + L::kSharedRows * L::kSharedPitch;
    const auto& scales = r.table.shared_scales;
    for (int group = 0; group < r.num_groups(); ++group) {
      const uint4* next = next_group_x(group);
      float acc[2][4] = {};
      std::uint32_t exponent = 0;
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        // A scale group is a run of `kShare` lanes, or two blocks of K where it is longer.
        constexpr int kShare = L::kBlock < 4 * L::kRun ? L::kBlock / L::kRun : 4;
        constexpr int kSpan = L::kBlock / (kShare * L::kRun);
        if (block % kSpan == 0) {
          float amax = pairs_amax<kPairs>(x[block]);
          if constexpr (kSpan == 2) amax = fmaxf(amax, pairs_amax<kPairs>(x[block + 1]));
          exponent = activation_exponent(lanes_max<kShare>(amax));
        }
        std::uint32_t b[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) b[i] = x[block][i];
        quantize_pairs<kPairs>(b, exponent);
        const int scale = (warp * L::kSlice + block * L::kBlockK + t * L::kRun) / L::kBlock;
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t at = block * L::kBlockK + half * 16;
          multiply_e4m3(acc[(block + half) & 1], smem_load16(low_address + at),
                        smem_load16(high_address + at), e4m3_factor(scales[0][scale]),
                        e4m3_factor(scales[1][scale]), b + 8 * half);
        }
        // A scale group's blocks are looked at together.
        if (next != nullptr && block % kSpan == kSpan - 1) {
          for (int i = kSpan - 1; i >= 0; --i) load_block(block - i, next);
        }
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0])) return false;
    }
    arrive(&r.barriers.shared_done[n]);
    return true;
  }

  // ---- routing

  // Ids of all rows and what their weights are made of, in every block the same.
  LOWLAT_DEVICE void route(stages::GateRule rule) {
    for (int row = warp; row < r.a.rows; row += L::kConsumers) route_row<L>(r, row, rule);
    consumers_sync<L>();
  }
  // When the experts are on their way.
  LOWLAT_DEVICE void weigh(stages::GateSum sum_rule) {
    for (int row = warp; row < r.a.rows; row += L::kConsumers) weigh_row<L>(r, row, sum_rule);
    consumers_sync<L>();
  }

  // Pairs by expert, in entries. Which column of its entry a pair gets is a matter of who comes
  // first; no result depends on it.
  LOWLAT_DEVICE void make_table() {
    auto& table = r.table;
    const int num_pairs = r.a.rows * L::kSlots;
    static_assert(L::kMaxPairs <= L::kConsumers * plat::kWarpLanes, "a thread a pair");
    const int pair = warp * plat::kWarpLanes + r.lane;
    int id = 0, rank = 0;
    if (pair < num_pairs) {
      id = table.ids[pair];
      rank = static_cast<int>(atomicAdd(&table.count[id], 1u));
    }
    consumers_sync<L>();
    // Which pairs an entry has must be the same in every block: where an expert has several, its
    // pairs keep their order.
    if (pair < num_pairs && table.count[id] > L::kEntryPairs) {
      rank = 0;
#pragma unroll 4
      for (int other = 0; other < pair; ++other) rank += table.ids[other] == id ? 1 : 0;
    }
    // A thread an expert: how many pairs (low half) and entries (high half) lie before it.
    static_assert(L::kExperts <= L::kConsumers * plat::kWarpLanes);
    std::uint32_t count = 0, sum = 0;
    if (pair < L::kExperts) {
      count = table.count[pair];
      sum = count | (count + L::kEntryPairs - 1) / L::kEntryPairs << 16;
    }
    const std::uint32_t own = sum;
#pragma unroll
    for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
      const std::uint32_t theirs = __shfl_up_sync(plat::kAllLanes, sum, offset);
      if (r.lane >= offset) sum += theirs;
    }
    if (r.lane == plat::kWarpLanes - 1) table.warp_sums[warp] = sum;
    consumers_sync<L>();
    const std::uint32_t theirs = r.lane < L::kConsumers ? table.warp_sums[r.lane] : 0;
    sum += __reduce_add_sync(plat::kAllLanes, r.lane < warp ? theirs : 0u) - own;
    if (warp == 0) {
      const std::uint32_t all = __reduce_add_sync(plat::kAllLanes, theirs);
      table.num_entries = static_cast<std::int32_t>(all >> 16);
      table.first[all >> 16] = static_cast<std::uint16_t>(num_pairs);
    }
    if (count > 0) {
      std::uint32_t entry = sum >> 16;
      const std::uint32_t place = sum & 0xffffu;
      table.count[pair] = place;  // from here on: where its pairs begin
#pragma unroll 1
      for (std::uint32_t k = 0; k < count; k += L::kEntryPairs, ++entry) {
        table.expert[entry] = static_cast<std::uint16_t>(pair);
        table.first[entry] = static_cast<std::uint16_t>(place + k);
      }
    }
    consumers_sync<L>();
    if (pair < num_pairs) {
      table.sorted[table.count[id] + rank] = static_cast<std::uint16_t>(pair);
    }
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
  }

  // ---- the shared expert's second product

  // Sixteen columns of the band, a part of I, eight rows: while the first
  // experts' weights are on their way. Its h is there by then, or nearly.
  LOWLAT_DEVICE bool multiply_shared(int m, int part, int group, float* dst) const {
    const std::uint32_t codes = sm90::shared_address(r.smem) + L::kRingOffset + L::kBandAt +
                                (16 * m + g) * L::kInner + part * L::kPartBlocks * 64 + t * 16;
    const int band = r.block_idx * L::kBandRows;
    const int low_row = (band + 16 * m) / L::kBlock - band / L::kBlock;
    const int high_row = (band + 16 * m + 8) / L::kBlock - band / L::kBlock;
    const int row = group * kColumns + g;
    const unsigned char* hidden =
        r.shared_hidden(row < r.a.rows ? row : r.a.rows - 1) + part * L::kPartBlocks * 128 + t * 32;
    std::uint32_t b[L::kPartBlocks][8];
    for (int tries = 1;; ++tries) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < L::kPartBlocks; ++i) {
        const uint4 v = load_packet(hidden + i * 128), w = load_packet(hidden + i * 128 + 16);
        all = all && v.w != kPoison && w.w != kPoison;
        b[i][0] = v.x, b[i][1] = v.y, b[i][2] = v.z, b[i][3] = v.w;
        b[i][4] = w.x, b[i][5] = w.y, b[i][6] = w.z, b[i][7] = w.w;
      }
      if (__all_sync(plat::kAllLanes, all)) break;
      const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
      if (__any_sync(plat::kAllLanes, late)) return false;
    }
    float acc[4] = {};
    std::uint32_t exponent = 0;
#pragma unroll
    for (int i = 0; i < L::kPartBlocks; ++i) {
      // A scale group is two lanes' runs, or two blocks' of four lanes.
      constexpr int kSpan = L::kBlock == 32 ? 1 : 2;
      if (i % kSpan == 0) {
        float amax = pairs_amax<8>(b[i]);
        if constexpr (kSpan == 2) amax = fmaxf(amax, pairs_amax<8>(b[i + 1]));
        exponent = activation_exponent(lanes_max<2 * kSpan>(amax));
      }
      std::uint32_t quantized[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) quantized[k] = b[i][k];
      quantize_pairs<8>(quantized, exponent);
      const int column = ((part * L::kPartBlocks + i) * 64 + t * 16) / L::kBlock;
      const std::uint8_t* scales = r.table.band_scales + column;
      const uint4 low = smem_load16(codes + i * 64);
      const uint4 high = smem_load16(codes + 8 * L::kInner + i * 64);
      multiply_e4m3(acc, low, high, e4m3_factor(scales[low_row * L::kBandScaleColumns]),
                    e4m3_factor(scales[high_row * L::kBandScaleColumns]), quantized);
    }
    dst += (part * kColumns + 2 * t) * L::kBandRows + 16 * m + g;
    dst[0] = acc[0];
    dst[L::kBandRows] = acc[1];
    dst[8] = acc[2];
    dst[L::kBandRows + 8] = acc[3];
    return true;
  }
  LOWLAT_DEVICE bool run_shared_second() {
    if (!r.shared || r.block_idx >= L::kBands) return true;
    if (!barrier_wait(&r.barriers.band_full, 0, r.watch)) return false;
    for (int group = 0; group < r.num_groups(); ++group) {
      float* dst = begin_sums();
      if (dst == nullptr) return false;
#pragma unroll 1
      for (int item = warp; item < L::kSharedParts * L::kRowBlocks; item += L::kConsumers) {
        if (!multiply_shared(item / L::kSharedParts, item % L::kSharedParts, group, dst)) {
          return false;
        }
      }
      end_sums();
    }
    arrive(&r.barriers.band_done);
    return true;
  }

  // ---- routed experts

  // The codes of a warp's sixteen rows of two groups of 32 along K, as they lie in a slot: `words`
  // are a[0 .. 3]'s of the first, then of the second, before expansion.
  // `rows`: where codes_at or lines_at of the slot begin.
  template <bool kInLines>
  LOWLAT_DEVICE static void load_codes(std::uint32_t (&words)[4], std::uint32_t rows, int group) {
    if constexpr (L::kMarlin) {
      // A tile's word: rows g (even bytes) and g + 8 (odd bytes) at k = 2t (bytes 0 1) and 2t + 1,
      // k + 8 in the upper nibbles; a group is two tiles.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t at = rows + (group + i) * 2 * L::kTileBytes;
        const std::uint32_t first = smem_load4(at), second = smem_load4(at + L::kTileBytes);
        words[2 * i] = __byte_perm(first, second, 0x6420);
        words[2 * i + 1] = __byte_perm(first, second, 0x7531);
      }
    } else if constexpr (kInLines) {
      constexpr int kLine = L::kTileValues * L::kLineBytes;
      sm90::load_matrices(
          words, (rows ^ group % L::kLineGroups * 16) + group / L::kLineGroups * kLine);
    } else {
      sm90::load_matrices(words, rows + group * 16);
    }
  }
  // Where load_codes begins for quarter q of a slot's 64 rows: checkpoint: rows `low` .. + 7 and
  // `high` .. + 7.
  LOWLAT_DEVICE std::uint32_t codes_at(int q, int low, int high, int pitch) const {
    if constexpr (L::kMarlin) return ((2 * q + g % 2) * 4 + t) * 16 + g / 2 * 4;
    return ((r.lane / 8 % 2 != 0 ? high : low) + r.lane % 8) * pitch + r.lane / 16 * 16;
  }

  // The same of a tile: eight rows of w1 and of w3 in lines.
  LOWLAT_DEVICE std::uint32_t lines_at(int q) const {
    if constexpr (L::kMarlin) return codes_at(q, 0, 0, 0);
    const int row = r.lane % 8;
    return (r.lane / 8 % 2 != 0 ? L::kChunkCodes / 2 : 0) + (8 * q + row) * L::kLineBytes +
           ((r.lane / 16) ^ row) * 16;
  }

  // Products of kGroups groups of this warp's sixteen weight rows with the columns. `load(group)`
  // reads what belongs to a group's sums, early; `add(that, d)` takes the sums in order.
  template <int kGroups, bool kInLines, class Load, class Add>
  LOWLAT_DEVICE static void multiply(std::uint32_t rows, std::uint64_t columns, const Load& load,
                                     const Add& add) {
    __syncwarp();  // the waits before may have parted the lanes
    constexpr int kBatch = 2, kBatches = kGroups / kBatch;
    static_assert(kGroups % kBatch == 0);
    using Factors = decltype(load(0));
    float d[2][kBatch][4];
    std::uint32_t a[2][kBatch][4] = {}, codes[kBatch / 2][4] = {};
    Factors factors[2][kBatch];
    const auto load_batch = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kBatch; i += 2) load_codes<kInLines>(codes[i / 2], rows, batch * kBatch + i);
    };
    const auto finish = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        add(factors[batch & 1][i], d[batch & 1][i]);
      }
    };
    load_batch(0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        std::uint32_t (&to)[4] = a[batch & 1][i / 2];
        expand_fp4_e4m3(codes[i / 4][i % 4], to[i % 2], to[i % 2 + 2]);
      }
      products_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        product_e4m3(d[batch & 1][i], a[batch & 1][i],
                     columns + (batch * kBatch + i) * (L::kGroupBytes / 16));
      }
      products_commit();
      // While they run.
      if (batch + 1 < kBatches) load_batch(batch + 1);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) factors[batch & 1][i] = load(batch * kBatch + i);
      if (batch > 0) {
        products_wait<1>();
        finish(batch - 1);
      }
    }
    products_wait<0>();
    finish(kBatches - 1);
  }
  LOWLAT_DEVICE static float power(std::uint32_t byte) { return __uint_as_float(byte << 23); }
  // Which of a Marlin tile's 64 rows are this lane's in quarter q: this one and eight further. A
  // warp so reads 128 bytes in one piece.
  LOWLAT_DEVICE int tile_row(int q) const { return g / 2 * 16 + 2 * q + g % 2; }
  // Where their scales lie in a group's 64: the second's is two further.
  LOWLAT_DEVICE std::uint32_t scales_at(int q) const {
    return 8 * (2 * q + g % 2) + g / 4 * 4 + g / 2 % 2;
  }
  LOWLAT_DEVICE static std::uint64_t columns_matrix(std::uint32_t slot) {
    return product_columns(slot + L::kColumnsOffset);
  }

  // The warp groups take turns, use after use: the first of `first` and on that is this one's.
  LOWLAT_DEVICE static int turn(int group, int first) {
    return (group + L::kWarpGroups - first % L::kWarpGroups) % L::kWarpGroups;
  }
  LOWLAT_DEVICE bool run_tiles() {
    const int group = warp / 4, quarter = warp % 4, own_tiles = r.own_tiles();
    // Checkpoint: eight rows of w1, the same of w3; Marlin: sixteen of either.
    const std::uint32_t rows = lines_at(quarter);
    for (int n = 0; n < own_tiles; ++n) {
      const int buffer = n % L::kBuffers;
      const std::uint32_t tile_scales = sm90::shared_address(r.smem) + L::kScalesOffset +
                                        buffer * L::kTileScales + (8 * quarter + g) * L::kScaleRow;
      float total[2] = {};  // of rows g and g + 8, pair t
      if (!L::kMarlin &&
          !barrier_wait(&r.barriers.scales_full[buffer], n / L::kBuffers & 1, r.watch)) {
        return false;
      }
#pragma unroll 1
      for (int i = turn(group, n * L::kUses); i < L::kUses; i += L::kWarpGroups) {
        const int use = n * L::kUses + i, slot = use % L::kRing;
        if (!r.wait_filled(use)) return false;
        sm90::fence_async_shared();  // the products read the columns past the ordinary path
        const std::uint32_t address = r.slot_address(slot);
        // Of the low and the high rows; from a group to the next, kStep bytes.
        constexpr int kStep = L::kMarlin ? L::kUseRows : 1;
        const std::uint32_t low_scale = L::kMarlin ? address + L::kChunkCodes + scales_at(quarter)
                                                   : tile_scales + i * L::kChunkGroups;
        const std::uint32_t high_scale =
            L::kMarlin ? low_scale + 2 : low_scale + L::kTileValues * L::kScaleRow;
        float acc[2] = {};
        multiply<L::kChunkGroups, true>(
            address + rows, columns_matrix(address),
            [&](int k) {
              return make_uint2(smem_load1(low_scale + k * kStep),
                                smem_load1(high_scale + k * kStep));
            },
            [&](uint2 that, const float (&d)[4]) {
              acc[0] = plat::fma(d[0] + d[1], power(that.x), acc[0]);
              acc[1] = plat::fma(d[2] + d[3], power(that.y), acc[1]);
            });
        const float column = __uint_as_float(smem_load4(address + L::kColumnScales + t * 16));
        arrive(&r.barriers.empty[slot]);
        total[0] = plat::fma(acc[0], column, total[0]);
        total[1] = plat::fma(acc[1], column, total[1]);
      }
      if (!L::kMarlin) arrive(&r.barriers.scales_empty[buffer]);
      float* dst = begin_sums();
      if (dst == nullptr) return false;
      constexpr int kHigh = L::kMarlin ? 8 : L::kTileValues;  // rows from low to high
      dst += (group * L::kEntryPairs + t) * L::kSumsPitch +
             (L::kMarlin ? tile_row(quarter) : 8 * quarter + g);
      dst[0] = total[0];
      dst[kHigh] = total[1];
      end_sums();
    }
    return true;
  }

  LOWLAT_DEVICE bool run_second() const {
    if (r.block_idx >= L::kBands) return true;
    const int group = warp / 4, first_uses = r.own_tiles() * L::kUses;
    const int quarter = warp % 4;
    const std::uint32_t rows = codes_at(quarter, 16 * quarter, 16 * quarter + 8, L::kPartPitch);
    const int low_row = L::kMarlin ? tile_row(quarter) : 16 * quarter + g;
    for (int entry = turn(group, first_uses); entry < r.table.num_entries;
         entry += L::kWarpGroups) {
      float acc[2] = {};
#pragma unroll 1
      for (int part = 0; part < L::kBandParts; ++part) {
        const int use = first_uses + r.band_use_of(entry, part), slot = use % L::kRing;
        if (!r.wait_filled(use)) return false;
        sm90::fence_async_shared();  // the products read the columns past the ordinary path
        const std::uint32_t address = r.slot_address(slot), scales = address + L::kBandCodes;
        constexpr int kStep = L::kMarlin ? L::kBandRows : 1;
        const std::uint32_t low_scale =
            scales +
            (L::kMarlin ? scales_at(quarter) : low_row * L::kInnerGroups + part * L::kPartGroups);
        const std::uint32_t high_scale = low_scale + (L::kMarlin ? 2 : 8 * L::kInnerGroups);
        const std::uint32_t column_scales = address + L::kColumnScales + t * (L::kScaleWords * 4);
        multiply<L::kPartGroups, false>(
            address + rows, columns_matrix(address),
            [&](int i) {
              return make_uint3(smem_load1(low_scale + i * kStep),
                                smem_load1(high_scale + i * kStep),
                                smem_load4(column_scales + i * 4));
            },
            [&](uint3 that, const float (&d)[4]) {
              const float column = __uint_as_float(that.z);
              acc[0] = plat::fma(d[0] + d[1], power(that.x) * column, acc[0]);
              acc[1] = plat::fma(d[2] + d[3], power(that.y) * column, acc[1]);
            });
        arrive(&r.barriers.empty[slot]);
      }
      const int begin = r.table.first[entry], num = r.table.first[entry + 1] - begin;
      if (t >= num) continue;
      const int pair = r.table.sorted[begin + t];
      const float weight = r.table.weights[pair];
      __nv_bfloat16* dst = r.second(pair);
      dst[low_row] = __float2bfloat16_rn(weight * acc[0]);
      dst[low_row + 8] = __float2bfloat16_rn(weight * acc[1]);
    }
    return true;
  }

  LOWLAT_DEVICE bool run(stages::GateRule rule, stages::GateSum sum_rule) {
    g = r.lane / 4;
    t = r.lane % 4;
    load_x();
    bool going = !r.gates() || run_gate();
    route(rule);  // every consumer comes to its barriers
    make_table();
    weigh(sum_rule);
    // The first experts are on their way.
    for (int n = 0; going && n < r.shared_tiles(); ++n) {
      going = run_shared_tile(n);
    }
    return going && barrier_wait(&r.barriers.table, 0, r.watch) && run_shared_second() &&
           run_tiles() && run_second();
  }
};

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused
