// fused/layer_beside.cu: launches of what stands beside a layer, see layer_beside.hpp.
#include "fused/layer_beside.hpp"

#include <cuda_runtime.h>

namespace lowlat::nvidia::fused {

Gate beside_done(const BesideLayer& beside) {
  if (beside.index != nullptr) return beside.index->done;
  return beside.pool != nullptr ? beside.pool->done : beside.compress.done;
}

BesideOrder beside_order(BesideOrder order, int num_rows, int ratio, bool selects) {
  if (order != BesideOrder::measured) return order;
  if (num_rows > kHopRows) {
    if (!selects) return num_rows > 24 ? BesideOrder::pool_end : BesideOrder::q_last;
    if (ratio == shape::kOverlapRatio) {
      return num_rows > 16 ? BesideOrder::entries_q_last : BesideOrder::q_last;
    }
    return num_rows > 16 && num_rows <= 24 ? BesideOrder::q_last : BesideOrder::q_end;
  }
  if (!selects) return BesideOrder::q_last;
  if (ratio == shape::kOverlapRatio) {
    return num_rows > 1 ? BesideOrder::entries_q_last : BesideOrder::entries_query_first;
  }
  return BesideOrder::query_first;
}

namespace {

// The kernels of an order: Q query, K product and key or pool, S scores, E entries, L selection and
// published blocks, P pool alone; q the layer's own.
const char* sequence_of(BesideOrder order) {
  switch (order) {
    case BesideOrder::q_first: return "qKQSEL";
    case BesideOrder::pool_end: return "KqP";
    case BesideOrder::query_first: return "QKSqEL";
    case BesideOrder::q_end:
    case BesideOrder::keys_q_end: return "KQSELq";
    case BesideOrder::entries_q_end: return "KQESLq";
    case BesideOrder::entries_q_last: return "KQESqL";
    case BesideOrder::entries_query_first: return "QKESqL";
    case BesideOrder::q_last:
    case BesideOrder::measured: break;
  }
  return "KQSqEL";
}

}  // namespace

cudaError_t launch_beside(const BesideLayer& beside, HopKernel next, BesideOrder order,
                          const std::function<void(HopKernel)>* between, cudaStream_t stream) {
  const IndexParams* const index = beside.index;
  const bool selects = index != nullptr, pools = beside.pool != nullptr;
  order = beside_order(order, beside.compress.rows.num_rows, beside.compress.ratio, selects);
  if (order == BesideOrder::pool_end && (selects || !pools)) order = BesideOrder::q_last;
  cudaError_t error = cudaSuccess;
  const auto run = [&](HopKernel kernel, auto&& launch) {
    if (error != cudaSuccess) return;
    if (between != nullptr && kernel != HopKernel::count) (*between)(kernel);
    error = launch();
  };
  const auto pool = [&](const PoolParams& params) {
    run(HopKernel::count, [&] { return launch_compress_pool(params, true, stream); });
  };
  const auto launch = [&](char kernel) {
    switch (kernel) {
      case 'K':
        run(HopKernel::product,
            [&] { return launch_compress_product(beside.compress, beside.hidden, true, stream); });
        if (beside.keys) {
          run(HopKernel::count, [&] { return launch_compress_key(beside.compress, true, stream); });
        }
        if (pools && order != BesideOrder::pool_end) pool(*beside.pool);
        return;
      case 'P': pool(*beside.pool); return;
      case 'E':
        if (beside.entry_pool == nullptr) return;
        run(HopKernel::count, [&] {
          return launch_compress_product(*beside.entry_compress, beside.hidden, true, stream);
        });
        pool(*beside.entry_pool);
        return;
      default: break;
    }
    if (!selects) return;
    if (kernel == 'Q') {
      run(HopKernel::query, [&] { return launch_index_query(*index, true, stream); });
    } else if (kernel == 'S') {
      run(HopKernel::scores, [&] { return launch_index_scores(*index, true, stream); });
    } else {
      run(HopKernel::select, [&] { return launch_index_select(*index, true, stream); });
      if (index->block_scores == nullptr) return;
      run(HopKernel::count, [&] { return launch_index_blocks(*index, true, stream); });
    }
  };
  bool behind_q = false;
  for (const char* kernel = sequence_of(order); *kernel != '\0'; ++kernel) {
    if (*kernel == 'q') {
      behind_q = true;
    } else if (behind_q == (next == HopKernel::attention)) {
      launch(*kernel);
    }
  }
  return error;
}

}  // namespace lowlat::nvidia::fused
