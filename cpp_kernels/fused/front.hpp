// fused/front.hpp: the front of an attention sublayer: [q_a | kv], norms, RoPE, the stored key and
// q_b. Every C++ compiler reads it. One struct serves both kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/exchange.hpp"
#include "fused/model.hpp"

namespace lowlat::nvidia::fused {

// e4m3 weights [N, K], row-major, with ue8m0 scales [N / block, K / block], as a checkpoint has
// them: blocks of 32 (V4: 128). 16-byte aligned.
struct Fp8Weights {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

// Radians a position of the 32 rotating pairs: stages::rope_table of the layer's base and ramp.
struct RopeFrequencies {
  float values[32];
};

// Stored rows of 584 bytes in pages: slots_per_page rows of 576 bytes, then as many of 8 scale
// bytes. `base` and page_bytes are multiples of 16.
struct KvPages {
  std::uint8_t* base;
  std::int64_t page_bytes;
  int slots_per_page;
};

struct FrontParams {
  FusedModel model;
  int num_rows;   // T, 1 .. 48
  int num_heads;  // of this rank
  float norm_eps;
  // Up to kHopRows rows: packets instead of x_codes, x_scale, qa, qa_squares, kv and q. x comes
  // with the epoch of exchange x_index of the step (-1: the last one of the step before).
  Hop hop;
  HopBuffers packets;
  int x_index;
  // In.
  const std::uint8_t* x_codes;  // e4m3 [T, H] and its scales [H / group, padded_rows(T)]
  const float* x_scale;
  Fp8Weights wq_a, wkv, wq_b;     // [q_lora, H], [512, H], [num_heads * 512, q_lora]
  const std::uint16_t* q_norm;    // bf16 [q_lora]
  const std::uint16_t* kv_norm;   // bf16 [512]
  const std::int32_t* positions;  // [T]
  const std::int32_t* kv_slots;   // [T] where the row's key is stored; -1: nowhere
  RopeFrequencies rope;
  // Between the two kernels.
  std::uint16_t* qa;  // bf16 [T, q_lora]
  float* qa_squares;  // [q_lora / 16, padded_rows(T)]: sums of 16 squares each
  std::uint16_t* kv;  // bf16 [T, 512]
  // More than kHopRows rows: the normed latent, e4m3 [T, q_lora] and [q_lora / group,
  // padded_rows(T)].
  std::uint8_t* latent_codes;
  float* latent_scale;
  float* turns;  // [T, 32, 2]: cosine and sine of the rotating pairs at each row's position
  // Out.
  std::uint16_t* q;  // bf16 [T, num_heads, 512], the last 64 rotated; V4: each head normed before
  KvPages kv_pages;  // rows kv_slots are written; their padding byte is left
  // Of x; between the two kernels; of the latent (a block a row) and of the stored keys, which are
  // a kernel of their own where rows are many; of q. Blocks of the others: below.
  Gate before, qkv_done, latent_done, keys_done, done;
};

// More than kHopRows rows: rows whose keys a block stores, and blocks that open keys_done.
inline constexpr int kKeysABlock = 6;
constexpr std::uint32_t front_key_blocks(int num_rows) {
  return static_cast<std::uint32_t>((num_rows + kKeysABlock - 1) / kKeysABlock);
}

constexpr std::uint32_t front_qkv_blocks(FusedModel model) {
  return ((model == FusedModel::v4 ? shape::Dsv4Flash<1>::kQLora : shape::Dsv41Flash<1>::kQLora) +
          shape::kHeadDim) /
         16;
}
// More than kHopRows rows; fewer go by packets.
constexpr std::uint32_t front_q_blocks(int num_heads) {
  return static_cast<std::uint32_t>(8 * num_heads);
}

// [q_a | kv]. V4.1-Flash's sizes (H 5120, q_lora 1280) or V4-Flash's (4096, 1024);
// cudaErrorInvalidValue for num_rows or num_heads out of range.
cudaError_t launch_front_qkv(const FrontParams& params, bool programmatic, cudaStream_t stream);
// Of more than kHopRows rows, between the two: the latent's codes and the stored keys. Of fewer it
// launches nothing.
cudaError_t launch_front_latent(const FrontParams& params, bool programmatic, cudaStream_t stream);
// q_b with its norm before and RoPE after, and of few rows the stored keys.
cudaError_t launch_front_q(const FrontParams& params, bool programmatic, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
