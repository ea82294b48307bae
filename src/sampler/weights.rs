//! Softmax numerators as integers: exact sums in any order, the same on every platform.

use crate::alloc;
use crate::error::Result;

/// Tokens per inner loop of [`Weights::fill`].
const BLOCK: usize = 64;

/// `exp((logit - max) / temperature)` of each token, scaled so that the sum of all fits 63 bits.
/// For V4's 129,280 tokens the likeliest weighs 2^45: a token 3e-14 times as likely weighs 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    values: Vec<u64>,
    /// Weight of the likeliest token.
    one: u64,
}

impl Weights {
    /// `max` is the largest of `logits`, finite.
    pub(super) fn fill(&mut self, logits: &[f32], max: f32, temperature: f32) -> Result<()> {
        let one_bits = one_bits(logits.len());
        self.one = 1 << one_bits;
        self.values.clear();
        alloc::reserve("the sampler's weights", &mut self.values, logits.len())?;
        // In two short loops per block, so that the first one vectorises.
        let mut relative = [0.0; BLOCK];
        for block in logits.chunks(BLOCK) {
            for (relative, &logit) in relative.iter_mut().zip(block) {
                // Division: 1 / temperature would overflow for tiny temperatures.
                *relative = exp_of_negative((logit - max) / temperature);
            }
            let block = relative[..block.len()].iter();
            self.values.extend(block.map(|&relative| scaled(relative, one_bits)));
        }
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

/// Bits of the likeliest token's weight among `vocab`.
pub(super) fn one_bits(vocab: usize) -> u32 {
    let vocab_bits = u64::BITS - (vocab as u64).leading_zeros();
    62 - vocab_bits
}

/// `value * 2^bits` truncated to an integer, for a value from 0 to 1 that is not subnormal.
/// (A cast would do the same, one slow saturating conversion per token.)
fn scaled(value: f32, bits: u32) -> u64 {
    let raw = value.to_bits();
    let mantissa = u64::from(raw & 0x7f_ffff | 0x80_0000);
    // The value is mantissa * 2^(exponent - 23); 0 has the exponent -127 and is shifted out.
    let right = 127 - (raw >> 23) + 63 - bits;
    if right > 63 { 0 } else { (mantissa << 40) >> right }
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
    fn scaling_equals_the_cast() {
        for bits in [1, 20, 45, 61] {
            for step in 0..2000 {
                let value = exp_of_negative(-(step as f32) * 0.041);
                let cast = (f64::from(value) * 2f64.powi(bits)) as u64;
                assert_eq!(scaled(value, bits as u32), cast, "{value} * 2^{bits}");
            }
            assert_eq!(scaled(0.0, bits as u32), 0);
            assert_eq!(scaled(1.0, bits as u32), 1 << bits);
        }
    }

    #[test]
    fn the_sum_of_the_largest_vocabulary_does_not_overflow() {
        for vocab in [1, 2, 3, 1 << 17, 129_280, (1 << 17) + 1] {
            let mut weights = Weights::default();
            weights.fill(&vec![0.25; vocab], 0.25, 1.0).unwrap();
            let sum: u128 = weights.as_slice().iter().map(|&w| u128::from(w)).sum();
            assert!(sum < 1 << 63, "{vocab} tokens");
            assert_eq!(weights.as_slice()[0], weights.one());
        }
    }
}
