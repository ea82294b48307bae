//! `kernels/linear.cu`: products with dense weights, several matrices in one launch.

use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::{Launch, Params, at_least, multiple, wide, word};
use crate::error::{Result, bail};

/// Matrices of one launch.
pub(super) const MAX_JOBS: usize = 16;
/// Columns whose sums are added as one; see `kernels/product.cuh`.
const SLICE: usize = 512;
/// Most tokens of the kernel that is bound by the weights' bytes.
const FEW: usize = 16;
/// Bytes of the rings of a block whose weights flow through shared memory (`kernels/few.cuh`), and of the sums that it has
/// room for at least: below 99 KB in all, as every device has.
const RING_BYTES: usize = 8 * 5 * (2048 + 128);
const SUMS_BYTES: usize = 8 << 10;
/// Bytes of weights a multiprocessor from which it has two blocks.
const TWO_BLOCKS: usize = 180 << 10;
/// Rows of a tile.
const TILE_HEIGHT: usize = 16;
/// Rows and tokens of a block with many tokens, and its shared memory.
const TILE: [usize; 2] = [128, 64];
/// Enough blocks to keep a device busy; fewer are cut along the columns.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// A weight matrix on the device, in checkpoint storage.
#[derive(Clone)]
pub(crate) enum Weight {
    /// One E8M0 byte per 128x128 tile.
    E4m3 { data: Buffer<u8>, scales: Buffer<u8> },
    /// One float32 per tile (the `-Base` releases).
    E4m3F32 { data: Buffer<u8>, scales: Buffer<f32> },
    /// bfloat16.
    Bf16(Buffer<u16>),
}

/// Where a product goes, `[tokens, stride]`.
#[derive(Clone)]
pub(crate) enum Output {
    Bf16(Buffer<u16>),
    F32(Buffer<f32>),
}

impl Output {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(b) => b.len(),
            Self::F32(b) => b.len(),
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::Bf16(b) => b.address(),
            Self::F32(b) => b.address(),
        }
    }
}

/// One product `y = W x`.
pub(crate) struct Job<'a> {
    pub(crate) weight: &'a Weight,
    /// Rows `first_row..first_row + rows` of the stored matrix are taken.
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// `[tokens, x_stride]`, the first `cols` of each row.
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) x_stride: usize,
    pub(crate) y: Output,
    /// Values from one token's output to the next.
    pub(crate) y_stride: usize,
}

impl<'a> Job<'a> {
    /// The same product once more.
    pub(super) fn again(&self) -> Self {
        Self { y: self.y.clone(), ..*self }
    }

    /// The same for rows of `x`, whose first rows are the product's from `first` on.
    pub(crate) fn of_rows(&self, first: usize, x: &'a Buffer<u16>) -> Result<Self> {
        let y = match &self.y {
            Output::Bf16(y) => Output::Bf16(y.slice(first * self.y_stride..y.len())?),
            Output::F32(y) => Output::F32(y.slice(first * self.y_stride..y.len())?),
        };
        Ok(Self { x, y, ..*self })
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Matrix {
    pub(super) data: u64,
    pub(super) scales: u64,
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) first_row: u32,
    pub(super) format: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawJob {
    pub(super) weight: Matrix,
    x: u64,
    pub(super) y: u64,
    x_stride: u32,
    pub(super) y_stride: u32,
    pub(super) y_f32: u32,
    pub(super) first_tile: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LinearParams {
    jobs: [RawJob; MAX_JOBS],
    parts: u64,
    count: u32,
    tokens: u32,
}
// SAFETY: mirrors `LinearParams`.
unsafe impl Params for LinearParams {}

#[derive(Clone, Copy)]
#[repr(C)]
struct JoinParams {
    linear: LinearParams,
    slices: u32,
    pad: u32,
}
// SAFETY: mirrors `JoinParams`.
unsafe impl Params for JoinParams {}

/// Tiles of 16 rows that a block of 8 warps takes of a matrix with `cols` columns, decided as in the kernel.
pub(super) fn few_rows(cols: usize) -> usize {
    let lanes = match cols.div_ceil(SLICE) {
        5.. => 8,
        3 | 4 => 4,
        2 => 2,
        _ => 1,
    };
    8 / lanes * 16
}

/// Bytes of shared memory of a block with `tiles` tiles of 8 tokens.
pub(super) fn few_shared(cols: usize, tiles: usize) -> usize {
    few_rows(cols) / 16 * cols.div_ceil(SLICE) * tiles * 128 * 4
}

/// Bytes of shared memory of a block of `kernels/few.cuh`, or for one token `one.cuh`: rings, a token's inputs, and sums of a
/// round of tiles at least.
pub(super) fn stream_shared(cols: usize, tokens: usize) -> usize {
    let round = few_rows(cols) * cols.div_ceil(SLICE) * tokens * 4;
    let (inputs, sums) = if tokens == 1 { (8 * SLICE * 2, SUMS_BYTES / 2) } else { (0, SUMS_BYTES) };
    RING_BYTES + inputs + round.max(sums)
}

/// Bytes of shared memory of a block with many tokens, as `tiled_bytes` of `product.cuh`: two stages of weights of
/// `block_bytes` a row and 128 columns, inputs and scales, and the sums of what has narrow weights.
pub(super) fn many_shared(block_bytes: usize, scale_bytes: usize) -> usize {
    let sums = if block_bytes < 256 { TILE[0] * TILE[1] * 4 } else { 0 };
    2 * (TILE[0] * block_bytes + TILE[1] * 256 + scale_bytes) + sums
}

/// float32 values of workspace that [`linear`] may use for `rows` outputs of `tokens` tokens. Where many tokens are sure to
/// be many, [`super::images_len`] of each different input is enough.
pub(crate) fn workspace_len(rows: usize, cols: usize, tokens: usize) -> usize {
    let parts = rows.next_multiple_of(TILE[0]) * tokens.next_multiple_of(TILE[1]) * cols.div_ceil(SLICE);
    parts.max(wide::images_len(cols, tokens))
}

/// Runs all `jobs` on the same tokens. `workspace` lets few tokens use the whole device, and many tokens the kernels for
/// Hopper; a smaller one is slower, never different: sums have one order (`kernels/product.cuh`).
pub(crate) fn linear(stream: &Stream, jobs: &[Job<'_>], tokens: usize, workspace: Option<&Buffer<f32>>) -> Result<()> {
    if tokens == 0 {
        return Ok(());
    }
    if tokens <= FEW {
        return few(stream, jobs, tokens);
    }
    if let Some(workspace) = workspace.filter(|w| wide::suits(stream, jobs, tokens, w)) {
        return wide::linear(stream, jobs, tokens, workspace);
    }
    // a kernel a kind of storage
    let is_bf16 = |job: &&Job<'_>| matches!(job.weight, Weight::Bf16(_));
    let (wide, narrow): (Vec<&Job<'_>>, Vec<&Job<'_>>) = jobs.iter().partition(is_bf16);
    many(stream, &narrow, tokens, workspace, "linear_many_e4m3", many_shared(128, 0))?;
    many(stream, &wide, tokens, workspace, "linear_many_bf16", many_shared(256, 0))
}

/// Up to 16 tokens: bound by the weights' bytes.
fn few(stream: &Stream, jobs: &[Job<'_>], tokens: usize) -> Result<()> {
    if tokens == 1 && jobs.iter().all(|job| streams(stream, job)) {
        return one(stream, jobs);
    }
    let mut params = LinearParams::new(jobs.len(), tokens)?;
    let (mut tiles, mut shared) = (0, 0);
    for (job, raw) in jobs.iter().zip(&mut params.jobs) {
        *raw = check(job, tokens)?;
        raw.first_tile = word("row tiles", tiles)?;
        tiles += job.rows.div_ceil(few_rows(job.cols));
        shared = shared.max(few_shared(job.cols, tokens.div_ceil(8)));
    }
    let kernel = stream.gpu().kernel(if tokens <= 8 { "linear_few8" } else { "linear_few16" })?;
    // SAFETY: sizes checked for each job.
    unsafe { stream.launch(kernel, Launch { grid: [tiles, 1, 1], block: 256, shared }, &params) }
}

/// Whether `kernels/one.cuh` takes this job of one token.
pub(super) fn streams(stream: &Stream, job: &Job<'_>) -> bool {
    let shared = stream_shared(job.cols, 1);
    job.rows.is_multiple_of(TILE_HEIGHT) && shared <= stream.gpu().limits().shared_bytes as usize
}

/// One token: a block or two a multiprocessor, which the jobs share by their bytes.
fn one(stream: &Stream, jobs: &[Job<'_>]) -> Result<()> {
    let mut params = LinearParams::new(jobs.len(), 1)?;
    let all: usize = jobs.iter().map(weight_bytes).sum();
    let blocks = stream_blocks(stream, all);
    let (mut first, mut before, mut shared) = (0, 0, 0);
    for (job, raw) in jobs.iter().zip(&mut params.jobs) {
        *raw = check(job, 1)?;
        raw.first_tile = word("blocks", first)?;
        before += weight_bytes(job);
        let share = (before * blocks + all / 2) / all;
        first = share.clamp(first + 1, first + job.rows / TILE_HEIGHT);
        shared = shared.max(stream_shared(job.cols, 1));
    }
    let kernel = stream.gpu().kernel("linear_one")?;
    // SAFETY: sizes checked for each job.
    unsafe { stream.launch(kernel, Launch { grid: [first, 1, 1], block: 256, shared }, &params) }
}

pub(super) fn weight_bytes(job: &Job<'_>) -> usize {
    job.rows * job.cols * if matches!(job.weight, Weight::Bf16(_)) { 2 } else { 1 }
}

/// Blocks for so many bytes of weights: one a multiprocessor leaves room for the next kernel's, which then begins earlier.
pub(super) fn stream_blocks(stream: &Stream, bytes: usize) -> usize {
    let multiprocessors = stream.gpu().limits().multiprocessors as usize;
    if bytes >= multiprocessors * TWO_BLOCKS { 2 * multiprocessors } else { multiprocessors }
}

/// Many tokens: tiles of rows and tokens, and of slices where there are too few of those.
fn many(
    stream: &Stream,
    jobs: &[&Job<'_>],
    tokens: usize,
    workspace: Option<&Buffer<f32>>,
    kernel: &str,
    shared: usize,
) -> Result<()> {
    let mut params = LinearParams::new(jobs.len(), tokens)?;
    let (mut tiles, mut slices) = (0, 0);
    for (job, raw) in jobs.iter().zip(&mut params.jobs) {
        *raw = check(job, tokens)?;
        raw.first_tile = word("row tiles", tiles)?;
        tiles += job.rows.div_ceil(TILE[0]);
        slices = slices.max(job.cols.div_ceil(SLICE));
    }
    let token_tiles = tokens.div_ceil(TILE[1]);
    let wanted = stream.gpu().limits().multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR;
    let fits = |w: &&Buffer<f32>| w.len() >= tiles * token_tiles * slices * TILE[0] * TILE[1];
    let split = workspace.filter(fits).filter(|_| slices > 1 && tiles * token_tiles < wanted);
    params.parts = split.map_or(0, Buffer::address);
    let depth = if split.is_some() { slices } else { 1 };
    let kernel = stream.gpu().kernel(kernel)?;
    // SAFETY: sizes checked for each job, and that of the workspace above.
    unsafe { stream.launch(kernel, Launch { grid: [tiles, token_tiles, depth], block: 256, shared }, &params)? };
    if split.is_none() {
        return Ok(());
    }
    let join = JoinParams { linear: params, slices: slices as u32, pad: 0 };
    let kernel = stream.gpu().kernel("linear_join")?;
    // SAFETY: as above.
    unsafe { stream.launch(kernel, Launch { grid: [tiles, token_tiles, 8], block: 256, shared: 0 }, &join) }
}

impl LinearParams {
    fn new(count: usize, tokens: usize) -> Result<Self> {
        if count > MAX_JOBS {
            bail!(InvalidArgument, "{count} products in one launch; {MAX_JOBS} are possible");
        }
        let tokens = word("tokens", tokens)?;
        Ok(Self { jobs: Default::default(), parts: 0, count: count as u32, tokens })
    }
}

pub(super) fn check(job: &Job<'_>, tokens: usize) -> Result<RawJob> {
    multiple("the columns of a weight matrix", job.cols, 128)?;
    multiple("the stride of a product's input", job.x_stride, 8)?;
    let last = job.first_row + job.rows;
    let tiles = last.div_ceil(128) * (job.cols / 128);
    let offset = job.first_row * job.cols;
    let mut matrix = Matrix {
        rows: word("rows of a matrix", job.rows)?,
        cols: word("columns of a matrix", job.cols)?,
        first_row: word("the first row", job.first_row)?,
        ..Default::default()
    };
    match job.weight {
        Weight::E4m3 { data, scales } => {
            at_least("an E4M3 matrix", data, last * job.cols)?;
            at_least("the scales of an E4M3 matrix", scales, tiles)?;
            (matrix.data, matrix.scales, matrix.format) = (data.address() + offset as u64, scales.address(), 0);
        }
        Weight::E4m3F32 { data, scales } => {
            at_least("an E4M3 matrix", data, last * job.cols)?;
            at_least("the scales of an E4M3 matrix", scales, tiles)?;
            (matrix.data, matrix.scales, matrix.format) = (data.address() + offset as u64, scales.address(), 1);
        }
        Weight::Bf16(data) => {
            at_least("a bf16 matrix", data, last * job.cols)?;
            (matrix.data, matrix.format) = (data.address() + 2 * offset as u64, 3);
        }
    }
    if matrix.format < 2 && job.first_row > 0 {
        multiple("the first row of an E4M3 band", job.first_row, 128)?;
    }
    if job.x_stride < job.cols || job.y_stride < job.rows {
        bail!(
            InvalidArgument,
            "strides {} and {} of a {} x {} product",
            job.x_stride,
            job.y_stride,
            job.rows,
            job.cols
        );
    }
    at_least("a product's input", job.x, (tokens - 1) * job.x_stride + job.cols)?;
    let needed = (tokens - 1) * job.y_stride + job.rows;
    if job.y.len() < needed {
        bail!(InvalidArgument, "a product's output has {} values; {needed} are needed", job.y.len());
    }
    Ok(RawJob {
        weight: matrix,
        x: job.x.address(),
        y: job.y.address(),
        x_stride: word("a stride", job.x_stride)?,
        y_stride: word("a stride", job.y_stride)?,
        y_f32: u32::from(matches!(job.y, Output::F32(_))),
        first_tile: 0,
    })
}
