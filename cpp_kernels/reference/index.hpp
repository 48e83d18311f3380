// reference/index: what the indexers mean: double precision, with the roundings that fix V4.1's
// four-bit and V4's e4m3 codes.
#pragma once
#include <cstdint>
#include <vector>

namespace lowlat::reference {

// query bf16 [heads, 128]: dimensions 64..127 of x turned at `position`, bf16, then every 32
// channels through four bits.
void index_query(std::uint16_t* query, const std::uint16_t* x, std::int64_t heads,
                 std::int64_t position);

// row u8 [68] of one entry: latent bf16 [512] . wk bf16 [128, 512], bf16, norm, bf16,
// dimensions 64..127 turned at `position`, bf16, four bits.
void index_key(std::uint8_t* row, const std::uint16_t* latent, const std::uint16_t* wk,
               const std::uint16_t* gain, std::int64_t position, double eps);

// sum_h weights[h] * max(0, query_h . key) for each of `count` stored rows of 68 bytes.
std::vector<double> index_scores(const std::uint16_t* query, const float* weights,
                                 std::int64_t heads, const std::uint8_t* rows, std::int64_t count);

// V4. codes e4m3 [heads, 128] and scales f32 [heads] of x bf16 [heads, 128]: dimensions 64..127
// turned at `position`, times the Hadamard matrix (Sylvester's) and 128^-0.5, scale = max(1e-4,
// amax) / 448 in fp32, code = e4m3(value / scale); nothing else is rounded.
void index_query_fp8(std::uint8_t* codes, float* scales, const std::uint16_t* x, std::int64_t heads,
                     std::int64_t position);

// V4. rows u8 [length / 4, 132] of one sequence from position 0: 128 codes and the scale, low byte
// first, of pooled keys (reference/pool.hpp, ratio 4) times the Hadamard matrix, as of a query.
// wkv, wgate bf16 [256, hidden], ape f32 [4, 256], gain bf16 [128].
void index_keys_fp8(std::uint8_t* rows, const std::uint16_t* x, const std::uint16_t* wkv,
                    const std::uint16_t* wgate, const float* ape, const std::uint16_t* gain,
                    std::int64_t length, std::int64_t hidden, double eps);

// The values of one such row, [128].
void index_unpack_fp8(double* x, const std::uint8_t* row);

// V4. As index_scores, of e4m3 codes [heads, 128] and rows of 132 bytes.
std::vector<double> index_scores_fp8(const std::uint8_t* codes, const float* weights,
                                     std::int64_t heads, const std::uint8_t* rows,
                                     std::int64_t count);

}  // namespace lowlat::reference
