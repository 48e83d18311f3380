// V4's pooled keys: candidates, orders and ranges, by hand and by the reference.
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/pool.hpp"
#include "stages/linear.hpp"
#include "stages/pool.hpp"

namespace {

using lowlat::testing::Random;
namespace plat = lowlat::scalar::plat;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Pool = stages::PoolEntry<plat::Block<256>>;
using Key = stages::PooledKey<plat::Block<256>>;
using Codes = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

constexpr stages::PoolLayout kOverlap{4, 2}, kBlock{128, 1}, kCore{4, 512}, kLong{128, 512};

// One entry of rows [n, width] that begin at position 0.
Floats pooled(const stages::PoolLayout& layout, const Floats& rows, const Floats& ape,
              std::int64_t entry) {
  const auto row_of = [&](std::int64_t position) {
    REQUIRE(position >= 0 && position * layout.width() < static_cast<std::int64_t>(rows.size()));
    return rows.data() + position * layout.width();
  };
  Floats c(layout.dim, std::nanf(""));
  Pool::Scratch scratch;
  Pool::run(c.data(), layout, ape.data(), entry, row_of, 0, layout.dim, scratch);
  return c;
}

stages::RopeTurn turn(std::int64_t position) {
  const auto ramp = stages::yarn_ramp(160000.0, 16.0, 32.0, 1.0, 65536.0);
  return stages::rope_turn(stages::rope_table(160000.0f, ramp), position);
}

}  // namespace

TEST_CASE(layouts_are_those_of_the_published_sizes) {
  CHECK_EQ(kCore.num_candidates(), 8);
  CHECK_EQ(kCore.half_width(), 1024);
  CHECK_EQ(kCore.width(), 2048);
  CHECK_EQ(kLong.num_candidates(), 128);
  CHECK_EQ(kLong.half_width(), 512);
  CHECK_EQ(kLong.width(), 1024);
  // Entry 3 of ratio 4 pools 8 .. 11 by their overlap halves and 12 .. 15 by their own.
  CHECK_EQ(kCore.position(3, 0), 8);
  CHECK_EQ(kCore.position(3, 7), 15);
  CHECK_EQ(kCore.position(0, 3), -1);
  CHECK_EQ(kCore.offset(3), 0);
  CHECK_EQ(kCore.offset(4), 512);
  CHECK_EQ(kCore.ape_row(3), 3);
  CHECK_EQ(kCore.ape_row(4), 0);
  CHECK_EQ(kLong.position(3, 127), 511);
  CHECK_EQ(kLong.offset(127), 0);
  CHECK_EQ(kLong.ape_row(127), 127);
}

TEST_CASE(overlapping_entries_take_each_half_where_it_belongs) {
  // Rows [kv_ov(2) | kv(2) | sc_ov(2) | sc(2)]: values name their token and half, scores are huge
  // for one candidate, so that it alone is left.
  for (int winner = 0; winner < 8; ++winner) {
    Floats rows(8 * 8);
    for (int token = 0; token < 8; ++token) {
      for (int d = 0; d < 2; ++d) {
        rows[8 * token + d] = static_cast<float>(100 * token + d);
        rows[8 * token + 2 + d] = static_cast<float>(100 * token + 50 + d);
        rows[8 * token + 4 + d] = winner < 4 && token == winner ? 200.0f : 0.0f;
        rows[8 * token + 6 + d] = winner >= 4 && token == winner ? 200.0f : 0.0f;
      }
    }
    const float want = static_cast<float>(100 * winner + (winner < 4 ? 0 : 50));
    const Floats got = pooled(kOverlap, rows, Floats(4 * 4), 1);
    CHECK_EQ(got[0], want);
    CHECK_EQ(got[1], want + 1.0f);
    // The same by ape [4, kv_ov | kv] alone.
    for (int token = 0; token < 8; ++token) std::fill_n(&rows[8 * token + 4], 4, 0.0f);
    Floats ape(4 * 4);
    for (int d = 0; d < 2; ++d) ape[4 * (winner % 4) + (winner < 4 ? 0 : 2) + d] = 200.0f;
    CHECK_EQ(pooled(kOverlap, rows, ape, 1)[1], want + 1.0f);
  }
}

TEST_CASE(the_first_entry_has_no_overlap) {
  // Tokens 0 .. 3 with equal scores: the mean of their own halves, whatever their overlap halves.
  Floats rows(4 * 8, 1e30f);
  for (int token = 0; token < 4; ++token) {
    for (int d = 0; d < 2; ++d) {
      rows[8 * token + 2 + d] = static_cast<float>(token + d);
      rows[8 * token + 6 + d] = -50.0f;
    }
  }
  const Floats got = pooled(kOverlap, rows, Floats(4 * 4, 3.0f), 0);
  CHECK_EQ(got[0], 1.5f);
  CHECK_EQ(got[1], 2.5f);
  // Scores as low as the missing ones' weigh as much: 8 candidates, 4 of value 0.
  for (int token = 0; token < 4; ++token) {
    for (int d = 0; d < 2; ++d) rows[8 * token + 6 + d] = -std::numeric_limits<float>::max();
  }
  CHECK_EQ(pooled(kOverlap, rows, Floats(4 * 4), 0)[0], 0.75f);
}

TEST_CASE(blocks_of_128_pool_by_their_scores) {
  // e^(ln 3) = 3 at token 77, 1 elsewhere; value 1 at 77 and 0 elsewhere: 3 / 130.
  Floats rows(256 * 2);
  rows[2 * (128 + 77)] = 1.0f;
  rows[2 * (128 + 77) + 1] = std::log(3.0f);
  CHECK_NEAR(pooled(kBlock, rows, Floats(128), 1)[0], 3.0 / 130.0, 1e-8);
  Floats ape(128);
  ape[77] = 300.0f;
  CHECK_EQ(pooled(kBlock, rows, ape, 1)[0], 1.0f);
  // No score overflows: the largest is subtracted.
  for (int token = 0; token < 256; ++token) rows[2 * token + 1] = token % 2 == 0 ? 3e38f : -3e38f;
  for (int token = 0; token < 256; ++token) rows[2 * token] = token % 2 == 0 ? 2.0f : 8.0f;
  CHECK_EQ(pooled(kBlock, rows, Floats(128), 1)[0], 2.0f);
}

TEST_CASE(pooling_is_the_declared_order) {
  // Partials of 8 by their own maximum, then ascending: bit for bit.
  Random random(5);
  for (int seed = 0; seed < 50; ++seed) {
    const Floats rows = random.f32(128 * 2, 4.0), ape = random.f32(128);
    float maxima[16], sums[16], weighted[16], largest = -INFINITY;
    for (int p = 0; p < 16; ++p) {
      maxima[p] = -INFINITY, sums[p] = 0.0f, weighted[p] = 0.0f;
      for (int i = 8 * p; i < 8 * p + 8; ++i)
        maxima[p] = std::max(maxima[p], rows[2 * i + 1] + ape[i]);
      for (int i = 8 * p; i < 8 * p + 8; ++i) {
        const float e = std::exp(rows[2 * i + 1] + ape[i] - maxima[p]);
        sums[p] += e;
        weighted[p] += e * rows[2 * i];
      }
      largest = std::max(largest, maxima[p]);
    }
    float sum = 0.0f, total = 0.0f;
    for (int p = 0; p < 16; ++p) {
      sum += sums[p] * std::exp(maxima[p] - largest);
      total += weighted[p] * std::exp(maxima[p] - largest);
    }
    CHECK_EQ(pooled(kBlock, rows, ape, 0)[0], total / sum);
  }
}

TEST_CASE(channels_do_not_depend_on_the_range_asked_for) {
  Random random(6);
  for (const stages::PoolLayout& layout : {kCore, kLong}) {
    const Floats rows = random.f32(2 * layout.ratio * layout.width());
    const Floats ape = random.f32(layout.ratio * layout.half_width());
    const Floats whole = pooled(layout, rows, ape, 1);
    Floats part(layout.dim, 99.0f);
    Pool::Scratch scratch;
    Pool::run(
        part.data(), layout, ape.data(), 1,
        [&](std::int64_t position) { return rows.data() + position * layout.width(); }, 100, 163,
        scratch);
    for (int d = 0; d < layout.dim; ++d) CHECK_EQ(part[d], d >= 100 && d < 163 ? whole[d] : 99.0f);
  }
}

TEST_CASE(rows_of_the_step_are_preferred_to_the_ring) {
  const Floats step = {5.0f, 5.5f, 6.0f, 6.5f};
  float ring[2] = {};
  const auto ring_row = [&](std::int64_t position) -> const float* {
    ring[0] = static_cast<float>(position);
    return ring;
  };
  const stages::PoolRows<decltype(ring_row)> rows{step.data(), 5, 2, ring_row};
  CHECK_EQ(rows(4)[0], 4.0f);
  CHECK_EQ(rows(5)[1], 5.5f);
  CHECK_EQ(rows(6)[0], 6.0f);
}

TEST_CASE(keys_are_normed_and_turned_without_a_rounding_between) {
  // All 2: each its own root mean square (epsilon aside), times 3.
  Floats c(512, 2.0f);
  Key::Scratch scratch;
  Key::finish(c.data(), 512, Codes(512, reference::to_bf16(3.0)).data(), 0.0f, turn(1), scratch);
  CHECK_EQ(c[0], 3.0f);
  CHECK_EQ(c[447], 3.0f);
  CHECK_NEAR(c[448], 3.0 * (std::cos(1.0) - std::sin(1.0)), 1e-6);
  CHECK_NEAR(c[449], 3.0 * (std::cos(1.0) + std::sin(1.0)), 1e-6);
  // The entry is that, rounded once.
  Floats entry(512, 2.0f);
  Key::entry(entry.data(), Codes(512, reference::to_bf16(3.0)).data(), 0.0f, turn(1), scratch);
  for (int i = 0; i < 512; ++i) CHECK_EQ(entry[i], stages::round_bf16(c[i]));
}

TEST_CASE(the_statistic_takes_unrounded_values_and_its_epsilon) {
  // 1 + 2^-9 rounds to 1 in bf16; a statistic of the rounded values would give 1 + 2^-9.
  Floats c(128, 1.0f + 0x1p-9f);
  Key::Scratch scratch;
  Key::finish(c.data(), 128, Codes(128, 0x3f80).data(), 0.0f, turn(0), scratch);
  CHECK_NEAR(c[0], 1.0, 1e-7);
  Floats small(128, 1e-3f);
  Key::finish(small.data(), 128, Codes(128, 0x3f80).data(), 1e-6f, turn(0), scratch);
  CHECK_NEAR(small[0], std::sqrt(0.5), 1e-6);
  Floats zero(128, 0.0f);
  Key::finish(zero.data(), 128, Codes(128, 0x3f80).data(), 1e-6f, turn(9), scratch);
  CHECK(zero == Floats(128, 0.0f));
}

TEST_CASE(far_positions_turn_by_the_fp32_table) {
  for (const std::int64_t position : {0, 65532, 65535, 1048448, 1048575}) {
    Floats c(512, 0.0f);
    c[0] = 1.0f, c[510] = 3.0f;
    Key::Scratch scratch;
    const float scale = std::sqrt(512.0f / 10.0f);
    Key::finish(c.data(), 512, Codes(512, 0x3f80).data(), 0.0f, turn(position), scratch);
    const double angle = 5.68052904e-07 * static_cast<double>(position);
    CHECK_NEAR(c[0], scale, 1e-5);
    CHECK_NEAR(c[510], 3.0 * scale * std::cos(angle), 1e-5);
    CHECK_NEAR(c[511], 3.0 * scale * std::sin(angle), 1e-5);
  }
}

TEST_CASE(entries_agree_with_the_reference) {
  struct Case {
    int ratio, dim, length, hidden;
  };
  for (const Case& one : {Case{4, 512, 23, 32}, Case{128, 512, 300, 16}, Case{4, 128, 41, 48}}) {
    Random random(one.length);
    const stages::PoolLayout layout{one.ratio, one.dim};
    const int half = layout.half_width(), width = layout.width(), hidden = one.hidden;
    const Codes x = random.bf16(one.length * hidden), wkv = random.bf16(half * hidden, 0.2),
                wgate = random.bf16(half * hidden, 0.3), gain = random.bf16(one.dim);
    const Floats ape = random.f32(one.ratio * half);
    Floats input(x.size()), weight_row(hidden), rows(one.length * width);
    stages::expand_bf16(input.data(), x.data(), static_cast<int>(x.size()));
    for (const bool gate : {false, true}) {
      const stages::Bf16Weights weights{gate ? wgate.data() : wkv.data(), hidden};
      stages::linear(input.data(), hidden, one.length, hidden, weights, 0, half, weight_row.data(),
                     [&](int t, int n, float v) { rows[t * width + (gate ? half : 0) + n] = v; });
    }
    const std::vector<double> want =
        reference::pooled_keys(x.data(), wkv.data(), wgate.data(), ape.data(), gain.data(),
                               one.length, hidden, one.ratio, one.dim, 1e-6);
    std::vector<double> got;
    for (int n = 0; n < one.length / one.ratio; ++n) {
      Floats c = pooled(layout, rows, ape, n);
      Key::Scratch scratch;
      Key::finish(c.data(), one.dim, gain.data(), 1e-6f, turn(n * one.ratio), scratch);
      got.insert(got.end(), c.begin(), c.end());
    }
    REQUIRE(got.size() == want.size());
    CHECK_NEAR(lowlat::testing::rel_l2(got, want), 0.0, 1e-6);
  }
}
