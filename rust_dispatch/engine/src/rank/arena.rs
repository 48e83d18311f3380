//! One rank's step memory: every input and output of a launch, at addresses that never change.
//!
//! A plan is written into it, kernels read and write it, results are read from it. The launch
//! structs that point into it are made once, at capture, and only their counts differ.

use crate::EngineError;
use crate::kernels::{Buffer, KernelError, KernelModel, abi};
use crate::step::{StepPlan, StepRequest};
use crate::tokens::mix;

/// Rows and requests that the memory is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArenaShape {
    pub max_rows: usize,
    pub max_batch: usize,
    /// Page table entries a request.
    pub stride: usize,
    pub page_size: usize,
    /// 0: no draft.
    pub num_drafts: usize,
    pub vocab: usize,
}

impl ArenaShape {
    /// Rows a request of a verify step.
    pub fn verify_rows(&self) -> usize {
        self.num_drafts + 1
    }
}

macro_rules! arena {
    ($($(#[$meta:meta])* $name:ident: $type:ident [$($dim:ident)*],)*) => {
        pub(super) struct Arena {
            shape: ArenaShape,
            $($(#[$meta])* pub $name: Buffer<$type>,)*
        }

        /// Names of all buffers, in the order in which they are sealed.
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        const DTYPES: &[&str] = &[$(stringify!($type)),*];

        impl Arena {
            /// # Safety
            /// As for [`KernelModel::step_memory`].
            pub unsafe fn new(
                shape: ArenaShape,
                model: &mut KernelModel,
            ) -> Result<Self, KernelError> {
                Ok(Self {
                    shape,
                    $($name: {
                        let len = [$(dim::$dim(&shape)),*].iter().product();
                        // SAFETY: this function's contract.
                        unsafe { model.step_memory(len) }?
                    },)*
                })
            }

            fn addresses(&self) -> [u64; NAMES.len()] {
                [$(self.$name.address() as u64),*]
            }

            fn lens(&self) -> [i64; NAMES.len()] {
                [$(self.$name.len() as i64),*]
            }
        }
    };
}

/// Dimensions by name.
mod dim {
    use super::ArenaShape;

    pub fn rows(shape: &ArenaShape) -> usize {
        shape.max_rows
    }
    pub fn batch(shape: &ArenaShape) -> usize {
        shape.max_batch
    }
    pub fn stride(shape: &ArenaShape) -> usize {
        shape.stride
    }
    pub fn drafts(shape: &ArenaShape) -> usize {
        shape.num_drafts
    }
    pub fn verify(shape: &ArenaShape) -> usize {
        shape.verify_rows()
    }
    pub fn vocab(shape: &ArenaShape) -> usize {
        shape.vocab
    }
    pub fn three(_: &ArenaShape) -> usize {
        3
    }
}

arena! {
    token_ids: i32 [rows],
    positions: i32 [rows],
    request_idx: i32 [rows],
    slots: i32 [rows],
    page_table: i32 [batch stride],
    history: i32 [batch three],
    state_slots: i32 [batch],
    logit_rows: i32 [batch],
    logits: f32 [batch verify vocab],
    argmax: i32 [batch verify],
    inject_slots: i32 [rows],
    inject_positions: i32 [rows],
    anchors: i32 [batch],
    prefixes: i32 [batch],
    draft_slots: i32 [batch drafts],
    temperature: f32 [batch],
    noise_row: i32 [batch],
    noise_offset: i64 [batch],
    draft_tokens: i32 [batch drafts],
    draft_logits: f32 [batch drafts vocab],
    coins: f32 [batch verify],
    accepted: i32 [batch],
    next_tokens: i32 [batch],
}

/// Where the arena's buffers are now and how long, to be held against their seals.
pub(super) struct SealedNow {
    addresses: [u64; NAMES.len()],
    lens: [i64; NAMES.len()],
}

impl SealedNow {
    pub fn views(&self) -> impl Iterator<Item = lowlat_core::graph_key::SealView<'_>> {
        (0..NAMES.len()).map(|idx| lowlat_core::graph_key::SealView {
            name: NAMES[idx],
            address: self.addresses[idx],
            shape: std::slice::from_ref(&self.lens[idx]),
            dtype: DTYPES[idx],
        })
    }
}

impl Arena {
    pub fn shape(&self) -> ArenaShape {
        self.shape
    }

    pub fn sealed_now(&self) -> SealedNow {
        SealedNow {
            addresses: self.addresses(),
            lens: self.lens(),
        }
    }

    /// The launch of `batch_size` requests with `tokens_per_request` rows each (0: prompt rows,
    /// whose counts the caller fills in); logits of every row.
    pub fn step(
        &self,
        mode: abi::StepMode,
        batch_size: usize,
        tokens_per_request: usize,
    ) -> abi::Step {
        let num_rows = (batch_size * tokens_per_request) as i32;
        abi::Step {
            struct_bytes: size_of::<abi::Step>() as u32,
            mode: mode as u32,
            num_rows,
            batch_size: batch_size as i32,
            tokens_per_request: tokens_per_request as i32,
            page_table_stride: self.shape.stride as i32,
            token_ids: self.token_ids.address(),
            positions: self.positions.address(),
            request_idx: self.request_idx.address(),
            slots: self.slots.address(),
            page_table: self.page_table.address(),
            history: self.history.address(),
            state_slots: self.state_slots.address(),
            num_logit_rows: num_rows,
            reserved: 0,
            logit_rows: std::ptr::null(),
            logits: self.logits.address(),
            argmax: self.argmax.address(),
        }
    }

    /// The draft of `batch_size` requests (0: injection only), with nothing to inject yet.
    pub fn draft(&self, batch_size: usize, noise_key: u64) -> abi::Draft {
        abi::Draft {
            struct_bytes: size_of::<abi::Draft>() as u32,
            num_inject_rows: 0,
            inject_slots: self.inject_slots.address(),
            inject_positions: self.inject_positions.address(),
            batch_size: batch_size as i32,
            page_table_stride: self.shape.stride as i32,
            anchors: self.anchors.address(),
            prefixes: self.prefixes.address(),
            slots: self.draft_slots.address(),
            page_table: self.page_table.address(),
            temperature: self.temperature.address(),
            noise_row: self.noise_row.address(),
            noise_offset: self.noise_offset.address(),
            noise_key,
            draft_tokens: self.draft_tokens.address(),
            draft_logits: self.draft_logits.address(),
        }
    }

    /// The acceptance of `num_drafts` drafts of `batch_size` requests; with none it only draws.
    pub fn accept(&self, batch_size: usize, num_drafts: usize) -> abi::Accept {
        abi::Accept {
            struct_bytes: size_of::<abi::Accept>() as u32,
            batch_size: batch_size as i32,
            num_drafts: num_drafts as i32,
            vocab: self.shape.vocab as i32,
            draft_tokens: self.draft_tokens.address(),
            target_logits: self.logits.address(),
            draft_logits: self.draft_logits.address(),
            temperature: self.temperature.address(),
            coins: self.coins.address(),
            accepted: self.accepted.address(),
            next_tokens: self.next_tokens.address(),
        }
    }

    /// Page table, history and ring of each request; requests up to `padded_batch` are padding.
    pub fn fill_requests(&mut self, plan: &StepPlan, padded_batch: usize) {
        let stride = self.shape.stride;
        let page_table = self.page_table.as_mut_slice();
        page_table[..padded_batch * stride].fill(0);
        for (request_idx, request) in plan.requests.iter().enumerate() {
            let pages = plan.pages(request_idx);
            let used = pages.len().min(stride);
            let row = &mut page_table[request_idx * stride..][..used];
            // Entries behind the last page are never read; 0 is a page for certain.
            for (to, from) in row.iter_mut().zip(pages) {
                *to = (*from).max(0);
            }
            self.history.as_mut_slice()[request_idx * 3..][..3].copy_from_slice(&request.history);
            self.state_slots.as_mut_slice()[request_idx] = request.state_slot;
        }
        // Padding has rings of its own: those that no request of the step has.
        let mut free = (0..self.shape.max_batch as i32).filter(|slot| {
            plan.requests
                .iter()
                .all(|request| request.state_slot != *slot)
        });
        for request_idx in plan.requests.len()..padded_batch {
            self.history.as_mut_slice()[request_idx * 3..][..3].fill(0);
            self.state_slots.as_mut_slice()[request_idx] = free.next().unwrap_or(0);
        }
    }

    /// One row of a request: slot and position by its place.
    fn fill_row(
        &mut self,
        row: usize,
        token: i32,
        request_idx: usize,
        pages: &[i32],
        position: i32,
    ) -> Result<(), EngineError> {
        self.token_ids.as_mut_slice()[row] = token;
        self.positions.as_mut_slice()[row] = position;
        self.request_idx.as_mut_slice()[row] = request_idx as i32;
        self.slots.as_mut_slice()[row] = slot(pages, self.shape.page_size, position)?;
        Ok(())
    }

    /// The rows of prompt chunks. Gives the number of rows, and of those whose token is wanted.
    pub fn fill_extend(&mut self, plan: &StepPlan) -> Result<(usize, usize), EngineError> {
        let (mut row, mut num_wanted) = (0, 0);
        for (request_idx, request) in plan.requests.iter().enumerate() {
            for (offset, token) in chunk(plan, request)?.iter().enumerate() {
                if row == self.shape.max_rows {
                    return Err(EngineError::Bug(format!(
                        "an extend step has more than {} rows",
                        self.shape.max_rows
                    )));
                }
                let position = request.start + offset as i32;
                self.fill_row(row, *token, request_idx, plan.pages(request_idx), position)?;
                row += 1;
            }
            if request.wants_token {
                self.logit_rows.as_mut_slice()[num_wanted] = row as i32 - 1;
                num_wanted += 1;
            }
        }
        Ok((row, num_wanted))
    }

    /// The anchors, each with `num_drafts` drafts of [`Arena::draft_tokens`] behind it, then
    /// padding up to `padded_batch` requests.
    pub fn fill_uniform(
        &mut self,
        plan: &StepPlan,
        num_drafts: usize,
        padded_batch: usize,
    ) -> Result<(), EngineError> {
        let rows = num_drafts + 1;
        for (request_idx, request) in plan.requests.iter().enumerate() {
            let pages = plan.pages(request_idx);
            for offset in 0..rows {
                let token = match offset.checked_sub(1) {
                    None => anchor(plan, request)?,
                    Some(draft) => self.draft_tokens.as_slice()[request_idx * num_drafts + draft],
                };
                let position = request.start + offset as i32;
                self.fill_row(
                    request_idx * rows + offset,
                    token,
                    request_idx,
                    pages,
                    position,
                )?;
            }
        }
        for row in plan.requests.len() * rows..padded_batch * rows {
            self.token_ids.as_mut_slice()[row] = 0;
            self.positions.as_mut_slice()[row] = (row % rows) as i32;
            self.request_idx.as_mut_slice()[row] = (row / rows) as i32;
            self.slots.as_mut_slice()[row] = -1;
        }
        Ok(())
    }

    /// Anchors, prefixes and slots of the draft's rows.
    pub fn fill_draft(&mut self, plan: &StepPlan, padded_batch: usize) -> Result<(), EngineError> {
        let num_drafts = self.shape.num_drafts;
        for (request_idx, request) in plan.requests.iter().enumerate() {
            self.anchors.as_mut_slice()[request_idx] = anchor(plan, request)?;
            self.prefixes.as_mut_slice()[request_idx] = request.start;
            for offset in 0..num_drafts {
                let position = request.start + offset as i32;
                let slot = slot(plan.pages(request_idx), self.shape.page_size, position)?;
                self.draft_slots.as_mut_slice()[request_idx * num_drafts + offset] = slot;
            }
        }
        let num_requests = plan.requests.len();
        self.anchors.as_mut_slice()[num_requests..padded_batch].fill(0);
        self.prefixes.as_mut_slice()[num_requests..padded_batch].fill(0);
        self.draft_slots.as_mut_slice()[num_requests * num_drafts..padded_batch * num_drafts]
            .fill(-1);
        Ok(())
    }

    /// Temperatures, noise and coins of the requests that `wanted` lets pass, close together, then
    /// greedy padding. Every number follows from the seed, the request and its draw alone.
    pub fn fill_draws(
        &mut self,
        plan: &StepPlan,
        seed: u64,
        padded_batch: usize,
        num_coins: usize,
        wanted: impl Fn(&StepRequest) -> bool,
    ) {
        let mut place = 0;
        for request in plan.requests.iter().filter(|request| wanted(request)) {
            let temperature = if plan.simulated_accept.is_some() {
                0.0
            } else {
                request.temperature
            };
            self.temperature.as_mut_slice()[place] = temperature;
            self.noise_row.as_mut_slice()[place] = request.uid as i32;
            self.noise_offset.as_mut_slice()[place] = request.draw as i64;
            for coin_idx in 0..num_coins {
                self.coins.as_mut_slice()[place * num_coins + coin_idx] =
                    coin(seed, request.uid, request.draw, coin_idx);
            }
            place += 1;
        }
        for padding in place..padded_batch {
            self.temperature.as_mut_slice()[padding] = 0.0;
            self.noise_row.as_mut_slice()[padding] = 0;
            self.noise_offset.as_mut_slice()[padding] = 0;
            self.coins.as_mut_slice()[padding * num_coins..][..num_coins].fill(0.0);
        }
    }

    /// Notes for injection the rows of the step that just ran: of each request those before
    /// `commit(request_idx)`. `rows` is every request's, padding included.
    pub fn commit(&mut self, num_rows: usize, rows: usize, commit: impl Fn(usize) -> usize) {
        for row in 0..num_rows {
            let committed = row % rows < commit(row / rows);
            self.inject_slots.as_mut_slice()[row] = if committed {
                self.slots.as_slice()[row]
            } else {
                -1
            };
            self.inject_positions.as_mut_slice()[row] = self.positions.as_slice()[row];
        }
    }

    /// The same for a step all of whose rows are committed.
    pub fn commit_all(&mut self, num_rows: usize) {
        self.commit(num_rows, num_rows.max(1), |_| num_rows);
    }
}

/// KV slot of a position.
fn slot(pages: &[i32], page_size: usize, position: i32) -> Result<i32, EngineError> {
    let page_of = |position: usize| pages.get(position / page_size).copied();
    match usize::try_from(position)
        .ok()
        .and_then(|position| Some((position, page_of(position)?)))
    {
        Some((position, page)) if page >= 0 => {
            Ok(page * page_size as i32 + (position % page_size) as i32)
        }
        _ => Err(EngineError::Bug(format!(
            "a request has no page for its position {position}"
        ))),
    }
}

fn chunk<'a>(plan: &'a StepPlan, request: &StepRequest) -> Result<&'a [i32], EngineError> {
    plan.token_ids
        .get(request.first_row..request.first_row + request.num_rows)
        .ok_or_else(|| {
            EngineError::Bug(format!(
                "request {} has rows outside the plan's tokens",
                request.uid
            ))
        })
}

fn anchor(plan: &StepPlan, request: &StepRequest) -> Result<i32, EngineError> {
    chunk(plan, request)?
        .first()
        .copied()
        .ok_or_else(|| EngineError::Bug(format!("request {} has no row in the plan", request.uid)))
}

/// A uniform number in [0, 1) from a counter, so that it does not depend on what else runs.
fn coin(seed: u64, uid: u32, draw: u64, coin_idx: usize) -> f32 {
    let bits = mix(mix(mix(seed ^ 0x5b1e_3c7a_9d2f_4e61) ^ u64::from(uid)) ^ draw);
    let bits = mix(bits.wrapping_add(coin_idx as u64 + 1));
    (bits >> 40) as f32 / (1u64 << 24) as f32
}

/// Key of the draft's noise.
pub(super) fn noise_key(seed: u64) -> u64 {
    (seed ^ 0x2d2a_9c31_7e44_b1f3) & (u64::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coins_are_uniform_and_a_requests_own() {
        let mut cells = [0u32; 10];
        for draw in 0..2_000 {
            for coin_idx in 0..5 {
                let coin = coin(3, 1, draw, coin_idx);
                assert!((0.0..1.0).contains(&coin));
                cells[(coin * 10.0) as usize] += 1;
            }
        }
        // 1000 a cell, deviation 30.
        assert!(
            cells.iter().all(|cell| (850..1150).contains(cell)),
            "{cells:?}"
        );
        assert_ne!(coin(3, 1, 7, 0), coin(3, 2, 7, 0));
        assert_ne!(coin(3, 1, 7, 0), coin(4, 1, 7, 0));
        assert_ne!(coin(3, 1, 7, 0), coin(3, 1, 7, 1));
    }

    #[test]
    fn a_position_without_a_page_is_a_bug() {
        assert_eq!(slot(&[3, 1, -1], 64, 65), Ok(65));
        assert_eq!(slot(&[3, 1, -1], 64, 2), Ok(194));
        assert!(slot(&[3, 1, -1], 64, 128).is_err());
        assert!(slot(&[3, 1, -1], 64, 192).is_err());
        assert!(slot(&[3], 64, -1).is_err());
    }
}
