//! The ladder of deadlines.

use lowlat_core::DeadlineLadder;

use crate::border::{Failure, Status, border, invalid, struct_of};

/// Four budgets in nanoseconds, each shorter than the next.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LadderBudgets {
    /// A wait in a kernel.
    pub kernel_ns: u64,
    /// The plugin's wait for a step.
    pub plugin_ns: u64,
    /// The collective library's wait.
    pub collective_ns: u64,
    /// The engine's watchdog.
    pub engine_ns: u64,
}

impl LadderBudgets {
    pub(crate) fn checked(&self) -> Result<DeadlineLadder, Failure> {
        let Self {
            kernel_ns,
            plugin_ns,
            collective_ns,
            engine_ns,
        } = *self;
        DeadlineLadder::new(kernel_ns, plugin_ns, collective_ns, engine_ns)
            .map_err(|error| invalid(error.to_string()))
    }
}

/// Whether the budgets are above 0 and in order.
///
/// Ownership: the ladder stays the caller's. Threads: any, at any time. Errors: INVALID names each
/// budget that is not.
///
/// # Safety
/// `ladder` is NULL or points to a ladder that does not change during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_ladder_check(ladder: *const LadderBudgets) -> Status {
    border(|| {
        // SAFETY: NULL or valid for this call, by the contract above.
        let ladder = unsafe { struct_of("ladder", ladder) }?;
        ladder.checked().map(|_| ())
    })
}
