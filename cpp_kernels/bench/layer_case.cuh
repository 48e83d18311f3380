// bench/layer_case.cuh: whole plain layers of one rank with random contents, for the program that
// times them and the test that checks them. The model is that of attn_layer.hpp.
#pragma once

#include <map>
#include <memory>

#include "bench/attn_layer.hpp"
#include "bench/marlin_layout.cuh"
#include "fused/layer.hpp"

namespace lowlat::bench {

namespace moe_api = lowlat::fused;

template <int kTp>
constexpr moe_api::MoeShape kShape =
    kIsV4 ? (kTp == 4 ? moe_api::MoeShape::v4_tp4 : moe_api::MoeShape::v4_tp2)
          : (kTp == 4 ? moe_api::MoeShape::v41_tp4 : moe_api::MoeShape::v41_tp2);

// Bytes at random: `low` .. `low + range - 1`; range 0: any; e4m3: any but NaN.
static __global__ void fill(std::uint8_t* data, std::size_t count, std::uint64_t seed, int low,
                            int range, bool e4m3) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    std::uint64_t z = (i + seed) * 0x9e37'79b9'7f4a'7c15ull;
    z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
    z ^= z >> 31;
    std::uint8_t v = static_cast<std::uint8_t>(z);
    if (range > 0) v = static_cast<std::uint8_t>(low + static_cast<int>((z >> 8) % range));
    if (e4m3 && (v & 0x7f) == 0x7f) v ^= 1;
    data[i] = v;
  }
}
static __global__ void fill_bf16(std::uint16_t* data, std::size_t count, std::uint64_t seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    std::uint64_t z = (i + seed) * 0x9e37'79b9'7f4a'7c15ull;
    z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
    z ^= z >> 31;
    // Sign, an exponent of 2^-8 .. 2^-5, any fraction.
    data[i] = static_cast<std::uint16_t>((z & 0x8000) | (119 + (z >> 16) % 4) << 7 | (z & 0x7f));
  }
}

struct Matrix {
  Buffer<std::uint8_t> codes, scales;
  Matrix() = default;
  Matrix(std::size_t num_codes, std::size_t num_scales) : codes(num_codes), scales(num_scales) {}
  Matrix(std::size_t num_codes, std::size_t num_scales, int scale_code, bool e4m3,
         std::uint64_t seed)
      : codes(num_codes), scales(num_scales) {
    fill<<<1024, 256>>>(codes.get(), num_codes, seed, 0, 0, e4m3);
    fill<<<1024, 256>>>(scales.get(), num_scales, seed + 1, scale_code - 1, 3, false);
  }
  moe_api::MoeMatrix view() const { return {codes.get(), scales.get()}; }
};

template <int kTp>
struct MoeLayer {
  using Shape = ModelOf<kTp>;
  static constexpr std::size_t kE = Shape::kNumExperts, kI = Shape::kIntermediateLocal;
  static constexpr std::size_t kH = kHidden, kBlock = kScaleGroup;
  Matrix w1, w3, w2, shared_w1, shared_w3, shared_w2;
  Buffer<std::uint16_t> gate;
  Buffer<float> bias;
  moe_api::MoeLayout layout = moe_api::MoeLayout::checkpoint;
  MoeLayer(std::uint64_t whole, std::uint64_t shard)
      : w1(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, false, whole + shard),
        w3(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, false, whole + shard + 11),
        w2(kE * kH * kI / 2, kE * kH * kI / 32, 127 - 7, false, whole + shard + 22),
        shared_w1(kI * kH, kI / kBlock * (kH / kBlock), 127 - 13, true, whole + shard + 33),
        shared_w3(kI * kH, kI / kBlock * (kH / kBlock), 127 - 13, true, whole + shard + 44),
        shared_w2(kH * kI, kH / kBlock * (kI / kBlock), 127 - 12, true, whole + shard + 55),
        gate(kE * kH),
        bias(kE) {
    fill_bf16<<<1024, 256>>>(gate.get(), kE * kH, whole + 66);
    bias.zero();
  }
  // The same values in Marlin's tiles: w1 has the rows of w3 too, behind its own.
  void relay() {
    w1 = relaid(w1, &w3, kI, kH);
    w3 = Matrix();
    w2 = relaid(w2, nullptr, kH, kI);
    layout = moe_api::MoeLayout::marlin;
  }

 private:
  static Matrix relaid(const Matrix& from, const Matrix* behind, std::size_t n, std::size_t k) {
    const auto rows = [&](Buffer<std::uint8_t> Matrix::* part, std::size_t bytes) {
      return Rows{(from.*part).get(), behind != nullptr ? (behind->*part).get() : nullptr, n,
                  bytes};
    };
    const Rows codes = rows(&Matrix::codes, k / 2), scales = rows(&Matrix::scales, k / 32);
    Matrix out(kE * codes.all() * codes.bytes, kE * scales.all() * scales.bytes);
    marlin_codes<<<1024, 256>>>(reinterpret_cast<std::uint32_t*>(out.codes.get()),
                                out.codes.size() / 4, codes);
    marlin_scales<<<1024, 256>>>(out.scales.get(), out.scales.size(), scales);
    cuda_must(cudaDeviceSynchronize(), "Marlin's layout");
    return out;
  }
};

// Experts that a layer's rows chose, on average. ids: [layers][rows, 6].
inline double distinct_experts(const std::vector<std::int32_t>& ids, int layers, int rows) {
  double distinct = 0.0;
  for (int i = 0; i < layers; ++i) {
    std::vector<std::int32_t> seen(ids.begin() + i * rows * 6, ids.begin() + (i + 1) * rows * 6);
    std::sort(seen.begin(), seen.end());
    distinct += static_cast<double>(std::unique(seen.begin(), seen.end()) - seen.begin());
  }
  return distinct / layers;
}

// Attention's weights of a rank: those that ranks share are the same on all of them.
template <int kTp>
HostWeights sharded_weights(int rank) {
  constexpr int kHeads = 64 / kTp, kGroups = 8 / kTp;
  Random random(1);
  HostWeights out(kHeads, kGroups, random);
  if (rank == 0) return out;
  Random own(100 + static_cast<std::uint64_t>(rank));
  HostWeights other(kHeads, kGroups, own);
  out.wq_b = std::move(other.wq_b);
  out.wo_a = std::move(other.wo_a);
  out.wo_b = std::move(other.wo_b);
  out.sink = std::move(other.sink);
  return out;
}

// A chain of layers of one rank, on the device that is current.
template <int kTp>
struct Layers {
  int num_layers, rows;
  std::vector<DeviceWeights> weights;
  std::vector<std::unique_ptr<MoeLayer<kTp>>> moe;
  std::vector<DeviceKeys> keys;
  fused::ExchangePort port;
  std::uint64_t* step_epoch;
  Buffer<std::uint8_t> memory_bytes;
  fused::LayerMemory memory;
  Buffer<std::int32_t> ids;
  // [layers][rows, 6], different experts of a row: where `by_table`, the layers' routing, so that
  // chains of different parts read the same experts whatever their residuals become.
  Buffer<std::int32_t> table;
  bool by_table = false, plain_o = false;
  Buffer<fused::Stamp> stamps;
  std::vector<std::uint16_t> residual, x;
  struct Input {
    std::vector<std::uint16_t> residual, x;
  };
  std::map<int, Input> inputs;  // by number: drawing one takes longer than a step

  // What is sharded differs by rank, the rest by layer alone.
  Layers(const HostWeights& host, int layers, int num_rows,
         const fused::ExchangePort& exchange_port, std::uint64_t* epoch, int rank)
      : num_layers(layers),
        rows(num_rows),
        port(exchange_port),
        step_epoch(epoch),
        memory_bytes(static_cast<std::size_t>(
            fused::layer_memory(nullptr, kShape<kTp>, kTp, num_rows, num_layers).bytes)),
        memory(fused::layer_memory(memory_bytes.get(), kShape<kTp>, kTp, num_rows, num_layers)),
        ids(static_cast<std::size_t>(num_layers) * num_rows * 6),
        table(ids.size()),
        stamps(static_cast<std::size_t>(16 * num_layers) * fused::kStampBlocks *
               static_cast<std::size_t>(fused::StampStage::count)) {
    stamps.zero();
    port.stamps = {stamps.get(), static_cast<std::uint32_t>(16 * num_layers)};
    Random random(9);
    for (int i = 0; i < num_layers; ++i) {
      weights.emplace_back(host);
      keys.emplace_back(HostKeys(rows, random));
      moe.push_back(std::make_unique<MoeLayer<kTp>>(1000 * i + 7, 100'000 * rank));
    }
    residual.resize(static_cast<std::size_t>(rows) * 4 * kHidden);
    for (auto& v : residual) v = bf16(random.normal());
    x.resize(static_cast<std::size_t>(rows) * kHidden);
    for (auto& v : x) v = bf16(random.normal());
    std::vector<std::int32_t> drawn(table.size());
    for (std::size_t first = 0; first < drawn.size(); first += 6) {
      for (std::size_t i = first; i < first + 6;) {
        drawn[i] = random.below(static_cast<int>(MoeLayer<kTp>::kE));
        if (std::find(&drawn[first], &drawn[i], drawn[i]) == &drawn[i]) ++i;
      }
    }
    table.put(drawn);
    cuda_must(fused::layer_init(memory, kShape<kTp>, port, nullptr), "layer memory");
    wait_for(nullptr);
    reset();
  }
  // As an engine has them: experts in Marlin's tiles, and V4's wo_a for what is not quantised.
  void bind_as_engine() {
    for (auto& layer : moe) layer->relay();
    plain_o = true;
  }
  // Also after a fault.
  void recover() {
    cuda_must(fused::layer_recover(memory, kShape<kTp>, port, nullptr), "layer memory");
    wait_for(nullptr);
  }
  void reset() {
    put(memory.residual[0], residual);
    put(memory.residual[1], residual);
    put(memory.x, x);
    cuda_must(cudaMemset(memory.mix[1], 0, static_cast<std::size_t>(rows) * fused::kMixStride * 4),
              "memset");
  }
  // Another input from the next reset() on: the same for the same number.
  void use_input(int input) {
    Input& own = inputs[input];
    if (own.x.size() != x.size()) {
      Random random(static_cast<std::uint64_t>(100 + input));
      for (auto& v : residual) v = bf16(random.normal());
      for (auto& v : x) v = bf16(random.normal());
      own = {residual, x};
    }
    residual = own.residual;
    x = own.x;
  }
  // Steps of fewer rows in the same memory, up to what it was made for.
  void use_rows(int num_rows) {
    rows = num_rows;
    Random random(9);
    keys.clear();
    for (int i = 0; i < num_layers; ++i) keys.emplace_back(HostKeys(rows, random));
    residual.resize(static_cast<std::size_t>(rows) * 4 * kHidden);
    x.resize(static_cast<std::size_t>(rows) * kHidden);
  }
  // Every packet keeps its tag and has another payload.
  void spoil_packets() {
    const std::int64_t bytes = fused::hop_bytes(kHidden, kQLora, 64 / kTp, 8 / kTp);
    std::vector<std::uint32_t> words(static_cast<std::size_t>(bytes / 4));
    cuda_must(cudaMemcpy(words.data(), memory.packets.x, bytes, cudaMemcpyDeviceToHost), "copy");
    for (std::size_t i = 0; i < words.size(); ++i) words[i] ^= i % 4 == 3 ? 0u : 0x7fc0'7fc0u;
    cuda_must(cudaMemcpy(memory.packets.x, words.data(), bytes, cudaMemcpyHostToDevice), "copy");
  }
  void put(std::uint16_t* to, const std::vector<std::uint16_t>& from) {
    cuda_must(cudaMemcpy(to, from.data(), 2 * from.size(), cudaMemcpyHostToDevice), "copy");
  }
  // The residual and x as they are.
  std::vector<std::uint16_t> take() const {
    std::vector<std::uint16_t> out(residual.size() + x.size());
    cuda_must(
        cudaMemcpy(out.data(), memory.residual[0], 2 * residual.size(), cudaMemcpyDeviceToHost),
        "copy");
    cuda_must(
        cudaMemcpy(out.data() + residual.size(), memory.x, 2 * x.size(), cudaMemcpyDeviceToHost),
        "copy");
    return out;
  }

  fused::PlainLayer layer(int i) const {
    const DeviceWeights& w = weights[i];
    const DeviceKeys& k = keys[i];
    const MoeLayer<kTp>& e = *moe[i];
    fused::PlainLayer out = {};
    out.wq_a = w.wq_a.view();
    out.wkv = w.wkv.view();
    out.wq_b = w.wq_b.view();
    out.wo_a = w.wo_a.view();
    out.wo_b = w.wo_b.view();
    out.q_norm = w.q_norm.get();
    out.kv_norm = w.kv_norm.get();
    out.ffn_norm = out.next_norm = w.gain.get();
    out.sink = w.sink.get();
    out.rope = rope_frequencies();
    out.attn_hc = out.ffn_hc = out.next_hc = {w.fn.get(), w.base.get(), w.scale.get()};
    out.plain_o = plain_o;
    out.experts.layout = e.layout;
    out.experts.gate = e.gate.get();
    out.experts.gate_bias = e.bias.get();
    out.experts.w1 = e.w1.view();
    out.experts.w3 = e.w3.view();
    out.experts.w2 = e.w2.view();
    out.experts.shared_w1 = e.shared_w1.view();
    out.experts.shared_w3 = e.shared_w3.view();
    out.experts.shared_w2 = e.shared_w2.view();
    out.window = {k.window.get(), kPageBytes, kSlotsPerPage};
    out.extra = {k.extra.get(), kPageBytes, kSlotsPerPage};
    out.window_idx = k.window_idx.get();
    out.extra_idx = k.extra_idx.get();
    out.num_window = kWindow;
    out.num_extra = kExtra;
    if (by_table) out.hash_ids = table.get() + static_cast<std::size_t>(i) * rows * 6;
    return out;
  }
  fused::LayerStep step() const {
    fused::LayerStep step = {};
    step.memory = memory;
    step.port = port;
    step.shape = kShape<kTp>;
    step.num_rows = rows;
    step.positions = keys[0].positions.get();
    step.kv_slots = keys[0].kv_slots.get();
    step.norm_eps = kNormEps;
    step.hc_eps = kHcEps;
    step.sinkhorn_iters = kSinkhornIters;
    return step;
  }
  void launch_input(const fused::LayerStep& step, cudaStream_t stream) const {
    const fused::PlainLayer first = layer(0);
    cuda_must(kIsV4 ? fused::launch_layer_input(step, first.attn_hc, first.next_norm, stream)
                    : fused::launch_layer_input(step, stream),
              "input");
  }
  // A step. `input`: its x is sent; false: nobody sends it.
  void launch(const fused::LayerParts& parts, cudaStream_t stream, bool input = true) {
    fused::LayerStep step = this->step();
    cuda_must(fused::launch_layer_begin(step, step_epoch, 2 * num_layers, stream), "begin");
    if (input) launch_input(step, stream);
    for (int i = 0; i < num_layers; ++i) {
      step.expert_ids = ids.get() + static_cast<std::size_t>(i) * rows * 6;
      cuda_must(fused::launch_plain_layer(layer(i), step, i, parts, stream), "layer");
    }
  }
};

}  // namespace lowlat::bench
