//! A model on all its ranks: a thread a rank, started together, stepped together, stopped
//! together. A fault on one ends all, names who it was, and leaves nothing behind.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lowlat_core::config::{self, ModelConfig};
use lowlat_core::digest::Fnv1a;
use lowlat_core::graph_key::Record;
use lowlat_core::plan;
use lowlat_core::{
    Board, DeadlineLadder, FaultReport, Health, InstantNs, Reason, Seat, StatusWords, TpRank,
    Watchdog,
};

use crate::EngineError;
use crate::checkpoint::Checkpoint;
use crate::kernels::{Kernels, ModelHandle, abi};
use crate::model::Geometry;
use crate::rank::{Deadlines, PeerExchange, Rank, RankFacts, RankOutput, RankSetup, WeightSource};
use crate::step::{
    FaultKind, InjectedFault, RunnerInfo, RuntimeSettings, StepPath, StepPlan, StepResult,
    StepRunner,
};

/// Pages for padding: rows of it write nothing, but their tables name a page.
const SPARE_PAGES: u32 = 1;

/// Most prompt rows of a step.
const MAX_ROWS: u32 = 1 << 20;

/// Prompt rows that a step may have under the default deadlines as they are. A CPU runs some 150
/// rows a second while others use it, so this leaves ten times what a rank that works needs.
pub const ROWS_OF_DEFAULT_LADDER: usize = 256;

/// Weights that a start loads in a second, at the least.
const LOADED_BYTES_PER_S: u64 = 100_000_000;

/// How long a gap between two looks at the watchdog counts at most: a machine that slept is not
/// a rank that hangs.
const MAX_GAP_NS: u64 = 1_000_000_000;

/// How often a runtime that waits for its ranks looks at the clock.
const TICK: Duration = Duration::from_millis(10);

/// How long the other ranks have to say what they saw, once one has failed.
const GRACE: Duration = Duration::from_millis(50);

/// Everything that a runtime is started with: the command line's settings, and what only tests
/// and embedding programs change.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// The command line's.
    pub settings: RuntimeSettings,
    /// A configuration to use instead of the built-in of the settings' name.
    pub config: Option<ModelConfig>,
    /// Deadlines of every wait.
    pub ladder: DeadlineLadder,
    /// Whether all ranks' logits are compared, bit for bit, each step.
    pub compare_logits: bool,
    /// A rank that goes wrong while steps run, to show that all ranks end together.
    pub lapse: Option<Lapse>,
}

/// How a rank goes wrong, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LapseKind {
    /// Takes no part any more.
    Silent,
    /// Says another first token than it has.
    Differs,
}

/// Which rank goes wrong, how, and from which step on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lapse {
    /// The rank.
    pub tp_rank: u32,
    /// The first step of the lapse; 0 is the first that runs.
    pub first_step: u64,
    /// What it does.
    pub kind: LapseKind,
}

impl RuntimeOptions {
    /// The defaults beside `settings`: 10 s in a kernel, then 20, 30 and 60 s; all of them so many
    /// times longer as the largest prompt step has times [`ROWS_OF_DEFAULT_LADDER`] rows.
    ///
    /// # Panics
    /// Never: the default deadlines are in order.
    #[must_use]
    pub fn new(settings: RuntimeSettings) -> Self {
        let most_rows = settings.max_rows.clamp(1, MAX_ROWS as usize);
        let longer = most_rows.div_ceil(ROWS_OF_DEFAULT_LADDER) as u64;
        let seconds = |seconds: u64| seconds * 1_000_000_000 * longer;
        let ladder = DeadlineLadder::new(seconds(10), seconds(20), seconds(30), seconds(60))
            .expect("the default deadlines are in order");
        Self {
            settings,
            config: None,
            ladder,
            compare_logits: false,
            lapse: None,
        }
    }
}

/// What a rank's thread is asked for or has to say. The plan itself is in [`Shared`].
enum Post {
    /// Nothing to do; also while the start is under way.
    Idle,
    /// Run the plan.
    Run,
    /// The start came through, or the step did.
    Done,
    /// The start or the step failed.
    Failed(EngineError),
    /// Leave.
    Quit,
}

/// One rank's thread as the runtime sees it.
struct Mailbox {
    post: Mutex<Post>,
    changed: Condvar,
    output: Mutex<RankOutput>,
    facts: Mutex<Option<RankFacts>>,
    /// The model as soon as the rank has one, to be stopped and asked.
    model: Mutex<Option<ModelHandle>>,
}

/// A lock that a panicking rank cannot poison: what it guards is replaced whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    fn new() -> Self {
        Self {
            post: Mutex::new(Post::Idle),
            changed: Condvar::new(),
            output: Mutex::default(),
            facts: Mutex::default(),
            model: Mutex::default(),
        }
    }

    fn send(&self, post: Post) {
        *lock(&self.post) = post;
        self.changed.notify_all();
    }

    /// A rank's answer; quitting is not undone by it.
    fn answer(&self, answer: Post) {
        let mut post = lock(&self.post);
        if !matches!(*post, Post::Quit) {
            *post = answer;
        }
        drop(post);
        self.changed.notify_all();
    }

    /// Waits for work. It ends when the runtime is dropped, which sends [`Post::Quit`].
    fn next_is_run(&self) -> bool {
        let mut post = lock(&self.post);
        loop {
            match *post {
                Post::Run => return true,
                Post::Quit => return false,
                _ => {
                    post = self
                        .changed
                        .wait(post)
                        .unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    }

    /// Waits until the runtime says to leave, however often it asks for something else.
    fn wait_for_quit(&self) {
        let mut post = lock(&self.post);
        while !matches!(*post, Post::Quit) {
            post = self
                .changed
                .wait(post)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What ranks and runtime share.
struct Shared {
    plan: RwLock<StepPlan>,
    mailboxes: Vec<Mailbox>,
    /// Ranks with an error, by the order in which they failed.
    failed: Mutex<Vec<u32>>,
}

/// A model on all its ranks.
pub struct Runtime {
    info: RunnerInfo,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Option<Rank>>>,
    kernels: Kernels,
    catalogue: String,
    record: Option<Record>,
    ladder: DeadlineLadder,
    clock: Instant,
    num_steps: u64,
    /// Of every step so far.
    steps_digest: u64,
    /// After a fault every step gives it again.
    fault: Option<EngineError>,
}

impl Runtime {
    /// Starts all ranks by the default deadlines.
    ///
    /// # Errors
    /// A refusal that names every reason, or a fault that names a rank.
    pub fn start(settings: &RuntimeSettings) -> Result<Self, EngineError> {
        Self::start_with(RuntimeOptions::new(settings.clone()))
    }

    /// Starts all ranks.
    ///
    /// # Errors
    /// As for [`Runtime::start`].
    pub fn start_with(options: RuntimeOptions) -> Result<Self, EngineError> {
        let RuntimeOptions {
            settings,
            config,
            ladder,
            compare_logits,
            lapse,
        } = options;
        let model = match config {
            Some(config) => ModelSource::seeded(settings.model.clone(), config),
            None => ModelSource::find(&settings.model)?,
        };
        let config = model.config;
        let on_host = settings.platform == "scalar";
        let vendor = settings.platform.split(':').next();
        if !on_host && !matches!(vendor, Some("nvidia" | "amd")) {
            return Err(EngineError::Refused(format!(
                "--platform is {}; needs scalar, or nvidia or amd, with :N for device N",
                settings.platform
            )));
        }
        check_fault(&settings)?;
        let (geometry, num_drafts) = geometry(&settings, &config, &ladder)?;
        // A library that the options name is the user's affair; without one, a part of the
        // installation is missing.
        let kernels =
            Kernels::open(settings.kernels.as_deref()).map_err(|error| match settings.kernels {
                Some(_) => EngineError::Refused(error.message),
                None => EngineError::Fault(error.message),
            })?;
        let clock = Instant::now();
        let start_ns = ladder
            .engine_ns()
            .saturating_add(loading_ns(&config, &settings));
        let setup = RankSetup {
            kernels: kernels.clone(),
            platform: settings.platform.clone(),
            model: model.name,
            config: Arc::clone(&config),
            weights: match &model.checkpoint {
                Some(checkpoint) => WeightSource::Checkpoint(Arc::downgrade(checkpoint)),
                None => WeightSource::Seeded,
            },
            geometry: geometry.clone(),
            deadlines: Deadlines {
                ladder,
                start_ns,
                clock,
            },
            num_drafts,
            plugin: settings.plugin,
            seed: settings.seed,
            compare_logits,
            memory_bytes: if on_host { memory_available() } else { None },
            exchange: Arc::new(PeerExchange::default()),
        };
        let tp_size = settings.tp_size;
        let board = Board::new(tp_size).map_err(|error| EngineError::Refused(error.to_string()))?;
        let shared = Arc::new(Shared {
            plan: RwLock::new(StepPlan::new()),
            mailboxes: (0..tp_size).map(|_| Mailbox::new()).collect(),
            failed: Mutex::default(),
        });
        let info = runner_info(&settings, &config, &geometry, num_drafts);
        let mut runtime = Self {
            info,
            shared: Arc::clone(&shared),
            threads: Vec::new(),
            kernels,
            catalogue: String::new(),
            record: None,
            ladder,
            clock,
            num_steps: 0,
            steps_digest: 0,
            fault: None,
        };
        for rank in 0..tp_size {
            let seat = board
                .seat(TpRank(rank))
                .map_err(|error| EngineError::Bug(error.to_string()))?;
            let duty = Duty {
                tp_rank: rank,
                setup: setup.clone(),
                fault: settings.inject_fault.filter(|fault| fault.tp_rank == rank),
                lapse: lapse.filter(|lapse| lapse.tp_rank == rank),
                shared: Arc::clone(&shared),
            };
            let thread = std::thread::Builder::new()
                .name(format!("lowlat rank {rank}"))
                .spawn(move || duty.run(seat))
                .map_err(|error| EngineError::Fault(format!("no thread for rank {rank}: {error}")));
            match thread {
                Ok(thread) => runtime.threads.push(thread),
                Err(error) => return Err(error),
            }
        }
        runtime.await_ranks(start_ns)?;
        runtime.note_facts(num_drafts, &geometry, model.checkpoint.as_deref());
        Ok(runtime)
    }

    /// Digest of the drafts of every step so far and, where ranks compare them, of all logits.
    /// All ranks have the same.
    #[must_use]
    pub fn steps_digest(&self) -> u64 {
        self.steps_digest
    }

    /// The configuration's facts for the report.
    fn note_facts(
        &mut self,
        num_drafts: u32,
        geometry: &Geometry,
        checkpoint: Option<&Checkpoint>,
    ) {
        let Some(facts) = lock(&self.shared.mailboxes[0].facts).clone() else {
            return;
        };
        self.catalogue = facts.catalogue;
        self.record = Some(facts.record);
        let mut note = |name: &str, value: String| self.info.facts.push((name.into(), value));
        note("widths", format!("{:?}", geometry.widths));
        note("num_drafts", num_drafts.to_string());
        note("graph_keys", facts.num_keys.to_string());
        note(
            "catalogue_digest",
            format!("{:#018x}", facts.catalogue_digest),
        );
        note("record_digest", format!("{:#018x}", facts.record_digest));
        note("vote_epoch", facts.vote_epoch.to_string());
        note("weight_bytes_per_rank", facts.weight_bytes.to_string());
        note("pool_bytes_per_rank", facts.pool_bytes.to_string());
        note("kernel_bytes_per_rank", facts.own_bytes.to_string());
        if let Some(checkpoint) = checkpoint {
            note("checkpoint", checkpoint.summary());
            note(
                "checkpoint_bytes_copied",
                checkpoint.copied_bytes().to_string(),
            );
        }
    }

    /// Waits until every rank is done, or one failed and the others had time to say so. The
    /// watchdog ends the wait: it knows a machine that slept from a rank that hangs.
    fn await_ranks(&mut self, budget_ns: u64) -> Result<(), EngineError> {
        let now = || InstantNs(self.clock.elapsed().as_nanos() as u64);
        let mut watchdog = Watchdog::new(budget_ns, MAX_GAP_NS);
        watchdog.arm(now());
        let mut late = None;
        let mut failed_at: Option<Instant> = None;
        'ranks: for (rank, mailbox) in self.shared.mailboxes.iter().enumerate() {
            let mut post = lock(&mailbox.post);
            while matches!(*post, Post::Idle | Post::Run) {
                if let Health::Overdue { .. } = watchdog.health(now()) {
                    late = Some(rank);
                    break 'ranks;
                }
                // The one that failed first is known; the others follow at once or are stopped.
                if !lock(&self.shared.failed).is_empty() {
                    let since = failed_at.get_or_insert_with(Instant::now);
                    if since.elapsed() > GRACE {
                        break 'ranks;
                    }
                }
                let waited = mailbox.changed.wait_timeout(post, TICK);
                post = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let failed = lock(&self.shared.failed).clone();
        if failed.is_empty() && late.is_none() {
            return Ok(());
        }
        let mut error = self.worst(&failed);
        if let Some(rank) = late.filter(|_| failed.is_empty()) {
            error = EngineError::Fault(format!(
                "[{}] rank {rank} did not end step {} within {} ms",
                Reason::StepOverdue.number(),
                self.num_steps,
                budget_ns / 1_000_000
            ));
        }
        Err(self.end(error))
    }

    /// The error to report when several ranks have one: a rank's own before those that followed
    /// it, a bug before a fault before a refusal, and the lowest rank's.
    fn worst(&self, failed: &[u32]) -> EngineError {
        let weight = |error: &EngineError| match error {
            EngineError::Bug(_) => 0,
            EngineError::Fault(_) => 1,
            EngineError::Refused(message) if message.contains("did not come through") => 3,
            EngineError::Refused(_) => 2,
        };
        let mut failed = failed.to_vec();
        failed.sort_unstable();
        let errors = failed.iter().filter_map(|rank| {
            match &*lock(&self.shared.mailboxes[*rank as usize].post) {
                Post::Failed(error) => Some(error.clone()),
                _ => None,
            }
        });
        errors
            .min_by_key(weight)
            .unwrap_or_else(|| EngineError::Bug("a rank failed without a word".into()))
    }

    /// Stops every rank after `error`, adds what the status words know, and keeps it.
    fn end(&mut self, error: EngineError) -> EngineError {
        let models: Vec<_> = self
            .shared
            .mailboxes
            .iter()
            .map(|mailbox| lock(&mailbox.model).clone())
            .collect();
        let words: Vec<_> = models
            .iter()
            .map(|model| status_words(model.as_ref()))
            .collect();
        for model in models.iter().flatten() {
            model.abort();
        }
        let error = match error {
            EngineError::Fault(mut message) => {
                let names = |kernel: u32, stage: u32| {
                    let line = self
                        .catalogue
                        .lines()
                        .nth(kernel as usize)
                        .unwrap_or("unknown");
                    let name = line.split_whitespace().next().unwrap_or(line);
                    (name.to_owned(), self.kernels.stage_name(stage))
                };
                if let Some(report) = FaultReport::of(&words, names) {
                    let _ = write!(message, "; {report}");
                }
                EngineError::Fault(message)
            }
            other => other,
        };
        self.fault = Some(error.clone());
        self.stop();
        error
    }

    /// Tells every rank to leave and waits for it, but not for ever: a thread that hangs is left
    /// behind with its memory, which its kernels may still use.
    fn stop(&mut self) {
        for mailbox in &self.shared.mailboxes {
            mailbox.send(Post::Quit);
        }
        let deadline = Instant::now() + Duration::from_nanos(self.ladder.engine_ns());
        let threads = std::mem::take(&mut self.threads);
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let hang = threads.iter().any(|thread| !thread.is_finished());
        let ranks: Vec<_> = threads
            .into_iter()
            .filter(JoinHandle::is_finished)
            .map(JoinHandle::join)
            .collect();
        for mailbox in &self.shared.mailboxes {
            let model = lock(&mailbox.model).take();
            if hang {
                std::mem::forget(model);
            }
        }
        // Only now, when no rank runs any more, may memory go that peers write into.
        if hang {
            std::mem::forget(ranks);
        }
    }

    /// Ranks' outputs against rank 0's; the first difference, in words.
    fn difference(&self) -> Option<String> {
        let first = lock(&self.shared.mailboxes[0].output);
        for (rank, mailbox) in self.shared.mailboxes.iter().enumerate().skip(1) {
            let output = lock(&mailbox.output);
            let what = if output.tokens != first.tokens || output.counts != first.counts {
                format!("tokens {:?} {:?}", output.counts, output.tokens)
            } else if output.digest != first.digest {
                format!("drafts or logits {:#018x}", output.digest)
            } else if (output.target, output.draft) != (first.target, first.draft) {
                format!("paths {:?} {:?}", output.target, output.draft)
            } else {
                continue;
            };
            return Some(format!(
                "rank {rank} and rank 0 differ at step {}: rank {rank} has {what}; rank 0 has \
                 tokens {:?} {:?}, digest {:#018x}, paths {:?} {:?}",
                self.num_steps, first.counts, first.tokens, first.digest, first.target, first.draft
            ));
        }
        None
    }
}

impl StepRunner for Runtime {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn run(&mut self, plan: &StepPlan, out: &mut StepResult) -> Result<(), EngineError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        {
            let mut shared = self
                .shared
                .plan
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            shared.mode = plan.mode;
            shared.requests.clone_from(&plan.requests);
            shared.token_ids.clone_from(&plan.token_ids);
            shared.page_table.clone_from(&plan.page_table);
            shared.page_table_stride = plan.page_table_stride;
            shared.simulated_accept = plan.simulated_accept;
        }
        for mailbox in &self.shared.mailboxes {
            mailbox.send(Post::Run);
        }
        self.await_ranks(self.ladder.engine_ns())?;
        if let Some(difference) = self.difference() {
            return Err(self.end(EngineError::Fault(difference)));
        }
        self.num_steps += 1;
        out.clear();
        let first = lock(&self.shared.mailboxes[0].output);
        out.tokens.extend_from_slice(&first.tokens);
        out.counts.extend_from_slice(&first.counts);
        out.target = first.target.unwrap_or(StepPath::Plain("none"));
        out.draft = first.draft;
        let digest = Fnv1a::new().u64(self.steps_digest).u64(first.digest);
        self.steps_digest = digest.finish();
        Ok(())
    }

    fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.stop();
        }
    }
}

/// What a rank's thread is started with.
struct Duty {
    tp_rank: u32,
    setup: RankSetup,
    fault: Option<InjectedFault>,
    lapse: Option<Lapse>,
    shared: Arc<Shared>,
}

impl Duty {
    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.tp_rank as usize]
    }

    fn fail(&self, error: EngineError) {
        lock(&self.shared.failed).push(self.tp_rank);
        self.mailbox().answer(Post::Failed(error));
    }

    /// The rank's whole life. It is given back, so that its memory goes when all have ended.
    fn run(self, seat: Seat) -> Option<Rank> {
        let kind = self.fault.map(|fault| fault.kind);
        if kind == Some(FaultKind::Silent) {
            self.mailbox().wait_for_quit();
            return None;
        }
        let watch = |model| *lock(&self.mailbox().model) = Some(model);
        let started = guarded(|| Rank::start(self.setup.clone(), seat, kind, watch));
        let mut rank = match started {
            Ok((rank, facts)) => {
                *lock(&self.mailbox().facts) = Some(facts);
                self.mailbox().answer(Post::Done);
                rank
            }
            Err(error) => {
                self.fail(error);
                return None;
            }
        };
        let mut num_steps = 0;
        while self.mailbox().next_is_run() {
            let lapse = self.lapse.filter(|lapse| lapse.first_step <= num_steps);
            let lapse = lapse.map(|lapse| lapse.kind);
            if lapse == Some(LapseKind::Silent) {
                self.mailbox().wait_for_quit();
                break;
            }
            num_steps += 1;
            let ran = guarded(|| {
                let plan = self
                    .shared
                    .plan
                    .read()
                    .unwrap_or_else(PoisonError::into_inner);
                let mut output = lock(&self.mailbox().output);
                rank.run(&plan, &mut output)?;
                if let (Some(LapseKind::Differs), Some(token)) = (lapse, output.tokens.first_mut())
                {
                    *token ^= 1;
                }
                Ok(())
            });
            match ran {
                Ok(()) => self.mailbox().answer(Post::Done),
                Err(error) => {
                    self.fail(error);
                    self.mailbox().wait_for_quit();
                    break;
                }
            }
        }
        rank.quiesce();
        Some(rank)
    }
}

/// A panic of ours ends as a bug, on this rank as on the others.
fn guarded<T>(body: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without words");
        Err(EngineError::Bug(text.replace('\n', " ")))
    })
}

fn status_words(model: Option<&ModelHandle>) -> StatusWords {
    let Some(Ok(words)) = model.map(ModelHandle::status) else {
        return StatusWords::default();
    };
    let abi::StatusWords {
        state,
        kernel,
        stage,
        peer,
        epoch,
        ..
    } = words;
    StatusWords {
        state,
        kernel,
        stage,
        peer,
        epoch,
    }
}

/// How long ranks that read from one slow disk need for their weights, at most.
fn loading_ns(config: &ModelConfig, settings: &RuntimeSettings) -> u64 {
    let options = plan::PlanOptions {
        tp_size: settings.tp_size,
        ..plan::PlanOptions::default()
    };
    // Ranks that do not divide the model are refused by the guard, with better words.
    let ranks = plan::MemoryPlan::new(config, &options).map_or(Vec::new(), |plan| plan.ranks);
    let bytes = ranks
        .iter()
        .fold(0u64, |sum, rank| sum.saturating_add(rank.weight_bytes));
    bytes.saturating_mul(1_000_000_000 / LOADED_BYTES_PER_S)
}

/// The model that is served and where its weights are.
struct ModelSource {
    /// What graph keys call it: the same for a folder as for the built-in model in it.
    name: String,
    config: Arc<ModelConfig>,
    /// Kept until all ranks have started; then its files are closed.
    checkpoint: Option<Arc<Checkpoint>>,
}

impl ModelSource {
    fn seeded(name: String, config: ModelConfig) -> Self {
        Self {
            name,
            config: Arc::new(config),
            checkpoint: None,
        }
    }

    /// A built-in model of that name, or else a checkpoint folder.
    fn find(model: &str) -> Result<Self, EngineError> {
        let built_in = |name: &str, text: &str| {
            ModelConfig::from_json(text)
                .map_err(|error| EngineError::Bug(format!("the built-in {name}: {error}")))
        };
        if let Some(text) = config::built_in(model) {
            return Ok(Self::seeded(model.to_owned(), built_in(model, text)?));
        }
        let folder = Path::new(model);
        if !folder.is_dir() {
            let known: Vec<_> = config::BUILT_IN.iter().map(|(name, _)| *name).collect();
            return Err(EngineError::Refused(format!(
                "--model is {model}; needs a built-in model ({}) or a checkpoint folder",
                known.join(", ")
            )));
        }
        let checkpoint = Checkpoint::open(folder)?;
        let config = Arc::clone(checkpoint.config());
        let mut name = folder.file_name().map_or_else(
            || "checkpoint".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        );
        for (known, text) in config::BUILT_IN {
            if built_in(known, text)? == *config {
                name = known.to_owned();
            }
        }
        Ok(Self {
            name,
            config,
            checkpoint: Some(Arc::new(checkpoint)),
        })
    }
}

fn check_fault(settings: &RuntimeSettings) -> Result<(), EngineError> {
    match settings.inject_fault {
        Some(fault) if fault.tp_rank >= settings.tp_size => Err(EngineError::Refused(format!(
            "--inject-fault names rank {}; needs a rank below --tp {}",
            fault.tp_rank, settings.tp_size
        ))),
        Some(_) if settings.tp_size == 1 => Err(EngineError::Refused(
            "--inject-fault needs another rank that sees it; --tp is 1 (--tp 2 or more)".into(),
        )),
        _ => Ok(()),
    }
}

/// What is built, and the drafts a step; every setting that is wrong in one line.
fn geometry(
    settings: &RuntimeSettings,
    config: &ModelConfig,
    ladder: &DeadlineLadder,
) -> Result<(Geometry, u32), EngineError> {
    let refuse = |message: String| Err(EngineError::Refused(message));
    if settings.speculative && config.draft.is_none() {
        return refuse(format!(
            "--speculative is on; {} has no draft (--speculative off)",
            settings.model
        ));
    }
    let num_drafts = config
        .draft
        .as_ref()
        .filter(|_| settings.speculative)
        .map_or(0, |d| d.block);
    let rows = num_drafts + 1;
    let Some(max_batch) = u32::try_from(settings.max_batch)
        .ok()
        .filter(|n| (1..=64).contains(n))
    else {
        return refuse(format!(
            "--max-batch is {}; needs 1 to 64",
            settings.max_batch
        ));
    };
    let widths = match &settings.widths[..] {
        [] => (1..=max_batch.min(abi::MAX_WIDTHS as u32))
            .map(|batch| batch * rows)
            .collect(),
        widths => widths.to_vec(),
    };
    let widest = max_batch * rows;
    let fits = |width: &u32| (1..=widest).contains(width) && width % rows == 0;
    if widths.len() > abi::MAX_WIDTHS
        || !widths.iter().all(fits)
        || !widths.is_sorted_by(|a, b| a < b)
    {
        return refuse(format!(
            "--widths is {:?}; needs at most {} ascending multiples of {rows} up to {widest} \
             ({rows} rows a request, --max-batch {max_batch})",
            widths,
            abi::MAX_WIDTHS
        ));
    }
    let max_rows = u32::try_from(settings.max_rows)
        .ok()
        .filter(|n| (1..=MAX_ROWS).contains(n));
    let Some(max_rows) = max_rows else {
        return refuse(format!(
            "--prefill-chunk is {}; needs 1 to {MAX_ROWS}",
            settings.max_rows
        ));
    };
    let page_size = plan::default_page_size(config);
    let pages = (settings.kv_tokens as u64)
        .div_ceil(u64::from(page_size))
        .max(1);
    let Some(num_pages) = u32::try_from(pages)
        .ok()
        .filter(|n| *n < i32::MAX as u32 / page_size)
    else {
        return refuse(format!(
            "the page pool must hold {} tokens, more than slots can number (fewer --sessions, or \
             a shorter --limit-input)",
            settings.kv_tokens
        ));
    };
    let geometry = Geometry {
        tp_size: settings.tp_size,
        widths,
        max_batch,
        // Uncovered verify steps run by the plain path, so it has room for the largest.
        max_rows: max_rows.max(max_batch * plan::verify_rows(config)),
        page_size,
        num_pages: num_pages + SPARE_PAGES,
        wait_budget_ns: ladder.kernel_ns(),
    };
    Ok((geometry, num_drafts))
}

fn runner_info(
    settings: &RuntimeSettings,
    config: &ModelConfig,
    geometry: &Geometry,
    num_drafts: u32,
) -> RunnerInfo {
    let special = &config.special_tokens;
    let first_token = (0..)
        .zip(special)
        .take_while(|(id, special)| id == *special)
        .count() as u32;
    RunnerInfo {
        model: settings.model.clone(),
        platform: settings.platform.clone(),
        tp_size: settings.tp_size,
        vocab: config.vocab,
        first_token,
        special_tokens: special
            .iter()
            .copied()
            .filter(|id| *id >= first_token)
            .collect(),
        page_size: geometry.page_size as usize,
        num_pages: (geometry.num_pages - SPARE_PAGES) as usize,
        max_batch: geometry.max_batch as usize,
        max_rows: geometry.max_rows as usize,
        max_positions: config.max_positions as usize,
        num_drafts: num_drafts as usize,
        facts: Vec::new(),
    }
}

/// Bytes that this machine can still give, where it says so.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
