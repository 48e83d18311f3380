// compress_key_fp4_sm90: V4.1's compressed entries and their index keys, from the projections.
//
// Math         c = bf( pool of a pair (ratio 2), or kv (ratio 1) ),  latent = bf( c·rsqrt(mean c² +
//              ε)·norm );  entry = the last 64 of the latent bf( RoPE at the entry's first position ),
//              every 16 channels through e2m1 under an e4m3 scale, stored as 584 bytes;  ik = bf(
//              latent·wkᵀ ), bf( norm ), its last 64 bf( RoPE ), every 32 through e2m1, 68 bytes
// Shapes       sums fp32 [2,T,1024 or 512] · wk bf16 [128,512]
// Rounding     bf16 where bf( ) stands; codes nearest-even after a true division
// Bytes        0.13 MB of wk, 4 KB a row
// Floor        none of its own: two hops
// Launch       a cluster of eight blocks of 256 threads for each eight rows. All blocks make all
//              latents, a warp a row; a block makes 16 of an index key's 128 sums for every row, and
//              then finishes one row: what it stores is its own
// Ordering     gates (exchange_gate.cuh) or kernels' ends; the sums of a row go to its block by
//              stores that count on that block's barrier. Nobody ends before all that is sent to it
//              has come
// Determinism  fixed order; bitwise run to run and rank to rank
// Meaning      reference/compress.cpp, index.cpp, kv.cpp. Bound: a code may differ where a sum is
//              rounded the other way; rel_l2 ≤ 2e-2 of entries and keys
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/compress.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_weights.cuh"
#include "fused/index_latent.cuh"
#include "fused/index_place.cuh"
#include "stages/compress.hpp"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / plat::kWarpLanes;
constexpr int kCluster = 8;  // blocks, and rows
constexpr int kDim = shape::kHeadDim, kNope = kDim - shape::kRopeDim;
constexpr int kPieces = kDim / plat::kWarpLanes / 4;  // of four channels, of a lane
constexpr int kPieceStride = 4 * plat::kWarpLanes;    // channels from a lane's piece to its next
constexpr int kKeyRows = kIndexDim / kCluster;
constexpr int kLatentPitch = 2 * kDim + 64;  // bytes; as of weights
constexpr int kSumPitch = kKeyRows + 4;
static_assert(kWarps == kCluster && kKeyRows == 16);

struct KeyShared {
  alignas(16) unsigned char latent[kCluster * kLatentPitch];
  float sum[kWarps][kCluster][kSumPitch];
  float key[kIndexDim];  // sent by the blocks of the cluster
  std::uint64_t barrier;
};

struct Four {
  float v[4];
};
LOWLAT_DEVICE Four load_four(const float* from) {
  const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
  return {{v.x, v.y, v.z, v.w}};
}

// Four channels of a row's projections: the parts added.
LOWLAT_DEVICE Four sum_of(const CompressParams& params, int row, int width, int channel) {
  const float* from = params.partial + static_cast<std::int64_t>(row) * width + channel;
  Four a = load_four(from);
  const Four b = load_four(from + static_cast<std::int64_t>(params.rows.num_rows) * width);
#pragma unroll
  for (int i = 0; i < 4; ++i) a.v[i] += b.v[i];
  return a;
}

// What a row does.
struct RowWork {
  bool stored;     // has a slot
  bool completes;  // an entry
  int position;
  float* cell;  // ratio 2: of the ring, this position's or, where it completes, the one before
  bool before_in_step;
};
LOWLAT_DEVICE RowWork work_of(const CompressParams& params, int row) {
  RowWork work = {};
  if (row >= params.rows.num_rows) return work;
  work.stored = __ldg(params.rows.slots + row) >= 0;
  work.position = __ldg(params.rows.positions + row);
  if (!work.stored) return work;
  work.completes = work.position % params.ratio == params.ratio - 1;
  if (params.ratio == 1) return work;
  const int request = row / params.rows.tokens;
  const int position = work.completes ? work.position - 1 : work.position;
  work.cell = params.state + (static_cast<std::int64_t>(__ldg(params.state_slots + request)) *
                                  params.ring +
                              position % params.ring) *
                                 2 * kDim;
  work.before_in_step =
      row % params.rows.tokens != 0 && __ldg(params.rows.slots + row - 1) >= 0;
  return work;
}

// The latent of a completed entry, four channels a piece.
LOWLAT_DEVICE void make_latent(Four (&latent)[kPieces], const CompressParams& params,
                               const RowWork& work, int row, int width, int lane_idx) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = i * kPieceStride + 4 * lane_idx;
    Four kv = sum_of(params, row, width, channel);
    if (params.ratio == 2) {
      const Four score = sum_of(params, row, width, kDim + channel);
      Four kv_even, score_even;
      if (work.before_in_step) {
        kv_even = sum_of(params, row - 1, width, channel);
        score_even = sum_of(params, row - 1, width, kDim + channel);
      } else {
        kv_even = load_four(work.cell + channel);
        score_even = load_four(work.cell + kDim + channel);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        kv.v[j] = stages::pool_pair(kv_even.v[j], score_even.v[j], kv.v[j], score.v[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      latent[i].v[j] = quick_bf16(kv.v[j]);
      squares = plat::fma(latent[i].v[j], latent[i].v[j], squares);
    }
  }
  const float norm =
      quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kDim) + params.norm_eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint2 gain = __ldg(reinterpret_cast<const uint2*>(params.norm + i * kPieceStride) +
                             lane_idx);
    const float gains[4] = {sm90::low_bf16(gain.x), sm90::high_bf16(gain.x),
                            sm90::low_bf16(gain.y), sm90::high_bf16(gain.y)};
#pragma unroll
    for (int j = 0; j < 4; ++j) latent[i].v[j] = quick_bf16(latent[i].v[j] * norm * gains[j]);
  }
}

// Turns four channels, of pairs pair and pair + 1, and rounds them.
LOWLAT_DEVICE void turn_four(Four& x, const RopeFrequencies& rope, int pair, int position) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 turn = index_turn(rope, pair + i, position);
    const float a = x.v[2 * i], b = x.v[2 * i + 1];
    x.v[2 * i] = quick_bf16(a * turn.x - b * turn.y);
    x.v[2 * i + 1] = quick_bf16(a * turn.y + b * turn.x);
  }
}

template <int kLanes>
LOWLAT_DEVICE float amax_of(const Four& x) {
  float amax = 0.0f;
#pragma unroll
  for (const float v : x.v) amax = plat::max(plat::abs(v), amax);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    amax = plat::max(plat::warp_shuffle_xor(amax, mask), amax);
  }
  return amax;
}

// A scale rounded to e4m3.
LOWLAT_DEVICE float round_e4m3(float v) {
  std::uint32_t pair[2];
  sm90::e4m3_to_f16(pair, sm90::to_e4m3_pair(v, 0.0f));
  float out;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(out)
      : "r"(pair[0]));
  return out;
}

// Stores an entry. A warp calls.
LOWLAT_DEVICE void store_entry(const CompressParams& params, Four (&x)[kPieces], int row,
                               int first_position, int lane_idx) {
  const stages::KvRow<std::uint8_t> to =
      stages::KvPaged<std::uint8_t>{params.pool.base, params.pool.slots_per_page,
                                    params.pool.page_bytes}
          .row(__ldg(params.rows.slots + row) / params.ratio);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = i * kPieceStride + 4 * lane_idx;
    if (i == kPieces - 1 && channel >= kNope) {
      turn_four(x[i], params.rope, (channel - kNope) / 2, first_position);
    }
    const float scale = round_e4m3(
        plat::min(plat::max(amax_of<stages::kFp4LatentGroup / 4>(x[i]) / 6.0f, 0x1p-9f), 448.0f));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i].v[j] = fp4_round(x[i].v[j] / scale) * scale + 0.0f;
    const std::uint32_t code = power_code(plat::max(amax_of<stages::kKvGroup / 4>(x[i]), 1e-4f));
    const float inverse = plat::bits_float((254u - code) << 23);
    if (channel < kNope) {
      *reinterpret_cast<std::uint32_t*>(to.data + channel) =
          sm90::to_e4m3_pair(x[i].v[0] * inverse, x[i].v[1] * inverse) |
          sm90::to_e4m3_pair(x[i].v[2] * inverse, x[i].v[3] * inverse) << 16;
      if (channel % stages::kKvGroup == 0) {
        to.scales[channel / stages::kKvGroup] = static_cast<std::uint8_t>(code);
      }
    } else {
      *reinterpret_cast<uint2*>(to.data + kNope + 2 * (channel - kNope)) =
          make_uint2(sm90::to_bf16_pair(x[i].v[0], x[i].v[1]),
                     sm90::to_bf16_pair(x[i].v[2], x[i].v[3]));
    }
  }
}

// Norms, turns and stores an index key. A warp calls.
LOWLAT_DEVICE void store_key(const CompressParams& params, const float* sums, int row,
                             int first_position, int lane_idx) {
  Four x;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x.v[j] = quick_bf16(sums[4 * lane_idx + j]);
    squares = plat::fma(x.v[j], x.v[j], squares);
  }
  const float norm =
      quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kIndexDim) + params.norm_eps);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x.v[j] =
        quick_bf16(x.v[j] * norm * stages::from_bf16(__ldg(params.k_norm + 4 * lane_idx + j)));
  }
  constexpr int kTurned = kIndexDim - shape::kRopeDim;
  if (4 * lane_idx >= kTurned) {
    turn_four(x, params.rope, (4 * lane_idx - kTurned) / 2, first_position);
  }
  const std::uint32_t code = fp4_scale_code(
      plat::max(amax_of<stages::kFp4IndexGroup / 4>(x), stages::kFp4KeyAmaxMin));
  const float inverse = fp4_scale(code).inverse;
  std::uint32_t packed = 0u;
#pragma unroll
  for (int j = 0; j < 4; ++j) packed |= fp4_code(fp4_round(x.v[j] * inverse)) << 4 * j;
  const stages::IndexRow<std::uint8_t> to =
      stages::IndexPaged<std::uint8_t>{params.keys.base, params.keys.page_bytes}.row(
          __ldg(params.rows.slots + row) / params.ratio);
  *reinterpret_cast<std::uint16_t*>(to.data + 2 * lane_idx) = static_cast<std::uint16_t>(packed);
  if (lane_idx % 8 == 0) to.scales[lane_idx / 8] = static_cast<std::uint8_t>(code);
}

__global__ void __launch_bounds__(kThreads, 1)
    compress_key_fp4_sm90(const __grid_constant__ CompressParams params) {
  __shared__ KeyShared shared;
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int block_idx = sm90::cluster_rank();
  const int first_row = static_cast<int>(blockIdx.x) / kCluster * kCluster;
  const int row = first_row + warp_idx, width = compress_width(params);
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, kIndexDim * 4);
  }
  plat::block_sync();
  sm90::cluster_arrive_relaxed();
  // The block's rows of wk: a warp has 64 of K.
  uint4 weight[2][2];
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[step][half] = __ldg(reinterpret_cast<const uint4*>(
          params.wk + (block_idx * kKeyRows + g + 8 * half) * kDim + warp_idx * 64 + step * 32 +
          8 * t));
    }
  }
  const RowWork work = work_of(params, row);
  const int first_position = work.position - (params.ratio - 1);
  wait_at(params.product_done);

  Four latent[kPieces] = {};
  if (work.completes) {
    make_latent(latent, params, work, row, width, lane_idx);
  } else if (work.stored && block_idx == warp_idx) {
    // The pair's first half waits for its second, which may come in a later step.
#pragma unroll 1
    for (int i = 0; i < 2 * kPieces; ++i) {
      const int channel = i * kPieceStride + 4 * lane_idx;
      const Four v = sum_of(params, row, width, channel);
      *reinterpret_cast<float4*>(work.cell + channel) =
          make_float4(v.v[0], v.v[1], v.v[2], v.v[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = i * kPieceStride + 4 * lane_idx;
    *reinterpret_cast<uint2*>(shared.latent + warp_idx * kLatentPitch + 2 * channel) =
        make_uint2(sm90::to_bf16_pair(latent[i].v[0], latent[i].v[1]),
                   sm90::to_bf16_pair(latent[i].v[2], latent[i].v[3]));
  }
  plat::block_sync();
  {
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint4 &low = weight[step][0], &high = weight[step][1];
      const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y},
                                     {low.z, high.z, low.w, high.w}};
      const uint4 b = *reinterpret_cast<const uint4*>(shared.latent + g * kLatentPitch +
                                                      2 * (warp_idx * 64 + step * 32 + 8 * t));
      const std::uint32_t b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
      sm90::mma_bf16(sum, a[0], b_low);
      sm90::mma_bf16(sum, a[1], b_high);
    }
    float* to = &shared.sum[warp_idx][2 * t][g];
    to[0] = sum[0];
    to[kSumPitch] = sum[1];
    to[8] = sum[2];
    to[kSumPitch + 8] = sum[3];
  }
  plat::block_sync();
  sm90::cluster_wait();  // the others run
  if (thread_idx < kCluster * kKeyRows) {
    const int token = thread_idx / kKeyRows, place = thread_idx % kKeyRows;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared.sum[warp][token][place];
    sm90::send_to_peer(sm90::peer_address(&shared.key[block_idx * kKeyRows + place], token), total,
                       sm90::peer_address(&shared.barrier, token));
  }
  // The warp of the block's own row stores it.
  if (warp_idx == block_idx && work.completes) {
    store_entry(params, latent, row, first_position, lane_idx);
  }
  wait_for_cluster(&shared.barrier, 0);
  if (warp_idx == block_idx && work.completes) {
    store_key(params, shared.key, row, first_position, lane_idx);
  }
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_compress_key(const CompressParams& params, bool programmatic,
                                cudaStream_t stream) {
  const StepRows& rows = params.rows;
  if (rows.num_rows < 1 || rows.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (rows.tokens < 1 || rows.num_rows % rows.tokens != 0) return cudaErrorInvalidValue;
  if (params.ratio != 1 && params.ratio != 2) return cudaErrorInvalidValue;
  if (compress_width(params) != params.ratio * kDim) return cudaErrorInvalidValue;
  return launch_kernel(compress_key_fp4_sm90, dim3(compress_key_blocks(rows.num_rows)), kThreads, 0,
                       kCluster, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused
