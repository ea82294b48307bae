//! Expanding stored rows (KV entries, embeddings) to float32 in their own order.

use super::vector::Vector;
use super::{Op, Simd};

/// `out[i] = value(codes[i]) * scale` for E4M3 codes; NaN codes give NaN.
///
/// # Panics
/// If the lengths differ.
pub fn e4m3_to_f32(simd: Simd, codes: &[u8], scale: f32, out: &mut [f32]) {
    assert_eq!(codes.len(), out.len(), "codes and values");
    simd.dispatch(FromE4m3 { codes, scale, out });
}

/// `out[i]` = the `i`-th little-endian bfloat16 of `bytes`.
///
/// # Panics
/// If `bytes` is not twice as long as `out`.
pub fn bf16_to_f32(simd: Simd, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len(), "bytes and values");
    simd.dispatch(FromBf16 { bytes, out });
}

/// `out[i] = x[i] * factor`.
pub(in crate::backend::cpu) fn scale(simd: Simd, x: &[f32], factor: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "scaled values");
    simd.dispatch(Scale { x, factor, out });
}

struct Scale<'a> {
    x: &'a [f32],
    factor: f32,
    out: &'a mut [f32],
}

impl Op for Scale<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for (to, from) in self.out.iter_mut().zip(self.x) {
            *to = from * self.factor;
        }
    }
}

struct FromE4m3<'a> {
    codes: &'a [u8],
    scale: f32,
    out: &'a mut [f32],
}

impl Op for FromE4m3<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let whole = self.codes.len() / V::LANES * V::LANES;
        // SAFETY: the processor has `V` by contract; whole vectors, then one from a padded buffer.
        unsafe {
            let scale = V::splat(self.scale);
            for i in (0..whole).step_by(V::LANES) {
                V::e4m3_values(self.codes.as_ptr().add(i)).mul(scale).store(self.out.as_mut_ptr().add(i));
            }
            let rest = &self.codes[whole..];
            if !rest.is_empty() {
                let mut codes = [0; super::vector::MAX_LANES];
                codes[..rest.len()].copy_from_slice(rest);
                let values = V::e4m3_values(codes.as_ptr()).mul(scale);
                values.store_first(self.out.as_mut_ptr().add(whole), rest.len());
            }
        }
    }
}

struct FromBf16<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Op for FromBf16<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let whole = self.out.len() / V::LANES * V::LANES;
        // SAFETY: the processor has `V` by contract; whole vectors, then one from a padded buffer.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                V::bf16_values(self.bytes.as_ptr().add(2 * i)).store(self.out.as_mut_ptr().add(i));
            }
            let rest = &self.bytes[2 * whole..];
            if !rest.is_empty() {
                let mut bytes = [0; 2 * super::vector::MAX_LANES];
                bytes[..rest.len()].copy_from_slice(rest);
                let values = V::bf16_values(bytes.as_ptr());
                values.store_first(self.out.as_mut_ptr().add(whole), rest.len() / 2);
            }
        }
    }
}
