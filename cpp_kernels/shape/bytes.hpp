// shape/bytes.hpp: the fewest bytes a layer reads on one rank: each weight once. Floors are these
// over a measured bandwidth.
//
// Works on a compiled shape; tests hold the results to the published worked numbers.
#pragma once

#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::shape {

// Expected number of distinct experts that `rows` rows touch with independent, uniform routing: an
// upper bound, for correlated rows touch fewer.
constexpr double expected_experts(int num_experts, int experts_per_token, int rows) {
  double missed = 1.0;
  for (int i = 0; i < rows; ++i) {
    missed *= 1.0 - static_cast<double>(experts_per_token) / num_experts;
  }
  return num_experts * (1.0 - missed);
}

// Bytes of one stored weight: e4m3 with a ue8m0 byte a block, fp4 with a ue8m0 byte per 32.
template <class S>
constexpr double kFp8Bytes = 1.0 + 1.0 / (S::kScaleBlock * S::kScaleBlock);
inline constexpr double kFp4Bytes = 0.5 + 1.0 / kFp4Group;

// [q_a | kv] and q_b.
template <class S>
constexpr double attention_weight_bytes() {
  return ((S::kQLora + kHeadDim) * double{S::kHidden} +
          S::kNumHeadsLocal * double{kHeadDim} * S::kQLora) *
         kFp8Bytes<S>;
}
// wo_a, fp8 or expanded to bf16 as the standard path keeps it (of every draft stage too), and wo_b.
template <class S>
constexpr double output_weight_bytes(bool quantized_o = S::kQuantizedO) {
  const double outputs = S::kGroupsLocal * double{S::kOLora};
  return outputs * S::kGroupInput * (quantized_o ? kFp8Bytes<S> : 2.0) +
         S::kHidden * outputs * kFp8Bytes<S>;
}
template <class S>
constexpr double expert_weight_bytes() {
  return 3.0 * S::kHidden * S::kIntermediateLocal * kFp4Bytes;
}
template <class S>
constexpr double moe_weight_bytes(int rows) {
  return expected_experts(S::kNumExperts, S::kExpertsPerToken, rows) * expert_weight_bytes<S>() +
         3.0 * S::kHidden * S::kIntermediateLocal * kFp8Bytes<S> +
         2.0 * S::kNumExperts * S::kHidden;
}
// fn of both sublayers and the two norms' gains.
template <class S>
constexpr double mix_weight_bytes() {
  return 2.0 * 24 * kNumStreams * S::kHidden * 4 + 2.0 * 2 * S::kHidden;
}
// A layer with neither compressor nor indexer of its own.
template <class S>
constexpr double plain_layer_bytes(int rows) {
  return attention_weight_bytes<S>() + output_weight_bytes<S>() + moe_weight_bytes<S>(rows) +
         mix_weight_bytes<S>();
}
inline constexpr double kKvRowBytes = 584.0;
// Stored keys that one row gathers: its window and its selection.
template <class S>
constexpr double row_kv_bytes() {
  return (S::kWindow + S::kIndexTopk) * kKvRowBytes;
}
// The same layer as two kernels with a boundary between them: up to q and the stored keys, and from
// the gathered keys on.
template <class S>
constexpr double front_kernel_bytes() {
  return attention_weight_bytes<S>() + mix_weight_bytes<S>() / 2;
}
template <class S>
constexpr double back_kernel_bytes(int rows) {
  return output_weight_bytes<S>() + moe_weight_bytes<S>(rows) + mix_weight_bytes<S>() / 2 +
         rows * row_kv_bytes<S>();
}
// One of V4's compressors, of keys `dim` wide: two projections in bf16, ape and the norm's gain.
template <class S>
constexpr double compressor_weight_bytes(int ratio, int dim) {
  const double outputs = ratio == kOverlapRatio ? 2.0 * dim : dim;
  return 2.0 * outputs * S::kHidden * 2 + ratio * outputs * 4 + dim * 2.0;
}
// The index of V4's ratio 4: queries, head weights, and the compressor of its keys.
template <class S>
constexpr double indexer_weight_bytes() {
  return S::kIndexHeads * double{kIndexDim} * S::kQLora * kFp8Bytes<S> +
         2.0 * S::kIndexHeads * S::kHidden + compressor_weight_bytes<S>(kOverlapRatio, kIndexDim);
}
template <class S>
constexpr double overlap_layer_bytes(int rows) {
  return plain_layer_bytes<S>(rows) + compressor_weight_bytes<S>(kOverlapRatio, kHeadDim) +
         indexer_weight_bytes<S>();
}
template <class S>
constexpr double block_layer_bytes(int rows) {
  return plain_layer_bytes<S>(rows) + compressor_weight_bytes<S>(kBlockRatio, kHeadDim);
}
template <class S>
constexpr double head_weight_bytes() {
  return 2.0 * S::kVocabLocal * S::kHidden;
}
// All layers of V4 and its head, one step of the target.
template <class S>
constexpr double pooled_model_bytes(int rows) {
  return S::kNumWindowLayers * plain_layer_bytes<S>(rows) +
         S::kNumOverlapLayers * overlap_layer_bytes<S>(rows) +
         S::kNumBlockLayers * block_layer_bytes<S>(rows) + head_weight_bytes<S>();
}

// What a request of `length` tokens has read in a layer of V4, whatever its rows: the index keys of
// ratio 4, all entries of ratio 128.
constexpr double index_kv_bytes(int length) {
  return length / kOverlapRatio * static_cast<double>(kIndexDim + 4);
}
constexpr double block_kv_bytes(int length) { return length / kBlockRatio * kKvRowBytes; }

}  // namespace lowlat::shape
