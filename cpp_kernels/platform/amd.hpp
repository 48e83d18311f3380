// platform/amd.hpp: HIP without ROCm: a block is a workgroup, a warp a wave of 64 lanes. Compiled
// by clang -x hip for gfx942 and gfx950, with no header and no device library of a vendor. It never
// ran on an AMD GPU; docs/amd.md says what was run instead.
//
// Arithmetic is IEEE where the contract says "rounded once": the build passes -ffp-contract=off,
// division and square root are the exact ones, and denormals are kept. exp, log, pow, sin and cos
// are platform/amd_math.hpp's, products of tiles platform/amd_tile.hpp's; platform/amd_mfma.hpp has
// the matrix unit's products of 8 and 4 bits on both sides. What each name means is in
// platform/contract.hpp.
#pragma once

#ifndef __HIP__
#error "platform/amd.hpp is compiled as HIP"
#endif

#include <cstdint>

#define LOWLAT_PLATFORM amd
#define LOWLAT_DEVICE __attribute__((device)) inline
// Inlined too: a call passes its arguments through the stack, and that is memory here.
#define LOWLAT_UNIT __attribute__((device, always_inline)) inline
#define LOWLAT_TABLE static __attribute__((device)) constexpr
#define LOWLAT_SHARED(type, name) __attribute__((shared)) type name
// A kernel of `threads` threads a block, of which a compute unit holds one or more: at one wave a
// SIMD each may use all registers.
#define LOWLAT_KERNEL(threads)                                                     \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), \
                            amdgpu_waves_per_eu(1))) void

#include "platform/amd_math.hpp"
#include "platform/amd_tile.hpp"
#include "platform/amd_types.hpp"

namespace lowlat::amd::plat {

LOWLAT_DEVICE int thread_idx() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
// The workgroup's number in its launch.
LOWLAT_DEVICE int block_idx() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
LOWLAT_DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
LOWLAT_DEVICE void warp_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
LOWLAT_DEVICE std::uint64_t warp_ballot(bool mine) { return __builtin_amdgcn_ballot_w64(mine); }
LOWLAT_DEVICE bool block_any(bool mine) {
  using Said = std::uint32_t[16];  // of each wave; a block has 16 at most
  LOWLAT_SHARED(Said, said);
  const int warp_idx = thread_idx() / kWarpLanes;
  const bool here = warp_ballot(mine) != 0u;
  if (thread_idx() % kWarpLanes == 0) said[warp_idx] = here ? 1u : 0u;
  block_sync();
  const int num_warps = static_cast<int>(__builtin_amdgcn_workgroup_size_x()) / kWarpLanes;
  std::uint32_t any = 0u;
  for (int i = 0; i < num_warps; ++i) any |= said[i];
  block_sync();
  return any != 0u;
}
LOWLAT_DEVICE std::uint32_t float_bits(float v) { return __builtin_bit_cast(std::uint32_t, v); }
LOWLAT_DEVICE float bits_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
LOWLAT_DEVICE std::uint32_t warp_shuffle(std::uint32_t v, int lane) {
  return static_cast<std::uint32_t>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(v)));
}
LOWLAT_DEVICE float warp_shuffle(float v, int lane) {
  return bits_float(warp_shuffle(float_bits(v), lane));
}
LOWLAT_DEVICE std::uint32_t warp_shuffle_xor(std::uint32_t v, int mask) {
  return warp_shuffle(v, (thread_idx() % kWarpLanes) ^ mask);
}
LOWLAT_DEVICE float warp_shuffle_xor(float v, int mask) {
  return bits_float(warp_shuffle_xor(float_bits(v), mask));
}
LOWLAT_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) v += warp_shuffle_xor(v, mask);
  return v;
}
LOWLAT_DEVICE float warp_max(float v) {
#pragma unroll
  for (int mask = kWarpLanes / 2; mask > 0; mask /= 2) {
    const float other = warp_shuffle_xor(v, mask);
    v = v != v || other > v ? other : v;
  }
  return v;
}
LOWLAT_DEVICE int warp_uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
LOWLAT_DEVICE int popcount(std::uint64_t bits) { return __builtin_popcountll(bits); }

LOWLAT_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LOWLAT_DEVICE float sqrt(float v) { return __builtin_sqrtf(v); }
LOWLAT_DEVICE float rsqrt(float v) { return 1.0f / __builtin_sqrtf(v); }
LOWLAT_DEVICE float exp(float v) { return math::exp(v); }
LOWLAT_DEVICE float log(float v) { return math::log(v); }
LOWLAT_DEVICE float log1p(float v) { return math::log1p(v); }
LOWLAT_DEVICE float pow(float base, float exponent) { return math::pow(base, exponent); }
LOWLAT_DEVICE float sin(float v) { return math::sin(v); }
LOWLAT_DEVICE float cos(float v) { return math::cos(v); }
LOWLAT_DEVICE float abs(float v) { return __builtin_fabsf(v); }
LOWLAT_DEVICE float min(float a, float b) { return a < b ? a : b; }
LOWLAT_DEVICE float max(float a, float b) { return a > b ? a : b; }
LOWLAT_DEVICE float copysign(float magnitude, float sign) {
  return __builtin_copysignf(magnitude, sign);
}

// Memory order. The scope is always said in full.
template <Scope kScope>
inline constexpr int kHipScope = kScope == Scope::block    ? __HIP_MEMORY_SCOPE_WORKGROUP
                                 : kScope == Scope::device ? __HIP_MEMORY_SCOPE_AGENT
                                                           : __HIP_MEMORY_SCOPE_SYSTEM;
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t load_acquire(const std::uint32_t* word) {
  return __hip_atomic_load(word, __ATOMIC_ACQUIRE, kHipScope<kScope>);
}
// The comment is for who reads the code: the load is before it.
LOWLAT_DEVICE void keep(std::uint32_t v) { asm volatile("; kept %0" ::"v"(v)); }
// An acquire drops what the caches hold, so a wait does it once and not at every look.
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t load_poll(const std::uint32_t* word) {
  return __hip_atomic_load(word, __ATOMIC_RELAXED, kHipScope<kScope>);
}
template <Scope kScope>
LOWLAT_DEVICE void fence_polled() {
  if constexpr (kScope == Scope::block) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  } else if constexpr (kScope == Scope::device) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  }
}
template <Scope kScope>
LOWLAT_DEVICE void store_release(std::uint32_t* word, std::uint32_t value) {
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, kHipScope<kScope>);
}
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t atomic_add(std::uint32_t* word, std::uint32_t value) {
  return __hip_atomic_fetch_add(word, value, __ATOMIC_RELAXED, kHipScope<kScope>);
}
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t atomic_cas(std::uint32_t* word, std::uint32_t expected,
                                       std::uint32_t desired) {
  __hip_atomic_compare_exchange_strong(word, &expected, desired, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       kHipScope<kScope>);
  return expected;
}

// One access of 16 aligned bytes past all caches: global_store_dwordx4 and global_load_dwordx4 with
// sc0 sc1 (a test reads them in the code objects). That a peer sees such an access whole is what
// these parts are seen to do and no manual promises; the owner's script of docs/amd.md looks for a
// packet in two pieces. Relaxed is enough: nothing else is published by the tag.
using Packet = std::uint32_t __attribute__((ext_vector_type(4)));
LOWLAT_DEVICE void store_tagged(TaggedWords* dst, const std::uint32_t (&payload)[kTaggedPayload],
                                std::uint32_t tag) {
  const Packet packet = {payload[0], payload[1], payload[2], tag};
  asm volatile("global_store_dwordx4 %0, %1, off sc0 sc1" ::"v"(dst), "v"(packet) : "memory");
}
// True and the payload when `src` carries `tag`; false (out untouched) when it does not yet.
LOWLAT_DEVICE bool load_tagged(const TaggedWords* src, std::uint32_t tag,
                               std::uint32_t (&out_payload)[kTaggedPayload]) {
  Packet packet;
  // The compiler counts no access of an asm, so the wait for it is here.
  asm volatile(
      "global_load_dwordx4 %0, %1, off sc0 sc1\n"
      "s_waitcnt vmcnt(0)"
      : "=v"(packet)
      : "v"(src)
      : "memory");
  if (packet.w != tag) return false;
  out_payload[0] = packet.x;
  out_payload[1] = packet.y;
  out_payload[2] = packet.z;
  return true;
}

LOWLAT_DEVICE void spin_pause() { __builtin_amdgcn_s_sleep(1); }
// The device's clock that never changes its rate, nanoseconds.
LOWLAT_DEVICE std::uint64_t clock_ns() { return __builtin_readsteadycounter() * kClockTickNs; }

}  // namespace lowlat::amd::plat
