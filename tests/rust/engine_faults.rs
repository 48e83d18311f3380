//! Ranks that disagree or fall silent: all refuse or fail together, within their deadlines, and
//! the message names the rank and the difference. Afterwards nothing is left and a new runtime
//! works.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lowlat_engine::EngineError;
use lowlat_engine::runtime::{Lapse, LapseKind, Runtime, RuntimeOptions};
use lowlat_engine::step::{
    FaultKind, InjectedFault, RuntimeSettings, StepMode, StepPlan, StepRequest, StepResult,
    StepRunner,
};

#[path = "support/engine.rs"]
mod support;
use support::{library, settings, short_ladder, sources};

/// One test at a time: they look for threads of this process that were left behind.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads of ranks, and of the kernels, which inherit the name of the rank that made them.
fn num_rank_threads() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let names = tasks.filter_map(|task| name(task.ok()?).ok());
    names.filter(|name| name.starts_with("lowlat rank")).count()
}

/// A thread leaves the process's list a moment after it was joined.
fn expect_no_thread_left() {
    let until = Instant::now() + Duration::from_secs(10);
    while num_rank_threads() > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(num_rank_threads(), 0, "threads are left");
}

fn options(library: &std::path::Path, model: &str, tp_size: u32) -> RuntimeOptions {
    let settings = RuntimeSettings {
        model: model.into(),
        tp_size,
        max_batch: 2,
        ..settings(library)
    };
    RuntimeOptions {
        ladder: short_ladder(),
        compare_logits: true,
        ..RuntimeOptions::new(settings)
    }
}

/// A step of one request at position `start`.
fn plan(mode: StepMode, start: i32, tokens: &[i32]) -> StepPlan {
    StepPlan {
        mode,
        requests: vec![StepRequest {
            uid: 0,
            first_row: 0,
            num_rows: tokens.len(),
            start,
            history: [0; 3],
            state_slot: 0,
            temperature: 0.0,
            draw: 0,
            wants_token: true,
        }],
        token_ids: tokens.to_vec(),
        page_table: (0..8).collect(),
        page_table_stride: 8,
        simulated_accept: None,
    }
}

/// A prompt and a verify step give tokens.
fn works(runtime: &mut Runtime) {
    let mut result = StepResult::new();
    runtime
        .run(&plan(StepMode::Extend, 0, &[5, 9, 11, 40]), &mut result)
        .unwrap();
    let anchor = result.tokens[0];
    runtime
        .run(&plan(StepMode::Verify, 4, &[anchor]), &mut result)
        .unwrap();
    assert!(!result.tokens.is_empty());
}

fn a_fresh_one_works(options: RuntimeOptions) {
    let mut fresh = Runtime::start_with(options).unwrap();
    works(&mut fresh);
    assert!(
        num_rank_threads() > 0,
        "rank threads are looked for under another name"
    );
    drop(fresh);
    expect_no_thread_left();
}

/// Both models, on two ranks built in and on four from their folders.
fn refuses(tp_size: u32, fault: InjectedFault, check: impl Fn(&EngineError)) {
    for (served, model) in sources() {
        if (served == model) == (tp_size == 2) {
            println!("{served} on {tp_size} ranks");
            model_refuses(&served, tp_size, fault, &check);
        }
    }
}

/// Both models from their folders.
fn folders() -> impl Iterator<Item = String> {
    let folders = sources().into_iter();
    folders
        .filter(|(served, model)| served != model)
        .map(|(served, _)| served)
}

fn model_refuses(model: &str, tp_size: u32, fault: InjectedFault, check: &impl Fn(&EngineError)) {
    let Some(library) = library() else { return };
    let _one = one_at_a_time();
    let mut options = options(&library, model, tp_size);
    options.settings.inject_fault = Some(fault);
    let began = Instant::now();
    let error = Runtime::start_with(options.clone())
        .err()
        .expect("the ranks disagree");
    let taken = began.elapsed();
    check(&error);
    assert!(
        taken < Duration::from_nanos(options.ladder.engine_ns()),
        "{taken:?}: {error}"
    );
    expect_no_thread_left();
    options.settings.inject_fault = None;
    a_fresh_one_works(options);
}

#[test]
fn other_widths_are_named_and_refused() {
    for tp_size in [2, 4] {
        refuses(
            tp_size,
            InjectedFault {
                tp_rank: 1,
                kind: FaultKind::Widths,
            },
            |error| {
                assert_eq!(
                    error,
                    &EngineError::Refused(
                        "[301] rank 1 covers widths [6]; rank 0 covers [6, 12]".into()
                    )
                );
            },
        );
    }
}

#[test]
fn another_catalogue_is_named_and_refused() {
    refuses(
        4,
        InjectedFault {
            tp_rank: 3,
            kind: FaultKind::Catalogue,
        },
        |error| {
            let EngineError::Refused(message) = error else {
                panic!("{error:?}")
            };
            assert!(
                message.starts_with("[304] rank 3 carries kernel catalogue 0x"),
                "{message}"
            );
            assert!(
                message.contains("; rank 0 carries kernel catalogue 0x"),
                "{message}"
            );
        },
    );
}

#[test]
fn a_rank_that_never_answers_is_named_within_the_deadline() {
    for (tp_size, tp_rank) in [(2, 0), (4, 2)] {
        refuses(
            tp_size,
            InjectedFault {
                tp_rank,
                kind: FaultKind::Silent,
            },
            |error| {
                let EngineError::Fault(message) = error else {
                    panic!("{error:?}")
                };
                let expected = format!(
                    "[401] rank {tp_rank} did not answer the vote of epoch 1 by the deadline"
                );
                assert!(message.starts_with(&expected), "{message}");
            },
        );
    }
}

/// The others have recorded their launches and wait in the vote behind it; without the ballot of
/// the one that failed they would until the engine's deadline.
#[test]
fn a_rank_that_fails_late_in_its_capture_ends_its_peers_at_once() {
    for (tp_size, tp_rank) in [(2, 1), (4, 2)] {
        let kind = FaultKind::Capture;
        refuses(tp_size, InjectedFault { tp_rank, kind }, |error| {
            let expected = format!("rank {tp_rank} failed in capture, as --inject-fault asks");
            let EngineError::Fault(message) = error else {
                panic!("{error:?}")
            };
            assert!(message.starts_with(&expected), "{message}");
        });
    }
}

/// Falls silent at a step: a covered one ends in the kernels' deadline, a plain one in the vote's.
fn silent_at(step: u64, check: impl Fn(&str)) {
    for model in folders() {
        println!("{model}");
        model_silent_at(&model, step, &check);
    }
}

fn model_silent_at(model: &str, step: u64, check: &impl Fn(&str)) {
    let Some(library) = library() else { return };
    let _one = one_at_a_time();
    let mut options = options(&library, model, 2);
    let ms = |ms: u64| ms * 1_000_000;
    // Plain steps vote with the collective's budget, so it is short here too.
    options.ladder =
        lowlat_core::DeadlineLadder::new(ms(2_000), ms(4_000), ms(5_000), ms(30_000)).unwrap();
    options.lapse = Some(Lapse {
        tp_rank: 1,
        first_step: step,
        kind: LapseKind::Silent,
    });
    let mut runtime = Runtime::start_with(options.clone()).unwrap();
    let mut result = StepResult::new();
    let extend = plan(StepMode::Extend, 0, &[5, 9, 11, 40]);
    let verify = plan(StepMode::Verify, 4, &[7]);
    let began = Instant::now();
    let error = match step {
        0 => runtime.run(&extend, &mut result).unwrap_err(),
        _ => {
            runtime.run(&extend, &mut result).unwrap();
            runtime.run(&verify, &mut result).unwrap_err()
        }
    };
    assert!(
        began.elapsed() < Duration::from_nanos(options.ladder.engine_ns()),
        "{error}"
    );
    let EngineError::Fault(message) = &error else {
        panic!("{error:?}")
    };
    check(message);
    // A fault is for good, and leaves no thread.
    assert_eq!(runtime.run(&extend, &mut result), Err(error));
    expect_no_thread_left();
    drop(runtime);
    options.lapse = None;
    a_fresh_one_works(options);
}

#[test]
fn a_rank_that_leaves_before_a_plain_step_is_named() {
    silent_at(0, |message| {
        assert!(
            message.starts_with("[401] rank 1 did not answer the vote"),
            "{message}"
        );
    });
}

#[test]
fn a_rank_that_leaves_before_a_covered_step_is_named_by_the_kernels() {
    silent_at(1, |message| {
        assert!(
            message.starts_with("rank 0 waited 2000 ms for rank 1 in embed_sum"),
            "{message}"
        );
        assert!(
            message.contains("[402] rank 0: a wait in a kernel passed its deadline"),
            "{message}"
        );
        assert!(message.contains("waited for rank 1"), "{message}");
    });
}

#[test]
fn a_rank_that_says_another_token_is_named_with_its_step() {
    for model in folders() {
        says_another_token(&model);
    }
}

fn says_another_token(model: &str) {
    let Some(library) = library() else { return };
    let _one = one_at_a_time();
    let mut options = options(&library, model, 4);
    options.lapse = Some(Lapse {
        tp_rank: 2,
        first_step: 1,
        kind: LapseKind::Differs,
    });
    let mut runtime = Runtime::start_with(options).unwrap();
    let mut result = StepResult::new();
    let extend = plan(StepMode::Extend, 0, &[5, 9, 11, 40]);
    runtime.run(&extend, &mut result).unwrap();
    let verify = plan(StepMode::Verify, 4, &[result.tokens[0]]);
    let error = runtime.run(&verify, &mut result).unwrap_err();
    let EngineError::Fault(message) = &error else {
        panic!("{error:?}")
    };
    assert!(
        message.starts_with("rank 2 and rank 0 differ at step 1: rank 2 has tokens"),
        "{message}"
    );
    assert_eq!(runtime.run(&verify, &mut result), Err(error));
    expect_no_thread_left();
}

/// The launch runs on in memory that its rank has given up: seen to end the process by SIGSEGV
/// when the memory went with the rank, and not with the model.
#[test]
fn a_launch_that_outlives_its_rank_keeps_its_memory() {
    let Some(library) = library() else { return };
    let _one = one_at_a_time();
    let mut options = options(&library, "tiny-v41", 1);
    // One rank waits for nobody, so only the host's patience ends, in the middle of a launch. The
    // buffers are so large that giving them back unmaps them.
    options.settings.max_rows = 1 << 16;
    options.settings.max_batch = 8;
    options.ladder = lowlat_core::DeadlineLadder::new(1, 2, 3, 30_000_000_000).unwrap();
    let error = Runtime::start_with(options).err().expect("no patience");
    let EngineError::Fault(message) = &error else {
        panic!("{error:?}")
    };
    assert!(
        message.starts_with("rank 0 is still running after 0 ms"),
        "{message}"
    );
    expect_no_thread_left();
}

#[test]
fn a_rank_alone_has_nobody_to_disagree_with() {
    let Some(library) = library() else { return };
    let mut options = options(&library, "tiny-v41", 1);
    options.settings.inject_fault = Some(InjectedFault {
        tp_rank: 0,
        kind: FaultKind::Silent,
    });
    let error = Runtime::start_with(options).err().expect("refused");
    assert!(
        error.to_string().contains("--tp is 1 (--tp 2 or more)"),
        "{error}"
    );
    assert_eq!(error.exit_code(), 1);
}
