// The kernels of a layer's attention half at true shapes, each against float64 on the inputs that
// the device had: TP4's share of V4.1-Flash (or of V4-Flash, where LOWLAT_BENCH_V4 is defined), its
// mailboxes looped back to the one device.
#include "attention_values.hpp"
#include "bench/attn_layer.hpp"
#include "gpu.cuh"
#include "reference/hc.hpp"
#include "reference/kv.hpp"
#include "reference/linear.hpp"
#include "reference/norm.hpp"
#include "reference/rank_sum.hpp"

namespace lowlat::bench {
namespace {

void must_run(cudaError_t error, const char* what) {
  cuda_must(error, what);
  cuda_must(cudaDeviceSynchronize(), what);
}

// One case: every kernel in order, each against float64 on the inputs that the device had.
void check_rows(int rows, const HostWeights& weights, const DeviceWeights& device, bool awkward,
                std::uint64_t budget_ns = 20'000'000) {
  Random random(static_cast<std::uint64_t>(rows) * 77 + (awkward ? 1 : 0));
  HostKeys keys(rows, random);
  std::vector<float> sink = weights.sink;
  if (awkward) {
    // A row of pads alone; one whose selection is empty; one with a single key; a dominating sink
    // and none.
    std::fill_n(keys.window_idx.begin(), kWindow, -1);
    std::fill_n(keys.extra_idx.begin(), kExtra, -1);
    if (rows > 1) std::fill_n(keys.extra_idx.begin() + kExtra, kExtra, -1);
    if (rows > 2) {
      std::fill_n(keys.window_idx.begin() + 2 * kWindow, kWindow, -1);
      std::fill_n(keys.extra_idx.begin() + 2 * kExtra, kExtra, -1);
      keys.extra_idx[2 * kExtra + 77] = 5;
    }
    keys.kv_slots[0] = -1;
    sink[0] = 60.0f;
    sink[1] = -std::numeric_limits<float>::infinity();
  }
  DeviceKeys device_keys(keys);
  Activations act(rows, kHeads, kGroups);
  Mailboxes mail(rows, kRanks, budget_ns);
  const fused::ExchangePort port = mail.looped(kRanks);
  act.tell(port);
  Buffer<float> device_sink(sink);

  std::vector<std::uint16_t> residual(act.count(4 * kHidden));
  for (auto& v : residual) v = bf16(random.normal());
  act.residual[0].put(residual);

  // Statistics alone, then the exchange of random partial sums, sent by the product: u is random,
  // or o where one kernel makes both products.
  std::vector<std::uint8_t> u_codes(act.count(kGroups * 1024));
  for (auto& code : u_codes) {
    code = static_cast<std::uint8_t>(random.bits());
    if ((code & 0x7f) == 0x7f) code ^= 1;
  }
  std::vector<float> u_scale(act.u_scale.size(), 0.00390625f);
  const Gates gates(2);
  const auto mixing = [&](int side) {
    return act.mixing(device, side, gates.at(side, Gates::ticket, 1).word,
                      gates.at(side, Gates::mix, 1));
  };
  must_run(
      fused::launch_begin_step(mail.step_epoch.get(), 3, gates.words(), gates.num_words(), nullptr),
      "begin step");
  const auto tag = static_cast<std::uint32_t>(mail.step_epoch.take()[0]) + act.index;
  const bool in_one = fused::oproj_is_few(act.oproj(device, port, 1, false));
  if (in_one) {
    std::vector<std::uint16_t> random_o(act.o.size());
    for (auto& v : random_o) v = static_cast<std::uint16_t>(0x3800 + (random.bits() & 0x83ff));
    act.put_o(random_o, std::vector<float>(act.o_scale.size(), 0.25f), tag);
  } else {
    act.put_u(u_codes, u_scale, tag);
  }
  const auto take_u = [&] {
    return values(act.take_codes(act.u_codes, act.packets.u, kGroups * 1024),
                  act.take_scales(act.u_scale, act.packets.u, kGroups * 1024, 8), rows,
                  kGroups * 1024);
  };
  const auto project = [&](int index, bool published) {
    const fused::OprojParams params = act.oproj(device, port, index, published);
    must_run(in_one ? fused::launch_oproj_few(params, false, nullptr)
                    : fused::launch_oproj_b(params, false, nullptr),
             "wo_b");
  };
  // V4's exchanges make the statistics, the step's first one without anything to receive.
  const auto exchange = [&](int index, int side, bool early) {
    return kIsV4 ? fused::launch_exchange_mix(act.exchange_mix(device, port, index, side, true),
                                              false, nullptr)
                 : fused::launch_exchange_norm(act.exchange(device, port, index, side, early),
                                               kHidden, false, nullptr);
  };
  must_run(kIsV4 ? fused::launch_exchange_mix(act.exchange_mix(device, port, 0, 0, false), false,
                                              nullptr)
                 : fused::launch_mix(mixing(0), 8, false, false, nullptr),
           "mix");
  const std::vector<float> first_mix = (kIsV4 ? act.mixes[0] : act.mix).take();
  project(1, false);
  project(1, true);
  must_run(exchange(1, 0, false), "exchange");
  const std::vector<double> u = take_u();
  const std::vector<float> partial = act.partial.take();
  expect("wo_b partial", rows, std::vector<double>(partial.begin(), partial.end()),
         product(u, weights.wo_b, rows, kHidden, kGroups * 1024, kGroups * 1024, 0), 1e-5);

  std::vector<float> pre(act.count(4)), post(act.count(4)), comb(act.count(16));
  const auto mix_of = [&](const std::vector<std::uint16_t>& from) {
    parallel(rows, [&](std::int64_t row) {
      reference::hc_stats(&pre[row * 4], &post[row * 4], &comb[row * 16], &from[row * 4 * kHidden],
                          weights.fn.data(), weights.base.data(), weights.scale.data(), 1, kHidden,
                          kNormEps, kHcEps, kSinkhornIters);
    });
  };
  mix_of(residual);
  const auto expect_mix = [&](const char* what, const std::vector<float>& mix) {
    std::vector<double> got, want;
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < 24; ++i) {
        got.push_back(mix[static_cast<std::size_t>(row * fused::kMixStride + i)]);
        want.push_back(i < 4   ? pre[row * 4 + i]
                       : i < 8 ? post[row * 4 + i - 4]
                               : comb[row * 16 + i - 8]);
      }
    }
    expect(what, rows, got, want, 2e-5);
  };
  expect_mix("statistics", first_mix);
  std::vector<std::uint16_t> y(act.count(kHidden)), want_residual(residual.size()),
      want_x(y.size());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = bf16(double{kRanks} * partial[i]);
  reference::hc_post(want_residual.data(), residual.data(), y.data(), post.data(), comb.data(),
                     rows, kHidden);
  const std::vector<std::uint16_t> got_residual = act.residual[1].take(), x = act.x.take();
  expect("residual", rows, values(got_residual), values(want_residual), 4e-3);
  if (kIsV4) mix_of(got_residual);
  reference::hc_combine_norm(want_x.data(), got_residual.data(), pre.data(), weights.gain.data(),
                             rows, kHidden, kNormEps, kIsV4);
  expect("x", rows, values(x), values(want_x), 4e-3);
  const std::vector<double> x_quantized =
      values(act.take_codes(act.x_codes, act.packets.x, kHidden),
             act.take_scales(act.x_scale, act.packets.x, kHidden, 8), rows, kHidden);
  expect("x quantised", rows, x_quantized, quantized(x), 0.0);

  if (kIsV4 && rows <= fused::kMaxMixClusters) {
    // x alone, by other sums; then as it was.
    for (const bool alone : {true, false}) {
      fused::ExchangeMixParams params = act.exchange_mix(device, port, 1, 0, true);
      if (alone) params.mix_out = nullptr;
      must_run(fused::launch_exchange_mix(params, false, nullptr), "exchange");
      CHECK(act.residual[1].take() == got_residual);
      const std::vector<std::uint16_t> again = act.x.take();
      expect("x alone", rows, values(again), values(want_x), 4e-3);
      CHECK(alone || again == x);
    }
  }

  // The front.
  fused::FrontParams front = act.front(device, device_keys);
  if (!kIsV4) must_run(fused::launch_mix(mixing(1), 2, true, false, nullptr), "mix");
  const std::vector<float> second_mix = (kIsV4 ? act.mixes[1] : act.mix).take();
  must_run(fused::launch_front_qkv(front, false, nullptr), "qkv");
  const std::vector<std::uint16_t> qa = act.take_halves(act.qa, act.packets.qa, kQLora),
                                   kv = act.take_halves(act.kv, act.packets.kv, kDim);
  expect("qa", rows, values(qa),
         rounded(product(x_quantized, weights.wq_a, rows, kQLora, kHidden, kHidden, 0)), 4e-3);
  expect("kv", rows, values(kv),
         rounded(product(x_quantized, weights.wkv, rows, kDim, kHidden, kHidden, 0)), 4e-3);
  {
    // Other statistics, by way of the parameters: another exchange from residual 1.
    mix_of(got_residual);
    expect_mix("statistics by two blocks", second_mix);
    project(2, true);
    must_run(exchange(2, 1, true), "exchange, early");
    reference::hc_post(want_residual.data(), got_residual.data(), y.data(), post.data(),
                       comb.data(), rows, kHidden);
    expect("residual, statistics by two blocks", rows, values(act.residual[0].take()),
           values(want_residual), 4e-3);
  }
  must_run(fused::launch_front_latent(front, false, nullptr), "latent");
  must_run(fused::launch_front_q(front, false, nullptr), "q");
  std::vector<std::uint16_t> latent(qa.size());
  reference::rms_norm(latent.data(), qa.data(), weights.q_norm.data(), rows, kQLora, kNormEps);
  std::vector<double> want_q =
      rounded(product(quantized(latent), weights.wq_b, rows, kHeads * kDim, kQLora, kQLora, 0));
  const std::vector<std::int64_t> positions(keys.positions.begin(), keys.positions.end());
  // V4's heads of few rows are normed and turned by attention.
  const bool finished = !(kIsV4 && act.hops());
  const auto finish_q = [&](std::vector<double>& values) {
    if (kIsV4) norm_heads(values);
    reference::rope(values.data(), positions.data(), rows, kHeads, kDim, true, false);
  };
  if (finished) finish_q(want_q);
  std::vector<std::uint16_t> q = act.take_halves(act.q, act.packets.q, kHeads * kDim);
  expect("q", rows, values(q), rounded(want_q), 6e-3);
  if (!finished) {
    std::vector<double> of_attention = values(q);
    finish_q(of_attention);
    q = codes_of(of_attention);
  }

  // Stored keys: rows that were written equal in value, all others untouched.
  const std::vector<std::uint8_t> packed = stored_keys(kv, weights.kv_norm, keys.positions, rows);
  std::vector<std::uint8_t> want_pool = flat(keys.window, kNumPages, kSlotsPerPage, kPageBytes),
                            got_pool;
  keys.window = device_keys.window.take();
  got_pool = flat(keys.window, kNumPages, kSlotsPerPage, kPageBytes);
  std::vector<double> got_key, want_key;
  for (int row = 0; row < rows; ++row) {
    const int slot = keys.kv_slots[row];
    if (slot < 0) continue;
    float stored[2][kDim];
    reference::kv_unpack(stored[0], &got_pool[static_cast<std::size_t>(slot) * 584], 1);
    reference::kv_unpack(stored[1], &packed[static_cast<std::size_t>(row) * 584], 1);
    got_key.insert(got_key.end(), stored[0], stored[0] + kDim);
    want_key.insert(want_key.end(), stored[1], stored[1] + kDim);
    std::memcpy(&want_pool[static_cast<std::size_t>(slot) * 584],
                &got_pool[static_cast<std::size_t>(slot) * 584], 584);
  }
  expect("stored keys", rows, got_key, want_key, 4e-3);
  CHECK(want_pool == got_pool);  // no other stored row changed

  // Attention, by every number of blocks a row, and V4's as a draft has it.
  const std::vector<double> plain_o = attention(q, seen_by(keys), keys.positions, sink, rows);
  const std::vector<double> want_o = kIsV4 ? quantized(codes_of(plain_o)) : plain_o;
  std::vector<double> o;
  struct Way {
    int blocks;
    bool plain;
  };
  for (const auto& [blocks, plain] :
       {Way{16, false}, Way{8, false}, Way{4, false}, Way{2, false}, Way{0, true}, Way{0, false}}) {
    fused::AttentionParams params = act.attention(device, device_keys);
    params.sink = device_sink.get();
    params.blocks_per_row = blocks;
    params.plain_o = plain;
    act.o.poison();
    must_run(fused::launch_sparse_attention(params, false, nullptr), "attention");
    o = half_values(act.take_halves(act.o, act.packets.o, kHeads * kDim),
                    act.take_scales(act.o_scale, act.packets.o, kHeads * kDim, 4), rows,
                    kHeads * kDim);
    // V4: a code of o moves where attention's own error passes a tie.
    const bool quantized_o = kIsV4 && !plain;
    expect("attention", rows, o, plain ? plain_o : want_o, quantized_o ? 3e-2 : 5e-3);
  }
  if (awkward) {
    bool zero = true;
    for (int i = 0; i < kHeads * kDim; ++i) zero &= o[i] == 0.0;
    CHECK(zero);  // a row without keys
  }

  // wo_a.
  if (in_one) {
    // Those of the random o have the same tag.
    cuda_must(cudaMemset(act.packets.u, 0, act.count(kGroups * 1024 / 8) * fused::kHopPacketBytes),
              "zeros");
    project(2, false);
  } else {
    must_run(fused::launch_oproj_a(act.oproj(device, port, 2, false), false, nullptr), "wo_a");
  }
  std::vector<double> want_u(act.count(kGroups * 1024));
  for (int group = 0; group < kGroups; ++group) {
    HostFp8 part;
    part.codes.assign(weights.wo_a.codes.begin() + group * 1024 * 4096,
                      weights.wo_a.codes.begin() + (group + 1) * 1024 * 4096);
    constexpr int kScales = 1024 / kScaleGroup * (4096 / kScaleGroup);
    part.scales.assign(weights.wo_a.scales.begin() + group * kScales,
                       weights.wo_a.scales.begin() + (group + 1) * kScales);
    const std::vector<double> y_part =
        product(o, part, rows, 1024, 4096, kHeads * kDim, group * 4096);
    for (int row = 0; row < rows; ++row) {
      std::copy_n(y_part.begin() + row * 1024, 1024,
                  want_u.begin() + (row * kGroups + group) * 1024);
    }
  }
  expect("u quantised", rows, take_u(), quantized(codes_of(want_u)), 6e-3);
  CHECK(!mail.faulted());
}

// A rank that sends nothing: the wait ends at its budget, says so, and the device lives on.
void check_deadline(const DeviceWeights& device, int rows) {
  Activations act(rows, kHeads, kGroups);
  Mailboxes mail(rows, kRanks);
  fused::ExchangePort port = mail.looped(kRanks);
  port.budget_ns = 20'000'000;
  must_run(
      kIsV4 ? fused::launch_exchange_mix(act.exchange_mix(device, port, 1, 0, true), false, nullptr)
            : fused::launch_exchange_norm(act.exchange(device, port, 1, 0, false), kHidden, false,
                                          nullptr),
      "exchange without a sender");
  const auto x = act.x.take();
  bool nan = true;
  for (const double v : values(x)) nan &= std::isnan(v);
  const auto* words = reinterpret_cast<const std::uint32_t*>(mail.status);
  CHECK_EQ(words[0], 1u);
  CHECK_EQ(words[2], 3u);  // StageId::attention_sum
  CHECK_EQ(words[3], 0u);
  CHECK(nan);
}

// Packets of one half of each row, when `ns` have passed.
__global__ void send_half(uint4* boxes, const uint4* from, int count, int half, std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < ns);
  constexpr int kQuads = kHidden / 4;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    if (i % kQuads / (kQuads / 2) == half) __stcg(boxes + i, from[i]);
  }
}

// Half of each row's packets come more than a second after the others and well within the budget:
// the sums over a row are of both, as if all had come at once. Fails where a block waits for its
// cluster no longer than a second.
void check_late_half(const DeviceWeights& device, int rows) {
  Random random(static_cast<std::uint64_t>(rows));
  Activations act(rows, kHeads, kGroups);
  Mailboxes mail(rows, kRanks, 20'000'000'000);
  const fused::ExchangePort port = mail.looped(kRanks);
  act.tell(port);
  std::vector<std::uint16_t> residual(act.count(4 * kHidden));
  for (auto& v : residual) v = bf16(random.normal());
  act.residual[0].put(residual);
  const Gates gates(1);
  must_run(
      fused::launch_begin_step(mail.step_epoch.get(), 3, gates.words(), gates.num_words(), nullptr),
      "begin step");
  must_run(kIsV4 ? fused::launch_exchange_mix(act.exchange_mix(device, port, 0, 0, false), false,
                                              nullptr)
                 : fused::launch_mix(act.mixing(device, 0, gates.at(0, Gates::ticket, 1).word,
                                                gates.at(0, Gates::mix, 1)),
                                     8, false, false, nullptr),
           "mix");
  const std::uint64_t epoch = mail.step_epoch.take()[0] + 1;
  const int count = static_cast<int>(kRanks * mail.box_packets);
  std::vector<std::uint32_t> words(static_cast<std::size_t>(count) * 4);
  for (std::size_t i = 0; i < words.size(); i += 4) {
    // Floats of 24 bits, of 0.0078 to 0.5.
    std::uint64_t codes[4];
    for (auto& code : codes) code = 0x3c'0000u + random.bits() % 0x3'0000u;
    words[i] = static_cast<std::uint32_t>(codes[0] | codes[1] << 24);
    words[i + 1] = static_cast<std::uint32_t>(codes[1] >> 8 | codes[2] << 16);
    words[i + 2] = static_cast<std::uint32_t>(codes[2] >> 16 | codes[3] << 8);
    words[i + 3] = static_cast<std::uint32_t>(epoch);
  }
  const Buffer<std::uint32_t> packets(words);
  auto* const boxes = reinterpret_cast<uint4*>(mail.boxes.get()) + (epoch & 1u) * count;
  const auto* const from = reinterpret_cast<const uint4*>(packets.get());
  cudaStream_t beside;
  cuda_must(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
  const auto exchange = [&](std::uint64_t late_ns) {
    mail.boxes.zero();
    act.residual[1].poison();
    act.x.poison();
    send_half<<<1, 1024>>>(boxes, from, count, 0, 0);
    cuda_must(cudaDeviceSynchronize(), "the first half");
    send_half<<<1, 1024, 0, beside>>>(boxes, from, count, 1, late_ns);
    cuda_must(cudaGetLastError(), "the second half");
    must_run(kIsV4 ? fused::launch_exchange_mix(act.exchange_mix(device, port, 1, 0, true), false,
                                                nullptr)
                   : fused::launch_exchange_norm(act.exchange(device, port, 1, 0, false), kHidden,
                                                 false, nullptr),
             "exchange");
    std::vector<std::uint16_t> out = act.residual[1].take();
    const std::vector<std::uint16_t> x = act.x.take();
    out.insert(out.end(), x.begin(), x.end());
    return out;
  };
  const std::vector<std::uint16_t> want = exchange(0);
  CHECK(all_finite(want));
  CHECK(exchange(1'200'000'000) == want);
  CHECK(!mail.faulted());
  cudaStreamDestroy(beside);
}

struct Weights {
  HostWeights host;
  DeviceWeights device;
  explicit Weights(Random random = Random(1)) : host(kHeads, kGroups, random), device(host) {}
};

}  // namespace
}  // namespace lowlat::bench

using lowlat::testing::need_device;

TEST_CASE(every_kernel_equals_float64_for_all_widths) {
  need_device();
  const lowlat::bench::Weights weights;
  for (const int rows : {1, 6, 8, 12, 24, 48}) {
    lowlat::bench::check_rows(rows, weights.host, weights.device, false);
  }
}

// Rows of pads, a single key, a sink that takes everything and none, a row that stores no key.
TEST_CASE(every_kernel_equals_float64_for_awkward_inputs) {
  need_device();
  const lowlat::bench::Weights weights;
  for (const int rows : {1, 6, 8, 12, 24, 37, 48}) {
    lowlat::bench::check_rows(rows, weights.host, weights.device, true);
  }
}

TEST_CASE(brief_one_row_and_six) {
  need_device();
  const lowlat::bench::Weights weights;
  for (const int rows : {1, 6}) {
    lowlat::bench::check_rows(rows, weights.host, weights.device, false,
                              lowlat::testing::kBriefBudgetNs);
  }
}

TEST_CASE(a_rank_that_sends_nothing_is_named_at_the_deadline) {
  need_device();
  const lowlat::bench::Weights weights;
  for (const int rows : {6, 24}) lowlat::bench::check_deadline(weights.device, rows);
}

TEST_CASE(packets_that_come_late_and_in_time_are_waited_for) {
  need_device();
  const lowlat::bench::Weights weights;
  for (const int rows : {6, 24}) lowlat::bench::check_late_half(weights.device, rows);
}
