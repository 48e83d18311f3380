// late.cuh: a kernel that lets time pass, for tests that make another one late.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lowlat::testing {

// One thread.
static __global__ void spend(std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < ns);
}

}  // namespace lowlat::testing
