#include "host/nvidia/exchange_region.hpp"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "platform/nvidia.hpp"
// The platform comes first.
#include "stages/wait.hpp"

namespace lowlat::host::cuda {
namespace {

constexpr std::uint64_t kMagic = 0x3144'5643'4c57'4c4cull;  // "LLWLCVD1", little-endian
constexpr std::uint32_t kProbe = 0x6c6c'7770u;              // plus the prober's rank
constexpr std::int64_t kLine = 128;                         // bytes: nobody shares another's line
constexpr std::int64_t kStatusBytes = 2 * kLine;
static_assert(sizeof(nvidia::stages::StatusWords) <= kLine);

struct HandleBytes {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::int32_t tp_rank, tp_size;
  std::int32_t device;  // number in the exporting process
  std::int64_t pid;
  std::uint32_t box_packets, fused_packets;
  std::uint64_t base;
  std::uint64_t model_digest;
  std::uint64_t device_id;  // the same in every process
  cudaIpcMemHandle_t memory;
};
static_assert(sizeof(HandleBytes) <= LOWLAT_PEER_HANDLE_BYTES);

// Of the device's UUID.
std::uint64_t device_id(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::uint64_t halves[2];
  static_assert(sizeof halves == sizeof properties.uuid);
  std::memcpy(halves, &properties.uuid, sizeof halves);
  return halves[0] ^ halves[1];
}

__global__ void probe_any(std::uint32_t* word, std::uint32_t value) {
  nvidia::plat::store_release<nvidia::plat::Scope::system>(word, value);
}

}  // namespace

// Of a region: boxes [2][tp_size][box_packets] of 16 bytes, those of the fused exchange, the abort
// word, a probe word a rank.
struct ExchangeRegion::Layout {
  std::int64_t box_packets, fused_packets;
  int tp_size;
  std::int64_t fused_at() const { return 2 * tp_size * box_packets * 16; }
  std::int64_t abort_at() const {
    const std::int64_t bytes = fused_at() + 2 * tp_size * fused_packets * 16;
    return (bytes + kLine - 1) / kLine * kLine;
  }
  std::int64_t probe_at(int rank) const { return abort_at() + kLine * (1 + rank); }
  std::int64_t bytes() const { return probe_at(tp_size); }
};

ExchangeRegion::ExchangeRegion(int tp_rank, int tp_size, std::int64_t box_packets,
                               std::int64_t fused_packets, std::uint64_t model_digest)
    : tp_rank_(tp_rank),
      tp_size_(tp_size),
      box_packets_(box_packets),
      fused_packets_(fused_packets),
      model_digest_(model_digest),
      peers_(static_cast<std::size_t>(tp_size)) {
  if (tp_size < 1 || tp_size > nvidia::fused::kMaxRanks || tp_rank < 0 || tp_rank >= tp_size) {
    throw Error(LOWLAT_INVALID,
                "tp_rank " + std::to_string(tp_rank) + " of tp_size " + std::to_string(tp_size) +
                    "; needed 0 <= rank < size <= " + std::to_string(nvidia::fused::kMaxRanks));
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (box_packets < 0 || fused_packets < 0 || box_packets > kMost || fused_packets > kMost) {
    throw Error(LOWLAT_BUG, "more packets a box than a handle can say");
  }
  check(cudaGetDevice(&device_), "cudaGetDevice");
  const Layout layout{box_packets_, fused_packets_, tp_size_};
  check(cudaMalloc(&base_, layout.bytes()), "cudaMalloc");
  check(cudaMemset(base_, 0, layout.bytes()), "cudaMemset");
  // The step's epoch, then the word that the first thread with a fault takes.
  const std::uint64_t first[2] = {1, 0};
  check(cudaMalloc(&own_, sizeof first), "cudaMalloc");
  check(cudaMemcpy(own_, first, sizeof first, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaHostAlloc(&status_, kStatusBytes, cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  std::memset(status_, 0, kStatusBytes);
  *abort_source() = nvidia::stages::kAbortByHost;
  abort_stream_ = std::make_unique<Stream>();
  peers_[tp_rank_].base = base_;
  peers_[tp_rank_].device_id = device_id(device_);
}

ExchangeRegion::~ExchangeRegion() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  for (const Peer& peer : peers_) {
    if (peer.mapped) cudaIpcCloseMemHandle(peer.base);
  }
  cudaFree(base_);
  cudaFree(own_);
  cudaFreeHost(status_);
  cudaSetDevice(before);
}

lowlat_peer_handle ExchangeRegion::handle() const {
  const OnDevice on(device_);
  HandleBytes bytes;
  std::memset(&bytes, 0, sizeof bytes);
  bytes.magic = kMagic;
  bytes.abi_version = LOWLAT_KERNELS_ABI_VERSION;
  bytes.tp_rank = tp_rank_;
  bytes.tp_size = tp_size_;
  bytes.device = device_;
  bytes.pid = getpid();
  bytes.box_packets = static_cast<std::uint32_t>(box_packets_);
  bytes.fused_packets = static_cast<std::uint32_t>(fused_packets_);
  bytes.base = reinterpret_cast<std::uint64_t>(base_);
  bytes.model_digest = model_digest_;
  bytes.device_id = device_id(device_);
  check(cudaIpcGetMemHandle(&bytes.memory, base_), "cudaIpcGetMemHandle");
  lowlat_peer_handle out;
  std::memset(out.bytes, 0, sizeof out.bytes);
  std::memcpy(out.bytes, &bytes, sizeof bytes);
  return out;
}

void ExchangeRegion::open(int peer_rank, const lowlat_peer_handle& handle) {
  const auto refuse = [&](lowlat_status status, const std::string& why) -> Error {
    return {status, "peer handle of rank " + std::to_string(peer_rank) + ": " + why};
  };
  HandleBytes bytes;
  std::memcpy(&bytes, handle.bytes, sizeof bytes);
  if (bytes.magic != kMagic) {
    throw refuse(LOWLAT_INVALID, "these bytes are no handle of a CUDA exchange region of lowlat");
  }
  if (bytes.abi_version != LOWLAT_KERNELS_ABI_VERSION) {
    throw refuse(LOWLAT_INVALID, "it is of ABI version " + std::to_string(bytes.abi_version) +
                                     "; this library has " +
                                     std::to_string(LOWLAT_KERNELS_ABI_VERSION));
  }
  if (peer_rank < 0 || peer_rank >= tp_size_ || peer_rank == tp_rank_ ||
      bytes.tp_rank != peer_rank) {
    throw refuse(LOWLAT_INVALID, "it is rank " + std::to_string(bytes.tp_rank) +
                                     "'s; this is rank " + std::to_string(tp_rank_) + " of " +
                                     std::to_string(tp_size_));
  }
  const auto region_text = [](int size, std::int64_t packets, std::int64_t fused) {
    return "of tp_size " + std::to_string(size) + ", " + std::to_string(packets) +
           " packets a box and " + std::to_string(fused) + " of the fused exchange";
  };
  if (bytes.tp_size != tp_size_ || bytes.box_packets != box_packets_ ||
      bytes.fused_packets != fused_packets_) {
    throw refuse(LOWLAT_INVALID,
                 "its region is " +
                     region_text(bytes.tp_size, bytes.box_packets, bytes.fused_packets) +
                     "; this rank's " + region_text(tp_size_, box_packets_, fused_packets_));
  }
  if (bytes.model_digest != model_digest_) {
    throw refuse(LOWLAT_INVALID,
                 "it was made for another model shape, another set of widths or other kernels");
  }
  const OnDevice on(device_);
  Peer& peer = peers_[static_cast<std::size_t>(peer_rank)];
  peer.device_id = bytes.device_id;
  if (bytes.pid != getpid()) {
    const cudaError_t error =
        cudaIpcOpenMemHandle(&peer.base, bytes.memory, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
      throw refuse(LOWLAT_UNSUPPORTED,
                   std::string("its memory cannot be mapped here: ") + cudaGetErrorString(error) +
                       " (both GPUs must be of one host, see nvidia-smi topo -p2p w)");
    }
    peer.mapped = true;
    return;
  }
  if (bytes.device != device_) {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device_, bytes.device), "cudaDeviceCanAccessPeer");
    if (can == 0) {
      throw refuse(LOWLAT_UNSUPPORTED, "device " + std::to_string(device_) +
                                           " cannot reach device " + std::to_string(bytes.device) +
                                           " (see nvidia-smi topo -p2p w)");
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(bytes.device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check(error, "cudaDeviceEnablePeerAccess");
    }
  }
  peer.base = reinterpret_cast<void*>(bytes.base);
}

void ExchangeRegion::probe(int peer_rank) {
  const OnDevice on(device_);
  const Layout layout{box_packets_, fused_packets_, tp_size_};
  auto* base = static_cast<std::uint8_t*>(peers_.at(static_cast<std::size_t>(peer_rank)).base);
  if (base == nullptr) {
    throw Error(LOWLAT_INVALID, "rank " + std::to_string(peer_rank) + "'s region is not open");
  }
  const Stream stream;
  probe_any<<<1, 1, 0, stream.get()>>>(
      reinterpret_cast<std::uint32_t*>(base + layout.probe_at(tp_rank_)), kProbe + tp_rank_);
  check(cudaGetLastError(), "probe of peer memory");
  stream.wait();
  std::uint32_t seen = 0;
  check(cudaMemcpy(&seen, base + layout.probe_at(tp_rank_), sizeof seen, cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  if (seen != kProbe + static_cast<std::uint32_t>(tp_rank_)) {
    throw Error(LOWLAT_UNSUPPORTED, "a store to rank " + std::to_string(peer_rank) +
                                        "'s memory did not arrive (see nvidia-smi topo -p2p w)");
  }
}

void ExchangeRegion::probed_by(int peer_rank, std::uint64_t budget_ns) {
  using Clock = std::chrono::steady_clock;
  const OnDevice on(device_);
  const Layout layout{box_packets_, fused_packets_, tp_size_};
  const auto* word = static_cast<const std::uint8_t*>(base_) + layout.probe_at(peer_rank);
  const auto deadline = Clock::now() + std::chrono::nanoseconds(budget_ns);
  for (;;) {
    std::uint32_t seen = 0;
    check(cudaMemcpy(&seen, word, sizeof seen, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (seen == kProbe + static_cast<std::uint32_t>(peer_rank)) return;
    if (Clock::now() > deadline) {
      throw Error(LOWLAT_UNSUPPORTED,
                  "rank " + std::to_string(peer_rank) + "'s store did not arrive at rank " +
                      std::to_string(tp_rank_) +
                      "'s memory (see nvidia-smi topo -p2p w; peer access must work both ways)");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void ExchangeRegion::loop_back() { looped_ = true; }

void* ExchangeRegion::base_of(int rank) const {
  if (looped_) return base_;
  void* base = peers_[static_cast<std::size_t>(rank)].base;
  if (base == nullptr) {
    throw Error(LOWLAT_INVALID, "rank " + std::to_string(rank) + "'s region is not open");
  }
  return base;
}

void* ExchangeRegion::boxes_at(int rank, std::int64_t begin, std::int64_t packets) const {
  // Looped back: this rank's box in a peer's memory is that peer's in its own.
  const std::int64_t shift = looped_ ? (rank - tp_rank_) * packets * 16 : 0;
  return static_cast<std::uint8_t*>(base_of(rank)) + begin + shift;
}

void* ExchangeRegion::boxes(int rank) const { return boxes_at(rank, 0, box_packets_); }

std::uint32_t* ExchangeRegion::abort_word(int rank) const {
  const Layout layout{box_packets_, fused_packets_, tp_size_};
  return reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(base_of(rank)) +
                                          layout.abort_at());
}

std::uint32_t* ExchangeRegion::fault_claim() const {
  return reinterpret_cast<std::uint32_t*>(step_epoch() + 1);
}

std::uint32_t* ExchangeRegion::abort_source() const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(status_) + kLine);
}

int ExchangeRegion::ranks_on_device() const {
  const std::uint64_t own = peers_[static_cast<std::size_t>(tp_rank_)].device_id;
  int count = 0;
  for (const Peer& peer : peers_) count += peer.base != nullptr && peer.device_id == own ? 1 : 0;
  return count;
}

bool ExchangeRegion::has_shared_device() const {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const bool open = peers_[i].base != nullptr && peers_[j].base != nullptr;
      if (open && peers_[i].device_id == peers_[j].device_id) return true;
    }
  }
  return false;
}

nvidia::fused::ExchangePort ExchangeRegion::port(std::uint64_t budget_ns,
                                                 std::uint32_t kernel) const {
  const Layout layout{box_packets_, fused_packets_, tp_size_};
  nvidia::fused::ExchangePort out = {};
  for (int rank = 0; rank < tp_size_; ++rank) {
    out.boxes[rank] = boxes_at(rank, layout.fused_at(), fused_packets_);
    out.abort_words[rank] = abort_word(rank);
  }
  out.status = status_;
  out.step_epoch = step_epoch();
  out.fault_claim = fault_claim();
  out.budget_ns = budget_ns;
  out.box_packets = fused_packets_;
  out.tp_rank = tp_rank_;
  out.tp_size = tp_size_;
  out.kernel = kernel;
  return out;
}

std::uint64_t* ExchangeRegion::step_epoch() const { return static_cast<std::uint64_t*>(own_); }

void ExchangeRegion::abort() {
  const OnDevice on(device_);
  for (int rank = 0; rank < tp_size_; ++rank) {
    if (!is_open(rank)) continue;
    check(cudaMemcpyAsync(abort_word(rank), abort_source(), sizeof(std::uint32_t),
                          cudaMemcpyHostToDevice, abort_stream_->get()),
          "cudaMemcpyAsync");
  }
  abort_stream_->wait();
}

std::uint64_t ExchangeRegion::bytes() const {
  return static_cast<std::uint64_t>(Layout{box_packets_, fused_packets_, tp_size_}.bytes()) + 16;
}

}  // namespace lowlat::host::cuda
