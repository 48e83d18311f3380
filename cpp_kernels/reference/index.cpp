#include "reference/index.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "reference/format.hpp"
#include "reference/fp4.hpp"
#include "reference/pool.hpp"
#include "reference/rope.hpp"

namespace lowlat::reference {
namespace {

constexpr std::int64_t kDim = 128;

void turn(double* x, std::int64_t position) {
  rope(x, &position, 1, 1, kDim, true, false);
  for (std::int64_t i = 64; i < kDim; ++i) x[i] = round_bf16(x[i]);
}

// x times the matrix of (-1)^(ones in i & j) / sqrt(128), then codes; returns the scale.
float hadamard_codes(std::uint8_t* codes, const double* x) {
  double y[kDim], amax = 1e-4f;
  for (unsigned i = 0; i < kDim; ++i) {
    double sum = 0.0;
    for (unsigned j = 0; j < kDim; ++j) sum += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    y[i] = sum / std::sqrt(128.0);
    amax = std::max(amax, std::abs(y[i]));
  }
  const auto scale = static_cast<float>(amax / 448.0);
  for (int i = 0; i < kDim; ++i) codes[i] = to_e4m3(y[i] / scale);
  return scale;
}

// Heads of a query from their codes.
template <class Code>
std::vector<double> values_of(const Code* codes, std::int64_t heads, double (*value)(Code)) {
  std::vector<double> values(heads * kDim);
  for (std::int64_t i = 0; i < heads * kDim; ++i) values[i] = value(codes[i]);
  return values;
}

std::vector<double> scores(const std::vector<double>& query, const float* weights,
                           const std::uint8_t* rows, std::int64_t row_bytes,
                           void (*unpack)(double*, const std::uint8_t*), std::int64_t count) {
  const std::int64_t heads = static_cast<std::int64_t>(query.size()) / kDim;
  std::vector<double> sums;
  for (std::int64_t n = 0; n < count; ++n) {
    double key[kDim];
    unpack(key, rows + n * row_bytes);
    double sum = 0.0;
    for (std::int64_t h = 0; h < heads; ++h) {
      double match = 0.0;
      for (std::int64_t i = 0; i < kDim; ++i) match += query[h * kDim + i] * key[i];
      sum += weights[h] * std::max(match, 0.0);
    }
    sums.push_back(sum);
  }
  return sums;
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
  return scores(values_of(query, heads, from_bf16), weights, rows, 68, fp4_unpack_index, count);
}

void index_query_fp8(std::uint8_t* codes, float* scales, const std::uint16_t* x, std::int64_t heads,
                     std::int64_t position) {
  for (std::int64_t h = 0; h < heads; ++h) {
    double values[kDim];
    for (std::int64_t i = 0; i < kDim; ++i) values[i] = from_bf16(x[h * kDim + i]);
    rope(values, &position, 1, 1, kDim, true, false);
    scales[h] = hadamard_codes(codes + h * kDim, values);
  }
}

void index_keys_fp8(std::uint8_t* rows, const std::uint16_t* x, const std::uint16_t* wkv,
                    const std::uint16_t* wgate, const float* ape, const std::uint16_t* gain,
                    std::int64_t length, std::int64_t hidden, double eps) {
  const std::vector<double> keys =
      pooled_keys(x, wkv, wgate, ape, gain, length, hidden, 4, kDim, eps);
  for (std::int64_t n = 0; n < length / 4; ++n) {
    std::uint8_t* row = rows + n * 132;
    const auto bits = std::bit_cast<std::uint32_t>(hadamard_codes(row, &keys[n * kDim]));
    for (int i = 0; i < 4; ++i) row[kDim + i] = static_cast<std::uint8_t>(bits >> 8 * i);
  }
}

void index_unpack_fp8(double* x, const std::uint8_t* row) {
  std::uint32_t bits = 0;
  for (int i = 3; i >= 0; --i) bits = bits * 256 + row[kDim + i];
  for (std::int64_t i = 0; i < kDim; ++i) x[i] = from_e4m3(row[i]) * std::bit_cast<float>(bits);
}

std::vector<double> index_scores_fp8(const std::uint8_t* codes, const float* weights,
                                     std::int64_t heads, const std::uint8_t* rows,
                                     std::int64_t count) {
  return scores(values_of(codes, heads, from_e4m3), weights, rows, 132, index_unpack_fp8, count);
}

}  // namespace lowlat::reference
