// fused/exchange_gate.cuh: waiting at and opening of gates, see exchange_gate.hpp.
//
// Ordering     word   counted up by one thread of each block of the writer (release.device, after
//                     the block's barrier, so that the block's stores come before it), read by one
//                     thread of each block of a reader (acquire.device), whose other threads follow
//                     its block's barrier. Data are read past the first-level cache.
//              reuse  words are zeroed by the kernel that begins a step. What a kernel writes it
//                     writes after it has passed its own gate, which the readers of the former
//                     contents have opened, directly or through the kernels between; steps follow
//                     each other by the stream's order.
//              late   twice the port's budget without an opening ends the wait, fills the status
//                     words and raises the abort word, which ends all other waits; the receiver of
//                     the next exchange sees it too, so the step's results are NaN.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.cuh"
#include "fused/exchange_gate.hpp"
#include "fused/front_weights.cuh"

namespace lowlat::nvidia::fused {

LOWLAT_DEVICE std::uint32_t gate_word(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
LOWLAT_DEVICE bool has_opened(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}
LOWLAT_DEVICE bool is_open(const std::uint32_t* word, std::uint32_t target) {
  return has_opened(gate_word(word), target);
}

// How a wait ended.
enum class GateEnd { open, late, aborted };
// Says so in the status words. The call leaves few registers to who keeps values over it.
LOWLAT_DEVICE void report_gate(const Gate& gate, GateEnd end) {
  if (gate.port == nullptr) return;
  const ExchangePort& port = *gate.port;
  report_fault(port, gate.id, stages::StageId::none, port.tp_rank, *port.step_epoch,
               end == GateEnd::aborted);
}

// A wait that has failed so far: its deadline, and whether it has to end.
class GateWatch {
 public:
  LOWLAT_DEVICE explicit GateWatch(const Gate& gate)
      : gate_(gate),
        deadline_ns_(plat::clock_ns() +
                     (gate.port != nullptr ? patient_budget_ns(*gate.port) : kSecondNs)) {}
  LOWLAT_DEVICE GateEnd end() const {
    const ExchangePort* port = gate_.port;
    const bool late = plat::clock_ns() > deadline_ns_;
    if (port != nullptr &&
        plat::load_acquire<plat::Scope::system>(port->abort_words[port->tp_rank]) != 0u) {
      return GateEnd::aborted;
    }
    return late ? GateEnd::late : GateEnd::open;
  }
  LOWLAT_DEVICE bool ended() const {
    const GateEnd how = end();
    if (how != GateEnd::open) report_gate(gate_, how);
    return how != GateEnd::open;
  }

 private:
  const Gate& gate_;
  std::uint64_t deadline_ns_;
};

// After is_open() has said so: what was stored before is seen from here on.
LOWLAT_DEVICE void pass_gate() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Both, by one access: quicker than a fence behind relaxed polls, although it empties the
// first-level cache every time.
LOWLAT_DEVICE bool passes_gate(const Gate& gate) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(gate.word))
               : "memory");
  return has_opened(value, gate.blocks);
}

// One thread calls. What ended the wait otherwise is for the caller to report.
LOWLAT_DEVICE GateEnd poll_gate_quietly(const Gate& gate) {
  if (passes_gate(gate)) return GateEnd::open;
  GateEnd how = GateEnd::open;
  const GateWatch watch(gate);
  for (int polls = 1; how == GateEnd::open && !passes_gate(gate); ++polls) {
    if (polls % 256 == 0) how = watch.end();
  }
  return how;
}
LOWLAT_DEVICE void poll_gate(const Gate& gate) {
  if (passes_gate(gate)) return;
  const GateWatch watch(gate);
  for (int polls = 1; !passes_gate(gate); ++polls) {
    if (polls % 256 == 0 && watch.ended()) return;
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

// The same for the threads of a warp alone.
LOWLAT_DEVICE void warp_wait_at(const Gate& gate) {
  if (gate.word == nullptr) {
    sm90::wait_for_predecessors();
    return;
  }
  if (plat::thread_idx() % plat::kWarpLanes == 0) poll_gate(gate);
  __syncwarp();
}

// A part of wait_at for several gates: what was written before them is there for all threads of the
// block after its next barrier. Each gate is asked by a warp of its own, so that the ways to them
// are one; of those after the first a NULL word means that there is nothing to wait for. All
// threads of the block call.
template <class... Gates>
LOWLAT_DEVICE void poll_gates(const Gate& first, const Gates&... more) {
  if (first.word == nullptr) sm90::wait_for_predecessors();
  if (plat::thread_idx() % plat::kWarpLanes != 0) return;
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  Gate own = first;
  int number = 0;
  static_cast<void>(((own = warp_idx == ++number ? more : own), ...));
  if (warp_idx <= number && own.word != nullptr) poll_gate(own);
}

// By one thread, when a barrier of those that stored has ordered it behind them.
LOWLAT_DEVICE void count_at_gate(const Gate& gate, std::uint32_t count) {
  asm volatile(
      "red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(gate.word)),
      "r"(count)
      : "memory");
}
// All threads of the block call, after their stores. The block counts as so many.
LOWLAT_DEVICE void open_gate(const Gate& gate, std::uint32_t count = 1u) {
  if (gate.word == nullptr) return;
  plat::block_sync();
  if (plat::thread_idx() == 0) count_at_gate(gate, count);
}

}  // namespace lowlat::nvidia::fused
