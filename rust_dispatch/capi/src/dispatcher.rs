//! The dispatcher.

use std::ffi::{CString, c_char};

use lowlat_core::graph_key::Record;
use lowlat_core::{Decision, Dispatcher};

use crate::border::{Failure, Status, border, c_text, give, invalid, null, take_back, text_of};
use crate::vote::{CoverageHandle, reason_of};

/// Decides which captured graph runs a step.
pub struct DispatcherHandle {
    dispatcher: Dispatcher,
    report: CString,
}

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

fn record_of(text: &str) -> Result<Record, Failure> {
    Record::from_json(text).map_err(|error| invalid(error.to_string()))
}

/// Digest of a graph record's keys, for the ballot.
///
/// # Safety
/// `record_json` is NULL or NUL-terminated; `out_digest` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_record_keys_digest(
    record_json: *const c_char,
    out_digest: *mut u64,
) -> Status {
    border(|| {
        // SAFETY: NULL or terminated, by the contract above.
        let record = record_of(unsafe { text_of("record_json", record_json) }?)?;
        if out_digest.is_null() {
            return Err(null("out_digest"));
        }
        // SAFETY: not NULL, checked above; valid for a write by the contract above.
        unsafe { out_digest.write(record.keys_digest()) };
        Ok(())
    })
}

/// A dispatcher over what was captured, a graph record as JSON. The record must hold the keys and
/// widths that all ranks agreed on; anything else is LOWLAT_DISPATCH_STATUS_BUG: the peers go on.
///
/// # Safety
/// `coverage` is NULL or alive; `record_json` is NULL or NUL-terminated; `out_dispatcher` is NULL
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_create(
    coverage: *const CoverageHandle,
    record_json: *const c_char,
    out_dispatcher: *mut *mut DispatcherHandle,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive by the contract above.
        let coverage = unsafe { coverage.as_ref() }.ok_or_else(|| null("coverage"))?;
        // SAFETY: NULL or terminated, by the contract above.
        let record = record_of(unsafe { text_of("record_json", record_json) }?)?;
        let make = || {
            let dispatcher = Dispatcher::new(&coverage.0, record)
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

/// Frees a dispatcher and its report.
///
/// # Safety
/// `dispatcher` is NULL or came from lowlat_dispatcher_create and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_destroy(dispatcher: *mut DispatcherHandle) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(dispatcher) };
}

/// Decides what runs a step, and counts it. Allocates nothing. A step that no graph runs is
/// LOWLAT_DISPATCH_STATUS_OK with a reason: it is an answer.
///
/// # Safety
/// `dispatcher` is NULL or alive and used by no other thread; `step` is NULL or does not change
/// during the call; `out_decision` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_decide(
    dispatcher: *mut DispatcherHandle,
    step: *const StepFacts,
    out_decision: *mut StepDecision,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { dispatcher.as_mut() }.ok_or_else(|| null("dispatcher"))?;
        // SAFETY: NULL, which makes None, or valid for this call by the contract above.
        let step = unsafe { step.as_ref() }.ok_or_else(|| null("step"))?;
        if out_decision.is_null() {
            return Err(null("out_decision"));
        }
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
        // SAFETY: not NULL, checked above; valid for a write by the contract above.
        unsafe { out_decision.write(decision) };
        Ok(())
    })
}

/// Disarms for good after a fault, a lowlat_reason. The first fault is kept.
///
/// # Safety
/// `dispatcher` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_disarm(
    dispatcher: *mut DispatcherHandle,
    fault: u32,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { dispatcher.as_mut() }.ok_or_else(|| null("dispatcher"))?;
        handle.dispatcher.disarm(reason_of(fault)?);
        Ok(())
    })
}

/// Switches the plugin on (not 0) or off (0) between steps; all ranks do it together.
///
/// # Safety
/// `dispatcher` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_switch(
    dispatcher: *mut DispatcherHandle,
    on: u32,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { dispatcher.as_mut() }.ok_or_else(|| null("dispatcher"))?;
        handle.dispatcher.switch(on != 0);
        Ok(())
    })
}

/// What was decided so far, as JSON: "covered", "uncovered", "covered_by_key",
/// "uncovered_by_reason", "fault". Valid until the next call of this function or of
/// lowlat_dispatcher_destroy.
///
/// # Safety
/// `dispatcher` is NULL or alive and used by no other thread; `out_json` is NULL or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_dispatcher_report(
    dispatcher: *mut DispatcherHandle,
    out_json: *mut *const c_char,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { dispatcher.as_mut() }.ok_or_else(|| null("dispatcher"))?;
        if out_json.is_null() {
            return Err(null("out_json"));
        }
        let report = serde_json::to_string(&handle.dispatcher.report());
        handle.report = c_text(&report.map_err(|error| (Status::Bug, error.to_string()))?);
        // SAFETY: not NULL, checked above; valid for a write by the contract above.
        unsafe { out_json.write(handle.report.as_ptr()) };
        Ok(())
    })
}
