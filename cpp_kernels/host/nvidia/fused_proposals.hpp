// host/nvidia/fused_proposals.hpp: the proposals of a draft for an engine that runs its layers:
// norm, head and the proposals' kernel.
#pragma once

#include <memory>
#include <string>

#include "host/nvidia/exchange_region.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host::cuda {

class FusedProposals {
 public:
  // As FusedStep's. Of a model that is hosted for proposals.
  static std::string refusal(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                             int device);
  static std::int64_t box_packets(const lowlat_model_config& config,
                                  const shape::RuntimeShape& shape);

  // first_index: of its exchanges, as launches of another schedule on the region have it.
  FusedProposals(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                 const lowlat::persistent::ModelWeights& weights, const ExchangeRegion& region,
                 std::uint32_t kernel, int first_index);
  ~FusedProposals();
  FusedProposals(const FusedProposals&) = delete;
  FusedProposals& operator=(const FusedProposals&) = delete;

  bool serves(const lowlat_proposal& proposal) const;
  // Where logits are asked for, those of greedy requests are left alone: no rule reads them.
  void launch(const lowlat_proposal& proposal, cudaStream_t stream) const;

  std::uint64_t bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lowlat::host::cuda
