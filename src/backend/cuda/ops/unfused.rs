//! `kernels/unfused.cu`: the fused operations in separate kernels, for measuring and checking only; no step calls these.
//!
//! Each gives the bits of the fused one. Intermediate values lie in the inputs, which are overwritten, or in `pooled`.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::cache::{Compress, CompressParams, Compressor, Insert, RawPages};
use super::{HEAD_DIM, Launch, Params, ROPE_DIM, at_least, exact, quantise, word};
use crate::error::Result;

#[derive(Clone, Copy)]
#[repr(C)]
struct PoolParams {
    compress: CompressParams,
    pooled: u64,
}
// SAFETY: mirrors `PoolParams`.
unsafe impl Params for PoolParams {}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RowsParams {
    x: u64,
    weight: u64,
    turns: u64,
    chosen: u64,
    staged: u64,
    sequence: u64,
    sequences: u64,
    entries: RawPages,
    count: u32,
    heads: u32,
    width: u32,
    ratio: u32,
    stepwise: u32,
    back: u32,
    eps: f32,
    pad: u32,
}
// SAFETY: mirrors `RowsParams`.
unsafe impl Params for RowsParams {}

/// Launches kernels over the same rows; a block takes 32 rows of `rotate_heads` and 8 of the others.
fn over_rows(stream: &Stream, names: &[&str], p: RowsParams) -> Result<()> {
    for &name in names {
        let per_block = if name == "rotate_heads" { 32 } else { 8 };
        let grid = [(p.count as usize * p.heads as usize).div_ceil(per_block), 1, 1];
        let kernel = stream.gpu().kernel(name)?;
        // SAFETY: the callers check every size.
        unsafe { stream.launch(kernel, Launch { grid, block: 256, shared: 0 }, &p)? };
    }
    Ok(())
}

/// As [`super::insert`], in five launches: norm and rotation of `q`; norm and rotation of `kv`, in place, and its
/// quantisation, which stores the rows where they go.
pub(crate) fn insert(stream: &Stream, a: &Insert<'_>) -> Result<()> {
    a.check()?;
    let rows = a.kv.len() / HEAD_DIM;
    let q = RowsParams {
        x: a.q.address(),
        turns: a.turns.address(),
        count: word("rows", rows)?,
        heads: word("heads", a.heads)?,
        width: HEAD_DIM as u32,
        stepwise: u32::from(a.stepwise),
        eps: a.eps,
        ..RowsParams::default()
    };
    over_rows(stream, &["norm_heads", "rotate_heads"], q)?;
    let (x, weight, staged) = (a.kv.address(), a.norm.address(), a.staged.address());
    let kv = RowsParams { x, weight, staged, heads: 1, stepwise: 0, ..q };
    over_rows(stream, &["norm_heads", "rotate_heads", "store_rows"], kv)
}

/// As [`super::compress`], in four launches (five for index keys): pooling and the new state, norm, rotation, Hadamard
/// transform, and quantisation, which stores the entries in their pages. `chosen` are the rows that complete an entry.
pub(crate) fn compress(stream: &Stream, a: &Compress<'_>, chosen: &Buffer<u32>, pooled: &Buffer<u16>) -> Result<()> {
    let (kind, rows) = (a.kind, a.sequence.len());
    exact("the pooled entries", pooled, rows * kind.dim())?;
    at_least("the rows of a step", a.sequence, chosen.len())?;
    let compress = a.params()?;
    let name = match kind {
        Compressor::Main4 => "pool4_main",
        Compressor::Index4 => "pool4_index",
        Compressor::Main128 => "pool128",
    };
    let params = PoolParams { compress, pooled: pooled.address() };
    // SAFETY: `Compress::params` checked the sizes; page ids and sequences are the caller's promise.
    unsafe { stream.launch(stream.gpu().kernel(name)?, a.launch(), &params)? };
    let p = RowsParams {
        x: pooled.address(),
        weight: a.norm.address(),
        turns: a.turns.address(),
        chosen: chosen.address(),
        sequence: a.sequence.address(),
        sequences: a.sequences.address(),
        entries: compress.entries,
        count: word("entries", chosen.len())?,
        heads: 1,
        width: kind.dim() as u32,
        ratio: kind.ratio() as u32,
        eps: a.eps,
        ..RowsParams::default()
    };
    over_rows(stream, &["norm_entries", "rotate_heads"], p)?;
    let last: &[&str] = if kind == Compressor::Index4 { &["hadamard_keys", "store_keys"] } else { &["store_rows"] };
    over_rows(stream, last, p)
}

/// What attention's epilogue does to its output `[rows, heads, 512]`, in two launches and in place: rotation by the
/// opposite angles and the E4M3 rounding.
pub(crate) fn round_output(stream: &Stream, out: &Buffer<u16>, turns: &Buffer<[f32; 2]>, heads: usize) -> Result<()> {
    let rows = turns.len() / (ROPE_DIM / 2);
    exact("the rotations", turns, rows * (ROPE_DIM / 2))?;
    exact("the attention output", out, rows * heads * HEAD_DIM)?;
    let p = RowsParams {
        x: out.address(),
        turns: turns.address(),
        count: word("rows", rows)?,
        heads: word("heads", heads)?,
        width: HEAD_DIM as u32,
        back: 1,
        ..RowsParams::default()
    };
    over_rows(stream, &["rotate_heads"], p)?;
    quantise(stream, out, out)
}
