// index_query_fp4_sm90 and index_query_fp8_sm90: V4.1's and V4's index queries, for few rows.
//
// Math         ql = bf( qa·rsqrt(mean qa² + ε)·q_norm ),  iq = bf( quant(ql)·wqᵀ ), the last 64 of
//              each head bf( RoPE(iq, position) ), every 32 channels through e2m1 under a power of
//              two; V4: RoPE unrounded, times the Hadamard matrix and 128^-0.5, e4m3 under
//              max(1e-4, amax) / 448
// Shapes       qa [T,1280] · wq e4m3 [32·128,1280] in blocks of 32; V4: [T,1024], [64·128,1024],
//              128
// Rounding     bf16 where bf( ) stands; codes nearest-even after a true division; sums fp32
// Bytes        5.2 MB; V4: 8.4 MB
// Floor        1.1 us at 4.65 TB/s; 1.8 us
// Launch       32 weight rows a block, which are one group of four-bit codes; V4: 64, and two
//              blocks are a cluster and a head. 256 threads. Weights are on their way before the
//              input is waited for. Codes of more than sixteen rows that lie in memory go
//              straight to the products, so that two blocks have room on a multiprocessor;
//              V4's are front_tall.cuh's then, of a head's rows and half of their K
// Ordering     gates (exchange_gate.cuh) or kernels' ends; V4: the halves of a head reach the other
//              block by stores that count on its barrier
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp, norm.cpp, index.cpp. Bound: rel_l2 ≤ 2e-2 (a code may
//              differ where a sum is rounded the other way)
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_tall.cuh"
#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_latent.cuh"
#include "fused/index_place.cuh"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::nvidia::fused {
namespace {

using Model = shape::Dsv41Flash<1>;
constexpr int kQLora = Model::kQLora, kGroup = Model::kScaleBlock;
constexpr int kRows = 32;
static_assert(kFp4IndexHeads * kIndexDim / kRows == kIndexQueryBlocks);
constexpr int kGroupsOfHead = kIndexDim / kRows;
constexpr int kRopeGroups = shape::kRopeDim / kRows;
constexpr int kPairsOfGroup = kRows / 2;

// The latent's codes, from packets where the step's are, or from what lies behind a gate. All
// threads call.
template <bool kFew, int kQLoraOf, int kGroupOf, int kTokens>
LOWLAT_DEVICE void wait_for_latent(IndexLatent<kQLoraOf, kGroupOf, kTokens>& latent,
                                   const IndexParams& params, int block_idx) {
  const int num_rows = params.rows.num_rows;
  if constexpr (kFew) {
    if (params.hop.port != nullptr) {
      const HopSigns signs = {static_cast<const plat::TaggedWords*>(params.packets.x) + block_idx,
                              hop_tag(params.hop, params.x_index, HopKernel::q).tag,
                              static_cast<const plat::TaggedWords*>(params.packets.qa),
                              kQLoraOf / 4 / plat::kWarpLanes};
      latent.take(hop_tag(params.hop, params.hop.index, HopKernel::q), signs, params.packets.qa,
                  params.q_norm, params.norm_eps, num_rows);
      return;
    }
  }
  wait_at(params.qkv_done);
  if (params.latent_codes != nullptr) {
    latent.copy(params.latent_codes, params.latent_scale, num_rows);
    return;
  }
  latent.fill(params.qa, params.qa_squares, params.q_norm, params.norm_eps, num_rows);
}

// Whether so many tiles of tokens may take the latent's codes from memory (kGiven).
template <int kTiles>
constexpr bool kTakesCodes = kTiles > 2;
struct Nothing {};

template <int kTiles, bool kGiven>
struct QueryShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  using Linear = Product<kRows, kQLora, kTiles, 1, kRows, 0, kGiven && kTiles == 6 ? 2 : 1>;
  typename Linear::Shared product;
  std::conditional_t<kGiven, Nothing, IndexLatent<kQLora, kGroup, kTokens>> latent;
  float2 turn[kTokens][kPairsOfGroup];
};

template <int kTiles, bool kGiven>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 3
                                                   : kGiven    ? 2
                                                               : 1)
    index_query_fp4_sm90(const __grid_constant__ IndexParams params) {
  using Linear = QueryShared<kTiles, kGiven>::Linear;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QueryShared<kTiles, kGiven>*>(memory);
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
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::query));
  stamps.mark(StampStage::ask);
  if constexpr (kGiven) {
    wait_at(params.qkv_done);
    stamps.mark(StampStage::wait);
    const CodeActivations<kGroup, false> latent{params.latent_codes, params.latent_scale, kQLora,
                                                padded_rows(num_rows)};
    Linear::run(shared.product, latent, num_rows, stamps);
  } else {
    wait_for_latent<kTiles == 1>(shared.latent, params, block_idx);
    stamps.mark(StampStage::wait);
    const CodeActivations<kGroup, true> latent{shared.latent.codes, shared.latent.scale,
                                               shared.latent.kPitch,
                                               QueryShared<kTiles, kGiven>::kTokens};
    Linear::run(shared.product, latent, num_rows, stamps);
  }
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
  stamps.mark(StampStage::store);
  open_gate(params.query_done);
}

// V4: a head is a cluster of two blocks of 64 channels.
using ModelV4 = shape::Dsv4Flash<1>;
constexpr int kQLoraV4 = ModelV4::kQLora, kGroupV4 = ModelV4::kScaleBlock;
constexpr int kHalf = kIndexDim / 2, kPairs = shape::kRopeDim / 2;
static_assert(kHalf == shape::kRopeDim && kGroupV4 == kIndexDim);
static_assert(kFp8IndexHeads * 2 == kIndexQueryBlocks);

template <int kTiles, bool kGiven>
struct QuerySharedV4 {
  static constexpr int kTokens = kTiles * kTileTokens;
  // Of given codes a block has all rows of a head and half of their K, and its own half of the
  // head when both have met.
  using Linear = std::conditional_t<
      kGiven, TallProduct<kGroupV4, kIndexDim, kQLoraV4 / 2, kTiles, 2, kQLoraV4 / 2 / kGroupV4, 1>,
      Product<kHalf, kQLoraV4, kTiles, 1, kHalf, 0>>;
  using Latent = IndexLatent<kQLoraV4, kGroupV4, kTokens>;
  // The head's own half before the last pass is where the product's sums were.
  typename Linear::Shared product;
  std::conditional_t<kGiven, Nothing, Latent> latent;
  float2 turn[kTokens][kPairs];
  using Half = float[kTokens][kHalf];
  std::conditional_t<kGiven, Nothing, Half> own_other;
  std::uint64_t barrier;

  // The other half. Of given codes it lies behind the product's sums: who sends it has all of this
  // block's, whose weights are used up then.
  LOWLAT_DEVICE Half& other() {
    if constexpr (kGiven) {
      static_assert(sizeof product.sums % 16 == 0 &&
                    sizeof product.sums + sizeof(Half) <= sizeof product.weights);
      return *reinterpret_cast<Half*>(product.weights + sizeof product.sums);
    } else {
      return own_other;
    }
  }
};
template <int kTiles, bool kGiven>
__global__ void __launch_bounds__(kProductThreads, kGiven ? 2 : 1)
    index_query_fp8_sm90(const __grid_constant__ IndexParams params) {
  using Linear = QuerySharedV4<kTiles, kGiven>::Linear;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QuerySharedV4<kTiles, kGiven>*>(memory);
  sm90::launch_dependents();
  const int num_rows = params.rows.num_rows, thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int head = static_cast<int>(blockIdx.x) / 2, half = sm90::cluster_rank();
  const bool rotates = half == 1;
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, num_rows * kHalf * 4);
  }
  constexpr int kScaleStride = kQLoraV4 / kGroupV4;
  const std::uint8_t* const codes =
      params.wq.codes + static_cast<std::int64_t>(head) * kIndexDim * kQLoraV4;
  const std::uint8_t* const scales = params.wq.scales + head * kScaleStride;
  constexpr int kFirstK = kQLoraV4 / 2;  // of a cluster's second block, where they share K
  if constexpr (kGiven) {
    Linear::load(
        shared.product,
        {codes + half * kFirstK, scales + half * (kFirstK / kGroupV4), kQLoraV4, kScaleStride},
        num_rows);
  } else {
    plat::block_sync();
    sm90::cluster_arrive_relaxed();
    Linear::template load<kGroupV4>(
        shared.product, {codes + half * kHalf * kQLoraV4, scales, kQLoraV4, kScaleStride},
        half * kHalf, num_rows);
  }
  if (rotates) {
    for (int i = thread_idx; i < num_rows * kPairs; i += kProductThreads) {
      shared.turn[i / kPairs][i % kPairs] =
          index_turn(params.rope, i % kPairs, __ldg(params.rows.positions + i / kPairs));
    }
  }
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::query));
  stamps.mark(StampStage::ask);
  if constexpr (kGiven) {
    static_assert(2 * (sizeof shared + 1024) <= 228 * 1024);
    wait_at(params.qkv_done);
    stamps.mark(StampStage::wait);
    const int padded = padded_rows(num_rows);
    const typename Linear::Tokens latent{params.latent_codes + half * kFirstK, kQLoraV4,
                                         params.latent_scale + half * (kFirstK / kGroupV4) * padded,
                                         padded, num_rows};
    Linear::load_tokens(shared.product, latent);
    Linear::run(shared.product, latent, stamps);
  } else {
    wait_for_latent<kTiles == 1>(shared.latent, params, static_cast<int>(blockIdx.x));
    const CodeActivations<kGroupV4, true> latent{shared.latent.codes, shared.latent.scale,
                                                 shared.latent.kPitch,
                                                 QuerySharedV4<kTiles, kGiven>::kTokens};
    stamps.mark(StampStage::wait);
    Linear::run(shared.product, latent, num_rows, stamps);
    sm90::cluster_wait();  // the other block runs
  }
  auto& own_half = shared.product.owned[0];
  auto& other_half = shared.other();
  // A warp a token, a lane channels 2 lane and the next: six passes of the Hadamard matrix. Tokens
  // of a turn go through them together.
  constexpr int kAtOnce = kTiles > 2 ? 3 : 1, kTurn = kAtOnce * kProductWarps;
  const auto own_token = [&](int first, int i) {  // or, where there is none, the first once more
    const int token = first + i * kProductWarps;
    return token < num_rows ? token : first;
  };
#pragma unroll 1
  for (int first = warp_idx; first < num_rows; first += kTurn) {
    float a[kAtOnce], b[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = own_token(first, i);
      a[i] = quick_bf16(Linear::sum(shared.product, token, 2 * lane_idx));
      b[i] = quick_bf16(Linear::sum(shared.product, token, 2 * lane_idx + 1));
      if (rotates) {
        const float2 turn = shared.turn[token][lane_idx];
        const float turned = a[i] * turn.x - b[i] * turn.y;
        b[i] = a[i] * turn.y + b[i] * turn.x;
        a[i] = turned;
      }
      const float sum = a[i] + b[i];
      b[i] = a[i] - b[i];
      a[i] = sum;
    }
#pragma unroll
    for (int mask = 1; mask < plat::kWarpLanes; mask *= 2) {
      const bool high = (lane_idx & mask) != 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float other_a = plat::warp_shuffle_xor(a[i], mask);
        const float other_b = plat::warp_shuffle_xor(b[i], mask);
        a[i] = high ? other_a - a[i] : a[i] + other_a;
        b[i] = high ? other_b - b[i] : b[i] + other_b;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = first + i * kProductWarps;
      if (token >= num_rows) break;
      *reinterpret_cast<float2*>(&own_half[token][2 * lane_idx]) = make_float2(a[i], b[i]);
      sm90::send_to_peer(sm90::peer_address(&other_half[token][2 * lane_idx], 1 - half), a[i], b[i],
                         sm90::peer_address(&shared.barrier, 1 - half));
    }
  }
  wait_for_cluster(&shared.barrier, 0);
  __syncwarp();
  constexpr float kRoot = 0.08838834764831845f;  // 128^-0.5
#pragma unroll 1
  for (int first = warp_idx; first < num_rows; first += kTurn) {
    float kept[kAtOnce][2], amax[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = own_token(first, i);
      const float2 own = *reinterpret_cast<const float2*>(&own_half[token][2 * lane_idx]);
      const float2 other = *reinterpret_cast<const float2*>(&other_half[token][2 * lane_idx]);
      const float pairs[2][2] = {{own.x, other.x}, {own.y, other.y}};
      amax[i] = stages::kIndexFp8AmaxMin;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float sum = (pairs[j][0] + pairs[j][1]) * kRoot;
        const float difference =
            (rotates ? pairs[j][1] - pairs[j][0] : pairs[j][0] - pairs[j][1]) * kRoot;
        kept[i][j] = rotates ? difference : sum;
        amax[i] = plat::max(plat::abs(sum), amax[i]);
        amax[i] = plat::max(plat::abs(difference), amax[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) amax[i] = plat::warp_max(amax[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = first + i * kProductWarps;
      if (token >= num_rows) break;
      const float scale = amax[i] / stages::kE4m3Max, inverse = 1.0f / scale;
      std::uint32_t pair[2];
      sm90::e4m3_to_f16(pair, sm90::to_e4m3_pair(kept[i][0] * inverse, kept[i][1] * inverse));
      const int channel = half * kHalf + 2 * lane_idx;
      *reinterpret_cast<std::uint32_t*>(params.query + token * kFp8IndexHeads * kIndexDim +
                                        index_query_place(head, channel, true)) = pair[0];
      if (half == 0 && lane_idx == 0) params.query_scale[token * kFp8IndexHeads + head] = scale;
    }
  }
  stamps.mark(StampStage::store);
  open_gate(params.query_done);
}

}  // namespace

cudaError_t launch_index_query(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (params.format == IndexFormat::fp8) {
    return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
      const auto launch = [&]<bool kGiven>() {
        return launch_kernel(index_query_fp8_sm90<kTiles, kGiven>, dim3(kIndexQueryBlocks),
                             kProductThreads, sizeof(QuerySharedV4<kTiles, kGiven>), 2,
                             programmatic, stream, params);
      };
      if constexpr (kTakesCodes<kTiles>) {
        if (params.latent_codes != nullptr) return launch.template operator()<true>();
      }
      return launch.template operator()<false>();
    });
  }
  return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
    const auto launch = [&]<bool kGiven>() {
      return launch_kernel(index_query_fp4_sm90<kTiles, kGiven>, dim3(kIndexQueryBlocks),
                           kProductThreads, sizeof(QueryShared<kTiles, kGiven>), 1, programmatic,
                           stream, params);
    };
    if constexpr (kTakesCodes<kTiles>) {
      if (params.latent_codes != nullptr) return launch.template operator()<true>();
    }
    return launch.template operator()<false>();
  });
}

}  // namespace lowlat::nvidia::fused
