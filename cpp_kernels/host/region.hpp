// host/region.hpp: what every device's exchange region and its handle have in common: where things
// lie in it, and what a handle says before the runtime's own bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "lowlat/kernels.h"

namespace lowlat::host {

// The word that rank r leaves at a peer as the proof that its stores arrive is kProbeWord + r.
inline constexpr std::uint32_t kProbeWord = 0x6c6c'7770u;

// Bytes: nobody shares another's line.
inline constexpr std::int64_t kRegionLine = 128;

// Of a region: boxes [2][tp_size][box_packets] of 16 bytes, those of the fused exchange where a
// device has one, the abort word, a probe word a rank.
struct DeviceRegionLayout {
  std::int64_t box_packets;
  int tp_size;
  std::int64_t fused_packets = 0;
  std::int64_t fused_at() const { return 2 * tp_size * box_packets * 16; }
  std::int64_t abort_at() const {
    const std::int64_t bytes = fused_at() + 2 * tp_size * fused_packets * 16;
    return (bytes + kRegionLine - 1) / kRegionLine * kRegionLine;
  }
  std::int64_t probe_at(int rank) const { return abort_at() + kRegionLine * (1 + rank); }
  std::int64_t bytes() const { return probe_at(tp_size); }
};

struct RegionHandle {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::int32_t tp_rank, tp_size;
  std::int32_t device;  // number in the exporting process
  std::int64_t pid;
  std::uint32_t box_packets, fused_packets;
  std::uint64_t base;
  std::uint64_t model_digest;
  std::uint64_t device_id;  // the same in every process
};

// What a handle holds: `Memory` are the runtime's bytes that map the region elsewhere.
template <class Memory>
struct HandleBytes {
  RegionHandle about;
  Memory memory;

  explicit HandleBytes(const RegionHandle& region) {
    // Whole, with what lies between the fields: equal regions have equal handles.
    std::memset(static_cast<void*>(this), 0, sizeof *this);
    about = region;
  }
  explicit HandleBytes(const lowlat_peer_handle& handle) {
    std::memcpy(static_cast<void*>(this), handle.bytes, sizeof *this);
  }
  lowlat_peer_handle handle() const {
    static_assert(sizeof *this <= LOWLAT_PEER_HANDLE_BYTES);
    lowlat_peer_handle out;
    std::memset(out.bytes, 0, sizeof out.bytes);
    std::memcpy(out.bytes, this, sizeof *this);
    return out;
  }
};

// "peer handle of rank 2: " and why, as an error to throw.
[[noreturn]] void refuse_handle(lowlat_status status, int peer_rank, const std::string& why);
// Refuses a handle that is not of `peer_rank`'s region for the rank that `own` describes; `kind` is
// whose regions they are.
void check_handle(const RegionHandle& seen, const RegionHandle& own, int peer_rank,
                  const char* kind);
// Refuses boxes of more packets than a handle can say.
void check_packets(std::int64_t box_packets, std::int64_t fused_packets);
// Refuses a rank that is none of a group of tp_size, or a group of more than `most`.
void check_ranks(int tp_rank, int tp_size, int most);

}  // namespace lowlat::host
