#include "host/amd/step.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "platform/amd_host.hpp"
#include "platform/contract.hpp"
// The platform comes first.
#include "host/amd/geometry.hpp"
#include "host/device_model.hpp"

namespace lowlat::host::hip {
namespace {

namespace persistent = lowlat::amd::persistent;

static_assert(sizeof(persistent::Rank) == amd::kRankBytes);
static_assert(sizeof(persistent::BlockMemory) == amd::kBlockMemoryBytes);

// The parameters of the kernels of host/amd/step.hip; those of head, inject, leave, propose and
// accept have no last one. A layer's call is a persistent::TargetStep or DraftStep.
template <class Call>
struct Parameters {
  const persistent::Rank* rank;
  std::uint32_t* arrived;
  std::int32_t num_blocks;
  Call call;
};
template <class Call>
struct LayerParameters {
  const persistent::Rank* rank;
  std::uint32_t* arrived;
  std::int32_t num_blocks;
  Call call;
  std::int32_t layer;
};

// Blocks of a rank: all are resident at once, one a compute unit, the units shared among the ranks
// that have this device.
int resident_blocks(const Module& module, const ExchangeRegion& region) {
  const Runtime& hip = runtime();
  int num_units = 0;
  check(hip.hipDeviceGetAttribute(&num_units, kMultiprocessorCount, region.device()),
        "hipDeviceGetAttribute");
  for (const amd::KernelPlan& plan : amd::kKernelPlans) {
    int of_unit = 0;
    check(hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
              &of_unit, module.function(plan.name), amd::kBlockThreads, 0),
          "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor");
    if (of_unit < amd::kBlocksPerUnit) {
      throw Error(LOWLAT_UNSUPPORTED,
                  std::string("a block of ") + plan.name + " fits no compute unit here");
    }
  }
  const int num_blocks = num_units * amd::kBlocksPerUnit / region.ranks_on_device();
  if (num_blocks < 1) {
    throw Error(LOWLAT_UNSUPPORTED, std::to_string(region.ranks_on_device()) +
                                        " ranks on one device of " + std::to_string(num_units) +
                                        " compute units; needed a unit a rank");
  }
  return num_blocks;
}

template <class T>
void put(void* where, const T* values, std::size_t count) {
  check(runtime().hipMemcpy(where, values, count * sizeof(T), kCopyDefault), "hipMemcpy");
}
template <class T>
T* copied(std::vector<Memory>& pieces, const T* values, std::size_t count) {
  Memory& piece = pieces.emplace_back(MemoryKind::device, count * sizeof(T));
  put(piece.data(), values, count);
  return static_cast<T*>(piece.data());
}

}  // namespace

std::int64_t step_box_packets(const shape::RuntimeShape& shape) {
  return persistent::Program::box_packets(shape, shape.kMaxRows);
}

struct ResidentStep::State {
  const Module& module;
  int num_blocks = 0;
  persistent::Rank rank_values{};
  persistent::Rank* rank = nullptr;  // the same, the device's
  std::uint32_t* arrived = nullptr;
  std::vector<Memory> pieces;
  std::vector<bool> selects;  // of each target layer
  int num_draft_stages = 0;

  template <class Call>
  void launch(const char* kernel, const Call& call, void* stream, int blocks) const {
    Parameters<Call> parameters{rank, arrived, blocks, call};
    module.launch(kernel, blocks, parameters, stream);
  }
  template <class Call>
  void launch_layer(const char* kernel, const Call& call, int layer, void* stream) const {
    LayerParameters<Call> parameters{rank, arrived, num_blocks, call, layer};
    module.launch(kernel, num_blocks, parameters, stream);
  }
  void launch_target(const persistent::TargetStep& step, void* stream) const;
  void launch_stages(const persistent::DraftStep& step, void* stream) const;
};

void ResidentStep::State::launch_target(const persistent::TargetStep& step, void* stream) const {
  for (int layer = 0; layer < static_cast<int>(selects.size()); ++layer) {
    launch_layer("lowlat_target_front", step, layer, stream);
    if (selects[static_cast<std::size_t>(layer)]) {
      launch_layer("lowlat_target_select", step, layer, stream);
    }
    launch_layer("lowlat_target_back", step, layer, stream);
  }
  launch("lowlat_target_head", step, stream, num_blocks);
}

void ResidentStep::State::launch_stages(const persistent::DraftStep& step, void* stream) const {
  for (int stage = 0; stage < num_draft_stages; ++stage) {
    launch_layer("lowlat_draft_front", step, stage, stream);
    launch_layer("lowlat_draft_back", step, stage, stream);
  }
}

ResidentStep::ResidentStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                           const lowlat::persistent::ModelWeights& weights,
                           const lowlat_pools& pools, const Module& module,
                           const ExchangeRegion& region)
    : state_(new State{.module = module, .rank_values = {}, .pieces = {}, .selects = {}}) {
  const OnDevice on(region.device());
  State& s = *state_;
  s.num_blocks = resident_blocks(module, region);
  s.num_draft_stages = shape.kNumDraftStages;
  for (int i = 0; i < shape.kNumLayers; ++i) {
    const lowlat_layer& plan = weights.layers[i].plan;
    s.selects.push_back(plan.ratio > 0 && plan.index_source == i);
  }

  const auto zeroed = [&](std::size_t bytes) {
    return s.pieces.emplace_back(MemoryKind::device, bytes).data();
  };
  const auto copy = [&](const auto* values, std::size_t count) {
    return copied(s.pieces, values, count);
  };
  s.rank_values = lowlat::amd::devices::resident_rank(config, shape, weights, pools, region,
                                                      s.num_blocks, zeroed, copy, s.arrived);
  s.rank = copied(s.pieces, &s.rank_values, 1);
}

ResidentStep::~ResidentStep() = default;

void ResidentStep::launch(const lowlat_step& step, void* stream) const {
  state_->launch_target({step, {}}, stream);
}
void ResidentStep::launch(const lowlat_hosted_step& step, void* stream) const {
  state_->launch_target({{}, step}, stream);
}
void ResidentStep::launch(const lowlat_proposal& proposal, void* stream) const {
  state_->launch("lowlat_propose", proposal, stream, state_->num_blocks);
}

void ResidentStep::launch(const lowlat_draft& draft, void* stream) const {
  const State& s = *state_;
  if (draft.num_inject_rows > 0) s.launch("lowlat_draft_inject", draft, stream, s.num_blocks);
  if (draft.batch_size == 0) return;
  s.launch_stages({draft, {}}, stream);
  s.launch("lowlat_draft_propose", draft, stream, s.num_blocks);
}
void ResidentStep::launch(const lowlat_hosted_draft& draft, void* stream) const {
  state_->launch_stages({{}, draft}, stream);
  state_->launch("lowlat_draft_leave", draft, stream, state_->num_blocks);
}

void ResidentStep::launch(const lowlat_accept& accept, void* stream) const {
  const State& s = *state_;
  s.launch("lowlat_accept_tokens", accept, stream, std::min(accept.batch_size, s.num_blocks));
}

void ResidentStep::move_pools(const lowlat::persistent::ModelWeights& weights,
                              const lowlat_pools& pools) {
  State& s = *state_;
  s.rank_values.pools = lowlat::amd::devices::pools_of(pools);
  // The copy of the weights' places is this step's own, and has the pools' among them.
  put(const_cast<lowlat::persistent::ModelWeights*>(s.rank_values.weights), &weights, 1);
  put(s.rank, &s.rank_values, 1);
}

std::uint64_t ResidentStep::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : state_->pieces) bytes += piece.bytes();
  return bytes;
}
int ResidentStep::num_blocks() const { return state_->num_blocks; }

}  // namespace lowlat::host::hip
