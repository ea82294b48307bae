use super::super::tests::{bits, floats};
use super::super::{Form, permutation};
use super::*;
use crate::tensor::format::{E2M1, e4m3_round_trip, e8m0_value};

/// Levels with integer products.
fn levels() -> Vec<Simd> {
    Simd::available().into_iter().filter(|simd| simd.takes_digits()).collect()
}

fn to_digits(simd: Simd, x: &[f32]) -> Vec<Digits> {
    let mut digits = vec![Digits::ZERO; x.len().div_ceil(DIGIT_COLS)];
    // filled twice, so that nothing of the first time may stay
    for x in [&vec![1.5; x.len()][..], x] {
        for (digits, x) in digits.iter_mut().zip(x.chunks(DIGIT_COLS)) {
            digits.fill(simd, x);
        }
    }
    digits
}

fn is_taken(x: &[f32]) -> bool {
    let taken = levels().into_iter().map(|simd| DigitDots::takes(&to_digits(simd, x))).collect::<Vec<_>>();
    assert!(taken.windows(2).all(|t| t[0] == t[1]), "levels differ");
    taken[0]
}

/// Weights `[rows, cols]` with scales from `scale`.
struct Weights {
    rows: usize,
    cols: usize,
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Weights {
    fn random(rows: usize, cols: usize, seed: u32, scale: impl Fn(u8) -> u8) -> Self {
        let byte = |x: f32| (x.to_bits() >> 3) as u8;
        let data = floats(rows * cols / 2, seed).into_iter().map(byte).collect();
        let scales = floats(rows * cols / 32, seed + 1).into_iter().map(|x| scale(byte(x))).collect();
        Self { rows, cols, data, scales }
    }

    fn view(&self) -> Rows<'_> {
        let Self { rows, cols, ref data, ref scales } = *self;
        Rows { storage: Storage::E2m1, rows, cols, data, scales, factors: [1.0; 2] }
    }

    fn dots(&self, simd: Simd, x: &[f32]) -> Vec<f32> {
        let (prepared, mut out) = (in_order(simd, x), vec![7.0; self.rows]);
        Dots { weights: self.view(), x: &prepared, out: &mut out }.run(simd);
        out
    }

    fn digit_dots(&self, simd: Simd, x: &[f32]) -> Vec<f32> {
        let (prepared, mut out) = (in_order(simd, x), vec![7.0; self.rows]);
        let dots = Dots { weights: self.view(), x: &prepared, out: &mut out };
        DigitDots { dots, digits: &to_digits(simd, x) }.run(simd);
        out
    }

    /// The sum as documented: eight exact products a lane and block, joined to a float32 chain, lanes added in one order.
    fn chain(&self, simd: Simd, row: usize, x: &[f32]) -> f32 {
        let mut lanes = vec![0.0_f32; simd.lanes()];
        for first in (0..self.cols).step_by(8) {
            let scale = f64::from(e8m0_value(self.scales[row * (self.cols / 32) + first / 32]));
            let products = (first..first + 8).map(|c| {
                let code = self.data[(row * self.cols + c) / 2] >> (c % 2 * 4) & 15;
                f64::from(E2M1[usize::from(code)]) * f64::from(x[c])
            });
            let (sum, lane) = (products.sum::<f64>(), &mut lanes[first / 8 % simd.lanes()]);
            assert_eq!(f64::from(sum as f32), sum, "the test's input has inexact sums");
            *lane = (sum as f32).mul_add(scale as f32, *lane);
        }
        let fold = |i: usize| lanes[i..].iter().step_by(8).sum::<f32>();
        let [a, b, c, d, e, f, g, h] = std::array::from_fn(fold);
        ((a + e) + (b + f)) + ((c + g) + (d + h))
    }
}

fn in_order(simd: Simd, x: &[f32]) -> Vec<f32> {
    let group = Form::Nibbles.group(simd.lanes());
    let order = permutation(Form::Nibbles, simd.lanes());
    let padded = x.len().next_multiple_of(group);
    (0..padded).map(|i| x.get(i / group * group + usize::from(order[i % group])).copied().unwrap_or(0.0)).collect()
}

/// Random values rounded to E4M3, their magnitudes spread by `power`.
fn quantised(cols: usize, seed: u32, power: i32) -> Vec<f32> {
    let mut x = floats(cols, seed);
    x.iter_mut().for_each(|x| *x = x.powi(power) * 37.0);
    x.chunks_mut(128).for_each(|x| e4m3_round_trip(x, x.len()));
    x
}

#[test]
fn integer_products_are_the_documented_chain_and_that_of_floats() {
    for simd in levels() {
        for (i, (rows, cols)) in
            [(1, 32), (3, 96), (5, 256), (4, 544), (7, 1056), (2, 4096), (130, 224)].into_iter().enumerate()
        {
            for power in [1, 3, 9] {
                let seed = (100 * i) as u32 + power as u32;
                let weights = Weights::random(rows, cols, seed, |byte| 100 + byte % 40);
                let x = quantised(cols, seed + 50, power);
                let integers = weights.digit_dots(simd, &x);
                assert_eq!(bits(&integers), bits(&weights.dots(simd, &x)), "{} {rows} x {cols}", simd.level());
                let chains: Vec<f32> = (0..rows).map(|row| weights.chain(simd, row, &x)).collect();
                assert_eq!(bits(&integers), bits(&chains), "{} {rows} x {cols}", simd.level());
            }
        }
    }
}

#[test]
fn every_e4m3_value_meets_every_e2m1_value_exactly() {
    let values: Vec<f32> = (0..=255).map(|code| crate::tensor::format::E4M3[code]).filter(|v| !v.is_nan()).collect();
    for simd in levels() {
        for code in 0..16 {
            let data = vec![code << 4 | (15 - code); 128];
            let weights = Weights { rows: 1, cols: 256, data, scales: vec![127; 8] };
            for (i, value) in values.iter().enumerate() {
                // beside the largest of the block, in a lane of its own
                let mut x = vec![0.0; 256];
                x[i % 128] = *value;
                x[(i + 64) % 128] = 448.0;
                let y = weights.digit_dots(simd, &x)[0];
                assert_eq!(
                    y.to_bits(),
                    weights.chain(simd, 0, &x).to_bits(),
                    "{} {value} times code {code}",
                    simd.level()
                );
            }
        }
    }
}

#[test]
fn extreme_scales_give_the_bits_of_floats() {
    for simd in levels() {
        let x = quantised(512, 3, 1);
        let ends = [0, 1, 79, 80, 81, 127, 187, 188, 189, 253, 254, 255];
        for (i, &end) in ends.iter().enumerate() {
            for other in [end, 120] {
                let mut weights = Weights::random(11, 512, i as u32, |_| other);
                weights.scales[5 * 16 + i] = end;
                let (integers, floats) = (weights.digit_dots(simd, &x), weights.dots(simd, &x));
                assert_eq!(bits(&integers), bits(&floats), "{} scale {end} among {other}", simd.level());
                assert_eq!(integers[5].is_nan(), end == 255 || floats[5].is_nan(), "{} scale {end}", simd.level());
            }
        }
    }
}

#[test]
fn quantised_inputs_are_taken_at_usual_sizes_only() {
    for power in [1, 3, 9] {
        let x = quantised(1024, 9, power);
        assert!(is_taken(&x));
        for exponent in [-40, -1, 1, 40] {
            assert!(is_taken(&x.iter().map(|x| x * 2f32.powi(exponent)).collect::<Vec<_>>()), "{exponent}");
        }
        for exponent in [-100, 100] {
            assert!(!is_taken(&x.iter().map(|x| x * 2f32.powi(exponent)).collect::<Vec<_>>()), "{exponent}");
        }
    }
    assert!(is_taken(&[0.0; 320]));
    assert!(is_taken(&[-0.0; 32]));
}

#[test]
fn other_inputs_are_not_taken() {
    let quantised = quantised(256, 11, 1);
    let with = |at: usize, value: f32| {
        let mut x = quantised.clone();
        x[at] = value;
        x
    };
    assert!(!is_taken(&floats(256, 1)));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-30, f32::from_bits(1), 0.1, 3e38] {
        for at in [0, 77, 255] {
            assert!(!is_taken(&with(at, value)), "{value} at {at}");
        }
    }
    // more bits than the largest value of a block may have, and than any may
    assert!(is_taken(&[240.0, 0.0]) && !is_taken(&[248.0, 0.0]));
    assert!(is_taken(&[240.0, 2f32.powi(-10)]) && !is_taken(&[240.0, 2f32.powi(-11)]));
}

#[test]
fn a_lane_whose_sum_float32_would_round_is_not_taken() {
    // magnitudes of a lane up to `2^24 / 12` units, the largest weight being 12 halves
    let unit = 2f32.powi(-9);
    let lane = |rest: f32, fine: f32| {
        let mut x = vec![0.0; 128];
        x[40..48].copy_from_slice(&[448.0, 448.0, 448.0, 448.0, 448.0, 448.0, rest, fine]);
        x
    };
    let limit = 2f32.powi(24) / 12.0 * unit - 6.0 * 448.0;
    let below = (limit / 4.0).floor() * 4.0;
    assert!(is_taken(&lane(below, unit)), "{below}");
    assert!(!is_taken(&lane(below + 4.0, unit)), "{below}");
    assert!(is_taken(&lane(below + 4.0, 2.0 * unit)), "all even: a bit to spare");
    assert!(is_taken(&vec![448.0; 256]) && is_taken(&vec![-448.0; 256]));
}
