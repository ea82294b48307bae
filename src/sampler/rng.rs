//! Random numbers: `SplitMix64` (Steele, Lea, Flood 2014) read as a function of (seed, counter).
//!
//! Integer arithmetic only, so every platform gives the same numbers, and a counter makes the
//! state two words that can be saved and forked. Not for cryptography.

/// 2^64 divided by the golden ratio, odd: the step of `SplitMix64`.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The n-th number depends on the seed and n alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CounterRng {
    key: u64,
    counter: u64,
}

impl CounterRng {
    /// Mixes the seed first: neighbouring seeds give unrelated streams.
    pub(super) fn new(seed: u64) -> Self {
        Self { key: mix(seed ^ STEP), counter: 0 }
    }

    /// Uniform in `0..bound` (bias below `bound / 2^64`). `bound` is above 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(bound);
        (product >> 64) as u64
    }

    fn next(&mut self) -> u64 {
        let value = self.peek();
        self.skip();
        value
    }

    /// The next number, which stays the next.
    pub(super) fn peek(&self) -> u64 {
        mix(self.key.wrapping_add(STEP.wrapping_mul(self.counter.wrapping_add(1))))
    }

    /// Leaves the next number out.
    pub(super) fn skip(&mut self) {
        self.counter = self.counter.wrapping_add(1);
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixing_function_is_splitmix64() {
        // First outputs of the published generator for seed 1234567.
        let state = |n: u64| 1_234_567u64.wrapping_add(STEP.wrapping_mul(n));
        assert_eq!(mix(state(1)), 6_457_827_717_110_365_317);
        assert_eq!(mix(state(2)), 3_203_168_211_198_807_973);
        assert_eq!(mix(state(3)), 9_817_491_932_198_370_423);
    }

    #[test]
    fn draws_stay_below_their_bound() {
        let mut rng = CounterRng::new(1);
        for bound in [1, 2, 3, 1 << 40, u64::MAX] {
            for _ in 0..100 {
                assert!(rng.below(bound) < bound);
            }
        }
    }
}
