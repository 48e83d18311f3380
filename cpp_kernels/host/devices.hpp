// host/devices.hpp: what this library can run on here, found by doing it.
#pragma once

#include <string>
#include <vector>

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

PlatformDevices nvidia_devices();
PlatformDevices amd_devices();

// The answer of lowlat_devices().
std::string found_devices();
std::string devices_json(const PlatformDevices& nvidia, const PlatformDevices& amd);

}  // namespace lowlat::host
