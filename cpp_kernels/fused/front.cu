// front_qkv_fp8_sm90 and front_q_fp8_sm90: the products at the front of attention, for few rows.
//
// Math         [qa | kv] = bf( x·[wq_a ; wkv]ᵀ )        x quantised in groups of 32
//              ql = bf( qa·rsqrt(mean qa² + ε)·q_norm ),  q = bf( quant(ql)·wq_bᵀ )
//              q's last 64 of each head: bf( RoPE(q, position) )
//              k = kv·rsqrt(mean kv² + ε)·kv_norm (fp32), its last 64 rotated, stored as 584 bytes
//              beside the first product: the hyper-connections' statistics (mix.cuh)
// Shapes       V4.1-Flash: x [T,5120] · wq_a [1280,5120] · wkv [512,5120] · wq_b [heads·512,1280]
// Rounding     bf16 where bf( ) stands, codes nearest-even; V4.1 has no norm of heads
// Bytes        TP4: 9.18 MB (and 1.97 MB of fn), then 10.5 MB. T = 6: activations 0.25 MB, in L2
// Floor        2.4 us and 2.3 us at 4.65 TB/s
// Launch       64 weight rows a block, 256 threads; K of the first in a cluster of four. Weights
//              are on their way before the input is waited for
// Ordering     gates (exchange_gate.cuh) or kernels' ends; inside a cluster front_product.cuh
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp, norm.cpp, rope.cpp, kv.cpp. Bound: rel_l2 ≤ 4e-3 each
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front.hpp"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/mix.cuh"
#include "shape/dsv41_flash.hpp"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

// Of the model, whatever the rank's share.
using Model = shape::Dsv41Flash<1>;
constexpr int kHidden = Model::kHidden, kQLora = Model::kQLora, kGroup = Model::kScaleBlock;
constexpr int kHeadDim = shape::kHeadDim, kRopePairs = shape::kRopeDim / 2;
constexpr int kNope = kHeadDim - shape::kRopeDim;
constexpr int kRows = 64;
constexpr int kSquared = 16;  // values of qa whose squares one block of the first product adds
constexpr int kQkvBlocks = 4;
constexpr int kQkvK = kHidden / kQkvBlocks;
constexpr int kQaTiles = kQLora / kRows;
constexpr int kQkvTiles = (kQLora + kHeadDim) / kRows;

template <int kTiles>
using QkvProduct = Product<kRows, kQkvK, kTiles, kQkvBlocks, kRows / kQkvBlocks, 1>;

template <int kTiles>
constexpr int min_blocks() {
  return kTiles == 1 ? 3 : kTiles == 2 ? 2 : 1;
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads, min_blocks<kTiles>())
    front_qkv_fp8_sm90(const __grid_constant__ FrontParams params) {
  using Linear = QkvProduct<kTiles>;
  extern __shared__ __align__(128) unsigned char memory[];
  sm90::launch_dependents();
  const int block_idx = static_cast<int>(blockIdx.x);
  if (block_idx >= kQkvTiles * kQkvBlocks) {
    mix_block(*reinterpret_cast<MixShared*>(memory), params.mix, params.before,
              block_idx - kQkvTiles * kQkvBlocks);
    return;
  }
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  const int tile = block_idx / kQkvBlocks, rank = block_idx % kQkvBlocks;
  const bool is_q = tile < kQaTiles;
  const int first_row = (is_q ? tile : tile - kQaTiles) * kRows;
  const Fp8Weights& from = is_q ? params.wq_a : params.wkv;
  constexpr int kScaleStride = kHidden / kGroup;
  const ProductWeights weights{
      from.codes + static_cast<std::int64_t>(first_row) * kHidden + rank * kQkvK,
      from.scales + first_row / kGroup * kScaleStride + rank * kQkvK / kGroup, kHidden,
      kScaleStride};
  Linear::template load<kGroup>(shared, weights, 0, params.num_rows);
  wait_at(params.before);
  const int padded = padded_rows(params.num_rows);
  const CodeActivations<kGroup, false> x{params.x_codes + rank * kQkvK,
                                         params.x_scale + rank * kQkvK / kGroup * padded, kHidden,
                                         padded};
  Linear::run(shared, x, params.num_rows);
  constexpr int kOwned = Linear::kOwned, kPairs = kOwned / 2;
  static_assert(kOwned == kSquared && kProductThreads % kPairs == 0);
  std::uint16_t* out = is_q ? params.qa : params.kv;
  const int width = is_q ? kQLora : kHeadDim;
  // Whole warps stay together: padded rows, of which those that are not there are not stored.
#pragma unroll 1
  for (int i = plat::thread_idx(); i < kPairs * padded; i += kProductThreads) {
    const int token = i / kPairs, row = i % kPairs * 2;
    const std::uint32_t pair =
        sm90::to_bf16_pair(Linear::sum(shared, token, row), Linear::sum(shared, token, row + 1));
    const float low = sm90::low_bf16(pair), high = sm90::high_bf16(pair);
    float squares = plat::fma(low, low, high * high);
#pragma unroll
    for (int mask = 1; mask < kPairs; mask *= 2) {
      squares += __shfl_xor_sync(plat::kAllLanes, squares, mask);
    }
    if (token >= params.num_rows) continue;
    *reinterpret_cast<std::uint32_t*>(out + token * width + first_row + rank * kOwned + row) = pair;
    if (is_q && row == 0) params.qa_squares[(tile * kQkvBlocks + rank) * padded + token] = squares;
  }
  open_gate(params.qkv_done);
}

template <int kTiles>
struct QShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kPitch = kQLora + 32;  // as of the weights
  typename Product<kRows, kQLora, kTiles, 1, kRows, 0>::Shared product;
  alignas(16) std::uint8_t codes[kTokens * kPitch];
  float scale[kQLora / kGroup * kTokens];
  float norm[kTokens];
  float2 turn[kTokens][kRopePairs];  // cosine and sine
};

LOWLAT_DEVICE float2 turn_of(const RopeFrequencies& rope, int pair, int position) {
  const float angle = static_cast<float>(position) * rope.values[pair];
  return make_float2(plat::cos(angle), plat::sin(angle));
}

// One piece of a row of qa on its way to codes: 8 of its values, by one thread; four threads that
// lie together have a group.
constexpr int kPiece = 8, kPieces = kQLora / kPiece;

struct LatentPiece {
  uint4 values, gain;
};
LOWLAT_DEVICE LatentPiece load_latent(const FrontParams& params, int piece) {
  return {__ldcg(reinterpret_cast<const uint4*>(params.qa + piece * kPiece)),
          __ldg(reinterpret_cast<const uint4*>(params.q_norm + piece % kPieces * kPiece))};
}
LOWLAT_DEVICE void quantize_latent(std::uint8_t* codes, int pitch, float* scale, int padded,
                                   const float* norms, const LatentPiece& from, int piece) {
  static_assert(kGroup == 4 * kPiece);
  const int token = piece / kPieces, k = piece % kPieces * kPiece;
  const float norm = norms[token];
  const std::uint32_t words[4] = {from.values.x, from.values.y, from.values.z, from.values.w};
  const std::uint32_t gains[4] = {from.gain.x, from.gain.y, from.gain.z, from.gain.w};
  std::uint32_t pairs[4];
  float amax = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pairs[j] = sm90::to_bf16_pair(sm90::low_bf16(words[j]) * norm * sm90::low_bf16(gains[j]),
                                  sm90::high_bf16(words[j]) * norm * sm90::high_bf16(gains[j]));
    amax = plat::max(plat::abs(sm90::low_bf16(pairs[j])), amax);
    amax = plat::max(plat::abs(sm90::high_bf16(pairs[j])), amax);
  }
  amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, 1), amax);
  amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, 2), amax);
  const PowerScale group = power_scale(amax);
  std::uint32_t packed[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const std::uint32_t a = pairs[2 * j], b = pairs[2 * j + 1];
    packed[j] =
        sm90::to_e4m3_pair(sm90::low_bf16(a) * group.inverse, sm90::high_bf16(a) * group.inverse) |
        sm90::to_e4m3_pair(sm90::low_bf16(b) * group.inverse, sm90::high_bf16(b) * group.inverse)
            << 16;
  }
  *reinterpret_cast<uint2*>(codes + token * pitch + k) = make_uint2(packed[0], packed[1]);
  if (k % kGroup == 0) scale[k / kGroup * padded + token] = group.scale;
}

// Norm, rotation and packing of one key, by one warp: lane has 16 values. Waits for the kernels
// before when all that does not depend on them is done.
LOWLAT_DEVICE void store_key(const FrontParams& params, int row_idx) {
  constexpr int kPerLane = kHeadDim / plat::kWarpLanes;
  static_assert(kPerLane == 16 && stages::kKvGroup == 4 * kPerLane);
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes, first = lane_idx * kPerLane;
  const int known_row = min(row_idx, params.num_rows - 1);  // whole blocks wait
  const int slot = params.kv_slots[known_row], position = params.positions[known_row];
  const bool rotates = first >= kNope;
  float2 turn[kPerLane / 2];
  float gain[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane / 2; ++i) {
    turn[i] =
        rotates ? turn_of(params.rope, (first - kNope) / 2 + i, position) : make_float2(1.0f, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) gain[i] = stages::from_bf16(__ldg(params.kv_norm + first + i));
  wait_at(params.qkv_done);
  if (row_idx >= params.num_rows) return;
  float x[kPerLane], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane / 8; ++i) {
    const uint4 raw =
        __ldcg(reinterpret_cast<const uint4*>(params.kv + row_idx * kHeadDim + first + 8 * i));
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[8 * i + 2 * j] = sm90::low_bf16(words[j]);
      x[8 * i + 2 * j + 1] = sm90::high_bf16(words[j]);
    }
  }
#pragma unroll
  for (const float v : x) squares = plat::fma(v, v, squares);
  const float norm =
      quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kHeadDim) + params.norm_eps);
  float amax = 1e-4f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = x[i] * norm * gain[i];
    amax = plat::max(plat::abs(x[i]), amax);
  }
  amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, 1), amax);
  amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, 2), amax);
  if (slot < 0) return;
  const stages::KvPaged<std::uint8_t> pages{params.kv_pages.base, params.kv_pages.slots_per_page,
                                            params.kv_pages.page_bytes};
  const stages::KvRow<std::uint8_t> row = pages.row(slot);
  if (!rotates) {
    const std::uint32_t code = power_code(amax);
    const float inverse = plat::bits_float((254u - code) << 23);
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = sm90::to_e4m3_pair(x[4 * i] * inverse, x[4 * i + 1] * inverse) |
                 sm90::to_e4m3_pair(x[4 * i + 2] * inverse, x[4 * i + 3] * inverse) << 16;
    }
    *reinterpret_cast<uint4*>(row.data + first) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (lane_idx % 4 == 0) row.scales[lane_idx / 4] = static_cast<std::uint8_t>(code);
    return;
  }
  std::uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    words[i] = sm90::to_bf16_pair(a * turn[i].x - b * turn[i].y, a * turn[i].y + b * turn[i].x);
  }
  std::uint8_t* to = row.data + kNope + 2 * (first - kNope);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  *reinterpret_cast<uint4*>(to + 16) = make_uint4(words[4], words[5], words[6], words[7]);
}

template <int kTiles>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 3 : 1)
    front_q_fp8_sm90(const __grid_constant__ FrontParams params) {
  using Linear = Product<kRows, kQLora, kTiles, 1, kRows, 0>;
  constexpr int kTilesPerHead = kHeadDim / kRows;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QShared<kTiles>*>(memory);
  sm90::launch_dependents();
  const int tile = static_cast<int>(blockIdx.x), num_rows = params.num_rows;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  if (tile >= params.num_heads * kTilesPerHead) {
    const int row_idx = (tile - params.num_heads * kTilesPerHead) * kProductWarps + warp_idx;
    store_key(params, row_idx);
    open_gate(params.done);
    return;
  }
  constexpr int kScaleStride = kQLora / kGroup;
  const ProductWeights weights{params.wq_b.codes + static_cast<std::int64_t>(tile) * kRows * kQLora,
                               params.wq_b.scales + tile * kRows / kGroup * kScaleStride, kQLora,
                               kScaleStride};
  Linear::template load<kGroup>(shared.product, weights, 0, num_rows);
  // The head's last tile is the one that rotates.
  const bool rotates = tile % kTilesPerHead == kTilesPerHead - 1;
  static_assert(kRows == shape::kRopeDim);
  if (rotates) {
    for (int i = plat::thread_idx(); i < num_rows * kRopePairs; i += kProductThreads) {
      const int token = i / kRopePairs, pair = i % kRopePairs;
      shared.turn[token][pair] = turn_of(params.rope, pair, params.positions[token]);
    }
  }
  wait_at(params.qkv_done);
  constexpr int kTokens = QShared<kTiles>::kTokens, kPitch = QShared<kTiles>::kPitch;
  constexpr int kTogether = 4;
  const int pieces = num_rows * kPieces, padded = padded_rows(num_rows);
  static_assert(kPieces % plat::kWarpLanes == 0, "whole warps have pieces");
  LatentPiece ahead[kTogether];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int piece = first + i * kProductThreads;
      if (piece < pieces) ahead[i] = load_latent(params, piece);
    }
  };
  load(plat::thread_idx());
  for (int token = warp_idx; token < num_rows; token += kProductWarps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = plat::thread_idx() % plat::kWarpLanes; i < kQLora / kSquared;
         i += plat::kWarpLanes) {
      squares += __ldcg(params.qa_squares + i * padded + token);
    }
    squares = plat::warp_sum(squares);
    shared.norm[token] = quick_rsqrt(squares / static_cast<float>(kQLora) + params.norm_eps);
  }
  plat::block_sync();
#pragma unroll 1
  for (int first = plat::thread_idx(); first < pieces; first += kTogether * kProductThreads) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int piece = first + i * kProductThreads;
      if (piece >= pieces) break;
      quantize_latent(shared.codes, kPitch, shared.scale, kTokens, shared.norm, ahead[i], piece);
    }
    load(first + kTogether * kProductThreads);
  }
  plat::block_sync();
  const CodeActivations<kGroup, true> latent{shared.codes, shared.scale, kPitch, kTokens};
  Linear::run(shared.product, latent, num_rows);
  const std::int64_t width = static_cast<std::int64_t>(params.num_heads) * kHeadDim;
#pragma unroll 1
  for (int i = plat::thread_idx(); i < kRows / 2 * num_rows; i += kProductThreads) {
    const int token = i / (kRows / 2), pair = i % (kRows / 2);
    float a = quick_bf16(Linear::sum(shared.product, token, 2 * pair));
    float b = quick_bf16(Linear::sum(shared.product, token, 2 * pair + 1));
    if (rotates) {
      const float2 turn = shared.turn[token][pair];
      const float turned = a * turn.x - b * turn.y;
      b = a * turn.y + b * turn.x;
      a = turned;
    }
    *reinterpret_cast<std::uint32_t*>(params.q + token * width + tile * kRows + 2 * pair) =
        sm90::to_bf16_pair(a, b);
  }
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_front_qkv(const FrontParams& params, bool programmatic, cudaStream_t stream) {
  return with_tiles(params.num_rows, [&]<int kTiles>() {
    constexpr int kProductBytes = sizeof(typename QkvProduct<kTiles>::Shared);
    constexpr int kBytes =
        kProductBytes > int{sizeof(MixShared)} ? kProductBytes : int{sizeof(MixShared)};
    const int mix = params.mix.fn != nullptr ? mix_parts(kHidden) : 0;
    static_assert(mix_parts(kHidden) % kQkvBlocks == 0);
    return launch_kernel(front_qkv_fp8_sm90<kTiles>, dim3(kQkvTiles * kQkvBlocks + mix),
                         kProductThreads, kBytes, kQkvBlocks, programmatic, stream, params);
  });
}

cudaError_t launch_front_q(const FrontParams& params, bool programmatic, cudaStream_t stream) {
  if (params.num_heads < 1 || params.num_heads > 64) return cudaErrorInvalidValue;
  return with_tiles(params.num_rows, [&]<int kTiles>() {
    const int products = params.num_heads * (kHeadDim / kRows);
    const int keys = (params.num_rows + kProductWarps - 1) / kProductWarps;
    return launch_kernel(front_q_fp8_sm90<kTiles>, dim3(products + keys), kProductThreads,
                         sizeof(QShared<kTiles>), 1, programmatic, stream, params);
  });
}

}  // namespace lowlat::nvidia::fused
