// The numbers that operations take from the model.
#include "host/op/models.hpp"

#include "check.hpp"

TEST_CASE(compressed_layers_rotate_by_the_published_frequencies) {
  const auto table = lowlat::host::compressed_rope_table();
  CHECK_EQ(table.values[0], 1.0f);
  CHECK_NEAR(table.values[1], 0.687656022, 1e-7);
  CHECK_NEAR(table.values[15], 0.00363553858, 1e-9);
  CHECK_NEAR(table.values[16], 0.002265625, 1e-9);
  CHECK_NEAR(table.values[24], 1.953125e-05, 1e-11);
  CHECK_NEAR(table.values[31], 5.68052904e-07, 1e-13);
}

TEST_CASE(models_differ_as_they_are_published) {
  using lowlat::host::model_rules;
  CHECK_EQ(model_rules("v4").norm_eps, 1e-6);
  CHECK_EQ(model_rules("v41").norm_eps, 1e-20);
  CHECK_EQ(model_rules("v4").scale_block, 128);
  CHECK_EQ(model_rules("v41").scale_block, 32);
  CHECK_EQ(model_rules("v4").draft_experts, 6);
  CHECK_EQ(model_rules("v41").draft_experts, 3);
}
