//! The flow from facts to decisions, the way an engine walks it, and where it stops.

use lowlat_core::graph_key::keys_digest;
use lowlat_core::graph_key::{GraphKey, GraphMode, KeyIdx, Path, RecordError, Recorder, SealView};
use lowlat_core::vote::{Refusal, agree};
use lowlat_core::{
    Ballot, BallotParts, Built, Captured, Coverage, DeadlineLadder, Decision, Facts, Reason,
    Requirements, StepFacts, StepMode, TpRank, guard,
};

fn key(mode: GraphMode, batch_size: u32, tokens_per_request: u32) -> GraphKey {
    GraphKey {
        mode,
        batch_size,
        tokens_per_request,
        width: batch_size * tokens_per_request,
        shape: "tiny-v41".into(),
        isa: "scalar".into(),
        numerics_digest: 1,
        layout_digest: 2,
    }
}

fn coverage(keys: &[GraphKey], widths: &[u32]) -> Coverage {
    let digest = keys_digest(keys.iter().map(|key| (key, path_of(key))));
    vote([digest; 2], widths).unwrap()
}

/// The vote of two ranks, each with the digest of its own keys.
fn vote(keys_digests: [u64; 2], widths: &[u32]) -> Result<Coverage, Refusal> {
    let facts = Facts {
        isa: "scalar".into(),
        tp_size: 2,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
    let cast = |rank: u32| {
        let parts = BallotParts {
            widths,
            keys_digest: keys_digests[rank as usize],
            geometry_digest: 0,
            catalogue_digest: 0,
            ladder: DeadlineLadder::new(1, 2, 3, 4).unwrap(),
        };
        Ballot::new(&servable, TpRank(rank), parts).unwrap()
    };
    agree(TpRank(1), &[cast(0), cast(1)])
}

fn view(address: u64) -> SealView<'static> {
    SealView {
        name: "slots",
        address,
        shape: &[6],
        dtype: "i32",
    }
}

fn path_of(key: &GraphKey) -> Path {
    if key.batch_size == 3 {
        Path::Plain
    } else {
        Path::Persistent
    }
}

fn note_all(keys: &[GraphKey]) -> impl FnOnce(&mut u32, &mut Recorder) -> Result<(), RecordError> {
    move |payload, recorder| {
        for key in keys {
            *payload += 1;
            recorder.note(key.clone(), path_of(key), &[view(0x1000)])?;
        }
        Ok(())
    }
}

fn captured(keys: &[GraphKey], widths: &[u32]) -> Captured<u32> {
    let built = Built::new(coverage(keys, widths), |coverage| {
        assert_eq!(coverage.widths(), widths);
        Ok::<u32, RecordError>(0)
    });
    built.unwrap().capture(note_all(keys)).unwrap()
}

const VERIFY: GraphMode = GraphMode::TargetVerify;

#[test]
fn a_batch_is_padded_to_the_next_captured_one() {
    let keys = [
        key(VERIFY, 8, 6),
        key(VERIFY, 1, 6),
        key(VERIFY, 4, 6),
        key(VERIFY, 2, 6),
    ];
    let mut captured = captured(&keys, &[6, 12, 24, 48]);
    assert_eq!(*captured.payload(), 4);
    let padded = [1, 2, 4, 4, 8, 8, 8, 8];
    for (batch_size, expected) in (1..).zip(padded) {
        let decision = captured.decide(&StepFacts::uniform(StepMode::TargetVerify, batch_size, 6));
        let Decision::Replay { key, padded_batch } = decision else {
            panic!("{batch_size}: {decision:?}");
        };
        assert_eq!(padded_batch, expected);
        let record = captured.dispatcher().record();
        assert_eq!(record.entries()[key.0 as usize].key.batch_size, expected);
    }
    let report = captured.dispatcher().report();
    assert_eq!((report.covered, report.uncovered), (8, 0));
    let of_four = report.covered_by_key["target_verify 4 x 6 rows at width 24 (tiny-v41, scalar)"];
    assert_eq!(of_four, 2);
}

#[test]
fn each_reason_not_to_cover_a_step_is_told_and_counted() {
    let keys = [
        key(VERIFY, 1, 6),
        key(VERIFY, 3, 6),
        key(GraphMode::Draft, 1, 5),
    ];
    let mut captured = captured(&keys, &[5, 6, 18]);
    let uniform = StepFacts::uniform;
    let ragged = StepFacts {
        rows: 7,
        ..uniform(StepMode::TargetVerify, 2, 6)
    };
    let cases = [
        (uniform(StepMode::Extend, 1, 6), Reason::StepIsExtend),
        (uniform(StepMode::Mixed, 1, 6), Reason::StepIsMixed),
        (uniform(StepMode::Idle, 0, 0), Reason::StepIsIdle),
        (uniform(StepMode::TargetVerify, 0, 6), Reason::StepIsIdle),
        (uniform(StepMode::Decode, 1, 1), Reason::ModeNotCaptured),
        (
            uniform(StepMode::TargetVerify, 1, 5),
            Reason::TokensPerRequest,
        ),
        (uniform(StepMode::TargetVerify, 4, 6), Reason::BatchTooLarge),
        (uniform(StepMode::Draft, 2, 5), Reason::BatchTooLarge),
        (ragged, Reason::RowsRagged),
        (
            uniform(StepMode::TargetVerify, 2, 6),
            Reason::PlainAtCapture,
        ),
    ];
    for (step, reason) in cases {
        assert_eq!(captured.decide(&step), Decision::Plain(reason), "{step:?}");
    }
    captured.switch(false);
    let step = uniform(StepMode::TargetVerify, 1, 6);
    assert_eq!(captured.decide(&step), Decision::Plain(Reason::PluginOff));
    captured.switch(true);
    assert!(matches!(captured.decide(&step), Decision::Replay { .. }));

    let report = captured.dispatcher().report();
    assert_eq!((report.covered, report.uncovered), (1, 11));
    assert_eq!(report.uncovered_by_reason["step_is_idle"], 2);
    assert_eq!(report.uncovered_by_reason["batch_too_large"], 2);
    assert_eq!(report.uncovered_by_reason["plugin_off"], 1);
    assert!(!report.uncovered_by_reason.contains_key("disarmed"));
}

#[test]
fn a_broken_seal_disarms_for_good() {
    let mut captured = captured(&[key(VERIFY, 1, 6)], &[6]);
    let step = StepFacts::uniform(StepMode::TargetVerify, 1, 6);
    let good = captured.decide_sealed(&step, |_| [view(0x1000)]).unwrap();
    assert_eq!(
        good,
        Decision::Replay {
            key: KeyIdx(0),
            padded_batch: 1
        }
    );
    let fault = captured
        .decide_sealed(&step, |_| [view(0x1008)])
        .unwrap_err();
    assert!(
        fault.to_string().contains("now slots i32 [6] at 0x1008"),
        "{fault}"
    );
    // Even with the old address back, and after a later fault, which is not the first.
    captured.disarm(Reason::WaitExpired);
    let after = captured.decide_sealed(&step, |_| [view(0x1000)]).unwrap();
    assert_eq!(after, Decision::Plain(Reason::Disarmed));
    assert_eq!(captured.dispatcher().fault(), Some(Reason::SealChanged));
}

#[test]
fn a_capture_that_is_not_what_was_agreed_on_is_refused() {
    let agreed = [key(VERIFY, 1, 6), key(VERIFY, 2, 6)];
    let built =
        |widths| Built::new(coverage(&agreed, widths), |_| Ok::<u32, RecordError>(0)).unwrap();
    let error = built(&[6, 12])
        .capture(note_all(&agreed[..1]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("that all ranks agreed on"), "{error}");
    let error = built(&[6])
        .capture(note_all(&agreed))
        .unwrap_err()
        .to_string();
    assert!(error.ends_with("all ranks agreed on widths [6]"), "{error}");
    let error = built(&[6, 12])
        .capture(|_, recorder| {
            recorder.note(agreed[0].clone(), Path::Persistent, &[])?;
            recorder.note(agreed[1].clone(), Path::Plain, &[])
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("that all ranks agreed on"), "{error}");
    assert!(built(&[6, 12]).capture(note_all(&agreed)).is_ok());
}

/// One would replay where the other runs its own forward. Planted once: a digest of keys alone.
#[test]
fn ranks_that_run_one_key_by_another_path_do_not_agree() {
    let record = |path| {
        let mut recorder = Recorder::new();
        recorder.note(key(VERIFY, 1, 6), path, &[]).unwrap();
        recorder.finish()
    };
    let paths = [Path::Persistent, Path::Fused, Path::Plain];
    for first in paths {
        for second in paths {
            let digests = [first, second].map(|path| record(path).keys_digest());
            match vote(digests, &[6]) {
                Ok(_) => assert_eq!(first, second),
                Err(refusal) => {
                    assert_ne!(first, second);
                    assert_eq!(refusal.reason(), Reason::VoteKeys, "{refusal}");
                }
            }
        }
    }
}

#[test]
fn a_step_digest_depends_on_every_fact() {
    let base = StepFacts::uniform(StepMode::TargetVerify, 2, 6);
    let others = [
        StepFacts {
            mode: StepMode::Decode,
            ..base
        },
        StepFacts {
            batch_size: 3,
            ..base
        },
        StepFacts {
            tokens_per_request: 5,
            ..base
        },
        StepFacts { rows: 11, ..base },
    ];
    for other in others {
        assert_ne!(base.digest(), other.digest());
    }
}
