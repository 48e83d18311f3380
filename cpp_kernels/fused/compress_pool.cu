// compress_pool_sm90: V4's compressed entries and index keys: a softmax over the tokens of a block,
// channel by channel.
//
// Math         see stages/pool.hpp; entry = bf( norm, RoPE at the block's first position ), stored
//              as 584 bytes; index key (ratio 4) = e4m3( norm, RoPE, Hadamard·128^-0.5 ) under
//              max(1e-4, amax) / 448
// Shapes       sums fp32 [2,T,width] · rings fp32 · ape fp32
// Rounding     bf16 where bf( ) stands; codes nearest-even; all else fp32
// Bytes        ratio 4: 66 KB for each completed entry; ratio 128: 512 KB
// Floor        none of its own: one hop, and one inside the cluster
// Launch       a cluster of eight blocks of 256 threads a row, of which each has the 64 channels of
//              one scale; at ratio 4 a second cluster, or another launch, whose first block makes
//              the index key. Small blocks: attention's launch waits until they have a place, and
//              few steps complete an entry of ratio 128. Of more than eight rows of ratio 4 a block
//              of 512 threads instead of each cluster, since hundreds of blocks take long to come
//              and go
// Ordering     gates (exchange_gate.cuh) or kernels' ends; the sums of squares reach every block of
//              the cluster by stores that count on its barrier. A ring is longer than what an entry
//              reads and the step writes, so that neither waits for the other
// Determinism  the order of stages/pool.hpp; bitwise run to run and rank to rank
// Meaning      reference/pool.cpp, kv.cpp, index.cpp. Bound: rel_l2 ≤ 4e-3 of entries and keys
#include "platform/nvidia.hpp"
// The platform comes first.
#include <cfloat>

#include "fused/compress.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_weights.cuh"
#include "fused/index_latent.cuh"
#include "fused/index_place.cuh"
#include "stages/index.hpp"
#include "stages/kv.hpp"
#include "stages/pool_state.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kDim = shape::kHeadDim, kNope = kDim - shape::kRopeDim;
constexpr int kPartials = shape::kBlockRatio / stages::kPoolPartial;
constexpr int kGroup = stages::kKvGroup, kGroups = kDim / kGroup;
constexpr int kWarpsOfGroup = kGroup / plat::kWarpLanes;
static_assert(kNope % kGroup == 0 && kWarpsOfGroup == 2);

// Blocks that share a row. At ratio 128 teams of 64 threads share the partial softmaxes.
template <int kBlocks_>
struct Share {
  static constexpr int kBlocks = kBlocks_, kChannels = kDim / kBlocks;
  static constexpr int kThreads = kChannels < 256 ? 256 : kChannels;
  static constexpr int kOwnGroups = kChannels / kGroup;
};

struct Partial {
  float max, sum, weighted;
};
struct Eight {
  float values[stages::kPoolPartial], scores[stages::kPoolPartial];
};
template <int kRatio, int kBlocks>
struct PoolShared {
  static constexpr int kOwnWarps = Share<kBlocks>::kOwnGroups * kWarpsOfGroup;
  Partial partials[kRatio == shape::kBlockRatio ? kPartials : 1][Share<kBlocks>::kChannels];
  alignas(16) float pooled[kIndexDim];  // of the index
  float group_squares[kGroups];
  float warp_squares[kOwnWarps], warp_amax[kOwnWarps];
  std::uint64_t barrier;
};

// Where the projections of a request's tokens lie: the step's own, or a ring's.
struct Candidates {
  const PoolParams& params;
  stages::PoolLayout layout;
  int column;          // of the product
  const float* state;  // of the layer or the index
  int first_row, first_position, request;

  LOWLAT_DEVICE const float* ring_row(int position) const {
    std::int64_t row;
    if (layout.overlaps()) {
      const std::int32_t page =
          __ldg(params.pages.page_table + static_cast<std::int64_t>(request) * params.pages.stride +
                position / params.pages.per_page);
      std::int64_t slot = static_cast<std::int64_t>(page) * params.pages.per_page +
                          position % params.pages.per_page;
      if (params.window_slots != nullptr) {
        slot = __ldg(params.window_slots + slot);
        if (slot < 0 || slot >= params.num_window_slots) slot = 0;
      }
      row = stages::overlap_state_row(slot, params.pages.per_page, params.ring);
    } else {
      row = stages::block_state_row(__ldg(params.state_slots + request), position, params.ring);
    }
    return state + row * layout.width();
  }
  // Element i of the row of a token of the step: the parts added.
  LOWLAT_DEVICE float step_value(int row, int i) const {
    const float* from = params.partial + static_cast<std::int64_t>(row) * params.width + column + i;
    return __ldcg(from) +
           __ldcg(from + static_cast<std::int64_t>(params.rows.num_rows) * params.width);
  }
  // Candidates first .. first + 7 of channel d, as far as the rings have them; the step's own have
  // the part of ape alone.
  LOWLAT_DEVICE void from_rings(Eight& out, int entry, int first, int d, const float* ape) const {
#pragma unroll
    for (int j = 0; j < stages::kPoolPartial; ++j) {
      const int i = first + j, position = static_cast<int>(layout.position(entry, i));
      const int at = layout.offset(i) + d;
      out.values[j] = 0.0f, out.scores[j] = -FLT_MAX;
      if (position < 0) continue;
      out.scores[j] = __ldg(ape + layout.ape_row(i) * layout.half_width() + at);
      if (position >= first_position) continue;
      const float* row = ring_row(position);
      out.values[j] = __ldcg(row + at);
      out.scores[j] += __ldcg(row + layout.half_width() + at);
    }
  }
  // Their partial softmax, with the step's own.
  LOWLAT_DEVICE Partial partial(const Eight& known, int entry, int first, int d) const {
    float values[stages::kPoolPartial], scores[stages::kPoolPartial];
#pragma unroll
    for (int j = 0; j < stages::kPoolPartial; ++j) {
      const int i = first + j, position = static_cast<int>(layout.position(entry, i));
      const int at = layout.offset(i) + d;
      values[j] = known.values[j], scores[j] = known.scores[j];
      if (position < 0 || position < first_position) continue;
      const int row = first_row + position - first_position;
      values[j] = step_value(row, at);
      scores[j] += step_value(row, layout.half_width() + at);
    }
    Partial out{scores[0], 0.0f, 0.0f};
#pragma unroll
    for (const float s : scores) out.max = plat::max(s, out.max);
#pragma unroll
    for (int j = 0; j < stages::kPoolPartial; ++j) {
      const float weight = plat::exp(scores[j] - out.max);
      out.sum += weight;
      out.weighted += weight * values[j];
    }
    return out;
  }
};

// What a lane's four channels of an index key are multiplied by: its norm's gains, and turns of the
// channels that rotate.
struct KeyFactors {
  float gain[4];
  float2 turn[2];
};
constexpr int kKeyNope = kIndexDim - shape::kRopeDim;
LOWLAT_DEVICE KeyFactors key_factors(const PoolParams& params, int first_position, int lane_idx) {
  KeyFactors out = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    out.gain[j] = stages::from_bf16(__ldg(params.index_norm + 4 * lane_idx + j));
  }
  const int turned = 4 * lane_idx - kKeyNope;
  if (turned >= 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.turn[i] = index_turn(params.rope, turned / 2 + i, first_position);
    }
  }
  return out;
}

// Norms, turns, multiplies by the Hadamard matrix and stores an index key. A warp calls; a lane has
// four channels.
LOWLAT_DEVICE void store_index_key(const PoolParams& params, const KeyFactors& factors,
                                   const float* pooled, int slot, int lane_idx) {
  const float4 from = *reinterpret_cast<const float4*>(pooled + 4 * lane_idx);
  float x[4] = {from.x, from.y, from.z, from.w}, squares = 0.0f;
#pragma unroll
  for (const float v : x) squares = plat::fma(v, v, squares);
  const float norm =
      quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kIndexDim) + params.norm_eps);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] = x[j] * norm * factors.gain[j];
  }
  if (4 * lane_idx >= kKeyNope) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 turn = factors.turn[i];
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * turn.x - b * turn.y;
      x[2 * i + 1] = a * turn.y + b * turn.x;
    }
  }
  const float pairs[4] = {x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]};
  x[0] = pairs[0] + pairs[2], x[2] = pairs[0] - pairs[2];
  x[1] = pairs[1] + pairs[3], x[3] = pairs[1] - pairs[3];
#pragma unroll
  for (int mask = 1; mask < plat::kWarpLanes; mask *= 2) {
    const bool high = (lane_idx & mask) != 0;
#pragma unroll
    for (float& v : x) {
      const float other = plat::warp_shuffle_xor(v, mask);
      v = high ? other - v : v + other;
    }
  }
  constexpr float kRoot = 0.08838834764831845f;  // 128^-0.5
  float amax = stages::kIndexFp8AmaxMin;
#pragma unroll
  for (float& v : x) {
    v *= kRoot;
    amax = plat::max(plat::abs(v), amax);
  }
  amax = plat::warp_max(amax);
  const float scale = amax / stages::kE4m3Max, inverse = 1.0f / scale;
  const stages::IndexRow<std::uint8_t, stages::kIndexFp8DataBytes> to =
      stages::IndexPaged<std::uint8_t, stages::kIndexFp8DataBytes>{params.keys.base,
                                                                   params.keys.page_bytes}
          .row(slot);
  *reinterpret_cast<std::uint32_t*>(to.data + 4 * lane_idx) =
      sm90::to_e4m3_pair(x[0] * inverse, x[1] * inverse) |
      sm90::to_e4m3_pair(x[2] * inverse, x[3] * inverse) << 16;
  if (lane_idx == 0) *reinterpret_cast<float*>(to.scales) = scale;
}

template <int kRatio, int kBlocks>
__global__ void __launch_bounds__(Share<kBlocks>::kThreads)
    compress_pool_sm90(const __grid_constant__ PoolParams params) {
  using Own = Share<kBlocks>;
  constexpr int kChannels = Own::kChannels, kThreads = Own::kThreads;
  __shared__ PoolShared<kRatio, kBlocks> shared;
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx(), row = static_cast<int>(blockIdx.y);
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int block_idx = kBlocks > 1 ? sm90::cluster_rank() : 0;
  const bool is_index =
      params.part == PoolPart::both ? blockIdx.z != 0 : params.part == PoolPart::keys;
  const stages::PoolLayout layout{kRatio, is_index ? kIndexDim : kDim};
  const int request = row / params.rows.tokens, begin = request * params.rows.tokens;
  const int full_slot = __ldg(params.rows.slots + row);
  const int position = __ldg(params.rows.positions + row);
  // The request's rows of the step, without padding before and behind.
  int first_row = begin, end = 0;
#pragma unroll 1
  for (int i = params.rows.tokens - 1; i >= 0; --i) {
    if (__ldg(params.rows.slots + begin + i) < 0) continue;
    if (end == 0) end = __ldg(params.rows.positions + begin + i) + 1;
    first_row = begin + i;
  }
  const Candidates candidates{params,
                              layout,
                              is_index ? 4 * kDim : 0,
                              is_index ? params.index_state : params.state,
                              first_row,
                              __ldg(params.rows.positions + first_row),
                              request};
  const bool completes = full_slot >= 0 && position % kRatio == kRatio - 1;
  const int entry = position / kRatio, first_position = entry * kRatio;
  const int slot = full_slot / kRatio;
  if (kBlocks > 1 && thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, kBlocks * 4);
  }
  // All that does not hang on the product, before it is there.
  constexpr int kShare = (kRatio == stages::kOverlapRatio ? 4 : 2) * kDim / kBlocks;
  constexpr int kOfThread = (kShare + kThreads - 1) / kThreads;
  const int share = static_cast<int>(layout.width()) / kBlocks;  // the index has a quarter
  const auto has = [&](int i) { return thread_idx + i * kThreads < share; };
  const int own_idx = block_idx * share + thread_idx;
  const bool writes =
      has(0) && full_slot >= 0 &&
      stages::writes_pool_state(layout, params.ring, params.pages.per_page, position, end);
  float* const to_ring =
      writes ? const_cast<float*>(candidates.ring_row(position)) + own_idx : nullptr;
  const bool makes_key = completes && is_index && block_idx == 0;
  const bool makes_entry = completes && !is_index;
  const int local = thread_idx % kChannels, team = thread_idx / kChannels;
  const int channel = block_idx * kChannels + local;
  Eight known = {};
  KeyFactors factors = {};
  float gain = 0.0f;
  float2 turn = {};
  if (makes_key) {
    if (thread_idx < kIndexDim) {
      candidates.from_rings(known, entry, 0, thread_idx, params.index_ape);
    }
    if (warp_idx == 0) factors = key_factors(params, first_position, lane_idx);
  } else if (makes_entry && team == 0) {
    if constexpr (kRatio == stages::kOverlapRatio) {
      candidates.from_rings(known, entry, 0, channel, params.ape);
    }
    gain = stages::from_bf16(__ldg(params.norm + channel));
    if (channel >= kNope) turn = index_turn(params.rope, (channel - kNope) / 2, first_position);
  }
  if constexpr (kBlocks > 1) {
    plat::block_sync();
    sm90::cluster_arrive_relaxed();
  }
  wait_at(params.product_done);

  // What the row leaves in the ring.
  float own[kOfThread] = {};
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if (writes && has(i)) own[i] = candidates.step_value(row, own_idx + i * kThreads);
  }
  if (makes_key) {
    if (thread_idx < kIndexDim) {
      const Partial all = candidates.partial(known, entry, 0, thread_idx);
      shared.pooled[thread_idx] = all.weighted / all.sum;
    }
    plat::block_sync();
    if (warp_idx == 0) store_index_key(params, factors, shared.pooled, slot, lane_idx);
  } else if (makes_entry) {
    float value = 0.0f;
    if constexpr (kRatio == stages::kOverlapRatio) {
      if (team == 0) {
        const Partial all = candidates.partial(known, entry, 0, channel);
        value = all.weighted / all.sum;
      }
    } else {
      constexpr int kTeams = kThreads / kChannels;
#pragma unroll 1
      for (int i = team; i < kPartials; i += kTeams) {
        const int first = i * stages::kPoolPartial;
        candidates.from_rings(known, entry, first, channel, params.ape);
        shared.partials[i][local] = candidates.partial(known, entry, first, channel);
      }
      plat::block_sync();
      if (team == 0) {
        float largest = shared.partials[0][local].max, sum = 0.0f, weighted = 0.0f;
#pragma unroll
        for (int i = 1; i < kPartials; ++i) {
          largest = plat::max(largest, shared.partials[i][local].max);
        }
#pragma unroll 4
        for (int i = 0; i < kPartials; ++i) {
          const Partial& part = shared.partials[i][local];
          const float scale = plat::exp(part.max - largest);
          sum += part.sum * scale;
          weighted += part.weighted * scale;
        }
        value = weighted / sum;
      }
    }
    if (team == 0) {
      const float squares = plat::warp_sum(value * value);
      if (lane_idx == 0) shared.warp_squares[warp_idx] = squares;
    }
    plat::block_sync();
    if constexpr (kBlocks > 1) {
      static_assert(Own::kOwnGroups == 1);
      sm90::cluster_wait();  // the others run
      if (thread_idx < kBlocks) {
        sm90::send_to_peer(sm90::peer_address(&shared.group_squares[block_idx], thread_idx),
                           shared.warp_squares[0] + shared.warp_squares[1],
                           sm90::peer_address(&shared.barrier, thread_idx));
      }
      wait_for_cluster(&shared.barrier, 0);
    }
    if (team == 0) {
      // The same sum whoever makes it.
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        total += kBlocks > 1 ? shared.group_squares[i]
                             : shared.warp_squares[2 * i] + shared.warp_squares[2 * i + 1];
      }
      const float norm = quick_rsqrt(total / static_cast<float>(kDim) + params.norm_eps);
      value = value * norm * gain;
      if (channel >= kNope) {
        const float other = plat::warp_shuffle_xor(value, 1);
        value = local % 2 == 0 ? value * turn.x - other * turn.y : other * turn.y + value * turn.x;
      }
      value = quick_bf16(value);
      const float amax = plat::warp_max(plat::abs(value));
      if (lane_idx == 0) shared.warp_amax[warp_idx] = amax;
    }
    plat::block_sync();
    if (team == 0) {
      const stages::KvRow<std::uint8_t> to =
          stages::KvPaged<std::uint8_t>{params.pool.base, params.pool.slots_per_page,
                                        params.pool.page_bytes}
              .row(slot);
      if (channel >= kNope) {
        reinterpret_cast<std::uint16_t*>(to.data + kNope)[channel - kNope] =
            static_cast<std::uint16_t>(plat::float_bits(value) >> 16);
      } else {
        const int first = local / kGroup * kWarpsOfGroup;
        const std::uint32_t code = power_code(
            plat::max(plat::max(shared.warp_amax[first], shared.warp_amax[first + 1]), 1e-4f));
        to.data[channel] = static_cast<std::uint8_t>(
            sm90::to_e4m3_pair(value * plat::bits_float((254u - code) << 23), 0.0f));
        if (local % kGroup == 0) to.scales[channel / kGroup] = static_cast<std::uint8_t>(code);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if (writes && has(i)) to_ring[i * kThreads] = own[i];
  }
  if (kBlocks > 1 && !makes_entry) sm90::cluster_wait();
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_compress_pool(const PoolParams& params, bool programmatic, cudaStream_t stream) {
  const StepRows& rows = params.rows;
  if (rows.num_rows < 1 || rows.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (rows.tokens < 1 || rows.num_rows % rows.tokens != 0) return cudaErrorInvalidValue;
  const auto launch = [&]<int kRatio, int kBlocks>(int candidates, int width) {
    if (params.ring < candidates + rows.tokens - 1 || params.width < width ||
        (params.part != PoolPart::both && kRatio != stages::kOverlapRatio)) {
      return cudaErrorInvalidValue;
    }
    const auto num_rows = static_cast<unsigned>(rows.num_rows);
    const unsigned blocks = compress_pool_blocks(rows.num_rows, kRatio, params.part);
    const dim3 grid(kBlocks, num_rows, blocks / (kBlocks * num_rows));
    return launch_kernel(compress_pool_sm90<kRatio, kBlocks>, grid, Share<kBlocks>::kThreads, 0,
                         kBlocks, programmatic, stream, params);
  };
  if (params.ratio == 4) {
    constexpr int kWidth = 4 * kDim + 4 * kIndexDim;
    return compress_pool_cluster(rows.num_rows, 4) == 1
               ? launch.template operator()<4, 1>(8, kWidth)
               : launch.template operator()<4, 8>(8, kWidth);
  }
  if (params.ratio == 128) return launch.template operator()<128, 8>(128, 2 * kDim);
  return cudaErrorInvalidValue;
}

}  // namespace lowlat::nvidia::fused
