//! One rank's part in its group: the ballot that it casts, what all ranks agree on, and the
//! decision about each step that follows from it.

use std::sync::{Mutex, PoisonError};

use lowlat_core::digest::Fnv1a;
use lowlat_core::dispatch::Decision;
use lowlat_core::graph_key::{GraphKey, GraphMode, Path, Recorder, SealView, keys_digest};
use lowlat_core::vote::{BALLOT_WORDS, agree};
use lowlat_core::{BallotParts, Servable, StepFacts, StepMode, TpRank};
use pyo3::prelude::*;

use crate::module::{DeadlineLadder, GraphRecord, check_options, named_reason, value_error};

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

/// A rank that the guard found able to serve. `options` is as for `check`; ValueError holds every
/// reason against it, one a line.
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
        let servable =
            lowlat_core::spec::serve(model_config_json, &options).map_err(|declines| {
                let lines: Vec<String> = declines.iter().map(ToString::to_string).collect();
                value_error(lines.join("\n"))
            })?;
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
            keys_digest: keys_digest(&keys),
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
        let mut recorder = Recorder::new();
        for key in &self.keys {
            recorder
                .note(key.clone(), Path::Fused, &[])
                .map_err(value_error)?;
        }
        let dispatcher = lowlat_core::Dispatcher::new(&coverage, recorder.finish());
        Ok(Dispatcher {
            dispatcher: Mutex::new(dispatcher.map_err(value_error)?),
            keys: self.keys.clone(),
        })
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
        let mode = step_mode(mode)?;
        let step = StepFacts {
            mode,
            batch_size,
            tokens_per_request,
            rows,
        };
        Ok(match self.with(|dispatcher| dispatcher.decide(&step)) {
            Decision::Replay { padded_batch, .. } => (padded_batch, None),
            Decision::Plain(reason) => (0, Some(reason.number())),
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
