//! Which tokens of which waiting calls go into the next step. A pure function: it sees no clock, lock or cache.
//!
//! Calls that decode come first, since somebody waits for each of their tokens; what is left is for prompts, the oldest
//! first, with a share for each. Within a kind, higher priority goes before age. Calls that were passed over [`OVERDUE`]
//! times go before all others, the most passed over first, whatever their priority: so nothing waits for ever.
#![forbid(unsafe_code)]

use std::cmp::Reverse;

/// Steps a call may be passed over before it goes first.
pub(super) const OVERDUE: u32 = 4;
/// Tokens that an overdue prompt is given ahead of everybody else.
const OVERDUE_SHARE: usize = 16;

/// What a waiting call wants of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Tokens it has ready, at least 1.
    pub(crate) tokens: usize,
    /// Whether it continues a text instead of reading one.
    pub(crate) decodes: bool,
    /// Higher goes first.
    pub(crate) priority: i32,
    /// When the call began, as a number that grows.
    pub(crate) since: u64,
    /// Steps that were formed without it.
    pub(crate) passed: u32,
    /// It was in a step that failed as a whole: the next one is its alone.
    pub(crate) apart: bool,
}

/// What fits into a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Tokens, at least 1.
    pub(crate) rows: usize,
    /// Sequences, at least 1.
    pub(crate) sequences: usize,
    /// Tokens of prompts beside decoding calls.
    pub(crate) prefill: usize,
}

/// A call's part of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Place of the call among the demands.
    pub(crate) index: usize,
    /// Its first so many tokens, at least 1.
    pub(crate) tokens: usize,
}

/// Forms a step; it has something whenever there is a demand.
pub(crate) fn compose(demands: &[Demand], limits: Limits) -> Vec<Share> {
    let mut order: Vec<usize> = (0..demands.len()).collect();
    order.sort_by_key(|&i| {
        let d = &demands[i];
        let overdue = if d.passed < OVERDUE { 0 } else { d.passed };
        (Reverse(overdue), Reverse(if overdue > 0 { 0 } else { d.priority }), d.since)
    });
    let Some(&first) = order.first() else { return Vec::new() };
    if demands[first].apart {
        return vec![Share { index: first, tokens: demands[first].tokens.min(limits.rows) }];
    }
    order.retain(|&i| !demands[i].apart);

    let mut step = Forming { shares: Vec::new(), rows: limits.rows, sequences: limits.sequences };
    for &i in order.iter().filter(|&&i| demands[i].passed >= OVERDUE) {
        let d = &demands[i];
        step.give(i, if d.decodes { d.tokens } else { d.tokens.min(OVERDUE_SHARE) });
    }
    for &i in order.iter().filter(|&&i| demands[i].decodes && demands[i].passed < OVERDUE) {
        step.give(i, demands[i].tokens);
    }
    let is_decoding = step.shares.iter().any(|share| demands[share.index].decodes);
    order.retain(|&i| !demands[i].decodes);
    step.rows = step.rows.min(if is_decoding { limits.prefill } else { limits.rows });
    let floor = (step.rows / (2 * order.len().max(1))).max(1);
    for &i in &order {
        step.give(i, demands[i].tokens.saturating_sub(step.given(i)).min(floor));
    }
    for &i in &order {
        step.give(i, demands[i].tokens - step.given(i));
    }
    step.shares
}

/// A step that is being put together, and what still fits.
struct Forming {
    shares: Vec<Share>,
    rows: usize,
    sequences: usize,
}

impl Forming {
    /// Adds as many of `tokens` more tokens of call `index` as fit.
    fn give(&mut self, index: usize, tokens: usize) {
        let tokens = tokens.min(self.rows);
        if tokens == 0 {
            return;
        }
        match self.shares.iter_mut().find(|share| share.index == index) {
            Some(share) => share.tokens += tokens,
            None if self.sequences == 0 => return,
            None => {
                self.shares.push(Share { index, tokens });
                self.sequences -= 1;
            }
        }
        self.rows -= tokens;
    }

    /// Tokens that call `index` has so far.
    fn given(&self, index: usize) -> usize {
        self.shares.iter().find(|share| share.index == index).map_or(0, |share| share.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { rows: 256, sequences: 64, prefill: 32 };

    fn decode(since: u64) -> Demand {
        Demand { tokens: 1, decodes: true, priority: 0, since, passed: 0, apart: false }
    }

    fn prompt(since: u64, tokens: usize) -> Demand {
        Demand { tokens, decodes: false, ..decode(since) }
    }

    /// Tokens of each demand in the step.
    fn tokens(demands: &[Demand], limits: Limits) -> Vec<usize> {
        let mut given = vec![0; demands.len()];
        compose(demands, limits).iter().for_each(|share| given[share.index] += share.tokens);
        given
    }

    #[test]
    fn a_call_alone_gets_all_that_fits() {
        assert_eq!(tokens(&[prompt(0, 200)], LIMITS), [200]);
        assert_eq!(tokens(&[prompt(0, 300)], LIMITS), [256]);
        assert_eq!(tokens(&[decode(0)], LIMITS), [1]);
        assert!(compose(&[], LIMITS).is_empty());
    }

    #[test]
    fn decoding_calls_come_before_an_older_prompt_which_fills_its_budget() {
        assert_eq!(tokens(&[prompt(0, 200), decode(1), decode(2), decode(3)], LIMITS), [32, 1, 1, 1]);
    }

    #[test]
    fn of_several_prompts_each_has_a_share_and_the_oldest_the_rest() {
        assert_eq!(tokens(&[prompt(5, 300), prompt(1, 300), prompt(3, 10)], LIMITS), [42, 204, 10]);
        assert_eq!(tokens(&[prompt(5, 300), prompt(1, 300), decode(9)], LIMITS), [8, 24, 1]);
    }

    #[test]
    fn priority_goes_before_age_within_a_kind() {
        let low = Demand { priority: -1, ..prompt(0, 300) };
        assert_eq!(tokens(&[low, prompt(1, 300)], LIMITS), [64, 192]);
        let narrow = Limits { rows: 1, ..LIMITS };
        assert_eq!(tokens(&[decode(0), Demand { priority: 1, ..decode(1) }], narrow), [0, 1]);
    }

    #[test]
    fn a_call_apart_has_the_step_to_itself_and_joins_no_other() {
        let apart = Demand { apart: true, ..decode(0) };
        assert_eq!(tokens(&[decode(1), apart], LIMITS), [0, 1]);
        assert_eq!(tokens(&[decode(0), Demand { since: 1, ..apart }], LIMITS), [1, 0]);
    }

    /// Steps until all of `waiting` are through, while calls of higher priority keep decoding.
    fn steps_until_served(waiting: Vec<Demand>, limits: Limits, decoding: usize) -> usize {
        let mut since = waiting.len() as u64;
        let mut waiting: Vec<(Demand, bool)> = waiting.into_iter().map(|d| (d, true)).collect();
        for step in 0..100_000 {
            if !waiting.iter().any(|w| w.1) {
                return step;
            }
            for _ in waiting.iter().filter(|w| !w.1).count()..decoding {
                waiting.push((Demand { priority: 5, ..decode(since) }, false));
                since += 1;
            }
            let demands: Vec<Demand> = waiting.iter().map(|w| w.0).collect();
            let shares = compose(&demands, limits);
            assert!(!shares.is_empty(), "something waits");
            assert!(shares.iter().map(|s| s.tokens).sum::<usize>() <= limits.rows);
            assert!(shares.len() <= limits.sequences);
            waiting.iter_mut().for_each(|w| w.0.passed += 1);
            for Share { index, tokens } in shares {
                let d = &mut waiting[index].0;
                assert!((1..=d.tokens).contains(&tokens));
                *d = Demand { tokens: d.tokens - tokens, passed: 0, apart: false, ..*d };
            }
            waiting.retain(|w| w.0.tokens > 0);
        }
        panic!("a call starves");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn nobody_starves_beside_decoding_calls_of_higher_priority(
            waiting in prop::collection::vec((1..600_usize, any::<bool>(), -3..4_i32, any::<bool>()), 1..12),
            rows in 1..300_usize, sequences in 1..40_usize, prefill in 1..64_usize, decoding in 0..40_usize,
        ) {
            let demand = |(i, &(tokens, decodes, priority, apart)): (usize, &(usize, bool, i32, bool))| Demand {
                tokens: if decodes { tokens.min(4) } else { tokens }, decodes, priority, apart, ..decode(i as u64)
            };
            let demands: Vec<Demand> = waiting.iter().enumerate().map(demand).collect();
            let all: usize = demands.iter().map(|d| d.tokens).sum();
            let steps = steps_until_served(demands, Limits { rows, sequences, prefill }, decoding);
            // however narrow a step is, each token waits for the overdue ones at most
            let most = (all + 1) * (OVERDUE as usize + 12 + decoding);
            prop_assert!(steps <= most, "{steps} steps for {all} tokens");
        }
    }
}
