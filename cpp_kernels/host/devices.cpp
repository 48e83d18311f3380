#include "host/devices.hpp"

#include <exception>

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
  out += ", ";
  append_fields(out, {{"architectures", of.architectures},
                      {"toolkit", of.toolkit},
                      {"driver", of.driver},
                      {"refusal", of.refusal}});
  out += ", ";
  append_objects(out, "fused", of.fused, [&](const FusedKernel& kernel) {
    append_fields(out, {{"name", kernel.name}, {"shapes", kernel.shapes}, {"rows", kernel.rows}});
  });
  out += ", ";
  append_objects(out, "devices", of.devices, [&](const Device& device) {
    append_fields(out, {{"name", device.name}, {"isa", device.isa}, {"refusal", device.refusal}});
  });
  out += ", ";
  append_objects(out, "peers", of.peers, [&](const PeerStore& peer) {
    out += "\"from\": " + std::to_string(peer.from) + ", \"to\": " + std::to_string(peer.to) + ", ";
    append_field(out, "refusal", peer.refusal);
  });
  out += "}";
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
