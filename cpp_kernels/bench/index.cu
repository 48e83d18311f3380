// index: checks and times what layers of V4.1-Flash do beside a plain layer, on one GPU:
// compressor, index and n-gram memory.
//
//   index check [few]      every kernel against float64 at true shapes; exit code 1: a failure
//   index time [LENGTH..]  in a CUDA graph: each kernel alone, and whole layers with and without
//                          the index beside them
//   index many             the layers of 12, 24 and 48 rows
//   index engram           the same of the n-gram memory
//   index v4               V4-Flash's compressors and index, each kernel alone
//
// TP4's share on one GPU: 16 heads, two output groups, four mailboxes looped back.
#include "bench/engram_case.cuh"
#include "bench/index_case.cuh"
#include "bench/index_v4_case.cuh"
#include "bench/layer_case.cuh"
#include "bench/layer_stamps.hpp"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

constexpr int kRanks = 4, kHeads = 16, kGroups = 2, kLayers = 6;

enum class Kind { plain, source, ratio2, layer20, blocks, engram };
constexpr const char* kNames[] = {"plain",    "index source, all entries", "ratio-2 source",
                                  "layer 20", "index source by blocks",    "engram"};

// How the main chain makes sure of n-gram memory's product on a branch: that it has ended, or that
// it has its place on the device, so that a gate is enough.
enum class Join { ended, started };
// A way to launch a layer and what is beside it.
struct Way {
  fused::BesideOrder order = fused::BesideOrder::measured;
  Join join = Join::ended;
};
constexpr const char* kOrders[] = {
    "",        ", q first",     ", q last",        ", pool end", ", query first",
    ", q end", ", keys, q end", ", entries, q end"};

// The stream that is captured beside the main one, and the events between them.
struct Branch {
  cudaStream_t side;
  cudaEvent_t fork, started, ended;
  Branch() {
    cuda_must(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "stream");
    for (cudaEvent_t* event : {&fork, &started, &ended}) {
      cuda_must(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
    }
  }
  Branch(const Branch&) = delete;
  Branch& operator=(const Branch&) = delete;
  ~Branch() {
    for (cudaEvent_t event : {fork, started, ended}) cudaEventDestroy(event);
    cudaStreamDestroy(side);
  }
};

// Gates of the kernels beside a layer.
enum SideGate {
  gate_product = fused::kLayerFreeGate,
  gate_keys,
  gate_query,
  gate_scores,
  gate_select,
  gate_lookup = gate_product
};

struct IndexChain {
  IndexSizes sizes;
  Mailboxes mail;
  Layers<kRanks> layers;
  std::vector<DeviceIndexWeights> index_weights;
  std::vector<DeviceIndexState> states;
  std::vector<IndexBuffers> buffers;
  Activations act;  // of kernels that are timed alone

  IndexChain(const HostWeights& host, const HostIndexWeights& index, const IndexSizes& of)
      : sizes(of),
        mail(of.rows(), kRanks),
        layers(host, kLayers, of.rows(), mail.looped(kRanks), mail.step_epoch.get(), 0),
        act(of.rows(), kHeads, kGroups) {
    Random random(9);
    const HostIndexState state(of, Draw::random, true, random);
    for (int i = 0; i < kLayers; ++i) {
      index_weights.emplace_back(index);
      states.emplace_back(state);
      buffers.emplace_back(of);
      std::vector<std::int32_t> blocks(buffers.back().blocks.size());
      const int num_blocks = (of.max_entries() + 7) / 8;
      for (std::size_t j = 0; j < blocks.size(); ++j) {
        const int place = static_cast<int>(j % fused::kIndexMaxBlocks);
        const std::int64_t spread = (place + std::int64_t{1}) * num_blocks / fused::kIndexMaxBlocks;
        blocks[j] = num_blocks > fused::kIndexMaxBlocks ? static_cast<int>(spread) - 1
                    : place < num_blocks                ? place
                                                        : -1;
      }
      buffers.back().blocks.put(blocks);
    }
    IndexCheck::draw_inputs(act, Draw::random, random);
  }

  fused::Hop hop(int layer_idx) const {
    return {layers.memory.port, 2 * layer_idx, fused::kernel_place(layer_idx)};
  }
  bool by_packets() const { return sizes.rows() <= fused::kHopRows; }

  // What is beside layer i, of which `index` is a part.
  fused::BesideLayer beside(Kind kind, int i, fused::IndexParams& index) {
    const fused::LayerMemory& memory = layers.memory;
    const int rows = sizes.rows();
    const bool compresses = kind == Kind::ratio2 || kind == Kind::layer20;
    const auto gate = [&](int number, std::uint32_t blocks) {
      return fused::layer_gate(memory, i, number, blocks);
    };
    fused::BesideLayer out = {};
    out.hidden = kHidden;
    out.keys = compresses;
    out.index = &index;
    index = buffers[i].index(index_weights[i], states[i], act, kind == Kind::blocks, compresses,
                             !compresses);
    if (kind != Kind::layer20) index.block_scores = nullptr;
    index.hop = by_packets() ? hop(i) : fused::Hop{};
    index.packets = memory.packets;
    index.x_index = 2 * i - 1;
    fused::set_index_latent(memory, fused::FusedModel::v41, rows, i, &index);
    index.query_done = gate(gate_query, fused::kIndexQueryBlocks);
    index.scores_done = gate(gate_scores, fused::kIndexScoreBlocks);
    index.done = gate(gate_select, fused::index_done_blocks(index));
    out.compress = buffers[i].compress(index_weights[i], states[i], act, !compresses);
    out.compress.x = memory.x;
    out.compress.hop = index.hop;
    out.compress.x_done =
        fused::layer_gate(memory, i - 1, fused::kLayerDone, fused::exchange_norm_blocks(rows));
    out.compress.product_done = gate(gate_product, fused::compress_product_blocks(out.compress));
    index.heads_done = out.compress.product_done;
    if (compresses) {
      out.compress.done = gate(gate_keys, fused::compress_key_blocks(rows));
      index.keys_done = out.compress.done;
    }
    return out;
  }

  // What is applied before layer i, asked for a layer earlier.
  fused::EngramParams engram(fused::EngramParams params, int i) const {
    const fused::LayerMemory& memory = layers.memory;
    const int rows = sizes.rows();
    params.lookup_done =
        fused::layer_gate(memory, i, gate_lookup, fused::engram_lookup_blocks(rows));
    params.product_done = fused::layer_gate(memory, i, gate_keys, fused::kEngramProductBlocks);
    params.before =
        fused::layer_gate(memory, i - 1, fused::kLayerExchanged, fused::exchange_norm_blocks(rows));
    params.done =
        fused::layer_gate(memory, i - 1, fused::kLayerDone, fused::engram_apply_blocks(rows));
    params.residual = memory.residual[0];
    params.mix = memory.mix[1];
    params.x = memory.x;
    params.x_codes = memory.x_codes;
    params.x_scale = memory.x_scale;
    if (by_packets()) {
      params.hop = hop(i);
      params.hop.index = 2 * i - 1;
      params.x_packets = memory.packets.x;
    }
    return params;
  }

  // A step of layers with what `kind` has beside them, from the second layer on.
  void launch(Kind kind, const Way& way, cudaStream_t stream, Branch& branch,
              const std::function<fused::EngramParams(int)>& engram_of) {
    const Join join = way.join;
    fused::LayerStep step = layers.step();
    const bool has_index = kind != Kind::plain && kind != Kind::engram;
    cuda_must(fused::launch_layer_begin(step, layers.step_epoch, 2 * kLayers, stream), "begin");
    cuda_must(fused::launch_layer_input(step, stream), "input");
    for (int i = 0; i < kLayers; ++i) {
      fused::PlainLayer layer = layers.layer(i);
      fused::IndexParams index;
      fused::BesideLayer beside;
      if (i > 0 && has_index) {
        beside = this->beside(kind, i, index);
        layer.beside = &beside;
        layer.extra_idx = buffers[i].entry_slots.get();
        layer.extra = {states[i].pool.get(), HostIndexState::pool_page_bytes(sizes),
                       sizes.per_page()};
      }
      fused::EngramParams engram = {};
      if (kind == Kind::engram && i + 1 < kLayers) {
        layer.memory_follows = true;
        engram = this->engram(engram_of(i), i + 1);
        cuda_must(cudaEventRecord(branch.fork, stream), "record");
      }
      const auto join_branch = [&] {
        cuda_must(
            cudaStreamWaitEvent(stream, join == Join::started ? branch.started : branch.ended),
            "join");
      };
      const std::function<void(fused::HopKernel)> between = [&](fused::HopKernel kernel) {
        // Behind [q_a, kv], which as the first can begin before the exchange has ended.
        if (!layer.memory_follows || kernel != fused::HopKernel::q) return;
        cuda_must(cudaStreamWaitEvent(branch.side, branch.fork), "wait");
        cuda_must(fused::launch_engram_lookup(engram, false, branch.side), "lookup");
        cuda_must(fused::launch_engram_product(engram, true, branch.side,
                                               join == Join::started ? branch.started : nullptr),
                  "product");
        if (join == Join::ended) cuda_must(cudaEventRecord(branch.ended, branch.side), "record");
      };
      fused::LayerParts parts;
      parts.between = &between;
      parts.beside_order = way.order;
      cuda_must(fused::launch_plain_layer(layer, step, i, parts, stream), "layer");
      if (layer.memory_follows) {
        join_branch();
        cuda_must(fused::launch_engram_apply(engram, join == Join::started, stream), "apply");
      }
    }
    if (kind != Kind::engram) return;
    cuda_must(cudaEventRecord(branch.ended, branch.side), "record");
    cuda_must(cudaStreamWaitEvent(stream, branch.ended), "join");
  }
};

// Median microseconds a layer of one kernel alone, by the ends of launches.
void time_alone(const char* name, double megabytes, IndexChain& chain,
                const std::function<cudaError_t(int, cudaStream_t)>& body) {
  Graph graph([&](cudaStream_t stream) {
    for (int i = 0; i < kLayers; ++i) cuda_must(body(i, stream), name);
  });
  const Times times = time_of(graph, 60);
  std::printf("  %-24s T=%-2d length %-6d %6.2f us (10th %.2f, 90th %.2f)  %.2f MB\n", name,
              chain.sizes.rows(), chain.sizes.length, times.median_us / kLayers,
              times.low_us / kLayers, times.high_us / kLayers, megabytes);
}

// Microseconds that `kind` adds to a layer, or of a plain one; 0 where it was not timed. want: of
// all ways to launch the same layers; empty before the first.
double time_layers(IndexChain& chain, Kind kind, const Way& way, double plain_us,
                   const std::function<fused::EngramParams(int)>& engram_of,
                   std::vector<std::uint16_t>& want) {
  Branch branch;
  chain.layers.reset();
  Graph graph([&](cudaStream_t stream) { chain.launch(kind, way, stream, branch, engram_of); });
  std::printf("layer: %s%s%s, T=%d length %d: ", kNames[static_cast<int>(kind)],
              kOrders[static_cast<int>(way.order)], way.join == Join::started ? ", gate" : "",
              chain.sizes.rows(), chain.sizes.length);
  for (int replay = 0; replay < 3; ++replay) {
    chain.layers.reset();
    graph.replay();
    graph.wait();
    if (!chain.mail.faulted()) {
      const std::vector<std::uint16_t> result = chain.layers.take();
      if (want.empty()) want = result;
      if (result != want) std::printf("replay %d DIFFERS: ", replay);
      continue;
    }
    std::printf("replay %d faulted:", replay);
    chain.mail.print_status();
    chain.mail.recover();
    chain.layers.recover();
    chain.layers.reset();
  }
  const Times times = time_of(graph, 60);
  // One layer of a step is plain.
  const double us = kind == Kind::plain ? times.median_us / kLayers
                                        : (times.median_us - plain_us * kLayers) / (kLayers - 1);
  std::printf("%s%.2f us (step 10th %.1f, median %.1f, 90th %.1f)%s\n",
              kind == Kind::plain ? "" : "+", us, times.low_us, times.median_us, times.high_us,
              chain.mail.faulted() ? "  FAULTED" : "");
  std::fflush(stdout);
  if (kStamps) {
    chain.layers.stamps.zero();
    graph.replay();
    graph.wait();
    print_stamps(chain.layers.stamps.take(), 2);
  }
  if (chain.mail.faulted()) {
    chain.mail.recover();
    chain.layers.recover();
  }
  return us;
}

void time_case(const HostWeights& host, const HostIndexWeights& index_host, int requests,
               int tokens, int length, bool alone) {
  for (const int ratio : {2, 1}) {
    const IndexSizes sizes{requests, tokens, ratio, length};
    IndexChain chain(host, index_host, sizes);
    if (alone) {
      const double keys = sizes.requests * 68e-6 * sizes.max_entries();
      const auto index = [&](int i, bool by_blocks) {
        fused::IndexParams p = chain.buffers[i].index(chain.index_weights[i], chain.states[i],
                                                      chain.act, by_blocks, false);
        if (ratio == 2) p.block_scores = nullptr;
        return p;
      };
      const auto compress = [&](int i) {
        return chain.buffers[i].compress(chain.index_weights[i], chain.states[i], chain.act);
      };
      time_alone("compress_product", ratio * 5.24, chain, [&](int i, cudaStream_t s) {
        return fused::launch_compress_product(compress(i), kHidden, true, s);
      });
      time_alone("compress_product, heads", 0.33, chain, [&](int i, cudaStream_t s) {
        return fused::launch_compress_product(
            chain.buffers[i].compress(chain.index_weights[i], chain.states[i], chain.act, true),
            kHidden, true, s);
      });
      time_alone("compress_key", 0.13, chain, [&](int i, cudaStream_t s) {
        return fused::launch_compress_key(compress(i), true, s);
      });
      time_alone("index_query", 5.25, chain, [&](int i, cudaStream_t s) {
        return fused::launch_index_query(index(i, false), true, s);
      });
      time_alone("index_scores", keys, chain, [&](int i, cudaStream_t s) {
        return fused::launch_index_scores(index(i, false), true, s);
      });
      time_alone("index_select", 0.0, chain, [&](int i, cudaStream_t s) {
        return fused::launch_index_select(index(i, false), true, s);
      });
      if (ratio == 1) {
        time_alone("index_scores, blocks", 0.0, chain, [&](int i, cudaStream_t s) {
          return fused::launch_index_scores(index(i, true), true, s);
        });
        time_alone("index_select, blocks", 0.0, chain, [&](int i, cudaStream_t s) {
          return fused::launch_index_select(index(i, true), true, s);
        });
        time_alone("index_blocks", 0.0, chain, [&](int i, cudaStream_t s) {
          return fused::launch_index_blocks(index(i, false), true, s);
        });
      }
    }
    const std::vector<Kind> kinds = ratio == 2 ? std::vector<Kind>{Kind::source, Kind::ratio2}
                                               : std::vector<Kind>{Kind::layer20, Kind::blocks};
    std::vector<std::uint16_t> plain;
    const double plain_us = time_layers(chain, Kind::plain, {}, 0.0, nullptr, plain);
    for (const Kind kind : kinds) {
      std::vector<std::uint16_t> want;
      using fused::BesideOrder;
      for (const BesideOrder order :
           {BesideOrder::measured, BesideOrder::q_last, BesideOrder::query_first,
            BesideOrder::q_first, BesideOrder::q_end}) {
        time_layers(chain, kind, {order}, plain_us, nullptr, want);
      }
    }
  }
}

// V4's kernels alone.
void time_v4(int requests, int tokens, int length) {
  Random random(1);
  const HostV4 host(random);
  std::vector<DeviceV4> weights;
  for (int i = 0; i < kLayers; ++i) weights.emplace_back(host);
  for (const int ratio : {4, 128}) {
    std::vector<StepV4> steps;
    for (int i = 0; i < kLayers; ++i) {
      steps.emplace_back(IndexSizes{requests, tokens, ratio, length}, Draw::random, random);
    }
    const auto time = [&](const char* name,
                          const std::function<cudaError_t(int, cudaStream_t)>& body) {
      Graph graph([&](cudaStream_t stream) {
        for (int i = 0; i < kLayers; ++i) cuda_must(body(i, stream), name);
      });
      const Times times = time_of(graph, 60);
      std::printf("  V4 %-20s T=%-2d ratio %-3d length %-6d %6.2f us (10th %.2f, 90th %.2f)\n",
                  name, requests * tokens, ratio, length, times.median_us / kLayers,
                  times.low_us / kLayers, times.high_us / kLayers);
    };
    time("compress_product", [&](int i, cudaStream_t s) {
      return fused::launch_compress_product(steps[i].product(weights[i]), kHiddenV4, true, s);
    });
    time("compress_pool", [&](int i, cudaStream_t s) {
      return fused::launch_compress_pool(steps[i].pooling(weights[i]), true, s);
    });
    if (ratio != 4) continue;
    time("index_query", [&](int i, cudaStream_t s) {
      return fused::launch_index_query(steps[i].index(weights[i]), true, s);
    });
    time("index_scores", [&](int i, cudaStream_t s) {
      return fused::launch_index_scores(steps[i].index(weights[i]), true, s);
    });
    time("index_select", [&](int i, cudaStream_t s) {
      return fused::launch_index_select(steps[i].index(weights[i]), true, s);
    });
  }
}

void time_engram(int requests, int tokens) {
  Random random(1);
  const HostWeights host(kHeads, kGroups, random);
  const HostIndexWeights index_host(random);
  const HostEngram engram_host(random);
  const DeviceEngram engram[] = {DeviceEngram(engram_host), DeviceEngram(engram_host)};
  IndexChain chain(host, index_host, {requests, tokens, 2, 8192});
  const EngramBuffers buffers[] = {EngramBuffers(requests, tokens, random),
                                   EngramBuffers(requests, tokens, random)};
  const auto params = [&](int i) {
    return buffers[i % 2].params(engram_host, engram[i % 2], chain.act, 0);
  };
  time_alone("engram_lookup", 0.0063 * chain.sizes.rows(), chain, [&](int i, cudaStream_t s) {
    return fused::launch_engram_lookup(params(i), true, s);
  });
  for (const int slots : {6, 5, 4, 3, 2}) {
    char name[32];
    std::snprintf(name, sizeof(name), "engram_product, %d slots", slots);
    time_alone(name, 157.4, chain, [&](int i, cudaStream_t s) {
      fused::EngramParams p = params(i);
      p.slots = slots;
      return fused::launch_engram_product(p, true, s);
    });
  }
  time_alone("engram_apply", 0.0, chain,
             [&](int i, cudaStream_t s) { return fused::launch_engram_apply(params(i), true, s); });
  std::vector<std::uint16_t> plain, want;
  const double plain_us = time_layers(chain, Kind::plain, {}, 0.0, nullptr, plain);
  for (const int slots : {5, 4, 3}) {
    for (const Join join : {Join::ended, Join::started}) {
      std::printf("  ring of %d:\n", slots);
      time_layers(
          chain, Kind::engram, {{}, join}, plain_us,
          [&](int i) {
            fused::EngramParams p = params(i);
            p.slots = slots;
            return p;
          },
          want);
    }
  }
}

// few: a few small steps, for a sanitizer.
void check(bool few) {
  Random random(1);
  const HostIndexWeights host(random);
  const DeviceIndexWeights device(host);
  IndexCheck check;
  const HostV4 v4(random);
  const DeviceV4 device_v4(v4);
  CheckV4 check_v4;
  if (few) {
    check_v4.run({1, 6, 4, 2}, Draw::random, v4, device_v4);
    check_v4.run({1, 6, 128, 123}, Draw::random, v4, device_v4);
    check.failures += check_v4.failures;
    check.run({1, 6, 1, 3}, Draw::random, host, device);
    check.run({2, 6, 2, 3001}, Draw::padded, host, device);
    check.run({1, 6, 1, 17000}, Draw::random, host, device);
    check.run({1, 6, 1, 700}, Draw::equal_scores, host, device);
    failures += check.failures;
    return;
  }
  const IndexSizes all[] = {
      {1, 1, 2, 0},     {1, 6, 2, 0},      {1, 6, 1, 3},      {1, 6, 2, 8191},  {1, 6, 1, 8190},
      {2, 6, 2, 8192},  {8, 6, 1, 1030},   {8, 6, 2, 2049},   {48, 1, 1, 600},  {1, 8, 1, 20000},
      {4, 6, 1, 16386}, {1, 12, 2, 40000}, {1, 6, 1, 131000}, {1, 6, 2, 131001}};
  for (const IndexSizes& sizes : all) check.run(sizes, Draw::random, host, device);
  check.run({1, 6, 1, 20000}, Draw::equal_scores, host, device);
  check.run({1, 6, 2, 5000}, Draw::equal_scores, host, device);
  check.run({2, 6, 1, 3000}, Draw::padded, host, device);
  check.run({2, 6, 2, 3001}, Draw::padded, host, device);
  for (const IndexSizes& sizes :
       {IndexSizes{1, 6, 4, 0}, IndexSizes{1, 1, 4, 3}, IndexSizes{2, 6, 4, 253},
        IndexSizes{8, 6, 4, 4097}, IndexSizes{1, 8, 4, 33000}, IndexSizes{1, 6, 4, 131000},
        IndexSizes{1, 6, 128, 0}, IndexSizes{8, 6, 128, 125}, IndexSizes{2, 6, 128, 1020},
        IndexSizes{48, 1, 128, 255}, IndexSizes{48, 1, 4, 2047}}) {
    check_v4.run(sizes, Draw::random, v4, device_v4);
  }
  check_v4.run({1, 6, 4, 5000}, Draw::equal_scores, v4, device_v4);
  check_v4.run({2, 6, 4, 3000}, Draw::padded, v4, device_v4);
  check_v4.run({2, 6, 128, 124}, Draw::padded, v4, device_v4);
  check.failures += check_v4.failures;
  const HostEngram engram(random);
  const DeviceEngram device_engram(engram);
  for (const int requests : {1, 2, 4, 8}) {
    check.failures += check_engram(requests, 6, requests == 1 ? 3 : 0, engram, device_engram);
  }
  check.failures += check_engram(1, 1, 2, engram, device_engram);
  check.failures += check_engram(8, 1, 6, engram, device_engram);
  failures += check.failures;
}

void time_lengths(Rest& rest) {
  Random random(1);
  const HostWeights host(kHeads, kGroups, random);
  const HostIndexWeights index_host(random);
  const bool all = rest.empty();
  const bool alone = !rest.take("layers");
  for (const int length : rest.numbers(1, 1 << 20, {8192, 32768, 131000})) {
    time_case(host, index_host, 1, 6, length, alone);
  }
  if (!all) return;
  for (const int requests : {4, 8}) time_case(host, index_host, requests, 6, 8192, true);
}
void time_many() {
  Random random(1);
  const HostWeights host(kHeads, kGroups, random);
  const HostIndexWeights index_host(random);
  for (const int requests : {2, 4, 8}) time_case(host, index_host, requests, 6, 8192, false);
}

void time_v4() {
  for (const int length : {8187, 131000}) time_v4(1, 6, length);
  time_v4(8, 6, 8187);
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  using namespace lowlat::bench;
  return checked(argc, argv, "bench_index check [few] | time [LENGTH..] | many | engram | v4",
                 {{"check", [](Rest& rest) { check(rest.take("few")); }},
                  {"time", time_lengths},
                  {"many", [](Rest&) { time_many(); }},
                  {"engram", [](Rest&) { time_engram(1, 6); }},
                  {"v4", [](Rest&) { time_v4(); }}});
}
