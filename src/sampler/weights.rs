//! Softmax numerators as integers: exact sums in any order, the same on every platform.

use super::reserve;
use crate::error::Result;

/// `exp((logit - max) / temperature)` of each token, scaled so that the sum of all fits 63 bits.
/// For V4's 129,280 tokens the likeliest weighs 2^45: a token 3e-14 times as likely weighs 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    values: Vec<u64>,
    /// Weight of the likeliest token.
    one: u64,
}

impl Weights {
    /// `logits` are checked: none NaN or plus infinity, one at least finite.
    pub(super) fn fill(&mut self, logits: &[f32], temperature: f32) -> Result<()> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let vocab_bits = u64::BITS - (logits.len() as u64).leading_zeros();
        self.one = 1 << (62 - vocab_bits);
        let scale = self.one as f32;
        self.values.clear();
        reserve(&mut self.values, logits.len(), "weights")?;
        // Division, not multiplication by 1 / temperature, which overflows for tiny temperatures.
        let weight = |&logit: &f32| (exp_of_negative((logit - max) / temperature) * scale) as u64;
        self.values.extend(logits.iter().map(weight));
        Ok(())
    }

    /// Weight per token id.
    pub(super) fn as_slice(&self) -> &[u64] {
        &self.values
    }

    /// Weight of the likeliest token.
    pub(super) fn one(&self) -> u64 {
        self.one
    }
}

/// `exp(x)` for x <= 0 with relative error below 3e-7; 0 below -80. Only additions,
/// multiplications and bit operations, so that it is bit-identical everywhere and vectorises.
fn exp_of_negative(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, so that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -80.0 { x } else { -80.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    // Taylor to the sixth power: |r| <= ln 2 / 2, remainder below 1.3e-7.
    let series = 1.0 / 120.0 + r * (1.0 / 720.0);
    let series = 1.0 / 24.0 + r * series;
    let series = 1.0 / 6.0 + r * series;
    let series = 0.5 + r * series;
    let series = 1.0 + r * series;
    let series = 1.0 + r * series;
    let exponent = (shifted.to_bits() & 0x7f_ffff).wrapping_sub(0x40_0000).wrapping_add(127);
    let power = f32::from_bits(exponent << 23);
    if x > -80.0 { series * power } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_3e7_of_the_exact_value() {
        for step in 0..800_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_of_negative(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(-80.1), 0.0);
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn the_sum_of_the_largest_vocabulary_does_not_overflow() {
        for vocab in [1, 2, 3, 1 << 17, 129_280, (1 << 17) + 1] {
            let mut weights = Weights::default();
            weights.fill(&vec![0.25; vocab], 1.0).unwrap();
            let sum: u128 = weights.as_slice().iter().map(|&w| u128::from(w)).sum();
            assert!(sum < 1 << 63, "{vocab} tokens");
            assert_eq!(weights.as_slice()[0], weights.one());
        }
    }
}
