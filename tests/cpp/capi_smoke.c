/* The dispatcher's C face in C11, beside the kernels' header: guard, vote of two ranks that are
 * threads, dispatcher, watchdog, and what a wrong argument gives. */
#include <lowlat/dispatch.h>
#include <lowlat/kernels.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static int num_passed = 0;
static int num_failed = 0;

static void check(int holds, const char* words, int line) {
  if (holds) {
    ++num_passed;
  } else {
    fprintf(stderr, "line %d: %s (last error: %s)\n", line, words, lowlat_dispatch_last_error());
    ++num_failed;
  }
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define CHECK_ERROR(words) CHECK(strcmp(lowlat_dispatch_last_error(), words) == 0)

static const char kRecord[] =
    "{\"version\": 1, \"entries\": ["
    "{\"key\": {\"mode\": \"target_verify\", \"batch_size\": 1, \"tokens_per_request\": 6,"
    " \"width\": 6, \"shape\": \"tiny\", \"isa\": \"scalar\","
    " \"numerics_digest\": \"0x0000000000000000\", \"layout_digest\": \"0x0000000000000000\"},"
    " \"path\": \"persistent\", \"seals\": []},"
    "{\"key\": {\"mode\": \"target_verify\", \"batch_size\": 4, \"tokens_per_request\": 6,"
    " \"width\": 24, \"shape\": \"tiny\", \"isa\": \"scalar\","
    " \"numerics_digest\": \"0x0000000000000000\", \"layout_digest\": \"0x0000000000000000\"},"
    " \"path\": \"persistent\", \"seals\": []}]}";

/* The fields of a published configuration that the guard reads are many; the smallest one that is
 * refused is enough here, and tests in Rust and Python serve whole ones. */
static void guard_declines_in_words(void) {
  lowlat_servable* servable = NULL;
  CHECK(lowlat_guard("{\"model_type\": \"llama\"}", "{}", &servable) ==
        LOWLAT_DISPATCH_STATUS_DECLINE);
  CHECK(strncmp(lowlat_dispatch_last_error(), "[114] ", 6) == 0);
  CHECK(lowlat_guard("{}", "{\"tpp\": 4}", &servable) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK(strncmp(lowlat_dispatch_last_error(), "options: unknown field `tpp`", 28) == 0);
  CHECK(lowlat_guard(NULL, "{}", &servable) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK_ERROR("config_json is NULL");
  CHECK(servable == NULL);
  lowlat_servable_destroy(NULL);
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

static void records_and_handles_are_checked(void) {
  uint64_t digest = 0;
  CHECK(lowlat_record_keys_digest(kRecord, &digest) == LOWLAT_DISPATCH_STATUS_OK);
  CHECK(digest != 0);
  CHECK(lowlat_record_keys_digest("{", &digest) == LOWLAT_DISPATCH_STATUS_INVALID);
  lowlat_dispatcher* dispatcher = NULL;
  CHECK(lowlat_dispatcher_create(NULL, kRecord, &dispatcher) == LOWLAT_DISPATCH_STATUS_INVALID);
  CHECK_ERROR("coverage is NULL");
  lowlat_decision decision;
  const lowlat_step_facts step = {LOWLAT_FACTS_MODE_DECODE, 1, 1, 1};
  CHECK(lowlat_dispatcher_decide(NULL, &step, &decision) == LOWLAT_DISPATCH_STATUS_INVALID);
  lowlat_dispatcher_destroy(NULL);
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
  CHECK(lowlat_dispatch_abi_version() == 1);
  CHECK(strcmp(lowlat_reason_name(LOWLAT_REASON_TP_SIZE), "tp_size") == 0);
  CHECK(strcmp(lowlat_reason_words(9999), "unknown reason") == 0);
  /* The two libraries' statuses are one numbering. */
  CHECK((int)LOWLAT_DISPATCH_STATUS_INVALID == (int)LOWLAT_INVALID);
  CHECK((int)LOWLAT_DISPATCH_STATUS_DECLINE == (int)LOWLAT_UNSUPPORTED);
  CHECK((int)LOWLAT_DISPATCH_STATUS_FAULT == (int)LOWLAT_FAULT);
  CHECK((int)LOWLAT_DISPATCH_STATUS_BUG == (int)LOWLAT_BUG);
  guard_declines_in_words();
  a_ladder_is_checked();
  two_ranks_vote();
  records_and_handles_are_checked();
  a_watchdog_counts();
  printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}
