//! `kernels/chain.cu`: products of prompts on Hopper's matrix unit wgmma, whose sums are one chain over all columns.
//!
//! They differ from those of `kernels/product.cuh` by rounding, so nothing here is chosen by speed or by what workspace
//! there is: the caller says which rows are prompts. Weights with float32 scales, and experts in E4M3, have no such kernel
//! and keep their order, which is a property of the model.

use super::super::device::Gpu;
use super::super::memory::Buffer;
use super::super::stream::Stream;
use super::linear::{Job, MAX_JOBS, Matrix, RawJob, Weight, check, linear};
use super::moe::{ExpertFormat, ExpertParams, Grouping, Product};
use super::wide::{IMAGE_BYTES, Images, TILE, arrange, arrange_experts};
use super::{Launch, Params, word};
use crate::error::{Result, bail};

/// Rows of a tile of experts.
const EXPERT_ROWS: usize = 256;
const THREADS: u32 = 384;

/// Shared memory of a block with tiles of `rows` whose weights have `block_bytes` a row and 128 columns: as `Chain` in the
/// kernel, rings of weights and of inputs, outputs on their way, two barriers a stage.
fn shared(rows: usize, block_bytes: usize) -> usize {
    let (input_stages, staged) = (3, 2 * 16 * 128);
    let weights = rows * (block_bytes + if block_bytes == 64 { 4 } else { 0 });
    let inputs = input_stages * 2 * IMAGE_BYTES;
    let weight_stages = (((226 << 10) - inputs - staged) / weights).min(7);
    weight_stages * weights + inputs + staged + 16 * (weight_stages + input_stages)
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ChainJob {
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
struct ChainParams {
    jobs: [ChainJob; MAX_JOBS],
    count: u32,
    tokens: u32,
    row_tiles: u32,
    unused: u32,
}
// SAFETY: mirrors `ChainParams`.
unsafe impl Params for ChainParams {}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertChainParams {
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
// SAFETY: mirrors `ExpertChainParams`.
unsafe impl Params for ExpertChainParams {}

/// Whether the device has these kernels.
pub(crate) fn has_chains(gpu: &Gpu) -> bool {
    gpu.has("linear_chain_e4m3")
}

/// As [`linear`], for prompts. `workspace` holds the images of at least 128 tokens of each different input; a larger one is
/// faster, never different.
pub(crate) fn linear_chain(stream: &Stream, jobs: &[Job<'_>], tokens: usize, workspace: &Buffer<f32>) -> Result<()> {
    let (plain, chained): (Vec<&Job<'_>>, Vec<&Job<'_>>) =
        jobs.iter().partition(|job| matches!(job.weight, Weight::E4m3F32 { .. }));
    if !plain.is_empty() {
        linear(stream, &plain.into_iter().map(Job::again).collect::<Vec<_>>(), tokens, Some(workspace))?;
    }
    if chained.is_empty() || tokens == 0 {
        return Ok(());
    }
    let jobs: Vec<Job<'_>> = chained.into_iter().map(Job::again).collect();
    if jobs.len() > MAX_JOBS {
        bail!(InvalidArgument, "{} products in one launch; {MAX_JOBS} are possible", jobs.len());
    }
    let mut raw = [RawJob::default(); MAX_JOBS];
    for (job, raw) in jobs.iter().zip(&mut raw) {
        *raw = check(job, tokens)?;
    }
    let images = Images::of(&jobs, tokens, workspace);
    if images.tokens == 0 || !workspace.address().is_multiple_of(128) {
        bail!(InvalidArgument, "a workspace of {} values for the inputs of prompts", workspace.len());
    }
    for first in (0..tokens).step_by(images.tokens) {
        let count = images.tokens.min(tokens - first);
        arrange(stream, &images, first, count)?;
        for (kernel, is_bf16) in [("linear_chain_e4m3", false), ("linear_chain_bf16", true)] {
            let own = |(job, _): &(&Job<'_>, &RawJob)| matches!(job.weight, Weight::Bf16(_)) == is_bf16;
            let tokens = word("tokens", count)?;
            let mut params = ChainParams { jobs: Default::default(), count: 0, tokens, row_tiles: 0, unused: 0 };
            for (job, raw) in jobs.iter().zip(&raw).filter(own) {
                params.jobs[params.count as usize] = ChainJob {
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
            let tiles = params.row_tiles as usize * count.div_ceil(TILE);
            let shared = shared(TILE, if is_bf16 { 256 } else { 128 });
            // SAFETY: `check` saw weights, inputs and outputs, `Images::of` the workspace.
            unsafe { walk(stream, kernel, tiles, shared, &params)? };
        }
    }
    Ok(())
}

/// Whether experts of this format have a kernel here.
pub(super) fn has_experts(stream: &Stream, format: ExpertFormat) -> bool {
    format == ExpertFormat::E2m1 && has_chains(stream.gpu())
}

/// The product of prompts' places that `a` and `p` describe; [`has_experts`] said yes.
///
/// # Safety
/// As [`Stream::launch`] for `p`.
pub(super) unsafe fn experts(
    stream: &Stream,
    g: &Grouping,
    a: &Product<'_>,
    p: &ExpertParams,
    workspace: &Buffer<f32>,
) -> Result<()> {
    if g.images_len(a.cols) > workspace.len() || !workspace.address().is_multiple_of(128) {
        bail!(InvalidArgument, "a workspace of {} values for the experts' inputs", workspace.len());
    }
    // SAFETY: the caller's contract; the workspace was seen above.
    unsafe { arrange_experts(stream, g, p, workspace)? };
    let params = ExpertChainParams {
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
    let tiles = g.most_tiles() * a.matrices.len() * a.rows.div_ceil(EXPERT_ROWS);
    // SAFETY: as above.
    unsafe { walk(stream, "expert_chain_e2m1", tiles, shared(EXPERT_ROWS, 64), &params) }
}

/// A block a multiprocessor, or fewer.
///
/// # Safety
/// As [`Stream::launch`].
unsafe fn walk<P: Params>(stream: &Stream, kernel: &str, tiles: usize, shared: usize, params: &P) -> Result<()> {
    let grid = [tiles.min(stream.gpu().limits().multiprocessors as usize), 1, 1];
    let kernel = stream.gpu().kernel(kernel)?;
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, Launch { grid, block: THREADS, shared }, params) }
}
