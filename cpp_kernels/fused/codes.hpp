// fused/codes.hpp: bf16 weights that are e4m3 values under powers of two, as the codes and scales
// that they came from. Every C++ compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lowlat::nvidia::fused {

struct CodesParams {
  int rows, columns;             // multiples of block
  int block;                     // 32 or 128
  const std::uint16_t* weights;  // bf16 [rows, columns]
  std::uint8_t* codes;           // e4m3 [rows, columns]
  std::uint8_t* scales;          // ue8m0 [rows / block, columns / block]
  std::uint32_t* inexact;        // counted up by every value that is not its code under its scale
};

// Each block gets the power of two that brings its largest value to 224 .. 448: every
// value that was a code under any power of two is one under that.
cudaError_t launch_codes(const CodesParams& params, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
