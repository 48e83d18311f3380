// engram_product_fp8_sm90: keys and value of the n-gram memory, [5H, 6144] of e4m3 streamed once.
//
// Math         y[t,n] = Σ_g s[t,g]·w_scale[n,g] · (codes[t]·wkv[n])_g, in three parts of K that the
//              reader adds
// Shapes       codes e4m3 [T,6144] with a scale a 32 · wkv e4m3 [25600,6144] in blocks of 32 · sums
//              fp32 [3,T,25600]
// Rounding     none; sums fp32
// Bytes        157.4 MB
// Floor        33.8 us at 4.65 TB/s
// Launch       132 blocks: a third of K and a 44th of the rows each, so that a block's activations
//              stay with it. Eight warps multiply, four fill a ring of slots of 16 rows and 2 KB of
//              K
// Ordering     full[s]   four arrivals (of the filling warps, with their bytes) and the bytes;
//              empty[s]  one arrival a multiplying warp, after its last read. Parity as in
//              stream.cuh. The sums of a tile meet in shared memory at the multiplying warps' own
//              barrier, in two buffers (one, and a second barrier, for 48 rows)
// Determinism  fixed order: step, slot, warp; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp. Bound: rel_l2 ≤ 1e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/engram.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_weights.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kOutputs = 5 * 5120, kParts = 3, kPartK = kEngramWidth / kParts;
constexpr int kRows = 16, kSlotK = 2048, kSlotsOfTile = kPartK / kSlotK;
constexpr int kTilesInAll = kOutputs / kRows;
constexpr int kShares = static_cast<int>(kEngramProductBlocks) / kParts;
constexpr int kMultipliers = 8, kFillers = 4;  // warps
constexpr int kMultiplying = kMultipliers * plat::kWarpLanes;
constexpr int kThreads = (kMultipliers + kFillers) * plat::kWarpLanes;
constexpr int kRowsOfFiller = kRows / kFillers;
constexpr int kSteps = kSlotK / kMultipliers / kStep;  // of a warp and slot
constexpr int kGroups = kPartK / kStep;                // scales of a row's part
constexpr int kPitch = kSlotK + 32;                    // as front_product.cuh
constexpr int kScaleBytes = kSlotK / kStep;
constexpr int kSlotBytes = kRows * kPitch + kScaleBytes;
constexpr int kMaxSlots = 6;
constexpr int kSumPitch = kRows + 4;
static_assert(kSlotBytes % 16 == 0 && kSteps % 4 == 0 && kShares * kParts == 132);

template <int kTiles>
struct ProductShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kBuffers = kTiles < 6 ? 2 : 1;
  static constexpr int kTokenPitch = kPartK + 32;
  static constexpr bool kInRegisters = kTiles == 1;
  float sum[kBuffers][kMultipliers][kTokens][kSumPitch];
  alignas(16) unsigned char codes[kInRegisters ? 16 : kTokens * kTokenPitch];
  float scale[kInRegisters ? 1 : kGroups][kTokens];
  std::uint64_t full[kMaxSlots], empty[kMaxSlots];
  // The ring lies behind it.
  static constexpr int kBytes = 227 * 1024;
};
template <int kTiles>
constexpr int ring_offset() {
  return (static_cast<int>(sizeof(ProductShared<kTiles>)) + 127) / 128 * 128;
}

LOWLAT_DEVICE void meet_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory");
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    engram_product_fp8_sm90(const __grid_constant__ EngramParams params) {
  using Shared = ProductShared<kTiles>;
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  unsigned char* ring = memory + ring_offset<kTiles>();
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx(), num_rows = params.rows.num_rows;
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int part = static_cast<int>(blockIdx.x) % kParts;
  const int share = static_cast<int>(blockIdx.x) / kParts;
  const int first_tile = share * kTilesInAll / kShares;
  const int end_tile = (share + 1) * kTilesInAll / kShares;
  const int num_uses = (end_tile - first_tile) * kSlotsOfTile, num_slots = params.slots;
  if (thread_idx == 0) {
    for (int i = 0; i < num_slots; ++i) {
      sm90::barrier_init(&shared.full[i], kFillers);
      sm90::barrier_init(&shared.empty[i], kMultipliers);
    }
    sm90::fence_barrier_init();
  }
  plat::block_sync();
  if (warp_idx >= kMultipliers) {
    if (lane_idx == 0) {
      const int filler = warp_idx - kMultipliers, first_row = filler * kRowsOfFiller;
      constexpr int kScaleStride = kEngramWidth / kStep;
      const std::uint8_t* from =
          params.wkv.codes +
          static_cast<std::int64_t>(first_tile * kRows + first_row) * kEngramWidth + part * kPartK;
      int slot = 0;
      std::uint32_t parity = 1u;
#pragma unroll 1
      for (int use = 0; use < num_uses; ++use) {
        if (use >= num_slots) wait_for_weights(&shared.empty[slot], parity);
        unsigned char* to = ring + slot * kSlotBytes;
        const std::uint32_t bytes =
            kRowsOfFiller * kSlotK + (filler == 0 ? static_cast<std::uint32_t>(kScaleBytes) : 0u);
        sm90::barrier_arrive_expect(&shared.full[slot], bytes);
        const int k = use % kSlotsOfTile * kSlotK;
#pragma unroll
        for (int row = 0; row < kRowsOfFiller; ++row) {
          sm90::bulk_load(to + (first_row + row) * kPitch, from + row * kEngramWidth + k, kSlotK,
                          &shared.full[slot], sm90::CacheHint::evict_first);
        }
        if (filler == 0) {
          const int tile = first_tile + use / kSlotsOfTile;
          sm90::bulk_load(
              to + kRows * kPitch,
              params.wkv.scales + tile * kRows / kStep * kScaleStride + (part * kPartK + k) / kStep,
              kScaleBytes, &shared.full[slot]);
        }
        if (use % kSlotsOfTile == kSlotsOfTile - 1) {
          from += static_cast<std::int64_t>(kRows) * kEngramWidth;
        }
        if (++slot == num_slots) slot = 0, parity ^= 1u;
      }
    }
    __syncwarp();
    // The gate's barrier is the block's: fillers come too.
    open_gate(params.product_done);
    return;
  }

  if (params.lookup_done.word == nullptr) {
    sm90::wait_for_predecessors();
  } else {
    if (thread_idx == 0) poll_gate(params.lookup_done);
    meet_multipliers();
  }
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int padded = padded_rows(num_rows);
  const CodeActivations<kStep, false> global{
      params.codes + part * kPartK, params.scale + part * kGroups * padded, kEngramWidth, padded};
  // What a warp multiplies by: of each slot of a tile, 128 of K.
  std::uint32_t b_own[Shared::kInRegisters ? kSlotsOfTile * kSteps : 1][4];
  float2 scale_own[Shared::kInRegisters ? kSlotsOfTile * kSteps : 1];
  if constexpr (Shared::kInRegisters) {
#pragma unroll
    for (int i = 0; i < kSlotsOfTile * kSteps; ++i) {
      const int k = i / kSteps * kSlotK + (warp_idx * kSteps + i % kSteps) * kStep;
      const uint2 raw = g < num_rows ? global.fetch(g, k + 8 * t) : global.none();
      global.expand(b_own[i], raw);
      scale_own[i] = scales_of(global, 2 * t, k);
    }
  } else {
    constexpr int kPieces = kPartK / 16;
    for (int i = thread_idx; i < num_rows * kPieces; i += kMultiplying) {
      copy_16(shared.codes + i / kPieces * Shared::kTokenPitch + i % kPieces * 16,
              params.codes + static_cast<std::int64_t>(i / kPieces) * kEngramWidth + part * kPartK +
                  i % kPieces * 16);
    }
    for (int i = thread_idx; i < kGroups * padded; i += kMultiplying) {
      shared.scale[i / padded][i % padded] =
          __ldcg(params.scale + static_cast<std::int64_t>(part * kGroups) * padded + i);
    }
    wait_for_copies();
    meet_multipliers();
  }
  const CodeActivations<kStep, true> staged{shared.codes, &shared.scale[0][0], Shared::kTokenPitch,
                                            Shared::kTokens};

  float* out = params.sums + static_cast<std::int64_t>(part) * num_rows * kOutputs;
  int slot = 0, buffer = 0;
  std::uint32_t parity = 0u;
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) {
    float sum[kTiles][4] = {};
#pragma unroll
    for (int piece = 0; piece < kSlotsOfTile; ++piece) {
      wait_for_weights(&shared.full[slot], parity);
      const unsigned char* weights = ring + slot * kSlotBytes;
      std::uint32_t scales[kSteps / 4];
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        scales[i] = *reinterpret_cast<const std::uint32_t*>(weights + kRows * kPitch +
                                                            warp_idx * kSteps + 4 * i);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k = (warp_idx * kSteps + step) * kStep;
        const unsigned char* row = weights + g * kPitch + k + 8 * t;
        const uint2 low = *reinterpret_cast<const uint2*>(row);
        const uint2 high = *reinterpret_cast<const uint2*>(row + 8 * kPitch);
        // ue8m0 byte 0 counts as 0 and not as 2^-127: no sum sees the difference.
        const float weight_scale =
            plat::bits_float((scales[step / 4] >> 8 * (step % 4) & 0xffu) << 23);
        std::uint32_t a[2][4], pair[2];
        sm90::e4m3_to_f16(pair, low.x);
        a[0][0] = pair[0], a[0][2] = pair[1];
        sm90::e4m3_to_f16(pair, high.x);
        a[0][1] = pair[0], a[0][3] = pair[1];
        sm90::e4m3_to_f16(pair, low.y);
        a[1][0] = pair[0], a[1][2] = pair[1];
        sm90::e4m3_to_f16(pair, high.y);
        a[1][1] = pair[0], a[1][3] = pair[1];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          std::uint32_t b[4];
          float2 scale;
          if constexpr (Shared::kInRegisters) {
            const int i = piece * kSteps + step;
            b[0] = b_own[i][0], b[1] = b_own[i][1], b[2] = b_own[i][2], b[3] = b_own[i][3];
            scale = scale_own[i];
          } else {
            const int token = n * kTileTokens + g, at = piece * kSlotK + k;
            staged.expand(b, token < num_rows ? staged.fetch(token, at + 8 * t) : staged.none());
            scale = scales_of(staged, n * kTileTokens + 2 * t, at);
          }
          float part_sum[4] = {};
          sm90::mma_f16(part_sum, a[0], b[0], b[1]);
          sm90::mma_f16(part_sum, a[1], b[2], b[3]);
          const float even = weight_scale * scale.x, odd = weight_scale * scale.y;
          sum[n][0] = plat::fma(part_sum[0], even, sum[n][0]);
          sum[n][1] = plat::fma(part_sum[1], odd, sum[n][1]);
          sum[n][2] = plat::fma(part_sum[2], even, sum[n][2]);
          sum[n][3] = plat::fma(part_sum[3], odd, sum[n][3]);
        }
      }
      __syncwarp();
      if (lane_idx == 0) sm90::barrier_arrive(&shared.empty[slot]);
      if (++slot == num_slots) slot = 0, parity ^= 1u;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = &shared.sum[buffer][warp_idx][n * kTileTokens + 2 * t][g];
      to[0] = sum[n][0];
      to[kSumPitch] = sum[n][1];
      to[8] = sum[n][2];
      to[kSumPitch + 8] = sum[n][3];
    }
    meet_multipliers();
    for (int i = thread_idx; i < num_rows * kRows; i += kMultiplying) {
      const int token = i / kRows, row = i % kRows;
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kMultipliers; ++warp) {
        total += shared.sum[buffer][warp][token][row];
      }
      out[static_cast<std::int64_t>(token) * kOutputs + tile * kRows + row] = total;
    }
    if constexpr (Shared::kBuffers == 2) {
      buffer ^= 1;
    } else {
      meet_multipliers();
    }
  }
  open_gate(params.product_done);
}

template <int kTiles>
cudaError_t launch(const EngramParams& given, bool programmatic, cudaStream_t stream,
                   cudaEvent_t started) {
  EngramParams params = given;
  constexpr int kFit = (ProductShared<kTiles>::kBytes - ring_offset<kTiles>()) / kSlotBytes;
  static_assert(kFit >= 2);
  constexpr int kMost = kFit < kMaxSlots ? kFit : kMaxSlots;
  if (params.slots == 0) params.slots = kMost < 4 ? kMost : 4;
  if (params.slots < 2 || params.slots > kMaxSlots) return cudaErrorInvalidValue;
  if (params.slots > kMost) params.slots = kMost;
  return launch_kernel(engram_product_fp8_sm90<kTiles>, dim3(kEngramProductBlocks), kThreads,
                       ring_offset<kTiles>() + params.slots * kSlotBytes, 1, programmatic, stream,
                       params, started);
}

}  // namespace

cudaError_t launch_engram_product(const EngramParams& params, bool programmatic,
                                  cudaStream_t stream, cudaEvent_t started) {
  return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
    return launch<kTiles>(params, programmatic, stream, started);
  });
}

}  // namespace lowlat::nvidia::fused
