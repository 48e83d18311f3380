//! What a replay measured. Owns no clock: times are nanoseconds that the caller read.

use std::collections::BTreeMap;

use crate::histogram::Histogram;
use crate::sched::{Finished, Progress};
use crate::step::{StepMode, StepPath, StepPlan, StepResult};

/// Steps of one mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModeCount {
    /// Steps.
    pub steps: u64,
    /// Rows that the target ran, drafts included.
    pub rows: u64,
    /// Time from plan to result, nanoseconds.
    pub busy_ns: u64,
}

/// How the launches of one kind ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathCount {
    /// By the persistent schedule.
    pub covered: u64,
    /// By the plain path, by reason.
    pub plain: BTreeMap<&'static str, u64>,
}

impl PathCount {
    fn add(&mut self, path: StepPath) {
        match path {
            StepPath::Covered => self.covered += 1,
            StepPath::Plain(reason) => *self.plain.entry(reason).or_default() += 1,
        }
    }
}

/// One request's times and counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestMetrics {
    /// When it could have started, had the server been idle.
    pub submitted_at: u64,
    /// When its first token was there.
    pub first_token_at: u64,
    /// When its newest token was there.
    pub last_token_at: u64,
    /// When its last token was there.
    pub finished_at: u64,
    /// Tokens of the prompt that the cache had.
    pub cached_tokens: usize,
    /// What it generated.
    pub output: Vec<i32>,
    /// Verify steps that it took part in.
    pub verify_steps: u64,
    /// Drafts accepted in them, before the cut at its limit.
    pub accepted: u64,
}

impl RequestMetrics {
    /// Submission to first token, seconds.
    #[must_use]
    pub fn ttft_s(&self) -> f64 {
        seconds(self.first_token_at - self.submitted_at)
    }

    /// Submission to last token, seconds.
    #[must_use]
    pub fn e2e_s(&self) -> f64 {
        seconds(self.finished_at - self.submitted_at)
    }

    /// End-to-end seconds per output token; its inverse is the rate that the user saw.
    #[must_use]
    pub fn e2e_s_per_output_token(&self) -> f64 {
        self.e2e_s() / self.output.len() as f64
    }

    /// Mean seconds between tokens; `None` for a single one.
    #[must_use]
    pub fn inter_token_s(&self) -> Option<f64> {
        let gaps = self.output.len().checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(seconds(self.finished_at - self.first_token_at) / gaps as f64)
    }

    /// Mean tokens a verify step, the next token included; `None` where there was none.
    #[must_use]
    pub fn acceptance_length(&self) -> Option<f64> {
        acceptance_length(self.verify_steps, self.accepted)
    }
}

/// Everything counted in one replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// By uid.
    pub requests: Vec<RequestMetrics>,
    /// Prompt steps.
    pub extend: ModeCount,
    /// Steps of one row a request.
    pub decode: ModeCount,
    /// Steps that draft and verify.
    pub verify: ModeCount,
    /// How target steps ran.
    pub target: PathCount,
    /// How drafts ran.
    pub draft: PathCount,
    /// Request-steps by accepted drafts.
    pub accepted_histogram: Vec<u64>,
    /// Tokens that were accepted beyond a request's limit and dropped.
    pub cut_tokens: u64,
    /// Time between tokens, over all requests. Tokens that come together share the time since
    /// the ones before, so that the mean is the real one.
    pub inter_token: Histogram,
    /// Start to end, nanoseconds.
    pub wall_ns: u64,
}

impl Metrics {
    /// Nothing yet, for `num_requests` requests and `num_drafts` drafts a step.
    #[must_use]
    pub fn new(num_requests: usize, num_drafts: usize) -> Self {
        Self {
            requests: vec![RequestMetrics::default(); num_requests],
            accepted_histogram: vec![0; num_drafts + 1],
            ..Self::default()
        }
    }

    /// Takes in one step that ended at `now_ns` and took `busy_ns`.
    pub fn step(
        &mut self,
        plan: &StepPlan,
        result: &StepResult,
        progress: &[Progress],
        now_ns: u64,
        busy_ns: u64,
    ) {
        let num_drafts = self.accepted_histogram.len() as u64 - 1;
        let rows = plan.token_ids.len() as u64;
        let (mode, rows) = match plan.mode {
            StepMode::Extend => (&mut self.extend, rows),
            StepMode::Decode => (&mut self.decode, rows),
            StepMode::Verify => (&mut self.verify, rows * (num_drafts + 1)),
        };
        mode.steps += 1;
        mode.rows += rows;
        mode.busy_ns += busy_ns;
        self.target.add(result.target);
        if let Some(draft) = result.draft {
            self.draft.add(draft);
        }
        for one in progress {
            let request = &mut self.requests[one.uid as usize];
            // The first token of a request comes with the end of its prompt.
            if one.new_tokens > 0 && one.prompt_rows > 0 {
                request.first_token_at = now_ns;
            } else if one.new_tokens > 0 {
                let gap_s = seconds(now_ns - request.last_token_at) / one.new_tokens as f64;
                self.inter_token.add(gap_s, one.new_tokens as u64);
            }
            if one.new_tokens > 0 {
                request.last_token_at = now_ns;
            }
            if one.finished {
                request.finished_at = now_ns;
            }
            if let Some(accepted) = one.accepted {
                request.verify_steps += 1;
                request.accepted += u64::from(accepted);
                self.accepted_histogram[accepted as usize] += 1;
                self.cut_tokens += u64::from(accepted) + 1 - one.new_tokens as u64;
            }
        }
    }

    /// Takes in a request that has ended.
    pub fn finish(&mut self, finished: Finished) {
        let request = &mut self.requests[finished.uid as usize];
        request.cached_tokens = finished.cached_tokens;
        request.output = finished.output;
    }

    /// Share of request-steps in which the draft at each place was accepted; empty without one.
    #[must_use]
    pub fn accepted_by_position(&self) -> Vec<f64> {
        let steps: u64 = self.accepted_histogram.iter().sum();
        if steps == 0 {
            return Vec::new();
        }
        // The draft at a place is accepted together with all before it.
        (1..self.accepted_histogram.len())
            .map(|place| self.accepted_histogram[place..].iter().sum::<u64>())
            .map(|accepted| accepted as f64 / steps as f64)
            .collect()
    }

    /// Mean tokens of a request's verify step, the next token included.
    #[must_use]
    pub fn acceptance_length(&self) -> Option<f64> {
        let steps = self.accepted_histogram.iter().sum();
        let accepted = (0..)
            .zip(&self.accepted_histogram)
            .map(|(drafts, count)| drafts * count)
            .sum();
        acceptance_length(steps, accepted)
    }
}

fn acceptance_length(verify_steps: u64, accepted: u64) -> Option<f64> {
    (verify_steps > 0).then(|| 1.0 + accepted as f64 / verify_steps as f64)
}

/// Nanoseconds as seconds.
#[must_use]
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The value that `percent` of the values do not exceed, by nearest rank; `None` of nothing.
///
/// ```
/// use lowlat_engine::metrics::percentile;
/// let values = [15.0, 20.0, 35.0, 40.0, 50.0];
/// assert_eq!(percentile(&values, 30), Some(20.0));
/// assert_eq!(percentile(&values, 90), Some(50.0));
/// assert_eq!(percentile(&[], 50), None);
/// ```
#[must_use]
pub fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    assert!(
        (1..=100).contains(&percent),
        "a percentile is from 1 to 100"
    );
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}
