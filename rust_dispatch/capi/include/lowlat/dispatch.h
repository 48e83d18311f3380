/* lowlat/dispatch.h: the C ABI of the dispatcher: guard, vote, dispatcher, watchdog.
 *
 * Made by `make header` from rust_dispatch/capi; do not edit.
 *
 * The order of calls on one rank:
 *
 *   lowlat_guard  ->  lowlat_board_seat  ->  lowlat_seat_vote  ->  lowlat_dispatcher_create
 *   ->  lowlat_dispatcher_decide ...
 *
 * Parameters are handle, inputs, outputs. A call that does not return LOWLAT_DISPATCH_STATUS_OK has
 * written no output, unless it says so; lowlat_dispatch_last_error() gives the reason. Handles are
 * opaque: destroy each once; NULL is allowed there. Calls on one handle are made by one thread at
 * a time, but lowlat_board_seat may be called by any thread at any time. No call unwinds into the
 * caller: a broken assertion of ours is LOWLAT_DISPATCH_STATUS_BUG. Text is UTF-8.
 */
/* clang-format off */


#ifndef LOWLAT_DISPATCH_H_
#define LOWLAT_DISPATCH_H_

#include <stdint.h>

/**
 * What became of a call; the numbers are those of lowlat_status in lowlat/kernels.h.
 */
typedef enum lowlat_dispatch_status {
  /**
   * It did what it says.
   */
  LOWLAT_DISPATCH_STATUS_OK = 0,
  /**
   * An argument is wrong.
   */
  LOWLAT_DISPATCH_STATUS_INVALID = 1,
  /**
   * A decline: right in itself, but not ours to run; the engine runs its own forward.
   */
  LOWLAT_DISPATCH_STATUS_DECLINE = 2,
  /**
   * A rank is missing or a seal is broken; the plugin is disarmed for good.
   */
  LOWLAT_DISPATCH_STATUS_FAULT = 3,
  /**
   * We broke our own rule; treat it as a fault.
   */
  LOWLAT_DISPATCH_STATUS_BUG = 4,
} lowlat_dispatch_status;

/**
 * What the watchdog says of the work that is running.
 */
enum lowlat_health
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Nothing runs.
   */
  LOWLAT_HEALTH_IDLE = 0,
  /**
   * It runs within its budget.
   */
  LOWLAT_HEALTH_ON_TIME = 1,
  /**
   * It should have ended.
   */
  LOWLAT_HEALTH_OVERDUE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lowlat_health lowlat_health;
#else
typedef uint32_t lowlat_health;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A numbered reason. The numbers are the same in the C header and in Python.
 */
enum lowlat_reason
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The machine code of this device is not built.
   */
  LOWLAT_REASON_ISA = 101,
  /**
   * The tensor-parallel size is not built.
   */
  LOWLAT_REASON_TP_SIZE = 102,
  /**
   * The model's dtype is not built.
   */
  LOWLAT_REASON_DTYPE = 103,
  /**
   * A field of the model has another value.
   */
  LOWLAT_REASON_MODEL_FIELD = 104,
  /**
   * A size does not divide over the ranks.
   */
  LOWLAT_REASON_DIVIDES = 105,
  /**
   * A server argument has another value.
   */
  LOWLAT_REASON_SERVER_ARGUMENT = 106,
  /**
   * An environment variable has another value.
   */
  LOWLAT_REASON_ENVIRONMENT = 107,
  /**
   * The device has too few blocks that run at the same time.
   */
  LOWLAT_REASON_RESIDENT_BLOCKS = 108,
  /**
   * A feature is in use that these kernels do not accept.
   */
  LOWLAT_REASON_FEATURE = 109,
  /**
   * A loaded tensor is missing.
   */
  LOWLAT_REASON_TENSOR_MISSING = 110,
  /**
   * A loaded tensor has another dtype.
   */
  LOWLAT_REASON_TENSOR_DTYPE = 111,
  /**
   * A loaded tensor has another shape.
   */
  LOWLAT_REASON_TENSOR_SHAPE = 112,
  /**
   * A loaded tensor is laid out otherwise.
   */
  LOWLAT_REASON_TENSOR_LAYOUT = 113,
  /**
   * The model's configuration cannot be read as one that these kernels know.
   */
  LOWLAT_REASON_MODEL_CONFIG = 114,
  /**
   * The engine is of a release that this plugin was not made for.
   */
  LOWLAT_REASON_ENGINE_VERSION = 115,
  /**
   * The installed kernel library has no kernels for this device.
   */
  LOWLAT_REASON_KERNELS_MISSING = 116,
  /**
   * The step runs prompt rows.
   */
  LOWLAT_REASON_STEP_IS_EXTEND = 201,
  /**
   * The step mixes prompt rows and decode rows.
   */
  LOWLAT_REASON_STEP_IS_MIXED = 202,
  /**
   * The step runs no rows.
   */
  LOWLAT_REASON_STEP_IS_IDLE = 203,
  /**
   * No graph of this mode was captured.
   */
  LOWLAT_REASON_MODE_NOT_CAPTURED = 204,
  /**
   * The step has another number of tokens a request than the graphs of its mode.
   */
  LOWLAT_REASON_TOKENS_PER_REQUEST = 205,
  /**
   * The batch is larger than every captured one.
   */
  LOWLAT_REASON_BATCH_TOO_LARGE = 206,
  /**
   * The rows are not batch size times tokens a request.
   */
  LOWLAT_REASON_ROWS_RAGGED = 207,
  /**
   * The plain path was chosen for this step at capture.
   */
  LOWLAT_REASON_PLAIN_AT_CAPTURE = 208,
  /**
   * The plugin is switched off.
   */
  LOWLAT_REASON_PLUGIN_OFF = 209,
  /**
   * A fault happened before; the plugin is disarmed for good.
   */
  LOWLAT_REASON_DISARMED = 210,
  /**
   * Ranks cover other widths.
   */
  LOWLAT_REASON_VOTE_WIDTHS = 301,
  /**
   * Ranks cover other graph keys.
   */
  LOWLAT_REASON_VOTE_KEYS = 302,
  /**
   * Ranks have another launch geometry.
   */
  LOWLAT_REASON_VOTE_GEOMETRY = 303,
  /**
   * Ranks carry another kernel catalogue.
   */
  LOWLAT_REASON_VOTE_CATALOGUE = 304,
  /**
   * Ranks have another deadline ladder.
   */
  LOWLAT_REASON_VOTE_LADDER = 305,
  /**
   * Ranks believe in another tensor-parallel size, or not every rank voted once.
   */
  LOWLAT_REASON_VOTE_GROUP = 306,
  /**
   * A rank declines; all decline with it.
   */
  LOWLAT_REASON_VOTE_RANK_DECLINES = 307,
  /**
   * Ranks are about to run other steps.
   */
  LOWLAT_REASON_VOTE_STEP = 308,
  /**
   * Ranks checked against other requirements or another model.
   */
  LOWLAT_REASON_VOTE_REQUIREMENTS = 309,
  /**
   * A rank did not answer by the deadline.
   */
  LOWLAT_REASON_RANK_MISSING = 401,
  /**
   * A wait in a kernel passed its deadline.
   */
  LOWLAT_REASON_WAIT_EXPIRED = 402,
  /**
   * A peer raised the abort word.
   */
  LOWLAT_REASON_ABORTED_BY_PEER = 403,
  /**
   * The host raised the abort word.
   */
  LOWLAT_REASON_ABORTED_BY_HOST = 404,
  /**
   * What a captured graph reads was moved, reshaped or retyped since capture.
   */
  LOWLAT_REASON_SEAL_CHANGED = 405,
  /**
   * A step did not end within its budget.
   */
  LOWLAT_REASON_STEP_OVERDUE = 406,
  /**
   * The device reported an error.
   */
  LOWLAT_REASON_DEVICE = 407,
  /**
   * This rank is behind the others, or joined a group that has faulted.
   */
  LOWLAT_REASON_EPOCH_STALE = 408,
  /**
   * An assertion of ours failed.
   */
  LOWLAT_REASON_BUG = 501,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lowlat_reason lowlat_reason;
#else
typedef uint32_t lowlat_reason;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Which step the engine is about to run; the values of `mode` in lowlat_step_facts.
 */
enum lowlat_facts_mode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * One row a request.
   */
  LOWLAT_FACTS_MODE_DECODE = 0,
  /**
   * The anchor and its drafts.
   */
  LOWLAT_FACTS_MODE_TARGET_VERIFY = 1,
  /**
   * Prompt rows.
   */
  LOWLAT_FACTS_MODE_EXTEND = 2,
  /**
   * The draft's proposals.
   */
  LOWLAT_FACTS_MODE_DRAFT = 3,
  /**
   * Prompt rows and decode rows together.
   */
  LOWLAT_FACTS_MODE_MIXED = 4,
  /**
   * No rows.
   */
  LOWLAT_FACTS_MODE_IDLE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lowlat_facts_mode lowlat_facts_mode;
#else
typedef uint32_t lowlat_facts_mode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A group of ranks that are threads of this process.
 */
typedef struct lowlat_board lowlat_board;

/**
 * Proof that all ranks cover the same.
 */
typedef struct lowlat_coverage lowlat_coverage;

/**
 * Decides which captured graph runs a step.
 */
typedef struct lowlat_dispatcher lowlat_dispatcher;

/**
 * One rank's place in a group. It may outlive the board's handle.
 */
typedef struct lowlat_seat lowlat_seat;

/**
 * Proof that the guard found nothing against serving on this rank.
 */
typedef struct lowlat_servable lowlat_servable;

/**
 * Counts time against a budget. Owns no clock and no thread; the caller polls it.
 */
typedef struct lowlat_watchdog lowlat_watchdog;

/**
 * What a step is, from host state that every rank shares.
 */
typedef struct lowlat_step_facts {
  /**
   * A lowlat_facts_mode.
   */
  uint32_t mode;
  /**
   * Requests.
   */
  uint32_t batch_size;
  /**
   * Rows a request; 0 where requests differ.
   */
  uint32_t tokens_per_request;
  /**
   * Rows of the step.
   */
  uint32_t rows;
} lowlat_step_facts;

/**
 * What runs a step.
 */
typedef struct lowlat_decision {
  /**
   * 0 when a captured graph runs it, else the lowlat_reason why the engine's own forward does.
   */
  uint32_t reason;
  /**
   * The graph's place in the record; 0 when none runs it.
   */
  uint32_t key_idx;
  /**
   * The graph's batch size, to which the batch is padded; 0 when none runs it.
   */
  uint32_t padded_batch;
} lowlat_decision;

/**
 * Four budgets in nanoseconds, each shorter than the next.
 */
typedef struct lowlat_ladder {
  /**
   * A wait in a kernel.
   */
  uint64_t kernel_ns;
  /**
   * The plugin's wait for a step.
   */
  uint64_t plugin_ns;
  /**
   * The collective library's wait.
   */
  uint64_t collective_ns;
  /**
   * The engine's watchdog.
   */
  uint64_t engine_ns;
} lowlat_ladder;

/**
 * What a rank would run. All ranks must have the same.
 */
typedef struct lowlat_ballot {
  /**
   * Row counts that were built, ascending: `num_widths` of them, 1 to 32.
   */
  const uint32_t *widths;
  /**
   * How many.
   */
  uint32_t num_widths;
  /**
   * Digest of the graph keys, see lowlat_record_keys_digest.
   */
  uint64_t keys_digest;
  /**
   * Digest of grids, blocks and scratch.
   */
  uint64_t geometry_digest;
  /**
   * lowlat_model_catalogue_digest of lowlat/kernels.h.
   */
  uint64_t catalogue_digest;
  /**
   * Deadlines of every wait.
   */
  struct lowlat_ladder ladder;
} lowlat_ballot;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Version of this ABI; an engine refuses another than its header's.
 */
uint32_t lowlat_dispatch_abi_version(void);

/**
 * The calling thread's last call that did not return LOWLAT_DISPATCH_STATUS_OK, in words, one line
 * a reason; "" before any. Valid until that thread's next call into this library.
 */
const char *lowlat_dispatch_last_error(void);

/**
 * Digest of a graph record's keys, for the ballot.
 *
 * # Safety
 * `record_json` is NULL or NUL-terminated; `out_digest` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_keys_digest(const char *record_json,
                                                      uint64_t *out_digest);

/**
 * A dispatcher over what was captured, a graph record as JSON. The record must hold the keys and
 * widths that all ranks agreed on; anything else is LOWLAT_DISPATCH_STATUS_BUG: the peers go on.
 *
 * # Safety
 * `coverage` is NULL or alive; `record_json` is NULL or NUL-terminated; `out_dispatcher` is NULL
 * or valid for a write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_create(const struct lowlat_coverage *coverage,
                                                     const char *record_json,
                                                     struct lowlat_dispatcher **out_dispatcher);

/**
 * Frees a dispatcher and its report.
 *
 * # Safety
 * `dispatcher` is NULL or came from lowlat_dispatcher_create and was not destroyed before.
 */
void lowlat_dispatcher_destroy(struct lowlat_dispatcher *dispatcher);

/**
 * Decides what runs a step, and counts it. Allocates nothing. A step that no graph runs is
 * LOWLAT_DISPATCH_STATUS_OK with a reason: it is an answer.
 *
 * # Safety
 * `dispatcher` is NULL or alive and used by no other thread; `step` is NULL or does not change
 * during the call; `out_decision` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_decide(struct lowlat_dispatcher *dispatcher,
                                                     const struct lowlat_step_facts *step,
                                                     struct lowlat_decision *out_decision);

/**
 * Disarms for good after a fault, a lowlat_reason. The first fault is kept.
 *
 * # Safety
 * `dispatcher` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_dispatcher_disarm(struct lowlat_dispatcher *dispatcher,
                                                     uint32_t fault);

/**
 * Switches the plugin on (not 0) or off (0) between steps; all ranks do it together.
 *
 * # Safety
 * `dispatcher` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_dispatcher_switch(struct lowlat_dispatcher *dispatcher,
                                                     uint32_t on);

/**
 * What was decided so far, as JSON: "covered", "uncovered", "covered_by_key",
 * "uncovered_by_reason", "fault". Valid until the next call of this function or of
 * lowlat_dispatcher_destroy.
 *
 * # Safety
 * `dispatcher` is NULL or alive and used by no other thread; `out_json` is NULL or valid for a
 * write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_report(struct lowlat_dispatcher *dispatcher,
                                                     const char **out_json);

/**
 * Checks a model's published config.json against the built-in kernels. `options_json` holds
 * "tp_size", "isa", "dtype", "page_size", "moe_runner_backend", "server_args", "env", "features"
 * and "resident_blocks", each of which may be left out. LOWLAT_DISPATCH_STATUS_DECLINE puts every
 * reason, one a line, into the last error.
 *
 * # Safety
 * The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
 * or valid for a write.
 */
enum lowlat_dispatch_status lowlat_guard(const char *config_json,
                                         const char *options_json,
                                         struct lowlat_servable **out_servable);

/**
 * Frees a proof.
 *
 * # Safety
 * `servable` is NULL or came from lowlat_guard and was not destroyed before.
 */
void lowlat_servable_destroy(struct lowlat_servable *servable);

/**
 * Whether the budgets are above 0 and in order; LOWLAT_DISPATCH_STATUS_INVALID names each that is
 * not.
 *
 * # Safety
 * `ladder` is NULL or points to a ladder that does not change during the call.
 */
enum lowlat_dispatch_status lowlat_ladder_check(const struct lowlat_ladder *ladder);

/**
 * The name of a lowlat_reason, such as "tp_size". Lives as long as the library.
 */
const char *lowlat_reason_name(uint32_t number);

/**
 * A lowlat_reason in words. Lives as long as the library.
 */
const char *lowlat_reason_words(uint32_t number);

/**
 * A group of `tp_size` ranks, 1 to 64.
 *
 * # Safety
 * `out_board` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_board_create(uint32_t tp_size, struct lowlat_board **out_board);

/**
 * Frees a group's handle; seats that were given keep the group alive.
 *
 * # Safety
 * `board` is NULL or came from lowlat_board_create and was not destroyed before.
 */
void lowlat_board_destroy(struct lowlat_board *board);

/**
 * The seat of one rank, given once: a rank that was started again needs a new group.
 *
 * # Safety
 * `board` is NULL or a living group; `out_seat` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_board_seat(const struct lowlat_board *board,
                                              uint32_t tp_rank,
                                              struct lowlat_seat **out_seat);

/**
 * Frees a seat; it is not given again.
 *
 * # Safety
 * `seat` is NULL or came from lowlat_board_seat and was not destroyed before.
 */
void lowlat_seat_destroy(struct lowlat_seat *seat);

/**
 * Votes on coverage; every rank of the group calls it. Ends within `budget_ns`.
 * LOWLAT_DISPATCH_STATUS_DECLINE when ranks differ, LOWLAT_DISPATCH_STATUS_FAULT when one is
 * missing; every rank gets the same, and the same words.
 *
 * # Safety
 * Handles are NULL or alive and used by no other thread; `parts` and its widths are NULL or do
 * not change during the call; `out_coverage` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_seat_vote(struct lowlat_seat *seat,
                                             const struct lowlat_servable *servable,
                                             const struct lowlat_ballot *parts,
                                             uint64_t budget_ns,
                                             struct lowlat_coverage **out_coverage);

/**
 * Takes part in the vote as a rank that cannot serve, for a lowlat_reason, so that its peers
 * decline with it at once. Never returns LOWLAT_DISPATCH_STATUS_OK.
 *
 * # Safety
 * `seat` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_seat_decline(struct lowlat_seat *seat,
                                                uint32_t reason,
                                                uint64_t budget_ns);

/**
 * The hot vote: whether all ranks are about to run the step with this digest. No allocation, and
 * no system call when the peers are there. LOWLAT_DISPATCH_STATUS_DECLINE when ranks differ, then
 * the group may go on; LOWLAT_DISPATCH_STATUS_FAULT when one is missing.
 *
 * # Safety
 * `seat` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_seat_agree_step(struct lowlat_seat *seat,
                                                   uint64_t digest,
                                                   uint64_t budget_ns);

/**
 * The epoch of the vote that agreed.
 *
 * # Safety
 * `coverage` is NULL or alive; `out_epoch` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_coverage_epoch(const struct lowlat_coverage *coverage,
                                                  uint32_t *out_epoch);

/**
 * Frees a proof of agreement.
 *
 * # Safety
 * `coverage` is NULL or came from lowlat_seat_vote and was not destroyed before.
 */
void lowlat_coverage_destroy(struct lowlat_coverage *coverage);

/**
 * A watchdog for work of at most `budget_ns`, in which one gap between two polls counts at most
 * `max_gap_ns`: while a machine sleeps, nothing can be late.
 *
 * # Safety
 * `out_watchdog` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_watchdog_create(uint64_t budget_ns,
                                                   uint64_t max_gap_ns,
                                                   struct lowlat_watchdog **out_watchdog);

/**
 * Frees a watchdog.
 *
 * # Safety
 * `watchdog` is NULL or came from lowlat_watchdog_create and was not destroyed before.
 */
void lowlat_watchdog_destroy(struct lowlat_watchdog *watchdog);

/**
 * Work begins; refused while work runs.
 *
 * # Safety
 * `watchdog` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_watchdog_arm(struct lowlat_watchdog *watchdog, uint64_t now_ns);

/**
 * Work has ended.
 *
 * # Safety
 * `watchdog` is NULL or alive and used by no other thread.
 */
enum lowlat_dispatch_status lowlat_watchdog_disarm(struct lowlat_watchdog *watchdog);

/**
 * Counts the time since the last look. `out_late_ns` gets the time past the budget, else 0; it
 * may be NULL.
 *
 * # Safety
 * `watchdog` is NULL or alive and used by no other thread; the outputs are NULL or valid for a
 * write.
 */
enum lowlat_dispatch_status lowlat_watchdog_health(struct lowlat_watchdog *watchdog,
                                                   uint64_t now_ns,
                                                   lowlat_health *out_health,
                                                   uint64_t *out_late_ns);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LOWLAT_DISPATCH_H_ */
