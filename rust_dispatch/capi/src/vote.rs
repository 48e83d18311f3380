//! The vote: seats among threads or processes, and ballots for a caller's own all-gather.

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Instant;

use lowlat_core::ladder::{LadderError, Rung};
use lowlat_core::vote::{BALLOT_WORDS, Ballot, Decision, MAX_RANKS, MAX_WIDTHS, Refusal, agree};
use lowlat_core::words::one_line;
use lowlat_core::{Coverage, DeadlineLadder, InstantNs, Reason, Seat, TpRank};
use lowlat_host::{GroupSettings, HostSeat};

use crate::border::{
    Failure, Out, Status, border, destroy, give, invalid, list_of, null, struct_of, text_of,
};
use crate::guard::ServableHandle;
use crate::handle::{exclusive, kind, shared};
use crate::ladder::LadderBudgets;

/// A group of ranks that are threads of this process.
pub struct Board {
    board: Arc<lowlat_core::Board>,
    clock: Instant,
}
kind!(Board, 2);

/// One rank's place in a group.
pub struct SeatHandle {
    seat: AnySeat,
    /// What all ranks agreed on; it bounds the votes on steps.
    ladder: Option<DeadlineLadder>,
}
kind!(SeatHandle, 3);

/// A seat among threads or among processes.
enum AnySeat {
    Thread { seat: Seat, clock: Instant },
    Process(HostSeat),
}

impl AnySeat {
    fn tp_rank(&self) -> TpRank {
        match self {
            Self::Thread { seat, .. } => seat.tp_rank(),
            Self::Process(seat) => seat.tp_rank(),
        }
    }

    fn tp_size(&self) -> u32 {
        match self {
            Self::Thread { seat, .. } => seat.tp_size(),
            Self::Process(seat) => seat.tp_size(),
        }
    }

    fn agree(&mut self, ballot: &Ballot, budget_ns: u64) -> Result<Coverage, Failure> {
        match self {
            Self::Thread { seat, clock } => seat.agree(ballot, budget_ns, now(*clock)),
            Self::Process(seat) => seat.agree(ballot, budget_ns).map_err(wrong_budget)?,
        }
        .map_err(|refusal| refused(&refusal))
    }

    fn agree_step(&mut self, digest: u64, budget_ns: u64) -> Result<(), Failure> {
        let decision = match self {
            Self::Thread { seat, clock } => seat.agree_step(digest, budget_ns, now(*clock)),
            Self::Process(seat) => seat.agree_step(digest, budget_ns).map_err(wrong_budget)?,
        };
        match (decision, self) {
            (Decision::Agreed, _) => Ok(()),
            (decision, Self::Thread { seat, .. }) => Err(refused(&seat.step_refusal(decision))),
            (decision, Self::Process(seat)) => Err(refused(&seat.step_refusal(decision))),
        }
    }
}

/// Proof that all ranks cover the same.
pub struct CoverageHandle(pub(crate) Coverage);
kind!(CoverageHandle, 4);

/// What a rank would run. All ranks must have the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BallotParts {
    /// Row counts that were built, ascending: `num_widths` of them.
    pub widths: *const u32,
    /// How many, 1 to 32.
    pub num_widths: u32,
    /// Digest of the graph keys and paths, see lowlat_record_keys_digest.
    pub keys_digest: u64,
    /// Digest of grids, blocks and scratch.
    pub geometry_digest: u64,
    /// Digest of the kernels: lowlat_model_catalogue_digest of lowlat/kernels.h, or the engine's
    /// own.
    pub catalogue_digest: u64,
    /// Deadlines of every wait.
    pub ladder: LadderBudgets,
}

impl BallotParts {
    /// The ballot, and the ladder that it holds.
    ///
    /// # Safety
    /// `widths` is NULL or holds `num_widths` that do not change during the call.
    unsafe fn ballot(
        &self,
        servable: &ServableHandle,
        tp_rank: TpRank,
    ) -> Result<(Ballot, DeadlineLadder), Failure> {
        // SAFETY: this function's contract.
        let widths = unsafe { list_of("widths", self.widths, self.num_widths, MAX_WIDTHS) }?;
        let ladder = self.ladder.checked()?;
        let parts = lowlat_core::BallotParts {
            widths,
            keys_digest: self.keys_digest,
            geometry_digest: self.geometry_digest,
            catalogue_digest: self.catalogue_digest,
            ladder,
        };
        let ballot = Ballot::new(&servable.0, tp_rank, parts);
        Ok((ballot.map_err(|error| invalid(error.to_string()))?, ladder))
    }
}

fn now(clock: Instant) -> impl FnMut() -> InstantNs {
    move || InstantNs(u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

fn status_of(reason: Reason) -> Status {
    if reason.kind().is_fault() {
        Status::Fault
    } else {
        Status::Decline
    }
}

fn refused(refusal: &Refusal) -> Failure {
    (status_of(refusal.reason()), refusal.to_string())
}

fn wrong_budget(error: LadderError) -> Failure {
    invalid(error.to_string())
}

/// A vote is a wait of the plugin, so it must end before the collective library gives up.
fn check_budget(budget_ns: u64, ladder: Option<DeadlineLadder>) -> Result<(), Failure> {
    match ladder {
        Some(ladder) => ladder.check(Rung::Plugin, budget_ns).map_err(wrong_budget),
        None if budget_ns == 0 => Err(invalid("budget is 0 ns; it must be longer than 0")),
        None => Ok(()),
    }
}

pub(crate) fn reason_of(number: u32) -> Result<Reason, Failure> {
    Reason::from_number(number).ok_or_else(|| invalid(format!("{number} is no lowlat_reason")))
}

/// A group of `tp_size` ranks, 1 to 64, that are threads of this process.
///
/// Ownership: the board is the caller's, for lowlat_board_destroy. Threads: any, at any time.
/// Errors: INVALID for another size.
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
                clock: Instant::now(),
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_board", out_board, make) }
    })
}

/// Frees a board; NULL is allowed. Seats that were given live on.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living board, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_board_destroy(board: *mut Board) -> Status {
    destroy("board", board)
}

/// The seat of one rank, given once: a rank that was started again needs a new group.
///
/// Ownership: the seat is the caller's, for lowlat_seat_destroy. Threads: any, at the same time
/// too. Errors: INVALID for a rank outside the group, or one whose seat was given.
///
/// # Safety
/// `out_seat` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_board_seat(
    board: *const Board,
    tp_rank: u32,
    out_seat: *mut *mut SeatHandle,
) -> Status {
    border(|| {
        let board = shared("board", board)?;
        let make = || {
            let seat = board.board.seat(TpRank(tp_rank));
            let seat = seat.map_err(|error| invalid(error.to_string()))?;
            let clock = board.clock;
            Ok(SeatHandle {
                seat: AnySeat::Thread { seat, clock },
                ladder: None,
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_seat", out_seat, make) }
    })
}

/// Joins a group of ranks that are processes of this host, under a name, and waits until all have:
/// rank `tp_rank` of `tp_size`, 1 to 64. The group's memory is a file of /dev/shm, made for it and
/// gone with it. `ladder` bounds every wait; forming is one of the collective rung, so `budget_ns`
/// must be shorter than the engine budget.
///
/// Ownership: the texts stay the caller's; the seat is the caller's, for lowlat_seat_destroy, which
/// leaves the group. Threads: any, at any time; after fork(), only the process that joined votes.
/// Errors: DECLINE with LOWLAT_REASON_GROUP_IN_USE where a living group has the name (a dead one's
/// is taken over), _RANK_TAKEN for a second rank with one number, _VOTE_GROUP where ranks believe
/// in different sizes, _SHARED_MEMORY where that is full or not permitted; FAULT with
/// _RANK_MISSING, on every rank, where not all join in time; INVALID for a name that is not 1 to 64
/// letters, digits, _, . and -, or a rank, size, ladder or budget that is none.
///
/// # Safety
/// `name` is NULL or NUL-terminated, `ladder` is NULL or valid, and neither changes during the
/// call; `out_seat` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_group_join(
    name: *const c_char,
    tp_rank: u32,
    tp_size: u32,
    ladder: *const LadderBudgets,
    budget_ns: u64,
    out_seat: *mut *mut SeatHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL or terminated, by the contract above.
        let name = unsafe { text_of("name", name) }?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let ladder = unsafe { struct_of("ladder", ladder) }?.checked()?;
        let make = || {
            let settings = GroupSettings::new(name, TpRank(tp_rank), tp_size, ladder);
            let seat = lowlat_host::join(&settings, budget_ns).map_err(|error| {
                let status = error.reason().map_or(Status::Invalid, status_of);
                (status, one_line(&error.to_string()))
            })?;
            Ok(SeatHandle {
                seat: AnySeat::Process(seat),
                ladder: Some(ladder),
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_seat", out_seat, make) }
    })
}

/// Frees a seat, and leaves the group; NULL is allowed. A rank's seat is not given again, and peers
/// that vote on find this rank missing. Where it was a process's, the group's name is free.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living seat, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_seat_destroy(seat: *mut SeatHandle) -> Status {
    destroy("seat", seat)
}

/// Votes on coverage; every rank of the group calls it. Ends within `budget_ns`, which must be
/// shorter than the ballot's collective budget.
///
/// Ownership: the ballot stays the caller's; the coverage is the caller's, for
/// lowlat_coverage_destroy. Threads: one call on a seat at a time. Errors, the same on every rank:
/// DECLINE when ranks differ or one declines; FAULT when one is missing, and from then on in every
/// call on this seat. INVALID, before anything is cast, for a ballot or a budget that is none.
///
/// # Safety
/// `parts` and its widths are NULL or do not change during the call; `out_coverage` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_seat_vote(
    seat: *mut SeatHandle,
    servable: *const ServableHandle,
    parts: *const BallotParts,
    budget_ns: u64,
    out_coverage: *mut *mut CoverageHandle,
) -> Status {
    border(|| {
        let mut seat = exclusive("seat", seat)?;
        let servable = shared("servable", servable)?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let parts = unsafe { struct_of("parts", parts) }?;
        if servable.0.tp_size() != seat.seat.tp_size() {
            let (checked, group) = (servable.0.tp_size(), seat.seat.tp_size());
            return Err(invalid(format!(
                "servable was checked for tp {checked}; this group has {group} ranks"
            )));
        }
        // SAFETY: NULL or valid for this call, by the contract above.
        let (ballot, ladder) = unsafe { parts.ballot(&servable, seat.seat.tp_rank()) }?;
        check_budget(budget_ns, Some(ladder))?;
        let make = || {
            let coverage = seat.seat.agree(&ballot, budget_ns)?;
            seat.ladder = Some(ladder);
            Ok(CoverageHandle(coverage))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_coverage", out_coverage, make) }
    })
}

/// Takes part in the vote as a rank that cannot serve, for a lowlat_reason, so that its peers
/// decline with it at once.
///
/// Ownership: nothing is given. Threads: one call on a seat at a time. Errors: DECLINE or FAULT as
/// from lowlat_seat_vote, never OK; INVALID for a reason that is none or a budget of 0.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_seat_decline(
    seat: *mut SeatHandle,
    reason: u32,
    budget_ns: u64,
) -> Status {
    border(|| {
        let mut seat = exclusive("seat", seat)?;
        let reason = reason_of(reason)?;
        check_budget(budget_ns, seat.ladder)?;
        let ballot = Ballot::declining(seat.seat.tp_rank(), seat.seat.tp_size(), reason);
        let ballot = ballot.map_err(|error| invalid(error.to_string()))?;
        seat.seat.agree(&ballot, budget_ns)?;
        Err((Status::Bug, "bug: a vote with a decline agreed".to_owned()))
    })
}

/// The hot vote: whether all ranks are about to run the step with this digest. No allocation, and
/// no system call when the peers are there. Once coverage was agreed on, `budget_ns` must be
/// shorter than its collective budget.
///
/// Ownership: nothing is given. Threads: one call on a seat at a time. Errors, the same on every
/// rank: DECLINE when ranks differ, and then the group may go on; FAULT when one is missing, and
/// from then on in every call on this seat. INVALID, before anything is cast, for a budget that is
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_seat_agree_step(
    seat: *mut SeatHandle,
    digest: u64,
    budget_ns: u64,
) -> Status {
    border(|| {
        let mut seat = exclusive("seat", seat)?;
        check_budget(budget_ns, seat.ladder)?;
        seat.seat.agree_step(digest, budget_ns)
    })
}

/// The ballot of a rank as words, for an all-gather of the caller: LOWLAT_BALLOT_WORDS of them.
///
/// Ownership: the words are written to the caller's. Threads: any, at any time. Errors: INVALID for
/// a rank outside the servable's group, or a ballot that is none.
///
/// # Safety
/// `parts` and its widths are NULL or do not change during the call; `out_words` is NULL or valid
/// for writes of LOWLAT_BALLOT_WORDS words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_ballot_words(
    servable: *const ServableHandle,
    tp_rank: u32,
    parts: *const BallotParts,
    out_words: *mut u64,
) -> Status {
    border(|| {
        let servable = shared("servable", servable)?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let parts = unsafe { struct_of("parts", parts) }?;
        // SAFETY: NULL or valid for writes, by the contract above.
        let out_words = unsafe { Out::new("out_words", out_words.cast()) }?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let (ballot, _) = unsafe { parts.ballot(&servable, TpRank(tp_rank)) }?;
        out_words.put(ballot.to_words());
        Ok(())
    })
}

/// The words of the ballot of a rank that cannot serve, for a lowlat_reason. It is gathered all the
/// same, so that its peers decline with it.
///
/// Ownership: the words are written to the caller's. Threads: any, at any time. Errors: INVALID for
/// a reason that is none, or a rank outside its group.
///
/// # Safety
/// `out_words` is NULL or valid for writes of LOWLAT_BALLOT_WORDS words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_ballot_words_declining(
    tp_rank: u32,
    tp_size: u32,
    reason: u32,
    out_words: *mut u64,
) -> Status {
    border(|| {
        // SAFETY: NULL or valid for writes, by the contract above.
        let out_words = unsafe { Out::new("out_words", out_words.cast()) }?;
        let ballot = Ballot::declining(TpRank(tp_rank), tp_size, reason_of(reason)?);
        out_words.put(
            ballot
                .map_err(|error| invalid(error.to_string()))?
                .to_words(),
        );
        Ok(())
    })
}

/// The vote over gathered ballots: `words` holds LOWLAT_BALLOT_WORDS for each of `num_ranks` ranks,
/// in rank order, the same list on every rank.
///
/// Ownership: the words stay the caller's; the coverage is the caller's, for
/// lowlat_coverage_destroy. Threads: any, at any time. Errors: DECLINE names the first rank that
/// declines or differs, the same on every rank; INVALID for a rank or a size outside 1 to 64.
///
/// # Safety
/// `words` is NULL or holds `num_ranks` ballots that do not change during the call; `out_coverage`
/// is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_ballots_agree(
    tp_rank: u32,
    words: *const u64,
    num_ranks: u32,
    out_coverage: *mut *mut CoverageHandle,
) -> Status {
    border(|| {
        if num_ranks == 0 || num_ranks <= tp_rank {
            return Err(invalid(format!(
                "tp_rank is {tp_rank}; it must be below num_ranks, {num_ranks}"
            )));
        }
        if words.is_null() {
            return Err(null("words"));
        }
        let words: *const [u64; BALLOT_WORDS] = words.cast();
        // SAFETY: `num_ranks` ballots, by the contract above.
        let words = unsafe { list_of("ballots", words, num_ranks, MAX_RANKS) }?;
        let ballots: Vec<Ballot> = words.iter().map(Ballot::from_words).collect();
        let make = || {
            agree(TpRank(tp_rank), &ballots)
                .map(CoverageHandle)
                .map_err(|refusal| refused(&refusal))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_coverage", out_coverage, make) }
    })
}

/// The epoch of the vote that agreed; 0 for lowlat_ballots_agree.
///
/// Ownership: nothing is given. Threads: any, at the same time too. Errors: INVALID for a NULL
/// output.
///
/// # Safety
/// `out_epoch` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_coverage_epoch(
    coverage: *const CoverageHandle,
    out_epoch: *mut u32,
) -> Status {
    border(|| {
        let coverage = shared("coverage", coverage)?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_epoch = unsafe { Out::new("out_epoch", out_epoch) }?;
        out_epoch.put(coverage.0.epoch().0);
        Ok(())
    })
}

/// Frees a coverage; NULL is allowed. Dispatchers that were made from it live on.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living coverage, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_coverage_destroy(coverage: *mut CoverageHandle) -> Status {
    destroy("coverage", coverage)
}
