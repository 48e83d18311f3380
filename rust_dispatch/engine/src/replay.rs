//! Replays traces on a runner: sessions in, steps through, metrics out.

use crate::EngineError;
use crate::metrics::Metrics;
use crate::sched::{NewRequest, Scheduler, SchedulerSettings};
use crate::session::{Pace, Session};
use crate::step::{StepPlan, StepResult, StepRunner};
use crate::tokens::Tokens;
use crate::trace::{Trace, TraceRequest};

/// How to replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplaySettings {
    /// Tokens kept of each prompt.
    pub limit_input: Option<usize>,
    /// Tokens generated a request at most.
    pub limit_output: Option<usize>,
    /// Traces that are replayed at a time.
    pub sessions: usize,
    /// Which times to keep.
    pub pace: Pace,
    /// Seed of the synthesised prompts.
    pub seed: u64,
    /// How to batch.
    pub scheduler: SchedulerSettings,
}

impl ReplaySettings {
    /// Prompt tokens of the request after the cap.
    #[must_use]
    pub fn input_tokens(&self, request: &TraceRequest) -> usize {
        self.limit_input.map_or(request.input_tokens, |limit| {
            limit.min(request.input_tokens)
        })
    }

    /// Tokens to generate for the request after the cap.
    #[must_use]
    pub fn output_tokens(&self, request: &TraceRequest) -> usize {
        self.limit_output.map_or(request.output_tokens, |limit| {
            limit.min(request.output_tokens)
        })
    }
}

/// Where the time comes from; a test brings its own.
pub trait Clock {
    /// Nanoseconds since some fixed point; never less than before.
    fn now_ns(&mut self) -> u64;
    /// Returns at `at_ns` or a little later.
    fn sleep_until(&mut self, at_ns: u64);
}

/// What a replay gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Times, tokens and counts; requests of all traces in order, subagents where they start.
    pub metrics: Metrics,
    /// Pages of the pool that were evicted from the prefix cache.
    pub evicted_pages: u64,
    /// Pages that the prefix cache holds at the end.
    pub cached_pages: usize,
}

/// Replays `traces` in order, `settings.sessions` at a time. `on_tokens` is told how many tokens
/// of prompts and outputs have been dealt with since it was last called.
///
/// # Errors
/// [`EngineError::Refused`] before the first step when a request can never fit; whatever the
/// runner fails with.
pub fn replay(
    traces: &[Trace],
    settings: &ReplaySettings,
    runner: &mut dyn StepRunner,
    clock: &mut dyn Clock,
    on_tokens: &mut dyn FnMut(u64),
) -> Result<Outcome, EngineError> {
    let mut scheduler = Scheduler::new(settings.scheduler, runner.info())?;
    for trace in traces {
        for request in trace.agent.requests() {
            scheduler
                .check_fits(
                    settings.input_tokens(request),
                    settings.output_tokens(request),
                )
                .map_err(|error| {
                    EngineError::Refused(format!("{}: {}: {error}", trace.file, request.path))
                })?;
        }
    }
    let num_requests = traces
        .iter()
        .map(|trace| trace.agent.requests().len())
        .sum();
    let tokens = Tokens::new(runner.info(), settings.seed);
    let mut metrics = Metrics::new(num_requests, runner.info().num_drafts);
    let mut users = Users::new(traces, settings);
    let (mut plan, mut result) = (StepPlan::new(), StepResult::new());
    let (mut progress, mut finished) = (Vec::new(), Vec::new());
    let began_at = clock.now_ns();
    loop {
        users.submit(clock.now_ns(), &tokens, &mut scheduler, &mut metrics);
        if !scheduler.plan(&mut plan) {
            match users.next_ready_at() {
                Some(at_ns) => clock.sleep_until(at_ns),
                None => break,
            }
            continue;
        }
        let planned_at = clock.now_ns();
        result.clear();
        runner.run(&plan, &mut result)?;
        let now_ns = clock.now_ns();
        progress.clear();
        scheduler.commit(&plan, &result, &mut progress, &mut finished)?;
        metrics.step(&plan, &result, &progress, now_ns, now_ns - planned_at);
        let rows: usize = progress
            .iter()
            .map(|one| one.prompt_rows + one.new_tokens)
            .sum();
        let cached: usize = finished.iter().map(|one| one.cached_tokens).sum();
        on_tokens((rows + cached) as u64);
        for one in finished.drain(..) {
            users.finish(one.uid, now_ns);
            metrics.finish(one);
        }
    }
    assert!(
        users.are_done() && scheduler.is_idle(),
        "a session's graph has no cycle"
    );
    metrics.wall_ns = clock.now_ns() - began_at;
    let cache = scheduler.cache();
    Ok(Outcome {
        metrics,
        evicted_pages: cache.num_evicted(),
        cached_pages: cache.num_cached(),
    })
}

/// The traces: those that are being replayed, and those whose turn comes.
struct Users<'a> {
    traces: &'a [Trace],
    settings: &'a ReplaySettings,
    /// Uid of each trace's first request: the same whatever runs beside it.
    first_uids: Vec<u32>,
    next_trace: usize,
    active: Vec<(usize, Session)>,
    ready: Vec<(usize, u64)>,
}

impl<'a> Users<'a> {
    fn new(traces: &'a [Trace], settings: &'a ReplaySettings) -> Self {
        let mut next_uid = 0;
        let first_uids = traces
            .iter()
            .map(|trace| {
                let first_uid = next_uid;
                next_uid += trace.agent.requests().len() as u32;
                first_uid
            })
            .collect();
        Self {
            traces,
            settings,
            first_uids,
            next_trace: 0,
            active: Vec::new(),
            ready: Vec::new(),
        }
    }

    /// Starts sessions up to the limit and submits every request that may start by `now_ns`.
    fn submit(
        &mut self,
        now_ns: u64,
        tokens: &Tokens,
        scheduler: &mut Scheduler,
        metrics: &mut Metrics,
    ) {
        self.active.retain(|(_, session)| !session.is_over());
        while self.active.len() < self.settings.sessions && self.next_trace < self.traces.len() {
            let trace = &self.traces[self.next_trace];
            self.active.push((
                self.next_trace,
                Session::new(trace, self.settings.pace, now_ns),
            ));
            self.next_trace += 1;
        }
        for (trace_idx, session) in &mut self.active {
            let trace = &self.traces[*trace_idx];
            // A file that is replayed twice is two users, who share nothing.
            let copy = self.traces[..*trace_idx]
                .iter()
                .filter(|other| other.id == trace.id)
                .count();
            self.ready.clear();
            session.take_ready(now_ns, &mut self.ready);
            for &(request_idx, ready_at) in &self.ready {
                let request = &session.requests()[request_idx];
                let uid = self.first_uids[*trace_idx] + request_idx as u32;
                metrics.requests[uid as usize].submitted_at = ready_at;
                let input_tokens = self.settings.input_tokens(request);
                scheduler.submit(NewRequest {
                    uid,
                    prompt: tokens.prompt(trace, copy, request, input_tokens),
                    output_tokens: self.settings.output_tokens(request),
                });
            }
        }
    }

    fn finish(&mut self, uid: u32, now_ns: u64) {
        let trace_idx = self
            .first_uids
            .partition_point(|&first_uid| first_uid <= uid)
            - 1;
        let request_idx = (uid - self.first_uids[trace_idx]) as usize;
        let (_, session) = self
            .active
            .iter_mut()
            .find(|(active_idx, _)| *active_idx == trace_idx)
            .expect("a session with a running request is active");
        session.finish(request_idx, now_ns);
    }

    fn next_ready_at(&self) -> Option<u64> {
        self.active
            .iter()
            .filter_map(|(_, session)| session.next_ready_at())
            .min()
    }

    fn are_done(&self) -> bool {
        self.next_trace == self.traces.len()
            && self.active.iter().all(|(_, session)| session.is_over())
    }
}
