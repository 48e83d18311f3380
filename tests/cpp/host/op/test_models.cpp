// The numbers that operations take from the model.
#include "host/op/models.hpp"

#include <map>
#include <string>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "host/op/rope_tables.hpp"

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

TEST_CASE(rules_that_stages_take_are_the_models) {
  namespace stages = lowlat::scalar::stages;
  const auto &v4 = lowlat::host::model_rules("v4"), &v41 = lowlat::host::model_rules("v41");
  CHECK(v4.hc_statistic == stages::HcStatistic::unrounded);
  CHECK(v41.hc_statistic == stages::HcStatistic::rounded);
  CHECK(v4.gate_rule == stages::GateRule::v4);
  CHECK(v41.gate_rule == stages::GateRule::v41);
  CHECK(v4.target_gate_sum == stages::GateSum::draft);
  CHECK(v41.target_gate_sum == stages::GateSum::target);
}

TEST_CASE(what_one_model_alone_has_is_refused_by_name_for_the_other) {
  const std::map<std::string, std::string> alone = {
      {"hc_head", "v4"},          {"head_norm", "v4"},      {"hash_gate", "v4"},
      {"engram_hash", "v41"},     {"engram_lookup", "v41"}, {"engram_apply", "v41"},
      {"candidate_blocks", "v41"}};
  std::size_t num_alone = 0;
  for (const lowlat::host::OpSpec& op : lowlat::host::op_table()) {
    const std::string name = op.name, models = op.models;
    if (const auto it = alone.find(name); it != alone.end()) {
      CHECK_EQ(models, it->second);
      ++num_alone;
    }
    for (const std::string model : {"v4", "v41", "v5", "v", ""}) {
      if (model == models || (models == "v4 v41" && (model == "v4" || model == "v41"))) continue;
      CHECK_EQ(lowlat::testing::OpCall(op, model.c_str()).refusal(),
               "model is " + model + "; " + name + " is there for " + models);
    }
  }
  CHECK_EQ(num_alone, alone.size());
}
