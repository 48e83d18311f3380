// platform/nvidia_sm90_tf32.cuh: products of tf32, whose numbers are fp32 of which the lower 13
// bits do not count. Include platform/nvidia.hpp first.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

// d[16, 8] += a[16, 8] b[8, 8], fp32 sums; a warp calls. With lane = 4 g + t:
//   a[0] = (row g, k t)  a[1] = (row g + 8, k t)  a[2], a[3] = the same rows at k t + 4
//   b[0] = (k t, column g)  b[1] = (k t + 4, column g)
//   d[0] d[1] = (row g, columns 2t 2t+1)  d[2] d[3] = (row g + 8)
LOWLAT_DEVICE void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                            const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace lowlat::nvidia::sm90
