// The mixture-of-experts region at true shapes: against reference/, published, replayed from a
// graph bit for bit, and left at its deadline.
#include "bench/moe_case.cuh"

#include "gpu.cuh"

using lowlat::bench::check_case;
using lowlat::bench::check_fault;
using lowlat::bench::dims;
using lowlat::bench::Layer;
using lowlat::fused::MoeLayout;
using lowlat::fused::MoeShape;
using lowlat::testing::need_device;

namespace {

constexpr int kReplays = 20;

}  // namespace

TEST_CASE(v41_region_equals_reference_for_few_and_many_rows) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  for (const int rows : {1, 6, 8, 12, 48}) CHECK(check_case(layer, rows, "gate", kReplays));
}

TEST_CASE(v41_rows_may_share_their_experts_or_have_each_their_own) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  for (const int rows : {6, 48}) {
    CHECK(check_case(layer, rows, "same", kReplays));
    CHECK(check_case(layer, rows, "apart", kReplays));
  }
}

TEST_CASE(v4_region_routes_by_score_and_by_table) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4"));
  for (const int rows : {6, 48}) {
    CHECK(check_case(layer, rows, "gate", kReplays));
    CHECK(check_case(layer, rows, "table", kReplays));
  }
}

TEST_CASE(an_expert_that_a_row_names_twice_counts_twice) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  for (const int rows : {1, 6, 8}) CHECK(check_case(layer, rows, "twice", kReplays));
}

TEST_CASE(marlin_tiles_equal_reference_for_few_rows) {
  need_device();
  const Layer v41(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"),
                  MoeLayout::marlin);
  for (const int rows : {1, 6, 8}) CHECK(check_case(v41, rows, "gate", kReplays));
  for (const char* how : {"same", "apart", "twice"}) CHECK(check_case(v41, 6, how, kReplays));
  CHECK(check_fault(v41, 6));
  const Layer v4(dims<lowlat::shape::Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4"), MoeLayout::marlin);
  for (const int rows : {1, 6, 8}) CHECK(check_case(v4, rows, "gate", kReplays));
  CHECK(check_case(v4, 6, "table", kReplays));
}

TEST_CASE(marlin_tiles_of_two_ranks_equal_reference_for_few_rows) {
  need_device();
  const Layer v41(dims<lowlat::shape::Dsv41Flash<2>>(MoeShape::v41_tp2, "v41 tp2"),
                  MoeLayout::marlin);
  for (const int rows : {1, 6}) CHECK(check_case(v41, rows, "gate", kReplays));
  const Layer v4(dims<lowlat::shape::Dsv4Flash<2>>(MoeShape::v4_tp2, "v4 tp2"), MoeLayout::marlin);
  CHECK(check_case(v4, 6, "gate", kReplays));
}

TEST_CASE(brief_one_row_and_six) {
  need_device();
  for (const MoeLayout layout : {MoeLayout::checkpoint, MoeLayout::marlin}) {
    Layer layer(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"), layout);
    layer.budget_ns = lowlat::testing::kBriefBudgetNs;
    for (const int rows : {1, 6}) CHECK(check_case(layer, rows, "gate", 1));
  }
}

TEST_CASE(v41_region_of_two_ranks_at_few_rows) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv41Flash<2>>(MoeShape::v41_tp2, "v41 tp2"));
  CHECK(check_case(layer, 6, "gate", kReplays));
}

// Planted: one block tags its scores with another epoch.
TEST_CASE(a_block_that_is_never_heard_ends_the_launch_at_its_deadline) {
  need_device();
  const Layer layer(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"));
  CHECK(check_fault(layer, 6));
}
