//! Mirrors of `lowlat/kernels.h`, field for field. `layout` tells sizes and offsets, so that a
//! test can compare them with what a C compiler says.

use std::ffi::{c_char, c_void};

/// The header's `LOWLAT_KERNELS_ABI_VERSION`.
pub const ABI_VERSION: u32 = 1;

/// `LOWLAT_MAX_DIMS`.
pub const MAX_DIMS: usize = 6;
/// `LOWLAT_MAX_LAYERS`.
pub const MAX_LAYERS: usize = 64;
/// `LOWLAT_MAX_WIDTHS`.
pub const MAX_WIDTHS: usize = 32;
/// `LOWLAT_MAX_DRAFT_STAGES`.
pub const MAX_DRAFT_STAGES: usize = 4;
/// `LOWLAT_MAX_ENGRAMS`.
pub const MAX_ENGRAMS: usize = 4;
/// `LOWLAT_ENGRAM_NGRAMS`.
pub const ENGRAM_NGRAMS: usize = 3;
/// `LOWLAT_ENGRAM_HEADS`.
pub const ENGRAM_HEADS: usize = 8;
/// `LOWLAT_ENGRAM_SHIFTS`.
pub const ENGRAM_SHIFTS: usize = 4;
/// `LOWLAT_PEER_HANDLE_BYTES`.
pub const PEER_HANDLE_BYTES: usize = 128;
/// `LOWLAT_MAX_OP_OUTPUTS`.
pub const MAX_OP_OUTPUTS: usize = 8;

/// `LOWLAT_V41`.
pub const KIND_V41: u32 = 1;
/// `LOWLAT_V4`.
pub const KIND_V4: u32 = 2;
/// `LOWLAT_ROW_MAJOR`.
pub const ROW_MAJOR: u32 = 0;
/// `LOWLAT_WEIGHT`.
pub const ROLE_WEIGHT: u32 = 0;
/// `LOWLAT_POOL`.
pub const ROLE_POOL: u32 = 1;
/// `LOWLAT_MEMORY_DEVICE`.
pub const MEMORY_DEVICE: u32 = 0;
/// `LOWLAT_MEMORY_SHARED`.
pub const MEMORY_SHARED: u32 = 1;

/// `lowlat_status` of a call that went well.
pub const STATUS_OK: i32 = 0;

/// `lowlat_dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Dtype {
    /// Plain bytes.
    U8 = 0,
    /// Signed 32 bits.
    I32 = 1,
    /// Signed 64 bits.
    I64 = 2,
    /// IEEE single.
    F32 = 3,
    /// bfloat16, as its 16 bits.
    Bf16 = 4,
    /// OCP e4m3fn codes.
    E4m3 = 5,
    /// Powers of two, `2^(byte - 127)`.
    Ue8m0 = 6,
    /// Two e2m1 codes a byte, the even index in the low nibble.
    Fp4x2 = 7,
}

impl Dtype {
    /// The dtype of that number, if the header has one.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        const ALL: [Dtype; 8] = [
            Dtype::U8,
            Dtype::I32,
            Dtype::I64,
            Dtype::F32,
            Dtype::Bf16,
            Dtype::E4m3,
            Dtype::Ue8m0,
            Dtype::Fp4x2,
        ];
        ALL.get(code as usize).copied()
    }

    /// Bytes of one element as shapes count them (a pair of codes for `Fp4x2`).
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::E4m3 | Self::Ue8m0 | Self::Fp4x2 => 1,
            Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
        }
    }
}

/// `lowlat_step_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StepMode {
    /// One row a request.
    Decode = 0,
    /// The anchor, then the drafts of each request.
    TargetVerify = 1,
    /// Prompt rows; by the plain schedule only.
    Extend = 2,
}

/// Size and offsets of one mirrored struct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Its name in the header.
    pub c_name: &'static str,
    /// `sizeof`.
    pub bytes: usize,
    /// Field and `offsetof`, in order.
    pub fields: Vec<(&'static str, usize)>,
}

macro_rules! c_structs {
    ($($(#[$meta:meta])* $name:ident = $c_name:literal {
        $($(#[$field_meta:meta])* $field:ident: $type:ty,)*
    })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug)]
            #[repr(C)]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $type,)*
            }
        )*

        /// Every struct mirrored here.
        #[must_use]
        pub fn layout() -> Vec<StructLayout> {
            vec![$(StructLayout {
                c_name: $c_name,
                bytes: size_of::<$name>(),
                fields: vec![$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            },)*]
        }
    };
}

c_structs! {
    /// A tensor of the caller's.
    Tensor = "lowlat_tensor" {
        /// `sizeof`.
        struct_bytes: u32,
        /// [`Dtype`].
        dtype: u32,
        /// `lowlat_layout`.
        layout: u32,
        /// Dimensions in use.
        ndim: u32,
        /// Elements.
        shape: [i64; MAX_DIMS],
        /// Elements; the last is 1.
        stride: [i64; MAX_DIMS],
        /// First element.
        data: *mut c_void,
    }

    /// A tensor that a model must be given.
    TensorSpec = "lowlat_tensor_spec" {
        /// `sizeof`.
        struct_bytes: u32,
        /// [`Dtype`].
        dtype: u32,
        /// `lowlat_layout`.
        layout: u32,
        /// `lowlat_tensor_role`.
        role: u32,
        /// Dimensions in use.
        ndim: u32,
        /// Dimension of the published tensor that is split over ranks; -1: none.
        shard_dim: i32,
        /// On this rank.
        shape: [i64; MAX_DIMS],
        /// The model's.
        name: *const c_char,
    }

    /// One layer's place in the pattern of shared caches; -1: none.
    Layer = "lowlat_layer" {
        /// 0; V4.1 1 or 2; V4 4 or 128.
        ratio: i32,
        /// Layer whose compressed pool is read.
        kv_source: i32,
        /// Layer whose selection is used.
        index_source: i32,
        /// Layer whose candidate blocks restrict this index source.
        candidate_source: i32,
        /// Engram table.
        engram: i32,
        /// 1: a table gives each token's experts (V4).
        hash_gate: i32,
    }

    /// A model's sizes, this rank's place and what was built.
    ModelConfig = "lowlat_model_config" {
        /// `sizeof`.
        struct_bytes: u32,
        /// `lowlat_model_kind`.
        kind: u32,
        /// Width of the residual.
        hidden: i32,
        /// Target layers.
        num_layers: i32,
        /// Token ids.
        vocab: i32,
        /// Query heads.
        num_heads: i32,
        /// Width of a head.
        head_dim: i32,
        /// Rotating dimensions.
        rope_dim: i32,
        /// Query bottleneck.
        q_lora: i32,
        /// Output groups.
        o_groups: i32,
        /// Output bottleneck, a group.
        o_lora: i32,
        /// Sliding window.
        window: i32,
        /// Routed experts.
        num_experts: i32,
        /// Experts a row.
        experts_per_token: i32,
        /// Width inside an expert.
        moe_intermediate: i32,
        /// Indexer heads.
        index_heads: i32,
        /// Width of an index key.
        index_dim: i32,
        /// Entries selected.
        index_topk: i32,
        /// Layer that publishes candidate blocks; -1: none.
        candidate_layer: i32,
        /// Blocks published.
        candidate_blocks: i32,
        /// Positions a block.
        candidate_block_size: i32,
        /// Edge of an fp8 weight block.
        scale_block: i32,
        /// Sinkhorn passes.
        sinkhorn_iters: i32,
        /// Added to mean squares.
        norm_eps: f32,
        /// Of the hyper-connection.
        hc_eps: f32,
        /// Clamp.
        swiglu_limit: f32,
        /// Factor of the routed sum.
        routed_scaling: f32,
        /// Rotary base, window-only layers.
        rope_theta: f64,
        /// Rotary base, compressed layers.
        compress_rope_theta: f64,
        /// YaRN.
        yarn_factor: f64,
        /// YaRN.
        yarn_beta_fast: f64,
        /// YaRN.
        yarn_beta_slow: f64,
        /// YaRN.
        yarn_original_positions: f64,
        /// Positions are below it.
        max_positions: i64,
        /// Target layers.
        layers: [Layer; MAX_LAYERS],
        /// Engram tables.
        num_engrams: i32,
        /// Elements a row of a table.
        engram_head_dim: i32,
        /// Stands where there is no token.
        engram_pad_token: i32,
        /// Breaks n-grams; -1: none.
        image_token: i32,
        /// Rows of each column.
        engram_primes: [[[i64; ENGRAM_HEADS]; ENGRAM_NGRAMS]; MAX_ENGRAMS],
        /// Hash multipliers.
        engram_multipliers: [[i64; ENGRAM_SHIFTS]; MAX_ENGRAMS],
        /// 0: no draft.
        num_draft_stages: i32,
        /// Proposals a step.
        draft_block: i32,
        /// Token of a proposal not made yet.
        draft_mask_token: i32,
        /// Rank of the Markov head.
        markov_rank: i32,
        /// Routed experts of a stage.
        draft_experts: i32,
        /// Experts a row.
        draft_experts_per_token: i32,
        /// Layers whose input (V4.1) or output (V4) feeds the draft; -1 behind the last.
        draft_target_layers: [i32; MAX_DRAFT_STAGES],
        /// This rank.
        tp_rank: i32,
        /// All ranks.
        tp_size: i32,
        /// Entries of `widths` in use.
        num_widths: i32,
        /// Requests of a step.
        max_batch: i32,
        /// Rows of a plain step.
        max_rows: i32,
        /// Rows of a built step, ascending.
        widths: [i32; MAX_WIDTHS],
        /// Tokens a page.
        page_size: i32,
        /// Pages of every pool.
        num_pages: i32,
        /// Rows of the compressors' state ring.
        state_ring: i32,
        /// Every wait for a peer ends within it.
        wait_budget_ns: u64,
    }

    /// What a peer needs to reach a rank's memory.
    PeerHandle = "lowlat_peer_handle" {
        /// Plain bytes.
        bytes: [u8; PEER_HANDLE_BYTES],
    }

    /// A step's inputs and outputs; shapes and meaning as in the header.
    Step = "lowlat_step" {
        /// `sizeof`.
        struct_bytes: u32,
        /// [`StepMode`].
        mode: u32,
        /// Rows.
        num_rows: i32,
        /// Requests.
        batch_size: i32,
        /// 0 when extending.
        tokens_per_request: i32,
        /// Entries a request.
        page_table_stride: i32,
        /// `[num_rows]`.
        token_ids: *const i32,
        /// `[num_rows]`.
        positions: *const i32,
        /// `[num_rows]`.
        request_idx: *const i32,
        /// `[num_rows]`, -1: padding.
        slots: *const i32,
        /// `[batch_size, page_table_stride]`.
        page_table: *const i32,
        /// `[batch_size, 3]`.
        history: *const i32,
        /// `[batch_size]`.
        state_slots: *const i32,
        /// Rows that the head runs for.
        num_logit_rows: i32,
        /// 0.
        reserved: i32,
        /// `[num_logit_rows]` ascending; null: all.
        logit_rows: *const i32,
        /// `[num_logit_rows, vocab]`, or null.
        logits: *mut f32,
        /// `[num_logit_rows]`, or null.
        argmax: *mut i32,
    }

    /// A draft's inputs and outputs; shapes and meaning as in the header.
    Draft = "lowlat_draft" {
        /// `sizeof`.
        struct_bytes: u32,
        /// Rows of the last target step, or 0.
        num_inject_rows: i32,
        /// `[num_inject_rows]`, -1: not committed.
        inject_slots: *const i32,
        /// `[num_inject_rows]`.
        inject_positions: *const i32,
        /// 0: inject only.
        batch_size: i32,
        /// Entries a request.
        page_table_stride: i32,
        /// `[batch_size]`.
        anchors: *const i32,
        /// `[batch_size]`.
        prefixes: *const i32,
        /// `[batch_size, draft_block]`, -1: padding.
        slots: *const i32,
        /// `[batch_size, page_table_stride]`.
        page_table: *const i32,
        /// `[batch_size]`, 0: greedy.
        temperature: *const f32,
        /// `[batch_size]`.
        noise_row: *const i32,
        /// `[batch_size]`.
        noise_offset: *const i64,
        /// Of all rows.
        noise_key: u64,
        /// `[batch_size, draft_block]`.
        draft_tokens: *mut i32,
        /// `[batch_size, draft_block, vocab]`, or null when all rows are greedy.
        draft_logits: *mut f32,
    }

    /// The acceptance rule's inputs and outputs; shapes and meaning as in the header.
    Accept = "lowlat_accept" {
        /// `sizeof`.
        struct_bytes: u32,
        /// Requests.
        batch_size: i32,
        /// Drafts a request.
        num_drafts: i32,
        /// Width of the logits.
        vocab: i32,
        /// `[batch_size, num_drafts]`.
        draft_tokens: *const i32,
        /// `[batch_size, num_drafts + 1, vocab]`.
        target_logits: *const f32,
        /// `[batch_size, num_drafts, vocab]`; null: all greedy.
        draft_logits: *const f32,
        /// `[batch_size]`.
        temperature: *const f32,
        /// `[batch_size, num_drafts + 1]`; null: all greedy.
        coins: *const f32,
        /// `[batch_size]`.
        accepted: *mut i32,
        /// `[batch_size]`.
        next_tokens: *mut i32,
    }

    /// How a model lies inside another engine; meaning as in the header.
    Hosting = "lowlat_hosting" {
        /// `sizeof`.
        struct_bytes: u32,
        /// Row-major, or Marlin's tiles.
        expert_layout: u32,
        /// 1: V4.1's `wo_a` in bf16.
        bf16_wo_a: i32,
        /// 1: for proposals alone.
        proposals: i32,
        /// 1: for the layers before them too.
        stages: i32,
    }

    /// The caches of an engine that hosts a model; shapes and meaning as in the header.
    Pools = "lowlat_pools" {
        /// `sizeof`.
        struct_bytes: u32,
        /// That a page table may name.
        num_pages: i32,
        /// Of the window's pools.
        num_window_pages: i32,
        /// Rings of a request's state, rows of `history`.
        num_requests: i32,
        /// `[num_pages * page_size]`; null: the same slot.
        window_slots: *const i64,
        /// `[num_requests, 3]`, or null.
        history: *mut i32,
        /// Entries of `names` and `tensors`.
        num_tensors: i32,
        /// V4.1: 1 where codes and scales of an index are two tensors.
        split_index: i32,
        /// `[num_tensors]`.
        names: *const *const c_char,
        /// `[num_tensors]`.
        tensors: *const Tensor,
    }

    /// A step of a hosted model; shapes and meaning as in the header.
    HostedStep = "lowlat_hosted_step" {
        /// `sizeof`.
        struct_bytes: u32,
        /// [`StepMode`], never extending.
        mode: u32,
        /// Requests.
        batch_size: i32,
        /// Rows a request.
        tokens_per_request: i32,
        /// Entries from a table to the next.
        page_table_stride: i32,
        /// Entries of a table.
        num_table_pages: i32,
        /// `[rows]`.
        token_ids: *const i64,
        /// `[rows]`.
        positions: *const i64,
        /// `[rows]`, of page 0: padding.
        slots: *const i64,
        /// `[batch_size]`.
        requests: *const i64,
        /// `[batch_size, page_table_stride]`.
        page_table: *const i32,
        /// `[rows, hidden]`.
        hidden: *mut u16,
        /// `[rows, num_draft_stages * hidden]`, or null.
        features: *mut u16,
        /// `[rows, 4 * hidden]`, or null.
        streams: *mut u16,
    }

    /// The layers of a hosted draft; shapes and meaning as in the header.
    HostedDraft = "lowlat_hosted_draft" {
        /// `sizeof`.
        struct_bytes: u32,
        /// Requests.
        batch_size: i32,
        /// Entries from a row's window to the next one's.
        window_stride: i32,
        /// `[rows]`.
        token_ids: *const i64,
        /// `[rows]`.
        positions: *const i64,
        /// `[rows]`, of page 0: padding.
        key_slots: *const i32,
        /// `[rows, window_stride]`, below 0: none.
        window: *const i32,
        /// `[rows, hidden]`, V4's with four streams.
        hidden: *mut u16,
    }

    /// A block of proposals of a hosted draft; shapes and meaning as in the header.
    Proposal = "lowlat_proposal" {
        /// `sizeof`.
        struct_bytes: u32,
        /// Requests.
        batch_size: i32,
        /// `[batch_size * draft_block, hidden]`, V4's with four streams.
        hidden: *const u16,
        /// `[batch_size]`.
        anchors: *const i64,
        /// `[batch_size]`; null: all greedy.
        temperature: *const f32,
        /// `[1]`.
        noise_offset: *const i64,
        /// Of all rows.
        noise_key: u64,
        /// `[batch_size, draft_block]`.
        draft_tokens: *mut i64,
        /// `[batch_size, draft_block, vocab]`, or null.
        draft_logits: *mut f32,
    }

    /// What a rank's kernels say of themselves.
    StatusWords = "lowlat_status_words" {
        /// `sizeof`.
        struct_bytes: u32,
        /// 0 healthy, 1 a wait expired here, 2 aborted by a peer, 3 aborted by the host.
        state: u32,
        /// Line of the catalogue.
        kernel: u32,
        /// Stage, see `lowlat_stage_name`.
        stage: u32,
        /// Rank that was waited for or that raised the abort; -1: none.
        peer: i32,
        /// Which kernel or gate of the fused schedule, as the header says; else 0.
        place: u32,
        /// Of the exchange.
        epoch: u64,
    }

    /// An array of a single operation.
    Array = "lowlat_array" {
        /// Of the array.
        name: *const c_char,
        /// U8, I32, I64, F32 or BF16.
        dtype: u32,
        /// Dimensions in use.
        ndim: u32,
        /// Row-major, contiguous.
        shape: [i64; MAX_DIMS],
        /// First element.
        data: *mut c_void,
    }
}
