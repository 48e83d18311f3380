#include "host/nvidia/device.hpp"

#include <chrono>
#include <string>
#include <thread>

#include "platform/nvidia.hpp"

namespace lowlat::host::cuda {
namespace {

// Asked for its attributes, to see whether the library holds code for a device.
__global__ void marker() {}

Error unsupported(const std::string& message) { return {LOWLAT_UNSUPPORTED, message}; }

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error of a call is not to be seen by the next
  throw Error(LOWLAT_FAULT, std::string(call) + ": " + cudaGetErrorString(status));
}

std::string version_words(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int count_devices(std::string& out_why) {
  int count = 0, runtime = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  out_why = status == cudaSuccess ? "CUDA sees none" : cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver) {
    // Also where libcuda is not there at all.
    out_why = "no NVIDIA driver, or one that is older than CUDA " + version_words(runtime);
  }
  return 0;
}

std::string refusal_of_device(int device) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, marker);
  if (status != cudaSuccess) cudaGetLastError();
  check(cudaSetDevice(before), "cudaSetDevice");
  if (status == cudaSuccess) return "";
  if (status != cudaErrorNoKernelImageForDevice) return cudaGetErrorString(status);
  return "this library has no code for it; build with its architecture in LOWLAT_CUDA_ARCHS";
}

void require_device(int device, const std::string& asked) {
  std::string none;
  const int count = count_devices(none);
  if (count == 0) {
    throw unsupported("platform nvidia has no device here: " + none + " (lowlat doctor)");
  }
  if (device < 0 || device >= count) {
    throw unsupported("platform is \"" + asked + "\"; this machine has devices 0 .. " +
                      std::to_string(count - 1));
  }
  const std::string why = refusal_of_device(device);
  if (why.empty()) return;
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  throw unsupported("device " + std::to_string(device) + " is " + properties.name + " (sm_" +
                    std::to_string(properties.major) + std::to_string(properties.minor) +
                    "): " + why);
}

void open_first_device() {
  require_device(0, "nvidia");
  check(cudaSetDevice(0), "cudaSetDevice");
}

void wait_for(cudaStream_t stream, const char* work, std::uint64_t budget_ns) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(budget_ns);
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) check(status, work);
    cudaGetLastError();
    if (Clock::now() > deadline) {
      throw Error(LOWLAT_FAULT, std::string(work) + " did not finish within " +
                                    std::to_string(budget_ns / 1'000'000'000) + " s");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Capture::Capture(cudaStream_t stream) : stream_(stream) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

Capture::~Capture() {
  if (open_) cudaStreamEndCapture(stream_, &graph_);
  if (graph_ != nullptr) cudaGraphDestroy(graph_);
  cudaGetLastError();  // of a capture that a failed launch has spoiled
}

cudaGraph_t Capture::end() {
  open_ = false;
  check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
  return graph_;
}

Stream::Stream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}
Stream::~Stream() { cudaStreamDestroy(stream_); }

Event::Event() {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}

Event::~Event() { cudaEventDestroy(event_); }

void Event::record(cudaStream_t stream) const {
  check(cudaEventRecord(event_, stream), "cudaEventRecord");
}

void Event::hold(cudaStream_t stream) const {
  check(cudaStreamWaitEvent(stream, event_), "cudaStreamWaitEvent");
}

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  check(cudaMalloc(&data_, bytes > 0 ? bytes : 1), "cudaMalloc");
}
Memory::~Memory() { cudaFree(data_); }

}  // namespace lowlat::host::cuda
