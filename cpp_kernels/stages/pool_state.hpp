// stages/pool_state.hpp: where V4's compressors keep the projections of unfinished blocks, and
// which rows of a step are kept.
//
// State rows are fp32, PoolLayout::width() floats, the layout of stages/pool.hpp. Nothing is rolled
// back when drafts are rejected: a later step writes the position's row again before anyone reads
// it. One thread calls each function; nothing here touches memory order.
//
//   ratio 4    a ring of 8 rows (16 with speculation) a page of the window cache, so that what a
//              shared page needs goes with it
//   ratio 128  a ring of 128 rows (256 with speculation) a request
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/pool.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Rows of a ring: twice the candidates of an entry with speculation.
LOWLAT_DEVICE constexpr int pool_ring(const PoolLayout& layout, bool speculates) {
  return speculates ? 2 * layout.num_candidates() : layout.num_candidates();
}

// Rows of a ring where ratio 4 has overlap_ring: both are the same multiple of their candidates.
LOWLAT_DEVICE constexpr int pool_ring_rows(const PoolLayout& layout, int overlap_ring) {
  return overlap_ring / (2 * kOverlapRatio) * layout.num_candidates();
}

// Ratio 4: row of the token in slot swa_slot (>= 0) of the window cache.
LOWLAT_DEVICE constexpr std::int64_t overlap_state_row(std::int64_t swa_slot, int swa_page_size,
                                                       int ring) {
  return swa_slot / swa_page_size * ring + swa_slot % ring;
}

// Ratio 128: row of a request's token.
LOWLAT_DEVICE constexpr std::int64_t block_state_row(std::int64_t request_slot,
                                                     std::int64_t position, int ring) {
  return request_slot * ring + position % ring;
}

// Whether the row of `position` writes its projections to the ring in a step after which the
// sequence is `end` long: the blocks that are not finished, at ratio 4 the block whose overlap they
// need, and at least ring - candidates + 2 rows, so all rows that a verifying step may reject. At
// ratio 4 also the last four of a page of swa_page_size, whose overlap a request that shares the
// page will need. A chunk never writes two positions to one row.
LOWLAT_DEVICE constexpr bool writes_pool_state(const PoolLayout& layout, int ring,
                                               int swa_page_size, std::int64_t position,
                                               std::int64_t end) {
  const std::int64_t unfinished =
      end / layout.ratio * layout.ratio - (layout.overlaps() ? layout.ratio : 0);
  const std::int64_t latest = end - (ring - layout.num_candidates() + 2);
  if (position >= (unfinished < latest ? unfinished : latest)) return true;
  return layout.overlaps() && position % swa_page_size >= swa_page_size - layout.ratio;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
