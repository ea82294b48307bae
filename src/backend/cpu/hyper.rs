//! Manifold-constrained hyper-connections: mixing of the residual streams before and after each sub-layer
//! (reference `inference/model.py`). All arithmetic is float32; results that the official code stores as bf16 are rounded.
#![forbid(unsafe_code)]

use crate::tensor::format::round_bf16;

/// Most streams a model may have; the mixing matrix of one token lives on the stack.
pub const MAX_STREAMS: usize = 8;

/// Mixing coefficients of one token for one sub-layer.
#[derive(Clone, Copy, Default)]
pub struct Mix {
    /// Weight of each stream in the sub-layer's input.
    pub pre: [f32; MAX_STREAMS],
    /// Weight of the sub-layer's output in each stream.
    pub post: [f32; MAX_STREAMS],
    /// `comb[j][k]`: weight of old stream `j` in new stream `k`.
    pub comb: [[f32; MAX_STREAMS]; MAX_STREAMS],
}

/// Constants of the mixing.
#[derive(Clone, Copy)]
pub struct HyperParams {
    /// Number of residual streams.
    pub streams: usize,
    /// Sinkhorn iterations, the softmax counted as the first row pass.
    pub iterations: usize,
    /// Added to `pre`, to the softmax and to each normaliser.
    pub eps: f32,
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Coefficients from the projection `m` `[streams * (2 + streams)]` of one token, already times the inverse rms.
pub fn mix(p: HyperParams, m: &[f32], scale: &[f32], base: &[f32]) -> Mix {
    let n = p.streams;
    let mut mix = Mix::default();
    for j in 0..n {
        mix.pre[j] = sigmoid(m[j] * scale[0] + base[j]) + p.eps;
        mix.post[j] = 2.0 * sigmoid(m[n + j] * scale[1] + base[n + j]);
        for k in 0..n {
            let i = 2 * n + j * n + k;
            mix.comb[j][k] = m[i] * scale[2] + base[i];
        }
    }
    sinkhorn(p, &mut mix.comb);
    mix
}

/// Makes the rows and columns of `c` sum to one: a row softmax, a column pass, then `iterations - 1` row and column
/// passes. Ends on columns.
fn sinkhorn(p: HyperParams, c: &mut [[f32; MAX_STREAMS]; MAX_STREAMS]) {
    let n = p.streams;
    for row in c.iter_mut().take(n) {
        let max = row[..n].iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
        row[..n].iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f32 = row[..n].iter().sum();
        row[..n].iter_mut().for_each(|v| *v = *v / sum + p.eps);
    }
    normalise_columns(p, c);
    for _ in 1..p.iterations {
        for row in c.iter_mut().take(n) {
            let sum = row[..n].iter().sum::<f32>() + p.eps;
            row[..n].iter_mut().for_each(|v| *v /= sum);
        }
        normalise_columns(p, c);
    }
}

fn normalise_columns(p: HyperParams, c: &mut [[f32; MAX_STREAMS]; MAX_STREAMS]) {
    for k in 0..p.streams {
        let sum = c.iter().take(p.streams).map(|row| row[k]).sum::<f32>() + p.eps;
        c.iter_mut().take(p.streams).for_each(|row| row[k] /= sum);
    }
}

/// Weights of the final collapse (`hc_head`) from the projection `m` `[streams]`.
pub fn head_weights(p: HyperParams, m: &[f32], scale: f32, base: &[f32]) -> [f32; MAX_STREAMS] {
    let mut pre = [0.0; MAX_STREAMS];
    for j in 0..p.streams {
        pre[j] = sigmoid(m[j] * scale + base[j]) + p.eps;
    }
    pre
}

/// Sub-layer input of one token: `out[d] = sum_j pre[j] * x[j][d]`; `x` is `[streams, D]`, stream-major.
pub fn collapse(pre: &[f32; MAX_STREAMS], x: &[f32], bf16: bool, out: &mut [f32]) {
    let dim = out.len();
    out.fill(0.0);
    for (stream, &weight) in x.chunks_exact(dim).zip(pre) {
        for (o, &v) in out.iter_mut().zip(stream) {
            *o += weight * v;
        }
    }
    if bf16 {
        out.iter_mut().for_each(|v| *v = round_bf16(*v));
    }
}

/// New streams of one token: `x'[k] = post[k] * y + sum_j comb[j][k] * x[j]`, the sum over the *first* index.
pub fn expand(mix: &Mix, y: &[f32], x: &[f32], bf16: bool, out: &mut [f32]) {
    let dim = y.len();
    for (k, stream) in out.chunks_exact_mut(dim).enumerate() {
        stream.fill(0.0);
        for (j, old) in x.chunks_exact(dim).enumerate() {
            let weight = mix.comb[j][k];
            for (o, &v) in stream.iter_mut().zip(old) {
                *o += weight * v;
            }
        }
        for (o, &v) in stream.iter_mut().zip(y) {
            *o += mix.post[k] * v;
            if bf16 {
                *o = round_bf16(*o);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: HyperParams = HyperParams { streams: 4, iterations: 20, eps: 1e-6 };

    fn sample() -> Mix {
        let m: Vec<f32> = (0..24).map(|i| (i as f32 * 1.7).sin() * 2.0).collect();
        let base: Vec<f32> = (0..24).map(|i| (i as f32 * 0.9).cos()).collect();
        mix(P, &m, &[0.9, 1.1, 1.3], &base)
    }

    #[test]
    fn sinkhorn_agrees_with_float64() {
        let m: Vec<f32> = (0..24).map(|i| (i as f32 * 1.7).sin() * 2.0).collect();
        let base: Vec<f32> = (0..24).map(|i| (i as f32 * 0.9).cos()).collect();
        let eps = 1e-6f64;
        let mut c = [[0.0f64; 4]; 4];
        for j in 0..4 {
            for k in 0..4 {
                c[j][k] = f64::from(m[8 + 4 * j + k]) * 1.3 + f64::from(base[8 + 4 * j + k]);
            }
            let max = c[j].iter().fold(f64::MIN, |a, &b| a.max(b));
            let sum: f64 = c[j].iter().map(|v| (v - max).exp()).sum();
            c[j] = c[j].map(|v| (v - max).exp() / sum + eps);
        }
        for i in 0..20 {
            if i > 0 {
                for row in &mut c {
                    let s: f64 = row.iter().sum::<f64>() + eps;
                    *row = row.map(|v| v / s);
                }
            }
            for k in 0..4 {
                let s: f64 = c.iter().map(|r| r[k]).sum::<f64>() + eps;
                c.iter_mut().for_each(|r| r[k] /= s);
            }
        }
        let got = sample().comb;
        for j in 0..4 {
            for k in 0..4 {
                assert!((f64::from(got[j][k]) - c[j][k]).abs() < 1e-5, "[{j}][{k}] {} {}", got[j][k], c[j][k]);
            }
        }
    }

    #[test]
    fn expand_sums_over_the_first_index() {
        let mut mix = sample();
        mix.comb = [[0.0; MAX_STREAMS]; MAX_STREAMS];
        mix.comb[1][2] = 1.0;
        let x: Vec<f32> = (0..8).map(|i| i as f32).collect(); // four streams of width 2
        let mut out = vec![0.0; 8];
        expand(&mix, &[0.0, 0.0], &x, false, &mut out);
        assert_eq!(out, [0.0, 0.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0], "stream 1 goes to stream 2, not 2 to 1");
    }

    #[test]
    fn post_has_no_epsilon_and_pre_has() {
        let m = vec![-100.0; 24];
        let got = mix(P, &m, &[1.0, 1.0, 1.0], &[0.0; 24]);
        assert_eq!(got.post[0], 0.0);
        assert_eq!(got.pre[0], 1e-6);
    }
}
