#include "reference/compress.hpp"

#include <cmath>
#include <vector>

#include "reference/format.hpp"
#include "reference/fp4.hpp"
#include "reference/linear.hpp"
#include "reference/rope.hpp"

namespace lowlat::reference {
namespace {

constexpr std::int64_t kDim = 512;

}  // namespace

double pool_pair(double kv_even, double score_even, double kv_odd, double score_odd) {
  const double weight_even = 1.0 / (1.0 + std::exp(score_odd - score_even));
  return kv_even * weight_even + kv_odd * (1.0 - weight_even);
}

void compressed_latent(std::uint16_t* latent, const double* c, const std::uint16_t* gain,
                       double eps) {
  double sum_sq = 0.0;
  for (std::int64_t i = 0; i < kDim; ++i) sum_sq += round_bf16(c[i]) * round_bf16(c[i]);
  const double norm = std::sqrt(sum_sq / kDim + eps);
  for (std::int64_t i = 0; i < kDim; ++i) {
    latent[i] = to_bf16(round_bf16(c[i]) / norm * from_bf16(gain[i]));
  }
}

void compressed_entry(double* entry, const std::uint16_t* latent, std::int64_t first_position) {
  for (std::int64_t i = 0; i < kDim; ++i) entry[i] = from_bf16(latent[i]);
  rope(entry, &first_position, 1, 1, kDim, true, false);
  for (std::int64_t i = kDim - 64; i < kDim; ++i) entry[i] = round_bf16(entry[i]);
  fp4_round_trip_latent(entry, kDim);
}

void compress(float* kv, const std::uint16_t* x, const std::uint16_t* wkv,
              const std::uint16_t* wgate, const std::uint16_t* gain, std::int64_t length,
              std::int64_t hidden, std::int64_t ratio, double eps) {
  const std::vector<double> value = project(x, wkv, length, kDim, hidden);
  const std::vector<double> score =
      ratio == 2 ? project(x, wgate, length, kDim, hidden) : std::vector<double>{};
  for (std::int64_t n = 0; n < length / ratio; ++n) {
    const std::int64_t first = n * ratio;
    double c[kDim];
    for (std::int64_t i = 0; i < kDim; ++i) {
      const std::int64_t even = first * kDim + i, odd = even + kDim;
      c[i] = ratio == 2 ? pool_pair(value[even], score[even], value[odd], score[odd]) : value[even];
    }
    std::uint16_t latent[kDim];
    compressed_latent(latent, c, gain, eps);
    double entry[kDim];
    compressed_entry(entry, latent, first);
    for (std::int64_t i = 0; i < kDim; ++i) kv[n * kDim + i] = static_cast<float>(entry[i]);
  }
}

}  // namespace lowlat::reference
