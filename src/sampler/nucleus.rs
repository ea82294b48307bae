//! Which tokens remain candidates: top-k, then top-p, then min-p.
//!
//! Each of the three keeps a prefix of the tokens in falling order (logit, then lower id first),
//! so together they are one cut: the smallest sort key that stays. Found by selection in O(n);
//! a vocabulary is never sorted.

use std::cmp::Reverse;

use super::scan;
use super::weights::Weights;
use crate::TokenId;
use crate::alloc;
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

/// Lower end of the tokens that stay, in the order of [`key`].
#[derive(Clone, Copy)]
pub(super) struct Cut {
    key: u64,
    /// At most the weight of the token at `key`, at least 1: most tokens are decided by it alone.
    weight: u64,
}

impl Cut {
    /// True for the tokens that stay; `key` is asked for only where the weight does not decide.
    pub(super) fn keeps(self, weight: u64, key: impl FnOnce() -> u64) -> bool {
        weight >= self.weight && (self.key == 0 || key() >= self.key)
    }
}

/// Finds the cut of the three limits together. `keys` is scratch.
pub(super) fn cut(logits: &[f32], weights: &Weights, limits: &Limits, keys: &mut Vec<u64>) -> Result<Cut> {
    let weights_of = weights.as_slice();
    let mut cut = Cut { key: 0, weight: min_weight(limits.min_p, weights.one()) };
    let top_k = limits.top_k as usize;
    let limits_k = top_k > 0 && top_k < logits.len();
    if !limits_k && limits.top_p == 1.0 {
        return Ok(cut);
    }

    // Leave out early, and cheaply, what top-k or top-p will cut anyhow.
    let (floor_logit, floor_weight) = match limits_k {
        true => (top_k_floor(logits, top_k, keys)?, 1),
        false => (f32::NEG_INFINITY, top_p_floor(weights_of, limits.top_p)),
    };
    keys.clear();
    alloc::reserve("the sampler's candidates", keys, logits.len())?;
    let rows = (0..).zip(logits).zip(weights_of);
    let likely = rows.filter(|&((_, &l), &w)| (w >= floor_weight) & (l >= floor_logit));
    keys.extend(likely.map(|((id, &logit), _)| key(logit, id)));

    if limits_k {
        let kept = top_k.min(keys.len());
        cut.key = *keys.select_nth_unstable_by_key(kept - 1, |&key| Reverse(key)).1;
        keys.truncate(kept);
    }
    if limits.top_p < 1.0 {
        let sum = |keys: &[u64]| keys.iter().map(|&key| weights_of[id_of(key) as usize]).sum();
        let total = if limits_k { sum(keys) } else { weights_of.iter().sum() };
        cut.key = cut.key.max(top_p_cut(keys, top_p_target(limits.top_p, total), sum));
    }
    if cut.key > 0 {
        cut.weight = cut.weight.max(weights_of[id_of(cut.key) as usize]);
    }
    Ok(cut)
}

/// Weight that min-p asks for where the likeliest token weighs `one`: it needs no order. Tokens of weight 0 are never drawn.
pub(super) fn min_weight(min_p: f32, one: u64) -> u64 {
    (f64::from(min_p) * one as f64).ceil().max(1.0) as u64
}

/// A logit that at least `top_k` logits reach: the k-th largest of block maxima, or minus infinity
/// when there are too few blocks.
fn top_k_floor(logits: &[f32], top_k: usize, keys: &mut Vec<u64>) -> Result<f32> {
    const BLOCK: usize = 64;
    let blocks = logits.len().div_ceil(BLOCK);
    if blocks <= top_k {
        return Ok(f32::NEG_INFINITY);
    }
    keys.clear();
    alloc::reserve("the sampler's candidates", keys, blocks)?;
    let numbered = (0..).zip(logits.chunks(BLOCK));
    keys.extend(numbered.map(|(block, chunk)| key(scan::max(chunk), block)));
    let kth = *keys.select_nth_unstable_by_key(top_k - 1, |&key| Reverse(key)).1;
    let block = id_of(kth) as usize * BLOCK;
    Ok(scan::max(&logits[block..logits.len().min(block + BLOCK)]))
}

/// A weight that every token of the top-p set reaches: tokens below a mean share of what may be
/// dropped weigh less than that together. Leaves a few hundred of a real model's 129,280.
fn top_p_floor(weights: &[u64], top_p: f32) -> u64 {
    let total: u64 = weights.iter().sum();
    let dropped = (1.0 - f64::from(top_p)) * total as f64;
    // The margin covers the rounding of the three float operations above.
    let floor = dropped / weights.len() as f64 * (1.0 - 1e-9);
    (floor as u64).max(1)
}

fn top_p_target(top_p: f32, total: u64) -> u64 {
    ((f64::from(top_p) * total as f64).ceil() as u64).clamp(1, total)
}

/// Key at which the summed weight, likeliest first, reaches `target`. Weighted selection: halves
/// the range that holds it. `keys` is not empty.
fn top_p_cut(keys: &mut [u64], target: u64, sum: impl Fn(&[u64]) -> u64) -> u64 {
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
