#include "reference/rope.hpp"

#include <algorithm>
#include <cmath>

namespace lowlat::reference {

float rope_frequency(int pair, bool yarn) {
  const double base = yarn ? 160000.0 : 10000.0;
  const auto power = static_cast<float>(std::pow(base, pair / 32.0));
  const float f = 1.0f / power;
  if (!yarn) return f;
  // The ends of the ramp: pairs that turn 32 times and once over the original 65536 positions.
  const auto pair_with_turns = [&](double turns) {
    return 32.0 * std::log(65536.0 / (turns * 2.0 * std::acos(-1.0))) / std::log(base);
  };
  const auto low = static_cast<float>(std::floor(pair_with_turns(32.0)));
  const auto high = static_cast<float>(std::ceil(pair_with_turns(1.0)));
  const float ramp = std::clamp((static_cast<float>(pair) - low) / (high - low), 0.0f, 1.0f);
  const float slow = f / 16.0f * ramp;
  const float fast = f * (1.0f - ramp);
  return slow + fast;
}

void rope(double* x, const std::int64_t* pos, std::int64_t rows, std::int64_t heads,
          std::int64_t dim, bool yarn, bool inverse) {
  const float sign = inverse ? -1.0f : 1.0f;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int pair = 0; pair < 32; ++pair) {
      const float angle = static_cast<float>(pos[t]) * rope_frequency(pair, yarn);
      // Entries of the fp32 table.
      const auto cos = static_cast<float>(std::cos(static_cast<double>(angle)));
      const auto sin = static_cast<float>(std::sin(static_cast<double>(angle))) * sign;
      for (std::int64_t head = 0; head < heads; ++head) {
        double* values = x + ((t * heads + head + 1) * dim - 64 + 2 * pair);
        const double a = values[0], b = values[1];
        values[0] = a * cos - b * sin;
        values[1] = a * sin + b * cos;
      }
    }
  }
}

}  // namespace lowlat::reference
