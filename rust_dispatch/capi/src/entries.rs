//! What holds for every function of the C face.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use crate::border::tests::PLANT;
use crate::*;

/// Every function with arguments of nothing, and what each must return when its inside panics.
macro_rules! entries {
    ($($name:ident($($argument:expr),*) => $returned:expr;)*) => {
        /// Names of all, and a call of each: whether it returned what it must.
        const ENTRIES: &[(&str, fn() -> bool)] = &[$((stringify!($name), || {
            #[allow(unused_unsafe)] // Some of them are safe.
            // SAFETY: NULL is allowed everywhere, and numbers are.
            let returned = unsafe { $name($($argument),*) };
            returned == $returned
        }),)*];
    };
}

entries! {
    lowlat_ballot_words(null(), 0, null(), null_mut()) => Status::Bug;
    lowlat_ballot_words_declining(0, 1, 101, null_mut()) => Status::Bug;
    lowlat_ballots_agree(0, null(), 1, null_mut()) => Status::Bug;
    lowlat_board_create(1, null_mut()) => Status::Bug;
    lowlat_board_destroy(null_mut()) => Status::Bug;
    lowlat_board_seat(null(), 0, null_mut()) => Status::Bug;
    lowlat_coverage_destroy(null_mut()) => Status::Bug;
    lowlat_coverage_epoch(null(), null_mut()) => Status::Bug;
    lowlat_dispatch_abi_version() => 0;
    lowlat_dispatch_check_abi(2) => Status::Bug;
    lowlat_dispatch_last_error() => c"".as_ptr();
    lowlat_dispatch_last_reason() => 0;
    lowlat_dispatch_num_handles() => 0;
    lowlat_dispatcher_create(null(), null(), null_mut()) => Status::Bug;
    lowlat_dispatcher_decide(null_mut(), null(), null_mut()) => Status::Bug;
    lowlat_dispatcher_destroy(null_mut()) => Status::Bug;
    lowlat_dispatcher_disarm(null_mut(), 401) => Status::Bug;
    lowlat_dispatcher_report(null_mut(), null_mut()) => Status::Bug;
    lowlat_dispatcher_switch(null_mut(), 1) => Status::Bug;
    lowlat_group_join(null(), 0, 1, null(), 1, null_mut()) => Status::Bug;
    lowlat_guard(null(), null(), null_mut()) => Status::Bug;
    lowlat_guard_model(null(), null(), null_mut()) => Status::Bug;
    lowlat_ladder_check(null()) => Status::Bug;
    lowlat_reason_name(101) => lowlat_reason_name(9999);
    lowlat_reason_words(101) => lowlat_reason_words(9999);
    lowlat_record_check_seals(null(), 0, null(), 0) => Status::Bug;
    lowlat_record_compare(null(), null()) => Status::Bug;
    lowlat_record_destroy(null_mut()) => Status::Bug;
    lowlat_record_digest(null(), null_mut()) => Status::Bug;
    lowlat_record_keys_digest(null(), null_mut()) => Status::Bug;
    lowlat_record_num_graphs(null(), null_mut()) => Status::Bug;
    lowlat_record_read(null(), null_mut()) => Status::Bug;
    lowlat_record_text(null(), null_mut()) => Status::Bug;
    lowlat_recorder_create(null_mut()) => Status::Bug;
    lowlat_recorder_destroy(null_mut()) => Status::Bug;
    lowlat_recorder_finish(null_mut(), null_mut()) => Status::Bug;
    lowlat_recorder_note(null_mut(), null(), 0, null(), 0) => Status::Bug;
    lowlat_seat_agree_step(null_mut(), 0, 1) => Status::Bug;
    lowlat_seat_decline(null_mut(), 101, 1) => Status::Bug;
    lowlat_seat_destroy(null_mut()) => Status::Bug;
    lowlat_seat_vote(null_mut(), null(), null(), 1, null_mut()) => Status::Bug;
    lowlat_servable_destroy(null_mut()) => Status::Bug;
    lowlat_step_digest(null(), null_mut()) => Status::Bug;
    lowlat_watchdog_arm(null_mut(), 0) => Status::Bug;
    lowlat_watchdog_create(1, 1, null_mut()) => Status::Bug;
    lowlat_watchdog_destroy(null_mut()) => Status::Bug;
    lowlat_watchdog_disarm(null_mut()) => Status::Bug;
    lowlat_watchdog_health(null_mut(), 0, null_mut(), null_mut()) => Status::Bug;
}

const HEADER: &str = include_str!("../include/lowlat/dispatch.h");

/// Name and comment of every function of the header.
fn functions() -> Vec<(String, String)> {
    let mut functions = Vec::new();
    let mut comment = String::new();
    for line in HEADER.lines() {
        match line.trim_start() {
            "/**" => comment.clear(),
            text if text.starts_with('*') => {
                comment.push_str(text.trim_start_matches('*'));
                comment.push('\n');
            }
            _ => {
                let before = line.split('(').next().unwrap_or_default();
                let name = before.rsplit([' ', '*']).next().unwrap_or_default();
                if line.contains('(') && name.starts_with("lowlat_") {
                    functions.push((name.to_owned(), std::mem::take(&mut comment)));
                }
            }
        }
    }
    functions.sort();
    functions
}

#[test]
fn the_list_of_entries_is_the_header() {
    let listed: Vec<_> = ENTRIES.iter().map(|(name, _)| name.to_string()).collect();
    let declared: Vec<_> = functions().into_iter().map(|(name, _)| name).collect();
    assert_eq!(listed, declared);
}

#[test]
fn every_function_says_who_owns_what_on_which_thread_with_which_errors() {
    for (name, comment) in functions() {
        for word in ["Ownership:", "Threads:", "Errors"] {
            assert!(comment.contains(word), "{name} does not say {word}");
        }
    }
}

#[test]
fn no_entry_unwinds() {
    for (name, call) in ENTRIES {
        PLANT.set(true);
        let returned = std::panic::catch_unwind(call);
        PLANT.set(false);
        assert!(matches!(returned, Ok(true)), "{name}");
        let words: *const c_char = lowlat_dispatch_last_error();
        // SAFETY: a terminated text until this thread's next call.
        let words = unsafe { CStr::from_ptr(words) };
        assert_eq!(words, c"bug: planted", "{name}");
    }
}
