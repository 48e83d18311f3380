//! What every call has in common: its status, its last error, and the end of unwinding.
//!
//! Every function of the C face is one call of [`border`], or of [`quiet_border`] where it has no
//! status to return. The test `no_entry_unwinds` plants a panic in each of them.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use lowlat_core::Reason;

use crate::handle::{Kind, Reserved, num_live, take};

/// What became of a call; the numbers are those of lowlat_status in lowlat/kernels.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It did what it says.
    Ok = 0,
    /// An argument is wrong.
    Invalid = 1,
    /// A decline: right in itself, but not ours to run; the engine runs its own forward.
    Decline = 2,
    /// A rank is missing or a seal is broken; the plugin is disarmed for good.
    Fault = 3,
    /// We broke our own rule; treat it as a fault.
    Bug = 4,
}

/// Why a call fails: its status, and one line for the caller.
pub(crate) type Failure = (Status, String);

/// An argument is wrong.
pub(crate) fn invalid(words: impl Into<String>) -> Failure {
    (Status::Invalid, words.into())
}

/// An argument that must not be NULL is.
pub(crate) fn null(name: &str) -> Failure {
    invalid(format!("{name} is NULL"))
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

/// The version of this ABI, LOWLAT_DISPATCH_ABI_VERSION of the header. Grows with every change that
/// is not an addition.
pub(crate) const ABI_VERSION: u32 = 2;

/// The version of the library's ABI.
///
/// Ownership: nothing is given. Threads: any, at any time. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_abi_version() -> u32 {
    quiet_border(0, || ABI_VERSION)
}

/// Whether a caller that was compiled against `header_version` can use this library; the first call
/// of an engine, with LOWLAT_DISPATCH_ABI_VERSION.
///
/// Ownership: nothing is given. Threads: any, at any time. Errors: INVALID where the versions
/// differ.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_check_abi(header_version: u32) -> Status {
    border(|| {
        if header_version == ABI_VERSION {
            return Ok(());
        }
        Err(invalid(format!(
            "this library has ABI version {ABI_VERSION}; the caller was compiled for \
             {header_version}: use the header of this library and compile again"
        )))
    })
}

/// The calling thread's last call that did not return LOWLAT_DISPATCH_STATUS_OK, in words, one line
/// a reason; "" before any.
///
/// Ownership: the text stays the library's, valid until that thread's next call into it. Threads:
/// any; each has a text of its own. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_last_error() -> *const c_char {
    quiet_border(c"".as_ptr(), || {
        let text = LAST_ERROR.try_with(|text| text.borrow().as_ptr());
        text.unwrap_or(c"".as_ptr())
    })
}

/// The lowlat_reason of the calling thread's last call that did not return
/// LOWLAT_DISPATCH_STATUS_OK, the first where it gives several; 0 where it has none, such as for a
/// wrong argument.
///
/// Ownership: nothing is given. Threads: any; each has a reason of its own. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_last_reason() -> u32 {
    quiet_border(0, || {
        let reason = LAST_ERROR.try_with(|text| reason_in(&text.borrow().to_string_lossy()));
        reason.ok().flatten().map_or(0, Reason::number)
    })
}

/// The reason that a line begins with: every refusal is "[number] words".
fn reason_in(words: &str) -> Option<Reason> {
    let (number, _) = words.strip_prefix('[')?.split_once(']')?;
    Reason::from_number(number.parse().ok()?)
}

/// How many handles of this process were given and not destroyed, so that an engine can see at its
/// end that it leaks none.
///
/// Ownership: nothing is given. Threads: any, at any time. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_num_handles() -> u64 {
    quiet_border(0, num_live)
}

/// Text for C; NUL bytes, which C cannot hold, are left out.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// Runs `body`, keeps the words of a failure, and turns a panic into [`Status::Bug`].
pub(crate) fn border(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match caught(body).and_then(|ended| ended) {
        Ok(()) => Status::Ok,
        Err((status, words)) => {
            keep(&words);
            status
        }
    }
}

/// Runs `body` where there is no status to return: a panic gives `fallback`, and its words.
pub(crate) fn quiet_border<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    match caught(body) {
        Ok(given) => given,
        Err((_, words)) => {
            keep(&words);
            fallback
        }
    }
}

/// Keeps the words of a failure. A thread that is about to end has no place for them any more.
fn keep(words: &str) {
    let _ = LAST_ERROR.try_with(|text| *text.borrow_mut() = c_text(words));
}

/// The one place where a panic ends.
fn caught<T>(body: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(|| {
        #[cfg(test)]
        tests::PLANT.with(|plant| assert!(!plant.get(), "planted"));
        body()
    }))
    .map_err(|panic| (Status::Bug, format!("bug: {}", panic_words(&*panic))))
}

fn panic_words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic")
}

/// A C string as text.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string that lives and does not change for `'a`.
pub(crate) unsafe fn text_of<'a>(name: &str, text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: not NULL, checked above; terminated and alive by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|_| invalid(format!("{name} is not UTF-8")))
}

/// A list that C hands over.
///
/// # Safety
/// `list` is NULL or points to `count` of them that live and do not change for `'a`.
pub(crate) unsafe fn list_of<'a, T>(
    name: &str,
    list: *const T,
    count: u32,
    most: usize,
) -> Result<&'a [T], Failure> {
    // First: what is too long is not looked at.
    if most < count as usize {
        return Err(invalid(format!(
            "{count} {name} are too many; {most} at most"
        )));
    }
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(null(name));
    }
    if !list.is_aligned() {
        return Err(invalid(format!("{name} is not aligned")));
    }
    // SAFETY: not NULL and aligned, checked above; `count` of them by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(list, count as usize) })
}

/// A struct that C hands over.
///
/// # Safety
/// `value` is NULL or points to one that lives and does not change for `'a`.
pub(crate) unsafe fn struct_of<'a, T>(name: &str, value: *const T) -> Result<&'a T, Failure> {
    // SAFETY: this function's contract is that of `list_of` for one of them.
    let list = unsafe { list_of(name, value, 1, 1) }?;
    Ok(&list[0])
}

/// Where a call puts a result, checked before any work is done for it.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `out` is NULL or valid for a write until [`Out::put`].
    pub(crate) unsafe fn new(name: &str, out: *mut T) -> Result<Self, Failure> {
        if out.is_null() {
            return Err(null(name));
        }
        if !out.is_aligned() {
            return Err(invalid(format!("{name} is not aligned")));
        }
        Ok(Self(out))
    }

    /// Writes the result.
    pub(crate) fn put(self, value: T) {
        // SAFETY: not NULL and aligned, checked in `new`; valid for a write by its contract.
        unsafe { self.0.write(value) };
    }
}

/// Gives a new handle to the caller through `out`.
///
/// # Safety
/// `out` is NULL or valid for a write.
pub(crate) unsafe fn give<T: Kind>(
    name: &str,
    out: *mut *mut T,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    // SAFETY: NULL or valid for a write, by this function's contract.
    let out = unsafe { Out::new(name, out) }?;
    let place = Reserved::new()?;
    out.put(place.fill(make()?));
    Ok(())
}

/// Takes a handle back and frees it; NULL is allowed.
pub(crate) fn destroy<T: Kind>(name: &str, handle: *mut T) -> Status {
    border(|| {
        if !handle.is_null() {
            drop(take(name, handle)?);
        }
        Ok(())
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Whether this thread's next calls panic inside.
        pub(crate) static PLANT: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn a_refusal_begins_with_its_reason() {
        assert_eq!(
            reason_in("[401] rank 1 did not answer"),
            Some(Reason::RankMissing)
        );
        for words in ["", "rank [401]", "[401", "[9999] x", "[-1] x", "[x] y"] {
            assert_eq!(reason_in(words), None, "{words}");
        }
    }

    #[test]
    fn a_panic_becomes_a_status_and_words() {
        let status = border(|| panic!("armed {}", "twice"));
        assert_eq!(status, Status::Bug);
        // SAFETY: the last error is a NUL-terminated string until this thread's next call.
        let words = unsafe { text_of("words", lowlat_dispatch_last_error()) }.unwrap();
        assert_eq!(words, "bug: armed twice");
    }
}
