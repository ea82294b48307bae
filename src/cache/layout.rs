//! How cache rows are stored, and how many bytes each kind takes.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::pool::Bucket;
use crate::error::{Error, ErrorKind};
use crate::model::config::{Config, LayerKind};
use crate::tensor::format::{
    E2M1, E4M3, amax, bf16_bits, bf16_value, e2m1_code, e2m1_scale, e4m3_code, e4m3_scale, e8m0_value,
};

/// KV rows of a wide page: the c4a entries of one block.
pub(super) const WIDE_ROWS: usize = 64;
/// Keys of an index page: those of one block.
pub(super) const INDEX_KEYS: usize = 64;
/// KV rows of a narrow page: the c128a entries of one block.
pub(super) const NARROW_ROWS: usize = 2;
/// Values per E2M1 scale in an index key.
const INDEX_BLOCK: usize = 32;

/// Storage of KV rows and index keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// E4M3 with one E8M0 scale per 64 values and bf16 rotary dimensions; index keys in E2M1 with one scale per 32.
    /// Lossless for the quantised numerics, whose values lie on this grid.
    Fp8,
    /// bfloat16 for both. Lossless for `reference` and `served`.
    Bf16,
    /// float32 for both: the layout of `exact`.
    F32,
}

impl KvFormat {
    /// The name as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        [Self::Fp8, Self::Bf16, Self::F32].into_iter().find(|k| k.name() == s).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("unknown cache format {s:?}; one of fp8, bf16, f32"))
        })
    }
}

/// Dimensions of one trunk layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerLayout {
    /// What the layer attends to.
    pub kind: LayerKind,
    /// float32 values of the main compressor's state.
    pub main_state: usize,
    /// float32 values of the index compressor's state.
    pub index_state: usize,
}

/// Sizes of everything the cache of a model holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Storage of rows and keys.
    pub format: KvFormat,
    /// Values of a KV row.
    pub head_dim: usize,
    /// Rotary values at the end of a KV row.
    pub rope_dim: usize,
    /// Values of an index key.
    pub index_dim: usize,
    /// Tokens in the window, the current one included.
    pub window: usize,
    /// The trunk layers.
    pub layers: Vec<LayerLayout>,
}

impl CacheLayout {
    /// Values per E4M3 scale in a KV row.
    pub const KV_BLOCK: usize = 64;

    /// Layout of a model's cache.
    pub fn new(config: &Config, format: KvFormat) -> Self {
        let layer = |&kind: &LayerKind| {
            // c4a: previous group's first-half channels [4, d] of (u, g), then the current group [4, 2d] of (u, g);
            // c128a: running (max, sum, accumulator) per channel
            let c4_state = |d: usize| 2 * 4 * d + 2 * 4 * 2 * d;
            match kind {
                LayerKind::Window => LayerLayout { kind, main_state: 0, index_state: 0 },
                LayerKind::C4a => LayerLayout {
                    kind,
                    main_state: c4_state(config.head_dim),
                    index_state: c4_state(config.index_head_dim),
                },
                LayerKind::C128a => LayerLayout { kind, main_state: 3 * config.head_dim, index_state: 0 },
            }
        };
        Self {
            format,
            head_dim: config.head_dim,
            rope_dim: config.qk_rope_head_dim,
            index_dim: config.index_head_dim,
            window: config.sliding_window,
            layers: config.layers.iter().map(layer).collect(),
        }
    }

    /// Bytes of one stored KV row. fp8: codes, bf16 rotary part, scales, padded to 8 (584 for the releases).
    pub fn row_bytes(&self) -> usize {
        let nope = self.head_dim - self.rope_dim;
        match self.format {
            KvFormat::Fp8 => (nope + 2 * self.rope_dim + nope / Self::KV_BLOCK).next_multiple_of(8),
            KvFormat::Bf16 => 2 * self.head_dim,
            KvFormat::F32 => 4 * self.head_dim,
        }
    }

    /// Bytes of one stored index key (68 in fp8 for the releases: packed E2M1 and its scales).
    pub fn key_bytes(&self) -> usize {
        match self.format {
            KvFormat::Fp8 => self.index_dim / 2 + self.index_dim / INDEX_BLOCK,
            KvFormat::Bf16 => 2 * self.index_dim,
            KvFormat::F32 => 4 * self.index_dim,
        }
    }

    /// Bytes of a page of each bucket: 64 rows, 64 keys, 2 rows.
    pub fn page_bytes(&self) -> [usize; 3] {
        [WIDE_ROWS * self.row_bytes(), INDEX_KEYS * self.key_bytes(), NARROW_ROWS * self.row_bytes()]
    }

    /// Pages of one 256-token block of layer `index`: wide, index, narrow.
    pub fn block_pages(&self, index: usize) -> [usize; 3] {
        match self.layers[index].kind {
            LayerKind::Window => [0, 0, 0],
            LayerKind::C4a => [1, 1, 0],
            LayerKind::C128a => [0, 0, 1],
        }
    }

    /// Bytes of layer `index` that the first `tokens` tokens of a block fill: entries, index keys.
    pub fn layer_content(&self, index: usize, tokens: usize) -> [usize; 2] {
        let kind = self.layers[index].kind;
        let entries = tokens.checked_div(kind.ratio()).unwrap_or(0);
        [entries * self.row_bytes(), if kind == LayerKind::C4a { entries * self.key_bytes() } else { 0 }]
    }

    /// Bytes of all layers that the first `tokens` tokens of a block fill.
    pub fn block_content(&self, tokens: usize) -> u64 {
        (0..self.layers.len()).flat_map(|i| self.layer_content(i, tokens)).map(|bytes| bytes as u64).sum()
    }

    /// Bytes of the windows and compressor states of all layers, without the padding of pages.
    pub fn state_content(&self) -> u64 {
        let layer = |l: &LayerLayout| (self.window * self.row_bytes() + 4 * (l.main_state + l.index_state)) as u64;
        self.layers.iter().map(layer).sum()
    }

    /// Wide pages of the window ring of one layer.
    pub fn ring_pages(&self) -> usize {
        self.window.div_ceil(WIDE_ROWS)
    }

    /// Bucket and pages of the main compressor's state of layer `index`.
    pub fn main_state_pages(&self, index: usize) -> (Bucket, usize) {
        let layer = &self.layers[index];
        let bucket = if layer.kind == LayerKind::C128a { Bucket::Narrow } else { Bucket::Wide };
        (bucket, (4 * layer.main_state).div_ceil(self.page_bytes()[bucket as usize]))
    }

    /// Index pages of the index compressor's state of layer `index`.
    pub fn index_state_pages(&self, index: usize) -> usize {
        (4 * self.layers[index].index_state).div_ceil(self.page_bytes()[Bucket::Index as usize])
    }

    /// Stores a KV row `[head_dim]`; `out` has [`Self::row_bytes`] bytes.
    pub fn encode_row(&self, row: &[f32], out: &mut [u8]) {
        if self.format != KvFormat::Fp8 {
            return self.encode_plain(row, out);
        }
        let nope = self.head_dim - self.rope_dim;
        let (codes, rest) = out.split_at_mut(nope);
        let (rope, scales) = rest.split_at_mut(2 * self.rope_dim);
        scales.fill(0);
        for (b, block) in row[..nope].chunks(Self::KV_BLOCK).enumerate() {
            let max = amax(block);
            let scale = e4m3_scale(max);
            scales[b] = if max.is_nan() { 255 } else { e8m0_code(scale) };
            let inverse = 1.0 / scale;
            for (code, &v) in codes[b * Self::KV_BLOCK..].iter_mut().zip(block) {
                *code = e4m3_code((v * inverse).clamp(-448.0, 448.0));
            }
        }
        encode_bf16(&row[nope..], rope);
    }

    /// Reads a KV row back into `out` `[head_dim]`.
    pub fn decode_row(&self, bytes: &[u8], out: &mut [f32]) {
        if self.format != KvFormat::Fp8 {
            return self.decode_plain(bytes, out);
        }
        let nope = self.head_dim - self.rope_dim;
        let (codes, rest) = bytes.split_at(nope);
        let (rope, scales) = rest.split_at(2 * self.rope_dim);
        for (b, block) in out[..nope].chunks_mut(Self::KV_BLOCK).enumerate() {
            let scale = e8m0_value(scales[b]);
            for (v, &code) in block.iter_mut().zip(&codes[b * Self::KV_BLOCK..]) {
                *v = E4M3[usize::from(code)] * scale;
            }
        }
        decode_bf16(rope, &mut out[nope..]);
    }

    /// Stores an index key `[index_dim]`; `out` has [`Self::key_bytes`] bytes.
    pub fn encode_key(&self, key: &[f32], out: &mut [u8]) {
        if self.format != KvFormat::Fp8 {
            return self.encode_plain(key, out);
        }
        let (codes, scales) = out.split_at_mut(self.index_dim / 2);
        for (b, block) in key.chunks(INDEX_BLOCK).enumerate() {
            let max = amax(block);
            let scale = e2m1_scale(max);
            scales[b] = if max.is_nan() { 255 } else { e8m0_code(scale) };
            let inverse = 1.0 / scale;
            let code = |v: f32| e2m1_code((v * inverse).clamp(-6.0, 6.0));
            for (byte, pair) in codes[b * INDEX_BLOCK / 2..].iter_mut().zip(block.chunks_exact(2)) {
                *byte = code(pair[0]) | (code(pair[1]) << 4);
            }
        }
    }

    /// Reads an index key back into `out` `[index_dim]`.
    pub fn decode_key(&self, bytes: &[u8], out: &mut [f32]) {
        if self.format != KvFormat::Fp8 {
            return self.decode_plain(bytes, out);
        }
        let (codes, scales) = bytes.split_at(self.index_dim / 2);
        for (b, block) in out.chunks_mut(INDEX_BLOCK).enumerate() {
            let scale = e8m0_value(scales[b]);
            for (pair, &byte) in block.chunks_exact_mut(2).zip(&codes[b * INDEX_BLOCK / 2..]) {
                pair[0] = E2M1[usize::from(byte & 15)] * scale;
                pair[1] = E2M1[usize::from(byte >> 4)] * scale;
            }
        }
    }

    fn encode_plain(&self, values: &[f32], out: &mut [u8]) {
        if self.format == KvFormat::Bf16 {
            return encode_bf16(values, out);
        }
        for (bytes, v) in out.chunks_exact_mut(4).zip(values) {
            bytes.copy_from_slice(&v.to_le_bytes());
        }
    }

    fn decode_plain(&self, bytes: &[u8], out: &mut [f32]) {
        if self.format == KvFormat::Bf16 {
            return decode_bf16(bytes, out);
        }
        for (v, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
    }
}

/// Byte of a power of two.
fn e8m0_code(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

fn encode_bf16(values: &[f32], out: &mut [u8]) {
    for (bytes, &v) in out.chunks_exact_mut(2).zip(values) {
        bytes.copy_from_slice(&bf16_bits(v).to_le_bytes());
    }
}

fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (v, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *v = bf16_value(u16::from_le_bytes([b[0], b[1]]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::format::{e2m1_round_trip, e4m3_round_trip, round_bf16};

    fn layout(format: KvFormat) -> CacheLayout {
        CacheLayout { format, head_dim: 512, rope_dim: 64, index_dim: 128, window: 128, layers: Vec::new() }
    }

    fn sample(n: usize) -> Vec<f32> {
        (0..n).map(|i| round_bf16((i as f32 * 0.731).sin() * (1.0 + (i / 64) as f32 * 30.0))).collect()
    }

    #[test]
    fn rows_and_keys_have_the_documented_sizes() {
        let sizes = |f| (layout(f).row_bytes(), layout(f).key_bytes());
        assert_eq!(sizes(KvFormat::Fp8), (584, 68));
        assert_eq!(sizes(KvFormat::Bf16), (1024, 256));
        assert_eq!(sizes(KvFormat::F32), (2048, 512));
    }

    #[test]
    fn values_on_the_quantisation_grid_survive_every_format() {
        let (mut row, mut key) = (sample(512), sample(128));
        e4m3_round_trip(&mut row[..448], 64);
        e2m1_round_trip(&mut key);
        row[64..128].fill(0.0);
        for format in [KvFormat::Fp8, KvFormat::Bf16, KvFormat::F32] {
            let layout = layout(format);
            let mut bytes = vec![0xFF; layout.row_bytes()];
            let mut back = vec![f32::NAN; 512];
            layout.encode_row(&row, &mut bytes);
            layout.decode_row(&bytes, &mut back);
            assert_eq!(back, row, "{format}");
            let mut bytes = vec![0xFF; layout.key_bytes()];
            let mut back = vec![f32::NAN; 128];
            layout.encode_key(&key, &mut bytes);
            layout.decode_key(&bytes, &mut back);
            assert_eq!(back, key, "{format}");
        }
    }

    #[test]
    fn nan_survives_quantised_storage() {
        let layout = layout(KvFormat::Fp8);
        let (mut row, mut key) = (sample(512), sample(128));
        row[70] = f32::NAN;
        key[40] = f32::NAN;
        let mut bytes = vec![0; layout.row_bytes()];
        layout.encode_row(&row, &mut bytes);
        let mut back = vec![0.0; 512];
        layout.decode_row(&bytes, &mut back);
        assert!(back[70].is_nan());
        let mut bytes = vec![0; layout.key_bytes()];
        layout.encode_key(&key, &mut bytes);
        let mut back = vec![0.0; 128];
        layout.decode_key(&bytes, &mut back);
        assert!(back[40].is_nan());
    }
}
