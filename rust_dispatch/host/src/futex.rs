//! Sleeping until another process writes a word.

use lowlat_core::sync::atomic::AtomicU32;
use lowlat_core::vote::Bell;
use rustix::thread::futex::{self, Flags};
use rustix::time::Timespec;

/// Looks before a rank sleeps, where each rank has a core: some 50 µs, the time that falling asleep
/// and being woken costs.
const TRIES: u32 = 400;

/// The same where ranks share cores: a rank that spins keeps from its core whom it waits for.
const TRIES_SHARED: u32 = 16;

/// The kernel's futex, on words that processes share.
#[derive(Debug)]
pub(crate) struct Futex {
    tries: u32,
}

impl Futex {
    /// For a group of `tp_size` ranks on this machine.
    pub(crate) fn new(tp_size: u32) -> Self {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let tries = if tp_size as usize <= num_cores {
            TRIES
        } else {
            TRIES_SHARED
        };
        Self { tries }
    }
}

impl Bell for Futex {
    fn tries(&self) -> u32 {
        self.tries
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
