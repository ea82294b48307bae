//! The sampler against a slow, sorted float64 model of itself, and its statistics.

#![allow(clippy::unwrap_used, reason = "a failed call is a failed test")]

use dsv4::sampler::{Sampler, SamplerOptions, logprobs};
use dsv4::{ErrorKind, TokenId};
use proptest::prelude::*;

fn sampler(options: SamplerOptions) -> Sampler {
    Sampler::new(options).unwrap()
}

fn options() -> SamplerOptions {
    SamplerOptions::default()
}

/// A row like a language model's: a few likely tokens, a long tail.
fn model_like_row(vocab: usize) -> Vec<f32> {
    let mut state = 12345u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    (0..vocab).map(|_| 3.0 * (uniform() + uniform() + uniform() + uniform() - 2.0) - 2.0 * uniform().ln()).collect()
}

/// What `Sampler::distribution` should be: sort everything, cut in order, in float64.
fn expected(logits: &[f32], o: &SamplerOptions) -> Vec<(TokenId, f64)> {
    let mut rows: Vec<(TokenId, f32)> = (0..).zip(logits.iter().copied()).collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let max = f64::from(rows[0].1);
    let weight = |l: f32| ((f64::from(l) - max) / f64::from(o.temperature)).exp();
    if o.top_k > 0 {
        rows.truncate(o.top_k as usize);
    }
    if o.top_p < 1.0 {
        let total: f64 = rows.iter().map(|r| weight(r.1)).sum();
        let mut sum = 0.0;
        let reached = |r: &(TokenId, f32)| {
            sum += weight(r.1);
            sum >= f64::from(o.top_p) * total
        };
        let kept = rows.iter().position(reached).map_or(rows.len(), |index| index + 1);
        rows.truncate(kept);
    }
    rows.retain(|r| weight(r.1) >= f64::from(o.min_p));
    let total: f64 = rows.iter().map(|r| weight(r.1)).sum();
    let mut result: Vec<_> = rows.iter().map(|r| (r.0, weight(r.1) / total)).collect();
    result.sort_by_key(|r| r.0);
    result
}

/// Logits on a coarse grid: equal values are common, near-equal ones impossible, so that rounding
/// cannot move a cut by itself.
fn grid_row() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-40i32..40).prop_map(|v| v as f32 * 0.25), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_distribution_equals_the_sorted_float64_model(
        row in grid_row(),
        temperature in 0.2f32..3.0,
        top_k in 0u32..250,
        top_p in prop_oneof![Just(1.0f32), 0.05f32..0.999],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.9],
    ) {
        let o = SamplerOptions { temperature, top_k, top_p, min_p, ..options() };
        let want = expected(&row, &o);
        let got = sampler(o).distribution(&row).unwrap();
        let ids = |d: &[(TokenId, f64)]| d.iter().map(|r| r.0).collect::<Vec<_>>();
        // Where a sum lands on top_p (or a ratio on min_p) within rounding, one token may differ.
        prop_assume!(ids(&got) == ids(&want) || !borderline(&row, temperature, top_k, top_p, min_p));
        prop_assert_eq!(ids(&got), ids(&want));
        for (g, w) in got.iter().zip(&want) {
            prop_assert!((g.1 - w.1).abs() < 1e-6, "{:?} against {:?}", g, w);
        }
    }

    #[test]
    fn top_k_of_one_is_greedy(row in grid_row(), seed: u64) {
        let one = SamplerOptions { top_k: 1, seed, ..options() };
        let greedy = sampler(SamplerOptions::greedy()).sample(&row).unwrap();
        prop_assert_eq!(sampler(one).sample(&row).unwrap(), greedy);
        let first_max = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        prop_assert_eq!(greedy as usize, first_max);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it(row in grid_row(), top_p in 0.01f32..0.99) {
        let all = sampler(options()).distribution(&row).unwrap();
        let kept = sampler(SamplerOptions { top_p, ..options() }).distribution(&row).unwrap();
        let mass: f64 = kept.iter().map(|&(id, _)| all.iter().find(|r| r.0 == id).unwrap().1).sum();
        let least = kept.iter().map(|&(id, _)| all.iter().find(|r| r.0 == id).unwrap().1).fold(1.0, f64::min);
        let p = f64::from(top_p);
        prop_assert!(mass >= p - 1e-9, "kept {} of {}", mass, p);
        prop_assert!(mass - least < p + 1e-9, "{} would do without its least likely", mass);
    }

    #[test]
    fn a_banned_token_is_never_drawn(row in grid_row(), seed: u64, pick: prop::sample::Index) {
        prop_assume!(row.len() > 1);
        let banned = pick.index(row.len()) as TokenId;
        let o = SamplerOptions { logit_bias: vec![(banned, f32::NEG_INFINITY)], seed, ..options() };
        let mut s = sampler(o);
        for _ in 0..20 {
            prop_assert_ne!(s.sample(&row).unwrap(), banned);
        }
        prop_assert!(s.distribution(&row).unwrap().iter().all(|r| r.0 != banned));
    }

    #[test]
    fn any_logits_give_a_token_of_the_row_or_an_error(
        bits in prop::collection::vec(any::<u32>(), 0..64), o in any_options(),
    ) {
        let row: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let mut s = sampler(o);
        match s.sample(&row) {
            Ok(id) => prop_assert!(row[id as usize] > f32::NEG_INFINITY),
            Err(e) => prop_assert!(matches!(e.kind(), ErrorKind::Numeric | ErrorKind::InvalidArgument)),
        }
    }
}

fn any_options() -> impl Strategy<Value = SamplerOptions> {
    let tiny_or_huge = prop_oneof![Just(f32::MIN_POSITIVE), Just(f32::MAX), Just(1e-45f32), 0.1f32..2.0];
    (any::<bool>(), tiny_or_huge, 0u32..4, 1e-9f32..=1.0, 0f32..0.99).prop_map(
        |(greedy, temperature, top_k, top_p, min_p)| SamplerOptions {
            greedy,
            temperature,
            top_k,
            top_p,
            min_p,
            ..options()
        },
    )
}

/// True when some cumulative sum is within 1e-5 of `top_p`, or a ratio within 1e-5 of `min_p`.
fn borderline(row: &[f32], temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> bool {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let weights: Vec<f64> = sorted.iter().map(|&l| (f64::from(l - sorted[0]) / f64::from(temperature)).exp()).collect();
    let kept = if top_k == 0 { weights.len() } else { weights.len().min(top_k as usize) };
    let total: f64 = weights[..kept].iter().sum();
    let mut sum = 0.0;
    let at_top_p = weights[..kept].iter().any(|w| {
        sum += w / total;
        (sum - f64::from(top_p)).abs() < 1e-5
    });
    at_top_p || weights.iter().any(|w| (w - f64::from(min_p)).abs() < 1e-5)
}

/// Pearson's chi-square of `draws` draws from `row` against the exact probabilities of `model`,
/// over the tokens with an expected count of at least 5.
fn chi_square(o: SamplerOptions, row: &[f32], model: &[f32], draws: u32) -> (f64, usize) {
    let want = expected(model, &o);
    let mut s = sampler(o);
    let mut counts = vec![0u32; row.len()];
    for _ in 0..draws {
        counts[s.sample(row).unwrap() as usize] += 1;
    }
    let mut drawable = vec![false; row.len()];
    want.iter().for_each(|r| drawable[r.0 as usize] = true);
    assert!(counts.iter().zip(&drawable).all(|(&c, &ok)| ok || c == 0), "drew a token that was cut");
    let cells: Vec<_> = want.iter().filter(|r| r.1 * f64::from(draws) >= 5.0).collect();
    let statistic = cells
        .iter()
        .map(|r| {
            let e = r.1 * f64::from(draws);
            (f64::from(counts[r.0 as usize]) - e).powi(2) / e
        })
        .sum();
    (statistic, cells.len())
}

#[test]
fn drawn_frequencies_fit_the_exact_probabilities() {
    // The chi-square statistic of d cells has mean d - 1 and deviation sqrt(2 (d - 1)); five
    // deviations above the mean are exceeded by a correct sampler in fewer than 1 of 10^5 runs,
    // and the seeds are fixed, so the test always gives the same answer.
    let row: Vec<f32> = model_like_row(500).iter().map(|l| l * 0.5).collect();
    let cases = [
        options(),
        SamplerOptions { temperature: 0.6, ..options() },
        SamplerOptions { temperature: 1.7, ..options() },
        SamplerOptions { top_k: 12, ..options() },
        SamplerOptions { top_p: 0.8, ..options() },
        SamplerOptions { min_p: 0.1, ..options() },
        SamplerOptions { temperature: 0.8, top_k: 50, top_p: 0.9, min_p: 0.02, ..options() },
    ];
    for (seed, case) in (0..).zip(cases) {
        let o = SamplerOptions { seed, ..case };
        let (statistic, cells) = chi_square(o.clone(), &row, &row, 50_000);
        assert!(cells > 5, "{o:?} leaves {cells} cells");
        assert!(statistic < chi_square_bound(cells), "{o:?}: {statistic} over {cells} cells");
    }
}

fn chi_square_bound(cells: usize) -> f64 {
    let free = cells as f64 - 1.0;
    free + 5.0 * (2.0 * free).sqrt()
}

#[test]
fn a_wrong_temperature_fails_the_frequency_test() {
    let row: Vec<f32> = model_like_row(500).iter().map(|l| l * 0.5).collect();
    let flatter: Vec<f32> = row.iter().map(|l| l / 1.05).collect();
    let (statistic, cells) = chi_square(options(), &flatter, &row, 50_000);
    assert!(statistic > chi_square_bound(cells), "{statistic} over {cells} cells");
}

#[test]
fn a_seed_gives_the_same_tokens_on_every_platform() {
    let row: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.07).collect();
    let mut s = sampler(SamplerOptions { seed: 42, temperature: 0.9, top_p: 0.95, ..options() });
    let drawn: Vec<TokenId> = (0..8).map(|_| s.sample(&row).unwrap()).collect();
    assert_eq!(drawn, PINNED, "the random numbers or weights changed: seeds no longer reproduce");
    s.reset();
    let again: Vec<TokenId> = (0..8).map(|_| s.sample(&row).unwrap()).collect();
    assert_eq!(again, drawn);
    let mut fork = s.clone();
    assert_eq!(fork.sample(&row).unwrap(), s.sample(&row).unwrap());
    let mut other = sampler(SamplerOptions { seed: 43, temperature: 0.9, top_p: 0.95, ..options() });
    let others: Vec<TokenId> = (0..8).map(|_| other.sample(&row).unwrap()).collect();
    assert_ne!(others, drawn);
}

const PINNED: [TokenId; 8] = [341, 958, 488, 65, 674, 65, 193, 737];

#[test]
fn greedy_ties_go_to_the_lowest_id() {
    let mut s = sampler(SamplerOptions::greedy());
    assert_eq!(s.sample(&[0.0, 2.0, 1.0, 2.0]).unwrap(), 1);
    assert_eq!(s.sample(&[-0.0, 0.0]).unwrap(), 0);
    assert_eq!(s.sample(&[f32::NEG_INFINITY, -3.0]).unwrap(), 1);
}

#[test]
fn top_k_ties_keep_the_lowest_ids() {
    let mut s = sampler(SamplerOptions { top_k: 2, ..options() });
    let kept: Vec<_> = s.distribution(&[1.0; 6]).unwrap().into_iter().map(|r| r.0).collect();
    assert_eq!(kept, [0, 1]);
}

#[test]
fn logits_that_are_nan_infinite_or_all_banned_are_refused_as_numeric() {
    for mut s in [sampler(options()), sampler(SamplerOptions::greedy())] {
        for (row, named) in [
            (vec![0.0, f32::NAN], "logit of token id 1 is NaN"),
            (vec![f32::INFINITY, 0.0], "logit of token id 0 is inf"),
            (vec![f32::NEG_INFINITY; 3], "all 3 logits are minus infinity"),
        ] {
            let e = s.sample(&row).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Numeric);
            assert!(e.message().contains(named), "{e}");
        }
        assert_eq!(s.sample(&[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(s.sample(&[f32::NEG_INFINITY, 0.5]).unwrap(), 1);
    }
}

#[test]
fn a_failed_call_uses_up_no_random_number() {
    let row = model_like_row(100);
    let (mut clean, mut disturbed) = (sampler(options()), sampler(options()));
    for _ in 0..10 {
        assert!(disturbed.sample(&[f32::NAN]).is_err());
        assert_eq!(clean.sample(&row).unwrap(), disturbed.sample(&row).unwrap());
    }
}

#[test]
fn every_option_out_of_range_is_refused_by_name() {
    let refused = |o: SamplerOptions, named: &str| {
        let e = Sampler::new(o).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().starts_with(named), "{e}");
    };
    for bad in [-1.0, f32::NAN, f32::INFINITY] {
        refused(SamplerOptions { temperature: bad, ..options() }, "temperature");
        refused(SamplerOptions { top_p: bad, ..options() }, "top_p");
        refused(SamplerOptions { min_p: bad, ..options() }, "min_p");
        refused(SamplerOptions { repetition_penalty: bad, ..options() }, "repetition_penalty");
    }
    refused(SamplerOptions { temperature: 0.0, ..options() }, "temperature is 0: ask for greedy");
    refused(SamplerOptions { top_p: 0.0, ..options() }, "top_p");
    refused(SamplerOptions { top_p: 1.5, ..options() }, "top_p");
    refused(SamplerOptions { min_p: 1.0, ..options() }, "min_p");
    refused(SamplerOptions { repetition_penalty: 0.0, ..options() }, "repetition_penalty");
    refused(SamplerOptions { presence_penalty: f32::NAN, ..options() }, "presence_penalty");
    refused(SamplerOptions { frequency_penalty: f32::INFINITY, ..options() }, "frequency_penalty");
    for bias in [f32::NAN, f32::INFINITY] {
        refused(SamplerOptions { logit_bias: vec![(7, bias)], ..options() }, "logit_bias of token id 7");
    }
    refused(SamplerOptions { logit_bias: vec![(7, 1.0), (7, 2.0)], ..options() }, "logit_bias has token id 7");
    assert!(Sampler::new(SamplerOptions { temperature: 0.0, ..SamplerOptions::greedy() }).is_ok());
}

#[test]
fn a_bias_or_accepted_token_beyond_the_logits_is_refused() {
    let mut s = sampler(SamplerOptions { logit_bias: vec![(3, 1.0)], ..options() });
    assert!(s.sample(&[0.0; 3]).unwrap_err().message().contains("token id 3"));
    let mut s = sampler(SamplerOptions { presence_penalty: 1.0, ..options() });
    s.accept(9).unwrap();
    assert!(s.sample(&[0.0; 3]).unwrap_err().message().contains("token id 9"));
}

#[test]
fn penalties_change_the_logits_as_documented() {
    let o = SamplerOptions { repetition_penalty: 2.0, presence_penalty: 0.25, frequency_penalty: 0.5, ..options() };
    let mut s = sampler(o);
    [0, 1, 1].into_iter().for_each(|id| s.accept(id).unwrap());
    let got = s.distribution(&[1.0, -1.0, 0.5, f32::NEG_INFINITY]).unwrap();
    let want = expected(&[1.0 / 2.0 - 0.75, -2.0 - 1.25, 0.5], &options());
    assert_eq!(got.len(), 3);
    for (g, w) in got.iter().zip(&want) {
        assert!((g.1 - w.1).abs() < 1e-6, "{g:?} against {w:?}");
    }
}

#[test]
fn penalties_forget_what_leaves_the_window_and_what_is_reset() {
    let o = SamplerOptions { presence_penalty: 5.0, penalty_window: 2, ..SamplerOptions::greedy() };
    let mut s = sampler(o);
    let row = [1.0, 0.5, 0.0];
    s.accept(0).unwrap();
    assert_eq!(s.sample(&row).unwrap(), 1);
    s.accept(1).unwrap();
    assert_eq!(s.sample(&row).unwrap(), 2);
    s.accept(2).unwrap();
    assert_eq!(s.sample(&row).unwrap(), 0, "token 0 has left the window");
    s.accept(0).unwrap();
    s.reset();
    assert_eq!(s.sample(&row).unwrap(), 0);
}

#[test]
fn bias_can_force_a_token() {
    let o = SamplerOptions { logit_bias: vec![(2, 1e4)], ..options() };
    assert_eq!(sampler(o).sample(&[5.0, 4.0, -8.0]).unwrap(), 2);
}

#[test]
fn logprobs_sum_to_one_and_take_no_logit_out_of_range() {
    let row = model_like_row(300);
    let sum: f64 = (0..300).map(|id| logprobs(&row, id).unwrap().exp()).sum();
    assert!((sum - 1.0).abs() < 1e-12, "{sum}");
    assert!((logprobs(&[0.0, 0.0], 1).unwrap() + 2f64.ln()).abs() < 1e-15);
    assert_eq!(logprobs(&[0.0, f32::NEG_INFINITY], 1).unwrap(), f64::NEG_INFINITY);
    assert_eq!(logprobs(&row, 300).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(logprobs(&[f32::NAN, 0.0], 1).unwrap_err().kind(), ErrorKind::Numeric);
}
