//! `kernels/hybrid.cu`: experts that are shared out between the device and the host.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::{Launch, Params, exact, multiple, rows, word};
use crate::error::{Result, bail};

const MAX_TOP_K: usize = 16;

#[derive(Clone, Copy)]
#[repr(C)]
struct DivideParams {
    ids: u64,
    here: u64,
    own: u64,
    count: u32,
    experts: u32,
}
// SAFETY: mirrors `DivideParams`.
unsafe impl Params for DivideParams {}

/// `own[i] = ids[i]` where `here` `[experts]` is 1 for that expert, else the number of experts: nobody's.
pub(crate) fn divide(stream: &Stream, ids: &Buffer<u32>, here: &Buffer<u8>, own: &Buffer<u32>) -> Result<()> {
    exact("the experts that are here", own, ids.len())?;
    let params = DivideParams {
        ids: ids.address(),
        here: here.address(),
        own: own.address(),
        count: word("assignments", ids.len())?,
        experts: word("experts", here.len())?,
    };
    let kernel = stream.gpu().kernel("divide")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, Launch { grid: [ids.len().div_ceil(256), 1, 1], block: 256, shared: 0 }, &params) }
}

/// Arguments of [`combine_all`].
pub(crate) struct CombineAll<'a> {
    /// `[places, width]`.
    pub(crate) routed: &'a Buffer<u16>,
    /// `[tokens, width]`.
    pub(crate) shared: &'a Buffer<u16>,
    /// `[tokens, top_k]` expert of each assignment, wherever it is computed; from `experts` on, nobody's.
    pub(crate) ids: &'a Buffer<u32>,
    /// `[tokens, top_k]` place of each assignment, below the number of places.
    pub(crate) places: &'a Buffer<u32>,
    /// `[tokens, width]`.
    pub(crate) out: &'a Buffer<u16>,
    pub(crate) width: usize,
    pub(crate) experts: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineAllParams {
    routed: u64,
    shared: u64,
    ids: u64,
    places: u64,
    out: u64,
    width: u32,
    top_k: u32,
    experts: u32,
    pad: u32,
}
// SAFETY: mirrors `CombineAllParams`.
unsafe impl Params for CombineAllParams {}

/// Adds each token's experts in order of id, those of the device and those of the host, then the shared expert.
pub(crate) fn combine_all(stream: &Stream, a: &CombineAll<'_>) -> Result<()> {
    multiple("hidden_size", a.width, 8)?;
    let tokens = a.out.len() / a.width;
    exact("the feed-forward output", a.out, tokens * a.width)?;
    exact("the shared expert's output", a.shared, tokens * a.width)?;
    exact("the places of assignments", a.places, a.ids.len())?;
    exact("the experts' output", a.routed, a.ids.len() * a.width)?;
    let top_k = a.ids.len().checked_div(tokens).unwrap_or(0);
    if top_k * tokens != a.ids.len() || top_k > MAX_TOP_K {
        bail!(InvalidArgument, "{} assignments of {tokens} tokens", a.ids.len());
    }
    let params = CombineAllParams {
        routed: a.routed.address(),
        shared: a.shared.address(),
        ids: a.ids.address(),
        places: a.places.address(),
        out: a.out.address(),
        width: word("hidden_size", a.width)?,
        top_k: top_k as u32,
        experts: word("experts", a.experts)?,
        pad: 0,
    };
    let kernel = stream.gpu().kernel("combine_all")?;
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, rows(tokens, 256), &params) }
}
