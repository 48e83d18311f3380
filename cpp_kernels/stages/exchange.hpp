// stages/exchange.hpp: every rank gives every rank its words; each value travels with the step's
// tag.
//
// Ordering     box[e & 1][p]  packets of epoch e from rank p, in the reader's memory. Written by p
//                             only (store_tagged: payload and tag as one access), read by its owner
//                             only.
//              edge           p: packet with tag e, then owner: load_tagged(e) is true, so the
//                             payload is e's
//              reuse          box[e & 1] is written again at e + 2. p begins e + 2 only after it
//                             has read every rank's packets of e + 1, and a rank sends those only
//                             after its last read of epoch e. So nobody still reads what is
//                             overwritten.
//              tags           u32(epoch). A box holds tags e - 2 or older before e arrives; equal
//                             low words would need 2^32 exchanges between two writes of one box.
//                             Epochs begin at 1, so zeroed memory is never taken for a packet.
//              late           every wait has the budget of its FaultPort; see wait.hpp. After a
//                             fault the epoch is not advanced and the exchange is not used again.
//
// Partial sums travel as fp32 and are added in rank order, so every rank rounds the same sum once
// and all ranks hold the same bits without a second exchange.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

#include "stages/format.hpp"
#include "stages/wait.hpp"

namespace lowlat::LOWLAT_PLATFORM::stages {

// Where packets go and come from. Boxes are [2][tp_size][box_packets]; `outboxes[r]` is rank r's
// memory.
struct ExchangePort {
  plat::TaggedWords* const* outboxes;  // [tp_size], own rank included
  FaultPort fault;
  std::int64_t box_packets;
};

LOWLAT_DEVICE constexpr std::int64_t packets_of(std::int64_t num_words) {
  return (num_words + plat::kTaggedPayload - 1) / plat::kTaggedPayload;
}

// The box of (epoch, source) in `reader`'s memory.
LOWLAT_DEVICE plat::TaggedWords* box_of(const ExchangePort& port, int reader, std::uint64_t epoch,
                                        int source) {
  return port.outboxes[reader] +
         (static_cast<std::int64_t>(epoch & 1u) * port.fault.tp_size + source) * port.box_packets;
}

// Sends one packet to every rank.
LOWLAT_DEVICE void publish_packet(const ExchangePort& port, std::uint64_t epoch,
                                  std::int64_t packet,
                                  const std::uint32_t (&payload)[plat::kTaggedPayload]) {
  for (int reader = 0; reader < port.fault.tp_size; ++reader) {
    plat::store_tagged(box_of(port, reader, epoch, port.fault.tp_rank) + packet, payload,
                       static_cast<std::uint32_t>(epoch));
  }
}

// body(packet, wanted) for packets 0 .. num_packets - 1, split over the block's threads; lanes of a
// warp stay together, the ones past the end with `wanted` false and a packet that exists. A warp
// leaves when its body says false; true when none did. Syncs at the end.
template <class Block, class Body>
LOWLAT_DEVICE bool for_packets(std::int64_t num_packets, Body&& body) {
  using Threads = Team<Block>;
  bool whole = true;
  for (std::int64_t first = Threads::warp_idx() * std::int64_t{Threads::kLanes};
       whole && first < num_packets; first += Block::kNumThreads) {
    const std::int64_t packet = first + Threads::lane();
    whole = body(packet < num_packets ? packet : first, packet < num_packets);
  }
  return !Threads::any(!whole);
}

// Sends num_words words to every rank, as packets first_packet and on of this epoch's box: word i
// is bits(i). Packets are independent, so rows and tiles may be sent as they are finished, by
// anybody. The block calls, threads split the packets; no sync.
template <class Block, class Bits>
LOWLAT_DEVICE void publish_words(const ExchangePort& port, std::uint64_t epoch,
                                 std::int64_t first_packet, std::int64_t num_words, Bits&& bits) {
  for (std::int64_t packet = Team<Block>::thread_idx(); packet < packets_of(num_words);
       packet += Block::kNumThreads) {
    const std::int64_t begin = packet * plat::kTaggedPayload;
    std::uint32_t payload[plat::kTaggedPayload] = {};
    for (int i = 0; i < plat::kTaggedPayload && begin + i < num_words; ++i) {
      payload[i] = bits(begin + i);
    }
    publish_packet(port, epoch, first_packet + packet, payload);
  }
}
template <class Block = OneThread>
LOWLAT_DEVICE void publish(const ExchangePort& port, std::uint64_t epoch, std::int64_t first_packet,
                           const std::uint32_t* words, std::int64_t num_words) {
  publish_words<Block>(port, epoch, first_packet, num_words,
                       [&](std::int64_t i) { return words[i]; });
}
template <class Block = OneThread>
LOWLAT_DEVICE void publish(const ExchangePort& port, std::uint64_t epoch, std::int64_t first_packet,
                           const float* values, std::int64_t num_words) {
  publish_words<Block>(port, epoch, first_packet, num_words,
                       [&](std::int64_t i) { return plat::float_bits(values[i]); });
}

// A sink of stages::linear that sends each row's results as soon as a packet of them is full: no
// read-back and no separate send. Row t's words begin at packet t * packets_of(num_words). Weight
// rows must come in ascending order, a packet's from one thread: the range that linear() gets
// begins at a multiple of kTaggedPayload and ends at one or at num_words. `pending` holds a packet
// a row; in a block each DotTeam has its own.
struct PublishRows {
  static constexpr int kRowsTogether = plat::kTaggedPayload;

  const ExchangePort& port;
  std::uint64_t epoch;
  std::int64_t num_words;
  std::uint32_t (*pending)[plat::kTaggedPayload];  // [num_rows]

  LOWLAT_DEVICE void operator()(int row_idx, int n, float value) const {
    const int place = n % plat::kTaggedPayload;
    pending[row_idx][place] = plat::float_bits(value);
    if (place != plat::kTaggedPayload - 1 && n != num_words - 1) return;
    for (int i = place + 1; i < plat::kTaggedPayload; ++i) pending[row_idx][i] = 0u;
    publish_packet(port, epoch, row_idx * packets_of(num_words) + n / plat::kTaggedPayload,
                   pending[row_idx]);
  }
};

// Waits for one packet of `source`. False: the step is over, reported. One thread calls, or all
// lanes of a warp, each for its own packet; a lane that is not `wanted` has none.
template <class Block = OneThread>
LOWLAT_DEVICE bool receive(const ExchangePort& port, std::uint64_t epoch, int source,
                           std::int64_t packet, std::uint32_t kernel, StageId stage,
                           std::uint32_t (&out)[plat::kTaggedPayload], bool wanted = true) {
  const plat::TaggedWords* src = box_of(port, port.fault.tp_rank, epoch, source) + packet;
  const auto tag = static_cast<std::uint32_t>(epoch);
  return wait_or_report<Block>(port.fault, kernel, stage, source, epoch,
                               [&] { return !wanted || plat::load_tagged(src, tag, out); });
}

// out[i] = bf( sum over ranks, ascending, of rank r's fp32 word i ). The block calls, threads split
// the packets and wait for their own; syncs at the end, and gives the same answer in every thread.
template <class Block = OneThread>
LOWLAT_DEVICE bool receive_sum(const ExchangePort& port, std::uint64_t epoch,
                               std::int64_t first_packet, std::uint16_t* out,
                               std::int64_t num_words, std::uint32_t kernel, StageId stage) {
  const auto receive_packet = [&](std::int64_t packet, bool wanted) {
    float sum[plat::kTaggedPayload] = {};
    for (int source = 0; source < port.fault.tp_size; ++source) {
      std::uint32_t words[plat::kTaggedPayload];
      if (!receive<Block>(port, epoch, source, first_packet + packet, kernel, stage, words,
                          wanted)) {
        return false;
      }
      for (int i = 0; wanted && i < plat::kTaggedPayload; ++i) {
        const float value = plat::bits_float(words[i]);
        sum[i] = source == 0 ? value : sum[i] + value;
      }
    }
    for (int i = 0; wanted && i < plat::kTaggedPayload; ++i) {
      const std::int64_t word = packet * plat::kTaggedPayload + i;
      if (word < num_words) out[word] = to_bf16(sum[i]);
    }
    return true;
  };
  return for_packets<Block>(packets_of(num_words), receive_packet);
}

// Hands every word of every rank to `put(source, word_idx, bits)`; `num_words` of each rank. The
// block calls, threads split the packets; one thread puts rank by rank, words ascending. Syncs and
// answers as receive_sum.
template <class Block = OneThread, class Put>
LOWLAT_DEVICE bool receive_all(const ExchangePort& port, std::uint64_t epoch,
                               std::int64_t first_packet, std::int64_t num_words,
                               std::uint32_t kernel, StageId stage, Put put) {
  const std::int64_t of_rank = packets_of(num_words);
  const auto receive_packet = [&](std::int64_t i, bool wanted) {
    const int source = static_cast<int>(i / of_rank);
    const std::int64_t packet = i % of_rank;
    std::uint32_t words[plat::kTaggedPayload];
    if (!receive<Block>(port, epoch, source, first_packet + packet, kernel, stage, words, wanted)) {
      return false;
    }
    for (int j = 0; wanted && j < plat::kTaggedPayload; ++j) {
      const std::int64_t word = packet * plat::kTaggedPayload + j;
      if (word < num_words) put(source, word, words[j]);
    }
    return true;
  };
  return for_packets<Block>(of_rank * port.fault.tp_size, receive_packet);
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
