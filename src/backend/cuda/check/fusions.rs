//! How fast the fused operations are beside the same work in separate kernels, whose bits are the same; replays take turns.

use super::timing::{Bench, HEADS, Queries, Table, turns};
use crate::backend::cuda::ops::{self, Compress, Compressor, HEAD_DIM, Insert, ROW_BYTES, Sequence};
use crate::backend::cuda::stream::Stream;
use crate::error::Result;

/// Norm and rotation of queries; norm, rotation, quantisation and storing of window rows.
pub(super) fn insert(b: &mut Bench<'_>) -> Result<()> {
    for tokens in [1, 8, 64, 1024, 4096] {
        let n = b.copies(tokens * HEADS * HEAD_DIM * 2).min(16);
        let q = (0..n).map(|_| b.bf16(tokens * HEADS * HEAD_DIM)).collect::<Result<Vec<_>>>()?;
        let (kv, norm, turns) = (b.bf16(tokens * HEAD_DIM)?, b.f32(HEAD_DIM)?, turns(b, tokens)?);
        let staged = b.out(tokens * ROW_BYTES)?;
        let args = |i: usize| {
            let (q, kv, norm, turns, staged) = (&q[i], &kv, &norm, &turns, &staged);
            Insert { q, kv, norm, turns, staged, heads: HEADS, eps: 1e-6, stepwise: true }
        };
        let fused = |stream: &Stream, i: usize| ops::insert(stream, &args(i));
        let apart = |stream: &Stream, i: usize| ops::unfused::insert(stream, &args(i));
        let bytes = (tokens * (HEADS * HEAD_DIM * 4 + HEAD_DIM * 2 + ROW_BYTES)) as f64;
        let times = b.medians(n, [&fused, &apart])?;
        b.compare(format!("insert (F3), {tokens} tokens"), bytes, times);
    }
    Ok(())
}

/// Compressors: one token of each of many sequences, all of which complete an entry, or a prefill chunk of one.
pub(super) fn compress(b: &mut Bench<'_>) -> Result<()> {
    for (kind, most) in [(Compressor::Main4, 1024), (Compressor::Index4, 1024), (Compressor::Main128, 32)] {
        for (sequences, per, start) in [(1, 1, 1023), (64, 1, 1023), (1, most * kind.ratio(), 0)] {
            compress_case(b, kind, sequences, per, start)?;
            b.restart()?;
        }
    }
    Ok(())
}

fn compress_case(b: &mut Bench<'_>, kind: Compressor, sequences: usize, per: usize, start: usize) -> Result<()> {
    let (ratio, rows) = (kind.ratio(), sequences * per);
    let list: Vec<Sequence> = (0..sequences)
        .map(|s| Sequence { start: start as u32, first_row: (s * per) as u32, rows: per as u32, unused: 0 })
        .collect();
    let sequence: Vec<u32> = (0..rows).map(|r| (r / per) as u32).collect();
    let chosen: Vec<u32> = (0..rows as u32).filter(|r| (start + *r as usize % per) % ratio == ratio - 1).collect();
    let windows = chosen.len();
    let (list, sequence, chosen) = (b.put(&list)?, b.put(&sequence)?, b.put(&chosen)?);
    let (ape, norm, turns) = (b.f32(ratio * kind.width())?, b.f32(kind.dim())?, turns(b, rows)?);
    let pooled = b.out(rows * kind.dim())?;
    let pages = ((start + per) / ratio + 1).div_ceil(kind.per_page());
    let entries = Table::new(b, sequences, pages, kind.page_bytes())?;
    let moved = 8 * rows * kind.width() + windows * ROW_BYTES + 8 * sequences * kind.state_len();
    let n = b.copies(moved).min(20);
    let (mut inputs, mut states) = (Vec::new(), Vec::new());
    for _ in 0..n {
        inputs.push((b.f32(rows * kind.width())?, b.f32(rows * kind.width())?));
        let mut state = || Table::new(b, sequences, kind.state_pages(), kind.page_bytes());
        states.push((state()?, state()?));
    }
    let args = |i: usize| Compress {
        kind,
        values: &inputs[i].0,
        gates: &inputs[i].1,
        ape: &ape,
        norm: &norm,
        turns: &turns,
        sequence: &sequence,
        sequences: &list,
        entries: entries.pages(),
        state: states[i].0.pages(),
        fresh: states[i].1.pages(),
        eps: 1e-6,
    };
    let fused = |stream: &Stream, i: usize| ops::compress(stream, &args(i));
    let apart = |stream: &Stream, i: usize| ops::unfused::compress(stream, &args(i), &chosen, &pooled);
    let times = b.medians(n, [&fused, &apart])?;
    b.compare(format!("compress {kind:?} (F1), {windows} windows of {sequences} sequences"), moved as f64, times);
    Ok(())
}

/// Rotation back and E4M3 rounding in attention's epilogue. Both sums, with attention; then both without it: what the
/// epilogue adds to an attention that does neither, and the two kernels behind one.
pub(super) fn output(b: &mut Bench<'_>) -> Result<()> {
    for (batch, per) in [(1, 1), (64, 1), (1, 4096)] {
        let a = Queries::new(b, HEADS, batch, per, 4, 512)?;
        let rows = batch * per;
        let unturned = b.put(&vec![[1.0, 0.0]; a.turns.len()])?;
        let fused = |stream: &Stream, i: usize| a.attend(stream, i, &a.turns, true);
        let plain = |stream: &Stream, i: usize| a.attend(stream, i, &unturned, false);
        let apart = |stream: &Stream, i: usize| {
            plain(stream, i)?;
            ops::unfused::round_output(stream, &a.out, &a.turns, HEADS)
        };
        let [fused, plain, apart] = b.medians(a.calls(), [&fused, &plain, &apart])?;
        b.compare(format!("attend and F2, {rows} tokens"), a.bytes(), [fused, apart]);
        let alone = [fused - plain, apart - plain];
        b.compare(format!("F2 without attention, {rows} tokens"), (a.out.len() * 4) as f64, alone);
        b.restart()?;
    }
    Ok(())
}
