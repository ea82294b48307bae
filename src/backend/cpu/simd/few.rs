//! Several tokens, too few to pay for decoded weights in memory: each vector of weights is decoded in registers where it
//! is multiplied, once for up to four tokens.
//!
//! Register tiles of three rows by four tokens, or four by two, go along whole rows, so an accumulator is a vector that
//! stays in its register, and an output's chain is the very one of [`super::rows`] and [`super::gemm`]. The inputs of so
//! few tokens come from the second-level cache in time; meanwhile the bytes of the next rows are asked for.

use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use super::rows::{Bf16, Decode, E4m3, F32, Rows, Storage, finish};
use super::vector::Vector;
use super::{Op, Simd};

/// Bytes that a prefetch brings.
const LINE: usize = 64;

/// What [`super::Block`] computes, of storage that decodes in registers: `out[t][row] = finish(row . x[t])`.
pub(in crate::backend::cpu) struct Few<'a, 'o> {
    pub weights: Rows<'a>,
    /// Prepared inputs: those of each of [`Few::shares`], and in them, vector by vector along the columns, its tokens'.
    pub x: &'a [f32],
    /// One slice of `[rows]` a token.
    pub out: &'a mut [&'o mut [f32]],
}

impl Few<'_, '_> {
    /// Whether weights of this kind are taken: `cols` must be whole groups.
    pub(in crate::backend::cpu) fn takes(storage: Storage, cols: usize, simd: Simd) -> bool {
        let in_registers = matches!(storage, Storage::E4m3 | Storage::Bf16 | Storage::F32);
        in_registers && cols.is_multiple_of(storage.form().group(simd.lanes()))
    }

    /// The tokens that meet a decoded weight together: at most four, in shares as even as can be.
    pub(in crate::backend::cpu) fn shares(tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let shares = tokens.div_ceil(4);
        (0..shares).map(move |share| (share * tokens).div_ceil(shares)..((share + 1) * tokens).div_ceil(shares))
    }

    /// Computes the band. Panics on slices of wrong sizes or weights that are not taken.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        let (w, tokens) = (&self.weights, self.out.len());
        w.check();
        assert!(Self::takes(w.storage, w.cols, simd), "{:?} of {} columns", w.storage, w.cols);
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
    // SAFETY: by contract.
    unsafe { if op.out.len() <= 2 { tiles::<V, D, 4>(op) } else { tiles::<V, D, 3>(op) } }
}

/// Takes the band `R` rows at a time, and these with a share of the tokens at a time.
///
/// # Safety
/// As [`band`].
#[inline(always)]
unsafe fn tiles<V: Vector, D: Decode<V>, const R: usize>(op: Few<'_, '_>) {
    let Few { weights: w, x, out } = op;
    let (row_bytes, tokens) = (w.row_bytes(), out.len());
    for first in (0..w.rows).step_by(R) {
        let count = R.min(w.rows - first);
        let mut rows = [w.data.as_ptr(); R];
        for r in 0..R {
            // a row that is not there is the last one's twin, whose sum is dropped
            rows[r] = w.data[(first + r.min(count - 1)) * row_bytes..][..row_bytes].as_ptr();
        }
        let groups = row_bytes / D::BYTES;
        // SAFETY: the processor has `V`; the rows are whole groups.
        let has_nan = unsafe { saw_nan::<V, D, R>(rows, groups) };
        for share in Few::shares(tokens) {
            let tile = Tile {
                rows,
                groups,
                x: x[share.start * w.cols..].as_ptr(),
                // each share asks for its part of the next rows
                ahead: w.data.as_ptr().wrapping_add((first + R) * row_bytes + R * row_bytes * share.start / tokens),
                ahead_step: R * D::BYTES * share.len() / tokens,
            };
            let write = |t: usize, r: usize, sum: f32| {
                if r < count {
                    out[share.start + t][first + r] = if has_nan[r] { f32::NAN } else { finish(sum, w.factors) };
                }
            };
            // SAFETY: the rows are whole, and `x` has the share's vectors.
            unsafe {
                match share.len() {
                    4 if R == 3 => tile.run::<V, D, 4>(write),
                    3 if R == 3 => tile.run::<V, D, 3>(write),
                    2 => tile.run::<V, D, 2>(write),
                    _ => tile.run::<V, D, 1>(write),
                }
            }
        }
    }
}

/// Whether each row has a NaN code.
///
/// # Safety
/// The processor has `V`; so many groups at each of the rows.
#[inline(always)]
unsafe fn saw_nan<V: Vector, D: Decode<V>, const R: usize>(mut rows: [*const u8; R], groups: usize) -> [bool; R] {
    // SAFETY: by contract; what is decoded besides is not used, and so not computed.
    unsafe {
        let mut seen = [V::nothing_seen(); R];
        for _ in 0..groups {
            for r in 0..R {
                D::decode(rows[r], std::ptr::null(), &mut seen[r]);
                rows[r] = rows[r].add(D::BYTES);
            }
        }
        let mut has_nan = [false; R];
        for r in 0..R {
            has_nan[r] = V::saw_nan(seen[r]);
        }
        has_nan
    }
}

/// `R` whole rows and a share of the tokens.
struct Tile<const R: usize> {
    rows: [*const u8; R],
    /// Groups of a row.
    groups: usize,
    x: *const f32,
    /// Bytes to ask for while the tile runs, so many a group.
    ahead: *const u8,
    ahead_step: usize,
}

impl<const R: usize> Tile<R> {
    /// Multiplies all rows with the `T` tokens of the share and hands each sum to `write(token, row, sum)`.
    ///
    /// # Safety
    /// The processor has `V`; `groups` at each of the rows, and at `x` their vectors of `T` tokens.
    #[inline(always)]
    unsafe fn run<V: Vector, D: Decode<V>, const T: usize>(self, mut write: impl FnMut(usize, usize, f32)) {
        let Self { mut rows, groups, mut x, mut ahead, ahead_step } = self;
        // SAFETY: by contract.
        unsafe {
            let mut sums = [[V::zero(); R]; T];
            for _ in 0..groups {
                V::prefetch_far(ahead);
                for line in (LINE..ahead_step).step_by(LINE) {
                    V::prefetch_far(ahead.wrapping_add(line));
                }
                ahead = ahead.wrapping_add(ahead_step);
                // decoded again for each vector, and the others left out: a whole group would not fit the registers
                multiply(vectors::<V, D, R, 0>(rows), x, &mut sums);
                if D::VECTORS > 1 {
                    multiply(vectors::<V, D, R, 1>(rows), x.add(T * V::LANES), &mut sums);
                }
                if D::VECTORS > 2 {
                    multiply(vectors::<V, D, R, 2>(rows), x.add(2 * T * V::LANES), &mut sums);
                    multiply(vectors::<V, D, R, 3>(rows), x.add(3 * T * V::LANES), &mut sums);
                }
                x = x.add(D::VECTORS * T * V::LANES);
                for r in 0..R {
                    rows[r] = rows[r].add(D::BYTES);
                }
            }
            for t in 0..T {
                let totals = V::sum4([sums[t][0], sums[t][1], sums[t][2], sums[t][R - 1]]);
                for r in 0..R {
                    write(t, r, totals[r]);
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
            vectors[r] = D::vector::<I>(rows[r]);
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
        unsafe { V::accumulate(&mut sums[t], weights, x.add(t * V::LANES)) };
    }
    // keeps the compiler from loading ahead what it then spills
    compiler_fence(Ordering::SeqCst);
}
