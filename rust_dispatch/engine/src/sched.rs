//! Continuous batching: which rows run next.
//!
//! Requests wait in order, are admitted when a batch place and all the pages that they can ever
//! need are free, prefill in chunks, then decode or verify until they have what they asked for.
//! Prompt chunks and decoding steps take turns, so that neither starves the other. Since an
//! admitted request never needs another page, nothing is preempted and nothing can deadlock: the
//! first in the queue gets its pages at the latest when everything before it has ended.

use std::collections::VecDeque;

use crate::EngineError;
use crate::cache::{Held, PrefixCache};
use crate::step::{RunnerInfo, StepMode, StepPlan, StepRequest, StepResult};
use crate::tokens::mix;

/// How to schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// Requests that run at a time; at most the runner's `max_batch`.
    pub max_batch: usize,
    /// Prompt rows of a step; at most the runner's `max_rows`.
    pub prefill_chunk: usize,
    /// Whether prompts share pages.
    pub prefix_cache: bool,
    /// 0 is greedy.
    pub temperature: f32,
    /// Mean tokens of a verify step that is to be simulated, the next token included.
    pub simulate_acceptance: Option<f64>,
    /// Seed of the simulated acceptance's draws.
    pub seed: u64,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRequest {
    /// Stable number of the request in this run.
    pub uid: u32,
    /// At least one token.
    pub prompt: Vec<i32>,
    /// Tokens to generate, at least 1.
    pub output_tokens: usize,
}

/// What a step did to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which request.
    pub uid: u32,
    /// Prompt rows that ran for it.
    pub prompt_rows: usize,
    /// Tokens that it got, cut at its limit.
    pub new_tokens: usize,
    /// Accepted drafts, before the cut; `None` where the step verified nothing.
    pub accepted: Option<u32>,
    /// Whether it has all its tokens.
    pub finished: bool,
}

/// A request that has all its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which request.
    pub uid: u32,
    /// Tokens of its prompt that the prefix cache had.
    pub cached_tokens: usize,
    /// What it generated.
    pub output: Vec<i32>,
}

#[derive(Debug)]
struct Running {
    uid: u32,
    state_slot: i32,
    /// Prompt, then what was generated.
    tokens: Vec<i32>,
    prompt_tokens: usize,
    output_tokens: usize,
    /// Tokens in the KV cache: all before it have been run.
    in_cache: usize,
    cached_tokens: usize,
    held: Held,
    pages: Vec<i32>,
    /// Of `pages`, the first ones belong to the tree.
    num_shared: usize,
    num_draws: u64,
}

impl Running {
    fn is_prefilling(&self) -> bool {
        self.in_cache < self.prompt_tokens
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }
}

/// Plans steps and takes in their results. Owns no clock and runs nothing.
#[derive(Debug)]
pub struct Scheduler {
    settings: SchedulerSettings,
    page_size: usize,
    num_drafts: usize,
    max_positions: usize,
    cache: PrefixCache,
    waiting: VecDeque<NewRequest>,
    running: Vec<Running>,
    free_state_slots: Vec<i32>,
    /// Indexes into `running` of the step that is planned, in the plan's order.
    planned: Vec<usize>,
    last_was_extend: bool,
    num_verify_steps: u64,
}

impl Scheduler {
    /// A scheduler for the runner that `info` describes, with all its pages free.
    ///
    /// # Errors
    /// [`EngineError::Refused`] when a setting is beyond what the runner was built for.
    pub fn new(settings: SchedulerSettings, info: &RunnerInfo) -> Result<Self, EngineError> {
        let at_most = |name: &str, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(EngineError::Refused(format!(
                "{name} is {value}; this model was built for 1 to {most}"
            )))
        };
        at_most("--max-batch", settings.max_batch, info.max_batch)?;
        at_most("--prefill-chunk", settings.prefill_chunk, info.max_rows)?;
        if let Some(length) = settings.simulate_acceptance {
            let most = (info.num_drafts + 1) as f64;
            if info.num_drafts == 0 || !(1.0..=most).contains(&length) {
                let hint = if info.num_drafts == 0 {
                    " (--speculative on)"
                } else {
                    ""
                };
                return Err(EngineError::Refused(format!(
                    "--simulate-acceptance is {length}; with {} drafts a step it needs 1 to \
                     {most}{hint}",
                    info.num_drafts
                )));
            }
        }
        Ok(Self {
            settings,
            page_size: info.page_size,
            num_drafts: info.num_drafts,
            max_positions: info.max_positions,
            cache: PrefixCache::new(info.num_pages, info.page_size, settings.prefix_cache),
            waiting: VecDeque::new(),
            running: Vec::new(),
            free_state_slots: (0..settings.max_batch as i32).rev().collect(),
            planned: Vec::new(),
            last_was_extend: false,
            num_verify_steps: 0,
        })
    }

    /// Whether a request of these sizes can ever run alone.
    ///
    /// # Errors
    /// [`EngineError::Refused`]: what it needs, what there is, which setting changes it.
    pub fn check_fits(&self, input_tokens: usize, output_tokens: usize) -> Result<(), EngineError> {
        let positions = self.positions_needed(input_tokens, output_tokens);
        let sizes = format!("{input_tokens} prompt and {output_tokens} output tokens");
        if positions > self.max_positions {
            return Err(EngineError::Refused(format!(
                "{sizes} need {positions} positions; the model has {} (--limit-input, \
                 --limit-output)",
                self.max_positions
            )));
        }
        let (pages, have) = (positions.div_ceil(self.page_size), self.cache.num_pages());
        if pages > have {
            return Err(EngineError::Refused(format!(
                "{sizes} need {pages} pages of {} tokens; the pool has {have} (--kv-tokens, \
                 --limit-input, --limit-output)",
                self.page_size
            )));
        }
        Ok(())
    }

    /// Puts a request at the end of the queue.
    ///
    /// # Panics
    /// When it cannot fit ([`Self::check_fits`]), or has no prompt or no output.
    pub fn submit(&mut self, request: NewRequest) {
        assert!(
            !request.prompt.is_empty() && request.output_tokens > 0,
            "a request has tokens"
        );
        assert!(
            self.check_fits(request.prompt.len(), request.output_tokens)
                .is_ok(),
            "a request was checked before it is submitted"
        );
        self.waiting.push_back(request);
    }

    /// Whether nothing waits and nothing runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The pool and what it holds.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Plans the next step into `out_plan`. False when there is nothing to run.
    pub fn plan(&mut self, out_plan: &mut StepPlan) -> bool {
        self.admit();
        let prefills = self.running.iter().any(Running::is_prefilling);
        let decodes = self.running.iter().any(|running| !running.is_prefilling());
        out_plan.requests.clear();
        out_plan.token_ids.clear();
        out_plan.page_table.clear();
        out_plan.simulated_accept = None;
        self.planned.clear();
        if prefills && !(decodes && self.last_was_extend) {
            self.plan_extend(out_plan);
        } else if decodes {
            self.plan_decode(out_plan);
        } else {
            return false;
        }
        self.last_was_extend = out_plan.mode == StepMode::Extend;
        let stride = self
            .planned
            .iter()
            .map(|&idx| self.running[idx].pages.len())
            .max();
        out_plan.page_table_stride = stride.unwrap_or(0);
        for &running_idx in &self.planned {
            let pages = &self.running[running_idx].pages;
            out_plan.page_table.extend_from_slice(pages);
            let padding = out_plan.page_table_stride - pages.len();
            out_plan.page_table.extend(std::iter::repeat_n(-1, padding));
        }
        true
    }

    /// Takes in what the planned step gave: appends each request's progress to `out_progress` and
    /// those that have ended to `out_finished`.
    ///
    /// # Errors
    /// [`EngineError::Bug`] when the result does not answer the plan.
    pub fn commit(
        &mut self,
        plan: &StepPlan,
        result: &StepResult,
        out_progress: &mut Vec<Progress>,
        out_finished: &mut Vec<Finished>,
    ) -> Result<(), EngineError> {
        self.check_answer(plan, result)?;
        let mut rest = result.tokens.as_slice();
        for (plan_idx, &count) in result.counts.iter().enumerate() {
            let (new, behind) = rest.split_at(count as usize);
            rest = behind;
            let progress = self.commit_one(self.planned[plan_idx], plan, plan_idx, new);
            out_progress.push(progress);
        }
        for idx in (0..self.running.len()).rev() {
            if self.running[idx].generated() == self.running[idx].output_tokens {
                // In place, not swapped: `running` keeps the order of admission.
                let ended = self.running.remove(idx);
                out_finished.push(self.end(ended));
            }
        }
        self.num_verify_steps += u64::from(plan.mode == StepMode::Verify);
        Ok(())
    }

    /// Admits from the front of the queue, as long as there is room for all that the front needs.
    fn admit(&mut self) {
        while self.running.len() < self.settings.max_batch {
            let Some(front) = self.waiting.front() else {
                return;
            };
            let positions = self.positions_needed(front.prompt.len(), front.output_tokens);
            let mut pages = Vec::with_capacity(positions.div_ceil(self.page_size));
            // Held before pages are taken, so that taking them cannot evict what was found.
            let held = self.cache.hold(&front.prompt, &mut pages);
            let num_shared = pages.len();
            let Some(own) = self.cache.allocate(pages.capacity() - num_shared) else {
                self.cache.release(held);
                return;
            };
            pages.extend(own);
            let front = self.waiting.pop_front().expect("seen above");
            let cached_tokens = num_shared * self.page_size;
            self.running.push(Running {
                uid: front.uid,
                state_slot: self.free_state_slots.pop().expect("one a batch place"),
                prompt_tokens: front.prompt.len(),
                output_tokens: front.output_tokens,
                tokens: front.prompt,
                in_cache: cached_tokens,
                cached_tokens,
                held,
                pages,
                num_shared,
                num_draws: 0,
            });
        }
    }

    /// Positions that the request's rows can reach. The last generated token is never run; a
    /// verify step before it may run all its drafts behind the anchor.
    fn positions_needed(&self, input_tokens: usize, output_tokens: usize) -> usize {
        let drafts = if output_tokens > 1 {
            self.num_drafts
        } else {
            0
        };
        input_tokens + output_tokens - 1 + drafts
    }

    fn plan_extend(&mut self, out_plan: &mut StepPlan) {
        out_plan.mode = StepMode::Extend;
        let mut rows_left = self.settings.prefill_chunk;
        for (idx, running) in self.running.iter().enumerate() {
            if running.is_prefilling() && rows_left > 0 {
                let num_rows = rows_left.min(running.prompt_tokens - running.in_cache);
                rows_left -= num_rows;
                let ends_prompt = running.in_cache + num_rows == running.prompt_tokens;
                push_request(
                    out_plan,
                    running,
                    num_rows,
                    ends_prompt,
                    self.settings.temperature,
                );
                self.planned.push(idx);
            }
        }
    }

    fn plan_decode(&mut self, out_plan: &mut StepPlan) {
        out_plan.mode = if self.num_drafts > 0 {
            StepMode::Verify
        } else {
            StepMode::Decode
        };
        for (idx, running) in self.running.iter().enumerate() {
            if !running.is_prefilling() {
                push_request(out_plan, running, 1, true, self.settings.temperature);
                self.planned.push(idx);
            }
        }
        if let Some(length) = self.settings.simulate_acceptance {
            out_plan.simulated_accept = Some(simulated_accept(
                length,
                self.settings.seed,
                self.num_verify_steps,
            ));
        }
    }

    fn check_answer(&self, plan: &StepPlan, result: &StepResult) -> Result<(), EngineError> {
        let most = if plan.mode == StepMode::Verify {
            self.num_drafts as u32 + 1
        } else {
            1
        };
        let counts_right = result.counts.len() == plan.requests.len()
            && plan
                .requests
                .iter()
                .zip(&result.counts)
                .all(|(request, &count)| {
                    if request.wants_token {
                        (1..=most).contains(&count)
                    } else {
                        count == 0
                    }
                });
        let num_tokens: usize = result.counts.iter().map(|&count| count as usize).sum();
        if counts_right && num_tokens == result.tokens.len() {
            return Ok(());
        }
        Err(EngineError::Bug(format!(
            "a {:?} step of {} requests gave {} tokens with counts {:?}",
            plan.mode,
            plan.requests.len(),
            result.tokens.len(),
            result.counts
        )))
    }

    fn commit_one(
        &mut self,
        running_idx: usize,
        plan: &StepPlan,
        plan_idx: usize,
        new: &[i32],
    ) -> Progress {
        let request = &plan.requests[plan_idx];
        let running = &mut self.running[running_idx];
        let is_extend = plan.mode == StepMode::Extend;
        running.in_cache += if is_extend {
            request.num_rows
        } else {
            new.len()
        };
        running.num_draws += u64::from(request.wants_token);
        let new_tokens = new.len().min(running.output_tokens - running.generated());
        running.tokens.extend_from_slice(&new[..new_tokens]);
        let finished = running.generated() == running.output_tokens;
        if is_extend && request.wants_token {
            let held = std::mem::take(&mut running.held);
            let prompt = &running.tokens[..running.prompt_tokens];
            let (held, num_shared) = self.cache.insert(prompt, &mut running.pages, held);
            running.held = held;
            running.num_shared = num_shared;
        }
        Progress {
            uid: running.uid,
            prompt_rows: if is_extend { request.num_rows } else { 0 },
            new_tokens,
            accepted: (plan.mode == StepMode::Verify).then(|| new.len() as u32 - 1),
            finished,
        }
    }

    fn end(&mut self, mut ended: Running) -> Finished {
        self.cache.release(ended.held);
        self.cache.free(&ended.pages[ended.num_shared..]);
        self.free_state_slots.push(ended.state_slot);
        Finished {
            uid: ended.uid,
            cached_tokens: ended.cached_tokens,
            output: ended.tokens.split_off(ended.prompt_tokens),
        }
    }
}

fn push_request(
    out_plan: &mut StepPlan,
    running: &Running,
    num_rows: usize,
    wants_token: bool,
    temperature: f32,
) {
    let start = running.in_cache;
    let mut history = [0; 3];
    for (slot, back) in history.iter_mut().zip([3, 2, 1]) {
        *slot = start
            .checked_sub(back)
            .map_or(0, |position| running.tokens[position]);
    }
    out_plan.requests.push(StepRequest {
        uid: running.uid,
        first_row: out_plan.token_ids.len(),
        num_rows,
        start: start as i32,
        history,
        state_slot: running.state_slot,
        temperature,
        draw: running.num_draws,
        wants_token,
    });
    out_plan
        .token_ids
        .extend_from_slice(&running.tokens[start..start + num_rows]);
}

/// Drafts that count as accepted in verify step `step_idx` so that the mean of accepted drafts
/// plus the next token is `length`: one draw a step for the whole batch, of the whole numbers
/// around `length`.
///
/// ```
/// use lowlat_engine::sched::simulated_accept;
/// assert_eq!(simulated_accept(3.0, 1, 0), 2);
/// assert!((2..=3).contains(&simulated_accept(3.51, 1, 0)));
/// ```
#[must_use]
pub fn simulated_accept(length: f64, seed: u64, step_idx: u64) -> u32 {
    // 53 bits make a uniform double in [0, 1).
    let uniform = (mix(seed ^ mix(step_idx)) >> 11) as f64 / (1u64 << 53) as f64;
    let tokens = length.floor() + if uniform < length.fract() { 1.0 } else { 0.0 };
    tokens as u32 - 1
}
