// fused/exchange_hop.hpp: values that go from one kernel of a layer to the next by packets with a
// tag, without a launch's end or a word that all blocks ask for. Every C++ compiler reads it.
#pragma once

#include <cstdint>

namespace lowlat::nvidia::fused {

struct ExchangePort;

// Up to so many rows a layer's activations are such packets; more rows go by gates.
inline constexpr int kHopRows = 8;

// Sixteen bytes: up to three words of payload and the tag, stored and read as one access.
inline constexpr int kHopPacketBytes = 16;

// The kernels of a layer, for status words and stamps: what they show is Hop::id plus one of these.
enum class HopKernel : std::uint32_t {
  qkv = 0,
  q = 1,
  attention = 2,
  oproj_a = 3,
  oproj_b = 4,
  exchange = 5,
  mix = 6,
  experts = 7,
  second_exchange = 8,
  begin = 9,
  second_mix = 10,
  latent = 11,
  // Beside the front: a compressor's product, and an index's kernels.
  product = 12,
  query = 13,
  scores = 14,
  select = 15,
  count
};

// Of one rank, in device memory, for kHopRows rows, zeroed once; shared by all layers. In packets:
struct HopBuffers {
  void* x;   // [T, H / 8]: eight e4m3 codes, the scale of their 32
  void* qa;  // [T, q_lora / 4]: four bf16
  void* kv;  // [T, 512 / 4]: four bf16
  void* q;   // [T, heads * 512 / 4]: four bf16; V4: not normed, and the squares of their 64, summed
  void*
      keys;  // [T, 72]: a stored key's 448 codes by eight, with their ue8m0 byte, then its 64 bf16
  void* o;   // [T, heads * 512 / 4]: four f16, the scale of their 32
  void* u;   // [T, groups * 1024 / 8]: eight e4m3 codes, the scale of their 32
  // [T, 512]: no packets but eight bytes each, a selected entry's slot and the tag.
  void* selected;
};
inline constexpr int kHopKeyPackets = 72;
inline constexpr int kHopSelectedPackets = 512 * 8 / kHopPacketBytes;

constexpr std::int64_t hop_bytes(int hidden, int q_lora, int num_heads, int num_groups) {
  return std::int64_t{kHopRows} * kHopPacketBytes *
         (hidden / 8 + q_lora / 4 + 512 / 4 + 2 * num_heads * (512 / 4) + kHopKeyPackets +
          num_groups * (1024 / 8) + kHopSelectedPackets);
}
inline HopBuffers hop_buffers(void* base, int hidden, int q_lora, int num_heads, int num_groups) {
  auto* at = static_cast<unsigned char*>(base);
  const auto next = [&](int packets) {
    void* out = at;
    at += std::int64_t{kHopRows} * kHopPacketBytes * packets;
    return out;
  };
  HopBuffers out = {};
  out.x = next(hidden / 8);
  out.qa = next(q_lora / 4);
  out.kv = next(512 / 4);
  out.q = next(num_heads * (512 / 4));
  out.keys = next(kHopKeyPackets);
  out.o = next(num_heads * (512 / 4));
  out.u = next(num_groups * (1024 / 8));
  out.selected = next(kHopSelectedPackets);
  return out;
}

// Where a kernel is in its step. The tag of what a layer's kernels send each other is the low half
// of the epoch of exchange `index`, the layer's own: no other layer and no other step has it.
struct Hop {
  const ExchangePort* port;  // this rank's, in device memory
  std::int32_t index;
  std::uint32_t id;  // kernel_place() of the layer
};

}  // namespace lowlat::nvidia::fused
