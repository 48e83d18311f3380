// stages/wait.hpp: every wait for a peer ends: the word arrived, its deadline passed, or somebody
// aborted.
//
// Ordering     abort     written by any rank or the host (release.system), read by every wait
//              (a poll, system). It only goes from 0 to a non-zero reason and nothing is published
//              by it, so a late reader loses time, never data.
//              status    written by the one thread that claimed it (a cas of `claimed`, 0 to 1,
//              which orders nothing), before its release of `state`; the host reads the rest after
//              it acquired a non-zero state. What a rank saw first stays.
//
// A wait is made by one thread alone or by all lanes of a warp, never by some of them: a loop that
// one lane of a warp spins in was compiled into one that never ends. Lanes may wait for different
// words; the warp goes on when all have arrived, and ends the step when one may not.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/team.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// What a wait is for; the word that a fault report shows. Numbers are part of the status words.
enum class StageId : std::uint32_t {
  none = 0,
  embed_sum = 1,
  engram_gather = 2,
  attention_sum = 3,
  moe_sum = 4,
  logits_gather = 5,
  argmax_gather = 6,
  draft_token_gather = 7,
  draft_logits_gather = 8,
  hand_off = 9,  // of the blocks of one rank
  count
};

enum class WaitResult : std::uint32_t { arrived, expired, aborted };

// The status words of one rank, in memory that the host can read while the kernel runs.
struct StatusWords {
  std::uint32_t state;  // 0 healthy, 1 a wait expired here, 2 aborted by a peer, 3 aborted by host
  std::uint32_t kernel;
  std::uint32_t stage;
  std::int32_t peer;
  std::uint64_t epoch;
  std::uint32_t claimed;  // by the thread that writes the others
};

// Abort words hold 0 or the reason: 1 + the rank that raised it, or kAbortByHost.
inline constexpr std::uint32_t kAbortByHost = 0xffff'ffffu;

// Whom to tell: this rank's and all peers' abort words, and where to write what happened.
struct FaultPort {
  std::uint32_t* const* abort_words;  // [tp_size], own rank included
  StatusWords* status;
  int tp_rank, tp_size;
  std::uint64_t budget_ns;  // of every wait
  // Where the status words lie in memory that takes no atomics of the device: a word of the rank's
  // own that stands for StatusWords::claimed.
  std::uint32_t* claimed = nullptr;
};

// Whether the caller is the one that writes the status words.
LOWLAT_DEVICE bool claim_status(const FaultPort& port) {
  std::uint32_t* word = port.claimed != nullptr ? port.claimed : &port.status->claimed;
  return plat::atomic_cas<plat::Scope::system>(word, 0u, 1u) == 0u;
}

// One thread of a warp calls; others may call at the same time. Stores what happened, then raises
// the abort word on every rank.
LOWLAT_DEVICE void raise_fault(const FaultPort& port, std::uint32_t kernel, StageId stage, int peer,
                               std::uint64_t epoch) {
  if (!claim_status(port)) return;
  port.status->kernel = kernel;
  port.status->stage = static_cast<std::uint32_t>(stage);
  port.status->peer = peer;
  port.status->epoch = epoch;
  plat::store_release<plat::Scope::system>(&port.status->state, 1u);
  for (int rank = 0; rank < port.tp_size; ++rank) {
    plat::store_release<plat::Scope::system>(port.abort_words[rank],
                                             1u + static_cast<std::uint32_t>(port.tp_rank));
  }
}

// One thread of a warp calls; others may call at the same time. Stores that a peer (or the host)
// ended the step.
LOWLAT_DEVICE void note_abort(const FaultPort& port, std::uint32_t kernel, StageId stage,
                              std::uint64_t epoch) {
  if (!claim_status(port)) return;
  const std::uint32_t reason =
      plat::load_acquire<plat::Scope::system>(port.abort_words[port.tp_rank]);
  port.status->kernel = kernel;
  port.status->stage = static_cast<std::uint32_t>(stage);
  port.status->peer = reason == kAbortByHost ? -1 : static_cast<std::int32_t>(reason) - 1;
  port.status->epoch = epoch;
  plat::store_release<plat::Scope::system>(&port.status->state, reason == kAbortByHost ? 3u : 2u);
}

// Polls between two looks at the abort word: some microseconds on a device.
inline constexpr std::uint32_t kPollsALook = 16;

// Polls `arrived` until it is true, the abort word rises or the budget is spent. One thread calls,
// or all lanes of a warp (any Block of more than one thread); the result is the warp's, and
// out_mine says whether the caller's own word arrived. `arrived` is not called again once it was
// true; a lane with nothing to wait for has one that is true at once. The clock is read only once
// the first poll has failed: a peer that was there costs no clock.
template <class Block = OneThread, class Arrived>
LOWLAT_DEVICE WaitResult wait_until(const FaultPort& port, Arrived arrived, bool& out_mine) {
  const auto one = [](bool mine) { return Team<Block>::warp_ballot(mine) != 0u; };
  out_mine = arrived();
  if (!one(!out_mine)) return WaitResult::arrived;
  const std::uint64_t deadline_ns = plat::clock_ns() + port.budget_ns;
  for (std::uint32_t poll = 0;; ++poll) {
    out_mine = out_mine || arrived();
    if (!one(!out_mine)) return WaitResult::arrived;
    // A look at the abort word takes as long as a poll and would double the time between two.
    if (poll % kPollsALook == 0 &&
        one(plat::load_poll<plat::Scope::system>(port.abort_words[port.tp_rank]) != 0u)) {
      return WaitResult::aborted;
    }
    if (one(plat::clock_ns() > deadline_ns)) return WaitResult::expired;
    plat::spin_pause();
  }
}
template <class Block = OneThread, class Arrived>
LOWLAT_DEVICE WaitResult wait_until(const FaultPort& port, Arrived arrived) {
  bool mine = false;
  return wait_until<Block>(port, arrived, mine);
}

// As wait_until, with the fault or abort already reported; true when it arrived, for all lanes. A
// fault names the peer of the first lane whose word did not come.
template <class Block = OneThread, class Arrived>
LOWLAT_DEVICE bool wait_or_report(const FaultPort& port, std::uint32_t kernel, StageId stage,
                                  int peer, std::uint64_t epoch, Arrived arrived) {
  bool mine = false;
  const WaitResult result = wait_until<Block>(port, arrived, mine);
  if (result == WaitResult::arrived) return true;
  const std::uint64_t missing = Team<Block>::warp_ballot(!mine);
  if (mine || Team<Block>::lanes_before(missing) != 0) return false;
  if (result == WaitResult::expired) {
    raise_fault(port, kernel, stage, peer, epoch);
  } else {
    note_abort(port, kernel, stage, epoch);
  }
  return false;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
