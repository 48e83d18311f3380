// front_qkv_fp8_sm90, front_q_fp8_sm90 and front_q_pair_fp8_sm90: the products at the front of
// attention, for few rows.
//
// Math         [qa | kv] = bf( x·[wq_a ; wkv]ᵀ )        x quantised in groups of 32 (V4: 128)
//              ql = bf( qa·rsqrt(mean qa² + ε)·q_norm ),  q = bf( quant(ql)·wq_bᵀ )
//              q's last 64 of each head: bf( RoPE(q, position) )
//              k = kv·rsqrt(mean kv² + ε)·kv_norm (fp32), its last 64 rotated, stored as 584 bytes
//              V4: each head of q before that: bf( q·rsqrt(mean_512 q² + ε) ); of few rows by
//              attention, so that q's packets have neither, and their tile's sum of squares
// Shapes       V4.1-Flash: x [T,5120] · wq_a [1280,5120] · wkv [512,5120] · wq_b [heads·512,1280]
//              V4-Flash: x [T,4096] · wq_a [1024,4096] · wkv [512,4096] · wq_b [heads·512,1024]
// Rounding     bf16 where bf( ) stands, codes nearest-even
// Bytes        TP4: 9.18 MB, then 10.5 MB. T = 6: activations 0.25 MB, in L2
// Floor        2.4 us and 2.3 us at 4.65 TB/s
// Launch       64 weight rows a block, 256 threads; K of the first in a cluster of four; the second
//              of V4.1's few rows and 32 heads has 128 rows a block; V4's is a cluster a head.
//              Weights are on their way before the input is waited for
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
#include "fused/front_wide.cuh"
#include "fused/model.hpp"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kHeadDim = shape::kHeadDim, kRopePairs = shape::kRopeDim / 2;
constexpr int kNope = kHeadDim - shape::kRopeDim;
constexpr int kRows = 64;
constexpr int kTilesPerHead = kHeadDim / kRows;
constexpr int kSquared = 16;  // values of qa whose squares one block of the first product adds
constexpr int kQkvBlocks = 4;
constexpr int kLatentThreads = 192;

// Of a model, whatever the rank's share: M is its shape.
template <class M>
struct Sizes {
  static constexpr int kQkvK = M::kHidden / kQkvBlocks;
  static constexpr int kQaTiles = M::kQLora / kRows;
  static constexpr int kQkvTiles = (M::kQLora + kHeadDim) / kRows;
};

// Few rows and more, each by its product.
template <int kTiles>
constexpr bool kWide = kTiles > 2;
// Chunks of tokens that have room at once (0: all). At 24 rows so few that q's blocks have room
// beside those of [q_a, kv], at 48 that attention's have room beside q's; of V4, whose blocks of q
// are clusters of eight of which sixteen do not fit one a multiprocessor, that there is room for
// two of either.
template <class M, int kTiles>
constexpr int kQkvSlots = M::kScaleBlock != 32 ? (kTiles == 6 ? 2 : 0)
                          : kTiles == 3        ? 3
                                               : 0;
template <class M, int kTiles>
constexpr int kQSlots = M::kScaleBlock != 32 ? (kTiles == 6 ? 2 : 0)
                        : kTiles == 3        ? 3
                        : kTiles == 6        ? 4
                                             : 0;
template <class M, int kTiles>
struct QkvOf {
  using Type = WideProduct<M::kScaleBlock, Sizes<M>::kQkvK, kTiles, kQkvBlocks, kRows / kQkvBlocks,
                           false, kQkvSlots<M, kTiles>>;
};
template <class M, int kTiles>
  requires(!kWide<kTiles>)
struct QkvOf<M, kTiles> {
  using Type = Product<kRows, Sizes<M>::kQkvK, kTiles, kQkvBlocks, kRows / kQkvBlocks, 1>;
};
template <class M, int kTiles>
using QkvProduct = QkvOf<M, kTiles>::Type;

template <int kTiles>
constexpr int min_blocks() {
  return kTiles == 1 ? 3 : kTiles == 2 ? 2 : 1;
}

template <class M, int kTiles>
__global__ void __launch_bounds__(kProductThreads, min_blocks<kTiles>())
    front_qkv_fp8_sm90(const __grid_constant__ FrontParams params) {
  using Linear = QkvProduct<M, kTiles>;
  constexpr int kHidden = M::kHidden, kQLora = M::kQLora, kGroup = M::kScaleBlock;
  constexpr int kQkvK = Sizes<M>::kQkvK, kQaTiles = Sizes<M>::kQaTiles;
  extern __shared__ __align__(128) unsigned char memory[];
  sm90::launch_dependents();
  const int block_idx = static_cast<int>(blockIdx.x);
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
  const int padded = padded_rows(params.num_rows);
  constexpr int kOwned = Linear::kOwned;
  static_assert(kOwned == kSquared);
  if constexpr (kWide<kTiles>) {
    Linear::load(shared, weights, params.num_rows);
  } else {
    Linear::template load<kGroup>(shared, weights, 0, params.num_rows);
  }
  if constexpr (kTiles == 1) {
    const HopTag hop = hop_tag(params.hop, params.hop.index, HopKernel::qkv);
    const HopTag x_hop = hop_tag(params.hop, params.x_index, HopKernel::qkv);
    const auto* from = static_cast<const plat::TaggedWords*>(params.packets.x) + rank * kQkvK / 8;
    const HopActivations<1> x{from, kHidden / 8, x_hop};
    const HopSigns signs = {nullptr, 0, from, kQkvK / 8 / plat::kWarpLanes};
    Stamps stamps(params.hop.port->stamps, hop.kernel);
    stamps.mark(StampStage::ask);
    constexpr int kQuads = kOwned / 4;
    auto* out = static_cast<plat::TaggedWords*>(is_q ? params.packets.qa : params.packets.kv);
    const int width = (is_q ? kQLora : kHeadDim) / 4;
    wait_for_signs(x_hop, signs);
    stamps.mark(StampStage::wait);
    Linear::run(shared, x, params.num_rows, stamps);
    const int token = plat::thread_idx() / kQuads, quad = plat::thread_idx() % kQuads;
    if (token >= params.num_rows) return;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = Linear::sum(shared, token, 4 * quad + i);
    send_packet(out + token * width + (first_row + rank * kOwned) / 4 + quad, hop.tag,
                sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]), 0);
    stamps.mark(StampStage::store);
  } else {
    constexpr int kPairs = kOwned / 2;
    static_assert(kProductThreads % kPairs == 0);
    Stamps stamps(stamp_sink(params.hop),
                  params.hop.id + static_cast<std::uint32_t>(HopKernel::qkv));
    stamps.mark(StampStage::ask);
    std::uint16_t* out = is_q ? params.qa : params.kv;
    const int width = is_q ? kQLora : kHeadDim;
    wait_at(params.before);
    stamps.mark(StampStage::wait);
    const std::uint8_t* codes = params.x_codes + rank * kQkvK;
    const float* scale = params.x_scale + rank * kQkvK / kGroup * padded;
    if constexpr (kWide<kTiles>) {
      const typename Linear::Tokens x{codes, kHidden, scale, padded, params.num_rows};
      Linear::load_tokens(shared, x);
      Linear::run(shared, x, stamps);
    } else {
      const CodeActivations<kGroup, false> x{codes, scale, kHidden, padded};
      Linear::run(shared, x, params.num_rows, stamps);
    }
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
      *reinterpret_cast<std::uint32_t*>(out + token * width + first_row + rank * kOwned + row) =
          pair;
      if (is_q && row == 0)
        params.qa_squares[(tile * kQkvBlocks + rank) * padded + token] = squares;
    }
    stamps.mark(StampStage::store);
    open_gate(params.qkv_done);
  }
}

template <class M, int kTiles>
struct QOf {
  using Type = WideProduct<M::kScaleBlock, M::kQLora, kTiles, 1, kRows, false, kQSlots<M, kTiles>>;
};
template <class M, int kTiles>
  requires(!kWide<kTiles>)
struct QOf<M, kTiles> {
  using Type = Product<kRows, M::kQLora, kTiles, 1, kRows, 1>;
};
template <class M, int kTiles>
using QProduct = QOf<M, kTiles>::Type;

// Heads are normed by the blocks of a head, which are a cluster; of few rows by attention, which
// has all of a head's packets and need not wait for eight multiprocessors of one part of the chip.
template <class M, int kTiles>
constexpr bool kNormsInCluster = M::kNormsHeads && kTiles > 1;

// What the blocks of a head tell each other.
template <class M, int kTiles>
struct HeadSquares {
  float of_tile[kTilesPerHead][kTiles * kTileTokens];
  std::uint64_t barrier;
};
template <class M, int kTiles>
  requires(!kNormsInCluster<M, kTiles>)
struct HeadSquares<M, kTiles> {};

template <class M, int kTiles>
struct QShared {
  static constexpr int kTokens = kTiles * kTileTokens;
  typename QProduct<M, kTiles>::Shared product;
  alignas(16) float2 turn[kTokens][kRopePairs];  // cosine and sine
  HeadSquares<M, kTiles> head;
};
// Up to eight rows: the block makes the latent's codes itself.
template <class M>
struct FewShared : QShared<M, 1> {
  static constexpr int kTokens = kTileTokens, kQLora = M::kQLora;
  static constexpr int kPitch = kQLora + 32;  // as of the weights
  alignas(16) std::uint8_t codes[kTokens * kPitch];
  float scale[kQLora / M::kScaleBlock * kTokens];
};

LOWLAT_DEVICE float2 turn_of(const RopeFrequencies& rope, int pair, int position) {
  return turn_by(static_cast<float>(position) * rope.values[pair]);
}

// The head's blocks start; the calling thread 0 makes the barrier before. All threads call after.
template <class Head>
LOWLAT_DEVICE void expect_squares(Head& head, int num_rows) {
  sm90::barrier_init(&head.barrier, 1);
  sm90::barrier_arrive_expect(&head.barrier, kTilesPerHead * num_rows * 4);
}
// A lane of a token's tells the block `peer` of the head the sum of squares of this block's tile.
template <class Head>
LOWLAT_DEVICE void send_squares(Head& head, int token, int peer, float squares) {
  sm90::send_to_peer(sm90::peer_address(&head.of_tile[sm90::cluster_rank()][token], peer), squares,
                     sm90::peer_address(&head.barrier, peer));
}
// What a head's values are multiplied with, after the wait for all tiles.
template <class Head>
LOWLAT_DEVICE float head_norm(const Head& head, int token, float norm_eps) {
  float squares = head.of_tile[0][token];
#pragma unroll
  for (int i = 1; i < kTilesPerHead; ++i) squares += head.of_tile[i][token];
  return quick_rsqrt(squares / static_cast<float>(kHeadDim) + norm_eps);
}

// One piece of a row of qa on its way to codes: 8 of its values, by one thread; the threads of a
// group lie together.
constexpr int kPiece = 8;
template <class M>
constexpr int kPieces = M::kQLora / kPiece;

struct LatentPiece {
  uint4 values, gain;
};
// Codes of values k and on go to `codes`, their scale, where a group begins, to `scale`.
template <class M>
LOWLAT_DEVICE void quantize_latent(std::uint8_t* codes, float* scale, float norm,
                                   const LatentPiece& from, int k) {
  constexpr int kGroup = M::kScaleBlock;
  static_assert(kGroup % kPiece == 0 && kGroup / kPiece <= plat::kWarpLanes);
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
#pragma unroll
  for (int mask = 1; mask < kGroup / kPiece; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
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
  *reinterpret_cast<uint2*>(codes) = make_uint2(packed[0], packed[1]);
  if (k % kGroup == 0) *scale = group.scale;
}

// Norm, rotation and packing of one key, by one warp: lane has 16 values. Waits for the kernels
// before when all that does not depend on them is done.
template <bool kHops>
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
  HopTag hop = {};
  if constexpr (kHops) hop = hop_tag(params.hop, params.hop.index, HopKernel::q);
  if constexpr (!kHops) wait_at(params.qkv_done);
  if constexpr (kHops) {
    wait_for_signs(hop, {static_cast<const plat::TaggedWords*>(params.packets.x),
                         hop_tag(params.hop, params.x_index, HopKernel::q).tag,
                         static_cast<const plat::TaggedWords*>(params.packets.kv), 4});
  }
  if (row_idx >= params.num_rows || (kHops && slot < 0)) return;  // the latter: nobody reads it
  std::uint32_t raw[kPerLane / 2];
  if constexpr (kHops) {
    constexpr int kPackets = kPerLane / 4;
    HopWords words[kPackets];
    take_packets(words, hop, (1u << kPackets) - 1u, [&](int i) {
      return static_cast<const plat::TaggedWords*>(params.packets.kv) +
             (row_idx * kHeadDim + first) / 4 + i;
    });
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      raw[2 * i] = low_word(words[i].pair), raw[2 * i + 1] = high_word(words[i].pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane / 8; ++i) {
      const uint4 four =
          __ldcg(reinterpret_cast<const uint4*>(params.kv + row_idx * kHeadDim + first + 8 * i));
      raw[4 * i] = four.x, raw[4 * i + 1] = four.y;
      raw[4 * i + 2] = four.z, raw[4 * i + 3] = four.w;
    }
  }
  float x[kPerLane], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane / 2; ++i) {
    x[2 * i] = sm90::low_bf16(raw[i]), x[2 * i + 1] = sm90::high_bf16(raw[i]);
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
  auto* packets = static_cast<plat::TaggedWords*>(params.packets.keys) + row_idx * kHopKeyPackets;
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
    if constexpr (kHops) {
      send_packet(packets + 2 * lane_idx, hop.tag, words[0], words[1], code);
      send_packet(packets + 2 * lane_idx + 1, hop.tag, words[2], words[3], code);
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
  if constexpr (kHops) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      send_packet(packets + kNope / 8 + (first - kNope) / 4 + i, hop.tag, words[2 * i],
                  words[2 * i + 1], 0);
    }
  }
  std::uint8_t* to = row.data + kNope + 2 * (first - kNope);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  *reinterpret_cast<uint4*>(to + 16) = make_uint4(words[4], words[5], words[6], words[7]);
}

// Up to eight rows: a warp has a row's latent, so its norm is the warp's own. Its codes go to
// `codes`, kPitch bytes a row, their scales to scale[group][token]. All threads call, and wait for
// it; `tile` spreads what they ask for meanwhile.
template <class M>
LOWLAT_DEVICE void take_latent(std::uint8_t* codes, float* scale, const FrontParams& params,
                               const HopTag& hop, int tile, Stamps& stamps) {
  constexpr int kTokens = FewShared<M>::kTokens, kPitch = FewShared<M>::kPitch;
  constexpr int kQLora = M::kQLora, kGroup = M::kScaleBlock;
  constexpr int kPackets = kQLora / 4 / plat::kWarpLanes, kLanes = kGroup / 4;
  static_assert(kQLora / 4 % plat::kWarpLanes == 0 && kTokens == kProductWarps);
  const int num_rows = params.num_rows;
  const int token = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  uint2 gain[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    gain[i] =
        __ldg(reinterpret_cast<const uint2*>(params.q_norm) + lane_idx + i * plat::kWarpLanes);
  }
  const auto* from =
      static_cast<const plat::TaggedWords*>(params.packets.qa) + token * (kQLora / 4);
  const HopSigns signs = {static_cast<const plat::TaggedWords*>(params.packets.x) + tile,
                          hop_tag(params.hop, params.x_index, HopKernel::q).tag,
                          static_cast<const plat::TaggedWords*>(params.packets.qa),
                          kQLora / 4 / plat::kWarpLanes};
  wait_for_signs(hop, signs);
  stamps.mark(StampStage::wait);
  if (token < num_rows) {
    HopWords words[kPackets];
    // Packets as they lie, so that a warp reads whole lines; eight lanes have a group of 32.
    take_packets(words, hop, (1u << kPackets) - 1u,
                 [&](int i) { return from + lane_idx + i * plat::kWarpLanes; });
    float v[kPackets][4], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const std::uint32_t pairs[2] = {low_word(words[i].pair), high_word(words[i].pair)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        v[i][2 * j] = sm90::low_bf16(pairs[j]), v[i][2 * j + 1] = sm90::high_bf16(pairs[j]);
        squares = plat::fma(v[i][2 * j], v[i][2 * j], squares);
        squares = plat::fma(v[i][2 * j + 1], v[i][2 * j + 1], squares);
      }
    }
    const float norm =
        quick_rsqrt(plat::warp_sum(squares) / static_cast<float>(kQLora) + params.norm_eps);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const std::uint32_t gains[2] = {gain[i].x, gain[i].y};
      float amax = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        v[i][2 * j] = quick_bf16(v[i][2 * j] * norm * sm90::low_bf16(gains[j]));
        v[i][2 * j + 1] = quick_bf16(v[i][2 * j + 1] * norm * sm90::high_bf16(gains[j]));
        amax = plat::max(plat::abs(v[i][2 * j]), amax);
        amax = plat::max(plat::abs(v[i][2 * j + 1]), amax);
      }
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
      }
      const PowerScale group = power_scale(amax);
      const int packet = lane_idx + i * plat::kWarpLanes;
      *reinterpret_cast<std::uint32_t*>(codes + token * kPitch + 4 * packet) =
          sm90::to_e4m3_pair(v[i][0] * group.inverse, v[i][1] * group.inverse) |
          sm90::to_e4m3_pair(v[i][2] * group.inverse, v[i][3] * group.inverse) << 16;
      if (packet % kLanes == 0) scale[packet / kLanes * kTokens + token] = group.scale;
    }
  }
  plat::block_sync();
  stamps.mark(StampStage::read);
}

template <class M>
LOWLAT_DEVICE void q_of_few(FewShared<M>& shared, const FrontParams& params, int tile,
                            bool rotates) {
  using Linear = QProduct<M, 1>;
  constexpr int kTokens = FewShared<M>::kTokens, kPitch = FewShared<M>::kPitch;
  constexpr int kGroup = M::kScaleBlock;
  const int num_rows = params.num_rows;
  const HopTag hop = hop_tag(params.hop, params.hop.index, HopKernel::q);
  Stamps stamps(params.hop.port->stamps, hop.kernel);
  stamps.mark(StampStage::ask);
  take_latent<M>(shared.codes, shared.scale, params, hop, tile, stamps);
  auto* to = static_cast<plat::TaggedWords*>(params.packets.q);
  const CodeActivations<kGroup, true> latent{shared.codes, shared.scale, kPitch, kTokens};
  Linear::run(shared.product, latent, num_rows, stamps);
  const int width = params.num_heads * (kHeadDim / 4);
  const int row = plat::thread_idx() / (kRows / 4), quad = plat::thread_idx() % (kRows / 4);
  float v[4];
  if constexpr (M::kNormsHeads) {
    constexpr int kLanesOfRow = kRows / 4;
    const int known_row = min(row, num_rows - 1);  // whole warps stay
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = quick_bf16(Linear::sum(shared.product, known_row, 4 * quad + i));
      squares = plat::fma(v[i], v[i], squares);
    }
#pragma unroll
    for (int mask = 1; mask < kLanesOfRow; mask *= 2) {
      squares += __shfl_xor_sync(plat::kAllLanes, squares, mask);
    }
    // The head's norm, and the rotation that follows it, are for who has all of its tiles.
    if (row >= num_rows) return;
    send_packet(to + row * width + tile * (kRows / 4) + quad, hop.tag,
                sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]),
                plat::float_bits(squares));
  } else {
    if (row >= num_rows) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = quick_bf16(Linear::sum(shared.product, row, 4 * quad + i));
    if (rotates) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 turn = shared.turn[row][2 * quad + i / 2];
        const float turned = v[i] * turn.x - v[i + 1] * turn.y;
        v[i + 1] = v[i] * turn.y + v[i + 1] * turn.x;
        v[i] = turned;
      }
    }
    send_packet(to + row * width + tile * (kRows / 4) + quad, hop.tag,
                sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]), 0);
  }
  stamps.mark(StampStage::store);
}

// Up to eight rows of more heads than multiprocessors have room for at 64 weight rows a block: 128
// rows a block, of which 80 wait for the latent, and the others take the place of the first 48. A
// block of attention has room beside it.
template <class M>
struct PairShared {
  static constexpr int kTokens = kTileTokens, kQLora = M::kQLora;
  static constexpr int kPitch = kQLora + 32, kAllRows = 2 * kRows, kFirst = 48, kHeld = 80;
  static constexpr int kScales = kQLora / kStep;
  alignas(128) unsigned char memory[kHeld * kPitch];
  alignas(16) std::uint8_t codes[kTokens * kPitch];
  float scale[kQLora / M::kScaleBlock * kTokens];
  float weight_scale[kAllRows / 16][kScales];
  alignas(16) float2 turn[kTokens][kRopePairs];
  std::uint64_t first, held, late;  // barriers of weights
};

template <class M>
__global__ void __maxnreg__(96) front_q_pair_fp8_sm90(const __grid_constant__ FrontParams params) {
  using S = PairShared<M>;
  constexpr int kPitch = S::kPitch, kQLora = M::kQLora, kGroup = M::kScaleBlock;
  constexpr int kSteps = kQLora / kStep / kProductWarps;
  constexpr int kMiddle = S::kHeld - S::kFirst, kLast = S::kAllRows - S::kHeld;
  static_assert(!M::kNormsHeads && kLast <= S::kFirst && kQLora % (kStep * kProductWarps) == 0);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<S*>(memory);
  sm90::launch_dependents();
  const int block_idx = static_cast<int>(blockIdx.x), num_rows = params.num_rows;
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  if (block_idx * S::kAllRows >= params.num_heads * kHeadDim) {
    store_key<true>(params, warp_idx);
    return;
  }
  if (thread_idx == 0) {
    for (std::uint64_t* barrier : {&shared.first, &shared.held, &shared.late}) {
      sm90::barrier_init(barrier, 1);
    }
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.first, S::kFirst * kQLora);
    sm90::barrier_arrive_expect(&shared.held, kMiddle * kQLora);
    sm90::barrier_arrive_expect(&shared.late, kLast * kQLora);
  }
  plat::block_sync();
  const std::uint8_t* const weights =
      params.wq_b.codes + static_cast<std::int64_t>(block_idx) * S::kAllRows * kQLora;
  const auto ask = [&](int place, int first, int count, std::uint64_t* barrier) {
    ask_for_rows<kPitch, kProductWarps>(shared.memory + place * kPitch, count, kQLora, barrier, 0,
                                        [&](int i) { return weights + (first + i) * kQLora; });
  };
  ask(0, 0, S::kFirst, &shared.first);
  ask(S::kFirst, S::kFirst, kMiddle, &shared.held);
#pragma unroll 1
  for (int i = thread_idx; i < S::kAllRows / 16 * S::kScales; i += kProductThreads) {
    const int sixteen = i / S::kScales, step = i % S::kScales;
    shared.weight_scale[sixteen][step] = stages::from_ue8m0(__ldg(
        params.wq_b.scales + (block_idx * S::kAllRows + 16 * sixteen) / kGroup * (kQLora / kGroup) +
        step * kStep / kGroup));
  }
  // The head's last 64 rows are those that rotate.
  const bool rotates = (block_idx + 1) * S::kAllRows % kHeadDim == 0;
  if (rotates) {
    for (int i = thread_idx; i < num_rows * kRopePairs; i += kProductThreads) {
      const int token = i / kRopePairs, pair = i % kRopePairs;
      shared.turn[token][pair] = turn_of(params.rope, pair, params.positions[token]);
    }
  }
  const HopTag hop = hop_tag(params.hop, params.hop.index, HopKernel::q);
  Stamps stamps(params.hop.port->stamps, hop.kernel);
  stamps.mark(StampStage::ask);
  take_latent<M>(shared.codes, shared.scale, params, hop, block_idx, stamps);
  using Latent = CodeActivations<kGroup, true>;
  const Latent latent{shared.codes, shared.scale, kPitch, S::kTokens};
  const int first_k = warp_idx * kSteps * kStep;
  const Operand x = take_operand<kSteps>(latent, first_k, num_rows);
  // Rows `first` and on, of which the first lies at `place`: products, then packets, eight tokens
  // by four rows a warp.
  const auto make_rows = [&](int place, int first, int count, std::uint64_t* barrier) {
    wait_for_weights(barrier, 0);
    unsigned char* const rows = shared.memory + place * kPitch;
    multiply_rows<Latent, kPitch>(
        rows + first_k, count, shared.weight_scale[first / 16] + warp_idx * kSteps, S::kScales, x);
    const int token = lane_idx % kTileTokens, of_quad = lane_idx / kTileTokens;
#pragma unroll 1
    for (int quad = warp_idx; quad < count / 4; quad += kProductWarps) {
      const float total =
          sum_of_warps<kSteps, kProductWarps>(rows + (4 * quad + of_quad) * kPitch, token);
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = quick_bf16(__shfl_sync(plat::kAllLanes, total, token + i * kTileTokens));
      }
      const int row = first + 4 * quad;
      if (token >= num_rows || of_quad > 0) continue;
      if (rotates && row >= kRows) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const float2 turn = shared.turn[token][(row - kRows + i) / 2];
          const float turned = v[i] * turn.x - v[i + 1] * turn.y;
          v[i + 1] = v[i] * turn.y + v[i + 1] * turn.x;
          v[i] = turned;
        }
      }
      send_packet(static_cast<plat::TaggedWords*>(params.packets.q) +
                      (token * params.num_heads * kHeadDim + block_idx * S::kAllRows + row) / 4,
                  hop.tag, sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]), 0);
    }
  };
  make_rows(0, 0, S::kFirst, &shared.first);
  sm90::fence_async_shared();  // the sums before the copies that come over them
  plat::block_sync();
  ask(0, S::kHeld, kLast, &shared.late);
  stamps.mark(StampStage::compute);
  make_rows(S::kFirst, S::kFirst, kMiddle, &shared.held);
  stamps.mark(StampStage::sum);
  make_rows(0, S::kHeld, kLast, &shared.late);
  stamps.mark(StampStage::store);
}

template <class M, int kTiles>
__global__ void __launch_bounds__(kProductThreads, kTiles == 1 ? 2 : 1)
    front_q_fp8_sm90(const __grid_constant__ FrontParams params) {
  using Linear = QProduct<M, kTiles>;
  constexpr int kQLora = M::kQLora, kGroup = M::kScaleBlock;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QShared<M, kTiles>*>(memory);
  sm90::launch_dependents();
  const int tile = static_cast<int>(blockIdx.x), num_rows = params.num_rows;
  if constexpr (kTiles == 1) {
    if (tile >= params.num_heads * kTilesPerHead) {
      // One block has all rows' keys; others fill a cluster.
      if (tile > params.num_heads * kTilesPerHead) return;
      store_key<true>(params, plat::thread_idx() / plat::kWarpLanes);
      return;
    }
  }
  constexpr int kScaleStride = kQLora / kGroup;
  const ProductWeights weights{params.wq_b.codes + static_cast<std::int64_t>(tile) * kRows * kQLora,
                               params.wq_b.scales + tile * kRows / kGroup * kScaleStride, kQLora,
                               kScaleStride};
  if constexpr (kNormsInCluster<M, kTiles>) {
    if (plat::thread_idx() == 0) expect_squares(shared.head, num_rows);
  }
  if constexpr (kWide<kTiles>) {
    Linear::load(shared.product, weights, num_rows);
  } else {
    Linear::template load<kGroup>(shared.product, weights, 0, num_rows);
  }
  if constexpr (kNormsInCluster<M, kTiles>) sm90::cluster_arrive_relaxed();
  // The head's last tile is the one that rotates, here or, where it is normed before, in attention.
  const bool rotates =
      tile % kTilesPerHead == kTilesPerHead - 1 && M::kNormsHeads == kNormsInCluster<M, kTiles>;
  static_assert(kRows == shape::kRopeDim);
  if constexpr (kTiles == 1) {
    if (rotates) {
      for (int i = plat::thread_idx(); i < num_rows * kRopePairs; i += kProductThreads) {
        const int token = i / kRopePairs, pair = i % kRopePairs;
        shared.turn[token][pair] = turn_of(params.rope, pair, params.positions[token]);
      }
    }
    q_of_few<M>(static_cast<FewShared<M>&>(shared), params, tile, rotates);
  } else {
    Stamps stamps(stamp_sink(params.hop), params.hop.id + static_cast<std::uint32_t>(HopKernel::q));
    stamps.mark(StampStage::ask);
    wait_at(params.latent_done);
    stamps.mark(StampStage::wait);
    if (rotates) {
      // With the tokens, which all threads wait for.
      static_assert(sizeof shared.turn[0] % 16 == 0);
      constexpr int kPieces = sizeof shared.turn[0] / 16;
      for (int i = plat::thread_idx(); i < num_rows * kPieces; i += kProductThreads) {
        copy_16(&shared.turn[i / kPieces][i % kPieces * 2], params.turns + 4 * i);
      }
    }
    const int padded = padded_rows(num_rows);
    if constexpr (kWide<kTiles>) {
      const typename Linear::Tokens latent{params.latent_codes, kQLora, params.latent_scale, padded,
                                           num_rows};
      Linear::load_tokens(shared.product, latent);
      Linear::run(shared.product, latent, stamps);
    } else {
      const CodeActivations<kGroup, false> latent{params.latent_codes, params.latent_scale, kQLora,
                                                  padded};
      Linear::run(shared.product, latent, num_rows, stamps);
    }
    const std::int64_t width = static_cast<std::int64_t>(params.num_heads) * kHeadDim;
    static_assert(kRows / 2 == plat::kWarpLanes, "a warp has a token");
    // A lane has two of the block's rows, a warp every eighth token, all of them together.
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    float a[kTiles], b[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int token = min(warp_idx + i * kProductWarps, num_rows - 1);
      a[i] = quick_bf16(Linear::sum(shared.product, token, 2 * lane_idx));
      b[i] = quick_bf16(Linear::sum(shared.product, token, 2 * lane_idx + 1));
    }
    if constexpr (kNormsInCluster<M, kTiles>) {
      float squares[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) squares[i] = plat::fma(a[i], a[i], b[i] * b[i]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) squares[i] = plat::warp_sum(squares[i]);
      sm90::cluster_wait();  // the head's other blocks run
      if (lane_idx < kTilesPerHead) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int token = warp_idx + i * kProductWarps;
          if (token < num_rows) send_squares(shared.head, token, lane_idx, squares[i]);
        }
      }
      wait_for_cluster(&shared.head.barrier, 0);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int token = warp_idx + i * kProductWarps;
      if (token >= num_rows) break;
      if constexpr (kNormsInCluster<M, kTiles>) {
        const float norm = head_norm(shared.head, token, params.norm_eps);
        a[i] = quick_bf16(a[i] * norm);
        b[i] = quick_bf16(b[i] * norm);
      }
      if (rotates) {
        const float2 turn = shared.turn[token][lane_idx];
        const float turned = a[i] * turn.x - b[i] * turn.y;
        b[i] = a[i] * turn.y + b[i] * turn.x;
        a[i] = turned;
      }
      *reinterpret_cast<std::uint32_t*>(params.q + token * width + tile * kRows + 2 * lane_idx) =
          sm90::to_bf16_pair(a[i], b[i]);
    }
    stamps.mark(StampStage::store);
    open_gate(params.done);
  }
}

// More than eight rows: a block a row makes the latent's codes and the cosines and sines of the
// row's position for all blocks of the product; others store the keys, which the product does not
// wait for.
template <class M>
__global__ void __launch_bounds__(kLatentThreads)
    front_latent_any(const __grid_constant__ FrontParams params) {
  constexpr int kQLora = M::kQLora, kGroup = M::kScaleBlock;
  constexpr int kTurnWarp = kLatentThreads / plat::kWarpLanes - 1;
  static_assert(kPieces<M> <= kTurnWarp * plat::kWarpLanes && kPieces<M> % plat::kWarpLanes == 0);
  static_assert(kKeysABlock == kTurnWarp + 1);
  sm90::launch_dependents();
  const int token = static_cast<int>(blockIdx.x), k = plat::thread_idx() * kPiece;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  if (token >= params.num_rows) {
    store_key<false>(params, (token - params.num_rows) * kKeysABlock + warp_idx);
    open_gate(params.keys_done);
    return;
  }
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::latent));
  if (warp_idx == kTurnWarp) {
    static_assert(kRopePairs == plat::kWarpLanes);
    reinterpret_cast<float2*>(params.turns)[token * kRopePairs + lane_idx] =
        turn_of(params.rope, lane_idx, params.positions[token]);
    wait_at(params.qkv_done);
  } else if (k >= kQLora) {
    wait_at(params.qkv_done);
  } else {
    LatentPiece piece = {};
    piece.gain = __ldg(reinterpret_cast<const uint4*>(params.q_norm + k));
    stamps.mark(StampStage::ask);
    wait_at(params.qkv_done);
    stamps.mark(StampStage::wait);
    piece.values = __ldcg(reinterpret_cast<const uint4*>(params.qa + token * kQLora + k));
    const int padded = padded_rows(params.num_rows);
    constexpr int kSums = kQLora / kSquared, kTurns = (kSums + 31) / plat::kWarpLanes;
    float parts[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int part = lane_idx + i * plat::kWarpLanes;
      parts[i] = part < kSums ? __ldcg(params.qa_squares + part * padded + token) : 0.0f;
    }
    float squares = 0.0f;
#pragma unroll
    for (const float part : parts) squares += part;
    squares = plat::warp_sum(squares);
    const float norm = quick_rsqrt(squares / static_cast<float>(kQLora) + params.norm_eps);
    stamps.mark(StampStage::read);
    quantize_latent<M>(params.latent_codes + token * kQLora + k,
                       params.latent_scale + k / kGroup * padded + token, norm, piece, k);
    stamps.mark(StampStage::store);
  }
  open_gate(params.latent_done);
}

}  // namespace

cudaError_t launch_front_qkv(const FrontParams& params, bool programmatic, cudaStream_t stream) {
  return with_model(params.model, [&]<class M>() {
    return with_tiles(params.num_rows, [&]<int kTiles>() {
      return launch_kernel(front_qkv_fp8_sm90<M, kTiles>, dim3(Sizes<M>::kQkvTiles * kQkvBlocks),
                           kProductThreads, sizeof(typename QkvProduct<M, kTiles>::Shared),
                           kQkvBlocks, programmatic, stream, params);
    });
  });
}

cudaError_t launch_front_latent(const FrontParams& params, bool programmatic, cudaStream_t stream) {
  if (params.num_rows <= kHopRows) return cudaSuccess;
  return with_model(params.model, [&]<class M>() {
    return launch_kernel(front_latent_any<M>,
                         dim3(params.num_rows + front_key_blocks(params.num_rows)), kLatentThreads,
                         0, 1, programmatic, stream, params);
  });
}

cudaError_t launch_front_q(const FrontParams& params, bool programmatic, cudaStream_t stream) {
  if (params.num_heads < 1 || params.num_heads > 64) return cudaErrorInvalidValue;
  return with_model(params.model, [&]<class M>() {
    return with_tiles(params.num_rows, [&]<int kTiles>() {
      constexpr int kCluster = kNormsInCluster<M, kTiles> ? kTilesPerHead : 1;
      const int products = params.num_heads * kTilesPerHead;
      if constexpr (kTiles == 1) {
        // The rows' keys by one block more.
        if constexpr (!M::kNormsHeads) {
          // More blocks than multiprocessors: a second wave would begin when the first ends.
          constexpr int kMostAtOnce = 132;
          static_assert(sizeof(PairShared<M>) <= 123 * 1024);
          if (products >= kMostAtOnce && products % 2 == 0) {
            return launch_kernel(front_q_pair_fp8_sm90<M>, dim3(products / 2 + 1), kProductThreads,
                                 sizeof(PairShared<M>), 1, programmatic, stream, params);
          }
        }
        // No two blocks on a multiprocessor, so that attention has room on all of them.
        constexpr int kOneAMultiprocessor = 115 * 1024;
        static_assert(sizeof(FewShared<M>) <= kOneAMultiprocessor);
        return launch_kernel(front_q_fp8_sm90<M, 1>, dim3(products + kCluster), kProductThreads,
                             kOneAMultiprocessor, kCluster, programmatic, stream, params);
      } else {
        return launch_kernel(front_q_fp8_sm90<M, kTiles>, dim3(products), kProductThreads,
                             sizeof(QShared<M, kTiles>), kCluster, programmatic, stream, params);
      }
    });
  });
}

}  // namespace lowlat::nvidia::fused
