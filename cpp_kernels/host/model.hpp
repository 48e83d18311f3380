// host/model.hpp: one rank's model behind the C ABI: configuration, tensors, peer memory, resident
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/peer.hpp"
#include "host/worker.hpp"
#include "lowlat/kernels.h"
#include "persistent/rank.hpp"
#include "platform/scalar.hpp"

namespace lowlat::host {

namespace plat = lowlat::scalar::plat;
namespace stages = lowlat::scalar::stages;
namespace persistent = lowlat::scalar::persistent;

// Every reason against a configuration, one a line; "" when there is none.
std::string config_reasons(const lowlat_model_config& config);
// One rank's sizes of a configuration that has no reasons against it.
shape::RuntimeShape runtime_shape(const lowlat_model_config& config);

// A tensor the model needs, and where its address goes.
struct TensorSlot {
  std::string name;
  lowlat_tensor_spec spec;  // name filled in when it is handed out
  std::function<void(void*)> set;
  bool bound = false;
};
// Every tensor of the model; the setters write into `weights`, which must outlive them.
std::vector<TensorSlot> tensor_slots(const lowlat_model_config& config,
                                     const shape::RuntimeShape& shape,
                                     lowlat::persistent::ModelWeights& weights);

// Kernels of this library for the platform, one a line in the order of persistent::KernelId.
const char* catalogue();

class Model {
 public:
  explicit Model(const lowlat_model_config& config);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const lowlat_model_config& config() const { return config_; }
  const std::vector<TensorSlot>& tensors() const { return tensors_; }
  void bind(const char* name, const lowlat_tensor& tensor);
  std::uint64_t own_bytes() const { return region_->bytes() + arena_bytes_; }
  std::uint64_t catalogue_digest() const;

  void peer_export(lowlat_peer_handle& out) const;
  void peer_import(int peer_rank, const lowlat_peer_handle& handle);
  void ready();

  void launch_step(const lowlat_step& step, Schedule schedule);
  void launch_draft(const lowlat_draft& draft, Schedule schedule);
  void launch_accept(const lowlat_accept& accept);
  void synchronize(std::uint64_t budget_ns);

  void read_status(lowlat_status_words& out) const;
  void abort();

 private:
  void check_tables() const;
  void require_ready(const char* call) const;
  void check_step(const lowlat_step& step, Schedule schedule) const;
  void check_draft(const lowlat_draft& draft, Schedule schedule) const;
  void run(const Job& job);

  lowlat_model_config config_;
  lowlat::persistent::ModelWeights weights_{};
  std::vector<TensorSlot> tensors_;
  std::shared_ptr<Region> region_;
  std::vector<std::shared_ptr<Region>> peers_;  // [tp_size], own region included
  std::vector<plat::TaggedWords*> outboxes_;    // [tp_size]
  std::vector<std::uint32_t*> abort_words_;     // [tp_size]
  std::vector<std::byte> arena_;
  std::uint64_t arena_bytes_ = 0;
  persistent::Rank rank_{};
  std::uint32_t plain_epoch_ = 0;
  int last_step_rows_ = 0;  // of the last target step that was launched
  bool ready_ = false;
  std::unique_ptr<Worker> worker_;
};

}  // namespace lowlat::host
