// fused/oproj_send.cuh: u on its way to wo_b, from the kernels of few rows.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "fused/exchange_hop.cuh"
#include "fused/front_quant.cuh"

namespace lowlat::nvidia::fused {

// A lane has four outputs of a group, which kLanes neighbouring lanes share: rounded to bf16, then
// quantised. Lanes that are `wanted`, every second one at most, send their own and the next lane's
// as the packet at place(). Whole warps call.
template <int kLanes, class Place>
LOWLAT_DEVICE void send_outputs(float (&v)[4], std::uint32_t tag, bool wanted, Place place) {
  static_assert(kLanes % 2 == 0 && kLanes <= plat::kWarpLanes);
  float amax = 0.0f;
#pragma unroll
  for (float& value : v) {
    value = quick_bf16(value);
    amax = plat::max(plat::abs(value), amax);
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
  }
  const PowerScale group = power_scale(amax);
  const std::uint32_t codes = sm90::to_e4m3_pair(v[0] * group.inverse, v[1] * group.inverse) |
                              sm90::to_e4m3_pair(v[2] * group.inverse, v[3] * group.inverse) << 16;
  const std::uint32_t next = __shfl_down_sync(plat::kAllLanes, codes, 1);
  if (!wanted) return;
  send_packet(place(), tag, codes, next, plat::float_bits(group.scale));
}

}  // namespace lowlat::nvidia::fused
