//! The dispatcher: which captured graph runs a step, or why none does. Built once; a decision
//! allocates nothing, reads no clock and makes no system call.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::digest::Fnv1a;
use crate::graph_key::{GraphMode, KeyIdx, Path, Record, RecordError};
use crate::reason::Reason;
use crate::vote::Coverage;

/// Which step the engine is about to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepMode {
    /// One row a request.
    Decode,
    /// The anchor and its drafts.
    TargetVerify,
    /// The draft's proposals.
    Draft,
    /// Prompt rows.
    Extend,
    /// Prompt rows and decode rows together.
    Mixed,
    /// No rows.
    Idle,
}

impl StepMode {
    /// The mode of the graphs that can run it, or why none can.
    fn graph_mode(self) -> Result<GraphMode, Reason> {
        match self {
            Self::Decode => Ok(GraphMode::Decode),
            Self::TargetVerify => Ok(GraphMode::TargetVerify),
            Self::Draft => Ok(GraphMode::Draft),
            Self::Extend => Err(Reason::StepIsExtend),
            Self::Mixed => Err(Reason::StepIsMixed),
            Self::Idle => Err(Reason::StepIsIdle),
        }
    }
}

/// What a step is, from host state that every rank shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepFacts {
    /// Which step.
    pub mode: StepMode,
    /// Requests.
    pub batch_size: u32,
    /// Rows a request; 0 where requests differ.
    pub tokens_per_request: u32,
    /// Rows of the step.
    pub rows: u32,
}

impl StepFacts {
    /// A step in which every request has `tokens_per_request` rows.
    pub fn uniform(mode: StepMode, batch_size: u32, tokens_per_request: u32) -> Self {
        let rows = batch_size.saturating_mul(tokens_per_request);
        Self {
            mode,
            batch_size,
            tokens_per_request,
            rows,
        }
    }

    /// Digest for the hot vote: mode's place in [`StepMode`], batch size, tokens a request, rows.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let digest = Fnv1a::new().u32(self.mode as u32).u32(self.batch_size);
        digest.u32(self.tokens_per_request).u32(self.rows).finish()
    }
}

/// What runs a step.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The captured graph of `key`, with the batch padded to `padded_batch` requests.
    Replay {
        /// The graph's place in the record.
        key: KeyIdx,
        /// Its batch size, at least the step's.
        padded_batch: u32,
    },
    /// The engine's own forward, for this reason.
    Plain(Reason),
}

/// One row of the table: a captured graph, by ascending batch size within its mode.
#[derive(Clone, Copy, Debug)]
struct Row {
    key: KeyIdx,
    batch_size: u32,
    tokens_per_request: u32,
    plain: bool,
}

/// Decides, step after step, and counts what it decided.
///
/// ```
/// # use lowlat_core::{DeadlineLadder, Facts, Requirements, TpRank, guard};
/// # use lowlat_core::vote::{Ballot, BallotParts, agree};
/// use lowlat_core::dispatch::{Decision, Dispatcher, StepFacts, StepMode};
/// use lowlat_core::graph_key::{GraphKey, GraphMode, KeyIdx, Path, Recorder, keys_digest};
/// use lowlat_core::Reason;
/// # let facts = Facts { isa: "scalar".into(), tp_size: 1, ..Facts::default() };
/// # let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
/// let key = |batch_size| GraphKey {
///     mode: GraphMode::TargetVerify, batch_size, tokens_per_request: 6, width: batch_size * 6,
///     shape: "tiny".into(), isa: "scalar".into(), numerics_digest: 0, layout_digest: 0,
/// };
/// let keys = [key(1), key(2), key(4)];
/// # let planned = keys.iter().map(|key| (key, Path::Persistent));
/// # let coverage = agree(TpRank(0), &[Ballot::new(&servable, TpRank(0), BallotParts {
/// #     widths: &[6, 12, 24], keys_digest: keys_digest(planned), geometry_digest: 0,
/// #     catalogue_digest: 0, ladder: DeadlineLadder::new(1, 2, 3, 4).unwrap(),
/// # }).unwrap()]).unwrap();
/// let mut recorder = Recorder::new();
/// for key in keys {
///     recorder.note(key, Path::Persistent, &[]).unwrap();
/// }
/// let mut dispatcher = Dispatcher::new(&coverage, recorder.finish()).unwrap();
///
/// // Three requests run in the graph for four.
/// let step = StepFacts::uniform(StepMode::TargetVerify, 3, 6);
/// let decision = dispatcher.decide(&step);
/// assert_eq!(decision, Decision::Replay { key: KeyIdx(2), padded_batch: 4 });
/// let step = StepFacts::uniform(StepMode::TargetVerify, 5, 6);
/// assert_eq!(dispatcher.decide(&step), Decision::Plain(Reason::BatchTooLarge));
/// assert_eq!(dispatcher.report().covered, 1);
///
/// // After a fault it never runs anything again.
/// dispatcher.disarm(Reason::RankMissing);
/// assert_eq!(dispatcher.decide(&step), Decision::Plain(Reason::Disarmed));
/// ```
#[derive(Clone, Debug)]
pub struct Dispatcher {
    record: Record,
    /// A table a graph mode, in the order of [`GraphMode::ALL`].
    tables: [Vec<Row>; 3],
    disarmed: Option<Reason>,
    switched_off: bool,
    covered: Vec<u64>,
    uncovered: [u64; Reason::ALL.len()],
}

impl Dispatcher {
    /// A dispatcher over what was captured.
    ///
    /// # Errors
    /// When the record is not what all ranks agreed to cover: other keys or paths, or a width that
    /// was not voted on. That is a bug on this rank, and its peers must not be left waiting for it.
    pub fn new(coverage: &Coverage, record: Record) -> Result<Self, RecordError> {
        if record.keys_digest() != coverage.keys_digest() {
            return Err(RecordError(format!(
                "captured graph keys and paths {:#018x} are not the {:#018x} that all ranks \
                 agreed on",
                record.keys_digest(),
                coverage.keys_digest()
            )));
        }
        let mut tables: [Vec<Row>; 3] = Default::default();
        for (idx, entry) in (0..).zip(record.entries()) {
            if !coverage.widths().contains(&entry.key.width) {
                return Err(RecordError(format!(
                    "{}: all ranks agreed on widths {:?}",
                    entry.key,
                    coverage.widths()
                )));
            }
            tables[entry.key.mode as usize].push(Row {
                key: KeyIdx(idx),
                batch_size: entry.key.batch_size,
                tokens_per_request: entry.key.tokens_per_request,
                plain: entry.path == Path::Plain,
            });
        }
        for table in &mut tables {
            table.sort_by_key(|row| row.batch_size);
        }
        Ok(Self {
            covered: vec![0; record.entries().len()],
            record,
            tables,
            disarmed: None,
            switched_off: false,
            uncovered: [0; Reason::ALL.len()],
        })
    }

    /// What was captured.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Decides what runs a step, and counts it. The answer depends only on the record and `step`,
    /// so it is the same on every rank that agreed on the record.
    pub fn decide(&mut self, step: &StepFacts) -> Decision {
        let decision = self.look_up(step);
        match decision {
            Decision::Replay { key, .. } => self.covered[key.0 as usize] += 1,
            Decision::Plain(reason) => self.uncovered[reason.idx()] += 1,
        }
        decision
    }

    fn look_up(&self, step: &StepFacts) -> Decision {
        if self.disarmed.is_some() {
            return Decision::Plain(Reason::Disarmed);
        }
        if self.switched_off {
            return Decision::Plain(Reason::PluginOff);
        }
        let mode = match step.mode.graph_mode() {
            Ok(mode) => mode,
            Err(reason) => return Decision::Plain(reason),
        };
        let table = &self.tables[mode as usize];
        if table.is_empty() {
            return Decision::Plain(Reason::ModeNotCaptured);
        }
        if step.batch_size == 0 || step.rows == 0 {
            return Decision::Plain(Reason::StepIsIdle);
        }
        let rows = u64::from(step.batch_size) * u64::from(step.tokens_per_request);
        if rows != u64::from(step.rows) {
            return Decision::Plain(Reason::RowsRagged);
        }
        let mut reason = Reason::TokensPerRequest;
        for row in table
            .iter()
            .filter(|row| row.tokens_per_request == step.tokens_per_request)
        {
            if row.batch_size < step.batch_size {
                reason = Reason::BatchTooLarge;
            } else if row.plain {
                return Decision::Plain(Reason::PlainAtCapture);
            } else {
                return Decision::Replay {
                    key: row.key,
                    padded_batch: row.batch_size,
                };
            }
        }
        Decision::Plain(reason)
    }

    /// Switches the plugin on or off between steps; all ranks do it together. Off is the baseline
    /// arm of a measurement.
    pub fn switch(&mut self, on: bool) {
        self.switched_off = !on;
    }

    /// Disarms for good after a fault. The first fault is kept.
    pub fn disarm(&mut self, fault: Reason) {
        self.disarmed.get_or_insert(fault);
    }

    /// The fault that disarmed it.
    pub fn fault(&self) -> Option<Reason> {
        self.disarmed
    }

    /// What was decided so far.
    #[must_use]
    pub fn report(&self) -> DispatchReport {
        let counted = Reason::ALL
            .into_iter()
            .zip(self.uncovered)
            .filter(|(_, count)| 0 < *count);
        let by_key = self.record.entries().iter().zip(&self.covered);
        DispatchReport {
            covered: self.covered.iter().sum(),
            uncovered: self.uncovered.iter().sum(),
            covered_by_key: by_key
                .map(|(entry, &n)| (entry.key.to_string(), n))
                .collect(),
            uncovered_by_reason: counted
                .map(|(reason, n)| (reason.name().to_owned(), n))
                .collect(),
            fault: self.disarmed,
        }
    }
}

/// How many steps ran by a graph, and how many did not, by reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DispatchReport {
    /// Steps that a graph ran.
    pub covered: u64,
    /// Steps that the engine's own forward ran.
    pub uncovered: u64,
    /// Covered steps by graph key, in words, those never used with 0.
    pub covered_by_key: BTreeMap<String, u64>,
    /// Uncovered steps by the reason's name; only reasons that occurred.
    pub uncovered_by_reason: BTreeMap<String, u64>,
    /// The fault that disarmed the dispatcher.
    pub fault: Option<Reason>,
}
