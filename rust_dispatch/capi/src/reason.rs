//! The numbered reasons in words.

use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

use lowlat_core::Reason;

use crate::border::{c_text, quiet_border};

const UNKNOWN: &CStr = c"unknown reason";

fn look_up(number: u32, table: &[CString]) -> *const c_char {
    let found = Reason::ALL
        .into_iter()
        .position(|reason| reason.number() == number);
    found.map_or(UNKNOWN.as_ptr(), |idx| table[idx].as_ptr())
}

fn table(words: fn(Reason) -> &'static str) -> Vec<CString> {
    Reason::ALL
        .into_iter()
        .map(|reason| c_text(words(reason)))
        .collect()
}

/// The name of a lowlat_reason, such as "tp_size"; "unknown reason" for any other number.
///
/// Ownership: the text stays the library's, as long as that is loaded. Threads: any, at any time.
/// Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_reason_name(number: u32) -> *const c_char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    quiet_border(UNKNOWN.as_ptr(), || {
        look_up(number, NAMES.get_or_init(|| table(Reason::name)))
    })
}

/// A lowlat_reason in words; "unknown reason" for any other number.
///
/// Ownership: the text stays the library's, as long as that is loaded. Threads: any, at any time.
/// Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_reason_words(number: u32) -> *const c_char {
    static WORDS: OnceLock<Vec<CString>> = OnceLock::new();
    quiet_border(UNKNOWN.as_ptr(), || {
        look_up(number, WORDS.get_or_init(|| table(Reason::words)))
    })
}
