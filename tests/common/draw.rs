//! The random streams and storage formats of the generated checkpoints.
//!
//! Every tensor has its own stream: Philox4x64-10 keyed by the BLAKE2b-128 of `"{seed}/{tensor name}"`, read as
//! 16-bit values that index tables of normal quantiles. The bytes of a tensor depend on its seed, name and shape
//! only, and equal those of the oracle's checkpoint maker (the manifests' sha256 say so).
#![forbid(unsafe_code)]

use blake2::{Blake2b, Digest, digest::consts::U16};
use std::sync::LazyLock;

/// One tensor's stream of 16-bit values.
pub struct Stream {
    key: [u64; 2],
    block: u64,
}

impl Stream {
    /// The stream of `name` in the checkpoint with `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        let digest = Blake2b::<U16>::digest(format!("{seed}/{name}"));
        let word = |at: usize| u64::from_le_bytes(digest[at..at + 8].try_into().expect("eight bytes"));
        Self { key: [word(0), word(8)], block: 0 }
    }

    /// The next `n` values. The unused values of the last 64-bit word are dropped, as in the original.
    pub fn draw(&mut self, n: usize) -> Vec<u16> {
        let words = n.div_ceil(4);
        assert!(self.block == 0, "a stream is drawn from once: words left in a block would be lost");
        let mut out = Vec::with_capacity(words * 4 + 16);
        while out.len() < words * 4 {
            self.block += 1;
            for word in philox(self.block, self.key) {
                out.extend((0..4).map(|i| (word >> (16 * i)) as u16));
            }
        }
        out.truncate(n);
        out
    }
}

/// Philox4x64 with ten rounds at counter `(block, 0, 0, 0)` (Salmon et al., SC 2011).
fn philox(block: u64, mut key: [u64; 2]) -> [u64; 4] {
    const MULTIPLY: [u64; 2] = [0xD2E7_470E_E14C_6C93, 0xCA5A_8263_9512_1157];
    const WEYL: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xBB67_AE85_84CA_A73B];
    let mut c = [block, 0, 0, 0];
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = u128::from(c[0]) * u128::from(MULTIPLY[0]);
        let b = u128::from(c[2]) * u128::from(MULTIPLY[1]);
        c = [(b >> 64) as u64 ^ c[1] ^ key[0], b as u64, (a >> 64) as u64 ^ c[3] ^ key[1], a as u64];
    }
    c
}

/// Normal quantiles at the midpoints of 2^16 equal shares.
pub static Z16: LazyLock<Vec<f64>> = LazyLock::new(|| quantiles(16));
/// Normal quantiles at the midpoints of 2^8 equal shares.
pub static Z8: LazyLock<Vec<f64>> = LazyLock::new(|| quantiles(8));

fn quantiles(bits: u32) -> Vec<f64> {
    let n = 1_u32 << bits;
    let half: Vec<f64> = (n / 2..n).map(|i| upper_quantile((f64::from(i) + 0.5) / f64::from(n))).collect();
    half.iter().rev().map(|z| -z).chain(half.iter().copied()).collect()
}

/// The normal quantile of `p` in (0.5, 1 - 1e-11), by Wichura's AS 241 (PPND16).
#[expect(clippy::excessive_precision, reason = "the coefficients as published")]
fn upper_quantile(p: f64) -> f64 {
    // coefficients from the highest power down
    const CENTRE: [[f64; 8]; 2] = [
        [
            2.509_080_928_730_122_672_7e3,
            3.343_057_558_358_812_810_5e4,
            6.726_577_092_700_870_085_3e4,
            4.592_195_393_154_987_145_7e4,
            1.373_169_376_550_946_112_5e4,
            1.971_590_950_306_551_442_7e3,
            1.331_416_678_917_843_774_5e2,
            3.387_132_872_796_366_608_0,
        ],
        [
            5.226_495_278_852_854_561_0e3,
            2.872_908_573_572_194_267_4e4,
            3.930_789_580_009_271_061_0e4,
            2.121_379_430_158_659_586_7e4,
            5.394_196_021_424_751_107_7e3,
            6.871_870_074_920_579_083_0e2,
            4.231_333_070_160_091_125_2e1,
            1.0,
        ],
    ];
    const TAIL: [[f64; 8]; 2] = [
        [
            7.745_450_142_783_414_076_40e-4,
            2.272_384_498_926_918_458_33e-2,
            2.417_807_251_774_506_117_70e-1,
            1.270_458_252_452_368_382_58,
            3.647_848_324_763_204_605_04,
            5.769_497_221_460_691_405_50,
            4.630_337_846_156_545_295_90,
            1.423_437_110_749_683_577_34,
        ],
        [
            1.050_750_071_644_416_843_24e-9,
            5.475_938_084_995_344_946_00e-4,
            1.519_866_656_361_645_719_66e-2,
            1.481_039_764_274_800_745_90e-1,
            6.897_673_349_851_000_045_50e-1,
            1.676_384_830_183_803_849_40,
            2.053_191_626_637_758_821_87,
            1.0,
        ],
    ];
    let polynomial = |c: &[f64; 8], r: f64| c[1..].iter().fold(c[0], |sum, &next| sum * r + next);
    let q = p - 0.5;
    if q <= 0.425 {
        let r = 0.180_625 - q * q;
        return polynomial(&CENTRE[0], r) * q / polynomial(&CENTRE[1], r);
    }
    let r = (-(1.0 - p).ln()).sqrt() - 1.6;
    polynomial(&TAIL[0], r) / polynomial(&TAIL[1], r)
}

/// `value` rounded to float32 and then to bf16, ties to even.
pub fn bf16_code(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Nearest E4M3 code, ties to even; values beyond 448 saturate.
pub fn e4m3_code(value: f64) -> u8 {
    let size = value.abs().min(448.0);
    let exponent = size.max(2.0_f64.powi(-20)).log2().floor().clamp(-6.0, 8.0) as i32;
    // eighths of the binade: 8..=16 for normal numbers, 0..=8 at the lowest exponent
    let steps = (size / 2.0_f64.powi(exponent - 3)).round_ties_even() as i32;
    let code = if exponent > -6 { (exponent + 6) * 8 + steps } else { steps };
    code.min(126) as u8 | if value < 0.0 { 0x80 } else { 0 }
}

/// Nearest E2M1 code; a tie goes to the smaller size.
pub fn e2m1_code(value: f64) -> u8 {
    const EDGES: [f64; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let code = EDGES.iter().filter(|&&edge| edge < value.abs()).count() as u8;
    code | if value < 0.0 { 8 } else { 0 }
}
