#include "reference/norm.hpp"

#include <cmath>

#include "reference/format.hpp"

namespace lowlat::reference {

namespace {

double root_mean_square(const std::uint16_t* x, std::int64_t n, double eps) {
  double sum_sq = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum_sq += from_bf16(x[i]) * from_bf16(x[i]);
  return std::sqrt(sum_sq / static_cast<double>(n) + eps);
}

}  // namespace

void rms_norm(std::uint16_t* y, const std::uint16_t* x, const std::uint16_t* gain,
              std::int64_t rows, std::int64_t hidden, double eps) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const double rms = root_mean_square(x + t * hidden, hidden, eps);
    for (std::int64_t h = 0; h < hidden; ++h) {
      y[t * hidden + h] = to_bf16(from_bf16(x[t * hidden + h]) / rms * from_bf16(gain[h]));
    }
  }
}

void head_norm(std::uint16_t* y, const std::uint16_t* x, std::int64_t rows, std::int64_t n,
               double eps) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const double rms = root_mean_square(x + t * n, n, eps);
    for (std::int64_t i = t * n; i < (t + 1) * n; ++i) y[i] = to_bf16(from_bf16(x[i]) / rms);
  }
}

}  // namespace lowlat::reference
