//! Pooling of token rows into compressed entries (reference `inference/model.py`).
//!
//! A token gives a value row `u` and a gate row `g` (its `ape` row already added). Entries are softmax-weighted sums
//! over a group of tokens, channel by channel. Tokens are taken one at a time in order of position, so the result does
//! not depend on how a sequence was cut into steps. Finishing an entry (norm, rotation, quantisation) is the caller's.
#![forbid(unsafe_code)]

/// Tokens of the overlapping c4a compressor's group.
const GROUP: usize = 4;

/// One compressor's running state, in the order documented at [`crate::cache::CacheLayout::new`].
pub enum Compressor<'a> {
    /// c4a, and the index compressor: 8 slots an entry, the previous group's first-half channels among them.
    Overlap {
        /// Channels of an entry.
        dim: usize,
        /// `[prev_u 4 x d | prev_g 4 x d | cur_u 4 x 2d | cur_g 4 x 2d]`.
        state: &'a mut [f32],
    },
    /// c128a: a running (maximum, sum, accumulator) per channel.
    Online {
        /// Channels of an entry.
        dim: usize,
        /// Tokens of a group.
        ratio: usize,
        /// `[max d | sum d | acc d]`.
        state: &'a mut [f32],
    },
}

impl Compressor<'_> {
    /// Takes the token at `position` and calls `emit(entry, values)` if it completes an entry.
    pub fn take(&mut self, position: usize, u: &[f32], g: &[f32], emit: &mut impl FnMut(usize, &mut [f32])) {
        match self {
            Self::Overlap { dim, state } => overlap(*dim, state, position, u, g, emit),
            Self::Online { dim, ratio, state } => online(*dim, *ratio, state, position, u, g, emit),
        }
    }
}

fn overlap(
    dim: usize,
    state: &mut [f32],
    position: usize,
    u: &[f32],
    g: &[f32],
    emit: &mut impl FnMut(usize, &mut [f32]),
) {
    let (previous, current) = state.split_at_mut(2 * GROUP * dim);
    let (prev_u, prev_g) = previous.split_at_mut(GROUP * dim);
    let (cur_u, cur_g) = current.split_at_mut(2 * GROUP * dim);
    let slot = position % GROUP;
    cur_u[slot * 2 * dim..(slot + 1) * 2 * dim].copy_from_slice(u);
    cur_g[slot * 2 * dim..(slot + 1) * 2 * dim].copy_from_slice(g);
    if slot + 1 < GROUP {
        return;
    }
    // the entry takes over prev_u, whose content it replaces; then the current first halves move there
    for c in 0..dim {
        let mut gates = [0.0f32; 2 * GROUP];
        let mut values = [0.0f32; 2 * GROUP];
        for i in 0..GROUP {
            gates[i] = prev_g[i * dim + c];
            values[i] = prev_u[i * dim + c];
            gates[GROUP + i] = cur_g[i * 2 * dim + dim + c];
            values[GROUP + i] = cur_u[i * 2 * dim + dim + c];
        }
        prev_u[c] = pool(&gates, &values);
    }
    emit(position / GROUP, &mut prev_u[..dim]);
    for i in 0..GROUP {
        prev_u[i * dim..(i + 1) * dim].copy_from_slice(&cur_u[i * 2 * dim..i * 2 * dim + dim]);
        prev_g[i * dim..(i + 1) * dim].copy_from_slice(&cur_g[i * 2 * dim..i * 2 * dim + dim]);
    }
}

/// Softmax of `gates` times `values`.
fn pool(gates: &[f32], values: &[f32]) -> f32 {
    let max = gates.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    let (mut sum, mut acc) = (0.0, 0.0);
    for (&g, &v) in gates.iter().zip(values) {
        let e = (g - max).exp();
        sum += e;
        acc += e * v;
    }
    acc / sum
}

fn online(
    dim: usize,
    ratio: usize,
    state: &mut [f32],
    position: usize,
    u: &[f32],
    g: &[f32],
    emit: &mut impl FnMut(usize, &mut [f32]),
) {
    let (max, rest) = state.split_at_mut(dim);
    let (sum, acc) = rest.split_at_mut(dim);
    for c in 0..dim {
        if g[c] > max[c] {
            let fade = (max[c] - g[c]).exp();
            sum[c] = sum[c] * fade + 1.0;
            acc[c] = acc[c] * fade + u[c];
            max[c] = g[c];
        } else {
            let e = (g[c] - max[c]).exp();
            sum[c] += e;
            acc[c] += e * u[c];
        }
    }
    if (position + 1).is_multiple_of(ratio) {
        acc.iter_mut().zip(sum.iter()).for_each(|(a, s)| *a /= s);
        emit(position / ratio, acc);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        acc.fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 3;

    fn row(seed: usize, n: usize) -> Vec<f32> {
        (0..n).map(|i| ((seed * 31 + i * 7) as f32 * 0.61).sin() * 3.0).collect()
    }

    fn fresh(ratio: usize) -> Vec<f32> {
        if ratio == 4 {
            let mut s = vec![0.0; 24 * DIM];
            s[4 * DIM..8 * DIM].fill(f32::NEG_INFINITY);
            s[16 * DIM..].fill(f32::NEG_INFINITY);
            return s;
        }
        let mut s = vec![0.0; 3 * DIM];
        s[..DIM].fill(f32::NEG_INFINITY);
        s
    }

    fn run(ratio: usize, tokens: usize) -> Vec<(usize, Vec<f32>)> {
        let mut state = fresh(ratio);
        let width = if ratio == 4 { 2 * DIM } else { DIM };
        let mut out = Vec::new();
        for t in 0..tokens {
            let mut c = match ratio {
                4 => Compressor::Overlap { dim: DIM, state: &mut state },
                _ => Compressor::Online { dim: DIM, ratio, state: &mut state },
            };
            c.take(t, &row(t, width), &row(t + 1000, width), &mut |j, e| out.push((j, e.to_vec())));
        }
        out
    }

    fn softmax_sum(rows: &[(f32, f32)]) -> f64 {
        let max = rows.iter().map(|r| f64::from(r.0)).fold(f64::MIN, f64::max);
        let sum: f64 = rows.iter().map(|r| (f64::from(r.0) - max).exp()).sum();
        rows.iter().map(|r| (f64::from(r.0) - max).exp() / sum * f64::from(r.1)).sum()
    }

    #[test]
    fn a_groups_first_half_feeds_the_next_entry_and_its_second_half_its_own() {
        let got = run(4, 11);
        assert_eq!(
            got.iter().map(|e| e.0).collect::<Vec<_>>(),
            [0, 1],
            "an entry every fourth token, none for the tail"
        );
        for (j, entry) in got {
            for (c, &value) in entry.iter().enumerate() {
                let mut slots = Vec::new();
                if j > 0 {
                    slots.extend((4 * j - 4..4 * j).map(|t| (row(t + 1000, 2 * DIM)[c], row(t, 2 * DIM)[c])));
                }
                slots.extend((4 * j..4 * j + 4).map(|t| (row(t + 1000, 2 * DIM)[DIM + c], row(t, 2 * DIM)[DIM + c])));
                assert!((f64::from(value) - softmax_sum(&slots)).abs() < 1e-5, "entry {j} channel {c}");
            }
        }
    }

    #[test]
    fn online_pooling_equals_the_softmax_over_the_whole_group() {
        let got = run(128, 300);
        assert_eq!(got.len(), 2);
        for (j, entry) in got {
            for (c, &value) in entry.iter().enumerate() {
                let slots: Vec<_> = (128 * j..128 * (j + 1)).map(|t| (row(t + 1000, DIM)[c], row(t, DIM)[c])).collect();
                assert!((f64::from(value) - softmax_sum(&slots)).abs() < 1e-5, "entry {j} channel {c}");
            }
        }
    }
}
