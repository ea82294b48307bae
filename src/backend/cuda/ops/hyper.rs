//! `kernels/hyper.cu`: the seam between two sub-layers.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::{Launch, MAX_WIDTH, Params, STREAMS, address, at_least, exact, multiple, rows, word};
use crate::error::{Result, bail};

/// float32 values of a token's mixing coefficients: pre, post, comb.
pub(crate) const MIX_FLOATS: usize = 2 * STREAMS + STREAMS * STREAMS;
const OUTPUTS: usize = STREAMS * (2 + STREAMS);
/// Columns of a stream that a block takes.
const COLUMNS: usize = 128;
/// Tokens from which a block takes 16 instead of 8.
const MANY: usize = 8;

/// Threads of a block of [`finish`].
const FINISH_THREADS: u32 = 9 * 32;

/// float32 values of the partial sums of `tokens` tokens.
pub(crate) fn parts_len(tokens: usize, width: usize) -> usize {
    tokens * (width / COLUMNS) * (OUTPUTS + 1)
}

/// Arguments of [`project`].
pub(crate) struct Project<'a> {
    /// `[tokens, STREAMS, width]`.
    pub(crate) x: &'a Buffer<u16>,
    /// The sub-layer's output `[tokens, width]`, its mixing coefficients `[tokens, MIX_FLOATS]` and where the new streams
    /// go; without, the streams are taken as they are.
    pub(crate) expand: Option<(&'a Buffer<u16>, &'a Buffer<f32>, &'a Buffer<u16>)>,
    /// `[24 or 4, STREAMS * width]`.
    pub(crate) basis: &'a Buffer<f32>,
    /// `[parts_len]`.
    pub(crate) parts: &'a Buffer<f32>,
    pub(crate) width: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ProjectParams {
    x: u64,
    y: u64,
    mixes: u64,
    out: u64,
    basis: u64,
    parts: u64,
    tokens: u32,
    width: u32,
    outputs: u32,
    pad: u32,
}
// SAFETY: mirrors `ProjectParams`.
unsafe impl Params for ProjectParams {}

/// Mixes a sub-layer's output into the streams and leaves the partial sums of the next projection.
pub(crate) fn project(stream: &Stream, a: &Project<'_>) -> Result<()> {
    multiple("hidden_size", a.width, COLUMNS)?;
    let tokens = a.x.len() / (STREAMS * a.width);
    exact("the streams", a.x, tokens * STREAMS * a.width)?;
    exact("the partial sums", a.parts, parts_len(tokens, a.width))?;
    let outputs = a.basis.len() / (STREAMS * a.width);
    if (outputs != OUTPUTS && outputs != STREAMS) || a.basis.len() != outputs * STREAMS * a.width {
        bail!(InvalidArgument, "a mixing basis of {} values for streams of {}", a.basis.len(), a.width);
    }
    if let Some((y, mixes, out)) = a.expand {
        exact("the sub-layer's output", y, tokens * a.width)?;
        exact("the mixing coefficients", mixes, tokens * MIX_FLOATS)?;
        exact("the new streams", out, a.x.len())?;
    }
    let params = ProjectParams {
        x: a.x.address(),
        y: address(a.expand.map(|e| e.0)),
        mixes: address(a.expand.map(|e| e.1)),
        out: address(a.expand.map(|e| e.2)),
        basis: a.basis.address(),
        parts: a.parts.address(),
        tokens: word("tokens", tokens)?,
        width: word("hidden_size", a.width)?,
        outputs: outputs as u32,
        pad: 0,
    };
    let (name, per_block) = if tokens > MANY { ("hyper_project16", 16) } else { ("hyper_project8", 8) };
    let kernel = stream.gpu().kernel(name)?;
    let grid = [a.width / COLUMNS, tokens.div_ceil(per_block), 1];
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, Launch { grid, block: 256, shared: 0 }, &params) }
}

/// Arguments of [`finish`].
pub(crate) struct Finish<'a> {
    /// `[.., STREAMS, width]`.
    pub(crate) x: &'a Buffer<u16>,
    /// Rows of `x` to take `[tokens]`, each below the number of rows; all without.
    pub(crate) rows: Option<&'a Buffer<u32>>,
    pub(crate) parts: &'a Buffer<f32>,
    /// `[3]`, or `[1]` for the final collapse.
    pub(crate) scale: &'a Buffer<f32>,
    /// `[24]`, or `[4]`.
    pub(crate) base: &'a Buffer<f32>,
    /// `[width]`.
    pub(crate) norm: &'a Buffer<f32>,
    /// `[rows of x, MIX_FLOATS]`; absent for the final collapse.
    pub(crate) mixes: Option<&'a Buffer<f32>>,
    /// `[tokens, width]`.
    pub(crate) out: &'a Buffer<u16>,
    /// `[tokens, width]` on the E4M3 grid.
    pub(crate) quantised: Option<&'a Buffer<u16>>,
    pub(crate) iterations: usize,
    pub(crate) hc_eps: f32,
    pub(crate) norm_eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FinishParams {
    x: u64,
    rows: u64,
    parts: u64,
    scale: u64,
    base: u64,
    weight: u64,
    mixes: u64,
    out: u64,
    quantised: u64,
    width: u32,
    iterations: u32,
    hc_eps: f32,
    norm_eps: f32,
}
// SAFETY: mirrors `FinishParams`.
unsafe impl Params for FinishParams {}

/// Mixing coefficients, collapse and norm.
pub(crate) fn finish(stream: &Stream, a: &Finish<'_>) -> Result<()> {
    let width = a.norm.len();
    multiple("hidden_size", width, COLUMNS)?;
    if width > MAX_WIDTH {
        bail!(Unsupported, "hidden_size is {width}; the GPU kernels take at most {MAX_WIDTH}");
    }
    let all = a.x.len() / (STREAMS * width);
    exact("the streams", a.x, all * STREAMS * width)?;
    at_least("the partial sums", a.parts, parts_len(all, width))?;
    let tokens = a.rows.map_or(all, Buffer::len);
    let (scales, bases) = if a.mixes.is_some() { (3, OUTPUTS) } else { (1, STREAMS) };
    exact("the mixing scales", a.scale, scales)?;
    exact("the mixing base", a.base, bases)?;
    if let Some(mixes) = a.mixes {
        exact("the mixing coefficients", mixes, all * MIX_FLOATS)?;
    }
    exact("the sub-layer's input", a.out, tokens * width)?;
    if let Some(q) = a.quantised {
        exact("the sub-layer's quantised input", q, tokens * width)?;
    }
    let params = FinishParams {
        x: a.x.address(),
        rows: address(a.rows),
        parts: a.parts.address(),
        scale: a.scale.address(),
        base: a.base.address(),
        weight: a.norm.address(),
        mixes: address(a.mixes),
        out: a.out.address(),
        quantised: address(a.quantised),
        width: width as u32,
        iterations: word("hc_sinkhorn_iters", a.iterations)?,
        hc_eps: a.hc_eps,
        norm_eps: a.norm_eps,
    };
    let kernel = stream.gpu().kernel("hyper_finish")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(tokens, FINISH_THREADS), &params) }
}
