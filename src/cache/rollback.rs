//! Taking the last few tokens back without computing anything.
//!
//! A token overwrites one row of each window ring and changes the compressor states; its [`Undo`] keeps what was there
//! before. What it wrote into blocks needs no undoing: nothing reads entries behind the position. A step is undone token
//! by token, however many it had, since only its last tokens may be wanted back (a draft that was not accepted).
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::alloc;
use crate::error::{Error, Result};

use super::layout::CacheLayout;
use super::sequence::StagedLayer;
use super::state::State;

/// What the last tokens of one step overwrote.
pub(super) struct Undo {
    /// Position of the first token it can take back.
    first: usize,
    /// Encoded window rows `[tokens, layers]` that made room for the tokens' own.
    rows: Vec<u8>,
    layers: Vec<Before>,
}

/// Compressor states before each of the tokens.
#[derive(Default)]
struct Before {
    /// `[tokens, main_state]`.
    main: Vec<f32>,
    /// `[tokens, index_state]`.
    index: Vec<f32>,
}

impl Undo {
    /// Room for the last `tokens` of a step, the first of them at position `first`.
    pub(super) fn new(layout: &CacheLayout, first: usize, tokens: usize) -> Result<Self> {
        let rows = alloc::with_capacity("rollback rows", tokens * layout.layers.len() * layout.row_bytes())?;
        let mut layers = alloc::with_capacity("rollback states", layout.layers.len())?;
        layers.resize_with(layout.layers.len(), Before::default);
        Ok(Self { first, rows, layers })
    }

    /// Remembers a window row; called for each token and, within it, each layer in order.
    pub(super) fn keep_row(&mut self, row: &[u8]) {
        self.rows.extend_from_slice(row);
    }

    /// Remembers the window rows of all tokens, in the order of [`Self::keep_row`].
    pub(super) fn keep_rows(&mut self, rows: &[u8]) {
        self.rows.clear();
        self.rows.extend_from_slice(rows);
    }

    /// Whether all that was overwritten by `tokens` tokens has been kept.
    pub(super) fn is_complete(&self, layout: &CacheLayout, tokens: usize) -> bool {
        self.rows.len() == tokens * layout.layers.len() * layout.row_bytes()
            && self.layers.iter().zip(&layout.layers).all(|(before, l)| {
                before.main.len() == tokens * l.main_state && before.index.len() == tokens * l.index_state
            })
    }

    /// Takes over the compressor states that the step recorded in `layer`.
    pub(super) fn keep_states(&mut self, layer: usize, step: &mut StagedLayer) {
        let before =
            Before { main: std::mem::take(&mut step.main_before), index: std::mem::take(&mut step.index_before) };
        self.layers[layer] = before;
    }

    /// Brings `state`, which stands behind token `end - 1` of this step, back to `position`. Errors come from a page
    /// memory; the state is then undefined.
    fn apply(&self, layout: &CacheLayout, state: &mut State, position: usize, end: usize) -> Result<()> {
        let (row, layers) = (layout.row_bytes(), layout.layers.len());
        for token in (position..end).rev() {
            let rows = &self.rows[(token - self.first) * layers * row..][..layers * row];
            for (layer, bytes) in rows.chunks_exact(row).enumerate() {
                state.set_window_row(layout, layer, token, bytes)?;
            }
        }
        let i = position - self.first;
        for (layer, before) in self.layers.iter().enumerate() {
            let l = &layout.layers[layer];
            let (main, index) = (i * l.main_state..(i + 1) * l.main_state, i * l.index_state..(i + 1) * l.index_state);
            state.set_compressors(layer, &before.main[main], &before.index[index])?;
        }
        state.set_position(position);
        Ok(())
    }
}

/// The undos of a sequence's last tokens, oldest first, each with the position behind its last token.
#[derive(Default)]
pub(super) struct UndoLog {
    undos: VecDeque<(Arc<Undo>, usize)>,
    /// Tokens that can be taken back at least.
    limit: usize,
}

impl UndoLog {
    pub(super) fn new(limit: usize) -> Self {
        Self { undos: VecDeque::new(), limit }
    }

    /// Tokens that it keeps.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Makes room for one more undo.
    pub(super) fn reserve(&mut self) -> Result<()> {
        self.undos.try_reserve(1).map_err(|_| refused(1))
    }

    /// Adds the undo of a step that ends at `end` and drops those that are no longer needed. Room was reserved.
    pub(super) fn push(&mut self, undo: Undo, end: usize) {
        self.undos.push_back((Arc::new(undo), end));
        while self.undos.front().is_some_and(|&(_, last)| last + self.limit <= end) {
            self.undos.pop_front();
        }
    }

    /// Whether `position`, below the sequence's end, can be gone back to.
    pub(super) fn reaches(&self, position: usize) -> bool {
        self.undos.front().is_some_and(|(undo, _)| undo.first <= position)
    }

    /// Brings `state` back to `position`, which it [reaches](Self::reaches). The log is as before until
    /// [`Self::forget`].
    ///
    /// # Errors
    /// Those of the page memory, on the host none; the state is then undefined.
    pub(super) fn roll_back(&self, layout: &CacheLayout, state: &mut State, position: usize) -> Result<()> {
        for (undo, end) in self.undos.iter().rev() {
            if *end > position {
                undo.apply(layout, state, position.max(undo.first), *end)?;
            }
        }
        Ok(())
    }

    /// Drops what was kept of tokens behind `position`, which are taken back.
    pub(super) fn forget(&mut self, position: usize) {
        while let Some((undo, end)) = self.undos.back_mut() {
            if undo.first < position {
                *end = position.min(*end);
                break;
            }
            self.undos.pop_back();
        }
    }

    /// Forgets everything: the sequence goes on from elsewhere.
    pub(super) fn clear(&mut self) {
        self.undos.clear();
    }

    /// A log for a fork; the undos are shared.
    pub(super) fn fork(&self) -> Result<Self> {
        let mut undos = VecDeque::new();
        undos.try_reserve(self.undos.len()).map_err(|_| refused(self.undos.len()))?;
        undos.extend(self.undos.iter().map(|(undo, end)| (Arc::clone(undo), *end)));
        Ok(Self { undos, limit: self.limit })
    }
}

fn refused(undos: usize) -> Error {
    Error::out_of_memory("rollback list", (undos * size_of::<(Arc<Undo>, usize)>()) as u64)
}
