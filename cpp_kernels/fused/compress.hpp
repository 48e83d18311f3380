// fused/compress.hpp: the compressor of a layer that owns a pool of compressed keys: projections of
// the step's rows, then the entries and index keys that they complete. Every C++ compiler reads it.
// One struct serves both kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/index.hpp"

namespace lowlat::nvidia::fused {

// Weight rows bf16 [num, H], 16-byte aligned; num a multiple of 16.
struct Bf16Rows {
  const std::uint16_t* rows;
  int num;
};

inline constexpr int kCompressMatrices = 5;
inline constexpr int kCompressSplits = 2;  // parts of K, whose sums lie apart

struct CompressParams {
  StepRows rows;
  int ratio;               // 2, or 1
  const std::uint16_t* x;  // bf16 [T, H]
  // The matrices of the product one under the other: wkv and, at ratio 2, wgate, if the layer owns
  // a pool; weights_proj, if it is an index source.
  Bf16Rows matrices[kCompressMatrices];
  // Of these rows the launch takes so many, from first_row on, both multiples of 16; 0: all.
  int first_row, some_rows;
  // Up to kHopRows rows: so many tiles of 16 of them a block, one after the other, so that all
  // blocks begin at once where there are many; 0: one.
  int turns;
  float* partial;  // [2, T, all rows of the matrices]
  // Rows of the pending halves of pairs, fp32 [kv 512 | score 512]: `ring`, at least tokens + 1,
  // for each request's state slot. Ratio 2 only.
  float* state;
  const std::int32_t* state_slots;  // [requests]
  int ring;
  const std::uint16_t* norm;    // bf16 [512]
  const std::uint16_t* wk;      // bf16 [128, 512], 16-byte aligned
  const std::uint16_t* k_norm;  // bf16 [128]
  float norm_eps;
  RopeFrequencies rope;
  // Out: rows slots[t] / ratio of both pools, where row t completes an entry.
  KvPages pool;
  IndexKeyPages keys;
  // Of x; of the sums; of entries and keys.
  Gate x_done, product_done, done;
  Hop hop;  // of its stamps
};

// What a launch makes at ratio 4: keys for scores, or the entries that are attended to.
enum class PoolPart { both, keys, entries };

// V4: pooling over the tokens of a block, from the same product with other matrices: wkv and wgate
// of the layer (ratio 4: [1024, H] each, ratio 128: [512, H]), then, at ratio 4, wkv and wgate of
// the index [256, H].
struct PoolParams {
  StepRows rows;
  int ratio;                        // 4 or 128
  PoolPart part;                    // both at ratio 128
  const float* partial;             // as CompressParams
  int width;                        // of its rows
  EntryPages pages;                 // of full slots: per_page is 256
  const float* ape;                 // fp32 [ratio, 1024 or 512]
  const std::uint16_t* norm;        // bf16 [512]
  const float* index_ape;           // ratio 4: fp32 [4, 256]
  const std::uint16_t* index_norm;  // bf16 [128]
  // Rings of stages/pool_state.hpp, fp32: of each page of the window cache (ratio 4; the index's
  // own beside it) or of each request's state slot (ratio 128). ring: rows, at least the candidates
  // of an entry (8 or 128) and tokens - 1 more.
  float* state;
  float* index_state;
  const std::int32_t* state_slots;  // [requests], ratio 128
  int ring;
  // Ratio 4: the window cache's slots of full slots, of which there are num_window_slots; NULL: the
  // same. Of what has none there, row 0 of the rings is used, which no request's token has.
  const std::int64_t* window_slots;
  std::int64_t num_window_slots;
  float norm_eps;
  RopeFrequencies rope;
  // Out: rows slots[t] / ratio, where row t completes an entry.
  KvPages pool;
  IndexKeyPages keys;  // ratio 4
  Gate product_done, done;
};

constexpr int compress_width(const CompressParams& params) {
  int sum = 0;
  for (const Bf16Rows& matrix : params.matrices) sum += matrix.num;
  return sum;
}
// Whether the product of many rows takes its weights by so many: all matrices but the last begin
// and end with one.
inline constexpr int kCompressWideRows = 64;
constexpr bool compress_is_wide(const CompressParams& params) {
  int sum = 0;
  for (const Bf16Rows& matrix : params.matrices) {
    if (matrix.num > 0 && sum % kCompressWideRows != 0) return false;
    sum += matrix.num;
  }
  return params.rows.num_rows > kHopRows && params.first_row % kCompressWideRows == 0;
}
constexpr int compress_rows(const CompressParams& params) {
  return params.some_rows > 0 ? params.some_rows : compress_width(params);
}
// Blocks that open product_done and done.
constexpr std::uint32_t compress_product_blocks(const CompressParams& params) {
  const int rows = compress_rows(params);
  return static_cast<std::uint32_t>(
      compress_is_wide(params)
          ? (rows + kCompressWideRows - 1) / kCompressWideRows * 4 * kCompressSplits
          : rows / 16 * kCompressSplits / (params.turns > 1 ? params.turns : 1));
}
// Of one row's entry or index key. Many rows of ratio 4 take a block each.
constexpr int compress_pool_cluster(int num_rows, int ratio) {
  return ratio == 4 && num_rows > kHopRows ? 1 : 8;
}
constexpr std::uint32_t compress_pool_blocks(int num_rows, int ratio, PoolPart part) {
  return static_cast<std::uint32_t>(compress_pool_cluster(num_rows, ratio) * num_rows *
                                    (ratio == 4 && part == PoolPart::both ? 2 : 1));
}
constexpr std::uint32_t compress_key_blocks(int num_rows) {
  return static_cast<std::uint32_t>(num_rows);
}

// x times the matrices, unrounded. hidden 5120 (V4.1) or 4096 (V4). cudaErrorInvalidValue for what
// is out of range. Both may be captured in a graph; nothing is allocated.
cudaError_t launch_compress_product(const CompressParams& params, int hidden, bool programmatic,
                                    cudaStream_t stream);
// V4.1: pooling, latent, entry and index key.
cudaError_t launch_compress_key(const CompressParams& params, bool programmatic,
                                cudaStream_t stream);
// V4: entries and, at ratio 4, index keys; then the rings take what later steps need.
cudaError_t launch_compress_pool(const PoolParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
