// fused/inject.hpp: what a draft takes from a target's rows: features through a projection and a
// norm, then each draft stage's key of the row into its cache. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/front.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kInjectStages = 3;

// One struct serves all five kernels. H is the model's, K is kInjectStages * H; a group of
// activations that share a scale is activation_group(model).
struct InjectParams {
  FusedModel model;
  int num_rows;                   // T, 1 .. 48
  const std::uint16_t* features;  // bf16 [T, K]
  const std::int32_t* positions;  // [T]
  const std::int32_t* slots;      // [T] of every stage's pages; -1 or beyond num_slots: none
  std::int64_t num_slots;
  Fp8Weights main_proj;                         // [H, K]
  const std::uint16_t* main_norm;               // bf16 [H]
  Fp8Weights wkv[kInjectStages];                // [512, H]
  const std::uint16_t* kv_norm[kInjectStages];  // bf16 [512]
  float norm_eps;
  RopeFrequencies rope;
  // Between the kernels.
  std::uint8_t* feature_codes;  // e4m3 [T, K]
  float* feature_scale;         // [K / group, padded_rows(T)]
  std::uint16_t* y;             // bf16 [T, H]
  std::uint8_t* x_codes;        // e4m3 [T, H]
  float* x_scale;               // [H / group, padded_rows(T)]
  std::uint16_t* kv;            // bf16 [T, kInjectStages, 512]
  // Out: rows slots[t].
  KvPages pages[kInjectStages];
};

// The five kernels, each after the one before. May be captured; nothing is allocated.
// cudaErrorInvalidValue for num_rows out of range.
cudaError_t launch_inject(const InjectParams& params, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
