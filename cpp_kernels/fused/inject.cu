// inject_codes_any, inject_product_fp8_sm90, inject_norm_any, inject_keys_fp8_sm90,
// inject_store_any: a draft's context keys from features of the target's rows.
//
// Math         y = bf( quant(f) · W ) ; x = bf( y · rsqrt(Σy²/H + ε) · gain ) ; of each stage
//              kv = bf( quant(x) · wkv ), normed and rotated unrounded, packed (stages/kv.hpp)
// Shapes       f bf16 [T,3H] · W e4m3 [H,3H] · wkv e4m3 [512,H] thrice · 1 ≤ T ≤ 48, H 5120
// Rounding     where bf( ) stands, nearest-even; quant: e4m3 in groups of 32 under powers of two
// Bytes        78.6 MB of W, 7.9 MB of wkv
// Floor        18.6 us at 4.65 TB/s
// Launch       16 weight rows and 2560 of K a block, a cluster of six (two) for the whole of K
// Ordering     kernels' ends; inside a cluster front_product.cuh
// Determinism  fixed order of all sums
// Meaning      reference/linear.cpp, reference/norm.cpp, reference/kv.cpp. Bound: rel_l2 ≤ 4e-3
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/inject.hpp"
#include "shape/dsv41_flash.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/rope.hpp"

namespace lowlat::nvidia::fused {
namespace {

using Model = shape::Dsv41Flash<1>;
constexpr int kHidden = Model::kHidden, kGroup = 32, kHeadDim = shape::kHeadDim;
constexpr int kWidth = kInjectStages * kHidden;
constexpr int kThreads = 256;
using Block = plat::Block<kThreads>;

// Rows of a block's product and its part of K; blocks of a cluster, and rows that one owns.
constexpr int kRows = 16, kPartK = 2560;
constexpr int kWideBlocks = kWidth / kPartK, kWideOwned = 4;
constexpr int kKeyBlocks = kHidden / kPartK, kKeyOwned = 8;
template <int kTiles>
using WideProduct = Product<kRows, kPartK, kTiles, kWideBlocks, kWideOwned, 1>;
template <int kTiles>
using KeyProduct = Product<kRows, kPartK, kTiles, kKeyBlocks, kKeyOwned, 1>;

// Four values of a row to their codes; eight lanes that lie together have a group.
LOWLAT_DEVICE void store_codes(const float (&v)[4], int quad, int row, int width, int padded,
                               std::uint8_t* codes, float* scale) {
  float amax = 0.0f;
  for (const float value : v) amax = plat::max(plat::abs(value), amax);
#pragma unroll
  for (int mask = 1; mask < kGroup / 4; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
  const PowerScale group = power_scale(amax);
  *reinterpret_cast<std::uint32_t*>(codes + static_cast<std::int64_t>(row) * width + 4 * quad) =
      sm90::to_e4m3_pair(v[0] * group.inverse, v[1] * group.inverse) |
      sm90::to_e4m3_pair(v[2] * group.inverse, v[3] * group.inverse) << 16;
  if (quad % (kGroup / 4) == 0) scale[quad / (kGroup / 4) * padded + row] = group.scale;
}

__global__ void __launch_bounds__(kThreads)
    inject_codes_any(const __grid_constant__ InjectParams params) {
  static_assert(kWidth / 4 % kThreads == 0);
  const int quad = static_cast<int>(blockIdx.x * kThreads) + plat::thread_idx();
  const int row = static_cast<int>(blockIdx.y);
  const uint2 words = __ldcg(reinterpret_cast<const uint2*>(params.features) +
                             static_cast<std::int64_t>(row) * (kWidth / 4) + quad);
  const float v[4] = {sm90::low_bf16(words.x), sm90::high_bf16(words.x), sm90::low_bf16(words.y),
                      sm90::high_bf16(words.y)};
  store_codes(v, quad, row, kWidth, padded_rows(params.num_rows), params.feature_codes,
              params.feature_scale);
}

// Rows first_row .. of a matrix [.., kColumns] times activations, by a cluster; the owned ones as
// bf16 to out[token * pitch].
template <class Linear, int kColumns>
LOWLAT_DEVICE void multiply(const Fp8Weights& from, int first_row, int num_rows,
                            const std::uint8_t* codes, const float* scale, std::uint16_t* out,
                            int pitch) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  const int rank = sm90::cluster_rank(), padded = padded_rows(num_rows);
  constexpr int kScaleStride = kColumns / kGroup;
  const ProductWeights weights{
      from.codes + static_cast<std::int64_t>(first_row) * kColumns + rank * kPartK,
      from.scales + first_row / kGroup * kScaleStride + rank * kPartK / kGroup, kColumns,
      kScaleStride};
  Linear::template load<kGroup>(shared, weights, 0, num_rows);
  const CodeActivations<kGroup, false> x{codes + rank * kPartK,
                                         scale + rank * kPartK / kGroup * padded, kColumns, padded};
  Stamps stamps({}, 0);
  Linear::run(shared, x, num_rows, stamps);
  if (!Linear::owns()) return;
  constexpr int kPairs = Linear::kOwned / 2;
  for (int i = plat::thread_idx(); i < num_rows * kPairs; i += kProductThreads) {
    const int token = i / kPairs, row = i % kPairs * 2;
    *reinterpret_cast<std::uint32_t*>(out + static_cast<std::int64_t>(token) * pitch +
                                      rank * Linear::kOwned + row) =
        sm90::to_bf16_pair(Linear::sum(shared, token, row), Linear::sum(shared, token, row + 1));
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads)
    inject_product_fp8_sm90(const __grid_constant__ InjectParams params) {
  const int first_row = static_cast<int>(blockIdx.x) / kWideBlocks * kRows;
  multiply<WideProduct<kTiles>, kWidth>(params.main_proj, first_row, params.num_rows,
                                        params.feature_codes, params.feature_scale,
                                        params.y + first_row, kHidden);
}

__global__ void __launch_bounds__(kThreads)
    inject_norm_any(const __grid_constant__ InjectParams params) {
  using Norm = stages::RmsNorm<Block>;
  __shared__ Norm::Scratch scratch;
  __shared__ float x[kHidden];
  __shared__ std::uint16_t normed[kHidden];
  static_assert(kHidden / 4 % kThreads == 0);
  const int row = static_cast<int>(blockIdx.x);
  const std::uint16_t* y = params.y + static_cast<std::int64_t>(row) * kHidden;
  for (int i = plat::thread_idx(); i < kHidden; i += kThreads) {
    x[i] = stages::from_bf16(__ldcg(y + i));
  }
  plat::block_sync();
  Norm::run(normed, x, params.main_norm, kHidden, params.norm_eps, scratch);
  plat::block_sync();
  for (int quad = plat::thread_idx(); quad < kHidden / 4; quad += kThreads) {
    float v[4];
    for (int j = 0; j < 4; ++j) v[j] = stages::from_bf16(normed[4 * quad + j]);
    store_codes(v, quad, row, kHidden, padded_rows(params.num_rows), params.x_codes,
                params.x_scale);
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads)
    inject_keys_fp8_sm90(const __grid_constant__ InjectParams params) {
  const int tile = static_cast<int>(blockIdx.x) / kKeyBlocks;
  constexpr int kStageTiles = kHeadDim / kRows;
  const int stage = tile / kStageTiles, first_row = tile % kStageTiles * kRows;
  multiply<KeyProduct<kTiles>, kHidden>(
      params.wkv[stage], first_row, params.num_rows, params.x_codes, params.x_scale,
      params.kv + stage * kHeadDim + first_row, kInjectStages * kHeadDim);
}

__global__ void __launch_bounds__(kThreads)
    inject_store_any(const __grid_constant__ InjectParams params) {
  using Norm = stages::RmsNorm<Block>;
  __shared__ Norm::Scratch scratch;
  __shared__ float kv[kHeadDim];
  __shared__ stages::RopeTurn turn;
  const int row = static_cast<int>(blockIdx.x), stage = static_cast<int>(blockIdx.y);
  const std::int32_t slot = params.slots[row];
  if (slot < 0 || slot >= params.num_slots) return;
  const std::uint16_t* from =
      params.kv + (static_cast<std::int64_t>(row) * kInjectStages + stage) * kHeadDim;
  for (int i = plat::thread_idx(); i < kHeadDim; i += kThreads) {
    kv[i] = stages::from_bf16(__ldcg(from + i));
  }
  stages::RopeTable table;
  for (int i = 0; i < shape::kRopeDim / 2; ++i) table.values[i] = params.rope.values[i];
  stages::rope_turn<Block>(turn, table, params.positions[row]);
  plat::block_sync();
  Norm::run(kv, kv, params.kv_norm[stage], kHeadDim, params.norm_eps, scratch);
  plat::block_sync();
  stages::Rope<Block>::rotate(kv + kHeadDim - shape::kRopeDim, turn);
  plat::block_sync();
  const KvPages& pages = params.pages[stage];
  stages::KvPack<Block>::run(
      stages::KvPaged<std::uint8_t>{pages.base, pages.slots_per_page, pages.page_bytes}.row(slot),
      kv);
}

}  // namespace

cudaError_t launch_inject(const InjectParams& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.num_rows);
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  inject_codes_any<<<dim3(kWidth / 4 / kThreads, rows), kThreads, 0, stream>>>(params);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  error = with_tiles(params.num_rows, [&]<int kTiles>() {
    return launch_kernel(inject_product_fp8_sm90<kTiles>, dim3(kHidden / kRows * kWideBlocks),
                         kProductThreads, sizeof(typename WideProduct<kTiles>::Shared), kWideBlocks,
                         false, stream, params);
  });
  if (error != cudaSuccess) return error;
  inject_norm_any<<<rows, kThreads, 0, stream>>>(params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  error = with_tiles(params.num_rows, [&]<int kTiles>() {
    return launch_kernel(inject_keys_fp8_sm90<kTiles>,
                         dim3(kInjectStages * kHeadDim / kRows * kKeyBlocks), kProductThreads,
                         sizeof(typename KeyProduct<kTiles>::Shared), kKeyBlocks, false, stream,
                         params);
  });
  if (error != cudaSuccess) return error;
  inject_store_any<<<dim3(rows, kInjectStages), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lowlat::nvidia::fused
