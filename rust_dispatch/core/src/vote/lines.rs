//! The memory that ranks vote in, whoever owns it: words of one process, or of one host.
//!
//! ```text
//! slot[p][e & 1]    ballot of epoch e, written by rank p, read by every rank
//! tag[p][e & 1]     epoch of that ballot; stored with release after the ballot's words, loaded
//!                   with acquire before they are read
//! register[e & 1]   what settles epoch e; swapped by comparison, acquire and release, so that who
//!                   sees a decision also sees the ballots that it rests on
//! sleepers[p]       how many ranks sleep until p casts; raised before a sleeper looks at tag and
//!                   register for the last time, read by p after its tag and by whoever claims a
//!                   missing rank after the claim. Between each store and look stands a fence,
//!                   sequentially consistent, so either the sleeper sees the store, or the writer
//!                   sees the sleeper and rings for it.
//! rung[p]           how often somebody rang for those sleepers: the word that they sleep on. A
//!                   sleeper reads it, with acquire, before its last look; who rings raises it,
//!                   with release, after the store. So a ring between look and sleep changes the
//!                   word, and one before it shows what it was for.
//! reuse             slot and register are written again for e + 2. A rank gets there only after
//!                   e + 1 was settled with every rank's ballot (anything else is a fault, after
//!                   which a seat votes no more), and a rank casts that ballot only after it
//!                   adopted e and read its ballots for the last time.
//! wrap              epochs are compared by their distance; ranks differ by at most 1.
//! late              a round never says wait from its deadline on; the claim that follows ends the
//!                   vote at once, whoever wins it. A sleep is never longer than what is left.
//! ```

use std::fmt;

use super::ballot::BALLOT_WORDS;
use super::decision::{Decision, Register};
use crate::ids::{Epoch, TpRank};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// One rank's ballots of an even and an odd epoch. Aligned so that two ranks never write to one
/// pair of cache lines. Its layout is that of C, since ranks of other processes map it.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Slots<const WORDS: usize> {
    tags: [AtomicU32; 2],
    sleepers: AtomicU32,
    rung: AtomicU32,
    words: [[AtomicU64; WORDS]; 2],
}

/// The decision registers of even and odd epochs.
///
/// ```
/// use lowlat_core::{Epoch, TpRank, vote::{Decision, Registers}};
/// let registers = Registers::before(Epoch(1));
/// assert_eq!(registers.decision(Epoch(1)), None);
/// let missing = Decision::Missing { rank: TpRank(1) };
/// // The first one stands, whoever claims next.
/// assert_eq!(registers.claim(Epoch(1), missing), Some(missing));
/// assert_eq!(registers.claim(Epoch(1), Decision::Agreed), Some(missing));
/// assert_eq!(registers.decision(Epoch(1)), Some(missing));
/// ```
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Registers([AtomicU64; 2]);

impl<const WORDS: usize> Slots<WORDS> {
    /// Slots in which nothing was cast before `first`.
    #[must_use]
    pub fn before(first: Epoch) -> Self {
        Self {
            tags: std::array::from_fn(|_| AtomicU32::new(first.before().0)),
            sleepers: AtomicU32::new(0),
            rung: AtomicU32::new(0),
            words: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    /// The same, in memory that others will share once it is ready.
    pub fn reset(&self, first: Epoch) {
        for tag in &self.tags {
            tag.store(first.before().0, Ordering::Release);
        }
        self.sleepers.store(0, Ordering::Release);
    }
}

impl Registers {
    /// Registers that have settled nothing; `first` is the first epoch.
    #[must_use]
    pub fn before(first: Epoch) -> Self {
        Self(std::array::from_fn(|_| {
            AtomicU64::new(Register::before(first).0)
        }))
    }

    /// The same, in memory that others will share once it is ready.
    pub fn reset(&self, first: Epoch) {
        for register in &self.0 {
            register.store(Register::before(first).0, Ordering::Release);
        }
    }

    /// What settles `epoch`, if it is settled.
    #[must_use]
    pub fn decision(&self, epoch: Epoch) -> Option<Decision> {
        // Pairs with the swap in `claim`.
        let word = self.0[epoch.parity()].load(Ordering::Acquire);
        Register(word).decision(epoch)
    }

    /// Puts `decision` into the register of `epoch` unless one stands; gives what stands, or
    /// `None` where the register is of a later epoch.
    #[must_use]
    pub fn claim(&self, epoch: Epoch, decision: Decision) -> Option<Decision> {
        let register = &self.0[epoch.parity()];
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

/// How a rank sleeps until a peer has voted, where it may sleep at all.
pub trait Bell: fmt::Debug + Send + Sync {
    /// How often a rank looks, with a short pause each time, before it sleeps.
    fn tries(&self) -> u32;

    /// Sleeps while `word` is `seen`, until somebody wakes it or `budget_ns` has passed. It may
    /// return early for no reason, and never later.
    fn sleep(&self, word: &AtomicU32, seen: u32, budget_ns: u64);

    /// Wakes all who sleep on `word`.
    fn wake(&self, word: &AtomicU32);
}

/// The memory of one group.
pub trait Lines: fmt::Debug + Send + Sync {
    /// Where coverage is voted on.
    fn coverage(&self) -> Channel<'_, BALLOT_WORDS>;
    /// Where steps are voted on.
    fn steps(&self) -> Channel<'_, 1>;
    /// How ranks sleep; without one they pause ([`crate::sync::pause`]).
    fn bell(&self) -> Option<&dyn Bell>;
}

/// Slots and registers of one kind of vote. Coverage and steps have a channel each, with epochs of
/// its own. A rank that votes on coverage while a peer votes on a step is missing in both, and both
/// end by their deadlines.
#[derive(Clone, Copy, Debug)]
pub struct Channel<'a, const WORDS: usize> {
    /// A slot a rank.
    pub slots: &'a [Slots<WORDS>],
    /// What settles the epochs.
    pub registers: &'a Registers,
}

impl<const WORDS: usize> Channel<'_, WORDS> {
    pub(super) fn cast(
        &self,
        rank: TpRank,
        epoch: Epoch,
        words: [u64; WORDS],
        bell: Option<&dyn Bell>,
    ) {
        let slots = &self.slots[rank.idx()];
        for (place, word) in slots.words[epoch.parity()].iter().zip(words) {
            // Relaxed: the tag's release orders these before it.
            place.store(word, Ordering::Relaxed);
        }
        // Pairs with the acquire in `read`.
        slots.tags[epoch.parity()].store(epoch.0, Ordering::Release);
        if let Some(bell) = bell {
            // Pairs with the fence in `sleep`.
            fence(Ordering::SeqCst);
            ring(slots, bell);
        }
    }

    pub(super) fn read(&self, rank: TpRank, epoch: Epoch) -> Option<[u64; WORDS]> {
        let slots = &self.slots[rank.idx()];
        // Pairs with the release in `cast`.
        if slots.tags[epoch.parity()].load(Ordering::Acquire) != epoch.0 {
            return None;
        }
        // Relaxed: the tag's acquire orders these after it, and the reuse rule keeps them still.
        Some(std::array::from_fn(|idx| {
            slots.words[epoch.parity()][idx].load(Ordering::Relaxed)
        }))
    }

    /// Claims the register and wakes who would sleep on although it is settled.
    pub(super) fn claim(
        &self,
        epoch: Epoch,
        decision: Decision,
        bell: Option<&dyn Bell>,
    ) -> Option<Decision> {
        let stands = self.registers.claim(epoch, decision);
        // Any other decision rests on every ballot, so that nobody waits for one.
        if let (Some(Decision::Missing { .. }), Some(bell)) = (stands, bell) {
            // Pairs with the fence in `sleep`.
            fence(Ordering::SeqCst);
            for slots in self.slots {
                ring(slots, bell);
            }
        }
        stands
    }

    /// Sleeps until `rank` has cast, a claim wakes it, or `budget_ns` has passed.
    pub(super) fn sleep(&self, rank: TpRank, epoch: Epoch, budget_ns: u64, bell: &dyn Bell) {
        let slots = &self.slots[rank.idx()];
        let tag = &slots.tags[epoch.parity()];
        // AcqRel only for form: the fence orders it, and the count guards nothing else.
        slots.sleepers.fetch_add(1, Ordering::AcqRel);
        // Pairs with the fences in `cast` and `claim`: the last look is after the count was raised.
        fence(Ordering::SeqCst);
        // Pairs with the release in `ring`, so before the last look.
        let seen = slots.rung.load(Ordering::Acquire);
        let cast = tag.load(Ordering::Acquire) == epoch.0;
        if !cast && self.registers.decision(epoch).is_none() {
            bell.sleep(&slots.rung, seen, budget_ns);
        }
        slots.sleepers.fetch_sub(1, Ordering::AcqRel);
    }
}

fn ring<const WORDS: usize>(slots: &Slots<WORDS>, bell: &dyn Bell) {
    // Relaxed: the fence before this call orders it; a sleeper that it misses has not slept.
    if slots.sleepers.load(Ordering::Relaxed) != 0 {
        // Pairs with the acquire in `sleep`.
        slots.rung.fetch_add(1, Ordering::Release);
        bell.wake(&slots.rung);
    }
}
