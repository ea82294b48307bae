//! How long a leader waits for company, and how many tokens of prompts decoding calls put up with: both follow from how
//! long steps took.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Longest wait for calls that are expected back.
const MOST_PATIENCE: Duration = Duration::from_millis(50);
/// Tokens of prompts beside decoding calls, before anything was measured.
const FIRST_PREFILL: usize = 32;
/// Fewest of those: prompts go on, however slow a step is.
pub(super) const LEAST_PREFILL: usize = 4;
/// A step with prompts may take so many times the time of one without.
const SLOWER: f64 = 2.0;
/// Below this, more tokens of prompts are tried.
const FASTER: f64 = 1.7;

/// What the last steps tell.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Time of a step of decoding calls only, smoothed.
    decode: Option<f64>,
    /// Tokens of prompts beside decoding calls.
    prefill: usize,
    /// Most tokens of a step.
    rows: usize,
    last: Duration,
}

impl Pace {
    pub(super) fn new(rows: usize) -> Self {
        Self { decode: None, prefill: FIRST_PREFILL.min(rows), rows, last: Duration::ZERO }
    }

    /// Tokens of prompts that a step with decoding calls may have.
    pub(super) fn prefill(&self) -> usize {
        self.prefill
    }

    /// How long a leader waits for those who were in the last step. A quarter of a step is lost at most, where half of it
    /// and more would be lost by going without them.
    pub(super) fn patience(&self) -> Duration {
        (self.last / 4).min(MOST_PATIENCE)
    }

    /// Takes note of a step: whether calls decoded in it, how many tokens of prompts it had, how long it took.
    pub(super) fn observe(&mut self, decoded: bool, prefilled: usize, took: Duration) {
        self.last = took;
        if !decoded {
            return;
        }
        let took = took.as_secs_f64();
        let Some(decode) = self.decode.filter(|_| prefilled > 0) else {
            if prefilled == 0 {
                self.decode = Some(self.decode.map_or(took, |before| 0.75 * before + 0.25 * took));
            }
            return;
        };
        if took > SLOWER * decode {
            self.prefill = (self.prefill / 2).max(LEAST_PREFILL.min(self.rows));
        } else if took < FASTER * decode && prefilled >= self.prefill {
            self.prefill = (self.prefill + self.prefill.div_ceil(4)).min(self.rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The budget after many steps, on a machine where a step takes `base` and `per_token` for each token of a prompt.
    fn settled(base: f64, per_token: f64) -> usize {
        let mut pace = Pace::new(256);
        pace.observe(true, 0, MS.mul_f64(base));
        for _ in 0..200 {
            let n = pace.prefill();
            pace.observe(true, n, MS.mul_f64(base + per_token * n as f64));
        }
        pace.prefill()
    }

    #[test]
    fn the_budget_settles_where_a_step_takes_about_twice_as_long() {
        assert_eq!(settled(1.0, 0.0), 256, "prompts cost nothing");
        let budget = settled(10.0, 0.25);
        assert!((24..=50).contains(&budget), "{budget}");
        assert_eq!(settled(1.0, 10.0), LEAST_PREFILL, "a prompt still goes on");
    }

    #[test]
    fn patience_is_part_of_a_step_and_nothing_before_the_first() {
        let mut pace = Pace::new(256);
        assert_eq!(pace.patience(), Duration::ZERO);
        pace.observe(true, 0, 8 * MS);
        assert_eq!(pace.patience(), 2 * MS);
        pace.observe(false, 256, 8000 * MS);
        assert_eq!(pace.patience(), MOST_PATIENCE);
    }
}
