// host/devices.hpp: what this library can run on here, found by doing it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/error.hpp"

namespace lowlat::host {

struct Device {
  std::string name;
  std::string isa;      // "sm_90"; of AMD that of the code that it takes, "" where it takes none
  std::string refusal;  // why the library's kernels do not run on it; "" when one did
};

// A store by a kernel on one device into memory of another.
struct PeerStore {
  int from, to;
  std::string refusal;  // why it did not arrive; "" when it did
};

// A fused kernel that the library has, see fused/instances.hpp.
struct FusedKernel {
  std::string name, shapes, rows;
};

// What was found for one platform.
struct PlatformDevices {
  bool built = false;           // whether the library has kernels of the platform
  std::string architectures;    // that they were built for
  std::string toolkit, driver;  // versions, "" without one; of AMD the runtime's file, and ""
  std::string refusal;          // why there are no devices; "" when there are
  std::vector<FusedKernel> fused;
  std::vector<Device> devices;
  std::vector<PeerStore> peers;  // every ordered pair
};

// The word that such a store leaves, and how long it may take.
inline constexpr std::uint32_t kArrived = 0x10a7u;
inline constexpr std::uint64_t kStoreBudgetNs = 5'000'000'000;

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

// Every ordered pair of the devices; store(from, to) throws where it did not arrive. A device that
// runs no kernel stores nothing, for its own reason.
template <class Store>
std::vector<PeerStore> stores_between(const std::vector<Device>& devices, Store&& store) {
  std::vector<PeerStore> out;
  const auto count = static_cast<int>(devices.size());
  for (int from = 0; from < count; ++from) {
    const std::string& no_code = devices[static_cast<std::size_t>(from)].refusal;
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      out.push_back({from, to, no_code.empty() ? words_of([&] { store(from, to); }) : no_code});
    }
  }
  return out;
}

PlatformDevices nvidia_devices();
PlatformDevices amd_devices();

// The answer of lowlat_devices().
std::string found_devices();
std::string devices_json(const PlatformDevices& nvidia, const PlatformDevices& amd);

}  // namespace lowlat::host
