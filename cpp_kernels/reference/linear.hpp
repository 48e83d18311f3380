// reference/linear: what the linears mean, in double precision. y = x W^T, y rounded to bf16.
#pragma once
#include <cstdint>
#include <vector>

namespace lowlat::reference {

// x bf16 [rows, k], w bf16 [n, k], y bf16 [rows, n].
void bf16_linear(std::uint16_t* y, const std::uint16_t* x, const std::uint16_t* w,
                 std::int64_t rows, std::int64_t n, std::int64_t k);

// The same unrounded, [rows, n].
std::vector<double> project(const std::uint16_t* x, const std::uint16_t* w, std::int64_t rows,
                            std::int64_t n, std::int64_t k);

// The values that a block-fp8 linear computes with: per `group` of x, scale = 2^ceil(log2(max(amax,
// 1e-10) / 448)) and e4m3(x / scale) * scale. x bf16 [n], out [n].
void quantize_activation(double* out, const std::uint16_t* x, std::int64_t n, std::int64_t group);

// x bf16 [rows, k], quantised in groups of `block`; w e4m3 [n, k], w_scale f32 [n / block, k /
// block]; y bf16 [rows, n].
void block_linear(std::uint16_t* y, const std::uint16_t* x, const std::uint8_t* w,
                  const float* w_scale, std::int64_t rows, std::int64_t n, std::int64_t k,
                  std::int64_t block);

}  // namespace lowlat::reference
