//! `kernels/attention.cu`, `attention_sm90.cu` and `attention_runs_sm90.cu`: sparse attention over window and entries.

use super::super::device::{Gpu, Limits};
use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::cache::{Pages, RawPages, Sequence};
use super::{HEAD_DIM, Launch, Params, ROPE_DIM, ROW_BYTES, address, at_least, exact, word};
use crate::error::{Result, bail};

/// Most runs that a query's keys are cut into.
const MAX_SPLITS: usize = 32;
/// Fewest keys of a run.
const RUN_KEYS: usize = 128;

/// Entries that queries attend to besides the window.
pub(crate) enum Entries<'a> {
    None,
    /// Chosen ones `[rows, width]`, `counts` `[rows]` of them, of ratio 4.
    Selected {
        pages: Pages<'a>,
        ids: &'a Buffer<u32>,
        counts: &'a Buffer<u32>,
        width: usize,
    },
    /// All that are complete at the query's position, of ratio 128.
    All {
        pages: Pages<'a>,
    },
}

/// How the work is cut.
pub(crate) enum Path<'a> {
    /// One block a query and head block.
    Whole,
    /// A query's keys are cut by their number: few queries use the whole device. `most_keys` bounds the keys of any query;
    /// workspace `[rows, 32, heads, 512]` and `[rows, 32, heads, 2]`.
    Split { most_keys: usize, out: &'a Buffer<f32>, sums: &'a Buffer<[f32; 2]> },
}

/// Arguments of [`attend`].
pub(crate) struct Attention<'a> {
    /// `[rows, heads, 512]`.
    pub(crate) q: &'a Buffer<u16>,
    /// `[rows, heads, 512]`.
    pub(crate) out: &'a Buffer<u16>,
    /// `[heads]`.
    pub(crate) sink: &'a Buffer<f32>,
    /// `[rows, 32]`.
    pub(crate) turns: &'a Buffer<[f32; 2]>,
    /// `[rows]`.
    pub(crate) sequence: &'a Buffer<u32>,
    pub(crate) sequences: &'a Buffer<Sequence>,
    /// `[rows, ROW_BYTES]`.
    pub(crate) staged: &'a Buffer<u8>,
    pub(crate) ring: Pages<'a>,
    pub(crate) entries: Entries<'a>,
    pub(crate) window: usize,
    /// Round the output to the E4M3 grid.
    pub(crate) quantise: bool,
    pub(crate) path: Path<'a>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionParams {
    q: u64,
    out: u64,
    sink: u64,
    turns: u64,
    sequence: u64,
    sequences: u64,
    staged: u64,
    ring: RawPages,
    entries: RawPages,
    selected: u64,
    counts: u64,
    part_out: u64,
    part_sums: u64,
    ratio: u32,
    width: u32,
    heads: u32,
    window: u32,
    quantise: u32,
    pad: u32,
}
// SAFETY: mirrors `AttentionParams`.
unsafe impl Params for AttentionParams {}

#[derive(Clone, Copy)]
#[repr(C)]
struct JoinParams {
    attention: AttentionParams,
    keys: u32,
    pad: u32,
}
// SAFETY: mirrors `JoinParams`.
unsafe impl Params for JoinParams {}

/// Which kernels compute; the bits are not the same. [`attend`] chooses by device and heads, so never by batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionKernel {
    /// For every device.
    Portable,
    /// With Hopper's warpgroup products, 64 heads a block.
    Hopper,
}

/// Arguments of the kernels for Hopper.
#[derive(Clone, Copy)]
#[repr(C)]
struct HopperParams {
    attention: AttentionParams,
    items: u32,
    pieces: u32,
}
// SAFETY: mirrors `HopperParams`.
unsafe impl Params for HopperParams {}

/// Of the kernels for Hopper: heads of a block and keys of a tile; tiles of a run, about; most runs of a query; bytes of a
/// block's shared memory, for keys in order and in runs.
const HOPPER_TILE: usize = 64;
const HOPPER_RUN: usize = 3;
const HOPPER_RUNS: usize = 15;
const HOPPER_WHOLE_SHARED: usize = 209_472;
const HOPPER_RUNS_SHARED: usize = 225_008;
/// Most blocks of heads whose runs are added in small blocks.
const HOPPER_FEW: usize = 8;

/// Heads and keys of a block, and the bytes of its shared memory as in the kernel's `Shape`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    heads: usize,
    keys: usize,
    threads: u32,
}

impl Shape {
    /// The largest block that wastes no whole tile of 16 heads and fits the device. Small ones of 16 heads where `pieces`
    /// (rows times runs) would leave most of the device idle: the same bits as blocks of 64, sooner.
    fn of(heads: usize, pieces: usize, limits: &Limits) -> Self {
        let shape = |heads, keys, threads| Self { heads, keys, threads };
        let shapes = [shape(64, 64, 512), shape(32, 32, 256), shape(16, 64, 256)];
        let fits =
            |s: &Self| heads.next_multiple_of(16).is_multiple_of(s.heads) && s.shared() <= limits.shared_bytes as usize;
        let largest = shapes.into_iter().find(fits).unwrap_or(shapes[2]);
        let is_idle = pieces * heads / 64 < limits.multiprocessors as usize / 2;
        if largest.heads == 64 && is_idle { shapes[2] } else { largest }
    }

    fn shared(self) -> usize {
        let pitch = (HEAD_DIM + 8) * 2;
        (self.heads + self.keys) * pitch + self.heads * ((self.keys + 4) * 4 + (self.keys + 8) * 2 + 4)
    }
}

/// Attention of each query, rotated back. Sequences, page ids and selected entries are the caller's promise.
pub(crate) fn attend(stream: &Stream, a: &Attention<'_>) -> Result<()> {
    let full = a.sink.len().is_multiple_of(HOPPER_TILE) && hopper_kernels(stream.gpu());
    attend_by(stream, a, if full { AttentionKernel::Hopper } else { AttentionKernel::Portable })
}

/// Whether the device and the build have the kernels for Hopper.
pub(crate) fn hopper_kernels(gpu: &Gpu) -> bool {
    gpu.limits().arch == (9, 0) && gpu.kernel("attend_hopper").is_ok()
}

/// The same with the kernels named; those for Hopper need the workspace of whole blocks of 64 heads.
pub(crate) fn attend_by(stream: &Stream, a: &Attention<'_>, kernel: AttentionKernel) -> Result<()> {
    let (rows, heads, count) = (a.sequence.len(), a.sink.len(), a.sequences.len());
    if heads == 0 {
        bail!(InvalidArgument, "attention without heads");
    }
    exact("the queries", a.q, rows * heads * HEAD_DIM)?;
    exact("the attention output", a.out, rows * heads * HEAD_DIM)?;
    exact("the rotations", a.turns, rows * (ROPE_DIM / 2))?;
    exact("the staged window rows", a.staged, rows * ROW_BYTES)?;
    let ring = a.ring.raw("the window ring", count, a.window.div_ceil(64))?;
    let (mut entries, mut selection, mut ratio, mut row_width) = (RawPages::default(), (None, None), 0, 0);
    match &a.entries {
        Entries::None => {}
        Entries::Selected { pages, ids, counts, width } => {
            exact("the selected entries", ids, rows * width)?;
            exact("the counts of selected entries", counts, rows)?;
            entries = pages.raw("the table of entries", count, 1)?;
            (selection, ratio, row_width) = ((Some(*ids), Some(*counts)), 4, *width);
        }
        Entries::All { pages } => {
            entries = pages.raw("the table of entries", count, 1)?;
            ratio = 128;
        }
    }
    let (mut parts, mut most_keys) = ((0, 0), None);
    if let Path::Split { most_keys: keys, out, sums } = &a.path {
        let padded = if kernel == AttentionKernel::Hopper { heads.next_multiple_of(HOPPER_TILE) } else { heads };
        at_least("the attention workspace", out, rows * MAX_SPLITS * padded * HEAD_DIM)?;
        at_least("the attention sums", sums, rows * MAX_SPLITS * heads)?;
        (parts, most_keys) = ((out.address(), sums.address()), Some(*keys));
    }
    let params = AttentionParams {
        q: a.q.address(),
        out: a.out.address(),
        sink: a.sink.address(),
        turns: a.turns.address(),
        sequence: a.sequence.address(),
        sequences: a.sequences.address(),
        staged: a.staged.address(),
        ring,
        entries,
        selected: address(selection.0),
        counts: address(selection.1),
        part_out: parts.0,
        part_sums: parts.1,
        ratio,
        width: word("selected entries", row_width)?,
        heads: word("heads", heads)?,
        window: word("sliding_window", a.window)?,
        quantise: u32::from(a.quantise),
        pad: 0,
    };
    match kernel {
        AttentionKernel::Portable => launch_portable(stream, params, rows, most_keys),
        AttentionKernel::Hopper => launch_hopper(stream, params, rows, most_keys),
    }
}

/// `most_keys` is there if keys are split.
fn launch_portable(stream: &Stream, params: AttentionParams, rows: usize, most_keys: Option<usize>) -> Result<()> {
    let heads = params.heads as usize;
    // window and entries are tiled apart, in tiles of at most 64 keys: two more than the keys alone would need
    let runs = most_keys.map_or(1, |keys| (keys + 2 * 64).div_ceil(RUN_KEYS).min(MAX_SPLITS));
    let shape = Shape::of(heads, rows * runs, stream.gpu().limits());
    let kernel = stream.gpu().kernel(match (shape.heads, most_keys.is_some()) {
        (64, false) => "attend_64",
        (32, false) => "attend_32",
        (_, false) => "attend_16",
        (64, true) => "attend_split_64",
        (32, true) => "attend_split_32",
        (_, true) => "attend_split_16",
    })?;
    // rows are the second dimension, which has 65535: longer steps come in pieces
    let grid = [heads.div_ceil(shape.heads), rows, runs];
    // SAFETY: sizes checked by `attend_by`; the rest is its caller's promise.
    unsafe { stream.launch(kernel, Launch { grid, block: shape.threads, shared: shape.shared() }, &params)? };
    if most_keys.is_none() {
        return Ok(());
    }
    let join = JoinParams { attention: params, keys: shape.keys as u32, pad: 0 };
    let kernel = stream.gpu().kernel("attend_join")?;
    // SAFETY: as above.
    unsafe { stream.launch(kernel, Launch { grid: [heads, rows, 1], block: 128, shared: 0 }, &join) }
}

/// The same.
fn launch_hopper(stream: &Stream, attention: AttentionParams, rows: usize, most_keys: Option<usize>) -> Result<()> {
    let (blocks, device) =
        ((attention.heads as usize).div_ceil(HOPPER_TILE), stream.gpu().limits().multiprocessors as usize);
    let most_tiles = most_keys.map(|keys| most_tiles(keys, attention.window as usize, attention.ratio > 0));
    let pieces = most_tiles.map_or(1, |tiles| hopper_pieces(rows * blocks, tiles, device));
    let items = rows * blocks * pieces;
    let halves = most_tiles.map_or(1, |_| hopper_halves(items, device));
    let params = HopperParams { attention, items: word("attention items", items)?, pieces: pieces as u32 };
    let (kernel, shared) = match most_keys {
        None => ("attend_hopper", HOPPER_WHOLE_SHARED),
        Some(_) => ("attend_hopper_runs", HOPPER_RUNS_SHARED),
    };
    let launch = Launch { grid: [items.min(device), halves, 1], block: 512, shared };
    // SAFETY: as above.
    unsafe { stream.launch(stream.gpu().kernel(kernel)?, launch, &params)? };
    if pieces == 1 {
        return Ok(());
    }
    let (kernel, grid, block) = match rows * blocks {
        0..=HOPPER_FEW => ("attend_hopper_join_few", 16 * blocks, 128),
        _ => ("attend_hopper_join", 4 * blocks, 512),
    };
    let launch = Launch { grid: [grid, rows, 1], block, shared: 0 };
    // SAFETY: as above.
    unsafe { stream.launch(stream.gpu().kernel(kernel)?, launch, &attention) }
}

/// Most tiles of a query with `most_keys` keys. Window and entries are tiled apart, so that both may end with a part of one.
fn most_tiles(most_keys: usize, window: usize, has_entries: bool) -> usize {
    if has_entries { most_keys / HOPPER_TILE + 2 } else { most_keys.min(window).div_ceil(HOPPER_TILE) }
}

/// Blocks that share the runs of a query, so that all `device` multiprocessors have work: results do not depend on it.
fn hopper_pieces(blocks: usize, most_tiles: usize, device: usize) -> usize {
    let runs = most_tiles.div_ceil(HOPPER_RUN).clamp(1, HOPPER_RUNS);
    (device / blocks.max(1)).clamp(1, runs)
}

/// Whether two blocks share the columns of an item's output. Both find the scores, so it is for a device that would be half
/// idle: results do not depend on it.
fn hopper_halves(items: usize, device: usize) -> usize {
    if items * 4 <= device { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(shared_bytes: u32) -> Limits {
        Limits { name: String::new(), arch: (9, 0), multiprocessors: 132, shared_bytes, l2_bytes: 0 }
    }

    /// Pitfall 58.
    #[test]
    fn head_counts_waste_at_most_one_tile_and_fit_the_device() {
        let (hopper, ada) = (device(227 << 10), device(99 << 10));
        let heads = |n, pieces, device: &Limits| Shape::of(n, pieces, device).heads;
        assert_eq!([4, 8, 16, 24, 32, 64, 128].map(|n| heads(n, 4096, &hopper)), [16, 16, 16, 32, 32, 64, 64]);
        assert_eq!([64, 128].map(|n| heads(n, 4096, &ada)), [32, 32]);
        assert_eq!([64, 128].map(|n| heads(n, 1, &hopper)), [16, 16], "few pieces: more, smaller blocks");
        for n in 1..=128 {
            for device in [&hopper, &ada] {
                for pieces in [1, 100, 4096] {
                    let shape = Shape::of(n, pieces, device);
                    let wasted = n.div_ceil(shape.heads) * shape.heads - n;
                    assert!(
                        wasted < 16 && shape.shared() <= device.shared_bytes as usize,
                        "{n} heads, {pieces} pieces"
                    );
                }
            }
        }
    }
    #[test]
    fn few_queries_are_cut_until_the_device_is_full_and_never_beyond_their_runs() {
        let tiles = most_tiles(640, 128, true);
        assert_eq!([1, 8, 44, 64, 128, 4096].map(|blocks| hopper_pieces(blocks, tiles, 132)), [4, 4, 3, 2, 1, 1]);
        let tiles = most_tiles(8320, 128, true);
        assert_eq!([1, 8, 64].map(|blocks| hopper_pieces(blocks, tiles, 132)), [15, 15, 2]);
        assert_eq!(hopper_pieces(1, most_tiles(1000, 128, false), 132), 1, "a window is one run");
        assert_eq!([1, 33, 34, 4096].map(|items| hopper_halves(items, 132)), [2, 2, 1, 1]);
    }
}
