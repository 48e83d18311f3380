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
#include "host/region.hpp"
#include "lowlat/kernels.h"

namespace lowlat::host::cuda {

class ExchangeRegion {
 public:
  // Two sets of boxes, one a schedule, each with a sequence of exchanges of its own: box_packets of
  // boxes(), for stages/exchange.hpp, and fused_packets of port(). Either may be 0. On the calling
  // thread's current device, which stays the region's. model_digest: of everything that the ranks
  // must agree on; another one's handle is refused.
  ExchangeRegion(int tp_rank, int tp_size, std::int64_t box_packets, std::int64_t fused_packets,
                 std::uint64_t model_digest);
  // Boxes of the fused exchange alone. max_rows: of the widest step.
  ExchangeRegion(int tp_rank, int tp_size, int max_rows, int hidden)
      : ExchangeRegion(tp_rank, tp_size, 0, std::int64_t{max_rows} * hidden / 4, 0) {}
  ~ExchangeRegion();
  ExchangeRegion(const ExchangeRegion&) = delete;
  ExchangeRegion& operator=(const ExchangeRegion&) = delete;

  lowlat_peer_handle handle() const;
  // Maps the peer's region for this rank's device. LOWLAT_INVALID for bytes that are no handle of
  // this version, rank and shape; LOWLAT_UNSUPPORTED where the devices cannot reach each other.
  void open(int peer_rank, const lowlat_peer_handle& handle);

  // Instead of opening peers: what this rank sends to each of them comes back to itself as that
  // peer's. One rank's work on one device, for measurements; its sums are those of tp_size ranks
  // that all hold the same.
  void loop_back();

  bool is_open(int rank) const {
    return looped_ || peers_[static_cast<std::size_t>(rank)].base != nullptr;
  }

  // Stores a word into the peer's region by a kernel, and reads it back from there. LOWLAT_FAULT
  // when that kernel fails, LOWLAT_UNSUPPORTED when the word is not there.
  void probe(int peer_rank);
  // Waits until the peer's word is here. LOWLAT_UNSUPPORTED when it is not within budget_ns.
  void probed_by(int peer_rank, std::uint64_t budget_ns);

  // What kernels take. Every peer is open. `kernel`: the catalogue's line for the status words.
  nvidia::fused::ExchangePort port(std::uint64_t budget_ns, std::uint32_t kernel) const;

  // The same for the tagged packets of stages/exchange.hpp: every open rank's, as this device sees
  // them.
  void* boxes(int rank) const;
  std::uint32_t* abort_word(int rank) const;
  void* status() const { return status_; }  // stages::StatusWords, memory of host and device
  std::uint32_t* fault_claim() const;       // device word
  std::int64_t box_packets() const { return box_packets_; }
  int device() const { return device_; }
  int ranks_on_device() const;  // of the open ones, this one included
  // Whether any two of the open ranks have one device: every rank gives the same answer.
  bool has_shared_device() const;

  std::uint64_t* step_epoch() const;  // device word, 1 at first: see launch_begin_step
  // Raises the abort word on this rank and on every open peer: waits end as soon as they see it. By
  // the copy engines, so that it arrives while kernels fill the device. Any thread may call.
  void abort();
  std::uint64_t bytes() const;

 private:
  std::uint32_t* abort_source() const;  // in the pinned memory
  RegionHandle description() const;

  struct Peer {
    void* base = nullptr;  // as this device sees it
    bool mapped = false;   // by an opened handle, to be closed
    std::uint64_t device_id = 0;
  };
  void* base_of(int rank) const;
  // The first packet of a set of boxes in rank's memory, as this rank counts in it.
  void* boxes_at(int rank, std::int64_t begin, std::int64_t packets) const;

  int device_ = 0, tp_rank_, tp_size_;
  std::int64_t box_packets_, fused_packets_;
  bool looped_ = false;
  std::uint64_t model_digest_;
  void* base_ = nullptr;    // this rank's region
  void* own_ = nullptr;     // device words that peers have no part in
  void* status_ = nullptr;  // pinned host memory: the status words, then what abort() copies
  std::unique_ptr<Stream> abort_stream_;
  std::vector<Peer> peers_;
};

}  // namespace lowlat::host::cuda
