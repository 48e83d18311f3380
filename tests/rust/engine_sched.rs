//! Scheduling and replaying, with a model whose every token depends on every token before it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use lowlat_engine::EngineError;
use lowlat_engine::replay::{Clock, Outcome, ReplaySettings, replay};
use lowlat_engine::sched::{NewRequest, Scheduler, SchedulerSettings, simulated_accept};
use lowlat_engine::session::Pace;
use lowlat_engine::step::{StepMode, StepPlan, StepResult, StepRunner};
use lowlat_engine::trace::{self, Trace};
use proptest::prelude::*;

#[path = "support/fake_model.rs"]
mod fake_model;
#[path = "support/traces.rs"]
mod traces;

use fake_model::FakeModel;

const MS: u64 = 1_000_000;

/// A clock that moves when a step runs or someone sleeps.
#[derive(Clone, Default)]
struct FakeClock(Rc<Cell<u64>>);

impl Clock for FakeClock {
    fn now_ns(&mut self) -> u64 {
        self.0.get()
    }

    fn sleep_until(&mut self, at_ns: u64) {
        assert!(at_ns > self.0.get(), "nobody sleeps for the past");
        self.0.set(at_ns);
    }
}

fn settings() -> ReplaySettings {
    ReplaySettings {
        limit_input: None,
        limit_output: None,
        sessions: 1,
        pace: Pace::Asap,
        seed: 0,
        scheduler: SchedulerSettings {
            max_batch: 8,
            prefill_chunk: 128,
            prefix_cache: true,
            temperature: 0.0,
            simulate_acceptance: None,
            seed: 0,
        },
    }
}

fn parse(id: &str, requests: &str) -> Trace {
    let text = format!(r#"{{"id": "{id}", "block_size": 4, "requests": [{requests}]}}"#);
    trace::parse(&format!("{id}.json"), id, text.as_bytes()).unwrap()
}

/// Three users; the first has two subagents.
fn users() -> Vec<Trace> {
    vec![
        parse(
            "a",
            r#"{"t": 0, "type": "n", "in": 9, "out": 7, "hash_ids": [1, 2]},
               {"t": 1, "type": "subagent", "requests": [
                   {"t": 0, "type": "n", "in": 21, "out": 3, "hash_ids": [1, 2, 3, 4, 5]},
                   {"t": 1, "type": "n", "in": 30, "out": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}]},
               {"t": 1, "type": "subagent", "requests": [
                   {"t": 0, "type": "n", "in": 22, "out": 19, "hash_ids": [1, 2, 3, 4, 9]}]},
               {"t": 9, "type": "n", "in": 33, "out": 12,
                "hash_ids": [1, 2, 3, 8, 9, 10, 11, 12]}"#,
        ),
        parse(
            "b",
            r#"{"t": 0, "type": "s", "in": 64, "out": 30},
               {"t": 1, "type": "s", "in": 1, "out": 2}"#,
        ),
        parse(
            "c",
            r#"{"t": 0, "type": "s", "in": 17, "out": 5, "hash_ids": [1, 2, 3, 4]}"#,
        ),
    ]
}

fn outputs(outcome: &Outcome) -> Vec<Vec<i32>> {
    outcome
        .metrics
        .requests
        .iter()
        .map(|request| request.output.clone())
        .collect()
}

fn run(traces: &[Trace], settings: &ReplaySettings, model: &mut FakeModel) -> Outcome {
    let clock = FakeClock::default();
    let step_clock = clock.clone();
    model.on_step = Box::new(move |_| step_clock.0.set(step_clock.0.get() + MS));
    replay(traces, settings, model, &mut clock.clone(), &mut |_| {}).unwrap()
}

/// What the model says when nothing is shared, batched, chunked or drafted.
fn plain_outputs(traces: &[Trace]) -> Vec<Vec<i32>> {
    let mut settings = settings();
    settings.scheduler.max_batch = 1;
    settings.scheduler.prefill_chunk = 4096;
    settings.scheduler.prefix_cache = false;
    outputs(&run(traces, &settings, &mut FakeModel::new(64, 4, 0)))
}

#[test]
fn tokens_do_not_depend_on_how_they_are_scheduled() {
    let traces = users();
    let plain = plain_outputs(&traces);
    let wanted: Vec<usize> = traces
        .iter()
        .flat_map(|trace| trace.agent.requests())
        .map(|request| request.output_tokens)
        .collect();
    assert_eq!(plain.iter().map(Vec::len).collect::<Vec<_>>(), wanted);
    for sessions in [1, 2, 8] {
        for prefill_chunk in [1, 3, 16, 128] {
            for prefix_cache in [true, false] {
                for num_drafts in [0, 5] {
                    // 25 pages hold just the largest request with its drafts.
                    for num_pages in [25, 400] {
                        let mut settings = settings();
                        settings.sessions = sessions;
                        settings.scheduler.prefill_chunk = prefill_chunk;
                        settings.scheduler.prefix_cache = prefix_cache;
                        let mut model = FakeModel::new(num_pages, 4, num_drafts);
                        let outcome = run(&traces, &settings, &mut model);
                        assert_eq!(
                            outputs(&outcome),
                            plain,
                            "{sessions} sessions, chunk {prefill_chunk}, cache {prefix_cache}, \
                             {num_drafts} drafts, {num_pages} pages"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_cache_spares_rows_and_counts_them() {
    let traces = users();
    let outcome = |prefix_cache| {
        let mut settings = settings();
        settings.scheduler.prefix_cache = prefix_cache;
        run(&traces, &settings, &mut FakeModel::new(400, 4, 0))
    };
    let (with, without) = (outcome(true), outcome(false));
    let cached = |outcome: &Outcome| -> Vec<usize> {
        outcome
            .metrics
            .requests
            .iter()
            .map(|request| request.cached_tokens)
            .collect()
    };
    // By hand: the subagents find [1, 2] of the first request, the first one's second request
    // finds all 5 blocks of its first, the parent's last finds [1, 2, 3]; others share nothing.
    assert_eq!(cached(&with), [0, 8, 20, 8, 12, 0, 0, 0]);
    assert_eq!(cached(&without), [0; 8]);
    let prompt_tokens = 9 + 21 + 30 + 22 + 33 + 64 + 1 + 17;
    assert_eq!(without.metrics.extend.rows, prompt_tokens);
    assert_eq!(with.metrics.extend.rows, prompt_tokens - 48);
    assert_eq!(without.cached_pages, 0);
}

#[test]
fn prompt_chunks_and_decoding_take_turns() {
    let traces = [
        parse("a", r#"{"t": 0, "type": "s", "in": 4, "out": 40}"#),
        parse("b", r#"{"t": 0, "type": "s", "in": 64, "out": 1}"#),
    ];
    let mut settings = settings();
    settings.sessions = 2;
    settings.scheduler.prefill_chunk = 8;
    let modes = Rc::new(RefCell::new(Vec::new()));
    let mut model = FakeModel::new(64, 4, 0);
    let seen = modes.clone();
    model.on_step = Box::new(move |plan| seen.borrow_mut().push((plan.mode, plan.token_ids.len())));
    replay(
        &traces,
        &settings,
        &mut model,
        &mut FakeClock::default(),
        &mut |_| {},
    )
    .unwrap();
    let modes = modes.borrow();
    // The first chunk holds all of a and the start of b; 60 rows of b are left: 8 chunks.
    assert_eq!(modes[0], (StepMode::Extend, 8));
    for step in 1..=16 {
        let mode = if step % 2 == 1 {
            StepMode::Decode
        } else {
            StepMode::Extend
        };
        assert_eq!(modes[step].0, mode, "step {step}");
    }
    assert_eq!(modes[16], (StepMode::Extend, 4));
    assert!(
        modes[17..]
            .iter()
            .all(|&(mode, rows)| mode == StepMode::Decode && rows == 1)
    );
    assert_eq!(modes.len(), 1 + 8 + 39);
}

#[test]
fn refuses_a_request_that_can_never_fit_before_the_first_step() {
    let traces = users();
    let refused = |model: &mut FakeModel, settings: &ReplaySettings| {
        model.on_step = Box::new(|_| panic!("no step runs"));
        replay(
            &traces,
            settings,
            model,
            &mut FakeClock::default(),
            &mut |_| {},
        )
        .unwrap_err()
    };
    // The largest is b's first: 64 + 30 - 1 + 5 = 98 positions = 25 pages.
    let error = refused(&mut FakeModel::new(24, 4, 5), &settings());
    assert_eq!(error.exit_code(), 1);
    let words = "b.json: requests[0]: 64 prompt and 30 output tokens need 25 pages of 4 tokens; \
                 the pool has 24 (--kv-tokens, --limit-input, --limit-output)";
    assert_eq!(error.to_string(), words);
    run(&traces, &settings(), &mut FakeModel::new(25, 4, 5));

    let mut wide = settings();
    wide.scheduler.max_batch = 9;
    let error = refused(&mut FakeModel::new(64, 4, 5), &wide).to_string();
    assert_eq!(error, "--max-batch is 9; this model was built for 1 to 8");
    let mut simulated = settings();
    simulated.scheduler.simulate_acceptance = Some(3.5);
    let error = refused(&mut FakeModel::new(64, 4, 0), &simulated).to_string();
    assert!(error.contains("--simulate-acceptance is 3.5") && error.contains("--speculative on"));
    simulated.scheduler.simulate_acceptance = Some(6.5);
    let error = refused(&mut FakeModel::new(64, 4, 5), &simulated).to_string();
    assert!(error.contains("needs 1 to 6"));
    simulated.scheduler.simulate_acceptance = Some(f64::NAN);
    assert_eq!(
        refused(&mut FakeModel::new(64, 4, 5), &simulated).exit_code(),
        1
    );
}

#[test]
fn caps_cut_prompts_and_outputs() {
    let mut settings = settings();
    settings.limit_input = Some(10);
    settings.limit_output = Some(4);
    let outcome = run(&users(), &settings, &mut FakeModel::new(64, 4, 5));
    let lengths: Vec<usize> = outputs(&outcome).iter().map(Vec::len).collect();
    assert_eq!(lengths, [4, 3, 1, 4, 4, 4, 2, 4]);
    // 9 + 10 + 10 + 10 + 10 + 10 + 1 + 10, less [1, 2] found four times.
    assert_eq!(outcome.metrics.extend.rows, 70 - 32);
}

#[test]
fn counts_what_was_accepted_cut_and_covered() {
    let mut model = FakeModel::new(64, 4, 5);
    let answers = Rc::new(Cell::new(0));
    let seen = answers.clone();
    let clock = FakeClock::default();
    model.draft_luck = 100;
    model.on_step = Box::new(move |plan| {
        seen.set(seen.get() + usize::from(plan.mode == StepMode::Verify));
    });
    let trace = [parse("a", r#"{"t": 0, "type": "s", "in": 5, "out": 9}"#)];
    let outcome = replay(
        &trace,
        &settings(),
        &mut model,
        &mut clock.clone(),
        &mut |_| {},
    )
    .unwrap();
    // The first token comes with the prompt; 8 are left: 6, then 2 of 6.
    let metrics = &outcome.metrics;
    assert_eq!(answers.get(), 2);
    assert_eq!(metrics.accepted_histogram, [0, 0, 0, 0, 0, 2]);
    assert_eq!(metrics.acceptance_length(), Some(6.0));
    assert_eq!(metrics.cut_tokens, 4);
    assert_eq!((metrics.verify.steps, metrics.verify.rows), (2, 12));
    assert_eq!(metrics.target.covered, 2);
    assert_eq!(metrics.target.plain.get("extend"), Some(&1));
    assert_eq!(metrics.draft.covered, 2);
    assert_eq!(metrics.draft.plain.len(), 0);
}

#[test]
fn simulated_acceptance_has_the_mean_that_was_asked_for() {
    let steps = 2_000;
    let drawn: Vec<u32> = (0..steps)
        .map(|step| simulated_accept(3.51, 0, step) + 1)
        .collect();
    assert!(drawn.iter().all(|tokens| [3, 4].contains(tokens)));
    let mean = f64::from(drawn.iter().sum::<u32>()) / steps as f64;
    assert!((mean - 3.51).abs() <= 0.04, "{mean}");
    for (length, least, most) in [(1.9, 1.86, 1.94), (2.25, 2.21, 2.29), (6.0, 6.0, 6.0)] {
        let tokens: u32 = (0..steps)
            .map(|step| simulated_accept(length, 7, step) + 1)
            .sum();
        let mean = f64::from(tokens) / steps as f64;
        assert!((least..=most).contains(&mean), "{mean}, not {length}");
    }
    // Draws of neighbouring steps are independent: a run of equal ones is about two long.
    let changes = drawn.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!((900..1100).contains(&changes), "{changes}");

    let mut simulated = settings();
    simulated.scheduler.simulate_acceptance = Some(3.51);
    let mut model = FakeModel::new(4096, 4, 5);
    let trace = [parse("a", r#"{"t": 0, "type": "s", "in": 5, "out": 7020}"#)];
    let outcome = run(&trace, &simulated, &mut model);
    let length = outcome.metrics.acceptance_length().unwrap();
    assert!((length - 3.51).abs() <= 0.04, "{length}");
    assert_eq!(outcome.metrics.requests[0].output.len(), 7020);
}

#[test]
fn times_count_from_when_a_request_could_start() {
    let traces = [parse(
        "a",
        r#"{"t": 0, "type": "s", "in": 4, "out": 3},
           {"t": 5, "type": "s", "in": 8, "out": 1, "think_time": 2}"#,
    )];
    let mut paced = settings();
    paced.pace = Pace::Trace;
    paced.scheduler.prefill_chunk = 4;
    let outcome = run(&traces, &paced, &mut FakeModel::new(64, 4, 0));
    let [first, second] = outcome.metrics.requests.as_slice() else {
        panic!("two requests")
    };
    // Each step takes 1 ms: prompt, two decodes; then 2 s of thought; two chunks.
    assert_eq!(
        (first.submitted_at, first.first_token_at, first.finished_at),
        (0, MS, 3 * MS)
    );
    assert_eq!(second.submitted_at, 2003 * MS);
    assert_eq!(second.first_token_at, 2005 * MS);
    assert_eq!(second.finished_at, 2005 * MS);
    assert_eq!(first.ttft_s(), 0.001);
    assert_eq!(first.e2e_s_per_output_token(), 0.001);
    assert_eq!(first.inter_token_s(), Some(0.001));
    assert_eq!(second.inter_token_s(), None);
    assert_eq!(outcome.metrics.wall_ns, 2005 * MS);
    let asap = run(&traces, &settings(), &mut FakeModel::new(64, 4, 0));
    assert_eq!(asap.metrics.requests[1].submitted_at, 3 * MS);

    // A request whose time comes in the middle of someone else's step has waited since then.
    let beside = parse("b", r#"{"t": 0, "type": "s", "in": 4, "out": 3000}"#);
    paced.sessions = 2;
    let thinks = parse(
        "a",
        r#"{"t": 0, "type": "s", "in": 4, "out": 3},
           {"t": 5, "type": "s", "in": 8, "out": 1, "think_time": 0.0005}"#,
    );
    let outcome = run(&[thinks, beside], &paced, &mut FakeModel::new(1024, 4, 0));
    let [first, second] = &outcome.metrics.requests[..2] else {
        panic!("three requests")
    };
    assert_eq!(second.submitted_at, first.finished_at + MS / 2);
    assert_eq!(second.first_token_at % MS, 0);
}

#[test]
fn a_fault_ends_the_replay_as_a_fault() {
    let mut model = FakeModel::new(64, 4, 5);
    model.fails_at = Some(3);
    let clock = &mut FakeClock::default();
    let error = replay(&users(), &settings(), &mut model, clock, &mut |_| {}).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("rank 1"));
}

#[test]
fn an_answer_that_does_not_fit_the_plan_is_a_bug_not_a_token() {
    let model = FakeModel::new(64, 4, 5);
    let answer = |tokens: Vec<i32>, counts: Vec<u32>| {
        let mut scheduler = Scheduler::new(settings().scheduler, model.info()).unwrap();
        scheduler.submit(NewRequest {
            uid: 0,
            prompt: vec![3, 4],
            output_tokens: 5,
        });
        let mut plan = StepPlan::new();
        assert!(scheduler.plan(&mut plan));
        let mut result = StepResult::new();
        (result.tokens, result.counts) = (tokens, counts);
        scheduler.commit(&plan, &result, &mut Vec::new(), &mut Vec::new())
    };
    assert_eq!(answer(vec![9], vec![1]), Ok(()));
    for (tokens, counts) in [
        (vec![], vec![0]),
        (vec![9, 9], vec![2]),
        (vec![9], vec![]),
        (vec![9, 9], vec![1]),
        (vec![9], vec![1, 0]),
    ] {
        assert!(matches!(answer(tokens, counts), Err(EngineError::Bug(_))));
    }
}

/// A request of a random load: prompt length, shared prefix length, output.
type Load = Vec<(usize, usize, usize)>;

proptest! {
    // Every load ends (nothing deadlocks or starves), with the tokens of the plain run, whatever
    // the pool. The model itself objects to a wrong page, position, history or ring. Mutations
    // seen to fail: pages taken before the prefix is held; `in_cache` advanced by the cut tokens;
    // state slots not given back; one page less reserved.
    #[test]
    fn every_load_ends_with_the_right_tokens(
        load in prop::collection::vec((1..40usize, 0..40usize, 1..20usize), 1..14) ,
        num_pages in 17..60usize,
        max_batch in 1..9usize,
        prefill_chunk in 1..50usize,
        num_drafts in prop_oneof![Just(0usize), Just(5usize)],
        prefix_cache in any::<bool>(),
    ) {
        let load: Load = load;
        let mut settings = settings().scheduler;
        settings.max_batch = max_batch;
        settings.prefill_chunk = prefill_chunk;
        settings.prefix_cache = prefix_cache;
        let mut model = FakeModel::new(num_pages, 4, num_drafts);
        let outputs = drive(&load, settings, &mut model);
        for (request, output) in load.iter().zip(&outputs) {
            let mut alone = settings;
            alone.prefill_chunk = 4096;
            alone.prefix_cache = false;
            let expected = drive(&vec![*request], alone, &mut FakeModel::new(60, 4, 0));
            prop_assert_eq!(&expected[0], output);
        }
    }
}

fn drive(load: &Load, settings: SchedulerSettings, model: &mut FakeModel) -> Vec<Vec<i32>> {
    let mut scheduler = Scheduler::new(settings, model.info()).unwrap();
    let most: usize = load.iter().map(|(input, _, output)| input + output).sum();
    for (uid, &(input, shared, output)) in load.iter().enumerate() {
        // Shared tokens first; the rest is told apart by the sizes, so that alone and together it
        // is the same prompt.
        let own = (input * 31 + shared * 7 + output) as i32;
        let token = |idx: usize| {
            if idx < shared {
                3 + idx as i32
            } else {
                100 + (own + idx as i32) % 300
            }
        };
        let prompt = (0..input).map(token).collect();
        scheduler.submit(NewRequest {
            uid: uid as u32,
            prompt,
            output_tokens: output,
        });
    }
    let (mut plan, mut result) = (StepPlan::new(), StepResult::new());
    let mut outputs = vec![Vec::new(); load.len()];
    let mut steps = 0;
    while scheduler.plan(&mut plan) {
        model.run(&plan, &mut result).unwrap();
        let mut finished = Vec::new();
        scheduler
            .commit(&plan, &result, &mut Vec::new(), &mut finished)
            .unwrap();
        for one in finished {
            outputs[one.uid as usize] = one.output;
        }
        steps += 1;
        assert!(steps <= 2 * most, "each step runs a row of someone");
    }
    assert!(scheduler.is_idle());
    assert_eq!(
        scheduler.cache().num_available(),
        scheduler.cache().num_pages(),
        "no page is lost"
    );
    outputs
}

#[test]
fn replays_the_real_traces_with_their_counts() {
    let Some(folder) = traces::real_traces() else {
        return;
    };
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .collect();
    paths.sort();
    let traces: Vec<Trace> = paths
        .iter()
        .map(|path| trace::read(path).unwrap())
        .collect();
    let mut settings = settings();
    settings.sessions = 8;
    settings.limit_output = Some(64);
    settings.limit_input = Some(2048);
    let outcome = run(&traces, &settings, &mut FakeModel::new(1024, 64, 5));
    let requests = traces.iter().flat_map(|trace| trace.agent.requests());
    let wanted: Vec<usize> = requests
        .map(|request| request.output_tokens.min(64))
        .collect();
    assert_eq!(
        outputs(&outcome).iter().map(Vec::len).collect::<Vec<_>>(),
        wanted
    );
    assert!(
        outcome
            .metrics
            .requests
            .iter()
            .any(|request| request.cached_tokens > 1000)
    );
}
