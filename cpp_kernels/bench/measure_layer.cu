// bench/measure_layer.cu: plain V4.1-Flash layers on one rank, checked and
// timed; the program behind `lowlat bench layer` and, built with
// LOWLAT_STAMPS=1, behind `lowlat profile layer`.
//
// A chain of layers in one CUDA graph, each with weights of its own, so that no
// cache holds them; a figure is the graph's time over the number of layers. One
// GPU: the mailboxes of all ranks are its own. As many GPUs as ranks: the
// longest rank's time of four replays in a row.
#include <fstream>
#include <memory>

#include "attn_layer.hpp"
#include "fused/layer.hpp"
#include "host/nvidia/exchange_region.hpp"
#include "machine.cuh"
#include "report.hpp"
#include "shape/bytes.hpp"
#include "stamps_file.hpp"
#include "words.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4, kReplays = 20, kStampedLayer = 2;
constexpr std::uint64_t kBudgetNs = 200'000'000;
#ifdef LOWLAT_STAMPS
constexpr bool kStamps = LOWLAT_STAMPS != 0;
#else
constexpr bool kStamps = false;
#endif

template <int kTp>
constexpr lowlat::fused::MoeShape kShape =
    kTp == 4 ? lowlat::fused::MoeShape::v41_tp4 : lowlat::fused::MoeShape::v41_tp2;

__device__ std::uint64_t mixed_bits(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t z = (i + seed) * 0x9e37'79b9'7f4a'7c15ull;
  z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
  return z ^ z >> 31;
}
// Any byte but e4m3's NaN; range > 0: low .. low + range - 1.
__global__ void fill_bytes(std::uint8_t* data, std::size_t count, std::uint64_t seed, int low,
                           int range) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    const std::uint64_t z = mixed_bits(i, seed);
    auto v = static_cast<std::uint8_t>(z);
    if (range > 0) v = static_cast<std::uint8_t>(low + static_cast<int>((z >> 8) % range));
    data[i] = (v & 0x7f) == 0x7f && range == 0 ? v ^ 1 : v;
  }
}
// Sign, a magnitude of 2^-8 to 2^-4.
__global__ void fill_bf16(std::uint16_t* data, std::size_t count, std::uint64_t seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    const std::uint64_t z = mixed_bits(i, seed);
    data[i] = static_cast<std::uint16_t>((z & 0x8000) | (119 + (z >> 16) % 4) << 7 | (z & 0x7f));
  }
}

struct Matrix {
  Buffer<std::uint8_t> codes, scales;
  Matrix(std::size_t num_codes, std::size_t num_scales, int scale_code, std::uint64_t seed)
      : codes(num_codes), scales(num_scales) {
    fill_bytes<<<1024, 256>>>(codes.get(), num_codes, seed, 0, 0);
    fill_bytes<<<1024, 256>>>(scales.get(), num_scales, seed + 1, scale_code - 1, 3);
  }
  lowlat::fused::MoeMatrix view() const { return {codes.get(), scales.get()}; }
};

// A layer's experts. The router is the same on every rank; what is sharded is
// not.
template <int kTp>
struct Experts {
  using Shape = shape::Dsv41Flash<kTp>;
  static constexpr std::size_t kE = Shape::kNumExperts, kI = Shape::kIntermediateLocal;
  static constexpr std::size_t kH = Shape::kHidden, kB = Shape::kScaleBlock;
  Matrix w1, w3, w2, shared_w1, shared_w3, shared_w2;
  Buffer<std::uint16_t> gate;
  Buffer<float> bias;
  Experts(std::uint64_t whole, std::uint64_t shard)
      : w1(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, shard),
        w3(kE * kI * kH / 2, kE * kI * kH / 32, 127 - 8, shard + 11),
        w2(kE * kH * kI / 2, kE * kH * kI / 32, 127 - 7, shard + 22),
        shared_w1(kI * kH, kI / kB * (kH / kB), 127 - 13, shard + 33),
        shared_w3(kI * kH, kI / kB * (kH / kB), 127 - 13, shard + 44),
        shared_w2(kH * kI, kH / kB * (kI / kB), 127 - 12, shard + 55),
        gate(kE * kH),
        bias(kE) {
    fill_bf16<<<1024, 256>>>(gate.get(), kE * kH, whole);
    bias.zero();
  }
  lowlat::fused::MoeWeights view() const {
    lowlat::fused::MoeWeights w = {};
    w.gate = gate.get();
    w.gate_bias = bias.get();
    w.w1 = w1.view();
    w.w3 = w3.view();
    w.w2 = w2.view();
    w.shared_w1 = shared_w1.view();
    w.shared_w3 = shared_w3.view();
    w.shared_w2 = shared_w2.view();
    return w;
  }
};

// The layers of one rank on the device that is current. Weights serve all row
// counts.
template <int kTp>
struct RankWeights {
  std::vector<DeviceWeights> attention;
  std::vector<std::unique_ptr<Experts<kTp>>> experts;

  RankWeights(const HostWeights& host, int rank) {
    for (int i = 0; i < kLayers; ++i) {
      const std::uint64_t whole = 1000 * i + 7;
      attention.emplace_back(host);
      experts.push_back(std::make_unique<Experts<kTp>>(whole, whole + 100'000 * (rank + 1)));
    }
    cuda_must(cudaDeviceSynchronize(), "weights");
  }
};

template <int kTp>
struct Rank {
  const RankWeights<kTp>& weights;
  std::vector<DeviceKeys> keys;
  Buffer<std::uint8_t> bytes;
  fused::LayerStep step = {};
  std::uint64_t* step_epoch;
  Buffer<std::int32_t> ids;
  std::vector<std::uint16_t> residual, x;
  std::unique_ptr<Graph> graph;

  Rank(const RankWeights<kTp>& rank_weights, int rows, const fused::ExchangePort& port,
       std::uint64_t* epoch)
      : weights(rank_weights),
        step_epoch(epoch),
        ids(static_cast<std::size_t>(kLayers) * rows * 6),
        residual(static_cast<std::size_t>(rows) * 4 * kHidden),
        x(static_cast<std::size_t>(rows) * kHidden) {
    Random random(9);
    for (int i = 0; i < kLayers; ++i) keys.emplace_back(HostKeys(rows, random));
    for (auto* values : {&residual, &x}) {
      for (auto& v : *values) v = bf16(random.normal());
    }
    const auto memory = [&](void* base) {
      return fused::layer_memory(base, kShape<kTp>, kTp, rows, kLayers);
    };
    bytes = Buffer<std::uint8_t>(static_cast<std::size_t>(memory(nullptr).bytes));
    step.memory = memory(bytes.get());
    step.port = port;
    step.shape = kShape<kTp>;
    step.num_rows = rows;
    step.positions = keys[0].positions.get();
    step.kv_slots = keys[0].kv_slots.get();
    step.norm_eps = kNormEps;
    step.hc_eps = kHcEps;
    step.sinkhorn_iters = kSinkhornIters;
    cuda_must(fused::layer_init(step.memory, step.shape, step.port), "layer memory");
    begin();
  }
  // The inputs of a step. The device is idle.
  void begin() {
    const auto put = [](std::uint16_t* to, const std::vector<std::uint16_t>& from) {
      cuda_must(cudaMemcpy(to, from.data(), 2 * from.size(), cudaMemcpyHostToDevice), "inputs");
    };
    put(step.memory.residual[0], residual);
    put(step.memory.x, x);
  }
  std::vector<std::uint16_t> result() const {
    std::vector<std::uint16_t> out(residual.size());
    cuda_must(
        cudaMemcpy(out.data(), step.memory.residual[0], 2 * out.size(), cudaMemcpyDeviceToHost),
        "result");
    return out;
  }
  fused::PlainLayer layer(int i) const {
    const DeviceWeights& w = weights.attention[i];
    fused::PlainLayer out = {};
    out.wq_a = w.wq_a.view();
    out.wkv = w.wkv.view();
    out.wq_b = w.wq_b.view();
    out.wo_a = w.wo_a.view();
    out.wo_b = w.wo_b.view();
    out.q_norm = w.q_norm.get();
    out.kv_norm = w.kv_norm.get();
    out.ffn_norm = w.gain.get();
    out.next_norm = w.gain.get();
    out.sink = w.sink.get();
    out.rope = rope_frequencies();
    out.attn_hc = out.ffn_hc = {w.fn.get(), w.base.get(), w.scale.get()};
    out.experts = weights.experts[i]->view();
    out.window = {keys[i].window.get(), kPageBytes, kSlotsPerPage};
    out.extra = {keys[i].extra.get(), kPageBytes, kSlotsPerPage};
    out.window_idx = keys[i].window_idx.get();
    out.extra_idx = keys[i].extra_idx.get();
    out.num_window = kWindow;
    out.num_extra = kExtra;
    return out;
  }
  void launch(const fused::LayerParts& parts, cudaStream_t stream) {
    cuda_must(fused::launch_layer_begin(step, step_epoch, 2 * kLayers, stream), "begin");
    cuda_must(fused::launch_layer_input(step, stream), "input");
    for (int i = 0; i < kLayers; ++i) {
      step.expert_ids = ids.get() + static_cast<std::size_t>(i) * step.num_rows * 6;
      cuda_must(fused::launch_plain_layer(layer(i), step, i, parts, stream), "layer");
    }
  }
  void capture(const fused::LayerParts& parts) {
    graph = std::make_unique<Graph>([&](cudaStream_t stream) { launch(parts, stream); });
    // Gates count the steps of one chain.
    cuda_must(fused::layer_recover(step.memory, step.shape, step.port), "layer memory");
  }
  // What a layer of these parts must read: weights of the chosen experts, once
  // each, and keys.
  double layer_bytes(const fused::LayerParts& parts) const {
    using Shape = shape::Dsv41Flash<kTp>;
    const int rows = step.num_rows;
    double sum = 0.0;
    if (parts.attention) {
      sum += weights.attention[0].bytes() + rows * shape::row_kv_bytes<Shape>();
    }
    if (parts.experts) {
      const std::vector<std::int32_t> chosen = ids.take();
      double distinct = 0.0;
      for (int i = 0; i < kLayers; ++i) {
        std::vector<std::int32_t> own(chosen.begin() + i * rows * 6,
                                      chosen.begin() + (i + 1) * rows * 6);
        std::sort(own.begin(), own.end());
        distinct += static_cast<double>(std::unique(own.begin(), own.end()) - own.begin());
      }
      sum += distinct / kLayers * shape::expert_weight_bytes<Shape>() +
             shape::moe_weight_bytes<Shape>(0) + shape::mix_weight_bytes<Shape>() / 2;
    }
    return sum;
  }
};

bool finite(const std::vector<std::uint16_t>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](std::uint16_t v) { return (v & 0x7f80) != 0x7f80; });
}

// All ranks of a group, each on its device or all looped back on one.
template <int kTp>
class Group {
 public:
  Group(const std::vector<std::unique_ptr<RankWeights<kTp>>>& weights, int rows) {
    const int gpus = static_cast<int>(weights.size());
    if (gpus == 1) {
      mail_ = std::make_unique<Mailboxes>(rows, kTp);
      fused::ExchangePort port = mail_->looped(kTp);
      port.budget_ns = kBudgetNs;
      status_.push_back(reinterpret_cast<const std::uint32_t*>(mail_->status));
      add_stamps(port);
      ranks_.push_back(
          std::make_unique<Rank<kTp>>(*weights[0], rows, port, mail_->step_epoch.get()));
      return;
    }
    for (int r = 0; r < gpus; ++r) {
      on(r);
      regions_.push_back(std::make_unique<host::cuda::ExchangeRegion>(r, kTp, rows, kHidden));
    }
    for (int r = 0; r < gpus; ++r) {
      on(r);
      for (int peer = 0; peer < gpus; ++peer) {
        if (peer == r) continue;
        regions_[r]->open(peer, regions_[peer]->handle());
        regions_[r]->probe(peer);
      }
    }
    for (int r = 0; r < gpus; ++r) {
      on(r);
      for (int peer = 0; peer < gpus; ++peer) {
        if (peer != r) regions_[r]->probed_by(peer, kBudgetNs);
      }
      fused::ExchangePort port = regions_[r]->port(kBudgetNs, 0);
      status_.push_back(static_cast<const std::uint32_t*>(port.status));
      ranks_.push_back(
          std::make_unique<Rank<kTp>>(*weights[r], rows, port, regions_[r]->step_epoch()));
    }
  }
  const Rank<kTp>& first() const { return *ranks_[0]; }

  void capture(const fused::LayerParts& parts) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      on(r);
      ranks_[r]->capture(parts);
    }
  }
  void begin() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      on(r);
      ranks_[r]->begin();
    }
  }
  // One step by the graphs, or launched as it comes.
  void run(bool eager) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      on(r);
      if (eager) {
        ranks_[r]->launch({}, nullptr);
      } else {
        ranks_[r]->graph->replay();
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      on(r);
      cuda_must(cudaDeviceSynchronize(), "step");
    }
  }
  std::vector<std::uint16_t> result(std::size_t r) {
    on(r);
    return ranks_[r]->result();
  }
  std::size_t size() const { return ranks_.size(); }
  // "" or the status words of the first rank that has any.
  std::string fault() const {
    for (std::size_t r = 0; r < status_.size(); ++r) {
      if (status_[r][0] == 0) continue;
      std::string words = "rank " + std::to_string(r) + ": kernel ";
      words += std::to_string(status_[r][1]) + ", stage " + std::to_string(status_[r][2]);
      return words + ", peer " + std::to_string(status_[r][3]);
    }
    return "";
  }
  // Microseconds a layer, of the longest rank.
  Spread time(int repeats) {
    // Several replays in a row where there are peers, so that the ranks' starts
    // do not count.
    const int in_a_row = size() > 1 ? 4 : 1;
    std::vector<cudaEvent_t> from(size()), to(size());
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      cuda_must(cudaEventCreate(&from[r]), "event");
      cuda_must(cudaEventCreate(&to[r]), "event");
    }
    std::vector<double> times;
    for (int i = 0; i < repeats + 5; ++i) {
      for (std::size_t r = 0; r < size(); ++r) {
        on(r);
        Graph& graph = *ranks_[r]->graph;
        if (size() > 1) graph.replay();
        cuda_must(cudaEventRecord(from[r], graph.stream()), "record");
        for (int j = 0; j < in_a_row; ++j) graph.replay();
        cuda_must(cudaEventRecord(to[r], graph.stream()), "record");
      }
      double longest = 0.0;
      for (std::size_t r = 0; r < size(); ++r) {
        on(r);
        ranks_[r]->graph->wait();
        float ms = 0.0f;
        cuda_must(cudaEventElapsedTime(&ms, from[r], to[r]), "elapsed");
        longest = std::max(longest, ms * 1e3 / in_a_row / kLayers);
      }
      if (i >= 5) times.push_back(longest);
    }
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      cudaEventDestroy(from[r]);
      cudaEventDestroy(to[r]);
    }
    return spread_of(times);
  }
  // Of the last step on the first rank.
  std::vector<fused::Stamp> stamps() const { return stamps_.take(); }
  void clear_stamps() { stamps_.zero(); }

 private:
  void on(std::size_t rank) const {
    if (!regions_.empty() || size() > 1) cuda_must(cudaSetDevice(static_cast<int>(rank)), "device");
  }
  void add_stamps(fused::ExchangePort& port) {
    if (!kStamps) return;
    constexpr std::uint32_t kKernels = 16 * kLayers;
    stamps_ = Buffer<fused::Stamp>(std::size_t{kKernels} * fused::kStampBlocks *
                                   static_cast<std::size_t>(fused::StampStage::count));
    stamps_.zero();
    port.stamps = {stamps_.get(), kKernels};
  }

  std::unique_ptr<Mailboxes> mail_;
  std::vector<std::unique_ptr<host::cuda::ExchangeRegion>> regions_;
  std::vector<std::unique_ptr<Rank<kTp>>> ranks_;
  std::vector<const std::uint32_t*> status_;
  Buffer<fused::Stamp> stamps_;
};

// Eager and replayed steps give the same bits on every rank, and nothing
// faulted.
template <int kTp>
bool check(Report& report, Group<kTp>& group, int rows) {
  const std::string at = " T=" + std::to_string(rows);
  group.begin();
  group.run(true);
  const std::vector<std::uint16_t> first = group.result(0);
  int different = 0;
  for (std::size_t r = 1; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  group.capture({});
  for (int i = 0; i < kReplays && group.fault().empty(); ++i) {
    group.begin();
    group.run(false);
    for (std::size_t r = 0; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  }
  const std::string fault = group.fault();
  report.check("no wait expired" + at, fault.empty(), fault);
  report.check("residual finite" + at, finite(first));
  report.check(std::to_string(kReplays) + " replays and all ranks equal eager" + at, different == 0,
               std::to_string(different) + " differ");
  return fault.empty();
}

template <int kTp>
int run(const Words& words, Report& report, double clock_mhz, const std::string& gpu) {
  Random random(1);
  const HostWeights host(64 / kTp, 8 / kTp, random);
  std::vector<std::unique_ptr<RankWeights<kTp>>> weights;
  for (int r = 0; r < words.gpus; ++r) {
    cuda_must(cudaSetDevice(r), "device");
    weights.push_back(std::make_unique<RankWeights<kTp>>(host, r));
  }
  cuda_must(cudaSetDevice(0), "device");
  for (const int rows : words.rows) {
    Group<kTp> group(weights, rows);
    if (!check(report, group, rows)) return 1;
    struct Part {
      const char* name;
      fused::LayerParts parts;
    };
    Part parts[3] = {{"layer", {}}, {"attention", {}}, {"moe", {}}};
    parts[1].parts.experts = parts[1].parts.second_statistics = false;
    parts[2].parts.attention = false;
    for (const Part& part : parts) {
      group.capture(part.parts);
      const Spread us = group.time(words.repeats);
      if (!group.fault().empty()) {
        report.check(std::string("no wait expired in ") + part.name, false, group.fault());
        return 1;
      }
      report.figure({part.name, "v41", words.schedule, kTp, words.gpus, rows, us, words.repeats,
                     group.first().layer_bytes(part.parts),
                     kStamps ? "with stamps" : "chain of 4 layers"});
      if (!kStamps || &part != parts) continue;
      group.clear_stamps();
      group.begin();
      group.run(false);
      const StampsAbout about = {"layer", "v41", words.schedule, gpu,       kTp,
                                 1,       rows,  words.plain_us, us.median, kStampedLayer};
      std::ofstream file(words.stamps);
      file << stamps_json(group.stamps(), about, clock_mhz);
      file.close();
      report.check("stamps written", file.good(), words.stamps);
      return report.all_good() ? 0 : 1;
    }
  }
  return report.all_good() ? 0 : 1;
}

int main_of(int argc, char** argv) {
  const Words words = read_words(argc, argv);
  if (!words.wrong.empty()) {
    std::fprintf(stderr, "%s\n", words.wrong.c_str());
    return 2;
  }
  Report report;
  const auto refuse = [&](const std::string& why) {
    report.refusal(why);
    return 1;
  };
  if (words.model != "v41") return refuse("the fused layer is built for v41, not " + words.model);
  if (words.schedule != "fused") {
    return refuse("a layer of this shape is built for --schedule fused, not " + words.schedule);
  }
  if (words.tp != 2 && words.tp != 4) {
    return refuse("the fused layer is built for --tp 2 and 4, not " + std::to_string(words.tp));
  }
  if (kStamps != !words.stamps.empty()) {
    return refuse(kStamps ? "the program with stamps needs --stamps FILE"
                          : "--stamps needs the program with stamps");
  }
  if (kStamps && words.gpus > 1) return refuse("stamps are taken on one GPU: --gpus 1");
  if (!require_gpus(report, words.gpus)) return 1;
  const Machine machine = measure_machine(words.gpus);
  report.machine(machine);
  return words.tp == 4 ? run<4>(words, report, machine.clock_mhz, machine.gpu)
                       : run<2>(words, report, machine.clock_mhz, machine.gpu);
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
