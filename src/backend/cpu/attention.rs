//! Sparse attention over the window and the chosen compressed entries, with a sink per head (reference
//! `inference/kernel.py`).
//!
//! Keys are values: one row serves as both, for all heads. Rows are read from the cache's pages tile by tile. The slots
//! of a query are its window (oldest first, padded to the window size) and then its compressed entries; tiles are 64
//! slots, so they depend on the query's position alone.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::cache::{CacheLayout, KvFormat, LayerView};
use crate::error::Result;
use crate::tensor::format::{e8m0_value, round_bf16};

use super::Cpu;
use super::indexer::Selection;
use super::simd::{self, Simd};

/// Slots per tile; the official kernel's, which decides where attention weights are rescaled.
const TILE: usize = 64;
/// Heads that one task takes when there are too few tokens for all threads.
const MIN_HEADS: usize = 8;

/// Shape and rounding of an attention call.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Values of a row.
    pub dim: usize,
    /// Position of the first query; the others follow.
    pub start: usize,
    /// Sink logit of each head.
    pub sink: &'a [f32],
    /// Attention weights are rounded to bf16 before they meet the values.
    pub weights_bf16: bool,
    /// The output is stored as bf16.
    pub bf16: bool,
}

/// Compressed entries a query attends to.
#[derive(Clone, Copy)]
pub enum Entries<'a> {
    /// None: a window-only layer.
    None,
    /// Every entry of `ratio` tokens that is complete at the query's position.
    All {
        /// Tokens of an entry.
        ratio: usize,
    },
    /// Those the indexer chose.
    Selected(&'a Selection),
}

impl Entries<'_> {
    fn count(&self, row: usize, position: usize) -> usize {
        match self {
            Self::None => 0,
            Self::All { ratio } => (position + 1) / ratio,
            Self::Selected(selection) => selection.counts[row] as usize,
        }
    }

    fn get(&self, row: usize, i: usize) -> usize {
        match self {
            Self::Selected(selection) => selection.row(row)[i] as usize,
            _ => i,
        }
    }
}

/// `out[t][h] = attention of q[t][h]`, before the inverse rotation; `q` and `out` are `[tokens, heads, dim]`.
pub fn attend(
    cpu: &Cpu,
    a: Attention<'_>,
    q: &[f32],
    view: LayerView<'_>,
    entries: Entries<'_>,
    out: &mut [f32],
) -> Result<()> {
    let tokens = q.len() / (a.heads * a.dim);
    let mut group = a.heads;
    while tokens * (a.heads / group) < 2 * cpu.pool.threads() && group.is_multiple_of(2) && group > MIN_HEADS {
        group /= 2;
    }
    let per_token = a.heads / group;
    cpu.pool.chunks(out, group * a.dim, |task, out| {
        let (row, first_head) = (task / per_token, task % per_token * group);
        let q = &q[(row * a.heads + first_head) * a.dim..][..group * a.dim];
        attend_one(cpu, a, q, view, entries, row, &a.sink[first_head..first_head + group], out)
    })
}

#[expect(clippy::too_many_arguments, reason = "the inner step of one task; every argument is a plain slice or index")]
fn attend_one(
    cpu: &Cpu,
    a: Attention<'_>,
    q: &[f32],
    view: LayerView<'_>,
    entries: Entries<'_>,
    row: usize,
    sink: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let heads = sink.len();
    let position = a.start + row;
    let window = view.layout().window;
    let first = (position + 1).saturating_sub(window);
    let in_window = position + 1 - first;
    let slots = window + entries.count(row, position);
    let softmax_scale = (a.dim as f32).sqrt().recip();

    let mut keys = alloc::vec_f32("attention key tile", TILE * a.dim)?;
    let mut scores = alloc::vec_f32("attention scores", heads * TILE)?;
    let mut max = alloc::vec_f32("attention maxima", heads)?;
    let mut sum = alloc::vec_f32("attention sums", heads)?;
    let mut fade = alloc::vec_f32("attention fades", heads)?;
    max.fill(f32::NEG_INFINITY);
    out.fill(0.0);

    for tile in (0..slots).step_by(TILE) {
        let mut len = 0;
        for slot in tile..(tile + TILE).min(slots) {
            let bytes = match slot.checked_sub(window) {
                Some(i) => view.entry(entries.get(row, i)),
                None if slot < in_window => view.window_row(first + slot),
                None => continue,
            };
            decode_row(cpu.simd, view.layout(), bytes, &mut keys[len * a.dim..(len + 1) * a.dim]);
            len += 1;
        }
        if len == 0 {
            continue;
        }
        let scores = &mut scores[..heads * len];
        simd::scores(cpu.simd, q, &keys[..len * a.dim], a.dim, scores);
        for (h, scores) in scores.chunks_exact_mut(len).enumerate() {
            scores.iter_mut().for_each(|s| *s *= softmax_scale);
            let highest = scores.iter().fold(max[h], |m, &s| if s > m { s } else { m });
            fade[h] = (max[h] - highest).exp();
            max[h] = highest;
            scores.iter_mut().for_each(|s| *s -= highest);
        }
        simd::exp(cpu.simd, scores);
        for (h, scores) in scores.chunks_exact_mut(len).enumerate() {
            sum[h] = sum[h] * fade[h] + scores.iter().sum::<f32>();
            if a.weights_bf16 {
                scores.iter_mut().for_each(|s| *s = round_bf16(*s));
            }
        }
        simd::accumulate(cpu.simd, &fade, scores, &keys[..len * a.dim], a.dim, out);
    }
    for (h, out) in out.chunks_exact_mut(a.dim).enumerate() {
        let total = sum[h] + (sink[h] - max[h]).exp();
        for o in out {
            *o /= total;
            if a.bf16 {
                *o = round_bf16(*o);
            }
        }
    }
    Ok(())
}

/// [`CacheLayout::decode_row`] with vector instructions.
fn decode_row(simd: Simd, layout: &CacheLayout, bytes: &[u8], out: &mut [f32]) {
    if layout.format == KvFormat::F32 {
        return layout.decode_row(bytes, out);
    }
    if layout.format == KvFormat::Bf16 {
        return simd::bf16_to_f32(simd, bytes, out);
    }
    let nope = layout.head_dim - layout.rope_dim;
    let (codes, rest) = bytes.split_at(nope);
    let (rope, scales) = rest.split_at(2 * layout.rope_dim);
    let blocks = codes.chunks(CacheLayout::KV_BLOCK).zip(out.chunks_mut(CacheLayout::KV_BLOCK));
    for ((codes, out), &scale) in blocks.zip(scales) {
        simd::e4m3_to_f32(simd, codes, e8m0_value(scale), out);
    }
    simd::bf16_to_f32(simd, rope, &mut out[nope..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_decoding_of_rows_equals_the_layouts_own() {
        for format in [KvFormat::Fp8, KvFormat::Bf16, KvFormat::F32] {
            let layout =
                CacheLayout { format, head_dim: 512, rope_dim: 64, index_dim: 128, window: 128, layers: Vec::new() };
            let row: Vec<f32> = (0..512).map(|i| (i as f32 * 0.91).sin() * (i as f32)).collect();
            let mut bytes = vec![0; layout.row_bytes()];
            layout.encode_row(&row, &mut bytes);
            let (mut want, mut got) = (vec![0.0; 512], vec![f32::NAN; 512]);
            layout.decode_row(&bytes, &mut want);
            for simd in Simd::available() {
                decode_row(simd, &layout, &bytes, &mut got);
                assert_eq!(got, want, "{format} {simd:?}");
            }
        }
    }
}
