// stages/rank_sum.hpp: the sum over tensor-parallel ranks, in rank order.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// out[i] = bf( ((p0[i] + p1[i]) + p2[i]) + ... ): fp32, rank 0 first, one rounding to bf16 at the
// end, so every rank that holds the same partials gets the same bits. `partial(rank, i)` gives
// rank's fp32 value of element i, wherever it lies (a mailbox slot, a row of an array). The block
// calls; threads split begin .. end - 1; no sync, no scratch. num_ranks >= 1.
template <class Block, class Partial>
LOWLAT_DEVICE void rank_sum(std::uint16_t* out, int num_ranks, int begin, int end,
                            Partial&& partial) {
  for (int i = begin + Team<Block>::thread_idx(); i < end; i += Block::kNumThreads) {
    float sum = partial(0, i);
    for (int rank = 1; rank < num_ranks; ++rank) sum += partial(rank, i);
    out[i] = to_bf16(sum);
  }
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
