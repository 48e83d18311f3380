//! The decision register: one 64-bit word that settles an epoch for every rank.
//!
//! ```text
//! bits 63..32  epoch that the word settles
//! bits 31..24  what was decided: 0 nothing, 1 agreed, 2 differs, 3 declines, 4 missing
//! bits 23..16  the rank that is named
//! bits 15..0   number of the reason
//! ```
//!
//! Transitions: a word of an older epoch, or one that decides nothing, may be replaced by a
//! decision of this epoch, once ([`Register::claim`]). A word that decides this epoch never
//! changes. There are two registers, for even and odd epochs. The one of epoch e is written again
//! for e + 2, and a rank gets there only after e + 1 was settled with every rank's ballot, which a
//! rank casts only after it adopted e. So nobody still reads what is overwritten.

use crate::ids::{Epoch, TpRank};
use crate::reason::Reason;

/// What became of one epoch, the same on every rank.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every rank voted and no two differ.
    Agreed,
    /// `rank` differs from rank 0 in what `reason` says.
    Differs {
        /// Who differs.
        rank: TpRank,
        /// In what.
        reason: Reason,
    },
    /// `rank` itself declines, for `reason`.
    Declines {
        /// Who declines.
        rank: TpRank,
        /// Why.
        reason: Reason,
    },
    /// `rank` did not vote by the deadline of the rank that decided.
    Missing {
        /// Who is missing.
        rank: TpRank,
    },
}

impl Decision {
    /// The reason to count and report; none when agreed.
    pub fn reason(self) -> Option<Reason> {
        match self {
            Self::Agreed => None,
            Self::Differs { reason, .. } => Some(reason),
            Self::Declines { .. } => Some(Reason::VoteRankDeclines),
            Self::Missing { .. } => Some(Reason::RankMissing),
        }
    }
}

/// The register's word, as a value; a transport keeps it in an atomic and swaps it by comparison.
///
/// ```
/// use lowlat_core::{Epoch, TpRank};
/// use lowlat_core::vote::{Decision, Register};
/// let missing = Decision::Missing { rank: TpRank(1) };
/// let empty = Register::before(Epoch(7));
/// let claimed = empty.claim(Epoch(7), missing).unwrap();
/// // The first one stands.
/// assert_eq!(claimed.claim(Epoch(7), Decision::Agreed), Err(Some(missing)));
/// assert_eq!(claimed.decision(Epoch(7)), Some(missing));
/// // The register is used again two epochs later, and never for an old epoch.
/// assert_eq!(claimed.decision(Epoch(9)), None);
/// assert_eq!(claimed.claim(Epoch(5), Decision::Agreed), Err(None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(pub u64);

impl Register {
    /// A register that has settled nothing yet; `first` is the first epoch.
    pub fn before(first: Epoch) -> Self {
        Self(u64::from(first.before().0) << 32)
    }

    fn epoch(self) -> Epoch {
        Epoch((self.0 >> 32) as u32)
    }

    /// What this word decides for `epoch`, if it does.
    #[must_use]
    pub fn decision(self, epoch: Epoch) -> Option<Decision> {
        if self.epoch() != epoch {
            return None;
        }
        let rank = TpRank(self.0 as u32 >> 16 & 0xff);
        let reason = || Reason::from_number(self.0 as u32 & 0xffff).unwrap_or(Reason::Bug);
        match self.0 as u32 >> 24 {
            0 => None,
            1 => Some(Decision::Agreed),
            2 => Some(Decision::Differs {
                rank,
                reason: reason(),
            }),
            3 => Some(Decision::Declines {
                rank,
                reason: reason(),
            }),
            _ => Some(Decision::Missing { rank }),
        }
    }

    /// The word that replaces this one when `decision` settles `epoch`.
    ///
    /// # Errors
    /// The decision that already stands, or `None` where this word is of a later epoch, so that
    /// the caller is behind its group.
    pub fn claim(self, epoch: Epoch, decision: Decision) -> Result<Self, Option<Decision>> {
        if let Some(stands) = self.decision(epoch) {
            return Err(Some(stands));
        }
        if self.epoch().is_after(epoch) {
            return Err(None);
        }
        let (kind, rank, reason) = match decision {
            Decision::Agreed => (1, TpRank(0), 0),
            Decision::Differs { rank, reason } => (2, rank, reason.number()),
            Decision::Declines { rank, reason } => (3, rank, reason.number()),
            Decision::Missing { rank } => (4, rank, 0),
        };
        let low = kind << 24 | (rank.0 & 0xff) << 16 | reason;
        Ok(Self(u64::from(epoch.0) << 32 | u64::from(low)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decision_survives_the_word() {
        let epoch = Epoch(u32::MAX);
        let mut decisions = vec![Decision::Agreed];
        for rank in [TpRank(0), TpRank(63)] {
            decisions.push(Decision::Missing { rank });
            for reason in Reason::ALL {
                decisions.push(Decision::Differs { rank, reason });
                decisions.push(Decision::Declines { rank, reason });
            }
        }
        for decision in decisions {
            let word = Register::before(epoch).claim(epoch, decision).unwrap();
            assert_eq!(word.decision(epoch), Some(decision));
        }
    }

    #[test]
    fn a_register_is_used_again_across_the_wrap() {
        let word = Register::before(Epoch(u32::MAX));
        let word = word.claim(Epoch(u32::MAX), Decision::Agreed).unwrap();
        let missing = Decision::Missing { rank: TpRank(2) };
        let word = word.claim(Epoch(1), missing).unwrap();
        assert_eq!(word.claim(Epoch(u32::MAX), Decision::Agreed), Err(None));
        assert_eq!(word.decision(Epoch(1)), Some(missing));
    }
}
