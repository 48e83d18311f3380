// hc_mix_sm90: the statistics of the hyper-connections, for few rows.
//
// Math         m = fn·x / sqrt(mean x² + ε) of a row's 4H values x; pre, post and comb from m
//              (Sinkhorn with reciprocals good to a unit in the last place)
// Shapes       R [T,4,H] bf16 · fn [24,4H] fp32 · mix [T,32] fp32 · 1 ≤ T ≤ 48
// Rounding     fn as the sum of three bf16, which leaves 2^-25 of a value; products exact, sums in
//              fp32
// Bytes        H = 5120: read 1.97 MB of fn and T·41 kB
// Floor        0.42 us at 4.65 TB/s; it runs beside others, on a few multiprocessors
// Launch       blocks of 256 threads take every so manieth piece of 128 or 256 values, for all
//              rows; two to twelve are on their way at a time, the first before the residual is
//              waited for. Rows are the M side of the products, 24 outputs the N side, and a warp
//              has an eighth of a piece's K
// Ordering     residual: gate (exchange_gate.cuh). full[stage]: an arrival a warp with the bytes of
//              its part of fn, and one a thread when its copies of rows have come. partial: each
//              block's stores, then its ticket (acq_rel.device, after the block's barrier); who has
//              the last ticket sees all
// Determinism  fixed summation tree for a number of blocks
// Meaning      reference/hc.cpp. Bound: pre, post, comb rel_l2 ≤ 2e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/mix.hpp"
#include "fused/mix_sinkhorn.cuh"
#include "fused/stamps.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/hc.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / plat::kWarpLanes;
constexpr int kOutputs = stages::kHcOutputs;
constexpr int kSums = kOutputs + 1;  // of a row: dot products, then the sum of squares
constexpr int kColumns = 8;          // outputs of one product
constexpr int kOutputTiles = kOutputs / kColumns;
constexpr int kPerWarp = kOutputs / kWarps;  // rows of fn that a warp asks for
constexpr int kStep = 16;                    // K of a product
static_assert(kOutputs == 24 && kMixStride >= kSums);

constexpr int kMinStages = 2, kMaxStages = 12;
// That a block takes for its stages, alone on a multiprocessor and beside one of [q_a, kv].
constexpr int kMaxBytes = 208 * 1024, kBesideBytes = 60 * 1024;

// A stage holds fn and then the rows of a piece, kLength values of K. Pitches of 64 and 32 more
// than a multiple of 128 bytes: what a quarter (half) of a warp reads lies in different banks.
template <int kLength_>
struct Piece {
  static constexpr int kLength = kLength_, kSteps = kLength / kWarps / kStep;
  static constexpr int kFnPitch = kLength + 16, kRowPitch = kLength + 16;  // values
  static constexpr int kFnBytes = kOutputs * kFnPitch * 4;
  static_assert(kSteps >= 1 && kFnBytes % 128 == 0);
  static constexpr int bytes(int num_rows) {
    return (kFnBytes + num_rows * kRowPitch * 2 + 127) / 128 * 128;
  }
  static_assert(kWarps * kMaxFusedRows * kSums * 4 <= kMinStages * bytes(kMaxFusedRows),
                "the warps' sums lie over the stages");
};
// Alone on a multiprocessor, where bytes on their way are what counts, and beside others.
using Long = Piece<256>;
using Short = Piece<128>;

struct Shared {
  std::uint64_t full[kMaxStages];
  bool last;
  float logit[kMaxFusedRows][kSums];
  // Then the stages, and when they are used up the warps' sums [warp][row][kSums].
};
constexpr int kHeadBytes = (sizeof(Shared) + 127) / 128 * 128;

// One block's view of its memory.
template <class P>
struct Stages {
  unsigned char* first;
  int bytes;  // of one
  LOWLAT_DEVICE float* fn(int stage) const {
    return reinterpret_cast<float*>(first + stage * bytes);
  }
  LOWLAT_DEVICE std::uint16_t* rows(int stage) const {
    return reinterpret_cast<std::uint16_t*>(first + stage * bytes + P::kFnBytes);
  }
};

// Asks for fn of a piece. All threads call: a thread's copies take turns, so each warp has its own.
template <class P>
LOWLAT_DEVICE void ask_for_weights(Shared& shared, const Stages<P>& stages, const MixParams& params,
                                   int stage, int piece) {
  if (plat::thread_idx() % plat::kWarpLanes != 0) return;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  constexpr int kBytes = P::kLength * 4;
  sm90::barrier_arrive_expect(&shared.full[stage], kPerWarp * kBytes);
#pragma unroll 1
  for (int i = warp_idx * kPerWarp; i < (warp_idx + 1) * kPerWarp; ++i) {
    sm90::bulk_load(stages.fn(stage) + i * P::kFnPitch,
                    params.fn + std::int64_t{i} * 4 * params.hidden + piece * P::kLength, kBytes,
                    &shared.full[stage]);
  }
}
template <class P>
LOWLAT_DEVICE void ask_for_rows(Shared& shared, const Stages<P>& stages, const MixParams& params,
                                int stage, int piece) {
  constexpr int kParts = P::kLength / 8;
  for (int i = plat::thread_idx(); i < params.num_rows * kParts; i += kThreads) {
    const int row = i / kParts, part = i % kParts;
    copy_16(stages.rows(stage) + row * P::kRowPitch + part * 8,
            params.residual + static_cast<std::int64_t>(row) * 4 * params.hidden +
                piece * P::kLength + part * 8);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   sm90::shared_address(&shared.full[stage]))
               : "memory");
}

// v = sum of parts[0 .. 2], largest first, two values each.
LOWLAT_DEVICE void split(std::uint32_t (&parts)[3], float first, float second) {
#pragma unroll
  for (std::uint32_t& part : parts) {
    part = sm90::to_bf16_pair(first, second);
    first -= sm90::low_bf16(part);
    second -= sm90::high_bf16(part);
  }
}

// sum[tile][outputs' tile] of a product's fragment, squares[tile] of rows g and g + 8, += those of
// a piece.
template <class P, int kRowTiles>
LOWLAT_DEVICE void add_piece(float (&sum)[kRowTiles][kOutputTiles][4],
                             float (&squares)[kRowTiles][2], const float* fn,
                             const std::uint16_t* rows, int num_rows) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  // Sums of a piece, so that few are added by the products themselves, which round towards zero.
  float own[kRowTiles][kOutputTiles][4] = {};
#pragma unroll 1
  for (int step = 0; step < P::kSteps; ++step) {
    // A lane has four neighbours of a step on both sides, whatever their places in the product.
    const int k = (warp_idx * P::kSteps + step) * kStep + 4 * t;
    std::uint32_t b[kOutputTiles][2][3];
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
      const float4 v = *reinterpret_cast<const float4*>(fn + (n * kColumns + g) * P::kFnPitch + k);
      split(b[n][0], v.x, v.y);
      split(b[n][1], v.z, v.w);
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      // Rows after the last are the last again; their sums are not stored.
      uint2 pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(tile * 16 + half * 8 + g, num_rows - 1);
        pairs[half] = *reinterpret_cast<const uint2*>(rows + row * P::kRowPitch + k);
        const float x[4] = {sm90::low_bf16(pairs[half].x), sm90::high_bf16(pairs[half].x),
                            sm90::low_bf16(pairs[half].y), sm90::high_bf16(pairs[half].y)};
#pragma unroll
        for (const float v : x) squares[tile][half] = plat::fma(v, v, squares[tile][half]);
      }
      const std::uint32_t a[4] = {pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y};
#pragma unroll
      for (int part = 2; part >= 0; --part) {
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) {
          const std::uint32_t b_part[2] = {b[n][0][part], b[n][1][part]};
          sm90::mma_bf16(own[tile][n], a, b_part);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][n][i] += own[tile][n][i];
    }
  }
}

// The block's sums of its pieces to `partial`. All threads call; the stages are used up.
template <int kRowTiles>
LOWLAT_DEVICE void store_sums(float* warp_sums, const MixParams& params,
                              const float (&sum)[kRowTiles][kOutputTiles][4],
                              float (&squares)[kRowTiles][2]) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& own = squares[tile][half];
      own += __shfl_xor_sync(plat::kAllLanes, own, 1);
      own += __shfl_xor_sync(plat::kAllLanes, own, 2);
      const int row = tile * 16 + half * 8 + g;
      if (row >= params.num_rows) continue;
      float* to = warp_sums + (warp_idx * params.num_rows + row) * kSums;
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
        to[n * kColumns + 2 * t] = sum[tile][n][2 * half];
        to[n * kColumns + 2 * t + 1] = sum[tile][n][2 * half + 1];
      }
      if (t == 0) to[kOutputs] = own;
    }
  }
  plat::block_sync();
  float* out =
      params.partial + static_cast<std::int64_t>(blockIdx.x) * params.num_rows * kMixStride;
#pragma unroll 1
  for (int i = plat::thread_idx(); i < params.num_rows * kSums; i += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      total += warp_sums[warp * params.num_rows * kSums + i];
    }
    out[i / kSums * kMixStride + i % kSums] = total;
  }
}

// All rows' parameters from the blocks' sums. All threads of the block call.
LOWLAT_DEVICE void finish_rows(Shared& shared, const MixParams& params) {
  constexpr int kTogether = 16;  // are asked for before one is added
  const int num_blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int i = plat::thread_idx(); i < params.num_rows * kSums; i += kThreads) {
    const float* from = params.partial + i / kSums * kMixStride + i % kSums;
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0; first < num_blocks; first += kTogether) {
      float part[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        part[j] =
            first + j < num_blocks
                ? __ldcg(from + static_cast<std::int64_t>(first + j) * params.num_rows * kMixStride)
                : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) total += part[j];
    }
    shared.logit[i / kSums][i % kSums] = total;
  }
  plat::block_sync();
#pragma unroll 1
  for (int i = plat::thread_idx(); i < params.num_rows * kOutputs; i += kThreads) {
    const int row_idx = i / kOutputs, which = i % kOutputs;
    const float squares = shared.logit[row_idx][kOutputs];
    const float m = shared.logit[row_idx][which] *
                    plat::rsqrt(squares / static_cast<float>(4 * params.hidden) + params.norm_eps);
    const float logit = m * __ldg(params.scale + min(which / 4, 2)) + __ldg(params.base + which);
    shared.logit[row_idx][which] = logit;  // nobody else reads this one
    if (which < 8) {
      const float gate = stages::sigmoid(logit);
      params.mix[row_idx * kMixStride + which] = which < 4 ? gate + params.hc_eps : 2.0f * gate;
    }
  }
  plat::block_sync();
  // A thread a row: its passes depend on each other, other rows' do not.
  const int row_idx = plat::thread_idx();
  if (row_idx >= params.num_rows) return;
  float comb[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = shared.logit[row_idx][8 + i];
  sinkhorn(comb, params.hc_eps, params.sinkhorn_iters);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float4*>(params.mix + row_idx * kMixStride + 8 + 4 * i) =
        make_float4(comb[i][0], comb[i][1], comb[i][2], comb[i][3]);
  }
}

template <class P, int kRowTiles>
__global__ void __launch_bounds__(kThreads) hc_mix_sm90(const __grid_constant__ MixParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop), params.hop.id + static_cast<std::uint32_t>(HopKernel::mix));
  const int num_blocks = static_cast<int>(gridDim.x), block_idx = static_cast<int>(blockIdx.x);
  const int num_pieces = 4 * params.hidden / P::kLength;
  const int own_pieces = (num_pieces - block_idx + num_blocks - 1) / num_blocks;
  const auto piece_of = [&](int turn) { return block_idx + turn * num_blocks; };
  const int num_stages = params.stages;
  const Stages<P> stages = {memory + kHeadBytes, P::bytes(params.num_rows)};
  if (plat::thread_idx() == 0) {
    for (int i = 0; i < num_stages; ++i) sm90::barrier_init(&shared.full[i], kWarps + kThreads);
    sm90::fence_barrier_init();
  }
  plat::block_sync();
  for (int turn = 0; turn < min(num_stages - 1, own_pieces); ++turn) {
    ask_for_weights(shared, stages, params, turn, piece_of(turn));
  }
  __syncwarp();
  stamps.mark(StampStage::ask);
  wait_at(params.before);
  stamps.mark(StampStage::wait);
  for (int turn = 0; turn < min(num_stages - 1, own_pieces); ++turn) {
    ask_for_rows(shared, stages, params, turn, piece_of(turn));
  }
  float sum[kRowTiles][kOutputTiles][4] = {}, squares[kRowTiles][2] = {};
  int stage = 0;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < own_pieces; ++turn) {
    plat::block_sync();  // the memory of the piece before is free
    const int next = turn + num_stages - 1, next_stage = stage == 0 ? num_stages - 1 : stage - 1;
    if (next < own_pieces) {
      ask_for_weights(shared, stages, params, next_stage, piece_of(next));
      __syncwarp();
      ask_for_rows(shared, stages, params, next_stage, piece_of(next));
    }
    wait_for_weights(&shared.full[stage], parity);
    add_piece<P>(sum, squares, stages.fn(stage), stages.rows(stage), params.num_rows);
    if (++stage == num_stages) stage = 0, parity ^= 1u;
  }
  plat::block_sync();
  store_sums(reinterpret_cast<float*>(stages.first), params, sum, squares);
  stamps.mark(StampStage::compute);
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    std::uint32_t ticket;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(ticket)
                 : "l"(__cvta_generic_to_global(params.ticket))
                 : "memory");
    shared.last = ticket % gridDim.x == gridDim.x - 1;  // a power of two: it may wrap
  }
  plat::block_sync();
  if (!shared.last) return;
  stamps.mark(StampStage::sum);
  finish_rows(shared, params);
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_mix(const MixParams& params, int blocks, bool alone, bool programmatic,
                       cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows || params.hidden % 64 != 0 ||
      blocks < 1 || blocks > kMaxMixBlocks || (blocks & (blocks - 1)) != 0 ||
      blocks > 4 * params.hidden / Long::kLength) {
    return cudaErrorInvalidValue;
  }
  const auto launch = [&]<class P, int kRowTiles>() {
    const int piece = P::bytes(params.num_rows);
    MixParams own = params;
    own.stages = min(kMaxStages, max(kMinStages, (alone ? kMaxBytes : kBesideBytes) / piece));
    return launch_kernel(hc_mix_sm90<P, kRowTiles>, dim3(blocks), kThreads,
                         kHeadBytes + own.stages * piece, 1, programmatic, stream, own);
  };
  const auto by_rows = [&]<class P>() {
    if (params.num_rows <= 16) return launch.template operator()<P, 1>();
    if (params.num_rows <= 32) return launch.template operator()<P, 2>();
    return launch.template operator()<P, 3>();
  };
  return alone || params.num_rows <= 8 ? by_rows.template operator()<Long>()
                                       : by_rows.template operator()<Short>();
}

}  // namespace lowlat::nvidia::fused
