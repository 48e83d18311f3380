// fused/mix.cuh: pieces of the hyper-connections' statistics, and their sum. See mix.hpp.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_weights.cuh"
#include "fused/mix.hpp"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/hc.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kMixOutputs = stages::kHcOutputs;
static_assert(kMixOutputs == 24 && kMixStride > kMixOutputs);

struct MixShared {
  alignas(128) float fn[kMixOutputs][kMixPartLength];
  alignas(16) std::uint16_t row[kMaxFusedRows][kMixPartLength];
  std::uint64_t barrier;
  float sum[8][kMixStride], comb[kMixOutputs];
};

// First half, before the residual is there: the piece's weights are on their way. All threads call.
LOWLAT_DEVICE void mix_load(MixShared& shared, const MixParams& params, int part) {
  if (plat::thread_idx() == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, sizeof shared.fn);
#pragma unroll 1
    for (int i = 0; i < kMixOutputs; ++i) {
      sm90::bulk_load(
          shared.fn[i],
          params.fn + static_cast<std::int64_t>(i) * 4 * params.hidden + part * kMixPartLength,
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
    float* out =
        params.partial + (static_cast<std::int64_t>(part) * params.num_rows + row_idx) * kMixStride;
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

// Third part: blocks take a row each, sum its pieces in order and make the parameters. All threads
// call; `part` as before. The first warp has the sums of the pieces of each warp in its lanes.
LOWLAT_DEVICE void mix_finish(MixShared& shared, const MixParams& params, int part) {
  const int num_parts = mix_parts(params.hidden);
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  constexpr int kWarps = 8, kMaxPerWarp = 5;
  if (part >= params.num_rows) return;
  wait_at(params.parts);
  for (int row_idx = part; row_idx < params.num_rows; row_idx += num_parts) {
    float v[kMaxPerWarp];
#pragma unroll
    for (int i = 0; i < kMaxPerWarp; ++i) {
      const int piece = warp_idx + i * kWarps;
      v[i] =
          piece < num_parts && lane_idx <= kMixOutputs
              ? __ldcg(params.partial +
                       (static_cast<std::int64_t>(piece) * params.num_rows + row_idx) * kMixStride +
                       lane_idx)
              : 0.0f;
    }
    float sum = v[0];
#pragma unroll
    for (int i = 1; i < kMaxPerWarp; ++i) sum += v[i];
    shared.sum[warp_idx][lane_idx] = sum;
    plat::block_sync();
    if (warp_idx == 0) {
      float total = shared.sum[0][lane_idx];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) total += shared.sum[i][lane_idx];
      const float squares = __shfl_sync(plat::kAllLanes, total, kMixOutputs);
      const float m =
          total * plat::rsqrt(squares / static_cast<float>(4 * params.hidden) + params.norm_eps);
      float* out = params.mix + row_idx * kMixStride;
      if (lane_idx < kMixOutputs) {
        const int group = lane_idx < 4 ? 0 : lane_idx < 8 ? 1 : 2;
        const float logit = m * params.scale[group] + params.base[lane_idx];
        shared.comb[lane_idx] = logit;
        if (lane_idx < 8) {
          const float gate = stages::sigmoid(logit);
          out[lane_idx] = lane_idx < 4 ? gate + params.hc_eps : 2.0f * gate;
        }
      }
      __syncwarp();
      if (lane_idx == 0) {
        float comb[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = shared.comb[8 + i];
        mix_sinkhorn(comb, params.hc_eps, params.sinkhorn_iters);
#pragma unroll
        for (int i = 0; i < 16; ++i) out[8 + i] = comb[i / 4][i % 4];
      }
    }
    open_gate(params.done);
    plat::block_sync();
  }
}

// All three, beside or as a kernel. `before`: the residual is there.
LOWLAT_DEVICE void mix_block(MixShared& shared, const MixParams& params, const Gate& before,
                             int part) {
  mix_load(shared, params, part);
  wait_at(before);
  mix_compute(shared, params, part);
  open_gate(params.parts);
  mix_finish(shared, params, part);
}

}  // namespace lowlat::nvidia::fused
