//! Small types for numbers that must not be swapped: instants, ranks and epochs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A point on the caller's monotonic clock, in nanoseconds. Nothing here reads a clock.
///
/// ```
/// use lowlat_core::InstantNs;
/// assert_eq!(InstantNs(5).after(7), InstantNs(12));
/// assert_eq!(InstantNs(12).since(InstantNs(5)), 7);
/// assert_eq!(InstantNs(5).since(InstantNs(12)), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstantNs(pub u64);

impl InstantNs {
    /// The instant `budget_ns` later; a budget past the end of the clock saturates.
    pub fn after(self, budget_ns: u64) -> Self {
        Self(self.0.saturating_add(budget_ns))
    }

    /// Nanoseconds from `earlier` to here; 0 when `earlier` is later.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A rank's place in its tensor-parallel group, from 0.
///
/// ```
/// assert_eq!(lowlat_core::TpRank(3).to_string(), "rank 3");
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct TpRank(pub u32);

impl TpRank {
    /// The rank as an index into a list of all ranks.
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// The number that a signal carries. It only grows, and wraps after 2^32; two epochs are compared
/// rightly while they are less than 2^31 apart.
///
/// ```
/// use lowlat_core::Epoch;
/// let last = Epoch(u32::MAX);
/// assert_eq!(last.next(), Epoch(0));
/// assert!(last.next().is_after(last));
/// assert!(!last.is_after(last.next()));
/// assert!(!last.is_after(last));
/// assert_eq!((Epoch(0).before(), last.parity()), (last, 1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u32);

impl Epoch {
    /// The epoch that follows, wrapping.
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The epoch before this one, wrapping.
    pub fn before(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }

    /// Which of two places this epoch uses: 0 when even, 1 when odd.
    pub fn parity(self) -> usize {
        self.0 as usize & 1
    }

    /// Whether this epoch comes after `other`, with wrap in mind.
    pub fn is_after(self, other: Self) -> bool {
        let ahead = self.0.wrapping_sub(other.0);
        ahead != 0 && ahead < 1 << 31
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}
