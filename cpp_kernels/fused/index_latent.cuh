// fused/index_latent.cuh: a product's block norms and quantises the query latent for itself, and
// what queries are turned by.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/front.hpp"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"

namespace lowlat::nvidia::fused {

// Cosine and sine of a pair at a position, as stages::rope_turn.
LOWLAT_DEVICE float2 index_turn(const RopeFrequencies& rope, int pair, int position) {
  const float angle = static_cast<float>(position) * rope.values[pair];
  return make_float2(plat::cos(angle), plat::sin(angle));
}

// e4m3 codes and scales of bf( qa·rsqrt(mean qa² + eps)·gain ), groups of kGroup, in shared memory.
template <int kQLora, int kGroup, int kTokens>
struct IndexLatent {
  static constexpr int kPitch = kQLora + 32;  // as of the weights
  static constexpr int kPiece = 8, kPieces = kQLora / kPiece, kLanes = kGroup / kPiece;
  static constexpr int kSquared = 16;  // values of a partial sum of squares
  static_assert(kPieces % plat::kWarpLanes == 0 && plat::kWarpLanes % kLanes == 0);

  alignas(16) std::uint8_t codes[kTokens * kPitch];
  float scale[kQLora / kGroup * kTokens];
  float norm[kTokens];

  // All threads of the block call; the codes are there on return.
  LOWLAT_DEVICE void fill(const std::uint16_t* qa, const float* qa_squares,
                          const std::uint16_t* gain, float eps, int num_rows) {
    const int thread_idx = plat::thread_idx();
    const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
    const int padded = padded_rows(num_rows);
    for (int token = warp_idx; token < num_rows; token += kProductWarps) {
      float squares = 0.0f;
#pragma unroll
      for (int i = lane_idx; i < kQLora / kSquared; i += plat::kWarpLanes) {
        squares += __ldcg(qa_squares + i * padded + token);
      }
      squares = plat::warp_sum(squares);
      norm[token] = quick_rsqrt(squares / static_cast<float>(kQLora) + eps);
    }
    plat::block_sync();
#pragma unroll 2
    for (int piece = thread_idx; piece < num_rows * kPieces; piece += kProductThreads) {
      quantize(qa, gain, piece);
    }
    plat::block_sync();
  }

 private:
  LOWLAT_DEVICE void quantize(const std::uint16_t* qa, const std::uint16_t* gain, int piece) {
    const int token = piece / kPieces, k = piece % kPieces * kPiece;
    const uint4 value = __ldcg(reinterpret_cast<const uint4*>(qa + piece * kPiece));
    const uint4 weight = __ldg(reinterpret_cast<const uint4*>(gain + k));
    const float by = norm[token];
    const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
    const std::uint32_t gains[4] = {weight.x, weight.y, weight.z, weight.w};
    std::uint32_t pairs[4];
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = sm90::to_bf16_pair(sm90::low_bf16(words[j]) * by * sm90::low_bf16(gains[j]),
                                    sm90::high_bf16(words[j]) * by * sm90::high_bf16(gains[j]));
      amax = plat::max(plat::abs(sm90::low_bf16(pairs[j])), amax);
      amax = plat::max(plat::abs(sm90::high_bf16(pairs[j])), amax);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
    }
    const PowerScale group = power_scale(amax);
    std::uint32_t packed[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t a = pairs[2 * j], b = pairs[2 * j + 1];
      packed[j] =
          sm90::to_e4m3_pair(sm90::low_bf16(a) * group.inverse,
                             sm90::high_bf16(a) * group.inverse) |
          sm90::to_e4m3_pair(sm90::low_bf16(b) * group.inverse, sm90::high_bf16(b) * group.inverse)
              << 16;
    }
    *reinterpret_cast<uint2*>(codes + token * kPitch + k) = make_uint2(packed[0], packed[1]);
    if (k % kGroup == 0) scale[k / kGroup * kTokens + token] = group.scale;
  }
};

}  // namespace lowlat::nvidia::fused
