// oproj_a_fp8_sm90 and oproj_b_fp8_sm90: the output projection of attention, for few rows.
//
// Math         u[g] = bf( o[g]·wo_a[g]ᵀ )     o not quantised: bf16 values, weights e4m3 exactly
//                                             (V4: o quantised by attention)
//              partial = quant(u)·wo_bᵀ       fp32, of this rank's columns; sent to every rank
// Shapes       V4.1-Flash: o [T,groups·4096] · wo_a [groups·1024,4096] · wo_b [5120,groups·1024]
//              V4-Flash: wo_b [4096,groups·1024], groups of 128 instead of 32
//              Up to eight rows of V4.1-Flash with two groups (TP4): oproj_few.cu
// Rounding     u to bf16, codes nearest-even; partial sums as exchange.cuh sends them
// Bytes        TP4: 8.40 MB, then 10.5 MB. T = 12: activations 0.2 MB, packets 0.98 MB
// Floor        1.8 us and 2.3 us at 4.65 TB/s
// Launch       wo_a: 64 rows a block, K in a cluster of four, of eight for more than sixteen rows
//              (V4: 128, so that a group of u is in one cluster, of eight; more than sixteen rows:
//              front_tall.cuh); wo_b: 80 (V4: 64) rows, K in a cluster of two a group pair; 32 rows
//              and twice the K where rows are few; more than 24 rows of V4: front_tall.cuh. Weights
//              are on their way before the input is waited for. Without gates wo_b lets the
//              receiving kernel start after its own wait, so that one may poll at once
// Ordering     gates (exchange_gate.cuh) or kernels' ends; inside a cluster front_product.cuh;
//              packets exchange.cuh
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp. Bound: rel_l2 ≤ 4e-3 each
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_tall.cuh"
#include "fused/front_wide.cuh"
#include "fused/oproj.hpp"
#include "fused/oproj_send.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kLora = 1024, kGroupInput = 4096;

// Of a model M. A group of outputs that share a scale is made in one cluster: by one block where
// rows are few; otherwise by several, who tell each other their largest values.
template <class M, int kTiles>
struct ShapeA {
  static constexpr bool kWide = false;
  static_assert(M::kOLora == kLora && M::kGroupInput == kGroupInput);
  static constexpr int kGroup = M::kScaleBlock;
  static constexpr int kRows = kGroup > 64 ? kGroup : 64, kBlocks = kRows / 16;
  static constexpr int kK = kGroupInput / kBlocks;
  static constexpr bool kShares = kGroup > 32 && kTiles > 1;
  static constexpr int kOwned = kShares ? kRows / kBlocks : kGroup;
  using Linear = Product<kRows, kK, kTiles, kBlocks, kOwned, 2>;
};
// More than sixteen rows of V4.1: half the K a block, and room for half of the activations of its
// most rows, so that three have room on a multiprocessor and no cluster has to wait for one of the
// first wave to end: parts of the chip that have fewer than sixteen multiprocessors hold only three
// of two each.
template <class M, int kTiles>
  requires(M::kScaleBlock == 32 && kTiles > 2)
struct ShapeA<M, kTiles> {
  static constexpr bool kWide = true, kShares = true;
  static constexpr int kGroup = M::kScaleBlock, kRows = 64, kBlocks = 8;
  static constexpr int kK = kGroupInput / kBlocks, kOwned = kRows / kBlocks;
  using Linear = WideProduct<kGroup, kK, kTiles, kBlocks, kOwned, true, kTiles == 6 ? 2 : 4, 40>;
};
// More than sixteen rows of V4, whose clusters have a group of 128 outputs: two blocks have room on
// a multiprocessor.
template <class M, int kTiles>
  requires(M::kScaleBlock == 128 && kTiles > 2)
struct ShapeA<M, kTiles> {
  static constexpr bool kWide = true, kShares = true;
  static constexpr int kGroup = M::kScaleBlock, kRows = kGroup, kBlocks = 8;
  static constexpr int kK = kGroupInput / kBlocks, kOwned = kRows / kBlocks;
  using Linear = TallProduct<kGroup, kRows, kK, kTiles, kBlocks, kTiles == 6 ? 3 : 4>;
};
// Up to eight tokens: fewer rows of twice the K a block, half as many blocks a cluster.
template <class M, int kTiles, int kGroups>
struct ShapeB {
  static constexpr bool kTall = false;
  static constexpr int kRows = kTiles == 1 ? 32 : M::kHidden == 5120 ? 80 : 64;
  static constexpr int kK = kTiles == 1 ? 2 * kLora : kLora;
  static constexpr int kBlocks = kGroups * kLora / kK;
  static_assert(M::kHidden % kRows == 0);
  // Of six groups of tokens twelve warps, each with two of these: so few registers that blocks of
  // the exchange have room beside.
  static constexpr int kParts = kTiles == 6 ? 3 : 1, kWarps = kTiles == 6 ? 12 : kProductWarps;
  using Linear = Product<kRows, kK, kTiles, kBlocks, kRows / kBlocks, 1, kParts, kWarps>;
};
// Most rows of V4: registers and memory for a block of the exchange (exchange_mix_wide.cu) beside
// one of these, so that it is there before the sums are. Clusters of two: of four that have a block
// a multiprocessor one does not fit.
template <class M, int kTiles, int kGroups>
  requires(M::kScaleBlock == 128 && kTiles > 3)
struct ShapeB<M, kTiles, kGroups> {
  static constexpr bool kTall = true;
  static constexpr int kRows = 64, kK = kLora, kBlocks = kGroups;
  static_assert(M::kHidden % kRows == 0);
  using Linear = TallProduct<M::kScaleBlock, kRows, kK, kTiles, kBlocks, 4, 1>;
};

template <class M, int kTiles>
struct SharedA {
  using Shape = ShapeA<M, kTiles>;
  typename Shape::Linear::Shared product;
  // Blocks that share a group. Largest of each one's outputs, by block and token; where blocks have
  // no room for it (V4), it takes the place of the activations' scales: who sends has all sums of
  // this block, whose products are over then.
  static constexpr int kSharing = Shape::kShares ? Shape::kGroup / Shape::kOwned : 1;
  float own_amax[Shape::kWide ? kSharing : 1][Shape::kWide ? kTiles * kTileTokens : 1];
  std::uint64_t amax_barrier;

  LOWLAT_DEVICE auto& amax() {
    if constexpr (Shape::kWide || !Shape::kShares) {
      return own_amax;
    } else {
      static_assert(kSharing <= Shape::kK / kStep);
      return product.token_scale;
    }
  }
};

template <class M, int kTiles>
constexpr int min_blocks() {
  if (ShapeA<M, kTiles>::kWide) return M::kScaleBlock == 32 ? 3 : 2;
  return kTiles == 1 ? 3 : 2;
}

template <class M, int kTiles>
__global__ void __launch_bounds__(kProductThreads, (min_blocks<M, kTiles>()))
    oproj_a_fp8_sm90(const __grid_constant__ OprojParams params) {
  using Shape = ShapeA<M, kTiles>;
  using Linear = Shape::Linear;
  constexpr int kGroup = Shape::kGroup, kRows = Shape::kRows, kBlocks = Shape::kBlocks;
  constexpr int kK = Shape::kK, kOwned = Shape::kOwned;
  [[maybe_unused]] constexpr int kSharing = SharedA<M, kTiles>::kSharing;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& whole = *reinterpret_cast<SharedA<M, kTiles>*>(memory);
  auto& shared = whole.product;
  sm90::launch_dependents();
  const int tile = static_cast<int>(blockIdx.x) / kBlocks;
  const int rank = static_cast<int>(blockIdx.x) % kBlocks;
  constexpr int kScaleStride = kGroupInput / kGroup;
  const ProductWeights weights{
      params.wo_a.codes + static_cast<std::int64_t>(tile) * kRows * kGroupInput + rank * kK,
      params.wo_a.scales + tile * (kRows / kGroup) * kScaleStride + rank * kK / kGroup, kGroupInput,
      kScaleStride};
  const int padded = padded_rows(params.num_rows);
  const int first_k = tile * kRows / kLora * kGroupInput + rank * kK;  // in the row of o
  if constexpr (kTiles == 1) {
    static_assert(kOwned == kGroup);
    const HopTag hop = hop_tag(params.hop, params.hop.index, HopKernel::oproj_a);
    Stamps stamps(params.hop.port->stamps, hop.kernel);
    const HopActivations<2> o{static_cast<const plat::TaggedWords*>(params.packets.o) + first_k / 4,
                              params.num_groups * (kGroupInput / 4), hop};
    const HopSigns signs = {static_cast<const plat::TaggedWords*>(params.packets.q) + tile, hop.tag,
                            o.data, kK / 4 / plat::kWarpLanes};
    Linear::template load<kGroup>(shared, weights, 0, params.num_rows);
    stamps.mark(StampStage::ask);
    wait_for_signs(hop, signs);
    stamps.mark(StampStage::wait);
    Linear::run(shared, o, params.num_rows, stamps);
    if (!Linear::owns()) return;
    // A lane has four outputs of a token's group; two lanes a packet.
    constexpr int kLanes = kGroup / 4, kTokensAWarp = plat::kWarpLanes / kLanes;
    const int token = plat::thread_idx() / kLanes, quad = plat::thread_idx() % kLanes;
    if (token / kTokensAWarp * kTokensAWarp >= params.num_rows) return;  // whole warps stay
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = Linear::sum(shared, min(token, params.num_rows - 1), 4 * quad + i);
    }
    send_outputs<kLanes>(v, hop.tag, quad % 2 == 0 && token < params.num_rows, [&] {
      return static_cast<plat::TaggedWords*>(params.packets.u) +
             token * params.num_groups * (kLora / 8) +
             (tile * kRows + rank * kOwned + 4 * quad) / 8;
    });
    stamps.mark(StampStage::store);
    return;
  }
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::oproj_a));
  if constexpr (Shape::kShares) {
    if (plat::thread_idx() == 0) {
      sm90::barrier_init(&whole.amax_barrier, 1);
      sm90::barrier_arrive_expect(&whole.amax_barrier, kSharing * params.num_rows * 4);
    }
  }
  const float* o_scale = params.o_scale + first_k / kGroup * padded;
  const int o_stride = 2 * params.num_groups * kGroupInput;  // bytes
  if constexpr (Shape::kWide) {
    Linear::load(shared, weights, params.num_rows);
    stamps.mark(StampStage::ask);
    wait_at(params.before);
    stamps.mark(StampStage::wait);
    const typename Linear::Tokens o{reinterpret_cast<const std::uint8_t*>(params.o + first_k),
                                    o_stride, o_scale, padded, params.num_rows};
    Linear::load_tokens(shared, o);
    Linear::run(shared, o, stamps);
  } else {
    Linear::template load<kGroup>(shared, weights, 0, params.num_rows);
    stamps.mark(StampStage::ask);
    const HalfActivations<kGroup, false> o{params.o + first_k, o_scale, o_stride, padded};
    wait_at(params.before);
    stamps.mark(StampStage::wait);
    Linear::run(shared, o, params.num_rows, stamps);
    if (!Linear::owns()) return;
  }
  // A lane a value of a token's: 32 share a scale, or those of a group have their largest told.
  static_assert(kTiles == 1 || plat::kWarpLanes % kOwned == 0);
  constexpr int kTokensATurn = kProductThreads / kOwned;
  constexpr int kTurns = (kTiles * kTileTokens + kTokensATurn - 1) / kTokensATurn;
  const int row = plat::thread_idx() % kOwned, first_row = tile * kRows + rank * kOwned;
  const int first_token = plat::thread_idx() / kOwned;
  float u[kTurns], amax[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = min(turn * kTokensATurn + first_token, params.num_rows - 1);
    u[turn] = quick_bf16(Linear::sum(shared, token, row));
    amax[turn] = plat::abs(u[turn]);
  }
#pragma unroll
  for (int mask = 1; mask < kOwned && mask < plat::kWarpLanes; mask *= 2) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      amax[turn] = plat::max(__shfl_xor_sync(plat::kAllLanes, amax[turn], mask), amax[turn]);
    }
  }
  if constexpr (Shape::kShares) {
    static_assert(kSharing <= kOwned);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = turn * kTokensATurn + first_token;
      if (token < params.num_rows && row < kSharing) {
        const int peer = rank / kSharing * kSharing + row;
        sm90::send_to_peer(sm90::peer_address(&whole.amax()[rank % kSharing][token], peer),
                           amax[turn], sm90::peer_address(&whole.amax_barrier, peer));
      }
    }
    wait_for_cluster(&whole.amax_barrier, 0);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = turn * kTokensATurn + first_token;
    if (token >= params.num_rows) break;
    if constexpr (Shape::kShares) {
#pragma unroll
      for (int i = 0; i < kSharing; ++i) amax[turn] = plat::max(whole.amax()[i][token], amax[turn]);
    }
    const PowerScale group = power_scale(amax[turn]);
    params.u_codes[static_cast<std::int64_t>(token) * params.num_groups * kLora + first_row + row] =
        static_cast<std::uint8_t>(sm90::to_e4m3_pair(u[turn] * group.inverse, 0.0f));
    if ((first_row + row) % kGroup == 0) {
      params.u_scale[first_row / kGroup * padded + token] = group.scale;
    }
  }
  stamps.mark(StampStage::store);
  open_gate(params.u_done);
}

template <class M, int kTiles, int kGroups>
__global__ void __launch_bounds__(ShapeB<M, kTiles, kGroups>::Linear::kThreads,
                                  kTiles == 1                         ? 3
                                  : ShapeB<M, kTiles, kGroups>::kTall ? 2
                                                                      : 1)
    oproj_b_fp8_sm90(const __grid_constant__ OprojParams params) {
  using Shape = ShapeB<M, kTiles, kGroups>;
  using Linear = Shape::Linear;
  constexpr int kHidden = M::kHidden, kGroup = M::kScaleBlock;
  constexpr int kBlocks = Shape::kBlocks, kRows = Shape::kRows, kKOfBlock = Shape::kK;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Linear::Shared*>(memory);
  const int tile = static_cast<int>(blockIdx.x) / kBlocks;
  const int rank = static_cast<int>(blockIdx.x) % kBlocks;
  const int k = kGroups * kLora, scale_stride = k / kGroup;
  const int first_row = tile * kRows;
  const ProductWeights weights{
      params.wo_b.codes + static_cast<std::int64_t>(first_row) * k + rank * kKOfBlock,
      params.wo_b.scales + first_row / kGroup * scale_stride + rank * kKOfBlock / kGroup, k,
      scale_stride};
  const bool early = kTiles == 1 || params.u_done.word != nullptr;
  if (early) sm90::launch_dependents();
  const int padded = padded_rows(params.num_rows);
  // Before the waits: it is read from memory.
  const std::uint64_t epoch =
      params.published ? exchange_epoch(params.port, params.exchange_index) : 0;
  HopTag hop = {};
  if constexpr (kTiles == 1) hop = hop_tag(params.hop, params.hop.index, HopKernel::oproj_b);
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::oproj_b));
  const HopActivations<1> few{
      static_cast<const plat::TaggedWords*>(params.packets.u) + rank * kKOfBlock / 8, k / 8, hop};
  if constexpr (Shape::kTall) {
    Linear::load(shared, weights, params.num_rows);
  } else {
    Linear::template load<kGroup>(shared, weights, first_row % kGroup, params.num_rows);
  }
  stamps.mark(StampStage::ask);
  if constexpr (kTiles == 1) {
    wait_for_signs(hop, {static_cast<const plat::TaggedWords*>(params.packets.o) + tile, hop.tag,
                         few.data, kKOfBlock / 8 / plat::kWarpLanes});
    stamps.mark(StampStage::wait);
    Linear::run(shared, few, params.num_rows, stamps);
  } else {
    wait_at(params.u_done);
    stamps.mark(StampStage::wait);
    if (!early) sm90::launch_dependents();
    const std::uint8_t* const codes = params.u_codes + rank * kKOfBlock;
    const float* const scale = params.u_scale + rank * kKOfBlock / kGroup * padded;
    if constexpr (Shape::kTall) {
      const typename Linear::Tokens u{codes, k, scale, padded, params.num_rows};
      Linear::load_tokens(shared, u);
      Linear::run(shared, u, stamps);
    } else {
      const CodeActivations<kGroup, false> u{codes, scale, k, padded};
      Linear::run(shared, u, params.num_rows, stamps);
    }
  }
  constexpr int kQuads = Linear::kOwned / 4;
  const int first_owned = first_row + rank * Linear::kOwned;
#pragma unroll 1
  for (int i = plat::thread_idx(); i < kQuads * params.num_rows; i += Linear::kThreads) {
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
  stamps.mark(StampStage::store);
}

}  // namespace

cudaError_t launch_oproj_a(const OprojParams& params, bool programmatic, cudaStream_t stream) {
  if (params.num_groups < 1 || params.num_groups > 8 || oproj_is_few(params)) {
    return cudaErrorInvalidValue;
  }
  return with_model(params.model, [&]<class M>() {
    return with_tiles(params.num_rows, [&]<int kTiles>() {
      using Shape = ShapeA<M, kTiles>;
      constexpr int kBlocks = min_blocks<M, kTiles>();
      static_assert((Shape::kWide ? kBlocks : 1) * (sizeof(SharedA<M, kTiles>) + 1024) <=
                    228 * 1024);
      return launch_kernel(oproj_a_fp8_sm90<M, kTiles>,
                           dim3(params.num_groups * kLora / Shape::kRows * Shape::kBlocks),
                           kProductThreads, sizeof(SharedA<M, kTiles>), Shape::kBlocks,
                           programmatic, stream, params);
    });
  });
}

cudaError_t launch_oproj_b(const OprojParams& params, bool programmatic, cudaStream_t stream) {
  const auto launch = [&]<class M, int kTiles, int kGroups>() {
    using Shape = ShapeB<M, kTiles, kGroups>;
    static_assert((Shape::kTall ? 2 : 1) * (sizeof(typename Shape::Linear::Shared) + 1024) <=
                  228 * 1024);
    // So that the exchange has room on all of them, no two of the tall ones of four ranks are on a
    // multiprocessor (of two ranks there are too many), and no three of V4's of few rows.
    constexpr int kOwnBytes = sizeof(typename Shape::Linear::Shared);
    constexpr bool kFewOfV4 = kTiles == 1 && M::kScaleBlock == 128;
    constexpr int kBytes = kGroups != 2   ? kOwnBytes
                           : Shape::kTall ? 114 * 1024
                           : kFewOfV4     ? 78 * 1024
                                          : kOwnBytes;
    static_assert(kOwnBytes <= kBytes);
    return launch_kernel(oproj_b_fp8_sm90<M, kTiles, kGroups>,
                         dim3(M::kHidden / Shape::kRows * Shape::kBlocks), Shape::Linear::kThreads,
                         kBytes, Shape::kBlocks, programmatic, stream, params);
  };
  return with_model(params.model, [&]<class M>() {
    return with_tiles(params.num_rows, [&]<int kTiles>() {
      switch (params.num_groups) {
        case 2:
          // V4.1's few rows are oproj_few.cu's.
          if constexpr (M::kScaleBlock != 32 || kTiles > 1) {
            return launch.template operator()<M, kTiles, 2>();
          }
          return cudaErrorInvalidValue;
        case 4: return launch.template operator()<M, kTiles, 4>();
        default: return cudaErrorInvalidValue;
      }
    });
  });
}

}  // namespace lowlat::nvidia::fused
