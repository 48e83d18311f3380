// platform/cpu.hpp: what the two platforms of the CPU, scalar and emu, share: arithmetic, memory
// order, tagged words and the clock. They differ in who runs beside whom; the platform includes
// this file after its LOWLAT_PLATFORM and LOWLAT_DEVICE. platform/contract.hpp says what each name
// means.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "platform/scalar.hpp or platform/emu.hpp includes this file"
#endif

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#define LOWLAT_TABLE inline constexpr

namespace lowlat::LOWLAT_PLATFORM::plat {

// Arithmetic. fma is one rounding; everything else rounds once an operation (-ffp-contract=off).
LOWLAT_DEVICE float fma(float a, float b, float c) { return std::fma(a, b, c); }
LOWLAT_DEVICE float rsqrt(float v) { return 1.0f / std::sqrt(v); }
LOWLAT_DEVICE float sqrt(float v) { return std::sqrt(v); }
LOWLAT_DEVICE float exp(float v) { return std::exp(v); }
LOWLAT_DEVICE float log(float v) { return std::log(v); }
LOWLAT_DEVICE float log1p(float v) { return std::log1p(v); }
LOWLAT_DEVICE float pow(float base, float exponent) { return std::pow(base, exponent); }
LOWLAT_DEVICE float sin(float v) { return std::sin(v); }
LOWLAT_DEVICE float cos(float v) { return std::cos(v); }
LOWLAT_DEVICE float abs(float v) { return std::fabs(v); }
LOWLAT_DEVICE float min(float a, float b) { return a < b ? a : b; }
LOWLAT_DEVICE float max(float a, float b) { return a > b ? a : b; }
LOWLAT_DEVICE float copysign(float magnitude, float sign) { return std::copysign(magnitude, sign); }
LOWLAT_DEVICE std::uint32_t float_bits(float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
LOWLAT_DEVICE float bits_float(std::uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline constexpr bool kMarlinExperts = true;
inline constexpr bool kHostedDrafts = true;
LOWLAT_DEVICE int warp_uniform(int v) { return v; }
LOWLAT_DEVICE int popcount(std::uint64_t bits) { return std::popcount(bits); }

// Nothing is gained by asking early, but what is asked for must be there.
inline constexpr int kEarlyLines = 2;
LOWLAT_DEVICE void keep(std::uint32_t) {}

// Memory order. The scope is always said in full; on one host every scope is the host's.
enum class Scope { block, device, system };
template <Scope>
LOWLAT_DEVICE std::uint32_t load_acquire(const std::uint32_t* word) {
  return std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire);
}
// ThreadSanitizer knows no fences, and here an acquire costs nothing.
template <Scope kScope>
LOWLAT_DEVICE std::uint32_t load_poll(const std::uint32_t* word) {
  return load_acquire<kScope>(word);
}
template <Scope>
LOWLAT_DEVICE void fence_polled() {}
#ifndef LOWLAT_CPU_RELEASE_ORDER  // tests plant memory_order_relaxed here and must be caught
#define LOWLAT_CPU_RELEASE_ORDER std::memory_order_release
#endif
template <Scope>
LOWLAT_DEVICE void store_release(std::uint32_t* word, std::uint32_t value) {
  std::atomic_ref(*word).store(value, LOWLAT_CPU_RELEASE_ORDER);
}
template <Scope>
LOWLAT_DEVICE std::uint32_t atomic_add(std::uint32_t* word, std::uint32_t value) {
  return std::atomic_ref(*word).fetch_add(value, std::memory_order_relaxed);
}
template <Scope>
LOWLAT_DEVICE std::uint32_t atomic_cas(std::uint32_t* word, std::uint32_t expected,
                                       std::uint32_t desired) {
  std::atomic_ref(*word).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
  return expected;
}

// Three words of payload and the epoch they belong to, written and read together. Hardware
// platforms use one 16-byte access; here the tag is released after the payload and acquired
// before it, which is the same promise and lets ThreadSanitizer check who reads when.
struct alignas(16) TaggedWords {
  std::uint32_t payload[3];
  std::uint32_t tag;
};
static_assert(sizeof(TaggedWords) == 16);
inline constexpr int kTaggedPayload = 3;

LOWLAT_DEVICE void store_tagged(TaggedWords* dst, const std::uint32_t (&payload)[kTaggedPayload],
                                std::uint32_t tag) {
  for (int i = 0; i < kTaggedPayload; ++i) dst->payload[i] = payload[i];
  std::atomic_ref(dst->tag).store(tag, LOWLAT_CPU_RELEASE_ORDER);
}
// True and the payload when `src` carries `tag`; false (out untouched) when it does not yet.
LOWLAT_DEVICE bool load_tagged(const TaggedWords* src, std::uint32_t tag,
                               std::uint32_t (&out_payload)[kTaggedPayload]) {
  auto* words = const_cast<TaggedWords*>(src);
  if (std::atomic_ref(words->tag).load(std::memory_order_acquire) != tag) return false;
  for (int i = 0; i < kTaggedPayload; ++i) out_payload[i] = words->payload[i];
  return true;
}

LOWLAT_DEVICE std::uint64_t clock_ns() {
  using namespace std::chrono;
  return static_cast<std::uint64_t>(
      duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

}  // namespace lowlat::LOWLAT_PLATFORM::plat
