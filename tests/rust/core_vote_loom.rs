//! The board under the model checker: two ranks, every interleaving that the C11 memory model
//! allows, up to two preemptions. Built only with `RUSTFLAGS="--cfg loom"`:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p lowlat-core --test core_vote_loom
//! ```
//!
//! Planted once: the tag's release in `Channel::cast` made relaxed lets a rank read a ballot that
//! is not there yet, and `two_ranks_agree_on_what_was_cast` fails; acting on the own proposal
//! instead of on what the register holds fails the other one.
#![cfg(loom)]

use loom::thread;
use lowlat_core::vote::Decision;
use lowlat_core::{Board, InstantNs, TpRank};

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
