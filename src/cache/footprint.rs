//! How much memory a context takes, before any of it is allocated.

#![forbid(unsafe_code)]

use crate::model::config::LayerKind;

use super::sequence::BLOCK_TOKENS;
use super::{CacheBytes, CacheLayout};

impl CacheLayout {
    /// Bytes of one block of [`BLOCK_TOKENS`] tokens in all layers: (compressed entries, index keys).
    pub fn block_bytes(&self) -> (u64, u64) {
        let mut rows = 0;
        let mut keys = 0;
        for layer in &self.layers {
            rows += BLOCK_TOKENS.checked_div(layer.kind.ratio()).unwrap_or(0);
            keys += if layer.kind == LayerKind::C4a { BLOCK_TOKENS / 4 } else { 0 };
        }
        (rows as u64 * self.row_bytes() as u64, keys as u64 * self.key_bytes() as u64)
    }

    /// Bytes of one sequence's cache with `tokens` tokens in it.
    pub fn bytes(&self, tokens: usize) -> CacheBytes {
        let (entries, keys) = self.block_bytes();
        let state: u64 = self.layers.iter().map(|layer| (layer.main_state + layer.index_state) as u64).sum();
        CacheBytes {
            window: (self.layers.len() * self.window) as u64 * self.row_bytes() as u64,
            state: state * size_of::<f32>() as u64,
            pages: tokens.div_ceil(BLOCK_TOKENS) as u64 * (entries + keys),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KvFormat, LayerLayout, SequenceCache};

    #[test]
    fn the_forecast_is_what_a_sequence_takes() {
        let kinds = [LayerKind::Window, LayerKind::C4a, LayerKind::C128a, LayerKind::C4a];
        let layers = kinds.map(|kind| LayerLayout {
            kind,
            main_state: [0, 12_288, 1_536][usize::from(kind != LayerKind::Window) + usize::from(kind.ratio() == 128)],
            index_state: if kind == LayerKind::C4a { 3_072 } else { 0 },
        });
        for format in [KvFormat::Fp8, KvFormat::Bf16, KvFormat::F32] {
            let layout = CacheLayout {
                format,
                head_dim: 512,
                rope_dim: 64,
                index_dim: 128,
                window: 128,
                layers: layers.to_vec(),
            };
            for tokens in [0, 1, 256, 257, 1000] {
                let mut cache = SequenceCache::new(layout.clone()).unwrap();
                let _staged = cache.stage(tokens).unwrap();
                assert_eq!(layout.bytes(tokens), cache.bytes(), "{format}, {tokens} tokens");
            }
        }
    }
}
