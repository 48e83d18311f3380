// fused/stream.cuh: the core of every product with few rows on Hopper: weights stream through
// shared memory once, are expanded to bf16 in registers and meet the rows in mma.m16n8k16.
//
// Weights are the M side (16 weight rows a tile), up to 8 activation rows the N side. e4m3 weights,
// bf16 weights and quantised activations are exact in bf16, fp4 codes in fp16.
//
// Order along K   The order is free as long as both sides use the same one. A thread (lane
//                 4 g + t of a warp) owns a *run* of consecutive K elements of weight rows g and
//                 g + 8 and of activation row g: 8 or 16 elements, four threads' runs side by side.
//                 Inside a run each 8 elements are paired (0,4) (1,5) (2,6) (3,7): what a 32-bit
//                 word of fp4 codes gives.
// Ordering        full[s]   one arrival (the producer's, with the bytes) and the copies' bytes; the
//                 consumers' wait acquires them. empty[s]  one arrival a consuming warp, after its
//                 last read; the producer's wait before it copies into slot s again. Parity of the
//                 n-th use of a slot is n & 1 for full, and a producer skips the first wait.
//                 late   every wait goes through Watch: when one for another block or rank is late,
//                 or a peer's abort word is up, all roles leave.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "platform/nvidia.hpp"
#include "platform/nvidia_sm90.cuh"

namespace lowlat::nvidia::fused {

// ------------------------------------------------------------------------------------ deadlines

// Why a wait of this block ended without its event; 0: none did.
enum class Stop : std::uint32_t { none = 0, expired = 1, aborted = 2 };

// The block's one deadline, and its end of work. Waits for other blocks or ranks look at the clock
// and at the abort word; waits inside the block (mbarriers) end because those do, and because a
// copy that was begun lands: they look at `stop` alone, which keeps the loops that wait short.
struct Watch {
  std::uint64_t deadline_ns;
  std::uint32_t* stop;              // shared memory, 0 at the start
  const std::uint32_t* abort_word;  // of this rank, in global memory, or nullptr

  LOWLAT_DEVICE bool stopped() const { return plat::load_acquire<plat::Scope::block>(stop) != 0u; }
  // Called by a wait for others that has just failed: true when it has to end. `event` (not 0) is
  // stored with the first reason, as reason << 28 | event, so that a report can name what did not
  // arrive.
  LOWLAT_DEVICE bool ended(std::uint32_t event) const {
    if (stopped()) return true;
    Stop why = Stop::none;
    if (abort_word != nullptr) {
      std::uint32_t raised;
      asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(raised) : "l"(abort_word));
      if (raised != 0) why = Stop::aborted;
    }
    if (why == Stop::none && plat::clock_ns() > deadline_ns) why = Stop::expired;
    if (why == Stop::none) return false;
    atomicCAS(stop, 0u, static_cast<std::uint32_t>(why) << 28 | event);
    return true;
  }
};

// Tries between two looks: at the clock and the abort word a look takes a microsecond itself.
inline constexpr int kTriesPerLook = 64;

// Waits for a barrier's phase of this parity. False: the block has to leave.
LOWLAT_DEVICE bool barrier_wait(std::uint64_t* barrier, std::uint32_t parity, const Watch& watch) {
  while (!sm90::barrier_try_wait(barrier, parity)) {
    if (watch.stopped()) return false;
  }
  return true;
}

// The same where only this block's copies and warps are waited for, which never stop halfway: a
// warp group has to stay together for its products.
LOWLAT_DEVICE void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  while (!sm90::barrier_try_wait(barrier, parity)) {
  }
}

// The same for loops whose every instruction counts: barrier and stop word by their addresses in
// shared memory.
LOWLAT_DEVICE bool barrier_try_wait_at(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0u;
}
LOWLAT_DEVICE void barrier_wait_at(std::uint32_t barrier, std::uint32_t parity) {
  while (!barrier_try_wait_at(barrier, parity)) {
  }
}
LOWLAT_DEVICE bool barrier_wait_at(std::uint32_t barrier, std::uint32_t parity,
                                   std::uint32_t stop) {
  while (!barrier_try_wait_at(barrier, parity)) {
    std::uint32_t stopped;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(stopped) : "r"(stop) : "memory");
    if (stopped != 0u) return false;
  }
  return true;
}
LOWLAT_DEVICE void barrier_arrive_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// ------------------------------------------------------------------------------------ shared reads

LOWLAT_DEVICE uint4 smem_load16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
LOWLAT_DEVICE uint2 smem_load8(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
LOWLAT_DEVICE std::uint32_t smem_load1(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

LOWLAT_DEVICE void smem_store4(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
LOWLAT_DEVICE void smem_store2(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<std::uint16_t>(v))
               : "memory");
}
LOWLAT_DEVICE void smem_store8(std::uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
// ------------------------------------------------------------------------------------ packets

// Sixteen bytes that the memory model calls one access: {payload, payload, payload, tag}, or any
// four words of which one tells whether they have arrived. Scope is the system's, so the reader may
// be another GPU.
LOWLAT_DEVICE void store_packet(void* dst, uint4 v) {
  asm volatile(
      "{\n .reg .b64 lo, hi;\n .reg .b128 v;\n mov.b64 lo, {%1, %2};\n mov.b64 hi, {%3, %4};\n"
      " mov.b128 v, {lo, hi};\n st.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(dst),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
LOWLAT_DEVICE uint4 load_packet(const void* src) {
  uint4 v;
  asm volatile(
      "{\n .reg .b64 lo, hi;\n .reg .b128 v;\n ld.relaxed.sys.global.b128 v, [%4];\n"
      " mov.b128 {lo, hi}, v;\n mov.b64 {%0, %1}, lo;\n mov.b64 {%2, %3}, hi;\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(src)
      : "memory");
  return v;
}

// ------------------------------------------------------------------------------------ numbers

LOWLAT_DEVICE std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// {low, high} rounded to nearest-even.
LOWLAT_DEVICE std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
LOWLAT_DEVICE float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
LOWLAT_DEVICE float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff'0000u); }
LOWLAT_DEVICE float round_to_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

// Expansion works on the stored bits: moved into a bf16's fields they are the value times a small
// power of two (subnormal codes too), and one exact multiply brings the scale and that power back.
// Codes of fp4 are placed in fp16 fields instead, without a multiply: out[i] = {element i, element
// i + 4} times 2^-kPlaceShift, subnormal or not; element 0 is in the word's low bits. The scale of
// a group of 32 is applied to its sums. Shifts to the left are written as products: those go to the
// other integer pipe.
inline constexpr int kPlaceShift = 14;
LOWLAT_DEVICE void place_fp4(std::uint32_t w, std::uint32_t (&out)[4]) {
  // A byte with one nibble left has its sign and its magnitude in the fields where two shifts by
  // different distances put them; what else the two copies hold is dropped. The compiler would
  // mask each copy.
  std::uint32_t even, odd;
  asm("and.b32 %0, %1, 0x0f0f0f0f;" : "=r"(even) : "r"(w));
  asm("and.b32 %0, %1, 0xf0f0f0f0;" : "=r"(odd) : "r"(w));
  const auto join = [](std::uint32_t a, std::uint32_t b) {
    std::uint32_t both;
    asm("lop3.b32 %0, %1, %2, 0x8e008e00, 0xa8;" : "=r"(both) : "r"(a), "r"(b));
    return both;
  };
  out[0] = join(even * 0x1000u, even * 0x0200u);
  out[1] = join(odd * 0x0100u, odd * 0x0020u);
  out[2] = join(even * 0x0010u, even * 0x0002u);
  out[3] = join(odd, odd >> 3);
}
// {low, high} rounded to nearest-even.
LOWLAT_DEVICE std::uint32_t pack_half(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// 2^(byte - 127), bytes from 1 to 254.
LOWLAT_DEVICE float scale_of(std::uint32_t byte) { return __uint_as_float(byte << 23); }

// Eight codes of two words: out[i] = {element i, element i + 4}. NaN codes come out as +-480.
LOWLAT_DEVICE void expand_e4m3(std::uint32_t w0, std::uint32_t w1, std::uint32_t factor,
                               std::uint32_t (&out)[4]) {
  constexpr std::uint32_t kSign = 0x8000'8000u, kMagnitude = 0x07f0'07f0u;
  const std::uint32_t a = __byte_perm(w0, w1, 0x5410);  // elements 0 1 | 4 5
  const std::uint32_t b = __byte_perm(w0, w1, 0x7632);  // elements 2 3 | 6 7
  out[0] = mul_bf16x2((a << 8 & kSign) | (a << 4 & kMagnitude), factor);
  out[1] = mul_bf16x2((a & kSign) | (a >> 4 & kMagnitude), factor);
  out[2] = mul_bf16x2((b << 8 & kSign) | (b << 4 & kMagnitude), factor);
  out[3] = mul_bf16x2((b & kSign) | (b >> 4 & kMagnitude), factor);
}

// Eight codes of two words as fp16, exactly: out[i] = {element i, element i + 4}.
LOWLAT_DEVICE void unpack_e4m3(std::uint32_t w0, std::uint32_t w1, std::uint32_t (&out)[4]) {
  const std::uint32_t four[2] = {__byte_perm(w0, w1, 0x5140), __byte_perm(w0, w1, 0x7362)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(out[2 * i]), "=r"(out[2 * i + 1])
        : "r"(four[i]));
  }
}

// Eight bf16 in their order to the order of pairs: out[i] = {element i, element i + 4}.
LOWLAT_DEVICE void pair_bf16(uint4 v, std::uint32_t (&out)[4]) {
  out[0] = __byte_perm(v.x, v.z, 0x5410);
  out[1] = __byte_perm(v.x, v.z, 0x7632);
  out[2] = __byte_perm(v.y, v.w, 0x5410);
  out[3] = __byte_perm(v.y, v.w, 0x7632);
}

// What a block-fp8 linear sees of a run of N pairs: e4m3 codes times a scale that is a power of
// two, one a group of activations. A group is the run of `kLanes` neighbouring lanes (a power of
// two up to 4), and `amax` what other runs of the same lane hold of it. Exact in bf16.
template <int N>
LOWLAT_DEVICE float pairs_amax(const std::uint32_t* pairs) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    amax = fmaxf(amax, fmaxf(fabsf(low_bf16(pairs[i])), fabsf(high_bf16(pairs[i]))));
  }
  return amax;
}
template <int kLanes>
LOWLAT_DEVICE float lanes_max(float v) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xffff'ffffu, v, offset));
  }
  return v;
}
// The scale's biased exponent: smallest power of two with amax / scale <= 448, amax at least 1e-10.
// 448 is 1.75 times 2^8: a larger mantissa takes the next power.
LOWLAT_DEVICE std::uint32_t activation_exponent(float amax) {
  return ((__float_as_uint(fmaxf(amax, 1e-10f)) + 0x1f'ffffu) >> 23) - 8u;
}
// Their codes, in fp16.
template <int N>
LOWLAT_DEVICE void quantize_codes(std::uint32_t* pairs, std::uint32_t exponent) {
  const float inverse = __uint_as_float((254u - exponent) << 23);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    std::uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(codes)
        : "f"(high_bf16(pairs[i]) * inverse), "f"(low_bf16(pairs[i]) * inverse));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[i]) : "h"(codes));
  }
}
// ------------------------------------------------------------------------------------ products

// acc += two pairs of weight rows g (`low`) and g + 8 (`high`) times two pairs of activation row g:
// acc[0..1] are weight row g with activation rows 2t and 2t + 1, acc[2..3] are g + 8.
LOWLAT_DEVICE void multiply_pairs(float (&acc)[4], const std::uint32_t* low,
                                  const std::uint32_t* high, const std::uint32_t* b) {
  const std::uint32_t a_words[4] = {low[0], high[0], low[1], high[1]};
  const std::uint32_t b_words[2] = {b[0], b[1]};
  sm90::mma_bf16(acc, a_words, b_words);
}

// The same with fp16.
LOWLAT_DEVICE void multiply_half_pairs(float (&acc)[4], const std::uint32_t* low,
                                       const std::uint32_t* high, const std::uint32_t* b) {
  const std::uint32_t a_words[4] = {low[0], high[0], low[1], high[1]};
  const std::uint32_t b_words[2] = {b[0], b[1]};
  sm90::mma_f16(acc, a_words, b_words);
}

// Of 32 along K, in bf16: a thread has eight of each row, the same for all rows.
LOWLAT_DEVICE void multiply_bf16(float (&acc)[4], const uint4& low, const uint4& high,
                                 const uint4& b) {
  const std::uint32_t l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
  const std::uint32_t b_words[4] = {b.x, b.y, b.z, b.w};
  multiply_pairs(acc, l, h, b_words);
  multiply_pairs(acc, l + 2, h + 2, b_words + 2);
}

}  // namespace lowlat::nvidia::fused
