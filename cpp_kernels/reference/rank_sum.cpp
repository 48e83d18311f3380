#include "reference/rank_sum.hpp"

#include "reference/format.hpp"

namespace lowlat::reference {

void rank_sum(std::uint16_t* y, const float* partial, std::int64_t ranks, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    double sum = partial[i];
    // A double holds the sum of two floats closely enough that rounding it to fp32 rounds once.
    for (std::int64_t rank = 1; rank < ranks; ++rank) {
      sum = static_cast<float>(sum + partial[rank * n + i]);
    }
    y[i] = to_bf16(sum);
  }
}

}  // namespace lowlat::reference
