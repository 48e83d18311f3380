// host/nvidia/fused_step.hpp: steps and drafts of a whole model by the fused kernels: a chain of
// launches that overlap (fused/layer.hpp), and the kernels of layers that own or select compressed
// keys, or have n-gram memory, beside it. Where a shape has no instances the resident schedule
// (step.hpp) serves it.
#pragma once

#include <memory>
#include <string>

#include "host/nvidia/exchange_region.hpp"
#include "host/nvidia/step.hpp"
#include "lowlat/kernels.h"
#include "persistent/weights.hpp"
#include "shape/runtime_shape.hpp"

namespace lowlat::host::cuda {

class FusedStep {
 public:
  // Every reason why the fused kernels do not serve a model on a device, in one line; "" where they
  // do. The same on every rank, where their devices are alike. Not of a model for proposals.
  static std::string refusal(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                             int device);
  // The same of the layers of its draft alone.
  static std::string draft_refusal(const lowlat_model_config& config);
  // The first exchange of a launch of a model without n-gram memory.
  static int first_index();
  // The model whose layers are the stages of a draft, of which this runs hosted drafts alone.
  static lowlat_model_config of_stages(lowlat_model_config config);
  // Packets of a box of the region's fused set.
  static std::int64_t box_packets(const lowlat_model_config& config,
                                  const shape::RuntimeShape& shape);

  // Of a model without a refusal, on the region's device, whose peers are open; pointers of the
  // weights are the device's. `resident`: of the same model; a step's features go to its buffers,
  // and what a draft has no fused kernels for is its launches. It outlives this. `kernel`: the
  // catalogue's line. Allocates everything and loads every kernel.
  // Throws LOWLAT_UNSUPPORTED for bf16 weights of wo_a that are no e4m3 values under powers of two.
  FusedStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
            const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools,
            const ExchangeRegion& region, const ResidentStep& resident, std::uint32_t kernel);
  ~FusedStep();
  FusedStep(const FusedStep&) = delete;
  FusedStep& operator=(const FusedStep&) = delete;

  // Whether there are kernels for a step of the model: up to 48 rows, fewer rows a request than the
  // compressors' rings have, and no more entries a request than the selection takes.
  bool serves(const lowlat_step& step) const;
  bool serves(const lowlat_draft& draft) const;
  bool serves(const lowlat_hosted_step& step) const;
  bool serves(const lowlat_hosted_draft& draft) const;
  // A stream that is being captured takes the launches of both branches.
  void launch(const lowlat_step& step, cudaStream_t stream) const;
  void launch(const lowlat_draft& draft, cudaStream_t stream) const;
  void launch(const lowlat_hosted_step& step, cudaStream_t stream) const;
  void launch(const lowlat_hosted_draft& draft, cudaStream_t stream) const;

  // Other caches from the next launch on; nothing that was launched may run.
  void move_pools(const lowlat::persistent::ModelWeights& weights, const lowlat_pools& pools);

  std::uint64_t bytes() const;

 private:
  void load_kernels() const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lowlat::host::cuda
