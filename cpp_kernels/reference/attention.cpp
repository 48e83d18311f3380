#include "reference/attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "reference/format.hpp"
#include "reference/kv.hpp"

namespace lowlat::reference {
namespace {

constexpr std::int64_t kDim = 512;
using Row = std::array<double, kDim>;

std::vector<Row> keys_of_row(const Keys& keys, std::int64_t row) {
  std::vector<Row> found;
  for (std::int64_t i = 0; i < keys.num_ids; ++i) {
    const std::int32_t id = keys.ids[row * keys.num_ids + i];
    if (id < 0) continue;
    float stored[kDim];
    kv_unpack(stored, keys.rows + std::int64_t{584} * id, 1);
    Row& key = found.emplace_back();
    std::copy(stored, stored + kDim, key.begin());
  }
  return found;
}

}  // namespace

void sparse_attention(std::uint16_t* o, const std::uint16_t* q, std::int64_t rows,
                      std::int64_t heads, const Keys& window, const Keys& extra,
                      const float* sink) {
  for (std::int64_t t = 0; t < rows; ++t) {
    std::vector<Row> keys = keys_of_row(window, t);
    for (const Row& key : keys_of_row(extra, t)) keys.push_back(key);
    for (std::int64_t h = 0; h < heads; ++h) {
      Row query;
      for (std::int64_t d = 0; d < kDim; ++d) query[d] = from_bf16(q[(t * heads + h) * kDim + d]);
      std::vector<double> logits;
      for (const Row& key : keys) {
        double product = 0.0;
        for (std::int64_t d = 0; d < kDim; ++d) product += query[d] * key[d];
        logits.push_back(product / std::sqrt(512.0));
      }
      double top = sink[h];
      for (const double logit : logits) top = std::max(top, logit);
      double denominator = std::isinf(sink[h]) ? 0.0 : std::exp(sink[h] - top);
      Row sum{};
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const double weight = std::exp(logits[j] - top);
        denominator += weight;
        for (std::int64_t d = 0; d < kDim; ++d) sum[d] += weight * keys[j][d];
      }
      for (std::int64_t d = 0; d < kDim; ++d) {
        o[(t * heads + h) * kDim + d] = to_bf16(denominator == 0.0 ? 0.0 : sum[d] / denominator);
      }
    }
  }
}

}  // namespace lowlat::reference
