// host/amd/geometry.hpp: the launch geometry of the platform amd: what the parts have, what each
// kernel may take of it, and that the two fit. The host's compiler and the one of code objects read
// it; a test holds the built code objects to it.
#pragma once

#include <cstdint>

namespace lowlat::amd {

// Of one compute unit; and how many a whole part has at most (a runtime says how many are there).
struct Part {
  const char* arch;
  int compute_units;
  int simds;      // each runs one wave of a block of 256 threads
  int registers;  // 32-bit, of a lane, when a SIMD has one wave
  int lds_bytes;
  std::int64_t hbm_bytes_per_us;
};
inline constexpr Part kParts[] = {
    // MI300X, MI325X; the first is the slower of the two in memory.
    {"gfx942", 304, 4, 512, 64 * 1024, 5'300'000},
    // MI350X, MI355X.
    {"gfx950", 256, 4, 512, 160 * 1024, 8'000'000},
};

// Threads of a block, and blocks of a compute unit. One block a unit is what makes every block
// resident at once without asking how many a unit would take.
inline constexpr int kBlockThreads = 256;
inline constexpr int kBlocksPerUnit = 1;

// What a kernel may take at most. Products in tiles take 16 KB of LDS, and registers for what is on
// its way. Private bytes are a lane's memory: arrays that are indexed at run time, none in a loop
// over weights; no kernel may spill a register into it.
struct KernelPlan {
  const char* name;
  int registers, lds_bytes, private_bytes;
};
inline constexpr KernelPlan kKernelPlans[] = {
    {"lowlat_target_front", 320, 24 * 1024, 256},  // K1
    {"lowlat_target_select", 160, 4 * 1024, 0},    // K2i
    {"lowlat_target_back", 288, 20 * 1024, 0},     // K2
    {"lowlat_target_head", 256, 32 * 1024, 64},
    {"lowlat_draft_inject", 256, 20 * 1024, 0},
    {"lowlat_draft_front", 320, 24 * 1024, 256},
    {"lowlat_draft_back", 288, 20 * 1024, 0},
    {"lowlat_draft_propose", 256, 32 * 1024, 64},
    // Of a hosted model; it makes a draft's call of the proposal, in private memory.
    {"lowlat_propose", 256, 32 * 1024, 192},
    {"lowlat_accept_tokens", 128, 4 * 1024, 0},
    {"lowlat_probe", 64, 1024, 0},
};

constexpr bool plans_fit() {
  for (const Part& part : kParts) {
    // A block's waves are one a SIMD for each block of the unit.
    if (kBlockThreads != 64 * part.simds) return false;
    for (const KernelPlan& plan : kKernelPlans) {
      if (plan.registers * kBlocksPerUnit > part.registers) return false;
      if (plan.lds_bytes * kBlocksPerUnit > part.lds_bytes) return false;
    }
  }
  return true;
}
static_assert(plans_fit(), "a kernel's plan takes more than a part has");

// Bytes of what the host lays out and kernels read: both compilers check them.
inline constexpr int kRankBytes = 1008;
inline constexpr int kBlockMemoryBytes = 104;

}  // namespace lowlat::amd
