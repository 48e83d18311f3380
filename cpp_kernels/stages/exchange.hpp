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

// Sends num_words words to every rank, as packets first_packet and on of this epoch's box. Any
// thread; packets are independent, so rows and tiles may be sent as they are finished.
LOWLAT_DEVICE void publish(const ExchangePort& port, std::uint64_t epoch, std::int64_t first_packet,
                           const std::uint32_t* words, std::int64_t num_words) {
  for (std::int64_t begin = 0; begin < num_words; begin += plat::kTaggedPayload) {
    std::uint32_t payload[plat::kTaggedPayload] = {};
    for (int i = 0; i < plat::kTaggedPayload && begin + i < num_words; ++i) {
      payload[i] = words[begin + i];
    }
    publish_packet(port, epoch, first_packet + begin / plat::kTaggedPayload, payload);
  }
}
LOWLAT_DEVICE void publish(const ExchangePort& port, std::uint64_t epoch, std::int64_t first_packet,
                           const float* values, std::int64_t num_words) {
  for (std::int64_t begin = 0; begin < num_words; begin += plat::kTaggedPayload) {
    std::uint32_t payload[plat::kTaggedPayload] = {};
    for (int i = 0; i < plat::kTaggedPayload && begin + i < num_words; ++i) {
      payload[i] = plat::float_bits(values[begin + i]);
    }
    publish_packet(port, epoch, first_packet + begin / plat::kTaggedPayload, payload);
  }
}

// A sink of stages::linear that sends each row's results as soon as a packet of them is full: no
// read-back and no separate send. Row t's words begin at packet t * packets_of(num_words). Weight
// rows must come in ascending order from 0 (one thread calls). `pending` holds a packet a row.
struct PublishRows {
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

// Waits for one packet of `source`. False: the step is over, reported.
LOWLAT_DEVICE bool receive(const ExchangePort& port, std::uint64_t epoch, int source,
                           std::int64_t packet, std::uint32_t kernel, StageId stage,
                           std::uint32_t (&out)[plat::kTaggedPayload]) {
  const plat::TaggedWords* src = box_of(port, port.fault.tp_rank, epoch, source) + packet;
  const auto tag = static_cast<std::uint32_t>(epoch);
  return wait_or_report(port.fault, kernel, stage, source, epoch,
                        [&] { return plat::load_tagged(src, tag, out); });
}

// out[i] = bf( sum over ranks, ascending, of rank r's fp32 word i ). One thread calls.
LOWLAT_DEVICE bool receive_sum(const ExchangePort& port, std::uint64_t epoch,
                               std::int64_t first_packet, std::uint16_t* out,
                               std::int64_t num_words, std::uint32_t kernel, StageId stage) {
  for (std::int64_t packet = 0; packet < packets_of(num_words); ++packet) {
    float sum[plat::kTaggedPayload] = {};
    for (int source = 0; source < port.fault.tp_size; ++source) {
      std::uint32_t words[plat::kTaggedPayload];
      if (!receive(port, epoch, source, first_packet + packet, kernel, stage, words)) return false;
      for (int i = 0; i < plat::kTaggedPayload; ++i) {
        const float value = plat::bits_float(words[i]);
        sum[i] = source == 0 ? value : sum[i] + value;
      }
    }
    for (int i = 0; i < plat::kTaggedPayload; ++i) {
      const std::int64_t word = packet * plat::kTaggedPayload + i;
      if (word < num_words) out[word] = to_bf16(sum[i]);
    }
  }
  return true;
}

// Hands every word of every rank to `put(source, word_idx, bits)`; `num_words` of each rank.
template <class Put>
LOWLAT_DEVICE bool receive_all(const ExchangePort& port, std::uint64_t epoch,
                               std::int64_t first_packet, std::int64_t num_words,
                               std::uint32_t kernel, StageId stage, Put put) {
  for (int source = 0; source < port.fault.tp_size; ++source) {
    for (std::int64_t packet = 0; packet < packets_of(num_words); ++packet) {
      std::uint32_t words[plat::kTaggedPayload];
      if (!receive(port, epoch, source, first_packet + packet, kernel, stage, words)) return false;
      for (int i = 0; i < plat::kTaggedPayload; ++i) {
        const std::int64_t word = packet * plat::kTaggedPayload + i;
        if (word < num_words) put(source, word, words[i]);
      }
    }
  }
  return true;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
