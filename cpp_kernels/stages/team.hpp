// stages/team.hpp: who calls a stage: a block, one warp of it, or one thread alone.
//
// A stage's parameter `Block` is one of
//   plat::Block<N>   all N threads of the block call, with the same arguments
//   Warp             all lanes of one warp call; warps may do different work, each with a Scratch
//   OneThread        one thread calls, whatever runs beside it: no collective and no barrier
// and is OneThread where a caller names none. On scalar all three are one thread. Results are in
// memory and, where a stage returns something, in every thread of the team.
//
// A stage says whether it syncs at its end. Where it does not, what it wrote is for the thread that
// wrote it until the caller syncs.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::stages {

struct OneThread {
  static constexpr int kNumThreads = 1;
};
struct Warp {
  static constexpr int kNumThreads = plat::kWarpLanes;
};

template <class Block>
struct IsWarp {
  static constexpr bool kValue = false;
};
template <>
struct IsWarp<Warp> {
  static constexpr bool kValue = plat::kWarpLanes > 1;
};

// Places, barriers and collectives of the threads that call a stage.
template <class Block>
struct Team {
  static constexpr int kNumThreads = Block::kNumThreads;
  static constexpr bool kAlone = kNumThreads == 1;
  static constexpr bool kOneWarp = IsWarp<Block>::kValue;
  static constexpr int kLanes = kAlone ? 1 : plat::kWarpLanes;
  static constexpr int kNumWarps = kNumThreads / kLanes;
  static_assert(kNumThreads % kLanes == 0);

  LOWLAT_DEVICE static int thread_idx() {
    if constexpr (kAlone) {
      return 0;
    } else if constexpr (kOneWarp) {
      return plat::thread_idx() % plat::kWarpLanes;
    } else {
      return plat::thread_idx();
    }
  }
  LOWLAT_DEVICE static int lane() { return thread_idx() % kLanes; }
  LOWLAT_DEVICE static int warp_idx() { return plat::warp_uniform(thread_idx() / kLanes); }
  LOWLAT_DEVICE static bool leads() { return thread_idx() == 0; }

  LOWLAT_DEVICE static void sync() {
    if constexpr (kOneWarp) {
      plat::warp_sync();
    } else if constexpr (!kAlone) {
      plat::block_sync();
    }
  }
  // True in every thread when one said true. Syncs.
  LOWLAT_DEVICE static bool any(bool mine) {
    if constexpr (kAlone) {
      return mine;
    } else if constexpr (kOneWarp) {
      plat::warp_sync();
      return plat::warp_ballot(mine) != 0u;
    } else {
      return plat::block_any(mine);
    }
  }

  // Over the lanes of the caller's warp, as the platform's; alone, of the one thread.
  LOWLAT_DEVICE static float warp_sum(float v) {
    if constexpr (kAlone) {
      return v;
    } else {
      return plat::warp_sum(v);
    }
  }
  LOWLAT_DEVICE static float warp_max(float v) {
    if constexpr (kAlone) {
      return v;
    } else {
      return plat::warp_max(v);
    }
  }
  LOWLAT_DEVICE static std::uint64_t warp_ballot(bool mine) {
    if constexpr (kAlone) {
      return mine ? 1u : 0u;
    } else {
      return plat::warp_ballot(mine);
    }
  }
  // Lanes before the caller that said true, of a ballot.
  LOWLAT_DEVICE static int lanes_before(std::uint64_t ballot) {
    return plat::popcount(ballot & ((std::uint64_t{1} << lane()) - 1u));
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
