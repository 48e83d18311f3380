//! Sleeping until another process writes a word.

use lowlat_core::sync::atomic::{AtomicU32, Ordering};
use lowlat_core::vote::Bell;
use rustix::thread::futex::{self, Flags};
use rustix::time::Timespec;

/// Looks before a rank sleeps, where each rank has a core: some 120 µs, more than being woken
/// takes. With less, a rank that has just woken its peer gives up on it before that has come to,
/// sleeps in its turn, and so on vote after vote: few looks make a median of 6 µs out of 0.25 µs.
const TRIES: u32 = 2_000;

/// The same where ranks share cores: a rank that spins keeps from its core whom it waits for.
const TRIES_SHARED: u32 = 16;

/// The kernel's futex, on words that processes share.
#[derive(Debug)]
pub(crate) struct Futex {
    tries: AtomicU32,
}

impl Default for Futex {
    fn default() -> Self {
        Self {
            tries: AtomicU32::new(TRIES_SHARED),
        }
    }
}

impl Futex {
    /// Whether each rank can have a core of its own.
    pub(crate) fn settle(&self, a_core_each: bool) {
        let tries = if a_core_each { TRIES } else { TRIES_SHARED };
        // Relaxed: a number that guards nothing, and this process's own.
        self.tries.store(tries, Ordering::Relaxed);
    }
}

impl Bell for Futex {
    fn tries(&self) -> u32 {
        self.tries.load(Ordering::Relaxed)
    }

    fn sleep(&self, word: &AtomicU32, seen: u32, budget_ns: u64) {
        let budget = Timespec {
            tv_sec: (budget_ns / 1_000_000_000) as i64,
            tv_nsec: (budget_ns % 1_000_000_000) as i64,
        };
        // Whatever ended it (a wake, the budget, a signal, a word that changed before): the caller
        // looks again.
        let _ = futex::wait(word, Flags::empty(), seen, Some(&budget));
    }

    fn wake(&self, word: &AtomicU32) {
        // It fails only for a word outside this process.
        let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
    }
}
