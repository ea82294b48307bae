//! AVX-512 (F and BW): sixteen lanes, otherwise as [`super::avx2`]. Products in integers need VNNI besides.
#![expect(clippy::undocumented_unsafe_blocks, reason = "all methods have the trait's contract, named once at the impl")]

use std::arch::x86_64::*;

use super::avx2::sum4_of_eight;
use super::digits::{Digits, Integers};
use super::vector::{E2M1_ORDER, E2M1_SCALED, E4M3_BITS, Vector};

/// Sixteen lanes of a 512-bit register.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

impl Avx512 {
    /// The normal E4M3 code in the top byte of each dword, times `2^-56`. The exponent is raised in the same instruction
    /// that masks, so that no float32 subnormals arise, for which these processors take a slow path.
    #[inline(always)]
    unsafe fn top_byte(codes: __m512i) -> Self {
        // SAFETY: AVX-512, by contract of the callers.
        unsafe {
            let (mask, raised) = (_mm512_set1_epi32(E4M3_BITS), _mm512_set1_epi32(64 << 23));
            // (shifted & mask) | raised
            Self(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xEA>(_mm512_srai_epi32::<4>(codes), mask, raised)))
        }
    }

    /// As [`Self::top_byte`], for any code: subnormal ones have no implicit leading bit.
    #[inline(always)]
    unsafe fn any_top_byte(codes: __m512i) -> Self {
        // SAFETY: AVX-512, by contract of the callers.
        unsafe {
            let bits = _mm512_srai_epi32::<4>(codes);
            let subnormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x0780_0000));
            let leading = _mm512_set1_epi32(65 << 23);
            let mantissa = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x0070_0000)), leading);
            let magnitude = _mm512_sub_ps(_mm512_castsi512_ps(mantissa), _mm512_castsi512_ps(leading));
            let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
            let exact = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), sign));
            Self(_mm512_mask_blend_ps(subnormal, Self::top_byte(codes).0, exact))
        }
    }

    /// The even and the odd bfloat16 of each dword.
    #[inline(always)]
    unsafe fn halves(pairs: __m512i) -> [Self; 2] {
        // SAFETY: AVX-512, by contract of the callers.
        unsafe {
            let low = _mm512_slli_epi32::<16>(pairs);
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
            [Self(_mm512_castsi512_ps(low)), Self(_mm512_castsi512_ps(high))]
        }
    }

    /// The low nibbles' E2M1 values, given the bytes of their bfloat16s: those of bytes 0, 2, ... and 1, 3, ... of each
    /// lower half of 16, then of each upper half.
    #[inline(always)]
    unsafe fn e2m1_codes(codes: __m512i, low_bytes: __m512i, high_bytes: __m512i) -> [Self; 4] {
        // SAFETY: the instruction set, by contract of the callers.
        unsafe {
            let codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
            let (low, high) = (_mm512_shuffle_epi8(low_bytes, codes), _mm512_shuffle_epi8(high_bytes, codes));
            let [a, b] = Self::halves(_mm512_unpacklo_epi8(low, high));
            let [c, d] = Self::halves(_mm512_unpackhi_epi8(low, high));
            [a, b, c, d]
        }
    }

    /// 16 bytes at each of four places, one after another.
    #[inline(always)]
    unsafe fn four(p: [*const u8; 4]) -> __m512i {
        // SAFETY: AVX-512 and 16 bytes at each, by contract of the callers.
        unsafe {
            let low = _mm256_loadu2_m128i(p[1].cast(), p[0].cast());
            let high = _mm256_loadu2_m128i(p[3].cast(), p[2].cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    /// Lanes `i + (i + 8)`.
    #[inline(always)]
    unsafe fn folded(self) -> __m256 {
        // SAFETY: AVX-512, by contract of the callers.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            _mm256_add_ps(_mm512_castps512_ps256(self.0), high)
        }
    }
}

// SAFETY of every method: the processor has AVX-512 F and BW, and pointers are valid as said, by the trait's contract.
impl Vector for Avx512 {
    const LANES: usize = 16;
    const E4M3_EXPONENT: u32 = 56;
    /// The largest doubled code of each byte: `0xFE` for NaN alone.
    type Seen = __m512i;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
    }

    #[inline(always)]
    unsafe fn min(self, bound: Self) -> Self {
        // the instruction returns its second operand where either is NaN
        Self(unsafe { _mm512_min_ps(bound.0, self.0) })
    }

    #[inline(always)]
    unsafe fn max(self, bound: Self) -> Self {
        Self(unsafe { _mm512_max_ps(bound.0, self.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, by: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn add(self, by: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, by.0) })
    }

    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        unsafe { sum4_of_eight(a.folded(), b.folded(), c.folded(), d.folded()) }
    }

    #[inline(always)]
    unsafe fn nothing_seen() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn saw_nan(seen: __m512i) -> bool {
        unsafe { _mm512_cmpeq_epi8_mask(seen, _mm512_set1_epi8(-2)) != 0 }
    }

    #[inline(always)]
    unsafe fn e4m3(p: *const u8, seen: &mut __m512i) -> [Self; 4] {
        unsafe {
            let codes = _mm512_loadu_si512(p.cast());
            *seen = _mm512_max_epu8(*seen, _mm512_add_epi8(codes, codes));
            if _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0 {
                return [
                    Self::any_top_byte(_mm512_slli_epi32::<24>(codes)),
                    Self::any_top_byte(_mm512_slli_epi32::<16>(codes)),
                    Self::any_top_byte(_mm512_slli_epi32::<8>(codes)),
                    Self::any_top_byte(codes),
                ];
            }
            [
                Self::top_byte(_mm512_slli_epi32::<24>(codes)),
                Self::top_byte(_mm512_slli_epi32::<16>(codes)),
                Self::top_byte(_mm512_slli_epi32::<8>(codes)),
                Self::top_byte(codes),
            ]
        }
    }

    #[inline(always)]
    unsafe fn e2m1(p: *const u8, scales: *const u8) -> [Self; 8] {
        unsafe {
            let [a, b, c, d] = scales.cast::<[u8; 4]>().read();
            let (a, b) = (E2M1_SCALED[usize::from(a)].as_ptr(), E2M1_SCALED[usize::from(b)].as_ptr());
            let (c, d) = (E2M1_SCALED[usize::from(c)].as_ptr(), E2M1_SCALED[usize::from(d)].as_ptr());
            let low_bytes = Self::four([a, b, c, d]);
            let high_bytes = Self::four([a.add(16), b.add(16), c.add(16), d.add(16)]);
            // as for AVX2
            let order = _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1_ORDER.as_ptr().cast()));
            let codes = _mm512_shuffle_epi8(_mm512_loadu_si512(p.cast()), order);
            let [a, c, e, g] = Self::e2m1_codes(codes, low_bytes, high_bytes);
            let [b, d, f, h] = Self::e2m1_codes(_mm512_srli_epi16::<4>(codes), low_bytes, high_bytes);
            [a, b, c, d, e, f, g, h]
        }
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> [Self; 2] {
        unsafe { Self::halves(_mm512_loadu_si512(p.cast())) }
    }

    #[inline(always)]
    unsafe fn e4m3_values(p: *const u8) -> Self {
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let values = Self::any_top_byte(_mm512_slli_epi32::<24>(codes)).mul(Self::splat((1_u64 << 56) as f32));
            let nan = _mm512_set1_epi32(0x7F);
            let is_nan = _mm512_cmpeq_epi32_mask(_mm512_and_si512(codes, nan), nan);
            Self(_mm512_mask_blend_ps(is_nan, values.0, _mm512_set1_ps(f32::NAN)))
        }
    }

    #[inline(always)]
    unsafe fn bf16_values(p: *const u8) -> Self {
        unsafe {
            let values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(values)))
        }
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

impl Avx512 {
    /// Twice the weights plus 12 of a group's low nibbles, and of its high ones.
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [__m512i; 2] {
        // SAFETY: AVX-512 and 64 bytes at `p`, by contract of the callers.
        unsafe {
            // 2 w + 12 for each code
            let table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
            let table = _mm512_broadcast_i32x4(table);
            let nibble = _mm512_set1_epi8(15);
            let codes = _mm512_loadu_si512(p.cast());
            let even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, nibble));
            let odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble));
            [even, odd]
        }
    }

    /// Adds to each of `sums` the integer sums of the lanes of 128 columns, the `G`th, eight products each, times their
    /// scales, whose bits are lanes `order` of `bits`.
    #[inline(always)]
    unsafe fn add_lane_sums<const G: usize, const T: usize>(
        sums: &mut [Self; T],
        codes: *const u8,
        bits: __m512i,
        order: __m512i,
        x: [&Digits; T],
    ) {
        // SAFETY: AVX-512 with VNNI and [`super::digits::DIGIT_COLS`] codes at `codes`, by contract of the callers.
        unsafe {
            let [even, odd] = Self::nibbles(codes.add(64 * G));
            let bits = _mm512_permutexvar_epi32(order, bits);
            for t in 0..T {
                let group = &x[t].groups[G];
                let coarse = Self::add_products_of(_mm512_setzero_si512(), even, &group.even[2], odd, &group.odd[2]);
                let coarse = _mm512_slli_epi32::<8>(coarse);
                let middle = Self::add_products_of(coarse, even, &group.even[1], odd, &group.odd[1]);
                let excess = _mm512_load_si512(group.excess.as_ptr().cast());
                let mut lanes = _mm512_sub_epi32(_mm512_slli_epi32::<3>(middle), excess);
                if x[t].has_fine[2 * G] || x[t].has_fine[2 * G + 1] {
                    lanes = Self::add_products_of(lanes, even, &group.even[0], odd, &group.odd[0]);
                }
                let scales = _mm512_add_epi32(bits, _mm512_set1_epi32(x[t].exponents[2 * G]));
                let scales = _mm512_castsi512_ps(scales);
                sums[t] = Self(_mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes), scales, sums[t].0));
            }
        }
    }

    /// Adds to each lane the eight products of its weights with one digit.
    #[inline(always)]
    unsafe fn add_products_of(
        lanes: __m512i,
        even: __m512i,
        x_even: &[i8; 64],
        odd: __m512i,
        x_odd: &[i8; 64],
    ) -> __m512i {
        // SAFETY: AVX-512 with VNNI, by contract of the callers; the digits are 64 aligned bytes of a `Group`.
        unsafe {
            let lanes = _mm512_dpbusd_epi32(lanes, even, _mm512_load_si512(x_even.as_ptr().cast()));
            _mm512_dpbusd_epi32(lanes, odd, _mm512_load_si512(x_odd.as_ptr().cast()))
        }
    }
}

// SAFETY: as for `Vector`, and the processor has VNNI.
impl Integers for Avx512 {
    #[inline(always)]
    unsafe fn add_products<const T: usize>(sums: &mut [Self; T], codes: *const u8, scales: *const u8, x: [&Digits; T]) {
        unsafe {
            // each scale byte where float32 has its exponent
            let bits = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(scales.cast())));
            let bits = _mm512_castsi256_si512(bits);
            let first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let second = _mm512_setr_epi32(4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
            Self::add_lane_sums::<0, T>(sums, codes, bits, first, x);
            Self::add_lane_sums::<1, T>(sums, codes, bits, second, x);
        }
    }
}
