// fused/stamps.cuh: a block's stages, by one of its threads; see stamps.hpp. Nothing is left of it
// in builds without LOWLAT_STAMPS=1.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/stamps.hpp"

#ifndef LOWLAT_STAMPS
#define LOWLAT_STAMPS 0
#endif

namespace lowlat::nvidia::fused {

// All threads may call; one writes, the block's first or that of a team with stages of its own.
// Stores alone: no thread waits for one.
class Stamps {
 public:
  LOWLAT_DEVICE Stamps(const StampSink& sink, std::uint32_t kernel, int writer = 0) {
    if constexpr (LOWLAT_STAMPS != 0) {
      const std::uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      const bool writes = plat::thread_idx() == writer && sink.stamps != nullptr &&
                          kernel < sink.kernels && block < kStampBlocks;
      if (!writes) return;
      first_ = sink.stamps + (std::uint64_t{kernel} * kStampBlocks + block) *
                                 static_cast<std::uint32_t>(StampStage::count);
      kernel_ = kernel;
      block_ = block;
      const std::uint64_t ns = plat::clock_ns();
      last_ = ticks();
      write(StampStage::align, ns, last_);
    }
  }
  // The stage that ends here.
  LOWLAT_DEVICE void mark(StampStage stage) {
    if constexpr (LOWLAT_STAMPS != 0) {
      if (first_ == nullptr) return;
      const std::uint64_t now = ticks();
      write(stage, last_, now);
      last_ = now;
    }
  }

 private:
  LOWLAT_DEVICE static std::uint64_t ticks() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
  }
  LOWLAT_DEVICE void write(StampStage stage, std::uint64_t begin, std::uint64_t end) {
    std::uint32_t multiprocessor;
    asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    const auto number = static_cast<std::uint32_t>(stage);
    first_[number] = {kernel_, number, block_, multiprocessor, begin, end};
  }

  Stamp* first_ = nullptr;
  std::uint64_t last_ = 0;
  std::uint32_t kernel_ = 0, block_ = 0;
};

}  // namespace lowlat::nvidia::fused
