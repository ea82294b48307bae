//! One token of quantised values, or a few: dot products with E2M1 weights in integers, faster than [`super::rows`], same
//! bits.
//!
//! Values of an input that was rounded to E4M3 are integers below `2^18` times a power of two per 128 columns, and twice
//! an E2M1 value is an integer of at most 12. The eight products of a lane within a block of 32 columns then have a sum
//! that is exact both in 32-bit integers and, unless it exceeds 24 bits, in the float32 additions of the other kernels
//! (which sum a group of E2M1 apart for this reason). Multiplied by the block's scale it joins the same chain.
//!
//! Bytes are what AVX2 and AVX-512 VNNI multiply fastest, so an integer is split into three signed digits, `fine + 8 * middle + 2048 *
//! coarse`, and weights are taken as `2 w + 12`, which is not negative; what the 12 adds is known beforehand.
//!
//! [`Digits::fill`] tells which inputs qualify, and rows with scales far from 1 go the other way.

use super::portable::Portable;
use super::rows::{Dots, Rows, Storage, finish};
use super::vector::{MAX_LANES, Vector};
use super::{Level, Op, Simd};

/// Columns of one [`Digits`].
pub(in crate::backend::cpu) const DIGIT_COLS: usize = 256;
/// Bytes of E2M1 weights that meet one [`Digits`], and their scales.
const BYTES: usize = DIGIT_COLS / 2;
const SCALES: usize = DIGIT_COLS / 32;

/// Columns that share a power of two.
const POWER_COLS: usize = 128;
/// Integers of a block whose largest magnitude is in `2^e ..` count in units of two to `e` minus this.
const UNIT: i32 = 17;
/// Exponents of the largest magnitude of a block that are taken, and scale bytes: no product leaves the normal range.
const EXPONENTS: std::ops::RangeInclusive<i32> = -60..=60;
const SCALE_BYTES: std::ops::RangeInclusive<u8> = 80..=188;

/// [`POWER_COLS`] columns in digits.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Group {
    /// Fine, middle and coarse digits of the even columns, which meet low nibbles.
    pub even: [[i8; 64]; 3],
    /// Those of the odd columns.
    pub odd: [[i8; 64]; 3],
    /// 12 times the sum of the integers of columns `8 l .. 8 l + 8`.
    pub excess: [i32; 16],
}

/// [`DIGIT_COLS`] columns of an input in digits.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(in crate::backend::cpu) struct Digits {
    pub(super) groups: [Group; 2],
    /// What to add to the bits of a float32 that is the block's weight scale, to have the scale of the integer sums;
    /// blocks 0, 2, 4, 6, then 1, 3, 5, 7.
    pub(super) exponents: [i32; 8],
    /// Of each 64 columns, whether a fine digit is not zero; few values, much smaller than the largest, have one.
    pub(super) has_fine: [bool; 4],
    is_exact: bool,
}

impl Digits {
    /// All columns zero.
    pub(in crate::backend::cpu) const ZERO: Self = {
        let group = Group { even: [[0; 64]; 3], odd: [[0; 64]; 3], excess: [0; 16] };
        Self { groups: [group; 2], exponents: [0; 8], has_fine: [false; 4], is_exact: true }
    };

    /// Takes up to [`DIGIT_COLS`] columns, the missing ones being zero. Whether the integers stand for them exactly, and
    /// their products sum to what float32 sums to, is kept for [`DigitDots::takes`].
    pub(in crate::backend::cpu) fn fill(&mut self, simd: Simd, x: &[f32]) {
        assert!(x.len() <= DIGIT_COLS, "{} columns", x.len());
        simd.dispatch(Fill { digits: self, x });
    }
}

struct Fill<'a> {
    digits: &'a mut Digits,
    x: &'a [f32],
}

impl Op for Fill<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // plain loops that compilers vectorise
        let Self { digits, x } = self;
        let mut values = [0.0; DIGIT_COLS];
        values[..x.len()].copy_from_slice(x);
        let (blocks, _) = values.as_chunks::<POWER_COLS>();
        digits.is_exact = true;
        for (b, (block, group)) in blocks.iter().zip(&mut digits.groups).enumerate() {
            let Some((exponent, integers)) = to_integers(block) else {
                digits.is_exact = false;
                return;
            };
            digits.is_exact &= split(&integers, group);
            for (has_fine, integers) in digits.has_fine[2 * b..].iter_mut().zip(integers.as_chunks::<64>().0) {
                *has_fine = integers.iter().fold(0, |bits, integer| bits | integer) & 7 != 0;
            }
            // twice a weight is what is multiplied
            let bits = (exponent - UNIT - 1) * (1 << 23);
            digits.exponents[2 * b..2 * b + 2].fill(bits);
            digits.exponents[4 + 2 * b..6 + 2 * b].fill(bits);
        }
    }
}

/// The integers that `block` is in units of `2^(exponent - UNIT)`, if it is.
#[inline(always)]
fn to_integers(block: &[f32; POWER_COLS]) -> Option<(i32, [i32; POWER_COLS])> {
    let largest = block.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let exponent = if largest == 0 { 0 } else { (largest >> 23) as i32 - 127 };
    // no E4M3 value has more than three bits behind its first, and the digits have no room for more
    if !EXPONENTS.contains(&exponent) || largest & 0x007F_FFFF > 0x0070_0000 {
        return None;
    }
    let power = |e: i32| f32::from_bits(((127 + e) as u32) << 23);
    let (per_unit, unit) = (power(UNIT - exponent), power(exponent - UNIT));
    // added to a float below 2^22, this leaves its nearest integer in the low bits
    const ROUND: f32 = (3 << 22) as f32;
    let (mut integers, mut rest) = ([0; POWER_COLS], 0);
    for (integer, &x) in integers.iter_mut().zip(block) {
        let rounded = x * per_unit + ROUND;
        *integer = rounded.to_bits() as i32 - ROUND.to_bits() as i32;
        rest |= ((rounded - ROUND) * unit - x).to_bits();
    }
    (rest == 0).then_some((exponent, integers))
}

/// Splits integers into digits. False if a lane's products may have a sum that float32 would round.
#[inline(always)]
fn split(integers: &[i32; POWER_COLS], group: &mut Group) -> bool {
    for i in 0..POWER_COLS / 2 {
        for (digits, integer) in [(&mut group.even, integers[2 * i]), (&mut group.odd, integers[2 * i + 1])] {
            let fine = ((integer + 4) & 7) - 4;
            let rest = (integer - fine) >> 3;
            let middle = rest as i8;
            let coarse = (rest - i32::from(middle)) >> 8;
            digits[0][i] = fine as i8;
            digits[1][i] = middle;
            digits[2][i] = coarse as i8;
        }
    }
    let mut rounds = false;
    for (excess, lane) in group.excess.iter_mut().zip(integers.as_chunks::<8>().0) {
        let (mut sum, mut size, mut bits) = (0, 0, 0);
        for &integer in lane {
            sum += integer;
            size += integer.abs();
            bits |= integer;
        }
        *excess = 12 * sum;
        // sums stay below 2^25, so even integers leave one bit to spare
        rounds |= 12 * size > 1 << 24 && bits & 1 == 1;
    }
    !rounds
}

/// A level with integer products.
pub(super) trait Integers: Vector {
    /// Adds to each sum the products of [`DIGIT_COLS`] columns with its input, `8 * LANES` columns at a time.
    ///
    /// # Safety
    /// As [`Vector`]: [`BYTES`] at `codes`, [`SCALES`] at `scales`, all of them in [`SCALE_BYTES`].
    unsafe fn add_products<const T: usize>(sums: &mut [Self; T], codes: *const u8, scales: *const u8, x: [&Digits; T]);
}

impl Simd {
    /// Whether [`DigitDots`] exists for this level.
    pub(in crate::backend::cpu) fn takes_digits(self) -> bool {
        match self.level() {
            Level::Portable | Level::Avx2 => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => is_x86_feature_detected!("avx512vnni"),
            _ => false,
        }
    }
}

/// What [`Dots`] computes, from an input that is there in digits as well.
pub(in crate::backend::cpu) struct DigitDots<'a> {
    pub dots: Dots<'a>,
    /// The input of `dots`, its columns in their own order; as many as cover them.
    pub digits: &'a [Digits],
}

impl DigitDots<'_> {
    /// Whether products of this input have the same bits in integers.
    pub(in crate::backend::cpu) fn takes(digits: &[Digits]) -> bool {
        !digits.is_empty() && digits.iter().all(|d| d.is_exact)
    }

    /// Computes the band. Panics on slices of wrong sizes, other storage than E2M1, or a level or an input that is not
    /// taken.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        self.dots.check(simd);
        let Self { dots: Dots { weights: w, x, out }, digits } = self;
        assert_eq!(w.storage, Storage::E2m1, "storage of integer products");
        assert_eq!(digits.len(), w.cols.div_ceil(DIGIT_COLS), "columns in digits");
        assert!(Self::takes(digits), "an input that integers do not stand for");
        assert!(simd.takes_digits(), "integer products on {}", simd.level());
        // rows one after another, as they lie in memory: the chain of one is short enough to look past its end
        for (four, out) in out.chunks_mut(ROWS).enumerate() {
            let weights = w.part(four * ROWS, out.len());
            if !are_taken(weights.scales) {
                Dots { weights, x, out }.run(simd);
                continue;
            }
            match simd.level() {
                // SAFETY: `Portable` needs no instructions beyond the target's own; sizes and scales were checked.
                Level::Portable => unsafe { rows::<Portable>(weights, digits, out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Simd` of this level exists only where the processor has its features; as above.
                Level::Avx2 => unsafe { rows_avx2(weights, digits, out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above; `takes_digits` has asked for VNNI.
                Level::Avx512 => unsafe { rows_avx512(weights, digits, out) },
                level => unreachable!("no integer products for {level}"),
            }
        }
    }
}

/// Whether all of a weight's scales are in [`SCALE_BYTES`].
fn are_taken(scales: &[u8]) -> bool {
    let above = scales.iter().fold(0, |above: u8, s| above.max(s.wrapping_sub(*SCALE_BYTES.start())));
    above <= SCALE_BYTES.end() - SCALE_BYTES.start()
}

/// Most tokens that meet a weight together.
pub(in crate::backend::cpu) const DIGIT_TOKENS: usize = 4;

/// [`DigitDots`] of `T` tokens with the same band.
pub(in crate::backend::cpu) struct FewDigitDots<'a, const T: usize> {
    pub dots: [DigitDots<'a>; T],
    /// [`FewDigitDots::SCRATCH`] floats.
    pub scratch: &'a mut [f32],
}

impl<const T: usize> FewDigitDots<'_, T> {
    /// Floats of scratch that a call needs.
    pub(in crate::backend::cpu) const SCRATCH: usize = NEAR_ROWS * T * MAX_LANES;

    /// Computes the band, one token after the other where together does not work. Panics as [`DigitDots::run`] does, and
    /// on tokens of different bands.
    pub(in crate::backend::cpu) fn run(self, simd: Simd) {
        let Self { dots, scratch } = self;
        let w = dots[0].dots.weights;
        if !w.cols.is_multiple_of(DIGIT_COLS) || !are_taken(w.scales) || T == 1 {
            return dots.into_iter().for_each(|dots| dots.run(simd));
        }
        for DigitDots { dots, digits } in &dots {
            dots.check(simd);
            assert_eq!(dots.weights.storage, Storage::E2m1, "storage of integer products");
            assert!(std::ptr::eq(dots.weights.data, w.data) && dots.weights.rows == w.rows, "tokens of one band");
            assert_eq!(digits.len(), w.cols / DIGIT_COLS, "columns in digits");
            assert!(DigitDots::takes(digits), "an input that integers do not stand for");
        }
        assert!(scratch.len() >= Self::SCRATCH, "scratch for {T} tokens");
        assert!(simd.takes_digits(), "integer products on {}", simd.level());
        let digits = dots.each_ref().map(|dots| dots.digits);
        let mut out = dots.map(|dots| dots.dots.out);
        for first in (0..w.rows).step_by(NEAR_ROWS) {
            let near = w.part(first, NEAR_ROWS.min(w.rows - first));
            let out = out.each_mut().map(|out| &mut out[first..][..near.rows]);
            match simd.level() {
                // SAFETY: `Portable` needs no instructions beyond the target's own; sizes and scales were checked.
                Level::Portable => unsafe { near_rows::<Portable, T>(near, digits, out, scratch) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Simd` of this level exists only where the processor has its features; as above.
                Level::Avx2 => unsafe { near_rows_avx2(near, digits, out, scratch) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above; `takes_digits` has asked for VNNI.
                Level::Avx512 => unsafe { near_rows_avx512(near, digits, out, scratch) },
                level => unreachable!("no integer products for {level}"),
            }
        }
    }
}

/// Rows whose accumulators are put aside together.
const NEAR_ROWS: usize = 32;
/// Inputs' digits that stay in the first-level cache while those rows pass: 1024 columns.
const NEAR_DIGITS: usize = 4;

/// # Safety
/// The processor has AVX2 and FMA; otherwise as [`near_rows`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn near_rows_avx2<const T: usize>(
    w: Rows<'_>,
    digits: [&[Digits]; T],
    out: [&mut [f32]; T],
    scratch: &mut [f32],
) {
    // SAFETY: by contract.
    unsafe { near_rows::<super::avx2::Avx2, T>(w, digits, out, scratch) }
}

/// # Safety
/// The processor has AVX-512 F, BW and VNNI; otherwise as [`near_rows`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
unsafe fn near_rows_avx512<const T: usize>(
    w: Rows<'_>,
    digits: [&[Digits]; T],
    out: [&mut [f32]; T],
    scratch: &mut [f32],
) {
    // SAFETY: by contract.
    unsafe { near_rows::<super::avx512::Avx512, T>(w, digits, out, scratch) }
}

/// # Safety
/// The processor has `V`; all `digits` cover the columns, which are whole [`Digits`], all `out` have the rows, at most
/// [`NEAR_ROWS`], their scales are in [`SCALE_BYTES`]; `scratch` is [`FewDigitDots::SCRATCH`] floats.
#[inline(always)]
unsafe fn near_rows<V: Integers, const T: usize>(
    w: Rows<'_>,
    digits: [&[Digits]; T],
    out: [&mut [f32]; T],
    scratch: &mut [f32],
) {
    let (row_bytes, row_scales, chains) = (w.row_bytes(), w.row_scales(), scratch.as_mut_ptr());
    // SAFETY: by contract; a row's chains are `T` vectors of the scratch.
    unsafe {
        for first in (0..digits[0].len()).step_by(NEAR_DIGITS) {
            let last = digits[0].len().min(first + NEAR_DIGITS);
            for row in 0..w.rows {
                let (codes, scales) = (w.data[row * row_bytes..].as_ptr(), w.scales[row * row_scales..].as_ptr());
                let mut sums = [V::zero(); T];
                for t in 0..T {
                    if first > 0 {
                        sums[t] = V::load(chains.add((row * T + t) * V::LANES));
                    }
                }
                for d in first..last {
                    // the same columns of a later row
                    V::prefetch(codes.wrapping_add(d * BYTES + ROWS_AHEAD * row_bytes));
                    V::prefetch(codes.wrapping_add(d * BYTES + ROWS_AHEAD * row_bytes + 64));
                    V::add_products(&mut sums, codes.add(d * BYTES), scales.add(d * SCALES), digits.map(|x| &x[d]));
                }
                for t in 0..T {
                    sums[t].store(chains.add((row * T + t) * V::LANES));
                }
            }
        }
        for (t, out) in out.into_iter().enumerate() {
            for (four, out) in out.chunks_mut(ROWS).enumerate() {
                let sum = |r: usize| V::load(chains.add(((four * ROWS + r.min(out.len() - 1)) * T + t) * V::LANES));
                let totals = V::sum4([sum(0), sum(1), sum(2), sum(3)]);
                for (out, total) in out.iter_mut().zip(totals) {
                    *out = finish(total, w.factors);
                }
            }
        }
    }
}

/// How many rows ahead bytes are asked for.
const ROWS_AHEAD: usize = 3;

/// Rows whose chains are reduced together.
const ROWS: usize = 4;

/// # Safety
/// The processor has AVX2 and FMA; otherwise as [`rows`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_avx2(w: Rows<'_>, digits: &[Digits], out: &mut [f32]) {
    // SAFETY: by contract.
    unsafe { rows::<super::avx2::Avx2>(w, digits, out) }
}

/// # Safety
/// The processor has AVX-512 F, BW and VNNI; otherwise as [`rows`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
unsafe fn rows_avx512(w: Rows<'_>, digits: &[Digits], out: &mut [f32]) {
    // SAFETY: by contract.
    unsafe { rows::<super::avx512::Avx512>(w, digits, out) }
}

/// # Safety
/// The processor has `V`; `digits` cover the columns, `out` has up to [`ROWS`] rows, their scales are in [`SCALE_BYTES`].
#[inline(always)]
unsafe fn rows<V: Integers>(w: Rows<'_>, digits: &[Digits], out: &mut [f32]) {
    // SAFETY: the processor has `V`, and the chunks are whole rows.
    unsafe {
        let mut sums = [V::zero(); ROWS];
        let rows = w.data.chunks(w.row_bytes()).zip(w.scales.chunks(w.row_scales()));
        for (sum, (codes, scales)) in sums.iter_mut().zip(rows) {
            *sum = chain::<V>(codes, scales, digits);
        }
        for (out, total) in out.iter_mut().zip(V::sum4(sums)) {
            *out = finish(total, w.factors);
        }
    }
}

/// How far ahead of its reading a row's bytes are asked for.
const AHEAD: usize = 3 << 10;

/// # Safety
/// The processor has `V`; `digits` cover the columns of `codes` and `scales`.
#[inline(always)]
unsafe fn chain<V: Integers>(codes: &[u8], scales: &[u8], digits: &[Digits]) -> V {
    let (whole, rest) = codes.as_chunks::<BYTES>();
    let (whole_scales, rest_scales) = scales.as_chunks::<SCALES>();
    // SAFETY: the processor has `V`, by contract; chunks are whole.
    unsafe {
        let mut sum = [V::zero()];
        for ((codes, scales), x) in whole.iter().zip(whole_scales).zip(digits) {
            V::prefetch(codes.as_ptr().wrapping_add(AHEAD));
            V::prefetch(codes.as_ptr().wrapping_add(AHEAD + 64));
            V::prefetch(scales.as_ptr().wrapping_add(AHEAD / (BYTES / SCALES)));
            V::add_products(&mut sum, codes.as_ptr(), scales.as_ptr(), [x]);
        }
        if let Some(x) = digits.get(whole.len()) {
            let (mut codes, mut scales) = ([0; BYTES], [127; SCALES]);
            codes[..rest.len()].copy_from_slice(rest);
            scales[..rest_scales.len()].copy_from_slice(rest_scales);
            V::add_products(&mut sum, codes.as_ptr(), scales.as_ptr(), [x]);
        }
        sum[0]
    }
}

#[cfg(test)]
mod tests;
