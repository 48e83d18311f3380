// The dispatcher's C face in C++20, walked from a model's config.json to decisions by two ranks
// that are threads. The configuration is the built-in small one, read from the source tree.
#include <lowlat/dispatch.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::uint64_t kBudgetNs = 60 * kSecondNs;

// tests/cpp/capi_flow.cpp lies two folders below the root of the source tree.
std::string tiny_config() {
  std::string root = __FILE__;
  root.erase(root.rfind("tests/cpp"));
  std::ifstream file(root + "rust_dispatch/core/src/config/tiny_v41.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// What went wrong first on this rank; empty when nothing did.
struct Failure {
  std::string words;
  void check(bool holds, const std::string& what) {
    if (!holds && words.empty()) words = what + ": " + lowlat_dispatch_last_error();
  }
};

// The graphs for 1 and 4 requests, each reading one table of this rank at `address`.
lowlat_record* captured(std::uint64_t address, Failure& failure) {
  lowlat_recorder* recorder = nullptr;
  lowlat_record* record = nullptr;
  failure.check(lowlat_recorder_create(&recorder) == LOWLAT_DISPATCH_STATUS_OK, "recorder");
  for (const std::uint32_t batch_size : {4u, 1u}) {
    const std::int64_t shape[] = {batch_size, 8};
    const lowlat_seal seal{"page_table", "int32", address, shape, 2};
    const lowlat_graph_key key{
        LOWLAT_FACTS_MODE_TARGET_VERIFY, batch_size, 6, batch_size * 6, "tiny-v41", "scalar", 1, 2};
    failure.check(lowlat_recorder_note(recorder, &key, LOWLAT_GRAPH_PATH_PERSISTENT, &seal, 1) ==
                      LOWLAT_DISPATCH_STATUS_OK,
                  "note");
  }
  failure.check(lowlat_recorder_finish(recorder, &record) == LOWLAT_DISPATCH_STATUS_OK, "finish");
  lowlat_recorder_destroy(recorder);
  return record;
}

void check_record(const lowlat_record* record, Failure& failure) {
  std::uint32_t num_graphs = 0;
  lowlat_record_num_graphs(record, &num_graphs);
  failure.check(num_graphs == 2, "two graphs");
  // Written and read, it is the same.
  const char* text = nullptr;
  lowlat_record* read = nullptr;
  failure.check(lowlat_record_text(record, &text) == LOWLAT_DISPATCH_STATUS_OK, "text");
  failure.check(lowlat_record_read(text, &read) == LOWLAT_DISPATCH_STATUS_OK, "read");
  std::uint64_t digests[2] = {0, 1};
  lowlat_record_digest(record, &digests[0]);
  lowlat_record_digest(read, &digests[1]);
  failure.check(digests[0] == digests[1], "digest");
  failure.check(lowlat_record_compare(record, read) == LOWLAT_DISPATCH_STATUS_OK, "compare");
  lowlat_record_destroy(read);
  // A table that moved is a fault.
  const std::int64_t shape[] = {1, 8};
  lowlat_seal seal{"page_table", "int32", 0x1000, shape, 2};
  failure.check(lowlat_record_check_seals(record, 0, &seal, 1) == LOWLAT_DISPATCH_STATUS_OK,
                "sealed");
  seal.address = 0x2000;
  failure.check(lowlat_record_check_seals(record, 0, &seal, 1) == LOWLAT_DISPATCH_STATUS_FAULT &&
                    std::strstr(lowlat_dispatch_last_error(),
                                "now page_table int32 [1, 8] at "
                                "0x2000") != nullptr,
                "moved");
}

void decide(const lowlat_coverage* coverage, const lowlat_record* record, Failure& failure) {
  lowlat_dispatcher* dispatcher = nullptr;
  failure.check(
      lowlat_dispatcher_create(coverage, record, &dispatcher) == LOWLAT_DISPATCH_STATUS_OK,
      "create");
  if (dispatcher == nullptr) return;
  const auto decided = [&](std::uint32_t mode, std::uint32_t batch_size) {
    const lowlat_step_facts step{mode, batch_size, 6, batch_size * 6};
    lowlat_decision decision{};
    failure.check(
        lowlat_dispatcher_decide(dispatcher, &step, &decision) == LOWLAT_DISPATCH_STATUS_OK,
        "decide");
    return decision;
  };
  const lowlat_decision padded = decided(LOWLAT_FACTS_MODE_TARGET_VERIFY, 3);
  failure.check(padded.reason == 0 && padded.key_idx == 1 && padded.padded_batch == 4, "padded");
  const lowlat_decision prompt = decided(LOWLAT_FACTS_MODE_EXTEND, 1);
  failure.check(prompt.reason == LOWLAT_REASON_STEP_IS_EXTEND, "prompt rows are not covered");
  const lowlat_step_facts unknown{77, 1, 6, 6};
  lowlat_decision untouched{1, 2, 3};
  failure.check(lowlat_dispatcher_decide(dispatcher, &unknown, &untouched) ==
                        LOWLAT_DISPATCH_STATUS_INVALID &&
                    untouched.key_idx == 2,
                "an unknown mode writes no output");
  lowlat_dispatcher_switch(dispatcher, 0);
  failure.check(decided(LOWLAT_FACTS_MODE_TARGET_VERIFY, 1).reason == LOWLAT_REASON_PLUGIN_OFF,
                "switched off");
  lowlat_dispatcher_disarm(dispatcher, LOWLAT_REASON_WAIT_EXPIRED);
  failure.check(decided(LOWLAT_FACTS_MODE_TARGET_VERIFY, 1).reason == LOWLAT_REASON_DISARMED,
                "disarmed");
  const char* report = nullptr;
  lowlat_dispatcher_report(dispatcher, &report);
  failure.check(report != nullptr && std::strstr(report, R"("covered":1,"uncovered":3)") != nullptr,
                "report");
  lowlat_dispatcher_destroy(dispatcher);
}

// `widths` of the ranks; `expected` is the refusal's words, or "" where they must agree.
bool run(std::array<std::array<std::uint32_t, 2>, 2> widths, const std::string& expected) {
  lowlat_board* board = nullptr;
  lowlat_board_create(2, &board);
  std::array<Failure, 2> failures;
  const auto rank_main = [&](std::uint32_t rank) {
    Failure& failure = failures[rank];
    lowlat_seat* seat = nullptr;
    lowlat_servable* servable = nullptr;
    lowlat_coverage* coverage = nullptr;
    failure.check(lowlat_board_seat(board, rank, &seat) == LOWLAT_DISPATCH_STATUS_OK, "seat");
    failure.check(lowlat_guard_model(tiny_config().c_str(), R"({"tp_size": 2})", &servable) ==
                      LOWLAT_DISPATCH_STATUS_OK,
                  "guard");
    lowlat_record* record = captured(0x1000, failure);
    check_record(record, failure);
    lowlat_ballot ballot{};
    ballot.widths = widths[rank].data();
    ballot.num_widths = 2;
    ballot.ladder = {kSecondNs, 2 * kSecondNs, 120 * kSecondNs, 300 * kSecondNs};
    lowlat_record_keys_digest(record, &ballot.keys_digest);
    const auto status = lowlat_seat_vote(seat, servable, &ballot, kBudgetNs, &coverage);
    if (expected.empty()) {
      failure.check(status == LOWLAT_DISPATCH_STATUS_OK, "vote");
      std::uint32_t epoch = 0;
      lowlat_coverage_epoch(coverage, &epoch);
      failure.check(epoch == 1, "epoch");
      if (coverage != nullptr) decide(coverage, record, failure);
      failure.check(lowlat_seat_agree_step(seat, 7, kBudgetNs) == LOWLAT_DISPATCH_STATUS_OK,
                    "step");
      failure.check(
          lowlat_seat_agree_step(seat, 7, 120 * kSecondNs) == LOWLAT_DISPATCH_STATUS_INVALID,
          "a step's vote beyond the next rung");
    } else {
      failure.check(status == LOWLAT_DISPATCH_STATUS_DECLINE && coverage == nullptr &&
                        lowlat_dispatch_last_error() == expected,
                    "refusal");
    }
    lowlat_coverage_destroy(coverage);
    lowlat_record_destroy(record);
    lowlat_servable_destroy(servable);
    lowlat_seat_destroy(seat);
  };
  std::thread peer(rank_main, 1u);
  rank_main(0);
  peer.join();
  lowlat_board_destroy(board);
  failures[0].check(lowlat_dispatch_num_handles() == 0, "every handle is destroyed");
  for (const Failure& failure : failures) {
    if (!failure.words.empty()) std::fprintf(stderr, "%s\n", failure.words.c_str());
  }
  return failures[0].words.empty() && failures[1].words.empty();
}

}  // namespace

int main() {
  const bool agreed = run({{{6, 24}, {6, 24}}}, "");
  const bool refused =
      run({{{6, 24}, {6, 12}}}, "[301] rank 1 covers widths [6, 12]; rank 0 covers [6, 24]");
  std::printf("%d passed, %d failed\n", agreed + refused, 2 - agreed - refused);
  return agreed && refused ? 0 : 1;
}
