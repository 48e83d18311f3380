//! numpy's `default_rng(seed).integers(0, bound, n, int64)`, bit for bit: SeedSequence, PCG64
//! (XSL-RR) and the unmasked Lemire rejection for bounds over 32 bits. The published Engram
//! tables were built with these numbers.

const POOL_WORDS: usize = 4;

/// One word of SeedSequence's hash; `state` is its running constant.
fn hash_mix(value: u32, state: &mut u32, multiplier: u32) -> u32 {
    let value = value ^ *state;
    *state = state.wrapping_mul(multiplier);
    let value = value.wrapping_mul(*state);
    value ^ (value >> 16)
}

fn mix(x: u32, y: u32) -> u32 {
    let value = x
        .wrapping_mul(0xca01_f9dd)
        .wrapping_sub(y.wrapping_mul(0x4973_f715));
    value ^ (value >> 16)
}

/// `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_words(seed: u64) -> [u64; POOL_WORDS] {
    const MULTIPLIER_IN: u32 = 0x931e_8875;
    const MULTIPLIER_OUT: u32 = 0x58f3_8ded;
    // The entropy is the seed's 32-bit words, low first; absent words hash as zero.
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut state = 0x43b0_d7e5;
    let mut pool = entropy.map(|word| hash_mix(word, &mut state, MULTIPLIER_IN));
    for src in 0..POOL_WORDS {
        for dst in 0..POOL_WORDS {
            if src != dst {
                pool[dst] = mix(pool[dst], hash_mix(pool[src], &mut state, MULTIPLIER_IN));
            }
        }
    }
    let mut state = 0x8b51_f9dd;
    let mut next = |word_idx: usize| {
        u64::from(hash_mix(
            pool[word_idx % POOL_WORDS],
            &mut state,
            MULTIPLIER_OUT,
        ))
    };
    std::array::from_fn(|i| {
        let low = next(2 * i);
        low | next(2 * i + 1) << 32
    })
}

/// PCG64 as numpy seeds it.
pub(super) struct NumpyRng {
    state: u128,
    increment: u128,
}

impl NumpyRng {
    pub(super) fn new(seed: u64) -> Self {
        let words = seed_words(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut rng = Self {
            state: 0,
            increment: wide(words[2], words[3]) << 1 | 1,
        };
        rng.advance();
        rng.state = rng.state.wrapping_add(wide(words[0], words[1]));
        rng.advance();
        rng
    }

    fn advance(&mut self) {
        const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self
            .state
            .wrapping_mul(MULTIPLIER)
            .wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.advance();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// A value below `bound`, which must need more than 32 bits: smaller ones take another path
    /// in numpy.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 1 << 32, "numpy draws small bounds another way");
        let mut product = u128::from(self.next_u64()) * u128::from(bound);
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = u128::from(self.next_u64()) * u128::from(bound);
            }
        }
        (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From numpy 2.4: `SeedSequence(10007).generate_state(4, np.uint64)` and
    /// `default_rng(10007).bit_generator.random_raw(3)`.
    #[test]
    fn equals_numpy_word_for_word() {
        assert_eq!(
            seed_words(10007),
            [
                0x77d3_2a34_8ad7_0d07,
                0x993e_d609_b84a_4fa5,
                0xd5f9_72de_c869_8e49,
                0x7d79_ebae_bcf1_48de,
            ]
        );
        let mut rng = NumpyRng::new(10007);
        let raw = [
            0xd2c3_f840_2666_1e33,
            0x0d4f_b696_9eb5_7435,
            0x62e6_e1c5_8c3b_d72b,
        ];
        assert_eq!([rng.next_u64(), rng.next_u64(), rng.next_u64()], raw);
    }

    /// From numpy 2.4: `default_rng(7).integers(0, 3 * 2**61, 6, np.int64)`: one draw in four
    /// is rejected with this bound, so the list passes through the rejection.
    #[test]
    fn rejects_as_numpy_does() {
        let mut rng = NumpyRng::new(7);
        let drawn: [u64; 6] = std::array::from_fn(|_| rng.below(3 << 61));
        assert_eq!(
            drawn,
            [
                0x5621_ed26_c1ae_67f7,
                0x4a77_4063_d784_1d84,
                0x159e_b120_7007_ceb8,
                0x1cd0_e2f9_6554_be79,
                0x53dc_7310_bb5d_ceb3,
                0x4ed6_8275_cffa_c292,
            ]
        );
    }
}
