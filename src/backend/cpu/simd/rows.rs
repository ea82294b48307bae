//! One token: dot products of a band of weight rows, decoded in registers, with one input vector.
//!
//! Several rows run side by side so that their chains hide each other's latency; each row's chain is the same alone.

use super::layout::Form;
use super::vector::{MAX_LANES, Vector};
use super::{Op, Simd};

/// How the rows of a band are stored, and hence decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend::cpu) enum Storage {
    /// E4M3 whose scales are folded into the input and the factors.
    E4m3,
    /// E4M3 times a float32 scale per 128 columns, rounded to bf16: decoded ahead of the product, not in registers.
    E4m3Rounded,
    /// E2M1 with E8M0 scales per row and 32 columns.
    E2m1,
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
}

impl Storage {
    /// The column order the decoded values come in.
    pub(in crate::backend::cpu) fn form(self) -> Form {
        match self {
            Self::E4m3 => Form::Bytes,
            Self::E2m1 => Form::Nibbles,
            Self::Bf16 => Form::Halves,
            Self::E4m3Rounded | Self::F32 => Form::Plain,
        }
    }

    fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::E4m3 | Self::E4m3Rounded => cols,
            Self::E2m1 => cols / 2,
            Self::Bf16 => cols * 2,
            Self::F32 => cols * 4,
        }
    }
}

/// A band of stored rows whose outputs are `sum * factors[0] * factors[1]`.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Rows<'a> {
    pub storage: Storage,
    pub rows: usize,
    pub cols: usize,
    /// `rows` rows of `row_bytes(cols)` bytes.
    pub data: &'a [u8],
    /// E2M1: `[rows, cols / 32]` bytes. E4M3 rounded: little-endian float32 `[cols / 128]`. Otherwise empty.
    pub scales: &'a [u8],
    /// Powers of two that undo what the input and the decoding were scaled by.
    pub factors: [f32; 2],
}

impl Rows<'_> {
    /// Bytes of one stored row.
    pub(super) fn row_bytes(&self) -> usize {
        self.storage.row_bytes(self.cols)
    }

    /// Scale bytes of one row.
    pub(super) fn row_scales(&self) -> usize {
        if self.storage == Storage::E2m1 { self.cols / 32 } else { 0 }
    }

    /// Columns with the last group filled up.
    pub(super) fn padded_cols(&self, lanes: usize) -> usize {
        self.cols.next_multiple_of(self.storage.form().group(lanes))
    }

    /// Panics unless the slices have the sizes that the kernels rely on.
    pub(super) fn check(&self) {
        assert_eq!(self.data.len(), self.rows * self.row_bytes(), "bytes of {} rows of {}", self.rows, self.cols);
        let scales = match self.storage {
            Storage::E2m1 => self.rows * self.row_scales(),
            Storage::E4m3Rounded => self.cols / 128 * 4,
            _ => 0,
        };
        assert_eq!(self.scales.len(), scales, "scale bytes of {} rows of {}", self.rows, self.cols);
        let multiple = match self.storage {
            Storage::E4m3 | Storage::E4m3Rounded => 128,
            Storage::E2m1 => 32,
            _ => 1,
        };
        assert_eq!(self.cols % multiple, 0, "columns {} must be a multiple of {multiple}", self.cols);
    }
}

/// The end of every output's chain. NaN is made canonical, since hardware hands its payload on by operand order.
#[inline(always)]
pub(super) fn finish(sum: f32, factors: [f32; 2]) -> f32 {
    let y = sum * factors[0] * factors[1];
    if y.is_nan() { f32::NAN } else { y }
}

/// How the groups of one storage decode.
pub(super) trait Decode<V: Vector> {
    type Values: AsRef<[V]>;
    /// Scale bytes of a group.
    const SCALES: usize;

    /// # Safety
    /// As [`Vector`]: a group at `p`, `SCALES` bytes at `scales`.
    unsafe fn decode(p: *const u8, scales: *const u8, seen: &mut V::Seen) -> Self::Values;
}

pub(super) struct E4m3;
pub(super) struct E2m1;
pub(super) struct Bf16;
pub(super) struct F32;

impl<V: Vector> Decode<V> for E4m3 {
    type Values = [V; 4];
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn decode(p: *const u8, _: *const u8, seen: &mut V::Seen) -> [V; 4] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::e4m3(p, seen) }
    }
}

impl<V: Vector> Decode<V> for E2m1 {
    type Values = [V; 8];
    const SCALES: usize = V::LANES / 4;

    #[inline(always)]
    unsafe fn decode(p: *const u8, scales: *const u8, _: &mut V::Seen) -> [V; 8] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::e2m1(p, scales) }
    }
}

impl<V: Vector> Decode<V> for Bf16 {
    type Values = [V; 2];
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn decode(p: *const u8, _: *const u8, _: &mut V::Seen) -> [V; 2] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::bf16(p) }
    }
}

impl<V: Vector> Decode<V> for F32 {
    type Values = [V; 1];
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn decode(p: *const u8, _: *const u8, _: &mut V::Seen) -> [V; 1] {
        // SAFETY: a group is `LANES` floats, unaligned loads allowed.
        unsafe { [V::load(p.cast())] }
    }
}

/// A last, incomplete group filled up with zeros (E2M1: with scale 1).
pub(super) struct Tail {
    pub bytes: [u8; 4 * MAX_LANES],
    pub scales: [u8; MAX_LANES / 4],
}

impl Tail {
    #[inline(always)]
    pub(super) fn new(bytes: &[u8], scales: &[u8]) -> Self {
        let mut tail = Self { bytes: [0; 4 * MAX_LANES], scales: [127; MAX_LANES / 4] };
        tail.bytes[..bytes.len()].copy_from_slice(bytes);
        tail.scales[..scales.len()].copy_from_slice(scales);
        tail
    }
}

/// `out[row] = finish(row . x)` for the rows of a band. Panics on slices of wrong sizes.
pub(in crate::backend::cpu) struct Dots<'a> {
    pub weights: Rows<'a>,
    /// Prepared input: `padded_cols` values in the storage's order, zeros behind the last column.
    pub x: &'a [f32],
    /// `[rows]`.
    pub out: &'a mut [f32],
}

impl Dots<'_> {
    /// Computes the band.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        self.weights.check();
        assert_eq!(self.out.len(), self.weights.rows, "one output a row");
        assert_eq!(self.x.len(), self.weights.padded_cols(simd.lanes()), "prepared columns");
        simd.dispatch(self);
    }
}

impl Op for Dots<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the processor has `V` by contract; `Dots::run` has checked the sizes.
        unsafe {
            match self.weights.storage {
                Storage::E4m3 => dots::<V, E4m3, 4>(self),
                Storage::E2m1 => dots::<V, E2m1, 4>(self),
                Storage::Bf16 => dots::<V, Bf16, 4>(self),
                Storage::F32 => dots::<V, F32, 8>(self),
                Storage::E4m3Rounded => unreachable!("rounded weights are decoded ahead"),
            }
        }
    }
}

/// # Safety
/// The sizes of [`Rows::check`] and [`Dots::run`] hold.
#[inline(always)]
unsafe fn dots<V: Vector, D: Decode<V>, const R: usize>(op: Dots<'_>) {
    let Dots { weights: w, x, out } = op;
    let (row_bytes, row_scales) = (w.row_bytes(), w.row_scales());
    let mut row = 0;
    while row < w.rows {
        let count = if row + R <= w.rows { R } else { 1 };
        let data = &w.data[row * row_bytes..(row + count) * row_bytes];
        let scales = &w.scales[row * row_scales..(row + count) * row_scales];
        // SAFETY: `data` and `scales` are those of `count` rows.
        unsafe {
            if count == R {
                band::<V, D, R>(data, scales, x, w.factors, &mut out[row..row + R]);
            } else {
                band::<V, D, 1>(data, scales, x, w.factors, &mut out[row..row + 1]);
            }
        }
        row += count;
    }
}

/// # Safety
/// `data` and `scales` hold `R` rows, `x` their padded columns.
#[inline(always)]
unsafe fn band<V: Vector, D: Decode<V>, const R: usize>(
    data: &[u8],
    scales: &[u8],
    x: &[f32],
    factors: [f32; 2],
    out: &mut [f32],
) {
    let (bytes, row_scales) = (data.len() / R, scales.len() / R);
    let group = 4 * V::LANES;
    let groups = bytes / group;
    // groups taken together: a cache line of each row
    let step = (64 / group).max(1);
    // SAFETY: groups below `groups` lie inside each row and `x`, the tail group in its buffer.
    unsafe {
        let mut sums = [V::zero(); R];
        let mut seen = [V::nothing_seen(); R];
        let mut x_at = x.as_ptr();
        let mut g = 0;
        while g + step <= groups {
            for r in 0..R {
                let p = data.as_ptr().add(r * bytes + g * group);
                V::prefetch(p.wrapping_add(R * bytes));
                let mut x_at = x_at;
                for i in 0..step {
                    let s = scales.as_ptr().add(r * row_scales + (g + i) * D::SCALES);
                    x_at = fold::<V, D>(p.add(i * group), s, x_at, &mut sums[r], &mut seen[r]);
                }
            }
            x_at = x_at.add(step * group_values::<V, D>());
            g += step;
        }
        while g < groups {
            for r in 0..R {
                let p = data.as_ptr().add(r * bytes + g * group);
                let s = scales.as_ptr().add(r * row_scales + g * D::SCALES);
                fold::<V, D>(p, s, x_at, &mut sums[r], &mut seen[r]);
            }
            x_at = x_at.add(group_values::<V, D>());
            g += 1;
        }
        if groups * group < bytes {
            for r in 0..R {
                let first_scale = r * row_scales + groups * D::SCALES;
                let tail = Tail::new(
                    &data[r * bytes + groups * group..(r + 1) * bytes],
                    &scales[first_scale.min(scales.len())..(r + 1) * row_scales],
                );
                fold::<V, D>(tail.bytes.as_ptr(), tail.scales.as_ptr(), x_at, &mut sums[r], &mut seen[r]);
            }
        }
        for first in (0..R).step_by(4) {
            let last = R - 1;
            let four = [sums[first], sums[last.min(first + 1)], sums[last.min(first + 2)], sums[last.min(first + 3)]];
            let totals = V::sum4(four);
            for r in first..R.min(first + 4) {
                out[r] = if V::saw_nan(seen[r]) { f32::NAN } else { finish(totals[r - first], factors) };
            }
        }
    }
}

/// Values in a group.
#[inline(always)]
pub(super) const fn group_values<V: Vector, D: Decode<V>>() -> usize {
    size_of::<D::Values>() / size_of::<V>() * V::LANES
}

/// Adds one group's products to a row's chain; returns where the next group's inputs are.
///
/// # Safety
/// A group at `p`, its scales at `scales`, its inputs at `x`.
#[inline(always)]
unsafe fn fold<V: Vector, D: Decode<V>>(
    p: *const u8,
    scales: *const u8,
    mut x: *const f32,
    sum: &mut V,
    seen: &mut V::Seen,
) -> *const f32 {
    // SAFETY: by contract.
    unsafe {
        for w in D::decode(p, scales, seen).as_ref() {
            *sum = w.mul_add(V::load(x), *sum);
            x = x.add(V::LANES);
        }
    }
    x
}
