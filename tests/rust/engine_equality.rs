//! Greedy tokens are the same, token for token, whatever serves them: the persistent schedule or
//! the plain path, one session or eight, small prompt chunks or large, with the prefix cache or
//! without, speculative or not, from a checkpoint folder or built in; and on 1, 2 and 4 ranks each
//! rank has the same logits bit for bit.

use std::time::Instant;

use lowlat_engine::replay::{Clock, Outcome, ReplaySettings, replay};
use lowlat_engine::sched::SchedulerSettings;
use lowlat_engine::session::Pace;
use lowlat_engine::step::RuntimeSettings;
use lowlat_engine::trace::{self, Trace};

#[path = "support/engine.rs"]
mod support;
use support::{library, settings, sources, start};

struct RealClock(Instant);

impl Clock for RealClock {
    fn now_ns(&mut self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    fn sleep_until(&mut self, at_ns: u64) {
        let now_ns = self.now_ns();
        std::thread::sleep(std::time::Duration::from_nanos(
            at_ns.saturating_sub(now_ns),
        ));
    }
}

/// Eight users. Two turns of the first share pages of the pool, longer than a window, an index
/// selection and the candidate blocks; the others are of all small lengths, and one generates its
/// way across the end of a page and of a block of 128.
fn traces() -> Vec<Trace> {
    let text = |id: &str, requests: &str| {
        let text = format!(r#"{{"id": "{id}", "block_size": 16, "requests": [{requests}]}}"#);
        trace::parse(&format!("{id}.json"), id, text.as_bytes()).unwrap()
    };
    let hashes = |n: usize| (1..=n).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
    let first = format!(
        r#"{{"t": 0, "type": "n", "in": 137, "out": 9, "hash_ids": [{}]}},
           {{"t": 1, "type": "n", "in": 160, "out": 12, "hash_ids": [{}]}}"#,
        hashes(8),
        hashes(10)
    );
    let mut traces = vec![text("long", &first)];
    for (place, (input, output)) in [
        (1, 13),
        (2, 8),
        (31, 10),
        (33, 17),
        (64, 5),
        (65, 11),
        (121, 14),
    ]
    .into_iter()
    .enumerate()
    {
        let request = format!(r#"{{"t": 0, "type": "n", "in": {input}, "out": {output}}}"#);
        traces.push(text(&format!("user{place}"), &request));
    }
    traces
}

/// What may not change the tokens.
#[derive(Clone, Copy)]
struct Arm {
    tp_size: u32,
    plugin: bool,
    sessions: usize,
    chunk: usize,
    prefix_cache: bool,
    speculative: bool,
}

const BASE: Arm = Arm {
    tp_size: 2,
    plugin: true,
    sessions: 8,
    chunk: 128,
    prefix_cache: true,
    speculative: true,
};

fn outcome(library: &std::path::Path, model: &str, arm: Arm) -> Outcome {
    let mut runtime = start(RuntimeSettings {
        model: model.into(),
        tp_size: arm.tp_size,
        plugin: arm.plugin,
        speculative: arm.speculative,
        max_rows: arm.chunk,
        ..settings(library)
    });
    let replay_settings = ReplaySettings {
        limit_input: None,
        limit_output: None,
        sessions: arm.sessions,
        pace: Pace::Asap,
        seed: 5,
        scheduler: SchedulerSettings {
            max_batch: 8,
            prefill_chunk: arm.chunk,
            prefix_cache: arm.prefix_cache,
            temperature: 0.0,
            simulate_acceptance: None,
            seed: 0,
        },
    };
    let mut clock = RealClock(Instant::now());
    replay(
        &traces(),
        &replay_settings,
        &mut runtime,
        &mut clock,
        &mut |_| {},
    )
    .unwrap()
}

fn tokens(outcome: &Outcome) -> Vec<Vec<i32>> {
    outcome
        .metrics
        .requests
        .iter()
        .map(|request| request.output.clone())
        .collect()
}

/// Proved by giving every request the compressor ring 0: one session then differs from eight.
#[test]
fn tokens_do_not_depend_on_what_serves_them() {
    let Some(library) = library() else { return };
    let [v4, v4_folder, v41, v41_folder] = sources().map(|(served, _)| served);
    tokens_of(&library, &v4, &v4_folder);
    tokens_of(&library, &v41, &v41_folder);
}

/// The built-in model sets the tokens; the arms serve it too, or the same model's folder.
fn tokens_of(library: &std::path::Path, model: &str, folder: &str) {
    println!("{model}");
    let base = outcome(library, model, BASE);
    let expected = tokens(&base);
    assert_eq!(
        expected.iter().map(Vec::len).collect::<Vec<_>>(),
        [9, 12, 13, 8, 10, 17, 5, 11, 14]
    );
    // The arms really differ: covered steps, drafts of every fate, and pages that were shared.
    assert!(base.metrics.target.covered > 0);
    assert!(base.metrics.accepted_histogram[0] > 0);
    assert!(base.metrics.accepted_histogram[1..].iter().sum::<u64>() > 0);
    assert!(base.metrics.requests[1].cached_tokens >= 128);

    let arms = [
        (
            "plugin off",
            Arm {
                plugin: false,
                ..BASE
            },
        ),
        (
            "one session",
            Arm {
                sessions: 1,
                ..BASE
            },
        ),
        ("chunks of 16", Arm { chunk: 16, ..BASE }),
        (
            "no prefix cache",
            Arm {
                prefix_cache: false,
                ..BASE
            },
        ),
        (
            "not speculative",
            Arm {
                speculative: false,
                ..BASE
            },
        ),
        (
            "all of it",
            Arm {
                plugin: false,
                sessions: 1,
                chunk: 16,
                prefix_cache: false,
                speculative: false,
                ..BASE
            },
        ),
    ];
    for (place, (name, arm)) in arms.into_iter().enumerate() {
        let served = [folder, model][place % 2];
        let run = outcome(library, served, arm);
        if !arm.plugin {
            assert_eq!(run.metrics.target.covered, 0, "{name}");
        }
        if !arm.prefix_cache {
            assert_eq!(run.metrics.requests[1].cached_tokens, 0, "{name}");
        }
        assert_eq!(tokens(&run), expected, "{name} of {served}");
    }
}

/// The runtime compares every rank's tokens, drafts and logits at each step, and a difference is
/// a fault; so a run that ends is the proof. Sums of other ranks round otherwise, so tokens may
/// differ from one size to another, but not so much that no request is alike.
#[test]
fn ranks_are_equal_on_one_two_and_four() {
    let Some(library) = library() else { return };
    for (served, model) in sources() {
        if served == model {
            continue;
        }
        let runs: Vec<_> = [1, 2, 4]
            .map(|tp_size| tokens(&outcome(&library, &served, Arm { tp_size, ..BASE })))
            .into();
        for run in &runs[1..] {
            let alike = run
                .iter()
                .zip(&runs[0])
                .filter(|(a, b)| a[0] == b[0])
                .count();
            assert!(alike >= 5, "{model}: {alike} of 9 first tokens are alike");
        }
    }
}
