//! One rank's place in a group: it votes in the group's memory, whoever owns that.

use super::ballot::{BALLOT_WORDS, Ballot, Coverage};
use super::decision::Decision;
use super::lines::{Bell, Channel, Lines};
use super::round::{Next, Refusal, Round, StepBallot, Votable};
use crate::ids::{Epoch, InstantNs, TpRank};
use crate::sync::{Arc, pause, spin};

/// A ballot that fits in a fixed number of words.
trait Posted<const WORDS: usize>: Votable {
    fn to_words(self) -> [u64; WORDS];
    fn from_words(words: &[u64; WORDS]) -> Self;
}

impl Posted<BALLOT_WORDS> for Ballot {
    fn to_words(self) -> [u64; BALLOT_WORDS] {
        Ballot::to_words(self)
    }

    fn from_words(words: &[u64; BALLOT_WORDS]) -> Self {
        Ballot::from_words(words)
    }
}

impl Posted<1> for StepBallot {
    fn to_words(self) -> [u64; 1] {
        [self.0]
    }

    fn from_words(words: &[u64; 1]) -> Self {
        Self(words[0])
    }
}

/// One rank's end of a channel.
#[derive(Debug)]
struct Voter<B, const WORDS: usize> {
    rank: TpRank,
    round: Round<B>,
    next: Epoch,
}

impl<B: Posted<WORDS>, const WORDS: usize> Voter<B, WORDS> {
    fn new(rank: TpRank, tp_size: u32, first: Epoch) -> Self {
        Self {
            rank,
            round: Round::new(rank, tp_size),
            next: first,
        }
    }

    fn begin(
        &mut self,
        channel: Channel<'_, WORDS>,
        bell: Option<&dyn Bell>,
        own: B,
        budget_ns: u64,
        now: InstantNs,
    ) {
        let epoch = self.next;
        self.next = epoch.next();
        self.round.begin(epoch, own, now, budget_ns);
        channel.cast(self.rank, epoch, own.to_words(), bell);
    }

    /// Reads what is new, and acts on it; the decision once the vote is over.
    fn look(
        &mut self,
        channel: Channel<'_, WORDS>,
        bell: Option<&dyn Bell>,
        now: &mut dyn FnMut() -> InstantNs,
    ) -> Option<Decision> {
        let epoch = self.round.epoch();
        loop {
            // The register before the ballots: a decision's ballots are then all read.
            if let Some(decision) = channel.registers.decision(epoch) {
                self.round.adopt(decision);
            }
            for peer in (0..channel.slots.len() as u32).map(TpRank) {
                if !self.round.has(peer) {
                    if let Some(words) = channel.read(peer, epoch) {
                        self.round.receive(peer, epoch, B::from_words(&words));
                    }
                }
            }
            match self.round.poll(now()) {
                Next::Ended(decision) => return Some(decision),
                // The next turn adopts what stands. A register of a later epoch means that the
                // group went on without us, so the one who is missing is this rank.
                Next::Propose(decision) => {
                    if channel.claim(epoch, decision, bell).is_none() {
                        return Some(Decision::Missing { rank: self.rank });
                    }
                }
                Next::Wait => return None,
            }
        }
    }

    /// Looks until the vote is over: now, after pauses, and then, where there is a bell, asleep.
    fn wait(
        &mut self,
        channel: Channel<'_, WORDS>,
        bell: Option<&dyn Bell>,
        now: &mut dyn FnMut() -> InstantNs,
    ) -> Decision {
        let mut try_idx = 0;
        loop {
            if let Some(decision) = self.look(channel, bell, now) {
                return decision;
            }
            match bell {
                None => pause(try_idx),
                Some(bell) if try_idx < bell.tries() => spin(),
                Some(bell) => {
                    let (epoch, left_ns) = (self.round.epoch(), self.round.left_ns());
                    if let Some(rank) = self.round.missing() {
                        channel.sleep(rank, epoch, left_ns, bell);
                    }
                }
            }
            try_idx = try_idx.saturating_add(1);
        }
    }
}

/// One rank's place in a group. All ranks make the same sequence of calls.
#[derive(Debug)]
pub struct Seat {
    lines: Arc<dyn Lines>,
    rank: TpRank,
    coverage: Voter<Ballot, BALLOT_WORDS>,
    steps: Voter<StepBallot, 1>,
    /// Whether a step vote has begun and not ended.
    in_step: bool,
    /// The decision and epoch of the fault after which this seat votes no more.
    fault: Option<(Decision, Epoch)>,
}

impl Seat {
    /// The seat of `rank` in a group's memory, whose first epoch is `first`. Whoever owns the
    /// memory gives each rank one seat and no second.
    ///
    /// # Panics
    /// When the rank is outside the group.
    pub fn over(lines: Arc<dyn Lines>, rank: TpRank, first: Epoch) -> Self {
        let tp_size = lines.steps().slots.len() as u32;
        Self {
            coverage: Voter::new(rank, tp_size, first),
            steps: Voter::new(rank, tp_size, first),
            lines,
            rank,
            in_step: false,
            fault: None,
        }
    }

    /// Whose seat it is.
    pub fn tp_rank(&self) -> TpRank {
        self.rank
    }

    /// Ranks of the group.
    pub fn tp_size(&self) -> u32 {
        self.lines.steps().slots.len() as u32
    }

    /// The fault after which this seat votes no more.
    pub fn fault(&self) -> Option<Decision> {
        self.fault.map(|(decision, _)| decision)
    }

    /// Votes on coverage. Ends within `budget_ns` of the call, as `now` counts it, and one claim.
    ///
    /// # Errors
    /// A decline when ranks differ, a fault when one is missing; every rank gets the same. After
    /// a fault each later call gives that fault again.
    ///
    /// # Panics
    /// When the ballot is another rank's.
    pub fn agree(
        &mut self,
        ballot: &Ballot,
        budget_ns: u64,
        mut now: impl FnMut() -> InstantNs,
    ) -> Result<Coverage, Refusal> {
        assert_eq!(
            ballot.tp_rank(),
            self.rank,
            "a seat casts its own rank's ballot"
        );
        if let Some((decision, epoch)) = self.fault {
            return Err(Refusal::new::<Ballot>(epoch, decision, std::iter::empty()));
        }
        let (channel, bell) = (self.lines.coverage(), self.lines.bell());
        let begun_at = now();
        self.coverage
            .begin(channel, bell, *ballot, budget_ns, begun_at);
        let decision = self.coverage.wait(channel, bell, &mut now);
        let epoch = self.coverage.round.epoch();
        self.note_fault(decision, epoch);
        match decision {
            Decision::Agreed => Ok(Coverage::of(*ballot, epoch)),
            _ => Err(self.coverage.round.refusal(decision)),
        }
    }

    /// The hot vote: whether all ranks are about to run the step with this digest. Allocates
    /// nothing, and makes no system call when the peers are there.
    ///
    /// Never [`Decision::Declines`]; [`Decision::Missing`] is a fault, and each later call gives
    /// it again.
    ///
    /// # Panics
    /// While a vote that [`Seat::begin_step`] began is not over.
    pub fn agree_step(
        &mut self,
        digest: u64,
        budget_ns: u64,
        mut now: impl FnMut() -> InstantNs,
    ) -> Decision {
        let begun_at = now();
        self.begin_step(digest, budget_ns, begun_at);
        if let Some((decision, _)) = self.fault {
            self.in_step = false;
            return decision;
        }
        let (channel, bell) = (self.lines.steps(), self.lines.bell());
        let decision = self.steps.wait(channel, bell, &mut now);
        self.end_step(decision)
    }

    /// Begins the hot vote and does not wait: for an engine that has other work until its peers
    /// have voted too. [`Seat::poll_step`] ends it.
    ///
    /// ```
    /// use lowlat_core::{Board, InstantNs, TpRank, vote::Decision};
    /// let board = Board::new(2).unwrap();
    /// let [mut first, mut second] = [0, 1].map(|rank| board.seat(TpRank(rank)).unwrap());
    /// first.begin_step(7, 1_000, InstantNs(0));
    /// assert_eq!(first.poll_step(InstantNs(10)), None);
    /// second.begin_step(7, 1_000, InstantNs(20));
    /// assert_eq!(second.poll_step(InstantNs(20)), Some(Decision::Agreed));
    /// assert_eq!(first.poll_step(InstantNs(30)), Some(Decision::Agreed));
    /// ```
    ///
    /// # Panics
    /// While a vote is not over.
    pub fn begin_step(&mut self, digest: u64, budget_ns: u64, now: InstantNs) {
        assert!(!self.in_step, "a step vote is not over");
        self.in_step = true;
        if self.fault.is_none() {
            let (channel, bell) = (self.lines.steps(), self.lines.bell());
            let own = StepBallot(digest);
            self.steps.begin(channel, bell, own, budget_ns, now);
        }
    }

    /// What became of the vote that [`Seat::begin_step`] began; `None` while peers are waited for,
    /// and never from its deadline on.
    ///
    /// # Panics
    /// When no vote was begun.
    pub fn poll_step(&mut self, now: InstantNs) -> Option<Decision> {
        assert!(self.in_step, "no step vote was begun");
        if let Some((decision, _)) = self.fault {
            self.in_step = false;
            return Some(decision);
        }
        let (channel, bell) = (self.lines.steps(), self.lines.bell());
        let decision = self.steps.look(channel, bell, &mut || now)?;
        Some(self.end_step(decision))
    }

    fn end_step(&mut self, decision: Decision) -> Decision {
        self.in_step = false;
        let epoch = self.steps.round.epoch();
        self.note_fault(decision, epoch);
        decision
    }

    /// The last step vote's decision in words, with the values where ranks differed.
    pub fn step_refusal(&self, decision: Decision) -> Refusal {
        self.steps.round.refusal(decision)
    }

    fn note_fault(&mut self, decision: Decision, epoch: Epoch) {
        if decision
            .reason()
            .is_some_and(|reason| reason.kind().is_fault())
        {
            self.fault = Some((decision, epoch));
        }
    }
}
