#include "reference/engram.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/format.hpp"
#include "reference/linear.hpp"

namespace lowlat::reference {

void engram_hash(std::int64_t* ids, const std::int64_t* token, const std::int64_t* history,
                 const std::int64_t* pos, const std::int64_t* map, const std::int64_t* mult,
                 const std::int64_t* prime, std::int64_t image_token, std::int64_t rows) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t back[4] = {token[t], history[t * 3 + 2], history[t * 3 + 1], history[t * 3]};
    // How many of them count, the row's own first: all up to the start or the first image token.
    std::int64_t num_open = 0;
    while (num_open < 4 && num_open <= pos[t] && back[num_open] != image_token) ++num_open;
    std::int64_t product[4];
    for (std::int64_t shift = 0; shift < 4; ++shift) {
      product[shift] = map[shift < num_open ? back[shift] : 2] * mult[shift];
    }
    std::int64_t first_row = 0;  // of the column
    for (std::int64_t column = 0; column < 24; ++column) {
      const std::int64_t size = column / 8 + 2;
      std::int64_t mixed = 0;
      for (std::int64_t shift = 0; shift < size; ++shift) mixed ^= product[shift];
      ids[t * 24 + column] = first_row + mixed % prime[column];
      first_row += prime[column];
    }
  }
}

void engram_lookup(std::uint16_t* e, const std::int64_t* ids, const std::uint8_t* codes,
                   const std::uint8_t* scales, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < rows * 24; ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      e[i * dim + d] = to_bf16(from_e4m3(codes[ids[i] * dim + d]) *
                               from_ue8m0(scales[ids[i] * (dim / 32) + d / 32]));
    }
  }
}

void engram_apply(std::uint16_t* out, const std::uint16_t* residual, const std::uint16_t* e,
                  const std::uint8_t* wkv, const float* wkv_scale, const std::uint16_t* q_weight,
                  const std::uint16_t* k_weight, std::int64_t rows, std::int64_t hidden,
                  std::int64_t width, double eps) {
  std::vector<std::uint16_t> kv(static_cast<std::size_t>(rows * 5 * hidden));
  block_linear(kv.data(), e, wkv, wkv_scale, rows, 5 * hidden, width, 32);
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::uint16_t* value = &kv[(t * 5 + 4) * hidden];
    for (std::int64_t k = 0; k < 4; ++k) {
      const std::uint16_t* key = &kv[(t * 5 + k) * hidden];
      const std::uint16_t* stream = residual + (t * 4 + k) * hidden;
      double match = 0.0, stream_sq = 0.0, key_sq = 0.0;
      for (std::int64_t h = 0; h < hidden; ++h) {
        match += from_bf16(stream[h]) * from_bf16(q_weight[k * hidden + h]) *
                 from_bf16(k_weight[k * hidden + h]) * from_bf16(key[h]);
        stream_sq += from_bf16(stream[h]) * from_bf16(stream[h]);
        key_sq += from_bf16(key[h]) * from_bf16(key[h]);
      }
      match /= std::sqrt(stream_sq / hidden + eps) * std::sqrt(key_sq / hidden + eps) *
               std::sqrt(hidden);
      const double root = std::sqrt(std::max(std::abs(match), 1e-6));
      const double gate = 1.0 / (1.0 + std::exp(std::signbit(match) ? root : -root));
      for (std::int64_t h = 0; h < hidden; ++h) {
        out[(t * 4 + k) * hidden + h] = to_bf16(from_bf16(stream[h]) + gate * from_bf16(value[h]));
      }
    }
  }
}

}  // namespace lowlat::reference
