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
//! | module | holds |
//! |---|---|
//! | `ballot` | what is voted on, and [`Coverage`], the proof of agreement |
//! | `round` | the state machine of one rank, pure: messages and `now` are arguments |
//! | `decision` | the register's word: what fits in it, who may write it |
//! | `board` | the transport for threads of one process, and the hot vote of a step |
//!
//! Where a transport gives every rank the same full list (an all-gather), [`agree`] is enough.

mod ballot;
mod board;
mod decision;
mod round;

pub use ballot::{
    BALLOT_WORDS, Ballot, BallotError, BallotParts, Coverage, MAX_RANKS, MAX_WIDTHS, agree,
};
pub use board::{Board, Seat, SeatError};
pub use decision::{Decision, Register};
pub use round::{Next, Refusal, Round, StepBallot, Votable};
