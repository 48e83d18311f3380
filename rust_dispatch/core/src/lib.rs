//! config, guard, build, capture, replay: the decisions of lowlat, with no tensor, no GPU and no
//! clock of their own.
//!
//! Every part is a state machine or a plain function: `now` and messages are arguments, decisions
//! are results. Nothing here reads a clock, the environment or a file, or starts a thread; atomics
//! and the way to wait come through the one module [`sync`]. So a test drives any schedule.
//!
//! | step | question | here |
//! |---|---|---|
//! | config | what was asked for? | [`config`], [`Facts`] |
//! | guard | can this rank serve it? can every rank? | [`guard()`], [`vote`] |
//! | build | bind weights, lay out memory | [`Built`], [`plan`] |
//! | capture | which steps are there, and what runs for each? | [`Captured`], [`graph_key`] |
//! | replay | what runs this step? did it end in time? | [`dispatch`], [`Watchdog`] |
#![deny(unsafe_code, missing_docs)]

pub mod config;
pub mod digest;
pub mod dispatch;
mod flow;
pub mod graph_key;
pub mod guard;
mod ids;
pub mod ladder;
pub mod plan;
mod reason;
pub mod spec;
pub mod sync;
pub mod vote;
mod watchdog;
pub mod words;

pub use dispatch::{Decision, DispatchReport, Dispatcher, StepFacts, StepMode};
pub use flow::{Built, Captured};
pub use graph_key::{GraphKey, GraphMode};
pub use guard::{Decline, Facts, Requirements, Servable, guard};
pub use ids::{Epoch, InstantNs, TpRank};
pub use ladder::{DeadlineLadder, LadderError, RUNGS};
pub use reason::{Reason, ReasonKind};
pub use vote::{Ballot, BallotParts, Board, Coverage, Seat};
pub use watchdog::{FaultReport, Health, StatusWords, Watchdog};
