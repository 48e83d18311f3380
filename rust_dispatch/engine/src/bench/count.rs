//! Counting what a piece of work costs: allocations, and instructions where the machine counts
//! them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts for each thread how often it is asked. The engine's binary
/// installs it; the count is one addition beside an allocation.
#[derive(Debug)]
pub struct Counting;

fn note() {
    // A thread that ends may free and allocate after its own counter is gone.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to `System` with the caller's own arguments, so its contract is ours.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller keeps `GlobalAlloc`'s contract for `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller keeps `GlobalAlloc`'s contract for `layout`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from one of the others, so from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note();
        // SAFETY: `pointer` came from `System`, and the caller keeps the contract for the sizes.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Allocations of this thread while `work` runs; `None` in a program without [`Counting`].
pub fn allocations(work: impl FnOnce()) -> Option<u64> {
    let count = || ALLOCATIONS.with(Cell::get);
    let before = count();
    drop(std::hint::black_box(Box::new(0_u8)));
    let counted = count() != before;
    let before = count();
    work();
    counted.then(|| count() - before)
}

/// What a counter of the machine counts, in `perf_event_open`'s terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    kind: u32,
    config: u64,
}

/// Instructions that this thread retired, without the kernel's.
pub(crate) const INSTRUCTIONS: Event = Event { kind: 0, config: 1 };

/// How often `event` happened on this thread while `work` ran.
///
/// # Errors
/// Why the machine does not count it; then `work` did not run.
pub(crate) fn events(event: Event, work: impl FnOnce()) -> io::Result<u64> {
    let counter = open(event)?;
    let before = read(&counter)?;
    work();
    Ok(read(&counter)? - before)
}

/// `struct perf_event_attr` of its first published size.
fn open(event: Event) -> io::Result<OwnedFd> {
    const SIZE: u64 = 64;
    const EXCLUDE_KERNEL: u64 = 1 << 5;
    const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
    let attributes: [u64; 8] = [
        u64::from(event.kind) | SIZE << 32,
        event.config,
        0,
        0,
        0,
        EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR,
        0,
        0,
    ];
    const { assert!(SIZE as usize == size_of::<[u64; 8]>()) };
    let (this_thread, any_core, no_group) = (0, -1, -1);
    // SAFETY: `attributes` is as long as it says and lives until the call has copied it.
    let descriptor = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attributes.as_ptr(),
            this_thread,
            any_core,
            no_group,
            0,
        )
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

fn read(counter: &OwnedFd) -> io::Result<u64> {
    let mut count = [0; 8];
    // SAFETY: `count` is valid for a write of its length.
    let length = unsafe { libc::read(counter.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    match length {
        8 => Ok(u64::from_ne_bytes(count)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page faults, which every machine counts, stand in for instructions, which a virtual machine
    /// often does not.
    #[test]
    fn events_are_counted_where_that_is_permitted() {
        let page_faults = Event { kind: 1, config: 2 };
        let touch = || {
            let pages = vec![1_u8; 64 << 12];
            std::hint::black_box(&pages);
        };
        match events(page_faults, touch) {
            Ok(count) => assert!((1..100_000).contains(&count), "{count}"),
            Err(error) => println!("skipped: {error}"),
        }
        assert!(
            events(
                Event {
                    kind: 99,
                    config: 0
                },
                || panic!("it ran")
            )
            .is_err()
        );
    }

    #[test]
    fn a_program_that_does_not_count_says_so() {
        assert_eq!(allocations(|| drop(vec![1_u8; 7])), None);
    }
}
