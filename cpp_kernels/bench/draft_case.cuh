// bench/draft_case.cuh: the five proposals of a draft on one or more ranks, and their check against
// float64 at true shapes. Shared by the bench and the GPU test.
//
// The check is fed with the kernel's own tokens: each proposal is judged by the one before it as it
// was proposed, so one near tie does not hide what follows.
#pragma once

#include <chrono>
#include <cmath>
#include <memory>

#include "bench/attn_bench.hpp"
#include "fused/draft.hpp"
#include "host/nvidia/exchange_region.hpp"
#include "reference/format.hpp"

namespace lowlat::bench {

namespace fused = ::lowlat::nvidia::fused;

constexpr std::uint64_t kDraftBudgetNs = 50'000'000;
constexpr std::uint64_t kNoiseKey = 0x1234'5678'9abc'def0ull & 0x7fff'ffff'ffff'ffffull;

// ------------------------------------------------------------------------------------ drawn data

// splitmix64 of a place: values in (-1, 1), evenly spread.
__host__ __device__ inline float spread(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t z = i + 0x9e37'79b9'7f4a'7c15ull * (seed + 1);
  z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
  z = (z ^ z >> 27) * 0x94d0'49bb'1331'11ebull;
  return static_cast<float>(static_cast<std::int32_t>(z >> 32 ^ z)) * 0x1p-31f;
}
static __global__ void draw_bf16(std::uint16_t* out, std::int64_t n, std::uint64_t seed,
                                 float scale) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n; i += stride) {
    const float v = spread(seed, static_cast<std::uint64_t>(i)) * scale;
    out[i] = static_cast<std::uint16_t>(
        (__float_as_uint(v) + 0x7fffu + (__float_as_uint(v) >> 16 & 1u)) >> 16);
  }
}
static __global__ void draw_floats(float* out, std::int64_t n, std::uint64_t seed, float scale) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n; i += stride) {
    out[i] = spread(seed, static_cast<std::uint64_t>(i)) * scale;
  }
}

// The draft head's weights of the whole vocabulary, on one device and on the host.
struct DraftWeights {
  int vocab;
  Buffer<std::uint16_t> w1, w2;
  std::vector<std::uint16_t> host_w1, host_w2;

  // `flat`: w1 is zero, so that every bias is.
  DraftWeights(int num_ids, std::uint64_t seed, bool flat)
      : vocab(num_ids),
        w1(static_cast<std::size_t>(num_ids) * fused::kMarkovRank),
        w2(static_cast<std::size_t>(num_ids) * fused::kMarkovRank) {
    const auto n = static_cast<std::int64_t>(w1.size());
    // Biases of about one: 256 products of two values of about a quarter.
    draw_bf16<<<1024, 256>>>(w1.get(), n, seed, flat ? 0.0f : 0.43f);
    draw_bf16<<<1024, 256>>>(w2.get(), n, seed + 1, 0.43f);
    cuda_must(cudaGetLastError(), "draw weights");
    host_w1 = w1.take();
    host_w2 = w2.take();
  }
};

// ------------------------------------------------------------------------------------ reference

// Philox4x32-10 and the Gumbel value, written down apart from the library's.
inline double reference_noise(std::uint64_t key, std::uint32_t id, std::uint32_t row,
                              std::uint32_t step, std::uint32_t offset) {
  std::uint32_t c[4] = {id / 4, row, step, offset};
  std::uint32_t k[2] = {static_cast<std::uint32_t>(key & 0xffff'ffffu),
                        static_cast<std::uint32_t>(key >> 32)};
  for (int i = 0; i < 10; ++i) {
    const std::uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const std::uint32_t next[4] = {
        static_cast<std::uint32_t>((b >> 32) ^ c[1] ^ k[0]), static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>((a >> 32) ^ c[3] ^ k[1]), static_cast<std::uint32_t>(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  // The uniform number is an fp32 one by its definition.
  const float u = (static_cast<float>(c[id % 4]) + 0.5f) * 2.3283064365386963e-10f;
  return -std::log(-std::log1p(-static_cast<double>(u)));
}

struct DraftVerdict {
  int wrong = 0;       // tokens that are not the best by more than the bound
  int near = 0;        // tokens other than the best, within the bound
  int bad_logits = 0;  // further from z than one unit of the bias' last place
  double moved = 0.0;  // share of the logits whose bias fell on the other side of a tie
  double least_margin = 1e30;
};

// One request: base [5, vocab], tokens [5], logits [5, vocab] or NULL.
inline DraftVerdict judge(const DraftWeights& weights, const float* base, std::int64_t anchor,
                          float temperature, int request, std::uint32_t offset,
                          const std::int64_t* tokens, const float* logits) {
  DraftVerdict verdict;
  const int vocab = weights.vocab;
  std::int64_t previous = anchor;
  std::int64_t moved = 0;
  for (int step = 0; step < fused::kDraftSteps; ++step) {
    std::vector<double> scores(static_cast<std::size_t>(vocab));
    const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
    std::vector<double> most_bias(workers), most_z(workers);
    std::vector<std::int64_t> bad(workers), other(workers);
    std::vector<float> row(fused::kMarkovRank);
    for (int i = 0; i < fused::kMarkovRank; ++i) {
      row[static_cast<std::size_t>(i)] = static_cast<float>(reference::from_bf16(
          weights.host_w1[static_cast<std::size_t>(previous) * fused::kMarkovRank + i]));
    }
    parallel(workers, [&](std::int64_t w) {
      const auto worker = static_cast<std::size_t>(w);
      for (std::int64_t v = w * vocab / workers; v < (w + 1) * vocab / workers; ++v) {
        const std::uint16_t* w2 =
            &weights.host_w2[static_cast<std::size_t>(v) * fused::kMarkovRank];
        double sum[8] = {};
        for (int i = 0; i < fused::kMarkovRank; i += 8) {
          for (int j = 0; j < 8; ++j) {
            const std::uint32_t bits = std::uint32_t{w2[i + j]} << 16;
            float value;
            std::memcpy(&value, &bits, sizeof value);
            sum[j] += static_cast<double>(value) * static_cast<double>(row[i + j]);
          }
        }
        double dot = 0.0;
        for (const double part : sum) dot += part;
        const double bias = reference::from_bf16(reference::to_bf16(dot));
        const float z = base[std::int64_t{step} * vocab + v] + static_cast<float>(bias);
        most_bias[worker] = std::max(most_bias[worker], std::abs(bias));
        most_z[worker] = std::max(most_z[worker], std::abs(static_cast<double>(z)));
        if (logits != nullptr) {
          const double off =
              std::abs(static_cast<double>(logits[std::int64_t{step} * vocab + v]) - z);
          bad[worker] += !(off <= std::abs(bias) * 0x1p-7 + 1e-6) ? 1 : 0;
          other[worker] += off != 0.0 ? 1 : 0;
        }
        double score = z;
        if (temperature > 0.0f) {
          score = score / std::max(temperature, 1e-5f) +
                  reference_noise(kNoiseKey, static_cast<std::uint32_t>(v),
                                  static_cast<std::uint32_t>(request),
                                  static_cast<std::uint32_t>(step), offset);
        }
        scores[static_cast<std::size_t>(v)] = score;
      }
    });
    double bias_bound = 0.0, z_bound = 0.0;
    for (unsigned w = 0; w < workers; ++w) {
      bias_bound = std::max(bias_bound, most_bias[w]);
      z_bound = std::max(z_bound, most_z[w]);
      verdict.bad_logits += static_cast<int>(bad[w]);
      moved += other[w];
    }
    const double tau = temperature > 0.0f ? std::max(temperature, 1e-5f) : 1.0;
    // A bias on the other side of a tie, and of sampled scores fp32's roundings of quotient, noise
    // (up to 23) and sum.
    const double bound =
        bias_bound * 0x1p-7 / tau + (temperature > 0.0f ? z_bound / tau * 0x1p-22 + 1e-5 : 0.0);
    std::int64_t best = 0;
    for (std::int64_t v = 1; v < vocab; ++v) {
      if (scores[static_cast<std::size_t>(v)] > scores[static_cast<std::size_t>(best)]) best = v;
    }
    const std::int64_t token = tokens[step];
    if (token < 0 || token >= vocab) {
      ++verdict.wrong;
      return verdict;
    }
    const double lost =
        scores[static_cast<std::size_t>(best)] - scores[static_cast<std::size_t>(token)];
    double margin = 1e30;
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (v == best) continue;
      margin = std::min(
          margin, scores[static_cast<std::size_t>(best)] - scores[static_cast<std::size_t>(v)]);
    }
    verdict.least_margin = std::min(verdict.least_margin, margin);
    if (token != best) {
      // Without a bias all is exact in greedy steps: ties too.
      if (lost > bound || (bias_bound == 0.0 && temperature == 0.0f)) {
        ++verdict.wrong;
      } else {
        ++verdict.near;
      }
    }
    previous = token;
  }
  verdict.moved = static_cast<double>(moved) / vocab / fused::kDraftSteps;
  return verdict;
}

// ------------------------------------------------------------------------------------ ranks

struct DraftSetup {
  int vocab = 129280;
  int ranks = 2;
  int devices = 1;  // rank r on device r % devices
  int blocks = 64;  // of a rank
  int batch = 1;
  std::vector<float> temperatures;  // [batch]; empty: none given
  bool share_logits = false;
  int launches = 1;  // of one replay; each has weights and logits of its own where `sets` says so
  int sets = 1;
  bool programmatic = true;
  std::uint64_t budget_ns = kDraftBudgetNs;
  bool chained = false;  // anchors are the last proposals of the launch before
};

// One rank's memory. On the current device.
struct DraftRank {
  int rank, device;
  std::vector<Buffer<std::uint16_t>> w2;
  const std::uint16_t* w1;
  Buffer<std::uint16_t> own_w1;
  std::vector<Buffer<float>> base;  // [B, 5, V / R]
  Buffer<std::int64_t> anchors, tokens, offset;
  Buffer<float> temperatures, logits;
  Buffer<std::uint64_t> stamps;
  host::cuda::ExchangeRegion region;
  std::unique_ptr<Graph> graph;
  bool stamped = false;

  DraftRank(const DraftSetup& setup, const DraftWeights& weights, int tp_rank, int on)
      : rank(tp_rank), device(on), region(tp_rank, setup.ranks, 16, 4096) {
    const int shard = setup.vocab / setup.ranks;
    const std::size_t row_begin = static_cast<std::size_t>(tp_rank) * shard * fused::kMarkovRank;
    const std::size_t row_count = static_cast<std::size_t>(shard) * fused::kMarkovRank;
    for (int i = 0; i < setup.sets; ++i) {
      w2.emplace_back(std::vector<std::uint16_t>(
          weights.host_w2.begin() + static_cast<std::ptrdiff_t>(row_begin),
          weights.host_w2.begin() + static_cast<std::ptrdiff_t>(row_begin + row_count)));
      base.emplace_back(static_cast<std::size_t>(setup.batch) * fused::kDraftSteps * shard);
      // A whole row is drawn by its place in the vocabulary.
      for (int r = 0; r < setup.batch * fused::kDraftSteps; ++r) {
        draw_floats<<<64, 256>>>(
            base.back().get() + std::int64_t{r} * shard, shard,
            500 + static_cast<std::uint64_t>(100 * i + r) * 8 + static_cast<std::uint64_t>(tp_rank),
            4.0f);
      }
    }
    cuda_must(cudaGetLastError(), "draw logits");
    if (device == 0) {
      w1 = weights.w1.get();
    } else {
      own_w1 = Buffer<std::uint16_t>(weights.host_w1);
      w1 = own_w1.get();
    }
    std::vector<std::int64_t> first(static_cast<std::size_t>(setup.batch));
    for (int b = 0; b < setup.batch; ++b) first[b] = (7919 * b + 12345) % setup.vocab;
    anchors = Buffer<std::int64_t>(first);
    tokens = Buffer<std::int64_t>(first.size() * fused::kDraftSteps);
    offset = Buffer<std::int64_t>(std::vector<std::int64_t>{0});
    temperatures = Buffer<float>(setup.temperatures);
    if (!setup.temperatures.empty()) {
      logits = Buffer<float>(first.size() * fused::kDraftSteps * setup.vocab);
    }
    const int stamps_of_block = (fused::kDraftSteps + 1) * fused::kDraftStamps;
    stamps = Buffer<std::uint64_t>(static_cast<std::size_t>(setup.blocks) * stamps_of_block);
  }
  const std::uint32_t* status() const {
    return static_cast<const std::uint32_t*>(region.port(kDraftBudgetNs, 0).status);
  }
};

// All ranks of one process.
class DraftGroup {
 public:
  DraftGroup(const DraftSetup& setup, const DraftWeights& weights)
      : setup_(setup), weights_(weights) {
    for (int r = 0; r < setup.ranks; ++r) {
      on(r);
      ranks_.push_back(std::make_unique<DraftRank>(setup, weights, r, r % setup.devices));
      cuda_must(cudaDeviceSynchronize(), "synchronize");
    }
    for (int r = 0; r < setup.ranks; ++r) {
      on(r);
      for (int peer = 0; peer < setup.ranks; ++peer) {
        if (peer != r) ranks_[r]->region.open(peer, ranks_[peer]->region.handle());
      }
    }
  }

  DraftRank& rank(int r) { return *ranks_[r]; }
  const DraftSetup& setup() const { return setup_; }
  void on(int r) const { cuda_must(cudaSetDevice(r % setup_.devices), "set device"); }

  fused::DraftProposalsParams params(int r, int launch) const {
    const DraftRank& rank = *ranks_[r];
    const int set = launch % setup_.sets;
    fused::DraftProposalsParams p = {};
    p.port = rank.region.port(setup_.budget_ns, 0);
    p.exchange_index = launch * fused::kDraftExchanges;
    p.batch_size = setup_.batch;
    p.vocab_shard = setup_.vocab / setup_.ranks;
    p.w1 = rank.w1;
    p.w2 = rank.w2[set].get();
    p.base = rank.base[set].get();
    p.base_pitch = p.vocab_shard;
    p.anchors = setup_.chained ? rank.tokens.get() + fused::kDraftSteps - 1 : rank.anchors.get();
    p.anchor_pitch = setup_.chained ? fused::kDraftSteps : 1;
    p.tokens = rank.tokens.get();
    if (!setup_.temperatures.empty()) {
      p.temperatures = rank.temperatures.get();
      p.noise_key = kNoiseKey;
      p.noise_offset = rank.offset.get();
      for (int peer = 0; peer < setup_.ranks; ++peer) {
        if (peer == r || setup_.share_logits) p.logits[peer] = ranks_[peer]->logits.get();
      }
      p.share_logits = setup_.share_logits;
    }
    if (rank.stamped) p.stamps = rank.stamps.get();
    return p;
  }

  void launch(int r, cudaStream_t stream) const {
    const DraftRank& rank = *ranks_[r];
    cuda_must(
        fused::launch_begin_step(rank.region.step_epoch(), setup_.launches * fused::kDraftExchanges,
                                 nullptr, 0, stream),
        "begin step");
    for (int i = 0; i < setup_.launches; ++i) {
      cuda_must(
          fused::launch_draft_proposals(params(r, i), setup_.blocks, setup_.programmatic, stream),
          "draft proposals");
    }
  }
  void capture() {
    for (int r = 0; r < setup_.ranks; ++r) {
      on(r);
      ranks_[r]->graph = std::make_unique<Graph>([&](cudaStream_t stream) { launch(r, stream); });
    }
  }
  void replay(int late_rank = -1) {
    for (int r = 0; r < setup_.ranks; ++r) {
      if (r != late_rank) replay_one(r);
    }
    if (late_rank < 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    replay_one(late_rank);
  }
  void replay_one(int r) {
    on(r);
    ranks_[r]->graph->replay();
  }
  void wait() {
    for (int r = 0; r < setup_.ranks; ++r) {
      on(r);
      ranks_[r]->graph->wait();
    }
  }

  // Tokens of rank 0, or nothing where ranks differ or one has a fault.
  std::vector<std::int64_t> tokens() const {
    std::vector<std::int64_t> first;
    for (int r = 0; r < setup_.ranks; ++r) {
      on(r);
      if (ranks_[r]->status()[0] != 0) return {};
      const std::vector<std::int64_t> own = ranks_[r]->tokens.take();
      if (r == 0) first = own;
      if (own != first) return {};
    }
    return first;
  }
  // Rank r's base of all ids, of set 0: [B, 5, V].
  std::vector<float> whole_base() const {
    const int shard = setup_.vocab / setup_.ranks, rows = setup_.batch * fused::kDraftSteps;
    std::vector<float> whole(static_cast<std::size_t>(rows) * setup_.vocab);
    for (int r = 0; r < setup_.ranks; ++r) {
      on(r);
      const std::vector<float> part = ranks_[r]->base[0].take();
      for (int row = 0; row < rows; ++row) {
        std::copy_n(&part[static_cast<std::size_t>(row) * shard], shard,
                    &whole[static_cast<std::size_t>(row) * setup_.vocab +
                           static_cast<std::size_t>(r) * shard]);
      }
    }
    return whole;
  }

 private:
  DraftSetup setup_;
  const DraftWeights& weights_;
  std::vector<std::unique_ptr<DraftRank>> ranks_;
};

// Replays once more and judges everything. True: as it has to be. One line.
inline bool check_draft(DraftGroup& group, const DraftWeights& weights, const char* what,
                        int late_rank = -1) {
  const DraftSetup& setup = group.setup();
  std::vector<std::int64_t> offsets;
  for (int r = 0; r < setup.ranks; ++r) {
    group.on(r);
    group.rank(r).tokens.poison();
    if (group.rank(r).logits.size() > 0) group.rank(r).logits.poison();
    offsets.push_back(group.rank(r).offset.take()[0]);
    cuda_must(cudaDeviceSynchronize(), "synchronize");
  }
  const std::vector<float> base = group.whole_base();
  group.replay(late_rank);
  group.wait();
  const std::vector<std::int64_t> tokens = group.tokens();
  bool good = !tokens.empty();
  DraftVerdict total;
  const std::vector<std::int64_t> anchors = group.rank(0).anchors.take();
  for (int r = 0; good && r < (setup.share_logits ? setup.ranks : 1); ++r) {
    group.on(r);
    const std::vector<float> logits = group.rank(r).logits.take();
    for (int b = 0; b < setup.batch; ++b) {
      const std::size_t at =
          static_cast<std::size_t>(b) * fused::kDraftSteps * static_cast<std::size_t>(setup.vocab);
      const float temperature = setup.temperatures.empty() ? 0.0f : setup.temperatures[b];
      const bool whole = temperature > 0.0f && (setup.share_logits || setup.ranks == 1);
      const DraftVerdict verdict = judge(
          weights, &base[at], anchors[b], temperature, b, static_cast<std::uint32_t>(offsets[0]),
          &tokens[b * fused::kDraftSteps], whole ? &logits[at] : nullptr);
      total.wrong += verdict.wrong;
      total.near += verdict.near;
      total.bad_logits += verdict.bad_logits;
      total.moved = std::max(total.moved, verdict.moved);
      total.least_margin = std::min(total.least_margin, verdict.least_margin);
      // Greedy requests write no logits.
      for (std::size_t i = 0; temperature == 0.0f && i < logits.size() / setup.batch; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, &logits[at + i], sizeof bits);
        total.bad_logits += bits != 0xffff'ffffu ? 1 : 0;
      }
    }
    if (!setup.temperatures.empty())
      good = good && group.rank(r).offset.take()[0] == offsets[r] + 1;
  }
  good = good && total.wrong == 0 && total.bad_logits == 0 && total.moved < 0.01;
  std::printf(
      "%s %-34s R=%d on %d GPU, %3d blocks, B=%d%s: wrong %d, near ties %d, bad logits %d, biases "
      "on a tie's other side %.5f, least margin %.2e, state %u\n",
      good ? "ok  " : "FAIL", what, setup.ranks, setup.devices, setup.blocks, setup.batch,
      setup.share_logits ? " shared logits" : "", total.wrong, total.near, total.bad_logits,
      total.moved, total.least_margin, group.rank(0).status()[0]);
  std::fflush(stdout);
  return good;
}

}  // namespace lowlat::bench
