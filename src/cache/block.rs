//! One block: the pages of all layers for 256 native tokens.
//!
//! A block that several sequences or the prefix index share is never written: whoever must write copies it first.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;

use super::layout::CacheLayout;
use super::manager::CacheManager;
use super::pool::{Bucket, Page};

/// Pages of one layer in a block.
struct LayerPages {
    /// Compressed entries: a wide page in c4a layers, a narrow one in c128a layers, none in window-only layers.
    entries: Option<Page>,
    /// Index keys of c4a layers.
    keys: Option<Page>,
}

impl LayerPages {
    fn pages(&self) -> impl Iterator<Item = &Page> {
        self.entries.iter().chain(&self.keys)
    }

    fn pages_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.entries.iter_mut().chain(&mut self.keys)
    }
}

/// Pages of all layers for 256 tokens.
pub struct Block {
    layers: Vec<LayerPages>,
}

impl Block {
    /// A block of pages with undefined content.
    pub fn new(manager: &CacheManager) -> Result<Self> {
        let layout = manager.layout();
        let mut layers = alloc::with_capacity("block table", layout.layers.len())?;
        for i in 0..layout.layers.len() {
            let take = |bucket: Bucket, pages: usize| (pages > 0).then(|| manager.take(bucket)).transpose();
            let [wide, index, narrow] = layout.block_pages(i);
            let entries = match take(Bucket::Wide, wide)? {
                Some(page) => Some(page),
                None => take(Bucket::Narrow, narrow)?,
            };
            layers.push(LayerPages { entries, keys: take(Bucket::Index, index)? });
        }
        Ok(Self { layers })
    }

    /// A copy in pages of its own.
    pub fn copy(&self, manager: &CacheManager) -> Result<Self> {
        let mut copy = Self::new(manager)?;
        let pages = copy.layers.iter_mut().flat_map(LayerPages::pages_mut);
        manager.pool().copy(pages.zip(self.layers.iter().flat_map(LayerPages::pages)))?;
        Ok(copy)
    }

    /// Hands over the rows and keys of the first `tokens` tokens, layer by layer, [`CacheLayout::block_content`] bytes.
    pub fn export(&self, layout: &CacheLayout, tokens: usize, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        for (i, layer) in self.layers.iter().enumerate() {
            let [entries, keys] = layout.layer_content(i, tokens);
            for (page, len) in [(&layer.entries, entries), (&layer.keys, keys)] {
                page.as_ref().map_or(Ok(()), |page| page.read(0..len, &mut *sink))?;
            }
        }
        Ok(())
    }

    /// A block with what `source` fills in: the content of [`Self::export`] for as many tokens. The rest of its pages is
    /// undefined.
    pub fn import(
        manager: &CacheManager,
        tokens: usize,
        source: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let mut block = Self::new(manager)?;
        for (i, layer) in block.layers.iter_mut().enumerate() {
            let [entries, keys] = manager.layout().layer_content(i, tokens);
            for (page, len) in [(&mut layer.entries, entries), (&mut layer.keys, keys)] {
                page.as_mut().map_or(Ok(()), |page| page.write(0..len, &mut *source))?;
            }
        }
        Ok(block)
    }

    /// Number in the page memory of the entries' page of `layer`; `None` if it has none there.
    pub fn entry_id(&self, layer: usize) -> Option<u32> {
        self.layers[layer].entries.as_ref().and_then(Page::id)
    }

    /// Number in the page memory of the index keys' page of `layer`; `None` if it has none there.
    pub fn key_id(&self, layer: usize) -> Option<u32> {
        self.layers[layer].keys.as_ref().and_then(Page::id)
    }

    /// Entry `slot` of `layer`, `row` bytes. As the functions below, for pages on the host.
    pub fn entry(&self, layer: usize, slot: usize, row: usize) -> &[u8] {
        part(&self.layers[layer].entries, slot, row)
    }

    /// Index key `slot` of `layer`, `key` bytes.
    pub fn key(&self, layer: usize, slot: usize, key: usize) -> &[u8] {
        part(&self.layers[layer].keys, slot, key)
    }

    /// Writes entry `slot` of `layer`.
    pub fn set_entry(&mut self, layer: usize, slot: usize, bytes: &[u8]) {
        set_part(&mut self.layers[layer].entries, slot, bytes);
    }

    /// Writes index key `slot` of `layer`.
    pub fn set_key(&mut self, layer: usize, slot: usize, bytes: &[u8]) {
        set_part(&mut self.layers[layer].keys, slot, bytes);
    }
}

fn part(page: &Option<Page>, slot: usize, len: usize) -> &[u8] {
    let page = page.as_ref().expect("the layer's kind has this page in every block");
    &page.bytes()[slot * len..(slot + 1) * len]
}

fn set_part(page: &mut Option<Page>, slot: usize, bytes: &[u8]) {
    let page = page.as_mut().expect("the layer's kind has this page in every block");
    page.bytes_mut()[slot * bytes.len()..(slot + 1) * bytes.len()].copy_from_slice(bytes);
}
