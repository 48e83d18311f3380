// fused/stamps.hpp: when each block of a kernel was where, for builds with LOWLAT_STAMPS=1 (others
// write none). Every C++ compiler reads it.
//
// A block's stages follow each other: stage n lasts from `begin` to `end`, ticks of its
// multiprocessor's clock (clock64), and begins where the one before ended. Stage `align` is no
// stage: its `begin` is the device's clock in nanoseconds (globaltimer) and its `end` the
// multiprocessor's at the same moment; with those of all blocks of a multiprocessor a reader brings
// the clocks together (globaltimer moves in steps, so the latest of its values that fits all is
// right). A stage that a block did not pass keeps its zeros.
#pragma once

#include <cstdint>

namespace lowlat::nvidia::fused {

enum class StampStage : std::uint32_t {
  align = 0,
  ask = 1,      // weights are asked for, tables made
  wait = 2,     // for the kernel before, or for other ranks
  read = 3,     // activations to registers or shared memory, norms, codes
  compute = 4,  // products; of attention: scores, softmax and values
  sum = 5,      // sums of warps and of a cluster's blocks
  store = 6,    // results on their way
  count = 8
};

struct Stamp {
  std::uint32_t kernel;  // kernel_place() of the layer, plus HopKernel
  std::uint32_t stage;   // StampStage
  std::uint32_t block;   // x + y * gridDim.x + z * gridDim.x * gridDim.y
  std::uint32_t multiprocessor;
  std::uint64_t begin, end;
};
static_assert(sizeof(Stamp) == 32);

// Device memory: stamps [kernels][kStampBlocks][StampStage::count], zeroed before a step. Kernels
// of a number from `kernels` on, and blocks from kStampBlocks on, write none.
inline constexpr std::uint32_t kStampBlocks = 512;
struct StampSink {
  Stamp* stamps;
  std::uint32_t kernels;
};

}  // namespace lowlat::nvidia::fused
