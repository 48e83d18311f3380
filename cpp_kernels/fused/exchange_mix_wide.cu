// hc_exchange_mix_wide_sm90: hc_exchange_mix_sm90 (exchange_mix.cu) for clusters that have several
// rows each, called turns here, all of which go from stage to stage together.
//
// Math         as there. m = fn·R' by products of tf32: R' is bf16, and fn the sum of two parts of
//              11 bits; the products of streams by mma of bf16. Sums are fp32
// Shapes       packets of epoch e · R, R' [T,4,4096] bf16 · fn [24,16384] fp32 · x [T,4096]
// Rounding     where bf( ) stands, nearest-even; fn to 22 bits
// Bytes        1.57 MB of fn a cluster (L2 but for the first)
// Floor        one hop: 1.3 us
// Launch       seven clusters of sixteen blocks, which is how many run at once, or eight of eight;
//              a thread a column. 128 registers, so that a block has room beside a product that
//              publishes; most of fn lies in shared memory
// Ordering     packets: exchange.cuh. Inside a cluster: each block stores its sums of all turns
//              into every block, and counts on that block's barrier
// Determinism  fixed summation tree; bitwise equal run to run and rank to rank
// Meaning      reference/hc.cpp, reference/rank_sum.cpp. Bound: x, R' rel_l2 ≤ 4e-3, mix 2e-5.
#include <bit>

#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/exchange_mix.cuh"
#include "fused/exchange_mix_wide.hpp"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "platform/nvidia_sm90_tf32.cuh"

namespace lowlat::nvidia::fused {
namespace {

using namespace mixing;

// Of fn a lane has its part of the first outputs in registers; the others lie in shared memory.
constexpr int kKept = 8, kSharedOutputs = kOutputs - kKept;
static_assert(kOutputs == 3 * kKept && kStreams == 4);

// Of a cluster of so many blocks with so many turns at most.
template <int kCluster_, int kTurns_>
struct Layout {
  static constexpr int kCluster = kCluster_, kTurns = kTurns_;
  static constexpr int kThreads = kHidden / kCluster, kWarps = kThreads / plat::kWarpLanes;
  // Threads that have a turn's columns by eights; quads of a turn's packets, and turns at once.
  static constexpr int kEights = kThreads / 8, kQuads = kThreads / 4, kTurnsAtOnce = 4;
  static constexpr int kRounds = (kTurns + kTurnsAtOnce - 1) / kTurnsAtOnce;
  // Chunks of four sums go to so many blocks by one thread.
  static constexpr int kChunks = kSumPitch / 4;
  static constexpr int kPeers =
      std::bit_ceil(unsigned{(kTurns * kChunks * kCluster + kThreads - 1) / kThreads});
  static constexpr int kSenders = kCluster / kPeers;  // threads that share a chunk
  static_assert(kCluster % kPeers == 0 && kTurns * kChunks * kSenders <= kThreads);
  // A turn is a column of a product, a warp's, and an eighth of the threads'.
  static_assert(kTurns <= 8 && kTurns <= kWarps && kEights % plat::kWarpLanes == 0);
};

template <class L>
struct alignas(128) Shared {
  // Rows of fn lie 16 banks apart and turns of the streams 4, so that eight lanes that read sixteen
  // bytes of two of them meet no bank twice.
  alignas(16) float fn[kSharedOutputs][kStreams * L::kThreads + 16];
  alignas(16) uint2 streams[L::kTurns][L::kThreads + 2];     // of a column: R, then R'
  alignas(16) std::uint16_t values[L::kTurns][L::kThreads];  // y, then x
  alignas(16) float of_warp[L::kTurns][L::kWarps][kSumPitch];
  alignas(16) float of_block[L::kTurns][L::kCluster][kSumPitch];  // written by each block
  alignas(16) float mix[L::kTurns][kMixStride];
  alignas(16) float pre[L::kTurns][kStreams];
  float scale[L::kTurns];
  float logit[L::kTurns][kOutputs];
  std::uint64_t barrier;  // of of_block
  std::uint64_t fn_barrier;
};

// The halves of two words: the low ones, the high ones.
LOWLAT_DEVICE std::uint32_t low_halves(std::uint32_t first, std::uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}
LOWLAT_DEVICE std::uint32_t high_halves(std::uint32_t first, std::uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

// A number's upper 11 bits as tf32, and what they leave.
LOWLAT_DEVICE std::uint32_t upper_part(float v) { return plat::float_bits(v) & 0xffff'e000u; }
LOWLAT_DEVICE std::uint32_t lower_part(float v) {
  return plat::float_bits(v - plat::bits_float(upper_part(v)));
}

// As try_receive_quad, of a quad of several rows, row_step apart from first_row on, all asked for
// at once: bits of those that are missing. Rows after last_row count as that one.
template <int kRanks, int kRounds>
LOWLAT_DEVICE unsigned try_receive_rows(float (&sums)[kRounds][4], const ExchangePort& port,
                                        std::uint64_t epoch, int first_row, int row_step,
                                        int last_row, int quad_idx) {
  std::uint32_t words[kRounds][kRanks][3] = {};
  bool there[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    there[round] = true;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      there[round] &=
          plat::load_tagged(quads_of(port, port.tp_rank, epoch, rank,
                                     min(first_row + round * row_step, last_row), kHidden / 4) +
                                quad_idx,
                            static_cast<std::uint32_t>(epoch), words[round][rank]);
    }
  }
  unsigned missing = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    missing |= (there[round] ? 0u : 1u) << round;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      float v[4];
      unpack_quad(v, words[round][rank]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[round][i] = rank == 0 ? v[i] : sums[round][i] + v[i];
    }
  }
  return missing;
}

template <int kRanks, class L>
__global__ void __maxnreg__(128)
    hc_exchange_mix_wide_sm90(const __grid_constant__ ExchangeMixParams params) {
  constexpr int kThreads = L::kThreads, kTurns = L::kTurns, kEights = L::kEights;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<L>*>(memory);
  sm90::launch_dependents();
  Stamps stamps(params.port.stamps, params.kernel);
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;  // of products
  const int block_idx = sm90::cluster_rank();
  const int cluster_idx = static_cast<int>(blockIdx.y);
  const int num_clusters = static_cast<int>(gridDim.y);
  const int first_column = block_idx * kThreads;
  const int num_turns = (params.num_rows - 1 - cluster_idx) / num_clusters + 1;
  const auto row_of = [&](int turn) { return cluster_idx + turn * num_clusters; };
  if (thread_idx == 0) {
    sm90::barrier_init(&shared.barrier, 1);
    sm90::barrier_init(&shared.fn_barrier, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier, num_turns * sizeof shared.of_block[0]);
    sm90::barrier_arrive_expect(&shared.fn_barrier, kSharedOutputs * kStreams * kThreads * 4);
  }
  plat::block_sync();
  // A copy takes its addresses from registers of the whole warp, so lanes would take turns.
  if (lane_idx == 0) {
#pragma unroll 1
    for (int i = warp_idx; i < kSharedOutputs * kStreams; i += L::kWarps) {
      sm90::bulk_load(&shared.fn[i / kStreams][i % kStreams * kThreads],
                      params.next.fn + (kKept * kStreams + i) * kHidden + first_column,
                      kThreads * 4, &shared.fn_barrier, sm90::CacheHint::evict_last);
    }
  }
  __syncwarp();
  sm90::cluster_arrive_relaxed();  // all blocks run before one stores into another
  // Before fn is asked for: who waits after its loads waits for them too.
  poll_gates(params.before, params.mix_before, params.x_read);
  // Of output g, by fours of the warp's columns: 4 t and on, 16 + 4 t and on.
  float4 fn[2][kStreams];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      fn[i][k] = __ldg(reinterpret_cast<const float4*>(
          params.next.fn + (g * kStreams + k) * kHidden + first_column +
          warp_idx * plat::kWarpLanes + 16 * i + 4 * t));
    }
  }
  const LogitScale of_logit = logit_scale(params.next, lane_idx);
  const float gain = plat::bits_float(
      static_cast<std::uint32_t>(__ldg(params.gain + first_column + thread_idx)) << 16);
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  const auto stage = static_cast<stages::StageId>(params.stage);
  // What is sent of a row's last sums and nobody wants.
  if (thread_idx < kTurns * L::kWarps) {
    float* of_warp = shared.of_warp[0][thread_idx];
    for (int i = kSums; i < kSumPitch; ++i) of_warp[i] = 0.0f;
  }
  stamps.mark(StampStage::ask);
  plat::block_sync();
  sm90::cluster_wait();

  // Eight columns of a turn.
  const int eight_turn = thread_idx / kEights, eight = thread_idx % kEights;
  const bool has_eight = eight_turn < num_turns;
  const std::int64_t eight_begin =
      static_cast<std::int64_t>(row_of(eight_turn)) * kStreams * kHidden + first_column + 8 * eight;
  std::uint32_t aborted = 0;
  {
    uint4 in[kStreams] = {};
    if (has_eight) {
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        in[k] =
            __ldcg(reinterpret_cast<const uint4*>(params.residual_in + eight_begin + k * kHidden));
      }
    }
    if constexpr (kRanks > 0) {
      constexpr int kMixQuads = kMixStride / 4;
      if (thread_idx < num_turns * kMixQuads) {
        *reinterpret_cast<float4*>(&shared.mix[0][4 * thread_idx]) =
            __ldcg(reinterpret_cast<const float4*>(params.mix_in +
                                                   row_of(thread_idx / kMixQuads) * kMixStride) +
                   thread_idx % kMixQuads);
      }
      const int own_turn = thread_idx / L::kQuads, own_quad = thread_idx % L::kQuads;
      const int quad_idx = first_column / 4 + own_quad;
      const auto try_receive = [&](float (&sums)[L::kRounds][4]) {
        return try_receive_rows<kRanks, L::kRounds>(sums, params.port, epoch, row_of(own_turn),
                                                    L::kTurnsAtOnce * num_clusters,
                                                    row_of(num_turns - 1), quad_idx);
      };
      float sums[L::kRounds][4];
      unsigned missing = try_receive(sums);
      if (__syncthreads_or(static_cast<int>(missing)) != 0) {
        wait_for_quads<kRanks>(params.port, epoch, cluster_idx, first_column / 4, L::kQuads,
                               kHidden / 4, stage);
        // What has come late comes soon: only after many polls is each waited for alone.
        constexpr int kPolls = 64;
#pragma unroll 1
        for (int polls = 0; missing != 0 && polls < kPolls; ++polls) missing = try_receive(sums);
        if (missing != 0) {
#pragma unroll
          for (int round = 0; round < L::kRounds; ++round) {
            if ((missing >> round & 1u) == 0u) continue;
            const int turn = min(own_turn + round * L::kTurnsAtOnce, num_turns - 1);
            receive_quad<kRanks>(sums[round], params.port, epoch, row_of(turn), quad_idx,
                                 kHidden / 4, stage);
          }
        }
      }
#pragma unroll
      for (int round = 0; round < L::kRounds; ++round) {
        const int turn = own_turn + round * L::kTurnsAtOnce;
        if (turn < num_turns) {
          *reinterpret_cast<uint2*>(&shared.values[turn][4 * own_quad]) =
              make_uint2(sm90::to_bf16_pair(sums[round][0], sums[round][1]),
                         sm90::to_bf16_pair(sums[round][2], sums[round][3]));
        }
      }
      // What came may be of a kernel whose own wait was ended. The answer is used further below.
      aborted = load_relaxed(params.port.abort_words[params.port.tp_rank]);
    }
    if (has_eight) {
      uint4* to = reinterpret_cast<uint4*>(&shared.streams[eight_turn][8 * eight]);
      const auto place = [&](int i, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                             std::uint32_t d) {
        to[i] =
            make_uint4(low_halves(a, b), low_halves(c, d), high_halves(a, b), high_halves(c, d));
      };
      place(0, in[0].x, in[1].x, in[2].x, in[3].x);
      place(1, in[0].y, in[1].y, in[2].y, in[3].y);
      place(2, in[0].z, in[1].z, in[2].z, in[3].z);
      place(3, in[0].w, in[1].w, in[2].w, in[3].w);
    }
  }
  plat::block_sync();
  stamps.mark(StampStage::wait);
  const auto streams_of = [&](int turn, float (&r)[kStreams]) {
    const uint2 words = shared.streams[turn][thread_idx];
    r[0] = sm90::low_bf16(words.x), r[1] = sm90::high_bf16(words.x);
    r[2] = sm90::low_bf16(words.y), r[3] = sm90::high_bf16(words.y);
  };
  if constexpr (kRanks > 0) {
#pragma unroll 2
    for (int turn = 0; turn < num_turns; ++turn) {
      float r[kStreams], out[kStreams];
      streams_of(turn, r);
      const float y =
          plat::bits_float(static_cast<std::uint32_t>(shared.values[turn][thread_idx]) << 16);
      const float* mix = shared.mix[turn];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        float acc = mix[8 + k] * r[0];
        acc = plat::fma(mix[4 + k], y, acc);
#pragma unroll
        for (int j = 1; j < kStreams; ++j) acc = plat::fma(mix[8 + 4 * j + k], r[j], acc);
        out[k] = acc;
      }
      shared.streams[turn][thread_idx] =
          make_uint2(sm90::to_bf16_pair(out[0], out[1]), sm90::to_bf16_pair(out[2], out[3]));
    }
    __syncwarp();  // a product's columns are the warp's own
  }
  stamps.mark(StampStage::read);

  // fn·R', of all turns. A product has two streams of four columns of the warp's as its K, and
  // eight outputs as its rows, each as two: its upper and its lower part.
  wait_for_weights(&shared.fn_barrier, 0);
  {
    float sum[kOutputs / 8][4] = {};
    const uint2* from = &shared.streams[min(g, kTurns - 1)][warp_idx * plat::kWarpLanes + 4 * t];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 low = *reinterpret_cast<const uint4*>(from + 16 * i);
      const uint4 high = *reinterpret_cast<const uint4*>(from + 16 * i + 2);
      const std::uint32_t pairs[4][2] = {
          {low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
      for (int part = 0; part < kOutputs / 8; ++part) {
        float4 own[kStreams];
#pragma unroll
        for (int k = 0; k < kStreams; ++k) {
          own[k] =
              part == 0
                  ? fn[i][k]
                  : *reinterpret_cast<const float4*>(
                        &shared.fn[8 * part - kKept + g]
                                  [k * kThreads + warp_idx * plat::kWarpLanes + 16 * i + 4 * t]);
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const float4 &even = own[2 * pair], &odd = own[2 * pair + 1];
          const float a[4][2] = {
              {even.x, odd.x}, {even.y, odd.y}, {even.z, odd.z}, {even.w, odd.w}};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sm90::mma_tf32(sum[part],
                           {upper_part(a[j][0]), lower_part(a[j][0]), upper_part(a[j][1]),
                            lower_part(a[j][1])},
                           {pairs[j][pair] << 16, pairs[j][pair] & 0xffff'0000u});
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i < num_turns) {
        float* to = shared.of_warp[2 * t + i][warp_idx];
#pragma unroll
        for (int part = 0; part < kOutputs / 8; ++part) {
          to[8 * part + g] = sum[part][i] + sum[part][2 + i];
        }
      }
    }
    __syncwarp();
  }
  // R'·R', of two turns a product: rows and columns are the streams of both.
#pragma unroll 1
  for (int first = 0; first < num_turns; first += 2) {
    const int turn = min(first + g / 4, kTurns - 1);
    const auto* from = reinterpret_cast<const std::uint16_t*>(
                           &shared.streams[turn][warp_idx * plat::kWarpLanes + 2 * t]) +
                       g % 4;
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto two = [&](int column) {
        return static_cast<std::uint32_t>(from[kStreams * column]) |
               static_cast<std::uint32_t>(from[kStreams * (column + 1)]) << 16;
      };
      const std::uint32_t b[2] = {two(16 * i), two(16 * i + 8)};
      const std::uint32_t a[4] = {b[0], 0u, b[1], 0u};
      sm90::mma_bf16(sum, a, b);
    }
    if (g / 4 == t / 2 && first + g / 4 < num_turns) {
      const int k = g % 4;
      float* to = shared.of_warp[turn][warp_idx];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int l = 2 * t % 4 + i;
        if (k == l) to[kOwnProducts + k] = sum[i];
        if (k < l) to[kCrossProducts + (k == 0 ? l - 1 : k == 1 ? l + 1 : l + 2)] = sum[i];
      }
    }
    __syncwarp();
  }
  plat::block_sync();
  stamps.mark(StampStage::compute);
  {
    const int sender = thread_idx % L::kSenders, place = thread_idx / L::kSenders;
    const int turn = place / L::kChunks, chunk = place % L::kChunks;
    if (turn < num_turns) {
      float4 sum = *reinterpret_cast<const float4*>(&shared.of_warp[turn][0][4 * chunk]);
#pragma unroll
      for (int i = 1; i < L::kWarps; ++i) {
        const float4 part = *reinterpret_cast<const float4*>(&shared.of_warp[turn][i][4 * chunk]);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      const uint4 bits = make_uint4(plat::float_bits(sum.x), plat::float_bits(sum.y),
                                    plat::float_bits(sum.z), plat::float_bits(sum.w));
#pragma unroll
      for (int i = 0; i < L::kPeers; ++i) {
        const int peer = sender + i * L::kSenders;
        sm90::send_to_peer(sm90::peer_address(&shared.of_block[turn][block_idx][4 * chunk], peer),
                           bits, sm90::peer_address(&shared.barrier, peer));
      }
    }
  }
  if constexpr (kRanks > 0) {
    if (has_eight) {
      const auto* from = reinterpret_cast<const uint4*>(&shared.streams[eight_turn][8 * eight]);
      uint4 two[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) two[i] = from[i];
      uint4 out[kStreams];
      out[0] = make_uint4(low_halves(two[0].x, two[0].z), low_halves(two[1].x, two[1].z),
                          low_halves(two[2].x, two[2].z), low_halves(two[3].x, two[3].z));
      out[1] = make_uint4(high_halves(two[0].x, two[0].z), high_halves(two[1].x, two[1].z),
                          high_halves(two[2].x, two[2].z), high_halves(two[3].x, two[3].z));
      out[2] = make_uint4(low_halves(two[0].y, two[0].w), low_halves(two[1].y, two[1].w),
                          low_halves(two[2].y, two[2].w), low_halves(two[3].y, two[3].w));
      out[3] = make_uint4(high_halves(two[0].y, two[0].w), high_halves(two[1].y, two[1].w),
                          high_halves(two[2].y, two[2].w), high_halves(two[3].y, two[3].w));
      constexpr std::uint32_t kNans = 0x7fc0'7fc0u;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (aborted != 0u) out[k] = make_uint4(kNans, kNans, kNans, kNans);
        *reinterpret_cast<uint4*>(params.residual_out + eight_begin + k * kHidden) = out[k];
      }
    }
  }
  // A warp a turn.
  if (warp_idx < num_turns) {
    wait_for_cluster(&shared.barrier, 0);
    float total = 0.0f, cross = 0.0f;
#pragma unroll
    for (int i = 0; i < L::kCluster; ++i) {
      total += shared.of_block[warp_idx][i][lane_idx];
      cross += shared.of_block[warp_idx][i][plat::kWarpLanes + lane_idx % 4];
    }
    const RowNumbers row = row_numbers(total, cross, of_logit, params.norm_eps, params.hc_eps);
    if (lane_idx == 0) {
      *reinterpret_cast<float4*>(shared.pre[warp_idx]) =
          make_float4(row.pre[0], row.pre[1], row.pre[2], row.pre[3]);
      shared.scale[warp_idx] = aborted != 0u ? plat::bits_float(0x7fc0'0000u) : row.scale;
    }
    if (lane_idx < kOutputs) shared.logit[warp_idx][lane_idx] = row.logit;
  }
  plat::block_sync();
  stamps.mark(StampStage::sum);
#pragma unroll 2
  for (int turn = 0; turn < num_turns; ++turn) {
    float r[kStreams];
    streams_of(turn, r);
    float v = 0.0f;
#pragma unroll
    for (int k = 0; k < kStreams; ++k) v = plat::fma(r[k], shared.pre[turn][k], v);
    v = quick_bf16(quick_bf16(v) * shared.scale[turn] * gain);
    shared.values[turn][thread_idx] = static_cast<std::uint16_t>(plat::float_bits(v) >> 16);
  }
  plat::block_sync();
  if (has_eight) {  // whole warps
    const int row_idx = row_of(eight_turn), column = first_column + 8 * eight;
    const std::int64_t place = static_cast<std::int64_t>(row_idx) * kHidden + column;
    const uint4 words = *reinterpret_cast<const uint4*>(&shared.values[eight_turn][8 * eight]);
    *reinterpret_cast<uint4*>(params.x + place) = words;
    if (params.x_packets != nullptr || params.x_codes != nullptr) {
      constexpr int kLanesAGroup = kGroup / 8;
      const float v[8] = {sm90::low_bf16(words.x), sm90::high_bf16(words.x),
                          sm90::low_bf16(words.y), sm90::high_bf16(words.y),
                          sm90::low_bf16(words.z), sm90::high_bf16(words.z),
                          sm90::low_bf16(words.w), sm90::high_bf16(words.w)};
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = plat::max(plat::abs(v[i]), amax);
#pragma unroll
      for (int mask = 1; mask < kLanesAGroup; mask *= 2) {
        amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
      }
      const PowerScale group = power_scale(amax);
      std::uint32_t codes[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i / 2] |=
            (sm90::to_e4m3_pair(v[2 * i] * group.inverse, v[2 * i + 1] * group.inverse) & 0xffffu)
            << 16 * (i % 2);
      }
      if (params.num_rows > kHopRows) {
        *reinterpret_cast<uint2*>(params.x_codes + place) = make_uint2(codes[0], codes[1]);
        if (column % kGroup == 0) {
          params.x_scale[column / kGroup * padded_rows(params.num_rows) + row_idx] = group.scale;
        }
      } else if (params.x_packets != nullptr) {
        send_packet(static_cast<plat::TaggedWords*>(params.x_packets) + place / 8,
                    static_cast<std::uint32_t>(epoch), codes[0], codes[1],
                    plat::float_bits(group.scale));
      }
    }
  }
  stamps.mark(StampStage::store);
  open_gate(params.done, static_cast<std::uint32_t>(num_turns) * (kMixCluster / L::kCluster));
  if (params.later_fn != nullptr) {
    ask_for_later(params.later_fn, cluster_idx * kHidden + first_column + thread_idx,
                  num_clusters * kHidden);
  }
  if (block_idx != 0) return;
  if (warp_idx < num_turns) {
    store_mix(params.mix_out + row_of(warp_idx) * kMixStride, shared.logit[warp_idx], params.hc_eps,
              params.sinkhorn_iters);
  }
  open_gate(params.mix_done, static_cast<std::uint32_t>(num_turns));
}

}  // namespace

cudaError_t launch_exchange_mix_wide(const ExchangeMixParams& params, bool programmatic,
                                     cudaStream_t stream) {
  const int clusters = static_cast<int>(exchange_mix_clusters(params));
  const int turns = (params.num_rows + clusters - 1) / clusters;
  const auto launch = [&]<int kRanks, int kCluster, int kTurns>() {
    using L = Layout<kCluster, kTurns>;
    return launch_kernel(hc_exchange_mix_wide_sm90<kRanks, L>, dim3(kCluster, clusters),
                         L::kThreads, sizeof(Shared<L>), kCluster, programmatic, stream, params);
  };
  return with_cluster(params, [&]<int kRanks, int kCluster>() {
    constexpr int kFew = 4, kMost = (kMaxFusedRows + kMaxMixClusters - 1) / kMaxMixClusters;
    return turns <= kFew ? launch.template operator()<kRanks, kCluster, kFew>()
                         : launch.template operator()<kRanks, kCluster, kMost>();
  });
}

}  // namespace lowlat::nvidia::fused
