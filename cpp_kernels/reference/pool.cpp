#include "reference/pool.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/format.hpp"
#include "reference/linear.hpp"
#include "reference/rope.hpp"

namespace lowlat::reference {
namespace {

struct Candidate {
  double value, score;
};

// Softmax of the scores, summed over the values.
double pool(const std::vector<Candidate>& candidates) {
  double largest = candidates.front().score;
  for (const Candidate& c : candidates) largest = std::max(largest, c.score);
  double sum = 0.0, weighted = 0.0;
  for (const Candidate& c : candidates) {
    const double weight = std::exp(c.score - largest);
    sum += weight;
    weighted += weight * c.value;
  }
  return weighted / sum;
}

}  // namespace

std::vector<double> pooled_keys(const std::uint16_t* x, const std::uint16_t* wkv,
                                const std::uint16_t* wgate, const float* ape,
                                const std::uint16_t* gain, std::int64_t length, std::int64_t hidden,
                                std::int64_t ratio, std::int64_t dim, double eps) {
  const std::int64_t width = ratio == 4 ? 2 * dim : dim;
  const std::vector<double> value = project(x, wkv, length, width, hidden);
  const std::vector<double> score = project(x, wgate, length, width, hidden);
  const std::int64_t num_entries = length / ratio;
  std::vector<double> keys(num_entries * dim);
  for (std::int64_t n = 0; n < num_entries; ++n) {
    double* key = &keys[n * dim];
    // Column of a token's projections as a candidate, with the ape of its place in its own block.
    const auto candidate = [&](std::int64_t token, std::int64_t column) {
      return Candidate{value[token * width + column],
                       score[token * width + column] + ape[token % ratio * width + column]};
    };
    double sum_sq = 0.0;
    for (std::int64_t d = 0; d < dim; ++d) {
      std::vector<Candidate> candidates;
      for (std::int64_t i = 0; ratio == 4 && i < 4; ++i) {
        candidates.push_back(n == 0 ? Candidate{0.0, -std::numeric_limits<float>::max()}
                                    : candidate(4 * n - 4 + i, d));
      }
      for (std::int64_t i = 0; i < ratio; ++i) {
        candidates.push_back(candidate(ratio * n + i, ratio == 4 ? dim + d : d));
      }
      key[d] = pool(candidates);
      sum_sq += key[d] * key[d];
    }
    const double norm = std::sqrt(sum_sq / static_cast<double>(dim) + eps);
    for (std::int64_t d = 0; d < dim; ++d) key[d] = key[d] / norm * from_bf16(gain[d]);
    const std::int64_t first_position = ratio * n;
    rope(key, &first_position, 1, 1, dim, true, false);
  }
  return keys;
}

void compress_pooled(float* kv, const std::uint16_t* x, const std::uint16_t* wkv,
                     const std::uint16_t* wgate, const float* ape, const std::uint16_t* gain,
                     std::int64_t length, std::int64_t hidden, std::int64_t ratio, double eps) {
  const std::vector<double> keys =
      pooled_keys(x, wkv, wgate, ape, gain, length, hidden, ratio, 512, eps);
  for (std::size_t i = 0; i < keys.size(); ++i) kv[i] = static_cast<float>(round_bf16(keys[i]));
}

}  // namespace lowlat::reference
