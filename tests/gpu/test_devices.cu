// What lowlat_devices() finds where a device is: kernels that run, and stores that arrive.
#include "gpu.cuh"
#include "host/devices.hpp"

using lowlat::host::Device;
using lowlat::host::nvidia_devices;
using lowlat::host::PeerStore;
using lowlat::testing::need_device;

TEST_CASE(the_first_device_runs_the_kernels) {
  need_device();
  const auto found = nvidia_devices();
  CHECK(found.built);
  CHECK_EQ(found.refusal, "");
  CHECK(!found.driver.empty() && !found.toolkit.empty());
  REQUIRE(!found.devices.empty());
  CHECK_EQ(found.devices[0].refusal, "");
  CHECK(found.devices[0].isa.starts_with("sm_"));
}

TEST_CASE(stores_reach_every_other_device) {
  need_device();
  const auto found = nvidia_devices();
  const std::size_t count = found.devices.size();
  CHECK_EQ(found.peers.size(), count * (count - 1));
  if (count < 2) SKIP("one device: no peer to store into");
  for (const PeerStore& peer : found.peers) CHECK_EQ(peer.refusal, "");
  // Asked again: the first time left no access behind, and one that is there is no failure.
  for (const PeerStore& peer : nvidia_devices().peers) CHECK_EQ(peer.refusal, "");
}
