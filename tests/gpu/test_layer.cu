// A plain layer's chain of kernels at true shapes, TP4's share on one device with its mailboxes
// looped back (and TP2 where there are two devices): bit for bit what the same kernels give one
// after another, whatever came before and however late a kernel, a rank or a step is; and its end
// at a deadline.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "bench/layer_case.cuh"
#include "gpu.cuh"
#include "host/nvidia/exchange_region.hpp"

using lowlat::bench::Graph;
using lowlat::bench::HostWeights;
using lowlat::bench::Layers;
using lowlat::bench::Mailboxes;
using lowlat::bench::Random;
using lowlat::nvidia::fused::HopKernel;
using lowlat::nvidia::fused::LayerParts;
using lowlat::testing::finish;
using lowlat::testing::need_device;

namespace {

constexpr int kLayers = 2, kRanks = 4;
using Result = std::vector<std::uint16_t>;

__global__ void spend(std::uint64_t ns) {
  std::uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < ns);
}

const HostWeights& weights() {
  static const HostWeights all = [] {
    Random random(1);
    return HostWeights(64 / kRanks, 8 / kRanks, random);
  }();
  return all;
}

// One rank of four on this device.
struct Rank {
  Mailboxes mail;
  Layers<kRanks> layers;
  explicit Rank(int rows, std::uint64_t budget_ns = 20'000'000)
      : mail(rows, kRanks, budget_ns),
        layers(weights(), kLayers, rows, mail.looped(kRanks), mail.step_epoch.get(), 0) {}

  // Another input: the same for the same number.
  void begin(int input) {
    Random random(static_cast<std::uint64_t>(100 + input));
    for (auto& v : layers.residual) v = lowlat::bench::bf16(random.normal());
    for (auto& v : layers.x) v = lowlat::bench::bf16(random.normal());
    layers.reset();
  }
  // Kernel after kernel, each when the one before has ended.
  Result one_by_one(int input) {
    const std::function<void(HopKernel)> wait = [](HopKernel) { finish(); };
    LayerParts parts;
    parts.between = &wait;
    begin(input);
    layers.launch(parts, nullptr);
    finish();
    return layers.take();
  }
  Result together(int input) {
    begin(input);
    layers.launch({}, nullptr);
    finish();
    return layers.take();
  }
  bool healthy() const { return !mail.faulted(); }
};

bool finite(const Result& result) {
  for (const std::uint16_t code : result) {
    if ((code & 0x7f80) == 0x7f80) return false;
  }
  return true;
}
bool all_nan(const Result& result) {
  for (const std::uint16_t code : result) {
    if ((code & 0x7f80) != 0x7f80 || (code & 0x7f) == 0) return false;
  }
  return true;
}

}  // namespace

TEST_CASE(replays_with_changing_inputs_equal_kernels_run_one_by_one) {
  need_device();
  constexpr int kInputs = 5;
  for (const int rows : {6, 12}) {
    Rank rank(rows);
    std::vector<Result> want;
    for (int i = 0; i < kInputs; ++i) want.push_back(rank.one_by_one(i));
    CHECK(finite(want[0]));
    CHECK(want[0] != want[1]);
    Graph graph([&](cudaStream_t stream) { rank.layers.launch({}, stream); });
    int different = 0;
    for (int i = 0; i < 1000; ++i) {
      rank.begin(i % kInputs);
      finish();  // the copies are the default stream's
      graph.replay();
      graph.wait();
      different += rank.layers.take() != want[static_cast<std::size_t>(i % kInputs)] ? 1 : 0;
    }
    CHECK_EQ(different, 0);
    CHECK(rank.healthy());
  }
}

TEST_CASE(brief_one_row_and_six) {
  need_device();
  for (const int rows : {1, 6}) {
    Rank rank(rows, lowlat::testing::kBriefBudgetNs);
    const Result want = rank.one_by_one(0);
    Graph graph([&](cudaStream_t stream) { rank.layers.launch({}, stream); });
    rank.begin(0);
    finish();
    graph.replay();
    graph.wait();
    CHECK(rank.layers.take() == want);
    CHECK(rank.healthy());
  }
}

TEST_CASE(steps_of_different_rows_follow_each_other) {
  need_device();
  Rank few(6), many(24);
  const Result want_few = few.one_by_one(1), want_many = many.one_by_one(1);
  // The same memory for both, as an engine has it.
  Rank rank(24);
  for (int i = 0; i < 6; ++i) {
    rank.layers.use_rows(i % 2 == 0 ? 6 : 24);
    const Result got = rank.together(1);
    CHECK(got == (i % 2 == 0 ? want_few : want_many));
  }
  CHECK(rank.healthy());
}

// What an earlier step left in the packets is wrong under a tag that is not this step's.
TEST_CASE(packets_of_an_earlier_step_are_never_taken) {
  need_device();
  Rank rank(6);
  const Result want = rank.one_by_one(0);
  for (int i = 0; i < 3; ++i) {
    CHECK(rank.together(1) != want);
    rank.layers.spoil_packets();
    CHECK(rank.together(0) == want);
  }
  CHECK(rank.healthy());
}

TEST_CASE(a_replay_after_ten_idle_seconds_is_like_any_other) {
  need_device();
  Rank rank(6);
  const Result want = rank.one_by_one(0);
  Graph graph([&](cudaStream_t stream) { rank.layers.launch({}, stream); });
  rank.begin(0);
  finish();
  std::this_thread::sleep_for(std::chrono::seconds(10));
  graph.replay();
  graph.wait();
  CHECK(rank.layers.take() == want);
  CHECK(rank.healthy());
}

TEST_CASE(a_kernel_may_start_a_millisecond_late) {
  need_device();
  for (const int rows : {6, 12}) {
    Rank rank(rows);
    const Result want = rank.one_by_one(0);
    for (int late = 0; late <= static_cast<int>(HopKernel::second_exchange); ++late) {
      const std::function<void(HopKernel)> delay = [late](HopKernel kernel) {
        if (static_cast<int>(kernel) == late) spend<<<1, 1>>>(1'000'000);
      };
      LayerParts parts;
      parts.between = &delay;
      rank.begin(0);
      rank.layers.launch(parts, nullptr);
      finish();
      CHECK(rank.layers.take() == want);
    }
    CHECK(rank.healthy());
  }
}

TEST_CASE(epochs_pass_the_wrap_of_their_low_half) {
  need_device();
  Rank rank(6);
  const Result want = rank.one_by_one(0);
  for (const std::uint64_t start :
       {0xffff'ff00ull, 0xffff'efeaull, 0xffff'efebull, 0xffff'efecull}) {
    rank.mail.step_epoch.put({start});
    for (int i = 0; i < 8; ++i) {
      CHECK(rank.together(1) != want);
      CHECK(rank.together(0) == want);
    }
    CHECK(rank.mail.step_epoch.take()[0] > start);
  }
  CHECK(rank.healthy());
}

TEST_CASE(an_input_that_never_comes_ends_the_step_at_its_deadline) {
  need_device();
  Rank rank(6);
  const Result want = rank.one_by_one(0);
  rank.layers.recover();  // no packet of an earlier step is left
  rank.begin(1);
  const auto begin = std::chrono::steady_clock::now();
  rank.layers.launch({}, nullptr, false);
  finish();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() < 1.0);  // fifty budgets
  const auto* words = reinterpret_cast<const std::uint32_t*>(rank.mail.status);
  CHECK_EQ(words[0], 1u);
  CHECK_EQ(words[1], static_cast<std::uint32_t>(HopKernel::qkv));
  CHECK(all_nan(rank.layers.take()));
  rank.mail.recover();
  rank.layers.recover();
  CHECK(rank.together(0) == want);
  CHECK(rank.healthy());
}

namespace {

void check_two_ranks(const LayerParts& parts) {
  need_device();
  int devices = 0;
  REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
  if (devices < 2) SKIP("one device; two ranks need two");
  Random random(1);
  const HostWeights host(32, 4, random);
  std::unique_ptr<lowlat::host::cuda::ExchangeRegion> regions[2];
  std::unique_ptr<Layers<2>> ranks[2];
  const auto on = [](int device) { REQUIRE(cudaSetDevice(device) == cudaSuccess); };
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r] = std::make_unique<lowlat::host::cuda::ExchangeRegion>(r, 2, 6, 5120);
  }
  for (int r = 0; r < 2; ++r) {
    on(r);
    regions[r]->open(1 - r, regions[1 - r]->handle());
    regions[r]->probe(1 - r);
  }
  for (int r = 0; r < 2; ++r) regions[r]->probed_by(1 - r, 1'000'000'000);
  std::unique_ptr<Graph> graphs[2];
  for (int r = 0; r < 2; ++r) {
    on(r);
    ranks[r] = std::make_unique<Layers<2>>(host, kLayers, 6, regions[r]->port(200'000'000, 0),
                                           regions[r]->step_epoch(), r);
    graphs[r] =
        std::make_unique<Graph>([&](cudaStream_t stream) { ranks[r]->launch(parts, stream); });
  }
  Result first;
  for (int i = 0; i < 60; ++i) {
    Result result[2];
    for (int r = 0; r < 2; ++r) {
      on(r);
      ranks[r]->reset();
      finish();
      if (i % 10 == 5 && i / 10 % 2 == r) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        spend<<<1, 1, 0, graphs[r]->stream()>>>(1'000'000);
      }
      graphs[r]->replay();
    }
    for (int r = 0; r < 2; ++r) {
      on(r);
      graphs[r]->wait();
      result[r] = ranks[r]->take();
      CHECK_EQ(*static_cast<std::uint32_t*>(ranks[r]->port.status), 0u);
    }
    if (i == 0) first = result[0];
    CHECK(result[0] == result[1]);
    CHECK(result[0] == first);
  }
  CHECK(finite(first));
}

}  // namespace

TEST_CASE(two_ranks_agree_on_attention_halves_and_wait_for_a_slow_one) {
  LayerParts parts;
  parts.experts = false;
  check_two_ranks(parts);
}
