// oproj_a_fp8_sm90 and oproj_b_fp8_sm90: the output projection of attention, for few rows.
//
// Math         u[g] = bf( o[g]·wo_a[g]ᵀ )     o not quantised: bf16 values, weights e4m3 exactly
//              partial = quant(u)·wo_bᵀ       fp32, of this rank's columns; sent to every rank
// Shapes       V4.1-Flash: o [T,groups·4096] · wo_a [groups·1024,4096] · wo_b [5120,groups·1024]
// Rounding     u to bf16, codes nearest-even; partial sums as exchange.cuh sends them
// Bytes        TP4: 8.40 MB, then 10.5 MB. T = 6: activations 0.1 MB, packets 0.49 MB
// Floor        1.8 us and 2.3 us at 4.65 TB/s
// Launch       wo_a: 64 rows a block, K in a cluster of four; wo_b: 80 rows, K in a cluster of two
//              a group pair. Weights are on their way before the input is waited for. Without
//              gates wo_b lets the receiving kernel start after its own wait, so that one may poll
//              at once
// Ordering     gates (exchange_gate.cuh) or kernels' ends; inside a cluster front_product.cuh;
//              packets exchange.cuh
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp. Bound: rel_l2 ≤ 4e-3 each
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/oproj.hpp"
#include "shape/dsv41_flash.hpp"

namespace lowlat::nvidia::fused {
namespace {

using Model = shape::Dsv41Flash<1>;
constexpr int kHidden = Model::kHidden, kLora = Model::kOLora, kGroup = Model::kScaleBlock;
constexpr int kGroupInput = Model::kGroupInput;
static_assert(kLora == 1024 && kGroupInput == 4096);

constexpr int kRowsA = 64, kBlocksA = 4, kOwnedA = kGroup;
constexpr int kKA = kGroupInput / kBlocksA;
constexpr int kRowsB = 80, kKB = kLora;

template <int kTiles>
using ProductA = Product<kRowsA, kKA, kTiles, kBlocksA, kOwnedA, 2>;
template <int kTiles, int kBlocks>
using ProductB = Product<kRowsB, kKB, kTiles, kBlocks, kRowsB / kBlocks, 1>;

template <int kTiles>
constexpr int min_blocks() {
  return kTiles == 1 ? 3 : kTiles == 2 ? 2 : 1;
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads, min_blocks<kTiles>())
    oproj_a_fp8_sm90(const __grid_constant__ OprojParams params) {
  using Linear = ProductA<kTiles>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  sm90::launch_dependents();
  const int tile = static_cast<int>(blockIdx.x) / kBlocksA;
  const int rank = static_cast<int>(blockIdx.x) % kBlocksA;
  constexpr int kScaleStride = kGroupInput / kGroup;
  const ProductWeights weights{
      params.wo_a.codes + static_cast<std::int64_t>(tile) * kRowsA * kGroupInput + rank * kKA,
      params.wo_a.scales + tile * (kRowsA / kGroup) * kScaleStride + rank * kKA / kGroup,
      kGroupInput, kScaleStride};
  Linear::template load<kGroup>(shared, weights, 0, params.num_rows);
  wait_at(params.before);
  const int padded = padded_rows(params.num_rows);
  const int first_k = tile * kRowsA / kLora * kGroupInput + rank * kKA;  // in the row of o
  const HalfActivations<kGroup, false> o{params.o + first_k,
                                         params.o_scale + first_k / kGroup * padded,
                                         2 * params.num_groups * kGroupInput, padded};
  Linear::run(shared, o, params.num_rows);
  if (!Linear::owns()) return;
  // A warp a token: its lanes are the 32 outputs that share a scale.
  static_assert(kOwnedA == plat::kWarpLanes);
  const int row = plat::thread_idx() % plat::kWarpLanes;
  const int first_row = tile * kRowsA + rank * kOwnedA;
  for (int token = plat::thread_idx() / plat::kWarpLanes; token < params.num_rows;
       token += kProductWarps) {
    const float u = quick_bf16(Linear::sum(shared, token, row));
    const PowerScale group = power_scale(plat::warp_max(plat::abs(u)));
    params.u_codes[static_cast<std::int64_t>(token) * params.num_groups * kLora + first_row + row] =
        static_cast<std::uint8_t>(sm90::to_e4m3_pair(u * group.inverse, 0.0f));
    if (row == 0) params.u_scale[first_row / kGroup * padded + token] = group.scale;
  }
  open_gate(params.u_done);
}

template <int kTiles, int kBlocks>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 3 : 1)
    oproj_b_fp8_sm90(const __grid_constant__ OprojParams params) {
  using Linear = ProductB<kTiles, kBlocks>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  const int tile = static_cast<int>(blockIdx.x) / kBlocks;
  const int rank = static_cast<int>(blockIdx.x) % kBlocks;
  const int k = kBlocks * kKB, scale_stride = k / kGroup;
  const int first_row = tile * kRowsB;
  const ProductWeights weights{
      params.wo_b.codes + static_cast<std::int64_t>(first_row) * k + rank * kKB,
      params.wo_b.scales + first_row / kGroup * scale_stride + rank * kKB / kGroup, k,
      scale_stride};
  Linear::template load<kGroup>(shared, weights, first_row % kGroup, params.num_rows);
  if (params.u_done.word != nullptr) sm90::launch_dependents();
  wait_at(params.u_done);
  if (params.u_done.word == nullptr) sm90::launch_dependents();
  const int padded = padded_rows(params.num_rows);
  const CodeActivations<kGroup, false> u{params.u_codes + rank * kKB,
                                         params.u_scale + rank * kKB / kGroup * padded, k, padded};
  Linear::run(shared, u, params.num_rows);
  constexpr int kQuads = Linear::kOwned / 4;
  const int first_owned = first_row + rank * Linear::kOwned;
  const std::uint64_t epoch =
      params.published ? exchange_epoch(params.port, params.exchange_index) : 0;
#pragma unroll 1
  for (int i = plat::thread_idx(); i < kQuads * params.num_rows; i += kProductThreads) {
    const int token = i / kQuads, quad = i % kQuads;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = Linear::sum(shared, token, 4 * quad + j);
    if (params.published) {
      publish_quad(params.port, epoch, token, first_owned / 4 + quad, kHidden / 4, v);
    } else {
      *reinterpret_cast<float4*>(params.partial + static_cast<std::int64_t>(token) * kHidden +
                                 first_owned + 4 * quad) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

}  // namespace

cudaError_t launch_oproj_a(const OprojParams& params, bool programmatic, cudaStream_t stream) {
  if (params.num_groups < 1 || params.num_groups > 8) return cudaErrorInvalidValue;
  return with_tiles(params.num_rows, [&]<int kTiles>() {
    return launch_kernel(oproj_a_fp8_sm90<kTiles>,
                         dim3(params.num_groups * kLora / kRowsA * kBlocksA), kProductThreads,
                         sizeof(typename ProductA<kTiles>::Shared), kBlocksA, programmatic, stream,
                         params);
  });
}

cudaError_t launch_oproj_b(const OprojParams& params, bool programmatic, cudaStream_t stream) {
  const auto launch = [&]<int kTiles, int kBlocks>() {
    return launch_kernel(oproj_b_fp8_sm90<kTiles, kBlocks>, dim3(kHidden / kRowsB * kBlocks),
                         kProductThreads, sizeof(typename ProductB<kTiles, kBlocks>::Shared),
                         kBlocks, programmatic, stream, params);
  };
  return with_tiles(params.num_rows, [&]<int kTiles>() {
    switch (params.num_groups) {
      case 2: return launch.template operator()<kTiles, 2>();
      case 4: return launch.template operator()<kTiles, 4>();
      default: return cudaErrorInvalidValue;
    }
  });
}

}  // namespace lowlat::nvidia::fused
