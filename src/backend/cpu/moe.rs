//! Router and expert activation (reference `inference/model.py`).
#![forbid(unsafe_code)]

use std::cmp::Ordering;

use crate::tensor::format::round_bf16;

/// `sqrt(softplus(z))`, the affinity of a token to an expert; softplus is linear above 20.
pub fn affinity(z: f32) -> f32 {
    let softplus = if z > 20.0 { z } else { z.exp().ln_1p() };
    softplus.sqrt()
}

/// The `ids.len()` experts of highest `affinity + bias`, best first; equal sums go to the lower expert, NaN is worst.
pub fn choose(affinities: &[f32], bias: &[f32], ids: &mut [u32]) {
    let value = |e: u32| {
        let v = affinities[e as usize] + bias[e as usize];
        if v.is_nan() { f32::NEG_INFINITY } else { v }
    };
    let mut taken = 0;
    for e in 0..affinities.len() as u32 {
        // insertion into the sorted prefix: k is at most a few
        let mut at = taken;
        while at > 0 && value(e).partial_cmp(&value(ids[at - 1])) == Some(Ordering::Greater) {
            at -= 1;
        }
        if at >= ids.len() {
            continue;
        }
        taken = (taken + 1).min(ids.len());
        ids[at..taken].rotate_right(1);
        ids[at] = e;
    }
}

/// Weights of the chosen experts: their affinities (never the biased ones), normalised, times the model's scale.
pub fn route_weights(affinities: &[f32], ids: &[u32], scale: f32, weights: &mut [f32]) {
    for (w, &e) in weights.iter_mut().zip(ids) {
        *w = affinities[e as usize];
    }
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w = *w / sum * scale);
}

/// `gate = weight * silu(min(gate, limit)) * clamp(up, -limit, limit)`, in place; a limit of 0 clamps nothing.
pub fn swiglu(gate: &mut [f32], up: &[f32], limit: f32, weight: f32, bf16: bool) {
    let limit = if limit > 0.0 { limit } else { f32::INFINITY };
    for (g, &u) in gate.iter_mut().zip(up) {
        // comparisons instead of min and max, which would drop a NaN
        let clamped = if *g > limit { limit } else { *g };
        let u = u.clamp(-limit, limit);
        let t = weight * (clamped / (1.0 + (-clamped).exp()) * u);
        *g = if bf16 { round_bf16(t) } else { t };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_decides_the_choice_but_not_the_weight() {
        let affinities = [1.0, 2.0, 3.0, 0.5];
        let mut ids = [0; 2];
        choose(&affinities, &[0.0, 0.0, -5.0, 4.0], &mut ids);
        assert_eq!(ids, [3, 1]);
        let mut weights = [0.0; 2];
        route_weights(&affinities, &ids, 1.5, &mut weights);
        assert_eq!(weights, [0.3, 1.2]);
    }

    #[test]
    fn choice_agrees_with_a_full_sort_and_ties_go_to_the_lower_expert() {
        for seed in 0..200u32 {
            let a: Vec<f32> = (0..17).map(|i| ((i * 7 + seed * 13) % 5) as f32).collect();
            let mut order: Vec<u32> = (0..17).collect();
            order.sort_by(|x, y| a[*y as usize].partial_cmp(&a[*x as usize]).unwrap());
            let mut ids = [0; 6];
            choose(&a, &[0.0; 17], &mut ids);
            assert_eq!(ids, order[..6]);
        }
    }

    #[test]
    fn nan_affinities_still_give_valid_distinct_experts() {
        let mut ids = [9; 3];
        choose(&[f32::NAN; 8], &[0.0; 8], &mut ids);
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn swiglu_clamps_the_gate_above_only_and_the_value_on_both_sides() {
        let mut gate = [100.0, -100.0, 1.0];
        swiglu(&mut gate, &[3.0, 3.0, -50.0], 10.0, 1.0, false);
        assert!((gate[0] - 30.0).abs() < 0.01 && gate[1].abs() < 1e-30);
        assert!((gate[2] + 10.0 * 0.731_058_6).abs() < 1e-5);
        let mut gate = [100.0];
        swiglu(&mut gate, &[3.0], 0.0, 0.5, false);
        assert_eq!(gate[0], 150.0, "no limit, no clamp");
        let mut gate = [f32::NAN];
        swiglu(&mut gate, &[1.0], 10.0, 1.0, false);
        assert!(gate[0].is_nan());
    }

    #[test]
    fn affinity_is_stable_at_both_ends() {
        assert_eq!(affinity(1e4), 100.0);
        assert!(affinity(-50.0) > 0.0 && affinity(-50.0) < 1e-10);
    }
}
