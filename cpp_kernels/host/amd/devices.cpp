// What HIP finds here: the devices that take a code object of this library, and whether a store of
// one arrives in another.
#include "host/devices.hpp"

#include "host/amd/hip.hpp"

namespace lowlat::host {
namespace {

// Stores from one device, whose code `module` is, into memory of another or its own. Throws Error
// where the store did not arrive.
void store(const hip::Module& module, int from, int to) {
  if (from != to) {
    int can = 0;
    hip::check(hip::runtime().hipDeviceCanAccessPeer(&can, from, to), "hipDeviceCanAccessPeer");
    if (can == 0) throw Error(LOWLAT_UNSUPPORTED, "HIP says that they cannot reach each other");
  }
  const auto memory = [&] {
    const hip::OnDevice there(to);
    return std::make_unique<hip::Memory>(hip::MemoryKind::uncached, sizeof(std::uint32_t));
  }();
  const hip::OnDevice here(from);
  if (from != to) hip::enable_access(to);
  if (!hip::store_arrives(module, memory->data(), kArrived, kStoreBudgetNs)) {
    throw Error(LOWLAT_FAULT, "the store did not arrive");
  }
}

}  // namespace

PlatformDevices amd_devices() {
  PlatformDevices found;
  const std::vector<hip::CodeObject> objects = hip::built_code_objects();
  found.built = !objects.empty();
  if (!found.built) return found;
  for (const hip::CodeObject& object : objects) {
    found.architectures += (found.architectures.empty() ? "" : ", ") + std::string(object.arch);
  }
  int count = 0;
  found.refusal = words_of([&] {
    hip::runtime();
    found.toolkit = hip::runtime_name();
    count = hip::count_devices();
    if (count == 0) hip::require_device(0, "amd");
  });
  std::vector<std::unique_ptr<hip::Module>> modules(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    char name[256] = {};
    hip::runtime().hipDeviceGetName(name, sizeof name - 1, i);
    Device device{name, "", ""};
    auto& module = modules[static_cast<std::size_t>(i)];
    device.refusal = words_of([&] {
      hip::require_device(i, "amd");
      const hip::OnDevice on(i);
      module = std::make_unique<hip::Module>(objects);
      device.isa = module->arch();
      store(*module, i, i);
    });
    found.devices.push_back(device);
  }
  found.peers = stores_between(found.devices, [&](int from, int to) {
    store(*modules[static_cast<std::size_t>(from)], from, to);
  });
  return found;
}

}  // namespace lowlat::host
