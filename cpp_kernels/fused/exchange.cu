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
//              before the publishing kernel has ended, see ExchangeNormParams. Up to eight rows of
//              V4.1 the experts' blocks do this at a layer's end (moe.cuh)
// Ordering     packets: exchange.cuh. Inside a cluster: each block stores its sum of squares into
//              every block, and counts on that block's barrier.
// Determinism  fixed summation tree; bitwise equal run to run and rank to rank
// Meaning      reference/hc.cpp, reference/rank_sum.cpp. Bound: x, R' rel_l2 ≤ 4e-3.
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_norm.cuh"
#include "fused/front_launch.cuh"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr bool same(ExchangeStage stage, stages::StageId id) {
  return static_cast<std::uint32_t>(stage) == static_cast<std::uint32_t>(id);
}
static_assert(same(ExchangeStage::embed_sum, stages::StageId::embed_sum));
static_assert(same(ExchangeStage::attention_sum, stages::StageId::attention_sum));
static_assert(same(ExchangeStage::moe_sum, stages::StageId::moe_sum));

// A block whose threads are a slice's, in a cluster of all slices of its row.
struct WholeBlock {
  LOWLAT_DEVICE static int thread() { return plat::thread_idx(); }
  LOWLAT_DEVICE static void sync() { plat::block_sync(); }
  LOWLAT_DEVICE static bool any(bool value) { return __syncthreads_or(value) != 0; }
};

template <int kHidden, int kRanks>
__global__ void __launch_bounds__(ExchangeSlice<kHidden, kRanks, WholeBlock>::kThreads)
    hc_exchange_norm_sm90(const __grid_constant__ ExchangeNormParams params) {
  using Slice = ExchangeSlice<kHidden, kRanks, WholeBlock>;
  __shared__ float warp_squares[Slice::kWarps];
  __shared__ float block_squares[kSlicesPerRow];
  __shared__ std::uint64_t squares_barrier;
  __shared__ float mix[kMixStride];

  sm90::launch_dependents();
  Stamps stamps(params.port.stamps, params.kernel);
  const int block_idx = sm90::cluster_rank();
  if (plat::thread_idx() == 0) {
    sm90::barrier_init(&squares_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&squares_barrier, sizeof block_squares);
  }
  __syncwarp();
  sm90::cluster_arrive_relaxed();  // all blocks run before one stores into another
  Slice slice = {params, WholeBlock(), mix, static_cast<int>(blockIdx.y), block_idx};
  slice.load_gain();
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  stamps.mark(StampStage::ask);
  if (params.before.word != nullptr || !params.early) wait_at(params.before);
  // A kernel that starts late, as behind the experts, finds packets and statistics there. The
  // residual was there before its statistics were.
  QuadPackets<kRanks> packets = {};
  slice.ask(packets, epoch, params.tile_order);
  slice.wait_for_statistics();
  slice.load_residual();
  slice.load_statistics();
  float y[4] = {};
  slice.template receive<true>(y, epoch, params.tile_order, packets);
  stamps.mark(StampStage::wait);
  float squares = slice.combine(y);
  stamps.mark(StampStage::compute);
  squares = slice.sum_of_warps(squares, warp_squares);
  sm90::cluster_wait();  // of the arrival at the start
  if (plat::thread_idx() < kSlicesPerRow) {
    sm90::send_to_peer(sm90::peer_address(&block_squares[block_idx], plat::thread_idx()), squares,
                       sm90::peer_address(&squares_barrier, plat::thread_idx()));
  }
  wait_for_cluster(&squares_barrier, 0);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlicesPerRow; ++i) total += block_squares[i];
  slice.norm(total, epoch, [&] { stamps.mark(StampStage::sum); });
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
__global__ void __launch_bounds__(kHidden / kSlicesPerRow / 4)
    send_x_any(const __grid_constant__ SendX params) {
  const int row_idx = static_cast<int>(blockIdx.y);
  const int quad_idx = static_cast<int>(blockIdx.x * blockDim.x) + plat::thread_idx();
  sm90::wait_for_predecessors();
  const std::int64_t place = static_cast<std::int64_t>(row_idx) * kHidden + 4 * quad_idx;
  const uint2 words = *reinterpret_cast<const uint2*>(params.x + place);
  const float v[4] = {sm90::low_bf16(words.x), sm90::high_bf16(words.x), sm90::low_bf16(words.y),
                      sm90::high_bf16(words.y)};
  send_codes(
      v, params.num_rows, params.packets,
      static_cast<std::uint32_t>(*params.step_epoch + static_cast<std::uint64_t>(params.index)),
      params.codes, params.scale, row_idx, quad_idx, kHidden);
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
  const dim3 grid(kSlicesPerRow, params.num_rows);
  const auto launch = [&](auto kernel) {
    return launch_kernel(kernel, grid, kHidden / kSlicesPerRow / 4, 0, kSlicesPerRow, programmatic,
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
  const dim3 grid(kSlicesPerRow, num_rows);
  if (hidden == 5120) {
    send_x_any<5120><<<grid, 5120 / kSlicesPerRow / 4, 0, stream>>>(params);
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
