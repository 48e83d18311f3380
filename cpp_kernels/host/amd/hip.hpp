// host/amd/hip.hpp: the HIP runtime, opened when a model asks for it: nothing links it and no
// header of it is needed. The types and numbers below are its C ABI of ROCm 6 and 7.
//
// Every failure is an Error that names the call and what HIP said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "host/error.hpp"

namespace lowlat::host::hip {

using Status = int;  // hipError_t
inline constexpr Status kSuccess = 0, kInvalidImage = 200, kNoBinaryForGpu = 209, kNotReady = 600,
                        kPeerAccessAlreadyEnabled = 704;

// hipDeviceAttribute_t
inline constexpr int kMultiprocessorCount = 63, kPciBusId = 67, kPciDeviceId = 68,
                     kPciDomainId = 69, kWallClockRateKhz = 10017;
// Flags of calls.
inline constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kIpcLazyPeerAccess = 1,
                          kHostPortable = 1, kHostMapped = 2, kHostCoherent = 0x40000000,
                          kDeviceUncached = 3;
inline constexpr int kCopyDefault = 4, kCopyHostToDevice = 1;
inline constexpr int kMemoryDevice = 2, kMemoryManaged = 3;  // hipMemoryType
// What the array of a launch's extra arguments holds before each value.
inline void* const kLaunchBuffer = reinterpret_cast<void*>(1);
inline void* const kLaunchBufferBytes = reinterpret_cast<void*>(2);
inline void* const kLaunchEnd = reinterpret_cast<void*>(3);

struct IpcHandle {
  char bytes[64];
};
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned allocation_flags;
};

// The functions that are used, by their names in the library.
#define LOWLAT_HIP_CALLS(call)                                                                     \
  call(hipGetDeviceCount, (int*)) call(hipSetDevice, (int)) call(hipGetDevice, (int*)) call(       \
      hipDeviceGetAttribute, (int*, int, int)) call(hipDeviceGetName, (char*, int, int))           \
      call(hipDeviceCanAccessPeer, (int*, int, int)) call(                                         \
          hipDeviceEnablePeerAccess, (int, unsigned)) call(hipExtMallocWithFlags,                  \
                                                           (void**, std::size_t, unsigned))        \
          call(hipMalloc, (void**, std::size_t)) call(hipFree, (void*)) call(                      \
              hipHostMalloc, (void**, std::size_t, unsigned)) call(hipHostFree, (void*))           \
              call(hipMemset, (void*, int, std::size_t)) call(                                     \
                  hipMemcpy, (void*, const void*, std::size_t, int))                               \
                  call(hipMemcpyAsync, (void*, const void*, std::size_t, int, void*))              \
                      call(hipPointerGetAttributes, (PointerAttributes*, const void*)) call(       \
                          hipStreamCreateWithFlags, (void**, unsigned))                            \
                          call(hipStreamDestroy, (void*)) call(hipStreamQuery, (void*)) call(      \
                              hipStreamIsCapturing, (void*, int*)) call(hipEventCreateWithFlags,   \
                                                                        (void**, unsigned))        \
                              call(hipEventDestroy, (void*)) call(hipEventRecord, (void*, void*))  \
                                  call(hipEventQuery, (void*)) call(                               \
                                      hipModuleLoadData, (void**, const void*))                    \
                                      call(hipModuleUnload, (void*)) call(                         \
                                          hipModuleGetFunction, (void**, void*, const char*))      \
                                          call(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, \
                                               (int*, void*, int, std::size_t))                    \
                                              call(hipModuleLaunchKernel,                          \
                                                   (void*, unsigned, unsigned, unsigned, unsigned, \
                                                    unsigned, unsigned, unsigned, void*, void**,   \
                                                    void**))                                       \
                                                  call(hipIpcGetMemHandle, (IpcHandle*, void*))    \
                                                      call(hipIpcOpenMemHandle,                    \
                                                           (void**, IpcHandle, unsigned))          \
                                                          call(hipIpcCloseMemHandle, (void*))

struct Runtime {
#define LOWLAT_HIP_MEMBER(name, parameters) Status(*name) parameters;
  LOWLAT_HIP_CALLS(LOWLAT_HIP_MEMBER)
#undef LOWLAT_HIP_MEMBER
  const char* (*hipGetErrorString)(Status);
};

// The runtime of this process, opened once. Throws LOWLAT_UNSUPPORTED, in one line, where there is
// none or it lacks a function; a later call tries again.
const Runtime& runtime();

// Which file it is, as it was found: "libamdhip64.so.7".
const char* runtime_name();

// Throws LOWLAT_FAULT: "hipMalloc: out of memory".
void check(Status status, const char* call);

// The current device of the calling thread, given back at the end.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// A deadline for work that is not meant to wait for anything.
inline constexpr std::uint64_t kWorkBudgetNs = 120'000'000'000;

// True once `done` gives kSuccess, false when it still is not ready after the budget (an hour at
// most). Any other answer is an Error of `call`.
bool poll(Status (*done)(void*), void* what, const char* call, std::uint64_t budget_ns);

// A stream of the device that is current when it is made.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }
  // Until all work is done; LOWLAT_FAULT when it failed or took longer.
  void wait(std::uint64_t budget_ns = kWorkBudgetNs) const;

 private:
  void* stream_ = nullptr;
};

// Done when the work before it in its stream is.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void* get() const { return event_; }

 private:
  void* event_ = nullptr;
};

// Lets the current device reach the memory of another that it can reach.
void enable_access(int device);

enum class MemoryKind {
  device,    // of the device
  uncached,  // of the device, past its caches: what peers write and read while kernels run
  shared,    // of the host, that devices reach; coherent
};

// Memory of one owner, zeroed; never null.
class Memory {
 public:
  Memory(MemoryKind kind, std::size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept : kind_(other.kind_), data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  MemoryKind kind_;
  void* data_ = nullptr;
  std::size_t bytes_;
};

// A code object that the library holds.
struct CodeObject {
  const char* arch;
  const void* data;
};
// Those of the resident schedule; none in a library that was built without a compiler for them.
std::vector<CodeObject> built_code_objects();

// A code object on the current device.
class Module {
 public:
  // The first of `objects` that the device takes, with every kernel of kKernelPlans: looking one up
  // later could wait for kernels that run. Throws LOWLAT_UNSUPPORTED where it takes none.
  explicit Module(const std::vector<CodeObject>& objects);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  const char* arch() const { return arch_; }
  void* function(const char* name) const { return functions_.at(name); }
  // Puts a kernel of geometry's block size into a stream. Arguments: a struct whose members are the
  // kernel's parameters, in order.
  template <class Arguments>
  void launch(const char* name, int num_blocks, Arguments& arguments, void* stream) const {
    launch(name, num_blocks, &arguments, sizeof arguments, stream);
  }

 private:
  void launch(const char* name, int num_blocks, void* arguments, std::size_t bytes,
              void* stream) const;

  void* module_ = nullptr;
  const char* arch_ = "";
  std::map<std::string, void*> functions_;  // of kKernelPlans
};

// Whether a word that a kernel on the current device stores is what the host then reads there.
// Throws where the kernel finds a matrix product's sums in other lanes than it expects.
bool store_arrives(const Module& module, void* word, std::uint32_t value, std::uint64_t budget_ns);

// How many devices HIP sees, and that it sees this one; `asked` is what was asked for.
int count_devices();
void require_device(int device, const std::string& asked);
// Of a device, the same in every process of the host.
std::uint64_t device_id(int device);

}  // namespace lowlat::host::hip
