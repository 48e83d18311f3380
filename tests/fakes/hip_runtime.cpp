// A HIP runtime without a GPU, as libamdhip64.so.7: every function that host/amd/hip.hpp looks up.
// Device memory is the process's; a launch is noted, handed to a hook, and has then run. A test can
// make any call fail, hold the work back, and see what was left behind.
//
// Written against the functions' public signatures. One lock: any thread may call.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kNoDevice = 100,
              kNoBinaryForGpu = 209, kNotFound = 500, kNotReady = 600, kAlreadyEnabled = 704;

// What a launch's hook gets: the kernel's name, its blocks and threads of one, its parameters as
// they lie in memory, and where it was launched.
using Hook = void (*)(const char* kernel, unsigned blocks, unsigned threads, void* parameters,
                      std::size_t bytes, int device, void* stream);

struct Block {
  std::vector<std::uint8_t> bytes;
  std::size_t size;  // as it was asked for; bytes has some more
  int kind;          // 0 device, 1 uncached, 2 host
  int device;
};

struct World {
  int num_devices = 2;
  int compute_units = 4;
  int clock_khz = 100'000;
  int architecture = 0x4f;  // EF_AMDGPU_MACH of gfx950; gfx942 has 0x4c
  bool reach = true;        // devices reach each other
  bool arrive = true;       // what lowlat_probe stores
  bool lanes = true;        // it finds a product's sums where it looks
  bool hold = false;        // no work is ever done
  Hook hook = nullptr;
  std::map<std::string, int> calls;  // how often each was made
  std::string fail_call;
  int fail_at = 0, fail_status = 0;
  std::map<std::uint8_t*, Block> memory;
  std::map<void*, std::unique_ptr<char>> things;  // streams, events, modules that live
  std::map<void*, std::string> functions;
  int mapped = 0;                        // handles that are open
  std::set<std::array<int, 2>> enabled;  // peers
  std::vector<std::string> launched;
};

World& world() {
  static World one;
  return one;
}
std::recursive_mutex& lock() {
  static std::recursive_mutex one;
  return one;
}
thread_local int current = 0;

// The status that a call gives before it does anything.
int begin(const char* call) {
  World& w = world();
  const int count = ++w.calls[call];
  return w.fail_call == call && count == w.fail_at ? w.fail_status : kSuccess;
}
#define BEGIN                          \
  const std::lock_guard guard(lock()); \
  World& w = world();                  \
  if (const int failed = begin(__func__)) return failed

int allocate(World& w, void** out, std::size_t bytes, int kind) {
  Block block{std::vector<std::uint8_t>(bytes + 256, 0xcd), bytes, kind, current};
  // As a device's: at 256 bytes.
  auto* base = block.bytes.data();
  auto* place = base + (256 - reinterpret_cast<std::uintptr_t>(base) % 256) % 256;
  *out = place;
  w.memory.emplace(place, std::move(block));
  return kSuccess;
}
int release(World& w, void* memory) {
  if (memory == nullptr) return kSuccess;
  return w.memory.erase(static_cast<std::uint8_t*>(memory)) == 1 ? kSuccess : kInvalidValue;
}
int make_thing(World& w, void** out) {
  auto thing = std::make_unique<char>();
  *out = thing.get();
  w.things.emplace(*out, std::move(thing));
  return kSuccess;
}
int end_thing(World& w, void* thing) {
  return w.things.erase(thing) == 1 ? kSuccess : kInvalidValue;
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------ what a test says

void fake_hip_reset(int num_devices, int architecture) {
  const std::lock_guard guard(lock());
  World fresh;
  fresh.num_devices = num_devices;
  fresh.architecture = architecture;
  world() = std::move(fresh);
}
// The at-th call of a function, counted from now, gives `status` and does nothing.
void fake_hip_fail(const char* call, int at, int status) {
  const std::lock_guard guard(lock());
  World& w = world();
  w.calls.clear();
  w.fail_call = call;
  w.fail_at = at;
  w.fail_status = status;
}
void fake_hip_set(const char* what, int value) {
  const std::lock_guard guard(lock());
  World& w = world();
  const std::string name = what;
  if (name == "compute_units") w.compute_units = value;
  if (name == "clock_khz") w.clock_khz = value;
  if (name == "reach") w.reach = value != 0;
  if (name == "arrive") w.arrive = value != 0;
  if (name == "lanes") w.lanes = value != 0;
  if (name == "hold") w.hold = value != 0;
}
void fake_hip_on_launch(Hook hook) {
  const std::lock_guard guard(lock());
  world().hook = hook;
}
int fake_hip_calls(const char* call) {
  const std::lock_guard guard(lock());
  return world().calls[call];
}
// What lives: memory, streams, events, modules, mapped handles.
int fake_hip_alive(void) {
  const std::lock_guard guard(lock());
  World& w = world();
  return static_cast<int>(w.memory.size() + w.things.size()) + w.mapped;
}
int fake_hip_num_launches(void) {
  const std::lock_guard guard(lock());
  return static_cast<int>(world().launched.size());
}
const char* fake_hip_launch(int idx) {
  const std::lock_guard guard(lock());
  return world().launched.at(static_cast<std::size_t>(idx)).c_str();
}
int fake_hip_kind_of(const void* memory) {
  const std::lock_guard guard(lock());
  for (const auto& [place, block] : world().memory) {
    if (memory >= place && memory < place + block.size) return block.kind;
  }
  return -1;
}

// ------------------------------------------------------------------ the runtime

const char* hipGetErrorString(int status) {
  switch (status) {
    case 2: return "out of memory";
    case kNoDevice: return "no ROCm-capable device is detected";
    case kNotReady: return "device not ready";
    case kNoBinaryForGpu: return "no kernel image is available for execution on the device";
    default: return "a status of the fake";
  }
}
int hipGetDeviceCount(int* count) {
  BEGIN;
  *count = w.num_devices;
  return w.num_devices == 0 ? kNoDevice : kSuccess;
}
int hipSetDevice(int device) {
  BEGIN;
  if (device < 0 || device >= w.num_devices) return kInvalidDevice;
  current = device;
  return kSuccess;
}
int hipGetDevice(int* device) {
  BEGIN;
  static_cast<void>(w);
  *device = current;
  return kSuccess;
}
int hipDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN;
  if (device < 0 || device >= w.num_devices) return kInvalidDevice;
  switch (attribute) {
    case 63: *value = w.compute_units; return kSuccess;
    case 67: *value = 16 + device; return kSuccess;  // PCI bus
    case 68:
    case 69: *value = 0; return kSuccess;
    case 10017: *value = w.clock_khz; return kSuccess;
    default: return kInvalidValue;
  }
}
int hipDeviceGetName(char* name, int bytes, int) {
  BEGIN;
  static_cast<void>(w);
  std::strncpy(name, "AMD Instinct of the fake", static_cast<std::size_t>(bytes));
  return kSuccess;
}
int hipDeviceCanAccessPeer(int* can, int, int) {
  BEGIN;
  *can = w.reach ? 1 : 0;
  return kSuccess;
}
int hipDeviceEnablePeerAccess(int peer, unsigned) {
  BEGIN;
  return w.enabled.insert({current, peer}).second ? kSuccess : kAlreadyEnabled;
}
int hipExtMallocWithFlags(void** out, std::size_t bytes, unsigned flags) {
  BEGIN;
  return flags == 3 ? allocate(w, out, bytes, 1) : kInvalidValue;
}
int hipMalloc(void** out, std::size_t bytes) {
  BEGIN;
  return allocate(w, out, bytes, 0);
}
int hipFree(void* memory) {
  BEGIN;
  return release(w, memory);
}
int hipHostMalloc(void** out, std::size_t bytes, unsigned flags) {
  BEGIN;
  return flags == (0x40000000u | 2u | 1u) ? allocate(w, out, bytes, 2) : kInvalidValue;
}
int hipHostFree(void* memory) {
  BEGIN;
  return release(w, memory);
}
int hipMemset(void* memory, int value, std::size_t bytes) {
  BEGIN;
  static_cast<void>(w);
  std::memset(memory, value, bytes);
  return kSuccess;
}
int hipMemcpy(void* dst, const void* src, std::size_t bytes, int) {
  BEGIN;
  static_cast<void>(w);
  std::memmove(dst, src, bytes);
  return kSuccess;
}
int hipMemcpyAsync(void* dst, const void* src, std::size_t bytes, int, void*) {
  BEGIN;
  static_cast<void>(w);
  std::memmove(dst, src, bytes);
  return kSuccess;
}
int hipPointerGetAttributes(void* out, const void* memory) {
  BEGIN;
  struct {
    int type, device;
    const void *device_pointer, *host_pointer;
    int is_managed;
    unsigned flags;
  } attributes{};
  for (const auto& [place, block] : w.memory) {
    if (memory < place || memory >= place + block.size) continue;
    attributes.type = block.kind == 2 ? 1 : 2;
    attributes.device = block.device;
    std::memcpy(out, &attributes, sizeof attributes);
    return kSuccess;
  }
  return kInvalidValue;
}
int hipStreamCreateWithFlags(void** out, unsigned) {
  BEGIN;
  return make_thing(w, out);
}
int hipStreamDestroy(void* stream) {
  BEGIN;
  return end_thing(w, stream);
}
// The null stream has the copies of making memory, which are never held back.
int hipStreamQuery(void* stream) {
  BEGIN;
  return w.hold && stream != nullptr && w.launched.size() > 0 ? kNotReady : kSuccess;
}
int hipStreamIsCapturing(void*, int* status) {
  BEGIN;
  static_cast<void>(w);
  *status = 0;
  return kSuccess;
}
int hipEventCreateWithFlags(void** out, unsigned) {
  BEGIN;
  return make_thing(w, out);
}
int hipEventDestroy(void* event) {
  BEGIN;
  return end_thing(w, event);
}
int hipEventRecord(void* event, void*) {
  BEGIN;
  return w.things.count(event) == 1 ? kSuccess : kInvalidValue;
}
int hipEventQuery(void*) {
  BEGIN;
  return w.hold ? kNotReady : kSuccess;
}
int hipModuleLoadData(void** out, const void* image) {
  BEGIN;
  // Of an ELF header, e_flags: the low byte is the part.
  std::uint32_t flags;
  std::memcpy(&flags, static_cast<const char*>(image) + 48, sizeof flags);
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0 ||
      static_cast<int>(flags & 0xffu) != w.architecture) {
    return kNoBinaryForGpu;
  }
  return make_thing(w, out);
}
int hipModuleUnload(void* module) {
  BEGIN;
  return end_thing(w, module);
}
int hipModuleGetFunction(void** out, void* module, const char* name) {
  BEGIN;
  if (w.things.count(module) == 0) return kInvalidValue;
  if (std::strncmp(name, "lowlat_", 7) != 0) return kNotFound;
  static std::set<std::string> names;  // their addresses stand for the functions
  const std::string& kept = *names.insert(name).first;
  *out = const_cast<std::string*>(&kept);
  w.functions[*out] = kept;
  return kSuccess;
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int,
                                                       std::size_t) {
  BEGIN;
  if (w.functions.count(function) == 0) return kInvalidValue;
  *blocks = 1;
  return kSuccess;
}
int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned,
                          void* stream, void** parameters, void** extra) {
  BEGIN;
  const bool whole = w.functions.count(function) == 1 && grid_x > 0 && grid_y == 1 && grid_z == 1 &&
                     block_x > 0 && block_y == 1 && block_z == 1 && parameters == nullptr &&
                     extra[0] == reinterpret_cast<void*>(1) &&
                     extra[2] == reinterpret_cast<void*>(2) &&
                     extra[4] == reinterpret_cast<void*>(3);
  if (!whole) return kInvalidValue;
  const std::string& name = w.functions[function];
  w.launched.push_back(name + " " + std::to_string(grid_x));
  if (name == "lowlat_probe") {  // what it does is known without running it
    struct {
      std::uint32_t* word;
      std::uint32_t value;
    } probe;
    std::memcpy(&probe, extra[1], sizeof probe);
    if (w.arrive) *probe.word = w.lanes ? probe.value : ~probe.value;
  }
  if (w.hook != nullptr) {
    std::size_t bytes;
    std::memcpy(&bytes, extra[3], sizeof bytes);
    w.hook(name.c_str(), grid_x, block_x, extra[1], bytes, current, stream);
  }
  return kSuccess;
}
int hipIpcGetMemHandle(void* handle, void* memory) {
  BEGIN;
  static_cast<void>(w);
  std::memcpy(handle, &memory, sizeof memory);
  return kSuccess;
}
struct FakeIpcHandle {
  char bytes[64];
};
int hipIpcOpenMemHandle(void** out, FakeIpcHandle handle, unsigned) {
  BEGIN;
  if (!w.reach) return kInvalidValue;
  std::memcpy(out, handle.bytes, sizeof *out);
  ++w.mapped;
  return kSuccess;
}
int hipIpcCloseMemHandle(void*) {
  BEGIN;
  --w.mapped;
  return kSuccess;
}

}  // extern "C"
