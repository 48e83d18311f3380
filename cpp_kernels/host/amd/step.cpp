#include "host/amd/step.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "platform/amd_host.hpp"
#include "platform/contract.hpp"
// The platform comes first.
#include "host/amd/geometry.hpp"
#include "host/model.hpp"
#include "host/rope_frequencies.hpp"
#include "persistent/program.hpp"

namespace lowlat::host::hip {
namespace {

namespace persistent = lowlat::amd::persistent;
namespace plat = lowlat::amd::plat;
namespace stages = lowlat::amd::stages;

static_assert(sizeof(persistent::Rank) == amd::kRankBytes);
static_assert(sizeof(persistent::BlockMemory) == amd::kBlockMemoryBytes);

// The parameters of the kernels of host/amd/step.hip; those of head, inject, propose and accept
// have no last one.
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
const T* copied(std::vector<Memory>& pieces, const T* values, std::size_t count) {
  Memory& piece = pieces.emplace_back(MemoryKind::device, count * sizeof(T));
  check(runtime().hipMemcpy(piece.data(), values, count * sizeof(T), kCopyDefault), "hipMemcpy");
  return static_cast<const T*>(piece.data());
}

}  // namespace

std::int64_t step_box_packets(const shape::RuntimeShape& shape) {
  return persistent::Program::box_packets(shape, shape.kMaxRows);
}

struct ResidentStep::State {
  const Module& module;
  int num_blocks = 0;
  const persistent::Rank* rank = nullptr;  // the device's
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
};

ResidentStep::ResidentStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                           const lowlat::persistent::ModelWeights& weights, const Module& module,
                           const ExchangeRegion& region)
    : state_(new State{.module = module, .pieces = {}, .selects = {}}) {
  const OnDevice on(region.device());
  State& s = *state_;
  s.num_blocks = resident_blocks(module, region);
  s.num_draft_stages = shape.kNumDraftStages;
  for (int i = 0; i < shape.kNumLayers; ++i) {
    const lowlat_layer& plan = weights.layers[i].plan;
    s.selects.push_back(plan.ratio > 0 && plan.index_source == i);
  }

  persistent::Rank rank{};
  rank.shape = shape;
  std::vector<persistent::BlockMemory> blocks(static_cast<std::size_t>(s.num_blocks));
  // The buffers, the blocks' own, the blocks' words, and where the sequence stands.
  const auto lay_out = [&](Carver& carve) {
    rank.buffers.lay_out(shape, carve);
    for (persistent::BlockMemory& block : blocks) block.lay_out(shape, carve);
    carve(s.num_blocks, s.arrived);
    carve(1, rank.progress);
  };
  Carver count;
  lay_out(count);
  Memory& arena =
      s.pieces.emplace_back(MemoryKind::device, static_cast<std::size_t>(count.bytes()));
  Carver place(static_cast<std::byte*>(arena.data()));
  lay_out(place);

  rank.blocks = copied(s.pieces, blocks.data(), blocks.size());
  rank.weights = copied(s.pieces, &weights, 1);
  rank.config = copied(s.pieces, &config, 1);
  const persistent::ModelRules rules =
      config.kind == LOWLAT_V4 ? persistent::kV4Rules : persistent::kV41Rules;
  rank.rules = copied(s.pieces, &rules, 1);
  std::vector<plat::TaggedWords*> outboxes;
  std::vector<std::uint32_t*> abort_words;
  for (int r = 0; r < config.tp_size; ++r) {
    outboxes.push_back(static_cast<plat::TaggedWords*>(region.boxes(r)));
    abort_words.push_back(region.abort_word(r));
  }
  rank.port = {copied(s.pieces, outboxes.data(), outboxes.size()),
               {copied(s.pieces, abort_words.data(), abort_words.size()),
                static_cast<stages::StatusWords*>(region.status()), config.tp_rank, config.tp_size,
                config.wait_budget_ns, region.fault_claim()},
               region.box_packets()};
  const RopeFrequencies rope = rope_frequencies(config);
  std::ranges::copy(rope.window, rank.window_rope.values);
  std::ranges::copy(rope.compressed, rank.compressed_rope.values);
  s.rank = copied(s.pieces, &rank, 1);
}

ResidentStep::~ResidentStep() = default;

void ResidentStep::launch(const lowlat_step& step, void* stream) const {
  const State& s = *state_;
  for (int layer = 0; layer < static_cast<int>(s.selects.size()); ++layer) {
    s.launch_layer("lowlat_target_front", step, layer, stream);
    if (s.selects[static_cast<std::size_t>(layer)]) {
      s.launch_layer("lowlat_target_select", step, layer, stream);
    }
    s.launch_layer("lowlat_target_back", step, layer, stream);
  }
  s.launch("lowlat_target_head", step, stream, s.num_blocks);
}

void ResidentStep::launch(const lowlat_draft& draft, void* stream) const {
  const State& s = *state_;
  if (draft.num_inject_rows > 0) s.launch("lowlat_draft_inject", draft, stream, s.num_blocks);
  if (draft.batch_size == 0) return;
  for (int stage = 0; stage < s.num_draft_stages; ++stage) {
    s.launch_layer("lowlat_draft_front", draft, stage, stream);
    s.launch_layer("lowlat_draft_back", draft, stage, stream);
  }
  s.launch("lowlat_draft_propose", draft, stream, s.num_blocks);
}

void ResidentStep::launch(const lowlat_accept& accept, void* stream) const {
  const State& s = *state_;
  s.launch("lowlat_accept_tokens", accept, stream, std::min(accept.batch_size, s.num_blocks));
}

std::uint64_t ResidentStep::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : state_->pieces) bytes += piece.bytes();
  return bytes;
}
int ResidentStep::num_blocks() const { return state_->num_blocks; }

}  // namespace lowlat::host::hip
