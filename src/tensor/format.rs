//! The narrow number formats of the release, exactly: E4M3, E2M1, E8M0 and bfloat16, and the quantise-dequantise
//! functions the model was trained with (reference `inference/kernel.py`: `act_quant`, `fp4_act_quant`).

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN. The same as through [`bf16_bits`], but in a form that
/// vectorises.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits((bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))) & 0xFFFF_0000);
    if x.is_nan() { f32::NAN } else { rounded }
}

/// The 16 bits of the nearest bfloat16, ties to even; NaN stays NaN.
#[inline]
pub fn bf16_bits(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// Value of bfloat16 bits.
#[inline]
pub fn bf16_value(bits: u16) -> f32 {
    half::bf16::from_bits(bits).to_f32()
}

/// Value of an E4M3FN code: sign, 4 exponent bits (bias 7), 3 mantissa bits; `0x7F` and `0xFF` are NaN, no infinities.
pub const fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as u32);
    let sign = ((code & 0x80) as u32) << 24;
    if exponent == 15 && mantissa == 7 {
        return f32::NAN;
    }
    if exponent == 0 {
        // m * 2^-9, built without arithmetic on subnormals
        let magnitude = mantissa as f32 * (1.0 / 512.0);
        return if sign == 0 { magnitude } else { -magnitude };
    }
    f32::from_bits(sign | ((exponent as u32 + 120) << 23) | (mantissa << 20))
}

/// All 256 E4M3 values.
pub static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_value(code as u8);
        code += 1;
    }
    table
};

/// The 16 E2M1 values; bit 3 is the sign.
pub static E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of an E8M0 byte: `2^(e-127)`; 0 is `2^-127` (subnormal in float32) and 255 is NaN.
#[inline]
pub const fn e8m0_value(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        e => f32::from_bits((e as u32) << 23),
    }
}

/// Nearest E4M3 code of `|x| <= 448`, ties to even; NaN gives the NaN code.
#[inline]
pub fn e4m3_code(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    let magnitude = x.abs();
    if magnitude < 1.0 / 64.0 {
        // subnormal range: multiples of 2^-9; adding 2^14 puts the rounding point at the last mantissa bit of the sum
        let steps = (magnitude + 16384.0).to_bits() - 16384.0f32.to_bits();
        return sign | steps as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// Smallest power of two not below a positive normal `x`, from the bit pattern (exponent + 1 if the mantissa is not 0).
#[inline]
pub fn ceil_pow2(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x7F_FFFF != 0);
    f32::from_bits(exponent << 23)
}

/// Scale of an E4M3 block whose largest magnitude is `amax`: a power of two.
#[inline]
pub fn e4m3_scale(amax: f32) -> f32 {
    ceil_pow2(amax.max(1e-4) * (1.0 / 448.0))
}

/// Scale of an E2M1 block whose largest magnitude is `amax`: a power of two, or NaN (E2M1 itself has none).
#[inline]
pub fn e2m1_scale(amax: f32) -> f32 {
    if amax.is_nan() {
        return amax;
    }
    ceil_pow2(amax.max(6.0 * f32::from_bits(1 << 23)) * (1.0 / 6.0))
}

/// Nearest E2M1 code of `|x| <= 6`, ties to the even code.
#[inline]
pub fn e2m1_code(x: f32) -> u8 {
    let m = x.abs();
    let code = u8::from(m > 0.25)
        + u8::from(m >= 0.75)
        + u8::from(m > 1.25)
        + u8::from(m >= 1.75)
        + u8::from(m > 2.5)
        + u8::from(m >= 3.5)
        + u8::from(m > 5.0);
    code | (((x.to_bits() >> 28) & 8) as u8)
}

/// Largest magnitude of a block; NaN if any element is NaN.
#[inline]
pub fn amax(block: &[f32]) -> f32 {
    // the bits of |v| order like the values, infinity and NaN last: an integer maximum, which vectorises
    f32::from_bits(block.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7FFF_FFFF)))
}

/// Nearest E4M3 value of `|x| <= 448`, ties to even, without branches so that it vectorises. Not for NaN.
#[inline]
pub fn round_e4m3(x: f32) -> f32 {
    const SUBNORMAL: f32 = 1.5 * 16384.0; // its last mantissa bit is worth 2^-9
    let bits = x.to_bits();
    let normal = f32::from_bits((bits + 0x7_FFFF + ((bits >> 20) & 1)) & 0xFFF0_0000);
    let subnormal = ((x + SUBNORMAL) - SUBNORMAL).copysign(x);
    if x.abs() < 1.0 / 64.0 { subnormal } else { normal }
}

/// Quantises `x` to E4M3 with one power-of-two scale per `block` values and writes the dequantised values back
/// (reference `act_quant`). `x.len()` is a multiple of `block`. A block that holds a NaN becomes NaN.
pub fn e4m3_round_trip(x: &mut [f32], block: usize) {
    for values in x.chunks_mut(block) {
        let max = amax(values);
        if max.is_nan() {
            values.fill(f32::NAN);
            continue;
        }
        let scale = e4m3_scale(max);
        let inverse = 1.0 / scale;
        for v in values {
            *v = round_e4m3((*v * inverse).clamp(-448.0, 448.0)) * scale;
        }
    }
}

/// Quantises `x` to E2M1 with one power-of-two scale per 32 values and writes the dequantised values back
/// (reference `fp4_act_quant`). `x.len()` is a multiple of 32.
pub fn e2m1_round_trip(x: &mut [f32]) {
    for values in x.chunks_mut(32) {
        let scale = e2m1_scale(amax(values));
        let inverse = 1.0 / scale;
        for v in values {
            *v = E2M1[usize::from(e2m1_code((*v * inverse).clamp(-6.0, 6.0)))] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_e4m3_code_is_its_own_nearest() {
        for code in 0..=255u8 {
            let value = e4m3_value(code);
            if value.is_nan() {
                assert_eq!(code & 0x7F, 0x7F);
                continue;
            }
            assert_eq!(e4m3_code(value), code);
            assert_eq!(round_e4m3(value).to_bits(), value.to_bits());
        }
        assert_eq!(e4m3_value(0x7E), 448.0);
        assert_eq!(e4m3_value(0x01), 1.0 / 512.0);
        assert_eq!(e4m3_code(f32::NAN), 0x7F);
    }

    #[test]
    fn e4m3_rounds_to_the_nearest_and_ties_to_even() {
        for code in 0..0x7Eu8 {
            let (low, high) = (e4m3_value(code), e4m3_value(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { low } else { high };
            for sign in [1.0, -1.0] {
                for (x, want) in [(middle, even), (middle.next_down(), low), (middle.next_up(), high)] {
                    assert_eq!(round_e4m3(sign * x), sign * want, "{x}");
                    assert_eq!(E4M3[usize::from(e4m3_code(sign * x))], sign * want, "{x}");
                }
            }
        }
    }

    #[test]
    fn scale_jumps_just_above_448_times_a_power_of_two() {
        for k in [-10, 0, 7] {
            let power = 2f32.powi(k);
            assert_eq!(e4m3_scale(448.0 * power), power);
            assert_eq!(e4m3_scale((448.0 * power).next_up()), 2.0 * power);
        }
        assert_eq!(e4m3_scale(0.0), 2f32.powi(-22), "an all-zero block takes the floor of 1e-4");
    }

    #[test]
    fn e2m1_ties_go_to_the_even_code() {
        for (x, want) in [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)] {
            assert_eq!(E2M1[usize::from(e2m1_code(x))], want);
            assert_eq!(E2M1[usize::from(e2m1_code(-x))], -want);
        }
        for code in 0..16u8 {
            assert_eq!(e2m1_code(E2M1[usize::from(code)]), code);
        }
    }

    #[test]
    fn e8m0_codes_are_powers_of_two_with_a_nan() {
        assert_eq!(e8m0_value(127), 1.0);
        assert_eq!(e8m0_value(0), 2f32.powi(-127));
        assert_eq!(e8m0_value(254), 2f32.powi(127));
        assert!(e8m0_value(255).is_nan());
    }

    #[test]
    fn bf16_rounds_ties_to_even_and_keeps_nan() {
        assert_eq!(round_bf16(f32::from_bits(0x3F80_8000)), 1.0);
        assert_eq!(round_bf16(f32::from_bits(0x3F81_8000)), f32::from_bits(0x3F82_0000));
        assert!(round_bf16(f32::from_bits(0x7F80_0001)).is_nan());
        assert_eq!(round_bf16(f32::INFINITY), f32::INFINITY);
        for i in 0..1_000_000u32 {
            let x = f32::from_bits(i.wrapping_mul(0x9E37_79B1));
            let through_half = bf16_value(bf16_bits(x));
            assert!(round_bf16(x).to_bits() == through_half.to_bits() || (x.is_nan() && through_half.is_nan()), "{x}");
        }
    }

    #[test]
    fn nan_poisons_its_block_and_only_its_block() {
        let mut x = vec![1.0; 256];
        x[3] = f32::NAN;
        e4m3_round_trip(&mut x, 128);
        assert!(x[..128].iter().all(|v| v.is_nan()) && x[128..].iter().all(|&v| v == 1.0));
    }
}
