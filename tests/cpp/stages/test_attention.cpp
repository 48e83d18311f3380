// Sparse attention: values by hand, invariance of a head's result, and the reference at random
// keys.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/attention.hpp"
#include "stages/attention.hpp"

namespace {

using lowlat::testing::Random;
using lowlat::testing::rel_l2;
using lowlat::testing::values_of;
namespace plat = lowlat::scalar::plat;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Attention = stages::SparseAttention<plat::Block<256>>;
using Flat = stages::KvFlat<const std::uint8_t>;
using Codes = std::vector<std::uint16_t>;
using Ids = std::vector<std::int32_t>;

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kDim = 512;
// The bound of the operation, declared in host/op/ops_attention.cpp.
constexpr double kBound = 5e-4;

template <class Rows>
Codes attend(const Codes& q, const Rows& first, const Ids& first_ids, const Rows& second,
             const Ids& second_ids, const std::vector<float>& sink) {
  const auto heads = static_cast<int>(sink.size());
  std::vector<float> memory(Attention::memory_floats(heads), std::nanf(""));
  Codes out(q.size(), 0xa5a5u);
  Attention::run(
      out.data(), q.data(), heads,
      stages::KeySet<Rows>{first_ids.data(), static_cast<int>(first_ids.size()), first},
      stages::KeySet<Rows>{second_ids.data(), static_cast<int>(second_ids.size()), second},
      sink.data(), memory.data());
  return out;
}
Codes attend(const Codes& q, const std::vector<std::uint8_t>& rows, const Ids& ids,
             const std::vector<float>& sink) {
  return attend(q, Flat{rows.data()}, ids, Flat{rows.data()}, {}, sink);
}

// Rows whose 512 values are all the given ones: powers of two and their halves fit either part.
std::vector<std::uint8_t> constant_rows(const std::vector<double>& values) {
  std::vector<std::uint8_t> rows(values.size() * 584);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint8_t* row = &rows[i * 584];
    const std::uint16_t code = lowlat::reference::to_bf16(values[i]);
    for (int d = 0; d < 448; ++d) row[d] = lowlat::reference::to_e4m3(values[i]);
    for (int d = 0; d < 64; ++d) {
      row[448 + 2 * d] = static_cast<std::uint8_t>(code & 255u);
      row[449 + 2 * d] = static_cast<std::uint8_t>(code >> 8);
    }
    for (int group = 0; group < 7; ++group) row[576 + group] = 127;
  }
  return rows;
}

Codes constant_query(double value, int heads = 1) {
  return Codes(static_cast<std::size_t>(heads) * kDim, lowlat::reference::to_bf16(value));
}

void check_constant(const Codes& o, double value, double bound = 0.0) {
  for (const std::uint16_t code : o) CHECK_NEAR(lowlat::reference::from_bf16(code), value, bound);
}

}  // namespace

TEST_CASE(one_key_without_sink_is_the_key) {
  check_constant(attend(constant_query(0.75), constant_rows({1.5}), {0}, {kNone}), 1.5);
}

TEST_CASE(a_sink_takes_its_share_of_the_denominator) {
  // Score 0 and sink 0: half of the key. Sink ln 3: a quarter.
  check_constant(attend(constant_query(0.0), constant_rows({2.0}), {0}, {0.0f}), 1.0);
  check_constant(attend(constant_query(0.0), constant_rows({2.0}), {0}, {std::log(3.0f)}), 0.5);
  // The sink is no dot product, so softmax_scale is not in it.
  check_constant(attend(constant_query(0.0), constant_rows({2.0}), {0}, {-1e4f}), 2.0);
  check_constant(attend(constant_query(0.0), constant_rows({2.0}), {0}, {1e4f}), 0.0);
}

TEST_CASE(scores_are_scaled_by_the_root_of_512) {
  // q . k = 512 * 0.0625 * 1 = 32 and 0: weights e^(32 / sqrt(512)) = e^sqrt(2) = 4.1133 and 1.
  const double weight = std::exp(std::sqrt(2.0));
  check_constant(attend(constant_query(0.0625), constant_rows({1.0, 0.0}), {0, 1}, {kNone}),
                 weight / (weight + 1.0), 1.0 / 512);
}

TEST_CASE(equal_scores_average_and_a_repeated_key_counts_twice) {
  const auto rows = constant_rows({1.0, 4.0});
  check_constant(attend(constant_query(0.0), rows, {0, 1}, {kNone}), 2.5);
  check_constant(attend(constant_query(0.0), rows, {0, 0, 1}, {kNone}), 2.0);
}

TEST_CASE(a_row_without_keys_gives_zero) {
  const auto rows = constant_rows({1.0});
  for (const float sink : {kNone, 0.0f, 5.0f}) {
    check_constant(attend(constant_query(1.0), rows, {}, {sink}), 0.0);
    check_constant(attend(constant_query(1.0), rows, {-1, -1, -1}, {sink}), 0.0);
  }
}

TEST_CASE(far_apart_scores_neither_overflow_nor_vanish) {
  // Scores of +-512 * 448 * 448 / sqrt(512): the largest takes all, wherever its tile is.
  const auto rows = constant_rows({-448.0, 448.0});
  for (const Ids& ids : {Ids{0, 1}, Ids{1, 0}, Ids{0, 0, 0, 0, 0, 0, 0, 0, 0, 1},
                         Ids{1, 0, 0, 0, 0, 0, 0, 0, 0, 0}}) {
    check_constant(attend(constant_query(448.0), rows, ids, {0.0f}), 448.0);
  }
  // All far below the sink.
  check_constant(attend(constant_query(448.0), rows, {0}, {0.0f}), 0.0);
}

TEST_CASE(a_head_depends_on_its_own_keys_only) {
  Random random(3);
  constexpr int kHeads = 5;
  const auto rows = random.kv_rows(60);
  const Codes q = random.bf16(kHeads * kDim);
  const std::vector<float> sink = random.f32(kHeads);
  Ids ids;
  for (int i = 0; i < 43; ++i) ids.push_back(static_cast<std::int32_t>(random.integer(0, 59)));
  const Codes whole = attend(q, rows, ids, sink);

  // Pads in other places, and the sequence cut into two sets anywhere.
  Ids spread;
  for (const std::int32_t id : ids) {
    for (std::int64_t pads = random.integer(0, 2); pads > 0; --pads) spread.push_back(-1);
    spread.push_back(id);
  }
  CHECK(attend(q, rows, spread, sink) == whole);
  for (const int cut : {0, 1, 8, 11, 42, 43}) {
    const Ids first(ids.begin(), ids.begin() + cut), second(ids.begin() + cut, ids.end());
    CHECK(attend(q, Flat{rows.data()}, first, Flat{rows.data()}, second, sink) == whole);
  }
  // One head alone.
  for (int head = 0; head < kHeads; ++head) {
    const Codes query(q.begin() + head * kDim, q.begin() + (head + 1) * kDim);
    const Codes part(whole.begin() + head * kDim, whole.begin() + (head + 1) * kDim);
    CHECK(attend(query, rows, ids, {sink[head]}) == part);
  }
  // In place.
  Codes both = q;
  std::vector<float> memory(Attention::memory_floats(kHeads));
  const stages::KeySet<Flat> keys{ids.data(), static_cast<int>(ids.size()), {rows.data()}};
  const stages::KeySet<Flat> none{nullptr, 0, {nullptr}};
  Attention::run(both.data(), both.data(), kHeads, keys, none, sink.data(), memory.data());
  CHECK(both == whole);
}

TEST_CASE(rows_in_pages_are_the_rows) {
  Random random(4);
  constexpr int kPageSlots = 16;
  const auto rows = random.kv_rows(3 * kPageSlots);
  const auto page_bytes = stages::kv_page_bytes(kPageSlots);
  std::vector<std::uint8_t> pages(3 * page_bytes, 0xff);
  const stages::KvPaged<std::uint8_t> paged{pages.data(), kPageSlots, page_bytes};
  Ids ids;
  for (int slot = 0; slot < 3 * kPageSlots; ++slot) {
    const auto row = paged.row(slot);
    std::copy_n(&rows[slot * 584], 576, row.data);
    std::copy_n(&rows[slot * 584 + 576], 8, row.scales);
    ids.push_back((slot * 7) % (3 * kPageSlots));
  }
  const Codes q = random.bf16(2 * kDim);
  const stages::KvPaged<const std::uint8_t> read{pages.data(), kPageSlots, page_bytes};
  CHECK(attend(q, read, ids, read, {}, {0.5f, kNone}) == attend(q, rows, ids, {0.5f, kNone}));
}

TEST_CASE(agrees_with_the_reference_at_random_keys) {
  Random random(5);
  double worst = 0.0;
  for (int seed = 0; seed < 40; ++seed) {
    const int heads = static_cast<int>(random.integer(1, 4));
    const auto num_rows = static_cast<std::int32_t>(random.integer(1, 700));
    const auto rows = random.kv_rows(num_rows);
    const Codes q = random.bf16(heads * kDim, seed % 4 == 0 ? 6.0 : 1.0);
    std::vector<float> sink = random.f32(heads);
    if (seed % 3 == 0) sink[0] = kNone;
    Ids window, extra;
    for (int i = 0; i < 128; ++i) {
      window.push_back(static_cast<std::int32_t>(random.integer(-1, num_rows - 1)));
    }
    for (int i = 0; i < 512 && seed % 5 != 0; ++i) {
      extra.push_back(static_cast<std::int32_t>(random.integer(-1, num_rows - 1)));
    }
    const Codes got = attend(q, Flat{rows.data()}, window, Flat{rows.data()}, extra, sink);
    Codes want(q.size());
    reference::sparse_attention(
        want.data(), q.data(), 1, heads, {rows.data(), window.data(), 128},
        {rows.data(), extra.data(), static_cast<std::int64_t>(extra.size())}, sink.data());
    worst = std::max(worst, rel_l2(values_of(got), values_of(want)));
  }
  std::printf("sparse_attention: worst rel_l2 %.2e\n", worst);
  CHECK(worst <= kBound);
}
