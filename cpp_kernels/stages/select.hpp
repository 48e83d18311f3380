// stages/select.hpp: the best of many scores as a set, in ascending order of position.
//
// Equal scores go to the lower position, so that the result is one set on every rank, in every
// batch and at every chunk of a prompt. One thread calls each function; nothing here touches memory
// order.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::stages {

// Candidates 0 .. n-1 are positions 0 .. n-1.
struct AllPositions {
  LOWLAT_DEVICE int operator()(int candidate_idx) const { return candidate_idx; }
};

// Candidates are the positions of published blocks: blocks ascend and only the last may reach past
// `count`, so candidates ascend too.
struct BlockPositions {
  const std::int32_t* blocks;  // [max_blocks] ascending, -1 at the end; each begins below count
  int max_blocks;
  int block_size;
  int count;  // positions that exist

  LOWLAT_DEVICE int size() const {
    int num_blocks = 0;
    while (num_blocks < max_blocks && blocks[num_blocks] >= 0) ++num_blocks;
    if (num_blocks == 0) return 0;
    const int past = (blocks[num_blocks - 1] + 1) * block_size - count;
    return num_blocks * block_size - (past > 0 ? past : 0);
  }
  LOWLAT_DEVICE int operator()(int candidate_idx) const {
    return blocks[candidate_idx / block_size] * block_size + candidate_idx % block_size;
  }
};

// Order of scores as unsigned numbers: -0 and +0 are equal, NaN is below everything.
LOWLAT_DEVICE std::uint32_t score_order(float score) {
  if (score != score) return 0u;
  const std::uint32_t bits = plat::float_bits(score + 0.0f);  // -0 + 0 is +0
  return (bits & 0x8000'0000u) != 0u ? ~bits : bits | 0x8000'0000u;
}

struct SelectScratch {
  std::uint32_t histogram[256];
};

// out_positions[0 .. k-1]: positions of the k best of scores[0 .. n-1], ascending; all of them when
// n <= k; -1 at the end. position_of ascends. The threshold is found by four passes of eight bits.
template <class PositionOf>
LOWLAT_DEVICE void select_top(std::int32_t* out_positions, const float* scores, int n, int k,
                              const PositionOf& position_of, SelectScratch& scratch) {
  int num_taken = 0;
  if (n <= k) {
    for (; num_taken < n; ++num_taken) out_positions[num_taken] = position_of(num_taken);
  } else if (k > 0) {
    std::uint32_t threshold = 0u;  // the k-th largest order, from its upper bits down
    std::uint32_t num_missing = static_cast<std::uint32_t>(k);  // to be taken at its upper bits
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (std::uint32_t& bin : scratch.histogram) bin = 0u;
      for (int i = 0; i < n; ++i) {
        const std::uint32_t order = score_order(scores[i]);
        // (x >> 24) >> 8 and not x >> 32, which is undefined: at the first pass all take part.
        if ((order >> shift) >> 8 == (threshold >> shift) >> 8) {
          ++scratch.histogram[order >> shift & 0xffu];
        }
      }
      std::uint32_t digit = 255u;
      while (scratch.histogram[digit] < num_missing) num_missing -= scratch.histogram[digit--];
      threshold |= digit << shift;
    }
    for (int i = 0; i < n && num_taken < k; ++i) {
      const std::uint32_t order = score_order(scores[i]);
      const bool at_threshold = order == threshold && num_missing > 0u;
      if (at_threshold) --num_missing;
      if (order > threshold || at_threshold) out_positions[num_taken++] = position_of(i);
    }
  }
  for (; num_taken < k; ++num_taken) out_positions[num_taken] = -1;
}

// out_blocks[0 .. k-1]: the best blocks of block_size positions by their largest score, the block
// of the newest position (count - 1) before all others; ascending, -1 at the end; all when there
// are no more than k. block_scores: scratch of count / block_size floats. k >= 1.
LOWLAT_DEVICE void candidate_blocks(std::int32_t* out_blocks, const float* scores, int count,
                                    int block_size, int k, float* block_scores,
                                    SelectScratch& scratch) {
  const int num_blocks = (count + block_size - 1) / block_size;
  if (num_blocks <= k) {
    for (int i = 0; i < k; ++i) out_blocks[i] = i < num_blocks ? i : -1;
    return;
  }
  // The newest block takes a place whatever its scores; the others, all of them whole, compete for
  // what is left.
  const int newest = num_blocks - 1;
  for (int block_idx = 0; block_idx < newest; ++block_idx) {
    const float* block = scores + block_idx * block_size;
    float best = block[0];
    for (int i = 1; i < block_size; ++i) best = plat::max(block[i], best);
    block_scores[block_idx] = best;
  }
  select_top(out_blocks, block_scores, newest, k - 1, AllPositions{}, scratch);
  out_blocks[k - 1] = newest;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
