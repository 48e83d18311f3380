//! When each request of a session may start.
//!
//! A session is a graph: a request waits for others to finish and, with the trace's timing, until
//! a time has come. The rules:
//!
//! * An agent's requests run one after the other.
//! * A subagent starts when its parent's previous request has finished (at the parent's start
//!   where there is none). Consecutive subagents run side by side.
//! * A parent's request waits for every earlier subagent that ended in the trace, by `t` +
//!   `duration_ms`, before the request's `t`; where the duration is unknown it waits too. The
//!   others run on in the background; the session ends when all requests have finished.
//! * With the trace's timing a request starts `think_time` after its predecessor finished, or as
//!   long after its predecessor's start as in the trace where the file has no `think_time`; a
//!   subagent starts as long after its parent's previous request as in the trace.

use crate::trace::{Agent, Entry, Trace, TraceRequest};

/// How to keep time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// As fast as possible: only the order counts.
    Asap,
    /// Think times and starts as in the trace.
    Trace,
}

/// The earliest time of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NotBefore {
    SessionStart { s: f64 },
    Start { of: usize, s: f64 },
    Finish { of: usize, s: f64 },
}

#[derive(Clone, Debug)]
struct Job {
    /// Requests that must have finished.
    after: Vec<usize>,
    not_before: NotBefore,
    started_at: Option<u64>,
    finished_at: Option<u64>,
}

/// The requests of one session and how far they have come. Owns no clock: times in nanoseconds
/// are given by the caller.
#[derive(Clone, Debug)]
pub struct Session {
    jobs: Vec<Job>,
    requests: Vec<TraceRequest>,
    pace: Pace,
    began_at: u64,
    num_finished: usize,
}

impl Session {
    /// The session of `trace`, begun at `now_ns`.
    #[must_use]
    pub fn new(trace: &Trace, pace: Pace, now_ns: u64) -> Self {
        let mut builder = Builder {
            jobs: Vec::new(),
            requests: Vec::new(),
        };
        builder.agent(&trace.agent, &[], None, 0.0);
        let Builder { jobs, requests } = builder;
        Self {
            jobs,
            requests,
            pace,
            began_at: now_ns,
            num_finished: 0,
        }
    }

    /// All requests, in the order of [`Agent::requests`]; other methods use indexes into it.
    #[must_use]
    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    /// Takes the requests that may start by now: appends each, once, to `out_ready` with the time
    /// since when it may.
    pub fn take_ready(&mut self, now_ns: u64, out_ready: &mut Vec<(usize, u64)>) {
        for job_idx in 0..self.jobs.len() {
            if let Some(ready_at) = self
                .ready_at(job_idx)
                .filter(|&ready_at| ready_at <= now_ns)
            {
                self.jobs[job_idx].started_at = Some(ready_at);
                out_ready.push((job_idx, ready_at));
            }
        }
    }

    /// When the next request may start that waits for nothing but time.
    #[must_use]
    pub fn next_ready_at(&self) -> Option<u64> {
        (0..self.jobs.len())
            .filter_map(|job_idx| self.ready_at(job_idx))
            .min()
    }

    /// Notes that a started request has finished.
    pub fn finish(&mut self, job_idx: usize, now_ns: u64) {
        let job = &mut self.jobs[job_idx];
        assert!(
            job.started_at.is_some() && job.finished_at.is_none(),
            "finishes once, started"
        );
        job.finished_at = Some(now_ns);
        self.num_finished += 1;
    }

    /// Whether every request has finished.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.num_finished == self.jobs.len()
    }

    /// When the request may start, once everything it waits for has finished.
    fn ready_at(&self, job_idx: usize) -> Option<u64> {
        let job = &self.jobs[job_idx];
        if job.started_at.is_some() {
            return None;
        }
        let mut ready_at = self.began_at;
        for &before in &job.after {
            ready_at = ready_at.max(self.jobs[before].finished_at?);
        }
        if self.pace == Pace::Asap {
            return Some(ready_at);
        }
        let not_before = match job.not_before {
            NotBefore::SessionStart { s } => self.began_at.saturating_add(nanoseconds(s)),
            NotBefore::Start { of, s } => self.jobs[of].started_at?.saturating_add(nanoseconds(s)),
            NotBefore::Finish { of, s } => {
                self.jobs[of].finished_at?.saturating_add(nanoseconds(s))
            }
        };
        Some(ready_at.max(not_before))
    }
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

struct Builder {
    jobs: Vec<Job>,
    requests: Vec<TraceRequest>,
}

/// A subagent that its parent has not waited for yet.
struct Background {
    jobs: std::ops::Range<usize>,
    ends_at: Option<f64>,
}

impl Builder {
    /// Adds an agent's jobs. `after`: what its first request waits for. `parent`: the request that
    /// its start counts from, `start_s` seconds after that one's start (or the session's).
    fn agent(&mut self, agent: &Agent, after: &[usize], parent: Option<usize>, start_s: f64) {
        let from_parent = |s: f64| match parent {
            Some(of) => NotBefore::Start { of, s: start_s + s },
            None => NotBefore::SessionStart { s: start_s + s },
        };
        let mut previous: Option<(usize, f64)> = None;
        let mut background: Vec<Background> = Vec::new();
        for entry in &agent.entries {
            let mut waits_for = match previous {
                Some((job_idx, _)) => vec![job_idx],
                None => after.to_vec(),
            };
            match entry {
                Entry::Request(request) => {
                    background.retain(|subagent| {
                        let waited = subagent.ends_at.is_none_or(|ends_at| ends_at <= request.t);
                        if waited {
                            waits_for.extend(subagent.jobs.clone());
                        }
                        !waited
                    });
                    let not_before = match (previous, request.think_time) {
                        (Some((of, _)), Some(s)) => NotBefore::Finish { of, s },
                        (Some((of, t)), None) => NotBefore::Start {
                            of,
                            s: request.t - t,
                        },
                        (None, _) => from_parent(request.t),
                    };
                    previous = Some((self.jobs.len(), request.t));
                    self.jobs.push(Job {
                        after: waits_for,
                        not_before,
                        started_at: None,
                        finished_at: None,
                    });
                    self.requests.push(request.clone());
                }
                Entry::Subagent(subagent) => {
                    let first = self.jobs.len();
                    let (origin, wait_s) = match previous {
                        Some((job_idx, t)) => (Some(job_idx), subagent.t - t),
                        None => (parent, start_s + subagent.t),
                    };
                    self.agent(&subagent.agent, &waits_for, origin, wait_s);
                    background.push(Background {
                        jobs: first..self.jobs.len(),
                        ends_at: subagent
                            .duration_s
                            .map(|duration_s| subagent.t + duration_s),
                    });
                }
            }
        }
    }
}
