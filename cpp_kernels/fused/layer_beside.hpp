// fused/layer_beside.hpp: the kernels that make a layer's compressed keys and select among them,
// in the chain of the layer's own. Every C++ compiler reads it.
//
// Order      one stream, in which each kernel is launched when all blocks of the one before have
//            begun (layer.hpp, "Residency") and waits at gates. Not a second stream: of a kernel's
//            successors in a captured graph the first alone may begin before it has ended; the
//            others begin some 4 us after its end.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "fused/compress.hpp"
#include "fused/exchange_hop.hpp"
#include "fused/index.hpp"

namespace lowlat::nvidia::fused {

// With all of their gates.
struct BesideLayer {
  int hidden;
  CompressParams compress;
  bool keys;               // V4.1: launch_compress_key follows
  const PoolParams* pool;  // V4; or NULL
  // V4, where `compress` and `pool` are of the index's keys alone: of the entries. Or NULL.
  const CompressParams* entry_compress;
  const PoolParams* entry_pool;
  // Of a layer that selects; or NULL. launch_index_blocks follows where it has block_scores.
  const IndexParams* index;
};

// The kernels between [q_a, kv], of many rows the latent, and attention: q, the keys' (product, key
// or pool), the index's query, scores and selection. Where entries are named, keys are those of
// ratio 4's index alone.
enum class BesideOrder {
  measured,
  q_first,              // q, keys, query, scores, selection
  q_last,               // keys, query, scores, q, selection
  pool_end,             // of ratio 128: product, q, pool; else q_last
  query_first,          // query, keys, scores, q, selection
  q_end,                // keys, query, scores, selection, q
  keys_q_end,           // keys, query, scores, entries, selection, q
  entries_q_end,        // keys, query, entries, scores, selection, q
  entries_q_last,       // keys, query, entries, scores, q, selection
  entries_query_first,  // query, keys, entries, scores, q, selection
};
// Whether ratio 4's entries have kernels of their own.
constexpr bool beside_splits(BesideOrder order) { return order >= BesideOrder::keys_q_end; }
// What `measured` stands for.
BesideOrder beside_order(BesideOrder order, int num_rows, int ratio, bool selects);

// What attention waits for.
Gate beside_done(const BesideLayer& beside);

// Launches what comes before the layer's kernel `next`, q or attention; `between` (or NULL) is
// called before each kernel that has a HopKernel. Capturable.
cudaError_t launch_beside(const BesideLayer& beside, HopKernel next, BesideOrder order,
                          const std::function<void(HopKernel)>* between, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
