//! Rotary position embedding on interleaved pairs (reference `inference/model.py`).
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;
use crate::model::config::Yarn;
use crate::tensor::format::round_bf16;

/// Angular frequencies of the `dim / 2` pairs, in radians per position; computed in float64 and rounded once.
pub fn frequencies(dim: usize, theta: f64, yarn: Option<&Yarn>) -> Vec<f32> {
    let plain = |i: usize| theta.powf(-((2 * i) as f64) / dim as f64);
    let Some(yarn) = yarn else {
        return (0..dim / 2).map(|i| plain(i) as f32).collect();
    };
    let boundary = |rotations: f64| {
        let original = yarn.original_max_position_embeddings as f64;
        dim as f64 * (original / (rotations * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
    };
    let low = boundary(yarn.beta_fast).floor().max(0.0);
    let high = boundary(yarn.beta_slow).ceil().min((dim - 1) as f64);
    let ramp = |i: usize| ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
    (0..dim / 2).map(|i| (plain(i) * (1.0 - ramp(i)) + plain(i) / yarn.factor * ramp(i)) as f32).collect()
}

/// Cosines and sines of a run of positions: the angle is a float32 product, its cosine and sine the nearest float32.
pub struct Rotations {
    pairs: usize,
    /// `[positions, pairs]` of (cos, sin).
    table: Vec<(f32, f32)>,
}

impl Rotations {
    /// Table for `positions`, one row each.
    pub fn new(frequencies: &[f32], positions: impl ExactSizeIterator<Item = usize>) -> Result<Self> {
        let pairs = frequencies.len();
        let mut table = alloc::with_capacity("rotation table", positions.len() * pairs)?;
        for position in positions {
            for &f in frequencies {
                let angle = f64::from(position as f32 * f);
                table.push((angle.cos() as f32, angle.sin() as f32));
            }
        }
        Ok(Self { pairs, table })
    }

    /// Rotates the last `2 * pairs` values of `x` by the angles of table row `row`.
    pub fn rotate(&self, row: usize, x: &mut [f32], bf16: bool) {
        self.apply(row, x, bf16, 1.0);
    }

    /// Rotates back: by the negative angles of table row `row`.
    pub fn rotate_back(&self, row: usize, x: &mut [f32], bf16: bool) {
        self.apply(row, x, bf16, -1.0);
    }

    fn apply(&self, row: usize, x: &mut [f32], bf16: bool, direction: f32) {
        let angles = &self.table[row * self.pairs..(row + 1) * self.pairs];
        let start = x.len() - 2 * self.pairs;
        for (pair, &(cos, sin)) in x[start..].chunks_exact_mut(2).zip(angles) {
            let (a, b, sin) = (pair[0], pair[1], sin * direction);
            pair[0] = a * cos - b * sin;
            pair[1] = a * sin + b * cos;
            if bf16 {
                pair[0] = round_bf16(pair[0]);
                pair[1] = round_bf16(pair[1]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLASH_YARN: Yarn =
        Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65536 };

    #[test]
    fn yarn_frequencies_are_those_of_the_specification() {
        let f = frequencies(64, 160_000.0, Some(&FLASH_YARN));
        for (i, want) in [
            (0, 1.0),
            (15, 3.635_538_6e-3),
            (16, 2.265_625e-3),
            (20, 2.969_777_8e-4),
            (25, 5.372_312_7e-6),
            (31, 5.680_529e-7),
        ] {
            assert!((f64::from(f[i]) / want - 1.0).abs() < 2e-7, "frequency {i} is {}, want {want}", f[i]);
        }
    }

    #[test]
    fn plain_frequencies_ignore_yarn() {
        let f = frequencies(64, 10_000.0, None);
        assert_eq!(f[0], 1.0);
        assert!((f64::from(f[31]) / 10_000f64.powf(-62.0 / 64.0) - 1.0).abs() < 1e-7);
    }

    /// Pitfall 51.
    #[test]
    fn rotating_back_undoes_rotating_at_every_range_of_positions() {
        let positions = [0usize, 1, 127, 65_535, 65_536, 1_048_575];
        let rotations = Rotations::new(&frequencies(64, 160_000.0, Some(&FLASH_YARN)), positions.into_iter()).unwrap();
        for row in 0..positions.len() {
            let before: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut x = before.clone();
            rotations.rotate(row, &mut x, false);
            assert_eq!(x[..64], before[..64], "only the last 64 values turn");
            assert!(row == 0 || x[64..] != before[64..]);
            rotations.rotate_back(row, &mut x, false);
            for (a, b) in x.iter().zip(&before) {
                assert!((a - b).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn pairs_are_interleaved_not_split_in_halves() {
        let rotations = Rotations::new(&[std::f32::consts::FRAC_PI_2, 0.0], [1usize].into_iter()).unwrap();
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotations.rotate(0, &mut x, false);
        assert!((x[0] + 2.0).abs() < 1e-6 && (x[1] - 1.0).abs() < 1e-6, "pair (0, 1) turns by a quarter: {x:?}");
        assert_eq!(x[2..], [3.0, 4.0]);
    }
}
