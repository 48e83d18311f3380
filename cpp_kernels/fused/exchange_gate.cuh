// fused/exchange_gate.cuh: waiting at and opening of gates, see exchange_gate.hpp.
//
// Ordering     word   counted up by one thread of each block of the writer (release.device, after
//                     the block's barrier, so that the block's stores come before it), read by one
//                     thread of each block of a reader (acquire.device), whose other threads follow
//                     its block's barrier. Data are read past the first-level cache.
//              reuse  a word only grows. What a kernel writes it writes after it has passed its
//                     own gate, which the readers of the former contents have opened, directly or
//                     through the kernels between; steps follow each other by the stream's order.
//              wrap   (word - target) as i32 >= 0 means open; round * blocks wraps with the word.
//              late   a second without an opening ends the wait; the step's results mean nothing
//                     then. The writer is resident before the reader is launched, so only a fault
//                     of the device comes there: ranks wait for each other at mailboxes.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange_gate.hpp"
#include "fused/front_weights.cuh"

namespace lowlat::nvidia::fused {

// One thread calls.
LOWLAT_DEVICE void poll_gate(const Gate& gate) {
  const std::uint32_t target = *gate.round * gate.blocks;
  const auto open = [&] {
    return static_cast<std::int32_t>(plat::load_acquire<plat::Scope::device>(gate.word) - target) >=
           0;
  };
  if (open()) return;
  const std::uint64_t deadline_ns = plat::clock_ns() + kSecondNs;
  for (int polls = 0; !open(); ++polls) {
    if (polls % 256 == 255 && plat::clock_ns() > deadline_ns) return;
  }
}

// All threads of the block call.
LOWLAT_DEVICE void wait_at(const Gate& gate) {
  if (gate.word == nullptr) {
    sm90::wait_for_predecessors();
    return;
  }
  if (plat::thread_idx() == 0) poll_gate(gate);
  plat::block_sync();
}

// All threads of the block call, after their stores.
LOWLAT_DEVICE void open_gate(const Gate& gate) {
  if (gate.word == nullptr) return;
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(gate.word))
        : "memory");
  }
}

}  // namespace lowlat::nvidia::fused
