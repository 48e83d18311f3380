// stages/kv.hpp: stored key-value rows: 448 values as e4m3 with a power of two a 64, 64 as bf16.
//
// A row is 576 data bytes (448 codes, then 64 bf16) and 8 scale bytes (7 ue8m0, one of padding).
// Rows lie flat, 584 bytes each, or in pages: all data rows of a page, then all its scale rows.
// Nothing here touches memory order: who publishes a row is the caller's affair.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "shape/runtime_shape.hpp"
#include "stages/format.hpp"
#include "stages/sum.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kKvDim = shape::kHeadDim;
inline constexpr int kKvRopeDim = shape::kRopeDim;
inline constexpr int kKvNopeDim = kKvDim - kKvRopeDim;
inline constexpr int kKvGroup = 64;
inline constexpr int kKvNumGroups = kKvNopeDim / kKvGroup;
inline constexpr int kKvDataBytes = kKvNopeDim + 2 * kKvRopeDim;
inline constexpr int kKvScaleBytes = 8;
inline constexpr int kKvRowBytes = kKvDataBytes + kKvScaleBytes;
static_assert(kKvDataBytes == 576 && kKvRowBytes == 584 && kKvNumGroups == 7);

// Where one row lies. Byte is std::uint8_t or const std::uint8_t.
template <class Byte>
struct KvRow {
  Byte* data;    // [576]
  Byte* scales;  // [8]
};

// Rows one after another.
template <class Byte>
struct KvFlat {
  Byte* base;
  LOWLAT_DEVICE KvRow<Byte> row(std::int64_t slot) const {
    Byte* data = base + slot * kKvRowBytes;
    return {data, data + kKvDataBytes};
  }
};

// LOWLAT_KV_PAGED: slot / slots_per_page is the page; a page is padded to a multiple of 576 bytes.
LOWLAT_DEVICE constexpr std::int64_t kv_page_bytes(std::int64_t slots_per_page) {
  const std::int64_t bytes = slots_per_page * kKvRowBytes;
  return (bytes + kKvDataBytes - 1) / kKvDataBytes * kKvDataBytes;
}
static_assert(kv_page_bytes(256) == 149760 && kv_page_bytes(128) == 74880);

template <class Byte>
struct KvPaged {
  Byte* base;
  int slots_per_page;
  std::int64_t page_bytes;  // distance of pages: kv_page_bytes(slots_per_page) when they are packed
  LOWLAT_DEVICE KvRow<Byte> row(std::int64_t slot) const {
    Byte* page = base + slot / slots_per_page * page_bytes;
    const std::int64_t i = slot % slots_per_page;
    return {page + i * kKvDataBytes,
            page + slots_per_page * std::int64_t{kKvDataBytes} + i * kKvScaleBytes};
  }
};

// LOWLAT_INDEX_PAGED: rows of the index keys, 64 a page: data bytes and 4 scale bytes. V4.1's data
// are 64 bytes of fp4 pairs, under 4 ue8m0 scales; V4's are 128 e4m3 codes, under one fp32 scale.
inline constexpr int kIndexDataBytes = 64;
inline constexpr int kIndexFp8DataBytes = shape::kIndexDim;
inline constexpr int kIndexScaleBytes = 4;
inline constexpr int kIndexRowBytes = kIndexDataBytes + kIndexScaleBytes;
inline constexpr int kIndexFp8RowBytes = kIndexFp8DataBytes + kIndexScaleBytes;
inline constexpr int kIndexSlotsPerPage = 64;
inline constexpr int kIndexPageBytes = kIndexSlotsPerPage * kIndexRowBytes;
inline constexpr int kIndexFp8PageBytes = kIndexSlotsPerPage * kIndexFp8RowBytes;
static_assert(kIndexFp8RowBytes == 132 && kIndexFp8PageBytes == 8192 + 256);

// Fp4 codes are reached by group() and scale(), which may be apart: groups of 32 values.
template <class Byte, int kDataBytes = kIndexDataBytes>
struct IndexRow {
  static constexpr int kGroupBytes = 16;
  Byte* data;    // [kDataBytes]
  Byte* scales;  // [4]
  int group_step = kGroupBytes, scale_step = 1;
  LOWLAT_DEVICE Byte* group(int g) const { return data + g * group_step; }
  LOWLAT_DEVICE Byte& scale(int g) const { return scales[g * scale_step]; }
};
template <class Byte, int kDataBytes = kIndexDataBytes>
struct IndexFlat {
  Byte* base;
  LOWLAT_DEVICE IndexRow<Byte, kDataBytes> row(std::int64_t slot) const {
    Byte* data = base + slot * (kDataBytes + kIndexScaleBytes);
    return {data, data + kDataBytes};
  }
};
template <class Byte, int kDataBytes = kIndexDataBytes>
struct IndexPaged {
  Byte* base;
  std::int64_t page_bytes;  // distance of pages: kIndex(Fp8)PageBytes when they are packed
  // Of fp4 codes whose scales have pages of their own, see lowlat_pools.split_index; page_bytes
  // then does not count.
  Byte* split_scales = nullptr;
  LOWLAT_DEVICE IndexRow<Byte, kDataBytes> row(std::int64_t slot) const {
    const std::int64_t page_idx = slot / kIndexSlotsPerPage;
    const std::int64_t i = slot % kIndexSlotsPerPage;
    if constexpr (kDataBytes == kIndexDataBytes) {
      using Row = IndexRow<Byte, kDataBytes>;
      if (split_scales != nullptr) {
        const std::int64_t place = 4 * (i % 16) + i / 16;
        return {base + page_idx * (kIndexSlotsPerPage * kDataBytes) + i * Row::kGroupBytes,
                split_scales + page_idx * (kIndexSlotsPerPage * kIndexScaleBytes) + place,
                kIndexSlotsPerPage * Row::kGroupBytes, kIndexSlotsPerPage};
      }
    }
    Byte* page = base + page_idx * page_bytes;
    return {page + i * kDataBytes, page + kIndexSlotsPerPage * kDataBytes + i * kIndexScaleBytes};
  }
};

// Writes a row from kv, fp32 [512], normed and rotated, neither rounded before. Per 64 of the first
// 448: scale = smallest power of two >= max(1e-4, amax) / 448, codes to nearest; the last 64 to
// bf16. The padding byte of the scales is left as it is. The block calls, a warp a group; no sync,
// no scratch.
template <class Block>
struct KvPack {
  LOWLAT_DEVICE static void run(KvRow<std::uint8_t> row, const float* kv) {
    for_groups<Block>(
        kKvNumGroups, kKvGroup, 1e-4f, [&](int g, int i) { return kv[g * kKvGroup + i]; },
        [&](int g, float amax, int begin, int step) {
          const std::uint8_t scale = ue8m0_ceil(amax / kE4m3Max);
          const float inverse = 1.0f / from_ue8m0(scale);  // exact: a power of two
          for (int i = g * kKvGroup + begin; i < (g + 1) * kKvGroup; i += step) {
            row.data[i] = to_e4m3(kv[i] * inverse);
          }
          if (begin == 0) row.scales[g] = scale;
        });
    // Bytes, low one first: a flat row's 584 bytes keep no alignment.
    std::uint8_t* out = row.data + kKvNopeDim;
    for (int i = Team<Block>::thread_idx(); i < kKvRopeDim; i += Block::kNumThreads) {
      const std::uint16_t code = to_bf16(kv[kKvNopeDim + i]);
      out[2 * i] = static_cast<std::uint8_t>(code & 0xffu);
      out[2 * i + 1] = static_cast<std::uint8_t>(code >> 8);
    }
  }
};

// Element i of a stored row, exactly. One thread calls.
template <class Byte>
LOWLAT_DEVICE float kv_value(KvRow<Byte> row, int i) {
  if (i < kKvNopeDim) {
    return kE4m3Values.value[row.data[i]] * from_ue8m0(row.scales[i / kKvGroup]);
  }
  const Byte* code = row.data + kKvNopeDim + 2 * (i - kKvNopeDim);
  return from_bf16(static_cast<std::uint16_t>(code[0] | code[1] << 8));
}

// out fp32 [512]: the stored values, exactly. The block calls, threads split the elements; no sync,
// no scratch.
template <class Block>
struct KvUnpack {
  template <class Byte>
  LOWLAT_DEVICE static void run(float* out, KvRow<Byte> row) {
    if constexpr (Team<Block>::kAlone) {
      for (int group = 0; group < kKvNumGroups; ++group) {
        expand_e4m3(out + group * kKvGroup, row.data + group * kKvGroup,
                    from_ue8m0(row.scales[group]), kKvGroup);
      }
      for (int i = kKvNopeDim; i < kKvDim; ++i) out[i] = kv_value(row, i);
    } else {
      for (int i = Team<Block>::thread_idx(); i < kKvDim; i += Block::kNumThreads) {
        out[i] = kv_value(row, i);
      }
    }
  }
};
static_assert(kKvRopeDim == kKvGroup, "the bf16 part is as wide as a group");

}  // namespace lowlat::LOWLAT_PLATFORM::stages
