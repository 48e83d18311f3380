// The functions that the platform amd brings itself, as plain C++: against the C library in long
// double. A GPU's fp64 is IEEE's, so what holds here holds there; the interpreter of code objects
// runs the same lines as machine code.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#define LOWLAT_DEVICE inline
#include "platform/amd_math.hpp"
// What brings LOWLAT_DEVICE comes first.
#include "check.hpp"

namespace {

namespace math = lowlat::amd::math;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Distance in units of the last place of the float at `truth`.
double ulps(float seen, long double truth) {
  const auto nearest = static_cast<float>(truth);
  if (std::isinf(nearest)) return seen == nearest ? 0.0 : 1e9;
  const int exponent = nearest == 0.0f ? -126 : std::max(std::ilogb(nearest), -126);
  return static_cast<double>(std::fabs(static_cast<long double>(seen) - truth) /
                             std::ldexp(1.0L, exponent - 23));
}

struct Draw {
  std::uint64_t state = 1;
  std::uint32_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::uint32_t>(state >> 32);
  }
  float within(float low, float high) {
    return low + (high - low) * static_cast<float>(bits() >> 8) * 0x1p-24f;
  }
};

// Worst distance of f from `truth` over `draw`.
double worst(const std::function<float(Draw&)>& draw, float (*f)(float),
             long double (*truth)(long double)) {
  Draw values;
  double most = 0.0;
  for (int i = 0; i < 200'000; ++i) {
    const float x = draw(values);
    most = std::max(most, ulps(f(x), truth(x)));
  }
  return most;
}

constexpr double kBound = 0.51;

TEST_CASE(exp_is_within_its_bound) {
  const auto wide = [](Draw& d) { return d.within(-103.0f, 88.7f); };
  const auto near = [](Draw& d) { return d.within(-1.0f, 1.0f) * d.within(0.0f, 1.0f); };
  CHECK(worst(wide, math::exp, std::exp) <= kBound);
  CHECK(worst(near, math::exp, std::exp) <= kBound);
  CHECK_EQ(math::exp(0.0f), 1.0f);
  CHECK_EQ(math::exp(100.0f), kInf);
  CHECK_EQ(math::exp(88.73f), kInf);
  CHECK_EQ(math::exp(-104.5f), 0.0f);
  CHECK_EQ(math::exp(-kInf), 0.0f);
  CHECK(std::isnan(math::exp(std::nanf(""))));
}

TEST_CASE(log_is_within_its_bound) {
  const auto any = [](Draw& d) { return std::bit_cast<float>(d.bits() % 0x7f80'0000u); };
  const auto near = [](Draw& d) { return d.within(0.5f, 2.0f); };
  CHECK(worst(any, math::log, std::log) <= kBound);
  CHECK(worst(near, math::log, std::log) <= kBound);
  CHECK_EQ(math::log(1.0f), 0.0f);
  CHECK_EQ(math::log(0.0f), -kInf);
  CHECK_EQ(math::log(kInf), kInf);
  CHECK(std::isnan(math::log(-1.0f)));
  CHECK(std::isnan(math::log(std::nanf(""))));
}

TEST_CASE(log1p_is_within_its_bound) {
  const auto unit = [](Draw& d) { return d.within(-0.99999f, 1.0f); };
  const auto tiny = [](Draw& d) {
    return d.within(-1.0f, 1.0f) * std::bit_cast<float>((100u + d.bits() % 27u) << 23);
  };
  const auto large = [](Draw& d) { return d.within(0.0f, 1e30f); };
  CHECK(worst(unit, math::log1p, std::log1p) <= kBound);
  CHECK(worst(tiny, math::log1p, std::log1p) <= kBound);
  CHECK(worst(large, math::log1p, std::log1p) <= kBound);
  CHECK_EQ(math::log1p(0.0f), 0.0f);
  CHECK_EQ(math::log1p(-1.0f), -kInf);
  CHECK(std::isnan(math::log1p(-1.5f)));
}

TEST_CASE(sin_and_cos_are_within_their_bounds) {
  // Angles of RoPE: a position times a frequency of at most one radian.
  const auto angles = [](Draw& d) { return d.within(-1'048'576.0f, 1'048'576.0f); };
  const auto near = [](Draw& d) { return d.within(-10.0f, 10.0f); };
  for (const auto& draw :
       {std::function<float(Draw&)>(angles), std::function<float(Draw&)>(near)}) {
    CHECK(worst(draw, math::sin, std::sin) <= kBound);
    CHECK(worst(draw, math::cos, std::cos) <= kBound);
  }
  CHECK_EQ(math::sin(0.0f), 0.0f);
  CHECK(std::signbit(math::sin(-0.0f)));
  CHECK_EQ(math::cos(0.0f), 1.0f);
  CHECK(std::isnan(math::sin(kInf)));
  CHECK(std::isnan(math::cos(std::nanf(""))));
}

TEST_CASE(pow_is_within_its_bound) {
  Draw values;
  double most = 0.0;
  for (int i = 0; i < 200'000; ++i) {
    const float base = values.within(0.001f, 200'000.0f), exponent = values.within(-3.0f, 3.0f);
    most = std::max(
        most, ulps(math::pow(base, exponent), std::pow(static_cast<long double>(base), exponent)));
  }
  CHECK(most <= kBound);
  CHECK_EQ(math::pow(160'000.0f, 0.0f), 1.0f);
  CHECK_EQ(math::pow(1e30f, 3.0f), kInf);
  CHECK_EQ(math::pow(1e30f, -3.0f), 0.0f);
  CHECK(std::isnan(math::pow(-1.0f, 0.5f)));
}

}  // namespace
