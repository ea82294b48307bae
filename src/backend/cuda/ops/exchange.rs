//! `kernels/exchange.cu`: what device and host tell each other in the middle of a step.

use super::super::memory::{Buffer, Pinned};
use super::super::stream::Stream;
use super::{Launch, Params, exact, multiple, word};
use crate::error::{Result, bail};

/// Most blocks that write to the host; each has a flag.
pub(crate) const ASK_BLOCKS: usize = 16;
/// Most blocks that read from it.
const FETCH_BLOCKS: usize = 32;
const BLOCK: u32 = 512;

/// Blocks, and so flags, of [`ask`] for `rows` rows.
pub(crate) fn ask_blocks(rows: usize) -> usize {
    rows.clamp(1, ASK_BLOCKS)
}

/// Arguments of [`ask`]: buffers on the device, and the pinned memory, from its beginning, that has their values then.
pub(crate) struct Ask<'a> {
    /// `[rows, top_k]` expert of each assignment, wherever it is, and the same for those of the device, with `experts` and
    /// above for the others. What the host gets has `experts` for those of the device.
    pub(crate) ids: (&'a Buffer<u32>, &'a Buffer<u32>, &'a Pinned),
    /// `[rows, top_k]`.
    pub(crate) weights: (&'a Buffer<f32>, &'a Pinned),
    /// `[rows, width]`.
    pub(crate) x: (&'a Buffer<u16>, &'a Pinned),
    pub(crate) rows: usize,
    pub(crate) experts: usize,
    /// Memory of flags, and the byte at which those of this call begin: a word for each of [`ask_blocks`].
    pub(crate) asked: (&'a Pinned, usize),
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AskParams {
    ids: u64,
    own: u64,
    weights: u64,
    x: u64,
    host_ids: u64,
    host_weights: u64,
    host_x: u64,
    asked: u64,
    count: u32,
    experts: u32,
    vectors: u32,
    pad: u32,
}
// SAFETY: mirrors `AskParams`.
unsafe impl Params for AskParams {}

/// Writes to pinned memory what the host needs to know, then sets the flags.
pub(crate) fn ask(stream: &Stream, a: &Ask<'_>) -> Result<()> {
    let ((ids, own, host_ids), (weights, host_weights), (x, host_x)) = (a.ids, a.weights, a.x);
    exact("the experts that are here", own, ids.len())?;
    exact("the expert weights", weights, ids.len())?;
    multiple("the experts' inputs", x.len(), 8)?;
    let params = AskParams {
        ids: ids.address(),
        own: own.address(),
        weights: weights.address(),
        x: x.address(),
        host_ids: pinned(host_ids, 0, ids.bytes())?,
        host_weights: pinned(host_weights, 0, weights.bytes())?,
        host_x: pinned(host_x, 0, x.bytes())?,
        asked: pinned(a.asked.0, a.asked.1, ask_blocks(a.rows) * size_of::<u32>())?,
        count: word("assignments", ids.len())?,
        experts: word("experts", a.experts)?,
        vectors: word("values of the experts' inputs", x.len() / 8)?,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("ask")?;
    // SAFETY: sizes checked above; pinned memory is the device's as well.
    unsafe { stream.launch(kernel, Launch { grid: [ask_blocks(a.rows), 1, 1], block: BLOCK, shared: 0 }, &params) }
}

/// Arguments of [`fetch`].
pub(crate) struct Fetch<'a> {
    /// Memory of flags, and the byte at which two words are: whether there is an answer ([`ANSWERED`], or another value but 0
    /// if there is none), and its rows.
    pub(crate) answered: (&'a Pinned, usize),
    /// The rows, `[rows, width]`, from its beginning.
    pub(crate) from: &'a Pinned,
    /// `[places, width]`, whose last rows they become.
    pub(crate) to: &'a Buffer<u16>,
    /// `[1]`, set if there is no answer.
    pub(crate) bad: &'a Buffer<u32>,
    pub(crate) width: usize,
}

/// The value of a flag that says that an answer is there.
pub(crate) const ANSWERED: u32 = 1;

#[derive(Clone, Copy)]
#[repr(C)]
struct FetchParams {
    answered: u64,
    from: u64,
    to: u64,
    bad: u64,
    places: u32,
    row_vectors: u32,
}
// SAFETY: mirrors `FetchParams`.
unsafe impl Params for FetchParams {}

/// Waits on the device for the host's answer, and takes it over.
pub(crate) fn fetch(stream: &Stream, a: &Fetch<'_>) -> Result<()> {
    multiple("hidden_size", a.width, 8)?;
    exact("the step's flag", a.bad, 1)?;
    let places = a.to.len() / a.width;
    exact("the experts' output", a.to, places * a.width)?;
    let params = FetchParams {
        answered: pinned(a.answered.0, a.answered.1, 2 * size_of::<u32>())?,
        from: pinned(a.from, 0, a.to.bytes())?,
        to: a.to.address(),
        bad: a.bad.address(),
        places: word("places of assignments", places)?,
        row_vectors: word("hidden_size", a.width / 8)?,
    };
    let kernel = stream.gpu().kernel("fetch")?;
    let grid = [places.clamp(1, FETCH_BLOCKS), 1, 1];
    // SAFETY: sizes checked above; pinned memory is the device's as well.
    unsafe { stream.launch(kernel, Launch { grid, block: BLOCK, shared: 0 }, &params) }
}

/// The address of `bytes` bytes at `at` of pinned memory.
fn pinned(memory: &Pinned, at: usize, bytes: usize) -> Result<u64> {
    if at > memory.len() || bytes > memory.len() - at || !at.is_multiple_of(16) {
        bail!(InvalidArgument, "{bytes} bytes at {at} of {} pinned ones", memory.len());
    }
    Ok(memory.address() as u64 + at as u64)
}
