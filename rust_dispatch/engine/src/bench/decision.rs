//! What one decision costs: which captured graph runs a step, and whether its seals hold.

use std::hint::black_box;
use std::time::Instant;

use lowlat_core::graph_key::{
    GraphKey, GraphMode, Path, RecordError, Recorder, SealView, keys_digest,
};
use lowlat_core::vote::agree;
use lowlat_core::{
    Ballot, BallotParts, Decision, Dispatcher, Facts, Requirements, StepFacts, StepMode, TpRank,
    guard,
};

use super::count;
use super::stats::Stats;
use crate::EngineError;

/// Requests of a batch, at most; each size is a graph of its own.
const MAX_BATCH: u32 = 8;

/// Rows of one verified request: the anchor and five drafts.
const VERIFY_ROWS: u32 = 6;

/// Decisions that are timed together. The clock takes as long as a few of them, so that one alone
/// could not be told from it.
pub(crate) const BATCH: u64 = 32;

const SEALED: [(&str, u64, [i64; 2]); 3] = [
    ("tokens", 0x1000, [8, 6]),
    ("page_table", 0x2000, [8, 64]),
    ("logits", 0x3000, [48, 129_280]),
];

fn seals() -> [SealView<'static>; 3] {
    let view = |idx: usize| {
        let (name, address, shape) = &SEALED[idx];
        SealView {
            name,
            address: *address,
            shape,
            dtype: "i32",
        }
    };
    [view(0), view(1), view(2)]
}

/// What a decision cost.
#[derive(Debug)]
pub(crate) struct Cost {
    pub ns: Stats,
    /// Of all decisions together; `None` where the program does not count them.
    pub allocations: Option<u64>,
    /// Of one decision, or why the machine does not count them.
    pub instructions: Result<f64, String>,
}

/// A dispatcher of verify and draft graphs for 1 to 8 requests, as a rank of `tp_size` has it.
fn dispatcher(tp_size: u32) -> Result<Dispatcher, String> {
    let widths: Vec<u32> = (1..=MAX_BATCH).map(|size| size * VERIFY_ROWS).collect();
    let graphs = (1..=MAX_BATCH).flat_map(|size| {
        [
            (GraphMode::TargetVerify, size, VERIFY_ROWS),
            (GraphMode::Draft, size, VERIFY_ROWS - 1),
        ]
    });
    let keys: Vec<GraphKey> = graphs
        .map(|(mode, batch_size, tokens_per_request)| GraphKey {
            mode,
            batch_size,
            tokens_per_request,
            width: batch_size * VERIFY_ROWS,
            shape: "v41-flash".into(),
            isa: "sm_90".into(),
            numerics_digest: 1,
            layout_digest: 2,
        })
        .collect();
    let facts = Facts {
        isa: "sm_90".into(),
        tp_size,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new("bench", &["sm_90"]));
    let servable = servable.map_err(|declines| format!("{declines:?}"))?;
    let cast = |rank| {
        let parts = BallotParts {
            widths: &widths,
            keys_digest: keys_digest(keys.iter().map(|key| (key, Path::Persistent))),
            geometry_digest: 3,
            catalogue_digest: 4,
            ladder: super::ladder(),
        };
        Ballot::new(&servable, TpRank(rank), parts)
    };
    let ballots: Result<Vec<Ballot>, _> = (0..tp_size).map(cast).collect();
    let ballots = ballots.map_err(|error| error.to_string())?;
    let coverage = agree(TpRank(0), &ballots).map_err(|refusal| refusal.to_string())?;
    let mut recorder = Recorder::new();
    let noted = keys
        .into_iter()
        .try_for_each(|key| recorder.note(key, Path::Persistent, &seals()));
    noted
        .and_then(|()| Dispatcher::new(&coverage, recorder.finish()))
        .map_err(|error: RecordError| error.to_string())
}

/// The steps of an agent's session: mostly one request that drafts and verifies, other batch sizes,
/// now and then a prompt.
fn steps() -> [StepFacts; 8] {
    let uniform = StepFacts::uniform;
    [
        uniform(StepMode::TargetVerify, 1, VERIFY_ROWS),
        uniform(StepMode::Draft, 1, VERIFY_ROWS - 1),
        uniform(StepMode::TargetVerify, 1, VERIFY_ROWS),
        uniform(StepMode::Draft, 3, VERIFY_ROWS - 1),
        uniform(StepMode::TargetVerify, 3, VERIFY_ROWS),
        uniform(StepMode::Draft, 8, VERIFY_ROWS - 1),
        uniform(StepMode::TargetVerify, 8, VERIFY_ROWS),
        uniform(StepMode::Extend, 1, 128),
    ]
}

fn decide(dispatcher: &mut Dispatcher, step: &StepFacts) {
    if let Decision::Replay { key, .. } = black_box(dispatcher.decide(black_box(step))) {
        let sealed = dispatcher.record().check_seals(key, black_box(seals()));
        assert!(black_box(sealed).is_ok(), "nothing was moved");
    }
}

/// Times `decisions`, and counts what else they cost.
pub(crate) fn measure(tp_size: u32, decisions: u64) -> Result<Cost, EngineError> {
    let mut dispatcher = dispatcher(tp_size).map_err(EngineError::Bug)?;
    let steps = steps();
    let mut work = |count: u64| {
        for step in steps.iter().cycle().take(count as usize) {
            decide(&mut dispatcher, step);
        }
    };
    work(BATCH);
    let batches = decisions.div_ceil(BATCH);
    let mut samples = Vec::with_capacity(batches as usize);
    let allocations = count::allocations(|| {
        for _ in 0..batches {
            let began_at = Instant::now();
            work(BATCH);
            samples.push(began_at.elapsed().as_nanos() as f64 / BATCH as f64);
        }
    });
    let instructions = count::events(count::INSTRUCTIONS, || work(batches * BATCH));
    Ok(Cost {
        ns: Stats::of(samples),
        allocations,
        instructions: instructions
            .map(|count| count as f64 / (batches * BATCH) as f64)
            .map_err(|error| format!("this machine does not count them: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_timed_is_a_decision_that_replays_and_one_that_does_not() {
        let mut dispatcher = dispatcher(4).unwrap();
        for step in &steps() {
            decide(&mut dispatcher, step);
        }
        let report = dispatcher.report();
        assert_eq!((report.covered, report.uncovered), (7, 1));
    }
}
