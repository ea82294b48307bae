//! The measures by which results are compared with goldens, as the oracle's own tools define them.
#![forbid(unsafe_code)]

use std::fmt;

/// Quantiles of a per-token error.
#[derive(Clone, Copy, Debug)]
pub struct Errors {
    pub p50: f64,
    pub p90: f64,
    pub max: f64,
    /// Share of tokens whose every value is equal.
    pub equal: f64,
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { p50, p90, max, equal } = self;
        write!(f, "p50 {p50:.2e} p90 {p90:.2e} max {max:.2e}, {:.0} % bit-equal", equal * 100.0)
    }
}

impl Errors {
    /// Relative error of each token's row: |got - want| / |want|, Euclidean norms in float64.
    pub fn of<'a>(rows: impl IntoIterator<Item = (&'a [f32], &'a [f32])>) -> Self {
        let errors = rows.into_iter().map(|(got, want)| {
            assert_eq!(got.len(), want.len(), "rows of one width");
            let square = |x: f64| x * x;
            let difference: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
            let size: f64 = want.iter().map(|&w| square(f64::from(w))).sum();
            (difference / size).sqrt()
        });
        let mut errors: Vec<f64> = errors.collect();
        assert!(!errors.is_empty() && errors.iter().all(|e| e.is_finite()), "errors of real rows: {errors:?}");
        errors.sort_by(f64::total_cmp);
        let equal = errors.iter().filter(|&&e| e == 0.0).count() as f64 / errors.len() as f64;
        let max = *errors.last().expect("not empty");
        Self { p50: quantile(&errors, 0.5), p90: quantile(&errors, 0.9), max, equal }
    }
}

/// Quantile of sorted values, linear between neighbours.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = share * (sorted.len() - 1) as f64;
    let low = sorted[at.floor() as usize];
    low + (sorted[at.ceil() as usize] - low) * at.fract()
}

/// ln of the sum of exponentials, in float64.
pub fn logsumexp(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    f64::from(top) + sum.ln()
}

/// Kullback-Leibler divergence in nats of `logits` from a golden row known by its best entries and its logsumexp; all
/// other entries count as one. A lower bound of the true divergence, close to it when the best entries hold the mass.
pub fn divergence(best_ids: &[i64], best_logits: &[f32], golden_logsumexp: f64, logits: &[f32]) -> f64 {
    let own = logsumexp(logits);
    let (mut sum, mut p_left, mut q_left) = (0.0, 1.0, 1.0);
    for (&id, &logit) in best_ids.iter().zip(best_logits) {
        let (ln_p, ln_q) = (f64::from(logit) - golden_logsumexp, f64::from(logits[id as usize]) - own);
        sum += ln_p.exp() * (ln_p - ln_q);
        p_left -= ln_p.exp();
        q_left -= ln_q.exp();
    }
    let tiny = 1e-12;
    if p_left > tiny { sum + p_left * (p_left / q_left.max(tiny)).ln() } else { sum }
}

/// Index of the largest value, the lowest one when equal.
pub fn argmax(values: &[f32]) -> u32 {
    let best = values.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row of logits").0 as u32
}
