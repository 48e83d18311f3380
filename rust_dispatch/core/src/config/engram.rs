//! Engram's constants: which primes its columns take and which odd numbers multiply the tokens.

use super::numpy_rng::NumpyRng;

/// n-gram sizes 2, 3 and 4.
pub const NGRAM_SIZES: usize = 3;
/// Hash heads a size.
pub const HEADS: usize = 8;
/// Tokens that a hash looks back over, the row's own counted.
pub const SHIFTS: usize = 4;

/// One table: the layer that it is applied before, and what hashes into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngramTable {
    /// The layer.
    pub layer: u32,
    /// Rows of each column.
    pub primes: [[u64; HEADS]; NGRAM_SIZES],
    /// Odd multiplier of each shift.
    pub multipliers: [u64; SHIFTS],
}

impl EngramTable {
    /// Rows of the table: the columns' one after the other.
    #[must_use]
    pub fn num_rows(&self) -> u64 {
        self.primes.iter().flatten().sum()
    }
}

/// The n-gram memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngramConfig {
    /// Tables in layer order.
    pub tables: Vec<EngramTable>,
    /// Elements a row.
    pub head_dim: u32,
    /// Token that stands where there is none; mapped like any other.
    pub pad_token: u32,
    /// The token map's values are below it.
    pub compressed_vocab: u32,
}

/// Tables of `layers`: successive primes from `vocab_size` on, never used twice, in order of
/// layer, n-gram size and head; multipliers drawn by the layer's own generator.
///
/// `compressed_vocab` is at least 1 and small enough that a draw needs over 32 bits (below 2^30).
pub(super) fn tables(layers: &[u32], vocab_size: u64, compressed_vocab: u32) -> Vec<EngramTable> {
    let bound = (i64::MAX as u64 / u64::from(compressed_vocab)) / 2;
    let mut prime = vocab_size.saturating_sub(1);
    let mut next_prime = || {
        prime += 1;
        while !is_prime(prime) {
            prime += 1;
        }
        prime
    };
    layers
        .iter()
        .map(|&layer| {
            let mut rng = NumpyRng::new(10007 * u64::from(layer));
            EngramTable {
                layer,
                primes: std::array::from_fn(|_| std::array::from_fn(|_| next_prime())),
                multipliers: std::array::from_fn(|_| rng.below(bound) * 2 + 1),
            }
        })
        .collect()
}

/// Trial division: the largest candidate is near 2^24 (under 2^32 by the reader's bound), so a
/// few thousand divisions settle it.
fn is_prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| n % d != 0)
}
