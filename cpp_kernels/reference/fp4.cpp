#include "reference/fp4.hpp"

#include <algorithm>
#include <cmath>

#include "reference/format.hpp"

namespace lowlat::reference {
namespace {

double largest(const double* x, std::int64_t n) {
  double amax = 0.0;
  for (std::int64_t i = 0; i < n; ++i) amax = std::max(amax, std::abs(x[i]));
  return amax;
}

double keep(double x, double scale) {
  const double kept = from_e2m1(to_e2m1(x / scale)) * scale;
  return kept == 0.0 ? 0.0 : kept;  // no -0
}

}  // namespace

void fp4_round_trip_latent(double* x, std::int64_t n) {
  for (std::int64_t first = 0; first < n; first += 16) {
    const double ideal = std::clamp(largest(x + first, 16) / 6.0, std::ldexp(1.0, -9), 448.0);
    const double scale = from_e4m3(to_e4m3(ideal));
    for (std::int64_t i = first; i < first + 16; ++i) x[i] = keep(x[i], scale);
  }
}

void fp4_round_trip_index(double* x, std::int64_t n) {
  for (std::int64_t first = 0; first < n; first += 32) {
    const double amax = std::max(largest(x + first, 32), std::ldexp(6.0, -126));
    const double scale = from_ue8m0(ue8m0_ceil(amax / 6.0));
    for (std::int64_t i = first; i < first + 32; ++i) x[i] = keep(x[i], scale);
  }
}

void fp4_pack_index(std::uint8_t* row, const double* x) {
  for (int group = 0; group < 4; ++group) {
    const double* values = x + 32 * group;
    const std::uint8_t scale = ue8m0_ceil(std::max(largest(values, 32), 1e-4) / 6.0);
    row[64 + group] = scale;
    for (int i = 0; i < 16; ++i) {
      const int low = to_e2m1(values[2 * i] / from_ue8m0(scale));
      const int high = to_e2m1(values[2 * i + 1] / from_ue8m0(scale));
      row[16 * group + i] = static_cast<std::uint8_t>(low + 16 * high);
    }
  }
}

void fp4_unpack_index(double* x, const std::uint8_t* row) {
  for (int i = 0; i < 128; ++i) {
    const int code = i % 2 == 0 ? row[i / 2] % 16 : row[i / 2] / 16;
    x[i] = from_e2m1(static_cast<std::uint8_t>(code)) * from_ue8m0(row[64 + i / 32]);
  }
}

}  // namespace lowlat::reference
