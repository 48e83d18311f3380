// reference/select: what the selections mean, by sorting.
#pragma once
#include <cstdint>
#include <vector>

namespace lowlat::reference {

// The k best of `scores` (all when there are no more), the lower index first among equals; the
// indexes in ascending order.
std::vector<std::int32_t> select_top(const std::vector<double>& scores, std::int64_t k);

// Blocks of block_size scores ranked by their largest; the last block counts as +infinity and the
// lower block wins among equals. The k best (all when there are no more), ascending.
std::vector<std::int32_t> candidate_blocks(const std::vector<double>& scores,
                                           std::int64_t block_size, std::int64_t k);

}  // namespace lowlat::reference
