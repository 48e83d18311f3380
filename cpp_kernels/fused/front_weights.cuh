// fused/front_weights.cuh: waiting for what a block asked for itself, or its cluster sends it.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"

namespace lowlat::nvidia::fused {

// Both land, or the device is lost: the hour is there so that even then no thread spins for ever.
// Not less, because a block of the cluster may wait for a peer as long as a model's budget says,
// and then sends all the same; whoever had given up before would add what is not there, and nobody
// would be told. The clock is looked at rarely, because that takes as long as what is waited for.
inline constexpr std::uint64_t kSecondNs = 1'000'000'000, kLostNs = 3600 * kSecondNs;
inline constexpr int kWaitsPerLook = 256;

// Waits for bulk copies from the device's own memory. Any thread calls.
LOWLAT_DEVICE void wait_for_weights(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint64_t deadline_ns = 0;
  for (int tries = 1; !sm90::barrier_try_wait(barrier, parity); ++tries) {
    if (tries % kWaitsPerLook != 0) continue;
    const std::uint64_t now_ns = plat::clock_ns();
    if (deadline_ns == 0) deadline_ns = now_ns + kLostNs;
    if (now_ns > deadline_ns) return;
  }
}

// Waits for what the blocks of the cluster send. Any thread calls.
LOWLAT_DEVICE void wait_for_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint64_t deadline_ns = 0;
  for (int tries = 1; !sm90::barrier_try_wait_cluster(barrier, parity); ++tries) {
    if (tries % kWaitsPerLook != 0) continue;
    const std::uint64_t now_ns = plat::clock_ns();
    if (deadline_ns == 0) deadline_ns = now_ns + kLostNs;
    if (now_ns > deadline_ns) return;
  }
}

// Copies 16 bytes from global to shared memory, past the first-level cache; nothing waits until
// wait_for_copies, which waits for all that the calling thread has asked for.
LOWLAT_DEVICE void copy_16(void* dst_shared, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}
LOWLAT_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Makes a group of what the calling thread has asked for since the last; then waits for all groups
// but the kLast last.
LOWLAT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLast>
LOWLAT_DEVICE void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
}

}  // namespace lowlat::nvidia::fused
