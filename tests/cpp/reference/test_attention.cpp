// What sparse attention means, by hand: keys that are 1 or 4 everywhere.
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "reference/attention.hpp"
#include "reference/format.hpp"

namespace {

namespace reference = lowlat::reference;

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Row 0 is 1 everywhere, row 1 is 4.
std::vector<std::uint8_t> two_rows() {
  std::vector<std::uint8_t> rows(2 * 584);
  for (int d = 0; d < 448; ++d) {
    rows[d] = 0x38;        // 1.0 in e4m3
    rows[584 + d] = 0x38;  // with scale 2^2
  }
  for (int d = 0; d < 64; ++d) {
    rows[449 + 2 * d] = 0x3f, rows[448 + 2 * d] = 0x80;              // bf16 1.0
    rows[584 + 449 + 2 * d] = 0x40, rows[584 + 448 + 2 * d] = 0x80;  // bf16 4.0
  }
  for (int group = 0; group < 7; ++group) rows[576 + group] = 127, rows[584 + 576 + group] = 129;
  return rows;
}

double attend(double query, const std::vector<std::int32_t>& window,
              const std::vector<std::int32_t>& extra, float sink) {
  const auto rows = two_rows();
  const std::vector<std::uint16_t> q(512, reference::to_bf16(query));
  std::vector<std::uint16_t> o(512, 0xa5a5u);
  reference::sparse_attention(
      o.data(), q.data(), 1, 1,
      {rows.data(), window.data(), static_cast<std::int64_t>(window.size())},
      {rows.data(), extra.data(), static_cast<std::int64_t>(extra.size())}, &sink);
  for (const std::uint16_t code : o) CHECK_EQ(code, o[0]);
  return reference::from_bf16(o[0]);
}

}  // namespace

TEST_CASE(weighs_keys_of_both_sets) {
  CHECK_EQ(attend(0.0, {1}, {}, kNone), 4.0);
  CHECK_EQ(attend(0.0, {0}, {1}, kNone), 2.5);
  CHECK_EQ(attend(0.0, {0, -1}, {-1, 0, 1}, kNone), 2.0);
  // q . k = 512 * 2^-6 * {1, 4} = 8 and 32, over sqrt(512): weights 1 and e^(24 / sqrt(512)).
  const double weight = std::exp(24.0 / std::sqrt(512.0));
  CHECK_EQ(attend(0x1p-6, {0, 1}, {}, kNone),
           reference::round_bf16((1.0 + 4.0 * weight) / (1.0 + weight)));
}

TEST_CASE(the_sink_is_in_the_denominator_only) {
  CHECK_EQ(attend(0.0, {1}, {}, 0.0f), 2.0);
  CHECK_EQ(attend(0.0, {0, 1}, {}, std::log(3.0f)), 1.0);
  CHECK_EQ(attend(0.0, {1}, {}, 1e6f), 0.0);
}

TEST_CASE(no_key_gives_zero) {
  CHECK_EQ(attend(1.0, {}, {}, kNone), 0.0);
  CHECK_EQ(attend(1.0, {-1}, {-1, -1}, 2.0f), 0.0);
}
