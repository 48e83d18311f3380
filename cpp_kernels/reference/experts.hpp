// reference/experts: what routed and shared experts mean, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// MXFP4 matrices [E, n, k], two codes a byte, the even column in the low nibble; scales ue8m0
// [E, n, k / 32].
struct Fp4Stack {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};
// e4m3 [n, k]; scales f32 [n / block, k / block].
struct E4m3Matrix {
  const std::uint8_t* codes;
  const float* scales;
};

// silu(min(gate, 10)) * clamp(up, -10, 10).
double swiglu(double gate, double up);

// y [rows, hidden] = sum over a row's slots of weight * expert(x) + shared(x), nothing rounded but
// what fixes the codes of the shared expert's two quantised inputs: x; and gate, up and their
// SwiGLU, each a bf16 tensor. x bf16 [rows, hidden]; w1, w3 [E, inner, hidden];
// w2 [E, hidden, inner]; ids, weight [rows, slots]; shared_w1, shared_w3 [inner, hidden];
// shared_w2 [hidden, inner]; `block` is that of the shared expert's weights and inputs.
void experts(float* y, const std::uint16_t* x, Fp4Stack w1, Fp4Stack w3, Fp4Stack w2,
             const std::int32_t* ids, const float* weight, E4m3Matrix shared_w1,
             E4m3Matrix shared_w3, E4m3Matrix shared_w2, std::int64_t rows, std::int64_t hidden,
             std::int64_t inner, std::int64_t slots, std::int64_t block);

}  // namespace lowlat::reference
