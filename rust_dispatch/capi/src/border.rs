//! What every call has in common: its status, its last error, and the end of unwinding.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

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

/// Version of this ABI; an engine refuses another than its header's.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_abi_version() -> u32 {
    1
}

/// The calling thread's last call that did not return LOWLAT_DISPATCH_STATUS_OK, in words, one line
/// a reason; "" before any. Valid until that thread's next call into this library.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatch_last_error() -> *const c_char {
    LAST_ERROR.with(|text| text.borrow().as_ptr())
}

/// Text for C; NUL bytes, which C cannot hold, are left out.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// Runs `body`, keeps the words of a failure, and turns a panic into [`Status::Bug`].
pub(crate) fn border(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    let ended = catch_unwind(AssertUnwindSafe(body));
    let (status, words) = match ended {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => (Status::Bug, format!("bug: {}", panic_words(&*panic))),
    };
    LAST_ERROR.with(|text| *text.borrow_mut() = c_text(&words));
    status
}

/// Runs `body` where there is no status to return; a panic is swallowed after it was reported.
pub(crate) fn quiet_border(body: impl FnOnce()) {
    let _ = border(|| {
        body();
        Ok(())
    });
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

/// Gives a new handle to the caller through `out`.
///
/// # Safety
/// `out` is NULL or valid for a write.
pub(crate) unsafe fn give<T>(
    name: &str,
    out: *mut *mut T,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    if out.is_null() {
        return Err(null(name));
    }
    let handle = Box::into_raw(Box::new(make()?));
    // SAFETY: not NULL, checked above; valid for a write by this function's contract.
    unsafe { out.write(handle) };
    Ok(())
}

/// Takes a handle back and frees it; NULL is allowed.
///
/// # Safety
/// `handle` is NULL or came from [`give`] and was not taken back before.
pub(crate) unsafe fn take_back<T>(handle: *mut T) {
    if handle.is_null() {
        return;
    }
    // SAFETY: it came from `Box::into_raw` in `give`, once, by this function's contract.
    let handle = unsafe { Box::from_raw(handle) };
    quiet_border(|| drop(handle));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_words() {
        let status = border(|| panic!("armed {}", "twice"));
        assert_eq!(status, Status::Bug);
        // SAFETY: the last error is a NUL-terminated string until this thread's next call.
        let words = unsafe { text_of("words", lowlat_dispatch_last_error()) }.unwrap();
        assert_eq!(words, "bug: armed twice");
    }
}
