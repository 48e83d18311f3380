// The exchange under ThreadSanitizer: the tag store is a release and the tag load an acquire, and a
// box is not written again before its reader is done. Built a second time with LOWLAT_PLANT, where
// the tag store is relaxed: that build must be caught.
#ifdef LOWLAT_PLANT
#define LOWLAT_CPU_RELEASE_ORDER std::memory_order_relaxed
#endif
#include "check.hpp"
#include "stages/exchange_group.hpp"

namespace {

using lowlat::testing::exchange_value;
using lowlat::testing::ExchangeGroup;
namespace plat = lowlat::scalar::plat;
namespace stages = lowlat::scalar::stages;

TEST_CASE(three_ranks_exchange_without_a_race) {
  constexpr std::int64_t kWords = 32;
  constexpr int kTpSize = 3, kEpochs = 300;
  ExchangeGroup group(kTpSize, kWords, 60'000'000'000ull);
  std::atomic<long> wrong = 0;
  group.run([&](int rank) {
    const auto port = group.port(rank);
    std::uint32_t words[kWords];
    std::uint16_t out[kWords];
    for (std::uint64_t epoch = 1; epoch <= kEpochs; ++epoch) {
      for (int i = 0; i < kWords; ++i) words[i] = plat::float_bits(exchange_value(rank, epoch, i));
      stages::publish(port, epoch, 0, words, kWords);
      if (!stages::receive_sum(port, epoch, 0, out, kWords, 0, stages::StageId::attention_sum)) {
        ++wrong;
        return;
      }
      for (int i = 0; i < kWords; ++i) {
        float sum = 0.0f;
        for (int r = 0; r < kTpSize; ++r) sum += exchange_value(r, epoch, i);
        wrong += out[i] != stages::to_bf16(sum);
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST_CASE(faults_and_aborts_are_reported_without_a_race) {
  ExchangeGroup group(3, 4, 20'000'000ull);
  group.run([&](int rank) {
    if (rank == 2) return;
    const std::uint32_t words[4] = {1, 2, 3, 4};
    std::uint16_t out[4];
    stages::publish(group.port(rank), 1, 0, words, 4);
    CHECK(!stages::receive_sum(group.port(rank), 1, 0, out, 4, 0, stages::StageId::moe_sum));
    CHECK(group.status(rank).state != 0u);
  });
  for (int rank : {0, 1, 2}) CHECK(group.abort_word(rank) != 0u);
}

}  // namespace
