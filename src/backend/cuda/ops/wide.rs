//! `kernels/wide.cu`: products of many tokens on Hopper's matrix unit wgmma, with the bits of the portable kernels.
//!
//! The inputs are arranged first, into images that the products read: memory that the caller lends. Without it, or on
//! another device, the portable kernels run.

use super::super::device::Prefer;
use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::linear::{Job, MAX_JOBS, Matrix, RawJob, Weight, check};
use super::moe::{ExpertParams, Grouping};
use super::{Launch, Params, word};
use crate::error::{Result, bail};

/// Rows and tokens of a tile, tokens of an image, columns of a block.
pub(super) const TILE: usize = 128;
pub(super) const IMAGE_TOKENS: usize = 64;
pub(super) const BLOCK: usize = 128;
pub(super) const IMAGE_BYTES: usize = IMAGE_TOKENS * BLOCK * 2;
const THREADS: u32 = 512;
/// Tokens below which a product is not cut for want of workspace.
const FEWEST_TOKENS: usize = 512;

/// Shared memory of a block whose weights have `block_bytes` a row and 128 columns: as `Wide` in the kernel, rings of
/// weights and of inputs, the totals, two barriers a stage.
fn shared(block_bytes: usize) -> usize {
    let (weights, weight_stages) =
        if block_bytes == 64 { (TILE * 68, 7) } else { (TILE * block_bytes, 512 / block_bytes) };
    let input_stages = 3;
    weight_stages * weights
        + input_stages * (2 * IMAGE_BYTES + 128)
        + TILE * TILE * 4
        + 16 * (weight_stages + input_stages)
}

/// float32 values of workspace that the images of one input `[tokens, cols]` take.
pub(crate) fn images_len(cols: usize, tokens: usize) -> usize {
    tokens.next_multiple_of(TILE) * cols / 2
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct Arranged {
    x: u64,
    image: u64,
    stride: u32,
    cols: u32,
    format: u32,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ArrangeParams {
    inputs: [Arranged; MAX_JOBS],
    tokens: u32,
    unused: u32,
}
// SAFETY: mirrors `ArrangeParams`.
unsafe impl Params for ArrangeParams {}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct WideJob {
    weight: Matrix,
    image: u64,
    y: u64,
    y_stride: u32,
    y_f32: u32,
    first_tile: u32,
    unused: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct WideParams {
    jobs: [WideJob; MAX_JOBS],
    count: u32,
    tokens: u32,
    row_tiles: u32,
    unused: u32,
}
// SAFETY: mirrors `WideParams`.
unsafe impl Params for WideParams {}

/// Inputs of several products, each once, with the places of their images in a workspace.
pub(super) struct Images {
    inputs: [Arranged; MAX_JOBS],
    count: usize,
    /// Tokens, a multiple of a tile's, of which the workspace holds all images.
    pub(super) tokens: usize,
}

impl Images {
    pub(super) fn of(jobs: &[Job<'_>], tokens: usize, workspace: &Buffer<f32>) -> Self {
        let mut images = Self { inputs: Default::default(), count: 0, tokens: 0 };
        for job in jobs.iter().take(MAX_JOBS) {
            if images.find(job).is_none() {
                images.inputs[images.count] = key(job);
                images.count += 1;
            }
        }
        let inputs = &mut images.inputs[..images.count];
        let token: usize = inputs.iter().map(|input| 2 * input.cols as usize).sum();
        images.tokens = (4 * workspace.len() / token.max(1) / TILE * TILE).min(tokens.next_multiple_of(TILE));
        let mut at = workspace.address();
        for input in inputs {
            input.image = at;
            at += (images.tokens * 2 * input.cols as usize) as u64;
        }
        images
    }

    pub(super) fn find(&self, job: &Job<'_>) -> Option<u64> {
        let same = |input: &&Arranged| Arranged { image: 0, ..**input } == key(job);
        self.inputs[..self.count].iter().find(same).map(|input| input.image)
    }
}

/// What makes two inputs the same; the storage of the weights decides how columns are arranged.
fn key(job: &Job<'_>) -> Arranged {
    let format = if matches!(job.weight, Weight::Bf16(_)) { 3 } else { 0 };
    Arranged { x: job.x.address(), image: 0, stride: job.x_stride as u32, cols: job.cols as u32, format, unused: 0 }
}

/// Whether the device has these kernels and they are the faster ones. Many tokens are cut where the workspace is small.
pub(super) fn suits(stream: &Stream, jobs: &[Job<'_>], tokens: usize, workspace: &Buffer<f32>) -> bool {
    let gpu = stream.gpu();
    let rows: usize = jobs.iter().map(|job| job.rows.div_ceil(TILE)).sum();
    let waves = (rows * tokens.div_ceil(TILE)).div_ceil(gpu.limits().multiprocessors as usize);
    // a tile of a multiprocessor takes as long as the whole device with the portable kernels takes for a third of its
    // multiprocessors in tiles
    let is_faster = 3 * rows * tokens > waves * gpu.limits().multiprocessors as usize * TILE;
    gpu.has("linear_wide_e4m3")
        && (gpu.prefers(Prefer::Own) || gpu.prefers(Prefer::Fastest) && is_faster)
        && workspace.address().is_multiple_of(128)
        && Images::of(jobs, tokens, workspace).tokens >= tokens.next_multiple_of(TILE).min(FEWEST_TOKENS)
}

/// Runs all `jobs`; [`suits`] said yes.
pub(super) fn linear(stream: &Stream, jobs: &[Job<'_>], tokens: usize, workspace: &Buffer<f32>) -> Result<()> {
    if jobs.len() > MAX_JOBS {
        bail!(InvalidArgument, "{} products in one launch; {MAX_JOBS} are possible", jobs.len());
    }
    let mut raw = [RawJob::default(); MAX_JOBS];
    for (job, raw) in jobs.iter().zip(&mut raw) {
        *raw = check(job, tokens)?;
    }
    let images = Images::of(jobs, tokens, workspace);
    for first in (0..tokens).step_by(images.tokens) {
        arrange(stream, &images, first, images.tokens.min(tokens - first))?;
        for (kernel, is_bf16) in [("linear_wide_e4m3", false), ("linear_wide_bf16", true)] {
            let own = |(job, _): &(&Job<'_>, &RawJob)| matches!(job.weight, Weight::Bf16(_)) == is_bf16;
            let count = word("tokens", images.tokens.min(tokens - first))?;
            let mut params = WideParams { jobs: Default::default(), count: 0, tokens: count, row_tiles: 0, unused: 0 };
            for (job, raw) in jobs.iter().zip(&raw).filter(own) {
                params.jobs[params.count as usize] = WideJob {
                    weight: raw.weight,
                    image: images.find(job).expect("every job's input is among the images"),
                    y: raw.y + (first * job.y_stride * if raw.y_f32 > 0 { 4 } else { 2 }) as u64,
                    y_stride: raw.y_stride,
                    y_f32: raw.y_f32,
                    first_tile: params.row_tiles,
                    unused: 0,
                };
                params.count += 1;
                params.row_tiles += word("row tiles", job.rows.div_ceil(TILE))?;
            }
            let tiles = params.row_tiles as usize * images.tokens.min(tokens - first).div_ceil(TILE);
            // SAFETY: `check` saw weights, inputs and outputs, `Images::of` the workspace.
            unsafe { walk(stream, kernel, tiles, if is_bf16 { 256 } else { 128 }, &params)? };
        }
    }
    Ok(())
}

/// Writes the images of `count` tokens from `first`.
pub(super) fn arrange(stream: &Stream, images: &Images, first: usize, count: usize) -> Result<()> {
    let mut params = ArrangeParams { inputs: images.inputs, tokens: word("tokens", count)?, unused: 0 };
    let mut blocks = 0;
    for input in &mut params.inputs[..images.count] {
        input.x += 2 * first as u64 * u64::from(input.stride);
        blocks = blocks.max(input.cols as usize / BLOCK);
    }
    let grid = [count.next_multiple_of(TILE) / IMAGE_TOKENS, blocks, images.count];
    let kernel = stream.gpu().kernel("arrange")?;
    // SAFETY: `check` saw the inputs, `Images::of` the workspace.
    unsafe { stream.launch(kernel, Launch { grid, block: 256, shared: 0 }, &params) }
}

/// A block a multiprocessor, or fewer.
///
/// # Safety
/// As [`Stream::launch`].
unsafe fn walk<P: Params>(stream: &Stream, kernel: &str, tiles: usize, block_bytes: usize, params: &P) -> Result<()> {
    let grid = [tiles.min(stream.gpu().limits().multiprocessors as usize), 1, 1];
    let kernel = stream.gpu().kernel(kernel)?;
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, Launch { grid, block: THREADS, shared: shared(block_bytes) }, params) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ArrangeExpertsParams {
    x: u64,
    order: u64,
    bounds: u64,
    tile_expert: u64,
    tile_first: u64,
    totals: u64,
    image: u64,
    cols: u32,
    top_k: u32,
    format: u32,
    unused: u32,
}
// SAFETY: mirrors `ArrangeExpertsParams`.
unsafe impl Params for ArrangeExpertsParams {}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertWideParams {
    data: [u64; 2],
    scales: [u64; 2],
    image: u64,
    bounds: u64,
    tile_expert: u64,
    tile_first: u64,
    totals: u64,
    y: u64,
    halves: u32,
    rows: u32,
    cols: u32,
    format: u32,
}
// SAFETY: mirrors `ExpertWideParams`.
unsafe impl Params for ExpertWideParams {}

impl Grouping {
    /// float32 values of workspace that the images of an expert product's input with `cols` columns take.
    pub(crate) fn images_len(&self, cols: usize) -> usize {
        self.most_tiles() * IMAGE_TOKENS * cols / 2
    }
}

/// As [`suits`], for the experts of a step of many tokens.
pub(super) fn suits_experts(stream: &Stream, g: &Grouping, cols: usize, workspace: &Buffer<f32>) -> bool {
    stream.gpu().has("expert_wide_e2m1")
        && !stream.gpu().prefers(Prefer::Portable)
        && workspace.address().is_multiple_of(128)
        && g.images_len(cols) <= workspace.len()
}

/// Writes the images of the inputs of the product that `p` describes.
///
/// # Safety
/// As [`Stream::launch`] for `p` and `workspace`, of [`Grouping::images_len`].
pub(super) unsafe fn arrange_experts(
    stream: &Stream,
    g: &Grouping,
    p: &ExpertParams,
    workspace: &Buffer<f32>,
) -> Result<()> {
    let params = ArrangeExpertsParams {
        x: p.x,
        order: p.order,
        bounds: p.bounds,
        tile_expert: p.tile_expert,
        tile_first: p.tile_first,
        totals: p.totals,
        image: workspace.address(),
        cols: p.cols,
        top_k: p.top_k,
        format: p.format,
        unused: 0,
    };
    let grid = [g.most_tiles(), p.cols as usize / BLOCK, 1];
    let kernel = stream.gpu().kernel("arrange_experts")?;
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, Launch { grid, block: 256, shared: 0 }, &params) }
}

/// The product that `p` describes; [`suits_experts`] said yes.
///
/// # Safety
/// As [`Stream::launch`] for `p`.
pub(super) unsafe fn experts(stream: &Stream, g: &Grouping, p: &ExpertParams, workspace: &Buffer<f32>) -> Result<()> {
    // SAFETY: the caller's contract; `suits_experts` saw the workspace.
    unsafe { arrange_experts(stream, g, p, workspace)? };
    let wide = ExpertWideParams {
        data: p.data,
        scales: p.scales,
        image: workspace.address(),
        bounds: p.bounds,
        tile_expert: p.tile_expert,
        tile_first: p.tile_first,
        totals: p.totals,
        y: p.y,
        halves: p.halves,
        rows: p.rows,
        cols: p.cols,
        format: p.format,
    };
    let tiles = g.most_tiles() * (p.halves * p.rows) as usize / TILE;
    let (kernel, block_bytes) = if p.format == 2 { ("expert_wide_e2m1", 64) } else { ("expert_wide_e4m3", 128) };
    // SAFETY: as above.
    unsafe { walk(stream, kernel, tiles, block_bytes, &wide) }
}
