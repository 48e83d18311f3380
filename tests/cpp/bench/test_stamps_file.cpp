// Clocks of several multiprocessors brought together, and the file that lowlat profile reads.
#include "bench/stamps_file.hpp"

#include "check.hpp"

namespace {

using lowlat::bench::OneClock;
using lowlat::bench::stamps_json;
using lowlat::nvidia::fused::Stamp;
using lowlat::nvidia::fused::StampStage;

Stamp stamp(std::uint32_t kernel, StampStage stage, std::uint32_t block, std::uint32_t sm,
            std::uint64_t begin, std::uint64_t end) {
  return {kernel, static_cast<std::uint32_t>(stage), block, sm, begin, end};
}

// Two multiprocessors whose clocks began at other times, 2 ticks a nanosecond. Their true offsets
// are +5000 ns and -3000 ns; the device's clock moves in steps of 32 ns.
constexpr double kTicksPerNs = 2.0;
std::uint64_t device_ns(std::uint64_t true_ns) { return true_ns / 32 * 32; }
std::uint64_t ticks(std::uint32_t sm, std::uint64_t true_ns) {
  return 2 * (sm == 0 ? true_ns + 5000 : true_ns - 3000);
}

std::vector<Stamp> aligns() {
  std::vector<Stamp> out;
  for (const std::uint32_t sm : {0u, 1u}) {
    for (const std::uint64_t ns : {100'000ull, 100'017ull, 100'032ull, 100'063ull}) {
      out.push_back(stamp(0, StampStage::align, 7, sm, device_ns(ns), ticks(sm, ns)));
    }
  }
  return out;
}

}  // namespace

TEST_CASE(the_latest_placing_is_the_true_one) {
  // At 100'000 and 100'032 the device's clock had just moved: there it is exact.
  const OneClock clock(aligns(), kTicksPerNs);
  for (const std::uint32_t sm : {0u, 1u}) {
    CHECK_NEAR(clock.ns(sm, ticks(sm, 100'500)), 500.0, 1e-6);
    CHECK_NEAR(clock.ns(sm, ticks(sm, 99'990)), -10.0, 1e-6);
  }
  CHECK(clock.knows(1));
  CHECK(!clock.knows(2));
}

TEST_CASE(the_rate_is_that_of_the_stamps) {
  // 400 us at 1.75 ticks a nanosecond where 2 are usual; the device's clock moves in steps of 1 us.
  constexpr double kRate = 1.75;
  const auto at = [](std::uint32_t sm, double ns) {
    return static_cast<std::uint64_t>((ns + 1e6 + 777.0 * sm) * kRate);
  };
  std::vector<Stamp> stamps;
  for (std::uint32_t sm = 0; sm < 64; ++sm) {
    for (int i = 0; i < 40; ++i) {
      // Multiprocessors have their blocks at other times.
      const double ns = 5'000'000.0 + 10'000.0 * i + 613.0 * ((7 * i + 13 * sm) % 16);
      if (sm % 2 == 0 ? i > 30 : i < 10) continue;
      stamps.push_back(stamp(0, StampStage::align, 7, sm,
                             static_cast<std::uint64_t>(ns / 1000.0) * 1000, at(sm, ns)));
    }
  }
  const OneClock clock(stamps, kTicksPerNs);
  const double first = clock.ns(0, at(0, 5'200'000.0));
  for (std::uint32_t sm = 0; sm < 64; ++sm) {
    CHECK_NEAR(clock.ns(sm, at(sm, 5'200'000.0)), first, 150.0);
    CHECK_NEAR(clock.ns(sm, at(sm, 5'300'000.0)) - clock.ns(sm, at(sm, 5'200'000.0)), 100'000.0,
               100.0);
  }
}

TEST_CASE(a_block_that_was_not_there_places_nothing) {
  std::vector<Stamp> stamps = aligns();
  stamps.push_back(stamp(0, StampStage::align, 3, 0, 0, 0));
  const OneClock clock(stamps, kTicksPerNs);
  CHECK_NEAR(clock.ns(0, ticks(0, 100'500)), 500.0, 1e-6);
}

TEST_CASE(the_file_has_one_layers_kernels_in_nanoseconds_of_one_clock) {
  std::vector<Stamp> stamps = aligns();
  const std::uint32_t qkv = 16 * 2 + 0, attention = 16 * 2 + 2, next = 16 * 3;
  stamps.push_back(stamp(qkv, StampStage::wait, 0, 0, ticks(0, 100'200), ticks(0, 100'700)));
  stamps.push_back(
      stamp(attention, StampStage::compute, 5, 1, ticks(1, 100'900), ticks(1, 101'400)));
  stamps.push_back(stamp(next, StampStage::compute, 0, 0, ticks(0, 102'000), ticks(0, 102'400)));
  stamps.push_back(stamp(0, StampStage::sum, 0, 0, 0, 0));
  const std::string text = stamps_json(
      stamps, {"layer", "v41", "fused", "NVIDIA H200", 4, 1, 6, 60.5, 61.25, 2}, kTicksPerNs * 1e3);
  CHECK_EQ(text,
           "{\"schema\": \"lowlat.stamps\", \"schema_version\": 1, \"what\": \"layer\", "
           "\"model\": \"v41\", \"schedule\": \"fused\", \"tp\": 4, \"gpus\": 1, \"rows\": 6, "
           "\"units\": 1, \"machine\": {\"gpu\": \"NVIDIA H200\"}, \"plain_us\": 60.500000, "
           "\"stamped_us\": 61.250000,\n\"launches\": [\"front qkv\", \"attention\"],\n"
           "\"stages\": [{\"name\": \"align\", \"waits\": false}, "
           "{\"name\": \"ask\", \"waits\": false}, {\"name\": \"input\", \"waits\": true}, "
           "{\"name\": \"read\", \"waits\": false}, {\"name\": \"compute\", \"waits\": false}, "
           "{\"name\": \"sum\", \"waits\": false}, {\"name\": \"store\", \"waits\": false}, "
           "{\"name\": \"other\", \"waits\": false}],\n"
           "\"stamps\": [\n[0,2,0,0,500],\n[1,4,5,700,1200]]}\n");
}
