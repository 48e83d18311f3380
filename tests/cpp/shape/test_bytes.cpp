// The byte formulas against the published worked numbers (megabytes, two decimals).
#include "check.hpp"
#include "shape/bytes.hpp"

namespace {

using namespace lowlat::shape;
using Tp1 = Dsv41Flash<1>;
using Tp4 = Dsv41Flash<4>;

constexpr double kMb = 1e6;

TEST_CASE(expected_experts_follow_the_table) {
  CHECK_NEAR(expected_experts(384, 6, 1), 6.00, 0.005);
  CHECK_NEAR(expected_experts(384, 6, 6), 34.62, 0.005);
  CHECK_NEAR(expected_experts(384, 6, 48), 203.68, 0.005);
  CHECK_NEAR(expected_experts(128, 3, 40), 78.43, 0.005);
}

TEST_CASE(pieces_follow_the_table) {
  CHECK_NEAR(attention_weight_bytes<Tp4>() / kMb, 9.19 + 10.50, 0.011);
  CHECK_NEAR(attention_weight_bytes<Tp1>() / kMb, 9.19 + 41.98, 0.011);
  CHECK_NEAR(output_weight_bytes<Tp4>() / kMb, 16.78 + 10.50, 0.011);
  CHECK_NEAR(expert_weight_bytes<Tp1>() / kMb, 18.80, 0.005);
  CHECK_NEAR(expert_weight_bytes<Tp4>() / kMb, 4.70, 0.005);
  CHECK_NEAR(mix_weight_bytes<Tp4>() / kMb, 3.95, 0.005);
}

TEST_CASE(whole_layers_follow_the_table) {
  CHECK_NEAR(moe_weight_bytes<Tp4>(6) / kMb, 175.52, 0.01);
  CHECK_NEAR(moe_weight_bytes<Tp4>(48) / kMb, 970.13, 0.01);
  CHECK_NEAR(plain_layer_bytes<Tp4>(1) / kMb, 91.9, 0.05);
  CHECK_NEAR(plain_layer_bytes<Tp4>(6) / kMb, 226.4, 0.05);
  CHECK_NEAR(plain_layer_bytes<Tp4>(12) / kMb, 374.5, 0.05);
  CHECK_NEAR(plain_layer_bytes<Tp4>(24) / kMb, 631.8, 0.05);
  CHECK_NEAR(plain_layer_bytes<Tp4>(48) / kMb, 1021.0, 0.05);
}

TEST_CASE(stored_keys_follow_the_row_format) {
  CHECK_EQ(static_cast<long>(row_kv_bytes<Tp4>()), (128 + 512) * 584);
}

}  // namespace
