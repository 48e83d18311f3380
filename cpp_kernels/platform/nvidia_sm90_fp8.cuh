// platform/nvidia_sm90_fp8.cuh: e4m3 codes to f16 and from fp32, and products of f16 with fp32
// sums. Include platform/nvidia_sm90.cuh first.
//
// Every e4m3 value is an f16 value (2^-9 to 448, subnormal codes too), so codes go through f16
// products without a rounding; their scales belong to the sums.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

// Four codes, the lowest byte first, as two words of two f16 each.
LOWLAT_DEVICE void e4m3_to_f16(std::uint32_t (&out)[2], std::uint32_t codes) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(out[0]), "=r"(out[1])
      : "r"(codes));
}

// Two codes as a word of two f16.
LOWLAT_DEVICE std::uint32_t e4m3_pair_to_f16(std::uint16_t codes) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// Codes of two values, the first in the low byte: to nearest-even, saturating at +-448.
LOWLAT_DEVICE std::uint32_t to_e4m3_pair(float first, float second) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}
LOWLAT_DEVICE std::uint32_t to_bf16_pair(float first, float second) {
  std::uint32_t codes;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(second), "f"(first));
  return codes;
}
LOWLAT_DEVICE std::uint32_t to_f16_pair(float first, float second) {
  std::uint32_t codes;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(second), "f"(first));
  return codes;
}
LOWLAT_DEVICE std::uint32_t multiply_bf16_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// The bf16 values of a word.
LOWLAT_DEVICE float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
LOWLAT_DEVICE float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff'0000u); }

// As mma_bf16, of f16.
LOWLAT_DEVICE void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                           std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace lowlat::nvidia::sm90
