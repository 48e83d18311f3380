// The rank sum stage: bitwise as the reference, in rank order, by ranges.
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/rank_sum.hpp"
#include "stages/rank_sum.hpp"

namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using lowlat::testing::Random;

void sum(std::vector<std::uint16_t>& out, const std::vector<float>& partial, int ranks, int begin,
         int end) {
  const int n = static_cast<int>(out.size());
  stages::rank_sum<Block>(out.data(), ranks, begin, end,
                          [&](int rank, int i) { return partial[rank * n + i]; });
}

}  // namespace

TEST_CASE(adds_in_rank_order_in_fp32) {
  const std::vector<float> partial = {1, 0x1p24f, 0x1p24f, 2, 1, -0x1p24f, 4, -0x1p24f, 1};
  std::vector<std::uint16_t> y(3);
  sum(y, partial, 3, 0, 3);
  CHECK(y == std::vector<std::uint16_t>({0x40e0, 0x0000, 0x3f80}));
}

TEST_CASE(bitwise_as_the_reference_by_any_ranges) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    const int ranks = static_cast<int>(random.integer(1, 8)), n = 200;
    const std::vector<float> partial = random.f32(ranks * n);
    std::vector<std::uint16_t> want(n), got(n, 0x7fc0);
    lowlat::reference::rank_sum(want.data(), partial.data(), ranks, n);
    const int cut = static_cast<int>(random.integer(0, n));
    sum(got, partial, ranks, cut, n);
    sum(got, partial, ranks, 0, cut);
    CHECK(got == want);
  }
}
