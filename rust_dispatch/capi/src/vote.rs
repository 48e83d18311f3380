//! The vote among ranks that are threads of one process.

use std::sync::Arc;
use std::time::Instant;

use lowlat_core::vote::{Ballot, Decision, Refusal};
use lowlat_core::{Coverage, InstantNs, Reason, Seat, TpRank};

use crate::border::{Failure, Status, border, give, invalid, null, take_back};
use crate::guard::ServableHandle;
use crate::ladder::LadderBudgets;

/// A group of ranks that are threads of this process.
pub struct Board {
    board: Arc<lowlat_core::Board>,
    tp_size: u32,
    clock: Instant,
}

/// One rank's place in a group. It may outlive the board's handle.
pub struct SeatHandle {
    seat: Seat,
    tp_size: u32,
    clock: Instant,
}

/// Proof that all ranks cover the same.
pub struct CoverageHandle(pub(crate) Coverage);

/// What a rank would run. All ranks must have the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BallotParts {
    /// Row counts that were built, ascending: `num_widths` of them, 1 to 32.
    pub widths: *const u32,
    /// How many.
    pub num_widths: u32,
    /// Digest of the graph keys, see lowlat_record_keys_digest.
    pub keys_digest: u64,
    /// Digest of grids, blocks and scratch.
    pub geometry_digest: u64,
    /// lowlat_model_catalogue_digest of lowlat/kernels.h.
    pub catalogue_digest: u64,
    /// Deadlines of every wait.
    pub ladder: LadderBudgets,
}

fn now(clock: Instant) -> impl FnMut() -> InstantNs {
    move || InstantNs(u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

fn refused(refusal: &Refusal) -> Failure {
    let fault = refusal.reason().kind().is_fault();
    let status = if fault {
        Status::Fault
    } else {
        Status::Decline
    };
    (status, refusal.to_string())
}

/// A group of `tp_size` ranks, 1 to 64.
///
/// # Safety
/// `out_board` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_board_create(tp_size: u32, out_board: *mut *mut Board) -> Status {
    border(|| {
        let make = || {
            let board =
                lowlat_core::Board::new(tp_size).map_err(|error| invalid(error.to_string()))?;
            Ok(Board {
                board,
                tp_size,
                clock: Instant::now(),
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_board", out_board, make) }
    })
}

/// Frees a group's handle; seats that were given keep the group alive.
///
/// # Safety
/// `board` is NULL or came from lowlat_board_create and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_board_destroy(board: *mut Board) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(board) };
}

/// The seat of one rank, given once: a rank that was started again needs a new group.
///
/// # Safety
/// `board` is NULL or a living group; `out_seat` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_board_seat(
    board: *const Board,
    tp_rank: u32,
    out_seat: *mut *mut SeatHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive by the contract above; only shared access.
        let board = unsafe { board.as_ref() }.ok_or_else(|| null("board"))?;
        let make = || {
            let seat = board.board.seat(TpRank(tp_rank));
            let seat = seat.map_err(|error| invalid(error.to_string()))?;
            Ok(SeatHandle {
                seat,
                tp_size: board.tp_size,
                clock: board.clock,
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_seat", out_seat, make) }
    })
}

/// Frees a seat; it is not given again.
///
/// # Safety
/// `seat` is NULL or came from lowlat_board_seat and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_seat_destroy(seat: *mut SeatHandle) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(seat) };
}

/// Votes on coverage; every rank of the group calls it. Ends within `budget_ns`.
/// LOWLAT_DISPATCH_STATUS_DECLINE when ranks differ, LOWLAT_DISPATCH_STATUS_FAULT when one is
/// missing; every rank gets the same, and the same words.
///
/// # Safety
/// Handles are NULL or alive and used by no other thread; `parts` and its widths are NULL or do
/// not change during the call; `out_coverage` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_seat_vote(
    seat: *mut SeatHandle,
    servable: *const ServableHandle,
    parts: *const BallotParts,
    budget_ns: u64,
    out_coverage: *mut *mut CoverageHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let seat = unsafe { seat.as_mut() }.ok_or_else(|| null("seat"))?;
        // SAFETY: NULL, which makes None, or alive by the contract above.
        let servable = unsafe { servable.as_ref() }.ok_or_else(|| null("servable"))?;
        // SAFETY: NULL, which makes None, or valid for this call by the contract above.
        let parts = unsafe { parts.as_ref() }.ok_or_else(|| null("parts"))?;
        if parts.widths.is_null() {
            return Err(null("widths"));
        }
        if servable.0.tp_size() != seat.tp_size {
            let (checked, group) = (servable.0.tp_size(), seat.tp_size);
            return Err(invalid(format!(
                "servable was checked for tp {checked}; this group has {group} ranks"
            )));
        }
        let num_widths = parts.num_widths as usize;
        // SAFETY: not NULL, checked above; `num_widths` of them by the contract above.
        let widths = unsafe { std::slice::from_raw_parts(parts.widths, num_widths) };
        let core_parts = lowlat_core::BallotParts {
            widths,
            keys_digest: parts.keys_digest,
            geometry_digest: parts.geometry_digest,
            catalogue_digest: parts.catalogue_digest,
            ladder: parts.ladder.checked()?,
        };
        let ballot = Ballot::new(&servable.0, seat.seat.tp_rank(), core_parts);
        let ballot = ballot.map_err(|error| invalid(error.to_string()))?;
        let make = || {
            let coverage = seat.seat.agree(&ballot, budget_ns, now(seat.clock));
            coverage
                .map(CoverageHandle)
                .map_err(|refusal| refused(&refusal))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_coverage", out_coverage, make) }
    })
}

/// Takes part in the vote as a rank that cannot serve, for a lowlat_reason, so that its peers
/// decline with it at once. Never returns LOWLAT_DISPATCH_STATUS_OK.
///
/// # Safety
/// `seat` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_seat_decline(
    seat: *mut SeatHandle,
    reason: u32,
    budget_ns: u64,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let seat = unsafe { seat.as_mut() }.ok_or_else(|| null("seat"))?;
        let reason = reason_of(reason)?;
        let ballot = Ballot::declining(seat.seat.tp_rank(), seat.tp_size, reason);
        let ballot = ballot.map_err(|error| invalid(error.to_string()))?;
        match seat.seat.agree(&ballot, budget_ns, now(seat.clock)) {
            Err(refusal) => Err(refused(&refusal)),
            Ok(_) => Err((Status::Bug, "bug: a vote with a decline agreed".to_owned())),
        }
    })
}

pub(crate) fn reason_of(number: u32) -> Result<Reason, Failure> {
    Reason::from_number(number).ok_or_else(|| invalid(format!("{number} is no lowlat_reason")))
}

/// The hot vote: whether all ranks are about to run the step with this digest. No allocation, and
/// no system call when the peers are there. LOWLAT_DISPATCH_STATUS_DECLINE when ranks differ, then
/// the group may go on; LOWLAT_DISPATCH_STATUS_FAULT when one is missing.
///
/// # Safety
/// `seat` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_seat_agree_step(
    seat: *mut SeatHandle,
    digest: u64,
    budget_ns: u64,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let seat = unsafe { seat.as_mut() }.ok_or_else(|| null("seat"))?;
        match seat.seat.agree_step(digest, budget_ns, now(seat.clock)) {
            Decision::Agreed => Ok(()),
            decision => Err(refused(&seat.seat.step_refusal(decision))),
        }
    })
}

/// The epoch of the vote that agreed.
///
/// # Safety
/// `coverage` is NULL or alive; `out_epoch` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_coverage_epoch(
    coverage: *const CoverageHandle,
    out_epoch: *mut u32,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive by the contract above.
        let coverage = unsafe { coverage.as_ref() }.ok_or_else(|| null("coverage"))?;
        if out_epoch.is_null() {
            return Err(null("out_epoch"));
        }
        // SAFETY: not NULL, checked above; valid for a write by the contract above.
        unsafe { out_epoch.write(coverage.0.epoch().0) };
        Ok(())
    })
}

/// Frees a proof of agreement.
///
/// # Safety
/// `coverage` is NULL or came from lowlat_seat_vote and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_coverage_destroy(coverage: *mut CoverageHandle) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(coverage) };
}
