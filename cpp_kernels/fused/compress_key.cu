// compress_key_fp4_sm90: V4.1's compressed entries and their index keys, from the projections.
//
// Math         c = bf( pool of a pair (ratio 2), or kv (ratio 1) ),  latent = bf( c·rsqrt(mean c² +
//              ε)·norm );  entry = the last 64 of the latent bf( RoPE at the entry's first position
//              ), every 16 channels through e2m1 under an e4m3 scale, stored as 584 bytes;  ik =
//              bf( latent·wkᵀ ), bf( norm ), its last 64 bf( RoPE ), every 32 through e2m1, 68
//              bytes
// Shapes       sums fp32 [2,T,..1024 or 512..] · wk bf16 [128,512]
// Rounding     bf16 where bf( ) stands; codes nearest-even after a true division
// Bytes        0.13 MB of wk, 4 KB a row
// Floor        none of its own: one hop
// Launch       a block of 256 threads a row; a warp has 16 rows of wk, in registers before the sums
//              are waited for. Then one warp finishes the index key while four store the entry
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  fixed order; bitwise run to run and rank to rank
// Meaning      reference/compress.cpp, index.cpp, kv.cpp. Bound: a code may differ where a sum is
//              rounded the other way; rel_l2 ≤ 2e-2 of entries and keys
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/compress.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/index_latent.cuh"
#include "fused/index_place.cuh"
#include "stages/compress.hpp"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / plat::kWarpLanes;
constexpr int kDim = shape::kHeadDim, kNope = kDim - shape::kRopeDim;
constexpr int kStepK = 32, kSteps = kDim / kStepK;
constexpr int kEntryWarps = 4;  // each with 128 channels
static_assert(kDim == 2 * kThreads && kIndexDim == 16 * kWarps);
static_assert(kDim == 4 * plat::kWarpLanes * kEntryWarps);

struct KeyShared {
  alignas(16) std::uint32_t latent[kDim / 2];
  float squares[kWarps];
  alignas(16) float key[kIndexDim];
};

// Two channels of a row's projections: the parts added.
LOWLAT_DEVICE float2 sum_of(const CompressParams& params, int row, int width, int channel) {
  const float* from = params.partial + static_cast<std::int64_t>(row) * width + channel;
  const float2 a = __ldcg(reinterpret_cast<const float2*>(from));
  const float2 b = __ldcg(reinterpret_cast<const float2*>(
      from + static_cast<std::int64_t>(params.rows.num_rows) * width));
  return make_float2(a.x + b.x, a.y + b.y);
}

struct Four {
  float v[4];
};

// Turns four channels, of pairs pair and pair + 1, and rounds them.
LOWLAT_DEVICE void turn_four(Four& x, const float2 (&turn)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = x.v[2 * i], b = x.v[2 * i + 1];
    x.v[2 * i] = quick_bf16(a * turn[i].x - b * turn[i].y);
    x.v[2 * i + 1] = quick_bf16(a * turn[i].y + b * turn[i].x);
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

// Stores four channels of an entry. A warp calls, with 128 channels.
LOWLAT_DEVICE void store_entry(const CompressParams& params, const std::uint32_t* latent, int slot,
                               int channel, const float2 (&turn)[2]) {
  const stages::KvRow<std::uint8_t> to =
      stages::KvPaged<std::uint8_t>{params.pool.base, params.pool.slots_per_page,
                                    params.pool.page_bytes}
          .row(slot);
  const uint2 words = *reinterpret_cast<const uint2*>(latent + channel / 2);
  Four x{{sm90::low_bf16(words.x), sm90::high_bf16(words.x), sm90::low_bf16(words.y),
          sm90::high_bf16(words.y)}};
  if (channel >= kNope) turn_four(x, turn);
  const float scale = round_e4m3(
      plat::min(plat::max(amax_of<stages::kFp4LatentGroup / 4>(x) / 6.0f, 0x1p-9f), 448.0f));
#pragma unroll
  for (float& v : x.v) v = fp4_round(v / scale) * scale + 0.0f;
  const std::uint32_t code = power_code(plat::max(amax_of<stages::kKvGroup / 4>(x), 1e-4f));
  if (channel < kNope) {
    const float inverse = plat::bits_float((254u - code) << 23);
    *reinterpret_cast<std::uint32_t*>(to.data + channel) =
        sm90::to_e4m3_pair(x.v[0] * inverse, x.v[1] * inverse) |
        sm90::to_e4m3_pair(x.v[2] * inverse, x.v[3] * inverse) << 16;
    if (channel % stages::kKvGroup == 0) {
      to.scales[channel / stages::kKvGroup] = static_cast<std::uint8_t>(code);
    }
  } else {
    *reinterpret_cast<uint2*>(to.data + kNope + 2 * (channel - kNope)) =
        make_uint2(sm90::to_bf16_pair(x.v[0], x.v[1]), sm90::to_bf16_pair(x.v[2], x.v[3]));
  }
}

// Norms, turns and stores an index key. A warp calls.
LOWLAT_DEVICE void store_key(const CompressParams& params, const float* sums, int slot, int channel,
                             const float2 (&turn)[2], uint2 gain) {
  const float4 from = *reinterpret_cast<const float4*>(sums + channel);
  Four x{{from.x, from.y, from.z, from.w}};
  float squares = 0.0f;
#pragma unroll
  for (float& v : x.v) {
    v = quick_bf16(v);
    squares = plat::fma(v, v, squares);
  }
  const float norm =
      quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kIndexDim) + params.norm_eps);
  const float gains[4] = {sm90::low_bf16(gain.x), sm90::high_bf16(gain.x), sm90::low_bf16(gain.y),
                          sm90::high_bf16(gain.y)};
#pragma unroll
  for (int j = 0; j < 4; ++j) x.v[j] = quick_bf16(x.v[j] * norm * gains[j]);
  if (channel >= kIndexDim - shape::kRopeDim) turn_four(x, turn);
  const std::uint32_t code =
      fp4_scale_code(plat::max(amax_of<stages::kFp4IndexGroup / 4>(x), stages::kFp4KeyAmaxMin));
  const float inverse = fp4_scale(code).inverse;
  std::uint32_t packed = 0u;
#pragma unroll
  for (int j = 0; j < 4; ++j) packed |= fp4_code(fp4_round(x.v[j] * inverse)) << 4 * j;
  const stages::IndexRow<std::uint8_t> to =
      stages::IndexPaged<std::uint8_t>{params.keys.base, params.keys.page_bytes}.row(slot);
  *reinterpret_cast<std::uint16_t*>(to.data + channel / 2) = static_cast<std::uint16_t>(packed);
  if (channel % stages::kFp4IndexGroup == 0) {
    to.scales[channel / stages::kFp4IndexGroup] = static_cast<std::uint8_t>(code);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    compress_key_fp4_sm90(const __grid_constant__ CompressParams params) {
  __shared__ KeyShared shared;
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx(), row = static_cast<int>(blockIdx.x);
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4, width = compress_width(params);
  const int full_slot = __ldg(params.rows.slots + row), slot = full_slot / params.ratio;
  const int position = __ldg(params.rows.positions + row);
  const bool completes = full_slot >= 0 && position % params.ratio == params.ratio - 1;
  const int first_position = position - (params.ratio - 1);
  if (!completes) {
    wait_at(params.product_done);
    if (full_slot >= 0) {
      // The pair's first half waits for its second, which may come in a later step.
      const int request = row / params.rows.tokens;
      float* cell = params.state +
                    (static_cast<std::int64_t>(__ldg(params.state_slots + request)) * params.ring +
                     position % params.ring) *
                        2 * kDim;
      for (int channel = 2 * thread_idx; channel < 2 * kDim; channel += 2 * kThreads) {
        *reinterpret_cast<float2*>(cell + channel) = sum_of(params, row, width, channel);
      }
    }
    open_gate(params.done);
    return;
  }
  uint4 weight[kSteps][2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[step][half] = __ldg(reinterpret_cast<const uint4*>(
          params.wk + (warp_idx * 16 + g + 8 * half) * kDim + step * kStepK + 8 * t));
    }
  }
  // Warp 0 turns the index key, the last of the entry's warps the entry.
  const bool turns_key = warp_idx == 0;
  const int entry_channel =
      (warp_idx - (kWarps - kEntryWarps)) * 4 * plat::kWarpLanes + 4 * lane_idx;
  const int pair =
      (turns_key ? 4 * lane_idx - (kIndexDim - shape::kRopeDim) : entry_channel - kNope) / 2;
  float2 turn[2] = {};
  if (pair >= 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) turn[i] = index_turn(params.rope, pair + i, first_position);
  }
  const std::uint32_t gain =
      __ldg(reinterpret_cast<const std::uint32_t*>(params.norm) + thread_idx);
  const uint2 key_gain = __ldg(reinterpret_cast<const uint2*>(params.k_norm) + lane_idx);
  wait_at(params.product_done);

  const int channel = 2 * thread_idx;
  float2 c = sum_of(params, row, width, channel);
  if (params.ratio == 2) {
    const float2 score = sum_of(params, row, width, kDim + channel);
    float2 kv_even, score_even;
    if (row % params.rows.tokens != 0 && __ldg(params.rows.slots + row - 1) >= 0) {
      kv_even = sum_of(params, row - 1, width, channel);
      score_even = sum_of(params, row - 1, width, kDim + channel);
    } else {
      const int request = row / params.rows.tokens;
      const float* cell =
          params.state +
          (static_cast<std::int64_t>(__ldg(params.state_slots + request)) * params.ring +
           (position - 1) % params.ring) *
              2 * kDim;
      kv_even = __ldcg(reinterpret_cast<const float2*>(cell + channel));
      score_even = __ldcg(reinterpret_cast<const float2*>(cell + kDim + channel));
    }
    c.x = stages::pool_pair(kv_even.x, score_even.x, c.x, score.x);
    c.y = stages::pool_pair(kv_even.y, score_even.y, c.y, score.y);
  }
  c.x = quick_bf16(c.x), c.y = quick_bf16(c.y);
  const float squares = plat::warp_sum(plat::fma(c.x, c.x, c.y * c.y));
  if (lane_idx == 0) shared.squares[warp_idx] = squares;
  plat::block_sync();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += shared.squares[warp];
  const float norm = quick_rsqrt(total / static_cast<float>(kDim) + params.norm_eps);
  shared.latent[thread_idx] =
      sm90::to_bf16_pair(c.x * norm * sm90::low_bf16(gain), c.y * norm * sm90::high_bf16(gain));
  plat::block_sync();
  // The index key's sums: column 0 of the products is the row.
  {
    float sum[4] = {}, other[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 &low = weight[step][0], &high = weight[step][1];
      const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y},
                                     {low.z, high.z, low.w, high.w}};
      const uint4 b =
          g == 0 ? *reinterpret_cast<const uint4*>(shared.latent + (step * kStepK + 8 * t) / 2)
                 : make_uint4(0u, 0u, 0u, 0u);
      const std::uint32_t b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
      sm90::mma_bf16(sum, a[0], b_low);
      sm90::mma_bf16(other, a[1], b_high);
    }
    if (t == 0) {
      shared.key[warp_idx * 16 + g] = sum[0] + other[0];
      shared.key[warp_idx * 16 + g + 8] = sum[2] + other[2];
    }
  }
  plat::block_sync();
  if (turns_key) {
    store_key(params, shared.key, slot, 4 * lane_idx, turn, key_gain);
  } else if (entry_channel >= 0) {
    store_entry(params, shared.latent, slot, entry_channel, turn);
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
  if (compress_width(params) < params.ratio * kDim) return cudaErrorInvalidValue;
  // A row reads the cell before its request's first and writes its own.
  if (params.ratio == 2 && params.ring < rows.tokens + 1) return cudaErrorInvalidValue;
  return launch_kernel(compress_key_fp4_sm90, dim3(compress_key_blocks(rows.num_rows)), kThreads, 0,
                       1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused
