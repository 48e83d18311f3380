//! The C face of lowlat-core: guard, vote, records, dispatcher, watchdog. Thin: it looks handles
//! up, checks pointers and counts, and turns a panic into a status, because unwinding into C is
//! undefined.
#![deny(missing_docs)]

mod border;
mod dispatcher;
#[cfg(test)]
mod entries;
mod guard;
mod handle;
mod ladder;
mod reason;
mod record;
mod vote;
mod watchdog;

pub use border::{
    Status, lowlat_dispatch_abi_version, lowlat_dispatch_check_abi, lowlat_dispatch_last_error,
    lowlat_dispatch_last_reason, lowlat_dispatch_num_handles,
};
pub use dispatcher::{
    DispatcherHandle, FactsMode, StepDecision, StepFacts, lowlat_dispatcher_create,
    lowlat_dispatcher_decide, lowlat_dispatcher_destroy, lowlat_dispatcher_disarm,
    lowlat_dispatcher_report, lowlat_dispatcher_switch, lowlat_step_digest,
};
pub use guard::{ServableHandle, lowlat_guard, lowlat_guard_model, lowlat_servable_destroy};
pub use ladder::{LadderBudgets, lowlat_ladder_check};
pub use reason::{lowlat_reason_name, lowlat_reason_words};
pub use record::{
    GraphPath, KeyParts, RecordHandle, RecorderHandle, SealParts, lowlat_record_check_seals,
    lowlat_record_compare, lowlat_record_destroy, lowlat_record_digest, lowlat_record_keys_digest,
    lowlat_record_num_graphs, lowlat_record_read, lowlat_record_text, lowlat_recorder_create,
    lowlat_recorder_destroy, lowlat_recorder_finish, lowlat_recorder_note,
};
pub use vote::{
    BallotParts, Board, CoverageHandle, SeatHandle, lowlat_ballot_words,
    lowlat_ballot_words_declining, lowlat_ballots_agree, lowlat_board_create, lowlat_board_destroy,
    lowlat_board_seat, lowlat_coverage_destroy, lowlat_coverage_epoch, lowlat_group_join,
    lowlat_seat_agree_step, lowlat_seat_decline, lowlat_seat_destroy, lowlat_seat_vote,
};
pub use watchdog::{
    Health, WatchdogHandle, lowlat_watchdog_arm, lowlat_watchdog_create, lowlat_watchdog_destroy,
    lowlat_watchdog_disarm, lowlat_watchdog_health,
};
