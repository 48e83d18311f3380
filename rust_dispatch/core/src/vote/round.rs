//! One rank's part of one vote, as a state machine that takes messages and `now` as arguments.

use std::fmt;

use super::decision::Decision;
use crate::ids::{Epoch, InstantNs, TpRank};
use crate::reason::Reason;

/// Something that ranks can agree on by value.
pub trait Votable: Copy + fmt::Debug {
    /// Why the rank itself declines, if it does.
    fn declines(&self) -> Option<Reason>;
    /// In what this ballot differs from rank 0's, if it does.
    fn difference(&self, other: &Self) -> Option<Reason>;
    /// "covers widths [6, 12]": this ballot's side of a difference.
    ///
    /// # Errors
    /// Those of the formatter.
    fn describe(&self, reason: Reason, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    /// The same for rank 0, said after another rank's.
    ///
    /// # Errors
    /// Those of the formatter.
    fn describe_other(&self, reason: Reason, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(reason, f)
    }
}

/// What a rank is about to run in an eager step, as a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBallot(pub u64);

impl Votable for StepBallot {
    fn declines(&self) -> Option<Reason> {
        None
    }

    fn difference(&self, other: &Self) -> Option<Reason> {
        (self != other).then_some(Reason::VoteStep)
    }

    fn describe(&self, _reason: Reason, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "is about to run step {:#018x}", self.0)
    }
}

/// The decision over a full list of ballots, in rank order.
pub(super) fn compare<'a, B: Votable + 'a>(
    ballots: impl Iterator<Item = &'a B> + Clone,
) -> Decision {
    let ranks = || (0..).map(TpRank);
    for (rank, ballot) in ranks().zip(ballots.clone()) {
        if let Some(reason) = ballot.declines() {
            return Decision::Declines { rank, reason };
        }
    }
    let Some(first) = ballots.clone().next() else {
        return Decision::Differs {
            rank: TpRank(0),
            reason: Reason::VoteGroup,
        };
    };
    for (rank, ballot) in ranks().zip(ballots) {
        if let Some(reason) = ballot.difference(first) {
            return Decision::Differs { rank, reason };
        }
    }
    Decision::Agreed
}

/// What a rank does next.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Read the register and the ballots again.
    Wait,
    /// Claim the register for this decision, then [`Round::adopt`] what the register holds.
    Propose(Decision),
    /// The vote is over; act on this decision.
    Ended(Decision),
}

/// One rank's view of one vote. Used again for each epoch; only [`Round::new`] allocates.
///
/// ```
/// use lowlat_core::{Epoch, InstantNs, TpRank};
/// use lowlat_core::vote::{Decision, Next, Round, StepBallot};
/// let mut round = Round::new(TpRank(0), 2);
/// round.begin(Epoch(1), StepBallot(7), InstantNs(100), 50);
/// assert_eq!(round.poll(InstantNs(110)), Next::Wait);
/// round.receive(TpRank(1), Epoch(1), StepBallot(7));
/// assert_eq!(round.poll(InstantNs(120)), Next::Propose(Decision::Agreed));
/// // Another rank was first, and its deadline had passed: this rank follows.
/// let missing = Decision::Missing { rank: TpRank(0) };
/// round.adopt(missing);
/// assert_eq!(round.poll(InstantNs(121)), Next::Ended(missing));
/// ```
#[derive(Clone, Debug)]
pub struct Round<B> {
    tp_rank: TpRank,
    epoch: Epoch,
    /// When time was last counted, and how much of the budget is left.
    looked_at: InstantNs,
    left_ns: u64,
    ballots: Vec<Option<B>>,
    num_seen: usize,
    adopted: Option<Decision>,
}

impl<B: Votable> Round<B> {
    /// A rank of a group that has not begun to vote.
    ///
    /// # Panics
    /// When the rank is outside the group.
    pub fn new(tp_rank: TpRank, tp_size: u32) -> Self {
        assert!(
            tp_rank.0 < tp_size,
            "{tp_rank} is outside a group of {tp_size}"
        );
        Self {
            tp_rank,
            epoch: Epoch(0),
            looked_at: InstantNs(0),
            left_ns: 0,
            ballots: vec![None; tp_size as usize],
            num_seen: 0,
            adopted: None,
        }
    }

    /// Begins the vote of `epoch`: this rank casts `own` now and gives up after `budget_ns`.
    pub fn begin(&mut self, epoch: Epoch, own: B, now: InstantNs, budget_ns: u64) {
        self.epoch = epoch;
        self.looked_at = now;
        self.left_ns = budget_ns;
        self.ballots.fill(None);
        self.num_seen = 0;
        self.adopted = None;
        self.receive(self.tp_rank, epoch, own);
    }

    /// The epoch that is being voted on.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether `rank`'s ballot is here.
    pub fn has(&self, rank: TpRank) -> bool {
        self.ballots.get(rank.idx()).is_some_and(Option::is_some)
    }

    /// A peer's ballot. One of another epoch is ignored, and so is a second one: the first
    /// counts, since a decision may already rest on it.
    pub fn receive(&mut self, from: TpRank, epoch: Epoch, ballot: B) {
        if epoch != self.epoch {
            return;
        }
        if let Some(place @ None) = self.ballots.get_mut(from.idx()) {
            *place = Some(ballot);
            self.num_seen += 1;
        }
    }

    /// What the register of this epoch holds. The first one stands.
    pub fn adopt(&mut self, decision: Decision) {
        self.adopted.get_or_insert(decision);
    }

    /// The first rank whose ballot is not here.
    pub fn missing(&self) -> Option<TpRank> {
        (0..self.ballots.len() as u32)
            .map(TpRank)
            .find(|&rank| !self.has(rank))
    }

    /// What was left of the budget when it was last polled.
    pub fn left_ns(&self) -> u64 {
        self.left_ns
    }

    /// What to do now. Once the budget is spent it never says [`Next::Wait`]. A clock that runs
    /// backwards spends nothing, and what follows counts from there.
    pub fn poll(&mut self, now: InstantNs) -> Next {
        if let Some(decision) = self.adopted {
            return Next::Ended(decision);
        }
        if self.num_seen == self.ballots.len() {
            return Next::Propose(compare(self.ballots.iter().flatten()));
        }
        self.left_ns = self.left_ns.saturating_sub(now.since(self.looked_at));
        self.looked_at = now;
        if 0 < self.left_ns {
            return Next::Wait;
        }
        let missing = self.missing();
        Next::Propose(Decision::Missing {
            rank: missing.expect("a ballot is not here"),
        })
    }

    /// Why the vote refused, in words; the ballots that are here supply the values.
    pub fn refusal(&self, decision: Decision) -> Refusal {
        Refusal::new(
            self.epoch,
            decision,
            self.ballots.iter().map(Option::as_ref),
        )
    }
}

/// Why a vote gave no coverage: the same reason, rank and words on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What the register holds.
    pub decision: Decision,
    /// The vote's epoch.
    pub epoch: Epoch,
    words: String,
}

impl Refusal {
    pub(super) fn new<'a, B: Votable + 'a>(
        epoch: Epoch,
        decision: Decision,
        ballots: impl Iterator<Item = Option<&'a B>>,
    ) -> Self {
        let ballots: Vec<_> = ballots.collect();
        let at = |rank: TpRank| ballots.get(rank.idx()).copied().flatten();
        let words = match decision {
            Decision::Agreed => "all ranks agree".to_owned(),
            Decision::Missing { rank } => {
                format!("{rank} did not answer the vote of {epoch} by the deadline")
            }
            Decision::Declines { rank, reason } => {
                format!("{rank} declines, so all do: {reason} [{}]", reason.number())
            }
            Decision::Differs { rank, reason } => match (at(TpRank(0)), at(rank)) {
                (Some(first), Some(other)) if rank.0 != 0 => {
                    format!(
                        "{rank} {}; rank 0 {}",
                        Side(other, reason),
                        Other(first, reason)
                    )
                }
                _ => format!("{rank}: {reason}"),
            },
        };
        Self {
            decision,
            epoch,
            words,
        }
    }

    /// The reason to count and report.
    pub fn reason(&self) -> Reason {
        self.decision.reason().unwrap_or(Reason::Bug)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.reason().number(), self.words)
    }
}

impl std::error::Error for Refusal {}

struct Side<'a, B>(&'a B, Reason);

impl<B: Votable> fmt::Display for Side<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe(self.1, f)
    }
}

struct Other<'a, B>(&'a B, Reason);

impl<B: Votable> fmt::Display for Other<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe_other(self.1, f)
    }
}
