// fused/layer_pooled.cu: launches of V4's layers, see layer_pooled.hpp.
#include "fused/layer_pooled.hpp"

#include <cuda_runtime.h>

#include <optional>

namespace lowlat::nvidia::fused {
namespace {

enum BranchGate {
  gate_product = kLayerFreeGate,
  gate_pool,
  gate_query,
  gate_scores,
  gate_select,
};
static_assert(gate_select < kLayerExchanged);

// The kernels of a layer's branch, which ends with `done`.
class Branch {
 public:
  Branch(const PooledLayer& layer, const LayerStep& step, int layer_idx, const LayerBranch& branch)
      : step_(step),
        layer_idx_(layer_idx),
        branch_(branch),
        ratio_(layer.ratio),
        first_(layer.first) {
    const StepRows rows = {step.num_rows, layer.tokens, step.positions, layer.slots};
    compress_ = layer.compress;
    compress_.rows = rows;
    compress_.ratio = ratio_;
    compress_.x = step.memory.x;
    const Hop hop = {step.memory.port, 2 * layer_idx, kernel_place(layer_idx)};
    compress_.hop = hop;
    compress_.x_done = layer_x_gate(step, layer_idx);
    compress_.product_done = gate(gate_product, compress_product_blocks(compress_));
    pool_ = layer.pool;
    pool_.rows = rows;
    pool_.ratio = ratio_;
    pool_.partial = compress_.partial;
    pool_.width = compress_width(compress_);
    pool_.product_done = compress_.product_done;
    pool_.done = gate(gate_pool, compress_pool_blocks(step.num_rows, ratio_));
    if (!selects()) return;
    index_ = layer.index;
    index_.format = IndexFormat::fp8;
    index_.rows = rows;
    index_.ratio = ratio_;
    index_.head_sums = compress_.partial + pool_.width - shape::Dsv4Flash<1>::kIndexHeads;
    index_.head_stride = pool_.width;
    index_.new_keys = true;
    index_.packets = step.memory.packets;
    if (step.num_rows <= kHopRows) index_.hop = hop;
    index_.x_index = 2 * layer_idx - 1;
    set_index_latent(step.memory, FusedModel::v4, step.num_rows, layer_idx, &index_);
    index_.heads_done = compress_.product_done;
    index_.keys_done = pool_.done;
    index_.query_done = gate(gate_query, kIndexQueryBlocks);
    index_.scores_done = gate(gate_scores, index_score_blocks(IndexFormat::fp8));
    index_.done = gate(gate_select, index_select_blocks(index_));
  }

  Gate done() const { return selects() ? index_.done : pool_.done; }

  // Before [q_a, kv] is launched. Ratio 128's product of many rows takes too much from the end of
  // the exchange, as measured, and begins when that is over.
  cudaError_t begin(cudaStream_t stream) const {
    const auto side = branch_.side;
    const bool early = !first_ && (selects() || step_.num_rows <= kHopRows);
    return run_all(
        [&] { return early ? cudaSuccess : cudaEventRecord(branch_.fork, stream); },
        [&] { return cudaStreamWaitEvent(side, branch_.fork); },
        [&] {
          return launch_compress_product(compress_, shape::Dsv4Flash<1>::kHidden, false, side);
        },
        [&] { return launch_compress_pool(pool_, true, side, selects() ? nullptr : started()); });
  }

  // Before attention is launched, which waits for what this leaves.
  cudaError_t end(cudaStream_t stream) const {
    const auto side = branch_.side;
    cudaError_t error = cudaSuccess;
    if (selects()) {
      error = run_all([&] { return cudaStreamWaitEvent(side, branch_.projected); },
                      [&] { return launch_index_query(index_, true, side); },
                      [&] { return launch_index_scores(index_, true, side); },
                      [&] { return launch_index_select(index_, true, side, started()); });
    }
    if (error == cudaSuccess && started() == nullptr) error = cudaEventRecord(branch_.ended, side);
    if (error != cudaSuccess) return error;
    return cudaStreamWaitEvent(stream, started() == nullptr ? branch_.ended : branch_.started);
  }

  // Recorded when the last kernel of the branch has begun; NULL: attention waits for its end.
  cudaEvent_t started() const {
    const bool waits =
        branch_.join == BranchJoin::started || (branch_.join == BranchJoin::measured && !selects());
    return waits ? branch_.started : nullptr;
  }

 private:
  // One after another, as long as they succeed.
  template <class... Calls>
  static cudaError_t run_all(const Calls&... calls) {
    cudaError_t error = cudaSuccess;
    static_cast<void>((((error = calls()) == cudaSuccess) && ...));
    return error;
  }
  bool selects() const { return ratio_ == shape::kOverlapRatio; }
  Gate gate(int number, std::uint32_t blocks) const {
    return layer_gate(step_.memory, layer_idx_, number, blocks);
  }

  const LayerStep& step_;
  int layer_idx_;
  const LayerBranch& branch_;
  int ratio_;
  bool first_;
  CompressParams compress_ = {};
  PoolParams pool_ = {};
  IndexParams index_ = {};
};

}  // namespace

cudaError_t launch_pooled_layer(const PooledLayer& layer, const LayerStep& step, int layer_idx,
                                const LayerParts& parts, const LayerBranch& branch,
                                cudaStream_t stream) {
  const bool has_pool = layer.ratio != 0;
  if (has_pool && layer.ratio != shape::kOverlapRatio && layer.ratio != shape::kBlockRatio) {
    return cudaErrorInvalidValue;
  }
  cudaError_t error = cudaSuccess;
  PlainLayer plain = layer.plain;
  LayerParts own_parts = parts;
  std::optional<Branch> beside;
  if (has_pool) {
    beside.emplace(layer, step, layer_idx, branch);
    if (beside->started() != nullptr) {
      plain.extra_done = beside->done();
    } else {
      plain.extra_ends = true;
    }
    if (layer.ratio == shape::kOverlapRatio) plain.extra_idx = layer.index.entry_slots;
  }
  const std::function<void(HopKernel)> between = [&](HopKernel kernel) {
    if (error == cudaSuccess && beside) {
      if (kernel == HopKernel::qkv) error = beside->begin(stream);
      if (kernel == HopKernel::attention) error = beside->end(stream);
    }
    if (parts.between != nullptr) (*parts.between)(kernel);
  };
  own_parts.between = &between;
  if (layer.ratio == shape::kOverlapRatio) own_parts.qkv_started = branch.projected;
  own_parts.last_started = branch.fork;
  const cudaError_t result = launch_plain_layer(plain, step, layer_idx, own_parts, stream);
  return error == cudaSuccess ? result : error;
}

cudaError_t join_layer_branch(const LayerBranch& branch, cudaStream_t stream) {
  // From here, so that also where no layer had a branch a capture has one stream again.
  cudaError_t error = cudaEventRecord(branch.fork, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(branch.side, branch.fork);
  if (error == cudaSuccess) error = cudaEventRecord(branch.ended, branch.side);
  return error == cudaSuccess ? cudaStreamWaitEvent(stream, branch.ended) : error;
}

}  // namespace lowlat::nvidia::fused
