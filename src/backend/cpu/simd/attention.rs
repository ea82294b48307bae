//! The inner products of attention: scores of queries against keys, weighted sums of values, and the exponential.

use super::gemm::{Tile, reduce};
use super::vector::Vector;
use super::{Op, Simd};

/// `out[h][t] = q[h] . k[t]` for `q` `[heads, dim]`, `k` `[keys, dim]`, `out` `[heads, keys]`; an element's bits depend on
/// its own head and key alone.
///
/// # Panics
/// If `dim` is 0 or the slices' lengths do not fit.
pub fn scores(simd: Simd, q: &[f32], k: &[f32], dim: usize, out: &mut [f32]) {
    assert!(dim > 0 && q.len() % dim == 0 && k.len() % dim == 0, "{} and {} by {dim}", q.len(), k.len());
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
    assert!(dim > 0 && v.len() % dim == 0, "{} by {dim}", v.len());
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

impl Op for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let heads = self.fade.len();
        for h in (0..heads).step_by(4) {
            // SAFETY: the processor has `V` by contract; these heads exist.
            unsafe {
                match heads - h {
                    1 => self.heads::<V, 1>(h),
                    2 => self.heads::<V, 2>(h),
                    3 => self.heads::<V, 3>(h),
                    _ => self.heads::<V, 4>(h),
                }
            }
        }
    }
}

impl Accumulate<'_> {
    /// Heads `h..h + H`, all columns.
    ///
    /// # Safety
    /// The processor has `V`; the heads exist.
    #[inline(always)]
    unsafe fn heads<V: Vector, const H: usize>(&mut self, h: usize) {
        let wide = 3 * V::LANES;
        let mut d = 0;
        // SAFETY: columns below `dim` only.
        unsafe {
            while d + wide <= self.dim {
                self.columns::<V, H, 3>(h, d, V::LANES);
                d += wide;
            }
            while d < self.dim {
                self.columns::<V, H, 1>(h, d, V::LANES.min(self.dim - d));
                d += V::LANES;
            }
        }
    }

    /// Heads `h..h + H`, columns `d..` of `N` vectors, the last (only) one `lanes` wide.
    ///
    /// # Safety
    /// The processor has `V`; heads and columns exist; `lanes == V::LANES` unless `N == 1`.
    #[inline(always)]
    unsafe fn columns<V: Vector, const H: usize, const N: usize>(&mut self, h: usize, d: usize, lanes: usize) {
        let (dim, keys) = (self.dim, self.v.len() / self.dim);
        // SAFETY: indices stay below heads, keys and `dim` by contract.
        unsafe {
            let acc = self.acc.as_mut_ptr().add(h * dim + d);
            let mut sums = [[V::zero(); N]; H];
            for i in 0..H {
                let fade = V::splat(self.fade[h + i]);
                for n in 0..N {
                    sums[i][n] = load::<V>(acc.add(i * dim + n * V::LANES), lanes).mul(fade);
                }
            }
            let p = self.p.as_ptr().add(h * keys);
            let mut v = self.v.as_ptr().wrapping_add(d);
            for t in 0..keys {
                let mut values = [V::zero(); N];
                for n in 0..N {
                    values[n] = load::<V>(v.wrapping_add(n * V::LANES), lanes);
                }
                for i in 0..H {
                    let weight = V::splat(*p.add(i * keys + t));
                    for n in 0..N {
                        sums[i][n] = weight.mul_add(values[n], sums[i][n]);
                    }
                }
                v = v.wrapping_add(dim);
            }
            for i in 0..H {
                for n in 0..N {
                    let to = acc.add(i * dim + n * V::LANES);
                    if lanes == V::LANES { sums[i][n].store(to) } else { sums[i][n].store_first(to, lanes) }
                }
            }
        }
    }
}

/// # Safety
/// The processor has `V`; `lanes` floats at `p`.
#[inline(always)]
unsafe fn load<V: Vector>(p: *const f32, lanes: usize) -> V {
    // SAFETY: by contract.
    unsafe { if lanes == V::LANES { V::load(p) } else { V::load_first(p, lanes) } }
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
    const LN2_HIGH: f32 = 0.693_359_375;
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
