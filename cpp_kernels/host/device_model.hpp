// host/device_model.hpp: what models on devices share, whatever the vendor: which device a word
// names, the status words that a kernel leaves, what a rank's region answers for its model, and the
// memory of one rank's resident schedule. Included after a platform.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before this file"
#endif

#include <algorithm>
#include <atomic>
#include <charconv>
#include <memory>
#include <string>
#include <vector>

#include "host/model.hpp"
#include "host/rope_frequencies.hpp"
#include "persistent/program.hpp"

namespace lowlat::LOWLAT_PLATFORM::devices {

// "vendor:2" names its device; "vendor" takes the rank's of count() devices.
template <class Count>
int device_number(const std::string& platform, int tp_rank, Count count) {
  const std::size_t colon = platform.find(':');
  if (colon == std::string::npos) {
    const int num_devices = count();
    return num_devices > 0 ? tp_rank % num_devices : 0;
  }
  int device = -1;
  const char* end = platform.data() + platform.size();
  const auto read = std::from_chars(platform.data() + colon + 1, end, device);
  if (read.ec == std::errc{} && read.ptr == end && device >= 0) return device;
  const std::string vendor = platform.substr(0, colon);
  throw host::invalid("platform is \"" + platform + "\"; needed " + vendor + " or " + vendor +
                      ":N, N a device's number");
}

// Of memory that a device writes, so no load may be kept from an earlier look: the state first, the
// rest after it.
inline lowlat_status_words status_of(const stages::StatusWords* words) {
  const std::uint32_t state = __atomic_load_n(&words->state, __ATOMIC_ACQUIRE);
  lowlat_status_words out{};
  out.struct_bytes = sizeof out;
  out.peer = -1;
  if (state == 0u) return out;
  out.state = state;
  out.kernel = words->kernel;
  out.stage = words->stage;
  out.peer = words->peer;
  out.epoch = words->epoch;
  return out;
}

// A model of one device, whose peers, faults and abort are its region's.
template <class Region>
class DeviceModel : public host::Model {
 public:
  void peer_export(lowlat_peer_handle& out) const override { out = region_->handle(); }

  void abort() override {
    aborted_.store(true, std::memory_order_relaxed);  // orders nothing: only ever read as a word
    region_->abort();
  }

 protected:
  DeviceModel(const lowlat_model_config& config, const lowlat_hosting* hosting,
              const char* platform, const char* catalogue, int device)
      : Model(config, hosting, platform, catalogue, false), device_(device) {}

  // For a destructor: work that still runs must end before its memory goes; its peers end with it.
  void end_work() {
    try {
      if (!wait_idle(0)) {
        abort();
        wait_idle(2 * config().wait_budget_ns + 1'000'000'000);
      }
    } catch (const host::Error&) {
      // The device is lost; what follows frees what it can.
    }
  }

  // other_device: whose memory a tensor lies in, -1 for the host's.
  host::Error misplaced(const host::TensorSlot& slot, int other_device) const {
    const std::string seen =
        other_device < 0 ? "host memory" : "memory of device " + std::to_string(other_device);
    return host::invalid("tensor " + slot.name + ": data is " + seen +
                         "; this rank needs memory of device " + std::to_string(device_) +
                         " (lowlat_model_alloc)");
  }

  void open_peer(int peer_rank, const lowlat_peer_handle& handle) override {
    region_->open(peer_rank, handle);
    region_->probe(peer_rank);
  }
  bool has_peer(int rank) const override { return region_->is_open(rank); }
  bool is_aborted() const override { return aborted_.load(std::memory_order_relaxed); }
  bool is_aborted_by_host() const override { return is_aborted(); }
  lowlat_status_words status() const override {
    return status_of(static_cast<const stages::StatusWords*>(region_->status()));
  }

  int device_;
  std::unique_ptr<Region> region_;

 private:
  std::atomic<bool> aborted_{false};
};

// Where the caches end, as kernels read it.
inline persistent::Pools pools_of(const lowlat_pools& pools) {
  return {pools.num_pages, pools.num_window_pages, pools.num_requests, pools.window_slots,
          pools.history};
}

// A rank as kernels read it. zeroed(bytes) gives device memory, copied(values, count) a copy there;
// both outlive the rank. The region's peers are open. out_arrived: the blocks' words of the
// hand-offs.
template <class Region, class Zeroed, class Copied>
persistent::Rank resident_rank(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                               const lowlat::persistent::ModelWeights& weights,
                               const lowlat_pools& pools, const Region& region, int num_blocks,
                               Zeroed zeroed, Copied copied, std::uint32_t*& out_arrived) {
  persistent::Rank rank{};
  rank.shape = shape;
  std::vector<persistent::BlockMemory> blocks(static_cast<std::size_t>(num_blocks));
  // Behind the buffers: the blocks' words, and where the sequence stands.
  const auto lay_out = [&](host::Carver& carve) {
    rank.buffers.lay_out(shape, carve);
    for (persistent::BlockMemory& block : blocks) block.lay_out(shape, carve);
    carve(num_blocks, out_arrived);
    carve(1, rank.progress);
  };
  host::Carver count;
  lay_out(count);
  host::Carver place(static_cast<std::byte*>(zeroed(static_cast<std::size_t>(count.bytes()))));
  lay_out(place);
  if (place.bytes() != count.bytes())
    throw host::Error(LOWLAT_BUG, "buffers are laid out in two ways");

  rank.blocks = copied(blocks.data(), blocks.size());
  rank.weights = copied(&weights, std::size_t{1});
  rank.config = copied(&config, std::size_t{1});
  rank.pools = pools_of(pools);
  const persistent::ModelRules rules =
      config.kind == LOWLAT_V4 ? persistent::kV4Rules : persistent::kV41Rules;
  rank.rules = copied(&rules, std::size_t{1});
  std::vector<plat::TaggedWords*> outboxes;
  std::vector<std::uint32_t*> abort_words;
  for (int r = 0; r < config.tp_size; ++r) {
    outboxes.push_back(static_cast<plat::TaggedWords*>(region.boxes(r)));
    abort_words.push_back(region.abort_word(r));
  }
  rank.port = {copied(outboxes.data(), outboxes.size()),
               {copied(abort_words.data(), abort_words.size()),
                static_cast<stages::StatusWords*>(region.status()), config.tp_rank, config.tp_size,
                config.wait_budget_ns, region.fault_claim()},
               region.box_packets()};
  const host::RopeFrequencies rope = host::rope_frequencies(config);
  std::ranges::copy(rope.window, rank.window_rope.values);
  std::ranges::copy(rope.compressed, rank.compressed_rope.values);
  return rank;
}

}  // namespace lowlat::LOWLAT_PLATFORM::devices
