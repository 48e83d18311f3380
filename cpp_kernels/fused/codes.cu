// codes_any: block-fp8 weights from their bf16 values, see codes.hpp.
//
// Math         scale = 2^k, the least with amax / 2^k ≤ 448; code = e4m3( w / 2^k )
// Shapes       w bf16 [N,K], blocks of 32 x 32 or 128 x 128
// Rounding     none where w = code' · 2^k' for codes of a block: amax's exponent is at most 8 + k',
//              so k ≤ k', and a value that is a multiple of 2^-9 · 2^k' with four significant bits
//              is one of 2^-9 · 2^k
// Bytes        3 N K, once, when weights are bound
// Launch       a block of 256 threads a block of weights
// Meaning      reference/format.cpp, exactly or counted
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/codes.hpp"
#include "stages/format.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256;

template <int kBlock>
__global__ void __launch_bounds__(kThreads) codes_any(const __grid_constant__ CodesParams params) {
  constexpr int kPerThread = kBlock * kBlock / kThreads;
  __shared__ float largest[kThreads / plat::kWarpLanes];
  const int thread_idx = plat::thread_idx();
  const std::int64_t place =
      (std::int64_t{blockIdx.y} * kBlock + thread_idx / (kBlock / kPerThread)) * params.columns +
      blockIdx.x * kBlock + thread_idx % (kBlock / kPerThread) * kPerThread;
  const auto value = [&](int i) { return stages::from_bf16(params.weights[place + i]); };
  float amax = 0.0f;
  for (int i = 0; i < kPerThread; ++i) amax = plat::max(plat::abs(value(i)), amax);
  amax = plat::warp_max(amax);
  if (thread_idx % plat::kWarpLanes == 0) largest[thread_idx / plat::kWarpLanes] = amax;
  plat::block_sync();
  for (const float other : largest) amax = plat::max(other, amax);
  // 448 is 1.75 * 2^8. A block of zeros, or of next to nothing, gets the least scale.
  const int exponent = static_cast<int>((plat::float_bits(amax) + 0x1f'ffffu) >> 23) - 8;
  const auto scale_code = static_cast<std::uint8_t>(exponent > 1 ? exponent : 1);
  const float scale = stages::from_ue8m0(scale_code);
  for (int i = 0; i < kPerThread; ++i) {
    const std::uint8_t code = stages::to_e4m3(value(i) / scale);
    params.codes[place + i] = code;
    // Not equal for a NaN either.
    if (!(stages::from_e4m3(code) * scale == value(i))) atomicAdd(params.inexact, 1u);
  }
  if (thread_idx == 0) {
    params.scales[std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = scale_code;
  }
}

template <int kBlock>
cudaError_t launch(const CodesParams& params, cudaStream_t stream) {
  if (params.rows < 1 || params.columns < 1 || params.rows % kBlock != 0 ||
      params.columns % kBlock != 0) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(params.columns / kBlock),
                  static_cast<unsigned>(params.rows / kBlock));
  codes_any<kBlock><<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_codes(const CodesParams& params, cudaStream_t stream) {
  if (params.block == 32) return launch<32>(params, stream);
  return params.block == 128 ? launch<128>(params, stream) : cudaErrorInvalidValue;
}

}  // namespace lowlat::nvidia::fused
