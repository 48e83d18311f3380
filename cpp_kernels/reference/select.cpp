#include "reference/select.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace lowlat::reference {

std::vector<std::int32_t> select_top(const std::vector<double>& scores, std::int64_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  // Stable: equal scores keep the order of their indexes.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min<std::size_t>(order.size(), static_cast<std::size_t>(k)));
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<std::int32_t> candidate_blocks(const std::vector<double>& scores,
                                           std::int64_t block_size, std::int64_t k) {
  std::vector<double> best;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const std::size_t block_idx = i / static_cast<std::size_t>(block_size);
    if (block_idx == best.size()) best.push_back(scores[i]);
    best[block_idx] = std::max(best[block_idx], scores[i]);
  }
  if (!best.empty()) best.back() = std::numeric_limits<double>::infinity();
  return select_top(best, k);
}

}  // namespace lowlat::reference
