// index_query_fp4_sm90: V4.1's index queries and head weights, for few rows.
//
// Math         ql = bf( qa·rsqrt(mean qa² + ε)·q_norm ),  iq = bf( quant(ql)·wqᵀ ), the last 64 of
//              each head bf( RoPE(iq, position) ), every 32 channels through e2m1 under a power of
//              two; w = bf( x·weights_projᵀ ) · (128·32)^-0.5
// Shapes       qa [T,1280] · wq e4m3 [32·128,1280] in blocks of 32 · x [T,5120] · weights_proj bf16
//              [32,5120]
// Rounding     bf16 where bf( ) stands; codes nearest-even after a true division; sums fp32
// Bytes        5.2 MB of wq, 0.33 MB of weights_proj
// Floor        1.2 us at 4.65 TB/s
// Launch       32 weight rows a block, which are one group of four-bit codes; 256 threads; four
//              blocks more for each eight rows make the head weights, a warp a head. Weights are on
//              their way before the input is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp, norm.cpp, index.cpp. Bound: rel_l2 ≤ 2e-2 of the queries (a
//              code may differ where a sum is rounded the other way), 1e-3 of the head weights
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/index.hpp"
#include "fused/index_latent.cuh"
#include "fused/index_place.cuh"
#include "shape/dsv41_flash.hpp"

namespace lowlat::nvidia::fused {
namespace {

using Model = shape::Dsv41Flash<1>;
constexpr int kHidden = Model::kHidden, kQLora = Model::kQLora, kGroup = Model::kScaleBlock;
constexpr int kRows = 32;
constexpr int kProductBlocks = kFp4IndexHeads * kIndexDim / kRows;
constexpr int kGroupsOfHead = kIndexDim / kRows;
constexpr int kRopeGroups = shape::kRopeDim / kRows;
constexpr int kPairsOfGroup = kRows / 2;
constexpr int kHeadRows = 8;  // rows whose head weights one warp makes

template <int kTiles>
struct QueryShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  typename Product<kRows, kQLora, kTiles, 1, kRows, 0>::Shared product;
  IndexLatent<kQLora, kGroup, kTokens> latent;
  float2 turn[kTokens][kPairsOfGroup];
};

// One head's weights for rows first_row .. first_row + 7. A warp calls.
LOWLAT_DEVICE void head_weights(const IndexParams& params, int head, int first_row) {
  constexpr int kLoads = kHidden / 8 / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes, num_rows = params.rows.num_rows;
  const auto* weight = reinterpret_cast<const uint4*>(params.weights_proj + head * kHidden);
  float sum[kHeadRows] = {};
#pragma unroll 2
  for (int i = 0; i < kLoads; ++i) {
    const int piece = i * plat::kWarpLanes + lane_idx;
    const uint4 w = __ldg(weight + piece);
    const std::uint32_t a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int row = 0; row < kHeadRows; ++row) {
      const int known = min(first_row + row, num_rows - 1);
      const uint4 v = __ldcg(reinterpret_cast<const uint4*>(params.x + known * kHidden) + piece);
      const std::uint32_t b[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[row] = plat::fma(sm90::low_bf16(a[j]), sm90::low_bf16(b[j]), sum[row]);
        sum[row] = plat::fma(sm90::high_bf16(a[j]), sm90::high_bf16(b[j]), sum[row]);
      }
    }
  }
  constexpr float kRoot = 0.015625f;  // (128 * 32)^-0.5
  static_assert(kFp4IndexHeads * kIndexDim == 4096);
#pragma unroll
  for (int row = 0; row < kHeadRows; ++row) {
    const float total = plat::warp_sum(sum[row]);
    if (lane_idx == row && first_row + row < num_rows) {
      params.weights[(first_row + row) * kFp4IndexHeads + head] = quick_bf16(total) * kRoot;
    }
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 3 : 1)
    index_query_fp4_sm90(const __grid_constant__ IndexParams params) {
  using Linear = Product<kRows, kQLora, kTiles, 1, kRows, 0>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QueryShared<kTiles>*>(memory);
  sm90::launch_dependents();
  const int block_idx = static_cast<int>(blockIdx.x), num_rows = params.rows.num_rows;
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  if (block_idx >= kProductBlocks) {
    wait_at(params.x_done);
    const int unit = (block_idx - kProductBlocks) * kProductWarps + warp_idx;
    head_weights(params, unit % kFp4IndexHeads, unit / kFp4IndexHeads * kHeadRows);
    open_gate(params.query_done);
    return;
  }
  const int head = block_idx / kGroupsOfHead, group = block_idx % kGroupsOfHead;
  const bool rotates = group >= kGroupsOfHead - kRopeGroups;
  constexpr int kScaleStride = kQLora / kGroup;
  const ProductWeights weights{
      params.wq.codes + static_cast<std::int64_t>(block_idx) * kRows * kQLora,
      params.wq.scales + block_idx * kRows / kGroup * kScaleStride, kQLora, kScaleStride};
  Linear::template load<kGroup>(shared.product, weights, 0, num_rows);
  if (rotates) {
    const int first_pair = (group - (kGroupsOfHead - kRopeGroups)) * kPairsOfGroup;
    for (int i = thread_idx; i < num_rows * kPairsOfGroup; i += kProductThreads) {
      shared.turn[i / kPairsOfGroup][i % kPairsOfGroup] =
          index_turn(params.rope, first_pair + i % kPairsOfGroup,
                     __ldg(params.rows.positions + i / kPairsOfGroup));
    }
  }
  wait_at(params.qkv_done);
  shared.latent.fill(params.qa, params.qa_squares, params.q_norm, params.norm_eps, num_rows);
  using Codes = CodeActivations<kGroup, true>;
  const Codes latent{shared.latent.codes, shared.latent.scale, shared.latent.kPitch,
                     QueryShared<kTiles>::kTokens};
  Linear::run(shared.product, latent, num_rows);
  // A warp a token, a lane a channel of the group.
  for (int token = warp_idx; token < num_rows; token += kProductWarps) {
    float value = quick_bf16(Linear::sum(shared.product, token, lane_idx));
    if (rotates) {
      const float2 turn = shared.turn[token][lane_idx / 2];
      const float other = plat::warp_shuffle_xor(value, 1);
      const float a = value * turn.x, b = other * turn.y;
      value = quick_bf16(lane_idx % 2 == 0 ? a - b : b + a);
    }
    float amax = plat::abs(value);
#pragma unroll
    for (int mask = 1; mask < plat::kWarpLanes; mask *= 2) {
      amax = plat::max(plat::warp_shuffle_xor(amax, mask), amax);
    }
    const PowerScale by = fp4_scale(fp4_scale_code(plat::max(amax, stages::kFp4AmaxMin)));
    const float kept = fp4_round(value * by.inverse) * by.scale + 0.0f;
    params.query[token * kFp4IndexHeads * kIndexDim +
                 index_query_place(head, group * kRows + lane_idx)] =
        static_cast<std::uint16_t>(plat::float_bits(kept) >> 16);
  }
  open_gate(params.query_done);
}

}  // namespace

cudaError_t launch_index_query(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
    return launch_kernel(index_query_fp4_sm90<kTiles>,
                         dim3(index_query_blocks(params.rows.num_rows)), kProductThreads,
                         sizeof(QueryShared<kTiles>), 1, programmatic, stream, params);
  });
}

}  // namespace lowlat::nvidia::fused
