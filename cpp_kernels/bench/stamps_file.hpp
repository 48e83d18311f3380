// bench/stamps_file.hpp: from the stamps of a step (fused/stamps.hpp) to the file that `lowlat
// profile` draws; its format is described in python/lowlat/cli/stamps.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fused/exchange_hop.hpp"
#include "fused/stamps.hpp"
#include "host/json.hpp"

namespace lowlat::bench {

// One clock for all multiprocessors. globaltimer moves in steps, so a pair (its value, the
// multiprocessor's ticks at the same moment) places the ticks no later than they were; the latest
// placing of all pairs is the nearest.
class OneClock {
 public:
  OneClock(const std::vector<nvidia::fused::Stamp>& stamps, double ticks_per_ns)
      : ticks_per_ns_(ticks_per_ns) {
    for (const auto& stamp : stamps) {
      if (stamp.stage != static_cast<std::uint32_t>(nvidia::fused::StampStage::align)) continue;
      if (stamp.begin == 0) continue;  // a block that was not there
      if (origin_ns_ == 0 || stamp.begin < origin_ns_) origin_ns_ = stamp.begin;
    }
    for (const auto& stamp : stamps) {
      if (stamp.stage != static_cast<std::uint32_t>(nvidia::fused::StampStage::align)) continue;
      if (stamp.begin == 0) continue;
      const double offset = static_cast<double>(stamp.begin - origin_ns_) -
                            static_cast<double>(stamp.end) / ticks_per_ns_;
      const auto [at, is_new] = offset_ns_.try_emplace(stamp.multiprocessor, offset);
      if (!is_new) at->second = std::max(at->second, offset);
    }
  }
  // Nanoseconds since the first block began, or so; negative for a block that began before.
  double ns(std::uint32_t multiprocessor, std::uint64_t ticks) const {
    return static_cast<double>(ticks) / ticks_per_ns_ + offset_ns_.at(multiprocessor);
  }
  bool knows(std::uint32_t multiprocessor) const { return offset_ns_.count(multiprocessor) != 0; }

 private:
  double ticks_per_ns_;
  std::uint64_t origin_ns_ = 0;
  std::map<std::uint32_t, double> offset_ns_;
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
  static constexpr std::array<const char*, static_cast<std::size_t>(HopKernel::count)> kKernels = {
      "front qkv",     "front q",    "attention", "wo_a",         "wo_b",
      "attention sum", "statistics", "experts",   "experts' sum", "begin"};
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
           stamp.kernel / 16 == static_cast<std::uint32_t>(about.layer) &&
           stamp.kernel % 16 < kKernels.size() && clock.knows(stamp.multiprocessor);
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
      if (!shown(stamp) || stamp.kernel % 16 != kernel) continue;
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
  host::append_field(out, "what", about.what);
  out += ", ";
  host::append_field(out, "model", about.model);
  out += ", ";
  host::append_field(out, "schedule", about.schedule);
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
