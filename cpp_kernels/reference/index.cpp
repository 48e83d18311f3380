#include "reference/index.hpp"

#include <algorithm>
#include <cmath>

#include "reference/format.hpp"
#include "reference/fp4.hpp"
#include "reference/rope.hpp"

namespace lowlat::reference {
namespace {

constexpr std::int64_t kDim = 128;

void turn(double* x, std::int64_t position) {
  rope(x, &position, 1, 1, kDim, true, false);
  for (std::int64_t i = 64; i < kDim; ++i) x[i] = round_bf16(x[i]);
}

}  // namespace

void index_query(std::uint16_t* query, const std::uint16_t* x, std::int64_t heads,
                 std::int64_t position) {
  for (std::int64_t h = 0; h < heads; ++h) {
    double values[kDim];
    for (std::int64_t i = 0; i < kDim; ++i) values[i] = from_bf16(x[h * kDim + i]);
    turn(values, position);
    fp4_round_trip_index(values, kDim);
    for (std::int64_t i = 0; i < kDim; ++i) query[h * kDim + i] = to_bf16(values[i]);
  }
}

void index_key(std::uint8_t* row, const std::uint16_t* latent, const std::uint16_t* wk,
               const std::uint16_t* gain, std::int64_t position, double eps) {
  double x[kDim];
  double sum_sq = 0.0;
  for (std::int64_t n = 0; n < kDim; ++n) {
    double product = 0.0;
    for (std::int64_t i = 0; i < 512; ++i)
      product += from_bf16(latent[i]) * from_bf16(wk[n * 512 + i]);
    x[n] = round_bf16(product);
    sum_sq += x[n] * x[n];
  }
  const double norm = std::sqrt(sum_sq / kDim + eps);
  for (std::int64_t n = 0; n < kDim; ++n) x[n] = round_bf16(x[n] / norm * from_bf16(gain[n]));
  turn(x, position);
  fp4_pack_index(row, x);
}

std::vector<double> index_scores(const std::uint16_t* query, const float* weights,
                                 std::int64_t heads, const std::uint8_t* rows, std::int64_t count) {
  std::vector<double> scores;
  for (std::int64_t n = 0; n < count; ++n) {
    double key[kDim];
    fp4_unpack_index(key, rows + n * 68);
    double score = 0.0;
    for (std::int64_t h = 0; h < heads; ++h) {
      double match = 0.0;
      for (std::int64_t i = 0; i < kDim; ++i) match += from_bf16(query[h * kDim + i]) * key[i];
      score += weights[h] * std::max(match, 0.0);
    }
    scores.push_back(score);
  }
  return scores;
}

}  // namespace lowlat::reference
