// fused/front_product.cuh: products of few rows whose weights wait in shared memory.
//
// A block has kRows weight rows and kK of their K: it asks for all of them by bulk copies before
// its input is there, so only the activations are read after the wait. Weights are the M side of
// mma.m16n8k16 (16 rows), up to eight tokens are N, kTiles such groups of tokens use one expanded
// weight fragment. Eight warps split K, each in steps of 32, and meet in shared memory; kBlocks
// blocks of a cluster split the whole K and meet in the block that owns the row. All sums have a
// fixed order: step, warp, block.
//
// e4m3 codes are f16 values and enter the products unscaled; the scale of a weight block and that
// of a token's group multiply the fp32 sums of 32 products each: exact, as both are powers of two.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>
#include <type_traits>

#include "fused/exchange_hop.cuh"
#include "fused/front_weights.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/format.hpp"

namespace lowlat::nvidia::fused {

inline constexpr int kProductThreads = 256;
inline constexpr int kProductWarps = kProductThreads / plat::kWarpLanes;
inline constexpr int kStep = 32;  // K of one step: two products, one scale of each side
inline constexpr int kTileTokens = 8;

// Activations as e4m3 codes [token, stride] with scales [K / group, padded tokens], in global or
// shared memory. `data` and `scale` point at the block's first K; stride in bytes.
template <int kGroup_, bool kShared_>
struct CodeActivations {
  static constexpr int kGroup = kGroup_, kBytes = 1;
  static constexpr bool kShared = kShared_;
  using Raw = uint2;
  using InShared = CodeActivations<kGroup, true>;
  const void* data;
  const float* scale;
  int stride, padded;

  LOWLAT_DEVICE Raw fetch(int token, int k) const {
    const auto* src = reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(data) +
                                                     static_cast<std::int64_t>(token) * stride + k);
    if constexpr (kShared) return *src;
    return __ldcg(src);
  }
  LOWLAT_DEVICE static Raw none() { return make_uint2(0u, 0u); }
  LOWLAT_DEVICE static void expand(std::uint32_t (&out)[4], Raw raw) {
    std::uint32_t pair[2];
    sm90::e4m3_to_f16(pair, raw.x);
    out[0] = pair[0], out[1] = pair[1];
    sm90::e4m3_to_f16(pair, raw.y);
    out[2] = pair[0], out[3] = pair[1];
  }
};

// Activations as f16 values under such scales.
template <int kGroup_, bool kShared_>
struct HalfActivations {
  static constexpr int kGroup = kGroup_, kBytes = 2;
  static constexpr bool kShared = kShared_;
  using Raw = uint4;
  using InShared = HalfActivations<kGroup, true>;
  const void* data;
  const float* scale;
  int stride, padded;

  LOWLAT_DEVICE Raw fetch(int token, int k) const {
    const auto* src = reinterpret_cast<const uint4*>(
        static_cast<const std::uint8_t*>(data) + static_cast<std::int64_t>(token) * stride + 2 * k);
    if constexpr (kShared) return *src;
    return __ldcg(src);
  }
  LOWLAT_DEVICE static Raw none() { return make_uint4(0u, 0u, 0u, 0u); }
  LOWLAT_DEVICE static void expand(std::uint32_t (&out)[4], Raw raw) {
    out[0] = raw.x, out[1] = raw.y, out[2] = raw.z, out[3] = raw.w;
  }
};

// Activations on their way in packets (up to eight tokens): eight e4m3 codes and their group's
// scale each (kPacketsAPiece 1), or four f16 values and theirs (2). `data` is the packet of the
// block's first K; stride in packets.
template <int kPacketsAPiece>
struct HopActivations {
  using Raw = std::conditional_t<kPacketsAPiece == 1, uint2, uint4>;
  static_assert(kPacketsAPiece == 1 || kPacketsAPiece == 2);
  static constexpr bool kSplit = kPacketsAPiece == 2;
  const plat::TaggedWords* data;
  int stride;
  HopTag hop;

  // A lane's pieces of 8 of its token, in steps of 32 from first_k on, and the scales of the two
  // tokens whose sums the lane has. Whole warps call, after wait_for_signs.
  template <int kSteps>
  LOWLAT_DEVICE void take(Raw (&raw)[kSteps], float2 (&scale)[kSteps], int first_k,
                          int num_rows) const {
    constexpr int kPackets = kSteps * kPacketsAPiece;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes, g = lane_idx / 4, t = lane_idx % 4;
    // Of two packets a piece the second lies four lanes on: a warp reads whole lines, and a lane
    // has values 4 t and 16 + 4 t of a step instead of 8 t (kSplit).
    const plat::TaggedWords* from = data + g * stride + first_k / 8 * kPacketsAPiece + t;
    HopWords words[kPackets];
    take_packets(words, hop, g < num_rows ? (1u << kPackets) - 1u : 0u,
                 [&](int i) { return from + 4 * i; });
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const HopWords& first = words[step * kPacketsAPiece];
      if constexpr (kPacketsAPiece == 1) {
        raw[step] = make_uint2(low_word(first.pair), high_word(first.pair));
      } else {
        const HopWords& second = words[step * kPacketsAPiece + 1];
        raw[step] = make_uint4(low_word(first.pair), high_word(first.pair), low_word(second.pair),
                               high_word(second.pair));
      }
      // Lane 4 g of a token has its scale.
      const float own = plat::bits_float(first.third);
      scale[step] = make_float2(__shfl_sync(plat::kAllLanes, own, 8 * t),
                                __shfl_sync(plat::kAllLanes, own, 8 * t + 4));
    }
  }
  LOWLAT_DEVICE static void expand(std::uint32_t (&out)[4], Raw raw) {
    if constexpr (kPacketsAPiece == 1) {
      CodeActivations<32, true>::expand(out, raw);
    } else {
      HalfActivations<32, true>::expand(out, raw);
    }
  }
};

// Scales of two tokens, for the step of 32 that begins at k.
template <class Activations>
LOWLAT_DEVICE float2 scales_of(const Activations& activations, int token, int k) {
  const auto* src = reinterpret_cast<const float2*>(
      activations.scale + k / Activations::kGroup * activations.padded + token);
  if constexpr (Activations::kShared) return *src;
  return __ldcg(src);
}

// Weight rows e4m3 [rows, stride] with ue8m0 scales of kGroup x kGroup blocks [rows / group,
// scale_stride], from the block's first row and K on.
struct ProductWeights {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t stride;
  int scale_stride;
};

// Activations in global memory: values [token, stride] (in bytes), e4m3 codes or f16 as the product
// says, and scales [K / group, padded] from the block's first K on.
struct StoredTokens {
  const std::uint8_t* values;
  int stride;
  const float* scale;
  int padded, num_rows;
};

// A token's sum of an owned row, when what the cluster sends is there.
template <int kBlocks, int kTokens, int kOwned>
LOWLAT_DEVICE float owned_sum(const float (&owned)[kBlocks][kTokens][kOwned], int token, int row) {
  float total = owned[0][token][row];
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) total += owned[i][token][row];
  return total;
}

// Adds sums [part][token][kSumPitch rows] of a block's kParts warps or groups of warps, in their
// order, and sends them to the blocks that own the rows, four rows of a token at once, as tokens
// `first` and on of their owned sums [block][token][kOwned]; the barrier counts them. All threads
// of the cluster call, whose blocks all run.
template <int kRows, int kTokens, int kBlocks, int kOwned, int kParts, int kSumPitch,
          int kThreads = kProductThreads, int kAll>
LOWLAT_DEVICE void send_sums(const float* sums, float (&owned)[kBlocks][kAll][kOwned],
                             std::uint64_t* barrier, int num_rows, int first) {
  static_assert(kOwned % 4 == 0 && kSumPitch % 4 == 0);
  const int block_idx = kBlocks > 1 ? sm90::cluster_rank() : 0;
  constexpr int kQuads = kRows / 4;
#pragma unroll 1
  for (int i = plat::thread_idx(); i < kQuads * num_rows; i += kThreads) {
    const int token = i / kQuads, row = i % kQuads * 4;
    const float* from = sums + token * kSumPitch + row;
    float4 total = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      const float4 more = *reinterpret_cast<const float4*>(from + part * kTokens * kSumPitch);
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    float* to = &owned[block_idx][first + token][row % kOwned];
    if constexpr (kBlocks > 1) {
      sm90::send_to_peer(sm90::peer_address(to, row / kOwned),
                         make_uint4(plat::float_bits(total.x), plat::float_bits(total.y),
                                    plat::float_bits(total.z), plat::float_bits(total.w)),
                         sm90::peer_address(barrier, row / kOwned));
    } else {
      *reinterpret_cast<float4*>(to) = total;
    }
  }
}
// Until the owned sums are there, if this block owns any.
template <int kRows, int kBlocks, int kOwned>
LOWLAT_DEVICE void wait_for_sums(std::uint64_t* barrier) {
  if constexpr (kBlocks > 1) {
    if (sm90::cluster_rank() * kOwned < kRows) wait_for_cluster(barrier, 0);
  } else {
    plat::block_sync();
  }
}
// Both, of all tokens at once.
template <int kRows, int kTokens, int kBlocks, int kOwned, int kParts, int kSumPitch,
          int kThreads = kProductThreads>
LOWLAT_DEVICE void hand_over_sums(const float* sums, float (&owned)[kBlocks][kTokens][kOwned],
                                  std::uint64_t* barrier, int num_rows) {
  if constexpr (kBlocks > 1) sm90::cluster_wait();  // the others run: all arrived when they began
  send_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch, kThreads>(sums, owned, barrier,
                                                                          num_rows, 0);
  wait_for_sums<kRows, kBlocks, kOwned>(barrier);
}

// A lane's eight codes of a step, in the order of its activations; `piece` is where 8 t begins.
template <class Activations>
LOWLAT_DEVICE uint2 codes_of(const unsigned char* piece, int t) {
  if constexpr (requires { requires Activations::kSplit; }) {
    const unsigned char* from = piece - 4 * t;
    return make_uint2(*reinterpret_cast<const std::uint32_t*>(from),
                      *reinterpret_cast<const std::uint32_t*>(from + 16));
  } else {
    return *reinterpret_cast<const uint2*>(piece);
  }
}

// Codes of rows g and g + 8 as an operand of mma.
LOWLAT_DEVICE void place_codes(std::uint32_t (&to)[4], std::uint32_t low, std::uint32_t high) {
  std::uint32_t pair[2];
  sm90::e4m3_to_f16(pair, low);
  to[0] = pair[0], to[2] = pair[1];
  sm90::e4m3_to_f16(pair, high);
  to[1] = pair[0], to[3] = pair[1];
}
// sum += codes of rows g and g + 8 times b, under both scales.
LOWLAT_DEVICE void add_step(float (&sum)[4], uint2 low, uint2 high, const std::uint32_t (&b)[4],
                            float weight_scale, float2 token_scale) {
  std::uint32_t a[2][4];
  place_codes(a[0], low.x, high.x);
  place_codes(a[1], low.y, high.y);
  float part[4] = {};
  sm90::mma_f16(part, a[0], b[0], b[1]);
  sm90::mma_f16(part, a[1], b[2], b[3]);
  const float even = weight_scale * token_scale.x, odd = weight_scale * token_scale.y;
  sum[0] = plat::fma(part[0], even, sum[0]);
  sum[1] = plat::fma(part[1], odd, sum[1]);
  sum[2] = plat::fma(part[2], even, sum[2]);
  sum[3] = plat::fma(part[3], odd, sum[3]);
}

// A lane's activations of kSteps steps of its warp's K, and the scales of its two tokens.
template <int kSteps>
struct Operand {
  std::uint32_t b[kSteps][4];
  float2 scale[kSteps];
};

// Of the steps from first_k on, of up to eight tokens. Whole warps call.
template <int kSteps, class Activations>
LOWLAT_DEVICE Operand<kSteps> take_operand(const Activations& activations, int first_k,
                                           int num_rows) {
  typename Activations::Raw raw[kSteps];
  Operand<kSteps> out;
  if constexpr (requires { activations.hop; }) {
    activations.take(raw, out.scale, first_k, num_rows);
  } else {
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes, g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = first_k + step * kStep;
      raw[step] = g < num_rows ? activations.fetch(g, k + 8 * t) : Activations::none();
      out.scale[step] = scales_of(activations, 2 * t, k);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) Activations::expand(out.b[step], raw[step]);
  return out;
}

// Products of a warp's K with num_rows rows of weights, kPitch bytes apart, the warp's K of the
// first at `rows`; the row's sums go where its codes of that K were, eight tokens. `scale`: of the
// warp's steps, those of sixteen rows scale_stride behind those of the sixteen before. Short code:
// eight warps run it several times. All threads of the block call; ends with its barrier.
template <class Activations, int kPitch, int kSteps>
LOWLAT_DEVICE void multiply_rows(unsigned char* rows, int num_rows, const float* weight_scale,
                                 int scale_stride, const Operand<kSteps>& x) {
  static_assert(kSteps * kStep >= 4 * kTileTokens && kSteps * kStep % 32 == 0);
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  unsigned char* row = rows + g * kPitch + 8 * t;
#pragma unroll 1
  for (int first = 0; first < num_rows; first += 16) {
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // Beyond the last row: anything in the block's memory, whose sums nobody takes.
      const uint2 low = codes_of<Activations>(row + step * kStep, t);
      const uint2 high = codes_of<Activations>(row + 8 * kPitch + step * kStep, t);
      add_step(sum, low, high, x.b[step], weight_scale[step], x.scale[step]);
    }
    __syncwarp();  // all lanes have read the rows' codes
    *reinterpret_cast<float2*>(row) = make_float2(sum[0], sum[1]);
    if (num_rows % 16 == 0 || first + 8 < num_rows) {
      *reinterpret_cast<float2*>(row + 8 * kPitch) = make_float2(sum[2], sum[3]);
    }
    row += 16 * kPitch;
    weight_scale += scale_stride;
  }
  plat::block_sync();
}
// A row's sum of a token after multiply_rows, over the warps in their order; `row` is the row's
// first K of the block.
template <int kSteps, int kWarps>
LOWLAT_DEVICE float sum_of_warps(const unsigned char* row, int token) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total += *reinterpret_cast<const float*>(row + warp * kSteps * kStep + 4 * token);
  }
  return total;
}

// Asks for num_rows rows of weights, `bytes` each, kPitch bytes apart in shared memory, a warp for
// every kWarps-th; source(i) has row i. pace_ns: about so long from one copy of a warp's to its
// next, where the weights have time and all at once would be in the way of a kernel that others
// wait for. All threads call. A copy takes its addresses from registers of the whole warp, so lanes
// would take turns.
template <int kPitch, int kWarps, class Source>
LOWLAT_DEVICE void ask_for_rows(unsigned char* to, int num_rows, int bytes, std::uint64_t* barrier,
                                unsigned pace_ns, Source source) {
  if (plat::thread_idx() % plat::kWarpLanes == 0) {
#pragma unroll 1
    for (int row = plat::thread_idx() / plat::kWarpLanes; row < num_rows; row += kWarps) {
      sm90::bulk_load(to + row * kPitch, source(row), bytes, barrier, sm90::CacheHint::evict_first);
      if (pace_ns > 0) __nanosleep(pace_ns);
    }
  }
  __syncwarp();
}

// kOwned rows of the kRows belong to one block of the cluster: block i has rows i * kOwned and on
// (blocks after the last row have none).
// kStaged bytes an activation (1, 2; 0: none): more than one group of tokens is brought to shared
// memory first, so that no step waits for its own. kTokenParts: into so many parts the groups of
// tokens are divided among the warps, which then split K less often and have fewer sums to add.
template <int kRows_, int kK_, int kTiles_, int kBlocks_, int kOwned_, int kStaged_,
          int kTokenParts = 1, int kWarps_ = kProductWarps>
struct Product {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * plat::kWarpLanes;
  static constexpr int kRows = kRows_, kK = kK_, kTiles = kTiles_, kBlocks = kBlocks_;
  static constexpr int kOwned = kOwned_, kStaged = kTiles > 1 ? kStaged_ : 0;
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kParts = kWarps / kTokenParts;  // of K
  static constexpr int kSteps = kK / kStep / kParts;   // of a warp
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kOwnTiles = kTiles / kTokenParts;  // of a warp
  static_assert(kTiles % kTokenParts == 0 && kWarps % kTokenParts == 0);
  static_assert(kTokenParts == 1 || kTiles > 1);
  // A row's pitch of 32 more than a multiple of 128 bytes, so that the four rows and four pieces
  // of 8 bytes that half a warp reads lie in 32 different banks.
  static constexpr int kPitch = kK + 32;
  // Partial sums [warp][token][row]: two tokens are 8 banks apart (mod 32), rows follow.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kCodeBytes = kRows * kPitch;
  static constexpr int kSumBytes = kParts * kTokens * kSumPitch * 4;
  static_assert(kK % (kStep * kParts) == 0 && kK % 128 == 0 && kRows % 16 == 0);
  static_assert(2 * kSumPitch % 32 == 8 && kOwned * kBlocks >= kRows && kRows % kOwned == 0);

  // Copied activations lie behind the codes, a pitch of 32 (64) more than a multiple of 128 bytes
  // as for the weights.
  static constexpr int kTokenPitch = kStaged * (kK + 32);
  static constexpr int kOperandBytes = kCodeBytes + kTokens * kTokenPitch;

  struct Shared {
    // Operands, then, when they are used up, the partial sums of the warps.
    alignas(128) unsigned char memory[kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes];
    alignas(16) float owned[kBlocks][kTokens][kOwned];  // written by each block of the cluster
    float scale[kRowTiles][kK / kStep];
    alignas(16) float token_scale[kStaged > 0 ? kK / kStep : 1][kTokens];
    std::uint64_t barrier;        // of the weights
    std::uint64_t owned_barrier;  // of what the cluster sends
  };

  // Asks for the weights, and tells the cluster that this block runs. All threads call.
  // `first_row`: of the block within its scale blocks of kGroup rows.
  template <int kGroup>
  LOWLAT_DEVICE static void load(Shared& shared, const ProductWeights& weights, int first_row,
                                 int num_rows) {
    const int thread_idx = plat::thread_idx();
    if (thread_idx == 0) {
      sm90::barrier_init(&shared.barrier, 1);
      sm90::barrier_init(&shared.owned_barrier, 1);
      sm90::fence_barrier_init();
      sm90::barrier_arrive_expect(&shared.barrier, kRows * kK);
      if (kBlocks > 1) {
        sm90::barrier_arrive_expect(&shared.owned_barrier, kBlocks * kOwned * num_rows * 4);
      }
    }
    plat::block_sync();
    if constexpr (kBlocks > 1) sm90::cluster_arrive_relaxed();
    ask_for_rows<kPitch, kWarps>(shared.memory, kRows, kK, &shared.barrier, 0,
                                 [&](int row) { return weights.codes + row * weights.stride; });
    for (int i = thread_idx; i < kRowTiles * (kK / kStep); i += kThreads) {
      const int tile = i / (kK / kStep), step = i % (kK / kStep);
      shared.scale[tile][step] = stages::from_ue8m0(
          __ldg(weights.scales + (first_row + tile * 16) / kGroup * weights.scale_stride +
                step * kStep / kGroup));
    }
    plat::block_sync();
  }

  // The block's part of all sums goes to the owners' `owned`. All threads of the cluster call,
  // after load(); on return the owned sums are there, if this block owns any.
  template <class Activations>
  LOWLAT_DEVICE static void run(Shared& shared, const Activations& activations, int num_rows,
                                Stamps& stamps) {
    if constexpr (kTiles == 1) {
      multiply_few(shared, activations, num_rows, stamps);
    } else if constexpr (kStaged == 0) {
      multiply_many(shared, activations, num_rows, stamps);
    } else {
      static_assert(kStaged == Activations::kBytes && !Activations::kShared);
      constexpr int kPieces = kStaged * kK / 16, kScalePieces = kTokens / 4;
      for (int i = plat::thread_idx(); i < num_rows * kPieces; i += kThreads) {
        const int token = i / kPieces, piece = i % kPieces;
        copy_16(shared.memory + kCodeBytes + token * kTokenPitch + 16 * piece,
                static_cast<const std::uint8_t*>(activations.data) +
                    static_cast<std::int64_t>(token) * activations.stride + 16 * piece);
      }
      for (int i = plat::thread_idx(); i < kK / Activations::kGroup * kScalePieces; i += kThreads) {
        const int group = i / kScalePieces, token = i % kScalePieces * 4;
        if (token < activations.padded) {
          copy_16(&shared.token_scale[group][token],
                  activations.scale + group * activations.padded + token);
        }
      }
      wait_for_copies();
      plat::block_sync();
      stamps.mark(StampStage::read);
      const typename Activations::InShared staged{shared.memory + kCodeBytes,
                                                  &shared.token_scale[0][0], kTokenPitch, kTokens};
      multiply_many(shared, staged, num_rows, stamps);
    }
    stamps.mark(StampStage::sum);
  }

  // The sum of an owned row, after run(). The block owns some: owns().
  LOWLAT_DEVICE static bool owns() { return kBlocks == 1 || sm90::cluster_rank() * kOwned < kRows; }
  LOWLAT_DEVICE static float sum(const Shared& shared, int token, int owned_row) {
    return owned_sum(shared.owned, token, owned_row);
  }

 private:
  // One group of tokens: the activations are asked for at once and kept as f16; a warp's sums of a
  // row go where its own codes of it were: row's pitch, the warp's slice of K, eight tokens.
  template <class Activations>
  LOWLAT_DEVICE static void multiply_few(Shared& shared, const Activations& activations,
                                         int num_rows, Stamps& stamps) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes, first_k = warp_idx * kSteps * kStep;
    const Operand x = take_operand<kSteps>(activations, first_k, num_rows);
    stamps.mark(StampStage::read);
    wait_for_weights(&shared.barrier, 0);
    multiply_rows<Activations, kPitch, kSteps>(shared.memory + first_k, kRows,
                                               shared.scale[0] + warp_idx * kSteps, kK / kStep, x);
    stamps.mark(StampStage::compute);
    hand_over(shared, num_rows);
  }

  // Adds the warps' sums and gives each row's to the block that owns it.
  LOWLAT_DEVICE static void hand_over(Shared& shared, int num_rows) {
    if constexpr (kBlocks > 1) {
      sm90::cluster_wait();  // the others run, see load()
      send_quads(shared, num_rows);
      if (owns()) wait_for_cluster(&shared.owned_barrier, 0);
    } else {
#pragma unroll 1
      for (int i = plat::thread_idx(); i < kRows * kTileTokens; i += kThreads) {
        const int token = i % kTileTokens, row = i / kTileTokens;
        if (token >= num_rows) continue;
        shared.owned[0][token][row % kOwned] =
            sum_of_warps<kSteps, kWarps>(shared.memory + row * kPitch, token);
      }
      plat::block_sync();
    }
  }
  // Four rows of a token at once: what a block receives is counted by accesses.
  LOWLAT_DEVICE static void send_quads(Shared& shared, int num_rows) {
    static_assert(kTiles == 1 && kOwned % 4 == 0 && kPitch % 128 == 32);
    const int block_idx = sm90::cluster_rank();
#pragma unroll 1
    for (int i = plat::thread_idx(); i < kRows / 4 * kTileTokens; i += kThreads) {
      const int token = i % kTileTokens, quad = i / kTileTokens;
      if (token >= num_rows) continue;
      // Neighbours begin with another row of theirs, in other banks.
      std::uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 4 * quad + (j + quad) % 4;
        v[j] = plat::float_bits(sum_of_warps<kSteps, kWarps>(shared.memory + row * kPitch, token));
      }
      const auto turned = [&](int by) {
        const std::uint32_t old[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = (quad & by) != 0 ? old[(j + 4 - by) % 4] : old[j];
      };
      turned(1);
      turned(2);
      const int row = 4 * quad, owner = row / kOwned;
      float* const to = &shared.owned[block_idx][token][row % kOwned];
      sm90::send_to_peer(sm90::peer_address(to, owner), make_uint4(v[0], v[1], v[2], v[3]),
                         sm90::peer_address(&shared.owned_barrier, owner));
    }
  }

  // Several groups of tokens: every weight fragment is expanded once for each part of them. What
  // is not in shared memory is asked for so many steps at a time, the first before the weights are
  // waited for.
  template <class Activations>
  LOWLAT_DEVICE static void multiply_many(Shared& shared, const Activations& activations,
                                          int num_rows, Stamps& stamps) {
    const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
    const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
    const int g = lane_idx / 4, t = lane_idx % 4;
    const int part = warp_idx % kParts, first_token = warp_idx / kParts * kOwnTiles * kTileTokens;
    const int first_k = part * kSteps * kStep;
    constexpr int kAhead = Activations::kShared ? 1 : kSteps % 5 == 0 ? 5 : kSteps % 4 == 0 ? 4 : 1;
    constexpr int kStepsAGroup = Activations::kGroup / kStep;
    constexpr int kScales = (kAhead + kStepsAGroup - 1) / kStepsAGroup;
    static_assert(kSteps % kAhead == 0 && (kScales == 1 || kAhead % kStepsAGroup == 0));
    if constexpr (Activations::kShared) wait_for_weights(&shared.barrier, 0);
    float sum[kRowTiles][kOwnTiles][4] = {};
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kAhead) {
      [[maybe_unused]] typename Activations::Raw raw[kAhead][kOwnTiles];
      std::uint32_t b[kOwnTiles][4];
      float2 scale[kScales][kOwnTiles];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = first_k + (first + i) * kStep;
#pragma unroll
        for (int n = 0; n < kOwnTiles; ++n) {
          const int token = first_token + n * kTileTokens;
          // Tokens that are not there: codes of none, and scales that no stored sum sees.
          const typename Activations::Raw piece =
              token + g < num_rows ? activations.fetch(token + g, k + 8 * t) : Activations::none();
          if constexpr (Activations::kShared) {
            Activations::expand(b[n], piece);
          } else {
            raw[i][n] = piece;
          }
          if (i % kStepsAGroup == 0) {
            scale[i / kStepsAGroup][n] = scales_of(activations, token + 2 * t, k);
          }
        }
      }
      if constexpr (!Activations::kShared) {
        if (first == 0) wait_for_weights(&shared.barrier, 0);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if constexpr (!Activations::kShared) {
#pragma unroll
          for (int n = 0; n < kOwnTiles; ++n) Activations::expand(b[n], raw[i][n]);
        }
        const int k = first_k + (first + i) * kStep;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const unsigned char* row = shared.memory + (tile * 16 + g) * kPitch + k + 8 * t;
          const uint2 low = *reinterpret_cast<const uint2*>(row);
          const uint2 high = *reinterpret_cast<const uint2*>(row + 8 * kPitch);
          const float weight_scale = shared.scale[tile][part * kSteps + first + i];
#pragma unroll
          for (int n = 0; n < kOwnTiles; ++n) {
            add_step(sum[tile][n], low, high, b[n], weight_scale, scale[i / kStepsAGroup][n]);
          }
        }
      }
    }
    plat::block_sync();  // all codes are used up
    float* partial = reinterpret_cast<float*>(shared.memory);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < kOwnTiles; ++n) {
        float* to = partial + (part * kTokens + first_token + n * kTileTokens + 2 * t) * kSumPitch +
                    tile * 16 + g;
        to[0] = sum[tile][n][0];
        to[kSumPitch] = sum[tile][n][1];
        to[8] = sum[tile][n][2];
        to[kSumPitch + 8] = sum[tile][n][3];
      }
    }
    plat::block_sync();
    stamps.mark(StampStage::compute);
    hand_over_sums<kRows, kTokens, kBlocks, kOwned, kParts, kSumPitch, kThreads>(
        partial, shared.owned, &shared.owned_barrier, num_rows);
  }
};

}  // namespace lowlat::nvidia::fused
