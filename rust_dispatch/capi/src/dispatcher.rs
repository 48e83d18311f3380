//! The dispatcher.

use std::ffi::{CString, c_char};

use lowlat_core::{Decision, Dispatcher};

use crate::border::{Failure, Out, Status, border, c_text, destroy, give, invalid, struct_of};
use crate::handle::{exclusive, kind, shared};
use crate::record::RecordHandle;
use crate::vote::{CoverageHandle, reason_of};

/// Decides which captured graph runs a step.
pub struct DispatcherHandle {
    dispatcher: Dispatcher,
    report: CString,
}
kind!(DispatcherHandle, 5);

/// Which step the engine is about to run; the values of `mode` in lowlat_step_facts.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactsMode {
    /// One row a request.
    Decode = 0,
    /// The anchor and its drafts.
    TargetVerify = 1,
    /// Prompt rows.
    Extend = 2,
    /// The draft's proposals.
    Draft = 3,
    /// Prompt rows and decode rows together.
    Mixed = 4,
    /// No rows.
    Idle = 5,
}

/// What a step is, from host state that every rank shares.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StepFacts {
    /// A lowlat_facts_mode.
    pub mode: u32,
    /// Requests.
    pub batch_size: u32,
    /// Rows a request; 0 where requests differ.
    pub tokens_per_request: u32,
    /// Rows of the step.
    pub rows: u32,
}

impl StepFacts {
    fn checked(&self) -> Result<lowlat_core::StepFacts, Failure> {
        use lowlat_core::StepMode as Core;
        let mode = match self.mode {
            mode if mode == FactsMode::Decode as u32 => Core::Decode,
            mode if mode == FactsMode::TargetVerify as u32 => Core::TargetVerify,
            mode if mode == FactsMode::Extend as u32 => Core::Extend,
            mode if mode == FactsMode::Draft as u32 => Core::Draft,
            mode if mode == FactsMode::Mixed as u32 => Core::Mixed,
            mode if mode == FactsMode::Idle as u32 => Core::Idle,
            mode => {
                return Err(invalid(format!(
                    "mode is {mode}; a lowlat_facts_mode is needed"
                )));
            }
        };
        let Self {
            batch_size,
            tokens_per_request,
            rows,
            ..
        } = *self;
        Ok(lowlat_core::StepFacts {
            mode,
            batch_size,
            tokens_per_request,
            rows,
        })
    }
}

/// What runs a step.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StepDecision {
    /// 0 when a captured graph runs it, else the lowlat_reason why the engine's own forward does.
    pub reason: u32,
    /// The graph's place in the record; 0 when none runs it.
    pub key_idx: u32,
    /// The graph's batch size, to which the batch is padded; 0 when none runs it.
    pub padded_batch: u32,
}

/// A dispatcher over what was captured. The record must hold the keys and widths that all ranks
/// agreed on; anything else is a bug of this rank, and its peers go on.
///
/// Ownership: the record is copied; the dispatcher is the caller's, for lowlat_dispatcher_destroy.
/// Threads: any, at any time. Errors: BUG for another record than the one agreed on.
///
/// # Safety
/// `out_dispatcher` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_create(
    coverage: *const CoverageHandle,
    record: *const RecordHandle,
    out_dispatcher: *mut *mut DispatcherHandle,
) -> Status {
    border(|| {
        let coverage = shared("coverage", coverage)?;
        let record = shared("record", record)?;
        let make = || {
            let dispatcher = Dispatcher::new(&coverage.0, record.record.clone())
                .map_err(|error| (Status::Bug, format!("bug: {error}")))?;
            Ok(DispatcherHandle {
                dispatcher,
                report: CString::default(),
            })
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_dispatcher", out_dispatcher, make) }
    })
}

/// Frees a dispatcher and its report; NULL is allowed.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living dispatcher, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatcher_destroy(dispatcher: *mut DispatcherHandle) -> Status {
    destroy("dispatcher", dispatcher)
}

/// Decides what runs a step, and counts it. Allocates nothing and makes no system call. A step that
/// no graph runs is OK with a reason: it is an answer.
///
/// Ownership: the step stays the caller's. Threads: one call on a dispatcher at a time. Errors:
/// INVALID for a mode that is none.
///
/// # Safety
/// `step` is NULL or does not change during the call; `out_decision` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_decide(
    dispatcher: *mut DispatcherHandle,
    step: *const StepFacts,
    out_decision: *mut StepDecision,
) -> Status {
    border(|| {
        let mut handle = exclusive("dispatcher", dispatcher)?;
        // SAFETY: NULL or valid for this call, by the contract above.
        let step = unsafe { struct_of("step", step) }?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_decision = unsafe { Out::new("out_decision", out_decision) }?;
        let decision = match handle.dispatcher.decide(&step.checked()?) {
            Decision::Replay { key, padded_batch } => StepDecision {
                reason: 0,
                key_idx: key.0,
                padded_batch,
            },
            Decision::Plain(reason) => StepDecision {
                reason: reason.number(),
                key_idx: 0,
                padded_batch: 0,
            },
        };
        out_decision.put(decision);
        Ok(())
    })
}

/// Digest of a step, for lowlat_seat_agree_step.
///
/// Ownership: the step stays the caller's. Threads: any, at any time. Errors: INVALID for a mode
/// that is none.
///
/// # Safety
/// `step` is NULL or does not change during the call; `out_digest` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_step_digest(
    step: *const StepFacts,
    out_digest: *mut u64,
) -> Status {
    border(|| {
        // SAFETY: NULL or valid for this call, by the contract above.
        let step = unsafe { struct_of("step", step) }?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_digest = unsafe { Out::new("out_digest", out_digest) }?;
        out_digest.put(step.checked()?.digest());
        Ok(())
    })
}

/// Disarms for good after a fault, a lowlat_reason. The first fault is kept.
///
/// Ownership: nothing is given. Threads: one call on a dispatcher at a time. Errors: INVALID for a
/// number that is no reason.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatcher_disarm(
    dispatcher: *mut DispatcherHandle,
    fault: u32,
) -> Status {
    border(|| {
        let mut handle = exclusive("dispatcher", dispatcher)?;
        handle.dispatcher.disarm(reason_of(fault)?);
        Ok(())
    })
}

/// Switches the plugin on (not 0) or off (0) between steps; all ranks do it together.
///
/// Ownership: nothing is given. Threads: one call on a dispatcher at a time. Errors: INVALID for a
/// handle that is none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_dispatcher_switch(dispatcher: *mut DispatcherHandle, on: u32) -> Status {
    border(|| {
        let mut handle = exclusive("dispatcher", dispatcher)?;
        handle.dispatcher.switch(on != 0);
        Ok(())
    })
}

/// What was decided so far, as JSON: "covered", "uncovered", "covered_by_key",
/// "uncovered_by_reason", "fault".
///
/// Ownership: the text stays the dispatcher's, valid until the next call of this function on it or
/// of lowlat_dispatcher_destroy. Threads: one call on a dispatcher at a time. Errors: INVALID for a
/// NULL output.
///
/// # Safety
/// `out_json` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_report(
    dispatcher: *mut DispatcherHandle,
    out_json: *mut *const c_char,
) -> Status {
    border(|| {
        let mut handle = exclusive("dispatcher", dispatcher)?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_json = unsafe { Out::new("out_json", out_json) }?;
        let report = serde_json::to_string(&handle.dispatcher.report());
        handle.report = c_text(&report.map_err(|error| (Status::Bug, error.to_string()))?);
        out_json.put(handle.report.as_ptr());
        Ok(())
    })
}
