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

constexpr std::uint64_t kBudgetNs = 60'000'000'000;

// tests/cpp/capi_flow.cpp lies two folders below the root of the source tree.
std::string tiny_config() {
  std::string root = __FILE__;
  root.erase(root.rfind("tests/cpp"));
  std::ifstream file(root + "rust_dispatch/core/src/config/tiny_v41.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string entry(int batch_size) {
  const std::string batch = std::to_string(batch_size);
  const std::string width = std::to_string(batch_size * 6);
  return R"({"path": "persistent", "seals": [], "key": {"mode": "target_verify", "batch_size": )" +
         batch + R"(, "tokens_per_request": 6, "width": )" + width +
         R"(, "shape": "tiny-v41", "isa": "scalar", "numerics_digest": "0x0000000000000001",
            "layout_digest": "0x0000000000000002"}})";
}

const std::string& record() {
  static const std::string text =
      R"({"version": 1, "entries": [)" + entry(1) + "," + entry(4) + "]}";
  return text;
}

// What went wrong first on this rank; empty when nothing did.
struct Failure {
  std::string words;
  void check(bool holds, const std::string& what) {
    if (!holds && words.empty()) words = what + ": " + lowlat_dispatch_last_error();
  }
};

void decide(lowlat_coverage* coverage, Failure& failure) {
  lowlat_dispatcher* dispatcher = nullptr;
  failure.check(lowlat_dispatcher_create(coverage, record().c_str(), &dispatcher) ==
                    LOWLAT_DISPATCH_STATUS_OK,
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
    failure.check(lowlat_guard(tiny_config().c_str(), R"({"tp_size": 2})", &servable) ==
                      LOWLAT_DISPATCH_STATUS_OK,
                  "guard");
    lowlat_ballot ballot{};
    ballot.widths = widths[rank].data();
    ballot.num_widths = 2;
    ballot.ladder = {1, 2, 3, 4};
    lowlat_record_keys_digest(record().c_str(), &ballot.keys_digest);
    const auto status = lowlat_seat_vote(seat, servable, &ballot, kBudgetNs, &coverage);
    if (expected.empty()) {
      failure.check(status == LOWLAT_DISPATCH_STATUS_OK, "vote");
      std::uint32_t epoch = 0;
      lowlat_coverage_epoch(coverage, &epoch);
      failure.check(epoch == 1, "epoch");
      if (coverage != nullptr) decide(coverage, failure);
    } else {
      failure.check(status == LOWLAT_DISPATCH_STATUS_DECLINE && coverage == nullptr &&
                        lowlat_dispatch_last_error() == expected,
                    "refusal");
    }
    lowlat_coverage_destroy(coverage);
    lowlat_servable_destroy(servable);
    lowlat_seat_destroy(seat);
  };
  std::thread peer(rank_main, 1u);
  rank_main(0);
  peer.join();
  lowlat_board_destroy(board);
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
