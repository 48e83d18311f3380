// fused/exchange_norm.cuh: what a team of threads does for its slice of a row where a sublayer ends
// and the next begins; exchange.cu has the formulas. A team is a block of hc_exchange_norm_sm90, or
// the last warps of a block of the experts (moe.cuh).
//
// Team         thread(): its place in [0, kThreads). sync(): a barrier of the team. any(v): whether
//              v is true of one of its threads, a barrier too. Whole warps; the first is that of
//              threads 0 .. 31.
// Use          all threads of a team, in the order of the functions below. Between combine and norm
//              the caller adds the squares of a row's slices, always in the same order.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_quant.cuh"
#include "fused/mix.hpp"
#include "platform/nvidia_sm90_fp8.cuh"

namespace lowlat::nvidia::fused {

inline constexpr int kNormGroup = 32;  // columns under one scale

// Four columns of a row as codes to where the next kernel reads them: packets (of two lanes; NULL:
// nowhere), or codes and scales. Whole warps call.
LOWLAT_DEVICE void send_codes(const float (&v)[4], int num_rows, void* packets, std::uint32_t tag,
                              std::uint8_t* codes, float* scale, int row_idx, int quad_idx,
                              int hidden) {
  float amax = 0.0f;
#pragma unroll
  for (const float value : v) amax = plat::max(plat::abs(value), amax);
#pragma unroll
  for (int mask = 1; mask < kNormGroup / 4; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
  const PowerScale group = power_scale(amax);
  const std::uint32_t four = sm90::to_e4m3_pair(v[0] * group.inverse, v[1] * group.inverse) |
                             sm90::to_e4m3_pair(v[2] * group.inverse, v[3] * group.inverse) << 16;
  if (num_rows <= kHopRows) {
    const std::uint32_t next = __shfl_down_sync(plat::kAllLanes, four, 1);
    if (packets == nullptr || quad_idx % 2 != 0) return;
    send_packet(static_cast<plat::TaggedWords*>(packets) + (row_idx * (hidden / 4) + quad_idx) / 2,
                tag, four, next, plat::float_bits(group.scale));
    return;
  }
  *reinterpret_cast<std::uint32_t*>(codes + static_cast<std::int64_t>(row_idx) * hidden +
                                    4 * quad_idx) = four;
  if (quad_idx % (kNormGroup / 4) == 0) {
    scale[quad_idx / (kNormGroup / 4) * padded_rows(num_rows) + row_idx] = group.scale;
  }
}

template <int kHidden, int kRanks, class Team>
struct ExchangeSlice {
  static constexpr int kQuads = kHidden / 4, kThreads = kQuads / kSlicesPerRow;
  static constexpr int kWarps = kThreads / plat::kWarpLanes;
  static_assert(kThreads % plat::kWarpLanes == 0 && kNormGroup == 8 * 4);

  const ExchangeNormParams& params;
  Team team;
  float* mix;  // [kMixStride], the team's, in shared memory
  int row_idx, slice_idx;
  uint2 gain = {}, residual[4] = {};
  float v[4] = {};
  std::uint32_t aborted = 0;

  LOWLAT_DEVICE int quad_idx() const { return slice_idx * kThreads + team.thread(); }
  // Of stream k of the residual, this thread's four columns.
  LOWLAT_DEVICE std::int64_t place(int k) const {
    return (static_cast<std::int64_t>(row_idx) * 4 + k) * kHidden + 4 * quad_idx();
  }

  LOWLAT_DEVICE void load_gain() {
    gain = __ldg(reinterpret_cast<const uint2*>(params.gain + 4 * quad_idx()));
  }
  LOWLAT_DEVICE void wait_for_statistics() const {
    if (params.mix_done.word == nullptr) return;
    if (team.thread() == 0) poll_gate(params.mix_done);
    team.sync();
  }
  LOWLAT_DEVICE void load_residual() {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      residual[k] = __ldcg(reinterpret_cast<const uint2*>(params.residual_in + place(k)));
    }
  }
  LOWLAT_DEVICE void load_statistics() const {
    if (team.thread() < kMixStride) {
      mix[team.thread()] = __ldcg(params.mix + row_idx * kMixStride + team.thread());
    }
  }

  // `tile_order`: quads hold positions 8 g + j .. + 3 of 64 columns 8 j + g (ExchangeNormParams).
  // With j and g as bits, a quad's number ends with g j2 and a thread's with j g2; j's lower bits
  // and g's are a quad's place and a thread's. So bits 0 and 3 of the number change places, and
  // what lies in four quads and four threads is transposed.
  LOWLAT_DEVICE int received_quad(bool tile_order) const {
    const int own = quad_idx();
    return tile_order ? (own & ~9) | (own >> 3 & 1) | (own & 1) << 3 : own;
  }
  // Asks for this thread's packets, for receive().
  LOWLAT_DEVICE void ask(QuadPackets<kRanks>& packets, std::uint64_t epoch, bool tile_order) const {
    packets.ask(params.port, epoch, row_idx, received_quad(tile_order), kQuads);
  }
  // y = the sums over the ranks of this thread's columns, of packets that were asked for before.
  // kAgain: some time ago.
  template <bool kAgain>
  LOWLAT_DEVICE void receive(float (&y)[4], std::uint64_t epoch, bool tile_order,
                             const QuadPackets<kRanks>& packets) {
    const auto stage = static_cast<stages::StageId>(params.stage);
    const int quad = received_quad(tile_order);
    if (packets.there) packets.add(y);
    // A team that starts when all has come goes on at once.
    bool missing = team.any(!packets.there);
    if (kAgain && missing) {
      missing = team.any(!try_receive_quad<kRanks>(y, params.port, epoch, row_idx, quad, kQuads));
    }
    if (missing) {
      if (team.thread() < plat::kWarpLanes) {
        poll_quads<kRanks>(params.port, epoch, row_idx, slice_idx * kThreads, kThreads, kQuads,
                           stage);
      }
      team.sync();
      receive_quad<kRanks>(y, params.port, epoch, row_idx, quad, kQuads, stage);
    }
    if (tile_order) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const bool upper = (team.thread() / 2 & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i & step) continue;
          const float theirs =
              __shfl_xor_sync(plat::kAllLanes, upper ? y[i] : y[i + step], 2 * step);
          (upper ? y[i] : y[i + step]) = theirs;
        }
      }
    }
    // What came may be of a kernel whose own wait was ended. The answer is used further below.
    aborted = load_relaxed(params.port.abort_words[params.port.tp_rank]);
    team.sync();
  }

  LOWLAT_DEVICE void receive(float (&y)[4], std::uint64_t epoch, bool tile_order) {
    QuadPackets<kRanks> packets = {};
    ask(packets, epoch, tile_order);
    receive<false>(y, epoch, tile_order, packets);
  }

  // Stores the new residual; what is normed next stays here. Returns its sum of squares.
  LOWLAT_DEVICE float combine(float (&y)[4]) {
    float r[4][4];  // [stream][column]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      r[j][0] = sm90::low_bf16(residual[j].x), r[j][1] = sm90::high_bf16(residual[j].x);
      r[j][2] = sm90::low_bf16(residual[j].y), r[j][3] = sm90::high_bf16(residual[j].y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = quick_bf16(y[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float acc = mix[8 + k] * r[0][i];
        acc = plat::fma(mix[4 + k], y[i], acc);
#pragma unroll
        for (int j = 1; j < 4; ++j) acc = plat::fma(mix[8 + 4 * j + k], r[j][i], acc);
        out[i] = quick_bf16(acc);
        v[i] = plat::fma(out[i], mix[k], v[i]);
      }
      *reinterpret_cast<uint2*>(params.residual_out + place(k)) =
          make_uint2(sm90::to_bf16_pair(out[0], out[1]), sm90::to_bf16_pair(out[2], out[3]));
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = quick_bf16(v[i]);
      squares = plat::fma(v[i], v[i], squares);
    }
    return squares;
  }
  // The slice's sum of the threads' squares, for threads of the first warp. `of_warps`: [kWarps] of
  // the team, in shared memory.
  LOWLAT_DEVICE float sum_of_warps(float squares, float* of_warps) const {
    squares = plat::warp_sum(squares);
    if (team.thread() % plat::kWarpLanes == 0) {
      of_warps[team.thread() / plat::kWarpLanes] = squares;
    }
    team.sync();
    float sum = 0.0f;
    if (team.thread() < plat::kWarpLanes) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += of_warps[i];
    }
    return sum;
  }

  // x and its codes from the row's sum of squares. `scaled` is called when the norm's factor is
  // known.
  template <class Scaled>
  LOWLAT_DEVICE void norm(float total, std::uint64_t epoch, Scaled scaled) {
    float scale = quick_rsqrt(total / static_cast<float>(kHidden) + params.norm_eps);
    if (aborted != 0u) {
      scale = plat::bits_float(0x7fc0'0000u);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        *reinterpret_cast<uint2*>(params.residual_out + place(k)) =
            make_uint2(0x7fc0'7fc0u, 0x7fc0'7fc0u);
      }
    }
    scaled();
    const float gains[4] = {sm90::low_bf16(gain.x), sm90::high_bf16(gain.x), sm90::low_bf16(gain.y),
                            sm90::high_bf16(gain.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = quick_bf16(v[i] * scale * gains[i]);
    if (params.x != nullptr) {
      *reinterpret_cast<uint2*>(params.x + static_cast<std::int64_t>(row_idx) * kHidden +
                                4 * quad_idx()) =
          make_uint2(sm90::to_bf16_pair(v[0], v[1]), sm90::to_bf16_pair(v[2], v[3]));
    }
    send_codes(v, params.num_rows, params.x_packets, static_cast<std::uint32_t>(epoch),
               params.x_codes, params.x_scale, row_idx, quad_idx(), kHidden);
  }
};

}  // namespace lowlat::nvidia::fused
