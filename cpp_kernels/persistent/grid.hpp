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
// While a block waits, it asks for the weights that it reads first afterwards: they depend on
// nothing that the others make. What arrives is not used; it is near when it is asked for again.
//
// All blocks of a rank must be resident at once; the launch checks that.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any schedule"
#endif

#include <cstdint>

#include "stages/sum.hpp"
#include "stages/wait.hpp"

namespace lowlat::LOWLAT_PLATFORM::persistent {

using Block = plat::Block<256>;
using Threads = stages::Team<Block>;

#if LOWLAT_STAMPS
// When a block reached a hand-off and when it left it, in nanoseconds of the platform's clock. For
// builds that look where time goes (bench/resident_stages.cu); others keep none.
struct HandOffStamp {
  std::uint64_t arrive_ns, leave_ns;
};
inline constexpr std::uint32_t kStampedHandOffs = 1024;  // the last ones: [number % this][block]
#endif

// One block of a rank's kernel. On scalar there is one, of one thread.
struct Grid {
  std::uint32_t* arrived;  // [num_blocks], zeroed once; not read where num_blocks is 1
  int block_idx, num_blocks;
#if LOWLAT_STAMPS
  HandOffStamp* stamps;  // NULL: none
#endif
};

// The weight rows that a block's teams of lanes read first after a hand-off: team i row i *
// `together` of `rows`.
struct Early {
  const std::uint8_t* rows = nullptr;
  std::int64_t row_bytes = 0;
  int num_rows = 0, together = 1;
};

// A byte of each line of the block's rows, as far as the platform asks ahead.
class Asked {
 public:
  LOWLAT_DEVICE explicit Asked(Early early) {
    if constexpr (kAsks) {
      using Dots = stages::DotTeam<Block>;
      const std::int64_t row = std::int64_t{Dots::idx()} * early.together;
      for (int i = 0; i < plat::kEarlyLines; ++i) {
        const std::int64_t at = (std::int64_t{i} * stages::kDotLanes + Dots::lane()) * kLineBytes;
        const bool there = row < early.num_rows && at < early.row_bytes;
        byte_[i] = there ? early.rows[row * early.row_bytes + at] : 0u;
      }
    }
  }
  // The loads are made before this and not later.
  LOWLAT_DEVICE void keep() const {
    if constexpr (kAsks) {
      for (int i = 0; i < plat::kEarlyLines; ++i) plat::keep(byte_[i]);
    }
  }

 private:
  static constexpr bool kAsks = !Threads::kAlone && plat::kEarlyLines > 0;
  static constexpr int kLineBytes = 128;
  std::uint32_t byte_[plat::kEarlyLines > 0 ? plat::kEarlyLines : 1];
};

// Everything that any thread of the rank wrote before is visible to all threads after it. All
// threads of all blocks call, with the same number, which ascends by one a call. `early` is the
// block's own. False: the step is over, reported.
LOWLAT_DEVICE bool hand_off(const Grid& grid, std::uint32_t number, const stages::FaultPort& fault,
                            std::uint32_t kernel, std::uint64_t epoch, Early early = {}) {
  plat::block_sync();
  if (grid.num_blocks == 1) return true;
#if LOWLAT_STAMPS
  const std::uint64_t arrive_ns = plat::clock_ns();
#endif
  if (Threads::leads()) {
    plat::store_release<plat::Scope::device>(grid.arrived + grid.block_idx, number);
  }
  const Asked asked(early);
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
  asked.keep();
  plat::fence_polled<plat::Scope::device>();
#if LOWLAT_STAMPS
  if (Threads::leads() && grid.stamps != nullptr) {
    const std::int64_t row = number % kStampedHandOffs;
    grid.stamps[row * grid.num_blocks + grid.block_idx] = {arrive_ns, plat::clock_ns()};
  }
#endif
  return !Threads::any(!arrived);
}

// body(i) for i in 0 .. n - 1, split over the threads of the block; no sync.
template <class Body>
LOWLAT_DEVICE void spread(std::int64_t n, Body&& body) {
  for (std::int64_t i = Threads::thread_idx(); i < n; i += Block::kNumThreads) body(i);
}

}  // namespace lowlat::LOWLAT_PLATFORM::persistent
