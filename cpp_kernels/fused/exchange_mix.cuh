// fused/exchange_mix.cuh: what the kernels of exchange_mix.hpp have in common.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange_gate.cuh"
#include "fused/exchange_mix.hpp"
#include "fused/front_quant.cuh"
#include "fused/mix_sinkhorn.cuh"
#include "shape/dsv4_flash.hpp"
#include "stages/hc.hpp"

namespace lowlat::nvidia::fused::mixing {

using Model = shape::Dsv4Flash<1>;
constexpr int kHidden = Model::kHidden, kGroup = Model::kScaleBlock;
constexpr int kStreams = shape::kNumStreams, kOutputs = stages::kHcOutputs;
// Sums of a row: the dot products, then the products of streams: of each with itself and, after
// these, 01, 02, 03, 12, 13, 23.
constexpr int kOwnProducts = kOutputs, kCrossProducts = kOutputs + kStreams;
constexpr int kSums = kCrossProducts + 6, kSumPitch = (kSums + 3) / 4 * 4;
static_assert(kOutputs == 24);
static_assert(kSums > plat::kWarpLanes && kSums <= 2 * plat::kWarpLanes);

// What a lane needs to make a logit of its sum: of output min(lane, kOutputs - 1).
struct LogitScale {
  float scale, base;
};
LOWLAT_DEVICE LogitScale logit_scale(const HyperWeights& weights, int lane_idx) {
  const int output = min(lane_idx, kOutputs - 1);
  return {__ldg(weights.scale + (output < 4   ? 0
                                 : output < 8 ? 1
                                              : 2)),
          __ldg(weights.base + output)};
}

// Of a row; the same in all lanes, but for the logit, which is that of the lane's output.
struct RowNumbers {
  float pre[kStreams], scale, logit;
};
// total: a lane's sum of all blocks; cross: of lane i the sum 32 + i % 4. The products of streams
// follow kDots dot products. Whole warps call.
template <int kDots = kOutputs>
LOWLAT_DEVICE RowNumbers row_numbers(float total, float cross, const LogitScale& of_logit,
                                     float norm_eps, float hc_eps) {
  RowNumbers out;
  const auto of_lane = [](float v, int lane) { return __shfl_sync(plat::kAllLanes, v, lane); };
  const auto product = [&](int i) {
    const int at = kDots + i;
    return at < plat::kWarpLanes ? of_lane(total, at) : of_lane(cross, at - plat::kWarpLanes);
  };
  float own[kStreams];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) own[k] = product(k);
  const float squares = (own[0] + own[1]) + (own[2] + own[3]);
  out.logit = total * plat::rsqrt(squares / static_cast<float>(kStreams * kHidden) + norm_eps) *
                  of_logit.scale +
              of_logit.base;
  const float gate = stages::sigmoid(out.logit);
  float (&pre)[kStreams] = out.pre;
#pragma unroll
  for (int k = 0; k < kStreams; ++k) pre[k] = of_lane(gate + hc_eps, k);
  float v_squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kStreams; ++k) v_squares = plat::fma(pre[k] * pre[k], own[k], v_squares);
  v_squares = plat::fma(2.0f * pre[0] * pre[1], product(kStreams), v_squares);
  v_squares = plat::fma(2.0f * pre[0] * pre[2], product(kStreams + 1), v_squares);
  v_squares = plat::fma(2.0f * pre[0] * pre[3], product(kStreams + 2), v_squares);
  v_squares = plat::fma(2.0f * pre[1] * pre[2], product(kStreams + 3), v_squares);
  v_squares = plat::fma(2.0f * pre[1] * pre[3], product(kStreams + 4), v_squares);
  v_squares = plat::fma(2.0f * pre[2] * pre[3], product(kStreams + 5), v_squares);
  out.scale = quick_rsqrt(plat::max(v_squares, 0.0f) / static_cast<float>(kHidden) + norm_eps);
  return out;
}

// Asks for so many outputs of fn of a later exchange on their way to the second-level cache: thread
// `first` of num_threads of all that call.
template <int kDots = kOutputs>
LOWLAT_DEVICE void ask_for_later(const float* later_fn, int first, int num_threads) {
  constexpr int kLine = 128 / sizeof(float), kLines = kDots * kStreams * kHidden / kLine;
  for (int line = first; line < kLines; line += num_threads) {
    asm volatile(
        "prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(later_fn + line * kLine)));
  }
}

// What the sublayer's end needs of a row, [kMixStride]. A warp calls.
LOWLAT_DEVICE void store_mix(float* out, const float* logits, float hc_eps, int sinkhorn_iters) {
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  if (lane_idx < 8) {
    const float gate = stages::sigmoid(logits[lane_idx]);
    out[lane_idx] = lane_idx < 4 ? gate + hc_eps : 2.0f * gate;
  }
  if (lane_idx == 0) {
    float comb[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = logits[8 + i];
    sinkhorn(comb, hc_eps, sinkhorn_iters);
#pragma unroll
    for (int i = 0; i < 16; ++i) out[8 + i] = comb[i / 4][i % 4];
  }
}

// Calls launch.operator()<ranks, blocks a cluster>() as the parameters ask for; nothing is received
// of 0 ranks.
template <class F>
cudaError_t with_cluster(const ExchangeMixParams& params, F launch) {
  if (!params.receives) return launch.template operator()<0, kMixCluster>();
  const auto with_ranks = [&]<int kRanks>() {
    return params.few_blocks ? launch.template operator()<kRanks, kMixCluster / 2>()
                             : launch.template operator()<kRanks, kMixCluster>();
  };
  switch (params.port.tp_size) {
    case 1: return with_ranks.template operator()<1>();
    case 2: return with_ranks.template operator()<2>();
    case 4: return with_ranks.template operator()<4>();
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace lowlat::nvidia::fused::mixing
