// platform/nvidia.hpp: CUDA: a block is a thread block, a warp 32 lanes. Compiled by nvcc only.
//
// Arithmetic is IEEE where the contract says "rounded once": the build passes -fmad=false, and
// division and square root are the exact ones. exp, log, pow, sin and cos are CUDA's own, within
// two units in the last place of the true value: what hangs on them is declared with a bound.
// Instructions of one architecture are in platform/nvidia_sm90.cuh. platform/contract.hpp says what
// each name means.
#pragma once

#ifndef __CUDACC__
#error "platform/nvidia.hpp is compiled by nvcc"
#endif

#include <cmath>
#include <cstdint>

#define LOWLAT_PLATFORM nvidia
#define LOWLAT_DEVICE __device__ inline
#define LOWLAT_UNIT __device__ __noinline__ inline
// A constant that device code indexes at run time: internal linkage, because an object file holds
// its own copy of device memory.
#define LOWLAT_TABLE static __device__ constexpr
#define LOWLAT_SHARED(type, name) __shared__ type name

namespace lowlat::nvidia::plat {

inline constexpr const char* kName = "nvidia";
inline constexpr int kWarpLanes = 32;
inline constexpr bool kMarlinExperts = true;
template <int kThreads>
struct Block {
  static_assert(kThreads % kWarpLanes == 0 && kThreads <= 1024);
  static constexpr int kNumThreads = kThreads;
};

// Every lane of a warp.
inline constexpr unsigned kAllLanes = 0xffff'ffffu;

LOWLAT_DEVICE int thread_idx() { return static_cast<int>(threadIdx.x); }
LOWLAT_DEVICE void block_sync() { __syncthreads(); }
LOWLAT_DEVICE bool block_any(bool mine) { return __syncthreads_or(mine ? 1 : 0) != 0; }
LOWLAT_DEVICE void warp_sync() { __syncwarp(); }
LOWLAT_DEVICE float warp_shuffle(float v, int lane) { return __shfl_sync(kAllLanes, v, lane); }
LOWLAT_DEVICE std::uint32_t warp_shuffle(std::uint32_t v, int lane) {
  return __shfl_sync(kAllLanes, v, lane);
}
LOWLAT_DEVICE float warp_shuffle_xor(float v, int mask) {
  return __shfl_xor_sync(kAllLanes, v, mask);
}
LOWLAT_DEVICE std::uint32_t warp_shuffle_xor(std::uint32_t v, int mask) {
  return __shfl_xor_sync(kAllLanes, v, mask);
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
LOWLAT_DEVICE std::uint64_t warp_ballot(bool mine) { return __ballot_sync(kAllLanes, mine); }
// As it is: the compiler's own branches bring a warp's threads together again.
LOWLAT_DEVICE int warp_uniform(int v) { return v; }
LOWLAT_DEVICE int popcount(std::uint64_t bits) { return __popcll(bits); }

LOWLAT_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LOWLAT_DEVICE float rsqrt(float v) { return __fdiv_rn(1.0f, __fsqrt_rn(v)); }
LOWLAT_DEVICE float sqrt(float v) { return __fsqrt_rn(v); }
LOWLAT_DEVICE float exp(float v) { return ::expf(v); }
LOWLAT_DEVICE float log(float v) { return ::logf(v); }
LOWLAT_DEVICE float log1p(float v) { return ::log1pf(v); }
LOWLAT_DEVICE float pow(float base, float exponent) { return ::powf(base, exponent); }
LOWLAT_DEVICE float sin(float v) { return ::sinf(v); }
LOWLAT_DEVICE float cos(float v) { return ::cosf(v); }
LOWLAT_DEVICE float abs(float v) { return ::fabsf(v); }
// As written, and not fminf: a NaN on the left gives the right operand, as on every platform.
LOWLAT_DEVICE float min(float a, float b) { return a < b ? a : b; }
LOWLAT_DEVICE float max(float a, float b) { return a > b ? a : b; }
LOWLAT_DEVICE float copysign(float magnitude, float sign) { return ::copysignf(magnitude, sign); }
LOWLAT_DEVICE std::uint32_t float_bits(float v) { return __float_as_uint(v); }
LOWLAT_DEVICE float bits_float(std::uint32_t bits) { return __uint_as_float(bits); }

// Memory order. The scope is always said in full.
enum class Scope { block, device, system };
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t load_acquire(const std::uint32_t* word) {
  std::uint32_t value;
  if constexpr (kScope == Scope::block) {
    asm volatile("ld.acquire.cta.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  } else if constexpr (kScope == Scope::device) {
    asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  } else {
    asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  }
  return value;
}
// The fused kernels ask early for themselves; the resident schedule is not about time here.
inline constexpr int kEarlyLines = 0;
LOWLAT_DEVICE void keep(std::uint32_t) {}
// An acquire is no dearer than a look here.
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t load_poll(const std::uint32_t* word) {
  return load_acquire<kScope>(word);
}
template <Scope>
LOWLAT_DEVICE void fence_polled() {}
template <Scope kScope>
LOWLAT_DEVICE void store_release(std::uint32_t* word, std::uint32_t value) {
  if constexpr (kScope == Scope::block) {
    asm volatile("st.release.cta.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  } else if constexpr (kScope == Scope::device) {
    asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  } else {
    asm volatile("st.release.sys.b32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
}

template <Scope kScope>
LOWLAT_DEVICE std::uint32_t atomic_add(std::uint32_t* word, std::uint32_t value) {
  if constexpr (kScope == Scope::block) {
    return atomicAdd_block(word, value);
  } else if constexpr (kScope == Scope::device) {
    return atomicAdd(word, value);
  } else {
    return atomicAdd_system(word, value);
  }
}
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t atomic_cas(std::uint32_t* word, std::uint32_t expected,
                                       std::uint32_t desired) {
  if constexpr (kScope == Scope::block) {
    return atomicCAS_block(word, expected, desired);
  } else if constexpr (kScope == Scope::device) {
    return atomicCAS(word, expected, desired);
  } else {
    return atomicCAS_system(word, expected, desired);
  }
}

// Three words of payload and the epoch they belong to, written and read together.
//
// Ordering: relaxed is enough. In PTX's memory model a .b128 access with a scope is one memory
// operation (a .v4.b32 would be four, in any order), and a relaxed one is morally strong against
// another of overlapping scope; so a load of the 16 bytes returns one store's 16 bytes whole, and a
// tag that matches says that this payload is the one stored with it. Nothing else is published by
// the tag: who needs that has load_acquire and store_release. .sys reaches a peer's memory over
// NVLink or PCIe as it does the own; the address is global and aligned to 16 bytes.
//
// A box is written again two epochs later at the earliest (stages/exchange.hpp), and its reader has
// read it before it publishes the epoch between: no fence is needed for reuse either.
struct alignas(16) TaggedWords {
  std::uint32_t payload[3];
  std::uint32_t tag;
};
static_assert(sizeof(TaggedWords) == 16);
inline constexpr int kTaggedPayload = 3;

LOWLAT_DEVICE void store_tagged(TaggedWords* dst, const std::uint32_t (&payload)[kTaggedPayload],
                                std::uint32_t tag) {
  const std::uint64_t low = payload[0] | static_cast<std::uint64_t>(payload[1]) << 32;
  const std::uint64_t high = payload[2] | static_cast<std::uint64_t>(tag) << 32;
  asm volatile(
      "{\n"
      ".reg .b128 packet;\n"
      "mov.b128 packet, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], packet;\n"
      "}" ::"l"(__cvta_generic_to_global(dst)),
      "l"(low), "l"(high)
      : "memory");
}
// True and the payload when `src` carries `tag`; false (out untouched) when it does not yet.
LOWLAT_DEVICE bool load_tagged(const TaggedWords* src, std::uint32_t tag,
                               std::uint32_t (&out_payload)[kTaggedPayload]) {
  std::uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 packet;\n"
      "ld.relaxed.sys.global.b128 packet, [%2];\n"
      "mov.b128 {%0, %1}, packet;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(__cvta_generic_to_global(src))
      : "memory");
  if (static_cast<std::uint32_t>(high >> 32) != tag) return false;
  out_payload[0] = static_cast<std::uint32_t>(low);
  out_payload[1] = static_cast<std::uint32_t>(low >> 32);
  out_payload[2] = static_cast<std::uint32_t>(high);
  return true;
}

LOWLAT_DEVICE void spin_pause() { __nanosleep(20); }
// The device's own clock, nanoseconds; it moves in steps of up to a microsecond.
LOWLAT_DEVICE std::uint64_t clock_ns() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// The fused kernels have the tensor core; the resident schedule keeps one order of sums.
inline constexpr bool kTileProducts = false;

}  // namespace lowlat::nvidia::plat

#include "platform/tile_plain.hpp"
