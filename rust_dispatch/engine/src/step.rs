//! The seam between the engine and the model.
//!
//! The scheduler fills a [`StepPlan`], a [`StepRunner`] runs it on every rank and fills a
//! [`StepResult`]. Nothing above this seam knows kernels, ranks or logits; nothing below it knows
//! traces, sessions or the prefix cache. Plan and result are reused from step to step, so that a
//! step allocates nothing once the vectors have grown.
//!
//! Who does what with speculation on:
//!
//! * The scheduler gives each request's anchor (last emitted token, not yet in the cache) and
//!   slots for `num_drafts + 1` rows behind it, and cuts what a request emits at its limit.
//! * The runner keeps the draft's context: an extend step injects its prompt rows before it ends
//!   (their pages may be shared with other requests from then on), and before a request drafts its
//!   committed rows (anchor and accepted drafts) of earlier steps have been injected. The runner
//!   drafts, verifies, accepts, and gives back the accepted drafts followed by the next token.
//! * A request that ended is simply in no later plan; its pages may be another's in the next one.

use std::path::PathBuf;

use lowlat_core::graph_key::Record;

use crate::EngineError;

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepMode {
    /// A chunk of prompt rows of one or more requests.
    Extend,
    /// One row a request, no draft.
    Decode,
    /// Draft, then `num_drafts + 1` rows a request, then accept.
    Verify,
}

/// One request's part of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRequest {
    /// Stable number of the request in this run. Draws of random numbers are keyed by it, so that
    /// a request's tokens do not depend on who shares its batch.
    pub uid: u32,
    /// Where its rows start in [`StepPlan::token_ids`].
    pub first_row: usize,
    /// Its entries in [`StepPlan::token_ids`]: a chunk of the prompt, or 1 (the anchor).
    pub num_rows: usize,
    /// Position of the first row = tokens of the request that the cache holds already.
    pub start: i32,
    /// The three tokens before the first row, oldest first; 0 where the position is negative.
    pub history: [i32; 3],
    /// Ring of the compressor state: below `max_batch`, the request's own until it ends.
    pub state_slot: i32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Steps of this request that wanted a token before this one: 0 for its first token. With
    /// `uid` and the run's seed it fixes every random draw of the step.
    pub draw: u64,
    /// Whether a token is wanted: always for decode and verify; of an extend step's requests only
    /// those whose chunk ends the prompt (the token then follows the chunk's last row).
    pub wants_token: bool,
}

/// One step for all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// What to compute.
    pub mode: StepMode,
    /// 1 to `max_batch` of them.
    pub requests: Vec<StepRequest>,
    /// Rows of all requests, request after request: prompt chunk (extend) or anchor.
    pub token_ids: Vec<i32>,
    /// `[requests, page_table_stride]` pool page of each logical page; -1 behind a request's last
    /// page. Slot of position p is `table[p / page_size] * page_size + p % page_size`; pages reach
    /// far enough for every row of the step, drafts included.
    pub page_table: Vec<i32>,
    /// Entries a request.
    pub page_table_stride: usize,
    /// Verify only: this many drafts count as accepted for every request (0 to `num_drafts`),
    /// whatever the rule says; draft, verify and accept run in full, greedily.
    pub simulated_accept: Option<u32>,
}

impl StepPlan {
    /// An empty plan, to be filled again and again.
    #[must_use]
    pub fn new() -> Self {
        Self {
            mode: StepMode::Extend,
            requests: Vec::new(),
            token_ids: Vec::new(),
            page_table: Vec::new(),
            page_table_stride: 0,
            simulated_accept: None,
        }
    }

    /// Page table row of the request at `request_idx`.
    #[must_use]
    pub fn pages(&self, request_idx: usize) -> &[i32] {
        let first = request_idx * self.page_table_stride;
        &self.page_table[first..first + self.page_table_stride]
    }
}

impl Default for StepPlan {
    fn default() -> Self {
        Self::new()
    }
}

/// How a launch of the step ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPath {
    /// By the persistent schedule, as recorded at capture.
    Covered,
    /// By the plain path, for the reason of that name (`step_is_extend`, `plugin_off` ...).
    Plain(&'static str),
}

/// What a step gave. The runner clears and fills it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepResult {
    /// Emitted tokens, request after request: 0 or 1 each (extend), 1 (decode), accepted drafts
    /// and the next token (verify).
    pub tokens: Vec<i32>,
    /// How many of them are each request's, in the plan's order.
    pub counts: Vec<u32>,
    /// How the target ran.
    pub target: StepPath,
    /// How the draft ran; `None` where the step has none.
    pub draft: Option<StepPath>,
}

impl StepResult {
    /// An empty result, to be filled again and again.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tokens: Vec::new(),
            counts: Vec::new(),
            target: StepPath::Plain("extend"),
            draft: None,
        }
    }

    /// Forgets the step before.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.counts.clear();
        self.target = StepPath::Plain("extend");
        self.draft = None;
    }
}

impl Default for StepResult {
    fn default() -> Self {
        Self::new()
    }
}

/// What the scheduler must know of a model that is ready to run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunnerInfo {
    /// Name of the built-in model, or its folder.
    pub model: String,
    /// `scalar`.
    pub platform: String,
    /// Ranks.
    pub tp_size: u32,
    /// Ids are below it.
    pub vocab: u32,
    /// First id that is an ordinary word; synthesised prompts use `[first_token, vocab)`.
    pub first_token: u32,
    /// Ids in that range that mean something else to the model (mask, image, pad).
    pub special_tokens: Vec<u32>,
    /// Tokens a page, a multiple of every ratio: nothing compressed lies across two pages.
    pub page_size: usize,
    /// Pages of the pool, all of them free.
    pub num_pages: usize,
    /// Requests of one step.
    pub max_batch: usize,
    /// Rows of one extend step.
    pub max_rows: usize,
    /// Positions are below it, those of rejected drafts included.
    pub max_positions: usize,
    /// Drafts a verify step (5); 0 where the model has none or speculation is off.
    pub num_drafts: usize,
    /// Facts for the report, as name and value: vote digest, catalogue digest, graph keys ...
    pub facts: Vec<(String, String)>,
}

/// A model on all its ranks that runs one step after the other.
pub trait StepRunner {
    /// What it is and how much it holds.
    fn info(&self) -> &RunnerInfo;

    /// Runs one step to its end on every rank. The tokens are equal on all ranks or it is a fault.
    ///
    /// # Errors
    /// [`EngineError::Fault`] when a deadline passed, a rank was lost or ranks differ; the runner
    /// is then of no further use. `out` means nothing after an error.
    fn run(&mut self, plan: &StepPlan, out: &mut StepResult) -> Result<(), EngineError>;

    /// What was captured, as rank 0 recorded it; `None` where nothing is captured.
    fn record(&self) -> Option<&Record> {
        None
    }
}

/// A rank told to misbehave while the ranks come to agree: shows that they refuse together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Covers other widths than its peers.
    Widths,
    /// Carries another kernel catalogue.
    Catalogue,
    /// Never answers the vote.
    Silent,
    /// Fails when its launches are recorded, the last of them too.
    Capture,
}

/// Which rank misbehaves, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    /// Below `tp_size`.
    pub tp_rank: u32,
    /// What it does.
    pub kind: FaultKind,
}

/// What the runtime is asked for; frozen once the command line is read.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeSettings {
    /// Name of a built-in model (`tiny-v4`, `tiny-v41`), or a checkpoint folder.
    pub model: String,
    /// `scalar`.
    pub platform: String,
    /// Ranks.
    pub tp_size: u32,
    /// Whether covered steps run by the persistent schedule; off: every step by the plain path.
    pub plugin: bool,
    /// Widths to build, in rows, ascending; empty: the default of the mode (multiples of
    /// `num_drafts + 1`, or 1 to `max_batch` without speculation).
    pub widths: Vec<u32>,
    /// Requests of one step at most.
    pub max_batch: usize,
    /// Rows of one extend step at most.
    pub max_rows: usize,
    /// Draft and verify, or plain decoding.
    pub speculative: bool,
    /// Least tokens that the page pool must hold.
    pub kv_tokens: usize,
    /// Seed of every random draw of the run (noise, coins).
    pub seed: u64,
    /// The kernel library; `None`: beside the program, then the loader's path.
    pub kernels: Option<PathBuf>,
    /// A rank that misbehaves, for tests of the agreement.
    pub inject_fault: Option<InjectedFault>,
}
