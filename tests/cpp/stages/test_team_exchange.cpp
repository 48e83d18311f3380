// An exchange between ranks whose blocks have many threads, on emu: values, tags' wrap, sinks of
// linears, and its ends: a silent rank, a peer's fault, the host's abort.
//
// Planted and seen to fail: a block that answers by the warp (threads go on alone), PublishRows of
// two rows together (packets hold other words). A status written without the claim is a race:
// test_team_tsan.cpp.
//
// Built a second time with LOWLAT_EMU_WARP_LANES=64.
#include <atomic>

#include "emu_block.hpp"
#include "random_values.hpp"
#include "stages/exchange_group.hpp"
#include "stages/linear.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;

constexpr std::uint64_t kSecond = 1'000'000'000;

// Each rank's block of Block::kNumThreads threads runs body(rank).
template <class Block, class Body>
void run_ranks(int tp_size, std::uint32_t order, Body body) {
  emu::launch({Block::kNumThreads, tp_size, order}, body);
}

// One exchange of every epoch in [first, first + count) on every rank; returns wrong words.
template <class Block>
long wrong_sums(int tp_size, std::int64_t num_words, std::uint64_t first, int count,
                std::uint32_t order) {
  ExchangeGroup group(tp_size, num_words, 60 * kSecond);
  std::atomic<long> wrong{0};
  std::vector<std::vector<std::uint32_t>> words(tp_size, std::vector<std::uint32_t>(num_words));
  std::vector<std::vector<std::uint16_t>> out(tp_size, std::vector<std::uint16_t>(num_words));
  run_ranks<Block>(tp_size, order, [&](int rank) {
    using Threads = stages::Team<Block>;
    const auto port = group.port(rank);
    for (std::uint64_t epoch = first; epoch < first + count; ++epoch) {
      for (std::int64_t i = Threads::thread_idx(); i < num_words; i += Block::kNumThreads) {
        words[rank][i] = plat::float_bits(exchange_value(rank, epoch, i));
        out[rank][i] = 0xaaaa;
      }
      Threads::sync();
      stages::publish<Block>(port, epoch, 0, words[rank].data(), num_words);
      if (!stages::receive_sum<Block>(port, epoch, 0, out[rank].data(), num_words, 0,
                                      stages::StageId::attention_sum)) {
        ++wrong;
        return;
      }
      for (std::int64_t i = Threads::thread_idx(); i < num_words; i += Block::kNumThreads) {
        float sum = 0.0f;
        for (int r = 0; r < tp_size; ++r) sum += exchange_value(r, epoch, i);
        wrong += out[rank][i] != stages::to_bf16(sum);
      }
      Threads::sync();  // before the next epoch writes words and out
    }
  });
  return wrong.load();
}

}  // namespace

TEST_CASE(sums_are_right_for_every_group_and_ragged_lengths) {
  for (const int tp_size : {2, 3, 4}) {
    for (const std::int64_t num_words : {1, 7, 500}) {
      CHECK_EQ(wrong_sums<Block128>(tp_size, num_words, 1, 4, 7u), 0);
    }
  }
  CHECK_EQ(wrong_sums<Block256>(2, 5120, 1, 3, emu::kAscending), 0);  // a row of the model
  CHECK_EQ(wrong_sums<Block256>(2, 5120, 1, 3, emu::kDescending), 0);
  CHECK_EQ(wrong_sums<Warp>(3, 100, 1, 5, 3u), 0);
}

TEST_CASE(tags_survive_the_wrap_of_their_32_bits) {
  CHECK_EQ(wrong_sums<Block128>(2, 400, (1ull << 32) - 3, 6, 9u), 0);
}

TEST_CASE(a_silent_rank_expires_every_wait_and_is_named) {
  ExchangeGroup group(3, 600, kSecond / 20);
  std::vector<int> received(3 * 128, -1);
  const std::vector<std::uint32_t> words(600, 1u);
  std::vector<std::vector<std::uint16_t>> out(3, std::vector<std::uint16_t>(600));
  run_ranks<Block128>(3, 5u, [&](int rank) {
    const auto port = group.port(rank);
    // The silent rank sends half of its packets: some warps get all they wait for.
    stages::publish<Block128>(port, 9, 0, words.data(), rank == 1 ? 96 : 600);
    if (rank == 1) return;
    received[rank * 128 + plat::thread_idx()] = stages::receive_sum<Block128>(
        port, 9, 0, out[rank].data(), 600, 2, stages::StageId::moe_sum);
  });
  for (const int rank : {0, 2}) {
    for (int thread = 0; thread < 128; ++thread) CHECK_EQ(received[rank * 128 + thread], 0);
  }
  lowlat::testing::check_rank_1_was_missed(group);
}

TEST_CASE(an_abort_by_the_host_ends_all_waits_long_before_their_budget) {
  ExchangeGroup group(2, 300, 3600 * kSecond);
  std::vector<int> received(128, -1);
  std::vector<std::uint16_t> out(300);
  std::atomic<int> num_waiting{0};
  std::thread host([&] {
    const std::uint64_t deadline_ns = plat::clock_ns() + 60 * kSecond;
    while (num_waiting.load() < 128 && plat::clock_ns() < deadline_ns) std::this_thread::yield();
    group.abort_by_host(0);
  });
  run_ranks<Block128>(1, emu::kAscending, [&](int) {
    ++num_waiting;
    received[plat::thread_idx()] = stages::receive_sum<Block128>(
        group.port(0), 1, 0, out.data(), 300, 0, stages::StageId::embed_sum);
  });
  host.join();
  for (const int answer : received) CHECK_EQ(answer, 0);
  CHECK_EQ(group.status(0).state, 3u);
  CHECK_EQ(group.status(0).peer, -1);
}

TEST_CASE(receive_all_hands_over_each_rank_in_its_place) {
  constexpr int kWords = 250;
  for (const std::uint32_t order : {0u, 1u, 6u}) {
    ExchangeGroup group(2, kWords, 60 * kSecond);
    std::vector<std::vector<std::uint32_t>> seen(2, std::vector<std::uint32_t>(2 * kWords, 0u));
    run_ranks<Block128>(2, order, [&](int rank) {
      const auto bits = [&](std::int64_t i) {
        return 1000u * (static_cast<std::uint32_t>(rank) + 1u) + static_cast<std::uint32_t>(i);
      };
      stages::publish_words<Block128>(group.port(rank), 1, 0, kWords, bits);
      CHECK(stages::receive_all<Block128>(group.port(rank), 1, 0, kWords, 0,
                                          stages::StageId::logits_gather,
                                          [&](int source, std::int64_t i, std::uint32_t word) {
                                            seen[rank][source * kWords + i] = word;
                                          }));
    });
    for (const int rank : {0, 1}) {
      for (int i = 0; i < 2 * kWords; ++i) {
        CHECK_EQ(seen[rank][i], 1000u * (i / kWords + 1) + i % kWords);
      }
    }
  }
}

TEST_CASE(a_linear_publishes_every_row_as_its_packets_fill) {
  Random random(1);
  // 100 words a row: 33 packets and one of a single word; ten rows are more than a tile.
  constexpr int kRows = 10, kWords = 100, kK = 64;
  const auto x = random.f32(kRows * kK);
  const auto w = random.bf16(kWords * kK);
  const std::int64_t row_packets = stages::packets_of(kWords);
  std::vector<float> want(kRows * kWords), w_row(kK);
  stages::linear(x.data(), kK, kRows, kK, stages::Bf16Weights{w.data(), kK}, 0, kWords,
                 w_row.data(), [&](int t, int n, float y) { want[t * kWords + n] = y; });
  for (const std::uint32_t order : {0u, 1u, 6u}) {
    ExchangeGroup group(2, kRows * 3 * row_packets, 60 * kSecond);
    std::vector<std::vector<std::uint16_t>> out(2, std::vector<std::uint16_t>(kRows * kWords));
    run_ranks<Block128>(2, order, [&](int rank) {
      using Dots = stages::DotTeam<Block128>;
      using Pending = std::uint32_t[Dots::kNum * kRows][plat::kTaggedPayload];
      LOWLAT_SHARED(Pending, pending);
      const auto port = group.port(rank);
      const stages::PublishRows sink{port, 4, kWords, pending + Dots::idx() * kRows};
      // In two ranges, as two blocks would.
      for (const auto& [begin, end] : {std::pair{0, 51}, std::pair{51, kWords}}) {
        stages::linear<Block128>(x.data(), kK, kRows, kK, stages::Bf16Weights{w.data(), kK}, begin,
                                 end, nullptr, sink);
      }
      for (int t = 0; t < kRows; ++t) {
        CHECK(stages::receive_sum<Block128>(port, 4, t * row_packets, out[rank].data() + t * kWords,
                                            kWords, 0, stages::StageId::attention_sum));
      }
    });
    for (const int rank : {0, 1}) {
      for (int i = 0; i < kRows * kWords; ++i) {
        CHECK_EQ(out[rank][i], stages::to_bf16(want[i] + want[i]));
      }
    }
  }
}
