//! The watchdog.

use lowlat_core::{InstantNs, Watchdog};

use crate::border::{Status, border, give, invalid, null, take_back};

/// Counts time against a budget. Owns no clock and no thread; the caller polls it.
pub struct WatchdogHandle(Watchdog);

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

/// Frees a watchdog.
///
/// # Safety
/// `watchdog` is NULL or came from lowlat_watchdog_create and was not destroyed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_destroy(watchdog: *mut WatchdogHandle) {
    // SAFETY: the caller's contract is that of `take_back`.
    unsafe { take_back(watchdog) };
}

/// Work begins; refused while work runs.
///
/// # Safety
/// `watchdog` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_arm(watchdog: *mut WatchdogHandle, now_ns: u64) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { watchdog.as_mut() }.ok_or_else(|| null("watchdog"))?;
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
/// # Safety
/// `watchdog` is NULL or alive and used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_disarm(watchdog: *mut WatchdogHandle) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { watchdog.as_mut() }.ok_or_else(|| null("watchdog"))?;
        handle.0.disarm();
        Ok(())
    })
}

/// Counts the time since the last look. `out_late_ns` gets the time past the budget, else 0; it
/// may be NULL.
///
/// # Safety
/// `watchdog` is NULL or alive and used by no other thread; the outputs are NULL or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowlat_watchdog_health(
    watchdog: *mut WatchdogHandle,
    now_ns: u64,
    out_health: *mut Health,
    out_late_ns: *mut u64,
) -> Status {
    border(|| {
        // SAFETY: NULL, which makes None, or alive and ours alone by the contract above.
        let handle = unsafe { watchdog.as_mut() }.ok_or_else(|| null("watchdog"))?;
        if out_health.is_null() {
            return Err(null("out_health"));
        }
        let (health, late_ns) = match handle.0.health(InstantNs(now_ns)) {
            lowlat_core::Health::Idle => (Health::Idle, 0),
            lowlat_core::Health::OnTime => (Health::OnTime, 0),
            lowlat_core::Health::Overdue { late_ns } => (Health::Overdue, late_ns),
        };
        // SAFETY: not NULL, checked above; valid for a write by the contract above.
        unsafe { out_health.write(health) };
        if !out_late_ns.is_null() {
            // SAFETY: not NULL, checked in the line above; valid for a write by the contract.
            unsafe { out_late_ns.write(late_ns) };
        }
        Ok(())
    })
}
