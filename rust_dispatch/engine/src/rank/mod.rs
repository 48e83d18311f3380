//! One rank, from its configuration to its last step: guard, vote, build, capture, replay. Each
//! rank does all of it for itself and agrees with the others; nobody decides for it.

mod arena;

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use lowlat_core::config::ModelConfig;
use lowlat_core::digest::Fnv1a;
use lowlat_core::graph_key::{self, KeyIdx, Path, Record, RecordError, Recorder};
use lowlat_core::spec::{model_facts, requirements};
use lowlat_core::vote::Decision as VoteDecision;
use lowlat_core::{
    Ballot, BallotParts, Built, Captured, Coverage, DeadlineLadder, Decision, Facts, GraphMode,
    InstantNs, Reason, Seat, StepFacts, StepMode as FactsMode, TpRank, guard,
};

use crate::EngineError;
use crate::checkpoint::Checkpoint;
use crate::kernels::abi::{self, PeerHandle, StepMode as KernelMode};
use crate::kernels::{Buffer, KernelError, KernelModel, Kernels, ModelHandle, Status, TensorInfo};
use crate::model::{self, Geometry, KeyTraits};
use crate::step::{FaultKind, StepMode, StepPath, StepPlan, StepRequest};
use crate::weights::{SeededWeights, WEIGHT_SEED};

use arena::{Arena, ArenaShape};

/// What runs every graph of this engine.
const PATH: Path = Path::Persistent;

/// How long ranks wait for each other, and the clock that they all read.
#[derive(Clone, Copy)]
pub(crate) struct Deadlines {
    pub ladder: DeadlineLadder,
    /// How long a phase of the start may take: the engine's deadline and the reading of weights.
    pub start_ns: u64,
    pub clock: Instant,
}

impl Deadlines {
    fn now(&self) -> InstantNs {
        InstantNs(self.clock.elapsed().as_nanos() as u64)
    }
}

/// Where the weights come from.
#[derive(Clone)]
pub(crate) enum WeightSource {
    /// Made on the spot.
    Seeded,
    /// Files that the runtime keeps open until all ranks have started.
    Checkpoint(Weak<Checkpoint>),
}

impl WeightSource {
    /// Hands every tensor with this rank's memory of it to `bind`.
    fn fill(
        &self,
        config: &ModelConfig,
        tensors: &[TensorInfo],
        coverage: &Coverage,
        mut bind: impl FnMut(&TensorInfo, Buffer<u8>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (rank, size) = (coverage.tp_rank().0, coverage.tp_size());
        let seeded;
        let open;
        let fill: &dyn Fn(&TensorInfo) -> Result<Buffer<u8>, String> = match self {
            Self::Seeded => {
                seeded = SeededWeights::new(config, WEIGHT_SEED);
                &|tensor| seeded.fill(tensor, rank, size)
            }
            Self::Checkpoint(checkpoint) => {
                open = checkpoint.upgrade().ok_or_else(|| {
                    EngineError::Fault("the start was given up while weights were read".into())
                })?;
                &|tensor| open.fill(tensor, rank, size)
            }
        };
        for tensor in tensors {
            bind(tensor, fill(tensor).map_err(EngineError::Refused)?)?;
        }
        Ok(())
    }
}

/// What every rank is started with.
#[derive(Clone)]
pub(crate) struct RankSetup {
    pub kernels: Kernels,
    pub platform: String,
    pub model: String,
    pub config: Arc<ModelConfig>,
    pub weights: WeightSource,
    pub geometry: Geometry,
    pub deadlines: Deadlines,
    /// Drafts a step; 0 without speculation.
    pub num_drafts: u32,
    pub plugin: bool,
    pub seed: u64,
    /// Whether every step's logits go into the comparison of ranks.
    pub compare_logits: bool,
    /// Bytes that all ranks' weights and pools may take; `None`: nobody could say.
    pub memory_bytes: Option<u64>,
    pub exchange: Arc<PeerExchange>,
}

/// Where ranks that are threads of one process leave their peer handles for each other.
#[derive(Default)]
pub(crate) struct PeerExchange {
    handles: Mutex<Vec<(u32, PeerHandle)>>,
}

/// What a rank found while it was built.
#[derive(Clone, Debug)]
pub(crate) struct RankFacts {
    pub catalogue_digest: u64,
    pub catalogue: String,
    pub record: Record,
    pub record_digest: u64,
    pub num_keys: usize,
    pub weight_bytes: u64,
    pub pool_bytes: u64,
    pub own_bytes: u64,
    pub vote_epoch: u32,
}

/// What a rank says of a step. Used again for each step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankOutput {
    pub tokens: Vec<i32>,
    pub counts: Vec<u32>,
    pub target: Option<StepPath>,
    pub draft: Option<StepPath>,
    /// Of the drafts, and of the logits where they are compared.
    pub digest: u64,
}

/// A model under its coverage: bound memory, step memory, recorded launches.
struct RankModel {
    model: KernelModel,
    /// Handed to the model at the end: a launch that a failed start or step left behind may still
    /// run, and whoever watches the model may keep it longer than this.
    arena: ManuallyDrop<Arena>,
    /// By [`KeyIdx`].
    launches: Vec<Launch>,
}

impl Drop for RankModel {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and the field is not used after it.
        let arena = unsafe { ManuallyDrop::take(&mut self.arena) };
        self.model.keep(arena);
    }
}

/// What was recorded for a graph key.
enum Launch {
    Target {
        step: abi::Step,
        accept: abi::Accept,
    },
    Draft(abi::Draft),
}

// SAFETY: the pointers lead into the arena beside it, which travels along and is freed later.
unsafe impl Send for Launch {}

/// One rank, ready to run steps.
pub(crate) struct Rank {
    captured: Captured<RankModel>,
    seat: Seat,
    setup: RankSetup,
    /// Rows of the last target step that wait to be injected into the draft's context.
    pending_rows: usize,
}

/// A fault that a test asks of this rank while ranks come to agree.
pub(crate) type Misbehaviour = Option<FaultKind>;

impl RankSetup {
    /// Widths as this rank covers them.
    fn widths(&self, fault: Misbehaviour) -> Vec<u32> {
        let mut widths = self.geometry.widths.clone();
        if fault == Some(FaultKind::Widths) {
            // Another width set that is right in itself: one less, or one more where it is alone.
            match widths.len() {
                1 => widths.push(widths[0] * 2),
                _ => drop(widths.pop()),
            }
        }
        widths
    }

    fn check_platform(&self) -> Result<lowlat_core::Servable, Vec<String>> {
        let facts = Facts {
            isa: RESIDENT_RULES.into(),
            tp_size: self.geometry.tp_size,
            dtype: Some("bfloat16".into()),
            model: model_facts(&self.config),
            ..Facts::default()
        };
        let Some(requirements) = requirements(self.config.family, RESIDENT_RULES) else {
            let family = self.config.family.words();
            return Err(vec![format!(
                "{family} has no kernels on {}",
                self.platform
            )]);
        };
        guard(&facts, &requirements)
            .map_err(|declines| declines.iter().map(ToString::to_string).collect())
    }
}

/// The resident schedule is one program for every platform and takes the sizes that it takes on
/// the scalar one; fused kernels have rules of their own.
const RESIDENT_RULES: &str = "scalar";

/// A reason to decline, with what is cast in the vote for it.
struct Refused {
    reason: Reason,
    message: String,
}

impl Rank {
    /// Guard, vote, build and capture. `watch` is told the model as soon as there is one, so that
    /// it can be stopped.
    pub fn start(
        setup: RankSetup,
        mut seat: Seat,
        fault: Misbehaviour,
        watch: impl FnOnce(ModelHandle),
    ) -> Result<(Self, RankFacts), EngineError> {
        let tp_rank = seat.tp_rank();
        let prepared = match prepare(&setup, tp_rank, fault) {
            Ok(prepared) => prepared,
            Err(refused) => {
                // Cast all the same, so that the peers decline now and not at their deadline.
                let ballot = Ballot::declining(tp_rank, setup.geometry.tp_size, refused.reason)
                    .map_err(bug)?;
                let vote = seat.agree(&ballot, setup.deadlines.ladder.kernel_ns(), || {
                    setup.deadlines.now()
                });
                debug_assert!(vote.is_err(), "a declining ballot agreed");
                return Err(EngineError::Refused(refused.message));
            }
        };
        let Prepared {
            model,
            tensors,
            widths,
            keys,
            servable,
            catalogue,
            catalogue_digest,
        } = prepared;
        watch(model.watch());
        let ballot = Ballot::new(
            &servable,
            tp_rank,
            BallotParts {
                widths: &widths,
                keys_digest: graph_key::keys_digest(keys.iter().map(|key| (key, PATH))),
                geometry_digest: model::geometry_digest(&setup.geometry),
                catalogue_digest,
                ladder: setup.deadlines.ladder,
            },
        )
        .map_err(bug)?;
        let coverage = seat
            .agree(&ballot, setup.deadlines.ladder.kernel_ns(), || {
                setup.deadlines.now()
            })
            .map_err(|refusal| match refusal.reason().kind().is_fault() {
                true => EngineError::Fault(refusal.to_string()),
                false => EngineError::Refused(refusal.to_string()),
            })?;
        let vote_epoch = coverage.epoch().0;
        let bytes = |pools: bool| -> u64 {
            let ours = tensors.iter().filter(|tensor| tensor.is_pool == pools);
            ours.map(|tensor| tensor.bytes() as u64).sum()
        };
        let (weight_bytes, pool_bytes) = (bytes(false), bytes(true));
        let built = Built::new(coverage, |coverage| {
            build(&setup, coverage, model, &tensors, &mut seat)
        })?;
        // Nobody is waited for after an error: peers may be in kernels that wait for this rank, and
        // end only when the runtime has heard of it.
        let leaving = Leaving {
            seat: &mut seat,
            deadlines: &setup.deadlines,
            phase: CAPTURE,
        };
        let recorded = built.capture(|built, recorder| {
            capture(&setup, built, &keys, recorder)?;
            match fault {
                Some(FaultKind::Capture) => Err(CaptureError(EngineError::Fault(format!(
                    "rank {} failed in {CAPTURE}, as --inject-fault asks",
                    tp_rank.0
                )))),
                _ => Ok(()),
            }
        });
        let mut captured = recorded.map_err(|CaptureError(error)| error)?;
        std::mem::forget(leaving);
        if !setup.plugin {
            captured.switch(false);
        }
        let record_digest = captured.dispatcher().record().digest();
        agree_phase(
            &mut seat,
            &setup.deadlines,
            CAPTURE,
            phase_digest(CAPTURE, record_digest),
        )?;
        let facts = RankFacts {
            catalogue_digest,
            catalogue,
            record: captured.dispatcher().record().clone(),
            record_digest,
            num_keys: keys.len(),
            weight_bytes,
            pool_bytes,
            own_bytes: captured.payload().model.own_bytes(),
            vote_epoch,
        };
        Ok((
            Self {
                captured,
                seat,
                setup,
                pending_rows: 0,
            },
            facts,
        ))
    }

    /// Waits until nothing of this rank runs any more, so that its memory and its peers' may go.
    pub fn quiesce(&mut self) {
        // An error only says that the stream was stopped; destroying the model ends it for good.
        let _ = self
            .captured
            .payload_mut()
            .model
            .synchronize(self.setup.deadlines.ladder.plugin_ns());
    }

    /// Runs one step. `out` means nothing after an error.
    pub fn run(&mut self, plan: &StepPlan, out: &mut RankOutput) -> Result<(), EngineError> {
        out.tokens.clear();
        out.counts.clear();
        out.draft = None;
        out.digest = 0;
        let shape = self.captured.payload().arena.shape();
        let num_requests = plan.requests.len();
        if num_requests == 0 || num_requests > shape.max_batch {
            return Err(EngineError::Bug(format!(
                "a step has {num_requests} requests; needs 1 to {}",
                shape.max_batch
            )));
        }
        let ran = match plan.mode {
            StepMode::Extend => self.extend(plan, out),
            StepMode::Decode => self.decode(plan, out),
            StepMode::Verify => self.verify(plan, out),
        };
        if let Err(EngineError::Fault(_) | EngineError::Bug(_)) = &ran {
            self.captured.disarm(Reason::Device);
        }
        ran
    }

    fn extend(&mut self, plan: &StepPlan, out: &mut RankOutput) -> Result<(), EngineError> {
        self.flush_injection()?;
        let built = self.captured.payload_mut();
        built.arena.fill_requests(plan, plan.requests.len());
        let (num_rows, num_wanted) = built.arena.fill_extend(plan)?;
        let facts = StepFacts {
            mode: FactsMode::Extend,
            batch_size: plan.requests.len() as u32,
            tokens_per_request: 0,
            rows: num_rows as u32,
        };
        let Decision::Plain(reason) = self.decide(&facts)? else {
            return Err(EngineError::Bug("a graph was found for prompt rows".into()));
        };
        self.agree_plain(&facts, num_rows)?;
        let built = self.captured.payload_mut();
        let mut step = built.arena.step(KernelMode::Extend, plan.requests.len(), 0);
        step.num_rows = num_rows as i32;
        step.num_logit_rows = num_wanted as i32;
        step.logit_rows = built.arena.logit_rows.address();
        launch_step(built, &step, true)?;
        let drawn = self.launch_draws(plan, num_wanted, |request| request.wants_token)?;
        if self.setup.num_drafts != 0 {
            // In the stream's order this is after the step whose rows it injects.
            let built = self.captured.payload_mut();
            built.arena.commit_all(num_rows);
            self.launch_injection(num_rows)?;
        }
        self.synchronize()?;
        out.target = Some(StepPath::Plain(reason.name()));
        let arena = &self.captured.payload().arena;
        let tokens = if drawn {
            &arena.next_tokens
        } else {
            &arena.argmax
        };
        let mut tokens = tokens.as_slice().iter();
        for request in &plan.requests {
            let token = if request.wants_token {
                tokens.next()
            } else {
                None
            };
            out.tokens.extend(token);
            out.counts.push(u32::from(token.is_some()));
        }
        self.digest(out, num_wanted, 0);
        Ok(())
    }

    fn decode(&mut self, plan: &StepPlan, out: &mut RankOutput) -> Result<(), EngineError> {
        self.flush_injection()?;
        let num_requests = plan.requests.len();
        let facts = StepFacts::uniform(FactsMode::Decode, num_requests as u32, 1);
        let decision = self.decide(&facts)?;
        let padded = padded_batch(decision, num_requests);
        let built = self.captured.payload_mut();
        built.arena.fill_requests(plan, padded);
        built.arena.fill_uniform(plan, 0, padded)?;
        out.target = Some(self.launch_target(decision, &facts, KernelMode::Decode, padded, 1)?);
        let drawn = self.launch_draws(plan, padded, |_| true)?;
        self.synchronize()?;
        let arena = &self.captured.payload().arena;
        let tokens = if drawn {
            &arena.next_tokens
        } else {
            &arena.argmax
        };
        out.tokens
            .extend_from_slice(&tokens.as_slice()[..num_requests]);
        out.counts.resize(num_requests, 1);
        self.digest(out, num_requests, 0);
        if self.setup.num_drafts != 0 {
            self.captured.payload_mut().arena.commit(padded, 1, |_| 1);
            self.pending_rows = padded;
        }
        Ok(())
    }

    fn verify(&mut self, plan: &StepPlan, out: &mut RankOutput) -> Result<(), EngineError> {
        let num_drafts = self.setup.num_drafts as usize;
        if num_drafts == 0 {
            return Err(EngineError::Bug("a verify step without a draft".into()));
        }
        let (num_requests, rows) = (plan.requests.len(), num_drafts + 1);
        out.draft = Some(self.propose(plan)?);

        let facts = StepFacts::uniform(FactsMode::TargetVerify, num_requests as u32, rows as u32);
        let decision = self.decide(&facts)?;
        let padded = padded_batch(decision, num_requests);
        let built = self.captured.payload_mut();
        built.arena.fill_requests(plan, padded);
        built.arena.fill_uniform(plan, num_drafts, padded)?;
        built
            .arena
            .fill_draws(plan, self.setup.seed, padded, rows, |_| true);
        out.target =
            Some(self.launch_target(decision, &facts, KernelMode::TargetVerify, padded, rows)?);
        let built = self.captured.payload_mut();
        let accept = match decision {
            Decision::Replay { key, .. } => match &built.launches[key.0 as usize] {
                Launch::Target { accept, .. } => *accept,
                Launch::Draft(_) => return Err(wrong_launch()),
            },
            Decision::Plain(_) => built.arena.accept(padded, num_drafts),
        };
        launch_accept(built, &accept)?;
        self.synchronize()?;

        let arena = &mut self.captured.payload_mut().arena;
        let accepted = |arena: &Arena, request_idx: usize| match plan.simulated_accept {
            Some(accepted) => (accepted as usize).min(num_drafts),
            None => arena.accepted.as_slice()[request_idx] as usize,
        };
        for request_idx in 0..num_requests {
            let accepted = accepted(arena, request_idx);
            let drafts = &arena.draft_tokens.as_slice()[request_idx * num_drafts..][..accepted];
            out.tokens.extend_from_slice(drafts);
            out.tokens.push(arena.next_tokens.as_slice()[request_idx]);
            out.counts.push(accepted as u32 + 1);
        }
        // The anchor and the accepted drafts are committed, the next token is not yet in the cache.
        let counts = &out.counts;
        arena.commit(padded * rows, rows, |request_idx| {
            counts.get(request_idx).map_or(0, |count| *count as usize)
        });
        self.pending_rows = padded * rows;
        self.digest(out, num_requests * rows, num_requests * num_drafts);
        Ok(())
    }

    /// The draft: pending injection and proposals, until the drafts are in the arena.
    fn propose(&mut self, plan: &StepPlan) -> Result<StepPath, EngineError> {
        let num_drafts = self.setup.num_drafts as usize;
        let num_requests = plan.requests.len();
        let facts = StepFacts::uniform(FactsMode::Draft, num_requests as u32, num_drafts as u32);
        let decision = self.decide(&facts)?;
        let padded = padded_batch(decision, num_requests);
        // A draft graph takes the rows of a verify step of its own batch, or none.
        let covered = matches!(decision, Decision::Replay { .. });
        if covered && self.pending_rows != padded * (num_drafts + 1) {
            self.flush_injection()?;
        }
        let built = self.captured.payload_mut();
        built.arena.fill_requests(plan, padded);
        built.arena.fill_draft(plan, padded)?;
        built
            .arena
            .fill_draws(plan, self.setup.seed, padded, num_drafts + 1, |_| true);
        let path = match decision {
            Decision::Replay { key, .. } => {
                let Launch::Draft(mut draft) = built.launches[key.0 as usize] else {
                    return Err(wrong_launch());
                };
                draft.num_inject_rows = self.pending_rows as i32;
                launch_draft(built, &draft, false)?;
                StepPath::Covered
            }
            Decision::Plain(reason) => {
                self.agree_plain(&facts, 0)?;
                let noise_key = arena::noise_key(self.setup.seed);
                let built = self.captured.payload_mut();
                let mut draft = built.arena.draft(padded, noise_key);
                draft.num_inject_rows = self.pending_rows as i32;
                launch_draft(built, &draft, true)?;
                StepPath::Plain(reason.name())
            }
        };
        self.pending_rows = 0;
        // The drafts become the verify step's tokens, so they must be here.
        self.synchronize()?;
        Ok(path)
    }

    /// Decides what runs the step, and that what a graph reads is where it was.
    fn decide(&mut self, facts: &StepFacts) -> Result<Decision, EngineError> {
        let sealed = self.captured.payload().arena.sealed_now();
        self.captured
            .decide_sealed(facts, |_| sealed.views())
            .map_err(|fault| EngineError::Fault(fault.to_string()))
    }

    /// The hot vote of a step that no graph fixes: all ranks are about to run the same rows.
    fn agree_plain(&mut self, facts: &StepFacts, num_rows: usize) -> Result<(), EngineError> {
        let arena = &self.captured.payload().arena;
        let words = |digest: Fnv1a, words: &[i32]| {
            words
                .iter()
                .fold(digest, |digest, word| digest.u32(*word as u32))
        };
        let digest = words(
            Fnv1a::new().u64(facts.digest()),
            &arena.token_ids.as_slice()[..num_rows],
        );
        let digest = words(digest, &arena.slots.as_slice()[..num_rows]).finish();
        let Self { seat, setup, .. } = self;
        let budget_ns = setup.deadlines.ladder.collective_ns();
        match seat.agree_step(digest, budget_ns, || setup.deadlines.now()) {
            VoteDecision::Agreed => Ok(()),
            decision => Err(EngineError::Fault(seat.step_refusal(decision).to_string())),
        }
    }

    fn launch_target(
        &mut self,
        decision: Decision,
        facts: &StepFacts,
        mode: KernelMode,
        padded: usize,
        rows: usize,
    ) -> Result<StepPath, EngineError> {
        match decision {
            Decision::Replay {
                key: KeyIdx(key), ..
            } => {
                let built = self.captured.payload_mut();
                let Launch::Target { step, .. } = built.launches[key as usize] else {
                    return Err(wrong_launch());
                };
                launch_step(built, &step, false)?;
                Ok(StepPath::Covered)
            }
            Decision::Plain(reason) => {
                self.agree_plain(facts, padded * rows)?;
                let built = self.captured.payload_mut();
                let step = built.arena.step(mode, padded, rows);
                launch_step(built, &step, true)?;
                Ok(StepPath::Plain(reason.name()))
            }
        }
    }

    /// Draws the wanted tokens where a request samples; without one the arg max is the token.
    fn launch_draws(
        &mut self,
        plan: &StepPlan,
        num_rows: usize,
        wanted: impl Fn(&StepRequest) -> bool,
    ) -> Result<bool, EngineError> {
        let samples = |request: &StepRequest| wanted(request) && request.temperature > 0.0;
        if !plan.requests.iter().any(samples) {
            return Ok(false);
        }
        let seed = self.setup.seed;
        let built = self.captured.payload_mut();
        built.arena.fill_draws(plan, seed, num_rows, 1, &wanted);
        let accept = built.arena.accept(num_rows, 0);
        launch_accept(built, &accept)?;
        Ok(true)
    }

    /// Injects what is pending, before another target step takes its place. Waits for it: that
    /// step may note rows of its own for injection while it runs, in the same memory.
    fn flush_injection(&mut self) -> Result<(), EngineError> {
        match std::mem::take(&mut self.pending_rows) {
            0 => Ok(()),
            pending => {
                self.launch_injection(pending)?;
                self.synchronize()
            }
        }
    }

    fn launch_injection(&mut self, num_rows: usize) -> Result<(), EngineError> {
        let noise_key = arena::noise_key(self.setup.seed);
        let built = self.captured.payload_mut();
        let mut draft = built.arena.draft(0, noise_key);
        draft.num_inject_rows = num_rows as i32;
        launch_draft(built, &draft, true)
    }

    fn synchronize(&mut self) -> Result<(), EngineError> {
        let budget_ns = self.setup.deadlines.ladder.plugin_ns();
        self.captured
            .payload_mut()
            .model
            .synchronize(budget_ns)
            .map_err(step_error)
    }

    /// What ranks must have in common beside the tokens.
    fn digest(&self, out: &mut RankOutput, num_logit_rows: usize, num_drafts: usize) {
        let arena = &self.captured.payload().arena;
        let mut digest = Fnv1a::new();
        for token in &arena.draft_tokens.as_slice()[..num_drafts] {
            digest = digest.u32(*token as u32);
        }
        if self.setup.compare_logits {
            let vocab = arena.shape().vocab;
            for logit in &arena.logits.as_slice()[..num_logit_rows * vocab] {
                digest = digest.u32(logit.to_bits());
            }
        }
        out.digest = digest.finish();
    }
}

fn padded_batch(decision: Decision, num_requests: usize) -> usize {
    match decision {
        Decision::Replay { padded_batch, .. } => padded_batch as usize,
        Decision::Plain(_) => num_requests,
    }
}

fn wrong_launch() -> EngineError {
    EngineError::Bug("a graph key has another mode's launch".into())
}

fn bug(error: impl std::fmt::Display) -> EngineError {
    EngineError::Bug(error.to_string())
}

fn step_error(error: KernelError) -> EngineError {
    match error.status {
        Status::Fault => EngineError::Fault(error.message),
        _ => EngineError::Bug(error.message),
    }
}

fn launch_step(built: &mut RankModel, step: &abi::Step, plain: bool) -> Result<(), EngineError> {
    // SAFETY: every pointer is the arena's, whose buffers are as long as the largest step needs
    // and outlive the model. Between a launch and the synchronize behind it only buffers are
    // written that no launch under way reads (an injection reads `inject_*` alone, a step no
    // draws), and outputs are read only behind a synchronize.
    unsafe { built.model.launch_step(step, plain) }.map_err(step_error)
}

fn launch_draft(built: &mut RankModel, draft: &abi::Draft, plain: bool) -> Result<(), EngineError> {
    // SAFETY: as for a step.
    unsafe { built.model.launch_draft(draft, plain) }.map_err(step_error)
}

fn launch_accept(built: &mut RankModel, accept: &abi::Accept) -> Result<(), EngineError> {
    // SAFETY: as for a step.
    unsafe { built.model.launch_accept(accept) }.map_err(step_error)
}

/// What a rank has before it votes.
struct Prepared {
    model: KernelModel,
    tensors: Vec<TensorInfo>,
    widths: Vec<u32>,
    keys: Vec<lowlat_core::GraphKey>,
    servable: lowlat_core::Servable,
    catalogue: String,
    catalogue_digest: u64,
}

/// Guard, and the kernels' own view of the configuration.
fn prepare(setup: &RankSetup, tp_rank: TpRank, fault: Misbehaviour) -> Result<Prepared, Refused> {
    let servable = setup.check_platform().map_err(|lines| Refused {
        reason: Reason::ModelField,
        message: lines.join("; "),
    })?;
    let kernel = |error: KernelError| Refused {
        reason: Reason::ModelConfig,
        message: error.message.trim().replace('\n', "; "),
    };
    let widths = setup.widths(fault);
    let geometry = Geometry {
        widths: widths.clone(),
        ..setup.geometry.clone()
    };
    let config = model::abi_config(&setup.config, &geometry, tp_rank.0);
    let model = setup
        .kernels
        .create_model(&setup.platform, &config)
        .map_err(kernel)?;
    let tensors = model.tensors().map_err(kernel)?;
    // What is bound and what the kernels will take for themselves: some sizes of a configuration,
    // as index_topk, are of no tensor.
    let bound: u64 = tensors.iter().map(|tensor| tensor.bytes() as u64).sum();
    let needed = bound
        .saturating_add(model.own_bytes())
        .saturating_mul(u64::from(geometry.tp_size));
    if let Some(bytes) = setup.memory_bytes.filter(|bytes| *bytes < needed) {
        return Err(Refused {
            reason: Reason::ServerArgument,
            message: format!(
                "{} needs {:.1} GB of memory with --tp {}; this machine has {:.1} GB free \
                 (a built-in tiny model, fewer --kv-tokens, or a shorter --limit-input)",
                setup.model,
                needed as f64 / 1e9,
                geometry.tp_size,
                bytes as f64 / 1e9,
            ),
        });
    }
    let catalogue = model.catalogue();
    let traits = KeyTraits {
        shape: setup.model.clone(),
        isa: setup.platform.clone(),
        numerics_digest: Fnv1a::new().text(&catalogue).finish(),
        layout_digest: model::layout_digest(&tensors),
    };
    let keys = model::graph_keys(&traits, &widths, setup.num_drafts);
    let mut catalogue_digest = model.catalogue_digest();
    if fault == Some(FaultKind::Catalogue) {
        catalogue_digest = !catalogue_digest;
    }
    Ok(Prepared {
        model,
        tensors,
        widths,
        keys,
        servable,
        catalogue,
        catalogue_digest,
    })
}

/// The phase of the start in which a rank's launches are recorded.
const CAPTURE: &str = "capture";

/// What a rank casts that came through a phase of the start, or with `digest` of its own.
fn phase_digest(phase: &str, digest: u64) -> u64 {
    Fnv1a::new().text(phase).u64(digest).finish()
}

/// What a rank casts that failed in a phase, so that its peers end now and not at their deadline.
fn failed_digest(seat: &Seat, phase: &str) -> u64 {
    // Rank plus 1: two ranks that both failed differ from the others, and nobody equals them.
    phase_digest(phase, u64::from(seat.tp_rank().0) + 1)
}

/// A bounded meeting of all ranks in one phase of the start.
fn agree_phase(
    seat: &mut Seat,
    deadlines: &Deadlines,
    phase: &str,
    digest: u64,
) -> Result<(), EngineError> {
    match seat.agree_step(digest, deadlines.start_ns, || deadlines.now()) {
        VoteDecision::Agreed => Ok(()),
        decision => {
            let refusal = seat.step_refusal(decision);
            let message = format!("ranks did not come through {phase} together: {refusal}");
            Err(match refusal.reason().kind().is_fault() {
                true => EngineError::Fault(message),
                false => EngineError::Refused(message),
            })
        }
    }
}

/// Runs `work` and meets the peers behind it; an error of this rank's own comes first.
fn phase<T>(
    seat: &mut Seat,
    deadlines: &Deadlines,
    name: &str,
    work: impl FnOnce() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    // For a panic, which is a bug and ends this rank.
    let leaving = Leaving {
        seat,
        deadlines,
        phase: name,
    };
    let done = work();
    std::mem::forget(leaving);
    let digest = match done {
        Ok(_) => phase_digest(name, 0),
        Err(_) => failed_digest(seat, name),
    };
    let met = agree_phase(seat, deadlines, name, digest);
    let done = done?;
    met?;
    Ok(done)
}

/// Casts, when it is dropped, that this rank failed in a phase, and waits for nobody. Forgotten
/// where the rank came through, or meets its peers all the same.
struct Leaving<'a> {
    seat: &'a mut Seat,
    deadlines: &'a Deadlines,
    phase: &'a str,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let digest = failed_digest(self.seat, self.phase);
        self.seat
            .begin_step(digest, self.deadlines.start_ns, self.deadlines.now());
    }
}

fn build(
    setup: &RankSetup,
    coverage: &Coverage,
    mut model: KernelModel,
    tensors: &[TensorInfo],
    seat: &mut Seat,
) -> Result<RankModel, EngineError> {
    let tp_rank = coverage.tp_rank();
    let kernel = |error: KernelError| EngineError::Refused(error.message.replace('\n', "; "));
    phase(seat, &setup.deadlines, "binding", || {
        setup
            .weights
            .fill(&setup.config, tensors, coverage, |tensor, memory| {
                model.bind(tensor, memory).map_err(kernel)
            })?;
        let handle = model.peer_export().map_err(kernel)?;
        let handles = &setup.exchange.handles;
        handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((tp_rank.0, handle));
        Ok(())
    })?;
    phase(seat, &setup.deadlines, "joining", || {
        let handles = setup
            .exchange
            .handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        for (peer, handle) in handles.iter().filter(|(peer, _)| *peer != tp_rank.0) {
            // SAFETY: the runtime keeps every rank's model until all of them have stopped.
            unsafe { model.peer_import(*peer, handle) }.map_err(kernel)?;
        }
        Ok(())
    })?;
    let max_positions = setup
        .config
        .max_positions
        .div_ceil(u64::from(setup.geometry.page_size));
    let shape = ArenaShape {
        max_rows: setup.geometry.max_rows as usize,
        max_batch: setup.geometry.max_batch as usize,
        stride: setup.geometry.num_pages.min(max_positions as u32) as usize,
        page_size: setup.geometry.page_size as usize,
        num_drafts: setup.num_drafts as usize,
        vocab: setup.config.vocab as usize,
    };
    // All memory is taken before any rank launches: on a device an allocation may wait for kernels
    // that run, and those for this rank's.
    let arena = phase(seat, &setup.deadlines, "readiness", || {
        model.ready().map_err(kernel)?;
        // SAFETY: the arena is used by this rank's steps alone, which need the model; then the
        // model keeps it.
        unsafe { Arena::new(shape, &mut model) }.map_err(kernel)
    })?;
    Ok(RankModel {
        model,
        arena: ManuallyDrop::new(arena),
        launches: Vec::new(),
    })
}

/// What ends a capture; [`Built::capture`] wants one error type for its own and ours.
struct CaptureError(EngineError);

impl From<RecordError> for CaptureError {
    fn from(error: RecordError) -> Self {
        Self(bug(error))
    }
}

/// Records a launch for every key, in the record's order, and runs each once over padding: what
/// cannot run is found now.
fn capture(
    setup: &RankSetup,
    built: &mut RankModel,
    keys: &[lowlat_core::GraphKey],
    recorder: &mut Recorder,
) -> Result<(), CaptureError> {
    let mut keys = keys.to_vec();
    keys.sort();
    let idle = StepPlan::new();
    for key in keys {
        let (batch, rows) = (key.batch_size as usize, key.tokens_per_request as usize);
        let mode = key.mode;
        let sealed = built.arena.sealed_now();
        recorder.note(key, PATH, &sealed.views().collect::<Vec<_>>())?;
        let arena = &mut built.arena;
        arena.fill_requests(&idle, batch);
        let launch = match mode {
            GraphMode::Draft => {
                arena.fill_draft(&idle, batch).map_err(CaptureError)?;
                arena.fill_draws(&idle, setup.seed, batch, rows + 1, |_| true);
                Launch::Draft(arena.draft(batch, arena::noise_key(setup.seed)))
            }
            GraphMode::Decode | GraphMode::TargetVerify => {
                arena
                    .fill_uniform(&idle, rows - 1, batch)
                    .map_err(CaptureError)?;
                arena.fill_draws(&idle, setup.seed, batch, rows, |_| true);
                let kernel_mode = match mode {
                    GraphMode::Decode => KernelMode::Decode,
                    _ => KernelMode::TargetVerify,
                };
                let step = arena.step(kernel_mode, batch, rows);
                Launch::Target {
                    step,
                    accept: arena.accept(batch, rows - 1),
                }
            }
        };
        let launched = match &launch {
            Launch::Target { step, accept } => {
                launch_step(built, step, false).and_then(|()| launch_accept(built, accept))
            }
            Launch::Draft(draft) => launch_draft(built, draft, false),
        };
        let budget_ns = setup.deadlines.ladder.plugin_ns();
        launched
            .and_then(|()| built.model.synchronize(budget_ns).map_err(step_error))
            .map_err(CaptureError)?;
        built.launches.push(launch);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowlat_core::Board;

    type Started = std::thread::Result<Result<(), EngineError>>;

    /// What three ranks come to when rank 1 ends a phase with `last`.
    fn after(last: fn() -> Result<(), EngineError>) -> Vec<Started> {
        let ladder = DeadlineLadder::new(1, 2, 3, 60_000_000_000).unwrap();
        let deadlines = Deadlines {
            ladder,
            start_ns: ladder.engine_ns(),
            clock: Instant::now(),
        };
        let board = Board::new(3).unwrap();
        let done: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let mut seat = board.seat(TpRank(rank)).unwrap();
                    scope.spawn(move || {
                        phase(&mut seat, &deadlines, "joining", || match rank {
                            1 => last(),
                            _ => Ok(()),
                        })
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join()).collect()
        });
        assert!(deadlines.clock.elapsed().as_nanos() < u128::from(ladder.engine_ns()));
        for followed in [&done[0], &done[2]] {
            let Ok(Err(EngineError::Refused(message))) = followed else {
                panic!("{followed:?}")
            };
            let expected = "ranks did not come through joining together: [308] rank 1 ";
            assert!(message.starts_with(expected), "{message}");
        }
        done
    }

    /// Without the other digest the peers would wait for their deadline, a minute here.
    #[test]
    fn a_rank_that_fails_in_a_phase_ends_its_peers_at_once() {
        let no_memory = || Err(EngineError::Refused("no memory".into()));
        assert_eq!(*after(no_memory)[1].as_ref().unwrap(), no_memory());
    }

    #[test]
    fn a_rank_that_panics_in_a_phase_ends_its_peers_at_once() {
        assert!(after(|| panic!("planted"))[1].is_err());
    }
}
