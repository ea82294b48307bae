//! What a sequence carries besides its blocks: window rings and compressor states, in pages.
//!
//! A [`State`] is complete for one position: with the blocks below that position it is all that is needed to go on. So
//! a shared copy of it is a checkpoint.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::alloc;
use crate::error::Result;

use super::compressors::Compressors;
use super::layout::{CacheLayout, WIDE_ROWS};
use super::manager::CacheManager;
use super::pool::{Bucket, Page};

/// Window rings and compressor states of all layers at one position.
pub struct State {
    position: usize,
    /// Of each layer, the ring of the last `window` rows; the row of position p is at slot p mod window.
    rings: Vec<Vec<Page>>,
    compressors: Compressors,
}

impl State {
    /// The state of an empty sequence.
    pub fn new(manager: &CacheManager) -> Result<Self> {
        let mut state = Self::unset(manager, 0)?;
        state.compressors.set_empty(manager)?;
        Ok(state)
    }

    /// Makes it the state of an empty sequence again, in a page memory by way of the `spare` compressor states. On error
    /// nothing changes.
    pub(super) fn reset(&mut self, manager: &CacheManager, spare: Option<&mut Compressors>) -> Result<()> {
        match spare {
            Some(spare) => {
                spare.set_empty(manager)?;
                self.swap_compressors(spare);
            }
            None => self.compressors.set_empty(manager)?,
        }
        self.position = 0;
        Ok(())
    }

    /// Pages for a state, with undefined content.
    fn unset(manager: &CacheManager, position: usize) -> Result<Self> {
        let layout = manager.layout();
        let mut rings = alloc::with_capacity("cache states", layout.layers.len())?;
        for _ in &layout.layers {
            rings.push(manager.take_many(Bucket::Wide, layout.ring_pages())?);
        }
        Ok(Self { position, rings, compressors: Compressors::unset(manager)? })
    }

    /// A copy in pages of its own.
    pub fn copy(&self, manager: &CacheManager) -> Result<Self> {
        let mut copy = Self::unset(manager, self.position)?;
        let rings = copy.rings.iter_mut().flatten().zip(self.rings.iter().flatten());
        manager.pool().copy(rings.chain(copy.compressors.pages_mut().zip(self.compressors.pages())))?;
        Ok(copy)
    }

    /// Hands over windows and compressor states, layer by layer, [`CacheLayout::state_content`] bytes: the window's slots
    /// in order, zeros for those not used yet, then the states.
    pub fn export(&self, layout: &CacheLayout, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let row = layout.row_bytes();
        let unused = alloc::zeroed("empty window row", row)?;
        for (layer, ring) in self.rings.iter().enumerate() {
            for (page, slots) in ring.iter().zip(ring_slots(layout)) {
                let used = self.position.clamp(slots.start, slots.end) - slots.start;
                page.read(0..used * row, &mut *sink)?;
                (used..slots.len()).try_for_each(|_| sink(&unused))?;
            }
            self.compressors.export(layout, layer, sink)?;
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
        let mut state = Self::unset(manager, position)?;
        for (layer, ring) in state.rings.iter_mut().enumerate() {
            for (page, slots) in ring.iter_mut().zip(ring_slots(layout)) {
                page.write(0..slots.len() * layout.row_bytes(), &mut *source)?;
            }
            state.compressors.import(layout, layer, source)?;
        }
        Ok(state)
    }

    /// Tokens it stands behind.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Encoded window row of `position`, one of the last `window` below [`Self::position`]; of a state on the host.
    pub fn window_row(&self, layout: &CacheLayout, layer: usize, position: usize) -> &[u8] {
        let (page, bytes) = slot_place(layout, position);
        &self.rings[layer][page].bytes()[bytes]
    }

    /// Main and index compressor state of `layer`, of a state on the host.
    pub fn compressors(&self, layout: &CacheLayout, layer: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        self.compressors.get(layout, layer)
    }

    /// Pages of the window ring of `layer`.
    pub(super) fn ring(&self, layer: usize) -> &[Page] {
        &self.rings[layer]
    }

    /// Pages of the compressor states.
    pub(super) fn compressor_pages(&self) -> &Compressors {
        &self.compressors
    }

    /// Exchanges the compressor states with another set of pages.
    pub(super) fn swap_compressors(&mut self, other: &mut Compressors) {
        std::mem::swap(&mut self.compressors, other);
    }

    /// Takes over what a step of `rows.len() / row_bytes` tokens from `start` brought to `layer`, on the host.
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
            self.set_window_row(layout, layer, start + i, &rows[i * row..(i + 1) * row]).expect(ON_HOST);
        }
        self.set_compressors(layer, main, index).expect(ON_HOST);
    }

    /// Writes the encoded window row of `position` where it belongs in the ring.
    ///
    /// # Errors
    /// Those of the page memory; on the host none.
    pub(super) fn set_window_row(
        &mut self,
        layout: &CacheLayout,
        layer: usize,
        position: usize,
        row: &[u8],
    ) -> Result<()> {
        let (page, bytes) = slot_place(layout, position);
        self.rings[layer][page].write(bytes, |bytes| {
            bytes.copy_from_slice(row);
            Ok(())
        })
    }

    /// Sets the main and index compressor state of `layer`.
    ///
    /// # Errors
    /// Those of the page memory; on the host none.
    pub(super) fn set_compressors(&mut self, layer: usize, main: &[f32], index: &[f32]) -> Result<()> {
        self.compressors.set(layer, main, index)
    }

    /// Sets the position after all layers have advanced.
    pub fn set_position(&mut self, position: usize) {
        self.position = position;
    }
}

const ON_HOST: &str = "pages on the host take every write";

/// Slots of a window in each page of its ring.
fn ring_slots(layout: &CacheLayout) -> impl Iterator<Item = Range<usize>> {
    let window = layout.window;
    (0..window).step_by(WIDE_ROWS).map(move |first| first..window.min(first + WIDE_ROWS))
}

/// Page of a ring, and bytes of it, where the row of `position` lies.
fn slot_place(layout: &CacheLayout, position: usize) -> (usize, Range<usize>) {
    let (row, slot) = (layout.row_bytes(), position % layout.window);
    let first = slot % WIDE_ROWS * row;
    (slot / WIDE_ROWS, first..first + row)
}
