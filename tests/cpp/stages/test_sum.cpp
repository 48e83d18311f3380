// dot() against its declared order, written out again from its words; the block forms on one
// thread.
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "stages/sum.hpp"

namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using lowlat::testing::Random;

// Element i to sum i mod 16, then 8 pairs (l, l + 8), 4, 2, 1.
float ordered(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> sums(16);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float product = a[i] * b[i];
    sums[i % 16] = sums[i % 16] + product;
  }
  for (std::size_t half = 8; half >= 1; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] = sums[lane] + sums[lane + half];
  }
  return sums[0];
}

}  // namespace

TEST_CASE(dot_has_the_declared_order) {
  for (int n = 0; n <= 200; ++n) {
    Random random(n);
    const std::vector<float> a = random.f32(n), b = random.f32(n);
    CHECK_EQ(stages::dot(a.data(), b.data(), n), ordered(a, b));
  }
  Random random(1);
  const std::vector<float> a = random.f32(5120), b = random.f32(5120);
  CHECK_EQ(stages::dot(a.data(), b.data(), 5120), ordered(a, b));
}

TEST_CASE(product_and_sum_are_two_roundings) {
  // 1 + 2^-12 squared is 1 + 2^-11 + 2^-24; a fused sum with -1 would keep the 2^-24.
  std::vector<float> a(32), b(32);
  a[0] = -1.0f;
  b[0] = 1.0f;
  a[16] = b[16] = 1.0f + 0x1p-12f;
  CHECK_EQ(stages::dot(a.data(), b.data(), 32), 0x1p-11f);
}

TEST_CASE(one_thread_blocks_sum_as_one_thread) {
  stages::BlockSum<Block>::Scratch scratch;
  CHECK_EQ(stages::BlockSum<Block>::run(2.5f, scratch), 2.5f);
  Random random(2);
  const std::vector<float> a = random.f32(77), b = random.f32(77);
  CHECK_EQ(stages::BlockDot<Block>::run(a.data(), b.data(), 77, scratch), ordered(a, b));
}
