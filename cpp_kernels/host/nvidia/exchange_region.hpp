// host/nvidia/exchange_region.hpp: the device memory that a rank's peers write into, and how they
// get hold of it: in one process with several GPUs, or in one process a GPU.
//
// The order of calls on every rank: create, give handle() to the others by any transport, open()
// each of theirs, probe() each, then (when all ranks have probed, which the caller's transport
// tells) probed_by() each: a store of a kernel that arrived is the proof. A rank that fails at any
// point says why; the caller makes all ranks decline together. Then port() is what the kernels
// take.
#pragma once

#include <memory>
#include <vector>

#include "fused/exchange.hpp"
#include "host/nvidia/device.hpp"
#include "lowlat/kernels.h"

namespace lowlat::host::cuda {

class ExchangeRegion {
 public:
  // On the calling thread's current device, which stays the region's. max_rows: of the widest step.
  ExchangeRegion(int tp_rank, int tp_size, int max_rows, int hidden);
  ~ExchangeRegion();
  ExchangeRegion(const ExchangeRegion&) = delete;
  ExchangeRegion& operator=(const ExchangeRegion&) = delete;

  lowlat_peer_handle handle() const;
  // Maps the peer's region for this rank's device. LOWLAT_INVALID for bytes that are no handle of
  // this version, rank and shape; LOWLAT_UNSUPPORTED where the devices cannot reach each other.
  void open(int peer_rank, const lowlat_peer_handle& handle);

  // Stores a word into the peer's region by a kernel. LOWLAT_FAULT when that kernel fails.
  void probe(int peer_rank);
  // Waits until the peer's word is here. LOWLAT_UNSUPPORTED when it is not within budget_ns.
  void probed_by(int peer_rank, std::uint64_t budget_ns);

  // What kernels take. Every peer is open. `kernel`: the catalogue's line for the status words.
  nvidia::fused::ExchangePort port(std::uint64_t budget_ns, std::uint32_t kernel) const;

  std::uint64_t* step_epoch() const;  // device word, 1 at first: see launch_begin_step
  // Raises the abort word on this rank and on every open peer: waits end as soon as they see it.
  void abort();
  std::uint64_t bytes() const;

 private:
  struct Layout;
  struct Peer {
    void* base = nullptr;  // as this device sees it
    bool mapped = false;   // by an opened handle, to be closed
  };

  int device_, tp_rank_, tp_size_;
  std::int64_t box_packets_;
  void* base_ = nullptr;    // this rank's region
  void* own_ = nullptr;     // device words that peers have no part in
  void* status_ = nullptr;  // pinned host memory
  std::vector<Peer> peers_;
};

}  // namespace lowlat::host::cuda
