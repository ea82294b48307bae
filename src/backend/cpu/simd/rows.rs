//! One token: dot products of a band of weight rows, decoded in registers, with one input vector.
//!
//! Several rows run side by side so that their chains hide each other's latency; each row's chain is the same alone.

use std::sync::atomic::{Ordering, compiler_fence};

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
    /// `count` E2M1 rows from `first`.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let (bytes, scales) = (self.row_bytes(), self.row_scales());
        let data = &self.data[first * bytes..][..count * bytes];
        Self { rows: count, data, scales: &self.scales[first * scales..][..count * scales], ..*self }
    }

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
    /// Bytes of a group.
    const BYTES: usize;
    /// Vectors of a group.
    const VECTORS: usize = size_of::<Self::Values>() / size_of::<V>();
    /// Scale bytes of a group.
    const SCALES: usize;
    /// Whether a group's products are summed before they join the chain, so that `super::digits` can do it in integers.
    const APART: bool = false;

    /// # Safety
    /// As [`Vector`]: a group at `p`, `SCALES` bytes at `scales`.
    unsafe fn decode(p: *const u8, scales: *const u8, seen: &mut V::Seen) -> Self::Values;

    /// Vector `I` of a group without scales.
    ///
    /// # Safety
    /// As [`Vector`]: a group at `p`.
    #[inline(always)]
    unsafe fn vector<const I: usize>(p: *const u8) -> V {
        // SAFETY: by contract; what is decoded besides is not used, and so not computed.
        unsafe { Self::decode(p, std::ptr::null(), &mut V::nothing_seen()).as_ref()[I] }
    }
}

pub(super) struct E4m3;
pub(super) struct E2m1;
pub(super) struct Bf16;
pub(super) struct F32;

impl<V: Vector> Decode<V> for E4m3 {
    type Values = [V; 4];
    const BYTES: usize = 4 * V::LANES;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn decode(p: *const u8, _: *const u8, seen: &mut V::Seen) -> [V; 4] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::e4m3(p, seen) }
    }

    #[inline(always)]
    unsafe fn vector<const I: usize>(p: *const u8) -> V {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::e4m3_vector::<I>(p) }
    }
}

impl<V: Vector> Decode<V> for E2m1 {
    type Values = [V; 8];
    const BYTES: usize = 4 * V::LANES;
    const SCALES: usize = V::LANES / 4;
    const APART: bool = true;

    #[inline(always)]
    unsafe fn decode(p: *const u8, scales: *const u8, _: &mut V::Seen) -> [V; 8] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::e2m1(p, scales) }
    }
}

impl<V: Vector> Decode<V> for Bf16 {
    type Values = [V; 2];
    const BYTES: usize = 4 * V::LANES;
    const SCALES: usize = 0;

    #[inline(always)]
    unsafe fn decode(p: *const u8, _: *const u8, _: &mut V::Seen) -> [V; 2] {
        // SAFETY: the caller's contract is that of the method.
        unsafe { V::bf16(p) }
    }
}

impl<V: Vector> Decode<V> for F32 {
    type Values = [V; 1];
    const BYTES: usize = 4 * V::LANES;
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
        self.check(simd);
        simd.dispatch(self);
    }

    /// Panics unless the slices have the sizes that the kernels rely on.
    pub(super) fn check(&self, simd: Simd) {
        self.weights.check();
        assert_eq!(self.out.len(), self.weights.rows, "one output a row");
        assert_eq!(self.x.len(), self.weights.padded_cols(simd.lanes()), "prepared columns");
    }
}

impl Op for Dots<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the processor has `V` by contract; `Dots::run` has checked the sizes.
        unsafe {
            match self.weights.storage {
                Storage::E4m3 => dots::<V, E4m3>(self),
                Storage::E2m1 => dots::<V, E2m1>(self),
                Storage::Bf16 => dots::<V, Bf16>(self),
                Storage::F32 => dots::<V, F32>(self),
                Storage::E4m3Rounded => unreachable!("rounded weights are decoded ahead"),
            }
        }
    }
}

/// Rows taken side by side.
const ROWS: usize = 4;
/// How far ahead of its reading a row's bytes are asked for: a memory latency's worth.
const AHEAD: usize = 1 << 10;

/// # Safety
/// The processor has `V`; the sizes of [`Rows::check`] and [`Dots::run`] hold.
#[inline(always)]
unsafe fn dots<V: Vector, D: Decode<V>>(op: Dots<'_>) {
    let Dots { weights: w, x, out } = op;
    let (row_bytes, row_scales) = (w.row_bytes(), w.row_scales());
    // rows a quarter of the band apart: each of the four streams through memory on its own, as prefetchers like it
    let quarter = w.rows.div_ceil(ROWS);
    for first in 0..quarter {
        // a row that is not there is the first one's twin, whose result is dropped
        let place = |r: usize| Some(first + r * quarter).filter(|&row| row < w.rows);
        let row = |r: usize| {
            let row = place(r).unwrap_or(first);
            (&w.data[row * row_bytes..][..row_bytes], &w.scales[row * row_scales..][..row_scales])
        };
        let rows = [row(0), row(1), row(2), row(3)];
        // SAFETY: each of the four is a whole row, and `x` its padded columns.
        let results = unsafe { four_rows::<V, D>(rows, x, w.factors) };
        for (r, result) in results.into_iter().enumerate() {
            if let Some(row) = place(r) {
                out[row] = result;
            }
        }
    }
}

/// One row on its way: where its next group is, its chain so far.
struct Row<V: Vector> {
    data: *const u8,
    scales: *const u8,
    sum: V,
    seen: V::Seen,
}

impl<V: Vector> Row<V> {
    #[inline(always)]
    unsafe fn new((data, scales): (&[u8], &[u8])) -> Self {
        // SAFETY: the processor has `V`, by contract of the caller.
        unsafe { Self { data: data.as_ptr(), scales: scales.as_ptr(), sum: V::zero(), seen: V::nothing_seen() } }
    }

    /// Adds one group's products to the chain, and asks for the bytes `ahead` of it unless that is 0.
    ///
    /// # Safety
    /// A group is left, and its inputs are at `x`.
    #[inline(always)]
    unsafe fn group<D: Decode<V>>(&mut self, x: *const f32, ahead: usize) {
        // SAFETY: by contract.
        unsafe {
            if ahead > 0 {
                V::prefetch(self.data.wrapping_add(ahead));
            }
            let weights = D::decode(self.data, self.scales, &mut self.seen);
            let mut sum = if D::APART { V::zero() } else { self.sum };
            for (i, w) in weights.as_ref().iter().enumerate() {
                sum = w.mul_add(V::load(x.add(i * V::LANES)), sum);
            }
            self.sum = if D::APART { self.sum.add(sum) } else { sum };
            self.data = self.data.add(D::BYTES);
            self.scales = self.scales.add(D::SCALES);
            // keeps the compiler from interleaving the rows and spilling what it then holds of all four
            compiler_fence(Ordering::SeqCst);
        }
    }

    /// Adds the products of a last, incomplete group.
    ///
    /// # Safety
    /// `bytes` and `scales` are what is left, its inputs with zeros behind are at `x`.
    #[inline(always)]
    unsafe fn tail<D: Decode<V>>(&mut self, bytes: &[u8], scales: &[u8], x: *const f32) {
        let tail = Tail::new(bytes, scales);
        (self.data, self.scales) = (tail.bytes.as_ptr(), tail.scales.as_ptr());
        // SAFETY: the tail is a whole group.
        unsafe { self.group::<D>(x, 0) }
    }
}

/// # Safety
/// The processor has `V`; `rows` are bytes and scales of four whole rows, `x` has their padded columns.
#[inline(always)]
unsafe fn four_rows<V: Vector, D: Decode<V>>(
    rows: [(&[u8], &[u8]); ROWS],
    x: &[f32],
    factors: [f32; 2],
) -> [f32; ROWS] {
    let (bytes, group) = (rows[0].0.len(), D::BYTES);
    let (groups, values) = (bytes / group, group_values::<V, D>());
    // SAFETY: groups below `groups` lie inside each row and `x`, the tail group in its buffer.
    unsafe {
        // four variables and no loop over them, so that they live in registers
        let (mut a, mut b, mut c, mut d) =
            (Row::<V>::new(rows[0]), Row::<V>::new(rows[1]), Row::<V>::new(rows[2]), Row::<V>::new(rows[3]));
        let mut at = x.as_ptr();
        let mut left = groups;
        let line = 64 / group;
        while left >= line {
            for i in 0..line {
                // a group of each row in turn: chains must alternate closely for the processor to overlap them
                let ahead = if i == 0 { AHEAD } else { 0 };
                a.group::<D>(at, ahead);
                b.group::<D>(at, ahead);
                c.group::<D>(at, ahead);
                d.group::<D>(at, ahead);
                at = at.add(values);
            }
            left -= line;
        }
        while left > 0 {
            a.group::<D>(at, 0);
            b.group::<D>(at, 0);
            c.group::<D>(at, 0);
            d.group::<D>(at, 0);
            at = at.add(values);
            left -= 1;
        }
        if groups * group < bytes {
            let rest =
                rows.map(|(data, scales)| (&data[groups * group..], &scales[scales.len().min(groups * D::SCALES)..]));
            a.tail::<D>(rest[0].0, rest[0].1, at);
            b.tail::<D>(rest[1].0, rest[1].1, at);
            c.tail::<D>(rest[2].0, rest[2].1, at);
            d.tail::<D>(rest[3].0, rest[3].1, at);
        }
        let sums = V::sum4([a.sum, b.sum, c.sum, d.sum]);
        let nan = [V::saw_nan(a.seen), V::saw_nan(b.seen), V::saw_nan(c.seen), V::saw_nan(d.seen)];
        std::array::from_fn(|r| if nan[r] { f32::NAN } else { finish(sums[r], factors) })
    }
}

/// Values in a group.
#[inline(always)]
pub(super) const fn group_values<V: Vector, D: Decode<V>>() -> usize {
    D::VECTORS * V::LANES
}
