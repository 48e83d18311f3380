// host/amd/step.hpp: launches of the resident schedule on the platform amd: K1, K2i and K2 a layer,
// and the device memory that they work in.
#pragma once

#include <memory>

#include "host/amd/exchange_region.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host::hip {

// Packets of a box that hold every exchange of a step or a prompt chunk.
std::int64_t step_box_packets(const shape::RuntimeShape& shape);

// What one rank's launches need; on the region's device. Everything is allocated at the making.
class ResidentStep {
 public:
  // The region's peers are open. The weights' pointers are the device's. module and region outlive
  // it.
  ResidentStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
               const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools,
               const Module& module, const ExchangeRegion& region);
  ~ResidentStep();
  ResidentStep(const ResidentStep&) = delete;
  ResidentStep& operator=(const ResidentStep&) = delete;

  // Launches in one stream, which a stream may capture: the boundary between two is the hand-off.
  void launch(const lowlat_step& step, void* stream) const;
  void launch(const lowlat_hosted_step& step, void* stream) const;
  void launch(const lowlat_draft& draft, void* stream) const;
  void launch(const lowlat_hosted_draft& draft, void* stream) const;
  void launch(const lowlat_proposal& proposal, void* stream) const;
  void launch(const lowlat_accept& accept, void* stream) const;

  // Other caches from the next launch on; nothing that was launched may run.
  void move_pools(const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools);

  std::uint64_t bytes() const;
  int num_blocks() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lowlat::host::hip
