// The exchange's values, its reuse of boxes, its wrap and its ends. Races are
// test_exchange_tsan.cpp's. Mutations that were seen to fail here: tag `epoch & 1` instead of epoch
// (stale values), one box instead of two (waits expire: a box holds a later tag), a wait without
// the abort test (the abort case takes the whole budget and reports `expired`), sums in the order
// of arrival (order case).
#include "check.hpp"
#include "stages/exchange_group.hpp"

namespace {

using lowlat::testing::exchange_value;
using lowlat::testing::ExchangeGroup;
namespace plat = lowlat::scalar::plat;
namespace stages = lowlat::scalar::stages;

constexpr std::uint64_t kSecond = 1'000'000'000;

// One exchange of every epoch in [first, first + count) on every rank; returns wrong words.
long wrong_sums(int tp_size, std::int64_t num_words, std::uint64_t first, int count) {
  ExchangeGroup group(tp_size, num_words, 20 * kSecond);
  std::vector<long> wrong(tp_size, 0);
  group.run([&](int rank) {
    const auto port = group.port(rank);
    std::vector<std::uint32_t> words(num_words);
    std::vector<std::uint16_t> out(num_words);
    for (std::uint64_t epoch = first; epoch < first + count; ++epoch) {
      for (std::int64_t i = 0; i < num_words; ++i) {
        words[i] = plat::float_bits(exchange_value(rank, epoch, i));
      }
      stages::publish(port, epoch, 0, words.data(), num_words);
      out.assign(num_words, 0xaaaa);
      if (!stages::receive_sum(port, epoch, 0, out.data(), num_words, 0,
                               stages::StageId::attention_sum)) {
        wrong[rank] = -1;
        return;
      }
      for (std::int64_t i = 0; i < num_words; ++i) {
        float sum = 0.0f;
        for (int r = 0; r < tp_size; ++r) sum += exchange_value(r, epoch, i);
        wrong[rank] += out[i] != stages::to_bf16(sum);
      }
    }
  });
  long total = 0;
  for (long w : wrong) total += w;
  return total;
}

TEST_CASE(sums_are_right_for_every_group_size_and_ragged_lengths) {
  for (int tp_size : {1, 2, 3, 4}) {
    for (std::int64_t num_words : {1, 2, 3, 7, 64}) {
      CHECK_EQ(wrong_sums(tp_size, num_words, 1, 40), 0);
    }
  }
}

TEST_CASE(tags_survive_the_wrap_of_their_32_bits) {
  CHECK_EQ(wrong_sums(2, 5, (1ull << 32) - 20, 40), 0);
}

TEST_CASE(the_sum_is_in_rank_order_and_rounds_once) {
  // 2^24 + 1 + 1 is 2^24 in fp32 from the left; from the right it is 2^24 + 2.
  ExchangeGroup group(3, 1, 20 * kSecond);
  const float value[3] = {16777216.0f, 1.0f, 1.0f};
  std::uint16_t out[3] = {};
  group.run([&](int rank) {
    const std::uint32_t word = plat::float_bits(value[rank]);
    stages::publish(group.port(rank), 1, 0, &word, 1);
    CHECK(stages::receive_sum(group.port(rank), 1, 0, &out[rank], 1, 0,
                              stages::StageId::attention_sum));
  });
  CHECK_EQ(out[0], stages::to_bf16(16777216.0f));
  CHECK_EQ(out[1], out[0]);
  CHECK_EQ(out[2], out[0]);

  // A case that bf16 can tell apart: 256 + 1 + 1 = 258 (bf16 258); rounding after each add gives
  // 256.
  ExchangeGroup again(3, 1, 20 * kSecond);
  const float small[3] = {256.0f, 1.0f, 1.0f};
  again.run([&](int rank) {
    const std::uint32_t word = plat::float_bits(small[rank]);
    stages::publish(again.port(rank), 1, 0, &word, 1);
    CHECK(stages::receive_sum(again.port(rank), 1, 0, &out[rank], 1, 0,
                              stages::StageId::attention_sum));
  });
  CHECK_EQ(out[0], stages::to_bf16(258.0f));
}

TEST_CASE(a_silent_rank_expires_the_wait_names_it_and_aborts_every_rank) {
  ExchangeGroup group(3, 4, kSecond / 20);
  std::vector<int> received(3, -1);
  group.run([&](int rank) {
    if (rank == 1) return;  // never publishes
    const std::uint32_t words[4] = {1, 2, 3, 4};
    const auto port = group.port(rank);
    stages::publish(port, 9, 0, words, 4);
    std::uint16_t out[4];
    received[rank] = stages::receive_sum(port, 9, 0, out, 4, 2, stages::StageId::moe_sum);
  });
  CHECK_EQ(received[0], 0);
  CHECK_EQ(received[2], 0);
  lowlat::testing::check_rank_1_was_missed(group);
}

TEST_CASE(an_abort_by_the_host_ends_a_wait_long_before_its_budget) {
  ExchangeGroup group(2, 1, 3600 * kSecond);
  bool received = true;
  std::thread waiting([&] {
    std::uint16_t out;
    received = stages::receive_sum(group.port(0), 1, 0, &out, 1, 0, stages::StageId::embed_sum);
  });
  group.abort_by_host(0);
  waiting
      .join();  // the test's own limit is the runner's: a wait that ignores the abort hangs an hour
  CHECK(!received);
  CHECK_EQ(group.status(0).state, 3u);
  CHECK_EQ(group.status(0).peer, -1);
}

TEST_CASE(receive_all_hands_over_each_rank_in_its_place) {
  ExchangeGroup group(2, 5, 20 * kSecond);
  std::vector<std::vector<std::uint32_t>> seen(2, std::vector<std::uint32_t>(10, 0xaaaaaaaau));
  group.run([&](int rank) {
    const auto port = group.port(rank);
    std::uint32_t words[5];
    for (int i = 0; i < 5; ++i) words[i] = 100u * (rank + 1) + i;
    stages::publish(port, 1, 0, words, 3);  // tile by tile
    stages::publish(port, 1, 1, words + 3, 2);
    CHECK(stages::receive_all(port, 1, 0, 5, 0, stages::StageId::logits_gather,
                              [&](int source, std::int64_t i, std::uint32_t bits) {
                                seen[rank][source * 5 + i] = bits;
                              }));
  });
  for (int rank : {0, 1}) {
    for (int i = 0; i < 10; ++i) CHECK_EQ(seen[rank][i], 100u * (i / 5 + 1) + i % 5);
  }
}

TEST_CASE(a_linear_sink_publishes_every_row_as_its_packets_fill) {
  // 7 words a row: two full packets and one of a single word.
  constexpr int kRows = 3, kWords = 7;
  ExchangeGroup group(2, kRows * 9, 20 * kSecond);
  std::vector<std::uint16_t> out[2];
  group.run([&](int rank) {
    const auto port = group.port(rank);
    std::uint32_t pending[kRows][plat::kTaggedPayload];
    const stages::PublishRows sink{port, 4, kWords, pending};
    for (int n = 0; n < kWords; ++n) {
      for (int t = 0; t < kRows; ++t) sink(t, n, 100.0f * rank + 10.0f * t + n);
    }
    out[rank].assign(kRows * kWords, 0xaaaa);
    for (int t = 0; t < kRows; ++t) {
      CHECK(stages::receive_sum(port, 4, t * stages::packets_of(kWords),
                                out[rank].data() + t * kWords, kWords, 0,
                                stages::StageId::attention_sum));
    }
  });
  for (int rank : {0, 1}) {
    for (int t = 0; t < kRows; ++t) {
      for (int n = 0; n < kWords; ++n) {
        CHECK_EQ(out[rank][t * kWords + n], stages::to_bf16(100.0f + 20.0f * t + 2.0f * n));
      }
    }
  }
}

}  // namespace
