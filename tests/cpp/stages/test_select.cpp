// Selections: the k best as a set, the lower position among equals, candidate blocks.
#include <limits>
#include <string>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "reference/select.hpp"
#include "stages/select.hpp"

namespace {

using lowlat::testing::Random;
namespace reference = lowlat::reference;
namespace stages = lowlat::scalar::stages;
using Ids = std::vector<std::int32_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string words(const Ids& ids) {
  std::string text;
  for (const std::int32_t id : ids) text += std::to_string(id) + " ";
  return text;
}

Ids top(const std::vector<float>& scores, int k) {
  Ids ids(k, 99);
  stages::SelectScratch scratch;
  stages::select_top(ids.data(), scores.data(), static_cast<int>(scores.size()), k,
                     stages::AllPositions{}, scratch);
  return ids;
}

Ids blocks(const std::vector<float>& scores, int count, int block_size, int k) {
  Ids ids(k, 99);
  std::vector<float> memory(count / block_size + 1);
  stages::SelectScratch scratch;
  stages::candidate_blocks(ids.data(), scores.data(), count, block_size, k, memory.data(), scratch);
  return ids;
}

void check_ids(const Ids& got, const Ids& want) { CHECK_EQ(words(got), words(want)); }

Ids padded(Ids ids, int k) {
  ids.resize(k, -1);
  return ids;
}

}  // namespace

TEST_CASE(takes_the_best_in_ascending_order) {
  check_ids(top({1.0f, 5.0f, -2.0f, 4.0f, 3.0f}, 3), {1, 3, 4});
  check_ids(top({-5.0f, -1.0f, -3.0f}, 1), {1});
  check_ids(top({0x1p-149f, -0x1p-149f, 0.0f}, 1), {0});
}

TEST_CASE(takes_all_when_there_are_no_more) {
  check_ids(top({2.0f, 1.0f}, 2), {0, 1});
  check_ids(top({2.0f, 1.0f}, 4), {0, 1, -1, -1});
  check_ids(top({}, 2), {-1, -1});
}

TEST_CASE(equal_scores_go_to_the_lower_position) {
  check_ids(top(std::vector<float>(100, 0.5f), 3), {0, 1, 2});
  check_ids(top({1.0f, 2.0f, 1.0f, 3.0f, 1.0f}, 3), {0, 1, 3});
  check_ids(top({-0.0f, 0.0f, -0.0f, 1.0f}, 2), {0, 3});
}

TEST_CASE(infinities_are_ends_and_nan_is_below_them) {
  check_ids(top({std::nanf(""), -kInfinity, kInfinity, 0.0f}, 3), {1, 2, 3});
  check_ids(top({std::nanf(""), -std::nanf(""), -kInfinity}, 2), {0, 2});
}

TEST_CASE(agrees_with_sorting_at_random_scores) {
  Random random(1);
  for (int seed = 0; seed < 400; ++seed) {
    const auto n = static_cast<std::size_t>(random.integer(1, 700));
    const auto k = static_cast<int>(random.integer(1, 600));
    std::vector<float> scores = random.f32(n, random.integer(0, 1) == 0 ? 1.0 : 1e-40);
    if (seed % 2 == 0) {  // few distinct values: most thresholds are ties
      for (float& s : scores) s = static_cast<float>(random.integer(-2, 2));
    }
    check_ids(top(scores, k), padded(reference::select_top({scores.begin(), scores.end()}, k), k));
  }
}

TEST_CASE(the_newest_block_is_taken_whatever_its_score) {
  // Blocks of 2: best scores 9, 1, 5, and -7 for the newest, which holds one position.
  const std::vector<float> scores = {9.0f, 0.0f, 1.0f, 1.0f, 2.0f, 5.0f, -7.0f, 100.0f};
  check_ids(blocks(scores, 7, 2, 1), {3});
  check_ids(blocks(scores, 7, 2, 2), {0, 3});
  check_ids(blocks(scores, 7, 2, 3), {0, 2, 3});
  check_ids(blocks(scores, 7, 2, 5), {0, 1, 2, 3, -1});
  check_ids(blocks(scores, 0, 2, 2), {-1, -1});
  // What lies past count is no score of this row.
  check_ids(blocks(scores, 6, 2, 2), {0, 2});
}

TEST_CASE(equal_blocks_go_to_the_lower) {
  check_ids(blocks(std::vector<float>(64, -1.0f), 64, 8, 3), {0, 1, 7});
}

TEST_CASE(blocks_agree_with_sorting_at_random_scores) {
  Random random(2);
  for (int seed = 0; seed < 300; ++seed) {
    const auto count = static_cast<int>(random.integer(1, 300));
    const auto block_size = static_cast<int>(random.integer(1, 9));
    const auto k = static_cast<int>(random.integer(1, 40));
    std::vector<float> scores = random.f32(count);
    if (seed % 2 == 0) {
      for (float& s : scores) s = static_cast<float>(random.integer(-1, 1));
    }
    check_ids(
        blocks(scores, count, block_size, k),
        padded(reference::candidate_blocks({scores.begin(), scores.end()}, block_size, k), k));
  }
}

TEST_CASE(candidates_are_the_positions_of_the_blocks) {
  const Ids published = {0, 3, 5, -1, -1};
  const stages::BlockPositions positions{published.data(), 5, 4, 22};
  REQUIRE(positions.size() == 10);  // block 5 holds 20 and 21 only
  Ids seen;
  for (int i = 0; i < positions.size(); ++i) seen.push_back(positions(i));
  check_ids(seen, {0, 1, 2, 3, 12, 13, 14, 15, 20, 21});
  const stages::BlockPositions none{published.data() + 3, 2, 4, 22};
  CHECK_EQ(none.size(), 0);
}

TEST_CASE(selects_among_candidates_by_their_own_positions) {
  const Ids published = {0, 3, 5, -1, -1};
  const stages::BlockPositions positions{published.data(), 5, 4, 22};
  const std::vector<float> scores = {1.0f, 7.0f, 1.0f, 1.0f, 1.0f, 1.0f, 9.0f, 1.0f, 1.0f, 8.0f};
  Ids ids(4, 99);
  stages::SelectScratch scratch;
  stages::select_top(ids.data(), scores.data(), positions.size(), 4, positions, scratch);
  check_ids(ids, {0, 1, 14, 21});
}
