// fused/exchange_hop.cuh: sending and taking of packets between kernels, see exchange_hop.hpp.
//
// Ordering     packet  stored and read as one relaxed access of the device's scope (PTX: a .b128
//                     access with a scope is one memory operation), so a tag that matches says that
//                     the payload is its own. Nothing else is published by it.
//              reuse  a packet's place is written again one layer later, by a kernel whose own
//                     input depends on all readers of the former contents: on each of them, since
//                     every block of a layer's kernels has a part in the layer's result.
//              tags   u32 of an epoch, from 1 on, see exchange.cuh; memory is zeroed once.
//              late   a wait ends at twice the port's budget, or soon after an abort; the status
//                     words then say which kernel waited, and the next exchange's receiver makes
//                     the results NaN (receive_quad and hc_exchange_norm look at the abort word).
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include "fused/exchange.cuh"
#include "fused/exchange_hop.hpp"
#include "fused/stamps.cuh"

namespace lowlat::nvidia::fused {

// What a kernel knows of its hop. Made before the wait: it reads memory.
struct HopTag {
  const ExchangePort* port;
  std::uint32_t tag, kernel;
};
LOWLAT_DEVICE HopTag hop_tag(const Hop& hop, int index, HopKernel kernel) {
  return {hop.port,
          static_cast<std::uint32_t>(*hop.port->step_epoch + static_cast<std::uint64_t>(index)),
          hop.id + static_cast<std::uint32_t>(kernel)};
}

// Where a kernel's stamps go.
LOWLAT_DEVICE StampSink stamp_sink(const Hop& hop) {
  return hop.port != nullptr ? hop.port->stamps : StampSink{};
}

LOWLAT_DEVICE void send_packet(plat::TaggedWords* dst, std::uint32_t tag, std::uint32_t a,
                               std::uint32_t b, std::uint32_t c) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 packet;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 packet, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], packet;\n"
      "}" ::"l"(__cvta_generic_to_global(dst)),
      "r"(a), "r"(b), "r"(c), "r"(tag)
      : "memory");
}

// The first two words of a payload, and the third.
struct HopWords {
  std::uint64_t pair;
  std::uint32_t third;
};

// A packet in four registers that follow each other, as one access takes it.
using PacketBits = unsigned __int128;
LOWLAT_DEVICE std::uint32_t tag_of(PacketBits packet) {
  return static_cast<std::uint32_t>(packet >> 96);
}

// packet = that at src, unless it has this tag.
LOWLAT_DEVICE void load_unless_tagged(PacketBits& packet, std::uint32_t tag,
                                      const plat::TaggedWords* src) {
  asm volatile(
      "{\n"
      ".reg .pred missing;\n"
      "setp.ne.u32 missing, %1, %2;\n"
      "@missing ld.relaxed.gpu.global.b128 %0, [%3];\n"
      "}"
      : "+q"(packet)
      : "r"(tag_of(packet)), "r"(tag), "l"(__cvta_generic_to_global(src))
      : "memory");
}

// Whether a wait that has failed so often has to end. A lane of each warp calls, rarely.
enum class HopEnd { none, late, aborted };
LOWLAT_DEVICE HopEnd hop_end(const HopTag& hop, std::uint64_t& deadline_ns) {
  const ExchangePort& port = *hop.port;
  const std::uint64_t now_ns = plat::clock_ns();
  if (deadline_ns == 0) deadline_ns = now_ns + patient_budget_ns(port);
  if (plat::load_acquire<plat::Scope::system>(port.abort_words[port.tp_rank]) != 0u) {
    return HopEnd::aborted;
  }
  return now_ns > deadline_ns ? HopEnd::late : HopEnd::none;
}
// Says so in the status words. The call leaves few registers to who keeps values over it.
LOWLAT_DEVICE void report_end(const HopTag& hop, HopEnd end) {
  const ExchangePort& port = *hop.port;
  report_fault(port, hop.kernel, stages::StageId::none, port.tp_rank, *port.step_epoch,
               end == HopEnd::aborted);
}
// What a wait does then: it reports, or keeps that for the caller to report later.
struct HopReports {
  LOWLAT_DEVICE bool operator()(const HopTag& hop, std::uint64_t& deadline_ns) const {
    const HopEnd end = hop_end(hop, deadline_ns);
    if (end != HopEnd::none) report_end(hop, end);
    return end != HopEnd::none;
  }
};
struct HopKeeps {
  HopEnd& kept;
  LOWLAT_DEVICE bool operator()(const HopTag& hop, std::uint64_t& deadline_ns) const {
    const HopEnd end = hop_end(hop, deadline_ns);
    if (end != HopEnd::none) kept = end;
    return end != HopEnd::none;
  }
};

// The tag at a place, for who does not want the payload.
LOWLAT_DEVICE std::uint32_t packet_tag(const plat::TaggedWords* src) {
  PacketBits packet;
  asm volatile("ld.relaxed.gpu.global.b128 %0, [%1];"
               : "=q"(packet)
               : "l"(__cvta_generic_to_global(src))
               : "memory");
  return tag_of(packet);
}
LOWLAT_DEVICE bool has_tag(const plat::TaggedWords* src, std::uint32_t tag) {
  return packet_tag(src) == tag;
}

// Where the first signs of a kernel's input show, so that blocks that wait long ask for little: a
// resident kernel's thousands of threads would otherwise take the cache's bandwidth from the
// kernels that they wait for.
struct HopSigns {
  const plat::TaggedWords* turn;  // a packet of something that comes before the input; NULL: none
  std::uint32_t turn_tag;
  const plat::TaggedWords* first;  // packets of the kernel's own input: 32, so far apart
  int stride;
};

// All threads of the block call: returns when the first packets are there, or when the wait has
// ended otherwise. One warp asks; now and then until `turn` is there, all the time from then on.
template <class Ended = HopReports>
LOWLAT_DEVICE void wait_for_signs(const HopTag& hop, const HopSigns& signs, Ended ended = {}) {
  constexpr unsigned kRarelyNs = 150;
  constexpr int kPollsPerLook = 64;
  if (plat::thread_idx() < plat::kWarpLanes) {
    const int lane_idx = plat::thread_idx();
    std::uint64_t deadline_ns = 0;
    bool often = signs.turn == nullptr;
#pragma unroll 1
    for (int polls = 1;; ++polls) {
      const bool came = has_tag(signs.first + lane_idx * signs.stride, hop.tag);
      if (!often) often = has_tag(signs.turn, signs.turn_tag);  // by all lanes: one access
      if (__any_sync(plat::kAllLanes, came)) break;
      if (!__any_sync(plat::kAllLanes, often)) __nanosleep(kRarelyNs);
      if (polls % kPollsPerLook == 0 &&
          __any_sync(plat::kAllLanes, lane_idx == 0 && ended(hop, deadline_ns))) {
        break;
      }
    }
  }
  plat::block_sync();
}

// Takes kPackets packets: of number i the bit i of `wanted`, at src(i). Whole warps call, each lane
// for its own. Returns whether all of the lane's are there: not where the wait has ended otherwise.
template <int kPackets, class Source, class Ended = HopReports>
LOWLAT_DEVICE bool take_packets(HopWords (&words)[kPackets], const HopTag& hop,
                                std::uint32_t wanted, Source src, Ended ended = {}) {
  constexpr int kPollsPerLook = 64;
  PacketBits packets[kPackets];
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    packets[i] = PacketBits{(wanted >> i & 1u) != 0u ? 0u : hop.tag} << 96;
  }
  std::uint64_t deadline_ns = 0;
  bool missing = false;
#pragma unroll 1
  for (int polls = 1;; ++polls) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) load_unless_tagged(packets[i], hop.tag, src(i));
    missing = false;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) missing |= tag_of(packets[i]) != hop.tag;
    if (!__any_sync(plat::kAllLanes, missing)) break;
    if (polls % kPollsPerLook == 0 &&
        __any_sync(plat::kAllLanes,
                   plat::thread_idx() % plat::kWarpLanes == 0 && ended(hop, deadline_ns))) {
      break;
    }
  }
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    words[i] = {static_cast<std::uint64_t>(packets[i]),
                static_cast<std::uint32_t>(packets[i] >> 64)};
  }
  return !missing;
}

LOWLAT_DEVICE std::uint32_t low_word(std::uint64_t pair) {
  return static_cast<std::uint32_t>(pair);
}
LOWLAT_DEVICE std::uint32_t high_word(std::uint64_t pair) {
  return static_cast<std::uint32_t>(pair >> 32);
}

}  // namespace lowlat::nvidia::fused
