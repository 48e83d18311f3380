//! A histogram of times whose memory is fixed, however many values it takes in.

/// Edges a decade: neighbours differ by 5.9 %, so a percentile is at most that much too high.
const PER_DECADE: usize = 40;
/// Decades from [`FIRST_S`] on.
const NUM_DECADES: usize = 10;
const NUM_BUCKETS: usize = PER_DECADE * NUM_DECADES;
/// Upper edge of the first bucket, which also holds everything below it.
const FIRST_S: f64 = 1e-6;

/// Counts by time, in buckets of equal ratio from 1 us to 10,000 s. What is shorter is in the
/// first bucket, what is longer in the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

/// One bucket that holds something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// Its values are above this, seconds.
    pub above_s: f64,
    /// Its values are at most this, seconds.
    pub up_to_s: f64,
    /// How many.
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; NUM_BUCKETS + 1],
        }
    }
}

impl Histogram {
    /// Takes in `count` times of `value_s` seconds.
    pub fn add(&mut self, value_s: f64, count: u64) {
        let place = ((value_s / FIRST_S).log10() * PER_DECADE as f64).ceil();
        // A negative or NaN place becomes 0.
        self.counts[(place as usize).min(NUM_BUCKETS)] += count;
    }

    /// Values taken in.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets that hold something, ascending.
    #[must_use]
    pub fn buckets(&self) -> Vec<Bucket> {
        (0..)
            .zip(&self.counts)
            .filter(|(_, count)| **count > 0)
            .map(|(place, count)| Bucket {
                above_s: if place == 0 { 0.0 } else { edge_s(place - 1) },
                up_to_s: edge_s(place),
                count: *count,
            })
            .collect()
    }

    /// Upper edge of the bucket of the value that `percent` of the values do not exceed, by
    /// nearest rank; `None` of nothing.
    ///
    /// ```
    /// use lowlat_engine::histogram::Histogram;
    /// let mut times = Histogram::default();
    /// times.add(0.010, 90);
    /// times.add(2.0, 10);
    /// let (p90, p91) = (times.percentile(90).unwrap(), times.percentile(91).unwrap());
    /// assert!((0.010..0.0106).contains(&p90) && (2.0..2.12).contains(&p91));
    /// assert_eq!(Histogram::default().percentile(50), None);
    /// ```
    #[must_use]
    pub fn percentile(&self, percent: u64) -> Option<f64> {
        assert!(
            (1..=100).contains(&percent),
            "a percentile is from 1 to 100"
        );
        let rank = (self.count() * percent).div_ceil(100);
        let mut seen = 0;
        let place = self.counts.iter().position(|count| {
            seen += count;
            rank > 0 && seen >= rank
        })?;
        Some(edge_s(place))
    }
}

/// Upper edge of the bucket at `place`.
fn edge_s(place: usize) -> f64 {
    FIRST_S * 10f64.powf(place as f64 / PER_DECADE as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_the_bucket_that_holds_it_and_none_is_lost() {
        let mut times = Histogram::default();
        let values: Vec<f64> = (-8..=5)
            .flat_map(|exponent| [1.0, 1.7, 3.3, 9.9].map(|part| part * 10f64.powi(exponent)))
            .collect();
        for &value in &values {
            let mut one = Histogram::default();
            one.add(value, 1);
            times.add(value, 1);
            let bucket = one.buckets()[0];
            let below = value <= bucket.up_to_s * (1.0 + 1e-12) || value > 1e4;
            assert!(
                bucket.above_s < value * (1.0 + 1e-12) && below,
                "{value} {bucket:?}"
            );
        }
        assert_eq!(times.count(), values.len() as u64);
    }

    #[test]
    fn what_is_no_time_is_counted_at_an_end() {
        let mut times = Histogram::default();
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            times.add(value, 1);
        }
        let buckets = times.buckets();
        assert_eq!((buckets[0].above_s, buckets[0].count), (0.0, 3));
        assert_eq!(buckets[1].count, 1);
        assert_eq!(times.count(), 4);
    }
}
