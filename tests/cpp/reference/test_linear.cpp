// The linears in double precision, worked out by hand.
#include "reference/linear.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace reference = lowlat::reference;

TEST_CASE(bf16_linear_by_hand) {
  const std::uint16_t x[4] = {0x3f80, 0x4000, 0x4040, 0xbf80};  // (1, 2), (3, -1)
  const std::uint16_t w[6] = {0x3f80, 0x3f80, 0x0000, 0x4080, 0xbf80, 0x3f00};
  std::uint16_t y[6];
  reference::bf16_linear(y, x, w, 2, 3, 2);
  const double want[6] = {3, 8, 0, 2, -4, -3.5};
  for (int i = 0; i < 6; ++i) CHECK_EQ(reference::from_bf16(y[i]), want[i]);
}

TEST_CASE(activations_are_quantised_by_groups) {
  // amax 448 keeps scale 1: 17 is a tie of 16 and 18, and goes to even. amax just above takes scale
  // 2, where 17 becomes 8.5, a tie of 8 and 9.
  std::vector<std::uint16_t> x(96, reference::to_bf16(17.0));
  x[0] = reference::to_bf16(448.0);
  x[32] = reference::to_bf16(450.0);
  for (int i = 64; i < 96; ++i) x[i] = 0x8000;  // -0, and an empty group's least scale
  x[95] = reference::to_bf16(1e-13);
  std::vector<double> out(96);
  reference::quantize_activation(out.data(), x.data(), 96, 32);
  CHECK_EQ(out[0], 448.0);
  CHECK_EQ(out[1], 16.0);
  CHECK_EQ(out[32], 448.0);
  CHECK_EQ(out[33], 16.0);
  CHECK_EQ(out[64], 0.0);
  // scale 2^-42 = 2.27e-13, the power above 1e-10 / 448 = 2.23e-13.
  const double code = out[95] / std::ldexp(1.0, -42);
  CHECK_NEAR(code, 0.4375, 1e-12);  // 1e-13 (as bf16) / 2^-42 = 0.4399 -> 0.4375
}

TEST_CASE(block_linear_by_hand) {
  // Two blocks along K with scales 1 and 4 (2 and 16 in the second block of rows): y = 32 * (1 * 1)
  // + 32 * (1 * 4).
  const std::vector<std::uint16_t> x(64, 0x3f80);
  std::vector<std::uint8_t> w(64 * 64, 0x38);
  w[64 + 5] = 0xb8;  // row 1: one of the first block is -1
  const float w_scale[4] = {1.0f, 4.0f, 2.0f, 16.0f};
  std::vector<std::uint16_t> y(64);
  reference::block_linear(y.data(), x.data(), w.data(), w_scale, 1, 64, 64, 32);
  CHECK_EQ(reference::from_bf16(y[0]), 160.0);
  CHECK_EQ(reference::from_bf16(y[1]), 158.0);
  CHECK_EQ(reference::from_bf16(y[31]), 160.0);
  CHECK_EQ(reference::from_bf16(y[32]), 576.0);  // 32 * 2 + 32 * 16
}
