//! The one door to atomics, cells and threads: the standard library, or the model checker's
//! doubles of it when built with `--cfg loom`. Nothing else in this crate names either.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;

/// How long a group lives is no part of a protocol, and only this one can be a method's `self`; so
/// the model checker gets it too.
pub use std::sync::Arc;

/// One short pause of the processor, for a word that another core is about to write.
#[cfg(not(loom))]
pub fn spin() {
    std::hint::spin_loop();
}

/// Lets the model checker run another thread.
#[cfg(loom)]
pub fn spin() {
    loom::thread::yield_now();
}

/// Waits a little, the longer the more tries were in vain: 64 processor pauses, then 64 times
/// giving the core away, then sleeps of 50 µs. A peer that is there answers within the pauses, so
/// no system call is made for it; a peer that is not must not cost a core that it needs itself.
#[cfg(not(loom))]
pub fn pause(try_idx: u32) {
    match try_idx {
        0..64 => std::hint::spin_loop(),
        64..128 => std::thread::yield_now(),
        _ => std::thread::sleep(std::time::Duration::from_micros(50)),
    }
}

/// Lets the model checker run another thread.
#[cfg(loom)]
pub fn pause(_try_idx: u32) {
    loom::thread::yield_now();
}
