// fused/mix.cuh: pieces of the hyper-connections' statistics, and their sum. See mix.hpp.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.hpp"
#include "fused/front_weights.cuh"
#include "fused/mix.hpp"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/hc.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kMixOutputs = stages::kHcOutputs;
static_assert(kMixOutputs == 24 && kMixPartStride > kMixOutputs);

struct MixShared {
  alignas(128) float fn[kMixOutputs][kMixPartLength];
  alignas(16) std::uint16_t row[kMaxFusedRows][kMixPartLength];
  std::uint64_t barrier;
};

// First half, before the residual is there: the piece's weights are on their way. All threads call.
LOWLAT_DEVICE void mix_load(MixShared& shared, const MixParams& params, int part) {
  if (plat::thread_idx() == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, sizeof shared.fn);
#pragma unroll 1
    for (int i = 0; i < kMixOutputs; ++i) {
      sm90::bulk_load(shared.fn[i],
                      params.fn + static_cast<std::int64_t>(i) * 4 * params.hidden +
                          part * kMixPartLength,
                      sizeof shared.fn[i], &shared.barrier);
    }
  }
  plat::block_sync();
}

// v[i] summed over the lanes, in v[0] of lane i: each exchange halves the values that a lane holds.
template <int kHalf = plat::kWarpLanes / 2>
LOWLAT_DEVICE void sum_over_lanes(float (&v)[plat::kWarpLanes], int lane_idx) {
  const bool upper = (lane_idx & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf];
    const float keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(plat::kAllLanes, send, kHalf);
  }
  if constexpr (kHalf > 1) sum_over_lanes<kHalf / 2>(v, lane_idx);
}

// Second half, by 256 threads: each of the 8 warps has three of the dot products and, as a fourth,
// the sum of squares; eight rows at a time, so that their 32 sums are one exchange of lanes.
LOWLAT_DEVICE void mix_compute(MixShared& shared, const MixParams& params, int part) {
  constexpr int kThreads = 256, kBatch = 8, kPerWarp = kMixOutputs / 8, kPiece = 8;
  static_assert(kBatch * (kPerWarp + 1) == plat::kWarpLanes);
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  constexpr int kPieces = kMixPartLength / kPiece;
  for (int i = plat::thread_idx(); i < params.num_rows * kPieces; i += kThreads) {
    const int row_idx = i / kPieces, piece = i % kPieces;
    copy_16(&shared.row[row_idx][piece * kPiece],
            params.residual + static_cast<std::int64_t>(row_idx) * 4 * params.hidden +
                part * kMixPartLength + piece * kPiece);
  }
  wait_for_copies();
  plat::block_sync();
  wait_for_weights(&shared.barrier, 0);
  for (int first_row = 0; first_row < params.num_rows; first_row += kBatch) {
    float sum[plat::kWarpLanes] = {};  // [row][dot product or squares]
#pragma unroll
    for (int j = 0; j < kMixPartLength / (4 * plat::kWarpLanes); ++j) {
      const int k = 4 * (lane_idx + j * plat::kWarpLanes);
      float4 fn[kPerWarp];
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i) {
        fn[i] = *reinterpret_cast<const float4*>(&shared.fn[warp_idx * kPerWarp + i][k]);
      }
#pragma unroll
      for (int row = 0; row < kBatch; ++row) {
        // Rows after the last are rows of the memory all the same; their sums are not stored.
        const uint2 pairs = *reinterpret_cast<const uint2*>(
            &shared.row[min(first_row + row, kMaxFusedRows - 1)][k]);
        const float x[4] = {sm90::low_bf16(pairs.x), sm90::high_bf16(pairs.x),
                            sm90::low_bf16(pairs.y), sm90::high_bf16(pairs.y)};
#pragma unroll
        for (int i = 0; i < kPerWarp; ++i) {
          float& to = sum[row * (kPerWarp + 1) + i];
          to = plat::fma(fn[i].x, x[0], to);
          to = plat::fma(fn[i].y, x[1], to);
          to = plat::fma(fn[i].z, x[2], to);
          to = plat::fma(fn[i].w, x[3], to);
        }
        float& squares = sum[row * (kPerWarp + 1) + kPerWarp];
#pragma unroll
        for (const float v : x) squares = plat::fma(v, v, squares);
      }
    }
    sum_over_lanes(sum, lane_idx);
    const float own = sum[0];
    const int row_idx = first_row + lane_idx / (kPerWarp + 1), which = lane_idx % (kPerWarp + 1);
    if (row_idx >= params.num_rows) continue;
    float* out = params.partial +
                 (static_cast<std::int64_t>(part) * params.num_rows + row_idx) * kMixPartStride;
    if (which < kPerWarp) {
      out[warp_idx * kPerWarp + which] = own;
    } else if (warp_idx == 0) {
      out[kMixOutputs] = own;
    }
  }
}

LOWLAT_DEVICE float approximate_reciprocal(float v) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
}

// stages::hc_sinkhorn with reciprocals good to one unit in the last place, all 16 numbers in
// registers: forty dependent passes are latency and nothing else. One thread calls.
LOWLAT_DEVICE void mix_sinkhorn(float (&comb)[4][4], float eps, int num_iters) {
#pragma unroll
  for (auto& row : comb) {
    float top = row[0];
#pragma unroll
    for (int k = 1; k < 4; ++k) top = plat::max(top, row[k]);
#pragma unroll
    for (float& v : row) v = plat::exp(v - top);
    const float inverse = approximate_reciprocal((row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
    for (float& v : row) v = plat::fma(v, inverse, eps);
  }
#pragma unroll 1
  for (int iter = 0; iter < num_iters; ++iter) {
    if (iter > 0) {
#pragma unroll
      for (auto& row : comb) {
        const float inverse = approximate_reciprocal((row[0] + row[1]) + (row[2] + row[3]) + eps);
#pragma unroll
        for (float& v : row) v *= inverse;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float inverse =
          approximate_reciprocal((comb[0][k] + comb[1][k]) + (comb[2][k] + comb[3][k]) + eps);
#pragma unroll
      for (int j = 0; j < 4; ++j) comb[j][k] *= inverse;
    }
  }
}

template <int kThreads>
struct MixSumShared {
  float partial[kThreads / plat::kWarpLanes][kMixPartStride];
  float mix[kMixPartStride];
  stages::HcParams params;
};

// The parameters of one row from its pieces. The block calls; shared.params is there after the
// caller's next block_sync, and all its work is done by then in the first warp.
template <int kThreads>
LOWLAT_DEVICE void mix_sum(MixSumShared<kThreads>& shared, const float* partial, int num_parts,
                           int num_rows, int row_idx, int length, const float* base,
                           const float* scale, float norm_eps, float hc_eps, int iters) {
  constexpr int kWarps = kThreads / plat::kWarpLanes;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  float sum = 0.0f;
  if (lane_idx <= kMixOutputs) {
    constexpr int kUnroll = 8;
    int part = warp_idx;
    for (; part + (kUnroll - 1) * kWarps < num_parts; part += kUnroll * kWarps) {
      float v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        v[i] = __ldcg(partial +
                      (static_cast<std::int64_t>(part + i * kWarps) * num_rows + row_idx) *
                          kMixPartStride +
                      lane_idx);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum += v[i];
    }
    for (; part < num_parts; part += kWarps) {
      sum +=
          __ldcg(partial + (static_cast<std::int64_t>(part) * num_rows + row_idx) * kMixPartStride +
                 lane_idx);
    }
  }
  shared.partial[warp_idx][lane_idx] = sum;
  plat::block_sync();
  if (warp_idx != 0) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += shared.partial[i][lane_idx];
  const float squares = __shfl_sync(plat::kAllLanes, total, kMixOutputs);
  const float inverse = plat::rsqrt(squares / static_cast<float>(length) + norm_eps);
  const float m = total * inverse;
  const int group = lane_idx < 4 ? 0 : lane_idx < 8 ? 1 : 2;
  const float v = lane_idx < kMixOutputs ? m * scale[group] + base[lane_idx] : 0.0f;
  if (lane_idx < 4) {
    shared.params.pre[lane_idx] = stages::sigmoid(v) + hc_eps;
  } else if (lane_idx < 8) {
    shared.params.post[lane_idx - 4] = 2.0f * stages::sigmoid(v);
  }
  shared.mix[lane_idx] = v;
  __syncwarp();
  if (lane_idx != 0) return;
  float comb[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) comb[j][k] = shared.mix[8 + 4 * j + k];
  }
  mix_sinkhorn(comb, hc_eps, iters);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) shared.params.comb[j][k] = comb[j][k];
  }
}

}  // namespace lowlat::nvidia::fused
