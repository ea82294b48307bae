//! Root-mean-square normalisation, float32 with a fixed order of summation.
#![forbid(unsafe_code)]

use crate::tensor::format::round_bf16;

/// Sum of `f(x)` over eight interleaved lanes, then the lanes pairwise: one fixed order for any caller.
pub fn lane_sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 8];
    let mut chunks = x.chunks_exact(8);
    for chunk in &mut chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane += f(v);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(v);
    }
    let [a, b, c, d, e, g, h, i] = lanes;
    ((a + e) + (c + h)) + ((b + g) + (d + i))
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (lane_sum(x, |v| v * v) / x.len() as f32 + eps).sqrt()
}

/// `out = x / rms(x) * weight`; the official code keeps everything in float32 and casts once at the end.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, bf16: bool, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
        let y = v * scale * w;
        *o = if bf16 { round_bf16(y) } else { y };
    }
}

/// Weightless norm of one query head, in place. With `bf16` the square, the mean, the sum with eps, the reciprocal
/// root and the product are each rounded to bf16, as the official code does.
pub fn head_norm(q: &mut [f32], eps: f32, bf16: bool) {
    if !bf16 {
        let scale = inverse_rms(q, eps);
        q.iter_mut().for_each(|v| *v *= scale);
        return;
    }
    let mean = round_bf16(lane_sum(q, |v| round_bf16(v * v)) / q.len() as f32);
    let scale = round_bf16(1.0 / round_bf16(mean + eps).sqrt());
    q.iter_mut().for_each(|v| *v = round_bf16(*v * scale));
}

/// Rounds every value to bf16 if `on`.
pub fn store_bf16(x: &mut [f32], on: bool) {
    if on {
        x.iter_mut().for_each(|v| *v = round_bf16(*v));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_has_unit_mean_square() {
        let x: Vec<f32> = (0..512).map(|i| (i as f32 * 0.11).cos() * 3.0).collect();
        let mut y = vec![0.0; 512];
        rms_norm(&x, &vec![1.0; 512], 1e-6, false, &mut y);
        let mean: f64 = y.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 512.0;
        assert!((mean - 1.0).abs() < 1e-5, "{mean}");
    }

    #[test]
    fn lane_sum_takes_the_remainder() {
        let x: Vec<f32> = (1..=19).map(|i| i as f32).collect();
        assert_eq!(lane_sum(&x, |v| v), 190.0);
    }

    #[test]
    fn bf16_head_norm_yields_bf16_values() {
        let mut q: Vec<f32> = (0..512).map(|i| round_bf16((i as f32 * 0.7).sin())).collect();
        head_norm(&mut q, 1e-6, true);
        assert!(q.iter().all(|&v| v == round_bf16(v)));
    }
}
