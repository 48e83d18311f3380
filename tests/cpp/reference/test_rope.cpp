// The rotary embedding: published YaRN frequencies, exact turns, the fp32 angle at far positions.
#include "reference/rope.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"

namespace reference = lowlat::reference;

TEST_CASE(yarn_frequencies_are_the_published_ones) {
  const double want[32] = {1,
                           0.687656022,
                           0.472870805,
                           0.325172456,
                           0.223606798,
                           0.153764561,
                           0.105737126,
                           0.0727107717,
                           0.05,
                           0.0343828011,
                           0.0236435402,
                           0.0162586228,
                           0.0111803399,
                           0.00768822805,
                           0.00528685632,
                           0.00363553858,
                           0.002265625,
                           0.00139680129,
                           0.000849689727,
                           0.000508081963,
                           0.000296977778,
                           0.000168179989,
                           9.0867843e-05,
                           4.54442323e-05,
                           1.953125e-05,
                           5.37231267e-06,
                           3.69430316e-06,
                           2.54040981e-06,
                           1.74692811e-06,
                           1.20128563e-06,
                           8.260713e-07,
                           5.68052904e-07};
  for (int i = 0; i < 32; ++i) {
    CHECK_NEAR(reference::rope_frequency(i, true) / want[i], 1.0, 3e-7);
    CHECK_NEAR(reference::rope_frequency(i, false) / std::pow(10000.0, -2.0 * i / 64), 1.0, 2e-7);
  }
}

TEST_CASE(position_0_changes_nothing_and_leading_values_stay) {
  std::vector<double> x(2 * 70);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i) - 50.5;
  const std::vector<double> before = x;
  const std::int64_t pos[1] = {0};
  reference::rope(x.data(), pos, 1, 2, 70, true, false);
  CHECK(x == before);
  const std::int64_t one[1] = {1};
  reference::rope(x.data(), one, 1, 2, 70, true, false);
  for (int i = 0; i < 140; ++i) CHECK((i % 70 < 6) == (x[i] == before[i]));
}

TEST_CASE(turns_pairs_and_back) {
  std::vector<double> x(64);
  x[0] = 1.0;  // pair 0 turns one radian a position
  x[2] = 2.0;
  const std::int64_t pos[1] = {3};
  reference::rope(x.data(), pos, 1, 1, 64, false, false);
  // Entries of an fp32 table.
  const auto cos = static_cast<float>(std::cos(3.0)), sin = static_cast<float>(std::sin(3.0));
  CHECK_EQ(x[0], cos);
  CHECK_EQ(x[1], sin);
  CHECK_NEAR(x[2], 2.0 * std::cos(3.0 * std::pow(10.0, -0.125)), 1e-6);
  CHECK_EQ(x[4], 0.0);
  reference::rope(x.data(), pos, 1, 1, 64, false, true);
  const double square = static_cast<double>(cos) * cos + static_cast<double>(sin) * sin;
  CHECK_NEAR(x[0], square, 1e-15);
  CHECK_NEAR(x[1], 0.0, 1e-15);
}

TEST_CASE(the_angle_and_its_cosine_are_fp32_numbers) {
  std::vector<double> x(64);
  x[2] = 1.0;
  const std::int64_t pos[1] = {1048575};
  reference::rope(x.data(), pos, 1, 1, 64, false, false);
  const float f = 1.0f / static_cast<float>(std::pow(10000.0, 1.0 / 32));
  const float angle = 1048575.0f * f;
  CHECK_EQ(x[2], static_cast<float>(std::cos(static_cast<double>(angle))));
  // The unrounded product is another angle by far more than a double's error.
  CHECK(std::abs(x[2] - std::cos(1048575.0 * std::pow(10000.0, -1.0 / 32))) > 1e-4);
}
