// The rotary stages: frequencies, the ramp, turns at near and far positions, in each form.
#include <cmath>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/rope.hpp"
#include "stages/rope.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Rope = stages::Rope<lowlat::scalar::plat::Block<256>>;
using lowlat::testing::Random;

stages::RopeTable table(bool yarn) {
  return yarn ? stages::rope_table(160000.0f, stages::yarn_ramp(160000, 16, 32, 1, 65536))
              : stages::rope_table(10000.0f, stages::YarnRamp{});
}

}  // namespace

TEST_CASE(ramp_of_the_model) {
  const stages::YarnRamp ramp = stages::yarn_ramp(160000, 16, 32, 1, 65536);
  CHECK_EQ(ramp.low, 15);
  CHECK_EQ(ramp.high, 25);
  CHECK_EQ(ramp.factor, 16.0f);
}

TEST_CASE(ramps_stay_inside_the_pairs_and_never_divide_by_zero) {
  const stages::YarnRamp below = stages::yarn_ramp(1e6, 4, 1e6, 1e6, 64);
  CHECK_EQ(below.low, 0);
  CHECK_EQ(below.high, 1);
  const stages::YarnRamp above = stages::yarn_ramp(2, 4, 32, 1, 1e30);  // a step past the last pair
  CHECK_EQ(above.high, above.low + 1);
  CHECK_EQ(stages::rope_table(2.0f, above).values[31],
           stages::rope_table(2.0f, stages::YarnRamp{}).values[31]);
}

TEST_CASE(frequencies_are_bitwise_the_reference) {
  for (const bool yarn : {false, true}) {
    for (int i = 0; i < 32; ++i) {
      CHECK_EQ(table(yarn).values[i], reference::rope_frequency(i, yarn));
    }
  }
  CHECK_NEAR(table(true).values[16], 0.002265625, 1e-9);
  CHECK_NEAR(table(true).values[31] / 5.68052904e-07, 1.0, 3e-7);
}

TEST_CASE(position_0_is_the_identity) {
  std::vector<float> x(64);
  for (int i = 0; i < 64; ++i) x[i] = static_cast<float>(i - 30);
  const std::vector<float> before = x;
  Rope::rotate(x.data(), stages::rope_turn(table(true), 0));
  CHECK(x == before);
}

TEST_CASE(agrees_with_the_reference_at_every_distance) {
  Random random(1);
  for (const std::int64_t pos : {0, 1, 127, 65535, 65536, 999983, 1048575}) {
    for (const bool yarn : {false, true}) {
      for (const bool inverse : {false, true}) {
        const std::vector<std::uint16_t> x = random.bf16(64);
        std::vector<double> want = lowlat::testing::values_of(x);
        reference::rope(want.data(), &pos, 1, 1, 64, yarn, inverse);
        stages::RopeTurn turn = stages::rope_turn(table(yarn), pos);
        if (inverse) turn = stages::rope_inverse(turn);
        std::vector<float> got(64);
        stages::expand_bf16(got.data(), x.data(), 64);
        Rope::rotate(got.data(), turn);
        for (int i = 0; i < 64; ++i) CHECK_NEAR(got[i], want[i], 1e-6);
        // The bf16 form is the fp32 form, rounded once.
        std::vector<std::uint16_t> rounded = x;
        Rope::rotate(rounded.data(), turn);
        for (int i = 0; i < 64; ++i) CHECK_EQ(rounded[i], stages::to_bf16(got[i]));
        // A table and a position are the same turn.
        if (!inverse) {
          std::vector<float> again(64);
          stages::expand_bf16(again.data(), x.data(), 64);
          Rope::rotate(again.data(), table(yarn), pos);
          CHECK(again == got);
        }
      }
    }
  }
}

TEST_CASE(pairs_are_interleaved) {
  std::vector<float> x(64);
  x[2] = 1.0f;
  Rope::rotate(x.data(), table(false), 5);
  CHECK(x[2] != 1.0f && x[3] != 0.0f);
  for (int i = 0; i < 64; ++i) CHECK(i == 2 || i == 3 || x[i] == 0.0f);
}
