//! How often something fell between fixed bounds.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Seconds, six bounds a decade from 0.1 ms to 100 s.
const SECONDS: [f64; Histogram::BOUNDS] = [
    1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 7e-2,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0,
];
/// Numbers of things.
const COUNTS: [f64; Histogram::BOUNDS] = [
    1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 28.0, 32.0, 40.0, 48.0, 56.0, 64.0,
    80.0, 96.0, 112.0, 128.0, 160.0, 192.0, 224.0, 256.0, 320.0, 384.0, 448.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0,
];

/// Observations by size. A plain value: no observation allocates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64; Self::BOUNDS],
    counts: [u64; Self::BOUNDS + 1],
    sum: f64,
}

impl Histogram {
    /// Number of bounds; one more bucket is for what lies above all.
    pub const BOUNDS: usize = 36;

    pub(super) const fn of_seconds() -> Self {
        Self { bounds: &SECONDS, counts: [0; Self::BOUNDS + 1], sum: 0.0 }
    }

    pub(super) const fn of_counts() -> Self {
        Self { bounds: &COUNTS, counts: [0; Self::BOUNDS + 1], sum: 0.0 }
    }

    pub(super) fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    pub(super) fn observe_time(&mut self, time: Duration) {
        self.observe(time.as_secs_f64());
    }

    /// Upper bounds of the buckets, each inclusive, in order; the last bucket has none.
    pub fn bounds(&self) -> &'static [f64] {
        self.bounds
    }

    /// Observations in each bucket: above the bound before, up to its own.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// All observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The value that a share `q` of the observations, 0 to 1, does not exceed, as exactly as the buckets tell: values are
    /// taken to be spread evenly within theirs. 0 without observations, the last bound beyond it.
    pub fn quantile(&self, q: f64) -> f64 {
        let target = q.clamp(0.0, 1.0) * self.count() as f64;
        let (mut below, mut seen) = (0.0, 0);
        for (&bound, &count) in self.bounds.iter().zip(&self.counts) {
            let behind = seen + count;
            if count > 0 && behind as f64 >= target {
                return below + (bound - below) * ((target - seen as f64) / count as f64).max(0.0);
            }
            (below, seen) = (bound, behind);
        }
        if seen < self.count() { below } else { 0.0 }
    }

    /// The median.
    pub fn p50(&self) -> f64 {
        self.quantile(0.5)
    }

    /// What 99 of 100 observations do not exceed.
    pub fn p99(&self) -> f64 {
        self.quantile(0.99)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_up_to_their_bucket() {
        let mut h = Histogram::of_seconds();
        assert_eq!((h.p50(), h.count()), (0.0, 0));
        (1..=1000).for_each(|ms| h.observe_time(Duration::from_millis(ms)));
        assert_eq!(h.count(), 1000);
        assert!((h.sum() - 500.5).abs() < 1e-6);
        assert!((0.49..=0.51).contains(&h.p50()), "{}", h.p50());
        assert!((0.97..=1.0).contains(&h.p99()), "{}", h.p99());
        h.observe(1e9);
        assert_eq!(h.quantile(1.0), 100.0, "beyond the last bound");
    }

    #[test]
    fn a_value_on_a_bound_belongs_below_it() {
        let mut h = Histogram::of_counts();
        [1.0, 8.0, 8.0, 9.0].into_iter().for_each(|v| h.observe(v));
        assert_eq!((h.counts()[0], h.counts()[7], h.counts()[8]), (1, 2, 1));
        assert!(h.bounds().is_sorted());
        assert!(Histogram::of_seconds().bounds().is_sorted());
    }
}
