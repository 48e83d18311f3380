// compress_product_bf16_sm90 and compress_product_wide_bf16_sm90: products of few rows, and of more
// than eight, with bf16 matrices, in fp32 and unrounded.
//
// Math         y[t,n] = x[t]·w[n], in two parts of K that the reader adds
// Shapes       x bf16 [T,H] · w bf16 [N,H]: wkv and wgate of a compressor (N 1024 at H 5120: ratio
//              2; 512: ratio 1; V4: 1024 at ratio 128, 2048 and the index's 512 at ratio 4)
// Rounding     none; sums fp32
// Bytes        10.5 MB at ratio 2; x from the second-level cache
// Floor        2.3 us at 4.65 TB/s
// Launch       16 weight rows and half of K a block, 256 threads, or several such tiles one after
//              the other (CompressParams::turns), a warp's part of the next on its way when it has
//              used up its own; of more than eight rows 64 and an eighth, four blocks of a half a
//              cluster, so that x is read a quarter as often. The first weights are asked for
//              before x is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  fixed order: step, warp, block, part; a block's first step is of its number; bitwise
//              run to run and rank to rank
// Meaning      reference/linear.cpp. Bound: rel_l2 ≤ 1e-5
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/compress.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_weights.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kRows = 16;
constexpr int kSumPitch = kRows + 4;  // two tokens are 8 banks apart

template <int kHidden, int kTiles>
struct BfShared {
  static constexpr int kK = kHidden / kCompressSplits, kTokens = kTiles * kTileTokens;
  // 64 more than a multiple of 128 bytes: two rows' four pieces of 16 bytes lie in all banks.
  static constexpr int kPitch = 2 * kK + 64;
  static_assert(2 * kK % 128 == 0 && kK % (kStep * kProductWarps) == 0);
  alignas(128) unsigned char weights[kRows * kPitch];
  float sum[kProductWarps][kTokens][kSumPitch];
  std::uint64_t barrier[kProductWarps];  // of each warp's part of K
};

LOWLAT_DEVICE const std::uint16_t* find_rows(const CompressParams& params, int row, int hidden) {
#pragma unroll
  for (int i = 0; i < kCompressMatrices; ++i) {
    if (row < params.matrices[i].num) {
      return params.matrices[i].rows + static_cast<std::int64_t>(row) * hidden;
    }
    row -= params.matrices[i].num;
  }
  return nullptr;
}

template <int kHidden, int kTiles>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 3 : 1)
    compress_product_bf16_sm90(const __grid_constant__ CompressParams params) {
  using Shared = BfShared<kHidden, kTiles>;
  constexpr int kSteps = Shared::kK / kStep / kProductWarps;
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::product));
  const int thread_idx = plat::thread_idx(), num_rows = params.rows.num_rows;
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int split = static_cast<int>(blockIdx.x) % kCompressSplits;
  const int turns = max(params.turns, 1);
  const int tiles = static_cast<int>(gridDim.x) / kCompressSplits;  // of a turn
  const auto first_row_of = [&](int turn) {
    return params.first_row +
           (static_cast<int>(blockIdx.x) / kCompressSplits + turn * tiles) * kRows;
  };
  constexpr int kWarpK = kSteps * kStep;  // a warp's part of K, which it asks for itself
  unsigned char* const own = shared.weights + 2 * warp_idx * kWarpK;
  std::uint64_t* const barrier = &shared.barrier[warp_idx];
  const auto ask = [&](int turn) {
    if (lane_idx != 0) return;
    const std::uint16_t* from =
        find_rows(params, first_row_of(turn), kHidden) + split * Shared::kK + warp_idx * kWarpK;
    sm90::barrier_arrive_expect(barrier, kRows * 2 * kWarpK);
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      sm90::bulk_load(own + row * Shared::kPitch, from + row * kHidden, 2 * kWarpK, barrier,
                      sm90::CacheHint::evict_first);
    }
  };
  if (lane_idx == 0) {
    sm90::barrier_init(barrier, 1);
    sm90::fence_barrier_init();
  }
  ask(0);
  __syncwarp();
  stamps.mark(StampStage::ask);
  wait_at(params.x_done);
  stamps.mark(StampStage::wait);
  const int first_k = warp_idx * kWarpK + 8 * t;
  const unsigned char* row = shared.weights + g * Shared::kPitch + 2 * first_k;
  const int width = compress_width(params);
  float* const out = params.partial + static_cast<std::int64_t>(split) * num_rows * width;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll 1
    for (int n = 0; n * kTileTokens < num_rows; ++n) {
      const int token = n * kTileTokens + g;
      uint4 b[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        b[step] = token < num_rows ? __ldcg(reinterpret_cast<const uint4*>(
                                         params.x + static_cast<std::int64_t>(token) * kHidden +
                                         split * Shared::kK + first_k + step * kStep))
                                   : make_uint4(0u, 0u, 0u, 0u);
      }
      if (n == 0) wait_for_weights(barrier, turn % 2);
      float sum[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 low = *reinterpret_cast<const uint4*>(row + 2 * step * kStep);
        const uint4 high =
            *reinterpret_cast<const uint4*>(row + 8 * Shared::kPitch + 2 * step * kStep);
        const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y},
                                       {low.z, high.z, low.w, high.w}};
        const std::uint32_t b_low[2] = {b[step].x, b[step].y}, b_high[2] = {b[step].z, b[step].w};
        sm90::mma_bf16(sum, a[0], b_low);
        sm90::mma_bf16(sum, a[1], b_high);
      }
      float* to = &shared.sum[warp_idx][n * kTileTokens + 2 * t][g];
      to[0] = sum[0];
      to[kSumPitch] = sum[1];
      to[8] = sum[2];
      to[kSumPitch + 8] = sum[3];
    }
    __syncwarp();  // the warp has read its weights
    if (turn + 1 < turns) ask(turn + 1);
    plat::block_sync();
    stamps.mark(StampStage::compute);
    for (int i = thread_idx; i < num_rows * kRows; i += kProductThreads) {
      const int token = i / kRows, place = i % kRows;
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kProductWarps; ++warp) total += shared.sum[warp][token][place];
      out[static_cast<std::int64_t>(token) * width + first_row_of(turn) + place] = total;
    }
    plat::block_sync();  // the sums' memory is free
  }
  stamps.mark(StampStage::store);
  open_gate(params.product_done);
}

// Many rows.
constexpr int kWideRows = kCompressWideRows, kWideBlocks = 4;
constexpr int kWideOwned = kWideRows / kWideBlocks;

template <int kHidden, int kTiles>
struct WideShared {
  static constexpr int kK = kHidden / (kCompressSplits * kWideBlocks);
  static constexpr int kTokens = kTiles * kTileTokens;
  // Of K, that has room at once of all tokens: as much as two blocks on a multiprocessor have.
  static constexpr int kChunk = 128, kChunks = kK / kChunk, kSlots = kTiles <= 3 ? kChunks : 2;
  // 16 more than a multiple of 128 bytes: pieces of 16 bytes of eight rows lie in all banks.
  static constexpr int kPitch = 2 * kK + 16, kTokenPitch = 2 * kChunk + 16;
  static constexpr int kWideSumPitch = kWideRows + 4, kParts = 2;
  static_assert(kK % kChunk == 0 && 2 * kK % 128 == 0);
  union {
    alignas(128) unsigned char weights[kWideRows * kPitch];
    // When they are used up.
    alignas(16) float sum[kParts][kTokens][kWideSumPitch];
  };
  union {
    alignas(128) unsigned char tokens[kSlots][kTokens * kTokenPitch];
    // When all blocks of the cluster have used theirs up.
    alignas(16) float owned[kWideBlocks][kTokens][kWideOwned];
  };
  std::uint64_t barrier, owned_barrier;
};

template <int kHidden, int kTiles>
__global__ void __launch_bounds__(kProductThreads, 2)
    compress_product_wide_bf16_sm90(const __grid_constant__ CompressParams params) {
  using Shared = WideShared<kHidden, kTiles>;
  constexpr int kK = Shared::kK, kTokens = Shared::kTokens, kPitch = Shared::kPitch;
  constexpr int kChunk = Shared::kChunk, kChunks = Shared::kChunks, kSlots = Shared::kSlots;
  constexpr int kTokenPitch = Shared::kTokenPitch, kWideSumPitch = Shared::kWideSumPitch;
  static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024);
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::product));
  const int thread_idx = plat::thread_idx(), num_rows = params.rows.num_rows;
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int rank = sm90::cluster_rank(), cluster = static_cast<int>(blockIdx.x) / kWideBlocks;
  const int tile = cluster / kCompressSplits, split = cluster % kCompressSplits;
  const int first_row = params.first_row + tile * kWideRows;
  // The last tile may have fewer; what is not there becomes sums that nobody stores.
  const int own_rows = min(compress_rows(params) - tile * kWideRows, kWideRows);
  const int first_k = (split * kWideBlocks + rank) * kK;
  const std::uint16_t* from = find_rows(params, first_row, kHidden) + first_k;
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::barrier_init(&shared.owned_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, own_rows * 2 * kK);
    sm90::barrier_arrive_expect(&shared.owned_barrier, kWideBlocks * kWideOwned * num_rows * 4);
  }
  plat::block_sync();
  // The first warp's first thread looks at the gate meanwhile: late blocks find it open.
  if (lane_idx == 0 && warp_idx > 0) {
#pragma unroll 1
    for (int row = warp_idx - 1; row < own_rows; row += kProductWarps - 1) {
      sm90::bulk_load(shared.weights + row * kPitch,
                      from + static_cast<std::int64_t>(row) * kHidden, 2 * kK, &shared.barrier,
                      sm90::CacheHint::evict_first);
    }
  }
  __syncwarp();
  stamps.mark(StampStage::ask);
  wait_at(params.x_done);
  stamps.mark(StampStage::wait);
  // Blocks that want the same tokens begin at different chunks of them.
  const auto chunk_of = [&](int number) { return (tile + number) % kChunks; };
  const auto load_chunk = [&](int number) {
    constexpr int kPieces = 2 * kChunk / 16;
    unsigned char* const slot = shared.tokens[number % kSlots];
    const std::uint16_t* const x = params.x + first_k + chunk_of(number) * kChunk;
#pragma unroll 1
    for (int i = thread_idx; i < num_rows * kPieces; i += kProductThreads) {
      const int token = i / kPieces, piece = i % kPieces;
      copy_16(slot + token * kTokenPitch + piece * 16,
              x + static_cast<std::int64_t>(token) * kHidden + piece * 8);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int number = 0; number < kSlots; ++number) load_chunk(number);
  // A warp has 16 of the rows, and half of each chunk's K in steps of 32.
  constexpr int kRowTiles = kWideRows / 16, kStepsOfWarp = kChunk / kStep / Shared::kParts;
  static_assert(kRowTiles * Shared::kParts == kProductWarps);
  const int row_tile = warp_idx % kRowTiles, part = warp_idx / kRowTiles;
  const unsigned char* const rows = shared.weights + (row_tile * 16 + lane_idx % 16) * kPitch +
                                    part * kStepsOfWarp * 2 * kStep + lane_idx / 16 * 16;
  const int columns =
      lane_idx % 8 * kTokenPitch + part * kStepsOfWarp * 2 * kStep + lane_idx / 8 * 16;
  float sum[kTiles][4] = {};
  wait_for_weights(&shared.barrier, 0);
#pragma unroll 1
  for (int number = 0; number < kChunks; ++number) {
    wait_for_copies_but<kSlots - 1>();
    plat::block_sync();
    if (number == 0) stamps.mark(StampStage::read);
    const unsigned char* const row = rows + chunk_of(number) * 2 * kChunk;
    const unsigned char* const column = shared.tokens[number % kSlots] + columns;
#pragma unroll
    for (int step = 0; step < kStepsOfWarp; ++step) {
      std::uint32_t a[2][4];
      sm90::load_matrices(a[0], row + step * 2 * kStep);
      sm90::load_matrices(a[1], row + step * 2 * kStep + 32);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        std::uint32_t b[4];
        sm90::load_matrices(b, column + n * kTileTokens * kTokenPitch + step * 2 * kStep);
        const std::uint32_t b_low[2] = {b[0], b[1]}, b_high[2] = {b[2], b[3]};
        sm90::mma_bf16(sum[n], a[0], b_low);
        sm90::mma_bf16(sum[n], a[1], b_high);
      }
    }
    if constexpr (kSlots < kChunks) {
      if (number + kSlots < kChunks) {
        plat::block_sync();  // the slot's tokens are used up
        load_chunk(number + kSlots);
        continue;
      }
    }
    commit_copies();  // of none, so that each turn has a group
  }
  plat::block_sync();  // weights and tokens are used up
  sm90::cluster_arrive_relaxed();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* to = &shared.sum[part][n * kTileTokens + 2 * t][row_tile * 16 + g];
    to[0] = sum[n][0];
    to[kWideSumPitch] = sum[n][1];
    to[8] = sum[n][2];
    to[kWideSumPitch + 8] = sum[n][3];
  }
  plat::block_sync();
  stamps.mark(StampStage::compute);
  sm90::cluster_wait();
  send_sums<kWideRows, kTokens, kWideBlocks, kWideOwned, Shared::kParts, kWideSumPitch>(
      shared.sum[0][0], shared.owned, &shared.owned_barrier, num_rows, 0);
  wait_for_sums<kWideRows, kWideBlocks, kWideOwned>(&shared.owned_barrier);
  stamps.mark(StampStage::sum);
  const int width = compress_width(params);
  float* out = params.partial + static_cast<std::int64_t>(split) * num_rows * width + first_row +
               rank * kWideOwned;
  constexpr int kQuads = kWideOwned / 4;
  const int stored = rank * kWideOwned < own_rows ? num_rows : 0;
  for (int i = thread_idx; i < stored * kQuads; i += kProductThreads) {
    const int token = i / kQuads, place = i % kQuads * 4;
    float4 total = *reinterpret_cast<const float4*>(&shared.owned[0][token][place]);
#pragma unroll
    for (int block = 1; block < kWideBlocks; ++block) {
      const float4 more = *reinterpret_cast<const float4*>(&shared.owned[block][token][place]);
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    *reinterpret_cast<float4*>(out + static_cast<std::int64_t>(token) * width + place) = total;
  }
  stamps.mark(StampStage::store);
  open_gate(params.product_done);
}

template <int kHidden>
cudaError_t launch(const CompressParams& params, bool programmatic, cudaStream_t stream) {
  if (compress_is_wide(params)) {
    return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
      if constexpr (kTiles > 1) {
        return launch_kernel(compress_product_wide_bf16_sm90<kHidden, kTiles>,
                             dim3(compress_product_blocks(params)), kProductThreads,
                             sizeof(WideShared<kHidden, kTiles>), kWideBlocks, programmatic, stream,
                             params);
      } else {
        return cudaErrorInvalidValue;
      }
    });
  }
  return with_tiles(params.rows.num_rows, [&]<int kTiles>() {
    return launch_kernel(compress_product_bf16_sm90<kHidden, kTiles>,
                         dim3(compress_product_blocks(params)), kProductThreads,
                         sizeof(BfShared<kHidden, kTiles>), 1, programmatic, stream, params);
  });
}

}  // namespace

cudaError_t launch_compress_product(const CompressParams& params, int hidden, bool programmatic,
                                    cudaStream_t stream) {
  for (const Bf16Rows& matrix : params.matrices) {
    if (matrix.num < 0 || matrix.num % kRows != 0) return cudaErrorInvalidValue;
  }
  const int width = compress_width(params);
  if (width == 0 || params.first_row % kRows != 0 || params.some_rows % kRows != 0 ||
      params.first_row < 0 || params.some_rows < 0 ||
      params.first_row + (params.some_rows > 0 ? params.some_rows : width) > width) {
    return cudaErrorInvalidValue;
  }
  if (params.turns > 1 &&
      (params.rows.num_rows > kHopRows || compress_rows(params) / kRows % params.turns != 0)) {
    return cudaErrorInvalidValue;
  }
  if (hidden == 5120) return launch<5120>(params, programmatic, stream);
  if (hidden == 4096) return launch<4096>(params, programmatic, stream);
  return cudaErrorInvalidValue;
}

}  // namespace lowlat::nvidia::fused
