// host/nvidia/pool_sequence.cuh: V4's pooled channels of one sequence, for keys of the attention
// and of the index.
#pragma once

#include "host/nvidia/linear.cuh"
#include "stages/pool.hpp"

namespace lowlat::host::cuda {

// One sequence is one step, so no token is older than the step's.
struct NoRing {
  LOWLAT_DEVICE const float* operator()(std::int64_t) const { return nullptr; }
};

// Projections of the call's x, wkv, wgate: fp32 [entries * ratio, layout.width()].
inline float* project_sequence(DeviceCall& call, const stages::PoolLayout& layout) {
  const int hidden = call.size("H");
  const std::int64_t num_rows = call.dim("L") / layout.ratio * layout.ratio;
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), num_rows * hidden);
  float* step = call.scratch<float>(num_rows * layout.width());
  int column = 0;
  for (const char* name : {"wkv", "wgate"}) {
    launch_linear(call, x, static_cast<int>(num_rows), hidden,
                  stages::Bf16Weights{call.in<std::uint16_t>(name), hidden}, layout.half_width(),
                  StoreF32{step + column, layout.width()});
    column += layout.half_width();
  }
  return step;
}

// c fp32 [layout.dim] of entry n, in the block's shared memory. The block calls; syncs at the end.
LOWLAT_DEVICE void pool_entry(float* c, const stages::PoolLayout& layout, const float* step,
                              const float* ape, std::int64_t n,
                              stages::PoolEntry<Block>::Scratch& scratch) {
  const stages::PoolRows<NoRing> rows{step, 0, layout.width(), {}};
  stages::PoolEntry<Block>::run(c, layout, ape, n, rows, 0, layout.dim, scratch);
}

}  // namespace lowlat::host::cuda
