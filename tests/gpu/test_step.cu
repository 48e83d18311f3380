// Whole steps and drafts of V4.1-Flash by the fused kernels, at true sizes: against the resident
// schedule on the same weights (logits, tokens, features by what a draft makes of them, caches), in
// captured replays, and when they are aborted. One rank of TP4 whose peers are itself.
//
// The two schedules add in other orders, and what four bits round to may flip by it, so logits are
// near and not equal; a row whose experts flip is further off. Replays are equal bit for bit.
#include "bench/step_case.cuh"
#include "gpu.cuh"

namespace {

using namespace lowlat::testing;
namespace bench = lowlat::bench;

constexpr const char* kFused = "nvidia:0:fused:loop";

// Bytes that eight layers, a draft and two sets of caches need; with experts in a second layout.
void need_memory(std::size_t gigabytes = 32) {
  need_device();
  std::size_t free_bytes = 0, all = 0;
  lowlat::host::cuda::check(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
  if (free_bytes < gigabytes << 30) {
    SKIP("needs " + std::to_string(gigabytes) + " GB of free device memory");
  }
}

}  // namespace

TEST_CASE(steps_and_drafts_are_those_of_the_resident_schedule) {
  need_memory();
  bench::failures = 0;
  const lowlat_model_config config = bench::config_of(false, 3);
  bench::Weights weights;
  bench::Rank fused(kFused, config, weights);
  bench::Rank resident("nvidia:0:persistent:loop", config, weights);
  for (const int start : {bench::kShort, bench::kPosition}) {
    int position = start;
    for (const int rows : {6, 1, 8, 12, 24, 48}) {
      const bench::Case of = bench::case_of(rows, position);
      bench::compare_step(fused, resident, of, rows);
      if (of.tokens == 6) bench::compare_draft(fused, resident, of);
      position += of.tokens;
    }
    bench::compare_pools(fused, resident, start == bench::kShort ? 0.08 : 0.2);
  }
  CHECK_EQ(bench::failures, 0);
}

TEST_CASE(hosted_steps_and_proposals_are_those_of_the_resident_schedule) {
  need_memory(48);
  bench::failures = 0;
  lowlat_model_config config = bench::config_of(false, 3);
  config.num_pages = bench::kPagesOfRequest;
  bench::compare_hosting(config);
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  bench::Weights weights;
  bench::Rank fused(kFused, config, weights, bench::Host::proposals);
  bench::Rank resident("nvidia:0:persistent:loop", config, weights, bench::Host::proposals);
  for (const int batch : {1, 4, 8}) {
    bench::compare_proposals(fused, resident, batch, false);
    bench::compare_proposals(fused, resident, batch, true);
  }
  CHECK_EQ(bench::failures, 0);
}

TEST_CASE(replays_are_equal) {
  need_memory();
  bench::failures = 0;
  bench::Weights weights;
  bench::Rank fused(kFused, bench::config_of(false, 0), weights);
  bench::replay(fused, bench::case_of(6, 4500), 1000);
  bench::replay(fused, bench::case_of(24, 4500), 200);
  CHECK_EQ(bench::failures, 0);
}

TEST_CASE(brief_one_row_and_six) {
  need_memory();
  bench::failures = 0;
  bench::Weights weights;
  lowlat_model_config config = bench::config_of(false, 0);
  config.wait_budget_ns = kBriefBudgetNs;
  bench::Rank fused(kFused, config, weights);
  for (const int rows : {1, 6}) bench::replay(fused, bench::case_of(rows, 4500), 1);
  CHECK_EQ(bench::failures, 0);
}

TEST_CASE(padding_leaves_the_other_rows_alone) {
  need_memory();
  bench::Weights weights;
  bench::Rank fused(kFused, bench::config_of(false, 0), weights);
  const bench::Case of = bench::case_of(12, 4500);
  const lowlat_step whole = fused.step_of(of, 1);
  lowlat_step padded = fused.step_of(of, 1);
  // The second request's rows are none, and what they hold is nothing of the model's.
  const auto spoiled = [&](const std::int32_t* from, std::int32_t value) {
    std::vector<std::int32_t> values = fused.take(from, 12);
    std::fill(values.begin() + 6, values.end(), value);
    return fused.place(values);
  };
  padded.slots = spoiled(whole.slots, -1);
  padded.positions = spoiled(whole.positions, -0x7fff'0000);
  padded.token_ids = spoiled(whole.token_ids, 0x7fff'0000);
  std::vector<std::vector<float>> logits;
  for (const lowlat_step& step : {whole, padded}) {
    bench::must(lowlat_step_launch(fused.model(), &step, nullptr));
    bench::must(lowlat_synchronize(fused.model(), 10'000'000'000));
    auto rows = fused.logits(step);
    rows.resize(rows.size() / 2);
    logits.push_back(rows);
  }
  CHECK(equal_bytes(logits[0], logits[1]));
}

TEST_CASE(an_abort_ends_the_steps_in_flight) {
  need_memory();
  bench::Weights weights;
  bench::Rank fused(kFused, bench::config_of(false, 0), weights);
  const lowlat_step step = fused.step_of(bench::case_of(6, bench::kPosition), 1);
  for (int i = 0; i < 50; ++i) bench::must(lowlat_step_launch(fused.model(), &step, nullptr));
  lowlat_abort(fused.model());
  CHECK_EQ(lowlat_synchronize(fused.model(), 5'000'000'000), LOWLAT_FAULT);
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  bench::must(lowlat_status_read(fused.model(), &words));
  CHECK_EQ(words.state, 3u);
  for (const float v : fused.logits(step)) REQUIRE(v != v);
  CHECK_EQ(lowlat_step_launch(fused.model(), &step, nullptr), LOWLAT_FAULT);
}

TEST_CASE(a_shape_without_kernels_is_refused_by_its_fields) {
  need_device();
  lowlat_model_config config = bench::config_of(false, 0);
  config.tp_size = 2;
  config.page_size = 64;
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("nvidia:0:fused", &config, &model), LOWLAT_UNSUPPORTED);
  const std::string why = lowlat_last_error();
  CHECK(why.find("tp_size is 2, needed 4") != std::string::npos);
  CHECK(why.find("page_size is 64, needed 128 or 256") != std::string::npos);
  CHECK(why.find("nvidia:persistent serves it") != std::string::npos);
  CHECK_EQ(lowlat_model_create("nvidia:0:quick", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("fused, persistent or loop") != std::string::npos);
  for (const char* twice :
       {"nvidia:fused:persistent", "nvidia:persistent:fused", "nvidia:fused:fused", "nvidia:0:1"}) {
    CHECK_EQ(lowlat_model_create(twice, &config, &model), LOWLAT_INVALID);
    CHECK(std::string(lowlat_last_error()).find("needed one of them") != std::string::npos);
  }
}
