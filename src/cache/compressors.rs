//! The running states of the compressors of all layers, in pages.
//!
//! float32, little-endian, from the start of a layer's pages on. On the host a step brings new values and they are written
//! over the old ones; in a page memory the step writes them into a set of pages of its own, and the sets change places.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;
use crate::model::config::LayerKind;

use super::layout::CacheLayout;
use super::manager::CacheManager;
use super::pool::{Bucket, Page};

/// Compressor states of all layers.
pub(super) struct Compressors {
    layers: Vec<LayerPages>,
}

struct LayerPages {
    main: Vec<Page>,
    index: Vec<Page>,
}

impl Compressors {
    /// Pages with undefined content.
    pub(super) fn unset(manager: &CacheManager) -> Result<Self> {
        let layout = manager.layout();
        let mut layers = alloc::with_capacity("cache states", layout.layers.len())?;
        for i in 0..layout.layers.len() {
            let (bucket, pages) = layout.main_state_pages(i);
            let main = manager.take_many(bucket, pages)?;
            layers.push(LayerPages { main, index: manager.take_many(Bucket::Index, layout.index_state_pages(i))? });
        }
        Ok(Self { layers })
    }

    /// Sets the states of an empty sequence. On error, the content is undefined in a page memory and unchanged on the host.
    pub(super) fn set_empty(&mut self, manager: &CacheManager) -> Result<()> {
        let (layout, is_in_memory) = (manager.layout(), manager.pool().is_in_memory());
        let mut empty = alloc::with_capacity("empty states", layout.layers.len())?;
        for l in &layout.layers {
            let main = empty_state(l.kind, layout.head_dim, l.main_state)?;
            empty.push((main, empty_state(l.kind, layout.index_dim, l.index_state)?));
        }
        let mut written = alloc::with_capacity("empty states", layout.layers.len())?;
        let mut copies = alloc::with_capacity("empty states", layout.layers.len())?;
        for ((layer, l), (main, index)) in self.layers.iter_mut().zip(&layout.layers).zip(&empty) {
            match written.iter().find(|(like, _)| *like == l) {
                // one call for all of them, where a call for each page would be many
                Some(&(_, first)) if is_in_memory => copies.push((layer, first)),
                _ => {
                    layer.set(main, index)?;
                    written.push((l, &*layer));
                }
            }
        }
        manager.pool().copy(copies.into_iter().flat_map(|(to, from)| to.pages_mut().zip(from.pages())))
    }

    /// Pages of all layers in order.
    pub(super) fn pages(&self) -> impl Iterator<Item = &Page> {
        self.layers.iter().flat_map(LayerPages::pages)
    }

    /// As [`Self::pages`], to write.
    pub(super) fn pages_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.layers.iter_mut().flat_map(LayerPages::pages_mut)
    }

    /// Pages of the main compressor's state of `layer`.
    pub(super) fn main(&self, layer: usize) -> &[Page] {
        &self.layers[layer].main
    }

    /// Pages of the index compressor's state of `layer`.
    pub(super) fn index(&self, layer: usize) -> &[Page] {
        &self.layers[layer].index
    }

    /// Main and index state of `layer`, of pages on the host.
    pub(super) fn get(&self, layout: &CacheLayout, layer: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let (l, pages) = (&layout.layers[layer], &self.layers[layer]);
        Ok((load(&pages.main, l.main_state)?, load(&pages.index, l.index_state)?))
    }

    /// Sets main and index state of `layer`.
    ///
    /// # Errors
    /// Those of the page memory; on the host none.
    pub(super) fn set(&mut self, layer: usize, main: &[f32], index: &[f32]) -> Result<()> {
        self.layers[layer].set(main, index)
    }

    /// Hands over the bytes of `layer`: main state, index state.
    pub(super) fn export(
        &self,
        layout: &CacheLayout,
        layer: usize,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (l, pages) = (&layout.layers[layer], &self.layers[layer]);
        for (pages, len) in [(&pages.main, 4 * l.main_state), (&pages.index, 4 * l.index_state)] {
            let mut left = len;
            for page in pages {
                let part = left.min(page.len());
                page.read(0..part, &mut *sink)?;
                left -= part;
            }
        }
        Ok(())
    }

    /// Fills `layer` with the bytes of [`Self::export`] from `source`.
    pub(super) fn import(
        &mut self,
        layout: &CacheLayout,
        layer: usize,
        source: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (l, pages) = (&layout.layers[layer], &mut self.layers[layer]);
        for (pages, len) in [(&mut pages.main, 4 * l.main_state), (&mut pages.index, 4 * l.index_state)] {
            let mut left = len;
            for page in pages {
                let part = left.min(page.len());
                page.write(0..part, &mut *source)?;
                left -= part;
            }
        }
        Ok(())
    }
}

impl LayerPages {
    fn pages(&self) -> impl Iterator<Item = &Page> {
        self.main.iter().chain(&self.index)
    }

    fn pages_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.main.iter_mut().chain(&mut self.index)
    }

    fn set(&mut self, main: &[f32], index: &[f32]) -> Result<()> {
        store(&mut self.main, main)?;
        store(&mut self.index, index)
    }
}

/// Writes `values` over the pages, from their start.
fn store(pages: &mut [Page], mut values: &[f32]) -> Result<()> {
    for page in pages {
        let (part, rest) = values.split_at(values.len().min(page.len() / 4));
        page.write(0..4 * part.len(), |bytes| {
            for (bytes, v) in bytes.chunks_exact_mut(4).zip(part) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
            Ok(())
        })?;
        values = rest;
    }
    Ok(())
}

fn load(pages: &[Page], count: usize) -> Result<Vec<f32>> {
    let mut values = alloc::with_capacity("compressor state", count)?;
    let words = pages.iter().flat_map(|page| page.bytes().chunks_exact(4));
    values.extend(words.take(count).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    Ok(values)
}

/// Empty compressor state: values 0, gates minus infinity. See [`CacheLayout::new`] for the order of the parts.
fn empty_state(kind: LayerKind, dim: usize, len: usize) -> Result<Vec<f32>> {
    let mut state = alloc::vec_f32("compressor state", len)?;
    match kind {
        LayerKind::C4a if len > 0 => {
            state[4 * dim..8 * dim].fill(f32::NEG_INFINITY);
            state[16 * dim..].fill(f32::NEG_INFINITY);
        }
        LayerKind::C128a if len > 0 => state[..dim].fill(f32::NEG_INFINITY),
        _ => {}
    }
    Ok(state)
}
