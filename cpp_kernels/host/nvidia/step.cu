#include "host/nvidia/step.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "platform/nvidia.hpp"
// The platform comes first.
#include "host/device_model.hpp"

namespace lowlat::host::cuda {
namespace {

namespace persistent = lowlat::nvidia::persistent;
namespace plat = lowlat::nvidia::plat;
namespace stages = lowlat::nvidia::stages;

constexpr int kThreads = persistent::Block::kNumThreads;

#if LOWLAT_STAMPS
__device__ persistent::HandOffStamp* hand_off_stamps;
#endif

LOWLAT_DEVICE persistent::Grid grid_of(std::uint32_t* arrived) {
  return {
      arrived,
      static_cast<int>(blockIdx.x),
      static_cast<int>(gridDim.x),
#if LOWLAT_STAMPS
      hand_off_stamps,
#endif
  };
}

// A rank that was ended runs nothing more: true when the block may go on.
LOWLAT_DEVICE bool may_run(const persistent::Rank& rank) {
  const stages::FaultPort& fault = rank.port.fault;
  if (plat::load_acquire<plat::Scope::system>(fault.abort_words[fault.tp_rank]) == 0u) return true;
  if (plat::thread_idx() == 0) {
    stages::note_abort(fault, 0, stages::StageId::none, rank.progress->epoch);
  }
  return false;
}

// A step's part between two layers' experts, see Program::target_cut.
struct StepCut {
  persistent::TargetStep step;
  int cut;
};

// A draft's last part, see Program::draft_proposals.
struct ProposalCut {
  lowlat_draft draft;
};

// Blocks that began before an abort was raised meet those that began after it in no hand-off: they
// see the word there.
template <class Call>
__global__ void __launch_bounds__(kThreads, 1)
    resident_kernel(const __grid_constant__ persistent::Rank rank, std::uint32_t* arrived,
                    const __grid_constant__ Call call) {
  const bool ended = plat::block_any(!may_run(rank));
  persistent::Program program(rank, grid_of(arrived));
  if (ended) {
    if constexpr (std::is_same_v<Call, persistent::TargetStep>) program.spoil(call);
    if constexpr (std::is_same_v<Call, StepCut>) program.spoil(call.step);
    return;
  }
  if constexpr (std::is_same_v<Call, persistent::TargetStep>) {
    program.target_step(call);
  } else if constexpr (std::is_same_v<Call, StepCut>) {
    program.target_cut(call.step, call.cut);
  } else if constexpr (std::is_same_v<Call, lowlat_proposal>) {
    program.propose(call);
  } else if constexpr (std::is_same_v<Call, lowlat_draft>) {
    program.draft(call);
  } else if constexpr (std::is_same_v<Call, ProposalCut>) {
    program.draft_proposals(call.draft);
  } else {
    program.accept(call);
  }
}

// Blocks of a rank: all are resident at once, one an SM, the SMs shared among the ranks that have
// this device.
int resident_blocks(const ExchangeRegion& region) {
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, region.device()),
        "cudaDeviceGetAttribute");
  // Asking loads a kernel. The first launch would load it otherwise, and that may wait for the
  // kernels that run on the device, as a peer's that waits for this rank.
  for (const void* kernel : {reinterpret_cast<const void*>(resident_kernel<persistent::TargetStep>),
                             reinterpret_cast<const void*>(resident_kernel<lowlat_proposal>),
                             reinterpret_cast<const void*>(resident_kernel<StepCut>),
                             reinterpret_cast<const void*>(resident_kernel<lowlat_draft>),
                             reinterpret_cast<const void*>(resident_kernel<ProposalCut>),
                             reinterpret_cast<const void*>(resident_kernel<lowlat_accept>)}) {
    int of_sm = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kThreads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    if (of_sm < 1) throw Error(LOWLAT_UNSUPPORTED, "a block of the schedule fits no SM here");
  }
  const int num_blocks = num_sms / region.ranks_on_device();
  if (num_blocks < 1) {
    throw Error(LOWLAT_UNSUPPORTED, std::to_string(region.ranks_on_device()) +
                                        " ranks on one device of " + std::to_string(num_sms) +
                                        " SMs; needed an SM a rank");
  }
  return num_blocks;
}

// The fused region that was built for a rank's experts, in either layout: none of these widths is
// padded in Marlin's tiles.
std::optional<fused::MoeShape> moe_shape(const shape::RuntimeShape& s, std::uint32_t kind) {
  const auto is = [&](int hidden, int experts, int inner, int scale_block) {
    return s.kHidden == hidden && s.kNumExperts == experts && s.kIntermediateLocal == inner &&
           s.kExpertsPerToken == 6 && s.kScaleBlock == scale_block;
  };
  if (kind == LOWLAT_V41 && is(5120, 384, 1152, 32)) return fused::MoeShape::v41_tp2;
  if (kind == LOWLAT_V41 && is(5120, 384, 576, 32)) return fused::MoeShape::v41_tp4;
  if (kind == LOWLAT_V4 && is(4096, 256, 1024, 128)) return fused::MoeShape::v4_tp2;
  if (kind == LOWLAT_V4 && is(4096, 256, 512, 128)) return fused::MoeShape::v4_tp4;
  return std::nullopt;
}
constexpr int kMaxFusedRows = 48;

fused::MoeMatrix matrix(const lowlat::persistent::Fp4Weight& w) { return {w.codes, w.scales}; }
fused::MoeMatrix matrix(const lowlat::persistent::Fp8Weight& w) { return {w.codes, w.scales}; }

template <class T>
const T* copied(std::vector<Memory>& pieces, const T* values, std::size_t count) {
  Memory& piece = pieces.emplace_back(count * sizeof(T));
  check(cudaMemcpy(piece.data(), values, count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<const T*>(piece.data());
}

}  // namespace

#if LOWLAT_STAMPS
void stamp_hand_offs(void* stamps) {
  check(cudaMemcpyToSymbol(hand_off_stamps, &stamps, sizeof stamps), "cudaMemcpyToSymbol");
}
#endif

std::int64_t step_box_packets(const shape::RuntimeShape& shape) {
  return persistent::Program::box_packets(shape, shape.kMaxRows);
}

fused::MoeWeights moe_weights(const lowlat::persistent::LayerWeights& w, int marlin_inner) {
  fused::MoeWeights out = {};
  out.gate = w.gate;
  out.gate_bias = w.gate_bias;
  out.gate_bias_vl = w.gate_bias_vl;
  out.layout = marlin_inner > 0 ? fused::MoeLayout::marlin : fused::MoeLayout::checkpoint;
  out.w1 = matrix(w.w1);
  out.w3 = matrix(w.w3);  // nothing of Marlin's, whose w1 has the rows of both
  out.w2 = matrix(w.w2);
  out.shared_w1 = matrix(w.shared_w1);
  out.shared_w3 = matrix(w.shared_w3);
  out.shared_w2 = matrix(w.shared_w2);
  return out;
}

struct ResidentStep::State {
  int num_blocks = 0;
  persistent::Rank rank{};
  std::uint32_t* arrived = nullptr;
  std::vector<Memory> pieces;
  std::optional<fused::MoeShape> moe;
  void* moe_workspace = nullptr;
  lowlat::persistent::ModelWeights* device_weights = nullptr;
  lowlat::persistent::ModelWeights weights;  // pointers of the device, for the host's launches

  // The experts of a layer, from x to every row's partial.
  void launch_experts(int layer_idx, int num_rows, cudaStream_t stream) const {
    const auto& w = weights.layers[layer_idx];
    const persistent::Buffers& b = rank.buffers;
    const bool hashed = w.plan.hash_gate != 0;
    fused::MoeArgs args{};
    args.rows = num_rows;
    args.routing = hashed ? fused::MoeRouting::table : fused::MoeRouting::gate;
    args.x = b.x;
    args.image_rows = w.gate_bias_vl != nullptr ? b.image_rows : nullptr;
    args.ids = hashed ? b.expert_ids : nullptr;
    args.w = moe_weights(w, weights.marlin_inner);
    args.out = b.partial;
    const stages::FaultPort& fault = rank.port.fault;
    args.fault = {fault.abort_words, fault.status, fault.tp_rank, fault.tp_size, fault.budget_ns};
    args.workspace = moe_workspace;
    check(static_cast<cudaError_t>(fused::launch_moe_region(*moe, args, stream, false)),
          "the experts' launch");
  }

  void launch_target(const persistent::TargetStep& step, int num_rows, bool fused_experts,
                     cudaStream_t stream) const {
    if (!fused_experts) {
      launch(step, stream, num_blocks);
      return;
    }
    const int num_layers = rank.shape.kNumLayers;
    for (int cut = 0; cut <= num_layers; ++cut) {
      if (cut > 0) launch_experts(cut - 1, num_rows, stream);
      launch(StepCut{step, cut}, stream, num_blocks);
    }
  }

  template <class Call>
  void launch(const Call& call, cudaStream_t stream, int blocks) const {
    resident_kernel<Call><<<blocks, kThreads, 0, stream>>>(rank, arrived, call);
    check(cudaGetLastError(), "a step's launch");
  }
};

ResidentStep::ResidentStep(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                           const lowlat::persistent::ModelWeights& weights,
                           const lowlat_pools& pools, const ExchangeRegion& region)
    : state_(std::make_unique<State>()) {
  const OnDevice on(region.device());
  State& s = *state_;
  s.num_blocks = resident_blocks(region);
  const auto zeroed = [&](std::size_t bytes) {
    Memory& piece = s.pieces.emplace_back(bytes);
    check(cudaMemset(piece.data(), 0, piece.bytes()), "cudaMemset");
    return piece.data();
  };
  const auto copy = [&](const auto* values, std::size_t count) {
    return copied(s.pieces, values, count);
  };
  s.rank = lowlat::nvidia::devices::resident_rank(config, shape, weights, pools, region,
                                                  s.num_blocks, zeroed, copy, s.arrived);

  if (region.ranks_on_device() == 1) s.moe = moe_shape(shape, config.kind);
  if (s.moe) {
    s.moe_workspace = s.pieces.emplace_back(fused::moe_workspace_bytes(*s.moe)).data();
    const Stream stream;
    check(
        static_cast<cudaError_t>(fused::moe_workspace_init(*s.moe, s.moe_workspace, stream.get())),
        "the experts' workspace");
    stream.wait();
  }
  // The copy is this step's own, and moves with the pools.
  s.device_weights = const_cast<lowlat::persistent::ModelWeights*>(s.rank.weights);
  move_pools(weights, pools);
}

ResidentStep::~ResidentStep() = default;

bool ResidentStep::has_fused_experts(int num_rows) const {
  return state_->moe.has_value() && num_rows <= kMaxFusedRows;
}

void ResidentStep::launch(const lowlat_step& step, bool fused_experts, cudaStream_t stream) const {
  state_->launch_target({step, {}}, step.num_rows, fused_experts, stream);
}
void ResidentStep::launch(const lowlat_hosted_step& step, bool fused_experts,
                          cudaStream_t stream) const {
  state_->launch_target({{}, step}, step.batch_size * step.tokens_per_request, fused_experts,
                        stream);
}
void ResidentStep::launch(const lowlat_proposal& proposal, cudaStream_t stream) const {
  state_->launch(proposal, stream, state_->num_blocks);
}

void ResidentStep::move_pools(const lowlat::persistent::ModelWeights& weights,
                              const lowlat_pools& pools) {
  State& s = *state_;
  s.weights = weights;
  s.rank.pools = lowlat::nvidia::devices::pools_of(pools);
  check(cudaMemcpy(s.device_weights, &weights, sizeof weights, cudaMemcpyHostToDevice),
        "cudaMemcpy");
}
void ResidentStep::launch(const lowlat_draft& draft, cudaStream_t stream) const {
  state_->launch(draft, stream, state_->num_blocks);
}
void ResidentStep::launch_proposals(const lowlat_draft& draft, cudaStream_t stream) const {
  state_->launch(ProposalCut{draft}, stream, state_->num_blocks);
}
void ResidentStep::launch(const lowlat_accept& accept, cudaStream_t stream) const {
  state_->launch(accept, stream, std::min(accept.batch_size, state_->num_blocks));
}

std::uint64_t ResidentStep::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : state_->pieces) bytes += piece.bytes();
  return bytes;
}
int ResidentStep::num_blocks() const { return state_->num_blocks; }
std::uint16_t* ResidentStep::features() const { return state_->rank.buffers.features; }
float* ResidentStep::logits_local() const { return state_->rank.buffers.logits_local; }

}  // namespace lowlat::host::cuda
