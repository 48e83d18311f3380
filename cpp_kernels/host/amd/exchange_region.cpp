#include "host/amd/exchange_region.hpp"

#include <unistd.h>

#include <string>

#include "platform/amd_host.hpp"
// The platform comes first.
#include "stages/wait.hpp"

namespace lowlat::host::hip {
namespace {

constexpr std::uint64_t kMagic = 0x3144'4d41'4c57'4c4cull;  // "LLWLAMD1", little-endian
constexpr const char* kKind = "HIP";
constexpr int kMaxRanks = 64;  // as of the resident schedule
constexpr const char* kAdvice = " (see rocm-smi --showtopoaccess)";
static_assert(sizeof(amd::stages::StatusWords) <= kRegionLine);

using Handle = HandleBytes<IpcHandle>;

int current_device() {
  int device = 0;
  check(runtime().hipGetDevice(&device), "hipGetDevice");
  return device;
}

DeviceRegionLayout checked(int tp_rank, int tp_size, std::int64_t box_packets) {
  check_ranks(tp_rank, tp_size, kMaxRanks);
  return {box_packets, tp_size};
}

}  // namespace

ExchangeRegion::ExchangeRegion(const Module& module, int tp_rank, int tp_size,
                               std::int64_t box_packets, std::uint64_t model_digest)
    : module_(module),
      layout_(checked(tp_rank, tp_size, box_packets)),
      device_(current_device()),
      tp_rank_(tp_rank),
      model_digest_(model_digest),
      base_(MemoryKind::uncached, static_cast<std::size_t>(layout_.bytes())),
      own_(MemoryKind::device, kRegionLine),
      status_(MemoryKind::shared, 2 * kRegionLine),
      peers_(static_cast<std::size_t>(tp_size)) {
  static_cast<std::uint32_t*>(status_.data())[kRegionLine / 4] = amd::stages::kAbortByHost;
  peers_[static_cast<std::size_t>(tp_rank)] = {base_.data(), false, true};
}

ExchangeRegion::~ExchangeRegion() {
  for (const Peer& peer : peers_) {
    if (peer.mapped) runtime().hipIpcCloseMemHandle(peer.base);
  }
}

RegionHandle ExchangeRegion::description() const {
  return {kMagic,
          LOWLAT_KERNELS_ABI_VERSION,
          tp_rank_,
          layout_.tp_size,
          device_,
          getpid(),
          static_cast<std::uint32_t>(layout_.box_packets),
          0,
          reinterpret_cast<std::uint64_t>(base_.data()),
          model_digest_,
          device_id(device_)};
}

lowlat_peer_handle ExchangeRegion::handle() const {
  const OnDevice on(device_);
  Handle bytes(description());
  check(runtime().hipIpcGetMemHandle(&bytes.memory, base_.data()), "hipIpcGetMemHandle");
  return bytes.handle();
}

void ExchangeRegion::open(int peer_rank, const lowlat_peer_handle& handle) {
  const Handle bytes(handle);
  const RegionHandle& seen = bytes.about;
  const OnDevice on(device_);
  check_handle(seen, description(), peer_rank, kKind);
  const Runtime& hip = runtime();
  Peer peer;
  peer.shares_device = seen.device_id == device_id(device_);
  if (seen.pid != getpid()) {
    const Status status = hip.hipIpcOpenMemHandle(&peer.base, bytes.memory, kIpcLazyPeerAccess);
    if (status != kSuccess) {
      refuse_handle(LOWLAT_UNSUPPORTED, peer_rank,
                    std::string("its memory cannot be mapped here: ") +
                        hip.hipGetErrorString(status) + kAdvice);
    }
    peer.mapped = true;
  } else {
    if (seen.device != device_) {
      int can = 0;
      check(hip.hipDeviceCanAccessPeer(&can, device_, seen.device), "hipDeviceCanAccessPeer");
      if (can == 0) {
        refuse_handle(LOWLAT_UNSUPPORTED, peer_rank,
                      "device " + std::to_string(device_) + " cannot reach device " +
                          std::to_string(seen.device) + kAdvice);
      }
      enable_access(seen.device);
    }
    peer.base = reinterpret_cast<void*>(seen.base);
  }
  peers_[static_cast<std::size_t>(peer_rank)] = peer;
}

void ExchangeRegion::probe(int peer_rank) {
  const OnDevice on(device_);
  const std::uint32_t word = kProbeWord + static_cast<std::uint32_t>(tp_rank_);
  auto* place = static_cast<std::uint8_t*>(boxes(peer_rank)) + layout_.probe_at(tp_rank_);
  if (!store_arrives(module_, place, word, kWorkBudgetNs)) {
    throw Error(LOWLAT_UNSUPPORTED, "a store to rank " + std::to_string(peer_rank) +
                                        "'s memory did not arrive" + kAdvice);
  }
}

void* ExchangeRegion::boxes(int rank) const {
  void* base = peers_.at(static_cast<std::size_t>(rank)).base;
  if (base == nullptr) {
    throw Error(LOWLAT_INVALID, "rank " + std::to_string(rank) + "'s region is not open");
  }
  return base;
}

std::uint32_t* ExchangeRegion::abort_word(int rank) const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(boxes(rank)) +
                                          layout_.abort_at());
}

int ExchangeRegion::ranks_on_device() const {
  int count = 0;
  for (const Peer& peer : peers_) count += peer.base != nullptr && peer.shares_device ? 1 : 0;
  return count;
}

void ExchangeRegion::abort() {
  const OnDevice on(device_);
  const auto* source = static_cast<const std::uint8_t*>(status_.data()) + kRegionLine;
  for (int rank = 0; rank < layout_.tp_size; ++rank) {
    if (!is_open(rank)) continue;
    check(runtime().hipMemcpyAsync(abort_word(rank), source, sizeof(std::uint32_t),
                                   kCopyHostToDevice, abort_stream_.get()),
          "hipMemcpyAsync");
  }
  abort_stream_.wait();
}

}  // namespace lowlat::host::hip
