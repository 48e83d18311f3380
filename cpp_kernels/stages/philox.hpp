// stages/philox.hpp: Philox4x32-10 counter noise, and the Gumbel value of a uniform number.
//
// One thread calls; a number depends on its counter and key alone, so any thread, block or rank
// that asks for the same one gets the same bits.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::stages {

struct PhiloxWords {
  std::uint32_t word[4];
};

// Ten rounds of Philox4x32 over (counter, key).
LOWLAT_DEVICE PhiloxWords philox4x32_10(PhiloxWords counter, std::uint32_t k0, std::uint32_t k1) {
  constexpr std::uint64_t kMultiplier0 = 0xd2511f53u, kMultiplier2 = 0xcd9e8d57u;
  constexpr std::uint32_t kBump0 = 0x9e3779b9u, kBump1 = 0xbb67ae85u;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = kMultiplier0 * counter.word[0];
    const std::uint64_t p2 = kMultiplier2 * counter.word[2];
    counter = {static_cast<std::uint32_t>(p2 >> 32) ^ counter.word[1] ^ k0,
               static_cast<std::uint32_t>(p2),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter.word[3] ^ k1,
               static_cast<std::uint32_t>(p0)};
    k0 += kBump0;
    k1 += kBump1;
  }
  return counter;
}

// (float32(bits) + 0.5) * 2^-32. The highest 128 values of bits give exactly 1, whose Gumbel value
// is -infinity: such an id is never chosen over another.
LOWLAT_DEVICE float noise_uniform(std::uint32_t bits) {
  return (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
}
LOWLAT_DEVICE float gumbel(float uniform) { return -plat::log(-plat::log1p(-uniform)); }

// The draft's uniform numbers of one row and step: id to u. Four neighbouring ids share one Philox
// call, so ids are best asked in ascending order.
struct PhiloxNoise {
  std::uint64_t key;
  std::uint32_t row, step, offset;  // offset: low word of the engine's counter
  std::int32_t quad = -1;           // ids 4 * quad .. + 3 are in `words`
  PhiloxWords words = {};

  LOWLAT_DEVICE float operator()(std::int32_t id) {
    if (id >> 2 != quad) {
      quad = id >> 2;
      words = philox4x32_10({static_cast<std::uint32_t>(quad), row, step, offset},
                            static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
    }
    return noise_uniform(words.word[id & 3]);
  }
};

}  // namespace lowlat::LOWLAT_PLATFORM::stages
