#include "reference/linear.hpp"

#include <algorithm>
#include <cmath>

#include "reference/format.hpp"

namespace lowlat::reference {
namespace {

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

void bf16_linear(std::uint16_t* y, const std::uint16_t* x, const std::uint16_t* w,
                 std::int64_t rows, std::int64_t n, std::int64_t k) {
  const std::vector<double> unrounded = project(x, w, rows, n, k);
  for (std::int64_t i = 0; i < rows * n; ++i) y[i] = to_bf16(unrounded[i]);
}

std::vector<double> project(const std::uint16_t* x, const std::uint16_t* w, std::int64_t rows,
                            std::int64_t n, std::int64_t k) {
  std::vector<double> y(static_cast<std::size_t>(rows * n));
  std::vector<double> a(static_cast<std::size_t>(rows * k)), b(static_cast<std::size_t>(k));
  for (std::int64_t i = 0; i < rows * k; ++i) a[i] = from_bf16(x[i]);
  for (std::int64_t out = 0; out < n; ++out) {
    for (std::int64_t i = 0; i < k; ++i) b[i] = from_bf16(w[out * k + i]);
    for (std::int64_t t = 0; t < rows; ++t) y[t * n + out] = dot(&a[t * k], b.data(), k);
  }
  return y;
}

void quantize_activation(double* out, const std::uint16_t* x, std::int64_t n, std::int64_t group) {
  for (std::int64_t begin = 0; begin < n; begin += group) {
    double amax = 1e-10;
    for (std::int64_t i = begin; i < begin + group; ++i) {
      amax = std::max(amax, std::abs(from_bf16(x[i])));
    }
    const double scale = from_ue8m0(ue8m0_ceil(amax / 448.0));
    for (std::int64_t i = begin; i < begin + group; ++i) {
      out[i] = from_e4m3(to_e4m3(from_bf16(x[i]) / scale)) * scale;
    }
  }
}

void block_linear(std::uint16_t* y, const std::uint16_t* x, const std::uint8_t* w,
                  const float* w_scale, std::int64_t rows, std::int64_t n, std::int64_t k,
                  std::int64_t block) {
  std::vector<double> a(static_cast<std::size_t>(rows * k)), b(static_cast<std::size_t>(k));
  for (std::int64_t t = 0; t < rows; ++t) quantize_activation(&a[t * k], x + t * k, k, block);
  for (std::int64_t out = 0; out < n; ++out) {
    for (std::int64_t i = 0; i < k; ++i) {
      b[i] = from_e4m3(w[out * k + i]) * w_scale[out / block * (k / block) + i / block];
    }
    for (std::int64_t t = 0; t < rows; ++t) y[t * n + out] = to_bf16(dot(&a[t * k], b.data(), k));
  }
}

}  // namespace lowlat::reference
