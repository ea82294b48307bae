//! `kernels/insert.cu` and `kernels/compressor.cu`: what a step adds to the cache.

use super::super::memory::{Buffer, Plain};
use super::super::stream::Stream;
use super::{HEAD_DIM, INDEX_DIM, KEY_BYTES, Launch, Params, ROPE_DIM, ROW_BYTES, at_least, exact, multiple, word};
use crate::error::{Result, bail};

/// One sequence of a step, as kernels see it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Sequence {
    /// Position of its first new token.
    pub(crate) start: u32,
    /// Row of that token in the step.
    pub(crate) first_row: u32,
    /// New tokens; 0 for an idle row, which is a sequence without pages.
    pub(crate) rows: u32,
    /// 0.
    pub(crate) unused: u32,
}
// SAFETY: four numbers.
unsafe impl Plain for Sequence {}

/// Pages of one kind of one layer: page i of sequence s lies at `memory[ids[s, i] * page_bytes]`.
#[derive(Clone, Copy)]
pub(crate) struct Pages<'a> {
    /// All pages of the bucket.
    pub(crate) memory: &'a Buffer<u8>,
    /// `[sequences, pitch]`, each less than the number of pages: the promise of whoever makes the table.
    pub(crate) ids: &'a Buffer<u32>,
    pub(crate) pitch: usize,
    pub(crate) page_bytes: usize,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawPages {
    base: u64,
    ids: u64,
    pitch: u32,
    page_bytes: u32,
}

impl Pages<'_> {
    /// Checks the table of `sequences` sequences with at least `pages` pages each.
    pub(super) fn raw(&self, what: &str, sequences: usize, pages: usize) -> Result<RawPages> {
        exact(what, self.ids, sequences * self.pitch)?;
        if self.pitch < pages || self.page_bytes == 0 {
            bail!(InvalidArgument, "{what}: {} pages of {} bytes; {pages} are needed", self.pitch, self.page_bytes);
        }
        multiple(what, self.page_bytes, 8)?;
        multiple(what, self.memory.len(), self.page_bytes)?;
        Ok(RawPages {
            base: self.memory.address(),
            ids: self.ids.address(),
            pitch: word(what, self.pitch)?,
            page_bytes: word(what, self.page_bytes)?,
        })
    }
}

/// Arguments of [`insert`].
pub(crate) struct Insert<'a> {
    /// `[rows, heads, 512]`, in place.
    pub(crate) q: &'a Buffer<u16>,
    /// `[rows, 512]`.
    pub(crate) kv: &'a Buffer<u16>,
    /// `[512]`.
    pub(crate) norm: &'a Buffer<f32>,
    /// `[rows, 32]`.
    pub(crate) turns: &'a Buffer<[f32; 2]>,
    /// `[rows, ROW_BYTES]`.
    pub(crate) staged: &'a Buffer<u8>,
    pub(crate) heads: usize,
    pub(crate) eps: f32,
    /// The head norm rounds each step, as the official code does.
    pub(crate) stepwise: bool,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct InsertParams {
    q: u64,
    kv: u64,
    weight: u64,
    turns: u64,
    staged: u64,
    heads: u32,
    eps: f32,
    stepwise: u32,
    pad: u32,
}
// SAFETY: mirrors `InsertParams`.
unsafe impl Params for InsertParams {}

impl Insert<'_> {
    /// Refuses buffers of other sizes.
    pub(super) fn check(&self) -> Result<()> {
        let rows = self.kv.len() / HEAD_DIM;
        exact("the KV values", self.kv, rows * HEAD_DIM)?;
        exact("the queries", self.q, rows * self.heads * HEAD_DIM)?;
        exact("the KV norm", self.norm, HEAD_DIM)?;
        exact("the rotations", self.turns, rows * (ROPE_DIM / 2))?;
        exact("the staged window rows", self.staged, rows * ROW_BYTES)
    }
}

/// Norm and rotation of queries; norm, rotation, quantisation and storing of the step's window rows.
pub(crate) fn insert(stream: &Stream, a: &Insert<'_>) -> Result<()> {
    a.check()?;
    let rows = a.kv.len() / HEAD_DIM;
    let params = InsertParams {
        q: a.q.address(),
        kv: a.kv.address(),
        weight: a.norm.address(),
        turns: a.turns.address(),
        staged: a.staged.address(),
        heads: word("heads", a.heads)?,
        eps: a.eps,
        stepwise: u32::from(a.stepwise),
        pad: 0,
    };
    let kernel = stream.gpu().kernel("insert")?;
    let launch = Launch { grid: [(a.heads + 1).div_ceil(8), rows, 1], block: 256, shared: 0 };
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, launch, &params) }
}

/// Arguments of [`window_commit`].
pub(crate) struct WindowCommit<'a> {
    /// `[layers, rows, ROW_BYTES]`.
    pub(crate) staged: &'a Buffer<u8>,
    /// Rings of all layers; the table is `[layers, sequences, pitch]`.
    pub(crate) ring: Pages<'a>,
    pub(crate) layers: usize,
    /// They lie within the rows.
    pub(crate) sequences: &'a Buffer<Sequence>,
    /// `[1]`: if it is not 0, nothing is moved.
    pub(crate) bad: &'a Buffer<u32>,
    pub(crate) window: usize,
    /// Most rows of any sequence.
    pub(crate) most_rows: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CommitParams {
    staged: u64,
    ring: RawPages,
    sequences: u64,
    bad: u64,
    staged_bytes: u64,
    ring_ids: u32,
    window: u32,
}
// SAFETY: mirrors `CommitParams`.
unsafe impl Params for CommitParams {}

/// Moves the last staged rows of each sequence into its rings.
pub(crate) fn window_commit(stream: &Stream, a: &WindowCommit<'_>) -> Result<()> {
    let (layers, sequences) = (a.layers.max(1), a.sequences.len());
    multiple("the staged window rows", a.staged.len(), layers * ROW_BYTES)?;
    exact("the flag of a step", a.bad, 1)?;
    let staged_bytes = a.staged.len() / layers;
    let params = CommitParams {
        staged: a.staged.address(),
        ring: a.ring.raw("the window rings", layers * sequences, a.window.div_ceil(64))?,
        sequences: a.sequences.address(),
        bad: a.bad.address(),
        staged_bytes: staged_bytes as u64,
        ring_ids: word("ring pages of a layer", sequences * a.ring.pitch)?,
        window: word("sliding_window", a.window)?,
    };
    let kernel = stream.gpu().kernel("window_commit")?;
    let grid = [a.window.min(a.most_rows), sequences, layers];
    // SAFETY: sizes checked above; the sequences' rows and the page ids are the caller's promise.
    unsafe { stream.launch(kernel, Launch { grid, block: 96, shared: 0 }, &params) }
}

/// Which compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compressor {
    /// Ratio 4, KV rows.
    Main4,
    /// Ratio 4, index keys.
    Index4,
    /// Ratio 128, KV rows.
    Main128,
}

impl Compressor {
    /// Channels of an entry.
    pub(crate) const fn dim(self) -> usize {
        if matches!(self, Self::Index4) { INDEX_DIM } else { HEAD_DIM }
    }

    /// Tokens of an entry.
    pub(crate) const fn ratio(self) -> usize {
        if matches!(self, Self::Main128) { 128 } else { 4 }
    }

    /// Channels of a token's values and gates.
    pub(crate) const fn width(self) -> usize {
        if matches!(self, Self::Main128) { HEAD_DIM } else { 2 * self.dim() }
    }

    /// float32 values of the state.
    pub(crate) const fn state_len(self) -> usize {
        if matches!(self, Self::Main128) { 3 * HEAD_DIM } else { 24 * self.dim() }
    }

    /// Pages of the state.
    pub(crate) const fn state_pages(self) -> usize {
        (4 * self.state_len()).div_ceil(self.page_bytes())
    }

    /// Entries of a page.
    pub(crate) const fn per_page(self) -> usize {
        if matches!(self, Self::Main128) { 2 } else { 64 }
    }

    /// Bytes of a page of its bucket.
    pub(crate) const fn page_bytes(self) -> usize {
        self.per_page() * if matches!(self, Self::Index4) { KEY_BYTES } else { ROW_BYTES }
    }
}

/// Arguments of [`compress`].
pub(crate) struct Compress<'a> {
    pub(crate) kind: Compressor,
    /// `[rows, width]`.
    pub(crate) values: &'a Buffer<f32>,
    /// `[rows, width]`.
    pub(crate) gates: &'a Buffer<f32>,
    /// `[ratio, width]`.
    pub(crate) ape: &'a Buffer<f32>,
    /// `[dim]`.
    pub(crate) norm: &'a Buffer<f32>,
    /// `[rows, 32]` of the entries' positions.
    pub(crate) turns: &'a Buffer<[f32; 2]>,
    /// `[rows]` sequence of each row.
    pub(crate) sequence: &'a Buffer<u32>,
    pub(crate) sequences: &'a Buffer<Sequence>,
    pub(crate) entries: Pages<'a>,
    /// State before the step, and pages of its own for the one after.
    pub(crate) state: Pages<'a>,
    pub(crate) fresh: Pages<'a>,
    pub(crate) eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CompressParams {
    u: u64,
    g: u64,
    ape: u64,
    weight: u64,
    turns: u64,
    sequence: u64,
    sequences: u64,
    pub(super) entries: RawPages,
    state: RawPages,
    fresh: RawPages,
    count: u32,
    eps: f32,
}
// SAFETY: mirrors `CompressParams`.
unsafe impl Params for CompressParams {}

impl Compress<'_> {
    /// What the kernels take, once every size is checked.
    pub(super) fn params(&self) -> Result<CompressParams> {
        let (rows, kind) = (self.sequence.len(), self.kind);
        exact("the compressor's values", self.values, rows * kind.width())?;
        exact("the compressor's gates", self.gates, rows * kind.width())?;
        exact("the compressor's ape", self.ape, kind.ratio() * kind.width())?;
        exact("the compressor's norm", self.norm, kind.dim())?;
        exact("the entries' rotations", self.turns, rows * (ROPE_DIM / 2))?;
        let count = self.sequences.len();
        at_least("the rows of a step", self.sequence, count)?;
        let state_pages = kind.state_pages();
        for pages in [&self.entries, &self.state, &self.fresh] {
            if pages.page_bytes != kind.page_bytes() {
                bail!(InvalidArgument, "pages of {} bytes for a {kind:?} compressor", pages.page_bytes);
            }
        }
        Ok(CompressParams {
            u: self.values.address(),
            g: self.gates.address(),
            ape: self.ape.address(),
            weight: self.norm.address(),
            turns: self.turns.address(),
            sequence: self.sequence.address(),
            sequences: self.sequences.address(),
            entries: self.entries.raw("the table of entries", count, 1)?,
            state: self.state.raw("the table of states", count, state_pages)?,
            fresh: self.fresh.raw("the table of new states", count, state_pages)?,
            count: word("sequences", count)?,
            eps: self.eps,
        })
    }

    /// Ratio 4: a block a row and one a slot of each new state. Ratio 128: a block a group that the rows may have a part of.
    pub(super) fn launch(&self) -> Launch {
        let (rows, sequences) = (self.sequence.len(), self.sequences.len());
        let (blocks, block) = match self.kind {
            Compressor::Main128 if rows == sequences => (sequences, HEAD_DIM as u32),
            Compressor::Main128 => (2 * sequences + rows.div_ceil(self.kind.ratio()), HEAD_DIM as u32),
            _ => (rows + 4 * sequences, 128),
        };
        Launch { grid: [blocks, 1, 1], block, shared: 0 }
    }
}

/// Feeds the rows to a compressor: entries they complete go to their pages, the new state to `fresh`. Each sequence has
/// at least one row; one that says 0 is idle, with a row whose position is 0.
pub(crate) fn compress(stream: &Stream, a: &Compress<'_>) -> Result<()> {
    let params = a.params()?;
    let kernel = stream.gpu().kernel(match a.kind {
        Compressor::Main4 => "compress4_main",
        Compressor::Index4 => "compress4_index",
        Compressor::Main128 => "compress128",
    })?;
    // SAFETY: sizes checked above; page ids and sequences are the caller's promise.
    unsafe { stream.launch(kernel, a.launch(), &params) }
}
