/* lowlat/kernels.h: the C ABI of the kernels, for any engine in C, C++, Rust or Python.
 *
 * One lowlat_model is one rank's share of one model (target and draft). The order of calls:
 *
 *   create  ->  bind every tensor that lowlat_model_tensor() lists  ->  peer_export / peer_import
 *   (tp_size > 1)  ->  model_ready  ->  step_launch / accept_launch / draft_launch ...
 *   ->  destroy
 *
 * Launches are asynchronous: each rank has one stream of work that runs in launch order: on the
 * scalar platform a resident thread, and `stream` must be NULL; on nvidia the cudaStream_t that is
 * given (it may be captured into a graph), or the model's own for NULL. lowlat_synchronize waits
 * for it. All ranks launch the same sequence; a rank that does not is a fault on every rank within
 * the wait budget, never a hang.
 *
 * Rules for every function: parameters are handle, inputs, outputs. A call that does not return
 * LOWLAT_OK has written no output and changed nothing, unless it says so; lowlat_last_error()
 * gives the reason in one line. Functions on different models may be called from different
 * threads; calls on one model are made by one thread at a time, but lowlat_abort and
 * lowlat_status_read may be called by any thread at any time before lowlat_model_destroy.
 * Every struct begins with struct_bytes = sizeof(that struct); another size is refused.
 */
#ifndef LOWLAT_KERNELS_H_
#define LOWLAT_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LOWLAT_API __attribute__((visibility("default")))
#else
#define LOWLAT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define LOWLAT_KERNELS_ABI_VERSION 1u

/* The version this library was built with; an engine refuses another than its own header's. */
LOWLAT_API uint32_t lowlat_kernels_abi_version(void);

typedef enum lowlat_status {
  LOWLAT_OK = 0,
  LOWLAT_INVALID = 1,     /* an argument is wrong */
  LOWLAT_UNSUPPORTED = 2, /* a decline: right in itself, but not built here */
  LOWLAT_FAULT = 3,       /* a deadline passed, a peer was lost or the model was aborted */
  LOWLAT_BUG = 4          /* we broke our own rule */
} lowlat_status;

/* One line for the calling thread's last call that did not return LOWLAT_OK; "" before any.
 * Valid until that thread's next call into the library. */
LOWLAT_API const char* lowlat_last_error(void);

/* ------------------------------------------------------------------ tensors */

typedef enum lowlat_dtype {
  LOWLAT_U8 = 0,
  LOWLAT_I32 = 1,
  LOWLAT_I64 = 2,
  LOWLAT_F32 = 3,
  LOWLAT_BF16 = 4,  /* uint16 bits */
  LOWLAT_E4M3 = 5,  /* uint8 codes, OCP e4m3fn */
  LOWLAT_UE8M0 = 6, /* uint8, value 2^(byte - 127) */
  LOWLAT_FP4X2 = 7  /* uint8, two e2m1 codes, the even index in the low nibble */
} lowlat_dtype;

typedef enum lowlat_layout {
  LOWLAT_ROW_MAJOR = 0, /* last dimension contiguous; the others by stride */
  LOWLAT_KV_PAGED = 1,  /* u8 [pages, page_bytes]: P rows of 576 B, then P rows of 8 scale bytes */
  /* u8 [pages, page bytes]: 64 rows, then their scales. V4.1: 64 * 68, rows of 64 B (fp4) and of 4
   * scale bytes. V4: 64 * 132, rows of 128 B (e4m3) and one f32 scale a row. */
  LOWLAT_INDEX_PAGED = 2,
  /* Experts as the Marlin repack leaves fp4 [E, N, K]. Codes i32 [E, K / 16, 2 N]: tiles of 16 k by
   * 64 n, 128 words each. With k = 2 t (+ 8) (+ 1) and n = 16 w + g (+ 8) inside the tile, word
   * 16 g + 4 t + w holds a nibble each, low to high: n at k, k + 8; n + 8 at k, k + 8; n at k + 1,
   * k + 9; n + 8 at k + 1, k + 9. Scales ue8m0 [E, K / 32, N]: of each 64 n, position
   * 8 g + 4 (w / 2) + w % 2 is row 16 w + g, two further is row 16 w + g + 8. */
  LOWLAT_MARLIN = 3
} lowlat_layout;

#define LOWLAT_MAX_DIMS 6

typedef struct lowlat_tensor {
  uint32_t struct_bytes;
  uint32_t dtype;  /* lowlat_dtype */
  uint32_t layout; /* lowlat_layout */
  uint32_t ndim;
  int64_t shape[LOWLAT_MAX_DIMS];  /* elements of dtype; FP4X2 counts bytes (pairs) */
  int64_t stride[LOWLAT_MAX_DIMS]; /* elements of dtype; the last one must be 1 */
  void* data;
} lowlat_tensor;

/* What a tensor is for. Engines load weights, allocate pools and may share or fill both. */
typedef enum lowlat_tensor_role {
  LOWLAT_WEIGHT = 0, /* read only */
  LOWLAT_POOL = 1    /* read and written by steps; zero-filled by the engine before model_ready */
} lowlat_tensor_role;

/* A tensor that must be bound, with its shape on this rank. `shard_dim` says which dimension of
 * the published tensor is split over the ranks (-1: none, whole on every rank). */
typedef struct lowlat_tensor_spec {
  uint32_t struct_bytes;
  uint32_t dtype;
  uint32_t layout;
  uint32_t role; /* lowlat_tensor_role */
  uint32_t ndim;
  int32_t shard_dim;
  int64_t shape[LOWLAT_MAX_DIMS];
  const char* name; /* lives as long as the model */
} lowlat_tensor_spec;

/* ------------------------------------------------------------------ model */

#define LOWLAT_MAX_LAYERS 64
#define LOWLAT_MAX_WIDTHS 32
#define LOWLAT_MAX_DRAFT_STAGES 4
#define LOWLAT_MAX_ENGRAMS 4
#define LOWLAT_ENGRAM_NGRAMS 3 /* n-gram sizes 2, 3, 4 */
#define LOWLAT_ENGRAM_HEADS 8  /* hash heads a size */
#define LOWLAT_ENGRAM_SHIFTS 4

typedef enum lowlat_model_kind {
  LOWLAT_V41 = 1, /* DeepSeek-V4.1-Flash's rules */
  LOWLAT_V4 = 2   /* DeepSeek-V4-Flash's rules */
} lowlat_model_kind;

typedef struct lowlat_layer {
  int32_t ratio;            /* 0: window only; compressed set of that ratio: V4.1 1, 2; V4 4, 128 */
  int32_t kv_source;        /* layer whose compressed pool is read; itself for a source; -1 at 0 */
  int32_t index_source;     /* layer whose selection is used; itself for a source; -1 at ratio 0 and
                             * at 128, where every entry is used */
  int32_t candidate_source; /* layer whose candidate blocks restrict this index source, -1: none */
  int32_t engram;           /* which Engram table is applied before this layer, -1: none */
  int32_t hash_gate;        /* 1: experts come from tid2eid by token id (V4); 0 in V4.1 */
} lowlat_layer;

typedef struct lowlat_model_config {
  uint32_t struct_bytes;
  uint32_t kind; /* lowlat_model_kind */
  /* Sizes of the whole model, before tensor parallelism. */
  int32_t hidden, num_layers, vocab;
  int32_t num_heads, head_dim, rope_dim, q_lora, o_groups, o_lora, window;
  int32_t num_experts, experts_per_token, moe_intermediate;
  int32_t index_heads, index_dim, index_topk;
  int32_t candidate_layer; /* publishes candidate blocks; -1: none */
  int32_t candidate_blocks, candidate_block_size;
  int32_t scale_block; /* fp8 weight blocks are scale_block x scale_block: V4.1 32, V4 128 */
  int32_t sinkhorn_iters;
  float norm_eps, hc_eps, swiglu_limit, routed_scaling;
  double rope_theta, compress_rope_theta;
  double yarn_factor, yarn_beta_fast, yarn_beta_slow, yarn_original_positions;
  int64_t max_positions;
  lowlat_layer layers[LOWLAT_MAX_LAYERS];
  /* Engram. */
  int32_t num_engrams, engram_head_dim, engram_pad_token, image_token;
  int64_t engram_primes[LOWLAT_MAX_ENGRAMS][LOWLAT_ENGRAM_NGRAMS][LOWLAT_ENGRAM_HEADS];
  int64_t engram_multipliers[LOWLAT_MAX_ENGRAMS][LOWLAT_ENGRAM_SHIFTS];
  /* Draft. num_draft_stages 0: no draft. */
  int32_t num_draft_stages, draft_block, draft_mask_token, markov_rank;
  int32_t draft_experts, draft_experts_per_token;
  /* Features: the mean of R's streams, V4.1 at the input of these layers, V4 at their output. */
  int32_t draft_target_layers[LOWLAT_MAX_DRAFT_STAGES];
  /* This rank. */
  int32_t tp_rank, tp_size;
  /* Steps. */
  int32_t num_widths, max_batch, max_rows; /* max_rows: of a plain step, >= the widest width */
  int32_t widths[LOWLAT_MAX_WIDTHS];       /* rows of a step that was built, ascending */
  /* KV cache: logical pages of page_size tokens; one page table addresses every pool. */
  int32_t page_size, num_pages; /* V4: page_size is a multiple of 128 */
  /* Rows of a compressor state ring, a power of two. V4.1: of the ratio-2 ring of a request, >= 2 +
   * draft rows. V4: of the ratio-4 ring of a page, >= 8, with a draft >= draft_block + 7; the
   * ratio-128 ring of a request has 16 * state_ring rows. */
  int32_t state_ring;
  uint64_t wait_budget_ns; /* every wait for a peer ends within it */
} lowlat_model_config;

typedef struct lowlat_model lowlat_model;

/* Checks the whole configuration and lists every reason against it, one a line, in
 * lowlat_last_error(). `platform` is "scalar" or, in a library with CUDA kernels, "nvidia" (device
 * tp_rank modulo the number of devices) or "nvidia:N" for device number N; in one with AMD code
 * objects "amd" and "amd:N" likewise, which never ran on an AMD GPU. Behind nvidia's, ":fused" or
 * ":persistent" names the schedule of steps and drafts; without a word it is the fused one where
 * that is built for the model, on devices of their own. ":loop" is for measurements: one rank
 * alone, whose peers are itself. */
LOWLAT_API lowlat_status lowlat_model_create(const char* platform,
                                             const lowlat_model_config* config,
                                             lowlat_model** out_model);
/* Stops the stream (a running step is aborted), then frees. NULL is allowed. */
LOWLAT_API void lowlat_model_destroy(lowlat_model* model);

/* The tensors that are to be bound, 0 <= tensor_idx < their number. */
LOWLAT_API int32_t lowlat_model_num_tensors(const lowlat_model* model);
LOWLAT_API lowlat_status lowlat_model_tensor(const lowlat_model* model, int32_t tensor_idx,
                                             lowlat_tensor_spec* out_spec);
/* Binds by name. The memory stays the caller's and must outlive the model. A name the model has
 * not, another dtype, shape or layout, or a stride that is not allowed is refused. */
LOWLAT_API lowlat_status lowlat_model_bind(lowlat_model* model, const char* name,
                                           const lowlat_tensor* tensor);

/* Memory for engines that have no allocator of the platform's own. */
typedef enum lowlat_memory_kind {
  LOWLAT_MEMORY_DEVICE = 0, /* the platform's: weights, pools */
  LOWLAT_MEMORY_SHARED = 1  /* read and written by the host and by launches at one address: a
                             * step's arrays and outputs. Slower for launches than the device's. */
} lowlat_memory_kind;

/* Memory of the model's device, zeroed; it goes with the model. On scalar both kinds are the
 * process's memory. */
LOWLAT_API lowlat_status lowlat_model_alloc(lowlat_model* model, lowlat_memory_kind kind,
                                            uint64_t bytes, void** out_memory);
/* Copies `bytes` between host memory and memory of the model's platform, whole at return. Nothing
 * that is launched may use the platform's side meanwhile. */
LOWLAT_API lowlat_status lowlat_model_write(lowlat_model* model, void* dst, const void* src,
                                            uint64_t bytes);
LOWLAT_API lowlat_status lowlat_model_read(const lowlat_model* model, void* dst, const void* src,
                                           uint64_t bytes);

/* What the build took: device bytes of our own, beyond what was bound. */
LOWLAT_API uint64_t lowlat_model_own_bytes(const lowlat_model* model);
/* Digest of everything that must be equal on all ranks: ABI, kernels, their numerics, widths and
 * launch geometry. Goes into the coverage vote. */
LOWLAT_API uint64_t lowlat_model_catalogue_digest(const lowlat_model* model);
/* The catalogue in words, one kernel a line: name, platform, isa, schedule, numerics. */
LOWLAT_API const char* lowlat_model_catalogue(const lowlat_model* model);

/* Peer memory: what peers write into. A handle is plain bytes that any transport may carry. */
#define LOWLAT_PEER_HANDLE_BYTES 128
typedef struct lowlat_peer_handle {
  uint8_t bytes[LOWLAT_PEER_HANDLE_BYTES];
} lowlat_peer_handle;

/* This rank's handle, for every peer. */
LOWLAT_API lowlat_status lowlat_peer_export(lowlat_model* model, lowlat_peer_handle* out_handle);
/* Maps the peer's memory and proves it by a store that the peer can see; a handle of another
 * shape, width set, rank, process (scalar) or library version is refused by name. */
LOWLAT_API lowlat_status lowlat_peer_import(lowlat_model* model, int32_t peer_rank,
                                            const lowlat_peer_handle* handle);

/* Ends the building: every tensor bound, every peer imported, or one line a missing one. Reads the
 * tables of V4's hash layers, which must be loaded by then: an expert that is none is refused. */
LOWLAT_API lowlat_status lowlat_model_ready(lowlat_model* model);

/* ------------------------------------------------------------------ steps */

typedef enum lowlat_step_mode {
  LOWLAT_DECODE = 0,        /* one row a request */
  LOWLAT_TARGET_VERIFY = 1, /* tokens_per_request rows a request: anchor, then the drafts */
  LOWLAT_EXTEND = 2         /* prompt rows, any number a request; the plain schedule only */
} lowlat_step_mode;

/* Rows of a request are consecutive and their positions ascend by one. A row with slot -1 is
 * padding: it runs, writes no KV and its outputs mean nothing. All pointers are in the
 * platform's memory: on scalar the host's, looked at before the launch and refused by name when
 * wrong; on nvidia memory that the device reaches, not looked at by the host: a row whose values
 * the model has not is then taken as padding. */
typedef struct lowlat_step {
  uint32_t struct_bytes;
  uint32_t mode;                                    /* lowlat_step_mode */
  int32_t num_rows, batch_size, tokens_per_request; /* tokens_per_request 0 in LOWLAT_EXTEND */
  int32_t page_table_stride;                        /* entries a request, >= pages in use */
  const int32_t* token_ids;                         /* [num_rows] */
  const int32_t* positions;                         /* [num_rows] */
  const int32_t* request_idx;                       /* [num_rows] which of the batch */
  const int32_t* slots;      /* [num_rows] full KV slot = page * page_size + position % page_size */
  const int32_t* page_table; /* [batch_size, page_table_stride] pool page of each logical page */
  const int32_t* history;    /* [batch_size, 3] tokens before the request's first row, oldest
                                 first; those before position 0 are not read */
  const int32_t* state_slots; /* [batch_size] request ring of the compressor state (V4.1 ratio 2, V4
                                 ratio 128), < max_batch */
  int32_t num_logit_rows;     /* the head runs for these rows only */
  int32_t reserved;
  const int32_t* logit_rows; /* [num_logit_rows] ascending; NULL: all rows in order */
  /* Out, equal bit for bit on every rank; either may be NULL. */
  float* logits;   /* [num_logit_rows, vocab] */
  int32_t* argmax; /* [num_logit_rows] lowest id on ties */
} lowlat_step;

/* Runs a step by the fused or the persistent schedule, as the model was created. LOWLAT_UNSUPPORTED
 * when num_rows is no built width or mode is LOWLAT_EXTEND. The struct is copied; what it points to
 * is read when the step runs. By the fused schedule row t is of request t / tokens_per_request, and
 * is padding where request_idx says otherwise; a step is hundreds of launches on two streams, which
 * a graph makes one. */
LOWLAT_API lowlat_status lowlat_step_launch(lowlat_model* model, const lowlat_step* step,
                                            void* stream);
/* The same step as one stage after another over all rows, every intermediate in memory: the
 * plain path, for prompts, for uncovered steps and as the baseline. num_rows <= max_rows. */
LOWLAT_API lowlat_status lowlat_plain_step_launch(lowlat_model* model, const lowlat_step* step,
                                                  void* stream);

/* Draft: first the context KV of rows of the LAST target step is injected, then draft_block
 * proposals a request are made. */
typedef struct lowlat_draft {
  uint32_t struct_bytes;
  int32_t num_inject_rows;         /* = num_rows of the last target step, or 0 */
  const int32_t* inject_slots;     /* [num_inject_rows] full slot, -1: not committed */
  const int32_t* inject_positions; /* [num_inject_rows] */
  int32_t batch_size;              /* 0: inject only */
  int32_t page_table_stride;
  const int32_t* anchors;    /* [batch_size] last emitted token of each request */
  const int32_t* prefixes;   /* [batch_size] committed tokens, the anchor not counted */
  const int32_t* slots;      /* [batch_size, draft_block] for positions prefix.. ; -1: padding */
  const int32_t* page_table; /* [batch_size, page_table_stride] */
  const float* temperature;  /* [batch_size] 0: greedy */
  /* Gumbel noise of sampled rows: Philox4x32-10 with counter (id >> 2, noise_row, step,
   * noise_offset low word) and this key, word id & 3, as SGLang does. */
  const int32_t* noise_row;    /* [batch_size] */
  const int64_t* noise_offset; /* [batch_size] */
  uint64_t noise_key;
  /* Out, equal bit for bit on every rank. */
  int32_t* draft_tokens; /* [batch_size, draft_block] */
  float* draft_logits;   /* [batch_size, draft_block, vocab] or NULL when all rows are greedy */
} lowlat_draft;

/* As lowlat_step_launch; LOWLAT_UNSUPPORTED when batch_size * draft_block rows were not built
 * (built: the batch sizes of the widths that are multiples of draft_block + 1). */
LOWLAT_API lowlat_status lowlat_draft_launch(lowlat_model* model, const lowlat_draft* draft,
                                             void* stream);
LOWLAT_API lowlat_status lowlat_plain_draft_launch(lowlat_model* model, const lowlat_draft* draft,
                                                   void* stream);

/* The acceptance rule over one verify step. Greedy rows (temperature 0) compare argmax. */
typedef struct lowlat_accept {
  uint32_t struct_bytes;
  int32_t batch_size, num_drafts, vocab;
  const int32_t* draft_tokens; /* [batch_size, num_drafts] */
  const float* target_logits;  /* [batch_size, num_drafts + 1, vocab] */
  const float* draft_logits;   /* [batch_size, num_drafts, vocab]; NULL: all rows greedy */
  const float* temperature;    /* [batch_size] */
  const float* coins;          /* [batch_size, num_drafts + 1] in [0, 1); NULL: all greedy */
  /* Out. */
  int32_t* accepted;    /* [batch_size] drafts accepted, 0 .. num_drafts */
  int32_t* next_tokens; /* [batch_size] the bonus or residual token */
} lowlat_accept;

LOWLAT_API lowlat_status lowlat_accept_launch(lowlat_model* model, const lowlat_accept* accept,
                                              void* stream);

/* ------------------------------------------------------------------ inside another engine */

/* A model inside an engine that keeps the caches, multiplies with the head and samples by itself.
 * The order of calls: hosted_create -> bind every weight -> peers -> ready -> pools_bind, once the
 * engine has made its caches -> hosted_step_launch or propose_launch. What differs from a model of
 * lowlat_model_create:
 *   tensors  Weights lie where the engine left them, experts and wo_a in the layout of
 *            lowlat_hosting. Pools are listed with shape[0] 0 and come by lowlat_pools_bind. There
 *            is no head, but of proposals.
 *   config   num_pages is the most pages of one request. widths, max_batch and max_rows are as
 *            always; state_ring is the engine's.
 *   launches lowlat_hosted_step_launch, or lowlat_propose_launch and, with `stages`,
 *            lowlat_hosted_draft_launch where `proposals` is set; no other. */
typedef struct lowlat_hosting {
  uint32_t struct_bytes;
  uint32_t expert_layout; /* LOWLAT_ROW_MAJOR: the checkpoint's. LOWLAT_MARLIN: w1 and w3 are one
                           * matrix, ffn.experts.w13 of 2 I' rows, w1's first; I' is this rank's
                           * moe_intermediate rounded up to 64, rows and columns beyond it are 0 */
  int32_t bf16_wo_a;      /* 1: attn.wo_a.weight is bf16 without a scale, and its input too, which
                           * V4's target quantises otherwise */
  int32_t proposals;      /* 1: of the draft nothing but its head, norm and Markov tables, for
                           * lowlat_propose_launch; with stages its embedding and layers too */
  int32_t stages;         /* 1, with proposals: lowlat_hosted_draft_launch before them; on nvidia by
                           * the fused schedule alone */
} lowlat_hosting;

LOWLAT_API lowlat_status lowlat_hosted_create(const char* platform,
                                              const lowlat_model_config* config,
                                              const lowlat_hosting* hosting,
                                              lowlat_model** out_model);

/* The engine's caches. A full slot is page * page_size + place; it addresses kv.extra and kv.index
 * (slot / ratio). The window's keys, and the states of V4's ratio 4, may lie elsewhere. */
typedef struct lowlat_pools {
  uint32_t struct_bytes;
  int32_t num_pages;           /* that a page table may name; page 0 belongs to padding */
  int32_t num_window_pages;    /* of kv.swa, page_size tokens each */
  int32_t num_requests;        /* rings of a request's state, rows of history */
  const int64_t* window_slots; /* [num_pages * page_size] slot of kv.swa of a full slot, below 0:
                                * none; NULL: the same slot */
  int32_t* history; /* Engram: [num_requests, 3] tokens before a request's next row, oldest first;
                     * one that is no token of the vocabulary is an image. NULL where there is no
                     * Engram. LOWLAT_DECODE moves the row's token in; verify steps leave it */
  int32_t num_tensors;
  /* V4.1: 1 where an index is two row-major tensors of 64 entries a page: kv.index.N u8
   * [pages, 4096], of a page [4, 64, 16] the 16 code bytes of each 32 values of an entry; and
   * kv.index_scales.N u8 [pages, 256], of a page [4, 64] their ue8m0 scales, entry i at place
   * 4 * (i % 16) + i / 16. */
  int32_t split_index;
  const char* const* names;     /* [num_tensors] every pool that lowlat_model_tensor() lists */
  const lowlat_tensor* tensors; /* [num_tensors] shape[0] may be more than is used. States are
                                 * [rows, width]: a ring a request of V4.1's ratio 2
                                 * (state_ring rows) and of V4's ratio 128 (16 state_ring rows); of
                                 * V4's ratio 4 a ring of state_ring rows a window page */
} lowlat_pools;

/* After lowlat_model_ready and before the first step; again when the engine has moved its caches.
 * Nothing that is launched may run meanwhile, and graphs that were captured keep the old ones. */
LOWLAT_API lowlat_status lowlat_pools_bind(lowlat_model* model, const lowlat_pools* pools);

/* A step of batch_size * tokens_per_request rows, a request's one after another. A row whose slot
 * is in page 0 is padding, and so is one whose values the model has not: it writes nothing, and its
 * outputs are finite but mean nothing. Arrays are in the platform's memory, as lowlat_step's. */
typedef struct lowlat_hosted_step {
  uint32_t struct_bytes;
  uint32_t mode;                          /* LOWLAT_DECODE or LOWLAT_TARGET_VERIFY */
  int32_t batch_size, tokens_per_request; /* 1 in LOWLAT_DECODE */
  int32_t page_table_stride;              /* entries from a request's table to the next one's */
  int32_t num_table_pages;                /* entries of a request's table */
  const int64_t* token_ids;               /* [rows] */
  const int64_t* positions;               /* [rows] */
  const int64_t* slots;                   /* [rows] full slots */
  const int64_t* requests;                /* [batch_size] row of history and ring of the states */
  const int32_t* page_table;              /* [batch_size, page_table_stride] */
  /* Out, equal bit for bit on every rank; NaN until the step has run, and after one that did not
   * end. */
  uint16_t* hidden;   /* bf16 [rows, hidden] after the last norm: what the head multiplies */
  uint16_t* features; /* bf16 [rows, num_draft_stages * hidden] what the draft's context is made
                       * from, see draft_target_layers; NULL: not wanted */
  uint16_t* streams;  /* bf16 [rows, 4 * hidden] after the last layer; NULL: not wanted */
} lowlat_hosted_step;

/* LOWLAT_UNSUPPORTED when that many rows were not built. */
LOWLAT_API lowlat_status lowlat_hosted_step_launch(lowlat_model* model,
                                                   const lowlat_hosted_step* step, void* stream);

/* The layers of a draft, over draft_block rows a request: its anchor, then mask tokens, at the
 * positions behind its committed tokens. A row's key is kept in slot key_slots of mtp.N.kv.swa, and
 * it sees the keys of the slots in its window, those of its request's rows among them. A row whose
 * key slot is in page 0 is padding, and so is one whose values the model has not. */
typedef struct lowlat_hosted_draft {
  uint32_t struct_bytes;
  int32_t batch_size;
  int32_t window_stride;    /* entries from a row's window to the next one's, at least
                             * window + draft_block, of which so many are read */
  const int64_t* token_ids; /* [batch_size * draft_block] */
  const int64_t* positions; /* [the same] */
  const int32_t* key_slots; /* [the same] */
  const int32_t* window;    /* [the same, window_stride]; below 0: none */
  /* Out, as lowlat_proposal takes it: bf16 [the same, hidden], V4 [.., 4, hidden]. Equal bit for
   * bit on every rank; NaN until the launch has run, and after one that did not end. */
  uint16_t* hidden;
} lowlat_hosted_draft;

/* After lowlat_pools_bind. LOWLAT_UNSUPPORTED when batch_size * draft_block rows were not built. */
LOWLAT_API lowlat_status lowlat_hosted_draft_launch(lowlat_model* model,
                                                    const lowlat_hosted_draft* draft, void* stream);

/* draft_block proposals a request, from what the draft's last layer left; before the norm. */
typedef struct lowlat_proposal {
  uint32_t struct_bytes;
  int32_t batch_size;
  const uint16_t* hidden;      /* bf16 [batch_size * draft_block, hidden], V4 [.., 4, hidden] */
  const int64_t* anchors;      /* [batch_size] */
  const float* temperature;    /* [batch_size] 0: greedy; NULL: all of them */
  const int64_t* noise_offset; /* [1] read when the launch runs; the row of the noise is the
                                * request's place in the batch, the rest as in lowlat_draft */
  uint64_t noise_key;
  /* Out, equal bit for bit on every rank. */
  int64_t* draft_tokens; /* [batch_size, draft_block] */
  float* draft_logits;   /* [batch_size, draft_block, vocab]; NULL: not wanted */
} lowlat_proposal;

/* LOWLAT_UNSUPPORTED when batch_size * draft_block rows were not built. */
LOWLAT_API lowlat_status lowlat_propose_launch(lowlat_model* model, const lowlat_proposal* proposal,
                                               void* stream);

/* Waits until everything launched has run. LOWLAT_FAULT when a wait expired, the model was
 * aborted, or budget_ns passed (then nothing is known of the work still running: abort). */
LOWLAT_API lowlat_status lowlat_synchronize(lowlat_model* model, uint64_t budget_ns);

/* ------------------------------------------------------------------ faults */

/* Places of a layer: its kernels, its gates, and what tells a gate from a kernel. */
#define LOWLAT_PLACE_KERNELS 16
#define LOWLAT_PLACE_GATES 32
#define LOWLAT_PLACE_GATE 0x1000u

typedef struct lowlat_status_words {
  uint32_t struct_bytes;
  uint32_t state;  /* 0 healthy, 1 a wait expired here, 2 aborted by a peer, 3 aborted by host */
  uint32_t kernel; /* index into the catalogue's lines */
  uint32_t stage;  /* lowlat_stage_name() gives the word */
  int32_t peer;    /* rank that was waited for or that raised the abort; -1: none */
  uint32_t place;  /* of the fused schedule: LOWLAT_PLACE_KERNELS times the layer, counted from 1,
                    * and which of its kernels; or LOWLAT_PLACE_GATE, LOWLAT_PLACE_GATES times the
                    * layer and which of its gates; else 0 */
  uint64_t epoch;  /* of the exchange */
} lowlat_status_words;

/* The words as they are now, also while launches run. */
LOWLAT_API lowlat_status lowlat_status_read(const lowlat_model* model,
                                            lowlat_status_words* out_words);
/* Of a number that is no stage's: "unknown". */
LOWLAT_API const char* lowlat_stage_name(uint32_t stage);
/* Raises the abort word on this rank and on every imported peer; waits end as soon as they see
 * it. The model stays unusable; a new one works. */
LOWLAT_API void lowlat_abort(lowlat_model* model);

/* ------------------------------------------------------------------ single operations */

typedef struct lowlat_array {
  const char* name;
  uint32_t dtype; /* U8, I32, I64, F32 or BF16; e4m3, ue8m0 and fp4 travel as U8 */
  uint32_t ndim;
  int64_t shape[LOWLAT_MAX_DIMS]; /* row-major, contiguous */
  void* data;
} lowlat_array;

/* What this library can run on here, found by doing it: a kernel is looked up on every device, and
 * every device stores into every other's memory. Takes a second on a machine with devices. JSON:
 * {"nvidia": {"built", "architectures", "toolkit", "driver", "refusal", "fused": [{"name",
 * "shapes", "rows"}], "devices": [{"name", "isa", "refusal"}], "peers": [{"from", "to",
 * "refusal"}]}, "amd": {the same}}; a refusal is "" where all is well, "built" is false in a
 * library without kernels of the platform, "fused" says which fused kernels are built for which
 * models, ranks and rows.
 * Valid until the calling thread's next call of this function. */
LOWLAT_API const char* lowlat_devices(void);

/* The operations as JSON: [{"name", "models", "about", "in": [{"name","dtype","shape","optional",
 * "about"}], "out": [...], "numerics": {platform: {output: "bitwise" | "metric <= bound"}}}].
 * "models" is words of "v4" and "v41"; a name whose arrays differ has an entry for each model. */
LOWLAT_API const char* lowlat_op_list(void);

/* First half: checks `inputs` (missing, extra, mis-shaped, mis-typed, out of range: refused by
 * name) and writes each output's name, dtype and shape into out_outputs (data NULL). At most
 * LOWLAT_MAX_OP_OUTPUTS. `model` is "v4" or "v41"; `platform` "reference", "scalar" or, in a
 * library with CUDA kernels, "nvidia". Needs no device. */
#define LOWLAT_MAX_OP_OUTPUTS 8
LOWLAT_API lowlat_status lowlat_op_plan(const char* op, const char* model, const char* platform,
                                        const lowlat_array* inputs, int32_t num_inputs,
                                        lowlat_array* out_outputs, int32_t* out_num_outputs);
/* Second half: the same checks, then the operation into the caller's output arrays. On nvidia the
 * arrays are the host's too: they are copied to the first device and back, and LOWLAT_UNSUPPORTED
 * says why there is none that runs the kernels. */
LOWLAT_API lowlat_status lowlat_op_run(const char* op, const char* model, const char* platform,
                                       const lowlat_array* inputs, int32_t num_inputs,
                                       lowlat_array* outputs, int32_t num_outputs);

#ifdef __cplusplus
}
#endif
#endif /* LOWLAT_KERNELS_H_ */
