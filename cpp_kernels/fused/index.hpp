// fused/index.hpp: the index of a layer that selects compressed keys: queries, scores of every
// stored key, and the best 512 entries of each row. Every C++ compiler reads it. One struct serves
// all kernels of a layer's index.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/front.hpp"

namespace lowlat::nvidia::fused {

// Entries of requests: entry n of a request lies in row (n % per_page) of the pool page
// page_table[request * stride + n / per_page].
struct EntryPages {
  const std::int32_t* page_table;
  int stride;
  int per_page;  // 256 / ratio; a power of two and, where keys are scored, at least 64
};

// What index keys are: V4.1's e2m1 codes under four ue8m0 scales, 32 heads; or V4's e4m3 codes
// under one fp32 scale, 64 heads.
enum class IndexFormat : std::uint8_t { fp4, fp8 };

// Stored index keys, LOWLAT_INDEX_PAGED: pages of 64 rows of 64 (fp8: 128) bytes of codes, then 64
// times 4 bytes of scales. 16-byte aligned. ue8m0 scales are at most 2^9, as a norm's results are.
struct IndexKeyPages {
  std::uint8_t* base;
  std::int64_t page_bytes;  // distance of pages, a multiple of 16
};

// Rows of a step: `tokens` consecutive ones of each request, positions ascending by one.
struct StepRows {
  int num_rows;                   // T, 1 .. 48, a multiple of tokens
  int tokens;                     // of a request
  const std::int32_t* positions;  // [T]
  const std::int32_t* slots;      // [T] full slot of the row's key; -1: padding, which sees nothing
};

inline constexpr int kIndexTopk = 512;
inline constexpr int kIndexBlock = 8;         // positions of a candidate block
inline constexpr int kIndexMaxBlocks = 2048;  // candidate blocks that are published

struct IndexParams {
  IndexFormat format;
  StepRows rows;
  int ratio;         // positions of an entry; a row sees (position + 1) / ratio entries
  EntryPages pages;  // of the entries, in the keys' pool and in the selection's
  int max_entries;   // no row sees more; sizes the grid and the buffers below
  IndexKeyPages keys;
  // Queries, from what front_qkv leaves. Up to kHopRows rows: packets instead of qa and
  // qa_squares, where hop.port is not NULL; x_index as FrontParams.
  Hop hop;
  HopBuffers packets;
  int x_index;
  Fp8Weights wq;                // [heads * 128, q_lora], scales of blocks of 32 (fp8: 128)
  const std::uint16_t* q_norm;  // bf16 [q_lora]
  const std::uint16_t* qa;      // bf16 [T, q_lora]
  const float* qa_squares;      // as FrontParams
  // Of more rows: the latent's codes as the front makes them (FrontParams), whose gate qkv_done is
  // then. NULL: each block makes them from qa.
  const std::uint8_t* latent_codes;
  const float* latent_scale;
  float norm_eps;
  RopeFrequencies rope;
  std::uint16_t* query;  // bf16 (fp8: f16 of the codes) [T, heads * 128], by index_query_place
  float* query_scale;    // [T, heads] of the codes; fp8 only
  // Head weights as launch_compress_product leaves x times weights_proj: fp32, row t's at
  // head_sums + t * head_stride and, the second part, T * head_stride behind it.
  const float* head_sums;
  int head_stride;
  // Scores. pitch: floats of a row, a multiple of 64, at least max_entries (with `blocks` at least
  // kIndexMaxBlocks * kIndexBlock).
  float* scores;
  std::int64_t pitch;
  float* block_scores;         // [T, pitch / 8] largest of each block; NULL: not wanted
  const std::int32_t* blocks;  // [T, 2048] published by launch_index_blocks; NULL: all entries
  bool new_keys;               // the step's own keys are written beside, see keys_done
  // Selection. Scratch: `found` holds index_found_count(max_entries) pairs a row, `tickets` one
  // word a row, zeroed once.
  uint2* found;
  std::uint32_t* tickets;
  // Out: [T, 512] selected entries, ascending, -1 at the end; and where they lie in the pool.
  std::int32_t* entries;      // NULL: not wanted
  std::int32_t* entry_slots;  // as AttentionParams::extra_idx
  std::int32_t* out_blocks;   // [T, 2048] of launch_index_blocks, ascending, -1 at the end
  // Of qa, or of latent_codes; of the head weights; of the step's own keys (with new_keys); between
  // the kernels; of the selection and the published blocks (index_done_blocks).
  Gate qkv_done, heads_done, keys_done, query_done, scores_done, done;
};

// Scores that one block selects from; as many at least as all blocks of the longest row leave.
inline constexpr int kIndexChunk = 11776;
constexpr int index_chunks(int max_entries) {
  return max_entries <= kIndexChunk ? 1 : (max_entries + kIndexChunk - 1) / kIndexChunk;
}
// Pairs of scratch a row, for launch_index_select and launch_index_blocks alike.
constexpr int index_found_count(int max_entries) {
  return index_chunks(max_entries) * kIndexTopk +
         index_chunks((max_entries + kIndexBlock - 1) / kIndexBlock) * kIndexMaxBlocks;
}
inline constexpr int kIndexMaxEntries = 262'144;

// Blocks that open query_done, scores_done and done.
inline constexpr std::uint32_t kIndexQueryBlocks = 128;
inline constexpr std::uint32_t kIndexScoreBlocks = 264;
constexpr std::uint32_t index_blocks_blocks(const IndexParams& params) {
  return static_cast<std::uint32_t>(
      index_chunks((params.max_entries + kIndexBlock - 1) / kIndexBlock) * params.rows.num_rows);
}
constexpr std::uint32_t index_select_blocks(const IndexParams& params) {
  const int most = params.blocks != nullptr && params.max_entries > kIndexMaxBlocks * kIndexBlock
                       ? kIndexMaxBlocks * kIndexBlock
                       : params.max_entries;
  return static_cast<std::uint32_t>(index_chunks(most) * params.rows.num_rows);
}
// Of `done`: the selection's and, where candidate blocks are published, theirs.
constexpr std::uint32_t index_done_blocks(const IndexParams& params) {
  return index_select_blocks(params) +
         (params.block_scores != nullptr ? index_blocks_blocks(params) : 0u);
}

// V4.1-Flash's sizes (q_lora 1280, 32 heads of 128) or V4-Flash's (1024, 64). Candidate blocks are
// V4.1's. cudaErrorInvalidValue for what is out of range. All may be captured in a graph; nothing
// is allocated.
cudaError_t launch_index_query(const IndexParams& params, bool programmatic, cudaStream_t stream);
cudaError_t launch_index_scores(const IndexParams& params, bool programmatic, cudaStream_t stream);
cudaError_t launch_index_select(const IndexParams& params, bool programmatic, cudaStream_t stream);
// out_blocks from block_scores.
cudaError_t launch_index_blocks(const IndexParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
