//! The memory that the ranks of one group share, and how it lies in its file.

use std::fs::File;
use std::io;
use std::mem::size_of;

use lowlat_core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use lowlat_core::vote::{BALLOT_WORDS, Bell, Channel, Lines, MAX_RANKS, Registers, Slots};
use lowlat_core::{Epoch, TpRank};
use memmap2::{MmapOptions, MmapRaw};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::futex::Futex;
use crate::process::Process;

/// "lowlatG" and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"lowlatG\x01");

/// The epoch of the one decision in the register of forming.
pub(crate) const FORMING: Epoch = Epoch(1);

/// One rank's entry, written while the file is locked. `pid` 0: it has not entered.
#[repr(C)]
struct RollEntry {
    pid: AtomicU32,
    started: AtomicU64,
    namespace: AtomicU64,
}

/// The file, from its first byte. Atomics only, so that any bytes are a value of it.
#[repr(C, align(128))]
pub(crate) struct Table {
    /// Written last when the memory is made; 0 before.
    magic: AtomicU64,
    tp_size: AtomicU32,
    first: AtomicU32,
    /// Not 0 once a rank has left or adopted a fault.
    closed: AtomicU32,
    /// How often a rank has entered: what sleepers sleep on while the group forms.
    pub arrivals: AtomicU32,
    /// Cores that a rank may run on, of any rank: a bit a core.
    cores: [AtomicU64; CpuSet::MAX_CPU / 64],
    /// Settles whether the group formed.
    pub forming: Registers,
    roll: [RollEntry; MAX_RANKS],
    coverage_registers: Registers,
    step_registers: Registers,
    coverage: [Slots<BALLOT_WORDS>; MAX_RANKS],
    steps: [Slots<1>; MAX_RANKS],
}

/// Bytes of the file.
pub(crate) const TABLE_BYTES: u64 = size_of::<Table>() as u64;

impl Table {
    /// Whether it was made ready; another value than ours or 0 is an error.
    pub(crate) fn is_ready(&self) -> Result<bool, u64> {
        match self.magic.load(Ordering::Acquire) {
            MAGIC => Ok(true),
            0 => Ok(false),
            other => Err(other),
        }
    }

    /// Makes memory that nobody else uses ready for a group.
    pub(crate) fn make(&self, tp_size: u32, first: Epoch) {
        self.tp_size.store(tp_size, Ordering::Relaxed);
        self.first.store(first.0, Ordering::Relaxed);
        self.closed.store(0, Ordering::Relaxed);
        self.forming.reset(FORMING);
        for registers in [&self.coverage_registers, &self.step_registers] {
            registers.reset(first);
        }
        for entry in &self.roll {
            entry.pid.store(0, Ordering::Relaxed);
        }
        for word in &self.cores {
            word.store(0, Ordering::Relaxed);
        }
        self.coverage.iter().for_each(|slots| slots.reset(first));
        self.steps.iter().for_each(|slots| slots.reset(first));
        // Release: who sees the magic sees all of the above.
        self.magic.store(MAGIC, Ordering::Release);
    }

    pub(crate) fn tp_size(&self) -> u32 {
        self.tp_size.load(Ordering::Relaxed)
    }

    pub(crate) fn first(&self) -> Epoch {
        Epoch(self.first.load(Ordering::Relaxed))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    pub(crate) fn close(&self) {
        self.closed.store(1, Ordering::Release);
    }

    /// Who entered as `rank`.
    pub(crate) fn member(&self, rank: TpRank) -> Option<Process> {
        let entry = &self.roll[rank.idx()];
        // Acquire: pairs with the release in `enter`.
        let pid = entry.pid.load(Ordering::Acquire);
        (pid != 0).then(|| Process {
            pid,
            started: entry.started.load(Ordering::Relaxed),
            namespace: entry.namespace.load(Ordering::Relaxed),
        })
    }

    pub(crate) fn enter(&self, rank: TpRank, process: Process) {
        // Where it cannot be told, a rank has no core of its own.
        if let Ok(cores) = sched_getaffinity(None) {
            for core in (0..CpuSet::MAX_CPU).filter(|&core| cores.is_set(core)) {
                self.cores[core / 64].fetch_or(1 << (core % 64), Ordering::Relaxed);
            }
        }
        let entry = &self.roll[rank.idx()];
        entry.started.store(process.started, Ordering::Relaxed);
        entry.namespace.store(process.namespace, Ordering::Relaxed);
        entry.pid.store(process.pid, Ordering::Release);
        self.arrivals.fetch_add(1, Ordering::AcqRel);
    }

    /// How many cores the ranks that have entered may run on, all together. A rank that is pinned
    /// sees one core alone, and its peers have others.
    fn num_cores(&self) -> u32 {
        let words = self.cores.iter();
        words
            .map(|word| word.load(Ordering::Relaxed).count_ones())
            .sum()
    }
}

/// A group's file, mapped.
#[derive(Debug)]
pub(crate) struct Memory {
    map: MmapRaw,
    tp_size: u32,
    bell: Futex,
}

impl Memory {
    /// Maps a file of [`TABLE_BYTES`] for a group of `tp_size`, at most [`MAX_RANKS`].
    ///
    /// # Errors
    /// Those of the mapping.
    pub(crate) fn map(file: &File, tp_size: u32) -> io::Result<Self> {
        let map = MmapOptions::new().len(TABLE_BYTES as usize).map_raw(file)?;
        Ok(Self {
            map,
            tp_size,
            bell: Futex::default(),
        })
    }

    pub(crate) fn table(&self) -> &Table {
        // SAFETY: the mapping is as long as a Table (`map`), begins at a page, which is a multiple
        // of its alignment, and lives as long as `self`. A Table is atomics only, so any bytes are
        // valid, and other processes may write them at any time. The file keeps its length: it is
        // this user's own (`group`), and nothing of ours shortens it.
        unsafe { &*self.map.as_ptr().cast::<Table>() }
    }

    /// The group has formed, so that it is known whether each rank can have a core.
    pub(crate) fn formed(&self) {
        self.bell.settle(self.tp_size <= self.table().num_cores());
    }

    pub(crate) fn futex(&self) -> &Futex {
        &self.bell
    }
}

impl Lines for Memory {
    fn coverage(&self) -> Channel<'_, BALLOT_WORDS> {
        let table = self.table();
        Channel {
            slots: &table.coverage[..self.tp_size as usize],
            registers: &table.coverage_registers,
        }
    }

    fn steps(&self) -> Channel<'_, 1> {
        let table = self.table();
        Channel {
            slots: &table.steps[..self.tp_size as usize],
            registers: &table.step_registers,
        }
    }

    fn bell(&self) -> Option<&dyn Bell> {
        Some(&self.bell)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Ranks of two builds may meet in one file. Where these numbers change, so must the version
    /// in [`MAGIC`], that the one refuses the other's.
    #[test]
    fn the_layout_is_that_of_its_version() {
        let places = [
            offset_of!(Table, magic),
            offset_of!(Table, tp_size),
            offset_of!(Table, first),
            offset_of!(Table, closed),
            offset_of!(Table, arrivals),
            offset_of!(Table, cores),
            offset_of!(Table, forming),
            offset_of!(Table, roll),
            offset_of!(Table, coverage_registers),
            offset_of!(Table, step_registers),
            offset_of!(Table, coverage),
            offset_of!(Table, steps),
        ];
        assert_eq!(MAGIC.to_le_bytes(), *b"lowlatG\x01");
        assert_eq!(
            places,
            [0, 8, 12, 16, 20, 24, 256, 384, 1920, 2048, 2176, 34944]
        );
        assert_eq!(
            [
                size_of::<RollEntry>(),
                size_of::<Slots<1>>(),
                size_of::<Table>()
            ],
            [24, 128, 43136]
        );
    }
}
