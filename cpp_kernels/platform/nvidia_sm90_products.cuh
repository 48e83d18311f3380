// platform/nvidia_sm90_products.cuh: products of a warp group whose rows are in registers and whose
// columns are in shared memory, 16-bit values with fp32 sums. Include platform/nvidia_sm90.cuh
// first.
//
// rows_fence, products, rows_commit, then rows_wait before sums or rows are touched. Parts without
// wgmma do the same warp by warp. Columns that were written by ordinary stores or copies need
// fence_async_shared and the block's barrier before.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

enum class Half : std::uint8_t { bf16, f16 };

// 32 columns of 16 along K: cores of [8 columns][8 along K], 128 bytes each in one piece, two along
// K one after the other; eight columns further is `along_columns` bytes. `+ bytes` are such columns
// so much further in shared memory.
struct Columns {
  std::uint64_t matrix;  // as wgmma takes it
  LOWLAT_DEVICE Columns operator+(std::uint32_t bytes) const { return {matrix + bytes / 16}; }
};
LOWLAT_DEVICE Columns columns_at(const void* shared, std::uint32_t along_columns) {
  return {std::uint64_t{(shared_address(shared) & 0x3ffffu) >> 4} | std::uint64_t{128 >> 4} << 16 |
          std::uint64_t{along_columns >> 4} << 32};
}

LOWLAT_DEVICE void rows_fence() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_fence();
#endif
}
LOWLAT_DEVICE void rows_commit() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_commit();
#endif
}
LOWLAT_DEVICE void rows_wait() {
#ifdef LOWLAT_HAS_WGMMA
  wgmma_wait<0>();
#endif
}

// d[16, 32] = a[16, 16] b[32, 16]^T (kAdd: + d): the warp's 16 of the group's 64 rows. a as
// mma_bf16's; d[4 n ..] is as its d, of columns 8 n ..
template <Half kHalf, bool kAdd>
LOWLAT_DEVICE void multiply_rows(float (&d)[16], const std::uint32_t (&a)[4], Columns columns) {
#ifdef LOWLAT_HAS_WGMMA
#define LOWLAT_MULTIPLY_ROWS(TYPE)                                                              \
  asm volatile(                                                                                 \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "               \
      "{%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns.matrix), "n"(kAdd ? 1 : 0))
  if constexpr (kHalf == Half::bf16) {
    LOWLAT_MULTIPLY_ROWS("bf16");
  } else {
    LOWLAT_MULTIPLY_ROWS("f16");
  }
#undef LOWLAT_MULTIPLY_ROWS
#else
  std::uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const auto address = static_cast<std::uint32_t>(columns.matrix & 0x3fffu) << 4;
    const auto along = static_cast<std::uint32_t>(columns.matrix >> 32 & 0x3fffu) << 4;
    const std::uint32_t at = address + n * along + 4 * lane;
    std::uint32_t b[2];
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b[0]) : "r"(at) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b[1]) : "r"(at + 128) : "memory");
    float part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = kAdd ? d[4 * n + i] : 0.0f;
    if constexpr (kHalf == Half::bf16) {
      mma_bf16(part, a, b);
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(part[0]), "+f"(part[1]), "+f"(part[2]), "+f"(part[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * n + i] = part[i];
  }
#endif
}

}  // namespace lowlat::nvidia::sm90
