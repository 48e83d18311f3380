//! The transport for ranks that are threads of one process: a board of atomics.
//!
//! ```text
//! slot[p][e & 1]    ballot of epoch e, written by rank p, read by every rank
//! tag[p][e & 1]     epoch of that ballot; stored with release after the ballot's words, loaded
//!                   with acquire before they are read
//! register[e & 1]   what settles epoch e; swapped by comparison, acquire and release, so that who
//!                   sees a decision also sees the ballots that it rests on
//! reuse             slot and register are written again for e + 2. A rank gets there only after
//!                   e + 1 was settled with every rank's ballot (anything else is a fault, after
//!                   which a seat votes no more), and a rank casts that ballot only after it
//!                   adopted e and read its ballots for the last time.
//! wrap              epochs are compared by their distance; ranks differ by at most 1.
//! late              `poll` never says wait from the deadline on; the claim that follows ends the
//!                   vote at once, whoever wins it.
//! ```
//!
//! Coverage and steps have a channel each, with epochs of its own. A rank that votes on coverage
//! while a peer votes on a step is missing in both, and both end by their deadlines.

use super::ballot::{BALLOT_WORDS, Ballot, Coverage, MAX_RANKS};
use super::decision::{Decision, Register};
use super::round::{Next, Refusal, Round, StepBallot, Votable};
use crate::ids::{Epoch, InstantNs, TpRank};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::pause;

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

/// One rank's ballots of an even and an odd epoch. Aligned so that two ranks never write to one
/// pair of cache lines.
#[repr(align(128))]
#[derive(Debug)]
struct Slots<const WORDS: usize> {
    tags: [AtomicU64; 2],
    words: [[AtomicU64; WORDS]; 2],
}

#[derive(Debug)]
struct Channel<const WORDS: usize> {
    slots: Box<[Slots<WORDS>]>,
    registers: [AtomicU64; 2],
}

impl<const WORDS: usize> Channel<WORDS> {
    fn new(tp_size: u32, first: Epoch) -> Self {
        let before = Register::before(first).0;
        let slots = (0..tp_size).map(|_| Slots {
            tags: std::array::from_fn(|_| AtomicU64::new(before)),
            words: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
        });
        Self {
            slots: slots.collect(),
            registers: std::array::from_fn(|_| AtomicU64::new(before)),
        }
    }

    fn cast(&self, rank: TpRank, epoch: Epoch, words: [u64; WORDS]) {
        let parity = epoch.0 as usize & 1;
        let slots = &self.slots[rank.idx()];
        for (place, word) in slots.words[parity].iter().zip(words) {
            // Relaxed: the tag's release orders these before it.
            place.store(word, Ordering::Relaxed);
        }
        // Pairs with the acquire in `read`.
        slots.tags[parity].store(u64::from(epoch.0) << 32, Ordering::Release);
    }

    fn read(&self, rank: TpRank, epoch: Epoch) -> Option<[u64; WORDS]> {
        let parity = epoch.0 as usize & 1;
        let slots = &self.slots[rank.idx()];
        // Pairs with the release in `cast`.
        if slots.tags[parity].load(Ordering::Acquire) != u64::from(epoch.0) << 32 {
            return None;
        }
        // Relaxed: the tag's acquire orders these after it, and the reuse rule keeps them still.
        Some(std::array::from_fn(|idx| {
            slots.words[parity][idx].load(Ordering::Relaxed)
        }))
    }

    fn decision(&self, epoch: Epoch) -> Option<Decision> {
        // Pairs with the swap in `claim`.
        let word = self.registers[epoch.0 as usize & 1].load(Ordering::Acquire);
        Register(word).decision(epoch)
    }

    /// Puts `decision` into the register of `epoch` unless one stands; gives what stands, or
    /// `None` where the register is of a later epoch.
    fn claim(&self, epoch: Epoch, decision: Decision) -> Option<Decision> {
        let register = &self.registers[epoch.0 as usize & 1];
        let mut seen = register.load(Ordering::Acquire);
        loop {
            let claimed = match Register(seen).claim(epoch, decision) {
                Ok(claimed) => claimed.0,
                Err(stands) => return stands,
            };
            // AcqRel: releases the ballots this rank saw, acquires those behind another's word.
            let swapped =
                register.compare_exchange(seen, claimed, Ordering::AcqRel, Ordering::Acquire);
            match swapped {
                Ok(_) => return Some(decision),
                // Another rank was first. It can only have settled this epoch, so this ends.
                Err(now) => seen = now,
            }
        }
    }
}

/// One rank's end of a channel.
#[derive(Debug)]
struct Voter<B, const WORDS: usize> {
    round: Round<B>,
    next: Epoch,
}

impl<B: Posted<WORDS>, const WORDS: usize> Voter<B, WORDS> {
    fn vote(
        &mut self,
        channel: &Channel<WORDS>,
        rank: TpRank,
        own: B,
        budget_ns: u64,
        now: &mut dyn FnMut() -> InstantNs,
    ) -> Decision {
        let epoch = self.next;
        self.next = epoch.next();
        self.round.begin(epoch, own, now(), budget_ns);
        channel.cast(rank, epoch, own.to_words());
        let mut try_idx = 0;
        loop {
            // The register before the ballots: a decision's ballots are then all read.
            if let Some(decision) = channel.decision(epoch) {
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
                Next::Ended(decision) => return decision,
                // The next turn adopts what stands. A register of a later epoch means that the
                // group went on without us, so the one who is missing is this rank.
                Next::Propose(decision) => {
                    if channel.claim(epoch, decision).is_none() {
                        return Decision::Missing { rank };
                    }
                }
                Next::Wait => pause(try_idx),
            }
            try_idx = try_idx.saturating_add(1);
        }
    }
}

/// A group of ranks that are threads of this process.
///
/// ```
/// use std::time::Instant;
/// use lowlat_core::{InstantNs, TpRank};
/// use lowlat_core::vote::{Board, Decision};
/// let board = Board::new(2).unwrap();
/// let start = Instant::now();
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let mut seat = board.seat(TpRank(rank)).unwrap();
///         scope.spawn(move || {
///             let now = || InstantNs(start.elapsed().as_nanos() as u64);
///             assert_eq!(seat.agree_step(7, 10_000_000_000, now), Decision::Agreed);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Board {
    coverage: Channel<BALLOT_WORDS>,
    steps: Channel<1>,
    first: Epoch,
    /// A bit a rank whose seat was given.
    taken: AtomicU64,
}

/// Why a rank gets no seat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SeatError {
    /// The group's size cannot be voted with.
    #[error("tp_size is {0}; a vote needs 1 to {MAX_RANKS}")]
    Size(u32),
    /// The rank is outside the group.
    #[error("tp_rank is {rank}; it must be below tp_size, {tp_size}")]
    Outside {
        /// The rank that asked.
        rank: u32,
        /// Ranks of the group.
        tp_size: u32,
    },
    /// The seat was given before: a rank that was started again needs a new group.
    #[error("the seat of {0} is taken; a rank that was started again needs a new group")]
    Taken(TpRank),
}

impl Board {
    /// A group of `tp_size` ranks, 1 to [`MAX_RANKS`].
    ///
    /// # Errors
    /// [`SeatError::Size`] for another size.
    pub fn new(tp_size: u32) -> Result<Arc<Self>, SeatError> {
        Self::starting_at(tp_size, Epoch(1))
    }

    /// The same, with the first epoch given, so that a test can begin just before the wrap.
    ///
    /// # Errors
    /// [`SeatError::Size`] for another size.
    pub fn starting_at(tp_size: u32, first: Epoch) -> Result<Arc<Self>, SeatError> {
        if tp_size == 0 || MAX_RANKS < tp_size as usize {
            return Err(SeatError::Size(tp_size));
        }
        Ok(Arc::new(Self {
            coverage: Channel::new(tp_size, first),
            steps: Channel::new(tp_size, first),
            first,
            taken: AtomicU64::new(0),
        }))
    }

    /// The seat of one rank, given once. A seat that is dropped is not given again.
    ///
    /// # Errors
    /// [`SeatError::Outside`] and [`SeatError::Taken`].
    pub fn seat(self: &Arc<Self>, rank: TpRank) -> Result<Seat, SeatError> {
        let tp_size = self.steps.slots.len() as u32;
        if tp_size <= rank.0 {
            return Err(SeatError::Outside {
                rank: rank.0,
                tp_size,
            });
        }
        let bit = 1 << rank.0;
        // AcqRel only for form: the bit guards nothing but itself.
        if self.taken.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return Err(SeatError::Taken(rank));
        }
        Ok(Seat {
            coverage: Voter {
                round: Round::new(rank, tp_size),
                next: self.first,
            },
            steps: Voter {
                round: Round::new(rank, tp_size),
                next: self.first,
            },
            board: Arc::clone(self),
            rank,
            fault: None,
        })
    }
}

/// One rank's place in a group. All ranks make the same sequence of calls.
#[derive(Debug)]
pub struct Seat {
    board: Arc<Board>,
    rank: TpRank,
    coverage: Voter<Ballot, BALLOT_WORDS>,
    steps: Voter<StepBallot, 1>,
    /// The decision and epoch of the fault after which this seat votes no more.
    fault: Option<(Decision, Epoch)>,
}

impl Seat {
    /// Whose seat it is.
    pub fn tp_rank(&self) -> TpRank {
        self.rank
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
        let Self {
            board,
            rank,
            coverage,
            ..
        } = self;
        let decision = coverage.vote(&board.coverage, *rank, *ballot, budget_ns, &mut now);
        let epoch = coverage.round.epoch();
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
    pub fn agree_step(
        &mut self,
        digest: u64,
        budget_ns: u64,
        mut now: impl FnMut() -> InstantNs,
    ) -> Decision {
        if let Some((decision, _)) = self.fault {
            return decision;
        }
        let Self {
            board, rank, steps, ..
        } = self;
        let own = StepBallot(digest);
        let decision = steps.vote(&board.steps, *rank, own, budget_ns, &mut now);
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
