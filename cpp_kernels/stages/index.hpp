// stages/index.hpp: queries, keys and scores of the index that selects compressed entries.
//
// Scores are selected from by stages/select.hpp.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/fp4.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/rope.hpp"
#include "stages/sum.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

inline constexpr int kIndexDim = 2 * kIndexDataBytes;
inline constexpr int kIndexGroups = kIndexDim / kFp4IndexGroup;
static_assert(kIndexDim == shape::kIndexDim && kIndexGroups == kIndexScaleBytes);

// A head's weight in the scores of a row: its bf16-rounded projection times head_dim^-0.5 *
// heads^-0.5, one product in fp32.
LOWLAT_DEVICE float index_weight(std::uint16_t projection, int num_heads) {
  return from_bf16(projection) * plat::rsqrt(static_cast<float>(kIndexDim * num_heads));
}

// Turns dimensions 64..127 of one head or key, bf16 values in fp32 [kIndexDim] in and out. The
// block calls; syncs inside and at the end.
template <class Block>
LOWLAT_DEVICE void index_rotate(float* x, const RopeTurn& turn) {
  float* rotated = x + kIndexDim - kRopeDim;
  Rope<Block>::rotate(rotated, turn);
  plat::block_sync();
  for (int i = plat::thread_idx(); i < kRopeDim; i += Block::kNumThreads) {
    rotated[i] = round_bf16(rotated[i]);
  }
  plat::block_sync();
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
  for (int group = plat::thread_idx(); group < num_groups; group += Block::kNumThreads) {
    fp4_round_trip_index(query + group * kFp4IndexGroup);
  }
  plat::block_sync();
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
    for (int i = plat::thread_idx(); i < kIndexDim; i += Block::kNumThreads) {
      x[i] = round_bf16(x[i]);
    }
    plat::block_sync();
    RmsNorm<Block>::run(scratch.normed, x, gain, kIndexDim, eps, scratch.norm);
    plat::block_sync();
    for (int i = plat::thread_idx(); i < kIndexDim; i += Block::kNumThreads) {
      x[i] = from_bf16(scratch.normed[i]);
    }
    plat::block_sync();
    index_rotate<Block>(x, turn);
    for (int group = plat::thread_idx(); group < kIndexGroups; group += Block::kNumThreads) {
      out_row.scales[group] =
          fp4_pack_index(out_row.data + group * kFp4IndexGroup / 2, x + group * kFp4IndexGroup);
    }
    plat::block_sync();
  }
};

// out fp32 [kIndexDim]: the stored values, exactly. One thread calls.
LOWLAT_DEVICE void index_unpack(float* out, IndexRow<const std::uint8_t> row) {
  for (int group = 0; group < kIndexGroups; ++group) {
    expand_fp4(out + group * kFp4IndexGroup, row.data + group * kFp4IndexGroup / 2,
               from_ue8m0(row.scales[group]), kFp4IndexGroup);
  }
}

// out_scores[i] = sum_h weights[h] * max(0, query_h . key), h ascending, of candidates i in
// begin .. end - 1 of one query row; the key of candidate i is rows.row(position_of(i)). query:
// fp32 [num_heads, kIndexDim]; dots by stages::dot, product and sum rounded to fp32 each. The block
// calls, each thread for its candidates; no sync. A score depends on its row and key only.
template <class Block, class Rows, class PositionOf>
LOWLAT_DEVICE void index_scores(float* out_scores, const float* query, const float* weights,
                                int num_heads, const Rows& rows, const PositionOf& position_of,
                                int begin, int end) {
  for (int i = begin + plat::thread_idx(); i < end; i += Block::kNumThreads) {
    float key[kIndexDim];
    index_unpack(key, rows.row(position_of(i)));
    float score = 0.0f;
    for (int head = 0; head < num_heads; ++head) {
      const float match = dot(query + head * kIndexDim, key, kIndexDim);
      score += weights[head] * plat::max(match, 0.0f);
    }
    out_scores[i] = score;
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
