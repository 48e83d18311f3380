// bench/processes.hpp: one process a rank, for programs that check what peers do across processes.
// What ranks tell each other goes through memory that they share; nobody waits for ever.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "host/nvidia/exchange_region.hpp"

namespace lowlat::bench {

class Processes {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kBudget{60};  // of a meeting, and behind the first end

  // body(processes, rank) in a process of its own for each rank. Before CUDA begins in this one,
  // which has no device then. Returns 0 when every body has.
  static int run(int num_ranks,
                 const std::function<int(const Processes& processes, int rank)>& body) {
    const Processes all(num_ranks);
    if (all.board_ == nullptr) return 3;
    std::vector<pid_t> children;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        const int code = body(all, rank);
        std::fflush(stdout);
        _exit(code);
      }
      if (child > 0) children.push_back(child);
    }
    int failures = num_ranks - static_cast<int>(children.size());
    const auto deadline = Clock::now() + 2 * kBudget;
    for (const pid_t child : children) {
      int status = 0;
      pid_t ended = 0;
      while ((ended = waitpid(child, &status, WNOHANG)) == 0 && Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (ended == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
      }
      failures += ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
    }
    return failures == 0 ? 0 : 1;
  }

  int size() const { return num_ranks_; }

  // Every rank's `own`, in order; T of at most kSlotBytes, to be copied as bytes. Empty: somebody
  // has not come within the budget. All ranks call it equally often.
  template <class T>
  std::vector<T> gather(int rank, const T& own) const {
    static_assert(sizeof(T) <= kSlotBytes && !std::is_same_v<T, bool>);
    std::memcpy(board_->slots[rank], &own, sizeof own);
    std::vector<T> out;
    if (!meet()) return out;
    out.resize(static_cast<std::size_t>(num_ranks_));
    for (int r = 0; r < num_ranks_; ++r) {
      std::memcpy(&out[static_cast<std::size_t>(r)], board_->slots[r], sizeof own);
    }
    // Nobody writes the next before all have read this.
    if (!meet()) out.clear();
    return out;
  }

 private:
  static constexpr int kMaxRanks = 8;
  static constexpr std::size_t kSlotBytes = 1024;
  struct Board {
    std::atomic<int> arrived;  // ever
    unsigned char slots[kMaxRanks][kSlotBytes];
  };

  explicit Processes(int num_ranks) : num_ranks_(num_ranks) {
    void* const memory =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED && num_ranks <= kMaxRanks) board_ = new (memory) Board();
  }

  bool meet() const {
    // Orders the slots, too.
    const int all = (board_->arrived.fetch_add(1) / num_ranks_ + 1) * num_ranks_;
    const auto deadline = Clock::now() + kBudget;
    while (board_->arrived.load() < all) {
      if (Clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  int num_ranks_;
  Board* board_ = nullptr;  // until the process ends
};

// Exchanges handles, opens every peer's region and has each proved by a store. False: a rank has
// not come. On the region's device.
inline bool open_peers(const Processes& processes, int rank, host::cuda::ExchangeRegion& region) {
  const auto handles = processes.gather(rank, region.handle());
  if (handles.empty()) return false;
  for (int peer = 0; peer < processes.size(); ++peer) {
    if (peer == rank) continue;
    region.open(peer, handles[static_cast<std::size_t>(peer)]);
    region.probe(peer);
  }
  if (processes.gather(rank, 1).empty()) return false;
  for (int peer = 0; peer < processes.size(); ++peer) {
    if (peer != rank) region.probed_by(peer, 1'000'000'000);
  }
  return true;
}

// One word for what a rank has, to compare with the others'.
inline std::uint64_t digest(const std::vector<std::uint16_t>& values) {
  std::uint64_t state = 0xcbf2'9ce4'8422'2325ull;
  for (const std::uint16_t v : values) state = (state ^ v) * 0x100'0000'01b3ull;
  return state;
}

}  // namespace lowlat::bench
