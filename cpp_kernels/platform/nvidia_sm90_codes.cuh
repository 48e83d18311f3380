// platform/nvidia_sm90_codes.cuh: products of a warp group whose rows and columns are e4m3 codes in
// shared memory, with fp32 sums. Include platform/nvidia_sm90.cuh first.
//
// wgmma_fence, products, wgmma_commit, then wgmma_wait before sums are touched. Parts without wgmma
// do the same warp by warp. Codes that were written by ordinary stores or copies need
// fence_async_shared and the block's barrier before.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

// Rows of codes: cores of [8 rows][16 codes], 128 bytes each in one piece, those of eight rows one
// after the other along K; the next eight rows are `pitch` bytes further. `+ codes` are the same
// rows so much further along K (a multiple of 16).
struct CodeRows {
  std::uint32_t address;
  std::uint32_t pitch;
  LOWLAT_DEVICE CodeRows operator+(int codes) const {
    return {address + 8 * static_cast<std::uint32_t>(codes), pitch};
  }
  LOWLAT_DEVICE std::uint64_t matrix() const {
    return std::uint64_t{(address & 0x3ffffu) >> 4} | std::uint64_t{128 >> 4} << 16 |
           std::uint64_t{pitch >> 4} << 32;
  }
};
LOWLAT_DEVICE CodeRows code_rows(const void* shared, std::uint32_t pitch) {
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

// d[64, 8 kTiles] = a[64, 32] b[8 kTiles, 32]^T (kAdd: + d). Of it warp w of the group has rows 16 w and on:
// d[4 n ..] is as mma_bf16's d, of columns 8 n ..
template <int kTiles, bool kAdd>
LOWLAT_DEVICE void multiply_codes(float (&d)[4 * kTiles], CodeRows a, CodeRows b) {
#ifdef LOWLAT_HAS_WGMMA
#define LOWLAT_SUMS8(I)                                                                       \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
      "+f"(d[I + 6]), "+f"(d[I + 7])
  if constexpr (kTiles == 1) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, add, 1, "
        "1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a.matrix()), "l"(b.matrix()), "n"(kAdd ? 1 : 0));
  } else if constexpr (kTiles == 2) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, add, 1, 1;\n}"
        : LOWLAT_SUMS8(0)
        : "l"(a.matrix()), "l"(b.matrix()), "n"(kAdd ? 1 : 0));
  } else if constexpr (kTiles == 3) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11}, %12, %13, add, 1, 1;\n}"
        : LOWLAT_SUMS8(0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "l"(a.matrix()), "l"(b.matrix()), "n"(kAdd ? 1 : 0));
  } else {
    static_assert(kTiles == 6);
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, "
        "add, 1, 1;\n}"
        : LOWLAT_SUMS8(0), LOWLAT_SUMS8(8), LOWLAT_SUMS8(16)
        : "l"(a.matrix()), "l"(b.matrix()), "n"(kAdd ? 1 : 0));
  }
#undef LOWLAT_SUMS8
#else
  std::uint32_t lane, warp;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm("mov.u32 %0, %%tid.x;" : "=r"(warp));
  warp = warp / 32 % 4;
  const auto core = [](std::uint32_t address) {
    std::uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
  };
  const std::uint32_t at = a.address + 2 * warp * a.pitch + 4 * lane;
  const std::uint32_t rows[4] = {core(at), core(at + a.pitch), core(at + 128),
                                 core(at + a.pitch + 128)};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const std::uint32_t from = b.address + n * b.pitch + 4 * lane;
    float part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = kAdd ? d[4 * n + i] : 0.0f;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(part[0]), "+f"(part[1]), "+f"(part[2]), "+f"(part[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(core(from)),
          "r"(core(from + 128)));
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * n + i] = part[i];
  }
#endif
}

}  // namespace lowlat::nvidia::sm90
