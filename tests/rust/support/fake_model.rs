//! A model in a few lines of Rust, for tests of everything above the step seam.
//!
//! The next token is a hash of every token before it, so that one wrong, missing or repeated token
//! changes all that follow. It keeps its own KV pool: a slot holds the hash of the prefix that
//! ends in it, so that a wrong page, position or history shows as a wrong token, not only as a
//! wrong count.

use lowlat_core::graph_key::Record;
use lowlat_engine::EngineError;
use lowlat_engine::step::{
    RunnerInfo, StepMode, StepPath, StepPlan, StepRequest, StepResult, StepRunner,
};
use lowlat_engine::tokens::mix;

/// What the hash of no tokens is.
const EMPTY: u64 = 0x1234_5678_9abc_def0;

pub struct FakeModel {
    info: RunnerInfo,
    /// By slot: hash of the prefix that ends there, 0 where nothing was written.
    pool: Vec<u64>,
    /// Tokens by slot, to check the history.
    tokens: Vec<i32>,
    /// Chance, of 100, that a draft is right.
    pub draft_luck: u64,
    /// Step at which it fails.
    pub fails_at: Option<u64>,
    /// What it says that it captured.
    pub record: Option<Record>,
    /// Called before each step.
    pub on_step: Box<dyn FnMut(&StepPlan)>,
    num_steps: u64,
}

impl FakeModel {
    pub fn new(num_pages: usize, page_size: usize, num_drafts: usize) -> Self {
        let info = RunnerInfo {
            model: "fake".into(),
            platform: "test".into(),
            tp_size: 1,
            vocab: 500,
            first_token: 3,
            special_tokens: vec![7, 499],
            page_size,
            num_pages,
            max_batch: 8,
            max_rows: 4096,
            max_positions: 1 << 20,
            num_drafts,
            facts: vec![("kind".into(), "hash".into())],
        };
        let slots = num_pages * page_size;
        Self {
            info,
            pool: vec![0; slots],
            tokens: vec![-1; slots],
            draft_luck: 60,
            fails_at: None,
            record: None,
            on_step: Box::new(|_| {}),
            num_steps: 0,
        }
    }

    fn next_token(&self, prefix: u64) -> i32 {
        3 + (mix(prefix ^ 0xabcd) % 400) as i32
    }

    fn slot(&self, pages: &[i32], position: usize) -> usize {
        let page = pages[position / self.info.page_size];
        assert!(page >= 0, "position {position} has a page");
        page as usize * self.info.page_size + position % self.info.page_size
    }

    /// Writes a row and gives the hash of the prefix that ends in it.
    fn row(&mut self, pages: &[i32], position: usize, token: i32) -> u64 {
        let before = match position.checked_sub(1) {
            Some(before) => self.pool[self.slot(pages, before)],
            None => EMPTY,
        };
        assert_ne!(
            before, 0,
            "position {position} runs after the one before it"
        );
        let slot = self.slot(pages, position);
        let hash = mix(before ^ (token as u64 + 1));
        self.pool[slot] = hash;
        self.tokens[slot] = token;
        hash
    }

    fn check_history(&self, pages: &[i32], request: &StepRequest) {
        for (back, &token) in [3, 2, 1].iter().zip(&request.history) {
            match (request.start as usize).checked_sub(*back) {
                Some(position) => assert_eq!(token, self.tokens[self.slot(pages, position)]),
                None => assert_eq!(token, 0),
            }
        }
    }
}

impl StepRunner for FakeModel {
    fn info(&self) -> &RunnerInfo {
        &self.info
    }

    fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    fn run(&mut self, plan: &StepPlan, out: &mut StepResult) -> Result<(), EngineError> {
        (self.on_step)(plan);
        self.num_steps += 1;
        if self.fails_at == Some(self.num_steps) {
            return Err(EngineError::Fault("rank 1 did not answer in 100 ms".into()));
        }
        out.clear();
        assert!((1..=self.info.max_batch).contains(&plan.requests.len()));
        let mut rings: Vec<i32> = plan
            .requests
            .iter()
            .map(|request| request.state_slot)
            .collect();
        rings.sort_unstable();
        rings.dedup();
        assert_eq!(
            rings.len(),
            plan.requests.len(),
            "each request has a ring of its own"
        );
        for (request_idx, request) in plan.requests.iter().enumerate() {
            let pages = plan.pages(request_idx);
            self.check_history(pages, request);
            let rows = &plan.token_ids[request.first_row..request.first_row + request.num_rows];
            let start = request.start as usize;
            let mut prefix = EMPTY;
            for (offset, &token) in rows.iter().enumerate() {
                prefix = self.row(pages, start + offset, token);
            }
            let first = out.tokens.len();
            match plan.mode {
                StepMode::Extend if !request.wants_token => {}
                StepMode::Extend | StepMode::Decode => out.tokens.push(self.next_token(prefix)),
                StepMode::Verify => {
                    let mut right = true;
                    let mut accepted = 0;
                    let mut bonus = self.next_token(prefix);
                    let mut drafts = Vec::new();
                    for draft_idx in 0..self.info.num_drafts {
                        let truth = self.next_token(prefix);
                        let lucky = mix(prefix ^ 77) % 100 < self.draft_luck;
                        let draft = if lucky { truth } else { truth ^ 1 };
                        drafts.push(draft);
                        prefix = self.row(pages, start + 1 + draft_idx, draft);
                        right &= draft == truth;
                        if right {
                            accepted += 1;
                            bonus = self.next_token(prefix);
                        }
                    }
                    let accepted = plan
                        .simulated_accept
                        .map_or(accepted, |count| count as usize);
                    out.tokens.extend_from_slice(&drafts[..accepted]);
                    out.tokens.push(bonus);
                }
            }
            out.counts.push((out.tokens.len() - first) as u32);
        }
        out.target = match plan.mode {
            StepMode::Extend => StepPath::Plain("extend"),
            _ if plan.requests.len() > 4 => StepPath::Plain("width_not_built"),
            _ => StepPath::Covered,
        };
        out.draft = (plan.mode == StepMode::Verify).then_some(out.target);
        Ok(())
    }
}
