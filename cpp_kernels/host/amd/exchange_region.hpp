// host/amd/exchange_region.hpp: the device memory that a rank's peers write into, on the platform
// amd, and how they get hold of it: in one process with several GPUs, or in one process a GPU.
//
// The order of calls on every rank: create, give handle() to the others by any transport, open()
// and probe() each of theirs. A rank that fails at any point says why; the caller makes all ranks
// decline together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/amd/hip.hpp"
#include "host/region.hpp"

namespace lowlat::host::hip {

class ExchangeRegion {
 public:
  // On the calling thread's current device, which stays the region's. `module` outlives it and has
  // the kernel of probe(). model_digest: of everything that the ranks must agree on.
  ExchangeRegion(const Module& module, int tp_rank, int tp_size, std::int64_t box_packets,
                 std::uint64_t model_digest);
  ~ExchangeRegion();
  ExchangeRegion(const ExchangeRegion&) = delete;
  ExchangeRegion& operator=(const ExchangeRegion&) = delete;

  lowlat_peer_handle handle() const;
  // Maps the peer's region for this rank's device. LOWLAT_INVALID for bytes that are no handle of
  // this version, rank and shape; LOWLAT_UNSUPPORTED where the devices cannot reach each other.
  void open(int peer_rank, const lowlat_peer_handle& handle);
  bool is_open(int rank) const { return peers_[static_cast<std::size_t>(rank)].base != nullptr; }
  // Stores a word into the peer's region by a kernel, and reads it back from there. LOWLAT_FAULT
  // when that kernel fails, LOWLAT_UNSUPPORTED when the word is not there.
  void probe(int peer_rank);

  // Of every open rank, as this device sees them.
  void* boxes(int rank) const;
  std::uint32_t* abort_word(int rank) const;
  void* status() const { return status_.data(); }  // stages::StatusWords, of host and device
  std::uint32_t* fault_claim() const { return static_cast<std::uint32_t*>(own_.data()); }
  std::int64_t box_packets() const { return layout_.box_packets; }
  int device() const { return device_; }
  int ranks_on_device() const;  // of the open ones, this one included
  // Raises the abort word on this rank and on every open peer, by copies, so that it arrives while
  // kernels fill the device. Any thread may call.
  void abort();
  std::uint64_t bytes() const { return base_.bytes() + own_.bytes() + status_.bytes(); }

 private:
  RegionHandle description() const;

  struct Peer {
    void* base = nullptr;  // as this device sees it
    bool mapped = false;   // by an opened handle, to be closed
    bool shares_device = false;
  };
  const Module& module_;
  DeviceRegionLayout layout_;
  int device_ = 0, tp_rank_;
  std::uint64_t model_digest_;
  Memory base_;    // what peers write into: past the caches
  Memory own_;     // the word that the first thread with a fault takes
  Memory status_;  // the status words, and a line behind them what abort() copies
  Stream abort_stream_;
  std::vector<Peer> peers_;
};

}  // namespace lowlat::host::hip
