//! `kernels/sample.cu`: the highest logit, the highest k in order, and the sampler's choice.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::{Params, at_least, exact, multiple, rows, word};
use crate::error::{Result, bail};
use crate::sampler::{Draw, Edit};

/// Threads of a block, and most values of [`top_logits`].
const THREADS: u32 = 1024;

/// A [`Draw`] as the kernel reads it: its struct, word by word.
pub(crate) type DrawWords = [u32; 12];
/// An [`Edit`] as the kernel reads it.
pub(crate) type EditWords = [u32; 4];

/// The draw of `row`, whose edits begin at `first_edit` of the list.
pub(crate) fn draw_words(draw: &Draw, row: usize, first_edit: usize) -> Result<DrawWords> {
    let halves = |v: u64| [v as u32, (v >> 32) as u32];
    let ([random, random_high], [least, least_high]) = (halves(draw.random), halves(draw.min_weight));
    Ok([
        random,
        random_high,
        least,
        least_high,
        draw.temperature.to_bits(),
        draw.top_p.to_bits(),
        draw.top_k,
        draw.one_bits,
        u32::from(draw.greedy),
        word("a row", row)?,
        word("an edit", first_edit)?,
        word("edits", draw.edits.len())?,
    ])
}

/// The edit.
pub(crate) fn edit_words(edit: &Edit) -> EditWords {
    [edit.id, edit.repetition.to_bits(), edit.subtract.to_bits(), edit.add.to_bits()]
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ArgmaxParams {
    logits: u64,
    ids: u64,
    values: u64,
    count: u32,
    pad: u32,
}
// SAFETY: mirrors `ArgmaxParams`.
unsafe impl Params for ArgmaxParams {}

/// The highest logit of each row `[rows, vocab]`, ties to the lower id; `u32::MAX` if a logit is NaN or infinite.
pub(crate) fn argmax(stream: &Stream, logits: &Buffer<f32>, ids: &Buffer<u32>, values: &Buffer<f32>) -> Result<()> {
    let count = ids.len();
    exact("the highest logits", values, count)?;
    if count == 0 {
        return Ok(());
    }
    multiple("the length of the logits", logits.len(), count)?;
    let params = ArgmaxParams {
        logits: logits.address(),
        ids: ids.address(),
        values: values.address(),
        count: word("vocab_size", logits.len() / count)?,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("argmax")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(count, THREADS), &params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct TopLogitsParams {
    logits: u64,
    ids: u64,
    values: u64,
    count: u32,
    k: u32,
}
// SAFETY: mirrors `TopLogitsParams`.
unsafe impl Params for TopLogitsParams {}

/// The `k` highest logits of each row `[rows, vocab]`, highest first, ties to the lower id: ids and values `[rows, k]`. Ids
/// behind a row's last, and all of a row with a logit that is NaN or infinite, are `u32::MAX`, and their values are not
/// written.
pub(crate) fn top_logits(
    stream: &Stream,
    logits: &Buffer<f32>,
    vocab: usize,
    k: usize,
    ids: &Buffer<u32>,
    values: &Buffer<f32>,
) -> Result<()> {
    if k == 0 || k > THREADS as usize {
        bail!(Unsupported, "the {k} highest logits; the GPU kernels give 1 to {THREADS}");
    }
    multiple("the length of the logits", logits.len(), vocab.max(1))?;
    let count = logits.len() / vocab.max(1);
    exact("ids of the highest logits", ids, count * k)?;
    exact("the highest logits", values, count * k)?;
    let params = TopLogitsParams {
        logits: logits.address(),
        ids: ids.address(),
        values: values.address(),
        count: word("vocab_size", vocab)?,
        k: k as u32,
    };
    let kernel = stream.gpu().kernel("top_logits")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(count, THREADS), &params) }
}

/// Arguments of [`sample`].
pub(crate) struct Sample<'a> {
    /// `[rows, vocab]`; rows that are drawn from are changed by their edits.
    pub(crate) logits: &'a Buffer<f32>,
    pub(crate) vocab: usize,
    /// Draws, each of a row of its own.
    pub(crate) draws: &'a Buffer<DrawWords>,
    pub(crate) edits: &'a Buffer<EditWords>,
    /// `[draws]`: the tokens; `u32::MAX` where the CPU's sampler finds an error.
    pub(crate) tokens: &'a Buffer<u32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SampleParams {
    logits: u64,
    draws: u64,
    edits: u64,
    tokens: u64,
    count: u32,
    pad: u32,
}
// SAFETY: mirrors `SampleParams`.
unsafe impl Params for SampleParams {}

/// Chooses a token for each draw: that of [`Sampler::sample`](crate::sampler::Sampler::sample). That rows lie within the
/// logits, edits within the list and their ids within the vocabulary is the caller's promise.
pub(crate) fn sample(stream: &Stream, a: &Sample<'_>) -> Result<()> {
    let count = a.draws.len();
    at_least("the chosen tokens", a.tokens, count)?;
    multiple("the length of the logits", a.logits.len(), a.vocab.max(1))?;
    for (what, address) in [("draws", a.draws.address()), ("edits", a.edits.address())] {
        if !address.is_multiple_of(8) {
            bail!(InvalidArgument, "the list of {what} is not aligned to 8 bytes");
        }
    }
    let params = SampleParams {
        logits: a.logits.address(),
        draws: a.draws.address(),
        edits: a.edits.address(),
        tokens: a.tokens.address(),
        count: word("vocab_size", a.vocab)?,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("sample")?;
    // SAFETY: sizes checked above; the rest is the caller's promise.
    unsafe { stream.launch(kernel, rows(count, THREADS), &params) }
}
