// Whole steps and drafts of both models by the fused kernels, at true sizes: against the resident
// schedule on the same weights (logits, tokens, features by what a draft makes of them, caches), in
// captured replays, and when they are aborted. One rank of TP4 whose peers are itself, and two or
// four ranks with a device each, whose results are equal bit for bit.
//
// The two schedules add in other orders, and what four bits round to may flip by it, so logits are
// near and not equal; a row whose experts flip is further off. Replays are equal bit for bit.
#include "bench/step_team.cuh"
#include "fused/mix.hpp"
#include "fused/step.hpp"
#include "gpu.cuh"

namespace {

using namespace lowlat::testing;
namespace bench = lowlat::bench;
using bench::Places;

constexpr Places kLooped = {4, true};
constexpr std::uint32_t kKinds[] = {LOWLAT_V41, LOWLAT_V4};

// A device for each rank, with the bytes that eight layers, a draft and two sets of caches need; at
// two ranks, or with experts in a second layout, more.
void need_memory(const Places& places = kLooped, std::size_t gigabytes = 32) {
  need_device();
  int devices = 0;
  lowlat::host::cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < places.size()) {
    SKIP(std::to_string(places.size()) + " ranks need as many devices; here are " +
         std::to_string(devices));
  }
  if (places.tp_size == 2) gigabytes = gigabytes * 7 / 4;
  for (int device = 0; device < places.size(); ++device) {
    bench::use_device(device);
    std::size_t free_bytes = 0, all = 0;
    lowlat::host::cuda::check(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    if (free_bytes < gigabytes << 30) {
      SKIP("needs " + std::to_string(gigabytes) + " GB of free memory on device " +
           std::to_string(device));
    }
  }
  bench::use_device(0);
}

void check_steps_and_drafts(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::failures = 0;
  const lowlat_model_config config = bench::config_of(kind, false, 3);
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, config, weights);
  bench::Team resident("persistent", places, config, weights);
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

// Requests' first rows, whose n-grams are all of the tokens before: what the fused step makes of
// them is the resident one's, and not the resident one's of the same tokens turned round. Of all
// rows the median tells nothing of them. Planted and seen: histories read from their end.
void check_first_rows(const bench::Case& of, std::size_t width, const std::vector<float>& got,
                      const std::vector<float>& want, const std::vector<float>& other) {
  for (int request = 0; request < of.requests; ++request) {
    const auto first = [&](const std::vector<float>& rows) {
      const auto at = rows.begin() + static_cast<std::ptrdiff_t>(
                                         static_cast<std::size_t>(request * of.tokens) * width);
      return std::vector<float>(at, at + static_cast<std::ptrdiff_t>(width));
    };
    const double error = bench::errors_of(first(got), first(want), width)[0],
                 turned = bench::errors_of(first(got), first(other), width)[0];
    std::printf("request %d: rel_l2 %.2e, of histories turned round %.2e\n", request, error,
                turned);
    CHECK(2.0 * error < turned);
  }
}

void turn_round(std::vector<std::int32_t>& history) {
  for (auto at = history.begin(); at != history.end(); at += 3) std::swap(at[0], at[2]);
}

void check_histories(const Places& places) {
  need_memory(places);
  const lowlat_model_config config = bench::config_of(LOWLAT_V41, false, 0);
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, config, weights);
  bench::Team resident("persistent", places, config, weights);
  const bench::Case of = bench::case_of(12, bench::kShort);
  const auto logits_of = [&](bench::Team& team, bool turned) {
    const auto steps = team.all([&](bench::Rank& rank) {
      lowlat_step step = rank.step_of(of, 5);
      if (!turned) return step;
      auto history = rank.take(step.history, 3 * static_cast<std::size_t>(of.requests));
      turn_round(history);
      step.history = rank.place(history);
      return step;
    });
    team.run(lowlat_step_launch, steps);
    return team.agreed(
        "logits of all ranks", steps,
        [](bench::Rank& rank, const lowlat_step& step) { return rank.logits(step); });
  };
  const auto other = logits_of(resident, true), want = logits_of(resident, false);
  check_first_rows(of, static_cast<std::size_t>(config.vocab), logits_of(fused, false), want,
                   other);
}

// An engine's, which lie with its caches.
void check_hosted_histories(const Places& places) {
  need_memory(places);
  lowlat_model_config config = bench::config_of(LOWLAT_V41, false, 0);
  config.num_pages = bench::kPagesOfRequest;
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, config, weights, bench::Host::steps);
  bench::Team resident("persistent", places, config, weights, bench::Host::steps);
  const bench::Case of = bench::case_of(12, bench::kShort);
  const auto width = static_cast<std::size_t>(config.hidden);
  const auto hidden_of = [&](bench::Team& team) {
    const auto steps = team.all([&](bench::Rank& rank) { return rank.hosted_of(of, 5); });
    team.run(lowlat_hosted_step_launch, steps);
    return team.agreed("hidden states of all ranks", steps,
                       [&](bench::Rank& rank, const lowlat_hosted_step& step) {
                         return rank.floats(step.hidden, width * static_cast<std::size_t>(6 + 1));
                       });
  };
  const auto want = hidden_of(resident), got = hidden_of(fused);
  resident.all([](bench::Rank& rank) {
    auto history = rank.history();
    turn_round(history);
    rank.set_history(history);
    return 0;
  });
  check_first_rows(of, width, got, want, hidden_of(resident));
}

void check_hosted(std::uint32_t kind, const Places& places) {
  need_memory(places, 48);
  bench::failures = 0;
  lowlat_model_config config = bench::config_of(kind, false, 3);
  config.num_pages = bench::kPagesOfRequest;
  bench::compare_hosting(places, config);
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, config, weights, bench::Host::proposals);
  bench::Team resident("persistent", places, config, weights, bench::Host::proposals);
  for (const int batch : {1, 4, 8}) {
    bench::compare_proposals(fused, resident, batch, false);
    bench::compare_proposals(fused, resident, batch, true);
  }
  CHECK_EQ(bench::failures, 0);
}

void check_hosted_draft(std::uint32_t kind, const Places& places) {
  need_memory(places, 48);
  bench::failures = 0;
  lowlat_model_config config = bench::config_of(kind, false, 3);
  bench::AllWeights weights(places);
  bench::Team own("fused", places, config, weights);
  config.num_pages = 1;
  config.num_widths = 0;
  for (const int width : {5, 10, 20, 40}) config.widths[config.num_widths++] = width;
  bench::Team hosted("fused", places, config, weights, bench::Host::draft);
  bench::Team marlin("fused", places, config, weights, bench::Host::marlin_draft);
  for (const int position : {bench::kShort, bench::kPosition}) {
    for (const int requests : {1, 2, 8, 4, 1}) {
      bench::compare_hosted_draft(hosted, own, {requests, 6, position});
      bench::compare_hosted_draft(marlin, own, {requests, 6, position}, true);
    }
  }
  CHECK_EQ(bench::failures, 0);
}

void check_replays(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::failures = 0;
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, bench::config_of(kind, false, 0), weights);
  bench::replay_widths(fused, 200);
  CHECK_EQ(bench::failures, 0);
}

void check_abort(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::AllWeights weights(places);
  bench::Team fused("fused", places, bench::config_of(kind, false, 0), weights);
  CHECK(bench::abort_ends_steps(fused));
}

void check_dead_rank(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::AllWeights weights(places);
  lowlat_model_config config = bench::config_of(kind, false, 0);
  config.wait_budget_ns = 200'000'000;
  bench::Team fused("fused", places, config, weights);
  CHECK(bench::dead_rank_is_named(fused));
}

void check_briefly(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::failures = 0;
  bench::AllWeights weights(places);
  lowlat_model_config config = bench::config_of(kind, false, 0);
  config.wait_budget_ns = kBriefBudgetNs;
  bench::Team fused("fused", places, config, weights);
  for (const int rows : {1, 6}) bench::replay(fused, bench::case_of(rows, 4500), 1);
  CHECK_EQ(bench::failures, 0);
}

void check_padding(std::uint32_t kind, const Places& places) {
  need_memory(places);
  bench::AllWeights weights(places);
  bench::Team team("fused", places, bench::config_of(kind, false, 0), weights);
  bench::Rank& fused = team.first();
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

constexpr Places kTwo = {2, false}, kFour = {4, false};

void of_both(void (*check)(std::uint32_t, const Places&), const Places& places) {
  for (const std::uint32_t kind : kKinds) check(kind, places);
}

}  // namespace

TEST_CASE(steps_and_drafts_are_those_of_the_resident_schedule) {
  of_both(check_steps_and_drafts, kLooped);
}
TEST_CASE(histories_are_those_of_the_resident_schedule) { check_histories(kLooped); }
TEST_CASE(hosted_histories_are_those_of_the_resident_schedule) { check_hosted_histories(kLooped); }
TEST_CASE(hosted_drafts_are_the_models_own) { of_both(check_hosted_draft, kLooped); }
TEST_CASE(hosted_steps_and_proposals_are_those_of_the_resident_schedule) {
  of_both(check_hosted, kLooped);
}
TEST_CASE(replays_are_equal) { of_both(check_replays, kLooped); }
TEST_CASE(an_abort_ends_the_steps_in_flight) { of_both(check_abort, kLooped); }
TEST_CASE(brief_one_row_and_six) { of_both(check_briefly, kLooped); }

TEST_CASE(two_ranks_steps_and_drafts_are_those_of_the_resident_schedule) {
  of_both(check_steps_and_drafts, kTwo);
}
TEST_CASE(two_ranks_hosted_steps_and_proposals_are_those_of_the_resident_schedule) {
  of_both(check_hosted, kTwo);
}
TEST_CASE(two_ranks_replays_are_equal) { of_both(check_replays, kTwo); }
TEST_CASE(two_ranks_an_abort_ends_the_steps_of_both) { of_both(check_abort, kTwo); }
TEST_CASE(two_ranks_one_that_is_gone_is_named_at_the_deadline) { of_both(check_dead_rank, kTwo); }

TEST_CASE(four_ranks_steps_and_drafts_are_those_of_the_resident_schedule) {
  of_both(check_steps_and_drafts, kFour);
}
TEST_CASE(four_ranks_hosted_steps_and_proposals_are_those_of_the_resident_schedule) {
  of_both(check_hosted, kFour);
}
TEST_CASE(four_ranks_replays_are_equal) { of_both(check_replays, kFour); }
TEST_CASE(four_ranks_an_abort_ends_the_steps_of_all) { of_both(check_abort, kFour); }
TEST_CASE(four_ranks_one_that_is_gone_is_named_at_the_deadline) { of_both(check_dead_rank, kFour); }

TEST_CASE(padding_leaves_the_other_rows_alone) { of_both(check_padding, kLooped); }

TEST_CASE(rows_list_the_entries_of_ratio_128_and_the_experts_of_tokens) {
  need_device();
  namespace fused = lowlat::nvidia::fused;
  constexpr int kRows = 6, kTokens = 3, kPages = 7, kPageSize = 256, kRatio = 128, kVocab = 50;
  constexpr int kEntries = kPages * kPageSize / kRatio;
  std::vector<std::int32_t> pages, table[2];
  for (int i = 0; i < 2 * kPages; ++i) pages.push_back((5 * i + 3) % (2 * kPages));
  for (int i = 0; i < kVocab * fused::kTableExperts; ++i) {
    table[0].push_back(7 * i % 256);
    table[1].push_back(11 * i % 256);
  }
  // The first request completes its first entry with its second row; the last row is padding.
  const std::vector<std::int32_t> positions = {126, 127, 128, 1022, 1023, 1024};
  const std::vector<std::int32_t> tokens = {0, 49, 7, 7, 21, 3}, requests = {0, 0, 0, 1, 1, 1};
  std::vector<std::int32_t> slots;
  for (int row = 0; row < kRows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    slots.push_back(
        pages[static_cast<std::size_t>(requests[at] * kPages + positions[at] / kPageSize)] *
            kPageSize +
        positions[at] % kPageSize);
  }
  slots.back() = -1;

  const OnDevice<std::int32_t> in_pages(pages), in_positions(positions), in_tokens(tokens),
      in_requests(requests), in_slots(slots), states(std::vector<std::int32_t>(2, 0)),
      tables[2] = {OnDevice<std::int32_t>(table[0]), OnDevice<std::int32_t>(table[1])};
  const OnDevice<std::uint32_t> abort_word(std::vector<std::uint32_t>(1, 0u));
  const OnDevice<std::int32_t> row_words(8 * kRows), entries(kRows * kEntries),
      window(kRows * fused::kStepWindow), own_pages(kRows * kPages),
      ids[2] = {OnDevice<std::int32_t>(kRows * fused::kTableExperts),
                OnDevice<std::int32_t>(kRows * fused::kTableExperts)};
  const OnDevice<float> mix(kRows * fused::kMixStride);
  const OnDevice<std::uint8_t> images(kRows);
  fused::StepInput in = {};
  in.port.abort_words[0] = abort_word.data();
  in.num_rows = kRows;
  in.tokens = kTokens;
  in.batch_size = kRows / kTokens;
  in.token_ids = in_tokens.data();
  in.positions = in_positions.data();
  in.request_idx = in_requests.data();
  in.slots = in_slots.data();
  in.state_slots = states.data();
  in.page_table = in_pages.data();
  in.page_table_stride = in.table_pages = in.most_pages = kPages;
  in.vocab = kVocab;
  in.num_pages = 2 * kPages;
  in.page_size = kPageSize;
  in.num_state_slots = 2;
  in.image_token = -1;
  for (int i = 0; i < 2; ++i) in.expert_tables[i] = tables[i].data();
  in.entry_ratio = kRatio;
  in.num_entries = kEntries;
  fused::StepArrays out = {};
  out.token_ids = row_words.data();
  out.positions = row_words.data() + kRows;
  out.slots = row_words.data() + 2 * kRows;
  out.kv_slots = row_words.data() + 3 * kRows;
  out.state_slots = row_words.data() + 4 * kRows;
  out.image_rows = images.data();
  out.window_idx = window.data();
  out.page_table = own_pages.data();
  out.mix = mix.data();
  for (int i = 0; i < 2; ++i) out.expert_ids[i] = ids[i].data();
  out.entry_slots = entries.data();
  lowlat::host::cuda::check(fused::launch_step_rows(in, out, nullptr), "rows");
  finish();

  std::vector<std::int32_t> want_entries, want_ids[2];
  for (int row = 0; row < kRows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    for (int i = 0; i < kEntries; ++i) {
      // Positions 128 i .. 128 i + 127, which lie in one page.
      const std::int32_t page =
          pages[static_cast<std::size_t>(requests[at] * kPages + kRatio * i / kPageSize)];
      const bool seen = slots[at] >= 0 && kRatio * i + kRatio - 1 <= positions[at];
      want_entries.push_back(seen ? (page * kPageSize + kRatio * i % kPageSize) / kRatio : -1);
    }
    for (int i = 0; i < 2; ++i) {
      const auto first = table[i].begin() + tokens[at] * fused::kTableExperts;
      want_ids[i].insert(want_ids[i].end(), first, first + fused::kTableExperts);
    }
  }
  CHECK(entries.get() == want_entries);
  for (int i = 0; i < 2; ++i) CHECK(ids[i].get() == want_ids[i]);
}

TEST_CASE(without_a_word_two_ranks_and_four_take_the_fused_schedule) {
  need_device();
  for (const std::uint32_t kind : kKinds) {
    for (const int tp_size : {2, 4}) {
      lowlat_model_config config = bench::config_of(kind, false, 0);
      config.tp_size = tp_size;
      for (const bool fused : {true, false}) {
        lowlat_model* model = nullptr;
        bench::must(
            lowlat_model_create(fused ? "nvidia:0" : "nvidia:0:persistent", &config, &model));
        const std::string lines = lowlat_model_catalogue(model);
        CHECK_EQ(lines.find("step nvidia sm_90a fused") != std::string::npos, fused);
        lowlat_model_destroy(model);
      }
    }
  }
}

TEST_CASE(a_shape_without_kernels_is_refused_by_its_fields) {
  need_device();
  lowlat_model_config config = bench::config_of(LOWLAT_V41, false, 0);
  config.tp_size = 1;
  config.page_size = 64;
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("nvidia:0:fused", &config, &model), LOWLAT_UNSUPPORTED);
  const std::string why = lowlat_last_error();
  CHECK(why.find("tp_size is 1, needed 2 or 4") != std::string::npos);
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
