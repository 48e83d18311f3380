// gpu.cuh: what the programs of tests/gpu share: a device or a skip, and arrays on it.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "host/nvidia/device.hpp"

namespace lowlat::testing {

// Cases named brief_ are what a tool gets through that makes a launch a thousand times slower: the
// fewest launches that run each kernel, at one row and at six. Their waits may take as long.
inline constexpr std::uint64_t kBriefBudgetNs = 60'000'000'000;

// Skips the case, with the reason, where no device runs the library's kernels.
inline void need_device() {
  try {
    host::cuda::open_first_device();
  } catch (const host::Error& error) {
    SKIP(error.what());
  }
}

// Elements in device memory, poisoned until they are written.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::size_t count) : count_(count), memory_(count * sizeof(T)) {
    host::cuda::check(cudaMemset(memory_.data(), 0xa5, count * sizeof(T)), "cudaMemset");
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) { set(values); }

  T* data() const { return static_cast<T*>(memory_.data()); }
  void set(const std::vector<T>& values) {
    REQUIRE(values.size() == count_);
    host::cuda::check(cudaMemcpy(data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
                      "cudaMemcpy");
  }
  // What it holds once all work of the default stream is done.
  std::vector<T> get() const {
    std::vector<T> values(count_);
    host::cuda::check(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost),
                      "cudaMemcpy");
    return values;
  }

 private:
  std::size_t count_;
  host::cuda::Memory memory_;
};

// After a launch on the default stream: it was accepted and ended well.
inline void finish() {
  host::cuda::check(cudaGetLastError(), "a kernel's launch");
  host::cuda::check(cudaDeviceSynchronize(), "a kernel");
}

// A thousand replays of what launch(stream) captures, five inputs in turn: each gives what the
// rank's kernels gave for its input one by one. take(): the result of the step that was last.
// Returns that of input 0.
template <class Graph, class Rank, class Launch, class Take>
auto check_replays_in_turn(Rank& rank, Launch launch, Take take) {
  constexpr int kInputs = 5;
  std::vector<decltype(take())> want;
  for (int i = 0; i < kInputs; ++i) want.push_back(rank.one_by_one(i));
  CHECK(want[0] != want[1]);
  Graph graph(launch);
  int different = 0;
  for (int i = 0; i < 1000; ++i) {
    rank.begin(i % kInputs);
    finish();  // the copies are the default stream's
    graph.replay();
    graph.wait();
    different += take() != want[static_cast<std::size_t>(i % kInputs)] ? 1 : 0;
  }
  CHECK_EQ(different, 0);
  return want[0];
}

template <class T>
bool equal_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace lowlat::testing
