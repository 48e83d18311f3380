#include "reference/hc.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/format.hpp"
#include "reference/norm.hpp"

namespace lowlat::reference {
namespace {

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

}  // namespace

void hc_sinkhorn(double* comb, double eps, int iters) {
  for (int j = 0; j < 4; ++j) {
    double* row = comb + 4 * j;
    const double top = *std::max_element(row, row + 4);
    double sum = 0.0;
    for (int k = 0; k < 4; ++k) sum += std::exp(row[k] - top);
    for (int k = 0; k < 4; ++k) row[k] = std::exp(row[k] - top) / sum + eps;
  }
  for (int iter = 0; iter < iters; ++iter) {
    for (int j = 0; j < 4 && iter > 0; ++j) {
      const double sum = comb[4 * j] + comb[4 * j + 1] + comb[4 * j + 2] + comb[4 * j + 3];
      for (int k = 0; k < 4; ++k) comb[4 * j + k] /= sum + eps;
    }
    for (int k = 0; k < 4; ++k) {
      const double sum = comb[k] + comb[4 + k] + comb[8 + k] + comb[12 + k];
      for (int j = 0; j < 4; ++j) comb[4 * j + k] /= sum + eps;
    }
  }
}

void hc_stats(float* pre, float* post, float* comb, const std::uint16_t* residual, const float* fn,
              const float* base, const float* scale, std::int64_t rows, std::int64_t hidden,
              double norm_eps, double hc_eps, int sinkhorn_iters) {
  const std::int64_t n = 4 * hidden;
  for (std::int64_t t = 0; t < rows; ++t) {
    double sum_sq = 0.0;
    double mix[24] = {};
    for (std::int64_t i = 0; i < n; ++i) {
      const double x = from_bf16(residual[t * n + i]);
      sum_sq += x * x;
      for (int out = 0; out < 24; ++out) mix[out] += fn[out * n + i] * x;
    }
    const double rms = std::sqrt(sum_sq / static_cast<double>(n) + norm_eps);
    for (double& m : mix) m /= rms;
    double logits[16];
    for (int k = 0; k < 4; ++k) {
      pre[4 * t + k] = static_cast<float>(sigmoid(mix[k] * scale[0] + base[k]) + hc_eps);
      post[4 * t + k] = static_cast<float>(2.0 * sigmoid(mix[4 + k] * scale[1] + base[4 + k]));
    }
    for (int i = 0; i < 16; ++i) logits[i] = mix[8 + i] * scale[2] + base[8 + i];
    hc_sinkhorn(logits, hc_eps, sinkhorn_iters);
    for (int i = 0; i < 16; ++i) comb[16 * t + i] = static_cast<float>(logits[i]);
  }
}

void hc_combine_norm(std::uint16_t* x, const std::uint16_t* residual, const float* pre,
                     const std::uint16_t* gain, std::int64_t rows, std::int64_t hidden,
                     double eps) {
  std::vector<std::uint16_t> v(static_cast<std::size_t>(rows * hidden));
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      double sum = 0.0;
      for (int k = 0; k < 4; ++k) {
        sum += static_cast<double>(pre[4 * t + k]) * from_bf16(residual[(4 * t + k) * hidden + h]);
      }
      v[static_cast<std::size_t>(t * hidden + h)] = to_bf16(sum);
    }
  }
  rms_norm(x, v.data(), gain, rows, hidden, eps);
}

void hc_post(std::uint16_t* out, const std::uint16_t* residual, const std::uint16_t* y,
             const float* post, const float* comb, std::int64_t rows, std::int64_t hidden) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int k = 0; k < 4; ++k) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        double sum = static_cast<double>(post[4 * t + k]) * from_bf16(y[t * hidden + h]);
        for (int j = 0; j < 4; ++j) {
          sum += static_cast<double>(comb[16 * t + 4 * j + k]) *
                 from_bf16(residual[(4 * t + j) * hidden + h]);
        }
        out[(4 * t + k) * hidden + h] = to_bf16(sum);
      }
    }
  }
}

}  // namespace lowlat::reference
