// hip.cpp: the HIP runtime's C ABI over a machine: each rank is a device. The library goes by the
// runtime's name (libamdhip64.so.7), so that code that opens it at run time meets this one when it
// is loaded before. Kernels run while somebody asks whether they are done.
//
// Copies and fills happen at once, as on a stream of their own; launches of a device run in order,
// whatever their stream.
#include <cstring>

#include "machine.hpp"

using namespace amd;

namespace {

using Status = int;
constexpr Status kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100,
                 kNoBinaryForGpu = 209, kNotFound = 500, kNotReady = 600,
                 kPeerAccessAlreadyEnabled = 704, kLaunchFailure = 719;
// hipDeviceAttribute_t
constexpr int kMultiprocessorCount = 63, kPciBusId = 67, kPciDeviceId = 68, kPciDomainId = 69,
              kWallClockRateKhz = 10017;
constexpr int kTypeHost = 1, kTypeDevice = 2;
constexpr int kWallClockKhz = 100'000;

// Python's half: `load` gives a module's number, or -1 for another part's; `function` a kernel's
// number, or -1; `launch` and `run` 0, or 1 with `error` set.
struct Face {
  Machine* machine;
  int num_units;
  int (*load)(const void* image, int device);
  int (*function)(int module, const char* name);
  int (*launch)(int function, int device, const u32* grid_and_block, u32 lds, const void* arguments,
                u64 bytes);
  int (*run)(int device);
  const char* (*error)();
};
Face face{};
thread_local int current = 0;  // the thread's device

struct Stream {
  int device;
};
struct Event {
  int device;
  u64 launch;  // done when so many of its device's launches are
};
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned allocation_flags;
};

int num_devices() {
  return face.machine == nullptr ? 0 : static_cast<int>(face.machine->queues.size());
}
int device_of(void* stream) {
  return stream == nullptr ? current : static_cast<Stream*>(stream)->device;
}
Status allocate(void** out, std::size_t bytes, const char* name, int owner) {
  try {
    *out = reinterpret_cast<void*>(face.machine->memory.allocate(bytes, name, false, owner));
    return kSuccess;
  } catch (const Fault&) {
    return kOutOfMemory;
  }
}
Status release(void* data) {
  try {
    if (data != nullptr) face.machine->memory.free(reinterpret_cast<u64>(data));
    return kSuccess;
  } catch (const Fault&) {
    return kInvalidValue;
  }
}
Status done(int device, u64 launch) {
  const auto at = static_cast<std::size_t>(device);
  if (face.machine->finished[at] < launch && face.run(device) != 0) return kLaunchFailure;
  return face.machine->finished[at] >= launch ? kSuccess : kNotReady;
}

}  // namespace

extern "C" {

void amd_hip_attach(const Face* given) { face = *given; }

const char* hipGetErrorString(Status status) {
  switch (status) {
    case kSuccess: return "no error";
    case kOutOfMemory: return "out of memory";
    case kNoDevice: return "no device";
    case kNoBinaryForGpu: return "no code for this device";
    case kNotFound: return "not found";
    case kNotReady: return "not ready";
    case kLaunchFailure: return face.error();
    default: return "invalid argument";
  }
}
Status hipGetDeviceCount(int* out) {
  *out = num_devices();
  return *out == 0 ? kNoDevice : kSuccess;
}
Status hipSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return kInvalidValue;
  current = device;
  return kSuccess;
}
Status hipGetDevice(int* out) {
  *out = current;
  return kSuccess;
}
Status hipDeviceGetName(char* out, int bytes, int device) {
  std::snprintf(out, static_cast<std::size_t>(bytes), "%s, interpreted, number %d",
                face.machine->is_gfx950 ? "gfx950" : "gfx942", device);
  return kSuccess;
}
Status hipDeviceGetAttribute(int* out, int attribute, int device) {
  switch (attribute) {
    case kMultiprocessorCount: *out = face.num_units; return kSuccess;
    case kPciBusId: *out = 1 + device; return kSuccess;
    case kPciDeviceId:
    case kPciDomainId: *out = 0; return kSuccess;
    case kWallClockRateKhz: *out = kWallClockKhz; return kSuccess;
    default: return kInvalidValue;
  }
}
Status hipDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return kSuccess;
}
Status hipDeviceEnablePeerAccess(int, unsigned) { return kPeerAccessAlreadyEnabled; }

Status hipMalloc(void** out, std::size_t bytes) {
  return allocate(out, bytes, "device memory", current);
}
Status hipExtMallocWithFlags(void** out, std::size_t bytes, unsigned) {
  return allocate(out, bytes, "uncached device memory", current);
}
Status hipHostMalloc(void** out, std::size_t bytes, unsigned) {
  return allocate(out, bytes, "host memory", kHost);
}
Status hipFree(void* data) { return release(data); }
Status hipHostFree(void* data) { return release(data); }
Status hipMemset(void* data, int value, std::size_t bytes) {
  std::memset(data, value, bytes);
  return kSuccess;
}
Status hipMemcpy(void* to, const void* from, std::size_t bytes, int) {
  std::memcpy(to, from, bytes);
  return kSuccess;
}
Status hipMemcpyAsync(void* to, const void* from, std::size_t bytes, int, void*) {
  std::memcpy(to, from, bytes);
  return kSuccess;
}
Status hipPointerGetAttributes(PointerAttributes* out, const void* data) {
  const Region* region = face.machine->memory.find(reinterpret_cast<u64>(data));
  if (region == nullptr) return kInvalidValue;
  *out = {};
  out->type = region->owner == kHost ? kTypeHost : kTypeDevice;
  out->device = region->owner == kHost ? 0 : region->owner;
  out->device_pointer = const_cast<void*>(data);
  return kSuccess;
}

Status hipStreamCreateWithFlags(void** out, unsigned) {
  *out = new Stream{current};
  return kSuccess;
}
Status hipStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return kSuccess;
}
Status hipStreamIsCapturing(void*, int* out) {
  *out = 0;
  return kSuccess;
}
Status hipStreamQuery(void* stream) {
  const int device = device_of(stream);
  return done(device, face.machine->launched[static_cast<std::size_t>(device)]);
}
Status hipEventCreateWithFlags(void** out, unsigned) {
  *out = new Event{current, 0};
  return kSuccess;
}
Status hipEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}
Status hipEventRecord(void* event, void* stream) {
  const int device = device_of(stream);
  *static_cast<Event*>(event) = {device, face.machine->launched[static_cast<std::size_t>(device)]};
  return kSuccess;
}
Status hipEventQuery(void* event) {
  const auto& at = *static_cast<Event*>(event);
  return done(at.device, at.launch);
}

// Modules and kernels are their numbers, from 1.
Status hipModuleLoadData(void** out, const void* image) {
  const int module = face.load(image, current);
  if (module < 0) return kNoBinaryForGpu;
  *out = reinterpret_cast<void*>(static_cast<std::uintptr_t>(module) + 1);
  return kSuccess;
}
Status hipModuleUnload(void*) { return kSuccess; }
Status hipModuleGetFunction(void** out, void* module, const char* name) {
  const int number = static_cast<int>(reinterpret_cast<std::uintptr_t>(module)) - 1;
  const int function = face.function(number, name);
  if (function < 0) return kNotFound;
  *out = reinterpret_cast<void*>(static_cast<std::uintptr_t>(function) + 1);
  return kSuccess;
}
Status hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void*, int, std::size_t) {
  *out = 1;
  return kSuccess;
}
// `extra`: 1, the arguments, 2, a pointer to their bytes, 3.
Status hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds,
                             void* stream, void** parameters, void** extra) {
  if (parameters != nullptr || extra == nullptr) return kInvalidValue;
  const u32 sizes[6] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  const int number = static_cast<int>(reinterpret_cast<std::uintptr_t>(function)) - 1;
  const u64 bytes = *static_cast<const std::size_t*>(extra[3]);
  const int failed = face.launch(number, device_of(stream), sizes, lds, extra[1], bytes);
  return failed == 0 ? kSuccess : kLaunchFailure;
}

// Ranks of one process never ask for these with effect.
Status hipIpcGetMemHandle(void* out, void* data) {
  std::memset(out, 0, 64);
  std::memcpy(out, &data, sizeof data);
  return kSuccess;
}
struct IpcHandle {
  char bytes[64];
};
Status hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned) {
  std::memcpy(out, handle.bytes, sizeof *out);
  return kSuccess;
}
Status hipIpcCloseMemHandle(void*) { return kSuccess; }
}
