//! The level every machine has: arrays of eight floats, which compilers turn into what the target offers.

use super::digits::{Digits, Integers};
use super::vector::{E2M1_SCALED, E4M3_BITS, Vector};
use crate::tensor::format::{E2M1, E4M3, bf16_value, e8m0_value};

/// Eight lanes in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

// SAFETY of every method: only the pointers' validity matters, and that is the caller's contract.
impl Vector for Portable {
    const LANES: usize = 8;
    type Seen = bool;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: eight floats at `p`, by contract.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: room for eight floats at `p`, by contract.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        self.zip(by, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * by.0[i] + plus.0[i]))
    }

    #[inline(always)]
    unsafe fn min(self, bound: Self) -> Self {
        self.zip(bound, |a, b| if b < a { b } else { a })
    }

    #[inline(always)]
    unsafe fn max(self, bound: Self) -> Self {
        self.zip(bound, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    unsafe fn sub(self, by: Self) -> Self {
        self.zip(by, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn add(self, by: Self) -> Self {
        self.zip(by, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        Self(self.0.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23)))
    }

    #[inline(always)]
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
        v.map(|Self(l)| ((l[0] + l[4]) + (l[1] + l[5])) + ((l[2] + l[6]) + (l[3] + l[7])))
    }

    #[inline(always)]
    unsafe fn nothing_seen() -> bool {
        false
    }

    #[inline(always)]
    unsafe fn saw_nan(seen: bool) -> bool {
        seen
    }

    #[inline(always)]
    unsafe fn e4m3(p: *const u8, seen: &mut bool) -> [Self; 4] {
        // SAFETY: 32 bytes at `p`, by contract.
        let codes = unsafe { p.cast::<[u8; 32]>().read_unaligned() };
        *seen |= codes.iter().fold(false, |nan, c| nan | (c & 0x7F == 0x7F));
        std::array::from_fn(|plane| {
            Self(std::array::from_fn(|lane| {
                let code = i32::from(codes[4 * lane + plane]) << 24;
                f32::from_bits(((code >> 4) & E4M3_BITS) as u32)
            }))
        })
    }

    #[inline(always)]
    unsafe fn e2m1(p: *const u8, scales: *const u8) -> [Self; 8] {
        // SAFETY: 32 bytes at `p` and two scales, by contract.
        let (dwords, scales) = unsafe { (p.cast::<[u32; 8]>().read_unaligned(), scales.cast::<[u8; 2]>().read()) };
        std::array::from_fn(|nibble| {
            Self(std::array::from_fn(|lane| {
                let code = (u32::from_le(dwords[lane]) >> (4 * nibble) & 15) as usize;
                let table = &E2M1_SCALED[usize::from(scales[lane / 4])];
                bf16_value(u16::from_le_bytes([table[code], table[code + 16]]))
            }))
        })
    }

    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> [Self; 2] {
        // SAFETY: 32 bytes at `p`, by contract.
        let pairs = unsafe { p.cast::<[u32; 8]>().read_unaligned() }.map(u32::from_le);
        [Self(pairs.map(|p| f32::from_bits(p << 16))), Self(pairs.map(|p| f32::from_bits(p & 0xFFFF_0000)))]
    }

    #[inline(always)]
    unsafe fn e4m3_values(p: *const u8) -> Self {
        // SAFETY: eight bytes at `p`, by contract.
        Self(unsafe { p.cast::<[u8; 8]>().read_unaligned() }.map(|c| E4M3[usize::from(c)]))
    }

    #[inline(always)]
    unsafe fn bf16_values(p: *const u8) -> Self {
        // SAFETY: 16 bytes at `p`, by contract.
        Self(unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(|b| bf16_value(u16::from_le(b))))
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

// SAFETY: as for `Vector`.
impl Integers for Portable {
    #[inline(always)]
    unsafe fn add_products<const T: usize>(sums: &mut [Self; T], codes: *const u8, scales: *const u8, x: [&Digits; T]) {
        // SAFETY: 128 bytes and eight scales, by contract.
        let (codes, scales) = unsafe { (codes.cast::<[[u8; 32]; 4]>().read(), scales.cast::<[u8; 8]>().read()) };
        for (Self(lanes), x) in sums.iter_mut().zip(x) {
            for (g, codes) in codes.iter().enumerate() {
                let group = &x.groups[g / 2];
                let integer = |digits: &[[i8; 64]; 3], i: usize| {
                    let i = g % 2 * 32 + i;
                    i32::from(digits[0][i]) + 8 * i32::from(digits[1][i]) + 2048 * i32::from(digits[2][i])
                };
                let twice = |code: u8| (2.0 * E2M1[usize::from(code)]) as i32;
                for (lane, value) in lanes.iter_mut().enumerate() {
                    let products = (4 * lane..4 * lane + 4).map(|i| {
                        twice(codes[i] & 15) * integer(&group.even, i) + twice(codes[i] >> 4) * integer(&group.odd, i)
                    });
                    let half = lane / 4;
                    let scale = e8m0_value(scales[2 * g + half]).to_bits() as i32 + x.exponents[4 * half + g];
                    *value += products.sum::<i32>() as f32 * f32::from_bits(scale as u32);
                }
            }
        }
    }
}
