//! What is voted on before anything is captured, and the proof that all ranks agree.

use std::fmt;

use super::decision::Decision;
use super::round::{Refusal, Votable, compare};
use crate::guard::Servable;
use crate::ids::{Epoch, TpRank};
use crate::ladder::{DeadlineLadder, RUNGS};
use crate::reason::Reason;

/// Most ranks of a group.
pub const MAX_RANKS: usize = 64;

/// Most widths of a ballot, as in the kernels' C header.
pub const MAX_WIDTHS: usize = 32;

/// What a rank would run, gathered by the caller.
#[derive(Clone, Copy, Debug)]
pub struct BallotParts<'a> {
    /// Row counts that were built, ascending, 1 to [`MAX_WIDTHS`] of them.
    pub widths: &'a [u32],
    /// Digest of the graph keys and what runs each ([`crate::graph_key::keys_digest`]).
    pub keys_digest: u64,
    /// Digest of the launch geometry: grids, blocks, scratch.
    pub geometry_digest: u64,
    /// Digest of the kernel catalogue (`lowlat_model_catalogue_digest`).
    pub catalogue_digest: u64,
    /// Deadlines of every wait.
    pub ladder: DeadlineLadder,
}

/// What one rank can cover, by value. Only a [`Servable`] rank can cast one that does not decline.
///
/// ```
/// use lowlat_core::{DeadlineLadder, Facts, Requirements, TpRank, guard};
/// use lowlat_core::vote::{Ballot, BallotParts, agree};
/// let facts = Facts { isa: "scalar".into(), tp_size: 2, ..Facts::default() };
/// let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
/// let cast = |rank, widths| {
///     let ladder = DeadlineLadder::new(1, 2, 3, 4).unwrap();
///     let parts = BallotParts {
///         widths, keys_digest: 7, geometry_digest: 8, catalogue_digest: 9, ladder,
///     };
///     Ballot::new(&servable, TpRank(rank), parts).unwrap()
/// };
/// let coverage = agree(TpRank(1), &[cast(0, &[6, 12]), cast(1, &[6, 12])]).unwrap();
/// assert_eq!(coverage.widths(), [6, 12]);
///
/// let refusal = agree(TpRank(1), &[cast(0, &[6, 12, 18]), cast(1, &[6, 12])]).unwrap_err();
/// assert_eq!(
///     refusal.to_string(),
///     "[301] rank 1 covers widths [6, 12]; rank 0 covers [6, 12, 18]"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ballot {
    tp_rank: TpRank,
    tp_size: u32,
    declines: Option<Reason>,
    num_widths: usize,
    widths: [u32; MAX_WIDTHS],
    requirements_digest: u64,
    keys_digest: u64,
    geometry_digest: u64,
    catalogue_digest: u64,
    budgets_ns: [u64; 4],
}

/// Why a ballot cannot be cast, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BallotError(String);

/// Words of a ballot on its way to its peers: 3 of places, counts and reasons, 4 digests, 4
/// budgets, 2 widths a word.
pub const BALLOT_WORDS: usize = 11 + MAX_WIDTHS / 2;

fn check_place(tp_rank: TpRank, tp_size: u32) -> Result<(), BallotError> {
    if tp_size == 0 || MAX_RANKS < tp_size as usize {
        return Err(BallotError(format!(
            "tp_size is {tp_size}; a vote needs 1 to {MAX_RANKS}"
        )));
    }
    if tp_size <= tp_rank.0 {
        let rank = tp_rank.0;
        return Err(BallotError(format!(
            "tp_rank is {rank}; it must be below tp_size, {tp_size}"
        )));
    }
    Ok(())
}

impl Ballot {
    /// The ballot of a rank that can serve.
    ///
    /// # Errors
    /// When the rank is outside the group, the group is larger than [`MAX_RANKS`], or the widths
    /// are not 1 to [`MAX_WIDTHS`] ascending numbers above 0.
    pub fn new(
        servable: &Servable,
        tp_rank: TpRank,
        parts: BallotParts<'_>,
    ) -> Result<Self, BallotError> {
        let tp_size = servable.tp_size();
        check_place(tp_rank, tp_size)?;
        let ascending = parts.widths.windows(2).all(|pair| pair[0] < pair[1]);
        let num_widths = parts.widths.len();
        if num_widths == 0 || MAX_WIDTHS < num_widths || !ascending || parts.widths[0] == 0 {
            return Err(BallotError(format!(
                "widths are {:?}; a vote needs 1 to {MAX_WIDTHS} ascending row counts above 0",
                parts.widths
            )));
        }
        let mut widths = [0; MAX_WIDTHS];
        widths[..num_widths].copy_from_slice(parts.widths);
        Ok(Self {
            tp_rank,
            tp_size,
            declines: None,
            num_widths,
            widths,
            requirements_digest: servable.digest(),
            keys_digest: parts.keys_digest,
            geometry_digest: parts.geometry_digest,
            catalogue_digest: parts.catalogue_digest,
            budgets_ns: parts.ladder.budgets_ns(),
        })
    }

    /// The ballot of a rank that cannot serve. It is cast all the same, so that its peers decline
    /// with it at once instead of waiting for it.
    ///
    /// # Errors
    /// When the rank is outside the group or the group is larger than [`MAX_RANKS`].
    pub fn declining(tp_rank: TpRank, tp_size: u32, reason: Reason) -> Result<Self, BallotError> {
        check_place(tp_rank, tp_size)?;
        Ok(Self {
            tp_rank,
            tp_size,
            declines: Some(reason),
            num_widths: 0,
            widths: [0; MAX_WIDTHS],
            requirements_digest: 0,
            keys_digest: 0,
            geometry_digest: 0,
            catalogue_digest: 0,
            budgets_ns: [0; 4],
        })
    }

    /// Whose ballot it is.
    pub fn tp_rank(&self) -> TpRank {
        self.tp_rank
    }

    /// Ranks of the group.
    pub fn tp_size(&self) -> u32 {
        self.tp_size
    }

    /// Row counts that this rank covers.
    pub fn widths(&self) -> &[u32] {
        &self.widths[..self.num_widths]
    }

    /// The ballot as plain words, for any transport: a board, or a caller's all-gather.
    ///
    /// ```
    /// use lowlat_core::{Ballot, Reason, TpRank};
    /// let ballot = Ballot::declining(TpRank(1), 2, Reason::TensorLayout).unwrap();
    /// assert_eq!(Ballot::from_words(&ballot.to_words()), ballot);
    /// ```
    pub fn to_words(self) -> [u64; BALLOT_WORDS] {
        let mut words = [0; BALLOT_WORDS];
        words[0] = u64::from(self.tp_rank.0);
        words[1] = u64::from(self.tp_size) << 32 | self.num_widths as u64;
        words[2] = self.declines.map_or(0, |reason| u64::from(reason.number()));
        words[3] = self.requirements_digest;
        words[4] = self.keys_digest;
        words[5] = self.geometry_digest;
        words[6] = self.catalogue_digest;
        words[7..11].copy_from_slice(&self.budgets_ns);
        for (word, pair) in words[11..].iter_mut().zip(self.widths.chunks_exact(2)) {
            *word = u64::from(pair[0]) << 32 | u64::from(pair[1]);
        }
        words
    }

    /// The ballot that [`Ballot::to_words`] wrote.
    pub fn from_words(words: &[u64; BALLOT_WORDS]) -> Self {
        let mut widths = [0; MAX_WIDTHS];
        for (word, pair) in words[11..].iter().zip(widths.chunks_exact_mut(2)) {
            pair[0] = (word >> 32) as u32;
            pair[1] = *word as u32;
        }
        Self {
            tp_rank: TpRank(words[0] as u32),
            tp_size: (words[1] >> 32) as u32,
            declines: Reason::from_number(words[2] as u32),
            num_widths: (words[1] as u32 as usize).min(MAX_WIDTHS),
            widths,
            requirements_digest: words[3],
            keys_digest: words[4],
            geometry_digest: words[5],
            catalogue_digest: words[6],
            budgets_ns: [words[7], words[8], words[9], words[10]],
        }
    }
}

/// "differs" is told field by field in this order, and the first one is named: other widths also
/// change the keys and the catalogue, and would hide behind their digests.
impl Votable for Ballot {
    fn declines(&self) -> Option<Reason> {
        self.declines
    }

    fn difference(&self, other: &Self) -> Option<Reason> {
        let differs = [
            (self.tp_size != other.tp_size, Reason::VoteGroup),
            (self.widths() != other.widths(), Reason::VoteWidths),
            (
                self.requirements_digest != other.requirements_digest,
                Reason::VoteRequirements,
            ),
            (self.budgets_ns != other.budgets_ns, Reason::VoteLadder),
            (
                self.geometry_digest != other.geometry_digest,
                Reason::VoteGeometry,
            ),
            (self.keys_digest != other.keys_digest, Reason::VoteKeys),
            (
                self.catalogue_digest != other.catalogue_digest,
                Reason::VoteCatalogue,
            ),
        ];
        differs
            .into_iter()
            .find(|(differs, _)| *differs)
            .map(|(_, reason)| reason)
    }

    fn describe(&self, reason: Reason, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match reason {
            Reason::VoteGroup => write!(f, "believes in {} ranks", self.tp_size),
            Reason::VoteWidths => write!(f, "covers widths {:?}", self.widths()),
            Reason::VoteRequirements => {
                write!(
                    f,
                    "checked requirements and model {:#018x}",
                    self.requirements_digest
                )
            }
            Reason::VoteLadder => {
                f.write_str("has deadlines of")?;
                for (idx, (rung, budget_ns)) in RUNGS.iter().zip(self.budgets_ns).enumerate() {
                    let comma = if idx == 0 { "" } else { "," };
                    write!(f, "{comma} {rung} {budget_ns} ns")?;
                }
                Ok(())
            }
            Reason::VoteGeometry => write!(f, "has launch geometry {:#018x}", self.geometry_digest),
            Reason::VoteKeys => write!(f, "covers graph keys {:#018x}", self.keys_digest),
            _ => write!(
                f,
                "carries kernel catalogue {:#018x}",
                self.catalogue_digest
            ),
        }
    }

    fn describe_other(&self, reason: Reason, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // "rank 1 covers widths [6]; rank 0 covers [6, 12]": the noun is not said twice.
        match reason {
            Reason::VoteWidths => write!(f, "covers {:?}", self.widths()),
            _ => self.describe(reason, f),
        }
    }
}

/// Proof that all ranks cover the same. Only the vote makes one: [`agree`] or
/// [`crate::vote::Seat::agree`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    ballot: Ballot,
    epoch: Epoch,
}

impl Coverage {
    pub(super) fn of(ballot: Ballot, epoch: Epoch) -> Self {
        Self { ballot, epoch }
    }

    /// This rank.
    pub fn tp_rank(&self) -> TpRank {
        self.ballot.tp_rank
    }

    /// Ranks of the group.
    pub fn tp_size(&self) -> u32 {
        self.ballot.tp_size
    }

    /// Row counts that every rank covers, ascending.
    pub fn widths(&self) -> &[u32] {
        self.ballot.widths()
    }

    /// Digest of the sorted graph keys that every rank covers.
    pub fn keys_digest(&self) -> u64 {
        self.ballot.keys_digest
    }

    /// The deadlines that every rank keeps.
    ///
    /// # Panics
    /// Never: a ballot that agreed was made from a ladder in order.
    pub fn ladder(&self) -> DeadlineLadder {
        let [kernel, plugin, collective, engine] = self.ballot.budgets_ns;
        DeadlineLadder::new(kernel, plugin, collective, engine).expect("a ballot holds a ladder")
    }

    /// The epoch of the vote that agreed; 0 for [`agree`].
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

/// The vote over an all-gather: `ballots` is the same full list on every rank, in rank order, and
/// `own` says whose proof is wanted.
///
/// # Errors
/// A decline that names the first rank that declines or differs from rank 0, the same on every
/// rank.
pub fn agree(own: TpRank, ballots: &[Ballot]) -> Result<Coverage, Refusal> {
    let epoch = Epoch(0);
    let refuse = |decision| Err(Refusal::new(epoch, decision, ballots.iter().map(Some)));
    for (idx, rank) in (0..).map(TpRank).take(ballots.len()).enumerate() {
        let ballot = &ballots[idx];
        if ballot.tp_rank != rank || ballot.tp_size as usize != ballots.len() {
            return refuse(Decision::Differs {
                rank,
                reason: Reason::VoteGroup,
            });
        }
    }
    let Some(ballot) = ballots.get(own.idx()) else {
        return refuse(Decision::Differs {
            rank: own,
            reason: Reason::VoteGroup,
        });
    };
    match compare(ballots.iter()) {
        Decision::Agreed => Ok(Coverage::of(*ballot, epoch)),
        decision => refuse(decision),
    }
}
