//! What a sequence carries besides its blocks: window rings and compressor states, in pages.
//!
//! A [`State`] is complete for one position: with the blocks below that position it is all that is needed to go on. So
//! a shared copy of it is a checkpoint.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;
use crate::model::config::LayerKind;

use super::layout::{CacheLayout, WIDE_ROWS};
use super::manager::CacheManager;
use super::pool::{Bucket, Page};

/// Window rings and compressor states of all layers at one position.
pub struct State {
    position: usize,
    layers: Vec<LayerState>,
}

struct LayerState {
    /// Ring of the last `window` rows; the row of position p is at slot p mod window.
    ring: Vec<Page>,
    main: Vec<Page>,
    index: Vec<Page>,
}

impl State {
    /// The state of an empty sequence.
    pub fn new(manager: &CacheManager) -> Result<Self> {
        let mut state = Self::unset(manager, 0)?;
        state.reset(manager.layout())?;
        Ok(state)
    }

    /// Makes it the state of an empty sequence again. On error nothing changes.
    pub fn reset(&mut self, layout: &CacheLayout) -> Result<()> {
        let mut empty = alloc::with_capacity("empty states", layout.layers.len())?;
        for l in &layout.layers {
            let main = empty_state(l.kind, layout.head_dim, l.main_state)?;
            empty.push((main, empty_state(l.kind, layout.index_dim, l.index_state)?));
        }
        for (layer, (main, index)) in self.layers.iter_mut().zip(&empty) {
            store(&mut layer.main, main);
            store(&mut layer.index, index);
        }
        self.position = 0;
        Ok(())
    }

    /// Pages for a state, with undefined content.
    fn unset(manager: &CacheManager, position: usize) -> Result<Self> {
        let layout = manager.layout();
        let mut layers = alloc::with_capacity("cache states", layout.layers.len())?;
        for i in 0..layout.layers.len() {
            let (bucket, pages) = layout.main_state_pages(i);
            layers.push(LayerState {
                ring: manager.take_many(Bucket::Wide, layout.ring_pages())?,
                main: manager.take_many(bucket, pages)?,
                index: manager.take_many(Bucket::Index, layout.index_state_pages(i))?,
            });
        }
        Ok(Self { position, layers })
    }

    /// A copy in pages of its own.
    pub fn copy(&self, manager: &CacheManager) -> Result<Self> {
        let mut copy = Self::unset(manager, self.position)?;
        for (to, from) in copy.layers.iter_mut().zip(&self.layers) {
            copy_pages(&mut to.ring, &from.ring);
            copy_pages(&mut to.main, &from.main);
            copy_pages(&mut to.index, &from.index);
        }
        Ok(copy)
    }

    /// Hands over windows and compressor states, layer by layer, [`CacheLayout::state_content`] bytes: the window's slots
    /// in order, zeros for those not used yet, then the states.
    pub fn export(&self, layout: &CacheLayout, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let row = layout.row_bytes();
        let unused = alloc::zeroed("empty window row", row)?;
        for (layer, l) in self.layers.iter().zip(&layout.layers) {
            for slot in 0..layout.window {
                let used = slot < self.position;
                sink(if used {
                    &layer.ring[slot / WIDE_ROWS].bytes()[slot % WIDE_ROWS * row..][..row]
                } else {
                    &unused
                })?;
            }
            for (pages, len) in [(&layer.main, 4 * l.main_state), (&layer.index, 4 * l.index_state)] {
                let mut left = len;
                for page in pages {
                    let part = left.min(page.bytes().len());
                    sink(&page.bytes()[..part])?;
                    left -= part;
                }
            }
        }
        Ok(())
    }

    /// The state behind `position` tokens with what `source` fills in: the content of [`Self::export`].
    pub fn import(
        manager: &CacheManager,
        position: usize,
        source: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let layout = manager.layout();
        let row = layout.row_bytes();
        let mut state = Self::unset(manager, position)?;
        for (layer, l) in state.layers.iter_mut().zip(&layout.layers) {
            for slot in 0..layout.window {
                source(&mut layer.ring[slot / WIDE_ROWS].bytes_mut()[slot % WIDE_ROWS * row..][..row])?;
            }
            for (pages, len) in [(&mut layer.main, 4 * l.main_state), (&mut layer.index, 4 * l.index_state)] {
                let mut left = len;
                for page in pages {
                    let part = left.min(page.bytes().len());
                    source(&mut page.bytes_mut()[..part])?;
                    left -= part;
                }
            }
        }
        Ok(state)
    }

    /// Tokens it stands behind.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Encoded window row of `position`, one of the last `window` below [`Self::position`].
    pub fn window_row(&self, layout: &CacheLayout, layer: usize, position: usize) -> &[u8] {
        let (row, slot) = (layout.row_bytes(), position % layout.window);
        &self.layers[layer].ring[slot / WIDE_ROWS].bytes()[slot % WIDE_ROWS * row..][..row]
    }

    /// Main and index compressor state of `layer`.
    pub fn compressors(&self, layout: &CacheLayout, layer: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let l = &layout.layers[layer];
        Ok((load(&self.layers[layer].main, l.main_state)?, load(&self.layers[layer].index, l.index_state)?))
    }

    /// Takes over what a step of `rows.len() / row_bytes` tokens from `start` brought to `layer`.
    pub fn advance(
        &mut self,
        layout: &CacheLayout,
        layer: usize,
        start: usize,
        rows: &[u8],
        main: &[f32],
        index: &[f32],
    ) {
        let (row, window) = (layout.row_bytes(), layout.window);
        let count = rows.len() / row;
        for i in count.saturating_sub(window)..count {
            self.set_window_row(layout, layer, start + i, &rows[i * row..(i + 1) * row]);
        }
        self.set_compressors(layer, main, index);
    }

    /// Writes the encoded window row of `position` where it belongs in the ring.
    pub(super) fn set_window_row(&mut self, layout: &CacheLayout, layer: usize, position: usize, bytes: &[u8]) {
        let slot = position % layout.window;
        let page = self.layers[layer].ring[slot / WIDE_ROWS].bytes_mut();
        page[slot % WIDE_ROWS * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Sets the main and index compressor state of `layer`.
    pub(super) fn set_compressors(&mut self, layer: usize, main: &[f32], index: &[f32]) {
        store(&mut self.layers[layer].main, main);
        store(&mut self.layers[layer].index, index);
    }

    /// Sets the position after all layers have advanced.
    pub fn set_position(&mut self, position: usize) {
        self.position = position;
    }
}

fn copy_pages(to: &mut [Page], from: &[Page]) {
    for (to, from) in to.iter_mut().zip(from) {
        to.bytes_mut().copy_from_slice(from.bytes());
    }
}

/// Writes `values` little-endian over the pages, from their start.
fn store(pages: &mut [Page], values: &[f32]) {
    let mut values = values.iter();
    for page in pages {
        for (bytes, v) in page.bytes_mut().chunks_exact_mut(4).zip(&mut values) {
            bytes.copy_from_slice(&v.to_le_bytes());
        }
    }
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
