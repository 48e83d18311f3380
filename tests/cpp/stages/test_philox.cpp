// Planted: nine rounds, a swapped output word, the key bump before the first round, and (id + 1) >>
// 2 each fail a case. Known answers: the published test vectors of Philox4x32-10 (Random123).
#include <cmath>
#include <vector>

#include "platform/scalar.hpp"
#include "stages/philox.hpp"

#include "check.hpp"

namespace {

using lowlat::scalar::stages::gumbel;
using lowlat::scalar::stages::noise_uniform;
using lowlat::scalar::stages::philox4x32_10;
using lowlat::scalar::stages::PhiloxNoise;
using lowlat::scalar::stages::PhiloxWords;

void check_words(PhiloxWords counter, std::uint32_t k0, std::uint32_t k1, PhiloxWords want) {
  const PhiloxWords got = philox4x32_10(counter, k0, k1);
  for (int i = 0; i < 4; ++i) CHECK_EQ(got.word[i], want.word[i]);
}

}  // namespace

TEST_CASE(gives_the_published_words) {
  check_words({0, 0, 0, 0}, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  check_words({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, 0xffffffffu, 0xffffffffu,
              {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  check_words({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0xa4093822u, 0x299f31d0u,
              {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST_CASE(uniforms_lie_above_0_and_reach_1_only_at_the_top) {
  CHECK_EQ(noise_uniform(0), 0x1p-33f);
  CHECK_EQ(noise_uniform(0x80000000u), 0.5f);
  CHECK_EQ(noise_uniform(0xffffff00u), 1.0f - 0x1p-24f);
  CHECK_EQ(noise_uniform(0xffffffffu), 1.0f);
}

TEST_CASE(gumbel_values) {
  CHECK_NEAR(gumbel(0.5f), 0.36651292058166432701, 1e-7);  // -ln(ln 2)
  CHECK_NEAR(gumbel(1.0f - 0x1p-24f), -std::log(24.0 * std::log(2.0)), 1e-6);
  CHECK_NEAR(gumbel(0x1p-33f), 33.0 * std::log(2.0), 1e-5);
  CHECK_EQ(gumbel(1.0f), -INFINITY);
}

TEST_CASE(noise_of_an_id_is_word_id_and_3_of_its_quad) {
  const std::uint64_t key = 0x299f31d0a4093822u;  // low word first
  PhiloxNoise noise{key, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
  // Counter word 0 is id >> 2, so this id's quad has the third published vector's counter but for
  // it.
  for (const std::int32_t id : {0, 1, 2, 3, 4, 129279, 7, 5, 0}) {
    const PhiloxWords words =
        philox4x32_10({static_cast<std::uint32_t>(id / 4), 0x85a308d3u, 0x13198a2eu, 0x03707344u},
                      0xa4093822u, 0x299f31d0u);
    CHECK_EQ(noise(id), noise_uniform(words.word[id % 4]));
  }
}

TEST_CASE(rows_steps_and_offsets_have_noise_of_their_own) {
  const auto first = [](std::uint32_t row, std::uint32_t step, std::uint32_t offset) {
    return PhiloxNoise{5, row, step, offset}(9);
  };
  CHECK(first(0, 0, 0) != first(1, 0, 0));
  CHECK(first(0, 0, 0) != first(0, 1, 0));
  CHECK(first(0, 0, 0) != first(0, 0, 1));
  CHECK(first(0, 1, 0) != first(1, 0, 0));
}
