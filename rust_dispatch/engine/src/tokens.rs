//! Token ids for prompts whose text is not in the trace.
//!
//! A token is a pure function of the seed and of what stands at its place: the hash id of its
//! block, or, where the file gives none, the request itself. So equal hash ids give equal tokens
//! (and prefixes are shared as in the trace), everything else differs, and no order of synthesis
//! matters.

use lowlat_core::digest::Fnv1a;

use crate::step::RunnerInfo;
use crate::trace::{Trace, TraceRequest};

/// What hash ids with a scope wider than their file are keyed by, instead of the file.
const SHARED_SCOPE: &str = "shared";

/// Draws ordinary tokens of one vocabulary.
#[derive(Clone, Debug)]
pub struct Tokens {
    ordinary: Vec<i32>,
    seed: u64,
}

impl Tokens {
    /// The ordinary ids of the model that `info` describes: from its first one, without its
    /// special ones.
    ///
    /// # Panics
    /// When the model has no ordinary id.
    #[must_use]
    pub fn new(info: &RunnerInfo, seed: u64) -> Self {
        let ordinary: Vec<i32> = (info.first_token..info.vocab)
            .filter(|id| !info.special_tokens.contains(id))
            .map(|id| id as i32)
            .collect();
        assert!(!ordinary.is_empty(), "a vocabulary has ordinary ids");
        Self { ordinary, seed }
    }

    /// The first `num_tokens` of the request's prompt. `session` tells apart a file that is
    /// replayed more than once.
    #[must_use]
    pub fn prompt(
        &self,
        trace: &Trace,
        session: usize,
        request: &TraceRequest,
        num_tokens: usize,
    ) -> Vec<i32> {
        let scope = if trace.local_hashes {
            Fnv1a::new()
                .u64(self.seed)
                .text(&trace.id)
                .u64(session as u64)
        } else {
            Fnv1a::new().u64(self.seed).text(SHARED_SCOPE)
        };
        let own = Fnv1a::new()
            .u64(self.seed)
            .text(&trace.id)
            .u64(session as u64)
            .text(&request.path);
        let num_tokens = num_tokens.min(request.input_tokens);
        let mut tokens = Vec::with_capacity(num_tokens);
        for (block_idx, first) in (0..num_tokens).step_by(trace.block_size).enumerate() {
            let key = match request.hash_ids.get(block_idx) {
                Some(id) => scope.u64(*id as u64).finish(),
                None => own.u64(block_idx as u64).finish(),
            };
            let block_tokens = trace.block_size.min(num_tokens - first);
            tokens.extend((0..block_tokens).map(|offset| self.draw(key, offset as u64)));
        }
        tokens
    }

    fn draw(&self, key: u64, counter: u64) -> i32 {
        // The high half of the product spreads 64 random bits over the ids with no division; its
        // bias, below ids / 2^64, is nothing.
        let wide = u128::from(mix(key ^ mix(counter))) * self.ordinary.len() as u128;
        self.ordinary[(wide >> 64) as usize]
    }
}

/// SplitMix64's finaliser behind its increment: a bijection whose every output bit depends on
/// every input bit.
#[must_use]
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::mix;

    #[test]
    fn mix_is_splitmix64() {
        // First outputs of the published SplitMix64 from state 0 and state 1234567.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
    }
}
