// Planted: the nibbles exchanged, the clamp of `up` on one side only and the shared input
// unquantised.
#include "reference/experts.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"
#include "reference/format.hpp"

namespace {

using lowlat::reference::experts;
using lowlat::reference::swiglu;
using lowlat::reference::to_bf16;

// Two experts of 32 x 32 and a shared one, all weights zero until a case sets some.
struct Model {
  std::vector<std::uint8_t> w1 = std::vector<std::uint8_t>(1024), w3 = w1, w2 = w1;
  std::vector<std::uint8_t> scale = std::vector<std::uint8_t>(64, 127);
  std::vector<std::uint8_t> shared_w1 = std::vector<std::uint8_t>(1024), shared_w3 = shared_w1,
                            shared_w2 = shared_w1;
  float shared_scale = 1.0f;

  std::vector<float> run(const std::vector<std::uint16_t>& x, const std::vector<std::int32_t>& ids,
                         const std::vector<float>& weight) const {
    std::vector<float> y(32, NAN);
    experts(y.data(), x.data(), {w1.data(), scale.data()}, {w3.data(), scale.data()},
            {w2.data(), scale.data()}, ids.data(), weight.data(), {shared_w1.data(), &shared_scale},
            {shared_w3.data(), &shared_scale}, {shared_w2.data(), &shared_scale}, 1, 32, 32,
            static_cast<std::int64_t>(ids.size()), 32);
    return y;
  }
};

}  // namespace

TEST_CASE(swiglu_by_hand) {
  CHECK_NEAR(swiglu(1.0, 2.0), 2.0 / (1.0 + std::exp(-1.0)), 1e-15);
  CHECK_NEAR(swiglu(40.0, 1.0), 10.0 / (1.0 + std::exp(-10.0)), 1e-14);
  CHECK_NEAR(swiglu(-40.0, 1.0), -40.0 / (1.0 + std::exp(40.0)), 1e-30);
  CHECK_NEAR(swiglu(1.0, -11.0), -10.0 / (1.0 + std::exp(-1.0)), 1e-14);
  CHECK_NEAR(swiglu(1.0, 11.0), 10.0 / (1.0 + std::exp(-1.0)), 1e-14);
}

TEST_CASE(routed_by_hand) {
  // Expert 1: gate = 1.5 x[3], up = 2 * (-3) x[2] (its row 7 has scale 2), down row 9 = 0.5 h[7].
  Model m;
  std::vector<std::uint16_t> x(32);
  x[2] = to_bf16(0.5);
  x[3] = to_bf16(2.0);
  m.w1[512 + 7 * 16 + 1] = 0x30;
  m.w3[512 + 7 * 16 + 1] = 0x0d;
  m.w2[512 + 9 * 16 + 3] = 0x10;
  m.scale[32 + 7] = 128;
  const double h = swiglu(2.0 * 1.5 * 2.0, 2.0 * -3.0 * 0.5);
  const std::vector<float> y = m.run(x, {0, 1}, {9.0f, 0.3f});
  CHECK_NEAR(y[9], static_cast<double>(0.3f) * 0.5 * h, 1e-6);
  CHECK_EQ(y[8], 0.0f);
  CHECK_NEAR(m.run(x, {1, 1}, {0.1f, 0.3f})[9], 0.2 * h, 1e-6);
}

TEST_CASE(shared_by_hand) {
  // x[0] = 17 beside 448 (scale 1): e4m3 has 16 and 18, the tie goes to 16. Gate 16/16 = 1, up = 1.
  Model m;
  std::vector<std::uint16_t> x(32);
  x[0] = to_bf16(17.0);
  x[1] = to_bf16(448.0);
  m.shared_w1[5 * 32] = m.shared_w3[5 * 32] = 0x18;  // 2^-4
  m.shared_w2[3 * 32 + 5] = 0x40;                    // 2
  // h = 0.7310586 is 187/256 in bf16; its scale is 2^-9: 374 is between 352 and 384 and
  // becomes 384.
  const std::vector<float> y = m.run(x, {0}, {1.0f});
  CHECK_NEAR(y[3], 2.0 * 384.0 / 512.0, 1e-12);
  CHECK_EQ(y[4], 0.0f);
}

TEST_CASE(shared_gate_is_bf16_before_swiglu) {
  // Gate 1 + 2^-9 is 1 in bf16, up 115/128. h = silu(1) up = 336.3/512 is 336/512 in bf16, and 336
  // is the tie of the codes 320 and 352: 320. Unrounded, h would be 337.1/512, 338/512 and 352.
  Model m;
  std::vector<std::uint16_t> x(32);
  x[0] = x[3] = to_bf16(1.0);
  x[1] = to_bf16(448.0);  // the scale is 1
  x[2] = to_bf16(0.001953125);
  m.shared_w1[5 * 32] = m.shared_w1[5 * 32 + 2] = 0x38;  // 1
  m.shared_w3[5 * 32] = 0x36;                            // 0.875
  m.shared_w3[5 * 32 + 3] = 0x0c;                        // 3/128
  m.shared_w2[3 * 32 + 5] = 0x40;                        // 2
  CHECK_NEAR(m.run(x, {0}, {1.0f})[3], 2.0 * 320.0 / 512.0, 1e-12);
}

TEST_CASE(shared_blocks_of_128_share_scale_and_quantisation) {
  // 1.25 2^-8 beside 448, in columns 3 and 100: in one block of 128 it is a tie of subnormal codes
  // and becomes 2^-8; a block of 32 to itself would keep it.
  const std::int64_t hidden = 256, inner = 128;
  std::vector<std::uint8_t> w13(inner * hidden / 2), w13_scale(inner * hidden / 32, 127);
  std::vector<std::uint8_t> w2(hidden * inner / 2), w2_scale(hidden * inner / 32, 127);
  std::vector<std::uint8_t> gate(inner * hidden), up(inner * hidden), down(hidden * inner);
  const float gate_scale[2] = {1.0f, 3.0f}, up_scale[2] = {1.0f, 1.0f};
  const float down_scale[2] = {1.0f, 5.0f};
  std::vector<std::uint16_t> x(hidden);
  x[3] = to_bf16(1.25 * 0x1p-8);
  x[100] = to_bf16(448.0);
  x[130] = to_bf16(1.0);
  gate[7 * hidden + 130] = 0x38;  // 1 * 1 * scale 3
  up[7 * hidden + 3] = 0x78;      // 256 * 2^-8 = 1
  down[200 * inner + 7] = 0x38;   // in the second block of rows: scale 5
  std::vector<float> y(hidden, NAN);
  const std::int32_t id = 0;
  const float weight = 1.0f;
  experts(y.data(), x.data(), {w13.data(), w13_scale.data()}, {w13.data(), w13_scale.data()},
          {w2.data(), w2_scale.data()}, &id, &weight, {gate.data(), gate_scale},
          {up.data(), up_scale}, {down.data(), down_scale}, 1, hidden, inner, 1, 128);
  // silu(3) * 1 = 2.8577 is 2.859375 in bf16; alone in its block, scale 2^-7: 366 becomes 352 or
  // 384, and 366 is nearer to 352.
  CHECK_NEAR(y[200], 5.0 * 352.0 / 128.0, 1e-12);
  CHECK_EQ(y[72], 0.0f);
}
