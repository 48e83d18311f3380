#include "reference/norm.hpp"

#include <cmath>

#include "reference/format.hpp"

namespace lowlat::reference {

void rms_norm(std::uint16_t* y, const std::uint16_t* x, const std::uint16_t* gain,
              std::int64_t rows, std::int64_t hidden, double eps) {
  for (std::int64_t t = 0; t < rows; ++t) {
    double sum_sq = 0.0;
    for (std::int64_t h = 0; h < hidden; ++h) {
      const double v = from_bf16(x[t * hidden + h]);
      sum_sq += v * v;
    }
    const double rms = std::sqrt(sum_sq / static_cast<double>(hidden) + eps);
    for (std::int64_t h = 0; h < hidden; ++h) {
      y[t * hidden + h] = to_bf16(from_bf16(x[t * hidden + h]) / rms * from_bf16(gain[h]));
    }
  }
}

}  // namespace lowlat::reference
