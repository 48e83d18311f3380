//! The ladder of deadlines: a wait in a kernel ends before the plugin gives up, the plugin before
//! the collective library, and that before the engine's watchdog kills the server.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Four budgets in nanoseconds, each shorter than the next. Only [`DeadlineLadder::new`] makes one.
///
/// ```
/// use lowlat_core::DeadlineLadder;
/// let ladder = DeadlineLadder::new(1_000, 2_000, 3_000, 4_000).unwrap();
/// assert_eq!(ladder.kernel_ns(), 1_000);
///
/// let refused = DeadlineLadder::new(2_000, 2_000, 3_000, 0).unwrap_err();
/// assert_eq!(
///     refused.to_string(),
///     "kernel budget is 2000 ns; it must be shorter than the plugin budget, 2000 ns; \
///      collective budget is 3000 ns; it must be shorter than the engine budget, 0 ns; \
///      engine budget is 0 ns; it must be longer than 0"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeadlineLadder {
    budgets_ns: [u64; 4],
}

/// What each rung is called, shortest first.
pub const RUNGS: [&str; 4] = ["kernel", "plugin", "collective", "engine"];

/// A rung by name, shortest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// A wait in a kernel.
    Kernel,
    /// The plugin waits: for a step, or for the vote on one.
    Plugin,
    /// The collective library waits, or a group forms.
    Collective,
    /// The engine's watchdog.
    Engine,
}

/// Every rung that is out of order, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LadderError {
    reasons: Vec<String>,
}

impl LadderError {
    /// One line a rung that is wrong.
    pub fn reasons(&self) -> &[String] {
        &self.reasons
    }
}

impl fmt::Display for LadderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reasons.join("; "))
    }
}

impl std::error::Error for LadderError {}

impl DeadlineLadder {
    /// A ladder of four budgets in nanoseconds, strictly ascending and above 0.
    ///
    /// # Errors
    /// Names every rung that is not shorter than the next, and every one that is 0.
    pub fn new(
        kernel_ns: u64,
        plugin_ns: u64,
        collective_ns: u64,
        engine_ns: u64,
    ) -> Result<Self, LadderError> {
        let budgets_ns = [kernel_ns, plugin_ns, collective_ns, engine_ns];
        let mut reasons = Vec::new();
        for (idx, name) in RUNGS.into_iter().enumerate() {
            let budget_ns = budgets_ns[idx];
            let next = RUNGS.get(idx + 1).zip(budgets_ns.get(idx + 1));
            if let Some((next, next_ns)) = next.filter(|(_, next_ns)| **next_ns <= budget_ns) {
                reasons.push(format!(
                    "{name} budget is {budget_ns} ns; it must be shorter than the {next} budget, \
                     {next_ns} ns"
                ));
            }
            if budget_ns == 0 {
                reasons.push(format!("{name} budget is 0 ns; it must be longer than 0"));
            }
        }
        if reasons.is_empty() {
            Ok(Self { budgets_ns })
        } else {
            Err(LadderError { reasons })
        }
    }

    /// How long a kernel waits for a peer.
    pub fn kernel_ns(&self) -> u64 {
        self.budgets_ns[0]
    }

    /// How long the plugin waits for a step.
    pub fn plugin_ns(&self) -> u64 {
        self.budgets_ns[1]
    }

    /// How long the collective library waits.
    pub fn collective_ns(&self) -> u64 {
        self.budgets_ns[2]
    }

    /// How long the engine's watchdog waits.
    pub fn engine_ns(&self) -> u64 {
        self.budgets_ns[3]
    }

    /// Whether a wait at `rung` may take `budget_ns`: more than 0, and less than the next rung, so
    /// that who waits reports before whoever waits for it gives up.
    ///
    /// ```
    /// use lowlat_core::{DeadlineLadder, ladder::Rung};
    /// let ladder = DeadlineLadder::new(1_000, 2_000, 3_000, 4_000).unwrap();
    /// assert!(ladder.check(Rung::Plugin, 2_999).is_ok());
    /// assert_eq!(
    ///     ladder.check(Rung::Plugin, 3_000).unwrap_err().to_string(),
    ///     "budget is 3000 ns; a wait of the plugin must be shorter than the collective budget, \
    ///      3000 ns"
    /// );
    /// assert_eq!(
    ///     ladder.check(Rung::Engine, 0).unwrap_err().to_string(),
    ///     "budget is 0 ns; it must be longer than 0"
    /// );
    /// ```
    ///
    /// # Errors
    /// What is wrong with the budget, in one line.
    pub fn check(&self, rung: Rung, budget_ns: u64) -> Result<(), LadderError> {
        let next = rung as usize + 1;
        let over = self.budgets_ns.get(next).filter(|ns| **ns <= budget_ns);
        let words = match over {
            _ if budget_ns == 0 => "budget is 0 ns; it must be longer than 0".to_owned(),
            Some(next_ns) => format!(
                "budget is {budget_ns} ns; a wait of the {} must be shorter than the {} budget, \
                 {next_ns} ns",
                RUNGS[rung as usize], RUNGS[next]
            ),
            None => return Ok(()),
        };
        Err(LadderError {
            reasons: vec![words],
        })
    }

    /// All four, kernel first.
    pub fn budgets_ns(&self) -> [u64; 4] {
        self.budgets_ns
    }
}

impl<'de> Deserialize<'de> for DeadlineLadder {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Plain {
            budgets_ns: [u64; 4],
        }
        let [kernel, plugin, collective, engine] = Plain::deserialize(deserializer)?.budgets_ns;
        Self::new(kernel, plugin, collective, engine).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_neighbours_is_checked() {
        for (broken, rung) in RUNGS.into_iter().enumerate().take(3) {
            let mut budgets = [10, 20, 30, 40];
            budgets.swap(broken, broken + 1);
            let [a, b, c, d] = budgets;
            let error = DeadlineLadder::new(a, b, c, d).unwrap_err();
            assert!(error.to_string().contains(rung), "{error}");
        }
        assert!(DeadlineLadder::new(10, 20, 30, 40).is_ok());
    }

    #[test]
    fn json_cannot_smuggle_a_ladder_out_of_order() {
        let json = r#"{"budgets_ns":[4,3,2,1]}"#;
        assert!(serde_json::from_str::<DeadlineLadder>(json).is_err());
        let ladder = DeadlineLadder::new(1, 2, 3, 4).unwrap();
        let json = serde_json::to_string(&ladder).unwrap();
        assert_eq!(
            serde_json::from_str::<DeadlineLadder>(&json).unwrap(),
            ladder
        );
    }
}
