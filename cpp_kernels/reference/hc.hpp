// reference/hc: what the hyper-connections mean, in double precision. Four residual streams:
// residual bf16 [rows, 4, hidden].
#pragma once
#include <cstdint>

namespace lowlat::reference {

// The numbers that a sublayer mixes the streams with. x = the row's 4 hidden values; m = fn x /
// sqrt(mean(x^2) + norm_eps); pre = sigmoid(m scale[0] + base) + hc_eps, post = 2 sigmoid(m
// scale[1] + base), comb = sinkhorn(m scale[2] + base). fn f32 [24, 4 hidden], base f32 [24], scale
// f32 [3]; pre, post f32 [rows, 4], comb f32 [rows, 4, 4].
void hc_stats(float* pre, float* post, float* comb, const std::uint16_t* residual, const float* fn,
              const float* base, const float* scale, std::int64_t rows, std::int64_t hidden,
              double norm_eps, double hc_eps, int sinkhorn_iters);

// comb [4, 4] in place: softmax of each row + eps, columns over (sum + eps), then iters - 1 times
// rows and columns the same way.
void hc_sinkhorn(double* comb, double eps, int iters);

// x = bf(v) / sqrt(mean(s^2) + eps) gain with v = sum_k pre[k] residual[k]; s is bf(v) (V4.1), or v
// itself where `unrounded_statistic` (V4). pre f32 [rows, 4], gain bf16 [hidden], x bf16 [rows,
// hidden].
void hc_combine_norm(std::uint16_t* x, const std::uint16_t* residual, const float* pre,
                     const std::uint16_t* gain, std::int64_t rows, std::int64_t hidden, double eps,
                     bool unrounded_statistic);

// V4's collapse before the head: h = bf( sum_k pre[k] residual[k] ), pre = sigmoid(m scale + base)
// + hc_eps with m as in hc_stats. fn f32 [4, 4 hidden], base f32 [4], h bf16 [rows, hidden].
void hc_head(std::uint16_t* h, const std::uint16_t* residual, const float* fn, const float* base,
             double scale, std::int64_t rows, std::int64_t hidden, double norm_eps, double hc_eps);

// out[k] = bf( post[k] y + sum_j comb[j][k] residual[j] ). y bf16 [rows, hidden].
void hc_post(std::uint16_t* out, const std::uint16_t* residual, const std::uint16_t* y,
             const float* post, const float* comb, std::int64_t rows, std::int64_t hidden);

}  // namespace lowlat::reference
