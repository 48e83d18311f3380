#include "host/peer.hpp"

#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "host/error.hpp"

namespace lowlat::host {
namespace {

constexpr std::uint64_t kMagic = 0x3152'4550'4c57'4c4cull;  // "LLWLPER1", little-endian

struct HandleBytes {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::int32_t tp_rank;
  std::int64_t pid;
  std::uint64_t region_id;
  RegionLayout layout;
};
static_assert(sizeof(HandleBytes) <= LOWLAT_PEER_HANDLE_BYTES);

// Regions of this process by id. Ids are never used twice, so a stale handle finds nothing.
struct Directory {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<Region>> regions;
  std::uint64_t next_id = 1;
};
Directory& directory() {
  static Directory instance;
  return instance;
}

}  // namespace

Region::Region(const RegionLayout& layout, int tp_rank)
    : layout_(layout),
      tp_rank_(tp_rank),
      boxes_(2 * layout.tp_size * layout.box_packets),
      staging_(2 * layout.staging_words) {}

std::shared_ptr<Region> Region::create(const RegionLayout& layout, int tp_rank) {
  const auto forget = [](Region* region) {
    {
      const std::lock_guard lock(directory().mutex);
      directory().regions.erase(region->id_);
    }
    delete region;
  };
  std::shared_ptr<Region> region(new Region(layout, tp_rank), forget);
  const std::lock_guard lock(directory().mutex);
  region->id_ = directory().next_id++;
  directory().regions[region->id_] = region;
  return region;
}

std::shared_ptr<Region> Region::find(std::uint64_t id) {
  const std::lock_guard lock(directory().mutex);
  const auto found = directory().regions.find(id);
  return found == directory().regions.end() ? nullptr : found->second.lock();
}

std::uint64_t Region::bytes() const {
  return sizeof(Region) + boxes_.size() * sizeof(boxes_[0]) + staging_.size() * sizeof(staging_[0]);
}

void write_handle(const Region& region, lowlat_peer_handle& out) {
  HandleBytes bytes;
  std::memset(&bytes, 0, sizeof bytes);  // padding too: equal regions give equal handles
  bytes.magic = kMagic;
  bytes.abi_version = LOWLAT_KERNELS_ABI_VERSION;
  bytes.tp_rank = region.tp_rank();
  bytes.pid = getpid();
  bytes.region_id = region.id();
  bytes.layout = region.layout();
  std::memset(out.bytes, 0, sizeof out.bytes);
  std::memcpy(out.bytes, &bytes, sizeof bytes);
}

std::shared_ptr<Region> open_handle(const lowlat_peer_handle& handle, int peer_rank,
                                    const RegionLayout& needed) {
  const auto refuse = [&](const std::string& why) -> Error {
    return {LOWLAT_INVALID, "peer handle of rank " + std::to_string(peer_rank) + ": " + why};
  };
  HandleBytes bytes;
  std::memcpy(&bytes, handle.bytes, sizeof bytes);
  if (bytes.magic != kMagic) throw refuse("these bytes are no peer handle of lowlat");
  if (bytes.abi_version != LOWLAT_KERNELS_ABI_VERSION) {
    throw refuse("it is of ABI version " + std::to_string(bytes.abi_version) +
                 "; this library has " + std::to_string(LOWLAT_KERNELS_ABI_VERSION));
  }
  if (bytes.tp_rank != peer_rank) {
    throw refuse("it is rank " + std::to_string(bytes.tp_rank) + "'s");
  }
  if (bytes.pid != getpid()) {
    throw refuse("it is of process " + std::to_string(bytes.pid) +
                 "; the scalar platform's ranks share one process, " + std::to_string(getpid()));
  }
  if (bytes.layout.tp_size != needed.tp_size) {
    throw refuse("its tp_size is " + std::to_string(bytes.layout.tp_size) + "; this rank's is " +
                 std::to_string(needed.tp_size));
  }
  if (!(bytes.layout == needed)) {
    throw refuse("it was made for another model shape, another set of widths or other kernels");
  }
  auto region = Region::find(bytes.region_id);
  if (region == nullptr) throw refuse("its model was destroyed");
  return region;
}

}  // namespace lowlat::host
