// A plain layer's chain of kernels at true shapes, TP4's share on one device with its mailboxes
// looped back, and whole TP2 and TP4 where there are as many devices: bit for bit what the same
// kernels give one after another, whatever came before and however late a kernel, a rank or a step
// is; and its end at a deadline.
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "bench/layer_group.cuh"
#include "gpu.cuh"
#include "late.cuh"

using lowlat::bench::all_finite;
using lowlat::bench::Graph;
using lowlat::bench::Group;
using lowlat::bench::Layers;
using lowlat::bench::Mailboxes;
using lowlat::nvidia::fused::HopKernel;
using lowlat::nvidia::fused::LayerParts;
using lowlat::testing::check_replays_in_turn;
using lowlat::testing::finish;
using lowlat::testing::need_device;
using lowlat::testing::spend;

namespace {

constexpr int kLayers = 2, kRanks = 4;
using Result = std::vector<std::uint16_t>;

// One rank of four on this device.
struct Rank {
  Mailboxes mail;
  Layers<kRanks> layers;
  explicit Rank(int rows, std::uint64_t budget_ns = 20'000'000)
      : mail(rows, kRanks, budget_ns),
        layers(Group<kRanks>::weights(0), kLayers, rows, mail.looped(kRanks), mail.step_epoch.get(),
               0) {}

  // Another input: the same for the same number.
  void begin(int input) {
    layers.use_input(input);
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

// || a - b || / || b || of bf16 values.
double distance(const Result& a, const Result& b) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double got = lowlat::reference::from_bf16(a[i]),
                 want = lowlat::reference::from_bf16(b[i]);
    difference += (got - want) * (got - want);
    size += want * want;
  }
  return std::sqrt(difference / size);
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
  for (const int rows : {6, 12, 24, 48}) {
    Rank rank(rows);
    const Result first = check_replays_in_turn<Graph>(
        rank, [&](cudaStream_t stream) { rank.layers.launch({}, stream); },
        [&] { return rank.layers.take(); });
    CHECK(all_finite(first));
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

// The sum over ranks, hyper-connection and norm by the experts' own blocks are those of the kernel
// that does them otherwise.
TEST_CASE(experts_end_a_layer_as_an_exchange_of_its_own_does) {
  need_device();
  for (const auto& [rows, marlin] : {std::pair{1, false}, {5, false}, {8, false}, {6, true}}) {
    Rank rank(rows);
    if (marlin) rank.layers.bind_as_engine();
    LayerParts apart;
    apart.experts_exchange = false;
    for (int input = 0; input < 2; ++input) {
      rank.begin(input);
      rank.layers.launch(apart, nullptr);
      finish();
      const Result want = rank.layers.take();
      CHECK(all_finite(want));
      CHECK(rank.together(input) == want);
    }
    CHECK(rank.healthy());
  }
}

// Of the same values in either layout, whose sums are added in another order, the layers' results
// differ by roundings alone.
TEST_CASE(experts_in_marlin_tiles_give_what_the_checkpoints_rows_give) {
  need_device();
  for (const int rows : {1, 6}) {
    Result results[2];
    for (int marlin = 0; marlin < 2; ++marlin) {
      Rank rank(rows);
      rank.layers.by_table = true;
      if (marlin != 0) rank.layers.bind_as_engine();
      results[marlin] = rank.together(0);
      CHECK(rank.healthy());
    }
    const double error = distance(results[1], results[0]);
    std::printf("T=%d Marlin's tiles rel_l2 %.2e (bound 1e-02)\n", rows, error);
    CHECK(error <= 1e-2);
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

// What a wider step has left is not taken for a narrower one's, nor the other way round.
TEST_CASE(steps_of_many_rows_follow_wider_and_narrower_ones) {
  need_device();
  constexpr int kWidths[] = {48, 12, 24};
  std::vector<Result> want[2];
  for (const int rows : kWidths) {
    Rank alone(rows);
    for (int input = 0; input < 2; ++input) want[input].push_back(alone.one_by_one(input));
  }
  Rank rank(48);
  for (int i = 0; i < 12; ++i) {
    const auto width = static_cast<std::size_t>(i % 3);
    rank.layers.use_rows(kWidths[width]);
    CHECK(rank.together(i % 2) == want[i % 2][width]);
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

// ---------------------------------------------------------------- groups of ranks

namespace {

// Skips a case where there are fewer devices.
void need_devices(int count) {
  need_device();
  int devices = 0;
  REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
  if (devices < count) {
    SKIP("needs " + std::to_string(count) + " devices, one a rank; here are " +
         std::to_string(devices));
  }
}

// A kernel's first use loads its code, see layer.hpp.
template <int kTp>
void load_spend(Group<kTp>& group) {
  group.each([](int) {
    spend<<<1, 1>>>(0);
    finish();
  });
}

using Between = std::function<void(HopKernel)>;

// A step's launches by a thread a rank, with what its rank's thread does between them. Kernels of
// ranks that wait for each other cannot be launched one after another by one thread that waits.
template <int kTp>
void launch_by_threads(Group<kTp>& group, const std::function<Between(int)>& between_of) {
  std::vector<std::thread> threads;
  for (int r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      group.on(r);
      const Between between = between_of(r);
      LayerParts parts;
      parts.between = &between;
      group.rank(r).launch(parts, group.graph(r).stream());
      group.wait(r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Kernel after kernel, each when the one before has ended.
template <int kTp>
Result one_by_one(Group<kTp>& group, int input) {
  group.begin(input);
  launch_by_threads<kTp>(group, [&](int r) { return [&group, r](HopKernel) { group.wait(r); }; });
  for (int r = 1; r < group.size(); ++r) CHECK(group.result(r) == group.result(0));
  return group.result(0);
}

// Ranks whose results are not `want`.
template <int kTp>
int num_different(Group<kTp>& group, const Result& want) {
  int out = 0;
  for (int r = 0; r < group.size(); ++r) out += group.result(r) != want ? 1 : 0;
  return out;
}

// gpus: 1, of one rank that is looped back, or one a rank.
template <int kTp>
void check_replays_of_ranks(int gpus) {
  constexpr int kInputs = 3;
  need_devices(gpus);
  for (const int rows : {1, 6, 8, 12, 24, 48}) {
    Group<kTp> group(gpus, kLayers, rows);
    group.capture({});
    load_spend(group);
    std::vector<Result> want;
    for (int i = 0; i < kInputs; ++i) want.push_back(one_by_one(group, i));
    CHECK(all_finite(want[0]));
    CHECK(want[0] != want[1]);
    int different = 0;
    const int count = rows % 6 == 0 ? 1000 : 100;
    for (int i = 0; i < count; ++i) {
      group.begin(i % kInputs);
      group.each([&](int r) {
        // Now and then a rank comes late, by the host and then by its device.
        if (i % 50 == 10 + r) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          spend<<<1, 1, 0, group.graph(r).stream()>>>(1'000'000);
        }
        group.graph(r).replay();
      });
      group.wait();
      const Result& wanted = want[static_cast<std::size_t>(i % kInputs)];
      const int others = num_different(group, wanted);
      if (others > 0) {
        const Result got = group.result(0);
        std::size_t values = 0, first = 0;
        for (std::size_t j = got.size(); j-- > 0;) {
          if (got[j] != wanted[j]) ++values, first = j;
        }
        std::printf("T=%d replay %d: %zu values of rank 0 differ, the first %zu\n", rows, i, values,
                    first);
      }
      different += others;
    }
    CHECK_EQ(different, 0);
    CHECK_EQ(group.fault(), "");
  }
}

template <int kTp>
void check_late_kernels_of_a_rank(int gpus) {
  need_devices(gpus);
  for (const int rows : {6, 12}) {
    Group<kTp> group(gpus, kLayers, rows);
    group.capture({});
    load_spend(group);
    const Result want = one_by_one(group, 0);
    for (int late = 0; late <= static_cast<int>(HopKernel::second_exchange); ++late) {
      const int slow = late % group.size();
      group.begin(0);
      launch_by_threads<kTp>(group, [&](int r) -> Between {
        if (r != slow) return [](HopKernel) {};
        return [&group, r, late](HopKernel kernel) {
          if (static_cast<int>(kernel) != late) return;
          spend<<<1, 1, 0, group.graph(r).stream()>>>(1'000'000);
        };
      });
      CHECK_EQ(num_different(group, want), 0);
    }
    CHECK_EQ(group.fault(), "");
  }
}

// Sums of equal shards are those of one rank that is its own peers.
template <int kTp>
void check_against_looped_back() {
  need_devices(kTp);
  for (const int rows : {6, 24}) {
    Group<kTp> alone(1, kLayers, rows), group(kTp, kLayers, rows, true);
    alone.capture({});
    group.capture({});
    alone.begin(0);
    alone.replay();
    group.begin(0);
    group.replay();
    const Result want = alone.result(0);
    CHECK(all_finite(want));
    CHECK_EQ(num_different(group, want), 0);
    // With shards of their own the ranks' sum is another.
    Group<kTp> other(kTp, kLayers, rows);
    other.capture({});
    other.begin(0);
    other.replay();
    CHECK_EQ(num_different(other, want), kTp);
  }
}

template <int kTp>
void check_missing_rank() {
  need_devices(kTp);
  Group<kTp> group(kTp, kLayers, 6);
  group.capture({});
  const Result want = one_by_one(group, 0);
  // The last rank does not come; the others wait for it alone.
  constexpr int kMissing = kTp - 1;
  group.begin(1);
  const auto begin = std::chrono::steady_clock::now();
  for (int r = 0; r < kMissing; ++r) {
    group.on(r);
    group.graph(r).replay();
  }
  for (int r = 0; r < kMissing; ++r) group.wait(r);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() < 2.0);  // ten budgets
  int expired = 0;
  for (int r = 0; r < kMissing; ++r) {
    const std::uint32_t* words = group.status(r);
    CHECK(words[0] == 1u || words[0] == 2u);  // here, or first at another that waited too
    if (words[0] == 1u) {
      ++expired;
      CHECK_EQ(words[3], static_cast<std::uint32_t>(kMissing));
    }
    CHECK(all_nan(group.result(r)));
  }
  CHECK(expired > 0);
  // It finds the abort word when it comes.
  group.on(kMissing);
  const auto late = std::chrono::steady_clock::now();
  group.graph(kMissing).replay();
  group.wait(kMissing);
  const std::chrono::duration<double> late_took = std::chrono::steady_clock::now() - late;
  CHECK(late_took.count() < 0.1);  // half a budget
  CHECK_EQ(group.status(kMissing)[0], 2u);
  CHECK(all_nan(group.result(kMissing)));
  group.recover();
  group.begin(0);
  group.replay();
  CHECK_EQ(num_different(group, want), 0);
  CHECK_EQ(group.fault(), "");
}

template <int kTp>
void check_abort_of_ranks() {
  need_devices(kTp);
  Group<kTp> group(kTp, kLayers, 6);
  group.capture({});
  const Result want = one_by_one(group, 0);
  // Rank 0 waits for the others until its host gives up.
  group.begin(1);
  group.on(0);
  const auto begin = std::chrono::steady_clock::now();
  group.graph(0).replay();
  group.peers()->of(0).abort();
  group.wait(0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() < 0.1);  // half a budget
  for (int r = 1; r < kTp; ++r) {
    group.on(r);
    group.graph(r).replay();
    group.wait(r);
  }
  for (int r = 0; r < kTp; ++r) {
    CHECK(group.status(r)[0] >= 2u);
    CHECK(all_nan(group.result(r)));
  }
  group.recover();
  group.begin(0);
  group.replay();
  CHECK_EQ(num_different(group, want), 0);
  CHECK_EQ(group.fault(), "");
}

}  // namespace

TEST_CASE(tp2_looped_replays_with_changing_inputs) { check_replays_of_ranks<2>(1); }
TEST_CASE(tp2_looped_a_kernel_may_start_a_millisecond_late) { check_late_kernels_of_a_rank<2>(1); }

TEST_CASE(two_ranks_replays_with_changing_inputs_and_a_slow_rank) { check_replays_of_ranks<2>(2); }
TEST_CASE(two_ranks_a_kernel_of_one_may_start_a_millisecond_late) {
  check_late_kernels_of_a_rank<2>(2);
}
TEST_CASE(two_ranks_with_equal_shards_are_one_looped_back) { check_against_looped_back<2>(); }
TEST_CASE(two_ranks_one_that_never_comes_is_named) { check_missing_rank<2>(); }
TEST_CASE(two_ranks_an_abort_ends_the_step_on_both) { check_abort_of_ranks<2>(); }

TEST_CASE(four_ranks_replays_with_changing_inputs_and_a_slow_rank) { check_replays_of_ranks<4>(4); }
TEST_CASE(four_ranks_a_kernel_of_one_may_start_a_millisecond_late) {
  check_late_kernels_of_a_rank<4>(4);
}
TEST_CASE(four_ranks_with_equal_shards_are_one_looped_back) { check_against_looped_back<4>(); }
TEST_CASE(four_ranks_one_that_never_comes_is_named) { check_missing_rank<4>(); }
TEST_CASE(four_ranks_an_abort_ends_the_step_on_all) { check_abort_of_ranks<4>(); }
