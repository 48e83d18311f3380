// fused/front_weights.cuh: waiting for what a block asked for itself, or its cluster sends it.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"

namespace lowlat::nvidia::fused {

// Both land, or the device is lost: the second is there so that even then no thread spins for ever.
inline constexpr std::uint64_t kSecondNs = 1'000'000'000;

// Waits for bulk copies from the device's own memory. Any thread calls.
LOWLAT_DEVICE void wait_for_weights(std::uint64_t* barrier, std::uint32_t parity) {
  if (sm90::barrier_try_wait(barrier, parity)) return;
  sm90::barrier_wait(barrier, parity, plat::clock_ns() + kSecondNs);
}

// Waits for what the blocks of the cluster send. Any thread calls.
LOWLAT_DEVICE void wait_for_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  sm90::barrier_wait_cluster(barrier, parity, kSecondNs);
}

// Copies 16 bytes from global to shared memory, past the first-level cache; nothing waits until
// wait_for_copies, which waits for all that the calling thread has asked for.
LOWLAT_DEVICE void copy_16(void* dst_shared, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}
LOWLAT_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace lowlat::nvidia::fused
