use super::*;
use crate::tensor::format::{E4M3, bf16_value};

pub(super) fn floats(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Pitfall 106.
#[test]
fn detection_picks_the_last_available_level_and_refuses_no_available_one() {
    let available = Simd::available();
    assert_eq!(available[0].level(), Level::Portable);
    assert_eq!(available.last(), Some(&Simd::detect()));
    for level in Level::ALL {
        assert_eq!(Simd::new(level).is_ok(), available.iter().any(|s| s.level() == level), "{level}");
    }
}

#[test]
fn scores_match_float64_and_do_not_depend_on_their_neighbours() {
    for simd in Simd::available() {
        for (heads, keys, dim) in [(1, 1, 512), (8, 64, 512), (7, 5, 128), (5, 9, 20), (2, 3, 5)] {
            let (q, k) = (floats(heads * dim, 1), floats(keys * dim, 2));
            let mut out = vec![0.0; heads * keys];
            scores(simd, &q, &k, dim, &mut out);
            for h in 0..heads {
                for t in 0..keys {
                    let (q, k) = (&q[h * dim..][..dim], &k[t * dim..][..dim]);
                    let exact: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let bound = (dim as f64 / 4.0 + 8.0) * 2f64.powi(-24) * dim as f64;
                    assert!((f64::from(out[h * keys + t]) - exact).abs() < bound, "{} {h} {t}", simd.level());
                    let mut alone = [0.0];
                    scores(simd, q, k, dim, &mut alone);
                    assert_eq!(alone[0].to_bits(), out[h * keys + t].to_bits(), "{} {h} {t}", simd.level());
                }
            }
        }
    }
}

#[test]
fn accumulation_matches_float64_and_does_not_depend_on_heads_or_tiles() {
    for simd in Simd::available() {
        for (heads, keys, dim) in
            [(1, 1, 512), (8, 64, 512), (7, 5, 128), (5, 9, 20), (2, 3, 5), (6, 150, 72), (3, 0, 16)]
        {
            let (p, v) = (floats(heads * keys, 3), floats(keys * dim, 4));
            let (fade, start) = (floats(heads, 5), floats(heads * dim, 6));
            let mut acc = start.clone();
            accumulate(simd, &fade, &p, &v, dim, &mut acc);
            for h in 0..heads {
                for d in 0..dim {
                    let terms = (0..keys).map(|t| f64::from(p[h * keys + t]) * f64::from(v[t * dim + d]));
                    let exact = f64::from(start[h * dim + d]) * f64::from(fade[h]) + terms.sum::<f64>();
                    let bound = (2.0 * keys as f64 + 4.0) * 2f64.powi(-24) * (keys as f64 + 1.0);
                    assert!((f64::from(acc[h * dim + d]) - exact).abs() < bound, "{} {h} {d}", simd.level());
                }
                // one head alone, its keys in two tiles
                let mut alone = start[h * dim..][..dim].to_vec();
                let (p, cut) = (&p[h * keys..][..keys], keys / 2);
                accumulate(simd, &fade[h..=h], &p[..cut], &v[..cut * dim], dim, &mut alone);
                accumulate(simd, &[1.0], &p[cut..], &v[cut * dim..], dim, &mut alone);
                assert_eq!(bits(&alone), bits(&acc[h * dim..][..dim]), "{} head {h}", simd.level());
            }
        }
    }
}

#[test]
fn exp_is_within_two_ulp_and_exact_at_its_ends() {
    let ulps = |x: f32, y: f32| {
        let exact = f64::from(x).exp();
        let spacing = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
        ((f64::from(y) - exact) / spacing).abs()
    };
    for simd in Simd::available() {
        let inputs: Vec<f32> = (0..400_001).map(|i| i as f32 * 0.000_48 - 103.9).collect();
        let mut outputs = inputs.clone();
        exp(simd, &mut outputs);
        for (&x, &y) in inputs.iter().zip(&outputs).filter(|(x, _)| **x < 88.7) {
            assert!(ulps(x, y) <= 2.0, "{} exp({x}) = {y}", simd.level());
        }
        let mut ends = [0.0, -0.0, -104.0, -1e30, f32::NEG_INFINITY, 88.8, f32::INFINITY, f32::NAN, -87.5];
        exp(simd, &mut ends);
        assert_eq!(ends[..7], [1.0, 1.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY], "{}", simd.level());
        assert!(ends[7].is_nan() && ends[8] > 0.0, "{}", simd.level());
        // an element's bits do not depend on where it stands
        for (&x, &y) in inputs.iter().zip(&outputs).step_by(997) {
            let mut alone = [x];
            exp(simd, &mut alone);
            assert_eq!(alone[0].to_bits(), y.to_bits(), "{} exp({x})", simd.level());
        }
    }
}

#[test]
fn stored_rows_expand_exactly() {
    let codes: Vec<u8> = (0..=255).chain(0..21).collect();
    let halves: Vec<u8> = (0..=u16::MAX).step_by(3).flat_map(u16::to_le_bytes).collect();
    for simd in Simd::available() {
        for scale in [1.0, 2f32.powi(-126), f32::from_bits(1 << 22), 2f32.powi(127), 0.3] {
            let mut out = vec![0.0; codes.len()];
            e4m3_to_f32(simd, &codes, scale, &mut out);
            for (&code, &y) in codes.iter().zip(&out) {
                let expected = E4M3[usize::from(code)] * scale;
                assert!(
                    y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan(),
                    "{} {code}",
                    simd.level()
                );
            }
        }
        let mut out = vec![0.0; halves.len() / 2];
        bf16_to_f32(simd, &halves, &mut out);
        for (pair, &y) in halves.chunks(2).zip(&out) {
            let expected = bf16_value(u16::from_le_bytes([pair[0], pair[1]]));
            assert!(y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan(), "{}", simd.level());
        }
    }
}
