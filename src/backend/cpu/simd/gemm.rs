//! Several tokens: a blocked product of a band of weight rows with a block of tokens.
//!
//! Rows are decoded to float32 once per block, `NEAR_ROWS` rows by `K_BLOCK` columns at a time, and then multiplied in
//! register tiles of 3 rows by 4 tokens. An output's accumulator is a whole vector that is put aside between K blocks
//! (between groups, where those are summed apart), so its chain is the very one of [`super::rows`].

use std::sync::atomic::{Ordering, compiler_fence};

use super::layout::K_BLOCK;
use super::rows::{Bf16, Decode, E2m1, E4m3, F32, Rows, Storage, Tail, finish, group_values};
use super::vector::Vector;
use super::{Op, Simd};
use crate::tensor::format::{E4M3, round_bf16};

/// Rows that pass a K block together.
const GROUP_ROWS: usize = 24;
/// Tokens of a block; a multiple of [`TILE_TOKENS`].
pub(in crate::backend::cpu) const TOKEN_BLOCK: usize = 64;

const TILE_ROWS: usize = 3;
const TILE_TOKENS: usize = 4;
/// Vectors of a group that is summed apart.
const APART_STEPS: usize = 8;
/// Rows decoded together, whose K block stays in the first-level cache while the tokens pass.
const NEAR_ROWS: usize = 2 * TILE_ROWS;

/// `out[t][row] = finish(row . x[t])` for the rows of a band and up to [`TOKEN_BLOCK`] tokens.
pub(in crate::backend::cpu) struct Block<'a, 'o> {
    pub weights: Rows<'a>,
    /// Prepared inputs, for each block of `K_BLOCK` columns the rows of the tokens; the last block is narrower. Token
    /// `t`'s row of block `b` starts at `b * x_stride + (first_token + t) * width of b`.
    pub x: &'a [f32],
    /// Floats from one K block to the next.
    pub x_stride: usize,
    /// Which token's row of each K block is the first one's.
    pub first_token: usize,
    /// One slice of `[rows]` a token.
    pub out: &'a mut [&'o mut [f32]],
    /// [`Block::scratch`] floats.
    pub scratch: &'a mut [f32],
}

impl Block<'_, '_> {
    /// Floats of scratch that a call needs.
    pub(in crate::backend::cpu) fn scratch(simd: Simd) -> usize {
        NEAR_ROWS * K_BLOCK + GROUP_ROWS * TOKEN_BLOCK * simd.lanes()
    }

    /// Computes the block. Panics on slices of wrong sizes.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        self.weights.check();
        let tokens = self.out.len();
        assert!(tokens <= TOKEN_BLOCK && self.scratch.len() >= Self::scratch(simd), "{tokens} tokens in a block");
        assert!(self.out.iter().all(|o| o.len() == self.weights.rows), "one output a row");
        let padded = self.weights.padded_cols(simd.lanes());
        if let Some(last) = padded.checked_sub(1).map(|c| c / K_BLOCK) {
            let width = padded - last * K_BLOCK;
            assert!(self.x.len() >= last * self.x_stride + (self.first_token + tokens) * width, "prepared columns");
            assert!(last == 0 || self.x_stride >= (self.first_token + tokens) * K_BLOCK, "K block stride");
        }
        simd.dispatch(self);
    }
}

impl Op for Block<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Block { weights, x, x_stride, first_token, out, scratch } = self;
        let padded = weights.padded_cols(V::LANES);
        let blocks = padded.div_ceil(K_BLOCK).max(1);
        let (decoded, aside) = scratch.split_at_mut(NEAR_ROWS * K_BLOCK);
        for first in (0..weights.rows).step_by(GROUP_ROWS) {
            let count = GROUP_ROWS.min(weights.rows - first);
            for b in 0..blocks {
                let cols = b * K_BLOCK..padded.min((b + 1) * K_BLOCK);
                let width = cols.len();
                let x = &x[b * x_stride + first_token * width..][..out.len() * width];
                let apart = weights.storage == Storage::E2m1;
                for near in (0..count).step_by(NEAR_ROWS) {
                    let rows = NEAR_ROWS.min(count - near);
                    let place = Place {
                        first_row: first + near,
                        rows,
                        first_block: b == 0,
                        last_block: b + 1 == blocks,
                        apart,
                    };
                    let aside = &mut aside[near * TOKEN_BLOCK * V::LANES..];
                    // SAFETY: the processor has `V` by contract; `Block::run` has checked the sizes.
                    unsafe {
                        for row in 0..rows {
                            let decoded = &mut decoded[row * K_BLOCK..][..width];
                            decode::<V>(&weights, first + near + row, cols.clone(), decoded);
                        }
                        multiply::<V>(decoded, x, width, place, aside, out, weights.factors);
                    }
                }
            }
        }
    }
}

/// Which part of a block's work a K block of some near rows is.
#[derive(Clone, Copy)]
struct Place {
    first_row: usize,
    rows: usize,
    first_block: bool,
    last_block: bool,
    /// Whether groups are summed apart; each is then [`APART_STEPS`] vectors.
    apart: bool,
}

/// Decodes columns `cols` of `row`, padding included, to `out`.
///
/// # Safety
/// The processor has `V`; the sizes of [`Rows::check`] hold.
#[inline(always)]
unsafe fn decode<V: Vector>(w: &Rows<'_>, row: usize, cols: std::ops::Range<usize>, out: &mut [f32]) {
    let row_bytes = w.row_bytes();
    let data = &w.data[row * row_bytes..][..row_bytes];
    let scales = &w.scales[row * w.row_scales()..][..w.row_scales()];
    // SAFETY: `data` and `scales` are the row's.
    unsafe {
        match w.storage {
            Storage::E4m3 => expand::<V, E4m3>(data, scales, cols, out),
            Storage::E2m1 => expand::<V, E2m1>(data, scales, cols, out),
            Storage::Bf16 => expand::<V, Bf16>(data, scales, cols, out),
            Storage::F32 => expand::<V, F32>(data, scales, cols, out),
            Storage::E4m3Rounded => round(data, w.scales, cols, out),
        }
    }
}

/// # Safety
/// The processor has `V`; `data` and `scales` are one row.
#[inline(always)]
unsafe fn expand<V: Vector, D: Decode<V>>(data: &[u8], scales: &[u8], cols: std::ops::Range<usize>, out: &mut [f32]) {
    let (group, values) = (D::BYTES, group_values::<V, D>());
    // SAFETY: the processor has `V`, by contract.
    let mut seen = unsafe { V::nothing_seen() };
    let mut at = out.as_mut_ptr();
    for g in cols.start / values..cols.end / values {
        // SAFETY: a whole group is read in place, an incomplete one from its buffer; `out` holds the values of all groups.
        unsafe {
            let decoded = match data.get(g * group..(g + 1) * group) {
                Some(bytes) => {
                    V::prefetch_far(bytes.as_ptr().wrapping_add((cols.end - cols.start) / values * group));
                    D::decode(bytes.as_ptr(), scales.as_ptr().wrapping_add(g * D::SCALES), &mut seen)
                }
                None => {
                    let tail = Tail::new(&data[g * group..], &scales[(g * D::SCALES).min(scales.len())..]);
                    D::decode(tail.bytes.as_ptr(), tail.scales.as_ptr(), &mut seen)
                }
            };
            for v in decoded.as_ref() {
                v.store(at);
                at = at.add(V::LANES);
            }
        }
    }
    // SAFETY: the processor has `V`, by contract.
    if unsafe { V::saw_nan(seen) } {
        // one NaN makes the row's outputs NaN, as its products would
        out[0] = f32::NAN;
    }
}

/// E4M3 times float32 scales, rounded to bf16.
fn round(codes: &[u8], scales: &[u8], cols: std::ops::Range<usize>, out: &mut [f32]) {
    let (scales, _) = scales.as_chunks::<4>();
    for (i, value) in out.iter_mut().enumerate() {
        let c = cols.start + i;
        *value = round_bf16(E4M3[usize::from(codes[c])] * f32::from_le_bytes(scales[c / 128]));
    }
}

/// Multiplies decoded rows with the tokens of one K block.
///
/// # Safety
/// The processor has `V`; `decoded` holds `place.rows` rows of stride `K_BLOCK`, `x` one row of `width` a token.
#[inline(always)]
unsafe fn multiply<V: Vector>(
    decoded: &[f32],
    x: &[f32],
    width: usize,
    place: Place,
    aside: &mut [f32],
    out: &mut [&mut [f32]],
    factors: [f32; 2],
) {
    let tokens = out.len();
    let steps = width / V::LANES;
    for t in (0..tokens).step_by(TILE_TOKENS) {
        for r in (0..place.rows).step_by(TILE_ROWS) {
            let tile = Tile {
                w: decoded[r * K_BLOCK..].as_ptr(),
                w_stride: K_BLOCK,
                x: x[t * width..].as_ptr(),
                x_stride: width,
                steps,
            };
            let aside = &mut aside[(r * tokens.next_multiple_of(TILE_TOKENS) + t * TILE_ROWS) * V::LANES..];
            let write = |i: usize, j: usize, sum: f32| out[t + i][place.first_row + r + j] = finish(sum, factors);
            // SAFETY: the tile's rows and tokens lie inside `decoded` and `x`.
            unsafe {
                match ((place.rows - r).min(TILE_ROWS), (tokens - t).min(TILE_TOKENS)) {
                    (3, 4) => tile.block::<V, 3, 4>(place, aside, write),
                    (3, 3) => tile.block::<V, 3, 3>(place, aside, write),
                    (3, 2) => tile.block::<V, 3, 2>(place, aside, write),
                    (3, 1) => tile.block::<V, 3, 1>(place, aside, write),
                    (2, 4) => tile.block::<V, 2, 4>(place, aside, write),
                    (2, 3) => tile.block::<V, 2, 3>(place, aside, write),
                    (2, 2) => tile.block::<V, 2, 2>(place, aside, write),
                    (2, 1) => tile.block::<V, 2, 1>(place, aside, write),
                    (1, 4) => tile.block::<V, 1, 4>(place, aside, write),
                    (1, 3) => tile.block::<V, 1, 3>(place, aside, write),
                    (1, 2) => tile.block::<V, 1, 2>(place, aside, write),
                    _ => tile.block::<V, 1, 1>(place, aside, write),
                }
            }
        }
    }
}

/// A register tile of dot products: rows at `w`, tokens (or keys) at `x`.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub w: *const f32,
    pub w_stride: usize,
    pub x: *const f32,
    pub x_stride: usize,
    /// Whole vectors along the summed axis.
    pub steps: usize,
}

impl Tile {
    /// Continues the chains of the tile by `steps` vectors.
    ///
    /// # Safety
    /// `steps` vectors at each of `R` rows and `T` tokens.
    #[inline(always)]
    pub(super) unsafe fn accumulate<V: Vector, const R: usize, const T: usize>(self, sums: &mut [[V; R]; T]) {
        // SAFETY: by contract.
        unsafe {
            let (mut w, mut x) = (self.w, self.x);
            for _ in 0..self.steps {
                let mut rows = [V::zero(); R];
                for r in 0..R {
                    rows[r] = V::load(w.add(r * self.w_stride));
                }
                for t in 0..T {
                    let token = V::load(x.add(t * self.x_stride));
                    for r in 0..R {
                        sums[t][r] = rows[r].mul_add(token, sums[t][r]);
                    }
                }
                w = w.add(V::LANES);
                x = x.add(V::LANES);
                // keeps the compiler from loading ahead what it then spills
                compiler_fence(Ordering::SeqCst);
            }
        }
    }

    /// Continues the chains of the tile, which are in `aside` unless this is their `start`, by groups summed apart.
    ///
    /// # Safety
    /// As [`Tile::accumulate`], `steps` a multiple of [`APART_STEPS`]; `aside` holds `R * T` vectors.
    #[inline(always)]
    unsafe fn accumulate_apart<V: Vector, const R: usize, const T: usize>(self, start: bool, aside: &mut [f32]) {
        let vectors = aside.as_mut_ptr();
        for first in (0..self.steps).step_by(APART_STEPS) {
            // SAFETY: by contract.
            unsafe {
                let offset = first * V::LANES;
                let group = Self { w: self.w.add(offset), x: self.x.add(offset), steps: APART_STEPS, ..self };
                let mut sums = [[V::zero(); R]; T];
                group.accumulate(&mut sums);
                for t in 0..T {
                    for r in 0..R {
                        let chain = vectors.add((t * R + r) * V::LANES);
                        let before = if start && first == 0 { V::zero() } else { V::load(chain) };
                        before.add(sums[t][r]).store(chain);
                    }
                }
            }
        }
    }

    /// One K block of a tile: fetches the accumulators, continues them, and puts them aside or finishes them.
    ///
    /// # Safety
    /// As [`Tile::accumulate`]; `aside` holds `R * T` vectors.
    #[inline(always)]
    unsafe fn block<V: Vector, const R: usize, const T: usize>(
        self,
        place: Place,
        aside: &mut [f32],
        write: impl FnMut(usize, usize, f32),
    ) {
        assert!(aside.len() >= R * T * V::LANES);
        // SAFETY: `aside` was checked, the rest is the contract.
        unsafe {
            if place.apart {
                self.accumulate_apart::<V, R, T>(place.first_block, aside);
                if !place.last_block {
                    return;
                }
            }
            let mut sums = [[V::zero(); R]; T];
            if place.apart || !place.first_block {
                for t in 0..T {
                    for r in 0..R {
                        sums[t][r] = V::load(aside.as_ptr().add((t * R + r) * V::LANES));
                    }
                }
            }
            if !place.apart {
                self.accumulate(&mut sums);
            }
            if place.last_block {
                return reduce(&sums, write);
            }
            for t in 0..T {
                for r in 0..R {
                    sums[t][r].store(aside.as_mut_ptr().add((t * R + r) * V::LANES));
                }
            }
        }
    }
}

/// Sums every accumulator of a tile and hands it to `write(token, row, sum)`.
///
/// # Safety
/// The processor has `V`.
#[inline(always)]
pub(super) unsafe fn reduce<V: Vector, const R: usize, const T: usize>(
    sums: &[[V; R]; T],
    mut write: impl FnMut(usize, usize, f32),
) {
    for first in (0..R * T).step_by(4) {
        let at = |i: usize| (first + i).min(R * T - 1);
        let four = [at(0), at(1), at(2), at(3)];
        let four = [
            sums[four[0] / R][four[0] % R],
            sums[four[1] / R][four[1] % R],
            sums[four[2] / R][four[2] % R],
            sums[four[3] / R][four[3] % R],
        ];
        // SAFETY: by contract.
        let totals = unsafe { V::sum4(four) };
        for n in first..(R * T).min(first + 4) {
            write(n / R, n % R, totals[n - first]);
        }
    }
}
