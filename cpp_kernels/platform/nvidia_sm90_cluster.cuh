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

// Every thread of the cluster calls arrive, then wait. What a thread wrote to any block's shared
// memory before it arrived is visible after the wait. Threads that have ended count as arrived.
LOWLAT_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
LOWLAT_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
LOWLAT_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address, in the cluster's window, of the same variable in another block's shared memory.
LOWLAT_DEVICE std::uint32_t peer_address(const void* shared, int rank) {
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(shared)), "r"(rank));
  return address;
}
LOWLAT_DEVICE void store_peer(std::uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
LOWLAT_DEVICE void store_peer(std::uint32_t address, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b)
               : "memory");
}
LOWLAT_DEVICE float load_peer(std::uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
LOWLAT_DEVICE void load_peer(std::uint32_t address, float& a, float& b) {
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(a), "=f"(b)
               : "r"(address)
               : "memory");
}

}  // namespace lowlat::nvidia::sm90
