// fused/layer_pooled.hpp: one decoder layer of V4-Flash on one rank as a chain of kernels: a plain
// layer, and beside its attention front the compressor of its pool (ratio 4 and 128) and the index
// that selects from it (ratio 4). Every C++ compiler reads it.
//
// Order      launch_layer_begin, launch_layer_input with the first layer's statistics, then layers
//            0, 1 and on with one branch, then join_layer_branch; capturable, nothing is allocated.
// Branch     what is beside the front runs on a second stream. A kernel there that waits at a gate
//            for one of the chain is launched when all blocks of that one have begun: it could
//            otherwise take the registers of every multiprocessor before the other has its places,
//            and both would wait for each other until their deadline (layer.hpp, "Residency").
#pragma once

#include <cuda_runtime_api.h>

#include "fused/compress.hpp"
#include "fused/index.hpp"
#include "fused/layer.hpp"

namespace lowlat::nvidia::fused {

// One layer. What the launch fills in itself: rows, x, gates, hops and packets of the three structs
// of kernels, qa of the index, and, where there is a pool, extra_done of the plain layer. What the
// kernels hand to each other and to attention may be the same memory in all layers: a layer's
// attention has ended before the next one's begin.
struct PooledLayer {
  PlainLayer plain;  // extra: the pool; extra_idx: ratio 128 the entries, ratio 4 index.entry_slots
  int ratio;         // 0 (no pool), 4 or 128
  int tokens;        // rows of a request
  bool first;        // of the step's layers
  const std::int32_t* slots;  // [T] full slots, -1: padding; the window's are the step's kv_slots
  CompressParams compress;
  PoolParams pool;
  IndexParams index;  // ratio 4
};

// How attention makes sure of the branch: it is launched when the branch has ended; or when the
// branch's last kernel has its place on the device, and waits at a gate. measured: as was fastest,
// behind a selection the first, behind a pool alone the second.
enum class BranchJoin { measured, ended, started };

// The second stream and its events (created without timing), of one capture or one order of
// launches at a time. `fork`: the exchange before the layer has begun, or has ended; `projected`:
// [q_a, kv] has begun.
struct LayerBranch {
  cudaStream_t side;
  cudaEvent_t fork, projected, started, ended;
  BranchJoin join;
};

// As launch_plain_layer. cudaErrorInvalidValue for a ratio that the model has not too.
cudaError_t launch_pooled_layer(const PooledLayer& layer, const LayerStep& step, int layer_idx,
                                const LayerParts& parts, const LayerBranch& branch,
                                cudaStream_t stream);
// After the last layer.
cudaError_t join_layer_branch(const LayerBranch& branch, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
