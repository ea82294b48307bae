//! `kernels/indexer.cu` and `indexer_sm90.cu`: index queries, scores, exact top-k.

use super::super::device::Gpu;
use super::super::memory::{Buffer, Plain};
use super::super::stream::Stream;
use super::cache::{Pages, RawPages};
use super::{INDEX_DIM, KEY_BYTES, Launch, Params, ROPE_DIM, address, at_least, exact, multiple, rows, word};
use crate::error::{Result, bail};

/// Keys of a block, rows of a group.
const SCORE_KEYS: usize = 256;
pub(crate) const GROUP_ROWS: usize = 16;
const MAX_HEADS: usize = 64;
/// Values of a row that a block chooses from, and bytes of its shared memory.
const CHUNK: usize = 16_384;
const SELECT_SHARED: usize = 4 * CHUNK;

/// Of the kernels for Hopper: keys of a page, of which a warpgroup takes one at a time; warpgroups of a block, and pages that
/// each has under way; bytes of a row's queries and weights, and of a page with its barrier, in shared memory.
const HOPPER_PAGE: usize = 64;
const HOPPER_TEAMS: usize = 4;
const HOPPER_STAGES: usize = 4;
const HOPPER_ROW_SHARED: usize = MAX_HEADS * (INDEX_DIM + 2);
const HOPPER_PAGE_SHARED: usize = HOPPER_PAGE * KEY_BYTES + 8;
/// Entries whose highest score is known; most of such groups of a row, and most entries that are chosen.
const HIGHEST_OF: usize = 16;
const MOST_HIGHEST: usize = 16_384;
const MOST_CHOSEN: usize = 1024;

/// Arguments of [`index_query`].
pub(crate) struct IndexQuery<'a> {
    /// `[rows, heads, 128]`, in place.
    pub(crate) q: &'a Buffer<u16>,
    /// `[rows, heads]`, in place.
    pub(crate) weights: &'a Buffer<u16>,
    /// `[rows, 32]`.
    pub(crate) turns: &'a Buffer<[f32; 2]>,
    pub(crate) heads: usize,
    /// Round to E2M1.
    pub(crate) fp4: bool,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct IndexQueryParams {
    q: u64,
    weights: u64,
    turns: u64,
    heads: u32,
    factor: f32,
    fp4: u32,
    pad: u32,
}
// SAFETY: mirrors `IndexQueryParams`.
unsafe impl Params for IndexQueryParams {}

/// Rotation, Hadamard and rounding of index queries, and the constant factor of the head weights.
pub(crate) fn index_query(stream: &Stream, a: &IndexQuery<'_>) -> Result<()> {
    if a.heads == 0 {
        bail!(InvalidArgument, "an indexer without heads");
    }
    let rows = a.weights.len() / a.heads;
    exact("the index weights", a.weights, rows * a.heads)?;
    exact("the index queries", a.q, rows * a.heads * INDEX_DIM)?;
    exact("the rotations", a.turns, rows * (ROPE_DIM / 2))?;
    let params = IndexQueryParams {
        q: a.q.address(),
        weights: a.weights.address(),
        turns: a.turns.address(),
        heads: word("index_n_heads", a.heads)?,
        factor: (1.0 / ((INDEX_DIM * a.heads) as f64).sqrt()) as f32,
        fp4: u32::from(a.fp4),
        pad: 0,
    };
    let kernel = stream.gpu().kernel("index_query")?;
    let launch = Launch { grid: [a.heads.div_ceil(8), rows, 1], block: 256, shared: 0 };
    // SAFETY: sizes checked above.
    unsafe { stream.launch(kernel, launch, &params) }
}

/// Rows of one sequence that share decoded keys: at most [`GROUP_ROWS`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Group {
    pub(crate) sequence: u32,
    pub(crate) first_row: u32,
    pub(crate) rows: u32,
    /// Position of the first row.
    pub(crate) position: u32,
}
// SAFETY: four numbers.
unsafe impl Plain for Group {}

/// Arguments of [`scores`].
pub(crate) struct Scores<'a> {
    /// `[rows, heads, 128]`.
    pub(crate) q: &'a Buffer<u16>,
    /// `[rows, heads]`.
    pub(crate) weights: &'a Buffer<u16>,
    pub(crate) groups: &'a Buffer<Group>,
    pub(crate) keys: Pages<'a>,
    /// `[rows of the groups, pitch]`; row 0 is `first_row`.
    pub(crate) scores: &'a Buffer<f32>,
    /// `[rows of the groups, highest_len]`, of [`highest_len`] of the pitch: ranks of the highest scores of 16 entries each.
    /// With it the kernels for Hopper compute, which [`hopper_index`] must allow, and `stepwise` must be set.
    pub(crate) highest: Option<&'a Buffer<u16>>,
    pub(crate) first_row: usize,
    pub(crate) pitch: usize,
    pub(crate) sequences: usize,
    pub(crate) heads: usize,
    /// Most entries that a row of the groups sees; at most `pitch`.
    pub(crate) visible: usize,
    /// Products, weighted products and sums are rounded to bf16.
    pub(crate) stepwise: bool,
    /// `[1]`, set to 1 if a score is NaN or infinite: one that is compared would not show.
    pub(crate) bad: Option<&'a Buffer<u32>>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ScoreParams {
    q: u64,
    weights: u64,
    groups: u64,
    keys: RawPages,
    scores: u64,
    highest: u64,
    bad: u64,
    first_row: u32,
    pitch: u32,
    heads: u32,
    stepwise: u32,
    highest_pitch: u32,
    pad: u32,
}
// SAFETY: mirrors `ScoreParams`.
unsafe impl Params for ScoreParams {}

/// Whether the kernels for Hopper serve this device and build and a choice of `k`. Their queries are on the grid of E2M1
/// (`rounded`): the device and the model choose them, never the batch.
pub(crate) fn hopper_index(gpu: &Gpu, rounded: bool, k: usize) -> bool {
    rounded && k <= MOST_CHOSEN && gpu.limits().arch == (9, 0) && gpu.kernel("index_scores_hopper").is_ok()
}

/// Highest scores of a row of `pitch` scores.
pub(crate) fn highest_len(pitch: usize) -> usize {
    pitch.div_ceil(HIGHEST_OF)
}

/// Scores of the visible entries of each row; others are not written. Groups lie within the rows, of which `first_row` is
/// the first of the launch: the caller's promise.
pub(crate) fn scores(stream: &Stream, a: &Scores<'_>) -> Result<()> {
    multiple("index_n_heads", a.heads, 8)?;
    if a.heads > MAX_HEADS {
        bail!(Unsupported, "index_n_heads is {}; the GPU kernels take at most {MAX_HEADS}", a.heads);
    }
    let rows = a.weights.len() / a.heads;
    exact("the index weights", a.weights, rows * a.heads)?;
    exact("the index queries", a.q, rows * a.heads * INDEX_DIM)?;
    multiple("the length of the scores", a.scores.len(), a.pitch)?;
    if a.visible > a.pitch || a.keys.page_bytes != 64 * KEY_BYTES {
        bail!(InvalidArgument, "{} visible entries in score rows of {}", a.visible, a.pitch);
    }
    if let Some(bad) = a.bad {
        exact("the flag of a step", bad, 1)?;
    }
    let params = ScoreParams {
        q: a.q.address(),
        weights: a.weights.address(),
        groups: a.groups.address(),
        keys: a.keys.raw("the table of index keys", a.sequences, a.visible.div_ceil(64))?,
        scores: a.scores.address(),
        highest: address(a.highest),
        bad: address(a.bad),
        first_row: word("a row", a.first_row)?,
        pitch: word("visible entries", a.pitch)?,
        heads: a.heads as u32,
        stepwise: u32::from(a.stepwise),
        highest_pitch: highest_len(a.pitch) as u32,
        pad: 0,
    };
    if let Some(highest) = a.highest {
        at_least("the highest scores", highest, a.scores.len() / a.pitch * highest_len(a.pitch))?;
        if !a.stepwise || !a.keys.memory.address().is_multiple_of(16) {
            bail!(InvalidArgument, "index scores that the kernels for Hopper do not compute");
        }
        return scores_hopper(stream, &params, a);
    }
    let kernel = stream.gpu().kernel("index_scores")?;
    let grid = [a.visible.div_ceil(SCORE_KEYS), a.groups.len(), 1];
    // SAFETY: sizes checked above; groups and page ids are the caller's promise.
    unsafe { stream.launch(kernel, Launch { grid, block: 256, shared: 2 * a.heads * 256 }, &params) }
}

fn scores_hopper(stream: &Stream, params: &ScoreParams, a: &Scores<'_>) -> Result<()> {
    let (rows, groups) = (a.scores.len() / a.pitch, a.groups.len());
    if groups == 0 || a.visible == 0 {
        return Ok(());
    }
    // no group is empty
    let most_rows = (rows + 1).saturating_sub(groups).clamp(1, GROUP_ROWS);
    let parts = hopper_parts(a.visible.div_ceil(HOPPER_PAGE), groups, stream.gpu().limits().multiprocessors as usize);
    let kernel = stream.gpu().kernel(if most_rows == 1 { "index_scores_hopper_one" } else { "index_scores_hopper" })?;
    let shared = 1024 + most_rows * HOPPER_ROW_SHARED + HOPPER_TEAMS * HOPPER_STAGES * HOPPER_PAGE_SHARED;
    let launch = Launch { grid: [parts, groups, 1], block: 128 * HOPPER_TEAMS as u32, shared };
    // SAFETY: sizes checked by `scores`; groups and page ids are its caller's promise.
    unsafe { stream.launch(kernel, launch, params) }
}

/// Blocks that share a group's pages: as many as the device has room for, and for many groups so many that the last to be
/// started do not leave it idle for long. Results do not depend on it.
fn hopper_parts(pages: usize, groups: usize, device: usize) -> usize {
    let at_once = pages.div_ceil(HOPPER_TEAMS).min(device / groups);
    at_once.max((pages / 64).min((4 * device).div_ceil(groups))).max(1)
}

/// Arguments of [`top_k`].
pub(crate) struct TopK<'a> {
    /// `[rows, pitch]`.
    pub(crate) scores: &'a Buffer<f32>,
    pub(crate) pitch: usize,
    /// Positions `[rows]` and the tokens of an entry: row r has `(position + 1) / ratio` values, at most `pitch`. Without,
    /// all rows have `pitch`.
    pub(crate) positions: Option<(&'a Buffer<u32>, usize)>,
    /// `[rows, k]`, ascending.
    pub(crate) ids: &'a Buffer<u32>,
    /// `[rows]`.
    pub(crate) counts: &'a Buffer<u32>,
    pub(crate) k: usize,
    /// Candidates `[rows, top_k_parts]`, for rows of more than one chunk.
    pub(crate) parts: Option<(&'a Buffer<f32>, &'a Buffer<u32>)>,
    /// What [`Scores::highest`] became with these scores, for the kernel for Hopper; with positions.
    pub(crate) highest: Option<&'a Buffer<u16>>,
}

/// Candidates of a row of up to `pitch` values; 0 if one block sees them all.
pub(crate) fn top_k_parts(pitch: usize, k: usize) -> usize {
    let chunks = pitch.div_ceil(CHUNK);
    if chunks > 1 { chunks * k } else { 0 }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct TopKParams {
    scores: u64,
    positions: u64,
    ids: u64,
    counts: u64,
    part_scores: u64,
    part_ids: u64,
    highest: u64,
    pitch: u32,
    ratio: u32,
    count: u32,
    k: u32,
    chunks: u32,
    highest_pitch: u32,
}
// SAFETY: mirrors `TopKParams`.
unsafe impl Params for TopKParams {}

/// The `k` highest values of each row, in ascending order of their places; ties go to the lower place, NaN is lowest.
pub(crate) fn top_k(stream: &Stream, a: &TopK<'_>) -> Result<()> {
    let count = a.counts.len();
    exact("the selected entries", a.ids, count * a.k)?;
    at_least("the scores", a.scores, count * a.pitch)?;
    if let Some((positions, ratio)) = a.positions {
        exact("the positions", positions, count)?;
        if ratio == 0 {
            bail!(InvalidArgument, "entries of 0 tokens");
        }
    }
    let (chunks, parts) = (a.pitch.div_ceil(CHUNK), top_k_parts(a.pitch, a.k));
    if parts > CHUNK {
        bail!(Unsupported, "top {} of {} values; the GPU kernels take top-k times chunks up to {CHUNK}", a.k, a.pitch);
    }
    if parts > 0 && a.highest.is_none() {
        let Some((values, ids)) = a.parts else {
            bail!(InvalidArgument, "top-k of {} values needs workspace", a.pitch)
        };
        at_least("the top-k candidates", values, count * parts)?;
        at_least("the top-k candidates", ids, count * parts)?;
    }
    let params = TopKParams {
        part_scores: address(a.parts.map(|p| p.0)),
        part_ids: address(a.parts.map(|p| p.1)),
        highest: address(a.highest),
        chunks: chunks as u32,
        highest_pitch: highest_len(a.pitch) as u32,
        scores: a.scores.address(),
        positions: address(a.positions.map(|p| p.0)),
        ids: a.ids.address(),
        counts: a.counts.address(),
        pitch: word("scores of a row", a.pitch)?,
        ratio: a.positions.map_or(1, |p| p.1) as u32,
        count: a.pitch as u32,
        k: word("top-k", a.k)?,
    };
    if let Some(highest) = a.highest {
        let groups = highest_len(a.pitch);
        at_least("the highest scores", highest, count * groups)?;
        if a.positions.is_none() || groups > MOST_HIGHEST || a.k > MOST_CHOSEN {
            bail!(Unsupported, "top {} of {} values by the kernel for Hopper", a.k, a.pitch);
        }
        let kernel = stream.gpu().kernel("top_k_hopper")?;
        // SAFETY: sizes checked above; positions that fit the rows are the caller's promise.
        return unsafe { stream.launch(kernel, rows(count, 1024), &params) };
    }
    let kernel = stream.gpu().kernel("top_k")?;
    let launch = |grid| Launch { grid, block: 1024, shared: SELECT_SHARED };
    // SAFETY: sizes checked above; positions that fit the rows are the caller's promise.
    unsafe { stream.launch(kernel, launch([chunks, count, 1]), &params)? };
    if chunks == 1 {
        return Ok(());
    }
    let kernel = stream.gpu().kernel("top_k_merge")?;
    // SAFETY: as above.
    unsafe { stream.launch(kernel, launch([count, 1, 1]), &params) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_shared_until_the_device_is_full_and_many_groups_end_together() {
        assert_eq!([1, 5, 256, 4096].map(|pages| hopper_parts(pages, 1, 132)), [1, 2, 64, 132]);
        assert_eq!([8, 64, 128, 4096].map(|groups| hopper_parts(4096, groups, 132)), [64, 9, 5, 1]);
        assert_eq!([32, 256].map(|groups| hopper_parts(256, groups, 132)), [4, 3]);
    }

    /// Pitfall 58: neither release's k is a special case, at any context.
    #[test]
    fn both_releases_choose_among_a_million_tokens_with_the_same_kernels() {
        for k in [512, 1024] {
            for pitch in [1, k, CHUNK, CHUNK + 1, 262_144] {
                let parts = top_k_parts(pitch, k);
                assert!(parts <= CHUNK, "top {k} of {pitch}: {parts} candidates do not fit the block that merges them");
                assert_eq!(parts == 0, pitch <= CHUNK, "one block sees up to {CHUNK}");
            }
        }
    }
}
