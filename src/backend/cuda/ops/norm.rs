//! `kernels/norm.cu`: embedding, root-mean-square norm, the E4M3 rounding of activations, rotation tables.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::{Launch, MAX_WIDTH, Params, STREAMS, address, at_least, exact, multiple, rows, word};
use crate::error::{Result, bail};

#[derive(Clone, Copy)]
#[repr(C)]
struct EmbedParams {
    table: u64,
    ids: u64,
    streams: u64,
    width: u32,
    vocab: u32,
}
// SAFETY: mirrors `EmbedParams`.
unsafe impl Params for EmbedParams {}

/// Embedding rows of `ids` `[rows]`, repeated for each stream: `streams` `[rows, STREAMS, width]`; `table` `[vocab, width]`.
/// A row of [`super::IDLE`] is zeros.
pub(crate) fn embed(
    stream: &Stream,
    table: &Buffer<u16>,
    ids: &Buffer<u32>,
    streams: &Buffer<u16>,
    width: usize,
) -> Result<()> {
    multiple("hidden_size", width, 128)?;
    exact("the streams", streams, ids.len() * STREAMS * width)?;
    let vocab = table.len() / width;
    exact("the embedding table", table, vocab * width)?;
    let params = EmbedParams {
        table: table.address(),
        ids: ids.address(),
        streams: streams.address(),
        width: word("hidden_size", width)?,
        vocab: word("vocab_size", vocab)?,
    };
    let kernel = stream.gpu().kernel("embed")?;
    // SAFETY: sizes checked above; ids outside the table are not followed.
    unsafe { stream.launch(kernel, rows(ids.len(), 256), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormParams {
    x: u64,
    weight: u64,
    out: u64,
    quantised: u64,
    width: u32,
    x_stride: u32,
    eps: f32,
    pad: u32,
}
// SAFETY: mirrors `NormParams`.
unsafe impl Params for NormParams {}

/// Arguments of [`rms_norm`].
pub(crate) struct RmsNorm<'a> {
    /// `[rows, stride]`; the first `weight.len()` values of each row are taken.
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) stride: usize,
    /// `[width]`.
    pub(crate) weight: &'a Buffer<f32>,
    /// `[rows, width]`.
    pub(crate) out: &'a Buffer<u16>,
    /// `[rows, width]` rounded to the E4M3 grid, if wanted.
    pub(crate) quantised: Option<&'a Buffer<u16>>,
    pub(crate) eps: f32,
}

/// `out = x / rms(x) * weight` of each row.
pub(crate) fn rms_norm(stream: &Stream, a: &RmsNorm<'_>) -> Result<()> {
    let width = a.weight.len();
    multiple("the width of a norm", width, 128)?;
    if width > MAX_WIDTH {
        bail!(Unsupported, "the width of a norm is {width}; the GPU kernels take at most {MAX_WIDTH}");
    }
    multiple("the stride of a norm's input", a.stride, 8)?;
    let count = a.out.len() / width;
    exact("the norm's output", a.out, count * width)?;
    if count > 0 {
        at_least("the norm's input", a.x, (count - 1) * a.stride + width)?;
    }
    if let Some(q) = a.quantised {
        exact("the norm's quantised output", q, count * width)?;
    }
    let params = NormParams {
        x: a.x.address(),
        weight: a.weight.address(),
        out: a.out.address(),
        quantised: address(a.quantised),
        width: width as u32,
        x_stride: word("a stride", a.stride)?,
        eps: a.eps,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("rms_norm")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(count, 256), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct QuantiseParams {
    x: u64,
    out: u64,
    count: u64,
}
// SAFETY: mirrors `QuantiseParams`.
unsafe impl Params for QuantiseParams {}

/// Rounds to the E4M3 grid, one power-of-two scale per 128 values. In place if `x` and `out` are the same.
pub(crate) fn quantise(stream: &Stream, x: &Buffer<u16>, out: &Buffer<u16>) -> Result<()> {
    if x.len() > 0 {
        multiple("the number of quantised values", x.len(), 128)?;
    }
    exact("the quantised output", out, x.len())?;
    let params = QuantiseParams { x: x.address(), out: out.address(), count: x.len() as u64 };
    let kernel = stream.gpu().kernel("quantise")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(x.len().div_ceil(2048), 256), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct WatchParams {
    x: u64,
    bad: u64,
    words: u64,
    is_f32: u64,
}
// SAFETY: mirrors `WatchParams`.
unsafe impl Params for WatchParams {}

/// Sets `bad` `[1]` to 1 if a bf16 value of `x` is NaN or infinite; leaves it alone otherwise.
pub(crate) fn watch(stream: &Stream, x: &Buffer<u16>, bad: &Buffer<u32>) -> Result<()> {
    watch_bytes(stream, &x.as_bytes(), false, bad)
}

/// As [`watch`], for float32 values.
pub(crate) fn watch_f32(stream: &Stream, x: &Buffer<f32>, bad: &Buffer<u32>) -> Result<()> {
    watch_bytes(stream, &x.as_bytes(), true, bad)
}

fn watch_bytes(stream: &Stream, x: &Buffer<u8>, is_f32: bool, bad: &Buffer<u32>) -> Result<()> {
    exact("the flag of a step", bad, 1)?;
    if x.len() > 0 {
        multiple("the bytes of watched values", x.len(), 4)?;
    }
    let words = x.len() / 4;
    let params = WatchParams { x: x.address(), bad: bad.address(), words: words as u64, is_f32: u64::from(is_f32) };
    let kernel = stream.gpu().kernel("watch")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(words.div_ceil(4 * 256), 256), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RotationParams {
    positions: u64,
    plain: u64,
    yarn: u64,
    turns: u64,
    rows: u32,
    pad: u32,
}
// SAFETY: mirrors `RotationParams`.
unsafe impl Params for RotationParams {}

/// Cosines and sines `[4, rows, 32, 2]`: of the plain frequencies, of the YaRN ones, and of the latter at the positions
/// of the entries of ratio 4 and 128 that a row would complete.
pub(crate) fn rotations(
    stream: &Stream,
    positions: &Buffer<u32>,
    plain: &Buffer<f32>,
    yarn: &Buffer<f32>,
    turns: &Buffer<[f32; 2]>,
) -> Result<()> {
    exact("the plain frequencies", plain, 32)?;
    exact("the YaRN frequencies", yarn, 32)?;
    exact("the rotation tables", turns, 4 * positions.len() * 32)?;
    let params = RotationParams {
        positions: positions.address(),
        plain: plain.address(),
        yarn: yarn.address(),
        turns: turns.address(),
        rows: word("the number of rows", positions.len())?,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("rotations")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, Launch { grid: [positions.len(), 1, 1], block: 128, shared: 0 }, &params) }
}
