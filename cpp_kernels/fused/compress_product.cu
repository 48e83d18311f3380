// compress_product_bf16_sm90: products of few rows with bf16 matrices, in fp32 and unrounded.
//
// Math         y[t,n] = x[t]·w[n], in two parts of K that the reader adds
// Shapes       x bf16 [T,H] · w bf16 [N,H]: wkv and wgate of a compressor (N 1024 at H 5120: ratio
//              2; 512: ratio 1; V4: 1024 at ratio 128, 2048 and the index's 512 at ratio 4)
// Rounding     none; sums fp32
// Bytes        10.5 MB at ratio 2; x from the second-level cache
// Floor        2.3 us at 4.65 TB/s
// Launch       16 weight rows and half of K a block, 256 threads; all weights are asked for before
//              x is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  fixed order: step, warp, part; bitwise run to run and rank to rank
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
  std::uint64_t barrier;
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
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 2 : 1)
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
  const int tile = static_cast<int>(blockIdx.x) / kCompressSplits;
  const int split = static_cast<int>(blockIdx.x) % kCompressSplits;
  const int first_row = params.first_row + tile * kRows;
  const std::uint16_t* from = find_rows(params, first_row, kHidden) + split * Shared::kK;
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, kRows * 2 * Shared::kK);
  }
  plat::block_sync();
  if (lane_idx == 0) {
#pragma unroll 1
    for (int row = warp_idx; row < kRows; row += kProductWarps) {
      sm90::bulk_load(shared.weights + row * Shared::kPitch, from + row * kHidden, 2 * Shared::kK,
                      &shared.barrier, sm90::CacheHint::evict_first);
    }
  }
  __syncwarp();
  stamps.mark(StampStage::ask);
  wait_at(params.x_done);
  stamps.mark(StampStage::wait);
  const int first_k = warp_idx * kSteps * kStep + 8 * t;
  const unsigned char* row = shared.weights + g * Shared::kPitch + 2 * first_k;
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
    if (n == 0) wait_for_weights(&shared.barrier, 0);
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
  plat::block_sync();
  stamps.mark(StampStage::compute);
  const int width = compress_width(params);
  float* out = params.partial + static_cast<std::int64_t>(split) * num_rows * width + first_row;
  for (int i = thread_idx; i < num_rows * kRows; i += kProductThreads) {
    const int token = i / kRows, place = i % kRows;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kProductWarps; ++warp) total += shared.sum[warp][token][place];
    out[static_cast<std::int64_t>(token) * width + place] = total;
  }
  stamps.mark(StampStage::store);
  open_gate(params.product_done);
}

template <int kHidden>
cudaError_t launch(const CompressParams& params, bool programmatic, cudaStream_t stream) {
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
  if (hidden == 5120) return launch<5120>(params, programmatic, stream);
  if (hidden == 4096) return launch<4096>(params, programmatic, stream);
  return cudaErrorInvalidValue;
}

}  // namespace lowlat::nvidia::fused
