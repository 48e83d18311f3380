// fused/draft_key.cuh: candidates as integers whose order is the argmax rule's (stages/argmax.hpp):
// the score, a NaN on top and -0 as +0, then the lower id. 0 is no candidate.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::fused {

LOWLAT_DEVICE std::uint32_t score_key(float score) {
  const std::uint32_t bits = plat::float_bits(score + 0.0f);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return 0xffff'ffffu;
  return (bits & 0x8000'0000u) != 0u ? ~bits : bits | 0x8000'0000u;
}
LOWLAT_DEVICE std::uint64_t candidate(std::uint32_t key, std::uint32_t id) {
  return std::uint64_t{key} << 32 | ~id;
}
LOWLAT_DEVICE std::uint32_t key_of(std::uint64_t c) { return static_cast<std::uint32_t>(c >> 32); }
LOWLAT_DEVICE std::uint32_t id_of(std::uint64_t c) { return ~static_cast<std::uint32_t>(c); }
LOWLAT_DEVICE std::uint64_t better(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }

LOWLAT_DEVICE std::uint64_t better_of_lanes(std::uint64_t c, int lane_mask) {
  return better(c, __shfl_xor_sync(plat::kAllLanes, c, lane_mask));
}
// The best of a warp, in every lane.
LOWLAT_DEVICE std::uint64_t best_of_warp(std::uint64_t c) {
  const std::uint32_t key = __reduce_max_sync(plat::kAllLanes, key_of(c));
  const std::uint32_t low = key_of(c) == key ? static_cast<std::uint32_t>(c) : 0u;
  return std::uint64_t{key} << 32 | __reduce_max_sync(plat::kAllLanes, low);
}

}  // namespace lowlat::nvidia::fused
