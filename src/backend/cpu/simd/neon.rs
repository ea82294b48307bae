//! NEON: eight lanes in two registers, in the order of [`super::avx2`], whose bits it shares.
#![expect(clippy::undocumented_unsafe_blocks, reason = "all methods have the trait's contract, named once at the impl")]

use std::arch::aarch64::*;

use super::vector::{E2M1_ORDER, E2M1_SCALED, E4M3_BITS, Vector};

/// Eight lanes: 0 to 3 and 4 to 7.
#[derive(Clone, Copy)]
pub(super) struct Neon(float32x4_t, float32x4_t);

/// Four E4M3 codes in the top bytes, times `2^-120`.
#[inline(always)]
unsafe fn top_bytes(codes: int32x4_t) -> float32x4_t {
    // SAFETY: NEON, by contract of the callers.
    unsafe { vreinterpretq_f32_s32(vandq_s32(vshrq_n_s32::<4>(codes), vdupq_n_s32(E4M3_BITS))) }
}

/// The even bfloat16 of each dword.
#[inline(always)]
unsafe fn even(pairs: uint32x4_t) -> float32x4_t {
    // SAFETY: NEON, by contract of the callers.
    unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)) }
}

/// The odd bfloat16 of each dword.
#[inline(always)]
unsafe fn odd(pairs: uint32x4_t) -> float32x4_t {
    // SAFETY: NEON, by contract of the callers.
    unsafe { vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000))) }
}

/// The E4M3 values of four dwords, NaN included.
#[inline(always)]
unsafe fn e4m3_of_dwords(codes: uint32x4_t) -> float32x4_t {
    // SAFETY: NEON, by contract of the callers.
    unsafe {
        let values = vmulq_n_f32(top_bytes(vreinterpretq_s32_u32(vshlq_n_u32::<24>(codes))), (1_u128 << 120) as f32);
        let nan = vdupq_n_u32(0x7F);
        let is_nan = vceqq_u32(vandq_u32(codes, nan), nan);
        vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(values), is_nan))
    }
}

/// A block of 32 E2M1 codes times their scale: nibble `i` of each dword in vector `i`.
#[inline(always)]
unsafe fn e2m1_block(p: *const u8, scale: u8) -> [float32x4_t; 8] {
    // SAFETY: NEON and 16 bytes at `p`, by contract of the callers.
    unsafe {
        let table = E2M1_SCALED[usize::from(scale)].as_ptr();
        let (low_bytes, high_bytes) = (vld1q_u8(table), vld1q_u8(table.add(16)));
        // the first two bytes of each dword, then the second two, so that interleaving leaves a dword's in one lane
        let codes = vqtbl1q_u8(vld1q_u8(p), vld1q_u8(E2M1_ORDER.as_ptr()));
        let (first, second) = (vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes));
        let (low_a, high_a) = (vqtbl1q_u8(low_bytes, first), vqtbl1q_u8(high_bytes, first));
        let (low_b, high_b) = (vqtbl1q_u8(low_bytes, second), vqtbl1q_u8(high_bytes, second));
        let (a, b) = (vzip1q_u8(low_a, high_a), vzip1q_u8(low_b, high_b));
        let (e, f) = (vzip2q_u8(low_a, high_a), vzip2q_u8(low_b, high_b));
        let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
        let (e, f) = (vreinterpretq_u32_u8(e), vreinterpretq_u32_u8(f));
        [even(a), even(b), odd(a), odd(b), even(e), even(f), odd(e), odd(f)]
    }
}

// SAFETY of every method: the processor has NEON, and pointers are valid as said, by the trait's contract.
impl Vector for Neon {
    const LANES: usize = 8;
    /// The largest doubled code of each byte: `0xFE` for NaN alone.
    type Seen = uint8x16_t;

    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Self::splat(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(vld1q_f32(p), vld1q_f32(p.add(4))) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            vst1q_f32(p, self.0);
            vst1q_f32(p.add(4), self.1);
        }
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        unsafe { Self(vmulq_f32(self.0, by.0), vmulq_f32(self.1, by.1)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        unsafe { Self(vfmaq_f32(plus.0, self.0, by.0), vfmaq_f32(plus.1, self.1, by.1)) }
    }

    #[inline(always)]
    unsafe fn min(self, bound: Self) -> Self {
        unsafe { Self(vminq_f32(self.0, bound.0), vminq_f32(self.1, bound.1)) }
    }

    #[inline(always)]
    unsafe fn max(self, bound: Self) -> Self {
        unsafe { Self(vmaxq_f32(self.0, bound.0), vmaxq_f32(self.1, bound.1)) }
    }

    #[inline(always)]
    unsafe fn sub(self, by: Self) -> Self {
        unsafe { Self(vsubq_f32(self.0, by.0), vsubq_f32(self.1, by.1)) }
    }

    #[inline(always)]
    unsafe fn add(self, by: Self) -> Self {
        unsafe { Self(vaddq_f32(self.0, by.0), vaddq_f32(self.1, by.1)) }
    }

    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        unsafe {
            let bias = vdupq_n_s32(127);
            let low = vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(self.0), bias));
            let high = vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(self.1), bias));
            Self(vreinterpretq_f32_s32(low), vreinterpretq_f32_s32(high))
        }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        unsafe {
            let ab = vpaddq_f32(vaddq_f32(a.0, a.1), vaddq_f32(b.0, b.1));
            let cd = vpaddq_f32(vaddq_f32(c.0, c.1), vaddq_f32(d.0, d.1));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), vpaddq_f32(ab, cd));
            out
        }
    }

    #[inline(always)]
    unsafe fn nothing_seen() -> uint8x16_t {
        unsafe { vdupq_n_u8(0) }
    }

    #[inline(always)]
    unsafe fn saw_nan(seen: uint8x16_t) -> bool {
        unsafe { vmaxvq_u8(seen) == 0xFE }
    }

    #[inline(always)]
    unsafe fn e4m3(p: *const u8, seen: &mut uint8x16_t) -> [Self; 4] {
        unsafe {
            let (a, b) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            *seen = vmaxq_u8(*seen, vmaxq_u8(vshlq_n_u8::<1>(a), vshlq_n_u8::<1>(b)));
            let (a, b) = (vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b));
            [
                Self(top_bytes(vshlq_n_s32::<24>(a)), top_bytes(vshlq_n_s32::<24>(b))),
                Self(top_bytes(vshlq_n_s32::<16>(a)), top_bytes(vshlq_n_s32::<16>(b))),
                Self(top_bytes(vshlq_n_s32::<8>(a)), top_bytes(vshlq_n_s32::<8>(b))),
                Self(top_bytes(a), top_bytes(b)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn e2m1(p: *const u8, scales: *const u8) -> [Self; 8] {
        unsafe {
            let (a, b) = (e2m1_block(p, *scales), e2m1_block(p.add(16), *scales.add(1)));
            [
                Self(a[0], b[0]),
                Self(a[1], b[1]),
                Self(a[2], b[2]),
                Self(a[3], b[3]),
                Self(a[4], b[4]),
                Self(a[5], b[5]),
                Self(a[6], b[6]),
                Self(a[7], b[7]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> [Self; 2] {
        unsafe {
            let (a, b) = (vreinterpretq_u32_u8(vld1q_u8(p)), vreinterpretq_u32_u8(vld1q_u8(p.add(16))));
            [Self(even(a), even(b)), Self(odd(a), odd(b))]
        }
    }

    #[inline(always)]
    unsafe fn e4m3_values(p: *const u8) -> Self {
        unsafe {
            let codes = vmovl_u8(vld1_u8(p));
            Self(e4m3_of_dwords(vmovl_u16(vget_low_u16(codes))), e4m3_of_dwords(vmovl_high_u16(codes)))
        }
    }

    #[inline(always)]
    unsafe fn bf16_values(p: *const u8) -> Self {
        unsafe {
            let halves = vreinterpretq_u16_u8(vld1q_u8(p));
            let (low, high) = (vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves));
            Self(even(low), even(high))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of any address is without effect but on caches.
        unsafe { std::arch::asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, readonly, preserves_flags)) }
    }
}
