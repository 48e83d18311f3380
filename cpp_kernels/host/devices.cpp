#include "host/devices.hpp"

#include <exception>
#include <utility>

#include "host/json.hpp"
#include "lowlat/kernels.h"

namespace lowlat::host {

#ifndef LOWLAT_HAVE_CUDA
PlatformDevices nvidia_devices() { return {}; }
#endif

std::string devices_json(const PlatformDevices& nvidia) {
  std::string out = "{\"nvidia\": {\"built\": ";
  out += nvidia.built ? "true" : "false";
  for (const auto& [name, text] :
       {std::pair{"architectures", &nvidia.architectures}, std::pair{"toolkit", &nvidia.toolkit},
        std::pair{"driver", &nvidia.driver}, std::pair{"refusal", &nvidia.refusal}}) {
    out += ", ";
    append_field(out, name, *text);
  }
  out += ", \"fused\": [";
  for (const FusedKernel& kernel : nvidia.fused) {
    if (&kernel != nvidia.fused.data()) out += ", ";
    out += "{";
    append_field(out, "name", kernel.name);
    out += ", ";
    append_field(out, "shapes", kernel.shapes);
    out += ", ";
    append_field(out, "rows", kernel.rows);
    out += "}";
  }
  out += "], \"devices\": [";
  for (const Device& device : nvidia.devices) {
    if (&device != nvidia.devices.data()) out += ", ";
    out += "{";
    append_field(out, "name", device.name);
    out += ", ";
    append_field(out, "isa", device.isa);
    out += ", ";
    append_field(out, "refusal", device.refusal);
    out += "}";
  }
  out += "], \"peers\": [";
  for (const PeerStore& peer : nvidia.peers) {
    if (&peer != nvidia.peers.data()) out += ", ";
    out +=
        "{\"from\": " + std::to_string(peer.from) + ", \"to\": " + std::to_string(peer.to) + ", ";
    append_field(out, "refusal", peer.refusal);
    out += "}";
  }
  return out + "]}}\n";
}

}  // namespace lowlat::host

extern "C" const char* lowlat_devices(void) {
  // Each thread keeps its last answer, so that two may ask at once.
  thread_local std::string json;
  try {
    json = lowlat::host::devices_json(lowlat::host::nvidia_devices());
  } catch (const std::exception& error) {
    lowlat::host::PlatformDevices none;
    none.refusal = error.what();
    json = lowlat::host::devices_json(none);
  }
  return json.c_str();
}
