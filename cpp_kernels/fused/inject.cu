// inject_codes_any, inject_product_fp8_sm90, inject_norm_any, inject_keys_fp8_sm90,
// inject_store_any: a draft's context keys from features of the target's rows.
//
// Math         y = bf( quant(f) · W ) ; x = bf( y · rsqrt(Σy²/H + ε) · gain ) ; of each stage
//              kv = bf( quant(x) · wkv ), normed and rotated unrounded, packed (stages/kv.hpp)
// Shapes       f bf16 [T,3H] · W e4m3 [H,3H] · wkv e4m3 [512,H] thrice · 1 ≤ T ≤ 48, H 5120 (V4:
//              4096)
// Rounding     where bf( ) stands, nearest-even; quant: e4m3 in groups of 32 (V4: 128) under powers
//              of two
// Bytes        78.6 MB of W (V4: 50.3), 7.9 MB (6.3) of wkv
// Floor        18.6 us (V4: 12.2) at 4.65 TB/s
// Launch       16 weight rows and half of H of K a block, a cluster of six (two) for all of K
// Ordering     kernels' ends; inside a cluster front_product.cuh
// Determinism  fixed order of all sums
// Meaning      reference/linear.cpp, reference/norm.cpp, reference/kv.cpp. Bound: rel_l2 ≤ 4e-3
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/inject.hpp"
#include "stages/kv.hpp"
#include "stages/norm.hpp"
#include "stages/rope.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kHeadDim = shape::kHeadDim, kThreads = 256;
using Block = plat::Block<kThreads>;

// Rows of a block's product; blocks of a cluster, each with half of H of K, and rows that one owns.
constexpr int kRows = 16;
constexpr int kWideBlocks = 2 * kInjectStages, kWideOwned = 4;
constexpr int kKeyBlocks = 2, kKeyOwned = 8;
template <class M>
constexpr int kPartK = M::kHidden / kKeyBlocks;
template <class M>
constexpr int kWidth = kInjectStages * M::kHidden;
template <class M, int kTiles>
using WideProduct = Product<kRows, kPartK<M>, kTiles, kWideBlocks, kWideOwned, 1>;
template <class M, int kTiles>
using KeyProduct = Product<kRows, kPartK<M>, kTiles, kKeyBlocks, kKeyOwned, 1>;

// Four values of a row to their codes; kGroup / 4 lanes that lie together have a group.
template <int kGroup>
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

template <class M>
__global__ void __launch_bounds__(kThreads)
    inject_codes_any(const __grid_constant__ InjectParams params) {
  static_assert(kWidth<M> / 4 % kThreads == 0 && M::kScaleBlock / 4 <= plat::kWarpLanes);
  const int quad = static_cast<int>(blockIdx.x * kThreads) + plat::thread_idx();
  const int row = static_cast<int>(blockIdx.y);
  const uint2 words = __ldcg(reinterpret_cast<const uint2*>(params.features) +
                             static_cast<std::int64_t>(row) * (kWidth<M> / 4) + quad);
  const float v[4] = {sm90::low_bf16(words.x), sm90::high_bf16(words.x), sm90::low_bf16(words.y),
                      sm90::high_bf16(words.y)};
  store_codes<M::kScaleBlock>(v, quad, row, kWidth<M>, padded_rows(params.num_rows),
                              params.feature_codes, params.feature_scale);
}

// Rows first_row .. of a matrix [.., kColumns] times activations, by a cluster; the owned ones as
// bf16 to out[token * pitch].
template <class M, class Linear, int kColumns>
LOWLAT_DEVICE void multiply(const Fp8Weights& from, int first_row, int num_rows,
                            const std::uint8_t* codes, const float* scale, std::uint16_t* out,
                            int pitch) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  const int rank = sm90::cluster_rank(), padded = padded_rows(num_rows);
  constexpr int kGroup = M::kScaleBlock, kScaleStride = kColumns / kGroup;
  const int first_k = rank * kPartK<M>;
  const ProductWeights weights{
      from.codes + static_cast<std::int64_t>(first_row) * kColumns + first_k,
      from.scales + first_row / kGroup * kScaleStride + first_k / kGroup, kColumns, kScaleStride};
  Linear::template load<kGroup>(shared, weights, 0, num_rows);
  const CodeActivations<kGroup, false> x{codes + first_k, scale + first_k / kGroup * padded,
                                         kColumns, padded};
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

template <class M, int kTiles>
__global__ void __launch_bounds__(kProductThreads)
    inject_product_fp8_sm90(const __grid_constant__ InjectParams params) {
  const int first_row = static_cast<int>(blockIdx.x) / kWideBlocks * kRows;
  multiply<M, WideProduct<M, kTiles>, kWidth<M>>(params.main_proj, first_row, params.num_rows,
                                                 params.feature_codes, params.feature_scale,
                                                 params.y + first_row, M::kHidden);
}

template <class M>
__global__ void __launch_bounds__(kThreads)
    inject_norm_any(const __grid_constant__ InjectParams params) {
  constexpr int kHidden = M::kHidden;
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
    store_codes<M::kScaleBlock>(v, quad, row, kHidden, padded_rows(params.num_rows), params.x_codes,
                                params.x_scale);
  }
}

template <class M, int kTiles>
__global__ void __launch_bounds__(kProductThreads)
    inject_keys_fp8_sm90(const __grid_constant__ InjectParams params) {
  const int tile = static_cast<int>(blockIdx.x) / kKeyBlocks;
  constexpr int kStageTiles = kHeadDim / kRows;
  const int stage = tile / kStageTiles, first_row = tile % kStageTiles * kRows;
  multiply<M, KeyProduct<M, kTiles>, M::kHidden>(
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
  return with_model(params.model, [&]<class M>() {
    inject_codes_any<M><<<dim3(kWidth<M> / 4 / kThreads, rows), kThreads, 0, stream>>>(params);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    error = with_tiles(params.num_rows, [&]<int kTiles>() {
      return launch_kernel(inject_product_fp8_sm90<M, kTiles>,
                           dim3(M::kHidden / kRows * kWideBlocks), kProductThreads,
                           sizeof(typename WideProduct<M, kTiles>::Shared), kWideBlocks, false,
                           stream, params);
    });
    if (error != cudaSuccess) return error;
    inject_norm_any<M><<<rows, kThreads, 0, stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    error = with_tiles(params.num_rows, [&]<int kTiles>() {
      return launch_kernel(inject_keys_fp8_sm90<M, kTiles>,
                           dim3(kInjectStages * kHeadDim / kRows * kKeyBlocks), kProductThreads,
                           sizeof(typename KeyProduct<M, kTiles>::Shared), kKeyBlocks, false,
                           stream, params);
    });
    if (error != cudaSuccess) return error;
    inject_store_any<<<dim3(rows, kInjectStages), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace lowlat::nvidia::fused
