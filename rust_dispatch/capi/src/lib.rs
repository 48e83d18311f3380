//! The C face of lowlat-core: guard, vote, dispatcher, watchdog. Thin: it checks pointers, keeps
//! handles, and turns a panic into a status, because unwinding into C is undefined.
#![deny(missing_docs)]

mod border;
mod dispatcher;
mod guard;
mod ladder;
mod reason;
mod vote;
mod watchdog;

pub use border::{Status, lowlat_dispatch_abi_version, lowlat_dispatch_last_error};
pub use dispatcher::{
    DispatcherHandle, FactsMode, StepDecision, StepFacts, lowlat_dispatcher_create,
    lowlat_dispatcher_decide, lowlat_dispatcher_destroy, lowlat_dispatcher_disarm,
    lowlat_dispatcher_report, lowlat_dispatcher_switch, lowlat_record_keys_digest,
};
pub use guard::{ServableHandle, lowlat_guard, lowlat_servable_destroy};
pub use ladder::{LadderBudgets, lowlat_ladder_check};
pub use reason::{lowlat_reason_name, lowlat_reason_words};
pub use vote::{
    BallotParts, Board, CoverageHandle, SeatHandle, lowlat_board_create, lowlat_board_destroy,
    lowlat_board_seat, lowlat_coverage_destroy, lowlat_coverage_epoch, lowlat_seat_agree_step,
    lowlat_seat_decline, lowlat_seat_destroy, lowlat_seat_vote,
};
pub use watchdog::{
    Health, WatchdogHandle, lowlat_watchdog_arm, lowlat_watchdog_create, lowlat_watchdog_destroy,
    lowlat_watchdog_disarm, lowlat_watchdog_health,
};
