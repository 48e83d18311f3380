// What CUDA finds here: the devices, and whether a store of one arrives in another.
#include "host/devices.hpp"

#include <memory>

#include "platform/nvidia.hpp"

#include "fused/instances.hpp"
#include "host/nvidia/device.hpp"

namespace lowlat::host {
namespace {

__global__ void store_kernel(std::uint32_t* word, std::uint32_t value) {
  namespace plat = lowlat::nvidia::plat;
  plat::store_release<plat::Scope::system>(word, value);
}

// Lets the current device reach another's memory, and leaves that as it was.
class PeerAccess {
 public:
  explicit PeerAccess(int to) : to_(to) {
    const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
    was_enabled_ = status == cudaErrorPeerAccessAlreadyEnabled;
    if (was_enabled_) {
      cudaGetLastError();
    } else {
      cuda::check(status, "cudaDeviceEnablePeerAccess");
    }
    cuda::check(cudaGetDevice(&from_), "cudaGetDevice");
  }
  ~PeerAccess() {
    if (was_enabled_) return;
    cudaSetDevice(from_);
    cudaDeviceDisablePeerAccess(to_);
  }
  PeerAccess(const PeerAccess&) = delete;
  PeerAccess& operator=(const PeerAccess&) = delete;

 private:
  int from_ = 0, to_;
  bool was_enabled_ = false;
};

// A word of the host that copies reach without a buffer of the driver, for which they would wait.
std::unique_ptr<std::uint32_t, cudaError_t (*)(void*)> pinned_word() {
  void* word = nullptr;
  cuda::check(cudaMallocHost(&word, sizeof(std::uint32_t)), "cudaMallocHost");
  return {static_cast<std::uint32_t*>(word), cudaFreeHost};
}

// Throws Error where the store did not arrive. Every wait has a deadline: a device may hang.
void store_into_peer(int from, int to) {
  using cuda::check;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
  if (can == 0)
    throw Error(LOWLAT_UNSUPPORTED, "the driver says that they cannot reach each other");
  check(cudaSetDevice(to), "cudaSetDevice");
  const cuda::Memory memory(sizeof(std::uint32_t));
  const auto seen = pinned_word();
  const cuda::Stream at_home;
  check(cudaMemsetAsync(memory.data(), 0, memory.bytes(), at_home.get()), "cudaMemsetAsync");
  at_home.wait(kStoreBudgetNs);
  check(cudaSetDevice(from), "cudaSetDevice");
  const PeerAccess access(to);
  const cuda::Stream stream;
  store_kernel<<<1, 1, 0, stream.get()>>>(static_cast<std::uint32_t*>(memory.data()), kArrived);
  check(cudaGetLastError(), "a kernel's launch");
  stream.wait(kStoreBudgetNs);
  check(cudaSetDevice(to), "cudaSetDevice");
  check(cudaMemcpyAsync(seen.get(), memory.data(), sizeof *seen, cudaMemcpyDeviceToHost,
                        at_home.get()),
        "cudaMemcpyAsync");
  at_home.wait(kStoreBudgetNs);
  if (*seen != kArrived) throw Error(LOWLAT_FAULT, "the store did not arrive");
}

}  // namespace

PlatformDevices nvidia_devices() {
  PlatformDevices found;
  found.built = true;
  found.architectures = LOWLAT_CUDA_ARCHS;
  for (const auto& kernel : nvidia::fused::kFusedInstances) {
    found.fused.push_back({kernel.kernel, kernel.shapes, kernel.rows});
  }
  int version = 0;
  cuda::check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  found.toolkit = cuda::version_words(version);
  const int count = cuda::count_devices(found.refusal);
  if (count == 0) return found;
  cuda::check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  found.driver = cuda::version_words(version);
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    cuda::check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    found.devices.push_back(
        {properties.name,
         "sm_" + std::to_string(properties.major) + std::to_string(properties.minor),
         cuda::refusal_of_device(i)});
  }
  found.peers = stores_between(found.devices, store_into_peer);
  cuda::check(cudaSetDevice(0), "cudaSetDevice");
  return found;
}

}  // namespace lowlat::host
