// host/worker.hpp: the resident thread of a rank: launches run on it one after another, in launch
// order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "lowlat/kernels.h"

namespace lowlat::host {

enum class Schedule { persistent, plain };

// One launch, by value: nothing is allocated for it.
struct Job {
  enum class Kind { none, step, draft, accept, hosted, hosted_draft, proposal } kind = Kind::none;
  Schedule schedule = Schedule::persistent;
  lowlat_step step{};
  lowlat_hosted_step hosted{};
  lowlat_hosted_draft hosted_draft{};
  lowlat_proposal proposal{};
  lowlat_draft draft{};
  lowlat_accept accept{};
};

class Worker {
 public:
  static constexpr int kMaxQueued = 16;

  explicit Worker(std::function<void(const Job&)> run)
      : run_(std::move(run)), queue_(kMaxQueued), thread_([this] { loop(); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // False when kMaxQueued launches wait already.
  bool push(const Job& job) {
    {
      const std::lock_guard lock(mutex_);
      if (last_ - first_ == kMaxQueued) return false;
      queue_[last_++ % kMaxQueued] = job;
    }
    wake_.notify_all();
    return true;
  }

  // True when everything pushed has run within the budget.
  bool wait_idle(std::uint64_t budget_ns) {
    std::unique_lock lock(mutex_);
    // An hour at a time: a budget of "for ever" must not overflow the clock.
    const auto limit = std::chrono::nanoseconds(
        budget_ns < 3'600'000'000'000ull ? budget_ns : 3'600'000'000'000ull);
    return idle_.wait_for(lock, limit, [this] { return first_ == last_ && !running_; });
  }
  bool busy() {
    const std::lock_guard lock(mutex_);
    return first_ != last_ || running_;
  }

 private:
  // The idle wait has no deadline: it waits for the engine's next launch, never for a peer, and
  // the destructor ends it.
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || first_ != last_; });
      if (stopping_) return;  // what is still queued never starts
      const Job job = queue_[first_++ % kMaxQueued];
      running_ = true;
      lock.unlock();
      run_(job);
      lock.lock();
      running_ = false;
      if (first_ == last_) idle_.notify_all();
    }
  }

  std::function<void(const Job&)> run_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<Job> queue_;
  std::uint64_t first_ = 0, last_ = 0;
  bool running_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace lowlat::host
