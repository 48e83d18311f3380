// index: checks and times what layers of V4.1-Flash do beside the attention half, on one GPU:
// compressor, index and n-gram memory.
//
//   index check [few]      every kernel against float64 at true shapes; exit code 1: a failure
//   index time [LENGTH..]  chains of layers in a CUDA graph: each kernel alone, and the attention
//                          half of a layer with and without the index beside it
//   index engram           the same of the n-gram memory
//   index v4               V4-Flash's compressors and index, each kernel alone
//
// TP4's share on one GPU: 16 heads, two output groups, four mailboxes looped back.
#include "bench/engram_case.cuh"
#include "bench/index_case.cuh"
#include "bench/index_v4_case.cuh"

namespace lowlat::bench {
namespace {

constexpr int kRanks = 4, kHeads = 16, kGroups = 2, kLayers = 6;

enum class Kind { plain, source, ratio2, layer20, blocks, engram };
constexpr const char* kNames[] = {"plain",    "index source, all entries", "ratio-2 source",
                                  "layer 20", "index source by blocks",    "engram"};

// How the main chain makes sure of what it waits for on a branch: that it has ended, or that it has
// its place on the device, so that a gate is enough.
enum class Join { ended, started };

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

// Whether one replay ends soon: waits that nobody ends take a second each.
bool ends_soon(Graph& graph) {
  cudaEvent_t begin, end;
  cuda_must(cudaEventCreate(&begin), "event");
  cuda_must(cudaEventCreate(&end), "event");
  cuda_must(cudaEventRecord(begin, graph.stream()), "record");
  graph.replay();
  cuda_must(cudaEventRecord(end, graph.stream()), "record");
  graph.wait();
  float ms;
  cuda_must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (ms > 50.0f) std::printf("  FIRST REPLAY TOOK %.0f ms: not timed\n", ms);
  return ms <= 50.0f;
}

// Gates: the attention half's, and those of the index.
class IndexGates {
 public:
  enum Kind { product, keys, query, scores, select, count };
  explicit IndexGates(int layers) : words_(static_cast<std::size_t>(layers) * count * 32) {
    words_.zero();
  }
  void reset() { words_.zero(); }
  fused::Gate at(int layer, Kind kind, std::uint32_t blocks, const std::uint32_t* round) const {
    return {words_.get() + (layer * count + kind) * 32, round, blocks};
  }

 private:
  Buffer<std::uint32_t> words_;
};

struct IndexChain {
  IndexSizes sizes;
  std::vector<DeviceWeights> weights;
  std::vector<DeviceKeys> keys;
  std::vector<DeviceIndexWeights> index_weights;
  std::vector<DeviceIndexState> states;
  std::vector<IndexBuffers> buffers;
  Activations act;
  Mailboxes mail;
  Gates gates;
  IndexGates index_gates;

  IndexChain(const HostWeights& host, const HostIndexWeights& index, const IndexSizes& of)
      : sizes(of),
        act(of.rows(), kHeads, kGroups),
        mail(of.rows(), kRanks),
        gates(kLayers),
        index_gates(kLayers) {
    Random random(9);
    const HostIndexState state(of, Draw::random, true, random);
    for (int i = 0; i < kLayers; ++i) {
      weights.emplace_back(host);
      keys.emplace_back(HostKeys(of.rows(), random));
      index_weights.emplace_back(index);
      states.emplace_back(state);
      buffers.emplace_back(of);
      std::vector<std::int32_t> blocks(buffers.back().blocks.size());
      const int num_blocks = (of.max_entries() + 7) / 8;
      for (std::size_t j = 0; j < blocks.size(); ++j) {
        const int place = static_cast<int>(j % fused::kIndexMaxBlocks);
        blocks[j] = num_blocks <= fused::kIndexMaxBlocks
                        ? (place < num_blocks ? place : -1)
                        : static_cast<int>((place + std::int64_t{1}) * num_blocks /
                                           fused::kIndexMaxBlocks) -
                              1;
      }
      buffers.back().blocks.put(blocks);
    }
    std::vector<std::uint16_t> residual(act.count(4 * kHidden));
    for (auto& v : residual) v = bf16(random.normal());
    for (auto& r : act.residual) r.put(residual);
    IndexCheck::draw_inputs(act, Draw::random, random);
    act.x_codes.zero();
    act.x_scale.put(std::vector<float>(act.x_scale.size(), 0.01f));
  }

  // Kernels of layer i's index on the branch; the gate of its selection.
  fused::Gate launch_index(Kind kind, int i, const fused::Gate& x_done, const fused::Gate& qkv_done,
                           Join join, Branch& branch) {
    const std::uint32_t* round = gates.round();
    const int rows = sizes.rows();
    const bool compresses = kind == Kind::ratio2 || kind == Kind::layer20;
    fused::IndexParams index = buffers[i].index(index_weights[i], states[i], act,
                                                kind == Kind::blocks, compresses, !compresses);
    if (kind != Kind::layer20) index.block_scores = nullptr;
    index.qkv_done = qkv_done;
    index.query_done = index_gates.at(i, IndexGates::query, fused::kIndexQueryBlocks, round);
    index.scores_done = index_gates.at(i, IndexGates::scores, fused::kIndexScoreBlocks, round);
    index.done = index_gates.at(i, IndexGates::select, fused::index_select_blocks(index), round);
    fused::CompressParams compress =
        buffers[i].compress(index_weights[i], states[i], act, !compresses);
    compress.x_done = x_done;
    compress.product_done =
        index_gates.at(i, IndexGates::product, fused::compress_product_blocks(compress), round);
    index.heads_done = compress.product_done;
    // One branch, each kernel of which is launched when all blocks of the one before have begun:
    // whatever waits at a gate, what it waits for has its place already.
    cuda_must(cudaStreamWaitEvent(branch.side, branch.fork), "wait");
    cuda_must(fused::launch_compress_product(compress, kHidden, false, branch.side), "product");
    if (compresses) {
      compress.done = index_gates.at(i, IndexGates::keys, fused::compress_key_blocks(rows), round);
      index.keys_done = compress.done;
      cuda_must(fused::launch_compress_key(compress, true, branch.side), "key");
    }
    cuda_must(fused::launch_index_query(index, true, branch.side), "query");
    cuda_must(fused::launch_index_scores(index, true, branch.side), "scores");
    cuda_must(fused::launch_index_select(index, true, branch.side,
                                         join == Join::started ? branch.started : nullptr),
              "select");
    if (join == Join::ended) cuda_must(cudaEventRecord(branch.ended, branch.side), "record");
    if (kind == Kind::layer20) {
      cuda_must(fused::launch_index_blocks(index, true, branch.side), "blocks");
    }
    return index.done;
  }

  // A chain of the attention half with what `kind` has beside it. early: the branch begins when
  // wo_b has ended, and waits for x at a gate. engram: its weights, by turns.
  void launch(Kind kind, bool early, Join join, cudaStream_t stream, Branch& branch,
              const std::function<fused::EngramParams(int, int)>& engram_of = nullptr) {
    gates.reset();
    index_gates.reset();
    const fused::ExchangePort port = mail.looped(kRanks);
    const int rows = sizes.rows();
    cuda_must(fused::launch_begin_step(mail.step_epoch.get(), kLayers, gates.round(), stream),
              "begin step");
    fused::Gate last = {};
    const bool has_index = kind != Kind::plain && kind != Kind::engram;
    const auto fork = [&] {
      if (kind != Kind::plain) cuda_must(cudaEventRecord(branch.fork, stream), "record");
    };
    fork();
    for (int i = 0; i < kLayers; ++i) {
      const auto gate = [&](Gates::Kind which, std::uint32_t blocks) {
        return gates.at(i, which, blocks);
      };
      if (i > 0 && !early) fork();
      fused::EngramParams engram = {};
      if (kind == Kind::engram) {
        // Asked for a layer before it is applied.
        engram = engram_of(i, 1 - i % 2);
        const std::uint32_t* round = gates.round();
        engram.lookup_done =
            index_gates.at(i, IndexGates::query, fused::engram_lookup_blocks(rows), round);
        engram.product_done =
            index_gates.at(i, IndexGates::scores, fused::kEngramProductBlocks, round);
        engram.done =
            index_gates.at(i, IndexGates::select, fused::engram_apply_blocks(rows), round);
        cuda_must(cudaStreamWaitEvent(branch.side, branch.fork), "wait");
        cuda_must(fused::launch_engram_lookup(engram, false, branch.side), "lookup");
        cuda_must(fused::launch_engram_product(engram, true, branch.side,
                                               join == Join::started ? branch.started : nullptr),
                  "product");
        if (join == Join::ended) {
          cuda_must(cudaEventRecord(branch.ended, branch.side), "record");
        }
      }
      const fused::Gate qkv_done = gate(Gates::qkv, fused::front_qkv_blocks());
      fused::Gate selected = {};
      if (has_index) selected = launch_index(kind, i, last, qkv_done, join, branch);
      fused::FrontParams front = act.front(weights[i], keys[i]);
      const fused::Gate mix_done = gate(Gates::mix, rows);
      front.mix = act.mixing(weights[i], i % 2, gate(Gates::mix_parts, fused::mix_parts(kHidden)),
                             mix_done);
      front.before = last;
      front.qkv_done = qkv_done;
      front.done = gate(Gates::q, fused::front_q_blocks(rows, kHeads));
      cuda_must(fused::launch_front_qkv(front, true, stream), "qkv");
      cuda_must(fused::launch_front_q(front, true, stream), "q");
      fused::AttentionParams attention = act.attention(weights[i], keys[i]);
      attention.before = front.done;
      attention.done = gate(Gates::attention, fused::attention_blocks(rows, kHeads));
      if (has_index) {
        attention.selected = join == Join::started ? selected : fused::Gate{};
        attention.extra_idx = buffers[i].entry_slots.get();
        attention.extra = {states[i].pool.get(), HostIndexState::pool_page_bytes(sizes),
                           sizes.per_page()};
        cuda_must(
            cudaStreamWaitEvent(stream, join == Join::started ? branch.started : branch.ended),
            "join");
      }
      cuda_must(
          fused::launch_sparse_attention(attention, !has_index || join == Join::started, stream),
          "attention");
      fused::OprojParams oproj = act.oproj(weights[i], port, i, true);
      oproj.before = attention.done;
      oproj.u_done = gate(Gates::u, fused::oproj_a_blocks(kGroups));
      cuda_must(fused::launch_oproj_a(oproj, true, stream), "wo_a");
      cuda_must(fused::launch_oproj_b(oproj, true, stream), "wo_b");
      if (early) fork();
      fused::ExchangeNormParams exchange = act.exchange(weights[i], port, i, i % 2, true);
      exchange.mix_done = mix_done;
      exchange.before = oproj.u_done;
      exchange.done = last = gate(Gates::exchange, fused::exchange_norm_blocks(rows));
      cuda_must(fused::launch_exchange_norm(exchange, kHidden, true, stream), "exchange");
      if (kind == Kind::engram) {
        engram.before = last;
        cuda_must(
            cudaStreamWaitEvent(stream, join == Join::started ? branch.started : branch.ended),
            "join");
        cuda_must(fused::launch_engram_apply(engram, join == Join::started, stream), "apply");
        last = engram.done;
      }
    }
    if (kind == Kind::plain) return;
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

// Microseconds a layer of a chain; 0 where it was not timed.
double time_half(IndexChain& chain, Kind kind, bool early, Join join, double plain_us,
                 const std::function<fused::EngramParams(int, int)>& engram_of) {
  Branch branch;
  Graph graph(
      [&](cudaStream_t stream) { chain.launch(kind, early, join, stream, branch, engram_of); });
  std::printf("half of %s%s%s, T=%d length %d: ", kNames[static_cast<int>(kind)],
              early ? ", early" : "", join == Join::started ? ", gate" : "", chain.sizes.rows(),
              chain.sizes.length);
  if (!ends_soon(graph)) return 0.0;
  const Times times = time_of(graph, 60);
  const double us = times.median_us / kLayers;
  std::printf("%.2f us a layer (10th %.2f, 90th %.2f), %+.2f over plain%s", us,
              times.low_us / kLayers, times.high_us / kLayers, us - plain_us,
              chain.mail.faulted() ? "  FAULTED" : "");
  if (kind != Kind::plain && kind != Kind::engram) {
    const auto first = chain.buffers[0].entry_slots.take();
    graph.replay();
    graph.wait();
    if (chain.buffers[0].entry_slots.take() != first) std::printf("  SELECTION DIFFERS");
  }
  std::printf("\n");
  std::fflush(stdout);
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
    const double plain_us = time_half(chain, Kind::plain, false, Join::ended, 0.0, nullptr);
    for (const Kind kind : kinds) {
      for (const Join join : {Join::ended, Join::started}) {
        for (const bool early : {false, true}) {
          time_half(chain, kind, early, join, plain_us, nullptr);
        }
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
  const auto params = [&](int i, int side) {
    return buffers[i % 2].params(engram_host, engram[i % 2], chain.act, side);
  };
  time_alone("engram_lookup", 0.0063 * chain.sizes.rows(), chain, [&](int i, cudaStream_t s) {
    return fused::launch_engram_lookup(params(i, 0), true, s);
  });
  for (const int slots : {12, 8, 6, 4, 3}) {
    char name[32];
    std::snprintf(name, sizeof(name), "engram_product, %d slots", slots);
    time_alone(name, 157.4, chain, [&](int i, cudaStream_t s) {
      fused::EngramParams p = params(i, 0);
      p.slots = slots;
      return fused::launch_engram_product(p, true, s);
    });
  }
  time_alone("engram_apply", 0.0, chain, [&](int i, cudaStream_t s) {
    return fused::launch_engram_apply(params(i, 0), true, s);
  });
  const double plain_us = time_half(chain, Kind::plain, false, Join::ended, 0.0, nullptr);
  for (const int slots : {12, 6, 4}) {
    for (const Join join : {Join::ended, Join::started}) {
      std::printf("  ring of %d:\n", slots);
      time_half(chain, Kind::engram, false, join, plain_us, [&](int i, int side) {
        fused::EngramParams p = params(i, side);
        p.slots = slots;
        return p;
      });
    }
  }
}

// few: a few small steps, for a sanitizer.
int check(bool few) {
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
    std::printf("%d failures\n", check.failures);
    return check.failures == 0 ? 0 : 1;
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
    check.failures += check_engram(requests, 6, requests == 1 ? 12 : 0, engram, device_engram);
  }
  check.failures += check_engram(1, 1, 2, engram, device_engram);
  check.failures += check_engram(8, 1, 4, engram, device_engram);
  std::printf("%d failures\n", check.failures);
  return check.failures == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "check") return check(argc > 2);
  if (what == "engram") {
    time_engram(1, 6);
    return 0;
  }
  if (what == "v4") {
    for (const int length : {8187, 131000}) time_v4(1, 6, length);
    time_v4(8, 6, 8187);
    return 0;
  }
  if (what != "time") {
    std::fprintf(stderr, "usage: index check [few] | time [LENGTH..] | engram | v4\n");
    return 2;
  }
  Random random(1);
  const HostWeights host(kHeads, kGroups, random);
  const HostIndexWeights index_host(random);
  if (argc > 2) {
    for (int i = 2; i < argc; ++i) time_case(host, index_host, 1, 6, std::atoi(argv[i]), true);
  } else {
    for (const int length : {8192, 32768, 131000}) time_case(host, index_host, 1, 6, length, true);
    time_case(host, index_host, 4, 6, 8192, true);
    time_case(host, index_host, 8, 6, 8192, true);
  }
  return 0;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) { return lowlat::bench::run(argc, argv); }
