// reference/engram: what n-gram memory means: exact integers for the hash, double precision for the
// rest.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// ids [rows, 24] of every row's n-grams of sizes 2, 3 and 4, eight heads each, column offsets
// included. token [rows]; history [rows, 3], oldest first; pos [rows]; map, mult [4], prime [3, 8].
// A token before position 0, an image token and everything older than it count as token 2.
void engram_hash(std::int64_t* ids, const std::int64_t* token, const std::int64_t* history,
                 const std::int64_t* pos, const std::int64_t* map, const std::int64_t* mult,
                 const std::int64_t* prime, std::int64_t image_token, std::int64_t rows);

// e [rows, 24 * dim] bf16: table row ids[t, c] at column c. codes e4m3 [N, dim], scales ue8m0
// [N, dim / 32].
void engram_lookup(std::uint16_t* e, const std::int64_t* ids, const std::uint8_t* codes,
                   const std::uint8_t* scales, std::int64_t rows, std::int64_t dim);

// out = bf( R_k + sigmoid(signed root of the k-th match) * V ) with keys and value from e wkv^T.
// residual, out bf16 [rows, 4, hidden]; e bf16 [rows, width]; wkv e4m3 [5 hidden, width] with
// scales [5 hidden / 32, width / 32]; q_weight, k_weight bf16 [4, hidden].
void engram_apply(std::uint16_t* out, const std::uint16_t* residual, const std::uint16_t* e,
                  const std::uint8_t* wkv, const float* wkv_scale, const std::uint16_t* q_weight,
                  const std::uint16_t* k_weight, std::int64_t rows, std::int64_t hidden,
                  std::int64_t width, double eps);

}  // namespace lowlat::reference
