//! One block: the pages of all layers for 256 native tokens.
//!
//! A block that several sequences or the prefix index share is never written: whoever must write copies it first.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;

use super::manager::CacheManager;
use super::pool::{Bucket, Page};

/// Pages of one layer in a block.
struct LayerPages {
    /// Compressed entries: a wide page in c4a layers, a narrow one in c128a layers, none in window-only layers.
    entries: Option<Page>,
    /// Index keys of c4a layers.
    keys: Option<Page>,
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
        for (to, from) in copy.layers.iter_mut().zip(&self.layers) {
            copy_page(&mut to.entries, &from.entries);
            copy_page(&mut to.keys, &from.keys);
        }
        Ok(copy)
    }

    /// Entry `slot` of `layer`, `row` bytes.
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

fn copy_page(to: &mut Option<Page>, from: &Option<Page>) {
    if let (Some(to), Some(from)) = (to, from) {
        to.bytes_mut().copy_from_slice(from.bytes());
    }
}
