// What lowlat_devices() says, and of what.
#include "host/devices.hpp"

#include "check.hpp"
#include "host/amd/hip.hpp"
#include "lowlat/kernels.h"

using lowlat::host::devices_json;
using lowlat::host::PlatformDevices;

TEST_CASE(every_device_and_store_is_named) {
  PlatformDevices found;
  found.built = true;
  found.architectures = "sm_90a";
  found.toolkit = "13.0";
  found.driver = "13.1";
  found.fused = {{"experts_sm90", "v4 tp2, v41 tp4", "1..64"}, {"mix_sm90", "v4", "1..48"}};
  found.devices = {{"H200", "sm_90", ""}, {"A100", "sm_80", "no code"}};
  found.peers = {{0, 1, "the store did not arrive"}, {1, 0, "no code"}};
  PlatformDevices amd;
  amd.built = true;
  amd.architectures = "gfx950, gfx942";
  amd.toolkit = "libamdhip64.so.7";
  amd.devices = {{"MI355X", "gfx950", ""}};
  CHECK_EQ(
      devices_json(found, amd),
      "{\"nvidia\": {\"built\": true, \"architectures\": \"sm_90a\", \"toolkit\": \"13.0\", "
      "\"driver\": \"13.1\", \"refusal\": \"\", \"fused\": [{\"name\": \"experts_sm90\", "
      "\"shapes\": \"v4 tp2, v41 tp4\", \"rows\": \"1..64\"}, {\"name\": \"mix_sm90\", "
      "\"shapes\": \"v4\", \"rows\": \"1..48\"}], \"devices\": [{\"name\": \"H200\", \"isa\": "
      "\"sm_90\", \"refusal\": \"\"}, {\"name\": \"A100\", \"isa\": \"sm_80\", \"refusal\": "
      "\"no code\"}], \"peers\": [{\"from\": 0, \"to\": 1, \"refusal\": \"the store did not "
      "arrive\"}, {\"from\": 1, \"to\": 0, \"refusal\": \"no code\"}]}, \"amd\": {\"built\": true, "
      "\"architectures\": \"gfx950, gfx942\", \"toolkit\": \"libamdhip64.so.7\", \"driver\": \"\", "
      "\"refusal\": \"\", \"fused\": [], \"devices\": [{\"name\": \"MI355X\", \"isa\": \"gfx950\", "
      "\"refusal\": \"\"}], \"peers\": []}}\n");
}

TEST_CASE(a_library_without_kernels_of_the_platform_says_so) {
  // This program has the library inside, with the code objects that were built.
#ifdef LOWLAT_HAVE_CUDA
  SKIP("this build has CUDA kernels; tests/gpu looks at what they find");
#else
  const std::string none =
      "{\"built\": false, \"architectures\": \"\", \"toolkit\": \"\", \"driver\": \"\", "
      "\"refusal\": \"\", \"fused\": [], \"devices\": [], \"peers\": []}";
  const std::string seen = lowlat_devices();
  CHECK(seen.starts_with("{\"nvidia\": " + none + ", \"amd\": {"));
  if (lowlat::host::hip::built_code_objects().empty()) {
    CHECK_EQ(seen, "{\"nvidia\": " + none + ", \"amd\": " + none + "}\n");
  }
#endif
}
