//! What a kernel may ask of an instruction set: a few float32 lanes, and the decoding of one group of stored weights.
//!
//! A *group* is `4 * LANES` stored bytes, one integer register. It decodes to `LANES` to `8 * LANES` values in an order
//! that depends on the number of lanes alone (see [`super::layout`]).

/// One vector of float32 lanes.
///
/// # Safety (of every method)
/// The processor has the instructions of the implementor; pointers are valid for the bytes named (no alignment needed).
pub(super) trait Vector: Copy {
    /// float32 lanes: a multiple of 8, at most [`MAX_LANES`].
    const LANES: usize;
    /// E4M3 codes decode to their value times two to the minus this: 120 makes a float32 with two operations a code, but
    /// subnormal codes become subnormal; 56 avoids those at a price that depends on the instruction set.
    const E4M3_EXPONENT: u32 = 120;
    /// Collects whether a NaN code was among the E4M3 groups decoded.
    type Seen: Copy;

    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    /// `LANES` floats at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// Writes `LANES` floats to `p`.
    unsafe fn store(self, p: *mut f32);
    unsafe fn mul(self, by: Self) -> Self;
    /// `self * by + plus`; one rounding on all levels but `Portable`.
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self;
    /// Adds to each sum the product of its weight with the vector at `x`.
    #[inline(always)]
    unsafe fn accumulate<const R: usize>(sums: &mut [Self; R], weights: [Self; R], x: *const f32) {
        // SAFETY: by contract.
        unsafe {
            let x = Self::load(x);
            for r in 0..R {
                sums[r] = weights[r].mul_add(x, sums[r]);
            }
        }
    }
    /// The smaller lane; `self` where either is NaN.
    unsafe fn min(self, bound: Self) -> Self;
    /// The larger lane; `self` where either is NaN.
    unsafe fn max(self, bound: Self) -> Self;
    unsafe fn sub(self, by: Self) -> Self;
    unsafe fn add(self, by: Self) -> Self;
    /// `2^n` of integral lanes in -126..=127.
    unsafe fn pow2(self) -> Self;
    /// The lane sums of four vectors, each in the same fixed order.
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4];

    unsafe fn nothing_seen() -> Self::Seen;
    unsafe fn saw_nan(seen: Self::Seen) -> bool;
    /// A group of E4M3 codes, each value times `2^-E4M3_EXPONENT`; NaN codes decode to a finite value and are reported by `seen`.
    unsafe fn e4m3(p: *const u8, seen: &mut Self::Seen) -> [Self; 4];
    /// Vector `I` of that.
    #[inline(always)]
    unsafe fn e4m3_vector<const I: usize>(p: *const u8) -> Self {
        // SAFETY: by contract.
        unsafe { Self::e4m3(p, &mut Self::nothing_seen())[I] }
    }
    /// A group of packed E2M1 codes times their E8M0 scales: `4 * LANES` bytes at `p`, `LANES / 4` at `scales`.
    unsafe fn e2m1(p: *const u8, scales: *const u8) -> [Self; 8];
    /// A group of bfloat16 values.
    unsafe fn bf16(p: *const u8) -> [Self; 2];

    /// `LANES` consecutive E4M3 codes, NaN included.
    unsafe fn e4m3_values(p: *const u8) -> Self;
    /// `LANES` consecutive bfloat16 values.
    unsafe fn bf16_values(p: *const u8) -> Self;

    /// Asks for the cache line at `p`, which may be any address.
    unsafe fn prefetch(p: *const u8);
    /// Asks for it in the second-level cache, since much else is needed before.
    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        // SAFETY: by contract.
        unsafe { Self::prefetch(p) }
    }

    /// The first `n <= LANES` floats at `p`, then zeros.
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the caller vouches for `n` floats at `p`; the buffer has room for `n <= LANES <= MAX_LANES`.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load(lanes.as_ptr())
        }
    }

    /// Writes the first `n <= LANES` lanes to `p`.
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: the caller vouches for `n` floats at `p`; the buffer holds `LANES <= MAX_LANES`.
        unsafe {
            self.store(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
}

/// Lanes of the widest level.
pub(super) const MAX_LANES: usize = 16;

/// For each E8M0 scale the 16 E2M1 values times that scale, as bfloat16: 16 low bytes, then 16 high bytes. Products
/// that float32 cannot hold are infinite (`6 * 2^127`); scale 255 gives NaN throughout. Subnormal products are exact.
pub(super) static E2M1_SCALED: [[u8; 32]; 256] = {
    let mut table = [[0; 32]; 256];
    let mut scale = 0;
    while scale < 256 {
        let mut code = 0;
        while code < 16 {
            let value = crate::tensor::format::E2M1[code] * crate::tensor::format::e8m0_value(scale as u8);
            let bits = if value.is_nan() { 0x7FC0 } else { value.to_bits() >> 16 };
            table[scale][code] = bits as u8;
            table[scale][code + 16] = (bits >> 8) as u8;
            code += 1;
        }
        scale += 1;
    }
    table
};

/// A block's bytes so that interleaving its low half with another block's, then its high half, leaves each dword's four
/// bytes in one dword place of the four results.
pub(super) static E2M1_ORDER: [u8; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// `0x87F0_0000`: sign, low four exponent bits and high three mantissa bits of a float32, where an E4M3 code lands.
pub(super) const E4M3_BITS: i32 = 0x87F0_0000_u32 as i32;
