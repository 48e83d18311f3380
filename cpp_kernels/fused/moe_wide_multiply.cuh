// fused/moe_wide_multiply.cuh: the role of moe_wide.cuh that multiplies: router, routing, shared
// expert, routed experts.
#pragma once

#include "fused/moe_wide_layout.cuh"
#include "fused/moe_wide_route.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

// ------------------------------------------------------------------------------------ the sum

// y of four columns of a row, when all its results are there. A whole warp calls; false (all
// lanes): they are late.
template <class L>
LOWLAT_DEVICE bool sum_quad(const Region<L>& r, int row, int quad, float (&y)[4]) {
  uint2 part[L::kRowParts];
#pragma unroll
  for (int slot = 0; slot < L::kRowParts; ++slot) {
    const std::uint32_t begin = slot < L::kSlots || r.shared ? kPoison : 0;
    part[slot] = make_uint2(begin, begin);
  }
  const std::uint32_t* first = r.results(row, 0, 4 * quad);
  for (int tries = 1;; ++tries) {
#pragma unroll
    for (int slot = 0; slot < L::kRowParts; ++slot) {
      load_words_if(part[slot], kPoison, first + slot * (L::kHidden / 2));
    }
    bool here = true;
#pragma unroll
    for (int slot = 0; slot < L::kRowParts; ++slot) {
      here = here && part[slot].x != kPoison && part[slot].y != kPoison;
    }
    if (__all_sync(plat::kAllLanes, here)) break;
    const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
    if (__any_sync(plat::kAllLanes, late)) return false;
  }
  float sum[4] = {};
#pragma unroll
  for (int slot = 0; slot < L::kSlots; ++slot) {
    sum[0] += low_bf16(part[slot].x), sum[1] += high_bf16(part[slot].x);
    sum[2] += low_bf16(part[slot].y), sum[3] += high_bf16(part[slot].y);
  }
  const uint2 shared = part[L::kSlots];
  y[0] = round_to_bf16(sum[0]) + low_bf16(shared.x);
  y[1] = round_to_bf16(sum[1]) + high_bf16(shared.x);
  y[2] = round_to_bf16(sum[2]) + low_bf16(shared.y);
  y[3] = round_to_bf16(sum[3]) + high_bf16(shared.y);
  return true;
}

// ------------------------------------------------------------------------------------ consumers

template <class L>
struct Consumer {
  const Region<L>& r;
  int warp;
  int g = 0, t = 0;  // place in the fragments
  int sums = 0;      // of the partial buffers
  // x of this warp's slice, of eight rows: a lane has eight of each 32 elements, as it has of the
  // router's, so that four lanes read whole sectors.
  static constexpr int kPieces = L::kBlockK / 32;
  uint4 x[L::kSliceBlocks][kPieces];

  // Of x, a group of eight rows, from column `column` on.
  LOWLAT_DEVICE const uint4* group_x(int group, int column) const {
    const int row = group * kColumns + g;
    return reinterpret_cast<const uint4*>(
        r.a.x + static_cast<std::size_t>(row < r.a.rows ? row : r.a.rows - 1) * L::kHidden +
        column + t * 8);
  }
  LOWLAT_DEVICE void load_block(int block, const uint4* src) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) x[block][i] = __ldcg(src + block * (L::kBlockK / 8) + i * 4);
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

  // A warp has a slice of the block's part of K, and of the groups of rows each kScoreParts-th.
  LOWLAT_DEVICE bool run_gate() {
    const int slice = warp % L::kScoreSlices * L::kSlice, own = warp / L::kScoreSlices;
    const auto source = [&](int first) {
      return group_x(first + own, r.score_part() * L::kGateK + slice);
    };
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) load_block(block, source(0));
    if (!barrier_wait(&r.barriers.gate_full, 0, r.watch)) return false;
    // Rows after the last: computed, not used.
    const auto row_at = [&](int row) {
      return r.slot_address(0) + (row < L::kScoreRows ? row : L::kScoreRows - 1) * L::kGatePitch +
             (slice + t * 8) * 2;
    };
    const std::uint32_t low_address = row_at(g), high_address = row_at(g + 8);
    for (int first = 0; first < r.num_groups(); first += L::kScoreParts) {
      const bool more = first + L::kScoreParts < r.num_groups();
      const uint4* next = source(more ? first + L::kScoreParts : first);
      float acc[2][4] = {};
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const std::uint32_t at = block * L::kBlockK * 2 + i * 64;
          multiply_bf16(acc[i & 1], smem_load16(low_address + at), smem_load16(high_address + at),
                        x[block][i]);
        }
        if (more) load_block(block, next);
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0])) return false;
    }
    arrive(&r.barriers.gate_done);
    return true;
  }

  // Until all rows are split. One warp asks: it is one word, whose counting all warps of all blocks
  // would hold up. A block that is never heard is reported for its scores, by those that make the
  // table.
  LOWLAT_DEVICE bool wait_rows() const {
    if (warp != 0) return barrier_wait(&r.barriers.rows, 0, r.watch);
    if (!r.wait_count(r.rows_done(), counted(r.a.rows * L::kChunks))) return false;
    arrive(&r.barriers.rows);
    return true;
  }
  // Gate rows, then up rows; x as the block-fp8 linear sees it. Codes of both are f16 values, and
  // scales multiply the sums of 32 along K.
  LOWLAT_DEVICE bool run_shared_tile(int n) {
    if (n == 0 && !wait_rows()) return false;
    constexpr int kBlocks = L::kSlice / 64;
    const auto work = r.shared_work(r.block_idx);
    uint4 codes[kBlocks];
    std::uint32_t row_scales[kBlocks];  // of rows 2t and 2t + 1, of two groups of 32
    const auto load_rows = [&](int block, int group) {
      const int at = warp * kBlocks + block;
      codes[block] = __ldcg(reinterpret_cast<const uint4*>(r.shared_x(group) + at * 512) + r.lane);
      row_scales[block] =
          __ldcg(reinterpret_cast<const std::uint32_t*>(r.shared_x_scales(group) + at * 16) + t);
    };
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) load_rows(block, work.group(0, r.block_idx));
    if (!barrier_wait(&r.barriers.shared_full[n], 0, r.watch)) return false;
    const std::uint32_t low_address =
        r.slot_address(0) + L::kSharedAt + g * L::kSharedPitch + warp * L::kSlice + t * 8;
    const auto& scales = r.table.shared_scales;
    for (int group = 0; group < work.num_groups; ++group) {
      // Blocks of the next group's x follow as this one's are done.
      const bool more = group + 1 < work.num_groups;
      const int next = more ? work.group(group + 1, r.block_idx) : 0;
      float acc[4] = {};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t at = low_address + block * 64 + half * 32;
          const uint2 low = smem_load8(at),
                      high = smem_load8(at + L::kSharedRows * L::kSharedPitch);
          std::uint32_t l[4], h[4], x_pairs[4];
          unpack_e4m3(low.x, low.y, l);
          unpack_e4m3(high.x, high.y, h);
          unpack_e4m3(half == 0 ? codes[block].x : codes[block].z,
                      half == 0 ? codes[block].y : codes[block].w, x_pairs);
          float d[4] = {};
          multiply_half_pairs(d, l, h, x_pairs);
          multiply_half_pairs(d, l + 2, h + 2, x_pairs + 2);
          const int scale = (warp * L::kSlice + block * 64 + half * 32) / L::kBlock;
          const float gate = power(scales[0][scale]), up = power(scales[1][scale]);
          const float first = power(row_scales[block] >> 16 * half & 0xffu),
                      second = power(row_scales[block] >> (16 * half + 8) & 0xffu);
          acc[0] = plat::fma(d[0], gate * first, acc[0]);
          acc[1] = plat::fma(d[1], gate * second, acc[1]);
          acc[2] = plat::fma(d[2], up * first, acc[2]);
          acc[3] = plat::fma(d[3], up * second, acc[3]);
        }
        if (more) load_rows(block, next);
      }
      if (!hand_over(acc)) return false;
    }
    arrive(&r.barriers.shared_done[n]);
    return true;
  }

  // ---- the shared expert's second product

  // Of weight rows g and g + 8 two neighbours' results, from lanes g and g ^ 1: rows g and g + 1
  // in an even lane, g + 7 and g + 8 in an odd one. A word is a pattern of no result until then.
  LOWLAT_DEVICE std::uint32_t result_word(float low, float high) const {
    const std::uint32_t own = pack_bf16(low, high);
    const std::uint32_t theirs = __shfl_xor_sync(plat::kAllLanes, own, 4);
    return g % 2 == 0 ? __byte_perm(own, theirs, 0x5410) : __byte_perm(theirs, own, 0x7632);
  }
  // Where they begin, from the row that is lane g's first.
  LOWLAT_DEVICE int result_column(int first) const { return g % 2 == 0 ? first : first + 7; }

  // This warp's groups of rows of the band's use `number`, sixteen columns of a warp group. Warps
  // of a scheduler, every fourth, have other groups in each use, so that all have as many.
  LOWLAT_DEVICE bool run_shared_use(int number, int use) const {
    static_assert(L::kSharedUseRows == 16);
    const int slot = L::slot_of(use), column = number * L::kSharedUseRows;
    const int band = r.block_idx * L::kBandRows;
    const int low_row = (band + column) / L::kBlock - band / L::kBlock;
    const int high_row = (band + column + 8) / L::kBlock - band / L::kBlock;
    const std::uint8_t* low_scales = r.table.band_scales + low_row * L::kBandScaleColumns;
    const std::uint8_t* high_scales = r.table.band_scales + high_row * L::kBandScaleColumns;
    const std::uint32_t low_address = r.slot_address(slot) + g * L::kInner + t * 8;
    uint4 codes[L::kPartBlocks];
    std::uint32_t row_scales[L::kPartBlocks];  // of rows 2t and 2t + 1, of two groups of 32
    const auto load_block = [&](int group, int part, int i) {
      const int at = part * L::kPartBlocks + i;
      codes[i] = __ldcg(reinterpret_cast<const uint4*>(r.shared_h(group) + at * 512) + r.lane);
      row_scales[i] =
          __ldcg(reinterpret_cast<const std::uint32_t*>(r.shared_h_scales(group) + at * 16) + t);
    };
    const int first_group = (warp + number) % 4;
    if (first_group < r.num_groups()) {
#pragma unroll
      for (int i = 0; i < L::kPartBlocks; ++i) load_block(first_group, 0, i);
    }
    if (!r.wait_filled(use)) return false;
#pragma unroll 1
    for (int group = first_group; group < r.num_groups(); group += 4) {
      float acc[4] = {};
#pragma unroll 1
      for (int part = 0; part < L::kSharedParts; ++part) {
        const bool last = part + 1 == L::kSharedParts;
        const int next_part = last ? 0 : part + 1, next_group = last ? group + 4 : group;
#pragma unroll
        for (int i = 0; i < L::kPartBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int k = (part * L::kPartBlocks + i) * 64 + half * 32;
            const uint2 low = smem_load8(low_address + k),
                        high = smem_load8(low_address + 8 * L::kInner + k);
            std::uint32_t l[4], h[4], pairs[4];
            unpack_e4m3(low.x, low.y, l);
            unpack_e4m3(high.x, high.y, h);
            unpack_e4m3(half == 0 ? codes[i].x : codes[i].z, half == 0 ? codes[i].y : codes[i].w,
                        pairs);
            float d[4] = {};
            multiply_half_pairs(d, l, h, pairs);
            multiply_half_pairs(d, l + 2, h + 2, pairs + 2);
            const float low_scale = power(low_scales[k / L::kBlock]),
                        high_scale = power(high_scales[k / L::kBlock]);
            const float first = power(row_scales[i] >> 16 * half & 0xffu),
                        second = power(row_scales[i] >> (16 * half + 8) & 0xffu);
            acc[0] = plat::fma(d[0], low_scale * first, acc[0]);
            acc[1] = plat::fma(d[1], low_scale * second, acc[1]);
            acc[2] = plat::fma(d[2], high_scale * first, acc[2]);
            acc[3] = plat::fma(d[3], high_scale * second, acc[3]);
          }
          if (next_group < r.num_groups()) load_block(next_group, next_part, i);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = group * kColumns + 2 * t + i;
        const std::uint32_t word = result_word(acc[i], acc[2 + i]);
        if (row >= r.a.rows) continue;
        store_word(
            r.results(row, L::kSlots, r.block_idx * L::kBandRows + column + result_column(g)),
            word);
      }
    }
    arrive(&r.barriers.empty[slot]);
    return true;
  }

  // ---- routed experts

  // The codes of a warp's sixteen rows of two groups of 32 along K, as they lie in a slot: `words`
  // are a[0 .. 3]'s of the first, then of the second, before expansion.
  // `rows`: where codes_at of the slot begins; kLine: bytes from a line of 128 to the next, or 0:
  // the rows are not in lines.
  template <int kLine>
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
    } else if constexpr (kLine > 0) {
      sm90::load_matrices(words,
                          (rows ^ group % L::kLineGroups * 16) + group / L::kLineGroups * kLine);
    } else {
      sm90::load_matrices(words, rows + group * 16);
    }
  }
  // Where load_codes begins for quarter q of a slot's 64 rows: checkpoint: eight rows from `low`
  // and eight from `high` on, in bytes, `pitch` bytes apart.
  template <bool kInLines>
  LOWLAT_DEVICE std::uint32_t codes_at(int q, int low, int high, int pitch) const {
    if constexpr (L::kMarlin) return ((2 * q + g % 2) * 4 + t) * 16 + g / 2 * 4;
    const int row = r.lane % 8, unit = kInLines ? (r.lane / 16) ^ row : r.lane / 16;
    return (r.lane / 8 % 2 != 0 ? high : low) + row * pitch + unit * 16;
  }

  // Products of kGroups groups of this warp's sixteen weight rows with the columns. `load(group)`
  // reads what belongs to a group's sums, early; `add(that, d)` takes the sums in order.
  template <int kGroups, int kLine, class Load, class Add>
  LOWLAT_DEVICE static void multiply(std::uint32_t rows, std::uint32_t slot, const Load& load,
                                     const Add& add) {
    __syncwarp();  // the waits before may have parted the lanes
    // The matrix: its high half is that of any. The reduction tells the compiler that all lanes
    // have the same low half, which so lies in uniform registers.
    const std::uint64_t kMatrix = product_columns(0) >> 32;
    const std::uint32_t columns = __reduce_or_sync(
        plat::kAllLanes, static_cast<std::uint32_t>(product_columns(slot + L::kColumnsOffset)));
    constexpr int kBatch = 2, kBatches = kGroups / kBatch;
    static_assert(kGroups % kBatch == 0);
    using Factors = decltype(load(0));
    float d[2][kBatch][4];
    std::uint32_t a[2][kBatch][4] = {}, codes[kBatch / 2][4] = {};
    Factors factors[2][kBatch];
    const auto load_batch = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kBatch; i += 2) load_codes<kLine>(codes[i / 2], rows, batch * kBatch + i);
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
                     kMatrix << 32 | (columns + (batch * kBatch + i) * (L::kGroupBytes / 16)));
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
  // Of byte i of sixteen.
  LOWLAT_DEVICE static float power_of(const uint4& bytes, int i) {
    const std::uint32_t word = i < 4 ? bytes.x : i < 8 ? bytes.y : i < 12 ? bytes.z : bytes.w;
    return power(word >> 8 * (i % 4) & 0xffu);
  }
  // Which of a Marlin tile's 64 rows are this lane's in quarter q: this one and eight further. A
  // warp so reads 128 bytes in one piece.
  LOWLAT_DEVICE int tile_row(int q) const { return g / 2 * 16 + 2 * q + g % 2; }
  // Where their scales lie in a group's 64: the second's is two further.
  LOWLAT_DEVICE std::uint32_t scales_at(int q) const {
    return 8 * (2 * q + g % 2) + g / 4 * 4 + g / 2 % 2;
  }

  // The warp groups take turns, use after use: the first of `first` and on that is this one's.
  LOWLAT_DEVICE static int turn(int group, int first) {
    return (group + L::kWarpGroups - first % L::kWarpGroups) % L::kWarpGroups;
  }
  LOWLAT_DEVICE bool run_tiles() {
    const int group = warp / 4, quarter = warp % 4, own_tiles = r.own_tiles();
    // Checkpoint: eight rows of w1, the same of w3; Marlin: sixteen of either.
    const int low = 8 * quarter * kLineBytes;
    const std::uint32_t rows = codes_at<true>(quarter, low, L::kChunkCodes / 2 + low, kLineBytes);
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
        const int use = n * L::kUses + i, slot = L::slot_of(use);
        if (!r.wait_filled(use)) return false;
        sm90::fence_async_shared();  // the products read the columns past the ordinary path
        const std::uint32_t address = r.slot_address(slot);
        float acc[2] = {};
        const auto add = [&](float low, float high, const float (&d)[4]) {
          acc[0] = plat::fma(d[0] + d[1], low, acc[0]);
          acc[1] = plat::fma(d[2] + d[3], high, acc[1]);
        };
        if constexpr (L::kMarlin) {
          const std::uint32_t scales = address + L::kChunkCodes + scales_at(quarter);
          multiply<L::kChunkGroups, L::kTileValues * kLineBytes>(
              address + rows, address,
              [&](int k) {
                return make_uint2(smem_load1(scales + k * L::kUseRows),
                                  smem_load1(scales + k * L::kUseRows + 2));
              },
              [&](uint2 that, const float (&d)[4]) { add(power(that.x), power(that.y), d); });
        } else {
          static_assert(L::kChunkGroups == 16);
          const std::uint32_t at = tile_scales + i * L::kChunkGroups;
          const uint4 low = smem_load16(at), high = smem_load16(at + L::kTileValues * L::kScaleRow);
          multiply<L::kChunkGroups, L::kTileValues * kLineBytes>(
              address + rows, address,
              [&](int k) { return make_float2(power_of(low, k), power_of(high, k)); },
              [&](float2 that, const float (&d)[4]) { add(that.x, that.y, d); });
        }
        const float column = __uint_as_float(smem_load4(address + L::kColumnScales + t * 16));
        arrive(&r.barriers.empty[slot]);
        total[0] = plat::fma(acc[0], column, total[0]);
        total[1] = plat::fma(acc[1], column, total[1]);
      }
      if (!L::kMarlin) arrive(&r.barriers.scales_empty[buffer]);
      float* dst = begin_sums();
      if (dst == nullptr) return false;
      constexpr int kHigh = L::kMarlin ? 8 : L::kTileValues;  // rows from low to high
      // By the piece that the group began with: the finisher adds in an order that is every tile's,
      // wherever it lies among the block's, that is whatever other rows have chosen.
      dst += (turn(group, n * L::kUses) * L::kEntryPairs + t) * L::kSumsPitch +
             (L::kMarlin ? tile_row(quarter) : 8 * quarter + g);
      dst[0] = total[0];
      dst[kHigh] = total[1];
      end_sums();
    }
    return true;
  }

  LOWLAT_DEVICE bool run_second() const {
    const int group = warp / 4, tile_uses = r.own_tiles() * L::kUses;
    const int quarter = warp % 4;
    if (r.shared_uses() > 0 &&
        !r.wait_count(r.hidden_done(), counted(r.a.rows * L::kHiddenSpans), kHiddenEvent)) {
      return false;
    }
    for (int i = turn(group, tile_uses); i < r.shared_uses(); i += L::kWarpGroups) {
      if (!run_shared_use(i, tile_uses + i)) return false;
    }
    const int first_uses = tile_uses + r.shared_uses();
    constexpr int kPitch = L::kBandInLines ? kLineBytes : L::kPartRow;
    const std::uint32_t rows = codes_at<L::kBandInLines>(quarter, 16 * quarter * kPitch,
                                                         (16 * quarter + 8) * kPitch, kPitch);
    const int low_row = L::kMarlin ? tile_row(quarter) : 16 * quarter + g;
    // What a unit has become is stored behind the next one's fence, which would wait for it.
    std::uint32_t* dst = nullptr;
    std::uint32_t word = 0;
    const auto store_results = [&] {
      if (dst != nullptr) store_word(dst, word);
    };
    const int place = turn(group, first_uses);  // in each batch
    for (int n = 0;; ++n) {
      int batch = 0;
      if (!r.wait_batch(n, &batch)) return false;
      if (batch < 0) break;
      const int entry = r.batch_entry(batch), band = r.batch_band(batch) + place;
      const int begin = r.table.first[entry], num = r.table.first[entry + 1] - begin;
      const int pair = r.table.sorted[begin + (t < num ? t : 0)];
      const float weight = r.table.weights[pair];
      float acc[2] = {};
#pragma unroll 1
      for (int part = 0; part < L::kBandParts; ++part) {
        const int use = first_uses + n * L::kBatchUses + part * L::kWarpGroups + place;
        const int slot = L::slot_of(use);
        if (!r.wait_filled(use)) return false;
        sm90::fence_async_shared();  // the products read the columns past the ordinary path
        if (part == 0) store_results();
        const std::uint32_t address = r.slot_address(slot), scales = address + L::kBandCodes;
        const std::uint32_t column_scales = address + L::kColumnScales + t * (L::kScaleWords * 4);
        constexpr int kLine = L::kBandInLines ? L::kBandRows * kLineBytes : 0;
        const auto add = [&](float low, float high, float column, const float (&d)[4]) {
          acc[0] = plat::fma(d[0] + d[1], low * column, acc[0]);
          acc[1] = plat::fma(d[2] + d[3], high * column, acc[1]);
        };
        if constexpr (L::kInnerGroups == 16 && !L::kMarlin) {
          const std::uint32_t at = scales + low_row * L::kInnerGroups;
          const uint4 low = smem_load16(at), high = smem_load16(at + 8 * L::kInnerGroups);
          multiply<L::kPartGroups, kLine>(
              address + rows, address,
              [&](int i) {
                return make_float3(power_of(low, i), power_of(high, i),
                                   __uint_as_float(smem_load4(column_scales + i * 4)));
              },
              [&](float3 that, const float (&d)[4]) { add(that.x, that.y, that.z, d); });
        } else {
          constexpr int kStep = L::kMarlin ? L::kBandRows : 1;
          const std::uint32_t low_scale =
              scales +
              (L::kMarlin ? scales_at(quarter) : low_row * L::kInnerGroups + part * L::kPartGroups);
          const std::uint32_t high_scale = low_scale + (L::kMarlin ? 2 : 8 * L::kInnerGroups);
          multiply<L::kPartGroups, kLine>(
              address + rows, address,
              [&](int i) {
                return make_uint3(smem_load1(low_scale + i * kStep),
                                  smem_load1(high_scale + i * kStep),
                                  smem_load4(column_scales + i * 4));
              },
              [&](uint3 that, const float (&d)[4]) {
                add(power(that.x), power(that.y), __uint_as_float(that.z), d);
              });
        }
        arrive(&r.barriers.empty[slot]);
      }
      word = result_word(weight * acc[0], weight * acc[1]);
      dst = t < num ? r.results(pair / L::kSlots, pair % L::kSlots,
                                band * L::kBandRows + result_column(low_row))
                    : nullptr;
    }
    store_results();
    return true;
  }

  LOWLAT_DEVICE void run(const Rules& rules, Stamps& stamps) {
    g = r.lane / 4;
    t = r.lane % 4;
    bool going = !r.gates() || run_gate();
    route_own_row(r, warp, rules);  // every consumer comes to its barriers
    stamps.mark(StampStage::read);
    // While rows are routed, and the first experts are on their way.
    for (int n = 0; going && n < r.shared_tiles(); ++n) {
      going = run_shared_tile(n);
    }
    going = going && barrier_wait(&r.barriers.table, 0, r.watch) && run_tiles();
    stamps.mark(StampStage::compute);
    going = going && run_second();
    stamps.mark(StampStage::sum);
    if (!going) return;
    if (r.a.boxes.outboxes == nullptr) {
      run_sums(rules.first_row);
    } else if (r.has_band()) {
      wait_band();
    }
  }

  // ---- the sum

  // Where packets have three columns a band's block sends its own: until all its results are there.
  LOWLAT_DEVICE void wait_band() const {
    constexpr int kQuads = L::kBandRows / 4, kRows = plat::kWarpLanes / kQuads;
    static_assert(plat::kWarpLanes % kQuads == 0);
    for (int first = warp * kRows; first < r.a.rows; first += L::kConsumers * kRows) {
      const int row = first + r.lane / kQuads;
      float y[4];
      if (!sum_quad(r, row < r.a.rows ? row : first, r.block_idx * kQuads + r.lane % kQuads, y)) {
        return;
      }
    }
  }
  // y of four columns, a lane each, of every block's results: a warp has quads of one row.
  LOWLAT_DEVICE void run_sums(int first_row) const {
    constexpr int kQuads = L::kHidden / 4, kRowWarps = kQuads / plat::kWarpLanes;
    static_assert(kQuads % plat::kWarpLanes == 0);
    const MoeArgs& a = r.a;
    const std::uint64_t epoch = r.table.quads_epoch;
#pragma unroll 1
    for (int i = warp * r.num_blocks + r.block_idx; i < a.rows * kRowWarps;
         i += L::kConsumers * r.num_blocks) {
      const int row = i / kRowWarps, quad = i % kRowWarps * plat::kWarpLanes + r.lane;
      float y[4];
      if (!sum_quad(r, row, quad, y)) return;
      if (a.quads.tp_size > 0) {
        publish_quad(a.quads, epoch, first_row + row, quad, kQuads, y);
      }
      if (a.out != nullptr) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          a.out[static_cast<std::size_t>(row) * L::kHidden + 4 * quad + k] = y[k];
        }
      }
    }
  }
};

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused
