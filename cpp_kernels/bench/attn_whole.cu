// attn_whole: checks and times whole plain V4.1-Flash layers: attention half, exchange, mixture of
// experts, exchange, chained in one CUDA graph.
//
//   attn_whole tp4 [rows..]   TP4's share on one GPU, its four mailboxes looped back
//   attn_whole tp2 [rows..]   TP2 on devices 0 and 1
//
// Exit code 1: a failure.
#include "attn_layer.hpp"
#include "fused/moe.hpp"
#include "host/nvidia/exchange_region.hpp"

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
  static constexpr int kHeads = 64 / kTp, kGroups = 8 / kTp;
  std::vector<DeviceWeights> weights;
  std::vector<std::unique_ptr<MoeLayer<kTp>>> moe;
  std::vector<DeviceKeys> keys;
  Activations act;
  Buffer<float> mix_ffn, mix_ffn_partial;
  fused::ExchangePort port;
  std::uint64_t* step_epoch;
  Gates gates, moe_gates;
  Buffer<std::uint8_t> workspace;
  Buffer<std::int32_t> ids;
  Buffer<std::uint32_t*> abort_words;
  std::vector<std::uint16_t> residual;

  // What is sharded differs by rank, the rest by layer alone.
  Layers(const HostWeights& host, int rows, const fused::ExchangePort& exchange_port,
         std::uint64_t* epoch, int rank)
      : act(rows, kHeads, kGroups),
        mix_ffn(act.mix.size()),
        mix_ffn_partial(act.mix_partial.size()),
        port(exchange_port),
        step_epoch(epoch),
        gates(kLayers),
        moe_gates(kLayers),
        workspace(moe_api::moe_workspace_bytes(kShape<kTp>)),
        ids(static_cast<std::size_t>(kLayers) * rows * 6),
        abort_words(std::vector<std::uint32_t*>(exchange_port.abort_words,
                                                exchange_port.abort_words + fused::kMaxRanks)),
        residual(act.count(4 * kHidden)) {
    Random random(9);
    for (int i = 0; i < kLayers; ++i) {
      weights.emplace_back(host);
      keys.emplace_back(HostKeys(rows, random));
      moe.push_back(std::make_unique<MoeLayer<kTp>>(1000 * i + 7, 100'000 * rank));
    }
    for (auto& v : residual) v = bf16(random.normal());
    recover();
    gates.tell(port, 100);
    moe_gates.tell(port, 200);
    cuda_must(cudaDeviceSynchronize(), "fill");
    reset();
  }
  // Also after a fault.
  void recover() {
    cuda_must(static_cast<cudaError_t>(
                  moe_api::moe_workspace_init(kShape<kTp>, workspace.get(), nullptr)),
              "workspace");
  }
  void reset() {
    gates.reset();
    moe_gates.reset();
    for (auto& r : act.residual) r.put(residual);
    Random random(4);
    std::vector<std::uint16_t> x(act.x.size());
    for (auto& v : x) v = bf16(random.normal());
    act.x.put(x);
    act.x_codes.zero();
    act.x_scale.put(std::vector<float>(act.x_scale.size(), 0.01f));
    mix_ffn.put(std::vector<float>(mix_ffn.size(), 0.25f));
  }

  moe_api::MoeArgs experts_args(int layer_idx) const {
    const MoeLayer<kTp>& layer = *moe[layer_idx];
    moe_api::MoeArgs args = {};
    args.rows = act.rows;
    args.routing = moe_api::MoeRouting::gate;
    args.x = act.x.get();
    args.w.gate = layer.gate.get();
    args.w.gate_bias = layer.bias.get();
    args.w.w1 = layer.w1.view();
    args.w.w3 = layer.w3.view();
    args.w.w2 = layer.w2.view();
    args.w.shared_w1 = layer.shared_w1.view();
    args.w.shared_w3 = layer.shared_w3.view();
    args.w.shared_w2 = layer.shared_w2.view();
    args.out_ids = ids.get() + static_cast<std::size_t>(layer_idx) * act.rows * 6;
    args.fault.budget_ns = port.budget_ns;
    args.fault.status = port.status;
    args.fault.abort_words = abort_words.get();
    args.fault.tp_rank = port.tp_rank;
    args.fault.tp_size = port.tp_size;
    args.quads = port;
    args.workspace = workspace.get();
    return args;
  }

  // statistics: those of the second sublayer are made (as a kernel between exchange and experts).
  void launch(bool attention_half, bool experts, bool statistics, bool gated, int rehearsal,
              bool turns, cudaStream_t stream) {
    const int rows = act.rows;
    cuda_must(fused::launch_begin_step(step_epoch, 2 * kLayers, gates.round(), stream),
              "begin step");
    fused::Gate last = {};
    const auto turn = [&](const fused::Gate& gate, const fused::Gate& earlier) {
      return turns ? after(gate, earlier) : gate;
    };
    for (int i = 0; i < kLayers; ++i) {
      const DeviceWeights& w = weights[i];
      const auto gate = [&](const Gates& from, Gates::Kind kind, std::uint32_t blocks) {
        fused::Gate out = gated ? from.at(i, kind, blocks) : fused::Gate{};
        out.round = gates.round();
        return out;
      };
      fused::Gate x_ready = last;
      if (attention_half) {
        fused::FrontParams front = act.front(w, keys[i]);
        const fused::Gate mix_done = gate(gates, Gates::mix, rows);
        front.mix =
            act.mixing(w, 0, gates.at(i, Gates::mix_parts, fused::mix_parts(kHidden)), mix_done);
        front.before = last;
        front.qkv_rehearses = (rehearsal & rehearse_qkv) != 0;
        front.q_rehearses = (rehearsal & rehearse_q) != 0;
        front.qkv_done = gate(gates, Gates::qkv, fused::front_qkv_blocks());
        front.done = gate(gates, Gates::q, fused::front_q_blocks(rows, kHeads));
        cuda_must(fused::launch_front_qkv(front, true, stream), "qkv");
        front.qkv_done = turn(front.qkv_done, last);
        cuda_must(fused::launch_front_q(front, true, stream), "q");
        fused::AttentionParams attention = act.attention(w, keys[i]);
        attention.before = turn(front.done, front.qkv_done);
        attention.rehearses = (rehearsal & rehearse_attention) != 0;
        attention.done = gate(gates, Gates::attention, fused::attention_blocks(rows, kHeads));
        cuda_must(fused::launch_sparse_attention(attention, true, stream), "attention");
        fused::OprojParams oproj = act.oproj(w, port, 2 * i, true);
        oproj.before = turn(attention.done, front.done);
        oproj.a_rehearses = (rehearsal & rehearse_wo_a) != 0;
        oproj.b_rehearses = (rehearsal & rehearse_wo_b) != 0;
        oproj.u_done = gate(gates, Gates::u, fused::oproj_a_blocks(kGroups));
        cuda_must(fused::launch_oproj_a(oproj, true, stream), "wo_a");
        oproj.u_done = turn(oproj.u_done, attention.done);
        cuda_must(fused::launch_oproj_b(oproj, true, stream), "wo_b");
        fused::ExchangeNormParams exchange = act.exchange(w, port, 2 * i, 0, true);
        exchange.mix_done = mix_done;
        exchange.before = oproj.u_done;
        exchange.rehearses = (rehearsal & rehearse_exchange) != 0;
        exchange.done = x_ready = gate(gates, Gates::exchange, fused::exchange_norm_blocks(rows));
        cuda_must(fused::launch_exchange_norm(exchange, kHidden, true, stream), "exchange");
      }
      if (attention_half)
        x_ready = turn(x_ready, gate(gates, Gates::u, fused::oproj_a_blocks(kGroups)));
      last = x_ready;
      fused::Gate ffn_mix_done = {};
      if (statistics) {
        fused::MixParams mix =
            act.mixing(w, 1, moe_gates.at(i, Gates::mix_parts, fused::mix_parts(kHidden)),
                       gate(moe_gates, Gates::mix, rows));
        mix.parts.round = gates.round();
        mix.partial = mix_ffn_partial.get();
        mix.mix = mix_ffn.get();
        ffn_mix_done = mix.done;
        cuda_must(fused::launch_mix(mix, x_ready, true, stream), "statistics");
      }
      if (experts) {
        moe_api::MoeArgs args = experts_args(i);
        args.quads_index = 2 * i + 1;
        args.before = x_ready;
        cuda_must(
            static_cast<cudaError_t>(moe_api::launch_moe_region(kShape<kTp>, args, stream, true)),
            "experts");
        fused::ExchangeNormParams exchange = act.exchange(w, port, 2 * i + 1, 1, true);
        exchange.mix = mix_ffn.get();
        exchange.mix_done = ffn_mix_done;
        exchange.done = last = gate(moe_gates, Gates::exchange, fused::exchange_norm_blocks(rows));
        cuda_must(fused::launch_exchange_norm(exchange, kHidden, true, stream), "exchange 2");
      }
    }
  }
};

struct Case {
  const char* name;
  bool attention_half, experts, statistics, gated;
  int rehearsal;
  bool turns;  // gates know the one before
};
const Case kCases[] = {
    {"layer", true, true, true, true, 0, false},
    {"layer, turns", true, true, true, true, 0, true},
    {"layer, turns, all rehearse", true, true, true, true, rehearse_all, true},
    {"layer, all rehearse", true, true, true, true, rehearse_all, false},
    {"layer without second statistics", true, true, false, true, 0, true},
    {"layer, no gates", true, true, true, false, 0, false},
    {"attention half", true, false, false, true, 0, true},
    {"attention half, all rehearse", true, false, false, true, rehearse_all, true},
    {"experts, exchange", false, true, false, true, 0, true},
    {"experts, exchange, statistics", false, true, true, true, 0, true},
};

template <int kTp>
double distinct_experts(const Layers<kTp>& layers) {
  const std::vector<std::int32_t> ids = layers.ids.take();
  const int rows = layers.act.rows;
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

// The experts' packets hold what they store.
void check_packets(Layers<4>& layers, const Mailboxes& mail) {
  const int rows = layers.act.rows;
  Random random(5);
  std::vector<std::uint16_t> x(layers.act.x.size());
  for (auto& v : x) v = bf16(random.normal());
  layers.act.x.put(x);
  Buffer<float> out(layers.act.partial.size());
  moe_api::MoeArgs args = layers.experts_args(0);
  args.out = out.get();
  args.quads_index = 1;
  cuda_must(fused::launch_begin_step(layers.step_epoch, 8, layers.gates.round(), nullptr), "begin");
  cuda_must(static_cast<cudaError_t>(moe_api::launch_moe_region(kShape<4>, args, nullptr, false)),
            "experts");
  cuda_must(cudaDeviceSynchronize(), "experts");
  const std::vector<float> want = out.take();
  const std::vector<std::uint8_t> boxes = mail.boxes.take();
  std::uint64_t epoch = mail.step_epoch.take()[0] + 1;
  double worst = 0.0;
  int missing = 0;
  for (int source = 0; source < 4; ++source) {
    for (std::size_t quad = 0; quad < want.size() / 4; ++quad) {
      std::uint32_t words[4];
      const std::size_t box = (epoch & 1) * 4 + source;
      std::memcpy(words, &boxes[(box * mail.box_packets + quad) * 16], 16);
      missing += words[3] != static_cast<std::uint32_t>(epoch) ? 1 : 0;
      std::uint8_t bytes[12];
      std::memcpy(bytes, words, 12);
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(bytes[3 * i]) << 8 |
                                   static_cast<std::uint32_t>(bytes[3 * i + 1]) << 16 |
                                   static_cast<std::uint32_t>(bytes[3 * i + 2]) << 24;
        float v;
        std::memcpy(&v, &bits, 4);
        const double w = want[4 * quad + i];
        if (!(std::abs(v - w) <= 1e-30)) worst = std::max(worst, std::abs(v - w) / std::abs(w));
        if (!std::isfinite(v)) ++missing;
      }
    }
  }
  std::printf("packets of the experts: %d missing, worst relative difference %.1e\n", missing,
              worst);
  report(missing == 0 && worst <= 0x1p-16, "packets of the experts hold their sums", rows);
}

void run_tp4(const HostWeights& host, int rows, bool checks) {
  Mailboxes mail(rows, 4);
  Layers<4> layers(host, rows, mail.looped(4), mail.step_epoch.get(), 0);
  if (checks) {
    check_packets(layers, mail);
    for (const Case& c : kCases) {
      Graph graph([&](cudaStream_t stream) {
        layers.launch(c.attention_half, c.experts, c.statistics, c.gated, c.rehearsal, c.turns,
                      stream);
      });
      for (int i = 0; i < 3; ++i) {
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
      if (!c.attention_half || !c.experts || !c.statistics) continue;
      std::vector<std::uint16_t> first;
      int different = 0;
      for (int i = 0; i < 100; ++i) {
        layers.reset();
        graph.replay();
        graph.wait();
        auto result = layers.act.residual[0].take();
        const auto x = layers.act.x.take();
        result.insert(result.end(), x.begin(), x.end());
        if (i == 0) first = result;
        different += result != first ? 1 : 0;
      }
      report(different == 0 && all_finite(first) && !mail.faulted(), c.name, rows);
    }
  }
  for (const Case& c : kCases) {
    layers.reset();
    Graph graph([&](cudaStream_t stream) {
      layers.launch(c.attention_half, c.experts, c.statistics, c.gated, c.rehearsal, c.turns,
                    stream);
    });
    const Times times = time_of(graph, 60);
    print(c, 4, rows, times, distinct_experts(layers), mail.faulted());
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
      graphs[r] = std::make_unique<Graph>([&](cudaStream_t stream) {
        ranks[r]->launch(c.attention_half, c.experts, c.statistics, c.gated, c.rehearsal, c.turns,
                         stream);
      });
      cuda_must(cudaEventCreate(&begin[r]), "event");
      cuda_must(cudaEventCreate(&end[r]), "event");
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
        result[r] = ranks[r]->act.residual[0].take();
        const auto x = ranks[r]->act.x.take();
        result[r].insert(result[r].end(), x.begin(), x.end());
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
