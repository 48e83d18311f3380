// hc_mix_sm90: the statistics of the hyper-connections, for few rows.
//
// Math         m = fn·x / sqrt(mean x² + ε) of a row's 4H values x; pre, post and comb from m
//              (Sinkhorn with reciprocals good to a unit in the last place)
// Shapes       R [T,4,H] bf16 · fn [24,4H] fp32 · mix [T,32] fp32 · 1 ≤ T ≤ 48
// Rounding     none but fp32 sums
// Bytes        H = 5120: read 1.97 MB of fn (once for eight rows) and T·41 kB
// Floor        0.42 us at 4.65 TB/s; it runs beside others, on a few multiprocessors
// Launch       blocks of 256 threads take every so manieth piece of 256 values; two or seven pieces
//              are on their way at a time, the first before the residual is waited for
// Ordering     residual: gate (exchange_gate.cuh). partial: each block's stores, then its ticket
//              (acq_rel.device, after the block's barrier); who has the last ticket sees all
// Determinism  fixed summation tree for a number of blocks
// Meaning      reference/hc.cpp. Bound: pre, post, comb rel_l2 ≤ 2e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
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
constexpr int kLength = 256;  // of a piece
constexpr int kBatch = 8;     // rows together, so that a warp's 32 sums are one exchange of lanes
constexpr int kPerWarp = kOutputs / kWarps;
static_assert(kOutputs == 24 && kMixStride > kOutputs);
static_assert(kBatch * (kPerWarp + 1) == plat::kWarpLanes);

constexpr int kMaxStages = 7;

struct Shared {
  struct alignas(128) Piece {
    float fn[kOutputs][kLength];
    std::uint16_t row[kBatch][kLength];
  };
  std::uint64_t barrier[kMaxStages];  // of fn
  float logit[kWarps][kOutputs];
  bool last;
  alignas(128) Piece piece[1];  // as many as were launched with
};

// v[i] summed over the lanes, in v[0] of lane i: each exchange halves the values that a lane holds.
template <int kHalf = plat::kWarpLanes / 2>
LOWLAT_DEVICE void sum_over_lanes(float (&v)[plat::kWarpLanes], int lane_idx) {
  const bool upper = (lane_idx & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf];
    const float keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(plat::kAllLanes, send, kHalf);
  }
  if constexpr (kHalf > 1) sum_over_lanes<kHalf / 2>(v, lane_idx);
}

// Asks for fn of a piece; the barrier's phase takes all of it. All threads call: a thread's copies
// take turns, so each warp has its own.
LOWLAT_DEVICE void ask_for_weights(Shared& shared, const MixParams& params, int stage, int piece) {
  if (plat::thread_idx() % plat::kWarpLanes != 0) return;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  sm90::barrier_arrive_expect(&shared.barrier[stage], kPerWarp * sizeof shared.piece[stage].fn[0]);
#pragma unroll 1
  for (int i = warp_idx * kPerWarp; i < (warp_idx + 1) * kPerWarp; ++i) {
    sm90::bulk_load(shared.piece[stage].fn[i],
                    params.fn + std::int64_t{i} * 4 * params.hidden + piece * kLength,
                    sizeof shared.piece[stage].fn[i], &shared.barrier[stage]);
  }
}
LOWLAT_DEVICE void ask_for_rows(Shared& shared, const MixParams& params, int stage, int piece,
                                int first_row) {
  constexpr int kParts = kLength / 8;
  for (int i = plat::thread_idx(); i < kBatch * kParts; i += kThreads) {
    // Rows after the last are the last again; their sums are not stored.
    const int row = i / kParts, part = i % kParts;
    copy_16(&shared.piece[stage].row[row][part * 8],
            params.residual +
                static_cast<std::int64_t>(min(first_row + row, params.num_rows - 1)) * 4 *
                    params.hidden +
                piece * kLength + part * 8);
  }
}

// Copies of ask_for_rows belong to the group that this ends; groups come in order.
LOWLAT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most stages - 2 groups are on their way.
LOWLAT_DEVICE void wait_for_copies_of_turn(int stages) {
  if (stages == 2) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMaxStages - 2) : "memory");
  }
}

// sum: [row][dot product or squares] += this piece's.
LOWLAT_DEVICE void add_piece(float (&sum)[plat::kWarpLanes], const Shared::Piece& piece,
                             int warp_idx, int lane_idx) {
#pragma unroll 1
  for (int j = 0; j < kLength / (4 * plat::kWarpLanes); ++j) {
    const int k = 4 * (lane_idx + j * plat::kWarpLanes);
    float4 fn[kPerWarp];
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      fn[i] = *reinterpret_cast<const float4*>(&piece.fn[warp_idx * kPerWarp + i][k]);
    }
#pragma unroll
    for (int row = 0; row < kBatch; ++row) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(&piece.row[row][k]);
      const float x[4] = {sm90::low_bf16(pairs.x), sm90::high_bf16(pairs.x),
                          sm90::low_bf16(pairs.y), sm90::high_bf16(pairs.y)};
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i) {
        float& to = sum[row * (kPerWarp + 1) + i];
        to = plat::fma(fn[i].x, x[0], to);
        to = plat::fma(fn[i].y, x[1], to);
        to = plat::fma(fn[i].z, x[2], to);
        to = plat::fma(fn[i].w, x[3], to);
      }
      float& squares = sum[row * (kPerWarp + 1) + kPerWarp];
#pragma unroll
      for (const float v : x) squares = plat::fma(v, v, squares);
    }
  }
}

// A warp makes a row's parameters from the blocks' sums.
LOWLAT_DEVICE void finish_row(Shared& shared, const MixParams& params, int row_idx, int warp_idx,
                              int lane_idx) {
  const int group = lane_idx < 4 ? 0 : lane_idx < 8 ? 1 : 2;
  const float scale = __ldg(params.scale + group);
  const float base = __ldg(params.base + min(lane_idx, kOutputs - 1));
  constexpr int kTogether = 16;  // are asked for before one is added
  const int num_blocks = static_cast<int>(gridDim.x);
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < num_blocks; first += kTogether) {
    float part[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::int64_t place =
          (static_cast<std::int64_t>(first + i) * params.num_rows + row_idx) * kMixStride;
      part[i] = first + i < num_blocks && lane_idx <= kOutputs
                    ? __ldcg(params.partial + place + lane_idx)
                    : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) total += part[i];
  }
  const float squares = __shfl_sync(plat::kAllLanes, total, kOutputs);
  const float m =
      total * plat::rsqrt(squares / static_cast<float>(4 * params.hidden) + params.norm_eps);
  float* out = params.mix + row_idx * kMixStride;
  if (lane_idx < kOutputs) {
    const float logit = m * scale + base;
    shared.logit[warp_idx][lane_idx] = logit;
    if (lane_idx < 8) {
      const float gate = stages::sigmoid(logit);
      out[lane_idx] = lane_idx < 4 ? gate + params.hc_eps : 2.0f * gate;
    }
  }
  __syncwarp();
  if (lane_idx == 0) {
    float comb[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = shared.logit[warp_idx][8 + i];
    sinkhorn(comb, params.hc_eps, params.sinkhorn_iters);
#pragma unroll
    for (int i = 0; i < 16; ++i) out[8 + i] = comb[i / 4][i % 4];
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kThreads) hc_mix_sm90(const __grid_constant__ MixParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(params.hop.port != nullptr ? params.hop.port->stamps : StampSink{},
                params.hop.id + static_cast<std::uint32_t>(HopKernel::mix));
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const int num_blocks = static_cast<int>(gridDim.x), block_idx = static_cast<int>(blockIdx.x);
  const int num_pieces = 4 * params.hidden / kLength;
  const int own_pieces = (num_pieces - block_idx + num_blocks - 1) / num_blocks;
  const int num_batches = (params.num_rows + kBatch - 1) / kBatch;
  const int turns = own_pieces * num_batches;
  const auto piece_of = [&](int turn) { return block_idx + turn % own_pieces * num_blocks; };
  const int stages = params.stages;
  if (plat::thread_idx() == 0) {
    for (int i = 0; i < stages; ++i) sm90::barrier_init(&shared.barrier[i], kWarps);
    sm90::fence_barrier_init();
  }
  plat::block_sync();
  for (int turn = 0; turn < min(stages - 1, turns); ++turn) {
    ask_for_weights(shared, params, turn, piece_of(turn));
  }
  __syncwarp();
  stamps.mark(StampStage::ask);
  wait_at(params.before);
  stamps.mark(StampStage::wait);
  for (int turn = 0; turn < stages - 1; ++turn) {
    if (turn < turns) {
      ask_for_rows(shared, params, turn, piece_of(turn), turn / own_pieces * kBatch);
    }
    commit_copies();
  }
  float sum[plat::kWarpLanes] = {};
  int stage = 0;
  std::uint32_t parity = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const int batch = turn / own_pieces;
    // A group of copies a turn: all but the latest stages - 2 have come.
    wait_for_copies_of_turn(stages);
    plat::block_sync();  // this piece's rows are there, and the memory of the one before is free
    const int next = turn + stages - 1, next_stage = stage == 0 ? stages - 1 : stage - 1;
    if (next < turns) {
      ask_for_weights(shared, params, next_stage, piece_of(next));
      __syncwarp();
      ask_for_rows(shared, params, next_stage, piece_of(next), next / own_pieces * kBatch);
    }
    commit_copies();
    wait_for_weights(&shared.barrier[stage], parity);
    add_piece(sum, shared.piece[stage], warp_idx, lane_idx);
    if (++stage == stages) stage = 0, parity ^= 1u;
    if ((turn + 1) % own_pieces != 0) continue;
    sum_over_lanes(sum, lane_idx);
    const int row_idx = batch * kBatch + lane_idx / (kPerWarp + 1);
    const int which = lane_idx % (kPerWarp + 1);
    if (row_idx < params.num_rows) {
      float* out = params.partial +
                   (static_cast<std::int64_t>(block_idx) * params.num_rows + row_idx) * kMixStride;
      if (which < kPerWarp) {
        out[warp_idx * kPerWarp + which] = sum[0];
      } else if (warp_idx == 0) {
        out[kOutputs] = sum[0];
      }
    }
#pragma unroll
    for (float& v : sum) v = 0.0f;
  }
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
#pragma unroll 1
  for (int row_idx = warp_idx; row_idx < params.num_rows; row_idx += kWarps) {
    finish_row(shared, params, row_idx, warp_idx, lane_idx);
  }
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_mix(const MixParams& params, int blocks, bool alone, bool programmatic,
                       cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows || params.hidden % 128 != 0 ||
      blocks < 1 || blocks > kMaxMixBlocks || (blocks & (blocks - 1)) != 0 ||
      blocks > 4 * params.hidden / kLength) {
    return cudaErrorInvalidValue;
  }
  MixParams own = params;
  own.stages = alone ? kMaxStages : 2;
  const int bytes = static_cast<int>(sizeof(Shared) + (own.stages - 1) * sizeof(Shared::Piece));
  return launch_kernel(hc_mix_sm90, dim3(blocks), kThreads, bytes, 1, programmatic, stream, own);
}

}  // namespace lowlat::nvidia::fused
