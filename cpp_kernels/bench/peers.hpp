// bench/peers.hpp: what programs and tests share that run all ranks of a group in one process, each
// on the device of its number, or all on one: exchange regions that are opened and probed, waiting,
// and times.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/attn_bench.hpp"
#include "bench/report.hpp"
#include "host/nvidia/exchange_region.hpp"

namespace lowlat::bench {

inline void use_device(int device) {
  if (cudaSetDevice(device) != cudaSuccess) {
    throw std::runtime_error("no device " + std::to_string(device));
  }
}

// Of work whose kernels have deadlines of their own.
inline constexpr std::chrono::seconds kRanksBudget{10};

// Microseconds of a replay, of the longest rank: on(r) makes its device current, graph(r) is its
// graph, wait(r) waits for it. Where there are peers several replays follow each other, so that the
// ranks' starts do not count.
template <class On, class GraphOf, class Wait>
Spread time_of_ranks(int num_ranks, int repeats, On on, GraphOf graph, Wait wait) {
  const int in_a_row = num_ranks > 1 ? 4 : 1;
  struct Events {
    cudaEvent_t from, to;
  };
  std::vector<Events> events(static_cast<std::size_t>(num_ranks));
  const auto each = [&](auto act) {
    for (int r = 0; r < num_ranks; ++r) {
      on(r);
      act(r, events[static_cast<std::size_t>(r)]);
    }
  };
  each([](int, Events& e) {
    cuda_must(cudaEventCreate(&e.from), "event");
    cuda_must(cudaEventCreate(&e.to), "event");
  });
  std::vector<double> times;
  for (int i = 0; i < repeats + 5; ++i) {
    each([&](int r, Events& e) {
      Graph& own = graph(r);
      if (num_ranks > 1) own.replay();
      cuda_must(cudaEventRecord(e.from, own.stream()), "record");
      for (int j = 0; j < in_a_row; ++j) own.replay();
      cuda_must(cudaEventRecord(e.to, own.stream()), "record");
    });
    double longest = 0.0;
    each([&](int r, Events& e) {
      wait(r);
      float ms = 0.0f;
      cuda_must(cudaEventElapsedTime(&ms, e.from, e.to), "elapsed");
      longest = std::max(longest, ms * 1e3 / in_a_row);
    });
    if (i >= 5) times.push_back(longest);
  }
  each([](int, Events& e) {
    cudaEventDestroy(e.from);
    cudaEventDestroy(e.to);
  });
  return spread_of(times);
}

class Peers {
 public:
  static constexpr std::uint64_t kProbeBudgetNs = 1'000'000'000;

  // max_rows, hidden: of the widest exchange of partial sums. on_one: device 0 is all ranks', whose
  // kernels have to be resident together.
  Peers(int num_ranks, int max_rows, int hidden, bool on_one = false) : on_one_(on_one) {
    for (int r = 0; r < num_ranks; ++r) {
      on(r);
      regions_.push_back(
          std::make_unique<host::cuda::ExchangeRegion>(r, num_ranks, max_rows, hidden));
    }
    for (int r = 0; r < num_ranks; ++r) {
      on(r);
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer == r) continue;
        of(r).open(peer, of(peer).handle());
        of(r).probe(peer);
      }
    }
    for (int r = 0; r < num_ranks; ++r) {
      on(r);
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer != r) of(r).probed_by(peer, kProbeBudgetNs);
      }
    }
  }
  host::cuda::ExchangeRegion& of(int rank) const {
    return *regions_[static_cast<std::size_t>(rank)];
  }
  int size() const { return static_cast<int>(regions_.size()); }
  // Makes a rank's device current.
  void on(int rank) const { use_device(on_one_ ? 0 : rank); }

  // After a fault, every device idle: no status, no abort, and the same epoch everywhere, behind
  // all that were used.
  void recover() const {
    std::uint64_t epoch = 0;
    for (int r = 0; r < size(); ++r) {
      std::uint64_t own = 0;
      copy(&own, of(r).step_epoch(), sizeof own);
      epoch = epoch < own ? own : epoch;
    }
    epoch += 1024;
    for (int r = 0; r < size(); ++r) {
      const std::uint32_t zero = 0;
      const nvidia::fused::ExchangePort port = of(r).port(1, 0);
      copy(of(r).step_epoch(), &epoch, sizeof epoch);
      copy(port.abort_words[r], &zero, sizeof zero);
      copy(port.fault_claim, &zero, sizeof zero);
      std::memset(port.status, 0, 64);
    }
  }

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    const cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }

  bool on_one_;
  std::vector<std::unique_ptr<host::cuda::ExchangeRegion>> regions_;
};

}  // namespace lowlat::bench
