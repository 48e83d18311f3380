// index_query_fp4_sm90: V4.1's index queries, for few rows.
//
// Math         ql = bf( qa·rsqrt(mean qa² + ε)·q_norm ),  iq = bf( quant(ql)·wqᵀ ), the last 64 of
//              each head bf( RoPE(iq, position) ), every 32 channels through e2m1 under a power of
//              two
// Shapes       qa [T,1280] · wq e4m3 [32·128,1280] in blocks of 32
// Rounding     bf16 where bf( ) stands; codes nearest-even after a true division; sums fp32
// Bytes        5.2 MB
// Floor        1.1 us at 4.65 TB/s
// Launch       32 weight rows a block, which are one group of four-bit codes; 256 threads. Weights
//              are on their way before the input is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp, norm.cpp, index.cpp. Bound: rel_l2 ≤ 2e-2 (a code may
//              differ where a sum is rounded the other way)
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
constexpr int kQLora = Model::kQLora, kGroup = Model::kScaleBlock;
constexpr int kRows = 32;
static_assert(kFp4IndexHeads * kIndexDim / kRows == kIndexQueryBlocks);
constexpr int kGroupsOfHead = kIndexDim / kRows;
constexpr int kRopeGroups = shape::kRopeDim / kRows;
constexpr int kPairsOfGroup = kRows / 2;

template <int kTiles>
struct QueryShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  typename Product<kRows, kQLora, kTiles, 1, kRows, 0>::Shared product;
  IndexLatent<kQLora, kGroup, kTokens> latent;
  float2 turn[kTokens][kPairsOfGroup];
};

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
                         dim3(kIndexQueryBlocks), kProductThreads, sizeof(QueryShared<kTiles>), 1,
                         programmatic, stream, params);
  });
}

}  // namespace lowlat::nvidia::fused
