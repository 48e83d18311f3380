// fused/layer_pooled.hpp: one decoder layer of V4-Flash on one rank as a chain of kernels: a plain
// layer with the compressor of its pool (ratio 4 and 128) and the index that selects from it
// (ratio 4). Every C++ compiler reads it.
//
// Order      launch_layer_begin, launch_layer_input with the first layer's statistics, then layers
//            0, 1 and on, on one stream; capturable, nothing is allocated.
#pragma once

#include <cuda_runtime_api.h>

#include "fused/layer.hpp"

namespace lowlat::nvidia::fused {

// One layer. What the launch fills in itself: rows, x, gates, hops and packets of the three structs
// of kernels, qa of the index, and the plain layer's `beside`. What the kernels hand to each other
// and to attention may be the same memory in all layers: a layer's attention has ended before the
// next one's write.
struct PooledLayer {
  PlainLayer plain;  // extra: the pool; extra_idx: ratio 128 the entries, ratio 4 index.entry_slots
  int ratio;         // 0 (no pool), 4 or 128
  int tokens;        // rows of a request
  const std::int32_t* slots;  // [T] full slots, -1: padding; the window's are the step's kv_slots
  CompressParams compress;
  PoolParams pool;
  IndexParams index;  // ratio 4
};

// As launch_plain_layer. cudaErrorInvalidValue for a ratio that the model has not too.
cudaError_t launch_pooled_layer(const PooledLayer& layer, const LayerStep& step, int layer_idx,
                                const LayerParts& parts, cudaStream_t stream);

}  // namespace lowlat::nvidia::fused
