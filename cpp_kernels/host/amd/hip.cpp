#include "host/amd/hip.hpp"

#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "host/amd/geometry.hpp"
#include "platform/amd_host.hpp"

namespace lowlat::host::hip {
namespace {

Error unsupported(const std::string& message) { return {LOWLAT_UNSUPPORTED, message}; }

// Newest first; the last is a link that development packages bring.
constexpr const char* kLibraries[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};

const char* opened_name = "";  // written before the runtime that is opened is handed out

void* open_library() {
  for (const char* name : kLibraries) {
    opened_name = name;
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw unsupported(
      "platform amd needs the HIP runtime, and libamdhip64.so.7 or .6 is not to be found: install "
      "ROCm 6 or 7, or set LD_LIBRARY_PATH to its lib");
}

Runtime load() {
  void* library = open_library();
  const auto find = [&](auto& function, const char* name) {
    void* address = dlsym(library, name);
    if (address == nullptr) {
      dlclose(library);
      throw unsupported(std::string("the HIP runtime has no ") + name +
                        ": needed that of ROCm 6 or 7");
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  Runtime out{};
#define LOWLAT_HIP_FIND(name, parameters) find(out.name, #name);
  LOWLAT_HIP_CALLS(LOWLAT_HIP_FIND)
#undef LOWLAT_HIP_FIND
  find(out.hipGetErrorString, "hipGetErrorString");
  return out;
}

}  // namespace

const Runtime& runtime() {
  static std::mutex mutex;
  static std::unique_ptr<Runtime> opened;
  const std::lock_guard lock(mutex);
  if (opened == nullptr) opened = std::make_unique<Runtime>(load());
  return *opened;
}

const char* runtime_name() {
  runtime();
  return opened_name;
}

void check(Status status, const char* call) {
  if (status == kSuccess) return;
  throw Error(LOWLAT_FAULT, std::string(call) + ": " + runtime().hipGetErrorString(status));
}

OnDevice::OnDevice(int device) {
  check(runtime().hipGetDevice(&before_), "hipGetDevice");
  check(runtime().hipSetDevice(device), "hipSetDevice");
}
OnDevice::~OnDevice() { runtime().hipSetDevice(before_); }

void enable_access(int device) {
  const Status status = runtime().hipDeviceEnablePeerAccess(device, 0);
  if (status != kPeerAccessAlreadyEnabled) check(status, "hipDeviceEnablePeerAccess");
}

bool poll(Status (*done)(void*), void* what, const char* call, std::uint64_t budget_ns) {
  using Clock = std::chrono::steady_clock;
  // An hour at most: a budget of "for ever" must not overflow the clock.
  constexpr std::uint64_t kHour = 3'600'000'000'000;
  const auto deadline =
      Clock::now() + std::chrono::nanoseconds(budget_ns < kHour ? budget_ns : kHour);
  for (;;) {
    const Status status = done(what);
    if (status == kSuccess) return true;
    if (status != kNotReady) check(status, call);
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Stream::Stream() {
  check(runtime().hipStreamCreateWithFlags(&stream_, kStreamNonBlocking),
        "hipStreamCreateWithFlags");
}
Stream::~Stream() { runtime().hipStreamDestroy(stream_); }
void Stream::wait(std::uint64_t budget_ns) const {
  if (poll(runtime().hipStreamQuery, stream_, "hipStreamQuery", budget_ns)) return;
  throw Error(LOWLAT_FAULT, "the device did not finish within " +
                                std::to_string(budget_ns / 1'000'000'000) + " s");
}

Event::Event() {
  check(runtime().hipEventCreateWithFlags(&event_, kEventDisableTiming), "hipEventCreateWithFlags");
}
Event::~Event() { runtime().hipEventDestroy(event_); }

Memory::Memory(MemoryKind kind, std::size_t bytes) : kind_(kind), bytes_(bytes > 0 ? bytes : 1) {
  const Runtime& hip = runtime();
  if (kind == MemoryKind::shared) {
    check(hip.hipHostMalloc(&data_, bytes_, kHostPortable | kHostMapped | kHostCoherent),
          "hipHostMalloc");
    std::memset(data_, 0, bytes_);
    return;
  }
  if (kind == MemoryKind::uncached) {
    check(hip.hipExtMallocWithFlags(&data_, bytes_, kDeviceUncached), "hipExtMallocWithFlags");
  } else {
    check(hip.hipMalloc(&data_, bytes_), "hipMalloc");
  }
  try {
    check(hip.hipMemset(data_, 0, bytes_), "hipMemset");
    // It may still run when the call returns, and a peer or another stream may write before it.
    if (!poll(hip.hipStreamQuery, nullptr, "hipStreamQuery after hipMemset", kWorkBudgetNs)) {
      throw Error(LOWLAT_FAULT, "hipMemset did not finish within 120 s");
    }
  } catch (const Error&) {
    hip.hipFree(data_);
    throw;
  }
}
Memory::~Memory() {
  if (data_ == nullptr) return;
  if (kind_ == MemoryKind::shared) {
    runtime().hipHostFree(data_);
  } else {
    runtime().hipFree(data_);
  }
}

Module::Module(const std::vector<CodeObject>& objects) {
  std::string tried;
  for (const CodeObject& object : objects) {
    const Status status = runtime().hipModuleLoadData(&module_, object.data);
    if (status == kSuccess) {
      arch_ = object.arch;
      break;
    }
    // Another part's code is refused by one of these.
    if (status != kNoBinaryForGpu && status != kInvalidImage) check(status, "hipModuleLoadData");
    tried += (tried.empty() ? "" : ", ") + std::string(object.arch);
  }
  if (module_ == nullptr) {
    throw unsupported("this library has no code for this device: it holds " +
                      (tried.empty() ? "none (build with LOWLAT_HIP=ON)" : tried));
  }
  for (const amd::KernelPlan& plan : amd::kKernelPlans) {
    const Status status =
        runtime().hipModuleGetFunction(&functions_[plan.name], module_, plan.name);
    if (status == kSuccess) continue;
    runtime().hipModuleUnload(module_);
    check(status, (std::string("hipModuleGetFunction of ") + plan.name).c_str());
  }
}
Module::~Module() { runtime().hipModuleUnload(module_); }

void Module::launch(const char* name, int num_blocks, void* arguments, std::size_t bytes,
                    void* stream) const {
  void* extra[] = {kLaunchBuffer, arguments, kLaunchBufferBytes, &bytes, kLaunchEnd};
  check(runtime().hipModuleLaunchKernel(functions_.at(name), static_cast<unsigned>(num_blocks), 1,
                                        1, amd::kBlockThreads, 1, 1, 0, stream, nullptr, extra),
        (std::string("the launch of ") + name).c_str());
}

bool store_arrives(const Module& module, void* word, std::uint32_t value, std::uint64_t budget_ns) {
  const Stream stream;
  struct {
    void* word;
    std::uint32_t value;
  } arguments{word, value};
  module.launch("lowlat_probe", 1, arguments, stream.get());
  stream.wait(budget_ns);
  std::uint32_t seen = 0;
  check(runtime().hipMemcpy(&seen, word, sizeof seen, kCopyDefault), "hipMemcpy");
  if (seen == ~value) {
    throw unsupported(
        "the matrix unit of this device has its sums in other lanes than these kernels, which were "
        "never run on one, expect: please report the device");
  }
  return seen == value;
}

int count_devices() {
  int count = 0;
  // No device is an error to HIP, and an answer here.
  return runtime().hipGetDeviceCount(&count) == kSuccess ? count : 0;
}

void require_device(int device, const std::string& asked) {
  const int count = count_devices();
  if (count == 0) throw unsupported("platform amd has no device here: HIP sees none (rocminfo)");
  if (device < 0 || device >= count) {
    throw unsupported("platform is \"" + asked + "\"; this machine has devices 0 .. " +
                      std::to_string(count - 1));
  }
  int khz = 0;
  check(runtime().hipDeviceGetAttribute(&khz, kWallClockRateKhz, device), "hipDeviceGetAttribute");
  constexpr int kNeededKhz = static_cast<int>(1'000'000 / amd::plat::kClockTickNs);
  if (khz == kNeededKhz) return;
  char name[256] = {};
  check(runtime().hipDeviceGetName(name, sizeof name - 1, device), "hipDeviceGetName");
  throw unsupported("device " + std::to_string(device) + " is " + name +
                    ", whose wall clock runs " + std::to_string(khz) + " kHz; needed " +
                    std::to_string(kNeededKhz) + " (gfx942 or gfx950)");
}

std::uint64_t device_id(int device) {
  std::uint64_t id = 1;  // never 0
  for (const int attribute : {kPciDomainId, kPciBusId, kPciDeviceId}) {
    int value = 0;
    check(runtime().hipDeviceGetAttribute(&value, attribute, device), "hipDeviceGetAttribute");
    id = id << 16 | (static_cast<std::uint32_t>(value) & 0xffffu);
  }
  return id;
}

}  // namespace lowlat::host::hip
