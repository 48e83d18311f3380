/* lowlat/dispatch.h: the C ABI of the dispatcher: guard, vote, records, dispatcher, watchdog.
 *
 * Made by `make header` from rust_dispatch/capi; do not edit. docs/embedding.md walks through it.
 *
 * The order of calls on one rank:
 *
 *   lowlat_dispatch_check_abi  ->  lowlat_guard  ->  lowlat_group_join (processes of one host) or
 *   lowlat_board_seat (threads)  ->  lowlat_recorder_note ...  ->  lowlat_recorder_finish
 *   ->  lowlat_seat_vote  ->  lowlat_dispatcher_create
 *   ->  lowlat_dispatcher_decide, lowlat_seat_agree_step ...
 *
 * Parameters are handle, inputs, outputs. A call that does not return LOWLAT_DISPATCH_STATUS_OK has
 * written no output, unless it says so; lowlat_dispatch_last_error() gives the reason in words,
 * lowlat_dispatch_last_reason() as a number.
 *
 * A handle is opaque and never dereferenced: NULL, a pointer that this library never gave, a handle
 * of another kind, one that was destroyed and one that another call is using are each refused with
 * LOWLAT_DISPATCH_STATUS_INVALID. Destroy each handle once; at most 65536 live at a time. Handles
 * hold for one process: after fork(), a child uses none of its parent's.
 *
 * No call unwinds into the caller: a broken assertion of ours is LOWLAT_DISPATCH_STATUS_BUG. Every
 * call ends: those that wait take a budget. Text is UTF-8, and ends with NUL. Every function says
 * who owns what, which threads may call it, and which errors it gives.
 */
/* clang-format off */


#ifndef LOWLAT_DISPATCH_H_
#define LOWLAT_DISPATCH_H_

#include <stdint.h>

/** The ABI of this header, for lowlat_dispatch_check_abi. */
#define LOWLAT_DISPATCH_ABI_VERSION 2u

/** Words of a ballot, see lowlat_ballot_words. */
#define LOWLAT_BALLOT_WORDS 27u

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
   * A living group has this name.
   */
  LOWLAT_REASON_GROUP_IN_USE = 117,
  /**
   * Shared memory is full, or not permitted.
   */
  LOWLAT_REASON_SHARED_MEMORY = 118,
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
   * Two processes have one rank's number.
   */
  LOWLAT_REASON_RANK_TAKEN = 310,
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
 * What runs a captured graph; the values of `path` in lowlat_recorder_note.
 */
enum lowlat_graph_path
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * A few resident kernels a layer.
   */
  LOWLAT_GRAPH_PATH_PERSISTENT = 0,
  /**
   * Chains of kernels.
   */
  LOWLAT_GRAPH_PATH_FUSED = 1,
  /**
   * The engine's own forward: captured, but not ours.
   */
  LOWLAT_GRAPH_PATH_PLAIN = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lowlat_graph_path lowlat_graph_path;
#else
typedef uint32_t lowlat_graph_path;
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
 * What was captured.
 */
typedef struct lowlat_record lowlat_record;

/**
 * Notes what is captured.
 */
typedef struct lowlat_recorder lowlat_recorder;

/**
 * One rank's place in a group.
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
 * Everything that a captured graph fixes.
 */
typedef struct lowlat_graph_key {
  /**
   * LOWLAT_FACTS_MODE_DECODE, _TARGET_VERIFY or _DRAFT.
   */
  uint32_t mode;
  /**
   * Requests of the step, above 0.
   */
  uint32_t batch_size;
  /**
   * Rows a request, above 0.
   */
  uint32_t tokens_per_request;
  /**
   * The built row count that runs it, at least batch_size x tokens_per_request.
   */
  uint32_t width;
  /**
   * The shape's name.
   */
  const char *shape;
  /**
   * The machine code, such as "sm_90".
   */
  const char *isa;
  /**
   * Digest of the declared numerics.
   */
  uint64_t numerics_digest;
  /**
   * Digest of the weights' layout.
   */
  uint64_t layout_digest;
} lowlat_graph_key;

/**
 * Something that a captured graph reads.
 */
typedef struct lowlat_seal {
  /**
   * What it is, such as "page_table".
   */
  const char *name;
  /**
   * Its dtype.
   */
  const char *dtype;
  /**
   * Where it lies.
   */
  uint64_t address;
  /**
   * Elements of each dimension: `num_dims` of them; NULL where there are none.
   */
  const int64_t *shape;
  /**
   * How many, 16 at most.
   */
  uint32_t num_dims;
} lowlat_seal;

/**
 * What a rank would run. All ranks must have the same.
 */
typedef struct lowlat_ballot {
  /**
   * Row counts that were built, ascending: `num_widths` of them.
   */
  const uint32_t *widths;
  /**
   * How many, 1 to 32.
   */
  uint32_t num_widths;
  /**
   * Digest of the graph keys and paths, see lowlat_record_keys_digest.
   */
  uint64_t keys_digest;
  /**
   * Digest of grids, blocks and scratch.
   */
  uint64_t geometry_digest;
  /**
   * Digest of the kernels: lowlat_model_catalogue_digest of lowlat/kernels.h, or the engine's
   * own.
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
 * The version of the library's ABI.
 *
 * Ownership: nothing is given. Threads: any, at any time. Errors: none.
 */
uint32_t lowlat_dispatch_abi_version(void);

/**
 * Whether a caller that was compiled against `header_version` can use this library; the first call
 * of an engine, with LOWLAT_DISPATCH_ABI_VERSION.
 *
 * Ownership: nothing is given. Threads: any, at any time. Errors: INVALID where the versions
 * differ.
 */
enum lowlat_dispatch_status lowlat_dispatch_check_abi(uint32_t header_version);

/**
 * The calling thread's last call that did not return LOWLAT_DISPATCH_STATUS_OK, in words, one line
 * a reason; "" before any.
 *
 * Ownership: the text stays the library's, valid until that thread's next call into it. Threads:
 * any; each has a text of its own. Errors: none.
 */
const char *lowlat_dispatch_last_error(void);

/**
 * The lowlat_reason of the calling thread's last call that did not return
 * LOWLAT_DISPATCH_STATUS_OK, the first where it gives several; 0 where it has none, such as for a
 * wrong argument.
 *
 * Ownership: nothing is given. Threads: any; each has a reason of its own. Errors: none.
 */
uint32_t lowlat_dispatch_last_reason(void);

/**
 * How many handles of this process were given and not destroyed, so that an engine can see at its
 * end that it leaks none.
 *
 * Ownership: nothing is given. Threads: any, at any time. Errors: none.
 */
uint64_t lowlat_dispatch_num_handles(void);

/**
 * A dispatcher over what was captured. The record must hold the keys and widths that all ranks
 * agreed on; anything else is a bug of this rank, and its peers go on.
 *
 * Ownership: the record is copied; the dispatcher is the caller's, for lowlat_dispatcher_destroy.
 * Threads: any, at any time. Errors: BUG for another record than the one agreed on.
 *
 * # Safety
 * `out_dispatcher` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_create(const struct lowlat_coverage *coverage,
                                                     const struct lowlat_record *record,
                                                     struct lowlat_dispatcher **out_dispatcher);

/**
 * Frees a dispatcher and its report; NULL is allowed.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living dispatcher, or one in use.
 */
enum lowlat_dispatch_status lowlat_dispatcher_destroy(struct lowlat_dispatcher *dispatcher);

/**
 * Decides what runs a step, and counts it. Allocates nothing and makes no system call. A step that
 * no graph runs is OK with a reason: it is an answer.
 *
 * Ownership: the step stays the caller's. Threads: one call on a dispatcher at a time. Errors:
 * INVALID for a mode that is none.
 *
 * # Safety
 * `step` is NULL or does not change during the call; `out_decision` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_decide(struct lowlat_dispatcher *dispatcher,
                                                     const struct lowlat_step_facts *step,
                                                     struct lowlat_decision *out_decision);

/**
 * Digest of a step, for lowlat_seat_agree_step.
 *
 * Ownership: the step stays the caller's. Threads: any, at any time. Errors: INVALID for a mode
 * that is none.
 *
 * # Safety
 * `step` is NULL or does not change during the call; `out_digest` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_step_digest(const struct lowlat_step_facts *step,
                                               uint64_t *out_digest);

/**
 * Disarms for good after a fault, a lowlat_reason. The first fault is kept.
 *
 * Ownership: nothing is given. Threads: one call on a dispatcher at a time. Errors: INVALID for a
 * number that is no reason.
 */
enum lowlat_dispatch_status lowlat_dispatcher_disarm(struct lowlat_dispatcher *dispatcher,
                                                     uint32_t fault);

/**
 * Switches the plugin on (not 0) or off (0) between steps; all ranks do it together.
 *
 * Ownership: nothing is given. Threads: one call on a dispatcher at a time. Errors: INVALID for a
 * handle that is none.
 */
enum lowlat_dispatch_status lowlat_dispatcher_switch(struct lowlat_dispatcher *dispatcher,
                                                     uint32_t on);

/**
 * What was decided so far, as JSON: "covered", "uncovered", "covered_by_key",
 * "uncovered_by_reason", "fault".
 *
 * Ownership: the text stays the dispatcher's, valid until the next call of this function on it or
 * of lowlat_dispatcher_destroy. Threads: one call on a dispatcher at a time. Errors: INVALID for a
 * NULL output.
 *
 * # Safety
 * `out_json` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_dispatcher_report(struct lowlat_dispatcher *dispatcher,
                                                     const char **out_json);

/**
 * Checks what an engine sees against what its own kernels need.
 *
 * `requirements_json` holds "name" and "isas", and any of "tp_sizes", "dtypes", "model",
 * "divides", "server_args", "env", "resident_blocks", "features"; settings are lists of {"name",
 * "accepted", "unset_accepted"}, divisions of {"field", "unit"}. `facts_json` holds "isa" and
 * "tp_size", and any of "dtype", "model", "server_args", "env", "resident_blocks", "features".
 *
 * Ownership: the texts stay the caller's; the servable is the caller's, for
 * lowlat_servable_destroy. Threads: any, at any time. Errors: DECLINE with every reason, one a
 * line; INVALID for a text that is none.
 *
 * # Safety
 * The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
 * or valid for a write.
 */
enum lowlat_dispatch_status lowlat_guard(const char *requirements_json,
                                         const char *facts_json,
                                         struct lowlat_servable **out_servable);

/**
 * Checks a model's published config.json against the built-in kernels, those of
 * lowlat/kernels.h.
 *
 * `options_json` holds "tp_size", "isa", "dtype", "page_size", "moe_runner_backend",
 * "server_args", "env", "features" and "resident_blocks", each of which may be left out.
 *
 * Ownership: the texts stay the caller's; the servable is the caller's, for
 * lowlat_servable_destroy. Threads: any, at any time. Errors: DECLINE with every reason, one a
 * line; INVALID for options that are none.
 *
 * # Safety
 * The texts are NULL or NUL-terminated and do not change during the call; `out_servable` is NULL
 * or valid for a write.
 */
enum lowlat_dispatch_status lowlat_guard_model(const char *config_json,
                                               const char *options_json,
                                               struct lowlat_servable **out_servable);

/**
 * Frees a servable; NULL is allowed.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living servable, or one in use.
 */
enum lowlat_dispatch_status lowlat_servable_destroy(struct lowlat_servable *servable);

/**
 * Whether the budgets are above 0 and in order.
 *
 * Ownership: the ladder stays the caller's. Threads: any, at any time. Errors: INVALID names each
 * budget that is not.
 *
 * # Safety
 * `ladder` is NULL or points to a ladder that does not change during the call.
 */
enum lowlat_dispatch_status lowlat_ladder_check(const struct lowlat_ladder *ladder);

/**
 * The name of a lowlat_reason, such as "tp_size"; "unknown reason" for any other number.
 *
 * Ownership: the text stays the library's, as long as that is loaded. Threads: any, at any time.
 * Errors: none.
 */
const char *lowlat_reason_name(uint32_t number);

/**
 * A lowlat_reason in words; "unknown reason" for any other number.
 *
 * Ownership: the text stays the library's, as long as that is loaded. Threads: any, at any time.
 * Errors: none.
 */
const char *lowlat_reason_words(uint32_t number);

/**
 * A recorder that has noted nothing.
 *
 * Ownership: the recorder is the caller's, for lowlat_recorder_destroy. Threads: any, at any time.
 * Errors: INVALID for a NULL output.
 *
 * # Safety
 * `out_recorder` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_recorder_create(struct lowlat_recorder **out_recorder);

/**
 * Notes one captured graph: its key, what runs it (a lowlat_graph_path), and what it reads, in an
 * order that lowlat_record_check_seals will see again.
 *
 * Ownership: everything is copied. Threads: one call on a recorder at a time. Errors: INVALID for
 * a key that can be none or was noted before, more than 4096 graphs or seals, a text that is not
 * UTF-8.
 *
 * # Safety
 * `key` is NULL or valid; `seals` is NULL or holds `num_seals`; their texts are NULL or
 * NUL-terminated, and their shapes NULL or as long as they say; nothing changes during the call.
 */
enum lowlat_dispatch_status lowlat_recorder_note(struct lowlat_recorder *recorder,
                                                 const struct lowlat_graph_key *key,
                                                 uint32_t path,
                                                 const struct lowlat_seal *seals,
                                                 uint32_t num_seals);

/**
 * Ends the capture: the record of what was noted. The recorder is empty again after it.
 *
 * Ownership: the record is the caller's, for lowlat_record_destroy; the recorder stays the
 * caller's. Threads: one call on a recorder at a time. Errors: INVALID for a NULL output.
 *
 * # Safety
 * `out_record` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_recorder_finish(struct lowlat_recorder *recorder,
                                                   struct lowlat_record **out_record);

/**
 * Frees a recorder; NULL is allowed.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living recorder, or one in use.
 */
enum lowlat_dispatch_status lowlat_recorder_destroy(struct lowlat_recorder *recorder);

/**
 * Reads the text of a record.
 *
 * Ownership: the text stays the caller's; the record is the caller's, for lowlat_record_destroy.
 * Threads: any, at any time. Errors: INVALID for a text that is truncated, damaged, of a newer
 * version or none.
 *
 * # Safety
 * `text` is NULL or NUL-terminated and does not change during the call; `out_record` is NULL or
 * valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_read(const char *text, struct lowlat_record **out_record);

/**
 * The text of a record, for a file that lowlat_record_read and `lowlat inspect` read.
 *
 * Ownership: the text stays the record's, valid until lowlat_record_destroy. Threads: any, at the
 * same time too. Errors: INVALID for a NULL output.
 *
 * # Safety
 * `out_text` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_text(const struct lowlat_record *record,
                                               const char **out_text);

/**
 * How many graphs a record holds.
 *
 * Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
 * output.
 *
 * # Safety
 * `out_num_graphs` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_num_graphs(const struct lowlat_record *record,
                                                     uint32_t *out_num_graphs);

/**
 * Digest of a record's keys and of what runs each, for the ballot.
 *
 * Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
 * output.
 *
 * # Safety
 * `out_digest` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_keys_digest(const struct lowlat_record *record,
                                                      uint64_t *out_digest);

/**
 * Digest of everything that ranks must have in common in a record: keys, paths, and the seals
 * without their addresses, which are each rank's own.
 *
 * Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
 * output.
 *
 * # Safety
 * `out_digest` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_record_digest(const struct lowlat_record *record,
                                                 uint64_t *out_digest);

/**
 * Whether ranks with these two records could replay together.
 *
 * Ownership: nothing is given. Threads: any, at the same time too. Errors: DECLINE with every
 * difference, one a line.
 */
enum lowlat_dispatch_status lowlat_record_compare(const struct lowlat_record *first,
                                                  const struct lowlat_record *second);

/**
 * Whether what the graph at `key_idx` reads is as it was at capture; `seals` lists what is there
 * now, in the order of lowlat_recorder_note.
 *
 * Ownership: nothing is kept. Threads: any, at the same time too. Errors: FAULT names the first
 * seal that changed, with both values; INVALID for a place outside the record.
 *
 * # Safety
 * `seals` is NULL or holds `num_seals`, with texts and shapes as in lowlat_recorder_note.
 */
enum lowlat_dispatch_status lowlat_record_check_seals(const struct lowlat_record *record,
                                                      uint32_t key_idx,
                                                      const struct lowlat_seal *seals,
                                                      uint32_t num_seals);

/**
 * Frees a record and its text; NULL is allowed.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living record, or one in use.
 */
enum lowlat_dispatch_status lowlat_record_destroy(struct lowlat_record *record);

/**
 * A group of `tp_size` ranks, 1 to 64, that are threads of this process.
 *
 * Ownership: the board is the caller's, for lowlat_board_destroy. Threads: any, at any time.
 * Errors: INVALID for another size.
 *
 * # Safety
 * `out_board` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_board_create(uint32_t tp_size, struct lowlat_board **out_board);

/**
 * Frees a board; NULL is allowed. Seats that were given live on.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living board, or one in use.
 */
enum lowlat_dispatch_status lowlat_board_destroy(struct lowlat_board *board);

/**
 * The seat of one rank, given once: a rank that was started again needs a new group.
 *
 * Ownership: the seat is the caller's, for lowlat_seat_destroy. Threads: any, at the same time
 * too. Errors: INVALID for a rank outside the group, or one whose seat was given.
 *
 * # Safety
 * `out_seat` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_board_seat(const struct lowlat_board *board,
                                              uint32_t tp_rank,
                                              struct lowlat_seat **out_seat);

/**
 * Joins a group of ranks that are processes of this host, under a name, and waits until all have:
 * rank `tp_rank` of `tp_size`, 1 to 64. The group's memory is a file of /dev/shm, made for it and
 * gone with it. `ladder` bounds every wait; forming is one of the collective rung, so `budget_ns`
 * must be shorter than the engine budget.
 *
 * Ownership: the texts stay the caller's; the seat is the caller's, for lowlat_seat_destroy, which
 * leaves the group. Threads: any, at any time; after fork(), only the process that joined votes.
 * Errors: DECLINE with LOWLAT_REASON_GROUP_IN_USE where a living group has the name (a dead one's
 * is taken over), _RANK_TAKEN for a second rank with one number, _VOTE_GROUP where ranks believe
 * in different sizes, _SHARED_MEMORY where that is full or not permitted; FAULT with
 * _RANK_MISSING, on every rank, where not all join in time; INVALID for a name that is not 1 to 64
 * letters, digits, _, . and -, or a rank, size, ladder or budget that is none.
 *
 * # Safety
 * `name` is NULL or NUL-terminated, `ladder` is NULL or valid, and neither changes during the
 * call; `out_seat` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_group_join(const char *name,
                                              uint32_t tp_rank,
                                              uint32_t tp_size,
                                              const struct lowlat_ladder *ladder,
                                              uint64_t budget_ns,
                                              struct lowlat_seat **out_seat);

/**
 * Frees a seat, and leaves the group; NULL is allowed. A rank's seat is not given again, and peers
 * that vote on find this rank missing. Where it was a process's, the group's name is free.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living seat, or one in use.
 */
enum lowlat_dispatch_status lowlat_seat_destroy(struct lowlat_seat *seat);

/**
 * Votes on coverage; every rank of the group calls it. Ends within `budget_ns`, which must be
 * shorter than the ballot's collective budget.
 *
 * Ownership: the ballot stays the caller's; the coverage is the caller's, for
 * lowlat_coverage_destroy. Threads: one call on a seat at a time. Errors, the same on every rank:
 * DECLINE when ranks differ or one declines; FAULT when one is missing, and from then on in every
 * call on this seat. INVALID, before anything is cast, for a ballot or a budget that is none.
 *
 * # Safety
 * `parts` and its widths are NULL or do not change during the call; `out_coverage` is NULL or
 * valid for a write.
 */
enum lowlat_dispatch_status lowlat_seat_vote(struct lowlat_seat *seat,
                                             const struct lowlat_servable *servable,
                                             const struct lowlat_ballot *parts,
                                             uint64_t budget_ns,
                                             struct lowlat_coverage **out_coverage);

/**
 * Takes part in the vote as a rank that cannot serve, for a lowlat_reason, so that its peers
 * decline with it at once.
 *
 * Ownership: nothing is given. Threads: one call on a seat at a time. Errors: DECLINE or FAULT as
 * from lowlat_seat_vote, never OK; INVALID for a reason that is none or a budget of 0.
 */
enum lowlat_dispatch_status lowlat_seat_decline(struct lowlat_seat *seat,
                                                uint32_t reason,
                                                uint64_t budget_ns);

/**
 * The hot vote: whether all ranks are about to run the step with this digest. No allocation, and
 * no system call when the peers are there. Once coverage was agreed on, `budget_ns` must be
 * shorter than its collective budget.
 *
 * Ownership: nothing is given. Threads: one call on a seat at a time. Errors, the same on every
 * rank: DECLINE when ranks differ, and then the group may go on; FAULT when one is missing, and
 * from then on in every call on this seat. INVALID, before anything is cast, for a budget that is
 * none.
 */
enum lowlat_dispatch_status lowlat_seat_agree_step(struct lowlat_seat *seat,
                                                   uint64_t digest,
                                                   uint64_t budget_ns);

/**
 * The ballot of a rank as words, for an all-gather of the caller: LOWLAT_BALLOT_WORDS of them.
 *
 * Ownership: the words are written to the caller's. Threads: any, at any time. Errors: INVALID for
 * a rank outside the servable's group, or a ballot that is none.
 *
 * # Safety
 * `parts` and its widths are NULL or do not change during the call; `out_words` is NULL or valid
 * for writes of LOWLAT_BALLOT_WORDS words.
 */
enum lowlat_dispatch_status lowlat_ballot_words(const struct lowlat_servable *servable,
                                                uint32_t tp_rank,
                                                const struct lowlat_ballot *parts,
                                                uint64_t *out_words);

/**
 * The words of the ballot of a rank that cannot serve, for a lowlat_reason. It is gathered all the
 * same, so that its peers decline with it.
 *
 * Ownership: the words are written to the caller's. Threads: any, at any time. Errors: INVALID for
 * a reason that is none, or a rank outside its group.
 *
 * # Safety
 * `out_words` is NULL or valid for writes of LOWLAT_BALLOT_WORDS words.
 */
enum lowlat_dispatch_status lowlat_ballot_words_declining(uint32_t tp_rank,
                                                          uint32_t tp_size,
                                                          uint32_t reason,
                                                          uint64_t *out_words);

/**
 * The vote over gathered ballots: `words` holds LOWLAT_BALLOT_WORDS for each of `num_ranks` ranks,
 * in rank order, the same list on every rank.
 *
 * Ownership: the words stay the caller's; the coverage is the caller's, for
 * lowlat_coverage_destroy. Threads: any, at any time. Errors: DECLINE names the first rank that
 * declines or differs, the same on every rank; INVALID for a rank or a size outside 1 to 64.
 *
 * # Safety
 * `words` is NULL or holds `num_ranks` ballots that do not change during the call; `out_coverage`
 * is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_ballots_agree(uint32_t tp_rank,
                                                 const uint64_t *words,
                                                 uint32_t num_ranks,
                                                 struct lowlat_coverage **out_coverage);

/**
 * The epoch of the vote that agreed; 0 for lowlat_ballots_agree.
 *
 * Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
 * output.
 *
 * # Safety
 * `out_epoch` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_coverage_epoch(const struct lowlat_coverage *coverage,
                                                  uint32_t *out_epoch);

/**
 * Frees a coverage; NULL is allowed. Dispatchers that were made from it live on.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living coverage, or one in use.
 */
enum lowlat_dispatch_status lowlat_coverage_destroy(struct lowlat_coverage *coverage);

/**
 * A watchdog for work of at most `budget_ns`, in which one gap between two polls counts at most
 * `max_gap_ns`: while a machine sleeps, nothing can be late.
 *
 * Ownership: the watchdog is the caller's, for lowlat_watchdog_destroy. Threads: any, at any time.
 * Errors: INVALID for a budget or gap of 0.
 *
 * # Safety
 * `out_watchdog` is NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_watchdog_create(uint64_t budget_ns,
                                                   uint64_t max_gap_ns,
                                                   struct lowlat_watchdog **out_watchdog);

/**
 * Frees a watchdog; NULL is allowed.
 *
 * Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
 * for what is no living watchdog, or one in use.
 */
enum lowlat_dispatch_status lowlat_watchdog_destroy(struct lowlat_watchdog *watchdog);

/**
 * Work begins, at `now_ns` of the caller's clock.
 *
 * Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID while
 * work runs.
 */
enum lowlat_dispatch_status lowlat_watchdog_arm(struct lowlat_watchdog *watchdog, uint64_t now_ns);

/**
 * Work has ended.
 *
 * Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID for a
 * handle that is none.
 */
enum lowlat_dispatch_status lowlat_watchdog_disarm(struct lowlat_watchdog *watchdog);

/**
 * Counts the time since the last look. `out_late_ns` gets the time past the budget, else 0; it
 * may be NULL.
 *
 * Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID for a
 * NULL `out_health`.
 *
 * # Safety
 * The outputs are NULL or valid for a write.
 */
enum lowlat_dispatch_status lowlat_watchdog_health(struct lowlat_watchdog *watchdog,
                                                   uint64_t now_ns,
                                                   lowlat_health *out_health,
                                                   uint64_t *out_late_ns);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LOWLAT_DISPATCH_H_ */
