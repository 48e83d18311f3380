//! The numbered reasons in words.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use lowlat_core::Reason;

use crate::border::c_text;

fn look_up(number: u32, table: &[CString]) -> *const c_char {
    let found = Reason::ALL
        .into_iter()
        .position(|reason| reason.number() == number);
    found.map_or(c"unknown reason".as_ptr(), |idx| table[idx].as_ptr())
}

fn table(words: fn(Reason) -> &'static str) -> Vec<CString> {
    Reason::ALL
        .into_iter()
        .map(|reason| c_text(words(reason)))
        .collect()
}

/// The name of a lowlat_reason, such as "tp_size". Lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_reason_name(number: u32) -> *const c_char {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    look_up(number, NAMES.get_or_init(|| table(Reason::name)))
}

/// A lowlat_reason in words. Lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_reason_words(number: u32) -> *const c_char {
    static WORDS: OnceLock<Vec<CString>> = OnceLock::new();
    look_up(number, WORDS.get_or_init(|| table(Reason::words)))
}
