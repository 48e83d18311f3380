//! Counting time against a budget, and telling from the status words who was late.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{InstantNs, TpRank};
use crate::reason::Reason;

/// Counts time against a budget. Owns no clock and no thread; somebody polls it.
///
/// Time counts between two polls, but at most `max_gap_ns` for one gap: while a machine sleeps or a
/// debugger holds it, nothing can be late. A clock that runs backwards counts nothing. Since every
/// gap counts something, a watchdog that is polled rarely still ends, only later.
///
/// ```
/// use lowlat_core::{Health, InstantNs, Watchdog};
/// let mut watchdog = Watchdog::new(100, 50);
/// assert_eq!(watchdog.health(InstantNs(0)), Health::Idle);
/// watchdog.arm(InstantNs(10));
/// assert_eq!(watchdog.health(InstantNs(60)), Health::OnTime);
/// // The machine slept: an hour counts as 50 ns.
/// assert_eq!(watchdog.health(InstantNs(3_600_000_000_000)), Health::OnTime);
/// assert_eq!(watchdog.health(InstantNs(3_600_000_000_020)), Health::Overdue { late_ns: 20 });
/// watchdog.disarm();
/// assert_eq!(watchdog.health(InstantNs(3_600_000_000_030)), Health::Idle);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Watchdog {
    budget_ns: u64,
    max_gap_ns: u64,
    /// When it was last looked at; `None` while nothing runs.
    polled_at: Option<InstantNs>,
    counted_ns: u64,
}

/// What the watchdog says of the work that is running.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Nothing runs.
    Idle,
    /// It runs within its budget.
    OnTime,
    /// It should have ended.
    Overdue {
        /// Counted time past the budget.
        late_ns: u64,
    },
}

impl Watchdog {
    /// A watchdog for work of at most `budget_ns`, in which one gap between polls counts at most
    /// `max_gap_ns`.
    ///
    /// # Panics
    /// When either is 0.
    pub fn new(budget_ns: u64, max_gap_ns: u64) -> Self {
        assert!(0 < budget_ns, "a budget of 0 is never kept");
        assert!(0 < max_gap_ns, "gaps that never count never end");
        Self {
            budget_ns,
            max_gap_ns,
            polled_at: None,
            counted_ns: 0,
        }
    }

    /// Work begins.
    ///
    /// # Panics
    /// When work runs already.
    pub fn arm(&mut self, now: InstantNs) {
        assert!(self.polled_at.is_none(), "armed twice");
        self.polled_at = Some(now);
        self.counted_ns = 0;
    }

    /// Whether work runs.
    pub fn is_armed(&self) -> bool {
        self.polled_at.is_some()
    }

    /// Work has ended, or nobody waits for it any more.
    pub fn disarm(&mut self) {
        self.polled_at = None;
    }

    /// Counts the time since the last look.
    pub fn health(&mut self, now: InstantNs) -> Health {
        let Some(polled_at) = self.polled_at else {
            return Health::Idle;
        };
        let gap_ns = now.since(polled_at).min(self.max_gap_ns);
        self.polled_at = Some(now);
        self.counted_ns = self.counted_ns.saturating_add(gap_ns);
        match self.counted_ns.checked_sub(self.budget_ns) {
            None | Some(0) => Health::OnTime,
            Some(late_ns) => Health::Overdue { late_ns },
        }
    }
}

/// One rank's status words, as the kernels store them (`lowlat_status_words`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusWords {
    /// 0 healthy, 1 a wait expired here, 2 aborted by a peer, 3 aborted by the host.
    pub state: u32,
    /// Index into the kernel catalogue.
    pub kernel: u32,
    /// Index of the stage.
    pub stage: u32,
    /// The rank that was waited for, or that raised the abort; -1 for none.
    pub peer: i32,
    /// Epoch of the exchange.
    pub epoch: u64,
}

/// Who was late, for whom, where: one line for the log and the post-mortem.
///
/// ```
/// use lowlat_core::{FaultReport, Reason, StatusWords, TpRank};
/// let expired = StatusWords { state: 1, kernel: 2, stage: 5, peer: 3, epoch: 17 };
/// let aborted = StatusWords { state: 2, peer: 1, ..expired };
/// let names = |kernel: u32, stage: u32| (format!("k{kernel}"), format!("s{stage}"));
/// // Rank 0 only followed; rank 1 is where the wait expired.
/// let report = FaultReport::of(&[aborted, expired], names).unwrap();
/// assert_eq!(report.rank, TpRank(1));
/// assert_eq!(report.reason, Reason::WaitExpired);
/// assert_eq!(
///     report.to_string(),
///     "[402] rank 1: a wait in a kernel passed its deadline (kernel k2, stage s5, \
///      waited for rank 3, epoch 17)"
/// );
/// assert_eq!(FaultReport::of(&[StatusWords::default()], names), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultReport {
    /// Expired, aborted by a peer, or aborted by the host.
    pub reason: Reason,
    /// Where it happened first.
    pub rank: TpRank,
    /// The kernel's name.
    pub kernel: String,
    /// The stage's name.
    pub stage: String,
    /// The rank that was waited for, or that raised the abort.
    pub peer: Option<TpRank>,
    /// Epoch of the exchange.
    pub epoch: u64,
}

impl FaultReport {
    /// The fault behind the status words of all ranks, in rank order; `None` when all are healthy.
    /// Where several ranks report, a wait that expired comes before an abort, and the host's abort
    /// before a peer's: those only followed. `names` gives the words for a kernel and a stage.
    pub fn of(
        ranks: &[StatusWords],
        names: impl FnOnce(u32, u32) -> (String, String),
    ) -> Option<Self> {
        let origin = |state| ranks.iter().position(|words| words.state == state);
        let unknown = || ranks.iter().position(|words| 3 < words.state);
        let idx = origin(1)
            .or_else(unknown)
            .or_else(|| origin(3))
            .or_else(|| origin(2))?;
        let words = ranks[idx];
        let reason = match words.state {
            1 => Reason::WaitExpired,
            2 => Reason::AbortedByPeer,
            3 => Reason::AbortedByHost,
            // A state that nobody writes: the words themselves are damaged.
            _ => Reason::Device,
        };
        let (kernel, stage) = names(words.kernel, words.stage);
        Some(Self {
            reason,
            rank: TpRank(idx as u32),
            kernel,
            stage,
            peer: u32::try_from(words.peer).ok().map(TpRank),
            epoch: words.epoch,
        })
    }
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            reason,
            rank,
            kernel,
            stage,
            peer,
            epoch,
        } = self;
        write!(
            f,
            "[{}] {rank}: {reason} (kernel {kernel}, stage {stage}",
            reason.number()
        )?;
        if let Some(peer) = peer {
            let verb = if *reason == Reason::AbortedByPeer {
                "raised by"
            } else {
                "waited for"
            };
            write!(f, ", {verb} {peer}")?;
        }
        write!(f, ", epoch {epoch})")
    }
}

impl std::error::Error for FaultReport {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_runs_backwards_counts_nothing() {
        let mut watchdog = Watchdog::new(100, 1000);
        watchdog.arm(InstantNs(500));
        assert_eq!(watchdog.health(InstantNs(100)), Health::OnTime);
        assert_eq!(watchdog.health(InstantNs(200)), Health::OnTime);
        assert_eq!(
            watchdog.health(InstantNs(201)),
            Health::Overdue { late_ns: 1 }
        );
    }

    /// Work that takes `work_ns` of polls 10 ns apart, between which the machine sleeps for hours
    /// or the clock jumps back; how often the watchdog said that it was late.
    fn fired(work_ns: u64, disturbances: u64) -> usize {
        let mut watchdog = Watchdog::new(1_000, 50);
        let mut now = InstantNs(1 << 60);
        watchdog.arm(now);
        let polls = work_ns / 10;
        let every = polls / (disturbances + 1) + 1;
        let late = (1..=polls).filter(|poll| {
            now = now.after(10);
            if poll % every == 0 {
                now = match (poll / every) % 2 {
                    0 => InstantNs(now.0 - 1_800_000_000_000),
                    _ => now.after(3_600_000_000_000),
                };
            }
            watchdog.health(now) != Health::OnTime
        });
        late.count()
    }

    #[test]
    fn a_machine_that_sleeps_and_a_clock_that_jumps_fire_nothing_and_hide_nothing() {
        assert_eq!(fired(1_000, 0), 0);
        // Each counts for one gap at most, so ten of them for half of the budget.
        for disturbances in 1..=10 {
            assert_eq!(fired(400, disturbances), 0, "{disturbances}");
            assert!(0 < fired(2_000, disturbances), "{disturbances}");
        }
    }

    #[test]
    fn a_watchdog_that_is_polled_rarely_still_ends() {
        let mut watchdog = Watchdog::new(100, 10);
        watchdog.arm(InstantNs(0));
        let mut polls = 0;
        while watchdog.health(InstantNs((polls + 1) * 1_000_000)) == Health::OnTime {
            polls += 1;
            assert!(polls < 100);
        }
        assert_eq!(polls, 10);
    }

    #[test]
    fn the_budget_begins_anew_when_armed_again() {
        let mut watchdog = Watchdog::new(10, 100);
        for start in [0, 1000] {
            watchdog.arm(InstantNs(start));
            assert_eq!(watchdog.health(InstantNs(start + 10)), Health::OnTime);
            watchdog.disarm();
        }
    }

    #[test]
    fn who_only_followed_is_not_named() {
        let names = |_, _| (String::new(), String::new());
        let with = |state| StatusWords {
            state,
            peer: -1,
            ..StatusWords::default()
        };
        let rank_of = |states: &[u32]| {
            let words: Vec<_> = states.iter().map(|&state| with(state)).collect();
            FaultReport::of(&words, names).map(|report| (report.rank.0, report.reason))
        };
        assert_eq!(rank_of(&[0, 2, 3, 1]), Some((3, Reason::WaitExpired)));
        assert_eq!(rank_of(&[2, 0, 3]), Some((2, Reason::AbortedByHost)));
        assert_eq!(rank_of(&[0, 2]), Some((1, Reason::AbortedByPeer)));
        assert_eq!(rank_of(&[2, 77]), Some((1, Reason::Device)));
        assert_eq!(rank_of(&[0, 0]), None);
    }
}
