// platform/scalar.hpp: a block is one thread and a warp one lane. Collectives are the identity,
// order is real.
//
// Every stage becomes ordinary C++ here: it runs, is debugged and is sanitised on a machine with
// no GPU, with one thread a rank. platform/contract.hpp says what each name means.
#pragma once

#include <thread>

#define LOWLAT_PLATFORM scalar
#define LOWLAT_DEVICE inline
#define LOWLAT_UNIT inline
#define LOWLAT_SHARED(type, name) type name

#include "platform/cpu.hpp"

namespace lowlat::scalar::plat {

inline constexpr const char* kName = "scalar";
inline constexpr int kWarpLanes = 1;
template <int kThreads>
struct Block {
  static constexpr int kNumThreads = 1;
};

LOWLAT_DEVICE int thread_idx() { return 0; }
LOWLAT_DEVICE void block_sync() {}
LOWLAT_DEVICE bool block_any(bool mine) { return mine; }
LOWLAT_DEVICE void warp_sync() {}
LOWLAT_DEVICE float warp_sum(float v) { return v; }
LOWLAT_DEVICE float warp_max(float v) { return v; }
LOWLAT_DEVICE float warp_shuffle(float v, int) { return v; }
LOWLAT_DEVICE std::uint32_t warp_shuffle(std::uint32_t v, int) { return v; }
LOWLAT_DEVICE float warp_shuffle_xor(float v, int) { return v; }
LOWLAT_DEVICE std::uint32_t warp_shuffle_xor(std::uint32_t v, int) { return v; }
LOWLAT_DEVICE std::uint64_t warp_ballot(bool mine) { return mine ? 1u : 0u; }

LOWLAT_DEVICE void spin_pause() { std::this_thread::yield(); }

// One lane is no tile.
inline constexpr bool kTileProducts = false;

}  // namespace lowlat::scalar::plat

#include "platform/tile_plain.hpp"
