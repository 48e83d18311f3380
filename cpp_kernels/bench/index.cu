// index: checks and times the compressor and the index of V4.1-Flash layers on one GPU.
//
//   index check          every kernel against float64 at true shapes; exit code 1: a failure
//   index time [LENGTH]  chains of layers in a CUDA graph: each kernel alone, and the attention half
//                        of a layer with and without the index beside it
//
// TP4's share on one GPU: 16 heads, two output groups, four mailboxes looped back.
#include "bench/index_case.cuh"

namespace lowlat::bench {
namespace {

constexpr int kRanks = 4, kHeads = 16, kGroups = 2, kLayers = 6;

enum class Kind { plain, source, ratio2, layer20, blocks };
constexpr const char* kNames[] = {"plain", "index source, all entries", "ratio-2 source",
                                  "layer 20", "index source by blocks"};

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
                                           fused::kIndexMaxBlocks) - 1;
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

  // A chain of the attention half with the index of `kind` beside it.
  // early: the side begins when wo_b has ended, and waits for x at a gate.
  void launch(Kind kind, bool early, cudaStream_t stream, cudaStream_t side, cudaStream_t other,
              cudaEvent_t event) {
    gates.reset();
    index_gates.reset();
    const fused::ExchangePort port = mail.looped(kRanks);
    const int rows = sizes.rows();
    cuda_must(fused::launch_begin_step(mail.step_epoch.get(), kLayers, gates.round(), stream),
              "begin step");
    fused::Gate last = {};
    const bool compresses = kind == Kind::ratio2 || kind == Kind::layer20;
    for (int i = 0; i < kLayers; ++i) {
      const auto gate = [&](Gates::Kind which, std::uint32_t blocks) {
        return gates.at(i, which, blocks);
      };
      fused::Gate selected = {};
      const fused::Gate qkv_done = gate(Gates::qkv, fused::front_qkv_blocks());
      if (kind != Kind::plain) {
        const std::uint32_t* round = gates.round();
        if (i == 0 || !early) cuda_must(cudaEventRecord(event, stream), "record");
        fused::IndexParams index = buffers[i].index(index_weights[i], states[i], act,
                                                    kind == Kind::blocks, compresses);
        if (kind != Kind::layer20) index.block_scores = nullptr;
        index.x_done = last;
        index.qkv_done = qkv_done;
        index.query_done =
            index_gates.at(i, IndexGates::query, fused::index_query_blocks(rows), round);
        index.scores_done =
            index_gates.at(i, IndexGates::scores, fused::kIndexScoreBlocks, round);
        index.done =
            index_gates.at(i, IndexGates::select, fused::index_select_blocks(index), round);
        if (compresses) {
          cuda_must(cudaStreamWaitEvent(other, event), "wait");
          fused::CompressParams compress = buffers[i].compress(index_weights[i], states[i], act);
          compress.x_done = last;
          compress.product_done = index_gates.at(
              i, IndexGates::product, fused::compress_product_blocks(compress), round);
          compress.done = index_gates.at(i, IndexGates::keys, fused::compress_key_blocks(rows), round);
          index.keys_done = compress.done;
          cuda_must(fused::launch_compress_product(compress, kHidden, false, other), "product");
          cuda_must(fused::launch_compress_key(compress, true, other), "key");
        }
        cuda_must(cudaStreamWaitEvent(side, event), "wait");
        cuda_must(fused::launch_index_query(index, false, side), "query");
        cuda_must(fused::launch_index_scores(index, true, side), "scores");
        cuda_must(fused::launch_index_select(index, true, side), "select");
        if (kind == Kind::layer20) {
          cuda_must(fused::launch_index_blocks(index, true, side), "blocks");
        }
        selected = index.done;
      }
      fused::FrontParams front = act.front(weights[i], keys[i]);
      const fused::Gate mix_done = gate(Gates::mix, rows);
      front.mix = act.mixing(weights[i], i % 2,
                             gate(Gates::mix_parts, fused::mix_parts(kHidden)), mix_done);
      front.before = last;
      front.qkv_done = qkv_done;
      front.done = gate(Gates::q, fused::front_q_blocks(rows, kHeads));
      cuda_must(fused::launch_front_qkv(front, true, stream), "qkv");
      cuda_must(fused::launch_front_q(front, true, stream), "q");
      fused::AttentionParams attention = act.attention(weights[i], keys[i]);
      attention.before = front.done;
      attention.done = gate(Gates::attention, fused::attention_blocks(rows, kHeads));
      if (kind != Kind::plain) {
        attention.selected = selected;
        attention.extra_idx = buffers[i].entry_slots.get();
        attention.extra = {states[i].pool.get(), HostIndexState::pool_page_bytes(sizes),
                           sizes.per_page()};
      }
      cuda_must(fused::launch_sparse_attention(attention, true, stream), "attention");
      fused::OprojParams oproj = act.oproj(weights[i], port, i, true);
      oproj.before = attention.done;
      oproj.u_done = gate(Gates::u, fused::oproj_a_blocks(kGroups));
      cuda_must(fused::launch_oproj_a(oproj, true, stream), "wo_a");
      cuda_must(fused::launch_oproj_b(oproj, true, stream), "wo_b");
      if (early && kind != Kind::plain) cuda_must(cudaEventRecord(event, stream), "record");
      fused::ExchangeNormParams exchange = act.exchange(weights[i], port, i, i % 2, true);
      exchange.mix_done = mix_done;
      exchange.before = oproj.u_done;
      exchange.done = last = gate(Gates::exchange, fused::exchange_norm_blocks(rows));
      cuda_must(fused::launch_exchange_norm(exchange, kHidden, true, stream), "exchange");
    }
    for (cudaStream_t joined : {side, other}) {
      if (kind == Kind::plain || (joined == other && !compresses)) continue;
      cuda_must(cudaEventRecord(event, joined), "record");
      cuda_must(cudaStreamWaitEvent(stream, event), "join");
    }
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

void time_case(const HostWeights& host, const HostIndexWeights& index_host, int requests,
               int tokens, int length, bool alone) {
  double plain_us = 0.0;
  for (const int ratio : {2, 1}) {
    const IndexSizes sizes{requests, tokens, ratio, length};
    IndexChain chain(host, index_host, sizes);
    cudaStream_t side, other;
    cudaEvent_t event;
    cuda_must(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "stream");
    cuda_must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    cuda_must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    if (alone) {
      const double keys = sizes.requests * 68e-6 * sizes.max_entries();
      const auto index = [&](int i, bool by_blocks) {
        fused::IndexParams p =
            chain.buffers[i].index(chain.index_weights[i], chain.states[i], chain.act, by_blocks,
                                   false);
        if (ratio == 2) p.block_scores = nullptr;
        return p;
      };
      const auto compress = [&](int i) {
        return chain.buffers[i].compress(chain.index_weights[i], chain.states[i], chain.act);
      };
      time_alone("compress_product", ratio * 5.24, chain, [&](int i, cudaStream_t s) {
        return fused::launch_compress_product(compress(i), kHidden, true, s);
      });
      time_alone("compress_key", 0.13, chain, [&](int i, cudaStream_t s) {
        return fused::launch_compress_key(compress(i), true, s);
      });
      time_alone("index_query", 5.58, chain, [&](int i, cudaStream_t s) {
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
    const std::vector<Kind> kinds =
        ratio == 2 ? std::vector<Kind>{Kind::plain, Kind::source, Kind::ratio2}
                   : std::vector<Kind>{Kind::plain, Kind::layer20, Kind::blocks};
    for (const bool early : {false, true})
    for (const Kind kind : kinds) {
      if (early && kind == Kind::plain) continue;
      Graph graph([&](cudaStream_t stream) { chain.launch(kind, early, stream, side, other, event); });
      const Times times = time_of(graph, 60);
      const double us = times.median_us / kLayers;
      if (kind == Kind::plain) plain_us = us;
      std::printf("half of %-26s%s T=%-2d length %-6d %6.2f us a layer (10th %.2f, 90th %.2f), "
                  "%+.2f over plain%s\n",
                  kNames[static_cast<int>(kind)], early ? " early" : "", sizes.rows(), length, us, times.low_us / kLayers,
                  times.high_us / kLayers, us - plain_us, chain.mail.faulted() ? "  FAULTED" : "");
      std::fflush(stdout);
      if (kind != Kind::plain) {
        // What a replay selected: the same the second time.
        const auto first = chain.buffers[0].entry_slots.take();
        graph.replay();
        graph.wait();
        if (chain.buffers[0].entry_slots.take() != first) std::printf("  SELECTION DIFFERS\n");
      }
    }
    cudaEventDestroy(event);
    cudaStreamDestroy(side);
    cudaStreamDestroy(other);
  }
}

int check() {
  Random random(1);
  const HostIndexWeights host(random);
  const DeviceIndexWeights device(host);
  IndexCheck check;
  const IndexSizes all[] = {
      {1, 1, 2, 0},      {1, 6, 2, 0},      {1, 6, 1, 3},     {1, 6, 2, 8191},   {1, 6, 1, 8190},
      {2, 6, 2, 8192},   {8, 6, 1, 1030},   {8, 6, 2, 2049},  {48, 1, 1, 600},   {1, 8, 1, 20000},
      {4, 6, 1, 16386},  {1, 12, 2, 40000}, {1, 6, 1, 131000}, {1, 6, 2, 131001}};
  for (const IndexSizes& sizes : all) check.run(sizes, Draw::random, host, device);
  check.run({1, 6, 1, 20000}, Draw::equal_scores, host, device);
  check.run({1, 6, 2, 5000}, Draw::equal_scores, host, device);
  check.run({2, 6, 1, 3000}, Draw::padded, host, device);
  check.run({2, 6, 2, 3001}, Draw::padded, host, device);
  std::printf("%d failures\n", check.failures);
  return check.failures == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "check") return check();
  if (what != "time") {
    std::fprintf(stderr, "usage: index check | time [LENGTH..]\n");
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
