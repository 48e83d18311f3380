// bench/attn_layer.hpp: the attention half of layers with random contents: weights, buffers, and
// its kernels' launches. A chain of layers rotates weights past the second-level cache. The model
// is V4.1-Flash, or V4-Flash where LOWLAT_BENCH_V4 is defined.
#pragma once

#include <array>
#include <cmath>
#include <limits>

#include "bench/attn_bench.hpp"
#include "fused/attention.hpp"
#include "fused/exchange.hpp"
#include "fused/exchange_mix.hpp"
#include "fused/front.hpp"
#include "fused/mix.hpp"
#include "fused/oproj.hpp"
#include "reference/format.hpp"
#include "reference/rope.hpp"

namespace lowlat::bench {

namespace fused = nvidia::fused;

#ifdef LOWLAT_BENCH_V4
template <int kTp>
using ModelOf = shape::Dsv4Flash<kTp>;
inline constexpr auto kModel = fused::FusedModel::v4;
inline constexpr float kNormEps = 1e-6f;
#else
template <int kTp>
using ModelOf = shape::Dsv41Flash<kTp>;
inline constexpr auto kModel = fused::FusedModel::v41;
inline constexpr float kNormEps = 1e-20f;
#endif
inline constexpr bool kIsV4 = kModel == fused::FusedModel::v4;
using Model = ModelOf<1>;
inline constexpr int kScaleGroup = Model::kScaleBlock;
inline constexpr int kHidden = Model::kHidden, kQLora = Model::kQLora, kDim = shape::kHeadDim;
inline constexpr int kWindow = Model::kWindow, kExtra = Model::kIndexTopk;
inline constexpr int kSlotsPerPage = 256, kNumPages = 8, kSlots = kSlotsPerPage * kNumPages;
inline constexpr std::int64_t kPageBytes = 149760;
inline constexpr float kHcEps = 1e-6f;
inline constexpr int kSinkhornIters = Model::kSinkhornIters;

inline std::uint16_t bf16(double v) { return reference::to_bf16(v); }

struct HostFp8 {
  std::vector<std::uint8_t> codes, scales;
  HostFp8() = default;
  HostFp8(std::int64_t n, std::int64_t k, int scale_code, Random& random)
      : codes(static_cast<std::size_t>(n * k)),
        scales(static_cast<std::size_t>(n / kScaleGroup * (k / kScaleGroup))) {
    for (auto& code : codes) {
      code = static_cast<std::uint8_t>(random.bits());
      if ((code & 0x7f) == 0x7f) code ^= 1;  // no NaN
    }
    for (auto& scale : scales) scale = static_cast<std::uint8_t>(scale_code - 1 + random.below(3));
  }
};
struct DeviceFp8 {
  Buffer<std::uint8_t> codes, scales;
  DeviceFp8() = default;
  explicit DeviceFp8(const HostFp8& from) : codes(from.codes), scales(from.scales) {}
  fused::Fp8Weights view() const { return {codes.get(), scales.get()}; }
};

// Weights of one layer's attention half on one rank, as the checkpoint has them. Scales are such
// that bf16 values of about one stay of about one.
struct HostWeights {
  HostFp8 wq_a, wkv, wq_b, wo_a, wo_b;
  std::vector<std::uint16_t> q_norm, kv_norm, gain;
  std::vector<float> sink, fn, base, scale;

  HostWeights(int heads, int groups, Random& random)
      // Codes have a root mean square of about 120: 2^-13 / sqrt(K / 5120) brings sums to one.
      : wq_a(kQLora, kHidden, 127 - 13, random),
        wkv(kDim, kHidden, 127 - 13, random),
        wq_b(std::int64_t{heads} * kDim, kQLora, 127 - 12, random),
        wo_a(std::int64_t{groups} * 1024, 4096, 127 - 11, random),
        wo_b(kHidden, std::int64_t{groups} * 1024, 127 - 12, random),
        q_norm(kQLora),
        kv_norm(kDim),
        gain(kHidden),
        sink(static_cast<std::size_t>(heads)),
        fn(24 * 4 * kHidden),
        base(24),
        scale(3) {
    for (auto* norm : {&q_norm, &kv_norm, &gain}) {
      for (auto& v : *norm) v = bf16(1.0 + 0.2 * random.normal());
    }
    for (auto& v : sink) v = random.normal();
    for (auto& v : fn) v = 0.01f * random.normal();
    for (auto& v : base) v = random.normal();
    for (auto& v : scale) v = 1.0f + 0.3f * random.normal();
  }
};
struct DeviceWeights {
  DeviceFp8 wq_a, wkv, wq_b, wo_a, wo_b;
  Buffer<std::uint16_t> q_norm, kv_norm, gain;
  Buffer<float> sink, fn, base, scale;
  explicit DeviceWeights(const HostWeights& from)
      : wq_a(from.wq_a),
        wkv(from.wkv),
        wq_b(from.wq_b),
        wo_a(from.wo_a),
        wo_b(from.wo_b),
        q_norm(from.q_norm),
        kv_norm(from.kv_norm),
        gain(from.gain),
        sink(from.sink),
        fn(from.fn),
        base(from.base),
        scale(from.scale) {}
  // Bytes that a layer's half reads of them; wo_a as it is stored, in eight bits.
  double bytes() const {
    double sum = 0.0;
    for (const auto* w : {&wq_a, &wkv, &wq_b, &wo_a, &wo_b}) {
      sum += static_cast<double>(w->codes.size() + w->scales.size());
    }
    return sum + 4.0 * static_cast<double>(fn.size());
  }
};

// Stored keys of a layer and the indices into them.
struct HostKeys {
  std::vector<std::uint8_t> window, extra;  // pages
  std::vector<std::int32_t> window_idx, extra_idx, kv_slots, positions;

  HostKeys(int rows, Random& random)
      : window(static_cast<std::size_t>(kPageBytes * kNumPages)),
        extra(window.size()),
        window_idx(static_cast<std::size_t>(rows) * kWindow),
        extra_idx(static_cast<std::size_t>(rows) * kExtra) {
    for (auto* pool : {&window, &extra}) {
      for (int slot = 0; slot < kSlots; ++slot) {
        std::uint8_t* page = pool->data() + slot / kSlotsPerPage * kPageBytes;
        std::uint8_t* data = page + slot % kSlotsPerPage * 576;
        std::uint8_t* scales = page + kSlotsPerPage * 576 + slot % kSlotsPerPage * 8;
        for (int i = 0; i < 448; ++i) {
          data[i] = static_cast<std::uint8_t>(random.bits());
          if ((data[i] & 0x7f) == 0x7f) data[i] ^= 1;
        }
        for (int i = 0; i < 64; ++i) {
          const std::uint16_t v = bf16(random.normal());
          std::memcpy(data + 448 + 2 * i, &v, 2);
        }
        for (int i = 0; i < 7; ++i)
          scales[i] = static_cast<std::uint8_t>(127 - 7 - random.below(2));
      }
    }
    // Requests of six rows; a request's rows are stored one after another.
    int slot = 0;
    for (int row = 0; row < rows; ++row) {
      const int request = row / 6;
      kv_slots.push_back(request * 200 + 100 + row % 6);
      positions.push_back(1000 + 70'001 * request + row % 6);
      for (int i = 0; i < kWindow; ++i) {
        slot = request * 200 + 100 + row % 6 - (kWindow - 1) + i;
        window_idx[static_cast<std::size_t>(row * kWindow + i)] = slot < request * 200 ? -1 : slot;
      }
      for (int i = 0; i < kExtra; ++i) {
        extra_idx[static_cast<std::size_t>(row * kExtra + i)] = random.below(kSlots);
      }
    }
  }
};
struct DeviceKeys {
  Buffer<std::uint8_t> window, extra;
  Buffer<std::int32_t> window_idx, extra_idx, kv_slots, positions;
  explicit DeviceKeys(const HostKeys& from)
      : window(from.window),
        extra(from.extra),
        window_idx(from.window_idx),
        extra_idx(from.extra_idx),
        kv_slots(from.kv_slots),
        positions(from.positions) {}
};

// What a rank's peers write into, and its port. One device: every rank is this one, and what it
// sends to rank r comes back as rank r's.
struct Mailboxes {
  std::int64_t box_packets;
  Buffer<std::uint8_t> boxes;
  Buffer<std::uint32_t> words;  // abort word, fault claim
  Buffer<std::uint64_t> step_epoch;
  std::uint64_t* status = nullptr;  // pinned: a status record
  std::uint64_t budget_ns;          // of the ports' waits

  Mailboxes(int rows, int tp_size, std::uint64_t wait_budget_ns = 20'000'000)
      : box_packets(std::int64_t{rows} * kHidden / 4),
        boxes(static_cast<std::size_t>(2 * tp_size * box_packets * 16)),
        words(64),
        step_epoch(1),
        budget_ns(wait_budget_ns) {
    boxes.zero();
    words.zero();
    step_epoch.put({1});
    cuda_must(cudaHostAlloc(reinterpret_cast<void**>(&status), 64, cudaHostAllocPortable),
              "pinned memory");
    std::memset(status, 0, 64);
  }
  Mailboxes(const Mailboxes&) = delete;
  Mailboxes& operator=(const Mailboxes&) = delete;
  ~Mailboxes() { cudaFreeHost(status); }

  fused::ExchangePort port(int tp_rank, int tp_size) const {
    fused::ExchangePort out = {};
    out.status = status;
    out.fault_claim = words.get() + 1;
    out.step_epoch = step_epoch.get();
    out.budget_ns = budget_ns;
    out.box_packets = box_packets;
    out.tp_rank = tp_rank;
    out.tp_size = tp_size;
    return out;
  }
  fused::ExchangePort looped(int tp_size) const {
    fused::ExchangePort out = port(0, tp_size);
    for (int rank = 0; rank < tp_size; ++rank) {
      out.boxes[rank] = boxes.get() + rank * box_packets * 16;
      out.abort_words[rank] = words.get();
    }
    return out;
  }
  // The state of the status record. The device is idle.
  bool faulted() const { return (status[0] & 0xffff'ffffu) != 0u; }
  void print_status() const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(status);
    std::printf("  state %u kernel %u stage %u peer %d epoch %llu\n", words[0], words[1], words[2],
                static_cast<int>(words[3]), static_cast<unsigned long long>(status[2]));
    std::fflush(stdout);
  }
  // After a fault. The device is idle.
  void recover() {
    words.zero();
    std::memset(status, 0, 64);
  }
};

// Which kernels rehearse (exchange_gate.cuh), as bits.
// Gates and tickets of a few sublayers.
class Gates {
 public:
  enum Kind { ticket, mix, count };

  explicit Gates(int sublayers) : words_(static_cast<std::size_t>(sublayers) * count * kStride) {}
  fused::Gate at(int sublayer, Kind kind, std::uint32_t blocks) const {
    return {words() + (sublayer * count + kind) * kStride, blocks, nullptr, 0};
  }
  std::uint32_t* words() const { return words_.get(); }
  int num_words() const { return static_cast<int>(words_.size()); }

 private:
  static constexpr int kStride = 32;  // words: nobody shares a line
  Buffer<std::uint32_t> words_;
};

inline fused::RopeFrequencies rope_frequencies() {
  fused::RopeFrequencies out;
  for (int i = 0; i < 32; ++i) out.values[i] = reference::rope_frequency(i, true);
  return out;
}

// Buffers between the kernels of one rank, for `rows` rows.
struct Activations {
  int rows, heads, groups, padded;
  Buffer<std::uint16_t> residual[2], x, qa, kv, q, o;
  Buffer<std::uint8_t> x_codes, latent_codes, u_codes;
  Buffer<float> x_scale, latent_scale, turns, o_scale, u_scale, partial, qa_squares, mix_partial,
      mix, mixes[2];
  // Up to kHopRows rows: instead of x_codes, qa, kv, q, o and u_codes and their scales.
  Buffer<std::uint8_t> packet_bytes;
  fused::HopBuffers packets;
  Buffer<fused::ExchangePort> port_copy;
  int index = 1;  // of the exchange whose epoch is the packets' tag

  Activations(int num_rows, int num_heads, int num_groups)
      : rows(num_rows),
        heads(num_heads),
        groups(num_groups),
        padded(fused::padded_rows(num_rows)),
        x(count(kHidden)),
        qa(count(kQLora)),
        kv(count(kDim)),
        q(count(heads * kDim)),
        o(count(heads * kDim)),
        x_codes(count(kHidden)),
        latent_codes(count(kQLora)),
        u_codes(count(groups * 1024)),
        x_scale(static_cast<std::size_t>(kHidden / kScaleGroup * padded)),
        latent_scale(static_cast<std::size_t>(kQLora / kScaleGroup * padded)),
        turns(count(2 * 32)),
        o_scale(static_cast<std::size_t>(heads * kDim / kScaleGroup * padded)),
        u_scale(static_cast<std::size_t>(groups * 1024 / kScaleGroup * padded)),
        partial(count(kHidden)),
        qa_squares(static_cast<std::size_t>(kQLora / 16 * padded)),
        mix_partial(static_cast<std::size_t>(fused::kMaxMixBlocks * rows * fused::kMixStride)),
        mix(count(fused::kMixStride)),
        packet_bytes(
            static_cast<std::size_t>(fused::hop_bytes(kHidden, kQLora, num_heads, num_groups))),
        packets(fused::hop_buffers(packet_bytes.get(), kHidden, kQLora, num_heads, num_groups)) {
    packet_bytes.zero();
    for (auto& r : residual) r = Buffer<std::uint16_t>(count(4 * kHidden));
    for (auto& m : mixes) m = Buffer<float>(count(fused::kMixStride));
  }
  std::size_t count(int width) const { return static_cast<std::size_t>(rows) * width; }
  // Before any launch.
  void tell(const fused::ExchangePort& port) {
    port_copy = Buffer<fused::ExchangePort>(std::vector<fused::ExchangePort>{port});
  }
  fused::Hop hop() const { return {port_copy.get(), index, 0}; }
  bool hops() const { return rows <= fused::kHopRows; }

  // [rows, packets a row] of packets, as words.
  std::vector<std::uint32_t> words_of(const void* from, int packets_a_row) const {
    std::vector<std::uint32_t> out(count(packets_a_row) * 4);
    cuda_must(cudaMemcpy(out.data(), from, out.size() * 4, cudaMemcpyDeviceToHost), "copy");
    return out;
  }
  // Values of two bytes, four a packet.
  std::vector<std::uint16_t> take_halves(const Buffer<std::uint16_t>& plain, const void* from,
                                         int width) const {
    if (!hops()) return plain.take();
    const std::vector<std::uint32_t> words = words_of(from, width / 4);
    std::vector<std::uint16_t> out(count(width));
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::uint16_t>(words[i / 4 * 4 + i % 4 / 2] >> 16 * (i % 2));
    }
    return out;
  }
  // Codes, eight a packet.
  std::vector<std::uint8_t> take_codes(const Buffer<std::uint8_t>& plain, const void* from,
                                       int width) const {
    if (!hops()) return plain.take();
    const std::vector<std::uint32_t> words = words_of(from, width / 8);
    std::vector<std::uint8_t> out(count(width));
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::uint8_t>(words[i / 8 * 4 + i % 8 / 4] >> 8 * (i % 4));
    }
    return out;
  }
  // Scales of groups, `values` a packet; NaN where a group's packets do not agree.
  std::vector<float> take_scales(const Buffer<float>& plain, const void* from, int width,
                                 int values) const {
    if (!hops()) return plain.take();
    const std::vector<std::uint32_t> words = words_of(from, width / values);
    std::vector<float> out(static_cast<std::size_t>(width / kScaleGroup * padded));
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < width; i += values) {
        const std::uint32_t bits =
            words[(static_cast<std::size_t>(row) * width + i) / values * 4 + 2];
        float scale;
        std::memcpy(&scale, &bits, 4);
        float& to = out[static_cast<std::size_t>(i / kScaleGroup * padded + row)];
        to = i % kScaleGroup == 0 || to == scale ? scale : std::numeric_limits<float>::quiet_NaN();
      }
    }
    return out;
  }
  // u and o as a kernel would send them; scales as u_scale and o_scale have them.
  void put_u(const std::vector<std::uint8_t>& codes, const std::vector<float>& scale,
             std::uint32_t tag) {
    u_codes.put(codes);
    u_scale.put(scale);
    put_packets(packets.u, codes, scale, groups * 1024, tag);
  }
  void put_o(const std::vector<std::uint16_t>& halves, const std::vector<float>& scale,
             std::uint32_t tag) {
    o.put(halves);
    o_scale.put(scale);
    put_packets(packets.o, halves, scale, groups * 4096, tag);
  }
  template <class T>
  void put_packets(void* to, const std::vector<T>& values, const std::vector<float>& scale,
                   int width, std::uint32_t tag) const {
    if (!hops()) return;
    constexpr std::size_t kValues = 8 / sizeof(T);  // of a packet
    std::vector<std::uint32_t> words(values.size() / kValues * 4);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint32_t* packet = &words[i / kValues * 4];
      std::memcpy(reinterpret_cast<T*>(packet) + i % kValues, &values[i], sizeof(T));
      const std::size_t group = i % width / kScaleGroup * padded + i / width;
      std::memcpy(packet + 2, &scale[group], 4);
      packet[3] = tag;
    }
    cuda_must(cudaMemcpy(to, words.data(), words.size() * 4, cudaMemcpyHostToDevice), "copy");
  }

  fused::MixParams mixing(const DeviceWeights& w, int side, std::uint32_t* ticket,
                          const fused::Gate& done) const {
    fused::MixParams p = {};
    p.residual = residual[side].get();
    p.fn = w.fn.get();
    p.base = w.base.get();
    p.scale = w.scale.get();
    p.norm_eps = kNormEps;
    p.hc_eps = kHcEps;
    p.sinkhorn_iters = kSinkhornIters;
    p.hidden = kHidden;
    p.num_rows = rows;
    p.partial = mix_partial.get();
    p.mix = mix.get();
    p.ticket = ticket;
    p.done = done;
    return p;
  }
  fused::FrontParams front(const DeviceWeights& w, const DeviceKeys& keys) const {
    fused::FrontParams p = {};
    p.model = kModel;
    p.num_rows = rows;
    p.num_heads = heads;
    p.norm_eps = kNormEps;
    p.x_codes = x_codes.get();
    p.x_scale = x_scale.get();
    p.wq_a = w.wq_a.view();
    p.wkv = w.wkv.view();
    p.wq_b = w.wq_b.view();
    p.q_norm = w.q_norm.get();
    p.kv_norm = w.kv_norm.get();
    p.positions = keys.positions.get();
    p.kv_slots = keys.kv_slots.get();
    p.rope = rope_frequencies();
    p.qa = qa.get();
    p.kv = kv.get();
    p.q = q.get();
    p.kv_pages = {keys.window.get(), kPageBytes, kSlotsPerPage};
    p.qa_squares = qa_squares.get();
    p.latent_codes = latent_codes.get();
    p.latent_scale = latent_scale.get();
    p.turns = turns.get();
    p.hop = hop();
    p.packets = packets;
    p.x_index = index;
    return p;
  }
  fused::AttentionParams attention(const DeviceWeights& w, const DeviceKeys& keys) const {
    fused::AttentionParams p = {};
    p.model = kModel;
    p.num_rows = rows;
    p.num_heads = heads;
    p.norm_eps = kNormEps;
    p.q = q.get();
    p.sink = w.sink.get();
    p.positions = keys.positions.get();
    p.rope = rope_frequencies();
    p.window = {keys.window.get(), kPageBytes, kSlotsPerPage};
    p.extra = {keys.extra.get(), kPageBytes, kSlotsPerPage};
    p.window_idx = keys.window_idx.get();
    p.extra_idx = keys.extra_idx.get();
    p.num_window = kWindow;
    p.num_extra = kExtra;
    p.kv_slots = keys.kv_slots.get();
    p.o = o.get();
    p.o_scale = o_scale.get();
    p.hop = hop();
    p.packets = packets;
    return p;
  }
  fused::OprojParams oproj(const DeviceWeights& w, const fused::ExchangePort& port,
                           int exchange_index, bool published) const {
    fused::OprojParams p = {};
    p.model = kModel;
    p.num_rows = rows;
    p.num_groups = groups;
    p.o = o.get();
    p.o_scale = o_scale.get();
    p.wo_a = w.wo_a.view();
    p.wo_b = w.wo_b.view();
    p.u_codes = u_codes.get();
    p.u_scale = u_scale.get();
    p.published = published;
    p.port = port;
    p.exchange_index = exchange_index;
    p.partial = partial.get();
    p.hop = hop();
    p.packets = packets;
    return p;
  }
  fused::ExchangeNormParams exchange(const DeviceWeights& w, const fused::ExchangePort& port,
                                     int exchange_index, int side, bool early) const {
    fused::ExchangeNormParams p = {};
    p.port = port;
    p.exchange_index = exchange_index;
    p.stage = fused::ExchangeStage::attention_sum;
    p.num_rows = rows;
    p.mix = mix.get();
    p.norm_eps = kNormEps;
    p.gain = w.gain.get();
    p.residual_in = residual[side].get();
    p.residual_out = residual[1 - side].get();
    p.x = x.get();
    p.x_codes = x_codes.get();
    p.x_scale = x_scale.get();
    p.x_packets = packets.x;
    p.early = early;
    return p;
  }
  // V4: from residual[side] to the other; parameters from mixes[side] to the other. receives false:
  // residual[side] alone, its parameters to mixes[side].
  fused::ExchangeMixParams exchange_mix(const DeviceWeights& w, const fused::ExchangePort& port,
                                        int exchange_index, int side, bool receives) const {
    fused::ExchangeMixParams p = {};
    p.port = port;
    p.exchange_index = exchange_index;
    p.stage = fused::ExchangeStage::attention_sum;
    p.num_rows = rows;
    p.receives = receives;
    p.few_blocks = receives && side == 1;
    p.mix_in = mixes[side].get();
    p.residual_in = residual[side].get();
    p.next = {w.fn.get(), w.base.get(), w.scale.get()};
    p.gain = w.gain.get();
    p.norm_eps = kNormEps;
    p.hc_eps = kHcEps;
    p.sinkhorn_iters = kSinkhornIters;
    p.residual_out = residual[1 - side].get();
    p.mix_out = mixes[receives ? 1 - side : side].get();
    p.x = x.get();
    p.x_codes = x_codes.get();
    p.x_scale = x_scale.get();
    p.x_packets = packets.x;
    return p;
  }
};

}  // namespace lowlat::bench
