// fused/index_latent.cuh: a product's block norms and quantises the query latent for itself, and
// what queries are turned by.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/exchange_hop.cuh"
#include "fused/front.hpp"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_weights.cuh"

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
      const int k = piece % kPieces * kPiece;
      quantize(__ldcg(reinterpret_cast<const uint4*>(qa + piece * kPiece)), gain_at(gain, k),
               piece / kPieces, k);
    }
    plat::block_sync();
  }

  // The same of codes that lie in memory as FrontParams::latent_codes.
  LOWLAT_DEVICE void copy(const std::uint8_t* from, const float* scales, int num_rows) {
    constexpr int kParts = kQLora / 16, kGroups = kQLora / kGroup;
    const int padded = padded_rows(num_rows);
    for (int i = plat::thread_idx(); i < num_rows * kParts; i += kProductThreads) {
      copy_16(codes + i / kParts * kPitch + i % kParts * 16, from + i * 16);
    }
    for (int i = plat::thread_idx(); i < num_rows * kGroups; i += kProductThreads) {
      const int group = i / num_rows, token = i % num_rows;
      scale[group * kTokens + token] = __ldcg(scales + group * padded + token);
    }
    wait_for_copies();
    plat::block_sync();
  }

  // The same of up to eight rows that come as packets of four values each; a warp has a row.
  LOWLAT_DEVICE void take(const HopTag& hop, const HopSigns& signs, const void* packets,
                          const std::uint16_t* gain, float eps, int num_rows) {
    static_assert(kTokens == kProductWarps);
    constexpr int kOfLane = kPieces / plat::kWarpLanes, kPackets = 2 * kOfLane;
    const int token = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    uint4 gains[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      gains[i] = gain_at(gain, (lane_idx + i * plat::kWarpLanes) * kPiece);
    }
    wait_for_signs(hop, signs);
    if (token < num_rows) {
      const auto* from =
          static_cast<const plat::TaggedWords*>(packets) + token * (kQLora / 4) + 2 * lane_idx;
      HopWords words[kPackets];
      take_packets(words, hop, (1u << kPackets) - 1u,
                   [&](int i) { return from + i / 2 * 2 * plat::kWarpLanes + i % 2; });
      float squares = 0.0f;
#pragma unroll
      for (const HopWords& four : words) {
        for (const std::uint32_t pair : {low_word(four.pair), high_word(four.pair)}) {
          squares = plat::fma(sm90::low_bf16(pair), sm90::low_bf16(pair), squares);
          squares = plat::fma(sm90::high_bf16(pair), sm90::high_bf16(pair), squares);
        }
      }
      norm[token] = quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kQLora) + eps);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const HopWords &first = words[2 * i], &second = words[2 * i + 1];
        quantize(make_uint4(low_word(first.pair), high_word(first.pair), low_word(second.pair),
                            high_word(second.pair)),
                 gains[i], token, (lane_idx + i * plat::kWarpLanes) * kPiece);
      }
    }
    plat::block_sync();
  }

 private:
  LOWLAT_DEVICE static uint4 gain_at(const std::uint16_t* gain, int k) {
    return __ldg(reinterpret_cast<const uint4*>(gain + k));
  }
  // Eight values from k on of a token whose norm is known. Whole warps call.
  LOWLAT_DEVICE void quantize(uint4 value, uint4 weight, int token, int k) {
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
