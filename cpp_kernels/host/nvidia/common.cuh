// host/nvidia/common.cuh: what the operations' kernels share: the platform, launches, and small
// forms of stages by a whole block.
#pragma once

#include <string>
#include <utility>

#include "platform/nvidia.hpp"

#include "host/nvidia/call.hpp"
#include "host/nvidia/rope_tables.hpp"
#include "stages/format.hpp"
#include "stages/rope.hpp"

namespace lowlat::host::cuda {

namespace plat = lowlat::nvidia::plat;
namespace stages = lowlat::nvidia::stages;

inline constexpr int kThreads = 256;
using Block = plat::Block<kThreads>;

// What a block may have beyond the 48 KB that need no asking, on every part since Hopper.
inline constexpr std::size_t kMaxSharedBytes = 227 * 1024;

// Refuses a size that would not fit into a block's shared memory: "H is 90000; platform nvidia
// takes at most 57344".
inline void require_at_most(const DeviceCall& call, const char* symbol, std::int64_t most) {
  require(call.dim(symbol) <= most, std::string(symbol) + " is " +
                                        std::to_string(call.dim(symbol)) +
                                        "; platform nvidia takes at most " + std::to_string(most));
}

// Puts kernel<<<grid, kThreads>>>(arguments) into the call's stream; a grid without blocks is none.
template <class... Parameters, class... Arguments>
void launch(const DeviceCall& call, void (*kernel)(Parameters...), dim3 grid,
            std::size_t shared_bytes, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute");
  }
  kernel<<<grid, kThreads, shared_bytes, call.stream()>>>(
      static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  check(cudaGetLastError(), "a kernel's launch");
}

// Blocks of kThreads threads for a thread an element.
inline unsigned blocks_for(std::int64_t elements) {
  return static_cast<unsigned>((elements + kThreads - 1) / kThreads);
}

// This thread among all of the grid.
LOWLAT_DEVICE std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * kThreads + plat::thread_idx();
}

// out[i] = value of codes[i]. The block calls; syncs at the end.
LOWLAT_DEVICE void expand_row(float* out, const std::uint16_t* codes, int n) {
  for (int i = plat::thread_idx(); i < n; i += kThreads) out[i] = stages::from_bf16(codes[i]);
  plat::block_sync();
}

// The turn at one position, in the block's shared memory. The block calls; syncs at the end.
LOWLAT_DEVICE void make_turn(stages::RopeTurn& out, const RopeFrequencies& table,
                             std::int64_t position, bool inverse = false) {
  const int pair = plat::thread_idx();
  if (pair < stages::kRopePairs) {
    const float angle = static_cast<float>(position) * table.values[pair];
    out.cos[pair] = plat::cos(angle);
    out.sin[pair] = inverse ? -plat::sin(angle) : plat::sin(angle);
  }
  plat::block_sync();
}

}  // namespace lowlat::host::cuda
