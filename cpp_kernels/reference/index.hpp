// reference/index: what the V4.1 indexer means: double precision, with the bf16 roundings that fix
// the four-bit codes.
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

}  // namespace lowlat::reference
