// stages/index.hpp: queries, keys and scores of the index that selects compressed entries.
//
//   V4.1   query   RoPE, bf16, then every 32 channels through four bits    index_query
//          key     projection of a latent, bf16, norm, bf16, RoPE, bf16, four bits    IndexKey
//   V4     query   RoPE, Hadamard, e4m3 under one fp32 scale a head        index_query_fp8
//          key     pooled, norm, RoPE, Hadamard, e4m3 under one fp32 scale IndexKeyFp8
//
// The rows of keys (stages/kv.hpp) say which of the two index_scores reads. Scores are selected
// from by stages/select.hpp.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/fp4.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/pool.hpp"
#include "stages/rope.hpp"
#include "stages/sum.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kIndexDim = 2 * kIndexDataBytes;
inline constexpr int kIndexGroups = kIndexDim / kFp4IndexGroup;
static_assert(kIndexDim == shape::kIndexDim && kIndexGroups == kIndexScaleBytes);
static_assert(kIndexDim == kIndexFp8DataBytes);

// A head's weight in the scores of a row: its bf16-rounded projection times head_dim^-0.5 *
// heads^-0.5, one product in fp32.
LOWLAT_DEVICE float index_weight(std::uint16_t projection, int num_heads) {
  return from_bf16(projection) * plat::rsqrt(static_cast<float>(kIndexDim * num_heads));
}
// V4: of the unrounded projection, with the scale of the row's query codes folded in.
LOWLAT_DEVICE float index_weight(float projection, int num_heads, float query_scale) {
  return projection * plat::rsqrt(static_cast<float>(kIndexDim * num_heads)) * query_scale;
}

// Turns dimensions 64..127 of one head or key, bf16 values in fp32 [kIndexDim] in and out. The
// block calls; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void index_rotate(float* x, const RopeTurn& turn) {
  float* rotated = x + kIndexDim - kRopeDim;
  Rope<Block>::rotate(rotated, turn);
  Team<Block>::sync();
  for (int i = Team<Block>::thread_idx(); i < kRopeDim; i += Block::kNumThreads) {
    rotated[i] = round_bf16(rotated[i]);
  }
  Team<Block>::sync();
}

// Heads of one query row: RoPE, then every 32 channels through four bits and a ue8m0 scale. query:
// bf16 values in fp32 [num_heads, kIndexDim], in place. Heads and rows are independent. The block
// calls; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void index_query(float* query, int num_heads, const RopeTurn& turn) {
  for (int head = 0; head < num_heads; ++head) {
    index_rotate<Block>(query + head * kIndexDim, turn);
  }
  const int num_groups = num_heads * kIndexGroups;
  for (int group = Team<Block>::thread_idx(); group < num_groups; group += Block::kNumThreads) {
    fp4_round_trip_index(query + group * kFp4IndexGroup);
  }
  Team<Block>::sync();
}

// The stored key of one compressed entry: norm, RoPE at the group's first position, four bits. x:
// fp32 [kIndexDim], latent . wk^T, unrounded; it is rounded to bf16 in place and then used as
// memory. gain: bf16 [kIndexDim]. The block calls; syncs inside and at the end, after which the row
// is written and x and the scratch are free.
template <class Block>
struct IndexKey {
  struct Scratch {
    typename RmsNorm<Block>::Scratch norm;
    std::uint16_t normed[kIndexDim];
  };

  LOWLAT_DEVICE static void run(IndexRow<std::uint8_t> out_row, float* x, const std::uint16_t* gain,
                                float eps, const RopeTurn& turn, Scratch& scratch) {
    for (int i = Team<Block>::thread_idx(); i < kIndexDim; i += Block::kNumThreads) {
      x[i] = round_bf16(x[i]);
    }
    Team<Block>::sync();
    RmsNorm<Block>::run(scratch.normed, x, gain, kIndexDim, eps, scratch.norm);
    Team<Block>::sync();
    for (int i = Team<Block>::thread_idx(); i < kIndexDim; i += Block::kNumThreads) {
      x[i] = from_bf16(scratch.normed[i]);
    }
    Team<Block>::sync();
    index_rotate<Block>(x, turn);
    for (int group = Team<Block>::thread_idx(); group < kIndexGroups; group += Block::kNumThreads) {
      out_row.scales[group] =
          fp4_pack_index(out_row.data + group * kFp4IndexGroup / 2, x + group * kFp4IndexGroup);
    }
    Team<Block>::sync();
  }
};

// x[0..127] times the Hadamard matrix (Sylvester's order, entry (-1)^popcount(i & j)) times
// 128^-0.5, in place: seven passes of sums and differences at distances 1, 2, 4 .. 64, each rounded
// to fp32, then one product. The block calls; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void hadamard(float* x) {
  for (int distance = 1; distance < kIndexDim; distance *= 2) {
    for (int i = Team<Block>::thread_idx(); i < kIndexDim / 2; i += Block::kNumThreads) {
      const int low = i / distance * 2 * distance + i % distance, high = low + distance;
      const float a = x[low], b = x[high];
      x[low] = a + b;
      x[high] = a - b;
    }
    Team<Block>::sync();
  }
  constexpr float kRoot = 0.08838834764831845f;  // 128^-0.5
  for (int i = Team<Block>::thread_idx(); i < kIndexDim; i += Block::kNumThreads) x[i] *= kRoot;
  Team<Block>::sync();
}

inline constexpr float kIndexFp8AmaxMin = 1e-4f;

// codes[i] = e4m3(x[i] * (1 / scale)) of x[0..127], scale = max(1e-4, amax) / 448, which is
// returned. One thread calls.
LOWLAT_DEVICE float index_fp8(std::uint8_t* codes, const float* x) {
  float amax = kIndexFp8AmaxMin;
  for (int i = 0; i < kIndexDim; ++i) amax = plat::max(amax, plat::abs(x[i]));
  const float scale = amax / kE4m3Max;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kIndexDim; ++i) codes[i] = to_e4m3(x[i] * inverse);
  return scale;
}

// Heads of one query row of V4. query: bf16 values in fp32 [num_heads, kIndexDim], used as memory;
// out_codes e4m3 [num_heads, kIndexDim], out_scales fp32 [num_heads], for index_weight. Nothing is
// rounded between the steps. Heads and rows are independent. The block calls; syncs inside and at
// the end.
template <class Block>
LOWLAT_DEVICE void index_query_fp8(std::uint8_t* out_codes, float* out_scales, float* query,
                                   int num_heads, const RopeTurn& turn) {
  for (int head = 0; head < num_heads; ++head) {
    float* x = query + head * kIndexDim;
    Rope<Block>::rotate(x + kIndexDim - kRopeDim, turn);
    Team<Block>::sync();
    hadamard<Block>(x);
  }
  for (int head = Team<Block>::thread_idx(); head < num_heads; head += Block::kNumThreads) {
    out_scales[head] = index_fp8(out_codes + head * kIndexDim, query + head * kIndexDim);
  }
  Team<Block>::sync();
}

// The stored key of one compressed entry of V4. c: fp32 [kIndexDim], pooled (stages/pool.hpp)
// and unrounded, used as memory; turn: of the block's first position. Nothing is rounded before the
// codes. The block calls; syncs inside and at the end, after which the row is written.
template <class Block>
struct IndexKeyFp8 {
  using Scratch = typename PooledKey<Block>::Scratch;

  LOWLAT_DEVICE static void run(IndexRow<std::uint8_t, kIndexFp8DataBytes> out_row, float* c,
                                const std::uint16_t* gain, float eps, const RopeTurn& turn,
                                Scratch& scratch) {
    PooledKey<Block>::finish(c, kIndexDim, gain, eps, turn, scratch);
    hadamard<Block>(c);
    if (Team<Block>::thread_idx() == 0) {
      // Bytes, low one first: a flat row keeps no alignment.
      const std::uint32_t bits = plat::float_bits(index_fp8(out_row.data, c));
      for (int i = 0; i < kIndexScaleBytes; ++i) {
        out_row.scales[i] = static_cast<std::uint8_t>(bits >> 8 * i & 0xffu);
      }
    }
    Team<Block>::sync();
  }
};

// out fp32 [kIndexDim] times the returned factor: the stored values. One thread calls. Of V4.1 the
// values themselves, exactly, and 1; of V4 the codes and their scale.
LOWLAT_DEVICE float index_unpack(float* out, IndexRow<const std::uint8_t, kIndexDataBytes> row) {
  for (int group = 0; group < kIndexGroups; ++group) {
    expand_fp4(out + group * kFp4IndexGroup, row.data + group * kFp4IndexGroup / 2,
               from_ue8m0(row.scales[group]), kFp4IndexGroup);
  }
  return 1.0f;
}
LOWLAT_DEVICE float index_unpack(float* out, IndexRow<const std::uint8_t, kIndexFp8DataBytes> row) {
  expand_e4m3(out, row.data, 1.0f, kIndexDim);
  std::uint32_t bits = 0u;
  for (int i = 0; i < kIndexScaleBytes; ++i) bits |= std::uint32_t{row.scales[i]} << 8 * i;
  return plat::bits_float(bits);
}

// out_scores[i] = factor * sum_h weights[h] * max(0, query_h . key), h ascending, of candidates i
// in begin .. end - 1 of one query row; key and factor of candidate i are those that index_unpack
// gives of rows.row(position_of(i)). query: fp32 [num_heads, kIndexDim]; dots by stages::dot,
// product and sum rounded to fp32 each. The block
// calls, each thread for its candidates; no sync. A score depends on its row and key only.
template <class Block, class Rows, class PositionOf>
LOWLAT_DEVICE void index_scores(float* out_scores, const float* query, const float* weights,
                                int num_heads, const Rows& rows, const PositionOf& position_of,
                                int begin, int end) {
  for (int i = begin + Team<Block>::thread_idx(); i < end; i += Block::kNumThreads) {
    float key[kIndexDim];
    const float factor = index_unpack(key, rows.row(position_of(i)));
    float score = 0.0f;
    for (int head = 0; head < num_heads; ++head) {
      const float match = dot(query + head * kIndexDim, key, kIndexDim);
      score += weights[head] * plat::max(match, 0.0f);
    }
    out_scores[i] = score * factor;
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
