// reference/pool: what V4's compressors mean: double precision, rounded where stored formats fix
// codes.
#pragma once
#include <cstdint>
#include <vector>

namespace lowlat::reference {

// Keys of one sequence from position 0, normed and turned at the first position of their blocks,
// nothing rounded: [length / ratio, dim]. x bf16 [length, hidden]; wkv, wgate bf16 [w, hidden] and
// ape f32 [ratio, w], w = 2 dim at ratio 4 and dim at 128; gain bf16 [dim].
std::vector<double> pooled_keys(const std::uint16_t* x, const std::uint16_t* wkv,
                                const std::uint16_t* wgate, const float* ape,
                                const std::uint16_t* gain, std::int64_t length, std::int64_t hidden,
                                std::int64_t ratio, std::int64_t dim, double eps);

// The same, dim 512, rounded to bf16: kv f32 [length / ratio, 512].
void compress_pooled(float* kv, const std::uint16_t* x, const std::uint16_t* wkv,
                     const std::uint16_t* wgate, const float* ape, const std::uint16_t* gain,
                     std::int64_t length, std::int64_t hidden, std::int64_t ratio, double eps);

}  // namespace lowlat::reference
