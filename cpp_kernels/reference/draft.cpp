#include "reference/draft.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/format.hpp"

namespace lowlat::reference {

void draft_feature(std::uint16_t* f, const std::uint16_t* residual, std::int64_t rows,
                   std::int64_t hidden) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      double sum = 0.0;
      for (std::int64_t k = 0; k < 4; ++k) sum += from_bf16(residual[(t * 4 + k) * hidden + h]);
      f[t * hidden + h] = to_bf16(sum / 4.0);
    }
  }
}

void markov_draft(std::int64_t* tokens, float* logits, double* out_margin, const float* base,
                  const std::uint16_t* w1, const std::uint16_t* w2, std::int64_t anchor,
                  double temperature, const float* uniform, std::int64_t steps, std::int64_t vocab,
                  std::int64_t rank) {
  std::int64_t previous = anchor;
  for (std::int64_t s = 0; s < steps; ++s) {
    double most = -HUGE_VAL, second = -HUGE_VAL;
    std::int64_t chosen = 0;
    for (std::int64_t v = 0; v < vocab; ++v) {
      double bias = 0.0;
      for (std::int64_t r = 0; r < rank; ++r) {
        bias += from_bf16(w1[previous * rank + r]) * from_bf16(w2[v * rank + r]);
      }
      // The bias and z are tensors of their own, bf16 and fp32.
      double z = logits[s * vocab + v] = static_cast<float>(base[s * vocab + v] + round_bf16(bias));
      if (temperature > 0.0) {
        const double u = uniform[s * vocab + v];
        z = z / std::max(temperature, 1e-5) - std::log(-std::log1p(-u));
      }
      if (z > most) {
        second = most;
        most = z;
        chosen = v;
      } else {
        second = std::max(second, z);
      }
    }
    tokens[s] = previous = chosen;
    out_margin[s] = most - second;
  }
}

}  // namespace lowlat::reference
