//! The vote's protocols under the model checker: two ranks, every interleaving that the C11 memory
//! model allows, up to two preemptions. A bound of one finds each planted bug; the second costs
//! nothing. Built only with `RUSTFLAGS="--cfg loom"`:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p lowlat-core --test core_vote_loom
//! ```
//!
//! | planted once | fails |
//! |---|---|
//! | the tag's release in `Channel::cast` made relaxed | `two_ranks_agree_on_what_was_cast` |
//! | acting on the own proposal, not on what the register holds | `a_deadline_that_falls...` |
//! | no fence in `Channel::cast`, or none in `Channel::sleep` | `nobody_sleeps_through_a_ballot` |
//! | a ring that is not counted in `ring` | both `nobody_sleeps_through_...` |
//! | no look at the register in `Channel::sleep` | `nobody_sleeps_through_a_missing_rank` |
//! | a plain store in place of the swap in `Registers::claim` | `a_group_forms_...` |
#![cfg(loom)]

use loom::sync::{Condvar, Mutex};
use loom::thread;
use lowlat_core::sync::atomic::{AtomicU32, Ordering};
use lowlat_core::vote::{Bell, Decision, Registers};
use lowlat_core::{Board, Epoch, InstantNs, TpRank};

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// `polls` counts as time: the deadline passes after that many looks at the clock.
fn clock(polls: u64) -> impl FnMut() -> InstantNs {
    let mut looked = 0;
    move || {
        looked += 1;
        InstantNs(if looked <= polls { 0 } else { 1_000 })
    }
}

/// A futex as the kernel makes one: word and queue under one lock. Nobody is woken by time, so that
/// who sleeps through what it waits for sleeps for ever, and the model checker says so.
#[derive(Debug, Default)]
struct Futex {
    queue: Mutex<()>,
    rung: Condvar,
}

impl Bell for Futex {
    fn tries(&self) -> u32 {
        0
    }

    fn sleep(&self, word: &AtomicU32, seen: u32, _budget_ns: u64) {
        let queue = self.queue.lock().unwrap();
        if word.load(Ordering::Relaxed) == seen {
            // Once, as the kernel: the caller looks again.
            drop(self.rung.wait(queue).unwrap());
        }
    }

    fn wake(&self, _word: &AtomicU32) {
        let _queue = self.queue.lock().unwrap();
        self.rung.notify_all();
    }
}

#[test]
fn two_ranks_agree_on_what_was_cast() {
    check(|| {
        let board = Board::new(2).unwrap();
        let mut second = board.seat(TpRank(1)).unwrap();
        let peer = thread::spawn(move || second.agree_step(7, 100, clock(u64::MAX)));
        let mut first = board.seat(TpRank(0)).unwrap();
        assert_eq!(first.agree_step(7, 100, clock(u64::MAX)), Decision::Agreed);
        assert_eq!(peer.join().unwrap(), Decision::Agreed);
    });
}

#[test]
fn a_deadline_that_falls_with_the_last_ballot_ends_both_alike() {
    check(|| {
        let board = Board::new(2).unwrap();
        let mut second = board.seat(TpRank(1)).unwrap();
        let peer = thread::spawn(move || second.agree_step(7, 100, clock(1)));
        let mut first = board.seat(TpRank(0)).unwrap();
        let own = first.agree_step(7, 100, clock(2));
        assert_eq!(own, peer.join().unwrap());
    });
}

/// Two epochs, so that slots of both parities are slept on.
#[test]
fn nobody_sleeps_through_a_ballot() {
    check(|| {
        let bell = Box::new(Futex::default());
        let board = Board::with_bell(2, Epoch(u32::MAX), Some(bell)).unwrap();
        let mut second = board.seat(TpRank(1)).unwrap();
        let peer = thread::spawn(move || second.agree_step(7, 100, clock(u64::MAX)));
        let mut first = board.seat(TpRank(0)).unwrap();
        assert_eq!(first.agree_step(7, 100, clock(u64::MAX)), Decision::Agreed);
        assert_eq!(peer.join().unwrap(), Decision::Agreed);
    });
}

/// Of three ranks one never votes, and one of the others has the shorter deadline: its claim wakes
/// the one that sleeps.
#[test]
fn nobody_sleeps_through_a_missing_rank() {
    check(|| {
        let bell = Box::new(Futex::default());
        let board = Board::with_bell(3, Epoch(1), Some(bell)).unwrap();
        let mut second = board.seat(TpRank(1)).unwrap();
        let peer = thread::spawn(move || second.agree_step(7, 100, clock(1)));
        let mut first = board.seat(TpRank(0)).unwrap();
        let missing = first.agree_step(7, 100, clock(u64::MAX));
        assert!(matches!(missing, Decision::Missing { .. }));
        assert_eq!(peer.join().unwrap(), missing);
    });
}

/// Forming: the last rank has entered while another's deadline passes; one register settles it.
#[test]
fn a_group_forms_for_both_ranks_or_for_neither() {
    check(|| {
        let registers = std::sync::Arc::new(Registers::before(Epoch(1)));
        let late = std::sync::Arc::clone(&registers);
        let missing = Decision::Missing { rank: TpRank(1) };
        let peer = thread::spawn(move || late.claim(Epoch(1), missing));
        let own = registers.claim(Epoch(1), Decision::Agreed);
        assert_eq!(own, peer.join().unwrap());
        assert_eq!(registers.decision(Epoch(1)), own);
    });
}
