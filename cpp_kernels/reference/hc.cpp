#include "reference/hc.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/format.hpp"

namespace lowlat::reference {
namespace {

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

// fn x / sqrt(mean(x^2) + eps) for the 4 hidden values x of one row.
std::vector<double> mix(const std::uint16_t* row, const float* fn, int num_outputs,
                        std::int64_t hidden, double eps) {
  const std::int64_t n = 4 * hidden;
  double sum_sq = 0.0;
  std::vector<double> m(num_outputs);
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = from_bf16(row[i]);
    sum_sq += x * x;
    for (int out = 0; out < num_outputs; ++out) m[out] += fn[out * n + i] * x;
  }
  for (double& v : m) v /= std::sqrt(sum_sq / static_cast<double>(n) + eps);
  return m;
}

// sum_k pre[k] residual[k] of one row.
std::vector<double> combine(const std::uint16_t* row, const double (&pre)[4], std::int64_t hidden) {
  std::vector<double> v(hidden);
  for (int k = 0; k < 4; ++k) {
    for (std::int64_t h = 0; h < hidden; ++h) v[h] += pre[k] * from_bf16(row[k * hidden + h]);
  }
  return v;
}

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
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::vector<double> m = mix(residual + t * 4 * hidden, fn, 24, hidden, norm_eps);
    double logits[16];
    for (int k = 0; k < 4; ++k) {
      pre[4 * t + k] = static_cast<float>(sigmoid(m[k] * scale[0] + base[k]) + hc_eps);
      post[4 * t + k] = static_cast<float>(2.0 * sigmoid(m[4 + k] * scale[1] + base[4 + k]));
    }
    for (int i = 0; i < 16; ++i) logits[i] = m[8 + i] * scale[2] + base[8 + i];
    hc_sinkhorn(logits, hc_eps, sinkhorn_iters);
    for (int i = 0; i < 16; ++i) comb[16 * t + i] = static_cast<float>(logits[i]);
  }
}

void hc_combine_norm(std::uint16_t* x, const std::uint16_t* residual, const float* pre,
                     const std::uint16_t* gain, std::int64_t rows, std::int64_t hidden, double eps,
                     bool unrounded_statistic) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const double weights[4] = {pre[4 * t], pre[4 * t + 1], pre[4 * t + 2], pre[4 * t + 3]};
    const std::vector<double> v = combine(residual + t * 4 * hidden, weights, hidden);
    double sum_sq = 0.0;
    for (const double value : v) {
      const double s = unrounded_statistic ? value : from_bf16(to_bf16(value));
      sum_sq += s * s;
    }
    const double rms = std::sqrt(sum_sq / static_cast<double>(hidden) + eps);
    for (std::int64_t h = 0; h < hidden; ++h) {
      x[t * hidden + h] = to_bf16(from_bf16(to_bf16(v[h])) / rms * from_bf16(gain[h]));
    }
  }
}

void hc_head(std::uint16_t* h, const std::uint16_t* residual, const float* fn, const float* base,
             double scale, std::int64_t rows, std::int64_t hidden, double norm_eps, double hc_eps) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::uint16_t* row = residual + t * 4 * hidden;
    const std::vector<double> m = mix(row, fn, 4, hidden, norm_eps);
    double pre[4];
    for (int k = 0; k < 4; ++k) pre[k] = sigmoid(m[k] * scale + base[k]) + hc_eps;
    const std::vector<double> v = combine(row, pre, hidden);
    for (std::int64_t i = 0; i < hidden; ++i) h[t * hidden + i] = to_bf16(v[i]);
  }
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
