//! The narrow number formats of the release, exactly: E4M3, E2M1, E8M0 and bfloat16, and the quantise-dequantise
//! functions the model was trained with (reference `inference/kernel.py`: `act_quant`, `fp4_act_quant`).

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// The 16 bits of the nearest bfloat16, ties to even; NaN stays NaN.
#[inline]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Value of bfloat16 bits.
#[inline]
pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
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
    block.iter().fold(0.0, |m, &v| if v.is_nan() || v.abs() > m { v.abs() } else { m })
}

/// Quantises `x` to E4M3 with one power-of-two scale per `block` values and writes the dequantised values back
/// (model.md section 4, `act_quant`). `x.len()` is a multiple of `block`.
pub fn e4m3_round_trip(x: &mut [f32], block: usize) {
    for values in x.chunks_mut(block) {
        let scale = e4m3_scale(amax(values));
        let inverse = 1.0 / scale;
        for v in values {
            *v = E4M3[usize::from(e4m3_code((*v * inverse).clamp(-448.0, 448.0)))] * scale;
        }
    }
}

/// Quantises `x` to E2M1 with one power-of-two scale per 32 values and writes the dequantised values back
/// (model.md section 4, `fp4_act_quant`). `x.len()` is a multiple of 32.
pub fn e2m1_round_trip(x: &mut [f32]) {
    for values in x.chunks_mut(32) {
        let scale = e2m1_scale(amax(values));
        let inverse = 1.0 / scale;
        for v in values {
            *v = E2M1[usize::from(e2m1_code((*v * inverse).clamp(-6.0, 6.0)))] * scale;
        }
    }
}
