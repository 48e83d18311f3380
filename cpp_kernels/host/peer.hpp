// host/peer.hpp: the memory that a rank's peers write into, and how they get hold of it.
//
// Layout of a region: header, then boxes [2][tp_size][box_packets] of the tagged exchange, then
// staging [2][staging_words] of the plain path's signals. On scalar a handle names a region of this
// process; who imported it shares it, so no peer ever writes into freed memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lowlat/kernels.h"
#include "platform/scalar.hpp"
#include "stages/wait.hpp"

namespace lowlat::host {

// What must be equal on both sides of an import.
struct RegionLayout {
  std::int32_t tp_size;
  std::int64_t box_packets;
  std::int64_t staging_words;
  std::uint64_t model_digest;  // of everything that the ranks' programs must agree on
  bool operator==(const RegionLayout&) const = default;
};

class Region {
 public:
  static constexpr int kMaxTpSize = 64;

  // Zeroed, and known to find() from now until the last owner lets go.
  static std::shared_ptr<Region> create(const RegionLayout& layout, int tp_rank);
  // The region that a handle of this process names; NULL when it is gone.
  static std::shared_ptr<Region> find(std::uint64_t id);

  std::uint64_t id() const { return id_; }
  int tp_rank() const { return tp_rank_; }
  const RegionLayout& layout() const { return layout_; }
  std::uint64_t bytes() const;

  scalar::plat::TaggedWords* boxes() { return boxes_.data(); }
  std::uint32_t* staging(std::uint32_t epoch) {
    return staging_.data() + static_cast<std::int64_t>(epoch & 1u) * layout_.staging_words;
  }

  struct alignas(64) Word {
    std::uint32_t value = 0;
  };
  Word abort_word;                       // written by any rank and the host
  Word arrived;                          // plain path: the last epoch staged here; by the owner
  Word probes[kMaxTpSize];               // peer r's proof that its stores arrive; by rank r
  scalar::stages::StatusWords status{};  // by the owner's resident thread

 private:
  Region(const RegionLayout& layout, int tp_rank);

  RegionLayout layout_;
  int tp_rank_;
  std::uint64_t id_ = 0;
  std::vector<scalar::plat::TaggedWords> boxes_;
  std::vector<std::uint32_t> staging_;
};

// The bytes of a handle.
void write_handle(const Region& region, lowlat_peer_handle& out);
// The region of a handle, or an Error that says what was seen and what was needed.
std::shared_ptr<Region> open_handle(const lowlat_peer_handle& handle, int peer_rank,
                                    const RegionLayout& needed);

}  // namespace lowlat::host
