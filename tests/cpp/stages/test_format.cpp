// The stages' number formats against the reference's, over all codes and the places between them.
#include <cmath>
#include <cstring>
#include <limits>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/format.hpp"
#include "stages/format.hpp"

namespace {

namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;

// Equal, or both NaN.
bool same(double a, double b) {
  return a == b ? std::signbit(a) == std::signbit(b) : std::isnan(a) && std::isnan(b);
}

// v, the floats beside it, and their negatives.
template <class Check>
void around(float v, Check check) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float w : {v, std::nextafter(v, 0.0f), std::nextafter(v, kInf)}) {
    check(w);
    check(-w);
  }
}

void check_bf16(float v) { CHECK_EQ(stages::to_bf16(v), reference::to_bf16(v)); }
void check_e4m3(float v) { CHECK_EQ(stages::to_e4m3(v), reference::to_e4m3(v)); }
void check_e2m1(float v) { CHECK_EQ(stages::to_e2m1(v), reference::to_e2m1(v)); }

}  // namespace

TEST_CASE(every_code_decodes_alike) {
  for (int code = 0; code < 65536; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    CHECK(same(stages::from_bf16(bits), reference::from_bf16(bits)));
  }
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    CHECK(same(stages::from_e4m3(bits), reference::from_e4m3(bits)));
    CHECK(same(stages::kE4m3Values.value[code], reference::from_e4m3(bits)));
    CHECK(same(stages::from_ue8m0(bits), reference::from_ue8m0(bits)));
    CHECK(same(stages::from_e2m1(bits), reference::from_e2m1(bits)));
  }
}

TEST_CASE(values_midpoints_and_neighbours_encode_alike) {
  for (int code = 0; code < 0x7f7f; ++code) {
    const double low = reference::from_bf16(static_cast<std::uint16_t>(code));
    const double high = reference::from_bf16(static_cast<std::uint16_t>(code + 1));
    around(static_cast<float>(low), check_bf16);
    around(static_cast<float>((low + high) / 2), check_bf16);
  }
  for (int code = 0; code < 0x7e; ++code) {
    const double low = reference::from_e4m3(static_cast<std::uint8_t>(code));
    const double high = reference::from_e4m3(static_cast<std::uint8_t>(code + 1));
    around(static_cast<float>(low), check_e4m3);
    around(static_cast<float>((low + high) / 2), check_e4m3);
  }
  for (int code = 0; code < 7; ++code) {
    const double low = reference::from_e2m1(static_cast<std::uint8_t>(code));
    const double high = reference::from_e2m1(static_cast<std::uint8_t>(code + 1));
    around(static_cast<float>(low), check_e2m1);
    around(static_cast<float>((low + high) / 2), check_e2m1);
  }
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float v : {448.0f, 464.0f, 480.0f, 6.0f, 1e9f, 0x1.ffp127f, kMax, 0x1p-149f}) {
    around(v, check_bf16);
    around(v, check_e4m3);
    around(v, check_e2m1);
  }
}

TEST_CASE(nan_and_infinity_keep_their_kind) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  CHECK_EQ(stages::to_bf16(kInf), 0x7f80);
  CHECK_EQ(stages::to_bf16(-kInf), 0xff80);
  CHECK_EQ(stages::to_e4m3(kInf), 0x7e);
  CHECK_EQ(stages::to_e4m3(-kInf), 0xfe);
  // The least NaN payload must not round away to infinity.
  const float nan = lowlat::scalar::plat::bits_float(0x7f80'0001u);
  CHECK(std::isnan(stages::from_bf16(stages::to_bf16(nan))));
  CHECK_EQ(stages::to_e4m3(nan), 0x7f);
}

TEST_CASE(ceiling_of_a_scale) {
  CHECK_EQ(stages::ue8m0_ceil(1.0f), 127);
  CHECK_EQ(stages::ue8m0_ceil(1.0000001f), 128);
  CHECK_EQ(stages::ue8m0_ceil(1e-4f / 448.0f), 105);
  lowlat::testing::Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const auto v = static_cast<float>(std::exp(20.0 * random.normal()));
    CHECK_EQ(stages::ue8m0_ceil(v), reference::ue8m0_ceil(v));
  }
}

TEST_CASE(rows_expand_as_single_codes_do) {
  std::uint8_t codes[256];
  float out[256];
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  stages::expand_e4m3(out, codes, 0.25f, 256);
  for (int i = 0; i < 256; ++i) CHECK(same(out[i], 0.25 * reference::from_e4m3(codes[i])));
  const std::uint16_t bf16[3] = {0x3f80, 0x8000, 0x0001};
  stages::expand_bf16(out, bf16, 3);
  CHECK(out[0] == 1.0f && std::signbit(out[1]) && out[2] == 0x1p-133f);
}
