// stages/engram.hpp: n-gram memory: ids by hash, table look-up, and the gated addition to the
// streams.
//
// Between look-up and EngramApply the caller runs the block linear [5H, 24D] on the looked-up row:
// keys K_0 .. K_3, one a stream, then the value V, each bf16[H].
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

inline constexpr int kEngramShifts = 4;  // a token and the three before it
inline constexpr int kEngramNgrams = 3;  // n-gram sizes 2, 3, 4
inline constexpr int kEngramHeads = 8;   // hash heads a size
inline constexpr int kEngramColumns = kEngramNgrams * kEngramHeads;
inline constexpr int kEngramStreams = shape::kNumStreams;
static_assert(kEngramColumns == shape::kEngramColumns);

// The token at each shift (0 = the row itself): from the request's own rows of the step, else from
// its history of three tokens, oldest first. Entries before position 0 are whatever history holds;
// engram_hash does not read them. request_row: the row's place among its request's rows. One thread
// calls: it is four loads.
LOWLAT_DEVICE void engram_window(std::int64_t (&out_tokens)[kEngramShifts],
                                 const std::int32_t* request_tokens, int request_row,
                                 const std::int32_t* history) {
  for (int shift = 0; shift < kEngramShifts; ++shift) {
    out_tokens[shift] = shift <= request_row ? request_tokens[request_row - shift]
                                             : history[kEngramShifts - 1 - (shift - request_row)];
  }
}

// The 24 table rows of one token, the offsets of the columns included. The block calls, threads
// split the columns (a column is a remainder of 64-bit numbers); no sync.
// map: token to compressed id; multipliers [4], primes [24] in column order (size - 2) * 8 + head.
// A shift before position 0 or at an image token is blocked, and so is every older one; a blocked
// shift counts as pad_token. Products must fit int64.
template <class Block = OneThread>
LOWLAT_DEVICE void engram_hash(std::int64_t (&out_ids)[kEngramColumns],
                               const std::int64_t (&tokens)[kEngramShifts], std::int64_t pos,
                               const std::int64_t* map, const std::int64_t* multipliers,
                               const std::int64_t* primes, std::int64_t image_token,
                               std::int64_t pad_token) {
  for (int column = Team<Block>::thread_idx(); column < kEngramColumns;
       column += Block::kNumThreads) {
    bool blocked = false;
    std::int64_t mixed = 0, offset = 0;
    for (int shift = 0; shift <= column / kEngramHeads + 1; ++shift) {
      blocked = blocked || shift > pos || tokens[shift] == image_token;
      mixed ^= map[blocked ? pad_token : tokens[shift]] * multipliers[shift];
    }
    for (int before = 0; before < column; ++before) offset += primes[before];
    out_ids[column] = mixed % primes[column] + offset;
  }
}

// out[column * dim ..] = bf(code * scale) for columns [column_begin, column_end) of one row. The
// table holds the rows of those columns only; first_row is the id of its row 0. codes e4m3
// [rows, dim], scales ue8m0 [rows, dim / 32], contiguous. The block calls, threads split the
// elements; no sync.
template <class Block = OneThread>
LOWLAT_DEVICE void engram_lookup(std::uint16_t* out, const std::int64_t* ids, int column_begin,
                                 int column_end, const std::uint8_t* codes,
                                 const std::uint8_t* scales, std::int64_t first_row, int dim) {
  const int num = (column_end - column_begin) * dim;
  for (int i = Team<Block>::thread_idx(); i < num; i += Block::kNumThreads) {
    const int column = column_begin + i / dim, place = i % dim;
    const std::int64_t row_idx = ids[column] - first_row;
    const float scale = from_ue8m0(scales[row_idx * (dim / 32) + place / 32]);
    out[static_cast<std::int64_t>(column) * dim + place] =
        to_bf16(from_e4m3(codes[row_idx * dim + place]) * scale);
  }
}

// R_k = bf(R_k + g_k * V) for the four streams of one row, in place; fp32 inside, product and sum
// rounded apart. The block calls; syncs inside; the scratch is free on return.
// residual bf16 [4, hidden]; kv bf16 [5, hidden]; q_weight, k_weight bf16 [4, hidden]. An image row
// is left as it is by not calling.
template <class Block>
struct EngramApply {
  using Scratch = typename BlockSum<Block>::Scratch;

  // The gate from the three sums over the hidden dimension.
  LOWLAT_DEVICE static float gate(float dot, float residual_sq, float key_sq, int hidden,
                                  float eps) {
    const float width = static_cast<float>(hidden);
    const float s = dot * plat::rsqrt(residual_sq / width + eps) *
                    plat::rsqrt(key_sq / width + eps) * plat::rsqrt(width);
    const float magnitude = plat::sqrt(plat::max(plat::abs(s), 1e-6f));
    return 1.0f / (1.0f + plat::exp(-plat::copysign(magnitude, s)));
  }

  LOWLAT_DEVICE static void run(std::uint16_t* residual, const std::uint16_t* kv,
                                const std::uint16_t* q_weight, const std::uint16_t* k_weight,
                                int hidden, float eps, Scratch& scratch) {
    const std::uint16_t* value = kv + static_cast<std::int64_t>(kEngramStreams) * hidden;
    for (int stream = 0; stream < kEngramStreams; ++stream) {
      const std::int64_t start = static_cast<std::int64_t>(stream) * hidden;
      float dot = 0.0f, residual_sq = 0.0f, key_sq = 0.0f;
      for (int i = Team<Block>::thread_idx(); i < hidden; i += Block::kNumThreads) {
        const float r = from_bf16(residual[start + i]), key = from_bf16(kv[start + i]);
        dot += r * from_bf16(q_weight[start + i]) * from_bf16(k_weight[start + i]) * key;
        residual_sq += r * r;
        key_sq += key * key;
      }
      dot = BlockSum<Block>::run(dot, scratch);
      residual_sq = BlockSum<Block>::run(residual_sq, scratch);
      key_sq = BlockSum<Block>::run(key_sq, scratch);
      const float g = gate(dot, residual_sq, key_sq, hidden, eps);
      for (int i = Team<Block>::thread_idx(); i < hidden; i += Block::kNumThreads) {
        residual[start + i] = to_bf16(from_bf16(residual[start + i]) + g * from_bf16(value[i]));
      }
    }
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
