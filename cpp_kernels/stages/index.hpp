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

// Turns dimensions 64..127 of heads or a key, bf16 values in fp32 [num_heads, kIndexDim] in and
// out. The block calls, threads split the pairs; syncs at the end.
template <class Block>
LOWLAT_DEVICE void index_rotate(float* x, const RopeTurn& turn, int num_heads = 1) {
  for (int i = Team<Block>::thread_idx(); i < num_heads * kRopePairs; i += Block::kNumThreads) {
    const int pair = i % kRopePairs;
    float* values = x + i / kRopePairs * kIndexDim + kIndexDim - kRopeDim + 2 * pair;
    rope_pair(values[0], values[1], turn.cos[pair], turn.sin[pair]);
    values[0] = round_bf16(values[0]);
    values[1] = round_bf16(values[1]);
  }
  Team<Block>::sync();
}

// Heads of one query row: RoPE, then every 32 channels through four bits and a ue8m0 scale. query:
// bf16 values in fp32 [num_heads, kIndexDim], in place. Heads and rows are independent. The block
// calls; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void index_query(float* query, int num_heads, const RopeTurn& turn) {
  index_rotate<Block>(query, turn, num_heads);
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
      out_row.scale(group) = fp4_pack_index(out_row.group(group), x + group * kFp4IndexGroup);
    }
    Team<Block>::sync();
  }
};

// x[0..127] of each head times the Hadamard matrix (Sylvester's order, entry (-1)^popcount(i & j))
// times 128^-0.5, in place: seven passes of sums and differences at distances 1, 2, 4 .. 64, each
// rounded to fp32, then one product. x: fp32 [num_heads, kIndexDim]. The block calls, threads split
// the pairs of all heads; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void hadamard(float* x, int num_heads = 1) {
  const int num_pairs = num_heads * (kIndexDim / 2);
  for (int distance = 1; distance < kIndexDim; distance *= 2) {
    for (int i = Team<Block>::thread_idx(); i < num_pairs; i += Block::kNumThreads) {
      // Heads are a multiple of every distance, so pairs of all of them are numbered through.
      const int low = i / distance * 2 * distance + i % distance, high = low + distance;
      const float a = x[low], b = x[high];
      x[low] = a + b;
      x[high] = a - b;
    }
    Team<Block>::sync();
  }
  constexpr float kRoot = 0.08838834764831845f;  // 128^-0.5
  for (int i = Team<Block>::thread_idx(); i < num_heads * kIndexDim; i += Block::kNumThreads) {
    x[i] *= kRoot;
  }
  Team<Block>::sync();
}

inline constexpr float kIndexFp8AmaxMin = 1e-4f;

// codes[i] = e4m3(x[i] * (1 / scale)) of each head's x[0..127], scale = max(1e-4, amax) / 448,
// which goes to put(head, scale), from one thread. x, codes: [num_heads, kIndexDim]. The block
// calls, a warp a head; no sync.
template <class Block, class Put>
LOWLAT_DEVICE void index_fp8(std::uint8_t* codes, const float* x, int num_heads, Put&& put) {
  for_groups<Block>(
      num_heads, kIndexDim, kIndexFp8AmaxMin,
      [&](int head, int i) { return x[head * kIndexDim + i]; },
      [&](int head, float amax, int begin, int step) {
        const float scale = amax / kE4m3Max;
        const float inverse = 1.0f / scale;
        for (int i = head * kIndexDim + begin; i < (head + 1) * kIndexDim; i += step) {
          codes[i] = to_e4m3(x[i] * inverse);
        }
        if (begin == 0) put(head, scale);
      });
}

// Of one head; the scale is returned. One thread calls.
LOWLAT_DEVICE float index_fp8(std::uint8_t* codes, const float* x) {
  float scale = 0.0f;
  index_fp8<OneThread>(codes, x, 1, [&](int, float v) { scale = v; });
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
    Rope<Block>::rotate(query + head * kIndexDim + kIndexDim - kRopeDim, turn);
  }
  Team<Block>::sync();
  hadamard<Block>(query, num_heads);
  index_fp8<Block>(out_codes, query, num_heads,
                   [&](int head, float scale) { out_scales[head] = scale; });
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
    index_fp8<Block>(out_row.data, c, 1, [&](int, float scale) {
      // Bytes, low one first: a flat row keeps no alignment.
      const std::uint32_t bits = plat::float_bits(scale);
      for (int i = 0; i < kIndexScaleBytes; ++i) {
        out_row.scales[i] = static_cast<std::uint8_t>(bits >> 8 * i & 0xffu);
      }
    });
    Team<Block>::sync();
  }
};

// The stored key of a row: element i is value(i) * factor(). Of V4.1 the values themselves,
// exactly, and 1; of V4 the codes and their scale. One thread calls.
struct IndexKeyFp4Values {
  IndexRow<const std::uint8_t, kIndexDataBytes> row;
  LOWLAT_DEVICE float value(int i) const {
    const int group = i / kFp4IndexGroup;
    const std::uint8_t pair = row.group(group)[i % kFp4IndexGroup / 2];
    return kFp4Pairs.value[pair][i % 2] * from_ue8m0(row.scale(group));
  }
  LOWLAT_DEVICE float factor() const { return 1.0f; }
  LOWLAT_DEVICE void expand(float* out) const {
    for (int group = 0; group < kIndexGroups; ++group) {
      expand_fp4(out + group * kFp4IndexGroup, row.group(group), from_ue8m0(row.scale(group)),
                 kFp4IndexGroup);
    }
  }
};
struct IndexKeyFp8Values {
  IndexRow<const std::uint8_t, kIndexFp8DataBytes> row;
  LOWLAT_DEVICE float value(int i) const { return kE4m3Values.value[row.data[i]]; }
  LOWLAT_DEVICE float factor() const {
    std::uint32_t bits = 0u;
    for (int i = 0; i < kIndexScaleBytes; ++i) bits |= std::uint32_t{row.scales[i]} << 8 * i;
    return plat::bits_float(bits);
  }
  LOWLAT_DEVICE void expand(float* out) const { expand_e4m3(out, row.data, 1.0f, kIndexDim); }
};
LOWLAT_DEVICE IndexKeyFp4Values index_values(IndexRow<const std::uint8_t, kIndexDataBytes> row) {
  return {row};
}
LOWLAT_DEVICE IndexKeyFp8Values index_values(IndexRow<const std::uint8_t, kIndexFp8DataBytes> row) {
  return {row};
}
// out fp32 [kIndexDim] times the returned factor: the stored values. One thread calls.
template <int kDataBytes>
LOWLAT_DEVICE float index_unpack(float* out, IndexRow<const std::uint8_t, kDataBytes> row) {
  const auto values = index_values(row);
  values.expand(out);
  return values.factor();
}

// out_scores[i] = factor * sum_h weights[h] * max(0, query_h . key), h ascending, of candidates i
// in begin .. end - 1 of one query row; key and factor of candidate i are those that index_unpack
// gives of rows.row(position_of(i)). query: fp32 [num_heads, kIndexDim]; dots by stages::dot,
// product and sum rounded to fp32 each. The block calls, 16 lanes (DotTeam) for a candidate; no
// sync. A score depends on its row and key only.
template <class Block, class Rows, class PositionOf>
LOWLAT_DEVICE void index_scores(float* out_scores, const float* query, const float* weights,
                                int num_heads, const Rows& rows, const PositionOf& position_of,
                                int begin, int end) {
  if constexpr (Team<Block>::kAlone) {
    for (int i = begin; i < end; ++i) {
      float key[kIndexDim];
      const float factor = index_unpack(key, rows.row(position_of(i)));
      float score = 0.0f;
      for (int head = 0; head < num_heads; ++head) {
        const float match = dot(query + head * kIndexDim, key, kIndexDim);
        score += weights[head] * plat::max(match, 0.0f);
      }
      out_scores[i] = score * factor;
    }
  } else {
    using Dots = DotTeam<Block>;
    constexpr int kDims = kIndexDim / kDotLanes;  // of a lane: lane + d * kDotLanes
    for (int base = begin; base < end; base += Dots::kNum) {
      const int i = base + Dots::idx();
      const auto values = index_values(rows.row(position_of(i < end ? i : base)));
      float key[kDims];
      for (int d = 0; d < kDims; ++d) key[d] = values.value(Dots::lane() + d * kDotLanes);
      float score = 0.0f;
      for (int head = 0; head < num_heads; ++head) {
        const float* q = query + head * kIndexDim + Dots::lane();
        float chain = 0.0f;
        for (int d = 0; d < kDims; ++d) chain += q[d * kDotLanes] * key[d];
        score += weights[head] * plat::max(Dots::join(chain), 0.0f);
      }
      if (i < end && Dots::lane() == 0) out_scores[i] = score * values.factor();
    }
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
