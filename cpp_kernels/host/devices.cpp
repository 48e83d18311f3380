#include "host/devices.hpp"

#include <exception>
#include <utility>

#include "host/json.hpp"
#include "lowlat/kernels.h"

namespace lowlat::host {

#ifndef LOWLAT_HAVE_CUDA
PlatformDevices nvidia_devices() { return {}; }
#endif

namespace {

void append_platform(std::string& out, const PlatformDevices& of) {
  out += "{\"built\": ";
  out += of.built ? "true" : "false";
  for (const auto& [name, text] :
       {std::pair{"architectures", &of.architectures}, std::pair{"toolkit", &of.toolkit},
        std::pair{"driver", &of.driver}, std::pair{"refusal", &of.refusal}}) {
    out += ", ";
    append_field(out, name, *text);
  }
  out += ", \"fused\": [";
  for (const FusedKernel& kernel : of.fused) {
    if (&kernel != of.fused.data()) out += ", ";
    out += "{";
    append_field(out, "name", kernel.name);
    out += ", ";
    append_field(out, "shapes", kernel.shapes);
    out += ", ";
    append_field(out, "rows", kernel.rows);
    out += "}";
  }
  out += "], \"devices\": [";
  for (const Device& device : of.devices) {
    if (&device != of.devices.data()) out += ", ";
    out += "{";
    append_field(out, "name", device.name);
    out += ", ";
    append_field(out, "isa", device.isa);
    out += ", ";
    append_field(out, "refusal", device.refusal);
    out += "}";
  }
  out += "], \"peers\": [";
  for (const PeerStore& peer : of.peers) {
    if (&peer != of.peers.data()) out += ", ";
    out +=
        "{\"from\": " + std::to_string(peer.from) + ", \"to\": " + std::to_string(peer.to) + ", ";
    append_field(out, "refusal", peer.refusal);
    out += "}";
  }
  out += "]}";
}

// A platform that cannot be asked is one refusal, and leaves the other's answer alone.
PlatformDevices asked(PlatformDevices (*devices)()) {
  try {
    return devices();
  } catch (const std::exception& error) {
    PlatformDevices none;
    none.refusal = error.what();
    return none;
  }
}

}  // namespace

std::string devices_json(const PlatformDevices& nvidia, const PlatformDevices& amd) {
  std::string out = "{\"nvidia\": ";
  append_platform(out, nvidia);
  out += ", \"amd\": ";
  append_platform(out, amd);
  return out + "}\n";
}

std::string found_devices() { return devices_json(asked(nvidia_devices), asked(amd_devices)); }

}  // namespace lowlat::host

extern "C" const char* lowlat_devices(void) {
  // Each thread keeps its last answer, so that two may ask at once.
  thread_local std::string json;
  json = lowlat::host::found_devices();
  return json.c_str();
}
