// fused/layer_beside.cu: launches of what stands beside a layer, see layer_beside.hpp.
#include "fused/layer_beside.hpp"

#include <cuda_runtime.h>

namespace lowlat::nvidia::fused {

Gate beside_done(const BesideLayer& beside) {
  if (beside.index != nullptr) return beside.index->done;
  return beside.pool != nullptr ? beside.pool->done : beside.compress.done;
}

BesideOrder beside_order(BesideOrder order, int num_rows, int ratio, bool selects, bool owns_keys) {
  if (order != BesideOrder::measured) return order;
  if (num_rows > kHopRows) return BesideOrder::q_first;
  if (!selects) return BesideOrder::q_last;
  if (ratio == shape::kOverlapRatio) return BesideOrder::keys_q_end;
  if (ratio == 1) return BesideOrder::q_end;
  return owns_keys ? BesideOrder::query_first : BesideOrder::q_last;
}

cudaError_t launch_beside(const BesideLayer& beside, HopKernel next, BesideOrder order,
                          const std::function<void(HopKernel)>* between, cudaStream_t stream) {
  const IndexParams* const index = beside.index;
  const bool selects = index != nullptr;
  order = beside_order(order, beside.compress.rows.num_rows, beside.compress.ratio, selects,
                       beside.keys);
  const bool query_first = selects && order == BesideOrder::query_first;
  const bool is_last = next == HopKernel::attention;
  cudaError_t error = cudaSuccess;
  const auto run = [&](HopKernel kernel, auto&& launch) {
    if (error != cudaSuccess) return;
    if (between != nullptr && kernel != HopKernel::count) (*between)(kernel);
    error = launch();
  };
  const auto query = [&] {
    run(HopKernel::query, [&] { return launch_index_query(*index, true, stream); });
  };
  const auto pool = [&] {
    run(HopKernel::count, [&] { return launch_compress_pool(*beside.pool, true, stream); });
  };
  const bool pool_end = !selects && beside.pool != nullptr && order == BesideOrder::pool_end;
  if (query_first && !is_last) query();
  if (is_last == (order == BesideOrder::q_first)) {
    run(HopKernel::product,
        [&] { return launch_compress_product(beside.compress, beside.hidden, true, stream); });
    if (beside.keys) {
      run(HopKernel::count, [&] { return launch_compress_key(beside.compress, true, stream); });
    }
    if (beside.pool != nullptr && !pool_end) pool();
    if (selects && !query_first) query();
    if (selects) run(HopKernel::scores, [&] { return launch_index_scores(*index, true, stream); });
  }
  if (pool_end && is_last) pool();
  const bool before_q = order == BesideOrder::q_end || order == BesideOrder::keys_q_end;
  if (!selects || is_last == before_q) return error;
  if (beside.entry_pool != nullptr) {
    run(HopKernel::count, [&] {
      return launch_compress_product(*beside.entry_compress, beside.hidden, true, stream);
    });
    run(HopKernel::count, [&] { return launch_compress_pool(*beside.entry_pool, true, stream); });
  }
  run(HopKernel::select, [&] { return launch_index_select(*index, true, stream); });
  if (index->block_scores != nullptr) {
    run(HopKernel::count, [&] { return launch_index_blocks(*index, true, stream); });
  }
  return error;
}

}  // namespace lowlat::nvidia::fused
