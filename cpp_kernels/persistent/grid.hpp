// persistent/grid.hpp: the blocks of one rank's kernel: who has which part of a unit's work, and
// the hand-off between them.
//
// Ordering     arrived[b]   the last hand-off that block b reached; written by b (release.device,
//                           after its barrier), read by every block of the rank (polls, then
//                           fence_polled.device).
//              edge         block b: what it wrote before hand-off n, then arrived[b] = n; another
//                           block: arrived[b] reaches n, then it reads
//              wrap         (arrived[b] - n) as u32 < 2^31 means arrived: blocks are apart by 1
//              late         twice the budget of a wait for a peer, because a block may stand in one
//                           while the others are here: the peer's wait tells the cause first
//
// All blocks of a rank must be resident at once; the launch checks that.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include <cstdint>

#include "stages/wait.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

using Block = plat::Block<256>;
using Threads = stages::Team<Block>;

// One block of a rank's kernel. On scalar there is one, of one thread.
struct Grid {
  std::uint32_t* arrived;  // [num_blocks], zeroed once; not read where num_blocks is 1
  int block_idx, num_blocks;
};

// Everything that any thread of the rank wrote before is visible to all threads after it. All
// threads of all blocks call, with the same number, which ascends by one a call. False: the step is
// over, reported.
LOWLAT_DEVICE bool hand_off(const Grid& grid, std::uint32_t number, const stages::FaultPort& fault,
                            std::uint32_t kernel, std::uint64_t epoch) {
  plat::block_sync();
  if (grid.num_blocks == 1) return true;
  if (Threads::leads()) {
    plat::store_release<plat::Scope::device>(grid.arrived + grid.block_idx, number);
  }
  // A thread looks at one block (at more than 256, every 256th): the warps wait side by side.
  stages::FaultPort patient = fault;
  patient.budget_ns *= 2;
  int next = Threads::thread_idx();
  const bool arrived = stages::wait_or_report<stages::Warp>(
      patient, kernel, stages::StageId::hand_off, fault.tp_rank, epoch, [&] {
        for (; next < grid.num_blocks; next += Block::kNumThreads) {
          const std::uint32_t seen = plat::load_poll<plat::Scope::device>(grid.arrived + next);
          if (seen - number > 0x7fff'ffffu) return false;
        }
        return true;
      });
  plat::fence_polled<plat::Scope::device>();
  return !Threads::any(!arrived);
}

// body(i) for i in 0 .. n - 1, split over the threads of the block; no sync.
template <class Body>
LOWLAT_DEVICE void spread(std::int64_t n, Body&& body) {
  for (std::int64_t i = Threads::thread_idx(); i < n; i += Block::kNumThreads) body(i);
}

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
