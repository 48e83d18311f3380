// hc_exchange_mix_sm90: the end of one sublayer and the beginning of the next, for few rows, where
// the next one is combined by its own statistics.
//
// Math         y = bf( Σ_r p_r )                       r over ranks, fp32, ascending
//              R'[k] = bf( post[k]·y + Σ_j comb[j][k]·R[j] )   fp32: round(comb[0][k]·R0), then fma
//              m = fn·R' / sqrt(mean R'² + ε); pre, post', comb' from m (Sinkhorn)
//              v = Σ_k pre[k]·R'[k]                    fp32 fma, k ascending
//              x = bf( bf(v) · rsqrt(Σv²/H + ε) · gain )      V4's rule: Σ over the unrounded v
//              codes, scale = quant(x)                  e4m3, groups of 128, powers of two
//              Σv² = Σ_kl pre[k]·pre[l]·(R'[k]·R'[l]): the ten products of streams go the way of
//              the statistics, so that one exchange between blocks serves both
// Shapes       p_r packets of epoch e · R, R' [T,4,4096] bf16 · fn [24,16384] fp32 · x [T,4096]
// Rounding     where bf( ) stands, nearest-even; partial sums to 24 bits (exchange.cuh)
// Bytes        1.57 MB of fn a cluster (L2 but for the first), 0.26 MB where mix_out is not wanted;
//              T = 6, 4 ranks: packets 0.39 MB
// Floor        one hop: 1.3 us
// Launch       a cluster of sixteen blocks (or eight, see Layout) a row, a thread a column, its
//              part of fn in registers and shared memory before the packets are there. More rows
//              than clusters that run at once: exchange_mix_wide.cu
// Ordering     packets: exchange.cuh. Inside a cluster: each block stores its sums into every
//              block, and counts on that block's barrier
// Determinism  fixed summation tree; bitwise equal run to run and rank to rank
// Meaning      reference/hc.cpp, reference/rank_sum.cpp. Bound: x, R' rel_l2 ≤ 4e-3, mix 2e-5.
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/exchange_mix.cuh"
#include "fused/exchange_mix_wide.hpp"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"

namespace lowlat::nvidia::fused {
namespace {

using namespace mixing;

// What a cluster of so many blocks has. A block of the big one has room beside two of a product
// that publishes, or one of that before it: it is there before the last of these have begun. The
// small one finds its places before all of the experts' blocks, beside which nothing has room, have
// ended. What registers do not hold of a block's part of fn lies in shared memory. kDots: outputs,
// 24 or the four of `pre`.
template <int kCluster_, int kDots_>
struct Layout {
  static constexpr int kCluster = kCluster_, kDots = kDots_;
  // Sums of a row: the dot products, then the products of streams.
  static constexpr int kSums = kDots + kStreams + 6, kSumPitch = (kSums + 3) / 4 * 4;
  static constexpr int kThreads = kHidden / kCluster, kWarps = kThreads / plat::kWarpLanes;
  static constexpr int kMaxRegisters = kCluster == kMixCluster ? 96 : 128;
  static constexpr int kKept = kDots < kOutputs          ? kDots  // outputs in registers
                               : kCluster == kMixCluster ? 12
                                                         : 16;
  static constexpr int kSharedOutputs = kDots - kKept;
  static constexpr int kSharedFnBytes = kSharedOutputs * kStreams * kThreads * 4;
  static_assert(kThreads % kGroup == 0);
};

// Behind it lies the third of fn, [outputs][streams][threads].
template <class L>
struct alignas(128) Shared {
  static constexpr int kCluster = L::kCluster, kThreads = L::kThreads, kWarps = L::kWarps;
  static constexpr int kSumPitch = L::kSumPitch;
  alignas(16) float of_warp[kWarps][kSumPitch];
  alignas(16) float of_block[kCluster][kSumPitch];  // written by each block of the cluster
  std::uint64_t barrier;                            // of these
  std::uint64_t fn_barrier;
  alignas(16) float y[kThreads];  // stored by fours
  float amax[kWarps];
  float mix[kMixStride];
  float logit[kOutputs];
};

// v[i] summed over the lanes, in v[0] of lane i: each exchange halves the values that a lane holds.
template <int kHalf, int kCount>
LOWLAT_DEVICE void sum_over_lanes(float (&v)[kCount], int lane_idx) {
  const bool upper = (lane_idx & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf];
    const float keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(plat::kAllLanes, send, kHalf);
  }
  if constexpr (kHalf > 1) sum_over_lanes<kHalf / 2>(v, lane_idx);
}
// Of lanes i and i + 16 where there are sixteen.
template <int kCount>
LOWLAT_DEVICE void sum_over_lanes(float (&v)[kCount], int lane_idx) {
  static_assert(kCount == plat::kWarpLanes || kCount == plat::kWarpLanes / 2);
  sum_over_lanes<kCount / 2>(v, lane_idx);
  if constexpr (kCount < plat::kWarpLanes) v[0] += __shfl_xor_sync(plat::kAllLanes, v[0], kCount);
}

LOWLAT_DEVICE float bf16_at(const std::uint16_t* from) {
  return plat::bits_float(static_cast<std::uint32_t>(__ldcg(from)) << 16);
}

// Eight lanes' codes become a packet's two words, in the first of them. Whole warps call.
LOWLAT_DEVICE uint2 gather_codes(std::uint32_t code) {
  code |= __shfl_down_sync(plat::kAllLanes, code, 1) << 8;
  code |= __shfl_down_sync(plat::kAllLanes, code, 2) << 16;
  return make_uint2(code, __shfl_down_sync(plat::kAllLanes, code, 4));
}

template <int kRanks, class L>
__global__ void __maxnreg__(L::kMaxRegisters)
    hc_exchange_mix_sm90(const __grid_constant__ ExchangeMixParams params) {
  constexpr int kThreads = L::kThreads, kWarps = L::kWarps, kKept = L::kKept;
  constexpr int kShared = L::kSharedOutputs, kDots = L::kDots, kSumPitch = L::kSumPitch;
  constexpr bool kMixes = kDots == kOutputs;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<L>*>(memory);
  [[maybe_unused]] auto* const shared_fn = reinterpret_cast<float*>(memory + sizeof shared);
  sm90::launch_dependents();
  Stamps stamps(params.port.stamps, params.kernel);
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int block_idx = sm90::cluster_rank();
  const int row_idx = static_cast<int>(blockIdx.y);
  const int column = block_idx * kThreads + thread_idx;
  if (thread_idx == kThreads - plat::kWarpLanes) {  // of a warp that asks no gate
    sm90::barrier_init(&shared.barrier, 1);
    sm90::barrier_init(&shared.fn_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, sizeof shared.of_block);
    if constexpr (kShared > 0) {
      sm90::barrier_arrive_expect(&shared.fn_barrier, L::kSharedFnBytes);
#pragma unroll 1
      for (int i = 0; i < kShared * kStreams; ++i) {
        sm90::bulk_load(shared_fn + i * kThreads,
                        params.next.fn + (kKept * kStreams + i) * kHidden + block_idx * kThreads,
                        kThreads * 4, &shared.fn_barrier, sm90::CacheHint::evict_last);
      }
    }
  }
  __syncwarp();
  sm90::cluster_arrive_relaxed();  // all blocks run before one stores into another
  // Before fn is asked for: who waits after its loads waits for them too.
  poll_gates(params.before, params.mix_before, params.x_read);
  float fn[kKept][kStreams];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      fn[i][k] = __ldg(params.next.fn + (i * kStreams + k) * kHidden + column);
    }
  }
  const LogitScale of_logit = logit_scale(params.next, lane_idx);
  const float gain =
      plat::bits_float(static_cast<std::uint32_t>(__ldg(params.gain + column)) << 16);
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  const auto stage = static_cast<stages::StageId>(params.stage);
  stamps.mark(StampStage::ask);
  plat::block_sync();
  sm90::cluster_wait();

  const std::int64_t row_begin = static_cast<std::int64_t>(row_idx) * kStreams * kHidden;
  float r[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    r[j] = bf16_at(params.residual_in + row_begin + j * kHidden + column);
  }
  std::uint32_t aborted = 0;
  if constexpr (kRanks > 0) {
    constexpr int kQuads = kHidden / 4, kOwnQuads = kThreads / 4;
    if (thread_idx < kMixStride) {
      shared.mix[thread_idx] = __ldcg(params.mix_in + row_idx * kMixStride + thread_idx);
    }
    // Blocks that begin late find all packets there.
    const int own_quad = block_idx * kOwnQuads + thread_idx;
    float sums[4] = {};
    const bool there =
        thread_idx >= kOwnQuads ||
        try_receive_quad<kRanks>(sums, params.port, epoch, row_idx, own_quad, kQuads);
    if (__syncthreads_or(there ? 0 : 1) != 0) {
      wait_for_quads<kRanks>(params.port, epoch, row_idx, block_idx * kOwnQuads, kOwnQuads, kQuads,
                             stage);
      if (!there) {
        receive_quad<kRanks>(sums, params.port, epoch, row_idx, own_quad, kQuads, stage);
      }
    }
    if (thread_idx < kOwnQuads) {
      *reinterpret_cast<float4*>(&shared.y[4 * thread_idx]) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    // What came may be of a kernel whose own wait was ended. The answer is used further below.
    aborted = load_relaxed(params.port.abort_words[params.port.tp_rank]);
    plat::block_sync();
    stamps.mark(StampStage::wait);
    const float y = quick_bf16(shared.y[thread_idx]);
    float out[kStreams];
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      float acc = shared.mix[8 + k] * r[0];
      acc = plat::fma(shared.mix[4 + k], y, acc);
#pragma unroll
      for (int j = 1; j < kStreams; ++j) acc = plat::fma(shared.mix[8 + 4 * j + k], r[j], acc);
      out[k] = quick_bf16(acc);
      params.residual_out[row_begin + k * kHidden + column] =
          static_cast<std::uint16_t>(plat::float_bits(out[k]) >> 16);
    }
#pragma unroll
    for (int k = 0; k < kStreams; ++k) r[k] = out[k];
  }

  {
    // Those that a warp's exchange of values takes; the last of many are summed by themselves.
    constexpr int kTogether = kMixes ? plat::kWarpLanes : plat::kWarpLanes / 2;
    float v[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      v[i] = fn[i][0] * r[0];
#pragma unroll
      for (int k = 1; k < kStreams; ++k) v[i] = plat::fma(fn[i][k], r[k], v[i]);
    }
    if constexpr (kShared > 0) {
      wait_for_weights(&shared.fn_barrier, 0);
#pragma unroll
      for (int i = 0; i < kShared; ++i) {
        const float* const from = shared_fn + i * kStreams * kThreads + thread_idx;
        float& to = v[kKept + i];
        to = from[0] * r[0];
#pragma unroll
        for (int k = 1; k < kStreams; ++k) to = plat::fma(from[k * kThreads], r[k], to);
      }
    }
    constexpr int kCross = kDots + kStreams;
#pragma unroll
    for (int k = 0; k < kStreams; ++k) v[kDots + k] = r[k] * r[k];
    v[kCross] = r[0] * r[1];
    v[kCross + 1] = r[0] * r[2];
    v[kCross + 2] = r[0] * r[3];
    v[kCross + 3] = r[1] * r[2];
    if constexpr (kMixes) {
      static_assert(kCross + 4 == kTogether);
      const float last[2] = {plat::warp_sum(r[1] * r[3]), plat::warp_sum(r[2] * r[3])};
      sum_over_lanes(v, lane_idx);
      shared.of_warp[warp_idx][lane_idx] = v[0];
      if (lane_idx < kSumPitch - kTogether) {
        shared.of_warp[warp_idx][kTogether + lane_idx] = lane_idx == 0   ? last[0]
                                                         : lane_idx == 1 ? last[1]
                                                                         : 0.0f;
      }
    } else {
      static_assert(kCross + 6 <= kTogether && kSumPitch == kTogether);
      v[kCross + 4] = r[1] * r[3];
      v[kCross + 5] = r[2] * r[3];
      sum_over_lanes(v, lane_idx);
      if (lane_idx < kSumPitch) shared.of_warp[warp_idx][lane_idx] = v[0];
    }
  }
  plat::block_sync();
  stamps.mark(StampStage::compute);
  constexpr int kChunks = kSumPitch / 4;
  if (thread_idx < L::kCluster * kChunks) {
    const int peer = thread_idx / kChunks, chunk = thread_idx % kChunks;
    float4 sum = *reinterpret_cast<const float4*>(&shared.of_warp[0][4 * chunk]);
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      const float4 part = *reinterpret_cast<const float4*>(&shared.of_warp[i][4 * chunk]);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    sm90::send_to_peer(sm90::peer_address(&shared.of_block[block_idx][4 * chunk], peer),
                       make_uint4(plat::float_bits(sum.x), plat::float_bits(sum.y),
                                  plat::float_bits(sum.z), plat::float_bits(sum.w)),
                       sm90::peer_address(&shared.barrier, peer));
  }
  wait_for_cluster(&shared.barrier, 0);
  float total = 0.0f, cross = 0.0f;
#pragma unroll
  for (int i = 0; i < L::kCluster; ++i) {
    total += shared.of_block[i][kMixes ? lane_idx : lane_idx % kSumPitch];
    if constexpr (kMixes) cross += shared.of_block[i][plat::kWarpLanes + lane_idx % 4];
  }
  auto [pre, scale, logit] =
      row_numbers<kDots>(total, cross, of_logit, params.norm_eps, params.hc_eps);
  if (aborted != 0u) {
    scale = plat::bits_float(0x7fc0'0000u);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      params.residual_out[row_begin + k * kHidden + column] = 0x7fc0u;
    }
  }
  float v = 0.0f;
#pragma unroll
  for (int k = 0; k < kStreams; ++k) v = plat::fma(r[k], pre[k], v);
  v = quick_bf16(quick_bf16(v) * scale * gain);
  params.x[static_cast<std::int64_t>(row_idx) * kHidden + column] =
      static_cast<std::uint16_t>(plat::float_bits(v) >> 16);
  const float warp_amax = plat::warp_max(plat::abs(v));
  if (lane_idx == 0) shared.amax[warp_idx] = warp_amax;
  if (kMixes && warp_idx == 0 && lane_idx < kOutputs) shared.logit[lane_idx] = logit;
  plat::block_sync();
  stamps.mark(StampStage::sum);
  if (params.x_packets != nullptr || params.x_codes != nullptr) {
    constexpr int kWarpsAGroup = kGroup / plat::kWarpLanes;
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarpsAGroup; ++i) {
      amax = plat::max(shared.amax[warp_idx / kWarpsAGroup * kWarpsAGroup + i], amax);
    }
    const PowerScale group = power_scale(amax);
    const std::uint32_t code = sm90::to_e4m3_pair(v * group.inverse, 0.0f) & 0xffu;
    const uint2 codes = gather_codes(code);
    if (params.num_rows <= kHopRows) {
      if (lane_idx % 8 == 0 && params.x_packets != nullptr) {
        send_packet(
            static_cast<plat::TaggedWords*>(params.x_packets) + (row_idx * kHidden + column) / 8,
            static_cast<std::uint32_t>(epoch), codes.x, codes.y, plat::float_bits(group.scale));
      }
    } else {
      if (lane_idx % 8 == 0) {
        *reinterpret_cast<uint2*>(params.x_codes + static_cast<std::int64_t>(row_idx) * kHidden +
                                  column) = codes;
      }
      if (column % kGroup == 0) {
        params.x_scale[column / kGroup * padded_rows(params.num_rows) + row_idx] = group.scale;
      }
    }
  }
  stamps.mark(StampStage::store);
  open_gate(params.done, kMixCluster / L::kCluster);
  if (params.later_fn != nullptr) {
    ask_for_later<kStreams>(params.later_fn, row_idx * kHidden + column, params.num_rows * kHidden);
  }
  if (!kMixes || block_idx != 0) return;
  if (warp_idx == 0) {
    store_mix(params.mix_out + row_idx * kMixStride, shared.logit, params.hc_eps,
              params.sinkhorn_iters);
  }
  open_gate(params.mix_done);
}

}  // namespace

cudaError_t launch_exchange_mix(const ExchangeMixParams& params, bool programmatic,
                                cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  const int clusters = static_cast<int>(exchange_mix_clusters(params));
  if (params.num_rows > clusters) {
    if (params.mix_out == nullptr) return cudaErrorInvalidValue;
    return launch_exchange_mix_wide(params, programmatic, stream);
  }
  return with_cluster(params, [&]<int kRanks, int kCluster>() {
    const auto launch = [&]<int kDots>() {
      using L = Layout<kCluster, kDots>;
      return launch_kernel(hc_exchange_mix_sm90<kRanks, L>, dim3(kCluster, clusters), L::kThreads,
                           sizeof(Shared<L>) + L::kSharedFnBytes, kCluster, programmatic, stream,
                           params);
    };
    return params.mix_out == nullptr ? launch.template operator()<kStreams>()
                                     : launch.template operator()<kOutputs>();
  });
}

}  // namespace lowlat::nvidia::fused
