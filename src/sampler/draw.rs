//! One choice as data, for those who choose where the logits are: [`Sampler::draw`] says what the next
//! [`Sampler::sample`] would do, [`Sampler::count_draw`] that it was done.
//!
//! Whoever follows it gets the same token, bit for bit: weights are integers, whose sums are exact in any order, and what
//! comes before them is single float32 operations (`weights.rs`).

use super::nucleus;
use super::weights;
use super::{Sampler, SamplerOptions};
use crate::TokenId;

/// A change of one logit: minus infinity stays, a positive one is divided by `repetition`, another multiplied, then
/// `subtract` is subtracted, and `add` is added to whatever it is then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Edit {
    /// Token whose logit it is.
    pub(crate) id: TokenId,
    /// 1 changes nothing.
    pub(crate) repetition: f32,
    /// Presence and frequency penalties.
    pub(crate) subtract: f32,
    /// Bias.
    pub(crate) add: f32,
}

/// What chooses a token from logits `[vocab]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Draw {
    /// Takes the highest logit, the lowest id among equals; what is below has no meaning then.
    pub(crate) greedy: bool,
    /// Divides the distance to the highest logit.
    pub(crate) temperature: f32,
    /// Largest logits that stay, fewer than there are; 0: all.
    pub(crate) top_k: u32,
    /// Share of the weights that stays, likeliest first; 1: all.
    pub(crate) top_p: f32,
    /// Weight of a candidate, at least 1, where the highest logit's is `2^one_bits`.
    pub(crate) min_weight: u64,
    /// Bits of the highest weight.
    pub(crate) one_bits: u32,
    /// Uniform random bits: `random * sum >> 64` is the place among the candidates' weights, by rising id.
    pub(crate) random: u64,
    /// Changes of logits, before all else, by rising id, which occur once.
    pub(crate) edits: Vec<Edit>,
}

impl Draw {
    /// Most edits: a longer list is slower than the logits' way to the host.
    pub(crate) const MAX_EDITS: usize = 4096;
}

impl Sampler {
    /// What the next [`Sampler::sample`] of `vocab` logits would do. `None` where that is an error, there are too many
    /// edits, or memory for them is refused: then call it.
    pub(crate) fn draw(&self, vocab: usize) -> Option<Draw> {
        let SamplerOptions { greedy, temperature, top_k, top_p, min_p, .. } = self.options;
        let edits = self.edits(vocab)?;
        let one_bits = weights::one_bits(vocab);
        let plain = Draw { greedy, temperature, top_k: 0, top_p: 1.0, min_weight: 1, one_bits, random: 0, edits };
        if greedy {
            return Some(plain);
        }
        Some(Draw {
            top_k: if (top_k as usize) < vocab { top_k } else { 0 },
            top_p,
            min_weight: nucleus::min_weight(min_p, 1 << one_bits),
            random: self.rng.peek(),
            ..plain
        })
    }

    /// Uses up the random number of a [`Draw`] that was followed.
    pub(crate) fn count_draw(&mut self) {
        if !self.options.greedy {
            self.rng.skip();
        }
    }

    fn edits(&self, vocab: usize) -> Option<Vec<Edit>> {
        let (penalised, bias) = (self.penalties.len(), &self.options.logit_bias);
        if penalised + bias.len() > Draw::MAX_EDITS {
            return None;
        }
        let mut edits = Vec::new();
        edits.try_reserve_exact(penalised + bias.len()).ok()?;
        let repetition = self.options.repetition_penalty;
        let of_token = |(id, subtract)| Edit { id, repetition, subtract, add: 0.0 };
        edits.extend(self.penalties.subtracted(&self.options).map(of_token));
        edits.sort_unstable_by_key(|edit| edit.id);
        for &(id, add) in bias {
            match edits[..penalised].binary_search_by_key(&id, |edit| edit.id) {
                Ok(i) => edits[i].add = add,
                Err(_) => edits.push(Edit { id, repetition: 1.0, subtract: 0.0, add }),
            }
        }
        edits.sort_unstable_by_key(|edit| edit.id);
        edits.last().is_none_or(|last| (last.id as usize) < vocab).then_some(edits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The description followed with plain loops.
    fn follow(draw: &Draw, logits: &[f32]) -> TokenId {
        let mut logits = logits.to_vec();
        for e in &draw.edits {
            let logit = &mut logits[e.id as usize];
            if *logit != f32::NEG_INFINITY {
                *logit = if *logit > 0.0 { *logit / e.repetition } else { *logit * e.repetition };
                *logit -= e.subtract;
            }
            *logit += e.add;
        }
        let mut order: Vec<TokenId> = (0..logits.len() as u32).collect();
        order.sort_by_key(|&id| std::cmp::Reverse(nucleus::key(logits[id as usize], id)));
        if draw.greedy {
            return order[0];
        }
        let mut all = weights::Weights::default();
        all.fill(&logits, logits[order[0] as usize], draw.temperature).unwrap();
        let weight = |id: &TokenId| all.as_slice()[*id as usize];
        order.retain(|id| weight(id) > 0);
        if draw.top_k > 0 {
            order.truncate(draw.top_k as usize);
        }
        if draw.top_p < 1.0 {
            let total: u64 = order.iter().map(weight).sum();
            let target = ((f64::from(draw.top_p) * total as f64).ceil() as u64).clamp(1, total);
            let mut sum = 0;
            let reaches = |id| {
                sum += weight(id);
                sum >= target
            };
            let kept = order.iter().position(reaches).unwrap() + 1;
            order.truncate(kept);
        }
        order.retain(|id| weight(id) >= draw.min_weight);
        order.sort_unstable();
        let sum: u64 = order.iter().map(weight).sum();
        let mut left = ((u128::from(draw.random) * u128::from(sum)) >> 64) as u64;
        *order
            .iter()
            .find(|id| {
                let found = left < weight(id);
                left = left.saturating_sub(weight(id));
                found
            })
            .unwrap()
    }

    #[test]
    fn a_draw_that_is_followed_gives_the_samplers_tokens() {
        let vocab = 700;
        let noise = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32 / (1 << 24) as f32;
        let plain = SamplerOptions { seed: 7, ..SamplerOptions::default() };
        let penal =
            SamplerOptions { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.1, ..plain.clone() };
        let biased = SamplerOptions { logit_bias: vec![(650, 4.0), (3, f32::NEG_INFINITY), (5, 1.5)], ..penal.clone() };
        let cut = SamplerOptions { top_k: 40, top_p: 0.9, min_p: 0.01, temperature: 1.7, ..biased.clone() };
        let all = [
            SamplerOptions { greedy: true, ..biased.clone() },
            SamplerOptions { top_p: 0.5, ..plain.clone() },
            SamplerOptions { top_k: 1, ..plain.clone() },
            SamplerOptions { top_k: 700, min_p: 0.2, ..plain.clone() },
            SamplerOptions { penalty_window: 5, ..penal.clone() },
            plain,
            penal,
            biased,
            cut,
        ];
        for options in all {
            let mut sampler = Sampler::new(options.clone()).unwrap();
            let mut copy = sampler.clone();
            for step in 0..40 {
                let logits: Vec<f32> = (0..vocab).map(|i| 12.0 * noise(step * 1000 + i) - 4.0).collect();
                let draw = sampler.draw(logits.len()).unwrap();
                assert_eq!(Some(&draw), sampler.draw(logits.len()).as_ref(), "asking changes nothing");
                let token = sampler.sample(&logits).unwrap();
                assert_eq!(follow(&draw, &logits), token, "{options:?}, step {step}");
                assert_eq!(copy.draw(logits.len()), Some(draw));
                copy.count_draw();
                sampler.accept(token).unwrap();
                copy.accept(token).unwrap();
            }
        }
    }

    #[test]
    fn what_is_an_error_or_too_long_has_no_draw() {
        let bias = |ids: std::ops::Range<u32>| SamplerOptions {
            logit_bias: ids.map(|id| (id, 1.0)).collect(),
            ..SamplerOptions::default()
        };
        let draw = |options| Sampler::new(options).unwrap().draw(10_000);
        assert!(draw(bias(0..4096)).is_some());
        assert!(draw(bias(0..4097)).is_none());
        assert!(draw(bias(10_000..10_001)).is_none(), "an id outside the vocabulary");
    }
}
