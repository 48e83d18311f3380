// reference/compress: what V4.1's compressors mean: double precision, with the bf16 roundings
// that fix the four-bit codes.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// Softmax pooling of a pair's values by their scores, the even position first.
double pool_pair(double kv_even, double score_even, double kv_odd, double score_odd);

// latent bf16 [512] of one entry from its projections before any rounding: c rounded to bf16, then
// the norm, then bf16.
void compressed_latent(std::uint16_t* latent, const double* c, const std::uint16_t* gain,
                       double eps);

// entry [512] as it is stored: the last 64 of the latent turned at first_position, bf16, then every
// 16 channels through four bits.
void compressed_entry(double* entry, const std::uint16_t* latent, std::int64_t first_position);

// All entries of one sequence from position 0: kv f32 [length / ratio, 512]. x bf16 [length,
// hidden]; wkv, wgate bf16 [512, hidden] (wgate is not read at ratio 1); gain bf16 [512].
void compress(float* kv, const std::uint16_t* x, const std::uint16_t* wkv,
              const std::uint16_t* wgate, const std::uint16_t* gain, std::int64_t length,
              std::int64_t hidden, std::int64_t ratio, double eps);

}  // namespace lowlat::reference
