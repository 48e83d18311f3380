// platform/nvidia_sm90_codes.cuh: products of a warp group of e4m3 codes, rows in registers and
// columns in shared memory, with fp32 sums. Include platform/nvidia_sm90.cuh first.
//
// codes_fence, products, codes_commit, then codes_wait before sums or rows are touched. Parts
// without wgmma do the same warp by warp. Codes that were written by ordinary stores or copies need
// fence_async_shared and the block's barrier before.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

// Columns of codes: cores of [8 columns][16 codes], 128 bytes each in one piece, those of eight
// columns one after the other along K; the next eight columns are `pitch` bytes further. `+ codes`
// are the same columns so much further along K (a multiple of 16).
struct CodeColumns {
  std::uint32_t address;
  std::uint32_t pitch;
  LOWLAT_DEVICE CodeColumns operator+(int codes) const {
    return {address + 8 * static_cast<std::uint32_t>(codes), pitch};
  }
  LOWLAT_DEVICE std::uint64_t matrix() const {
    return std::uint64_t{(address & 0x3ffffu) >> 4} | std::uint64_t{128 >> 4} << 16 |
           std::uint64_t{pitch >> 4} << 32;
  }
};
LOWLAT_DEVICE CodeColumns code_columns(const void* shared, std::uint32_t pitch) {
  return {shared_address(shared), pitch};
}

LOWLAT_DEVICE void codes_fence() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_fence();
#endif
}
LOWLAT_DEVICE void codes_commit() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_commit();
#endif
}
LOWLAT_DEVICE void codes_wait() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_wait<0>();
#endif
}

#ifdef LOWLAT_HAS_WGMMA
#define LOWLAT_SUMS4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define LOWLAT_OPERANDS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.matrix()), "n"(kAdd ? 1 : 0)
// One product of 8 kTiles columns; TYPES and TURN as the instruction takes them.
#define LOWLAT_MULTIPLY(DEPTH, TYPES, TURN)                                                      \
  if constexpr (kTiles == 1) {                                                                   \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %9, 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n8" DEPTH ".f32." TYPES                                 \
        " {%0, %1, %2, %3}, "                                                                    \
        "{%4, %5, %6, %7}, %8, add, 1, 1" TURN ";\n}"                                            \
        : LOWLAT_SUMS4(0)                                                                        \
        : LOWLAT_OPERANDS);                                                                      \
  } else if constexpr (kTiles == 2) {                                                            \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n16" DEPTH ".f32." TYPES                                \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1" TURN ";\n}"      \
        : LOWLAT_SUMS4(0), LOWLAT_SUMS4(4)                                                       \
        : LOWLAT_OPERANDS);                                                                      \
  } else if constexpr (kTiles == 3) {                                                            \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %17, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n24" DEPTH ".f32." TYPES                                \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, "            \
        "%16, add, 1, 1" TURN ";\n}"                                                             \
        : LOWLAT_SUMS4(0), LOWLAT_SUMS4(4), LOWLAT_SUMS4(8)                                      \
        : LOWLAT_OPERANDS);                                                                      \
  } else {                                                                                       \
    static_assert(kTiles == 6);                                                                  \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %29, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n48" DEPTH ".f32." TYPES                                \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "          \
        "%17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, add, 1, 1" TURN ";\n}"   \
        : LOWLAT_SUMS4(0), LOWLAT_SUMS4(4), LOWLAT_SUMS4(8), LOWLAT_SUMS4(12), LOWLAT_SUMS4(16), \
          LOWLAT_SUMS4(20)                                                                       \
        : LOWLAT_OPERANDS);                                                                      \
  }
#else
// Parts without wgmma: the warp's own product with each eight columns.
#define LOWLAT_MULTIPLY(DEPTH, TYPES)                                                       \
  std::uint32_t lane;                                                                       \
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));                                                \
  _Pragma("unroll") for (int n = 0; n < kTiles; ++n) {                                      \
    const std::uint32_t from = b.address + n * b.pitch + 4 * lane;                          \
    std::uint32_t word[2];                                                                  \
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[0]) : "r"(from) : "memory");         \
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[1]) : "r"(from + 128) : "memory");   \
    float part[4];                                                                          \
    _Pragma("unroll") for (int i = 0; i < 4; ++i) part[i] = kAdd ? d[4 * n + i] : 0.0f;     \
    asm volatile("mma.sync.aligned.m16n8" DEPTH ".row.col.f32." TYPES                       \
                 ".f32 {%0, %1, %2, %3}, "                                                  \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                 : "+f"(part[0]), "+f"(part[1]), "+f"(part[2]), "+f"(part[3])               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(word[0]), "r"(word[1])); \
    _Pragma("unroll") for (int i = 0; i < 4; ++i) d[4 * n + i] = part[i];                   \
  }
#endif

// d[16, 8 kTiles] = a[16, 32] b[8 kTiles, 32]^T (kAdd: + d): the warp's 16 of the group's 64 rows.
// Lane 4 g + t has a[0] = (row g, k 4 t .. + 3), a[1] = (row g + 8, the same), a[2], a[3] = those
// rows at k + 16; d[4 n ..] is as mma_bf16's d, of columns 8 n ..
template <int kTiles, bool kAdd>
LOWLAT_DEVICE void multiply_codes(float (&d)[4 * kTiles], const std::uint32_t (&a)[4],
                                  CodeColumns b) {
#ifdef LOWLAT_HAS_WGMMA
  LOWLAT_MULTIPLY("k32", "e4m3.e4m3", "")
#else
  LOWLAT_MULTIPLY("k32", "e4m3.e4m3")
#endif
}

// The same with f16 values, sixteen along K: a core is [8 columns][8 values], and CodeColumns
// counts bytes. Lane 4 g + t has a[0] = (row g, k 2 t and the next), a[2] = (row g, k + 8) ..
template <int kTiles, bool kAdd>
LOWLAT_DEVICE void multiply_halves(float (&d)[4 * kTiles], const std::uint32_t (&a)[4],
                                   CodeColumns b) {
#ifdef LOWLAT_HAS_WGMMA
  LOWLAT_MULTIPLY("k16", "f16.f16", ", 0")
#else
  LOWLAT_MULTIPLY("k16", "f16.f16")
#endif
}
#undef LOWLAT_MULTIPLY
#undef LOWLAT_SUMS4
#undef LOWLAT_OPERANDS

}  // namespace lowlat::nvidia::sm90
