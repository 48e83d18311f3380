// host/nvidia/step.hpp: launches of the resident schedule: one kernel a step, a draft or an
// acceptance, and the device memory that they work in. Where the experts of a model have a fused
// region, a step may be cut at them.
#pragma once

#include <memory>

#include "fused/moe.hpp"
#include "host/nvidia/exchange_region.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host::cuda {

// Packets of a box that hold every exchange of a step or a prompt chunk.
std::int64_t step_box_packets(const shape::RuntimeShape& shape);

#if LOWLAT_STAMPS
// Where resident kernels leave their stamps from now on: device memory, zeroed, of
// persistent::kStampedHandOffs rows of a HandOffStamp a block; NULL: nowhere.
void stamp_hand_offs(void* stamps);
#endif

// A layer's experts for the fused regions; marlin_inner as of its ModelWeights. Marlin's tiles must
// need no padding: a rank's expert width is a multiple of 64.
lowlat::fused::MoeWeights moe_weights(const lowlat::persistent::LayerWeights& w, int marlin_inner);

// What one rank's launches need; on the region's device. Everything is allocated at the making.
class ResidentStep {
 public:
  // The region's peers are open. The weights' pointers are the device's.
  ResidentStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
               const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools,
               const ExchangeRegion& region);
  ~ResidentStep();
  ResidentStep(const ResidentStep&) = delete;
  ResidentStep& operator=(const ResidentStep&) = delete;

  // Each is one launch, which a stream may capture; a step with fused experts two a layer.
  void launch(const lowlat_step& step, bool fused_experts, cudaStream_t stream) const;
  void launch(const lowlat_hosted_step& step, bool fused_experts, cudaStream_t stream) const;
  void launch(const lowlat_draft& draft, cudaStream_t stream) const;
  void launch(const lowlat_proposal& proposal, cudaStream_t stream) const;
  void launch(const lowlat_accept& accept, cudaStream_t stream) const;
  // The proposals of a draft whose logits are in logits_local().
  void launch_proposals(const lowlat_draft& draft, cudaStream_t stream) const;

  // Other caches from the next launch on; nothing that was launched may run.
  void move_pools(const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools);

  std::uint64_t bytes() const;
  int num_blocks() const;
  // Of the last target step, bf16 [max_rows, num_draft_stages, hidden], for who runs one instead.
  std::uint16_t* features() const;
  // Of the rows that are proposed for, fp32 [max_rows, vocab_local], likewise.
  float* logits_local() const;
  // Whether there is a fused region for these experts and for as many rows. It takes every SM, so
  // not where ranks share the device.
  bool has_fused_experts(int num_rows) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lowlat::host::cuda
