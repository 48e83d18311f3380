// reference/norm: what the norms mean, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// y[t] = bf( x[t] / sqrt(mean(x[t]^2) + eps) * gain ); x, y bf16[rows, hidden], gain bf16[hidden].
void rms_norm(std::uint16_t* y, const std::uint16_t* x, const std::uint16_t* gain,
              std::int64_t rows, std::int64_t hidden, double eps);

// The same without a weight: y[t] = bf( x[t] / sqrt(mean(x[t]^2) + eps) ); x, y bf16[rows, n].
void head_norm(std::uint16_t* y, const std::uint16_t* x, std::int64_t rows, std::int64_t n,
               double eps);

}  // namespace lowlat::reference
