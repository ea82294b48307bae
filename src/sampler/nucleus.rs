//! Which tokens remain candidates: top-k, then top-p, then min-p.
//!
//! Each of the three keeps a prefix of the tokens in falling order (logit, then lower id first),
//! so together they are one cut: the smallest sort key that stays. Found by selection in O(n);
//! a vocabulary is never sorted.

use std::cmp::Reverse;

use super::reserve;
use super::weights::Weights;
use crate::TokenId;
use crate::error::Result;

/// The three limits, validated.
pub(super) struct Limits {
    pub(super) top_k: u32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
}

/// Key that sorts as (logit, then lower id above higher). Unique per id.
pub(super) fn key(logit: f32, id: TokenId) -> u64 {
    // -0.0 equals 0.0: adding 0.0 makes it so.
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn id_of(key: u64) -> TokenId {
    !(key as u32)
}

/// Smallest key that stays. `keys` is scratch.
pub(super) fn cut(
    logits: &[f32],
    weights: &Weights,
    limits: Limits,
    keys: &mut Vec<u64>,
) -> Result<u64> {
    let weight_of = |key: u64| weights.as_slice()[id_of(key) as usize];
    // Tokens without weight are never drawn and change no sum: leave them out at once.
    let min_weight = (f64::from(limits.min_p) * weights.one() as f64).ceil().max(1.0) as u64;
    let keep_all = limits.top_k == 0 && limits.top_p == 1.0;
    if keep_all && limits.min_p == 0.0 {
        return Ok(0);
    }
    keys.clear();
    reserve(keys, logits.len(), "candidates")?;
    let weighted = (0..).zip(logits).zip(weights.as_slice());
    if keep_all {
        keys.extend(weighted.filter(|&(_, &w)| w >= min_weight).map(|((id, &l), _)| key(l, id)));
        return Ok(keys.iter().copied().min().unwrap_or(0));
    }
    keys.extend(weighted.filter(|&(_, &w)| w > 0).map(|((id, &l), _)| key(l, id)));

    let mut cut = 0;
    let top_k = limits.top_k as usize;
    if (1..keys.len()).contains(&top_k) {
        cut = *keys.select_nth_unstable_by_key(top_k - 1, |&key| Reverse(key)).1;
        keys.truncate(top_k);
    }
    if limits.top_p < 1.0 {
        cut = cut.max(top_p_cut(keys, limits.top_p, weight_of));
    }
    if limits.min_p > 0.0 {
        let kept = keys.iter().copied().filter(|&key| weight_of(key) >= min_weight);
        cut = cut.max(kept.min().unwrap_or(0));
    }
    Ok(cut)
}

/// Key of the token at which the summed weight, likeliest first, reaches `top_p` of the whole.
fn top_p_cut(keys: &mut Vec<u64>, top_p: f32, weight_of: impl Fn(u64) -> u64) -> u64 {
    let sum = |keys: &[u64]| keys.iter().map(|&key| weight_of(key)).sum::<u64>();
    let total = sum(keys);
    let target = ((f64::from(top_p) * total as f64).ceil() as u64).clamp(1, total);
    // Tokens below a mean share of what may be dropped weigh less than that together, so the cut
    // lies above all of them. This leaves a few hundred of a real model's 129,280.
    let floor = (1.0 - f64::from(top_p)) * total as f64 / keys.len() as f64 * (1.0 - 1e-9);
    keys.retain(|&key| weight_of(key) as f64 >= floor);

    // Weighted selection: halve the range that holds the cut.
    let (mut low, mut high, mut above) = (0, keys.len(), 0);
    while high - low > 1 {
        let half = (high - low) / 2;
        keys[low..high].select_nth_unstable_by_key(half - 1, |&key| Reverse(key));
        let upper = sum(&keys[low..low + half]);
        if above + upper >= target {
            high = low + half;
        } else {
            above += upper;
            low += half;
        }
    }
    keys[low]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_logit_and_then_by_lower_id() {
        let falling = [
            (3.0, 7),
            (0.5, 1),
            (0.5, 2),
            (0.0, 0),
            (-0.0, 3),
            (-1.0, 0),
            (-1.0, 9),
            (f32::MIN, 0),
            (f32::NEG_INFINITY, 0),
        ];
        for pair in falling.windows(2) {
            assert!(key(pair[0].0, pair[0].1) > key(pair[1].0, pair[1].1), "{pair:?}");
        }
        assert_eq!(id_of(key(-1.5, 129_279)), 129_279);
    }
}
