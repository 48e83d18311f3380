// host/model.hpp: one rank's model behind the C ABI: configuration, tensors, checks of calls. What
// is a platform's own (memory, peers, launches) is a class of its own: host/scalar_model.hpp and
// host/nvidia/model.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/error.hpp"
#include "host/worker.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host {

// Every reason against a configuration, one a line; "" when there is none.
std::string config_reasons(const lowlat_model_config& config);
// The same of what a hosted model adds to it.
std::string hosting_reasons(const lowlat_model_config& config, const lowlat_hosting& hosting);
// One rank's sizes of a configuration that has no reasons against it.
shape::RuntimeShape runtime_shape(const lowlat_model_config& config);

// A tensor the model needs, and where its address goes.
struct TensorSlot {
  std::string name;
  lowlat_tensor_spec spec;  // name filled in when it is handed out
  std::function<void(void*)> set;
  bool bound = false;
};
// Every tensor of the model; the setters write into `weights`, which must outlive them. A `hosting`
// of struct_bytes 0 is none.
std::vector<TensorSlot> tensor_slots(const lowlat_model_config& config,
                                     const lowlat_hosting& hosting,
                                     const shape::RuntimeShape& shape,
                                     lowlat::persistent::ModelWeights& weights);

// Rows of a rank's expert as Marlin's tiles have them.
constexpr int marlin_rows(int inner) { return (inner + 63) / 64 * 64; }

inline Error invalid(const std::string& message) { return {LOWLAT_INVALID, message}; }

// A struct of the C ABI is of this library's version.
template <class T>
void require_struct(const T& value, const char* name) {
  if (value.struct_bytes == sizeof(T)) return;
  throw invalid(std::string(name) + ".struct_bytes is " + std::to_string(value.struct_bytes) +
                "; this library's " + name + " has " + std::to_string(sizeof(T)));
}

// Places `count` elements after another, each at a cache line of its own: called once to count and
// once, with the memory's beginning, to place.
class Carver {
 public:
  explicit Carver(std::byte* next = nullptr) : next_(next) {}
  template <class T>
  void operator()(std::int64_t count, T*& member) {
    const std::int64_t bytes =
        (count * static_cast<std::int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
    if (next_ != nullptr) {
      member = reinterpret_cast<T*>(next_);
      next_ += bytes;
    }
    bytes_ += bytes;
  }
  std::int64_t bytes() const { return bytes_; }
  std::byte* next() const { return next_; }

  static constexpr std::int64_t kAlign = 128;

 private:
  std::byte* next_;
  std::int64_t bytes_ = 0;
};

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const lowlat_model_config& config() const { return config_; }
  const std::vector<TensorSlot>& tensors() const { return tensors_; }
  void bind(const char* name, const lowlat_tensor& tensor);
  std::uint64_t catalogue_digest() const;
  // Kernels of this library for the platform, one a line in the order of persistent::KernelId.
  const char* catalogue() const { return catalogue_; }
  virtual std::uint64_t own_bytes() const = 0;

  // Memory of the platform, zeroed, that goes with the model; and copies to and from it.
  virtual void* allocate(lowlat_memory_kind kind, std::uint64_t bytes) = 0;
  virtual void write(void* dst, const void* src, std::uint64_t bytes) = 0;
  virtual void read(void* dst, const void* src, std::uint64_t bytes) const = 0;

  virtual void peer_export(lowlat_peer_handle& out) const = 0;
  void peer_import(int peer_rank, const lowlat_peer_handle& handle);
  void ready();

  void launch_step(const lowlat_step& step, Schedule schedule, void* stream);
  void launch_draft(const lowlat_draft& draft, Schedule schedule, void* stream);
  void launch_accept(const lowlat_accept& accept, void* stream);
  // Of a hosted model.
  void bind_pools(const lowlat_pools& pools);
  void launch_hosted(const lowlat_hosted_step& step, void* stream);
  void launch_hosted(const lowlat_hosted_draft& draft, void* stream);
  void launch_proposal(const lowlat_proposal& proposal, void* stream);
  void synchronize(std::uint64_t budget_ns);

  void read_status(lowlat_status_words& out) const;
  virtual void abort() = 0;

 protected:
  // `reads_arrays`: what a launch points to is host memory, and is looked at before it.
  // `hosting`: NULL for a model that keeps its caches and head.
  Model(const lowlat_model_config& config, const lowlat_hosting* hosting, const char* platform,
        const char* catalogue, bool reads_arrays);

  // Refuses memory that the platform cannot use for a tensor.
  virtual void check_memory(const TensorSlot& slot, const void* data) const = 0;
  virtual void open_peer(int peer_rank, const lowlat_peer_handle& handle) = 0;
  virtual bool has_peer(int rank) const = 0;
  virtual void become_ready() = 0;
  virtual void start_step(const lowlat_step& step, Schedule schedule, void* stream) = 0;
  virtual void start_draft(const lowlat_draft& draft, Schedule schedule, void* stream) = 0;
  virtual void start_accept(const lowlat_accept& accept, void* stream) = 0;
  virtual void start_hosted(const lowlat_hosted_step& step, void* stream) = 0;
  // Of a model with stages, which a platform refuses where it has no such launch.
  virtual void start_hosted(const lowlat_hosted_draft& draft, void* stream) = 0;
  virtual void start_proposal(const lowlat_proposal& proposal, void* stream) = 0;
  // The pools' addresses are in weights(); nothing that was launched runs.
  virtual void move_pools() = 0;
  // True when everything launched has run within the budget.
  virtual bool wait_idle(std::uint64_t budget_ns) = 0;
  virtual bool is_aborted() const = 0;
  virtual bool is_aborted_by_host() const = 0;
  // Of the rank's status words: state 0 while it is healthy.
  virtual lowlat_status_words status() const = 0;

  bool is_ready() const { return ready_; }
  bool is_hosted() const { return hosting_.struct_bytes > 0; }
  bool proposes_only() const { return hosting_.proposals != 0; }
  bool has_hosted_stages() const { return hosting_.stages != 0; }
  // Where the caches end: as configured, or as lowlat_pools_bind said last.
  const lowlat_pools& pools() const { return pools_; }
  std::uint64_t digest() const;
  const shape::RuntimeShape& shape() const { return shape_; }
  const lowlat::persistent::ModelWeights& weights() const { return weights_; }

 private:
  void check_tables() const;
  void check_tensor(const TensorSlot& slot, const lowlat_tensor& tensor) const;
  void require_own(const char* call) const;
  void check_hosted(const lowlat_hosted_step& step) const;
  void check_hosted(const lowlat_hosted_draft& draft) const;
  void require_built(std::int64_t num_rows) const;
  void check_hosted_arrays(const lowlat_hosted_step& step) const;
  void check_proposal(const lowlat_proposal& proposal) const;
  void require_ready(const char* call) const;
  void check_step(const lowlat_step& step, Schedule schedule) const;
  void check_step_arrays(const lowlat_step& step) const;
  void check_draft(const lowlat_draft& draft, Schedule schedule) const;
  void check_inject_arrays(const lowlat_draft& draft) const;
  void check_draft_arrays(const lowlat_draft& draft) const;

  lowlat_model_config config_;
  lowlat_hosting hosting_{};
  lowlat_pools pools_{};
  bool has_pools_ = false;
  const char* platform_;
  const char* catalogue_;
  bool reads_arrays_;
  shape::RuntimeShape shape_{};
  lowlat::persistent::ModelWeights weights_{};
  std::vector<TensorSlot> tensors_;
  int last_step_rows_ = 0;  // of the last target step that was launched
  bool ready_ = false;
};

// A model on the platform that the word names: "scalar", or, in a library with CUDA kernels,
// "nvidia" or "nvidia:N" for device number N, in one with AMD code objects "amd" or "amd:N". Throws
// LOWLAT_UNSUPPORTED for any other. hosting: NULL for a model that keeps its caches and head.
std::unique_ptr<Model> make_model(const char* platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting);

}  // namespace lowlat::host
