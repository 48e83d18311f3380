// fused/attention_parts.cuh: what attention of few rows (attention.cu) and of more
// (attention_wide.cu) have in common: which keys a block has, and how the blocks of a cluster
// finish a row's heads.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/attention.hpp"
#include "fused/exchange_hop.cuh"
#include "fused/front_quant.cuh"
#include "fused/front_weights.cuh"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused::attention {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / plat::kWarpLanes;
constexpr int kHeads = 16;  // of a cluster: one tile of mma
constexpr int kDim = shape::kHeadDim;
constexpr int kNope = kDim - shape::kRopeDim;

// Slot of a row's key: places count through the window's and then the extra set's indices. -1: a
// pad, or none.
LOWLAT_DEVICE std::int32_t slot_at(const AttentionParams& params, int row_idx, int place, int end) {
  if (place >= end) return -1;
  return place < params.num_window
             ? __ldg(params.window_idx + row_idx * params.num_window + place)
             : __ldg(params.extra_idx + static_cast<std::int64_t>(row_idx) * params.num_extra +
                     place - params.num_window);
}

// Where the key of a place is.
LOWLAT_DEVICE stages::KvRow<std::uint8_t> key_at(const AttentionParams& params, int place,
                                                 std::int32_t slot) {
  if (slot < 0) return {nullptr, nullptr};
  const KvPages& pages = place < params.num_window ? params.window : params.extra;
  return stages::KvPaged<std::uint8_t>{pages.base, pages.slots_per_page, pages.page_bytes}.row(
      slot);
}

// Of a row's keys, eights.
constexpr int keys_per_block(int num_keys, int num_blocks) {
  return ((num_keys + num_blocks - 1) / num_blocks + 7) / 8 * 8;
}

// The keys of a block, of those that its row sees.
struct KeySpan {
  int first, end;
  // Of all that a row sees only the last entry may be the step's own. Where entries are selected, a
  // row's last block waits also if the row sees none: what opens the gate has read x by then, which
  // a later kernel of the chain overwrites.
  bool selects;
};
LOWLAT_DEVICE KeySpan keys_of_block(const AttentionParams& params, int row_idx, int block_idx,
                                    int num_blocks) {
  int num_keys = params.num_window + params.num_extra;
  bool completes = true;
  if (params.extra_ratio > 0) {
    const int count = __ldg(params.positions + row_idx) + 1, seen = count / params.extra_ratio;
    num_keys = params.num_window + min(seen, params.num_extra);
    // A request has at most the step's rows.
    completes = count - seen * params.extra_ratio < params.num_rows;
  }
  const int per_block = keys_per_block(num_keys, num_blocks);
  const int first = min(block_idx * per_block, num_keys);
  const int end = min(first + per_block, num_keys);
  const bool selects =
      params.selected.word != nullptr && completes && (end > params.num_window || end == num_keys);
  return {first, end, selects};
}

// Stored keys that come whole, each by eight threads of a warp: a thread has every eighth of its
// pieces of sixteen bytes, and of each group under a scale eight codes.
constexpr int kDataBytes = stages::kKvDataBytes, kGroups = stages::kKvNumGroups;
// A key's sixteen bytes that hold its eight of scales: copies of eight would go by way of the
// first-level cache, which may be older.
constexpr int kScaleBytes = 16;
constexpr int kKeyThreads = 8, kKeysAtOnce = kThreads / kKeyThreads;
static_assert(kNope == kGroups * kKeyThreads * 8 && shape::kRopeDim == kKeyThreads * 8);

// As copy_16, of `bytes` bytes and zeros behind them.
LOWLAT_DEVICE void copy_or_clear(void* dst_shared, const void* src, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(sm90::shared_address(dst_shared)),
      "l"(__cvta_generic_to_global(src)), "r"(bytes)
      : "memory");
}

// Asks for the calling thread's pieces of a key, whose bytes go to `data` and scales to
// `to_scales`. What is not used is zeros.
LOWLAT_DEVICE void ask_for_pieces(unsigned char* data, unsigned char* to_scales,
                                  const std::uint8_t* row, const std::uint8_t* row_scales,
                                  bool used, const void* any) {
  const int own = plat::thread_idx() % kKeyThreads, bytes = used ? 16 : 0;
  const auto* from = used ? row : static_cast<const std::uint8_t*>(any);
  constexpr int kTurns = kDataBytes / 16 / kKeyThreads, kRest = kDataBytes / 16 % kKeyThreads;
  unsigned char* to = data + own * 16;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    copy_or_clear(to + i * kKeyThreads * 16, from + (i * kKeyThreads + own) * 16, bytes);
  }
  if (own < kRest) {
    copy_or_clear(to + kTurns * kKeyThreads * 16, from + (kTurns * kKeyThreads + own) * 16, bytes);
  } else if (own == kRest) {
    const std::uintptr_t scales = reinterpret_cast<std::uintptr_t>(used ? row_scales : from);
    copy_or_clear(to_scales,
                  reinterpret_cast<const void*>(scales & ~std::uintptr_t{kScaleBytes - 1}), bytes);
  }
}
// Where in its sixteen bytes the scales are.
LOWLAT_DEVICE bool in_high_half(const std::uint8_t* scales) {
  return (reinterpret_cast<std::uintptr_t>(scales) & 8u) != 0u;
}

// Four codes as two pairs of bf16 under 2^-120: sign to bit 15, the rest to bits 10 .. 4 is the
// value times 2^-120, subnormal codes too.
LOWLAT_DEVICE void small_pairs(std::uint32_t codes, std::uint32_t (&pairs)[2]) {
  const std::uint32_t even = (codes << 4 & 0x07f0'07f0u) | (codes << 8 & 0x8000'8000u);
  const std::uint32_t odd = (codes >> 4 & 0x07f0'07f0u) | (codes & 0x8000'8000u);
  pairs[0] = __byte_perm(even, odd, 0x5410);
  pairs[1] = __byte_perm(even, odd, 0x7632);
}
LOWLAT_DEVICE std::uint32_t twice(std::uint32_t bf16) { return bf16 | bf16 << 16; }

// The calling thread's part of a key as bf16: store(i, its eight values of the 64 dimensions i).
template <class Store>
LOWLAT_DEVICE void expand_pieces(const unsigned char* data, const unsigned char* its_scales,
                                 bool high_half, Store store) {
  const int own = plat::thread_idx() % kKeyThreads;
  const uint2 scales = *reinterpret_cast<const uint2*>(its_scales + (high_half ? 8 : 0));
  const auto scale_code = [&](int group) {
    return (group < 4 ? scales.x >> 8 * group : scales.y >> 8 * (group - 4)) & 0xffu;
  };
  const auto expand = [&](int group, std::uint32_t first, std::uint32_t second) {
    const uint2 codes = *reinterpret_cast<const uint2*>(data + own * 8 + group * kKeyThreads * 8);
    std::uint32_t low[2], high[2];
    small_pairs(codes.x, low);
    small_pairs(codes.y, high);
    const auto scaled = [&](std::uint32_t pair) {
      pair = sm90::multiply_bf16_pairs(pair, first);
      return second == 0u ? pair : sm90::multiply_bf16_pairs(pair, second);
    };
    store(group, make_uint4(scaled(low[0]), scaled(low[1]), scaled(high[0]), scaled(high[1])));
  };
  // A scale of 2^7 and below is multiplied together with 2^120; larger ones, which only values
  // beyond 57,344 have, after it.
  constexpr std::uint32_t kMost = 0x8686'8686u, kOfGroups = 0x00ff'ffffu;
  if ((__vcmpgtu4(scales.x, kMost) | __vcmpgtu4(scales.y & kOfGroups, kMost)) == 0u) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      expand(group, twice((scale_code(group) + 120u) << 7), 0u);
    }
  } else {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const std::uint32_t code = scale_code(group);
      expand(group, 0x7b80'7b80u, twice(code == 0u ? 0x40u : code << 7));
    }
  }
  // The dimensions that are stored as bf16.
  store(kGroups, *reinterpret_cast<const uint4*>(data + kNope + own * 16));
}

// A group of 32 values as f16 under a power of two. The group's largest goes to 2^13 .. 2^14;
// exponents are kept where both factors are normal; what is smaller than that is 0 in any fp32 sum.
LOWLAT_DEVICE PowerScale half_scale(float amax) {
  int exponent = static_cast<int>(plat::float_bits(amax) >> 23) - 127;
  exponent = max(min(exponent, 127), -100);
  return {plat::bits_float(static_cast<std::uint32_t>(127 + exponent - 13) << 23),
          plat::bits_float(static_cast<std::uint32_t>(127 + 13 - exponent) << 23)};
}

// e^v, which the approximation of 2^v decides; 0 of -inf and of what is no normal number.
LOWLAT_DEVICE float quick_exp(float v) {
  constexpr float kLog2e = 1.4426950408889634f;
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v * kLog2e));
  return out;
}

// What the blocks of a cluster have sent becomes this block's heads of o: four warps one, a thread
// four dimensions in a row. `shared` has the barriers and the parts, see attention.cu; all threads
// of the block call.
template <class M, bool kHops, class Memory>
LOWLAT_DEVICE void finish_heads(Memory& shared, const AttentionParams& params,
                                [[maybe_unused]] const HopTag& hop, Stamps& stamps, int row_idx,
                                int first_head, int block_idx, int num_blocks,
                                int heads_per_block) {
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  [[maybe_unused]] const int padded = padded_rows(params.num_rows);
  constexpr int kGroup = M::kScaleBlock, kDims = 4;
  constexpr int kAtOnce = kThreads * kDims / kDim, kLanes = kGroup / kDims;
  static_assert(kAtOnce >= 1 && kLanes <= plat::kWarpLanes);
  const int dim = thread_idx * kDims % kDim;
  float2 turn[kDims / 2];
#pragma unroll
  for (int j = 0; j < kDims / 2; ++j) turn[j] = shared.turn[max(dim - kNope, 0) / 2 + j];
#pragma unroll 1
  for (int i = thread_idx * kDims / kDim; i < heads_per_block; i += kAtOnce) {
    const int head = block_idx * heads_per_block + i;
    const std::int64_t place =
        (static_cast<std::int64_t>(row_idx) * params.num_heads + first_head + head) * kDim + dim;
    // The weight of each block's part of the head comes from a lane for each.
    const float sink = shared.sink[head];
    wait_for_cluster(&shared.weights, 0);
    {
      const int part = lane_idx % kHeads;
      const bool there = part < num_blocks;
      const float2 from = shared.part_weight[(there ? part : 0) * heads_per_block + i];
      const float top = there ? from.x : -INFINITY;
      float weight = there ? from.y : 0.0f;
      float most = fmaxf(top, sink);
#pragma unroll
      for (int mask = 1; mask < kHeads; mask *= 2) {
        most = fmaxf(__shfl_xor_sync(plat::kAllLanes, most, mask), most);
      }
      const float base = most == -INFINITY ? 0.0f : most;
      const float factor = quick_exp(top - base);
      weight *= factor;
#pragma unroll
      for (int mask = 1; mask < kHeads; mask *= 2) {
        weight += __shfl_xor_sync(plat::kAllLanes, weight, mask);
      }
      weight += quick_exp(sink - base);
      __syncwarp();
      shared.factor[warp_idx][part] = weight > 0.0f ? __fdividef(factor, weight) : 0.0f;
      __syncwarp();
    }
    wait_for_cluster(&shared.parts, 0);
    stamps.mark(StampStage::sum);
    float v[kDims] = {};
    const auto add_parts = [&]<int kCount>(int first) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint2 pairs =
            *reinterpret_cast<const uint2*>(&shared.part[(first + j) * heads_per_block + i][dim]);
        const float factor = shared.factor[warp_idx][first + j];
        v[0] = plat::fma(sm90::low_bf16(pairs.x), factor, v[0]);
        v[1] = plat::fma(sm90::high_bf16(pairs.x), factor, v[1]);
        v[2] = plat::fma(sm90::low_bf16(pairs.y), factor, v[2]);
        v[3] = plat::fma(sm90::high_bf16(pairs.y), factor, v[3]);
      }
    };
    if (num_blocks == kHeads) {
      add_parts.template operator()<kHeads>(0);
    } else {
#pragma unroll 1
      for (int first = 0; first < num_blocks; first += 2) add_parts.template operator()<2>(first);
    }
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kDims; j += 2) {
      v[j] = quick_bf16(v[j]);
      v[j + 1] = quick_bf16(v[j + 1]);
      if (dim >= kNope) {
        const float turned = v[j] * turn[j / 2].x + v[j + 1] * turn[j / 2].y;
        v[j + 1] = quick_bf16(v[j + 1] * turn[j / 2].x - v[j] * turn[j / 2].y);
        v[j] = quick_bf16(turned);
      }
      amax = fmaxf(fmaxf(plat::abs(v[j]), plat::abs(v[j + 1])), amax);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      amax = fmaxf(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
    }
    const bool quantizes = M::kQuantizedO && !params.plain_o;
    const PowerScale group = quantizes ? power_scale(amax) : half_scale(amax);
    std::uint32_t pairs[kDims / 2];
#pragma unroll
    for (int j = 0; j < kDims; j += 2) {
      float a = v[j] * group.inverse, b = v[j + 1] * group.inverse;
      if (quantizes) {
        std::uint32_t values[2];
        sm90::e4m3_to_f16(values, sm90::to_e4m3_pair(a, b));
        pairs[j / 2] = values[0];
      } else {
        pairs[j / 2] = sm90::to_f16_pair(a, b);
      }
    }
    if constexpr (kHops) {
      send_packet(static_cast<plat::TaggedWords*>(params.packets.o) + place / 4, hop.tag, pairs[0],
                  pairs[1], plat::float_bits(group.scale));
    } else {
      *reinterpret_cast<uint2*>(params.o + place) = make_uint2(pairs[0], pairs[1]);
      if (dim % kGroup == 0) {
        params.o_scale[((first_head + head) * (kDim / kGroup) + dim / kGroup) * padded + row_idx] =
            group.scale;
      }
    }
  }
}

}  // namespace lowlat::nvidia::fused::attention
