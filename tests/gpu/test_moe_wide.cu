// The experts' kernel of many rows at true shapes: against reference/ in both layouts of the
// weights, of targets and draft stages, where rows share their experts and where they do not; and
// left at its deadline.
#include "bench/moe_case.cuh"

#include "gpu.cuh"

using lowlat::bench::check_case;
using lowlat::bench::check_fault;
using lowlat::bench::dims;
using lowlat::bench::Layer;
using lowlat::fused::MoeLayout;
using lowlat::fused::MoeShape;
using lowlat::shape::Dsv41Flash;
using lowlat::shape::Dsv41FlashDraft;
using lowlat::shape::Dsv4Flash;
using lowlat::testing::need_device;

namespace {

constexpr int kReplays = 20;

bool check(const Layer& layer, std::initializer_list<int> rows,
           std::initializer_list<const char*> scenarios) {
  bool good = true;
  for (const int num : rows) {
    for (const char* scenario : scenarios) {
      good = check_case(layer, num, scenario, kReplays) && good;
    }
  }
  return good;
}

}  // namespace

// Three pairs of an expert and forty-eight (twelve entries), and one alone.
TEST_CASE(v41_many_rows_equal_reference_however_they_are_routed) {
  need_device();
  const Layer layer(dims<Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  CHECK(check(layer, {12, 24, 48}, {"gate", "same", "apart"}));
}

TEST_CASE(v4_many_rows_equal_reference_by_score_and_by_table) {
  need_device();
  const Layer layer(dims<Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4"));
  CHECK(check(layer, {12, 24, 48}, {"gate", "table"}));
}

TEST_CASE(marlin_tiles_equal_reference_from_one_row_on) {
  need_device();
  const Layer v41(dims<Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"), MoeLayout::marlin);
  CHECK(check(v41, {1, 6, 8, 12, 24, 48}, {"gate"}));
  CHECK(check(v41, {6}, {"same", "apart"}));
  const Layer v4(dims<Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4"), MoeLayout::marlin);
  CHECK(check(v4, {1, 6, 48}, {"gate"}));
}

TEST_CASE(a_draft_stage_has_fewer_experts_in_either_layout) {
  need_device();
  for (const MoeLayout layout : {MoeLayout::checkpoint, MoeLayout::marlin}) {
    const Layer layer(dims<Dsv41FlashDraft<4>>(MoeShape::v41_draft_tp4, "draft tp4"), layout);
    CHECK(check(layer, {5, 40}, {"gate", "same"}));
  }
}

TEST_CASE(two_ranks_shares_equal_reference) {
  need_device();
  const Layer v41(dims<Dsv41Flash<2>>(MoeShape::v41_tp2, "v41 tp2"));
  CHECK(check(v41, {6, 12, 48}, {"gate"}));
  const Layer draft(dims<Dsv41FlashDraft<2>>(MoeShape::v41_draft_tp2, "draft tp2"));
  CHECK(check(draft, {5, 40}, {"gate"}));
}

TEST_CASE(brief_twelve_rows_and_one_of_marlin_tiles) {
  need_device();
  for (const MoeLayout layout : {MoeLayout::checkpoint, MoeLayout::marlin}) {
    Layer layer(dims<Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"), layout);
    layer.budget_ns = lowlat::testing::kBriefBudgetNs;
    CHECK(check_case(layer, layout == MoeLayout::marlin ? 1 : 12, "gate", 1));
  }
}

// Planted: one block tags its scores with another epoch.
TEST_CASE(a_block_of_many_rows_that_is_never_heard_ends_the_launch_at_its_deadline) {
  need_device();
  const Layer layer(dims<Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  CHECK(check_fault(layer, 12));
}
