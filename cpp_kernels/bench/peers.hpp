// bench/peers.hpp: exchange regions of all ranks of one process, each on the device of its number,
// opened and probed. Shared by the programs and tests that run ranks on several devices.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/nvidia/exchange_region.hpp"

namespace lowlat::bench {

inline void use_device(int device) {
  if (cudaSetDevice(device) != cudaSuccess) {
    throw std::runtime_error("no device " + std::to_string(device));
  }
}

class Peers {
 public:
  static constexpr std::uint64_t kProbeBudgetNs = 1'000'000'000;

  // max_rows, hidden: of the widest exchange of partial sums.
  Peers(int num_ranks, int max_rows, int hidden) {
    for (int r = 0; r < num_ranks; ++r) {
      use_device(r);
      regions_.push_back(
          std::make_unique<host::cuda::ExchangeRegion>(r, num_ranks, max_rows, hidden));
    }
    for (int r = 0; r < num_ranks; ++r) {
      use_device(r);
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer == r) continue;
        of(r).open(peer, of(peer).handle());
        of(r).probe(peer);
      }
    }
    for (int r = 0; r < num_ranks; ++r) {
      use_device(r);
      for (int peer = 0; peer < num_ranks; ++peer) {
        if (peer != r) of(r).probed_by(peer, kProbeBudgetNs);
      }
    }
  }
  host::cuda::ExchangeRegion& of(int rank) const {
    return *regions_[static_cast<std::size_t>(rank)];
  }
  int size() const { return static_cast<int>(regions_.size()); }

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

  std::vector<std::unique_ptr<host::cuda::ExchangeRegion>> regions_;
};

}  // namespace lowlat::bench
