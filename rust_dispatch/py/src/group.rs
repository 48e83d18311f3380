//! One rank's part in its group: the ballot that it casts, what all ranks agree on, and the
//! decision about each step that follows from it.

use std::sync::{Mutex, PoisonError};

use lowlat_core::Decision as StepDecision;
use lowlat_core::digest::Fnv1a;
use lowlat_core::graph_key::{GraphKey, GraphMode, Path, Recorder, SealView, keys_digest};
use lowlat_core::vote::{BALLOT_WORDS, Decision, agree};
use lowlat_core::words::one_line;
use lowlat_core::{
    BallotParts, Coverage, Decline, Facts, Requirements, Servable, StepFacts, StepMode, TpRank,
};
use lowlat_host::{GroupSettings, HostSeat};
use pyo3::prelude::*;

use crate::module::{
    DeadlineLadder, GraphRecord, check_options, json_text, named_reason, value_error,
};

/// What a captured graph reads: name, address, shape, dtype.
pub type SealRow = (String, u64, Vec<i64>, String);

/// A row, borrowed.
pub fn seal_view((name, address, shape, dtype): &SealRow) -> SealView<'_> {
    SealView {
        name,
        address: *address,
        shape,
        dtype,
    }
}

fn text_digest(text: &str) -> u64 {
    Fnv1a::new().text(text).finish()
}

fn step_mode(name: &str) -> PyResult<StepMode> {
    Ok(match name {
        "decode" => StepMode::Decode,
        "target_verify" => StepMode::TargetVerify,
        "draft" => StepMode::Draft,
        "extend" => StepMode::Extend,
        "mixed" => StepMode::Mixed,
        "idle" => StepMode::Idle,
        other => {
            return Err(value_error(format!(
                "mode is {other}; needed decode, target_verify, draft, extend, mixed or idle"
            )));
        }
    })
}

fn declined(declines: Vec<Decline>) -> PyErr {
    let lines: Vec<String> = declines.iter().map(ToString::to_string).collect();
    value_error(lines.join("\n"))
}

fn step_facts(
    mode: &str,
    batch_size: u32,
    tokens_per_request: u32,
    rows: u32,
) -> PyResult<StepFacts> {
    let mode = step_mode(mode)?;
    Ok(StepFacts {
        mode,
        batch_size,
        tokens_per_request,
        rows,
    })
}

/// Digest of a step, for `Seat.agree_step`.
#[pyfunction]
pub fn step_digest(
    mode: &str,
    batch_size: u32,
    tokens_per_request: u32,
    rows: u32,
) -> PyResult<u64> {
    Ok(step_facts(mode, batch_size, tokens_per_request, rows)?.digest())
}

/// A rank that the guard found able to serve with the built-in kernels. `options` is as for
/// `check`; ValueError holds every reason against it, one a line.
#[pyclass(frozen)]
pub struct Rank {
    servable: Servable,
    tp_rank: TpRank,
}

#[pymethods]
impl Rank {
    #[new]
    #[pyo3(signature = (model_config_json, options, *, tp_rank))]
    fn new(model_config_json: &str, options: &Bound<'_, PyAny>, tp_rank: u32) -> PyResult<Self> {
        let options = check_options(options)?;
        let servable = lowlat_core::spec::serve(model_config_json, &options).map_err(declined)?;
        let tp_rank = TpRank(tp_rank);
        Ok(Self { servable, tp_rank })
    }

    /// A rank that the guard found able to serve with an engine's own kernels. `requirements` (any
    /// of what `requirements()` lists; "name" and "isas" at least) and `facts` ("isa" and "tp_size"
    /// at least) are dicts or JSON text; ValueError holds every reason against it, one a line.
    #[staticmethod]
    #[pyo3(signature = (requirements, facts, *, tp_rank))]
    fn own(
        requirements: &Bound<'_, PyAny>,
        facts: &Bound<'_, PyAny>,
        tp_rank: u32,
    ) -> PyResult<Self> {
        let requirements = Requirements::from_json(&json_text(requirements)?);
        let facts = Facts::from_json(&json_text(facts)?).map_err(value_error)?;
        let servable = lowlat_core::guard(&facts, &requirements.map_err(value_error)?);
        let servable = servable.map_err(declined)?;
        let tp_rank = TpRank(tp_rank);
        Ok(Self { servable, tp_rank })
    }

    /// What this rank would run: steps of `mode` with `tokens_per_request` rows a request, at each
    /// of `widths`. The texts of `shape`, `numerics` and `layout` must be the same on every rank.
    #[pyo3(signature = (
        *, mode, tokens_per_request, widths, shape, numerics, layout, catalogue_digest, ladder
    ))]
    #[allow(clippy::too_many_arguments)] // Keywords all, in Python.
    fn ballot(
        &self,
        mode: &str,
        tokens_per_request: u32,
        widths: Vec<u32>,
        shape: &str,
        numerics: &str,
        layout: &str,
        catalogue_digest: u64,
        ladder: &DeadlineLadder,
    ) -> PyResult<Ballot> {
        let graph_mode = GraphMode::ALL
            .into_iter()
            .find(|known| known.name() == mode);
        let graph_mode = graph_mode.ok_or_else(|| {
            value_error(format!(
                "mode is {mode}; needed decode, target_verify or draft"
            ))
        })?;
        if tokens_per_request == 0 || widths.iter().any(|width| width % tokens_per_request != 0) {
            return Err(value_error(format!(
                "widths are {widths:?}; needed multiples of tokens_per_request, \
                 {tokens_per_request}"
            )));
        }
        let key = |width| GraphKey {
            mode: graph_mode,
            batch_size: width / tokens_per_request,
            tokens_per_request,
            width,
            shape: shape.to_owned(),
            isa: self.servable.isa().to_owned(),
            numerics_digest: text_digest(numerics),
            layout_digest: text_digest(layout),
        };
        let keys: Vec<GraphKey> = widths.iter().copied().map(key).collect();
        let parts = BallotParts {
            widths: &widths,
            keys_digest: keys_digest(keys.iter().map(|key| (key, Path::Fused))),
            // The kernels put their launch geometry into the catalogue's digest.
            geometry_digest: catalogue_digest,
            catalogue_digest,
            ladder: ladder.0,
        };
        let ballot = lowlat_core::Ballot::new(&self.servable, self.tp_rank, parts);
        let ballot = ballot.map_err(value_error)?;
        Ok(Ballot { ballot, keys })
    }
}

/// What one rank can cover. Its words travel by the engine's own all-gather.
#[pyclass(frozen)]
pub struct Ballot {
    ballot: lowlat_core::Ballot,
    keys: Vec<GraphKey>,
}

#[pymethods]
impl Ballot {
    /// The ballot as numbers, for the all-gather.
    fn words(&self) -> Vec<u64> {
        self.ballot.to_words().to_vec()
    }

    /// All or none: the decisions that follow when every rank's ballot, in rank order, is the same
    /// as this one. ValueError names the first rank that declines or differs, the same on every
    /// rank.
    fn agree(&self, ballots: Vec<Vec<u64>>) -> PyResult<Dispatcher> {
        let read = |words: Vec<u64>| {
            let seen = words.len();
            let words: [u64; BALLOT_WORDS] = words.try_into().map_err(|_| {
                value_error(format!("a ballot has {seen} words; needed {BALLOT_WORDS}"))
            })?;
            Ok(lowlat_core::Ballot::from_words(&words))
        };
        let ballots = ballots
            .into_iter()
            .map(read)
            .collect::<PyResult<Vec<_>>>()?;
        let coverage = agree(self.ballot.tp_rank(), &ballots).map_err(value_error)?;
        self.dispatcher(&coverage)
    }
}

impl Ballot {
    /// The decisions that follow from an agreement on this ballot.
    fn dispatcher(&self, coverage: &Coverage) -> PyResult<Dispatcher> {
        let mut recorder = Recorder::new();
        for key in &self.keys {
            recorder
                .note(key.clone(), Path::Fused, &[])
                .map_err(value_error)?;
        }
        let dispatcher = lowlat_core::Dispatcher::new(coverage, recorder.finish());
        Ok(Dispatcher {
            dispatcher: Mutex::new(dispatcher.map_err(value_error)?),
            keys: self.keys.clone(),
        })
    }
}

/// One rank's place in a group of processes of this host, which vote through shared memory. One
/// thread at a time uses it; other threads of Python run while it waits.
#[pyclass(frozen)]
pub struct Seat(Mutex<Option<HostSeat>>);

impl Seat {
    /// Runs `body` on the seat, without Python's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut HostSeat) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        let mut seat = self
            .0
            .try_lock()
            .map_err(|_| value_error("the seat is in use by another thread"))?;
        let seat = seat
            .as_mut()
            .ok_or_else(|| value_error("the seat has left its group; join again"))?;
        py.detach(|| body(seat))
    }
}

#[pymethods]
impl Seat {
    /// Joins the group of that name and waits until all ranks have. `ladder` bounds every wait;
    /// `budget_ns` must be shorter than its engine budget. ValueError in one line: [117] where a
    /// living group has the name, [118] where there is no shared memory, [306] and [310] for
    /// another size and a second rank of one number, [401] where not all join in time.
    #[staticmethod]
    #[pyo3(signature = (name, *, tp_rank, tp_size, ladder, budget_ns))]
    fn join(
        py: Python<'_>,
        name: &str,
        tp_rank: u32,
        tp_size: u32,
        ladder: &DeadlineLadder,
        budget_ns: u64,
    ) -> PyResult<Self> {
        let settings = GroupSettings::new(name, TpRank(tp_rank), tp_size, ladder.0);
        let seat = py.detach(|| lowlat_host::join(&settings, budget_ns));
        let seat = seat.map_err(|error| value_error(one_line(&error.to_string())))?;
        Ok(Self(Mutex::new(Some(seat))))
    }

    /// Votes on coverage; every rank of the group calls it. The decisions that follow, or
    /// ValueError, the same on every rank. `budget_ns` must be shorter than the collective budget.
    fn agree(&self, py: Python<'_>, ballot: &Ballot, budget_ns: u64) -> PyResult<Dispatcher> {
        let own = ballot.ballot;
        let coverage = self.with(py, |seat| {
            if (own.tp_rank(), own.tp_size()) != (seat.tp_rank(), seat.tp_size()) {
                return Err(value_error(format!(
                    "the ballot is of {} of {}; the seat is of {} of {}",
                    own.tp_rank(),
                    own.tp_size(),
                    seat.tp_rank(),
                    seat.tp_size()
                )));
            }
            let voted = seat.agree(&own, budget_ns).map_err(value_error)?;
            voted.map_err(value_error)
        })?;
        ballot.dispatcher(&coverage)
    }

    /// Takes part in the vote as a rank that cannot serve, for the reason of that name, so that its
    /// peers decline with it at once. What became of the vote, in words.
    fn decline(&self, py: Python<'_>, reason: &str, budget_ns: u64) -> PyResult<String> {
        let reason = named_reason(reason)?;
        self.with(py, |seat| {
            let ballot = lowlat_core::Ballot::declining(seat.tp_rank(), seat.tp_size(), reason);
            let voted = seat.agree(&ballot.map_err(value_error)?, budget_ns);
            let refused = voted.map_err(value_error)?.err();
            refused
                .map(|refusal| refusal.to_string())
                .ok_or_else(|| value_error("bug: a vote with a decline agreed"))
        })
    }

    /// The hot vote: returns when all ranks are about to run the step with this digest. ValueError,
    /// the same on every rank: [308] where they are not, and then the group may go on; [401] where
    /// one is missing, and from then on.
    fn agree_step(&self, py: Python<'_>, digest: u64, budget_ns: u64) -> PyResult<()> {
        self.with(py, |seat| {
            match seat.agree_step(digest, budget_ns).map_err(value_error)? {
                Decision::Agreed => Ok(()),
                decision => Err(value_error(seat.step_refusal(decision))),
            }
        })
    }

    /// Leaves the group: peers that vote on find this rank missing, and the name is free.
    fn leave(&self) -> PyResult<()> {
        let seat = self.0.try_lock();
        *seat.map_err(|_| value_error("the seat is in use by another thread"))? = None;
        Ok(())
    }
}

/// The words of the ballot of a rank that cannot serve, for the reason of that name. It is cast all
/// the same, so that its peers decline with it instead of waiting.
#[pyfunction]
#[pyo3(signature = (*, tp_rank, tp_size, reason))]
pub fn declining_ballot(tp_rank: u32, tp_size: u32, reason: &str) -> PyResult<Vec<u64>> {
    let reason = named_reason(reason)?;
    let ballot = lowlat_core::Ballot::declining(TpRank(tp_rank), tp_size, reason);
    Ok(ballot.map_err(value_error)?.to_words().to_vec())
}

/// Decides step after step whether all ranks run it, and counts.
#[pyclass(frozen)]
pub struct Dispatcher {
    dispatcher: Mutex<lowlat_core::Dispatcher>,
    keys: Vec<GraphKey>,
}

impl Dispatcher {
    fn with<T>(&self, body: impl FnOnce(&mut lowlat_core::Dispatcher) -> T) -> T {
        // A panic inside leaves counts at worst one short.
        body(
            &mut self
                .dispatcher
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

#[pymethods]
impl Dispatcher {
    /// (batch size of the built step that runs it, None), or (0, number of the reason).
    fn decide(
        &self,
        mode: &str,
        batch_size: u32,
        tokens_per_request: u32,
        rows: u32,
    ) -> PyResult<(u32, Option<u32>)> {
        let step = step_facts(mode, batch_size, tokens_per_request, rows)?;
        Ok(match self.with(|dispatcher| dispatcher.decide(&step)) {
            StepDecision::Replay { padded_batch, .. } => (padded_batch, None),
            StepDecision::Plain(reason) => (0, Some(reason.number())),
        })
    }

    /// Disarms for good after a fault, the reason of that name. The first fault is kept.
    fn disarm(&self, reason: &str) -> PyResult<()> {
        let reason = named_reason(reason)?;
        self.with(|dispatcher| dispatcher.disarm(reason));
        Ok(())
    }

    /// The record of the graphs that were captured: for each batch size, what its graph reads as
    /// (name, address, shape, dtype). ValueError where a batch size was not agreed on.
    fn captured(&self, seals: Vec<(u32, Vec<SealRow>)>) -> PyResult<GraphRecord> {
        let mut recorder = Recorder::new();
        for (batch_size, rows) in &seals {
            let key = self.keys.iter().find(|key| key.batch_size == *batch_size);
            let key = key.ok_or_else(|| {
                value_error(format!(
                    "batch size {batch_size} was captured and not agreed on"
                ))
            })?;
            let views: Vec<SealView<'_>> = rows.iter().map(seal_view).collect();
            recorder
                .note(key.clone(), Path::Fused, &views)
                .map_err(value_error)?;
        }
        Ok(GraphRecord(recorder.finish()))
    }

    /// What was decided so far, as JSON: covered, uncovered, covered_by_key, uncovered_by_reason,
    /// fault.
    fn report(&self) -> String {
        let report = self.with(|dispatcher| dispatcher.report());
        serde_json::to_string(&report).expect("a report is plain data")
    }
}
