// What HIP finds here: the devices that take a code object of this library, and whether a store of
// one arrives in another.
#include "host/devices.hpp"

#include "host/amd/hip.hpp"

namespace lowlat::host {
namespace {

constexpr std::uint32_t kArrived = 0x10a7u;
constexpr std::uint64_t kStoreBudgetNs = 5'000'000'000;

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
  if (from != to) {
    const hip::Status status = hip::runtime().hipDeviceEnablePeerAccess(to, 0);
    if (status != hip::kPeerAccessAlreadyEnabled) hip::check(status, "hipDeviceEnablePeerAccess");
  }
  if (!hip::store_arrives(module, memory->data(), kArrived, kStoreBudgetNs)) {
    throw Error(LOWLAT_FAULT, "the store did not arrive");
  }
}

// The words of what an attempt throws; "" when it does not.
template <class Attempt>
std::string words_of(Attempt&& attempt) {
  try {
    attempt();
    return "";
  } catch (const Error& error) {
    return error.what();
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
  for (int from = 0; from < count; ++from) {
    const std::string& no_code = found.devices[static_cast<std::size_t>(from)].refusal;
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      const auto& module = modules[static_cast<std::size_t>(from)];
      const std::string why =
          no_code.empty() ? words_of([&] { store(*module, from, to); }) : no_code;
      found.peers.push_back({from, to, why});
    }
  }
  return found;
}

}  // namespace lowlat::host
