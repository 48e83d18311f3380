/* The dispatcher's C face in C11, beside the kernels' header: guard, vote of two ranks that are
 * threads, dispatcher, watchdog, and what a wrong argument gives. */
#include <lowlat/kernels.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "capi_check.h"

#define CHECK_ERROR(words) CHECK(strcmp(lowlat_dispatch_last_error(), words) == 0)

/* The fields of a published configuration that the guard reads are many; the smallest one that is
 * refused is enough here, and tests in Rust and Python serve whole ones. */
static void guard_declines_in_words(void) {
  lowlat_servable* servable = NULL;
  CHECK(lowlat_guard_model("{\"model_type\": \"llama\"}", "{}", &servable) ==
        LOWLAT_DISPATCH_STATUS_DECLINE);
  CHECK(strncmp(lowlat_dispatch_last_error(), "[114] ", 6) == 0);
  CHECK(lowlat_guard_model("{}", "{\"tpp\": 4}", &servable) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(strncmp(lowlat_dispatch_last_error(), "options: unknown field `tpp`", 28) == 0);
  CHECK(lowlat_guard_model(NULL, "{}", &servable) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK_ERROR("config_json is NULL");
  CHECK(servable == NULL);
  CHECK(lowlat_servable_destroy(NULL) == LOWLAT_DISPATCH_STATUS_OK);
}

static void an_engine_brings_its_own_kernels(void) {
  const char* requirements = "{\"name\": \"mine\", \"isas\": [\"sm_90\"], \"tp_sizes\": [2]}";
  lowlat_servable* servable = NULL;
  CHECK(lowlat_guard(requirements, "{\"isa\": \"sm_80\", \"tp_size\": 3}", &servable) ==
        LOWLAT_DISPATCH_STATUS_DECLINE);
  CHECK_ERROR(
      "[101] isa is sm_80; these kernels need sm_90\n"
      "[102] tp_size is 3; these kernels need 2 (change: --tp)");
  CHECK(lowlat_dispatch_last_reason() == LOWLAT_REASON_ISA);
  CHECK(lowlat_guard(requirements, "{\"isa\": \"sm_90\"}", &servable) ==
        LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(strncmp(lowlat_dispatch_last_error(), "facts: missing field `tp_size`", 30) == 0);
  CHECK(lowlat_guard(requirements, "{\"isa\": \"sm_90\", \"tp_size\": 2}", &servable) ==
        LOWLAT_DISPATCH_STATUS_OK);

  /* Two ranks over an all-gather of the engine's own: here, one array. */
  const uint32_t widths[] = {6, 12};
  lowlat_ballot parts = {widths, 2, 1, 2, 3, {1, 2, 3, 4}};
  uint64_t words[2 * LOWLAT_BALLOT_WORDS];
  lowlat_coverage* coverage = NULL;
  uint32_t epoch = 7;
  for (uint32_t idx = 0; idx < 2; ++idx) {
    CHECK(lowlat_ballot_words(servable, idx, &parts, words + idx * LOWLAT_BALLOT_WORDS) ==
          LOWLAT_DISPATCH_STATUS_OK);
  }
  CHECK(lowlat_ballots_agree(1, words, 2, &coverage) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_coverage_epoch(coverage, &epoch) == LOWLAT_DISPATCH_STATUS_OK && epoch == 0);
  CHECK(lowlat_coverage_destroy(coverage) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_ballot_words_declining(1, 2, LOWLAT_REASON_TENSOR_LAYOUT,
                                      words + LOWLAT_BALLOT_WORDS) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_ballots_agree(0, words, 2, &coverage) == LOWLAT_DISPATCH_STATUS_DECLINE);
  CHECK_ERROR("[307] rank 1 declines, so all do: a loaded tensor is laid out otherwise [113]");
  CHECK(lowlat_servable_destroy(servable) == LOWLAT_DISPATCH_STATUS_OK);
}

static void a_ladder_is_checked(void) {
  lowlat_ladder ladder = {1, 2, 3, 4};
  CHECK(lowlat_ladder_check(&ladder) == LOWLAT_DISPATCH_STATUS_OK);
  ladder.plugin_ns = 3;
  CHECK(lowlat_ladder_check(&ladder) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK_ERROR("plugin budget is 3 ns; it must be shorter than the collective budget, 3 ns");
}

struct rank {
  lowlat_seat* seat;
  uint64_t digest;
  lowlat_dispatch_status agreed;
  lowlat_dispatch_status declined;
  char words[128];
};

static void* vote(void* argument) {
  struct rank* rank = argument;
  const uint64_t budget_ns = 60u * 1000u * 1000u * 1000u;
  rank->agreed = lowlat_seat_agree_step(rank->seat, rank->digest, budget_ns);
  rank->declined = lowlat_seat_decline(rank->seat, LOWLAT_REASON_TENSOR_LAYOUT, budget_ns);
  strncpy(rank->words, lowlat_dispatch_last_error(), sizeof rank->words - 1);
  return NULL;
}

static void two_ranks_vote(void) {
  lowlat_board* board = NULL;
  struct rank ranks[2];
  pthread_t thread;
  memset(ranks, 0, sizeof ranks);
  CHECK(lowlat_board_create(65, &board) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(lowlat_board_create(2, &board) == LOWLAT_DISPATCH_STATUS_OK);
  for (uint32_t idx = 0; idx < 2; ++idx) {
    ranks[idx].digest = 7;
    CHECK(lowlat_board_seat(board, idx, &ranks[idx].seat) == LOWLAT_DISPATCH_STATUS_OK);
  }
  lowlat_seat* again = NULL;
  CHECK(lowlat_board_seat(board, 1, &again) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK_ERROR("the seat of rank 1 is taken; a rank that was started again needs a new group");
  /* Seats keep the group alive. */
  lowlat_board_destroy(board);
  CHECK(pthread_create(&thread, NULL, vote, &ranks[1]) == 0);
  vote(&ranks[0]);
  CHECK(pthread_join(thread, NULL) == 0);
  for (uint32_t idx = 0; idx < 2; ++idx) {
    CHECK(ranks[idx].agreed == LOWLAT_DISPATCH_STATUS_OK);
    CHECK(ranks[idx].declined == LOWLAT_DISPATCH_STATUS_DECLINE);
    CHECK(strcmp(ranks[idx].words,
                 "[307] rank 0 declines, so all do: a loaded tensor is laid out otherwise [113]") ==
          0);
  }
  /* A peer that does not come is a fault, soon. */
  CHECK(lowlat_seat_agree_step(ranks[0].seat, 7, 1000) == LOWLAT_DISPATCH_STATUS_FAULT);
  CHECK_ERROR("[401] rank 1 did not answer the vote of epoch 2 by the deadline");
  lowlat_seat_destroy(ranks[0].seat);
  lowlat_seat_destroy(ranks[1].seat);
}

static void a_watchdog_counts(void) {
  lowlat_watchdog* watchdog = NULL;
  lowlat_health health = LOWLAT_HEALTH_OVERDUE;
  uint64_t late_ns = 0;
  CHECK(lowlat_watchdog_create(0, 1, &watchdog) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(lowlat_watchdog_create(100, 1000, &watchdog) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_watchdog_health(watchdog, 5, &health, NULL) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(health == LOWLAT_HEALTH_IDLE);
  CHECK(lowlat_watchdog_arm(watchdog, 10) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_watchdog_arm(watchdog, 10) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(lowlat_watchdog_health(watchdog, 117, &health, &late_ns) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(health == LOWLAT_HEALTH_OVERDUE && late_ns == 7);
  CHECK(lowlat_watchdog_disarm(watchdog) == LOWLAT_DISPATCH_STATUS_OK);
  lowlat_watchdog_destroy(watchdog);
}

int main(void) {
  CHECK(lowlat_dispatch_abi_version() == LOWLAT_DISPATCH_ABI_VERSION);
  CHECK(lowlat_dispatch_check_abi(LOWLAT_DISPATCH_ABI_VERSION) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(lowlat_dispatch_check_abi(1) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(strcmp(lowlat_reason_name(LOWLAT_REASON_TP_SIZE), "tp_size") == 0);
  CHECK(strcmp(lowlat_reason_words(9999), "unknown reason") == 0);
  /* The two libraries' statuses are one numbering. */
  CHECK((int)LOWLAT_DISPATCH_STATUS_INVALID == (int)LOWLAT_INVALID);
  CHECK((int)LOWLAT_DISPATCH_STATUS_DECLINE == (int)LOWLAT_UNSUPPORTED);
  CHECK((int)LOWLAT_DISPATCH_STATUS_FAULT == (int)LOWLAT_FAULT);
  CHECK((int)LOWLAT_DISPATCH_STATUS_BUG == (int)LOWLAT_BUG);
  guard_declines_in_words();
  an_engine_brings_its_own_kernels();
  a_ladder_is_checked();
  two_ranks_vote();
  a_watchdog_counts();
  CHECK(lowlat_dispatch_num_handles() == 0);
  return closing();
}
