// fused/exchange.cuh: partial sums between ranks, four to a 16-byte packet, for kernels.
//
// A packet is {four partial sums of 24 bits each, tag}. A partial sum keeps sign, exponent and 15
// bits of its fraction (nearest-even), 2^-17 of its size at most, where the summed result is
// rounded to 2^-9; three whole fp32 would need a third more packets, and 5120 is no multiple of
// three. A rank sends its own partial sums through the same rounding, so all ranks add the same
// numbers.
//
// Ordering     box[e & 1][p][row][quad]  packets of epoch e from rank p, in the reader's memory.
//                             Written by p only (store_tagged: payload and tag as one access), read
//                             by its owner only.
//              edge           p: packet with tag e, then owner: load_tagged(e) is true, so the
//                             payload is e's. Nothing else is published by the tag.
//              reuse          box[e & 1] is written again at e + 2. A rank's kernel of e + 2 waits
//                             for the end of its own kernel that read e + 1 from every rank, and a
//                             rank's kernel that sends e + 1 waits for the end of its kernel that
//                             read e. So nobody still reads what is overwritten.
//              tags           u32(epoch), from 1 on: zeroed memory is never taken for a packet.
//                             Rows that a step has not keep tags of older epochs; equal low words
//                             would need 2^32 exchanges between two writes of one place.
//              late           every poll has the budget of the port; see receive_quad.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.hpp"
#include "stages/format.hpp"
#include "stages/wait.hpp"

namespace lowlat::nvidia::fused {

// fp32 to its upper 24 bits, nearest-even; NaN stays NaN, overflow goes to infinity.
LOWLAT_DEVICE std::uint32_t to_24_bits(float v) {
  const std::uint32_t bits = plat::float_bits(v);
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u) return bits >> 8 | 0x4000u;
  return (bits + 0x7fu + (bits >> 8 & 1u)) >> 8;
}

LOWLAT_DEVICE void pack_quad(std::uint32_t (&payload)[3], const float (&v)[4]) {
  std::uint32_t code[4];
  for (int i = 0; i < 4; ++i) code[i] = to_24_bits(v[i]);
  payload[0] = code[0] | code[1] << 24;
  payload[1] = code[1] >> 8 | code[2] << 16;
  payload[2] = code[2] >> 16 | code[3] << 8;
}
LOWLAT_DEVICE void unpack_quad(float (&v)[4], const std::uint32_t (&payload)[3]) {
  v[0] = plat::bits_float(payload[0] << 8);
  v[1] = plat::bits_float(payload[1] << 16 | (payload[0] >> 24) << 8);
  v[2] = plat::bits_float(payload[2] << 24 | (payload[1] >> 16) << 8);
  v[3] = plat::bits_float(payload[2] & 0xffff'ff00u);
}

LOWLAT_DEVICE std::uint32_t load_relaxed(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}

// The epoch of exchange `index` of this step. begin_step() of the step has ended before.
LOWLAT_DEVICE std::uint64_t exchange_epoch(const ExchangePort& port, int index) {
  return *port.step_epoch + static_cast<std::uint64_t>(index);
}

// Where the quads of one row from one source lie in a reader's memory.
LOWLAT_DEVICE plat::TaggedWords* quads_of(const ExchangePort& port, int reader, std::uint64_t epoch,
                                          int source, int row_idx, int quads_per_row) {
  const std::int64_t box = static_cast<std::int64_t>(epoch & 1u) * port.tp_size + source;
  return static_cast<plat::TaggedWords*>(port.boxes[reader]) + box * port.box_packets +
         static_cast<std::int64_t>(row_idx) * quads_per_row;
}

// Sends four partial sums, packed, of this rank's row to one rank: number i of all.
LOWLAT_DEVICE void send_quad(const ExchangePort& port, int i, std::uint64_t epoch, int row_idx,
                             int quad_idx, int quads_per_row, const std::uint32_t (&payload)[3]) {
  // Each rank begins with another reader: links are not asked by all ranks at once.
  const int reader =
      i + port.tp_rank < port.tp_size ? i + port.tp_rank : i + port.tp_rank - port.tp_size;
  plat::store_tagged(quads_of(port, reader, epoch, port.tp_rank, row_idx, quads_per_row) + quad_idx,
                     payload, static_cast<std::uint32_t>(epoch));
}
// Sends columns 4 quad_idx .. + 3 of this rank's partial row to every rank. Any thread; call it as
// soon as the four sums exist.
LOWLAT_DEVICE void publish_quad(const ExchangePort& port, std::uint64_t epoch, int row_idx,
                                int quad_idx, int quads_per_row, const float (&v)[4]) {
  std::uint32_t payload[3];
  pack_quad(payload, v);
  for (int i = 0; i < port.tp_size; ++i) {
    send_quad(port, i, epoch, row_idx, quad_idx, quads_per_row, payload);
  }
}

// Reports what ended a wait, once a rank: the first thread writes the status words and raises the
// abort word everywhere; the others leave. Not inlined: a kernel runs once through its code and
// pays for each line that is fetched.
LOWLAT_DEVICE __noinline__ void report_fault(const ExchangePort& port, std::uint32_t kernel,
                                             stages::StageId stage, int peer, std::uint64_t epoch,
                                             bool aborted) {
  if (atomicExch(port.fault_claim, 1u) != 0u) return;
  const stages::FaultPort fault{port.abort_words, static_cast<stages::StatusWords*>(port.status),
                                port.tp_rank, port.tp_size, port.budget_ns};
  if (aborted) {
    stages::note_abort(fault, kernel, stage, epoch);
  } else {
    stages::raise_fault(fault, kernel, stage, peer, epoch);
  }
}

// Of a wait for this device's own kernels: where these wait for a peer, their wait ends first, and
// the status words name the peer.
LOWLAT_DEVICE std::uint64_t patient_budget_ns(const ExchangePort& port) {
  return 2 * port.budget_ns;
}

// Returns when the first packets of this row are there, or the wait has ended otherwise. One warp
// of the threads that have `quads` of the row's quads from first_quad on calls, before receive_quad
// and for all of them: while nothing has come it asks for 32 packets, and not every thread for its
// own, which would take the cache's bandwidth from the kernels that are waited for.
template <int kRanks>
LOWLAT_DEVICE void poll_quads(const ExchangePort& port, std::uint64_t epoch, int row_idx,
                              int first_quad, int quads, int quads_per_row, stages::StageId stage) {
  constexpr int kPollsPerCheck = 32;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes, rank = lane_idx % kRanks;
  const plat::TaggedWords* src = quads_of(port, port.tp_rank, epoch, rank, row_idx, quads_per_row) +
                                 first_quad + lane_idx * quads / plat::kWarpLanes;
  std::uint64_t deadline_ns = 0;
  for (int polls = 1;; ++polls) {
    std::uint32_t words[3];
    const bool came = plat::load_tagged(src, static_cast<std::uint32_t>(epoch), words);
    const unsigned there = __ballot_sync(plat::kAllLanes, came);
    if (there != 0u) return;
    if (polls % kPollsPerCheck != 0) continue;
    const std::uint64_t now_ns = plat::clock_ns();
    // Nothing at all has come, so this rank's own packets have not either.
    if (deadline_ns == 0) deadline_ns = now_ns + patient_budget_ns(port);
    const bool aborted =
        plat::load_acquire<plat::Scope::system>(port.abort_words[port.tp_rank]) != 0u;
    const bool late = lane_idx == 0 && (aborted || now_ns > deadline_ns);
    if (late) report_fault(port, port.kernel, stage, port.tp_rank, epoch, aborted);
    if (__any_sync(plat::kAllLanes, late)) return;
  }
}
// The same for all threads of a block.
template <int kRanks>
LOWLAT_DEVICE void wait_for_quads(const ExchangePort& port, std::uint64_t epoch, int row_idx,
                                  int first_quad, int quads, int quads_per_row,
                                  stages::StageId stage) {
  if (plat::thread_idx() < plat::kWarpLanes) {
    poll_quads<kRanks>(port, epoch, row_idx, first_quad, quads, quads_per_row, stage);
  }
  plat::block_sync();
}

// Packets of column 4 quad_idx and on, one a rank, and whether all of them are there.
template <int kRanks>
struct QuadPackets {
  std::uint32_t words[kRanks][3];
  bool there;

  // Any thread calls. All are asked for at once.
  LOWLAT_DEVICE void ask(const ExchangePort& port, std::uint64_t epoch, int row_idx, int quad_idx,
                         int quads_per_row) {
    there = true;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      there &= plat::load_tagged(
          quads_of(port, port.tp_rank, epoch, rank, row_idx, quads_per_row) + quad_idx,
          static_cast<std::uint32_t>(epoch), words[rank]);
    }
  }
  // sum[i] = the partial sums of column 4 quad_idx + i over the ranks, fp32 in rank order.
  LOWLAT_DEVICE void add(float (&sum)[4]) const {
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      float v[4];
      unpack_quad(v, words[rank]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = rank == 0 ? v[i] : sum[i] + v[i];
    }
  }
};

// Both; false (sum untouched) where a packet is missing.
template <int kRanks>
LOWLAT_DEVICE bool try_receive_quad(float (&sum)[4], const ExchangePort& port, std::uint64_t epoch,
                                    int row_idx, int quad_idx, int quads_per_row) {
  QuadPackets<kRanks> packets = {};
  packets.ask(port, epoch, row_idx, quad_idx, quads_per_row);
  if (packets.there) packets.add(sum);
  return packets.there;
}

// The same, but waits until all packets are there. After a fault (reported) or an abort the sums
// are NaN: what follows from them shows on this rank, and no plausible token leaves.
template <int kRanks>
LOWLAT_DEVICE void receive_quad(float (&sum)[4], const ExchangePort& port, std::uint64_t epoch,
                                int row_idx, int quad_idx, int quads_per_row,
                                stages::StageId stage) {
  // Abort word and clock are read once in so many polls: a poll is one trip to the cache.
  constexpr int kPollsPerCheck = 32;
  std::uint64_t deadline_ns = 0;
  for (int polls = 1; !try_receive_quad<kRanks>(sum, port, epoch, row_idx, quad_idx, quads_per_row);
       ++polls) {
    if (polls % kPollsPerCheck != 0) continue;
    const std::uint64_t now_ns = plat::clock_ns();
    if (deadline_ns == 0) deadline_ns = now_ns + port.budget_ns;
    const bool aborted =
        plat::load_acquire<plat::Scope::system>(port.abort_words[port.tp_rank]) != 0u;
    if (!aborted && now_ns <= deadline_ns) continue;
    int missing = 0;
    std::uint32_t words[3];
    while (missing < kRanks - 1 &&
           plat::load_tagged(
               quads_of(port, port.tp_rank, epoch, missing, row_idx, quads_per_row) + quad_idx,
               static_cast<std::uint32_t>(epoch), words)) {
      ++missing;
    }
    report_fault(port, port.kernel, stage, missing, epoch, aborted);
    for (float& v : sum) v = plat::bits_float(0x7fc0'0000u);
    return;
  }
}

}  // namespace lowlat::nvidia::fused
