// The byte formulas against the published worked numbers (megabytes, two decimals).
#include "check.hpp"
#include "shape/bytes.hpp"

namespace {

using namespace lowlat::shape;
using Tp1 = Dsv41Flash<1>;
using Tp4 = Dsv41Flash<4>;
using V4Tp1 = Dsv4Flash<1>;
using V4Tp2 = Dsv4Flash<2>;
using V4Tp4 = Dsv4Flash<4>;
using V4Tp8 = Dsv4Flash<8>;

constexpr double kMb = 1e6;

TEST_CASE(expected_experts_follow_the_table) {
  CHECK_NEAR(expected_experts(384, 6, 1), 6.00, 0.005);
  CHECK_NEAR(expected_experts(384, 6, 6), 34.62, 0.005);
  CHECK_NEAR(expected_experts(384, 6, 48), 203.68, 0.005);
  CHECK_NEAR(expected_experts(128, 3, 40), 78.43, 0.005);
  CHECK_NEAR(expected_experts(256, 6, 5), 28.63, 0.005);
  CHECK_NEAR(expected_experts(256, 6, 48), 173.99, 0.005);
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

// What docs/amd.md has of its two kernels; together they are the layer and the keys it gathers.
TEST_CASE(two_kernels_share_the_layer) {
  CHECK_NEAR(front_kernel_bytes<Tp4>() / kMb, 21.7, 0.05);
  CHECK_NEAR(back_kernel_bytes<Tp4>(1) / kMb, 70.6, 0.05);
  CHECK_NEAR(back_kernel_bytes<Tp4>(6) / kMb, 207.0, 0.05);
  CHECK_NEAR(row_kv_bytes<Tp4>() / kMb, 0.37, 0.005);
  for (const int rows : {1, 6, 48}) {
    CHECK_NEAR(front_kernel_bytes<Tp4>() + back_kernel_bytes<Tp4>(rows),
               plain_layer_bytes<Tp4>(rows) + rows * row_kv_bytes<Tp4>(), 1.0);
  }
}

// The table counts four bytes a scale, the checkpoint has one: 0.02% of a weight.
TEST_CASE(pieces_of_v4_follow_the_table) {
  CHECK_NEAR(attention_weight_bytes<V4Tp1>() / kMb, 6.30 + 33.56, 0.02);
  CHECK_NEAR(attention_weight_bytes<V4Tp4>() / kMb, 6.30 + 8.39, 0.011);
  CHECK_NEAR(output_weight_bytes<V4Tp4>() / kMb, 16.78, 0.005);
  CHECK_NEAR(output_weight_bytes<V4Tp4>(false) / kMb, 25.17, 0.005);
  CHECK_NEAR(expert_weight_bytes<V4Tp1>() / kMb, 13.37, 0.005);
  CHECK_NEAR(expert_weight_bytes<V4Tp4>() / kMb, 3.34, 0.005);
  CHECK_NEAR(expert_weight_bytes<V4Tp8>() / kMb, 1.67, 0.005);
  CHECK_NEAR(mix_weight_bytes<V4Tp4>() / kMb, 3.16, 0.005);
  CHECK_NEAR(compressor_weight_bytes<V4Tp4>(4, 512) / kMb, 16.80, 0.006);
  CHECK_NEAR(compressor_weight_bytes<V4Tp4>(4, 128) / kMb, 4.20, 0.006);
  CHECK_NEAR(compressor_weight_bytes<V4Tp4>(128, 512) / kMb, 8.65, 0.005);
  CHECK_NEAR(indexer_weight_bytes<V4Tp4>() / kMb, 13.11, 0.005);
  CHECK_NEAR(head_weight_bytes<V4Tp2>() / kMb, 529.5, 0.05);
}

TEST_CASE(whole_layers_of_v4_follow_the_table) {
  CHECK_NEAR(moe_weight_bytes<V4Tp4>(1) / kMb, 28.45, 0.01);
  CHECK_NEAR(moe_weight_bytes<V4Tp4>(6) / kMb, 121.88, 0.01);
  CHECK_NEAR(moe_weight_bytes<V4Tp4>(48) / kMb, 589.94, 0.01);
  const int rows[5] = {1, 6, 12, 24, 48};
  const double window[5] = {63.1, 156.5, 255.0, 414.4, 624.6};
  const double overlap[5] = {93.0, 186.4, 284.9, 444.3, 654.5};
  const double block[5] = {71.7, 165.2, 263.6, 423.0, 633.2};
  for (int i = 0; i < 5; ++i) {
    CHECK_NEAR(plain_layer_bytes<V4Tp4>(rows[i]) / kMb, window[i], 0.1);
    CHECK_NEAR(overlap_layer_bytes<V4Tp4>(rows[i]) / kMb, overlap[i], 0.1);
    CHECK_NEAR(block_layer_bytes<V4Tp4>(rows[i]) / kMb, block[i], 0.1);
  }
}

TEST_CASE(the_whole_of_v4_follows_the_table) {
  CHECK_NEAR(pooled_model_bytes<V4Tp2>(1) / kMb, 6258, 2);
  CHECK_NEAR(pooled_model_bytes<V4Tp4>(1) / kMb, 3778, 2);
  CHECK_NEAR(pooled_model_bytes<V4Tp4>(6) / kMb, 7796, 2);
  CHECK_NEAR(pooled_model_bytes<V4Tp8>(48) / kMb, 14610, 2);
}

TEST_CASE(stored_keys_follow_the_row_format) {
  CHECK_EQ(static_cast<long>(row_kv_bytes<Tp4>()), (128 + 512) * 584);
  // Of all layers, for 8192 and 131072 tokens: index keys and entries of ratio 128.
  CHECK_NEAR(V4Tp4::kNumOverlapLayers * index_kv_bytes(8192) / kMb, 5.7, 0.05);
  CHECK_NEAR(V4Tp4::kNumOverlapLayers * index_kv_bytes(131072) / kMb, 90.8, 0.05);
  CHECK_NEAR(V4Tp4::kNumBlockLayers * block_kv_bytes(8192) / kMb, 0.7, 0.05);
  CHECK_NEAR(V4Tp4::kNumBlockLayers * block_kv_bytes(131072) / kMb, 12.0, 0.05);
}

}  // namespace
