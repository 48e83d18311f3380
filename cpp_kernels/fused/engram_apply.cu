// engram_apply_sm90: n-gram memory into the streams, and the next sublayer's input from them.
//
// Math         K_k, V = bf( sums of the parts );  s_k = Σ R_k·qw_k·kw_k·K_k · rsqrt(mean R_k² + ε)
//              · rsqrt(mean K_k² + ε) · H^-0.5,  g_k = sigmoid( copysign( sqrt(max(|s_k|, 1e-6)),
//              s_k ) ), R_k = bf( R_k + g_k·V );  x = bf( v·rsqrt(mean v² + ε)·gain ), v = bf( Σ
//              pre[k]·R_k ), and its codes. A row of an image token keeps its R
// Shapes       sums fp32 [3,T,5·5120] · R bf16 [T,4,5120] in place · x bf16 [T,5120]
// Rounding     bf16 where bf( ) stands; sums fp32
// Bytes        0.4 MB a row, from the second-level cache
// Floor        none of its own: two sums over a row
// Launch       a cluster of eight blocks a row, 160 threads, a thread four columns of all streams.
//              All that does not hang on R is done before R is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends; sums go to every block of the cluster by
//              stores that count on its barriers
// Determinism  fixed order: thread, warp, block; bitwise run to run and rank to rank
// Meaning      reference/engram.cpp, hc.cpp, norm.cpp. Bound: rel_l2 ≤ 4e-3 of R and x
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/engram.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_weights.cuh"
#include "fused/mix.hpp"
#include "stages/engram.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kHidden = 5120, kStreams = 4, kParts = 3, kOutputs = 5 * kHidden, kGroup = 32;
constexpr int kBlocks = 8, kThreads = kHidden / kBlocks / 4, kWarps = kThreads / plat::kWarpLanes;
constexpr int kSums = 3 * kStreams;  // dot products, squares of R, squares of K
static_assert(kThreads % plat::kWarpLanes == 0 && kBlocks * kSums <= kThreads);

struct ApplyShared {
  float warp_sum[kWarps][kSums];
  float block_sum[kBlocks][kSums];
  float warp_squares[kWarps], block_squares[kBlocks];
  float gate[kStreams];
  std::uint64_t sums_barrier, squares_barrier;
};

struct Quad {
  float v[4];
};
LOWLAT_DEVICE Quad expand(uint2 codes) {
  return {{sm90::low_bf16(codes.x), sm90::high_bf16(codes.x), sm90::low_bf16(codes.y),
           sm90::high_bf16(codes.y)}};
}
LOWLAT_DEVICE Quad load_sum(const EngramParams& params, int row, int output) {
  Quad out = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(
        params.sums + (static_cast<std::int64_t>(part) * params.rows.num_rows + row) * kOutputs +
        output));
    out.v[0] += v.x, out.v[1] += v.y, out.v[2] += v.z, out.v[3] += v.w;
  }
#pragma unroll
  for (float& v : out.v) v = quick_bf16(v);
  return out;
}

__global__ void __launch_bounds__(kThreads)
    engram_apply_sm90(const __grid_constant__ EngramParams params) {
  __shared__ ApplyShared shared;
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx(), row = static_cast<int>(blockIdx.y);
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int block_idx = sm90::cluster_rank();
  const int column = (block_idx * kThreads + thread_idx) * 4;
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.sums_barrier, 1);
    sm90::barrier_init(&shared.squares_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.sums_barrier, kBlocks * kSums * 4);
    sm90::barrier_arrive_expect(&shared.squares_barrier, kBlocks * 4);
  }
  plat::block_sync();
  sm90::cluster_arrive_relaxed();
  const bool is_image = __ldg(params.token_ids + row) == params.image_token;
  const Quad gain = expand(__ldg(reinterpret_cast<const uint2*>(params.gain + column)));

  wait_at(params.product_done);
  Quad match[kStreams];  // weights times key
  float sums[kSums];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    const Quad q =
        expand(__ldg(reinterpret_cast<const uint2*>(params.q_weight + k * kHidden + column)));
    const Quad w =
        expand(__ldg(reinterpret_cast<const uint2*>(params.k_weight + k * kHidden + column)));
    const Quad key = load_sum(params, row, k * kHidden + column);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      match[k].v[i] = q.v[i] * w.v[i] * key.v[i];
      squares = plat::fma(key.v[i], key.v[i], squares);
    }
    sums[2 * kStreams + k] = squares;
  }
  const Quad value = load_sum(params, row, kStreams * kHidden + column);

  if (params.before.word != nullptr) wait_at(params.before);
  Quad r[kStreams];
  std::uint16_t* residual =
      params.residual + static_cast<std::int64_t>(row) * kStreams * kHidden + column;
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    r[k] = expand(__ldcg(reinterpret_cast<const uint2*>(residual + k * kHidden)));
    float dot = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dot = plat::fma(r[k].v[i], match[k].v[i], dot);
      squares = plat::fma(r[k].v[i], r[k].v[i], squares);
    }
    sums[k] = dot;
    sums[kStreams + k] = squares;
  }
  float pre[kStreams];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) pre[k] = __ldcg(params.mix + row * kMixStride + k);
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const float total = plat::warp_sum(sums[i]);
    if (lane_idx == i) shared.warp_sum[warp_idx][i] = total;
  }
  plat::block_sync();
  sm90::cluster_wait();  // the others run
  if (thread_idx < kBlocks * kSums) {
    const int to = thread_idx / kSums, i = thread_idx % kSums;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared.warp_sum[warp][i];
    sm90::send_to_peer(sm90::peer_address(&shared.block_sum[block_idx][i], to), total,
                       sm90::peer_address(&shared.sums_barrier, to));
  }
  wait_for_cluster(&shared.sums_barrier, 0);
  if (thread_idx < kStreams) {
    float total[3] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        total[i] += shared.block_sum[block][i * kStreams + thread_idx];
      }
    }
    shared.gate[thread_idx] = is_image
                                  ? 0.0f
                                  : stages::EngramApply<stages::OneThread>::gate(
                                        total[0], total[1], total[2], kHidden, params.norm_eps);
  }
  plat::block_sync();
  Quad v = {};
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    const float gate = shared.gate[k];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[k].v[i] = quick_bf16(r[k].v[i] + gate * value.v[i]);
      v.v[i] = plat::fma(r[k].v[i], pre[k], v.v[i]);
    }
    *reinterpret_cast<uint2*>(residual + k * kHidden) = make_uint2(
        sm90::to_bf16_pair(r[k].v[0], r[k].v[1]), sm90::to_bf16_pair(r[k].v[2], r[k].v[3]));
  }
  float squares = 0.0f;
#pragma unroll
  for (float& u : v.v) {
    u = quick_bf16(u);
    squares = plat::fma(u, u, squares);
  }
  squares = plat::warp_sum(squares);
  if (lane_idx == 0) shared.warp_squares[warp_idx] = squares;
  plat::block_sync();
  if (thread_idx < kBlocks) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared.warp_squares[warp];
    sm90::send_to_peer(sm90::peer_address(&shared.block_squares[block_idx], thread_idx), total,
                       sm90::peer_address(&shared.squares_barrier, thread_idx));
  }
  wait_for_cluster(&shared.squares_barrier, 0);
  float total = 0.0f;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) total += shared.block_squares[block];
  const float scale = quick_rsqrt(total / static_cast<float>(kHidden) + params.norm_eps);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v.v[i] = quick_bf16(v.v[i] * scale * gain.v[i]);
    amax = plat::max(plat::abs(v.v[i]), amax);
  }
#pragma unroll
  for (int mask = 1; mask < kGroup / 4; mask *= 2) {
    amax = plat::max(plat::warp_shuffle_xor(amax, mask), amax);
  }
  const std::int64_t place = static_cast<std::int64_t>(row) * kHidden + column;
  if (params.x != nullptr) {
    *reinterpret_cast<uint2*>(params.x + place) =
        make_uint2(sm90::to_bf16_pair(v.v[0], v.v[1]), sm90::to_bf16_pair(v.v[2], v.v[3]));
  }
  const PowerScale group = power_scale(amax);
  const std::uint32_t codes = sm90::to_e4m3_pair(v.v[0] * group.inverse, v.v[1] * group.inverse) |
                              sm90::to_e4m3_pair(v.v[2] * group.inverse, v.v[3] * group.inverse)
                                  << 16;
  if (params.hop.port != nullptr) {
    const std::uint32_t next = __shfl_down_sync(plat::kAllLanes, codes, 1);
    if (lane_idx % 2 == 0) {
      send_packet(static_cast<plat::TaggedWords*>(params.x_packets) + place / 8,
                  hop_tag(params.hop, params.hop.index, HopKernel::exchange).tag, codes, next,
                  plat::float_bits(group.scale));
    }
  } else {
    *reinterpret_cast<std::uint32_t*>(params.x_codes + place) = codes;
    if (column % kGroup == 0) {
      params.x_scale[column / kGroup * padded_rows(params.rows.num_rows) + row] = group.scale;
    }
  }
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_engram_apply(const EngramParams& params, bool programmatic,
                                cudaStream_t stream) {
  const int num_rows = params.rows.num_rows;
  if (num_rows < 1 || num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  return launch_kernel(engram_apply_sm90, dim3(kBlocks, static_cast<unsigned>(num_rows)), kThreads,
                       0, kBlocks, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused
