//! Several tokens, too few to pay for decoded weights in memory: each vector of weights is decoded in registers where it
//! is multiplied, once for up to six tokens, or eight of E4M3.
//!
//! A band is taken `GROUP_ROWS` rows by `K_BLOCK` columns at a time, so that the inputs of a K block stay in the
//! first-level cache, in register tiles of up to four rows and twelve accumulators. An accumulator is a whole vector that
//! is put aside between K blocks, so an output's chain is the very one of [`super::rows`] and [`super::gemm`].

use std::sync::atomic::{Ordering, compiler_fence};

use super::layout::K_BLOCK;
use super::rows::{Bf16, Decode, E4m3, F32, Rows, Storage, finish, group_values};
use super::vector::Vector;
use super::{Op, Simd};

/// Rows that pass a K block together; a multiple of every tile's rows.
const GROUP_ROWS: usize = 24;

/// What [`super::Block`] computes, of storage that decodes in registers: `out[t][row] = finish(row . x[t])`.
pub(in crate::backend::cpu) struct Few<'a, 'o> {
    pub weights: Rows<'a>,
    /// Prepared inputs: for each vector along the columns, those of all tokens.
    pub x: &'a [f32],
    /// One slice of `[rows]` a token.
    pub out: &'a mut [&'o mut [f32]],
    /// [`Few::scratch`] floats.
    pub scratch: &'a mut [f32],
}

impl Few<'_, '_> {
    /// Whether weights of this kind are taken: `cols` must be whole groups.
    pub(in crate::backend::cpu) fn takes(storage: Storage, cols: usize, simd: Simd) -> bool {
        let in_registers = matches!(storage, Storage::E4m3 | Storage::Bf16 | Storage::F32);
        in_registers && cols.is_multiple_of(storage.form().group(simd.lanes()))
    }

    /// Floats of scratch that a call with so many tokens needs.
    pub(in crate::backend::cpu) fn scratch(simd: Simd, tokens: usize) -> usize {
        GROUP_ROWS * tokens * simd.lanes()
    }

    /// Computes the band. Panics on slices of wrong sizes or weights that are not taken.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        let (w, tokens) = (&self.weights, self.out.len());
        w.check();
        assert!(Self::takes(w.storage, w.cols, simd), "{:?} of {} columns", w.storage, w.cols);
        assert!(self.scratch.len() >= Self::scratch(simd, tokens), "scratch for {tokens} tokens");
        assert!(self.out.iter().all(|o| o.len() == w.rows), "one output a row");
        assert_eq!(self.x.len(), tokens * w.cols, "prepared columns");
        simd.dispatch(self);
    }
}

impl Op for Few<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the processor has `V` by contract; `Few::run` has checked the sizes.
        unsafe {
            match self.weights.storage {
                Storage::E4m3 => band::<V, E4m3>(self),
                Storage::Bf16 => band::<V, Bf16>(self),
                Storage::F32 => band::<V, F32>(self),
                Storage::E2m1 | Storage::E4m3Rounded => unreachable!("refused by Few::run"),
            }
        }
    }
}

/// # Safety
/// The processor has `V`; the sizes that [`Few::run`] checks.
#[inline(always)]
unsafe fn band<V: Vector, D: Decode<V>>(op: Few<'_, '_>) {
    let Few { weights: w, x, out, scratch } = op;
    let (row_bytes, tokens, values) = (w.row_bytes(), out.len(), group_values::<V, D>());
    let (blocks, block_bytes) = (w.cols.div_ceil(K_BLOCK), K_BLOCK / values * D::BYTES);
    for first in (0..w.rows).step_by(GROUP_ROWS) {
        let rows = GROUP_ROWS.min(w.rows - first);
        let mut nan_rows = 0u32;
        for b in 0..blocks {
            let width = K_BLOCK.min(w.cols - b * K_BLOCK);
            let data = &w.data[first * row_bytes + b * block_bytes..];
            for row in 0..rows {
                let bytes = &data[row * row_bytes..][..width / values * D::BYTES];
                // SAFETY: the processor has `V`; the bytes are whole groups.
                nan_rows |= u32::from(unsafe { has_nan::<V, D>(bytes) }) << row;
            }
            let piece = Piece {
                rows,
                tokens,
                data: data.as_ptr(),
                row_bytes,
                x: x[b * K_BLOCK * tokens..][..tokens * width].as_ptr(),
                width,
                // the same row's next block, or the first of the row that takes its place
                ahead: if b + 1 < blocks { block_bytes } else { GROUP_ROWS * row_bytes - b * block_bytes },
                is_first: b == 0,
                is_last: b + 1 == blocks,
            };
            let write = |t: usize, row: usize, sum: f32| {
                out[t][first + row] = if nan_rows >> row & 1 == 1 { f32::NAN } else { finish(sum, w.factors) };
            };
            // SAFETY: the piece's rows and tokens were sliced, the scratch is large enough for them.
            unsafe {
                match tokens {
                    1 | 2 => piece.multiply::<V, D, 4>(2, scratch, write),
                    // long to decode: one row at a time, for more tokens
                    7 | 8 if D::VECTORS > 2 => piece.multiply::<V, D, 1>(8, scratch, write),
                    _ => piece.multiply::<V, D, 2>(6, scratch, write),
                }
            }
        }
    }
}

/// Whether a group of `bytes` has a NaN code.
///
/// # Safety
/// The processor has `V`; `bytes` are whole groups.
#[inline(always)]
unsafe fn has_nan<V: Vector, D: Decode<V>>(bytes: &[u8]) -> bool {
    // SAFETY: by contract; what is decoded besides is not used, and so not computed.
    unsafe {
        let mut seen = V::nothing_seen();
        for group in bytes.chunks_exact(D::BYTES) {
            D::decode(group.as_ptr(), std::ptr::null(), &mut seen);
        }
        V::saw_nan(seen)
    }
}

/// A K block of some rows and its inputs.
#[derive(Clone, Copy)]
struct Piece {
    rows: usize,
    tokens: usize,
    data: *const u8,
    row_bytes: usize,
    x: *const f32,
    width: usize,
    /// From a row's bytes to those that are asked for meanwhile.
    ahead: usize,
    is_first: bool,
    is_last: bool,
}

impl Piece {
    /// Continues the chains of all rows and tokens, in tiles of `R` rows and an even share of the tokens, at most `most`.
    ///
    /// # Safety
    /// The processor has `V`; `rows` whole groups at `data`, `tokens` inputs at `x`; `aside` holds [`GROUP_ROWS`] times
    /// `tokens` vectors.
    #[inline(always)]
    unsafe fn multiply<V: Vector, D: Decode<V>, const R: usize>(
        self,
        most: usize,
        aside: &mut [f32],
        mut write: impl FnMut(usize, usize, f32),
    ) {
        let mut rest = aside;
        for row in (0..self.rows).step_by(R) {
            let mut token = 0;
            for passes in (1..=self.tokens.div_ceil(most)).rev() {
                let tokens = (self.tokens - token).div_ceil(passes);
                let tile = Tile::<R> { piece: self, row, token };
                let aside;
                (aside, rest) = rest.split_at_mut(R * tokens * V::LANES);
                // SAFETY: the tile's rows and tokens are the piece's.
                unsafe {
                    match tokens {
                        8 if R == 1 => tile.block::<V, D, 8>(aside, &mut write),
                        7 if R == 1 => tile.block::<V, D, 7>(aside, &mut write),
                        6 if R <= 2 => tile.block::<V, D, 6>(aside, &mut write),
                        5 if R <= 2 => tile.block::<V, D, 5>(aside, &mut write),
                        4 if R <= 2 => tile.block::<V, D, 4>(aside, &mut write),
                        3 if R <= 2 => tile.block::<V, D, 3>(aside, &mut write),
                        2 => tile.block::<V, D, 2>(aside, &mut write),
                        _ => tile.block::<V, D, 1>(aside, &mut write),
                    }
                }
                token += tokens;
            }
        }
    }
}

/// A register tile: `R` rows of a piece from `row`, some of its tokens from `token`.
struct Tile<const R: usize> {
    piece: Piece,
    row: usize,
    token: usize,
}

impl<const R: usize> Tile<R> {
    /// Fetches the accumulators of `T` tokens, continues them, and puts them aside or finishes them.
    ///
    /// # Safety
    /// As [`Piece::multiply`]; `aside` holds `R * T` vectors.
    #[inline(always)]
    unsafe fn block<V: Vector, D: Decode<V>, const T: usize>(
        self,
        aside: &mut [f32],
        write: &mut impl FnMut(usize, usize, f32),
    ) {
        let Self { piece, row, token } = self;
        assert!(aside.len() >= R * T * V::LANES);
        // SAFETY: by contract.
        unsafe {
            let mut sums = [[V::zero(); R]; T];
            if !piece.is_first {
                for t in 0..T {
                    for r in 0..R {
                        sums[t][r] = V::load(aside.as_ptr().add((t * R + r) * V::LANES));
                    }
                }
            }
            self.accumulate::<V, D, T>(&mut sums);
            for t in 0..T {
                for r in 0..R {
                    sums[t][r].store(aside.as_mut_ptr().add((t * R + r) * V::LANES));
                }
            }
            if !piece.is_last {
                return;
            }
            // from memory, so that no index into the accumulators keeps them there all along
            for first in (0..R * T).step_by(4) {
                let at = |i: usize| V::load(aside.as_ptr().add((first + i).min(R * T - 1) * V::LANES));
                let totals = V::sum4([at(0), at(1), at(2), at(3)]);
                for (n, total) in (first..R * T).zip(totals) {
                    if row + n % R < piece.rows {
                        write(token + n / R, row + n % R, total);
                    }
                }
            }
        }
    }

    /// Continues the chains of the tile by the groups of the piece.
    ///
    /// # Safety
    /// As [`Tile::block`].
    #[inline(always)]
    unsafe fn accumulate<V: Vector, D: Decode<V>, const T: usize>(&self, sums: &mut [[V; R]; T]) {
        let piece = self.piece;
        let stride = piece.tokens * V::LANES;
        // SAFETY: rows and tokens are the piece's, and each has `width` columns.
        unsafe {
            // a row that is not there is the last one's twin, whose sum is dropped
            let mut rows = [piece.data; R];
            for r in 0..R {
                rows[r] = piece.data.add((self.row + r).min(piece.rows - 1) * piece.row_bytes);
            }
            let mut x = piece.x.add(self.token * V::LANES);
            for _ in 0..piece.width / group_values::<V, D>() {
                if self.token == 0 {
                    for r in 0..R {
                        V::prefetch_far(rows[r].wrapping_add(piece.ahead));
                    }
                }
                if R == 1 {
                    let weights = D::decode(rows[0], std::ptr::null(), &mut V::nothing_seen());
                    for &weight in weights.as_ref() {
                        multiply([weight; R], x, sums);
                        x = x.add(stride);
                    }
                } else {
                    // decoded again for each vector, and the others left out: a whole group would not fit the registers
                    multiply(vectors::<V, D, R, 0>(rows), x, sums);
                    x = x.add(stride);
                    if D::VECTORS > 1 {
                        multiply(vectors::<V, D, R, 1>(rows), x, sums);
                        x = x.add(stride);
                    }
                    if D::VECTORS > 2 {
                        multiply(vectors::<V, D, R, 2>(rows), x, sums);
                        x = x.add(stride);
                        multiply(vectors::<V, D, R, 3>(rows), x, sums);
                        x = x.add(stride);
                    }
                }
                for r in 0..R {
                    rows[r] = rows[r].add(D::BYTES);
                }
            }
        }
    }
}

/// Vector `I` of a group of each row.
///
/// # Safety
/// The processor has `V`; a group at each of `rows`.
#[inline(always)]
unsafe fn vectors<V: Vector, D: Decode<V>, const R: usize, const I: usize>(rows: [*const u8; R]) -> [V; R] {
    // SAFETY: by contract.
    unsafe {
        let mut vectors = [V::zero(); R];
        for r in 0..R {
            vectors[r] = D::decode(rows[r], std::ptr::null(), &mut V::nothing_seen()).as_ref()[I];
        }
        vectors
    }
}

/// Adds the products of a vector of weights of each row with those of `T` inputs at `x`.
///
/// # Safety
/// The processor has `V`; `T` vectors at `x`.
#[inline(always)]
unsafe fn multiply<V: Vector, const R: usize, const T: usize>(weights: [V; R], x: *const f32, sums: &mut [[V; R]; T]) {
    for t in 0..T {
        // SAFETY: by contract.
        unsafe {
            let input = V::load(x.add(t * V::LANES));
            for r in 0..R {
                sums[t][r] = weights[r].mul_add(input, sums[t][r]);
            }
        }
    }
    // keeps the compiler from loading ahead what it then spills
    compiler_fence(Ordering::SeqCst);
}
