// fused/moe_wide_numbers.cuh: fp4 codes and bf16 values as e4m3, and products of e4m3 with weights
// in registers and columns in shared memory.
#pragma once

#include "fused/stream.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

LOWLAT_DEVICE std::uint32_t smem_load4(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
LOWLAT_DEVICE std::uint32_t smem_load1(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// One word that another block waits for.
LOWLAT_DEVICE void store_word(std::uint32_t* dst, std::uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(dst), "r"(v) : "memory");
}
LOWLAT_DEVICE std::uint32_t load_word(const std::uint32_t* src) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(src) : "memory");
  return v;
}

// Two words, each an access of its own, unless neither is `poison`.
LOWLAT_DEVICE void load_words_if(uint2& v, std::uint32_t poison, const std::uint32_t* src) {
  asm volatile(
      "{\n.reg .pred first, missing;\n"
      "setp.eq.u32 first, %0, %2;\nsetp.eq.or.u32 missing, %1, %2, first;\n"
      "@missing ld.relaxed.sys.global.v2.u32 {%0, %1}, [%3];\n}"
      : "+r"(v.x), "+r"(v.y)
      : "r"(poison), "l"(src)
      : "memory");
}

LOWLAT_DEVICE void add_word(std::uint32_t* dst, std::uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(dst), "r"(v) : "memory");
}
// What it was before.
LOWLAT_DEVICE std::uint32_t take_word(std::uint32_t* dst, std::uint32_t v) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(dst), "r"(v)
               : "memory");
  return before;
}
// What a counter holds after n additions of 1, from the pattern that clears on.
constexpr std::uint32_t counted(int n) { return static_cast<std::uint32_t>(n) - 1u; }
// Orders what came before it (and what others had counted) before what follows, on the device.
LOWLAT_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Word i of neighbour t of four lanes becomes word t of neighbour i.
LOWLAT_DEVICE void transpose_quad(std::uint32_t (&v)[4], int t) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (t & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const std::uint32_t theirs = __shfl_xor_sync(0xffff'ffffu, upper ? v[i] : v[i + step], step);
      (upper ? v[i] : v[i + step]) = theirs;
    }
  }
}

// Eight codes of one word as e4m3: each byte is its element times 2^-kFp4E4m3Shift, exactly: e2m1's
// fields lie in e4m3's lowest. `odd`: elements 1 3 5 7, `even`: 0 2 4 6.
inline constexpr int kFp4E4m3Shift = 6;
LOWLAT_DEVICE void expand_fp4_e4m3(std::uint32_t w, std::uint32_t& odd, std::uint32_t& even) {
  constexpr std::uint32_t kSign = 0x8080'8080u, kMagnitude = 0x1c1c'1c1cu;
  odd = (w & kSign) | (w >> 2 & kMagnitude);
  even = (w << 4 & kSign) | (w << 2 & kMagnitude);
}

// Four values up to 448 as sums of two e4m3 codes, a byte each: what is left of eight bits after
// the high term's four fits the low one; 2^-10 is lost at most, where the low term is subnormal.
LOWLAT_DEVICE void split_e4m3(const float (&v)[4], std::uint32_t& high, std::uint32_t& low) {
  high = low = 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    std::uint16_t codes, rest;
    std::uint32_t halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(v[i + 1]), "f"(v[i]));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(rest)
        : "f"(v[i + 1] - values.y), "f"(v[i] - values.x));
    high |= static_cast<std::uint32_t>(codes) << 8 * i;
    low |= static_cast<std::uint32_t>(rest) << 8 * i;
  }
}

// ------------------------------------------------------------------------------------ products

// Of a warp group, which reads the columns on its own: products_fence, products, products_commit,
// then products_wait before sums or weights are touched. A columns' matrix is 8 columns of 32 along
// K: two cores of [8][16] bytes, one after the other. columns + n is 16 n bytes further. Parts
// without wgmma do the same warp by warp.
LOWLAT_DEVICE std::uint64_t product_columns(std::uint32_t shared_address) {
  constexpr std::uint64_t kAlongK = 128 >> 4, kAlongColumns = 256 >> 4;
  return (shared_address & 0x3ffffu) >> 4 | kAlongK << 16 | kAlongColumns << 32;
}
LOWLAT_DEVICE void products_fence() {
#ifdef LOWLAT_HAS_WGMMA
  sm90::wgmma_fence();
#endif
}
LOWLAT_DEVICE void products_commit() {
#ifdef LOWLAT_HAS_WGMMA
  sm90::wgmma_commit();
#endif
}
template <int kPending>
LOWLAT_DEVICE void products_wait() {
#ifdef LOWLAT_HAS_WGMMA
  sm90::wgmma_wait<kPending>();
#endif
}
// d[16, 8] = a[16, 32] b[8, 32]^T, fp32 sums, the warp's 16 of the group's 64 rows. With lane = 4 g
// + t: a[0] = (row g, k 4t ..+3), a[1] = (row g + 8, the same), a[2], a[3] = those rows at k + 16;
// d as mma_bf16's.
LOWLAT_DEVICE void product_e4m3(float (&d)[4], const std::uint32_t (&a)[4], std::uint64_t columns) {
#ifdef LOWLAT_HAS_WGMMA
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
#else
  std::uint32_t lane, b[2];
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  const auto address = static_cast<std::uint32_t>(columns & 0x3fffu) << 4;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(address + lane % 16 * 16)
               : "memory");
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused
