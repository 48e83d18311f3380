#include "host/region.hpp"

#include "host/error.hpp"

namespace lowlat::host {

void refuse_handle(lowlat_status status, int peer_rank, const std::string& why) {
  throw Error(status, "peer handle of rank " + std::to_string(peer_rank) + ": " + why);
}

void check_handle(const RegionHandle& seen, const RegionHandle& own, int peer_rank,
                  const char* kind) {
  const auto refuse = [&](const std::string& why) {
    refuse_handle(LOWLAT_INVALID, peer_rank, why);
  };
  if (seen.magic != own.magic) {
    refuse(std::string("these bytes are no handle of a ") + kind + " exchange region of lowlat");
  }
  if (seen.abi_version != own.abi_version) {
    refuse("it is of ABI version " + std::to_string(seen.abi_version) + "; this library has " +
           std::to_string(own.abi_version));
  }
  if (peer_rank < 0 || peer_rank >= own.tp_size || peer_rank == own.tp_rank ||
      seen.tp_rank != peer_rank) {
    refuse("it is rank " + std::to_string(seen.tp_rank) + "'s; this is rank " +
           std::to_string(own.tp_rank) + " of " + std::to_string(own.tp_size));
  }
  const auto region_text = [](const RegionHandle& of) {
    return "of tp_size " + std::to_string(of.tp_size) + ", " + std::to_string(of.box_packets) +
           " packets a box and " + std::to_string(of.fused_packets) + " of the fused exchange";
  };
  if (seen.tp_size != own.tp_size || seen.box_packets != own.box_packets ||
      seen.fused_packets != own.fused_packets) {
    refuse("its region is " + region_text(seen) + "; this rank's " + region_text(own));
  }
  if (seen.model_digest != own.model_digest) {
    refuse("it was made for another model shape, another set of widths or other kernels");
  }
}

void check_packets(std::int64_t box_packets, std::int64_t fused_packets) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (box_packets >= 0 && fused_packets >= 0 && box_packets <= kMost && fused_packets <= kMost) {
    return;
  }
  throw Error(LOWLAT_BUG, "more packets a box than a handle can say");
}

void check_ranks(int tp_rank, int tp_size, int most) {
  if (tp_size >= 1 && tp_size <= most && tp_rank >= 0 && tp_rank < tp_size) return;
  throw Error(LOWLAT_INVALID, "tp_rank " + std::to_string(tp_rank) + " of tp_size " +
                                  std::to_string(tp_size) +
                                  "; needed 0 <= rank < size <= " + std::to_string(most));
}

}  // namespace lowlat::host
