// fused/draft_accept.hpp: the acceptance rule over the verify rows of all requests.
// Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace lowlat::nvidia::fused {

inline constexpr int kMaxAcceptBatch = 8;
inline constexpr int kMaxAcceptDrafts = 7;
inline constexpr int kAcceptTileIds = 1024;  // of a block
inline constexpr int kMaxAcceptVocab = 128 * kAcceptTileIds;

// Device memory. The same on every rank, so ranks agree without an exchange.
struct DraftAcceptParams {
  int batch_size;              // B, 1 .. kMaxAcceptBatch
  int num_drafts;              // g, 1 .. kMaxAcceptDrafts
  int vocab;                   // V, 1 .. kMaxAcceptVocab
  const std::int64_t* drafts;  // [B, g], 0 .. V - 1
  const float* target_logits;  // fp32 [B, g + 1, V]: row i is of the token before draft i
  const float* draft_logits;   // fp32 [B, g, V] the drafts were drawn from; not read where greedy
  const float* temperatures;  // fp32 [B], 0 is greedy; NULL: all greedy, the two beside may be NULL
  const float* coins;         // fp32 [B, g + 1] in [0, 1): of each draft, and of the draw
  std::int64_t* accepted;     // out [B]: drafts accepted, 0 .. g
  std::int64_t* next;         // out [B]: the bonus token, or the one drawn at the first refusal
  void* workspace;            // kAcceptWorkspaceBytes, zeroed once; for one launch at a time
};

// The barrier's words, then a tile's best id, maximum and sum of each row, and each request's mass.
inline constexpr std::size_t kAcceptWorkspaceBytes =
    128 + std::size_t{48} * 128 * 16 + std::size_t{kMaxAcceptBatch} * 128 * 4;

// A launch for as many requests as fit (four at five drafts, three at seven), a block a tile of the
// vocabulary; all blocks are resident together. No allocation, no synchronisation;
// may be captured. cudaErrorInvalidValue for sizes out of range.
cudaError_t launch_draft_accept(const DraftAcceptParams& params, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
