// attn_whole: checks and times whole plain V4.1-Flash layers: attention half, exchange, mixture of
// experts, exchange, chained in one CUDA graph.
//
//   attn_whole tp4 [rows..]   TP4's share on one GPU, its four mailboxes looped back
//   attn_whole tp2 [rows..]   TP2 on devices 0 and 1
//
// Exit code 1: a failure.
#include "attn_layer.hpp"
#include "fused/layer.hpp"
#include "host/nvidia/exchange_region.hpp"

#ifndef LOWLAT_STAMPS
#define LOWLAT_STAMPS 0
#endif

#include <chrono>
#include <memory>

namespace lowlat::bench {
namespace moe_api = lowlat::fused;
namespace {

constexpr int kLayers = 4;
int failures = 0;

template <int kTp>
constexpr moe_api::MoeShape kShape =
    kTp == 4 ? moe_api::MoeShape::v41_tp4 : moe_api::MoeShape::v41_tp2;

// Bytes at random: `low` .. `low + range - 1`; range 0: any; e4m3: any but NaN.
__global__ void fill(std::uint8_t* data, std::size_t count, std::uint64_t seed, int low, int range,
                     bool e4m3) {
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
__global__ void fill_bf16(std::uint16_t* data, std::size_t count, std::uint64_t seed) {
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
  using Shape = shape::Dsv41Flash<kTp>;
  static constexpr std::size_t kE = Shape::kNumExperts, kI = Shape::kIntermediateLocal;
  static constexpr std::size_t kH = kHidden;
  Matrix w1, w3, w2, shared_w1, shared_w3, shared_w2;
  Buffer<std::uint16_t> gate;
  Buffer<float> bias;
  MoeLayer(std::uint64_t whole, std::uint64_t shard)
      : w1(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, false, whole + shard),
        w3(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, false, whole + shard + 11),
        w2(kE * kH * kI / 2, kE * kH * kI / 32, 127 - 7, false, whole + shard + 22),
        shared_w1(kI * kH, kI / 32 * (kH / 32), 127 - 13, true, whole + shard + 33),
        shared_w3(kI * kH, kI / 32 * (kH / 32), 127 - 13, true, whole + shard + 44),
        shared_w2(kH * kI, kH / 32 * (kI / 32), 127 - 12, true, whole + shard + 55),
        gate(kE * kH),
        bias(kE) {
    fill_bf16<<<1024, 256>>>(gate.get(), kE * kH, whole + 66);
    bias.zero();
  }
};

// A chain of layers of one rank, on the device that is current.
template <int kTp>
struct Layers {
  int rows;
  std::vector<DeviceWeights> weights;
  std::vector<std::unique_ptr<MoeLayer<kTp>>> moe;
  std::vector<DeviceKeys> keys;
  fused::ExchangePort port;
  std::uint64_t* step_epoch;
  Buffer<std::uint8_t> memory_bytes;
  fused::LayerMemory memory;
  Buffer<std::int32_t> ids;
  Buffer<fused::Stamp> stamps;
  std::vector<std::uint16_t> residual, x;

  // What is sharded differs by rank, the rest by layer alone.
  Layers(const HostWeights& host, int num_rows, const fused::ExchangePort& exchange_port,
         std::uint64_t* epoch, int rank)
      : rows(num_rows),
        port(exchange_port),
        step_epoch(epoch),
        memory_bytes(static_cast<std::size_t>(
            fused::layer_memory(nullptr, kShape<kTp>, kTp, num_rows, kLayers).bytes)),
        memory(fused::layer_memory(memory_bytes.get(), kShape<kTp>, kTp, num_rows, kLayers)),
        ids(static_cast<std::size_t>(kLayers) * num_rows * 6),
        stamps(std::size_t{16 * kLayers} * fused::kStampBlocks *
               static_cast<std::size_t>(fused::StampStage::count)) {
    stamps.zero();
    port.stamps = {stamps.get(), 16 * kLayers};
    Random random(9);
    for (int i = 0; i < kLayers; ++i) {
      weights.emplace_back(host);
      keys.emplace_back(HostKeys(rows, random));
      moe.push_back(std::make_unique<MoeLayer<kTp>>(1000 * i + 7, 100'000 * rank));
    }
    residual.resize(static_cast<std::size_t>(rows) * 4 * kHidden);
    for (auto& v : residual) v = bf16(random.normal());
    x.resize(static_cast<std::size_t>(rows) * kHidden);
    for (auto& v : x) v = bf16(random.normal());
    cuda_must(fused::layer_init(memory, kShape<kTp>, port), "layer memory");
    reset();
  }
  // Also after a fault.
  void recover() { cuda_must(fused::layer_recover(memory, kShape<kTp>, port), "layer memory"); }
  void reset() {
    put(memory.residual[0], residual);
    put(memory.residual[1], residual);
    put(memory.x, x);
    cuda_must(cudaMemset(memory.mix[1], 0, static_cast<std::size_t>(rows) * fused::kMixStride * 4),
              "memset");
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
    out.attn_hc = out.ffn_hc = {w.fn.get(), w.base.get(), w.scale.get()};
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
    return out;
  }
  void launch(const fused::LayerParts& parts, cudaStream_t stream) {
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
    cuda_must(fused::launch_layer_begin(step, step_epoch, 2 * kLayers, stream), "begin");
    cuda_must(fused::launch_layer_input(step, stream), "input");
    for (int i = 0; i < kLayers; ++i) {
      step.expert_ids = ids.get() + static_cast<std::size_t>(i) * rows * 6;
      cuda_must(fused::launch_plain_layer(layer(i), step, i, parts, stream), "layer");
    }
  }
};

struct Case {
  const char* name;
  fused::LayerParts parts;
  bool whole() const { return parts.attention && parts.experts && parts.second_statistics; }
};
const Case kCases[] = {
    {"step's first kernels alone", {false, false, false}},
    {"attention half", {true, false, true}},
    {"attention half, 4 blocks of statistics", {true, false, true, 4}},
    {"attention half, 16 blocks of statistics", {true, false, true, 16}},
    {"layer", {true, true, true}},
    {"layer, 4 idle", {true, true, true, 8, 4, 4}},
    {"layer, 0 idle", {true, true, true, 8, 16, 0}},
    {"layer without second statistics", {true, true, false}},
    {"experts, exchange", {false, true, false}},
    {"experts, exchange, statistics", {false, true, true}},
};

template <int kTp>
double distinct_experts(const Layers<kTp>& layers) {
  const std::vector<std::int32_t> ids = layers.ids.take();
  const int rows = layers.rows;
  double distinct = 0.0;
  for (int i = 0; i < kLayers; ++i) {
    std::vector<std::int32_t> seen(ids.begin() + i * rows * 6, ids.begin() + (i + 1) * rows * 6);
    std::sort(seen.begin(), seen.end());
    distinct += static_cast<double>(std::unique(seen.begin(), seen.end()) - seen.begin());
  }
  return distinct / kLayers;
}

void print(const Case& c, int tp, int rows, const Times& times, double experts, bool faulted) {
  std::printf("%-34s TP%d T=%-2d a layer: median %7.2f us  low %7.2f  high %7.2f  experts %.1f%s\n",
              c.name, tp, rows, times.median_us / kLayers, times.low_us / kLayers,
              times.high_us / kLayers, experts, faulted ? "  FAULTED" : "");
  std::fflush(stdout);
}

void report(bool good, const char* what, int rows) {
  failures += good ? 0 : 1;
  std::printf("%s T=%d %s\n", good ? "ok  " : "FAIL", rows, what);
  std::fflush(stdout);
}

bool all_finite(const std::vector<std::uint16_t>& codes) {
  bool finite = true;
  for (const std::uint16_t code : codes) finite &= (code & 0x7f80) != 0x7f80;
  return finite;
}

// Where the blocks of one layer's kernels were: medians and latest over blocks, in microseconds from
// the first block's begin.
template <int kTp>
void print_stamps(Layers<kTp>& layers, int layer_idx) {
  const std::vector<fused::Stamp> all = layers.stamps.take();
  const auto stages = static_cast<std::size_t>(fused::StampStage::count);
  std::vector<double> offset(1024, -1e300);
  std::uint64_t first_ns = ~std::uint64_t{0};
  for (std::size_t i = 0; i < all.size(); i += stages) {
    if (all[i].begin != 0) first_ns = std::min(first_ns, all[i].begin);
  }
  constexpr double kTicksAUs = 1980.0;
  for (std::size_t i = 0; i < all.size(); i += stages) {
    const fused::Stamp& align = all[i];
    if (align.begin == 0) continue;
    double& to = offset[align.multiprocessor];
    to = std::max(to, static_cast<double>(align.begin - first_ns) * 1e-3 -
                          static_cast<double>(align.end) / kTicksAUs);
  }
  const char* const kNames[] = {"qkv",      "q",   "attention", "wo_a",      "wo_b",
                                "exchange", "mix", "experts",   "exchange 2"};
  const char* const kStages[] = {"begin", "ask", "wait", "read", "compute", "sum", "store"};
  double start = 1e300;
  for (int pass = 0; pass < 2; ++pass) {
    for (int kernel = 0; kernel < 9; ++kernel) {
      for (std::size_t stage = 0; stage < 7; ++stage) {
        std::vector<double> ends, lengths;
        for (std::size_t block = 0; block < fused::kStampBlocks; ++block) {
          const fused::Stamp& stamp =
              all[((16 * layer_idx + kernel) * std::size_t{fused::kStampBlocks} + block) * stages +
                  stage];
          if (stamp.begin == 0) continue;
          const double end =
              static_cast<double>(stamp.end) / kTicksAUs + offset[stamp.multiprocessor];
          ends.push_back(end);
          if (stage > 0)
            lengths.push_back(static_cast<double>(stamp.end - stamp.begin) / kTicksAUs);
          start = std::min(start, end);
        }
        if (ends.empty() || pass == 0) continue;
        std::sort(ends.begin(), ends.end());
        std::sort(lengths.begin(), lengths.end());
        std::printf("stamp %-10s %-7s blocks %3zu end: first %7.2f median %7.2f last %7.2f",
                    kNames[kernel], kStages[stage], ends.size(), ends.front() - start,
                    ends[ends.size() / 2] - start, ends.back() - start);
        if (!lengths.empty()) {
          std::printf("  length: median %6.2f longest %6.2f", lengths[lengths.size() / 2],
                      lengths.back());
        }
        std::printf("\n");
      }
    }
  }
}

void run_tp4(const HostWeights& host, int rows, bool checks) {
  Mailboxes mail(rows, 4);
  Layers<4> layers(host, rows, mail.looped(4), mail.step_epoch.get(), 0);
  if (checks) {
    for (const Case& c : kCases) {
      Graph graph([&](cudaStream_t stream) { layers.launch(c.parts, stream); });
      for (int i = 0; i < 3; ++i) {
        if (i == 0) layers.recover();  // gates count the steps of one chain
        layers.reset();
        const auto begin = std::chrono::steady_clock::now();
        graph.replay();
        graph.wait();
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - begin;
        std::printf("%-34s one replay %.2f ms", c.name, took.count());
        mail.print_status();
      }
      if (mail.faulted()) {
        mail.recover();
        layers.recover();
        ++failures;
        continue;
      }
      if (!c.whole()) continue;
      std::vector<std::uint16_t> first;
      int different = 0;
      for (int i = 0; i < 100; ++i) {
        layers.reset();
        graph.replay();
        graph.wait();
        const auto result = layers.take();
        if (i == 0) first = result;
        different += result != first ? 1 : 0;
      }
      report(different == 0 && all_finite(first) && !mail.faulted(), c.name, rows);
    }
  }
  for (const Case& c : kCases) {
    layers.recover();
    layers.reset();
    Graph graph([&](cudaStream_t stream) { layers.launch(c.parts, stream); });
    const Times times = time_of(graph, 60);
    print(c, 4, rows, times, distinct_experts(layers), mail.faulted());
    if (LOWLAT_STAMPS != 0 && c.parts.mix_blocks == 8) {
      layers.stamps.zero();
      graph.replay();
      graph.wait();
      print_stamps(layers, 2);
    }
  }
}

void run_tp2(const HostWeights& host, int rows) {
  std::unique_ptr<host::cuda::ExchangeRegion> regions[2];
  std::unique_ptr<Layers<2>> ranks[2];
  const auto on = [](int device) { cuda_must(cudaSetDevice(device), "set device"); };
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r] = std::make_unique<host::cuda::ExchangeRegion>(r, 2, rows, kHidden);
  }
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r]->open(1 - r, regions[1 - r]->handle());
    regions[r]->probe(1 - r);
  }
  for (int r = 0; r < 2; ++r) regions[r]->probed_by(1 - r, 1'000'000'000);
  for (int r = 0; r < 2; ++r) {
    on(r);
    ranks[r] = std::make_unique<Layers<2>>(host, rows, regions[r]->port(200'000'000, 0),
                                           regions[r]->step_epoch(), r);
  }
  const auto faulted = [&] {
    return *static_cast<std::uint32_t*>(ranks[0]->port.status) != 0u ||
           *static_cast<std::uint32_t*>(ranks[1]->port.status) != 0u;
  };
  for (const Case& c : kCases) {
    std::unique_ptr<Graph> graphs[2];
    cudaEvent_t begin[2], end[2];
    for (int r = 0; r < 2; ++r) {
      on(r);
      graphs[r] =
          std::make_unique<Graph>([&](cudaStream_t stream) { ranks[r]->launch(c.parts, stream); });
      cuda_must(cudaEventCreate(&begin[r]), "event");
      cuda_must(cudaEventCreate(&end[r]), "event");
    }
    for (int r = 0; r < 2; ++r) {
      on(r);
      ranks[r]->recover();
    }
    int different = 0;
    std::vector<std::uint16_t> first;
    for (int i = 0; i < 20; ++i) {
      for (int r = 0; r < 2; ++r) {
        on(r);
        ranks[r]->reset();
        graphs[r]->replay();
      }
      std::vector<std::uint16_t> result[2];
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->wait();
        result[r] = ranks[r]->take();
      }
      if (i == 0) first = result[0];
      different += result[0] != result[1] || result[0] != first ? 1 : 0;
    }
    report(different == 0 && all_finite(first) && !faulted(), c.name, rows);
    std::vector<double> times;
    for (int i = 0; i < 45; ++i) {
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->replay();
        cuda_must(cudaEventRecord(begin[r], graphs[r]->stream()), "record");
        for (int j = 0; j < 2; ++j) graphs[r]->replay();
        cuda_must(cudaEventRecord(end[r], graphs[r]->stream()), "record");
      }
      double longest = 0.0;
      for (int r = 0; r < 2; ++r) {
        on(r);
        graphs[r]->wait();
        float ms;
        cuda_must(cudaEventElapsedTime(&ms, begin[r], end[r]), "elapsed");
        longest = std::max(longest, ms * 1e3 / 2);
      }
      if (i >= 5) times.push_back(longest);
    }
    std::sort(times.begin(), times.end());
    on(0);
    print(c, 2, rows, {times[20], times[4], times[36]}, distinct_experts(*ranks[0]), faulted());
    for (int r = 0; r < 2; ++r) {
      cudaEventDestroy(begin[r]);
      cudaEventDestroy(end[r]);
    }
  }
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "tp4" && what != "tp2") {
    std::fprintf(stderr, "usage: attn_whole tp4|tp2 [rows..]\n");
    return 2;
  }
  std::vector<int> rows;
  for (int i = 2; i < argc; ++i) rows.push_back(std::atoi(argv[i]));
  if (rows.empty()) rows = {6};
  Random random(1);
  const HostWeights host(what == "tp4" ? 16 : 32, what == "tp4" ? 2 : 4, random);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (what == "tp4") {
      run_tp4(host, rows[i], i == 0);
    } else {
      run_tp2(host, rows[i]);
    }
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
