// py/watch.hpp: a thread that watches a hosted model's status words, since nothing of ours runs
// when a graph replays. It needs no Python: an interpreter that is busy or stuck delays it by
// nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "lowlat/kernels.h"

namespace lowlat::py_face {

// One line about a fault: which rank, in which kernel and stage, for whom, at which exchange.
std::string words_of_fault(const lowlat_status_words& status, const std::string& catalogue,
                           int rank);

// At a fault, in this order: the post-mortem is written, the line goes to standard error, and
// stop_pid gets SIGQUIT, which is how SGLang's own watchdog ends a server (0: nobody gets it). A
// grace later it and this process get SIGKILL: at SIGQUIT SGLang's launcher asks its processes for
// diagnostics before it ends them, 5 s long and a minute more where a scheduler still answers, and
// all that time graphs would be run. No grace, of 0 ms: it may take that time.
class Watch {
 public:
  // about: a JSON object, which the post-mortem holds as it is; path: of the post-mortem's file.
  Watch(const lowlat_model* model, int rank, std::string about, std::string path, pid_t stop_pid,
        std::chrono::milliseconds grace);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void set_about(std::string about);
  bool has_seen_fault() const { return seen_.load(std::memory_order_acquire); }
  void stop();

 private:
  void run();
  void report(const lowlat_status_words& status);
  void stop_server(std::unique_lock<std::mutex>& lock);
  bool signal_server(int number) const;

  const lowlat_model* model_;
  int rank_;
  std::string catalogue_, about_, path_;
  pid_t stop_pid_;
  bool stops_parent_;
  std::chrono::milliseconds grace_;
  std::mutex mutex_;  // of about_ and stopped_
  std::condition_variable wake_;
  bool stopped_ = false;
  std::atomic<bool> seen_{false};
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace lowlat::py_face
