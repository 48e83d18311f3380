// platform/amd_types.hpp: sizes and types of the platform amd, the same for the compiler of code
// objects (platform/amd.hpp) and for the host's, which lays out what kernels read
// (platform/amd_host.hpp).
#pragma once

#ifndef LOWLAT_PLATFORM
#error "platform/amd.hpp or platform/amd_host.hpp includes this file"
#endif

#include <cstdint>

#include "platform/tile_types.hpp"

namespace lowlat::amd::plat {

inline constexpr const char* kName = "amd";
inline constexpr int kWarpLanes = 64;
inline constexpr int kEarlyLines = 4;          // with 16 lanes a row of 8 KB
inline constexpr bool kMarlinExperts = false;  // host/amd/model.cpp refuses them
inline constexpr bool kTileProducts = true;    // platform/amd_tile.hpp
template <int kThreads>
struct Block {
  static_assert(kThreads % kWarpLanes == 0 && kThreads <= 1024);
  static constexpr int kNumThreads = kThreads;
};

enum class Scope { block, device, system };

// Three words of payload and the epoch they belong to, written and read together.
struct alignas(16) TaggedWords {
  std::uint32_t payload[3];
  std::uint32_t tag;
};
static_assert(sizeof(TaggedWords) == 16);
inline constexpr int kTaggedPayload = 3;

// Of s_memrealtime, which runs at 100 MHz on gfx942 and gfx950; the host asks its runtime and
// refuses another rate.
inline constexpr std::uint64_t kClockTickNs = 10;

}  // namespace lowlat::amd::plat
