// host/scalar_model.hpp: a model on the platform scalar: memory of the process, a resident thread a
// rank.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "host/model.hpp"
#include "host/peer.hpp"
#include "platform/scalar.hpp"
// The platform comes before every schedule.
#include "persistent/rank.hpp"

namespace lowlat::host {

class ScalarModel final : public Model {
 public:
  ScalarModel(const lowlat_model_config& config, const lowlat_hosting* hosting);
  ~ScalarModel() override;

  std::uint64_t own_bytes() const override { return region_->bytes() + arena_bytes_; }
  void* allocate(lowlat_memory_kind kind, std::uint64_t bytes) override;
  void write(void* dst, const void* src, std::uint64_t bytes) override;
  void read(void* dst, const void* src, std::uint64_t bytes) const override;
  void peer_export(lowlat_peer_handle& out) const override;
  void abort() override;

 protected:
  void check_memory(const TensorSlot&, const void*) const override {}
  void open_peer(int peer_rank, const lowlat_peer_handle& handle) override;
  bool has_peer(int rank) const override { return peers_[rank] != nullptr; }
  void become_ready() override;
  void start_step(const lowlat_step& step, Schedule schedule, void* stream) override;
  void start_draft(const lowlat_draft& draft, Schedule schedule, void* stream) override;
  void start_accept(const lowlat_accept& accept, void* stream) override;
  void start_hosted(const lowlat_hosted_step& step, void* stream) override;
  void start_hosted(const lowlat_hosted_draft& draft, void* stream) override;
  void start_proposal(const lowlat_proposal& proposal, void* stream) override;
  void move_pools() override;
  bool wait_idle(std::uint64_t budget_ns) override { return worker_->wait_idle(budget_ns); }
  bool is_aborted() const override;
  bool is_aborted_by_host() const override;
  lowlat_status_words status() const override;

 private:
  // Gives the worker a job of a kind, whose part is `what`.
  template <class Part>
  void push(Job::Kind kind, Part Job::* part, const Part& what, void* stream,
            Schedule schedule = Schedule::persistent);
  void run(const Job& job);

  std::shared_ptr<Region> region_;
  std::vector<std::shared_ptr<Region>> peers_;        // [tp_size], own region included
  std::vector<scalar::plat::TaggedWords*> outboxes_;  // [tp_size]
  std::vector<std::uint32_t*> abort_words_;           // [tp_size]
  std::vector<std::byte> arena_;
  std::vector<std::unique_ptr<std::byte[]>> allocated_;
  std::uint64_t arena_bytes_ = 0;
  scalar::persistent::Rank rank_{};
  scalar::persistent::BlockMemory block_{};
  scalar::persistent::Progress progress_{};
  std::uint32_t plain_epoch_ = 0;
  std::unique_ptr<Worker> worker_;
};

}  // namespace lowlat::host
