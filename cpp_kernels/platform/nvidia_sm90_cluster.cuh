// platform/nvidia_sm90_cluster.cuh: block clusters of sm_90 and later: place, barrier, and the
// shared memory of the other blocks. Include platform/nvidia_sm90.cuh first.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

// Place of this block in its cluster, and how many blocks that has.
LOWLAT_DEVICE int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
LOWLAT_DEVICE int cluster_size() {
  std::uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

// Every thread of the cluster calls arrive, then wait. Threads that have ended count as arrived.
//
// cluster_arrive: what a thread wrote to any block's shared memory before it arrived is visible
// after the wait. That takes a fence over all of its memory accesses; cluster_arrive_relaxed has
// none and tells only that the thread got here (and, after fence_barrier_init, of barriers).
LOWLAT_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
LOWLAT_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
LOWLAT_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's window, of the same variable in another block's shared memory.
LOWLAT_DEVICE std::uint32_t peer_address(const void* shared, int rank) {
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(shared)), "r"(rank));
  return address;
}
// Stores v at `address`, and counts four bytes on the barrier at `barrier` once it is there; both
// are addresses in the window, of one block. Who waits for that barrier by barrier_try_wait_cluster
// sees v: no fence is needed.
LOWLAT_DEVICE void send_to_peer(std::uint32_t address, float v, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(v)), "r"(barrier)
      : "memory");
}
// The same with 16 bytes, or two floats; the address is aligned to them.
LOWLAT_DEVICE void send_to_peer(std::uint32_t address, uint4 v, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
LOWLAT_DEVICE void send_to_peer(std::uint32_t address, float a, float b, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::
          "r"(address),
      "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(barrier)
      : "memory");
}
// As barrier_try_wait, for what other blocks of the cluster have sent.
LOWLAT_DEVICE bool barrier_try_wait_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2;\n"
      "selp.b32 %0, 1, 0, over;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0u;
}

}  // namespace lowlat::nvidia::sm90
