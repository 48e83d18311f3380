#include "reference/experts.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "reference/format.hpp"
#include "reference/linear.hpp"

namespace lowlat::reference {
namespace {

using Values = std::vector<double>;

// What each of the first N codes stands for.
template <std::size_t N>
std::array<double, N> numbers(double (*decode)(std::uint8_t)) {
  std::array<double, N> out;
  for (std::size_t code = 0; code < N; ++code) out[code] = decode(static_cast<std::uint8_t>(code));
  return out;
}

// One expert's [n, k] in full.
Values values(Fp4Stack w, std::int64_t expert, std::int64_t n, std::int64_t k) {
  const auto number = numbers<16>(from_e2m1);
  Values out(n * k);
  double scale = 0.0;
  for (std::int64_t i = 0; i < n * k; ++i) {
    const std::int64_t at = expert * n * k + i;
    if (i == 0 || at % 32 == 0) scale = from_ue8m0(w.scales[at / 32]);
    const std::uint8_t code = at % 2 == 0 ? w.codes[at / 2] & 15 : w.codes[at / 2] >> 4;
    out[i] = number[code] * scale;
  }
  return out;
}

Values values(E4m3Matrix w, std::int64_t n, std::int64_t k, std::int64_t block) {
  const auto number = numbers<256>(from_e4m3);
  Values out(n * k);
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t column = 0; column < k; ++column) {
      out[row * k + column] =
          number[w.codes[row * k + column]] * w.scales[row / block * (k / block) + column / block];
    }
  }
  return out;
}

// w x for a matrix of x.size() columns.
Values product(const Values& w, const Values& x) {
  Values y(w.size() / x.size());
  for (std::size_t row = 0; row < y.size(); ++row) {
    const double* from = &w[row * x.size()];
    for (std::size_t i = 0; i < x.size(); ++i) y[row] += from[i] * x[i];
  }
  return y;
}

}  // namespace

double swiglu(double gate, double up) {
  const double g = std::min(gate, 10.0);
  return g / (1.0 + std::exp(-g)) * std::clamp(up, -10.0, 10.0);
}

void experts(float* y, const std::uint16_t* x, Fp4Stack w1, Fp4Stack w3, Fp4Stack w2,
             const std::int32_t* ids, const float* weight, E4m3Matrix shared_w1,
             E4m3Matrix shared_w3, E4m3Matrix shared_w2, std::int64_t rows, std::int64_t hidden,
             std::int64_t inner, std::int64_t slots, std::int64_t block) {
  const Values shared_gate = values(shared_w1, inner, hidden, block);
  const Values shared_up = values(shared_w3, inner, hidden, block);
  const Values shared_down = values(shared_w2, hidden, inner, block);
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::uint16_t* row = x + t * hidden;
    Values input(hidden), quantised(hidden), sum(hidden);
    for (std::int64_t h = 0; h < hidden; ++h) input[h] = from_bf16(row[h]);
    for (std::int64_t slot = t * slots; slot < (t + 1) * slots; ++slot) {
      Values mid = product(values(w1, ids[slot], inner, hidden), input);
      const Values up = product(values(w3, ids[slot], inner, hidden), input);
      for (std::int64_t i = 0; i < inner; ++i) mid[i] = swiglu(mid[i], up[i]);
      const Values down = product(values(w2, ids[slot], hidden, inner), mid);
      for (std::int64_t h = 0; h < hidden; ++h) sum[h] += weight[slot] * down[h];
    }
    quantize_activation(quantised.data(), row, hidden, block);
    const Values gate = product(shared_gate, quantised), up = product(shared_up, quantised);
    std::vector<std::uint16_t> mid(inner);
    for (std::int64_t i = 0; i < inner; ++i) {
      // What the second product quantises: SwiGLU of two bf16 tensors, a bf16 tensor itself.
      mid[i] = to_bf16(swiglu(from_bf16(to_bf16(gate[i])), from_bf16(to_bf16(up[i]))));
    }
    Values mid_quantised(inner);
    quantize_activation(mid_quantised.data(), mid.data(), inner, block);
    const Values shared = product(shared_down, mid_quantised);
    for (std::int64_t h = 0; h < hidden; ++h) {
      y[t * hidden + h] = static_cast<float>(sum[h] + shared[h]);
    }
  }
}

}  // namespace lowlat::reference
