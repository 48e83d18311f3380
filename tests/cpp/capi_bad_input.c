/* The dispatcher's C face in C11, called wrongly in every way that it promises to survive: each
 * wrong call is a numbered status and words, writes no output, and leaves nothing behind. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "capi_check.h"

static const uint64_t kSecondNs = 1000u * 1000u * 1000u;
static const char kRequirements[] = "{\"name\": \"mine\", \"isas\": [\"cpu\"]}";
static const char kFacts[] = "{\"isa\": \"cpu\", \"tp_size\": 1}";
static const uint32_t kWidths[] = {6};

/* One living handle of every kind. */
struct handles {
  lowlat_servable* servable;
  lowlat_board* board;
  lowlat_seat* seat;
  lowlat_coverage* coverage;
  lowlat_dispatcher* dispatcher;
  lowlat_watchdog* watchdog;
  lowlat_recorder* recorder;
  lowlat_record* record;
};

static lowlat_graph_key good_key(void) {
  const lowlat_graph_key key = {LOWLAT_FACTS_MODE_TARGET_VERIFY, 1, 6, 6, "mine", "cpu", 1, 2};
  return key;
}

static lowlat_ballot good_ballot(void) {
  const lowlat_ballot ballot = {
      kWidths, 1, 1, 2, 3, {kSecondNs, 2 * kSecondNs, 3 * kSecondNs, 4 * kSecondNs}};
  return ballot;
}

static struct handles make_all(void) {
  struct handles all;
  memset(&all, 0, sizeof all);
  const lowlat_graph_key key = good_key();
  lowlat_ballot ballot = good_ballot();
  OK(lowlat_guard(kRequirements, kFacts, &all.servable));
  OK(lowlat_board_create(1, &all.board));
  OK(lowlat_board_seat(all.board, 0, &all.seat));
  OK(lowlat_recorder_create(&all.recorder));
  OK(lowlat_recorder_note(all.recorder, &key, LOWLAT_GRAPH_PATH_FUSED, NULL, 0));
  OK(lowlat_recorder_finish(all.recorder, &all.record));
  OK(lowlat_record_keys_digest(all.record, &ballot.keys_digest));
  OK(lowlat_seat_vote(all.seat, all.servable, &ballot, kSecondNs, &all.coverage));
  OK(lowlat_dispatcher_create(all.coverage, all.record, &all.dispatcher));
  OK(lowlat_watchdog_create(1, 1, &all.watchdog));
  return all;
}

static void destroy_all(struct handles all) {
  OK(lowlat_servable_destroy(all.servable));
  OK(lowlat_board_destroy(all.board));
  OK(lowlat_seat_destroy(all.seat));
  OK(lowlat_coverage_destroy(all.coverage));
  OK(lowlat_dispatcher_destroy(all.dispatcher));
  OK(lowlat_watchdog_destroy(all.watchdog));
  OK(lowlat_recorder_destroy(all.recorder));
  OK(lowlat_record_destroy(all.record));
}

/* Every call that takes a handle, with `all` in its place: refused, in words that hold `words`. */
static void every_handle_is_refused(struct handles all, const char* words) {
  const lowlat_step_facts step = {LOWLAT_FACTS_MODE_DECODE, 1, 1, 1};
  const lowlat_graph_key key = good_key();
  const lowlat_ballot ballot = good_ballot();
  lowlat_decision decision = {1, 2, 3};
  lowlat_health health = LOWLAT_HEALTH_OVERDUE;
  lowlat_seat* seat = NULL;
  lowlat_record* record = NULL;
  lowlat_coverage* coverage = NULL;
  lowlat_dispatcher* dispatcher = NULL;
  const char* text = NULL;
  uint64_t words_out[LOWLAT_BALLOT_WORDS] = {0};
  uint64_t digest = 7;
  uint32_t number = 7;
  INVALID(lowlat_board_seat(all.board, 0, &seat), words);
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 1, &coverage), words);
  INVALID(lowlat_seat_decline(all.seat, LOWLAT_REASON_FEATURE, 1), words);
  INVALID(lowlat_seat_agree_step(all.seat, 1, 1), words);
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, words_out), words);
  INVALID(lowlat_coverage_epoch(all.coverage, &number), words);
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), words);
  INVALID(lowlat_recorder_finish(all.recorder, &record), words);
  INVALID(lowlat_record_text(all.record, &text), words);
  INVALID(lowlat_record_num_graphs(all.record, &number), words);
  INVALID(lowlat_record_keys_digest(all.record, &digest), words);
  INVALID(lowlat_record_digest(all.record, &digest), words);
  INVALID(lowlat_record_compare(all.record, all.record), words);
  INVALID(lowlat_record_check_seals(all.record, 0, NULL, 0), words);
  INVALID(lowlat_dispatcher_create(all.coverage, all.record, &dispatcher), words);
  INVALID(lowlat_dispatcher_decide(all.dispatcher, &step, &decision), words);
  INVALID(lowlat_dispatcher_disarm(all.dispatcher, LOWLAT_REASON_WAIT_EXPIRED), words);
  INVALID(lowlat_dispatcher_switch(all.dispatcher, 0), words);
  INVALID(lowlat_dispatcher_report(all.dispatcher, &text), words);
  INVALID(lowlat_watchdog_arm(all.watchdog, 0), words);
  INVALID(lowlat_watchdog_disarm(all.watchdog), words);
  INVALID(lowlat_watchdog_health(all.watchdog, 0, &health, NULL), words);
  /* Nothing was written. */
  CHECK(seat == NULL && record == NULL && coverage == NULL && dispatcher == NULL && text == NULL);
  CHECK(digest == 7 && number == 7 && decision.key_idx == 2 && health == LOWLAT_HEALTH_OVERDUE);
  CHECK(words_out[1] == 0);
}

static void every_destroy_is_refused(struct handles all, const char* words) {
  INVALID(lowlat_servable_destroy(all.servable), words);
  INVALID(lowlat_board_destroy(all.board), words);
  INVALID(lowlat_seat_destroy(all.seat), words);
  INVALID(lowlat_coverage_destroy(all.coverage), words);
  INVALID(lowlat_dispatcher_destroy(all.dispatcher), words);
  INVALID(lowlat_watchdog_destroy(all.watchdog), words);
  INVALID(lowlat_recorder_destroy(all.recorder), words);
  INVALID(lowlat_record_destroy(all.record), words);
}

/* Handles of the neighbouring kind. */
static struct handles turned(struct handles all) {
  void* slots[8];
  void* moved[8];
  struct handles out;
  _Static_assert(sizeof all == sizeof slots, "eight kinds");
  memcpy(slots, &all, sizeof slots);
  for (int idx = 0; idx < 8; ++idx) moved[idx] = slots[(idx + 1) % 8];
  memcpy(&out, moved, sizeof out);
  return out;
}

/* Pointers that this library never gave. */
static struct handles strangers(void) {
  static int variable = 0;
  void* slots[8];
  struct handles out;
  for (int idx = 0; idx < 8; ++idx) slots[idx] = &variable;
  slots[3] = (void*)1;
  slots[5] = (void*)~(uintptr_t)0;
  memcpy(&out, slots, sizeof out);
  return out;
}

static void handles_are_told_apart(void) {
  struct handles none;
  memset(&none, 0, sizeof none);
  every_handle_is_refused(none, " is NULL");
  every_handle_is_refused(strangers(), " which this library never gave");
  every_destroy_is_refused(strangers(), " which this library never gave");
  struct handles all = make_all();
  every_handle_is_refused(turned(all), "; a lowlat_");
  every_destroy_is_refused(turned(all), "; a lowlat_");
  destroy_all(all);
  every_handle_is_refused(all, " was destroyed before");
  every_destroy_is_refused(all, " was destroyed before");
  /* Places are used again, and old handles stay dead. */
  struct handles again = make_all();
  every_handle_is_refused(all, " was destroyed before");
  every_destroy_is_refused(all, " was destroyed before");
  destroy_all(again);
}

/* Every pointer but a handle. */
static void null_arguments(struct handles all) {
  const lowlat_step_facts step = {LOWLAT_FACTS_MODE_DECODE, 1, 1, 1};
  const lowlat_ballot ballot = good_ballot();
  lowlat_graph_key key = good_key();
  lowlat_seal seal = {"table", "int32", 1, NULL, 0};
  lowlat_decision decision;
  lowlat_servable* servable = NULL;
  lowlat_record* record = NULL;
  lowlat_coverage* coverage = NULL;
  uint64_t words[LOWLAT_BALLOT_WORDS];
  uint64_t digest = 0;
  INVALID(lowlat_guard(NULL, kFacts, &servable), "requirements_json is NULL");
  INVALID(lowlat_guard(kRequirements, NULL, &servable), "facts_json is NULL");
  INVALID(lowlat_guard(kRequirements, kFacts, NULL), "out_servable is NULL");
  INVALID(lowlat_guard_model(NULL, "{}", &servable), "config_json is NULL");
  INVALID(lowlat_guard_model("{}", NULL, &servable), "options_json is NULL");
  INVALID(lowlat_guard_model("{}", "{}", NULL), "out_servable is NULL");
  INVALID(lowlat_ladder_check(NULL), "ladder is NULL");
  INVALID(lowlat_board_create(1, NULL), "out_board is NULL");
  INVALID(lowlat_board_seat(all.board, 0, NULL), "out_seat is NULL");
  INVALID(lowlat_seat_vote(all.seat, NULL, &ballot, 1, &coverage), "servable is NULL");
  INVALID(lowlat_seat_vote(all.seat, all.servable, NULL, 1, &coverage), "parts is NULL");
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 1, NULL), "out_coverage is NULL");
  INVALID(lowlat_ballot_words(all.servable, 0, NULL, words), "parts is NULL");
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, NULL), "out_words is NULL");
  INVALID(lowlat_ballot_words_declining(0, 1, LOWLAT_REASON_FEATURE, NULL), "out_words is NULL");
  INVALID(lowlat_ballots_agree(0, NULL, 1, &coverage), "words is NULL");
  INVALID(lowlat_ballots_agree(0, words, 1, NULL), "out_coverage is NULL");
  INVALID(lowlat_coverage_epoch(all.coverage, NULL), "out_epoch is NULL");
  INVALID(lowlat_recorder_create(NULL), "out_recorder is NULL");
  INVALID(lowlat_recorder_note(all.recorder, NULL, 0, NULL, 0), "key is NULL");
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 1), "seals is NULL");
  seal.num_dims = 1;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 1), "dimensions is NULL");
  seal.name = NULL;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 1), "a seal's name is NULL");
  seal.name = "table";
  seal.dtype = NULL;
  INVALID(lowlat_record_check_seals(all.record, 0, &seal, 1), "a seal's dtype is NULL");
  key.isa = NULL;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "the key's isa is NULL");
  key.shape = NULL;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "the key's shape is NULL");
  INVALID(lowlat_recorder_finish(all.recorder, NULL), "out_record is NULL");
  INVALID(lowlat_record_read(NULL, &record), "text is NULL");
  INVALID(lowlat_record_read("{}", NULL), "out_record is NULL");
  INVALID(lowlat_record_text(all.record, NULL), "out_text is NULL");
  INVALID(lowlat_record_num_graphs(all.record, NULL), "out_num_graphs is NULL");
  INVALID(lowlat_record_keys_digest(all.record, NULL), "out_digest is NULL");
  INVALID(lowlat_record_digest(all.record, NULL), "out_digest is NULL");
  INVALID(lowlat_record_compare(all.record, NULL), "second is NULL");
  INVALID(lowlat_dispatcher_create(all.coverage, NULL, &all.dispatcher), "record is NULL");
  INVALID(lowlat_dispatcher_create(all.coverage, all.record, NULL), "out_dispatcher is NULL");
  INVALID(lowlat_dispatcher_decide(all.dispatcher, NULL, &decision), "step is NULL");
  INVALID(lowlat_dispatcher_decide(all.dispatcher, &step, NULL), "out_decision is NULL");
  INVALID(lowlat_dispatcher_report(all.dispatcher, NULL), "out_json is NULL");
  INVALID(lowlat_step_digest(NULL, &digest), "step is NULL");
  INVALID(lowlat_step_digest(&step, NULL), "out_digest is NULL");
  INVALID(lowlat_watchdog_create(1, 1, NULL), "out_watchdog is NULL");
  INVALID(lowlat_watchdog_health(all.watchdog, 0, NULL, NULL), "out_health is NULL");
  CHECK(servable == NULL && record == NULL && coverage == NULL);
}

/* A count beyond what the list could hold is refused before the list is looked at. */
static void oversize_counts(struct handles all) {
  lowlat_ballot ballot = good_ballot();
  const lowlat_graph_key key = good_key();
  const int64_t shape[] = {1};
  lowlat_seal seal = {"table", "int32", 1, shape, 0xffffffffu};
  lowlat_coverage* coverage = NULL;
  uint64_t words[LOWLAT_BALLOT_WORDS] = {0};
  ballot.num_widths = 0xffffffffu;
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 1, &coverage),
          "4294967295 widths are too many; 32 at most");
  ballot.num_widths = 33;
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, words), "33 widths are too many");
  ballot.num_widths = 0;
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, words), "widths are []; a vote needs 1 to");
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 0xffffffffu),
          "4294967295 seals are too many; 4096 at most");
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 1),
          "4294967295 dimensions are too many; 16 at most");
  INVALID(lowlat_ballots_agree(0, words, 65, &coverage), "65 ballots are too many; 64 at most");
  INVALID(lowlat_ballots_agree(0, words, 0xffffffffu, &coverage), "too many; 64 at most");
  INVALID(lowlat_board_create(0, &all.board), "tp_size is 0; a vote needs 1 to 64");
  INVALID(lowlat_board_create(65, &all.board), "tp_size is 65; a vote needs 1 to 64");
  INVALID(lowlat_board_create(0xffffffffu, &all.board), "a vote needs 1 to 64");
}

/* A pointer that no such value can have is refused before it is followed. */
static void pointers_that_are_not_aligned(struct handles all) {
  static uint64_t places[LOWLAT_BALLOT_WORDS + 1];
  char* const odd = (char*)places + 1;
  lowlat_ballot ballot = good_ballot();
  lowlat_coverage* coverage = NULL;
  uint64_t words[LOWLAT_BALLOT_WORDS];
  INVALID(lowlat_ballot_words(all.servable, 0, (void*)odd, words), "parts is not aligned");
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, (void*)odd), "out_words is not aligned");
  ballot.widths = (void*)odd;
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, words), "widths is not aligned");
  INVALID(lowlat_ballots_agree(0, (void*)odd, 1, &coverage), "ballots is not aligned");
  INVALID(lowlat_coverage_epoch(all.coverage, (void*)odd), "out_epoch is not aligned");
  CHECK(coverage == NULL);
}

/* What the guard has checked for one size says nothing about a group of another. */
static void a_servable_of_another_size(struct handles all) {
  const lowlat_ballot ballot = good_ballot();
  lowlat_board* board = NULL;
  lowlat_seat* seat = NULL;
  lowlat_coverage* coverage = NULL;
  OK(lowlat_board_create(2, &board));
  OK(lowlat_board_seat(board, 0, &seat));
  INVALID(lowlat_seat_vote(seat, all.servable, &ballot, 1, &coverage),
          "servable was checked for tp 1; this group has 2 ranks");
  CHECK(coverage == NULL);
  OK(lowlat_seat_destroy(seat));
  OK(lowlat_board_destroy(board));
}

static void texts_that_are_none(struct handles all) {
  static const char kBroken[] = "\xff\xfe{";
  lowlat_graph_key key = good_key();
  lowlat_seal seal = {kBroken, "int32", 1, NULL, 0};
  lowlat_servable* servable = NULL;
  lowlat_record* record = NULL;
  static char deep[40001];
  memset(deep, '[', sizeof deep - 1);
  INVALID(lowlat_guard(kBroken, kFacts, &servable), "requirements_json is not UTF-8");
  INVALID(lowlat_guard_model(kBroken, "{}", &servable), "config_json is not UTF-8");
  INVALID(lowlat_guard(kRequirements, deep, &servable), "facts: ");
  INVALID(lowlat_guard(deep, kFacts, &servable), "requirements: ");
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 1), "a seal's name is not UTF-8");
  seal.name = "table";
  seal.dtype = kBroken;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, &seal, 1), "a seal's dtype is not UTF-8");
  key.shape = kBroken;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "the key's shape is not UTF-8");
  INVALID(lowlat_record_read(kBroken, &record), "text is not UTF-8");
  INVALID(lowlat_record_read("", &record), "not a graph record");
  INVALID(lowlat_record_read("{}", &record), "not a graph record");
  INVALID(lowlat_record_read(deep, &record), "not a graph record");
  CHECK(servable == NULL && record == NULL);
}

static void numbers_out_of_range(struct handles all) {
  lowlat_ballot ballot = good_ballot();
  const uint32_t descending[] = {12, 6};
  lowlat_graph_key key = good_key();
  lowlat_step_facts step = {77, 1, 1, 1};
  lowlat_decision decision = {1, 2, 3};
  lowlat_coverage* coverage = NULL;
  lowlat_seat* seat = NULL;
  uint64_t words[LOWLAT_BALLOT_WORDS] = {0};
  INVALID(lowlat_board_seat(all.board, 1, &seat), "tp_rank is 1; it must be below tp_size, 1");
  INVALID(lowlat_board_seat(all.board, 0xffffffffu, &seat), "it must be below tp_size, 1");
  INVALID(lowlat_board_seat(all.board, 0, &seat), "the seat of rank 0 is taken");
  INVALID(lowlat_ballot_words(all.servable, 1, &ballot, words), "it must be below tp_size, 1");
  INVALID(lowlat_ballot_words_declining(2, 2, LOWLAT_REASON_FEATURE, words), "below tp_size, 2");
  INVALID(lowlat_ballot_words_declining(0, 65, LOWLAT_REASON_FEATURE, words), "1 to 64");
  INVALID(lowlat_ballot_words_declining(0, 1, 9999, words), "9999 is no lowlat_reason");
  INVALID(lowlat_ballots_agree(1, words, 1, &coverage), "it must be below num_ranks, 1");
  INVALID(lowlat_ballots_agree(0, words, 0, &coverage), "it must be below num_ranks, 0");
  INVALID(lowlat_seat_decline(all.seat, 0, 1), "0 is no lowlat_reason");
  ballot.widths = descending;
  ballot.num_widths = 2;
  INVALID(lowlat_ballot_words(all.servable, 0, &ballot, words), "ascending row counts above 0");
  INVALID(lowlat_dispatcher_decide(all.dispatcher, &step, &decision), "mode is 77");
  CHECK(decision.key_idx == 2);
  step.mode = LOWLAT_FACTS_MODE_IDLE;
  step.batch_size = step.tokens_per_request = step.rows = 0xffffffffu;
  OK(lowlat_dispatcher_decide(all.dispatcher, &step, &decision));
  CHECK(decision.reason == LOWLAT_REASON_STEP_IS_IDLE);
  INVALID(lowlat_dispatcher_disarm(all.dispatcher, 1), "1 is no lowlat_reason");
  INVALID(lowlat_record_check_seals(all.record, 1, NULL, 0), "the record holds 1 graphs");
  INVALID(lowlat_record_check_seals(all.record, 0xffffffffu, NULL, 0), "the record holds 1 graphs");
  key.mode = LOWLAT_FACTS_MODE_EXTEND;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "mode is 2; a graph runs");
  key = good_key();
  INVALID(lowlat_recorder_note(all.recorder, &key, 3, NULL, 0), "a lowlat_graph_path is needed");
  key.width = 5;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "at least 6 rows");
  key.batch_size = 0;
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "must be above 0");
  key = good_key();
  OK(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0));
  INVALID(lowlat_recorder_note(all.recorder, &key, 0, NULL, 0), "captured twice");
  CHECK(coverage == NULL && seat == NULL);
}

static void budgets_out_of_the_ladder(struct handles all) {
  lowlat_ballot ballot = good_ballot();
  lowlat_coverage* coverage = NULL;
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 0, &coverage),
          "budget is 0 ns; it must be longer than 0");
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 3 * kSecondNs, &coverage),
          "a wait of the plugin must be shorter than the collective budget, 3000000000 ns");
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, ~(uint64_t)0, &coverage),
          "must be shorter than the collective budget");
  INVALID(lowlat_seat_decline(all.seat, LOWLAT_REASON_FEATURE, 0),
          "budget is 0 ns; it must be longer than 0");
  INVALID(lowlat_seat_agree_step(all.seat, 1, 0), "budget is 0 ns; it must be longer than 0");
  INVALID(lowlat_seat_agree_step(all.seat, 1, 3 * kSecondNs),
          "must be shorter than the collective budget");
  ballot.ladder.plugin_ns = 0;
  INVALID(lowlat_seat_vote(all.seat, all.servable, &ballot, 1, &coverage), "plugin budget is 0 ns");
  INVALID(lowlat_watchdog_create(0, 1, &all.watchdog), "above 0 ns");
  INVALID(lowlat_watchdog_create(1, 0, &all.watchdog), "above 0 ns");
  OK(lowlat_watchdog_arm(all.watchdog, 5));
  INVALID(lowlat_watchdog_arm(all.watchdog, 5), "the watchdog is armed");
  CHECK(coverage == NULL);
}

/* A record that is not what all ranks agreed on. */
static void another_record(struct handles all) {
  lowlat_record* record = NULL;
  lowlat_dispatcher* dispatcher = NULL;
  lowlat_graph_key key = good_key();
  key.isa = "another";
  OK(lowlat_recorder_note(all.recorder, &key, LOWLAT_GRAPH_PATH_FUSED, NULL, 0));
  OK(lowlat_recorder_finish(all.recorder, &record));
  CHECK(lowlat_dispatcher_create(all.coverage, record, &dispatcher) == LOWLAT_DISPATCH_STATUS_BUG);
  CHECK(strstr(lowlat_dispatch_last_error(), "that all ranks agreed on") != NULL);
  CHECK(dispatcher == NULL);
  OK(lowlat_record_destroy(record));
}

static void* wait_alone(void* seat) {
  static lowlat_dispatch_status status;
  /* The main thread's looks may come first, and refuse this one. */
  do {
    status = lowlat_seat_agree_step(seat, 1, kSecondNs / 2);
  } while (status == LOWLAT_DISPATCH_STATUS_INVALID);
  return &status;
}

/* A second thread on a handle in use is refused, and the one that uses it ends as it should. */
static void a_handle_in_use(void) {
  lowlat_board* board = NULL;
  lowlat_seat* seat = NULL;
  pthread_t thread;
  void* status = NULL;
  int refused = 0;
  OK(lowlat_board_create(2, &board));
  OK(lowlat_board_seat(board, 0, &seat));
  CHECK(pthread_create(&thread, NULL, wait_alone, seat) == 0);
  /* A budget of 0 is refused too, in other words, until the other thread is inside its vote. */
  for (int tries = 0; tries < 2000000 && !refused; ++tries) {
    refused = lowlat_seat_agree_step(seat, 1, 0) == LOWLAT_DISPATCH_STATUS_INVALID &&
              strstr(lowlat_dispatch_last_error(), "in use by another call") != NULL;
  }
  CHECK(refused);
  INVALID(lowlat_seat_destroy(seat), "seat is in use by another call");
  CHECK(pthread_join(thread, &status) == 0);
  CHECK(*(lowlat_dispatch_status*)status == LOWLAT_DISPATCH_STATUS_FAULT);
  OK(lowlat_seat_destroy(seat));
  OK(lowlat_board_destroy(board));
}

static void more_handles_than_can_live(void) {
  static lowlat_watchdog* watchdogs[65537];
  uint32_t count = 0;
  while (count < 65537 && lowlat_watchdog_create(1, 1, &watchdogs[count]) == 0) ++count;
  CHECK(count == 65536);
  INVALID(lowlat_watchdog_create(1, 1, &watchdogs[count]), "65536 handles are alive");
  CHECK(watchdogs[count] == NULL);
  while (0 < count) lowlat_watchdog_destroy(watchdogs[--count]);
}

int main(void) {
  handles_are_told_apart();
  struct handles all = make_all();
  null_arguments(all);
  oversize_counts(all);
  pointers_that_are_not_aligned(all);
  a_servable_of_another_size(all);
  texts_that_are_none(all);
  numbers_out_of_range(all);
  budgets_out_of_the_ladder(all);
  another_record(all);
  destroy_all(all);
  a_handle_in_use();
  CHECK(lowlat_dispatch_num_handles() == 0);
  more_handles_than_can_live();
  CHECK(lowlat_dispatch_num_handles() == 0);
  return closing();
}
