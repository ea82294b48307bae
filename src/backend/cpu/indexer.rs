//! The lightning indexer: which compressed entries a query attends to (reference
//! `inference/model.py`).
#![forbid(unsafe_code)]

use std::cmp::Ordering;

use crate::alloc;
use crate::cache::LayerView;
use crate::error::{Result, bail};
use crate::tensor::format::round_bf16;

use super::Cpu;
use super::simd;

/// Keys decoded and scored at once.
const TILE: usize = 64;
/// Queries that share a decoded tile.
const QUERIES: usize = 8;

/// Chosen compressed entries of each query, best first.
pub struct Selection {
    /// Most entries a query can have.
    pub width: usize,
    /// `[queries, width]`; only the first `counts[query]` of a row are set.
    pub ids: Vec<u32>,
    /// Number of entries of each query.
    pub counts: Vec<u32>,
}

impl Selection {
    /// Entries of query `row`.
    pub fn row(&self, row: usize) -> &[u32] {
        &self.ids[row * self.width..][..self.counts[row] as usize]
    }
}

/// Walsh-Hadamard transform in natural order times `n^-0.5`; `x.len()` is a power of two.
pub fn hadamard(x: &mut [f32]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = (x.len() as f32).sqrt().recip();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// Index queries of a run of consecutive positions.
pub struct Queries<'a> {
    /// Rotated (and in quantised numerics rounded) queries `[n, heads, dim]`.
    pub q: &'a [f32],
    /// Head weights `[n, heads]`, the constant factors included.
    pub weights: &'a [f32],
    /// Index heads.
    pub heads: usize,
    /// Values of an index vector.
    pub dim: usize,
    /// Position of the first query.
    pub start: usize,
    /// Products, weighted scores and sums are stored as bf16.
    pub bf16: bool,
}

impl Queries<'_> {
    fn len(&self) -> usize {
        self.weights.len() / self.heads
    }

    /// Entries the query in `row` may see: those whose last token is not after it.
    fn visible(&self, row: usize) -> usize {
        (self.start + row + 1) / 4
    }
}

/// Scores every visible entry for every query and keeps the best `top_k`; equal scores go to the lower entry.
///
/// # Errors
/// `Numeric` if a score is not finite: a choice among such would look like any other.
pub fn select(cpu: &Cpu, queries: &Queries<'_>, view: LayerView<'_>, top_k: usize) -> Result<Selection> {
    let n = queries.len();
    let width = top_k.min(queries.visible(n - 1));
    let mut selection = Selection {
        width,
        ids: alloc::zeroed("selected entries", n * width)?,
        counts: alloc::zeroed("selected entry counts", n)?,
    };
    for (row, count) in selection.counts.iter_mut().enumerate() {
        *count = queries.visible(row).min(width) as u32;
    }
    if width == 0 {
        return Ok(selection);
    }
    cpu.pool.chunks(&mut selection.ids, QUERIES * width, |group, ids| {
        let first = group * QUERIES;
        let mut scores = scores(cpu, queries, view, first, ids.len() / width)?;
        for (row, ids) in ids.chunks_exact_mut(width).enumerate() {
            // one pass over the scores, each of which is a sum over all heads and dimensions
            if !scores[row].iter().fold(true, |finite, s| finite & s.is_finite()) {
                let position = queries.start + first + row;
                bail!(
                    Numeric,
                    "the index scores of position {position} are not finite; `dsv4 verify --scan` tells whether weights are not finite"
                );
            }
            best(&mut scores[row], ids)?;
        }
        Ok(())
    })?;
    Ok(selection)
}

/// Scores of `count` queries from `first`: one vector of the visible entries each.
pub fn scores(
    cpu: &Cpu,
    queries: &Queries<'_>,
    view: LayerView<'_>,
    first: usize,
    count: usize,
) -> Result<Vec<Vec<f32>>> {
    let (heads, dim) = (queries.heads, queries.dim);
    let mut out = alloc::with_capacity("index score rows", count)?;
    for row in first..first + count {
        out.push(alloc::vec_f32("index scores", queries.visible(row))?);
    }
    let mut keys = alloc::vec_f32("index key tile", TILE * dim)?;
    let mut products = alloc::vec_f32("index products", heads * TILE)?;
    let all = queries.visible(first + count - 1);
    for tile in (0..all).step_by(TILE) {
        let len = TILE.min(all - tile);
        for (j, key) in keys.chunks_exact_mut(dim).take(len).enumerate() {
            view.layout().decode_key(view.key(tile + j), key);
        }
        for (i, out) in out.iter_mut().enumerate() {
            let seen = out.len().saturating_sub(tile).min(len);
            if seen == 0 {
                continue;
            }
            let row = first + i;
            let q = &queries.q[row * heads * dim..(row + 1) * heads * dim];
            simd::scores(cpu.simd, q, &keys[..seen * dim], dim, &mut products[..heads * seen]);
            let weights = &queries.weights[row * heads..(row + 1) * heads];
            combine(&products[..heads * seen], weights, queries.bf16, &mut out[tile..tile + seen]);
        }
    }
    Ok(out)
}

/// `out[j] = sum_h weights[h] * relu(products[h][j])`, heads in order.
fn combine(products: &[f32], weights: &[f32], bf16: bool, out: &mut [f32]) {
    out.fill(0.0);
    for (row, &weight) in products.chunks_exact(out.len()).zip(weights) {
        for (o, &p) in out.iter_mut().zip(row) {
            // NaN must pass, so no f32::max
            let relu = if p < 0.0 { 0.0 } else { p };
            *o += if bf16 { round_bf16(round_bf16(relu) * weight) } else { relu * weight };
        }
    }
    if bf16 {
        out.iter_mut().for_each(|v| *v = round_bf16(*v));
    }
}

/// The best entries of `scores` (as many as fit in `ids`, or all), best first, ties to the lower entry; NaN is worst.
fn best(scores: &mut [f32], ids: &mut [u32]) -> Result<()> {
    let keep = ids.len().min(scores.len());
    let mut order: Vec<u32> = alloc::with_capacity("index order", scores.len())?;
    order.extend(0..scores.len() as u32);
    let value = |j: u32| {
        let s = scores[j as usize];
        if s.is_nan() { f32::NEG_INFINITY } else { s }
    };
    let compare = |a: &u32, b: &u32| value(*b).partial_cmp(&value(*a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
    if keep < order.len() {
        order.select_nth_unstable_by(keep, compare);
        order.truncate(keep);
    }
    order.sort_unstable_by(compare);
    ids[..keep].copy_from_slice(&order);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::attention::{Attention, Entries, attend};
    use crate::cache::{CacheLayout, CacheManager, CacheOptions, KvFormat, LayerLayout, SequenceCache, StagedLayer};
    use crate::model::config::LayerKind;

    #[test]
    fn hadamard_is_its_own_inverse_and_keeps_length() {
        let before: Vec<f32> = (0..128).map(|i| (i as f32 * 0.3).sin()).collect();
        let mut x = before.clone();
        hadamard(&mut x);
        let norm = |v: &[f32]| v.iter().map(|&a| f64::from(a).powi(2)).sum::<f64>();
        assert!((norm(&x) / norm(&before) - 1.0).abs() < 1e-5);
        assert!(
            (x[1]
                - before.iter().enumerate().map(|(i, v)| if i % 2 == 0 { *v } else { -v }).sum::<f32>()
                    / 128f32.sqrt())
            .abs()
                < 1e-5
        );
        hadamard(&mut x);
        assert!(x.iter().zip(&before).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    /// Pitfall 59.
    #[test]
    fn equal_scores_go_to_the_lower_entry() {
        let mut ids = [9; 4];
        best(&mut [1.0; 100], &mut ids).unwrap();
        assert_eq!(ids, [0, 1, 2, 3]);
        best(&mut [0.0, 3.0, -1.0, 3.0, 2.0], &mut ids).unwrap();
        assert_eq!(ids, [1, 3, 4, 0]);
    }

    /// Pitfall 54.
    #[test]
    fn nan_and_infinite_scores_give_valid_unique_entries() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut scores = vec![special; 50];
            scores[7] = 1.0;
            let mut ids = [u32::MAX; 16];
            best(&mut scores, &mut ids).unwrap();
            let mut sorted = ids;
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|w| w[0] < w[1]) && sorted[15] < 50, "{special}: {ids:?}");
        }
    }

    /// Pitfall 61: where the rectifier is.
    #[test]
    fn combine_weighs_after_the_relu_and_rounds_where_the_official_code_does() {
        let mut out = [0.0; 2];
        combine(&[1.0, -5.0, 2.0, 3.0], &[2.0, -1.0], false, &mut out);
        assert_eq!(out, [0.0, -3.0]);
        combine(&[1.003, 0.0], &[1.0], true, &mut out);
        assert_eq!(out, [round_bf16(1.003), 0.0]);
    }

    const HEADS: usize = 4;
    const DIM: usize = 32;

    fn sine(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((seed * 7919 + i * 104_729) as f32 * 0.37).sin()).collect()
    }

    /// A sequence with one layer of ratio 4 that has seen `tokens`; the key of entry j is `key(j)`, its row depends on j.
    fn sequence(tokens: usize, key: &dyn Fn(usize) -> Vec<f32>) -> SequenceCache {
        let layer = LayerLayout { kind: LayerKind::C4a, main_state: 24 * 8, index_state: 24 * DIM };
        let (head_dim, rope_dim, format) = (8, 0, KvFormat::F32);
        let layout = CacheLayout { format, head_dim, rope_dim, index_dim: DIM, window: 128, layers: vec![layer] };
        let manager = CacheManager::new(layout.clone(), CacheOptions::PRIVATE, b"");
        let mut cache = SequenceCache::new(&manager, 0).unwrap();
        let mut staged = cache.stage(tokens).unwrap();
        let StagedLayer { rows, entries, keys, .. } = &mut staged.layers[0];
        for (i, row) in rows.chunks_exact_mut(layout.row_bytes()).enumerate() {
            layout.encode_row(&sine(i % 1021, head_dim), row);
        }
        for j in 0..tokens / 4 {
            entries.resize((j + 1) * layout.row_bytes(), 0);
            layout.encode_row(&sine(j % 1021 + 5000, head_dim), &mut entries[j * layout.row_bytes()..]);
            keys.resize((j + 1) * layout.key_bytes(), 0);
            layout.encode_key(&key(j), &mut keys[j * layout.key_bytes()..]);
        }
        cache.commit(staged);
        cache
    }

    /// Chosen entries of `rows` queries that begin at the sequence's end.
    fn chosen(cpu: &Cpu, cache: &mut SequenceCache, q: &[f32], weights: &[f32], k: usize) -> Selection {
        let staged = cache.stage(weights.len() / HEADS).unwrap();
        let queries = Queries { q, weights, heads: HEADS, dim: DIM, start: cache.len(), bf16: false };
        select(cpu, &queries, cache.view(0, &staged), k).unwrap()
    }

    /// Pitfall 56: a million tokens back or a moment ago, and around 2^16 tokens and 2^16 entries, the planted entries are
    /// all of the choice; where it is one short, the lowest of them is left out.
    #[test]
    fn planted_entries_are_all_found_anywhere_in_a_million_tokens() {
        let planted =
            [0, 1, 2047, 2048, 4095, 4096, 16_383, 16_384, 65_535, 65_536, 65_537, 131_072, 200_001, 262_142, 262_143];
        let needle = sine(3, DIM);
        let key = |j: usize| match planted.iter().position(|&p| p == j) {
            Some(rank) => needle.iter().map(|v| v * (3.0 + rank as f32 / 8.0)).collect(),
            None => sine(j % 1021, DIM),
        };
        let mut cache = sequence(1 << 20, &key);
        let cpu = Cpu::new(2).unwrap();
        // the last row's own entry is staged by nobody, so the rows end before it
        let (q, weights) = (needle.repeat(3 * HEADS), [1.0; 3 * HEADS]);
        for k in [planted.len(), planted.len() - 1] {
            let selection = chosen(&cpu, &mut cache, &q, &weights, k);
            for row in 0..3 {
                let mut ids: Vec<usize> = selection.row(row).iter().map(|&id| id as usize).collect();
                assert!(ids.windows(2).all(|pair| pair[0] > pair[1]), "the best first: {ids:?}");
                ids.reverse();
                assert_eq!(ids, planted[planted.len() - k..], "top {k}, row {row}");
            }
        }
    }

    /// Pitfall 56: up to k entries the choice is all of them and attention the dense one; from then on the weakest is left
    /// out and nothing else.
    #[test]
    fn attention_is_dense_up_to_k_entries_and_leaves_the_weakest_out_from_then_on() {
        let (cpu, k) = (Cpu::new(1).unwrap(), 16);
        let (q, weights) = (sine(11, HEADS * DIM), [1.0, 0.5, 2.0, 1.5]);
        for entries in k - 1..=k + 2 {
            for rest in 0..4 {
                let tokens = 4 * entries + rest - 1;
                let mut cache = sequence(tokens, &|j| sine(j + 40, DIM));
                // the query's own token completes an entry where it is the fourth
                let mut staged = cache.stage(1).unwrap();
                let visible = (tokens + 1) / 4;
                if visible > tokens / 4 {
                    let layout = cache.layout();
                    let StagedLayer { entries, keys, .. } = &mut staged.layers[0];
                    entries.resize(layout.row_bytes(), 0);
                    layout.encode_row(&sine(visible - 1 + 5000, 8), entries);
                    keys.resize(layout.key_bytes(), 0);
                    layout.encode_key(&sine(visible - 1 + 40, DIM), keys);
                }
                let queries = Queries { q: &q, weights: &weights, heads: HEADS, dim: DIM, start: tokens, bf16: false };
                let view = cache.view(0, &staged);
                let selection = select(&cpu, &queries, view, k).unwrap();
                let mut ids = selection.row(0).to_vec();
                ids.sort_unstable();
                let all = scores(&cpu, &queries, view, 0, 1).unwrap().swap_remove(0);
                assert_eq!(all.len(), visible);
                let mut want: Vec<u32> = (0..visible as u32).collect();
                want.sort_by(|&a, &b| all[b as usize].total_cmp(&all[a as usize]));
                want.truncate(k);
                want.sort_unstable();
                assert_eq!(ids, want, "{tokens} tokens before the query");

                let attention = |entries: Entries<'_>| {
                    let (heads, dim, sink) = (2, 8, &[0.1, -0.2]);
                    let a = Attention { heads, dim, start: tokens, sink, weights_bf16: false, bf16: false };
                    let mut out = vec![0.0; heads * dim];
                    attend(&cpu, a, &sine(2, heads * dim), view, entries, &mut out).unwrap();
                    out
                };
                let (sparse, dense) = (attention(Entries::Selected(&selection)), attention(Entries::All { ratio: 4 }));
                let far = sparse.iter().zip(&dense).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert_eq!(far < 1e-6, visible <= k, "{visible} entries, top {k}: {far}");
            }
        }
    }
}
