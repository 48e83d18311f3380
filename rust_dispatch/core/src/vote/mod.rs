//! The coverage vote: all ranks or none, by value, within a deadline.
//!
//! A step that one rank runs and another does not is a hang. So every rank casts a [`Ballot`], and
//! one **decision register** an epoch holds what became of them: the first rank that can decide
//! writes it, and every rank, the writer too, acts on what the register holds. A rank decides when
//! it has every ballot (agreed, or who differs in what) or when its deadline passes (who is
//! missing). Two ranks can therefore never end an epoch differently, not even when the last ballot
//! and a deadline fall together, and none waits past its own deadline.
//!
//! A missing rank is a fault: no rank that adopted it votes again in that group, so a rank that
//! comes late or is started again never joins an old epoch. A difference is a decline that names
//! the rank and the two values; the group may vote again.
//!
//! # Properties
//!
//! Each is held by the tests that are named, in `tests/rust/`. "Simulation" is
//! `core_vote_simulation`: 2 to 64 ranks over seeded delays, losses, duplicates, crashes, stops,
//! restarts and clock jumps. "Model" is `core_vote_loom`: two ranks, every interleaving.
//!
//! 1. All or none: an epoch has one decision, and every rank that ends it acts on that (simulation;
//!    model: `a_deadline_that_falls_with_the_last_ballot_ends_both_alike`).
//! 2. No rank enters a step that another declines: agreed means that all cast the same (simulation;
//!    model: `two_ranks_agree_on_what_was_cast`).
//! 3. A vote is bounded: from its deadline on a rank never waits, and the missing rank is named,
//!    the same on every rank. A clock that jumps ahead ends it early and alike, one that jumps back
//!    gives no time back (simulation; `core_vote_threads`:
//!    `a_silent_rank_is_a_fault_that_names_it`).
//! 4. A rank that died, was started again or comes late never joins an old epoch: a seat is given
//!    once, after a fault a seat votes no more, and who may enter a group of processes is decided
//!    by its [`Roll`] (simulation; `core_vote_threads`:
//!    `a_late_rank_ends_like_those_who_gave_up_and_nobody_votes_again`,
//!    `a_rank_that_was_started_again_gets_no_seat`; `host_group`:
//!    `a_rank_that_was_started_again_waits_for_a_fresh_group`).
//! 5. Epochs survive their wrap (simulation; `host_group`:
//!    `ranks_agree_differ_and_go_on_across_the_wrap_of_epochs`).
//! 6. A vote whose peers have voted makes no system call and allocates nothing
//!    (`core_vote_threads`: `a_vote_that_need_not_wait_touches_no_bell`; `host_group`:
//!    `a_vote_that_need_not_wait_makes_no_system_call`; `core_hot_path`:
//!    `the_hot_vote_allocates_nothing`).
//! 7. Nobody sleeps through what it waits for (model: `nobody_sleeps_through_a_ballot`,
//!    `nobody_sleeps_through_a_missing_rank`).
//!
//! # Transports
//!
//! | ranks are | vote by |
//! |---|---|
//! | threads of one process | a [`Board`] |
//! | processes of one host | `lowlat_host::join`, the same [`Seat`] in shared memory |
//! | anywhere, with an all-gather of the caller's | [`agree`] over the full list of ballots |
//!
//! | module | holds |
//! |---|---|
//! | `ballot` | what is voted on, and [`Coverage`], the proof of agreement |
//! | `round` | the state machine of one rank, pure: messages and `now` are arguments |
//! | `decision` | the register's word: what fits in it, who may write it |
//! | `lines` | the memory that ranks vote in, whoever owns it, and how they sleep |
//! | `seat` | one rank's place in a group, and the hot vote of a step |
//! | `board` | the memory of ranks that are threads of one process |
//! | `roll` | who may enter a group of processes, and what a fresh group may take over |

mod ballot;
mod board;
mod decision;
mod lines;
mod roll;
mod round;
mod seat;

pub use ballot::{
    BALLOT_WORDS, Ballot, BallotError, BallotParts, Coverage, MAX_RANKS, MAX_WIDTHS, agree,
};
pub use board::{Board, SeatError};
pub use decision::{Decision, Register};
pub use lines::{Bell, Channel, Lines, Registers, Slots};
pub use roll::{Admission, Member, Roll};
pub use round::{Next, Refusal, Round, StepBallot, Votable};
pub use seat::Seat;
