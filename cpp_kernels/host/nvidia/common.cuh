// host/nvidia/common.cuh: what the operations' kernels share: the platform, the block, launches.
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

// Blocks of a grid's second dimension at most.
inline constexpr std::int64_t kMaxGridY = 65535;

// Refuses a size that a launch has no room for: "E is 70000; platform nvidia takes at most 65535".
inline void require_at_most(const DeviceCall& call, const char* symbol, std::int64_t most) {
  require(call.dim(symbol) <= most, std::string(symbol) + " is " +
                                        std::to_string(call.dim(symbol)) +
                                        "; platform nvidia takes at most " + std::to_string(most));
}

// Puts kernel<<<grid, kThreads>>>(arguments) into the call's stream; a grid without blocks is none.
template <class... Parameters, class... Arguments>
void launch(const DeviceCall& call, void (*kernel)(Parameters...), dim3 grid,
            Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  kernel<<<grid, kThreads, 0, call.stream()>>>(
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

// The frequencies of layers with a compressed set, or without, as a kernel's argument.
inline stages::RopeTable rope_table(bool compressed) {
  stages::RopeTable table;
  rope_frequencies(compressed, table.values);
  return table;
}

}  // namespace lowlat::host::cuda
