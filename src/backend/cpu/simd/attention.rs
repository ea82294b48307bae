//! The inner products of attention: scores of queries against keys, weighted sums of values, and the exponential.

use std::ops::Range;

use super::gemm::{Tile, reduce};
use super::vector::{MAX_LANES, Vector};
use super::{Op, Simd};

/// `out[h][t] = q[h] . k[t]` for `q` `[heads, dim]`, `k` `[keys, dim]`, `out` `[heads, keys]`; an element's bits depend on
/// its own head and key alone.
///
/// # Panics
/// If `dim` is 0 or the slices' lengths do not fit.
pub fn scores(simd: Simd, q: &[f32], k: &[f32], dim: usize, out: &mut [f32]) {
    assert!(
        dim > 0 && q.len().is_multiple_of(dim) && k.len().is_multiple_of(dim),
        "{} and {} by {dim}",
        q.len(),
        k.len()
    );
    assert_eq!(out.len(), (q.len() / dim) * (k.len() / dim), "scores");
    simd.dispatch(Scores { q, k, dim, out });
}

struct Scores<'a> {
    q: &'a [f32],
    k: &'a [f32],
    dim: usize,
    out: &'a mut [f32],
}

/// Heads whose queries stay in the first-level cache while the keys pass.
const NEAR_HEADS: usize = 6;

impl Op for Scores<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let (heads, keys) = (self.q.len() / self.dim, self.k.len() / self.dim);
        for near in (0..heads).step_by(NEAR_HEADS) {
            for t in (0..keys).step_by(4) {
                for h in (near..heads.min(near + NEAR_HEADS)).step_by(3) {
                    let tile = Tile {
                        w: self.q[h * self.dim..].as_ptr(),
                        w_stride: self.dim,
                        x: self.k[t * self.dim..].as_ptr(),
                        x_stride: self.dim,
                        steps: self.dim / V::LANES,
                    };
                    let rest = self.dim % V::LANES;
                    let write = |i: usize, j: usize, sum: f32| self.out[(h + j) * keys + t + i] = sum;
                    // SAFETY: the processor has `V` by contract; the tile's heads and keys exist.
                    unsafe {
                        match ((heads - h).min(3), (keys - t).min(4)) {
                            (3, 4) => dots::<V, 3, 4>(tile, rest, write),
                            (3, 3) => dots::<V, 3, 3>(tile, rest, write),
                            (3, 2) => dots::<V, 3, 2>(tile, rest, write),
                            (3, 1) => dots::<V, 3, 1>(tile, rest, write),
                            (2, 4) => dots::<V, 2, 4>(tile, rest, write),
                            (2, 3) => dots::<V, 2, 3>(tile, rest, write),
                            (2, 2) => dots::<V, 2, 2>(tile, rest, write),
                            (2, 1) => dots::<V, 2, 1>(tile, rest, write),
                            (1, 4) => dots::<V, 1, 4>(tile, rest, write),
                            (1, 3) => dots::<V, 1, 3>(tile, rest, write),
                            (1, 2) => dots::<V, 1, 2>(tile, rest, write),
                            _ => dots::<V, 1, 1>(tile, rest, write),
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// `tile.steps` vectors and `rest` more floats at each of `R` rows and `T` tokens.
#[inline(always)]
unsafe fn dots<V: Vector, const R: usize, const T: usize>(
    tile: Tile,
    rest: usize,
    write: impl FnMut(usize, usize, f32),
) {
    // SAFETY: by contract.
    unsafe {
        let mut sums = [[V::zero(); R]; T];
        tile.accumulate(&mut sums);
        if rest > 0 {
            let done = tile.steps * V::LANES;
            for t in 0..T {
                let x = V::load_first(tile.x.add(t * tile.x_stride + done), rest);
                for r in 0..R {
                    let w = V::load_first(tile.w.add(r * tile.w_stride + done), rest);
                    sums[t][r] = w.mul_add(x, sums[t][r]);
                }
            }
        }
        reduce(&sums, write);
    }
}

/// `acc[h][d] = acc[h][d] * fade[h] + sum over t of p[h][t] * v[t][d]`, `t` ascending, for `p` `[heads, keys]`, `v`
/// `[keys, dim]`, `acc` `[heads, dim]`; an element's bits depend on its own head's `p`, column and key order alone.
///
/// # Panics
/// If `dim` is 0 or the slices' lengths do not fit.
pub fn accumulate(simd: Simd, fade: &[f32], p: &[f32], v: &[f32], dim: usize, acc: &mut [f32]) {
    assert!(dim > 0 && v.len().is_multiple_of(dim), "{} by {dim}", v.len());
    assert_eq!(p.len(), fade.len() * (v.len() / dim), "attention weights");
    assert_eq!(acc.len(), fade.len() * dim, "accumulators");
    simd.dispatch(Accumulate { fade, p, v, dim, acc });
}

struct Accumulate<'a> {
    fade: &'a [f32],
    p: &'a [f32],
    v: &'a [f32],
    dim: usize,
    acc: &'a mut [f32],
}

/// Keys taken together: their packed columns stay in the first-level cache while the heads pass.
const NEAR_KEYS: usize = 64;
/// Vectors of columns taken together.
const WIDE: usize = 2;

impl Op for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let keys = self.v.len() / self.dim;
        let mut packed = [0.0; NEAR_KEYS * WIDE * MAX_LANES];
        for first in (0..keys).step_by(NEAR_KEYS) {
            let keys = first..keys.min(first + NEAR_KEYS);
            let mut d = 0;
            // SAFETY: the processor has `V` by contract; columns below `dim` only.
            unsafe {
                while d + WIDE * V::LANES <= self.dim {
                    self.columns::<V, WIDE>(keys.clone(), d, &mut packed);
                    d += WIDE * V::LANES;
                }
                while d + V::LANES <= self.dim {
                    self.columns::<V, 1>(keys.clone(), d, &mut packed);
                    d += V::LANES;
                }
                if d < self.dim {
                    self.last_columns::<V>(keys, d);
                }
            }
        }
        if keys == 0 {
            for (acc, fade) in self.acc.chunks_mut(self.dim).zip(self.fade) {
                acc.iter_mut().for_each(|a| *a *= fade);
            }
        }
    }
}

/// Values of some keys in some columns: key `t`'s at `at + t * stride`.
#[derive(Clone, Copy)]
struct Values {
    at: *const f32,
    stride: usize,
}

impl Accumulate<'_> {
    /// All heads, columns `d..` of `N` vectors.
    ///
    /// # Safety
    /// The processor has `V`; keys and columns exist.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(
        &mut self,
        keys: Range<usize>,
        d: usize,
        packed: &mut [f32; NEAR_KEYS * WIDE * MAX_LANES],
    ) {
        let heads = self.fade.len();
        let stored = Values { at: self.v[keys.start * self.dim + d..].as_ptr(), stride: self.dim };
        // rows of values lie so far apart that they evict each other: the first heads leave a dense copy for the others
        let packed = packed.as_mut_ptr();
        let dense = Values { at: packed.cast_const(), stride: N * V::LANES };
        for h in (0..heads).step_by(4) {
            // SAFETY: these heads exist; `packed` has room for the keys' columns and holds them from the second time on.
            unsafe {
                match (heads - h, h) {
                    (1, 0) => self.tile::<V, 1, N, false>(h, d, keys.clone(), stored, packed),
                    (2, 0) => self.tile::<V, 2, N, false>(h, d, keys.clone(), stored, packed),
                    (3, 0) => self.tile::<V, 3, N, false>(h, d, keys.clone(), stored, packed),
                    (4, 0) => self.tile::<V, 4, N, false>(h, d, keys.clone(), stored, packed),
                    (_, 0) => self.tile::<V, 4, N, true>(h, d, keys.clone(), stored, packed),
                    (1, _) => self.tile::<V, 1, N, false>(h, d, keys.clone(), dense, packed),
                    (2, _) => self.tile::<V, 2, N, false>(h, d, keys.clone(), dense, packed),
                    (3, _) => self.tile::<V, 3, N, false>(h, d, keys.clone(), dense, packed),
                    _ => self.tile::<V, 4, N, false>(h, d, keys.clone(), dense, packed),
                }
            }
        }
    }

    /// Heads `h..h + H`, columns `d..` of `N` vectors; with `PACK`, the values are copied to `packed`.
    ///
    /// # Safety
    /// The processor has `V`; heads, keys and columns exist; `values` are theirs.
    #[inline(always)]
    unsafe fn tile<V: Vector, const H: usize, const N: usize, const PACK: bool>(
        &mut self,
        h: usize,
        d: usize,
        keys: Range<usize>,
        values: Values,
        packed: *mut f32,
    ) {
        let (dim, all_keys) = (self.dim, self.v.len() / self.dim);
        // SAFETY: indices stay below heads, keys and `dim` by contract.
        unsafe {
            let acc = self.acc.as_mut_ptr().add(h * dim + d);
            let mut sums = [[V::zero(); N]; H];
            for i in 0..H {
                for n in 0..N {
                    sums[i][n] = V::load(acc.add(i * dim + n * V::LANES));
                }
                if keys.start == 0 {
                    let fade = V::splat(self.fade[h + i]);
                    for n in 0..N {
                        sums[i][n] = sums[i][n].mul(fade);
                    }
                }
            }
            let p = self.p.as_ptr().add(h * all_keys + keys.start);
            let (mut at, mut to) = (values.at, packed);
            for t in 0..keys.len() {
                let mut column = [V::zero(); N];
                for n in 0..N {
                    column[n] = V::load(at.wrapping_add(n * V::LANES));
                    if PACK {
                        column[n].store(to.add(n * V::LANES));
                    }
                }
                for i in 0..H {
                    let weight = V::splat(*p.add(i * all_keys + t));
                    for n in 0..N {
                        sums[i][n] = weight.mul_add(column[n], sums[i][n]);
                    }
                }
                at = at.wrapping_add(values.stride);
                if PACK {
                    to = to.wrapping_add(N * V::LANES);
                }
            }
            for i in 0..H {
                for n in 0..N {
                    sums[i][n].store(acc.add(i * dim + n * V::LANES));
                }
            }
        }
    }

    /// All heads, the columns from `d`, fewer than a vector.
    ///
    /// # Safety
    /// The processor has `V`; the keys exist.
    #[inline(always)]
    unsafe fn last_columns<V: Vector>(&mut self, keys: Range<usize>, d: usize) {
        let (dim, all_keys, lanes) = (self.dim, self.v.len() / self.dim, self.dim - d);
        for (h, &fade) in self.fade.iter().enumerate() {
            let acc = &mut self.acc[h * dim + d..][..lanes];
            // SAFETY: `lanes` floats are left in each row.
            unsafe {
                let mut sum = V::load_first(acc.as_ptr(), lanes);
                if keys.start == 0 {
                    sum = sum.mul(V::splat(fade));
                }
                for t in keys.clone() {
                    let values = V::load_first(self.v[t * dim + d..].as_ptr(), lanes);
                    sum = V::splat(self.p[h * all_keys + t]).mul_add(values, sum);
                }
                sum.store_first(acc.as_mut_ptr(), lanes);
            }
        }
    }
}

/// `x = exp(x)` for each element, within 2 ulp; 0 below -104, 1 for 0, infinite above 88.73, NaN for NaN.
pub fn exp(simd: Simd, x: &mut [f32]) {
    simd.dispatch(Exp(x));
}

struct Exp<'a>(&'a mut [f32]);

impl Op for Exp<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let mut chunks = self.0.chunks_exact_mut(V::LANES);
        // SAFETY: the processor has `V` by contract; chunks are whole vectors, the rest is shorter than one.
        unsafe {
            for chunk in &mut chunks {
                exp_lanes(V::load(chunk.as_ptr())).store(chunk.as_mut_ptr());
            }
            let rest = chunks.into_remainder();
            if !rest.is_empty() {
                exp_lanes(V::load_first(rest.as_ptr(), rest.len())).store_first(rest.as_mut_ptr(), rest.len());
            }
        }
    }
}

/// `2^n * e^r` with `n` the nearest integer to `x / ln 2` and `|r| <= 0.35`, where the series to the seventh power errs by
/// `5e-9`. The power is applied in two halves, which keeps results near zero gradual and large ones infinite.
///
/// # Safety
/// The processor has `V`.
#[inline(always)]
unsafe fn exp_lanes<V: Vector>(x: V) -> V {
    /// Adding and taking away `1.5 * 2^23` leaves the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    /// `ln 2 = LN2_HIGH + LN2_LOW`; the product of `LN2_HIGH` and an integer below 2^15 is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const SERIES: [f32; 7] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    // SAFETY: arithmetic only.
    unsafe {
        let x = x.max(V::splat(-105.0)).min(V::splat(90.0));
        let round = V::splat(ROUND);
        let n = x.mul(V::splat(std::f32::consts::LOG2_E)).add(round).sub(round);
        let r = n.mul_add(V::splat(-LN2_LOW), n.mul_add(V::splat(-LN2_HIGH), x));
        let mut series = V::splat(SERIES[0]);
        for c in &SERIES[1..] {
            series = series.mul_add(r, V::splat(*c));
        }
        let e = series.mul_add(r, V::splat(1.0));
        let half = n.mul(V::splat(0.5)).add(round).sub(round);
        e.mul(half.pow2()).mul(n.sub(half).pow2())
    }
}
