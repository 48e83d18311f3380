//! The median of many samples, and their tail.

use serde::{Deserialize, Serialize};

/// Median and 99th percentile of samples in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stats {
    pub ns_median: f64,
    pub ns_p99: f64,
    pub samples: u64,
}

impl Stats {
    /// Of at least one sample.
    pub(crate) fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "nothing was timed");
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self {
            ns_median: at(0.5),
            ns_p99: at(0.99),
            samples: samples.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_tail_are_samples() {
        let stats = Stats::of((0..101).rev().map(f64::from).collect());
        assert_eq!(
            (stats.ns_median, stats.ns_p99, stats.samples),
            (50.0, 99.0, 101)
        );
        assert_eq!(Stats::of(vec![7.0]).ns_p99, 7.0);
    }
}
