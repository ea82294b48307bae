//! AVX2 with FMA: eight lanes.
#![expect(clippy::undocumented_unsafe_blocks, reason = "all methods have the trait's contract, named once at the impl")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::digits::{Digits, Integers};
use super::vector::{E2M1_ORDER, E2M1_SCALED, E4M3_BITS, Vector};

/// Eight lanes of a 256-bit register.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256);

impl Avx2 {
    /// The E4M3 code in the top byte of each dword, times `2^-120`.
    #[inline(always)]
    unsafe fn top_byte(codes: __m256i) -> Self {
        // SAFETY: AVX2, by contract of the callers.
        unsafe {
            let bits = _mm256_and_si256(_mm256_srai_epi32::<4>(codes), _mm256_set1_epi32(E4M3_BITS));
            Self(_mm256_castsi256_ps(bits))
        }
    }

    /// The even and the odd bfloat16 of each dword.
    #[inline(always)]
    unsafe fn halves(pairs: __m256i) -> [Self; 2] {
        // SAFETY: AVX2, by contract of the callers.
        unsafe {
            let low = _mm256_slli_epi32::<16>(pairs);
            let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
            [Self(_mm256_castsi256_ps(low)), Self(_mm256_castsi256_ps(high))]
        }
    }

    /// The low nibbles' E2M1 values, given the bytes of their bfloat16s: those of bytes 0, 2, ... and 1, 3, ... of each
    /// lower half of 16, then of each upper half.
    #[inline(always)]
    unsafe fn e2m1_codes(codes: __m256i, low_bytes: __m256i, high_bytes: __m256i) -> [Self; 4] {
        // SAFETY: the instruction set, by contract of the callers.
        unsafe {
            let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
            let (low, high) = (_mm256_shuffle_epi8(low_bytes, codes), _mm256_shuffle_epi8(high_bytes, codes));
            let [a, b] = Self::halves(_mm256_unpacklo_epi8(low, high));
            let [c, d] = Self::halves(_mm256_unpackhi_epi8(low, high));
            [a, b, c, d]
        }
    }
}

/// The lane sums of four registers: lanes `i + (i + 4)`, then neighbours, then the two that are left.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn sum4_of_eight(a: __m256, b: __m256, c: __m256, d: __m256) -> [f32; 4] {
    // SAFETY: by contract.
    unsafe {
        // halves added: a | b and c | d
        let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
        // neighbours added: a a c c | b b d d
        let pairs = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(ab, cd), _mm256_shuffle_ps::<0xDD>(ab, cd));
        let sums = _mm256_add_ps(pairs, _mm256_permute_ps::<0xB1>(pairs));
        let (ac, bd) = (_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let mut out = [0.0; 4];
        _mm_storeu_ps(
            out.as_mut_ptr(),
            _mm_unpacklo_ps(_mm_shuffle_ps::<0x88>(ac, ac), _mm_shuffle_ps::<0x88>(bd, bd)),
        );
        out
    }
}

/// Each sum plus the product of its weight with `x`.
///
/// Twelve sums, three weights and an input are all registers that there are. Compilers would load the next input, or
/// decode the next weights, before they are done with these; past this they move nothing that reads memory.
///
/// # Safety
/// The processor has AVX2 and FMA.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_three_products([mut a, mut b, mut c]: [__m256; 3], [u, v, w]: [__m256; 3], x: __m256) -> [__m256; 3] {
    // SAFETY: by contract; registers alone are touched.
    unsafe {
        asm!(
            "vfmadd231ps {a}, {u}, {x}",
            "vfmadd231ps {b}, {v}, {x}",
            "vfmadd231ps {c}, {w}, {x}",
            a = inout(ymm_reg) a,
            b = inout(ymm_reg) b,
            c = inout(ymm_reg) c,
            u = in(ymm_reg) u,
            v = in(ymm_reg) v,
            w = in(ymm_reg) w,
            x = in(ymm_reg) x,
            options(nostack, preserves_flags),
        );
    }
    [a, b, c]
}

/// Eight times [`E4M3_BITS`].
#[repr(align(32))]
struct E4m3Mask([i32; 8]);
static E4M3_MASK: E4m3Mask = E4m3Mask([E4M3_BITS; 8]);

// SAFETY of every method: the processor has AVX2 and FMA, and pointers are valid as said, by the trait's contract.
impl Vector for Avx2 {
    const LANES: usize = 8;
    /// The largest doubled code of each byte: `0xFE` for NaN alone.
    type Seen = __m256i;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm256_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        Self(unsafe { _mm256_mul_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        Self(unsafe { _mm256_fmadd_ps(self.0, by.0, plus.0) })
    }

    #[inline(always)]
    unsafe fn accumulate<const R: usize>(sums: &mut [Self; R], weights: [Self; R], x: *const f32) {
        unsafe {
            let x = Self::load(x);
            if R == 3 && !cfg!(miri) {
                let [a, b, c] = [sums[0].0, sums[1].0, sums[2].0];
                let [a, b, c] = add_three_products([a, b, c], [weights[0].0, weights[1].0, weights[2].0], x.0);
                (sums[0].0, sums[1].0, sums[2].0) = (a, b, c);
                return;
            }
            for r in 0..R {
                sums[r] = weights[r].mul_add(x, sums[r]);
            }
        }
    }

    #[inline(always)]
    unsafe fn min(self, bound: Self) -> Self {
        // the instruction returns its second operand where either is NaN
        Self(unsafe { _mm256_min_ps(bound.0, self.0) })
    }

    #[inline(always)]
    unsafe fn max(self, bound: Self) -> Self {
        Self(unsafe { _mm256_max_ps(bound.0, self.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, by: Self) -> Self {
        Self(unsafe { _mm256_sub_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn add(self, by: Self) -> Self {
        Self(unsafe { _mm256_add_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        unsafe { sum4_of_eight(a.0, b.0, c.0, d.0) }
    }

    #[inline(always)]
    unsafe fn nothing_seen() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn saw_nan(seen: __m256i) -> bool {
        unsafe { _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, _mm256_set1_epi8(-2))) != 0 }
    }

    #[inline(always)]
    unsafe fn e4m3(p: *const u8, seen: &mut __m256i) -> [Self; 4] {
        unsafe {
            let codes = _mm256_loadu_si256(p.cast());
            *seen = _mm256_max_epu8(*seen, _mm256_add_epi8(codes, codes));
            [
                Self::top_byte(_mm256_slli_epi32::<24>(codes)),
                Self::top_byte(_mm256_slli_epi32::<16>(codes)),
                Self::top_byte(_mm256_slli_epi32::<8>(codes)),
                Self::top_byte(codes),
            ]
        }
    }

    #[inline(always)]
    unsafe fn e4m3_vector<const I: usize>(p: *const u8) -> Self {
        // read anew each time: it would keep a register that `few` needs
        unsafe {
            let codes = _mm256_loadu_si256(p.cast());
            let top = match I {
                0 => _mm256_slli_epi32::<24>(codes),
                1 => _mm256_slli_epi32::<16>(codes),
                2 => _mm256_slli_epi32::<8>(codes),
                _ => codes,
            };
            let mask = (&raw const E4M3_MASK.0).cast::<__m256i>().read_volatile();
            Self(_mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32::<4>(top), mask)))
        }
    }

    #[inline(always)]
    unsafe fn e2m1(p: *const u8, scales: *const u8) -> [Self; 8] {
        unsafe {
            let a = E2M1_SCALED[usize::from(*scales)].as_ptr();
            let b = E2M1_SCALED[usize::from(*scales.add(1))].as_ptr();
            let low_bytes = _mm256_loadu2_m128i(b.cast(), a.cast());
            let high_bytes = _mm256_loadu2_m128i(b.add(16).cast(), a.add(16).cast());
            // the first two bytes of each dword, then the second two, so that interleaving leaves a dword's in one lane
            let order = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_ORDER.as_ptr().cast()));
            let codes = _mm256_shuffle_epi8(_mm256_loadu_si256(p.cast()), order);
            let [a, c, e, g] = Self::e2m1_codes(codes, low_bytes, high_bytes);
            let [b, d, f, h] = Self::e2m1_codes(_mm256_srli_epi16::<4>(codes), low_bytes, high_bytes);
            [a, b, c, d, e, f, g, h]
        }
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> [Self; 2] {
        unsafe { Self::halves(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn e4m3_values(p: *const u8) -> Self {
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let top = _mm256_slli_epi32::<24>(codes);
            let bits = _mm256_and_si256(_mm256_srai_epi32::<4>(top), _mm256_set1_epi32(E4M3_BITS));
            let values = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps((1_u128 << 120) as f32));
            let nan = _mm256_set1_epi32(0x7F);
            let is_nan = _mm256_cmpeq_epi32(_mm256_and_si256(codes, nan), nan);
            Self(_mm256_or_ps(values, _mm256_castsi256_ps(is_nan)))
        }
    }

    #[inline(always)]
    unsafe fn bf16_values(p: *const u8) -> Self {
        unsafe { Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

impl Avx2 {
    /// Twice the weights plus 12 of a group's low nibbles, and of its high ones.
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [__m256i; 2] {
        // SAFETY: AVX2 and 32 bytes at `p`, by contract of the callers.
        unsafe {
            // 2 w + 12 for each code
            let table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
            let table = _mm256_broadcastsi128_si256(table);
            let nibble = _mm256_set1_epi8(15);
            let codes = _mm256_loadu_si256(p.cast());
            let even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
            let odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble));
            [even, odd]
        }
    }

    /// Adds to each of `sums` the integer sums of the lanes of 64 columns, the `G`th, eight products each, times their scales.
    #[inline(always)]
    unsafe fn add_lane_sums<const G: usize, const SCALES: i32, const T: usize>(
        sums: &mut [Self; T],
        codes: *const u8,
        scales: &[__m256; T],
        x: [&Digits; T],
    ) {
        // SAFETY: AVX2 and [`super::digits::DIGIT_COLS`] codes at `codes`, by contract of the callers.
        unsafe {
            let [even, odd] = Self::nibbles(codes.add(32 * G));
            for t in 0..T {
                let group = &x[t].groups[G / 2];
                let middle = Self::pairs(even, half::<G>(&group.even[1]), odd, half::<G>(&group.odd[1]));
                let coarse = Self::pairs(even, half::<G>(&group.even[2]), odd, half::<G>(&group.odd[2]));
                let middle = _mm256_madd_epi16(middle, _mm256_set1_epi16(8));
                let coarse = _mm256_madd_epi16(coarse, _mm256_set1_epi16(2048));
                let excess = _mm256_load_si256(group.excess.as_ptr().add(G % 2 * 8).cast());
                let mut lanes = _mm256_add_epi32(middle, _mm256_sub_epi32(coarse, excess));
                if x[t].has_fine[G] {
                    let fine = Self::pairs(even, half::<G>(&group.even[0]), odd, half::<G>(&group.odd[0]));
                    lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(fine, _mm256_set1_epi16(1)));
                }
                let scales = _mm256_permute_ps::<SCALES>(scales[t]);
                sums[t] = Self(_mm256_fmadd_ps(_mm256_cvtepi32_ps(lanes), scales, sums[t].0));
            }
        }
    }

    /// Weights of at most 24 times one digit, the four products of two bytes added: at most 12,288.
    #[inline(always)]
    unsafe fn pairs(even: __m256i, x_even: &[i8; 32], odd: __m256i, x_odd: &[i8; 32]) -> __m256i {
        // SAFETY: AVX2, by contract of the callers; the digits are 32 aligned bytes of a `Group`.
        unsafe {
            let even = _mm256_maddubs_epi16(even, _mm256_load_si256(x_even.as_ptr().cast()));
            let odd = _mm256_maddubs_epi16(odd, _mm256_load_si256(x_odd.as_ptr().cast()));
            _mm256_add_epi16(even, odd)
        }
    }
}

/// The digits that the `G`th 64 columns have among those of 128.
#[inline(always)]
fn half<const G: usize>(digits: &[i8; 64]) -> &[i8; 32] {
    &digits.as_chunks::<32>().0[G % 2]
}

// SAFETY: as for `Vector`.
impl Integers for Avx2 {
    #[inline(always)]
    unsafe fn add_products<const T: usize>(sums: &mut [Self; T], codes: *const u8, scales: *const u8, x: [&Digits; T]) {
        unsafe {
            // each scale byte to the top of a dword, shifted to where float32 has its exponent
            let order = _mm256_setr_epi8(
                -1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6, -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1,
                5, -1, -1, -1, 7,
            );
            let bits = _mm256_set1_epi64x(scales.cast::<i64>().read_unaligned());
            let bits = _mm256_srli_epi32::<1>(_mm256_shuffle_epi8(bits, order));
            let mut scales = [_mm256_setzero_ps(); T];
            for t in 0..T {
                let exponents = _mm256_load_si256(x[t].exponents.as_ptr().cast());
                scales[t] = _mm256_castsi256_ps(_mm256_add_epi32(bits, exponents));
            }
            Self::add_lane_sums::<0, 0x00, T>(sums, codes, &scales, x);
            Self::add_lane_sums::<1, 0x55, T>(sums, codes, &scales, x);
            Self::add_lane_sums::<2, 0xAA, T>(sums, codes, &scales, x);
            Self::add_lane_sums::<3, 0xFF, T>(sums, codes, &scales, x);
        }
    }
}
