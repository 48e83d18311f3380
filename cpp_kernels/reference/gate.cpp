#include "reference/gate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "reference/format.hpp"

namespace lowlat::reference {

namespace {

double logit(const std::uint16_t* x, const std::uint16_t* w, std::int64_t hidden) {
  double z = 0.0;
  for (std::int64_t i = 0; i < hidden; ++i) z += from_bf16(x[i]) * from_bf16(w[i]);
  return z;
}

}  // namespace

// log1p(exp(z)) is exact enough at any size in double but overflows above 709, where it equals z.
double gate_score(double z) { return std::sqrt(z > 500.0 ? z : std::log1p(std::exp(z))); }

void gate(std::int32_t* ids, float* weights, const std::uint16_t* x, const std::uint16_t* w,
          const float* bias, std::int64_t rows, std::int64_t hidden, std::int64_t num_experts,
          std::int64_t k, bool one_for_zero) {
  std::vector<double> score(num_experts);
  std::vector<std::int32_t> order(num_experts);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t e = 0; e < num_experts; ++e) {
      score[e] = gate_score(logit(x + t * hidden, w + e * hidden, hidden));
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return score[a] + bias[a] > score[b] + bias[b];
    });
    double sum = one_for_zero ? 0.0 : 1e-20;
    for (std::int64_t slot = 0; slot < k; ++slot) sum += score[order[slot]];
    if (sum <= 0.0) sum = 1.0;
    for (std::int64_t slot = 0; slot < k; ++slot) {
      ids[t * k + slot] = order[slot];
      weights[t * k + slot] = static_cast<float>(score[order[slot]] / sum * 1.5);
    }
  }
}

void hash_gate(std::int32_t* ids, float* weights, const std::int64_t* token,
               const std::int32_t* table, const std::uint16_t* x, const std::uint16_t* w,
               std::int64_t rows, std::int64_t hidden, std::int64_t k) {
  std::vector<double> score(k);
  for (std::int64_t t = 0; t < rows; ++t) {
    double sum = 1e-20;
    for (std::int64_t slot = 0; slot < k; ++slot) {
      const std::int64_t id = table[token[t] * k + slot];
      ids[t * k + slot] = static_cast<std::int32_t>(id);
      sum += score[slot] = gate_score(logit(x + t * hidden, w + id * hidden, hidden));
    }
    for (std::int64_t slot = 0; slot < k; ++slot) {
      weights[t * k + slot] = static_cast<float>(score[slot] / sum * 1.5);
    }
  }
}

}  // namespace lowlat::reference
