// bench/stamps_file.hpp: from the stamps of a step (fused/stamps.hpp) to the file that `lowlat
// profile` draws; its format is described in python/lowlat/cli/stamps.py.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fused/exchange_hop.hpp"
#include "fused/place.hpp"
#include "fused/stamps.hpp"
#include "host/json.hpp"

namespace lowlat::bench {

// One clock for all multiprocessors. Their rate is that of all pairs (the device's clock in
// nanoseconds, a multiprocessor's ticks at the same moment): under load it is not the one that an
// idle device has, and a hundredth is microseconds over a step. The device's clock moves in steps,
// so a pair places the ticks no later than they were; the latest placing of a multiprocessor's
// pairs is the nearest.
class OneClock {
 public:
  // usual_ticks_per_ns: where the pairs are too few to tell.
  OneClock(const std::vector<nvidia::fused::Stamp>& stamps, double usual_ticks_per_ns) {
    std::map<std::uint32_t, std::vector<Pair>> pairs;
    std::uint64_t origin_ns = 0;
    for (const auto& stamp : stamps) {
      // A block that was not there has zeros.
      if (stamp.stage != static_cast<std::uint32_t>(nvidia::fused::StampStage::align) ||
          stamp.begin == 0) {
        continue;
      }
      if (origin_ns == 0 || stamp.begin < origin_ns) origin_ns = stamp.begin;
      pairs[stamp.multiprocessor].push_back({stamp.begin, stamp.end});
    }
    // Least squares, each multiprocessor about its own mean. Ticks are taken from its first pair.
    double products = 0.0, squares = 0.0, most_ns = 0.0;
    for (const auto& [multiprocessor, own] : pairs) {
      double mean_ns = 0.0, mean_ticks = 0.0;
      for (const Pair& pair : own) {
        mean_ns += static_cast<double>(pair.ns - origin_ns) / static_cast<double>(own.size());
        mean_ticks += from(own[0], pair) / static_cast<double>(own.size());
      }
      for (const Pair& pair : own) {
        const double ns = static_cast<double>(pair.ns - origin_ns) - mean_ns;
        const double ticks = from(own[0], pair) - mean_ticks;
        products += ns * ticks;
        squares += ticks * ticks;
        most_ns = std::max(most_ns, std::abs(ns));
      }
    }
    ns_per_tick_ = most_ns > kEnoughNs ? products / squares : 1.0 / usual_ticks_per_ns;
    for (const auto& [multiprocessor, own] : pairs) {
      Place place = {own[0].ticks, -1e300};
      for (const Pair& pair : own) {
        place.ns = std::max(
            place.ns, static_cast<double>(pair.ns - origin_ns) - from(own[0], pair) * ns_per_tick_);
      }
      places_.emplace(multiprocessor, place);
    }
  }
  // Nanoseconds since the first block began, or so; negative for a block that began before.
  double ns(std::uint32_t multiprocessor, std::uint64_t ticks) const {
    const Place& place = places_.at(multiprocessor);
    return place.ns + from({0, place.ticks}, {0, ticks}) * ns_per_tick_;
  }
  bool knows(std::uint32_t multiprocessor) const { return places_.count(multiprocessor) != 0; }

 private:
  struct Pair {
    std::uint64_t ns, ticks;
  };
  struct Place {
    std::uint64_t ticks;
    double ns;  // of those ticks
  };
  // A span that the device's clock, in steps of a microsecond at most, tells to a thousandth.
  static constexpr double kEnoughNs = 50'000.0;

  static double from(const Pair& first, const Pair& pair) {
    return static_cast<double>(static_cast<std::int64_t>(pair.ticks - first.ticks));
  }

  double ns_per_tick_;
  std::map<std::uint32_t, Place> places_;
};

struct StampsAbout {
  std::string what, model, schedule, gpu;
  int tp, gpus, rows;
  double plain_us, stamped_us;
  int layer;  // of the step, whose kernels are shown
};

// The file's text. `stamps`: all of a step, those of blocks that were not there zero. Kernels of
// `about.layer` without a stamp are left out.
inline std::string stamps_json(const std::vector<nvidia::fused::Stamp>& stamps,
                               const StampsAbout& about, double clock_mhz) {
  using nvidia::fused::HopKernel;
  using nvidia::fused::StampStage;
  constexpr std::uint32_t kEach = nvidia::fused::kLayerKernels;
  static constexpr std::array<const char*, static_cast<std::size_t>(HopKernel::count)> kKernels = {
      "front qkv",    "front q",       "attention",         "wo_a",
      "wo_b",         "attention sum", "statistics",        "experts",
      "experts' sum", "begin",         "second statistics", "latent",
      "compressor",   "index query",   "index scores",      "index selection"};
  struct StageName {
    const char* name;
    bool waits;
  };
  static constexpr std::array<StageName, static_cast<std::size_t>(StampStage::count)> kStages = {
      {{"align", false},
       {"ask", false},
       {"input", true},
       {"read", false},
       {"compute", false},
       {"sum", false},
       {"store", false},
       {"other", false}}};
  const OneClock clock(stamps, clock_mhz * 1e-3);
  std::array<std::vector<std::string>, static_cast<std::size_t>(HopKernel::count)> lines;
  double first = 0.0;
  const auto shown = [&](const nvidia::fused::Stamp& stamp) {
    return stamp.stage != static_cast<std::uint32_t>(StampStage::align) && stamp.end != 0 &&
           stamp.stage < kStages.size() &&
           stamp.kernel / kEach == static_cast<std::uint32_t>(about.layer) &&
           stamp.kernel % kEach < kKernels.size() && clock.knows(stamp.multiprocessor);
  };
  bool any = false;
  for (const auto& stamp : stamps) {
    if (!shown(stamp)) continue;
    const double begin = clock.ns(stamp.multiprocessor, stamp.begin);
    first = any ? std::min(first, begin) : begin;
    any = true;
  }
  std::vector<std::uint32_t> order;
  for (std::uint32_t kernel = 0; kernel < kKernels.size(); ++kernel) {
    for (const auto& stamp : stamps) {
      if (!shown(stamp) || stamp.kernel % kEach != kernel) continue;
      if (order.empty() || order.back() != kernel) order.push_back(kernel);
      const auto at = [&](std::uint64_t ticks) {
        return std::to_string(
            static_cast<std::int64_t>(clock.ns(stamp.multiprocessor, ticks) - first + 0.5));
      };
      lines[kernel].push_back("[" + std::to_string(order.size() - 1) + "," +
                              std::to_string(stamp.stage) + "," + std::to_string(stamp.block) +
                              "," + at(stamp.begin) + "," + at(stamp.end) + "]");
    }
  }
  std::string out = "{\"schema\": \"lowlat.stamps\", \"schema_version\": 1, ";
  host::append_fields(out,
                      {{"what", about.what}, {"model", about.model}, {"schedule", about.schedule}});
  out += ", \"tp\": " + std::to_string(about.tp) + ", \"gpus\": " + std::to_string(about.gpus) +
         ", \"rows\": " + std::to_string(about.rows) + ", \"units\": 1, \"machine\": {";
  host::append_field(out, "gpu", about.gpu);
  out += "}, \"plain_us\": " + std::to_string(about.plain_us) +
         ", \"stamped_us\": " + std::to_string(about.stamped_us) + ",\n\"launches\": [";
  for (const std::uint32_t kernel : order) {
    if (kernel != order.front()) out += ", ";
    host::append_string(out, kKernels[kernel]);
  }
  out += "],\n\"stages\": [";
  for (const StageName& stage : kStages) {
    if (&stage != kStages.data()) out += ", ";
    out += "{";
    host::append_field(out, "name", stage.name);
    out += std::string(", \"waits\": ") + (stage.waits ? "true" : "false") + "}";
  }
  out += "],\n\"stamps\": [";
  bool begun = false;
  for (const std::uint32_t kernel : order) {
    for (const std::string& line : lines[kernel]) {
      out += (begun ? ",\n" : "\n") + line;
      begun = true;
    }
  }
  return out + "]}\n";
}

}  // namespace lowlat::bench
