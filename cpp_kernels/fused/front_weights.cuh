// fused/front_weights.cuh: waiting for weights that a block asked for itself.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "platform/nvidia_sm90.cuh"

namespace lowlat::nvidia::fused {

// Waits for bulk copies from the device's own memory. They land, or the device is lost: the second
// is there so that even then no thread spins for ever. Any thread calls.
LOWLAT_DEVICE void wait_for_weights(std::uint64_t* barrier, std::uint32_t parity) {
  if (sm90::barrier_try_wait(barrier, parity)) return;
  constexpr std::uint64_t kSecondNs = 1'000'000'000;
  sm90::barrier_wait(barrier, parity, plat::clock_ns() + kSecondNs);
}

}  // namespace lowlat::nvidia::fused
