//! How much memory a context takes, before any of it is allocated.

#![forbid(unsafe_code)]

use crate::model::config::LayerKind;

use super::sequence::BLOCK_TOKENS;
use super::{Bucket, CacheBytes, CacheLayout, slabs};

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

    /// Bytes of the pages of one sequence's windows and states: what it costs however long it is, padding included.
    pub fn fixed_page_bytes(&self) -> (u64, u64) {
        (self.bytes_of(self.window_pages()), self.bytes_of(self.compressor_pages()))
    }

    /// Pages of one sequence's windows: wide, index, narrow.
    pub(super) fn window_pages(&self) -> [u64; 3] {
        [(self.layers.len() * self.ring_pages()) as u64, 0, 0]
    }

    /// Pages of one sequence's compressor states: wide, index, narrow.
    pub(super) fn compressor_pages(&self) -> [u64; 3] {
        let mut pages = [0; 3];
        for i in 0..self.layers.len() {
            let (bucket, main) = self.main_state_pages(i);
            pages[bucket as usize] += main as u64;
            pages[Bucket::Index as usize] += self.index_state_pages(i) as u64;
        }
        pages
    }

    /// Pages of one block in all layers: wide, index, narrow.
    pub(super) fn all_block_pages(&self) -> [u64; 3] {
        let mut pages = [0; 3];
        for i in 0..self.layers.len() {
            pages.iter_mut().zip(self.block_pages(i)).for_each(|(sum, of_layer)| *sum += of_layer as u64);
        }
        pages
    }

    fn bytes_of(&self, pages: [u64; 3]) -> u64 {
        pages.iter().zip(self.page_bytes()).map(|(pages, size)| pages * size as u64).sum()
    }

    /// Bytes of a slab of a [`PageMemory`](super::PageMemory): what is beyond a multiple of it is not used there.
    pub fn slab_bytes(&self) -> u64 {
        slabs::slab_bytes(self.page_bytes())
    }

    /// Bytes of one sequence's cache with `tokens` tokens in it, without the padding of pages.
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
    use crate::cache::{CacheManager, CacheOptions, KvFormat, LayerLayout, SequenceCache};

    /// A cache with the layers of V4-Flash.
    fn flash(format: KvFormat) -> CacheLayout {
        cache(43, LayerKind::Window, format)
    }

    /// A cache with `count` layers: two of kind `first`, then c4a and c128a in turns.
    fn cache(count: usize, first: LayerKind, format: KvFormat) -> CacheLayout {
        let kinds = (0..count).map(|i| match i {
            0 | 1 => first,
            i if i % 2 == 0 => LayerKind::C4a,
            _ => LayerKind::C128a,
        });
        let layer = |kind| match kind {
            LayerKind::Window => LayerLayout { kind, main_state: 0, index_state: 0 },
            LayerKind::C4a => LayerLayout { kind, main_state: 24 * 512, index_state: 24 * 128 },
            LayerKind::C128a => LayerLayout { kind, main_state: 3 * 512, index_state: 0 },
        };
        let layers = kinds.map(layer).collect();
        CacheLayout { format, head_dim: 512, rope_dim: 64, index_dim: 128, window: 128, layers }
    }

    fn total(bytes: CacheBytes) -> u64 {
        bytes.window + bytes.state + bytes.pages
    }

    /// Pitfall 51.
    #[test]
    fn the_published_sizes_at_a_million_tokens_come_out_to_the_byte() {
        let pro = |format| cache(61, LayerKind::C128a, format);
        for (layout, window_and_pages, per_token) in [
            (pro(KvFormat::Bf16), 10_334_371_840, 9848.0),  // 9.6246 GiB
            (pro(KvFormat::Fp8), 5_280_404_480, 5031.4375), // 4.918 GiB
            (flash(KvFormat::Bf16), 7_219_838_976, 6880.0), // 6.724 GiB
            (flash(KvFormat::Fp8), 3_688_172_544, 3514.25), // 3.435 GiB
        ] {
            let bytes = layout.bytes(1 << 20);
            assert_eq!(bytes.window + bytes.pages, window_and_pages);
            let (entries, keys) = layout.block_bytes();
            assert_eq!((entries + keys) as f64 / BLOCK_TOKENS as f64, per_token);
        }
    }

    #[test]
    fn real_pages_of_a_64k_flash_sequence_are_the_forecast_plus_at_most_three_percent() {
        let layout = flash(KvFormat::Fp8);
        let forecast = total(layout.bytes(65_536));
        let manager = CacheManager::new(layout, CacheOptions::PRIVATE, b"");
        let mut cache = SequenceCache::new(&manager, 0).unwrap();
        for _ in 0..256 {
            let staged = cache.stage(BLOCK_TOKENS).unwrap();
            cache.commit(staged);
        }
        let used = manager.stats().pool.used_bytes;
        assert_eq!(used, total(cache.bytes()), "what a sequence says it uses is what it took from the pool");
        assert!(used >= forecast && used as f64 <= forecast as f64 * 1.03, "{used} used, {forecast} forecast");
    }

    #[test]
    fn the_fixed_cost_of_a_flash_sequence_is_below_7_mb() {
        let (window, state) = flash(KvFormat::Fp8).fixed_page_bytes();
        assert!(window + state < 7_000_000, "{window} + {state}");
    }
}
