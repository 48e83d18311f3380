//! The transport for ranks that are threads of one process: the group's memory on the heap.

use super::ballot::{BALLOT_WORDS, MAX_RANKS};
use super::lines::{Bell, Channel, Lines, Registers, Slots};
use super::seat::Seat;
use crate::ids::{Epoch, TpRank};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A group of ranks that are threads of this process.
///
/// ```
/// use std::time::Instant;
/// use lowlat_core::{InstantNs, TpRank};
/// use lowlat_core::vote::{Board, Decision};
/// let board = Board::new(2).unwrap();
/// let start = Instant::now();
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let mut seat = board.seat(TpRank(rank)).unwrap();
///         scope.spawn(move || {
///             let now = || InstantNs(start.elapsed().as_nanos() as u64);
///             assert_eq!(seat.agree_step(7, 10_000_000_000, now), Decision::Agreed);
///         });
///     }
/// });
/// ```
#[derive(Debug)]
pub struct Board {
    memory: Arc<Memory>,
    first: Epoch,
    /// A bit a rank whose seat was given.
    taken: AtomicU64,
}

#[derive(Debug)]
struct Memory {
    coverage: Box<[Slots<BALLOT_WORDS>]>,
    coverage_registers: Registers,
    steps: Box<[Slots<1>]>,
    step_registers: Registers,
    bell: Option<Box<dyn Bell>>,
}

impl Lines for Memory {
    fn coverage(&self) -> Channel<'_, BALLOT_WORDS> {
        Channel {
            slots: &self.coverage,
            registers: &self.coverage_registers,
        }
    }

    fn steps(&self) -> Channel<'_, 1> {
        Channel {
            slots: &self.steps,
            registers: &self.step_registers,
        }
    }

    fn bell(&self) -> Option<&dyn Bell> {
        self.bell.as_deref()
    }
}

/// Why a rank gets no seat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SeatError {
    /// The group's size cannot be voted with.
    #[error("tp_size is {0}; a vote needs 1 to {MAX_RANKS}")]
    Size(u32),
    /// The rank is outside the group.
    #[error("tp_rank is {rank}; it must be below tp_size, {tp_size}")]
    Outside {
        /// The rank that asked.
        rank: u32,
        /// Ranks of the group.
        tp_size: u32,
    },
    /// The seat was given before: a rank that was started again needs a new group.
    #[error("the seat of {0} is taken; a rank that was started again needs a new group")]
    Taken(TpRank),
}

impl Board {
    /// A group of `tp_size` ranks, 1 to [`MAX_RANKS`].
    ///
    /// # Errors
    /// [`SeatError::Size`] for another size.
    pub fn new(tp_size: u32) -> Result<Arc<Self>, SeatError> {
        Self::starting_at(tp_size, Epoch(1))
    }

    /// The same, with the first epoch given, so that a test can begin just before the wrap.
    ///
    /// # Errors
    /// [`SeatError::Size`] for another size.
    pub fn starting_at(tp_size: u32, first: Epoch) -> Result<Arc<Self>, SeatError> {
        Self::with_bell(tp_size, first, None)
    }

    /// The same, for ranks that sleep in the way that `bell` knows.
    ///
    /// # Errors
    /// [`SeatError::Size`] for another size.
    pub fn with_bell(
        tp_size: u32,
        first: Epoch,
        bell: Option<Box<dyn Bell>>,
    ) -> Result<Arc<Self>, SeatError> {
        if tp_size == 0 || MAX_RANKS < tp_size as usize {
            return Err(SeatError::Size(tp_size));
        }
        let memory = Memory {
            coverage: (0..tp_size).map(|_| Slots::before(first)).collect(),
            coverage_registers: Registers::before(first),
            steps: (0..tp_size).map(|_| Slots::before(first)).collect(),
            step_registers: Registers::before(first),
            bell,
        };
        Ok(Arc::new(Self {
            memory: Arc::new(memory),
            first,
            taken: AtomicU64::new(0),
        }))
    }

    /// The seat of one rank, given once. A seat that is dropped is not given again.
    ///
    /// # Errors
    /// [`SeatError::Outside`] and [`SeatError::Taken`].
    pub fn seat(self: &Arc<Self>, rank: TpRank) -> Result<Seat, SeatError> {
        let tp_size = self.memory.steps.len() as u32;
        if tp_size <= rank.0 {
            return Err(SeatError::Outside {
                rank: rank.0,
                tp_size,
            });
        }
        let bit = 1 << rank.0;
        // AcqRel only for form: the bit guards nothing but itself.
        if self.taken.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return Err(SeatError::Taken(rank));
        }
        let lines: Arc<dyn Lines> = Arc::clone(&self.memory) as _;
        Ok(Seat::over(lines, rank, self.first))
    }
}
