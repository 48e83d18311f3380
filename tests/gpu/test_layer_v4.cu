// V4-Flash's layers at true shapes, TP4's share on one device with its mailboxes looped back: whole
// layers of ratio 0, 4 and 128 against float64, half by half; and replays, and launches of which a
// kernel is late, bit for bit what the same kernels give one after another.
#include <functional>
#include <tuple>

#include "bench/layer_v4_case.cuh"
// The model comes first.
#include "attention_values.hpp"
#include "gpu.cuh"
#include "late.cuh"
#include "reference/experts.hpp"
#include "reference/gate.hpp"
#include "reference/hc.hpp"

using lowlat::nvidia::fused::HopKernel;
using lowlat::testing::finish;
using lowlat::testing::need_device;
using lowlat::testing::spend;

namespace lowlat::bench {
namespace {

constexpr int kTp = 4;

struct Weights {
  HostWeights host;
  HostV4 v4;
  explicit Weights(Random random = Random(1)) : host(kHeads, kGroups, random), v4(random) {}
};
const Weights& weights() {
  static const Weights all;
  return all;
}

struct Stats {
  std::vector<float> pre, post, comb;
  Stats(const std::vector<std::uint16_t>& residual, const HostWeights& w, int rows)
      : pre(static_cast<std::size_t>(rows) * 4), post(pre.size()), comb(4 * pre.size()) {
    parallel(rows, [&](std::int64_t row) {
      reference::hc_stats(&pre[row * 4], &post[row * 4], &comb[row * 16],
                          &residual[row * 4 * kHidden], w.fn.data(), w.base.data(), w.scale.data(),
                          1, kHidden, kNormEps, kHcEps, kSinkhornIters);
    });
  }
};

std::vector<std::uint16_t> combined(const std::vector<std::uint16_t>& residual, const Stats& stats,
                                    const HostWeights& w, int rows) {
  std::vector<std::uint16_t> x(static_cast<std::size_t>(rows) * kHidden);
  reference::hc_combine_norm(x.data(), residual.data(), stats.pre.data(), w.gain.data(), rows,
                             kHidden, kNormEps, true);
  return x;
}
std::vector<std::uint16_t> posted(const std::vector<std::uint16_t>& residual,
                                  const std::vector<std::uint16_t>& y, const Stats& stats,
                                  int rows) {
  std::vector<std::uint16_t> out(residual.size());
  reference::hc_post(out.data(), residual.data(), y.data(), stats.post.data(), stats.comb.data(),
                     rows, kHidden);
  return out;
}
// Four equal partial sums, by rank, as one bf16 tensor.
template <class T>
std::vector<std::uint16_t> summed(const std::vector<T>& partial) {
  std::vector<std::uint16_t> y(partial.size());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = bf16(4.0 * static_cast<float>(partial[i]));
  return y;
}

// The rows of a pool after the step, in float64 from x; of ratio 4 the keys of the index are left
// alone, for what is selected is taken from the device.
std::vector<std::uint8_t> pooled_rows(const StepV4& step, const std::vector<std::uint8_t>& pool,
                                      const std::vector<double>& x) {
  const IndexSizes& sizes = step.sizes;
  const int rows = sizes.rows(), width = width_v4(sizes.ratio);
  std::vector<float> sums(static_cast<std::size_t>(rows) * width);
  parallel(width, [&](std::int64_t n) {
    for (int row = 0; row < rows; ++row) {
      double sum = 0.0;
      for (int i = 0; i < kHidden; ++i) {
        sum += x[static_cast<std::size_t>(row) * kHidden + i] *
               reference::from_bf16(weights().v4.matrices[n * kHidden + i]);
      }
      sums[static_cast<std::size_t>(row * width + n)] = static_cast<float>(sum);
    }
  });
  std::vector<std::uint8_t> out = pool;
  for (int row = 0; row < rows; ++row) {
    if ((step.positions[row] + 1) % sizes.ratio != 0) continue;
    const std::vector<double> entry = CheckV4::pooled(step, weights().v4, sums, row, false);
    std::vector<float> rounded(kDim);
    for (int i = 0; i < kDim; ++i) rounded[i] = static_cast<float>(reference::round_bf16(entry[i]));
    reference::kv_pack(&out[static_cast<std::size_t>(step.slots[row] / sizes.ratio) * 584],
                       rounded.data(), 1);
  }
  return out;
}

std::vector<std::uint16_t> attention_half(const PooledChain& chain, const HostContext& context,
                                          const std::vector<std::uint16_t>& x) {
  const HostWeights& w = weights().host;
  const StepV4& step = chain.states[0];
  const IndexSizes& sizes = chain.sizes;
  const int rows = sizes.rows();
  const std::vector<double> codes = quantized(x);
  const std::vector<std::uint16_t> qa = codes_of(
                                       product(codes, w.wq_a, rows, kQLora, kHidden, kHidden, 0)),
                                   kv = codes_of(
                                       product(codes, w.wkv, rows, kDim, kHidden, kHidden, 0));
  std::vector<std::uint16_t> latent(qa.size());
  reference::rms_norm(latent.data(), qa.data(), w.q_norm.data(), rows, kQLora, kNormEps);
  std::vector<double> q =
      rounded(product(quantized(latent), w.wq_b, rows, kHeads * kDim, kQLora, kQLora, 0));
  norm_heads(q);
  const std::vector<std::int64_t> positions(step.positions.begin(), step.positions.end());
  reference::rope(q.data(), positions.data(), rows, kHeads, kDim, true, false);

  SeenKeys keys = {
      flat(context.window, sizes.num_pages(), kSlotsPerPage, kPageBytes),
      flat(context.pool, sizes.num_pages(), sizes.per_page(), StepV4::pool_page_bytes(sizes)),
      context.window_idx.data(), context.entry_idx.data(),
      chain.ratio == 0 ? 0 : context.num_entries};
  const std::vector<std::uint8_t> packed = stored_keys(kv, w.kv_norm, step.positions, rows);
  for (int row = 0; row < rows; ++row) {
    std::memcpy(&keys.window[static_cast<std::size_t>(step.slots[row]) * 584],
                &packed[static_cast<std::size_t>(row) * 584], 584);
  }
  if (chain.ratio != 0) keys.extra = pooled_rows(step, keys.extra, values(x));
  std::vector<std::int32_t> selected;
  if (chain.ratio == 4) {
    selected = step.entry_slots.take();
    keys.extra_idx = selected.data();
  }
  const std::vector<double> o =
      quantized(codes_of(attention(codes_of(q), keys, step.positions, w.sink, rows)));
  std::vector<double> u(static_cast<std::size_t>(rows) * kGroups * 1024);
  for (int group = 0; group < kGroups; ++group) {
    HostFp8 part;
    constexpr int kScales = 1024 / kScaleGroup * (4096 / kScaleGroup);
    part.codes.assign(w.wo_a.codes.begin() + group * 1024 * 4096,
                      w.wo_a.codes.begin() + (group + 1) * 1024 * 4096);
    part.scales.assign(w.wo_a.scales.begin() + group * kScales,
                       w.wo_a.scales.begin() + (group + 1) * kScales);
    const std::vector<double> y = product(o, part, rows, 1024, 4096, kHeads * kDim, group * 4096);
    for (int row = 0; row < rows; ++row) {
      std::copy_n(y.begin() + row * 1024, 1024, u.begin() + (row * kGroups + group) * 1024);
    }
  }
  return summed(
      product(quantized(codes_of(u)), w.wo_b, rows, kHidden, kGroups * 1024, kGroups * 1024, 0));
}

// A part of what lies on the device.
std::vector<std::uint8_t> part_of(const Buffer<std::uint8_t>& from, std::size_t begin,
                                  std::size_t count) {
  std::vector<std::uint8_t> out(count);
  cuda_must(cudaMemcpy(out.data(), from.get() + begin, count, cudaMemcpyDeviceToHost), "copy");
  return out;
}

// The experts of x, and in `ids` those that each row has to go to. hash_ids: empty, or of a table.
std::vector<std::uint16_t> experts_half(const MoeLayer<kTp>& moe,
                                        const std::vector<std::uint16_t>& x, int rows,
                                        std::vector<std::int32_t>& ids,
                                        const std::vector<std::int32_t>& hash_ids) {
  using Shape = ModelOf<kTp>;
  constexpr std::size_t kI = Shape::kIntermediateLocal, kH = kHidden;
  constexpr int kSlots = Shape::kExpertsPerToken;
  const std::vector<std::uint16_t> gate = moe.gate.take();
  const std::vector<float> bias = moe.bias.take();
  ids.resize(static_cast<std::size_t>(rows) * kSlots);
  std::vector<float> weight(ids.size());
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(rows));
  for (int row = 0; row < rows; ++row) tokens[row] = row;
  parallel(rows, [&](std::int64_t row) {
    const std::size_t at = static_cast<std::size_t>(row) * kSlots;
    if (hash_ids.empty()) {
      reference::gate(&ids[at], &weight[at], &x[row * kHidden], gate.data(), bias.data(), 1,
                      kHidden, Shape::kNumExperts, kSlots, true);
    } else {
      reference::hash_gate(&ids[at], &weight[at], &tokens[row], hash_ids.data(), &x[row * kHidden],
                           gate.data(), 1, kHidden, kSlots);
    }
  });
  std::vector<std::int32_t> chosen = ids;
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  const Matrix* matrices[3] = {&moe.w1, &moe.w3, &moe.w2};
  std::vector<std::uint8_t> codes[3], scales[3];
  for (int m = 0; m < 3; ++m) {
    for (const std::int32_t e : chosen) {
      const std::size_t n = kI * kH / 2, s = kI * kH / 32;
      const auto c = part_of(matrices[m]->codes, e * n, n),
                 f = part_of(matrices[m]->scales, e * s, s);
      codes[m].insert(codes[m].end(), c.begin(), c.end());
      scales[m].insert(scales[m].end(), f.begin(), f.end());
    }
  }
  std::vector<std::int32_t> local(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    local[i] = static_cast<std::int32_t>(std::lower_bound(chosen.begin(), chosen.end(), ids[i]) -
                                         chosen.begin());
  }
  const Matrix* shared[3] = {&moe.shared_w1, &moe.shared_w3, &moe.shared_w2};
  std::vector<std::uint8_t> shared_codes[3];
  std::vector<float> shared_scales[3];
  for (int m = 0; m < 3; ++m) {
    shared_codes[m] = shared[m]->codes.take();
    for (const std::uint8_t byte : shared[m]->scales.take()) {
      shared_scales[m].push_back(static_cast<float>(reference::from_ue8m0(byte)));
    }
  }
  std::vector<float> y(static_cast<std::size_t>(rows) * kHidden);
  parallel(rows, [&](std::int64_t row) {
    const std::size_t at = static_cast<std::size_t>(row) * kSlots;
    reference::experts(&y[row * kHidden], &x[row * kHidden], {codes[0].data(), scales[0].data()},
                       {codes[1].data(), scales[1].data()}, {codes[2].data(), scales[2].data()},
                       &local[at], &weight[at], {shared_codes[0].data(), shared_scales[0].data()},
                       {shared_codes[1].data(), shared_scales[1].data()},
                       {shared_codes[2].data(), shared_scales[2].data()}, 1, kHidden, kI, kSlots,
                       kScaleGroup);
  });
  return summed(y);
}

// The entries that the step completes and the layer stores, of one in five hundred that attention
// sees: nothing that a layer leaves would show a wrong one. Planted and seen: the first row of a
// step for each of its rows.
void check_stored(const PooledChain& chain, const HostContext& context,
                  const std::vector<std::uint16_t>& x) {
  const StepV4& step = chain.states[0];
  const IndexSizes& sizes = step.sizes;
  const auto rows_of = [&](const std::vector<std::uint8_t>& pool) {
    return flat(pool, sizes.num_pages(), sizes.per_page(), StepV4::pool_page_bytes(sizes));
  };
  const std::vector<std::uint8_t> stored[] = {rows_of(chain.contexts[0].pool.take()),
                                              pooled_rows(step, rows_of(context.pool), values(x))};
  std::vector<double> read[2];
  for (int row = 0; row < sizes.rows(); ++row) {
    if ((step.positions[row] + 1) % sizes.ratio != 0) continue;
    for (int i = 0; i < 2; ++i) {
      std::vector<float> entry(kDim);
      reference::kv_unpack(
          entry.data(), &stored[i][static_cast<std::size_t>(step.slots[row] / sizes.ratio) * 584],
          1);
      read[i].insert(read[i].end(), entry.begin(), entry.end());
    }
  }
  expect("stored entries", sizes.rows(), read[0], read[1], 2e-2);
}

// What a sublayer made, as its residual tells: y of least squares over the streams.
std::vector<double> made(const std::vector<std::uint16_t>& before,
                         const std::vector<std::uint16_t>& after, const Stats& stats, int rows) {
  std::vector<double> y(static_cast<std::size_t>(rows) * kHidden);
  for (int row = 0; row < rows; ++row) {
    const float *post = &stats.post[static_cast<std::size_t>(row) * 4],
                *comb = &stats.comb[static_cast<std::size_t>(row) * 16];
    for (int h = 0; h < kHidden; ++h) {
      double sum = 0.0, squares = 0.0;
      for (int k = 0; k < 4; ++k) {
        const auto at = [&](const std::vector<std::uint16_t>& from, int j) {
          return double{
              reference::from_bf16(from[(static_cast<std::size_t>(row) * 4 + j) * kHidden + h])};
        };
        double rest = at(after, k);
        for (int j = 0; j < 4; ++j) rest -= comb[4 * j + k] * at(before, j);
        sum += post[k] * rest;
        squares += double{post[k]} * post[k];
      }
      y[static_cast<std::size_t>(row) * kHidden + h] = sum / squares;
    }
  }
  return y;
}

// What was selected is exactly the best of the scores that the device has, each entry at its slot.
void check_selected(const StepV4& step) {
  const IndexSizes& sizes = step.sizes;
  const std::vector<float> scores = step.scores.take();
  const std::vector<std::int32_t> entries = step.entries.take(), slots = step.entry_slots.take();
  int wrong = 0;
  for (int row = 0; row < sizes.rows(); ++row) {
    const float* of_row = &scores[static_cast<std::size_t>(row * sizes.pitch())];
    const std::vector<double> values(of_row, of_row + (step.positions[row] + 1) / sizes.ratio);
    const std::vector<std::int32_t> best = reference::select_top(values, fused::kIndexTopk);
    const std::int32_t* pages =
        &step.page_table[static_cast<std::size_t>(row / sizes.tokens * sizes.pages_of_request())];
    for (std::size_t i = 0; i < fused::kIndexTopk; ++i) {
      const int want = i < best.size() ? best[i] : -1;
      const int slot =
          want < 0 ? -1
                   : pages[want / sizes.per_page()] * sizes.per_page() + want % sizes.per_page();
      const std::size_t at = static_cast<std::size_t>(row) * fused::kIndexTopk + i;
      wrong += entries[at] != want || slots[at] != slot ? 1 : 0;
    }
  }
  CHECK_EQ(wrong, 0);
}

// One layer, each half from what the device began it with. 4e-2: codes of V4's attention output,
// and of what follows, move where an error passes a tie (a single wrong key of 640 gives more);
// 2e-2: the experts' roundings, and of the residual.
void check_layer(int ratio, int rows, int length, bool hashes, std::uint64_t budget_ns = 20'000'000,
                 bool marlin = false) {
  const int tokens = rows % 6 == 0 ? 6 : 1;
  PooledChain chain(weights().host, weights().v4, 1, ratio, rows / tokens, tokens, length,
                    budget_ns);
  chain.hashes = hashes;
  // The same values by their checkpoint's rows.
  std::unique_ptr<MoeLayer<kTp>> laid;
  if (marlin) {
    laid = std::make_unique<MoeLayer<kTp>>(7, 0);
    chain.layers.moe[0]->relay();
  }
  // As the chain drew it.
  Random random(17);
  const StepV4 drawn(chain.sizes, Draw::random, random);
  const HostContext context(drawn, random);
  Graph graph([&](cudaStream_t stream) { chain.launch({}, stream); });
  chain.layers.reset();
  finish();
  graph.replay();
  graph.wait();
  CHECK(!chain.mail.faulted());
  std::printf("ratio %d length %d%s\n", ratio, length, hashes ? ", by table" : "");
  if (ratio == 4) check_selected(chain.states[0]);
  std::vector<std::uint16_t> got[2];
  for (int i = 0; i < 2; ++i) {
    got[i].resize(chain.layers.residual.size());
    cuda_must(cudaMemcpy(got[i].data(), chain.layers.memory.residual[i], 2 * got[i].size(),
                         cudaMemcpyDeviceToHost),
              "copy");
  }
  const HostWeights& w = weights().host;
  const std::vector<std::uint16_t>& first = chain.layers.residual;
  const Stats of_first(first, w, rows), of_middle(got[1], w, rows), of_last(got[0], w, rows);
  const std::vector<std::uint16_t> x_of_first = combined(first, of_first, w, rows);
  if (ratio != 0) check_stored(chain, context, x_of_first);
  const std::vector<std::uint16_t> y = attention_half(chain, context, x_of_first);
  expect("attention's y", rows, made(first, got[1], of_first, rows), values(y), 4e-2);
  expect("residual in the middle", rows, values(got[1]), values(posted(first, y, of_first, rows)),
         4e-2);
  std::vector<std::int32_t> ids;
  const std::vector<std::uint16_t> z =
      experts_half(marlin ? *laid : *chain.layers.moe[0], combined(got[1], of_middle, w, rows),
                   rows, ids, hashes ? chain.hash_ids.take() : std::vector<std::int32_t>{});
  CHECK(ids == chain.layers.ids.take());
  expect("experts' y", rows, made(got[1], got[0], of_middle, rows), values(z), 2e-2);
  expect("residual", rows, values(got[0]), values(posted(got[1], z, of_middle, rows)), 1e-2);
  const std::vector<std::uint16_t> all = chain.layers.take();
  const std::vector<std::uint16_t> x(all.begin() + static_cast<std::ptrdiff_t>(first.size()),
                                     all.end());
  expect("next x", rows, values(x), values(combined(got[0], of_last, w, rows)), 4e-3);
}

using Result = std::vector<std::uint16_t>;

// One rank of four on this device, two layers.
struct Rank {
  PooledChain chain;
  fused::LayerParts parts;
  Rank(int ratio, int rows, fused::BesideOrder order)
      : Rank(ratio, rows, rows % 6 == 0 ? 6 : 1, order) {}
  Rank(int ratio, int rows, int tokens, fused::BesideOrder order)
      : chain(weights().host, weights().v4, 2, ratio, rows / tokens, tokens, 8186) {
    parts.beside_order = order;
  }

  std::vector<Result> inputs;

  // Another input: the same for the same number.
  void begin(int input) {
    while (static_cast<int>(inputs.size()) <= input) {
      Random random(100 + inputs.size());
      inputs.push_back(chain.layers.residual);
      for (auto& v : inputs.back()) v = bf16(random.normal());
    }
    chain.layers.residual = inputs[static_cast<std::size_t>(input)];
    chain.layers.reset();
  }
  Result run(int input, const std::function<void(HopKernel)>& between, cudaStream_t stream) {
    fused::LayerParts watched = parts;
    watched.between = &between;
    begin(input);
    finish();
    chain.launch(watched, stream);
    finish();
    return chain.layers.take();
  }
  Result one_by_one(int input) {
    return run(input, [](HopKernel) { finish(); }, nullptr);
  }
};

}  // namespace
}  // namespace lowlat::bench

using lowlat::bench::check_layer;
using lowlat::bench::Graph;
using lowlat::bench::Rank;
using lowlat::bench::Result;
using lowlat::nvidia::fused::BesideOrder;

// Rows, ratio and order of chains.
constexpr std::tuple<int, int, BesideOrder> kWays[] = {
    {1, 4, BesideOrder::measured},    {6, 4, BesideOrder::entries_q_end},
    {6, 4, BesideOrder::measured},    {6, 4, BesideOrder::q_last},
    {6, 4, BesideOrder::keys_q_end},  {6, 4, BesideOrder::query_first},
    {6, 128, BesideOrder::measured},  {6, 128, BesideOrder::pool_end},
    {12, 4, BesideOrder::measured},   {12, 4, BesideOrder::q_first},
    {12, 128, BesideOrder::measured}, {24, 4, BesideOrder::measured},
    {48, 4, BesideOrder::keys_q_end}, {48, 4, BesideOrder::measured},
    {48, 128, BesideOrder::measured}};

TEST_CASE(layers_equal_float64_for_all_widths) {
  need_device();
  for (const int rows : {1, 6, 12, 24, 48}) {
    for (const int ratio : {4, 128}) check_layer(ratio, rows, 8186, false);
  }
  // Fewer entries than a selection; no pool, and experts by their table.
  check_layer(4, 6, 1000, false);
  check_layer(0, 6, 8186, true);
}

TEST_CASE(experts_in_marlin_tiles_equal_float64) {
  need_device();
  check_layer(128, 6, 1000, false, 20'000'000, true);
  check_layer(0, 1, 1000, true, 20'000'000, true);
}

TEST_CASE(brief_one_row_and_six) {
  need_device();
  for (const int rows : {1, 6}) {
    for (const int ratio : {4, 128}) {
      check_layer(ratio, rows, 1000, false, lowlat::testing::kBriefBudgetNs);
    }
  }
}

TEST_CASE(replays_with_changing_inputs_equal_kernels_run_one_by_one) {
  need_device();
  for (const auto& [rows, ratio, order] : kWays) {
    Rank rank(ratio, rows, order);
    lowlat::testing::check_replays_in_turn<Graph>(
        rank, [&](cudaStream_t stream) { rank.chain.launch(rank.parts, stream); },
        [&] { return rank.chain.layers.take(); });
    CHECK(!rank.chain.mail.faulted());
  }
}

// Kernels before the late one are resident and must leave it its places.
TEST_CASE(a_kernel_may_start_a_millisecond_late) {
  need_device();
  for (const auto& [rows, ratio, order] : kWays) {
    Rank rank(ratio, rows, order);
    const Result want = rank.one_by_one(0);
    for (int late = 0; late < static_cast<int>(HopKernel::count); ++late) {
      const auto delay = [late](HopKernel kernel) {
        if (static_cast<int>(kernel) == late) spend<<<1, 1>>>(1'000'000);
      };
      CHECK(rank.run(0, delay, nullptr) == want);
      REQUIRE(!rank.chain.mail.faulted());
    }
  }
}
