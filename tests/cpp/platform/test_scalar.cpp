// The platform scalar keeps the contract (which compiles only when it does), and its few functions
// that are not one call of the standard library do what they say.
#include "platform/scalar.hpp"

#include "platform/contract.hpp"

#include "check.hpp"

#include <limits>
#include <thread>

namespace plat = lowlat::scalar::plat;

TEST_CASE(fma_is_one_rounding) {
  // (1 + e)(1 - e) - 1 = -e^2, which two roundings lose.
  const float e = std::numeric_limits<float>::epsilon();
  CHECK_EQ(plat::fma(1.0f + e, 1.0f - e, -1.0f), -e * e);
}

TEST_CASE(products_and_sums_round_each) {
  // The same in two operations: 1 - e^2 rounds to 1. A compiler that contracts gives -e^2.
  float e = std::numeric_limits<float>::epsilon();
  asm("" : "+m"(e));  // not known to the compiler, so it computes at run time
  const float product = (1.0f + e) * (1.0f - e);
  CHECK_EQ(product - 1.0f, 0.0f);
  CHECK_EQ((1.0f + e) * (1.0f - e) - 1.0f, 0.0f);
}

TEST_CASE(bits_go_there_and_back) {
  for (const std::uint32_t bits : {0u, 0x80000000u, 1u, 0x7f800000u, 0x3f800000u, 0xff7fffffu}) {
    CHECK_EQ(plat::float_bits(plat::bits_float(bits)), bits);
  }
}

TEST_CASE(a_message_of_another_epoch_is_not_taken) {
  plat::TaggedWords words{};
  const std::uint32_t sent[plat::kTaggedPayload] = {1, 2, 3};
  std::uint32_t seen[plat::kTaggedPayload] = {7, 7, 7};
  plat::store_tagged(&words, sent, 5);
  CHECK(!plat::load_tagged(&words, 4, seen));
  CHECK(!plat::load_tagged(&words, 6, seen));
  for (const std::uint32_t word : seen) CHECK_EQ(word, 7);
  CHECK(plat::load_tagged(&words, 5, seen));
  for (int i = 0; i < plat::kTaggedPayload; ++i) CHECK_EQ(seen[i], sent[i]);
}

TEST_CASE(a_payload_is_whole_when_its_tag_is_seen) {
  plat::TaggedWords words{};
  constexpr std::uint32_t kEpochs = 2000;
  std::uint32_t taken[1] = {0};
  std::thread writer([&] {
    for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
      const std::uint32_t payload[plat::kTaggedPayload] = {epoch, epoch * 3, ~epoch};
      plat::store_tagged(&words, payload, epoch);
      const std::uint64_t deadline_ns = plat::clock_ns() + 10'000'000'000ull;
      while (plat::load_acquire<plat::Scope::system>(taken) != epoch) {
        if (plat::clock_ns() > deadline_ns) return;
        plat::spin_pause();
      }
    }
  });
  for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
    std::uint32_t seen[plat::kTaggedPayload] = {};
    const std::uint64_t deadline_ns = plat::clock_ns() + 10'000'000'000ull;
    bool arrived = false;
    while (!(arrived = plat::load_tagged(&words, epoch, seen))) {
      if (plat::clock_ns() > deadline_ns) break;
      plat::spin_pause();
    }
    CHECK(arrived);
    if (!arrived) break;
    CHECK_EQ(seen[0], epoch);
    CHECK_EQ(seen[1], epoch * 3);
    CHECK_EQ(seen[2], ~epoch);
    plat::store_release<plat::Scope::system>(taken, epoch);
  }
  writer.join();
}
