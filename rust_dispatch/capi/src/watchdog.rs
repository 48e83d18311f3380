//! The watchdog.

use lowlat_core::{InstantNs, Watchdog};

use crate::border::{Out, Status, border, destroy, give, invalid};
use crate::handle::{exclusive, kind};

/// Counts time against a budget. Owns no clock and no thread; the caller polls it.
pub struct WatchdogHandle(Watchdog);
kind!(WatchdogHandle, 6);

/// What the watchdog says of the work that is running.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Nothing runs.
    Idle = 0,
    /// It runs within its budget.
    OnTime = 1,
    /// It should have ended.
    Overdue = 2,
}

/// A watchdog for work of at most `budget_ns`, in which one gap between two polls counts at most
/// `max_gap_ns`: while a machine sleeps, nothing can be late.
///
/// Ownership: the watchdog is the caller's, for lowlat_watchdog_destroy. Threads: any, at any time.
/// Errors: INVALID for a budget or gap of 0.
///
/// # Safety
/// `out_watchdog` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_create(
    budget_ns: u64,
    max_gap_ns: u64,
    out_watchdog: *mut *mut WatchdogHandle,
) -> Status {
    border(|| {
        let make = || {
            if budget_ns == 0 || max_gap_ns == 0 {
                let words = "a watchdog needs a budget and a gap above 0 ns";
                return Err(invalid(words));
            }
            Ok(WatchdogHandle(Watchdog::new(budget_ns, max_gap_ns)))
        };
        // SAFETY: NULL or valid for a write, by the contract above.
        unsafe { give("out_watchdog", out_watchdog, make) }
    })
}

/// Frees a watchdog; NULL is allowed.
///
/// Ownership: ends the caller's. Threads: any, once no other call uses the handle. Errors: INVALID
/// for what is no living watchdog, or one in use.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_watchdog_destroy(watchdog: *mut WatchdogHandle) -> Status {
    destroy("watchdog", watchdog)
}

/// Work begins, at `now_ns` of the caller's clock.
///
/// Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID while
/// work runs.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_watchdog_arm(watchdog: *mut WatchdogHandle, now_ns: u64) -> Status {
    border(|| {
        let mut handle = exclusive("watchdog", watchdog)?;
        if handle.0.is_armed() {
            return Err(invalid(
                "the watchdog is armed; disarm it when work has ended",
            ));
        }
        handle.0.arm(InstantNs(now_ns));
        Ok(())
    })
}

/// Work has ended.
///
/// Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID for a
/// handle that is none.
#[unsafe(no_mangle)]
pub extern "C" fn lowlat_watchdog_disarm(watchdog: *mut WatchdogHandle) -> Status {
    border(|| {
        exclusive("watchdog", watchdog)?.0.disarm();
        Ok(())
    })
}

/// Counts the time since the last look. `out_late_ns` gets the time past the budget, else 0; it
/// may be NULL.
///
/// Ownership: nothing is given. Threads: one call on a watchdog at a time. Errors: INVALID for a
/// NULL `out_health`.
///
/// # Safety
/// The outputs are NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_health(
    watchdog: *mut WatchdogHandle,
    now_ns: u64,
    out_health: *mut Health,
    out_late_ns: *mut u64,
) -> Status {
    border(|| {
        let mut handle = exclusive("watchdog", watchdog)?;
        // SAFETY: NULL or valid for a write, by the contract above.
        let out_health = unsafe { Out::new("out_health", out_health) }?;
        let out_late_ns = if out_late_ns.is_null() {
            None
        } else {
            // SAFETY: valid for a write, by the contract above.
            Some(unsafe { Out::new("out_late_ns", out_late_ns) }?)
        };
        let (health, late_ns) = match handle.0.health(InstantNs(now_ns)) {
            lowlat_core::Health::Idle => (Health::Idle, 0),
            lowlat_core::Health::OnTime => (Health::OnTime, 0),
            lowlat_core::Health::Overdue { late_ns } => (Health::Overdue, late_ns),
        };
        out_health.put(health);
        if let Some(out_late_ns) = out_late_ns {
            out_late_ns.put(late_ns);
        }
        Ok(())
    })
}
