// hc_exchange_norm_sm90: the end of one sublayer and the beginning of the next, for few rows.
//
// Math         y = bf( Σ_r p_r )                       r over ranks, fp32, ascending
//              R'[k] = bf( post[k]·y + Σ_j comb[j][k]·R[j] )   fp32: round(comb[0][k]·R0), then fma
//              v = bf( Σ_k pre[k]·R'[k] )               fp32 fma, k ascending
//              x = bf( v · rsqrt(Σv²/H + ε) · gain )    V4.1's rule: Σ over the rounded v
//              codes, scale = quant(x)                  e4m3, groups of 32, powers of two
//              pre, post, comb of the residual: mix.cuh
// Shapes       p_r packets of epoch e · R, R' [T,4,H] bf16 · x [T,H] bf16 · 1 ≤ T ≤ 48
// Rounding     where bf( ) stands, nearest-even; partial sums to 24 bits (exchange.cuh)
// Bytes        T = 6, H = 5120, 4 ranks: read 0.74 MB (packets 0.49), write 0.34 MB, all in L2
// Floor        one hop: 1.3 us
// Launch       eight blocks (a cluster) a row, a thread for four columns; with `early` it polls
//              before the publishing kernel has ended, see ExchangeNormParams
// Ordering     packets: exchange.cuh. Inside a cluster: each block stores its sum of squares into
//              every block, and counts on that block's barrier.
// Determinism  fixed summation tree; bitwise equal run to run and rank to rank
// Meaning      reference/hc.cpp, reference/rank_sum.cpp. Bound: x, R' rel_l2 ≤ 4e-3.
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/mix.hpp"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kBlocksPerRow = 8;
constexpr int kGroup = 32;

constexpr bool same(ExchangeStage stage, stages::StageId id) {
  return static_cast<std::uint32_t>(stage) == static_cast<std::uint32_t>(id);
}
static_assert(same(ExchangeStage::embed_sum, stages::StageId::embed_sum));
static_assert(same(ExchangeStage::attention_sum, stages::StageId::attention_sum));
static_assert(same(ExchangeStage::moe_sum, stages::StageId::moe_sum));

// Four codes of a row to where the next kernel reads them: packets (of two lanes; NULL: nowhere),
// or codes and scales. Whole warps call.
LOWLAT_DEVICE void send_codes(int num_rows, void* packets, std::uint32_t tag, std::uint8_t* codes,
                              float* scale, int row_idx, int quad_idx, int hidden,
                              std::uint32_t four, float group_scale) {
  if (num_rows <= kHopRows) {
    const std::uint32_t next = __shfl_down_sync(plat::kAllLanes, four, 1);
    if (packets == nullptr || quad_idx % 2 != 0) return;
    send_packet(static_cast<plat::TaggedWords*>(packets) + (row_idx * (hidden / 4) + quad_idx) / 2,
                tag, four, next, plat::float_bits(group_scale));
    return;
  }
  *reinterpret_cast<std::uint32_t*>(codes + static_cast<std::int64_t>(row_idx) * hidden +
                                    4 * quad_idx) = four;
  if (quad_idx % (kGroup / 4) == 0) {
    scale[quad_idx / (kGroup / 4) * padded_rows(num_rows) + row_idx] = group_scale;
  }
}

template <int kHidden, int kRanks>
__global__ void __launch_bounds__(kHidden / kBlocksPerRow / 4)
    hc_exchange_norm_sm90(const __grid_constant__ ExchangeNormParams params) {
  constexpr int kThreads = kHidden / kBlocksPerRow / 4;
  constexpr int kWarps = kThreads / plat::kWarpLanes;
  constexpr int kQuads = kHidden / 4;
  static_assert(kThreads % plat::kWarpLanes == 0 && kGroup == 8 * 4);
  __shared__ float warp_squares[kWarps];
  __shared__ float block_squares[kBlocksPerRow];
  __shared__ std::uint64_t squares_barrier;

  sm90::launch_dependents();
  Stamps stamps(params.port.stamps, params.kernel);
  const int row_idx = static_cast<int>(blockIdx.y), block_idx = sm90::cluster_rank();
  const int quad_idx = block_idx * kThreads + plat::thread_idx();
  if (plat::thread_idx() == 0) {
    sm90::barrier_init(&squares_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&squares_barrier, sizeof block_squares);
  }
  __syncwarp();
  sm90::cluster_arrive_relaxed();  // all blocks run before one stores into another
  const uint2 gain_codes = __ldg(reinterpret_cast<const uint2*>(params.gain + 4 * quad_idx));
  __shared__ float mix[kMixStride];
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  std::uint32_t aborted = 0;
  stamps.mark(StampStage::ask);
  if (params.before.word != nullptr || !params.early) wait_at(params.before);
  // The residual was there before its statistics were.
  if (params.mix_done.word != nullptr) wait_at(params.mix_done);
  const std::int64_t row_begin = static_cast<std::int64_t>(row_idx) * 4 * kHidden;
  uint2 residual[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    residual[j] = __ldcg(reinterpret_cast<const uint2*>(params.residual_in + row_begin +
                                                        j * kHidden + 4 * quad_idx));
  }
  if (plat::thread_idx() < kMixStride) {
    mix[plat::thread_idx()] = __ldcg(params.mix + row_idx * kMixStride + plat::thread_idx());
  }
  float y[4] = {};
  const auto stage = static_cast<stages::StageId>(params.stage);
  // A kernel that starts when all has come goes on at once.
  if (__syncthreads_or(
          !try_receive_quad<kRanks>(y, params.port, epoch, row_idx, quad_idx, kQuads))) {
    wait_for_quads<kRanks>(params.port, epoch, row_idx, block_idx * kThreads, kThreads, kQuads,
                           stage);
    receive_quad<kRanks>(y, params.port, epoch, row_idx, quad_idx, kQuads, stage);
  }
  // What came may be of a kernel whose own wait was ended. The answer is used further below.
  aborted = load_relaxed(params.port.abort_words[params.port.tp_rank]);
  plat::block_sync();
  stamps.mark(StampStage::wait);

  float r[4][4];  // [stream][column]
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    r[j][0] = sm90::low_bf16(residual[j].x), r[j][1] = sm90::high_bf16(residual[j].x);
    r[j][2] = sm90::low_bf16(residual[j].y), r[j][3] = sm90::high_bf16(residual[j].y);
  }
  float v[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = quick_bf16(y[i]);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float acc = mix[8 + k] * r[0][i];
      acc = plat::fma(mix[4 + k], y[i], acc);
#pragma unroll
      for (int j = 1; j < 4; ++j) acc = plat::fma(mix[8 + 4 * j + k], r[j][i], acc);
      out[i] = quick_bf16(acc);
      v[i] = plat::fma(out[i], mix[k], v[i]);
    }
    *reinterpret_cast<uint2*>(params.residual_out + row_begin + k * kHidden + 4 * quad_idx) =
        make_uint2(sm90::to_bf16_pair(out[0], out[1]), sm90::to_bf16_pair(out[2], out[3]));
  }

  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = quick_bf16(v[i]);
    squares = plat::fma(v[i], v[i], squares);
  }
  stamps.mark(StampStage::compute);
  squares = plat::warp_sum(squares);
  if (plat::thread_idx() % plat::kWarpLanes == 0) {
    warp_squares[plat::thread_idx() / plat::kWarpLanes] = squares;
  }
  plat::block_sync();
  sm90::cluster_wait();  // of the arrival at the start
  if (plat::thread_idx() < kBlocksPerRow) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += warp_squares[i];
    sm90::send_to_peer(sm90::peer_address(&block_squares[block_idx], plat::thread_idx()), sum,
                       sm90::peer_address(&squares_barrier, plat::thread_idx()));
  }
  wait_for_cluster(&squares_barrier, 0);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlocksPerRow; ++i) total += block_squares[i];
  float scale = quick_rsqrt(total / static_cast<float>(kHidden) + params.norm_eps);
  if (aborted != 0u) {
    scale = plat::bits_float(0x7fc0'0000u);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      *reinterpret_cast<uint2*>(params.residual_out + row_begin + k * kHidden + 4 * quad_idx) =
          make_uint2(0x7fc0'7fc0u, 0x7fc0'7fc0u);
    }
  }
  stamps.mark(StampStage::sum);

  const float gain[4] = {sm90::low_bf16(gain_codes.x), sm90::high_bf16(gain_codes.x),
                         sm90::low_bf16(gain_codes.y), sm90::high_bf16(gain_codes.y)};
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = quick_bf16(v[i] * scale * gain[i]);
    amax = plat::max(plat::abs(v[i]), amax);
  }
  const std::int64_t place = static_cast<std::int64_t>(row_idx) * kHidden + 4 * quad_idx;
  if (params.x != nullptr) {
    *reinterpret_cast<uint2*>(params.x + place) =
        make_uint2(sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]));
  }
#pragma unroll
  for (int mask = 1; mask < kGroup / 4; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
  const PowerScale group = power_scale(amax);
  const std::uint32_t codes = sm90::to_e4m3_pair(v[0] * group.inverse, v[1] * group.inverse) |
                              sm90::to_e4m3_pair(v[2] * group.inverse, v[3] * group.inverse) << 16;
  send_codes(params.num_rows, params.x_packets, static_cast<std::uint32_t>(epoch), params.x_codes,
             params.x_scale, row_idx, quad_idx, kHidden, codes, group.scale);
  stamps.mark(StampStage::store);
  open_gate(params.done);
  // So that this kernel's end says that the publishing one has ended too.
  if (params.before.word == nullptr && params.early) sm90::wait_for_predecessors();
}

// Exchanges of a step, at most.
constexpr std::uint32_t kEpochMargin = 4096;

struct SendX {
  const std::uint16_t* x;
  int num_rows;
  void* packets;
  std::uint8_t* codes;
  float* scale;
  const std::uint64_t* step_epoch;
  std::int32_t index;
};

// x as its packets, see launch_send_x: a thread for four columns, as above.
template <int kHidden>
__global__ void __launch_bounds__(kHidden / kBlocksPerRow / 4)
    send_x_any(const __grid_constant__ SendX params) {
  const int row_idx = static_cast<int>(blockIdx.y);
  const int quad_idx = static_cast<int>(blockIdx.x * blockDim.x) + plat::thread_idx();
  sm90::wait_for_predecessors();
  const std::int64_t place = static_cast<std::int64_t>(row_idx) * kHidden + 4 * quad_idx;
  const uint2 words = *reinterpret_cast<const uint2*>(params.x + place);
  const float v[4] = {sm90::low_bf16(words.x), sm90::high_bf16(words.x), sm90::low_bf16(words.y),
                      sm90::high_bf16(words.y)};
  float amax = 0.0f;
  for (const float value : v) amax = plat::max(plat::abs(value), amax);
#pragma unroll
  for (int mask = 1; mask < kGroup / 4; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
  const PowerScale group = power_scale(amax);
  const std::uint32_t codes = sm90::to_e4m3_pair(v[0] * group.inverse, v[1] * group.inverse) |
                              sm90::to_e4m3_pair(v[2] * group.inverse, v[3] * group.inverse) << 16;
  send_codes(
      params.num_rows, params.packets,
      static_cast<std::uint32_t>(*params.step_epoch + static_cast<std::uint64_t>(params.index)),
      params.codes, params.scale, row_idx, quad_idx, kHidden, codes, group.scale);
}

__global__ void begin_step_any(std::uint64_t* step_epoch, std::uint64_t num_exchanges,
                               std::uint32_t* words, int num_words) {
  for (int i = plat::thread_idx(); i < num_words; i += static_cast<int>(blockDim.x)) words[i] = 0;
  if (plat::thread_idx() != 0) return;
  std::uint64_t next = *step_epoch + num_exchanges;
  // Tags are an epoch's low half: none of a step's is 0 (nor that of index -1), and mailboxes go on
  // taking turns.
  if (static_cast<std::uint32_t>(next) > ~kEpochMargin) {
    next = (((next >> 32) + 1) << 32) + 2 + (next & 1);
  }
  *step_epoch = next;
}

template <int kHidden>
cudaError_t launch_for(const ExchangeNormParams& params, bool programmatic, cudaStream_t stream) {
  const dim3 grid(kBlocksPerRow, params.num_rows);
  const auto launch = [&](auto kernel) {
    return launch_kernel(kernel, grid, kHidden / kBlocksPerRow / 4, 0, kBlocksPerRow, programmatic,
                         stream, params);
  };
  switch (params.port.tp_size) {
    case 1: return launch(hc_exchange_norm_sm90<kHidden, 1>);
    case 2: return launch(hc_exchange_norm_sm90<kHidden, 2>);
    case 4: return launch(hc_exchange_norm_sm90<kHidden, 4>);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_begin_step(std::uint64_t* step_epoch, std::uint64_t num_exchanges,
                              std::uint32_t* words, int num_words, cudaStream_t stream) {
  begin_step_any<<<1, 1024, 0, stream>>>(step_epoch, num_exchanges, words, num_words);
  return cudaGetLastError();
}

cudaError_t launch_send_x(const std::uint16_t* x, int num_rows, int hidden, void* packets,
                          std::uint8_t* codes, float* scale, const std::uint64_t* step_epoch,
                          int index, cudaStream_t stream) {
  if (num_rows < 1 || num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  const SendX params = {x, num_rows, packets, codes, scale, step_epoch, index};
  const dim3 grid(kBlocksPerRow, num_rows);
  if (hidden == 5120) {
    send_x_any<5120><<<grid, 5120 / kBlocksPerRow / 4, 0, stream>>>(params);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_exchange_norm(const ExchangeNormParams& params, int hidden, bool programmatic,
                                 cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (hidden == 5120) return launch_for<5120>(params, programmatic, stream);
  return cudaErrorInvalidValue;
}

}  // namespace lowlat::nvidia::fused
