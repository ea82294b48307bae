//! One sequence: its table of blocks and its state, and what a step sees and adds.
//!
//! Where pages lie in a [`PageMemory`](super::PageMemory), the backend writes a step's compressed entries and index keys
//! into the blocks' pages, behind what is committed, and the new compressor states into pages that are *fresh*;
//! [`SequenceCache::commit`] makes those the state. Window rows it writes at the very end, when nothing can fail any more.
//! A step must have ended on the device before its [`Staged`] or its sequence is dropped, since pages that were given back
//! belong to others.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::alloc;
use crate::error::{Result, bail};
use crate::model::config::LayerKind;

use super::block::Block;
use super::compressors::Compressors;
use super::layout::CacheLayout;
use super::manager::CacheManager;
use super::pool::Page;
use super::rollback::{Undo, UndoLog};
use super::state::State;

/// Native tokens per block-table entry, for all layers.
pub const BLOCK_TOKENS: usize = 256;

/// Bytes of one sequence's cache by kind. Pages that it shares with others count in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheBytes {
    /// Window rings of all layers.
    pub window: u64,
    /// Compressor states of all layers.
    pub state: u64,
    /// Pages of compressed entries and index keys.
    pub pages: u64,
}

/// The cache of one sequence; see the module's invariant.
pub struct SequenceCache {
    manager: Arc<CacheManager>,
    blocks: Vec<Arc<Block>>,
    state: Arc<State>,
    undo: UndoLog,
    /// In a page memory, where the next step writes its compressor states; taken when it is first needed.
    fresh: Option<Compressors>,
    version: u64,
}

/// What one step adds to one layer, not yet part of the cache. In a page memory, only `main_before` and `index_before` are
/// used.
#[derive(Default)]
pub struct StagedLayer {
    /// Window rows of the step's tokens, encoded.
    pub rows: Vec<u8>,
    /// Compressed entries that the step completes, encoded.
    pub entries: Vec<u8>,
    /// Index keys that the step completes, encoded.
    pub keys: Vec<u8>,
    /// Main compressor state after the step.
    pub main_state: Vec<f32>,
    /// Index compressor state after the step.
    pub index_state: Vec<f32>,
    /// Main compressor states `[kept, main_state]` before each of the step's last tokens, see [`Staged::kept_from`].
    pub main_before: Vec<f32>,
    /// Index compressor states before them, `[kept, index_state]`.
    pub index_before: Vec<f32>,
}

/// What one step adds to a sequence, not yet part of the cache.
pub struct Staged {
    /// Position of the step's first token.
    pub start: usize,
    /// Tokens of the step.
    pub count: usize,
    /// One entry a trunk layer.
    pub layers: Vec<StagedLayer>,
    /// What takes the step's last tokens back.
    undo: Option<Undo>,
    /// How many those are.
    kept: usize,
    /// Bytes of the window rows that they overwrite.
    kept_bytes: usize,
}

impl Staged {
    /// The first token of the step that may be taken back: before it and each later one, the compressor states are
    /// recorded.
    pub fn kept_from(&self) -> usize {
        self.count - self.kept
    }

    /// How many of the step's last tokens may be taken back.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// In a page memory: remembers the encoded window rows that those tokens overwrite, `[kept, layers, row_bytes]`. The
    /// token at position p overwrites the row of position p - window, which is one of the ring if that lies before the
    /// step and one of the step's own otherwise; what stands for positions below 0 does not matter. A step that keeps
    /// neither rows nor states cannot be taken back, nor can any before it.
    ///
    /// # Errors
    /// `InvalidArgument` if they are not that many bytes.
    pub fn keep_rows(&mut self, rows: &[u8]) -> Result<()> {
        let (kept, bytes) = (self.kept, self.kept_bytes);
        if rows.len() != bytes {
            bail!(InvalidArgument, "{} bytes of window rows to keep, {kept} tokens overwrite {bytes}", rows.len());
        }
        if let Some(undo) = &mut self.undo {
            undo.keep_rows(rows);
        }
        Ok(())
    }
}

/// A number that no block table of this process had before.
fn new_version() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl SequenceCache {
    /// An empty sequence whose last `rollback` tokens can always be taken back without computing.
    pub fn new(manager: &Arc<CacheManager>, rollback: usize) -> Result<Self> {
        let mut cache = Self::from_parts(manager, Vec::new(), Arc::new(State::new(manager)?), rollback);
        cache.own_fresh()?;
        Ok(cache)
    }

    /// A sequence of `tokens`, a multiple of 256, whose blocks are one and the same.
    #[cfg(test)]
    pub(super) fn synthetic(manager: &Arc<CacheManager>, tokens: usize) -> Result<Self> {
        let mut cache = Self::new(manager, 0)?;
        let block = Arc::new(Block::new(manager)?);
        cache.blocks = vec![block; tokens / BLOCK_TOKENS];
        cache.set_position(tokens);
        Ok(cache)
    }

    /// Appends `times` copies, in pages of their own, of the last block, which is full, and goes to their end: a long
    /// sequence without computing it, for measurements. The window is that of the block that was copied.
    pub(crate) fn repeat_last_block(&mut self, times: usize) -> Result<()> {
        // a step that did not finish may have left a block behind
        self.truncate_blocks(self.len() / BLOCK_TOKENS);
        alloc::reserve("block table", &mut self.blocks, times)?;
        self.own_state()?;
        let Some(last) = self.full_blocks().last().map(Arc::clone) else {
            bail!(InvalidArgument, "there is no full block to repeat")
        };
        for _ in 0..times {
            self.blocks.push(Arc::new(last.copy(&self.manager)?));
        }
        self.set_position(self.blocks.len() * BLOCK_TOKENS);
        self.undo.clear();
        Ok(())
    }

    /// A sequence that shares everything with this one; what either writes later it first copies.
    pub fn fork(&self) -> Result<Self> {
        let mut blocks = alloc::with_capacity("block table", self.blocks.len())?;
        blocks.extend(self.blocks.iter().map(Arc::clone));
        let undo = self.undo.fork()?;
        let (manager, state) = (Arc::clone(&self.manager), Arc::clone(&self.state));
        Ok(Self { manager, blocks, state, undo, fresh: None, version: new_version() })
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.state.position()
    }

    /// Whether no token is in the cache.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The layout of its rows and pages.
    pub fn layout(&self) -> &CacheLayout {
        self.manager.layout()
    }

    /// Bytes of the pages it uses.
    pub fn bytes(&self) -> CacheBytes {
        let (window, state) = self.layout().fixed_page_bytes();
        let (entries, keys) = self.layout().block_bytes();
        let state = if self.fresh.is_some() { 2 * state } else { state };
        CacheBytes { window, state, pages: self.blocks.len() as u64 * (entries + keys) }
    }

    /// The state behind the last token; a checkpoint, if it is kept.
    pub fn checkpoint(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// A sequence of `blocks` up to and including the one that `state` stands in; `rollback` as for [`Self::new`].
    pub fn from_parts(
        manager: &Arc<CacheManager>,
        blocks: Vec<Arc<Block>>,
        state: Arc<State>,
        rollback: usize,
    ) -> Self {
        debug_assert_eq!(blocks.len(), state.position().div_ceil(BLOCK_TOKENS), "blocks and state belong together");
        let undo = UndoLog::new(rollback);
        Self { manager: Arc::clone(manager), blocks, state, undo, fresh: None, version: new_version() }
    }

    /// As [`Self::from_parts`], with what takes its last tokens back.
    pub(super) fn from_parts_and_undo(
        manager: &Arc<CacheManager>,
        blocks: Vec<Arc<Block>>,
        state: Arc<State>,
        undo: UndoLog,
    ) -> Self {
        Self { undo, ..Self::from_parts(manager, blocks, state, 0) }
    }

    /// Tokens that can always be taken back without computing.
    pub fn rollback(&self) -> usize {
        self.undo.limit()
    }

    /// Where its pages come from.
    pub(super) fn manager(&self) -> &Arc<CacheManager> {
        &self.manager
    }

    /// Its table, which may end with a block that a step staged and did not commit.
    pub(super) fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    /// What takes its last tokens back.
    pub(super) fn undo(&self) -> &UndoLog {
        &self.undo
    }

    /// Bytes of the pages that [`Self::stage`] of `count` tokens takes: new blocks, copies of what is shared, and a second
    /// set of compressor states if there is none yet.
    pub fn needs(&self, count: usize) -> u64 {
        let tail = self.blocks.get(self.len() / BLOCK_TOKENS);
        let is_shared = tail.is_some_and(|tail| Arc::strong_count(tail) > 1 || Arc::weak_count(tail) > 0);
        let new = (self.len() + count).div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len());
        let blocks = (new + usize::from(is_shared)) as u64 * self.manager.block_bytes();
        let (windows, states) = self.layout().fixed_page_bytes();
        // what only checkpoints share needs no copy: they make room
        let others = Arc::strong_count(&self.state) - 1;
        let copy = if others > 0 && others > self.manager.kept(&self.state) { windows + states } else { 0 };
        let is_fresh_missing = self.fresh.is_none() && self.manager.pool().is_in_memory();
        blocks + copy + if is_fresh_missing { states } else { 0 }
    }

    /// The last block, if it holds fewer than 256 tokens.
    pub fn tail(&self) -> Option<&Block> {
        if self.len().is_multiple_of(BLOCK_TOKENS) { None } else { Some(&self.blocks[self.len() / BLOCK_TOKENS]) }
    }

    /// The blocks that hold 256 tokens each; a last one that holds fewer is not among them.
    pub fn full_blocks(&self) -> &[Arc<Block>] {
        &self.blocks[..self.len() / BLOCK_TOKENS]
    }

    /// Puts a block of equal content in place of the full block `i`, so that it is stored once.
    pub fn replace_block(&mut self, i: usize, block: Arc<Block>) {
        self.blocks[i] = block;
        self.version = new_version();
    }

    /// Appends shared full blocks and goes to the checkpoint `state` at their end. The sequence ends at a block's end.
    /// On error nothing changes.
    pub fn extend(&mut self, blocks: &[Arc<Block>], state: Arc<State>) -> Result<()> {
        debug_assert_eq!(self.len() % BLOCK_TOKENS, 0, "only a sequence of full blocks can be extended");
        alloc::reserve("block table", &mut self.blocks, blocks.len())?;
        // a step that did not finish may have left a block behind
        self.truncate_blocks(self.len() / BLOCK_TOKENS);
        self.blocks.extend(blocks.iter().map(Arc::clone));
        self.state = state;
        self.undo.clear();
        Ok(())
    }

    /// Goes back to `state`, a checkpoint of this very sequence.
    pub fn rewind(&mut self, state: Arc<State>) {
        self.truncate_blocks(state.position().div_ceil(BLOCK_TOKENS));
        self.state = state;
        self.undo.clear();
    }

    fn truncate_blocks(&mut self, count: usize) {
        if count < self.blocks.len() {
            self.blocks.truncate(count);
            self.version = new_version();
        }
    }

    /// Whether [`Self::roll_back`] can go to `position`.
    pub fn can_roll_back(&self, position: usize) -> bool {
        position < self.len() && self.undo.reaches(position)
    }

    /// Goes back to `position`, which [can be reached](Self::can_roll_back), from what its last tokens overwrote. On
    /// error, which comes only where the state is shared and its copy has no room, nothing changes. In a page memory a copy
    /// is always made, since a write may fail.
    pub fn roll_back(&mut self, position: usize) -> Result<()> {
        if self.manager.pool().is_in_memory() {
            let mut state = self.state.copy(&self.manager)?;
            self.undo.roll_back(self.manager.layout(), &mut state, position)?;
            self.state = Arc::new(state);
        } else {
            self.own_state()?;
            let state = Arc::get_mut(&mut self.state).expect("just made our own");
            self.undo.roll_back(self.manager.layout(), state, position)?;
        }
        self.undo.forget(position);
        self.truncate_blocks(position.div_ceil(BLOCK_TOKENS));
        Ok(())
    }

    /// Makes sure that `count` more tokens have pages of their own, and stages a step of that many. On error the
    /// sequence is as before.
    pub fn stage(&mut self, count: usize) -> Result<Staged> {
        if count > 0 {
            self.own(count)?;
        }
        let (layout, is_in_memory) = (self.manager.layout(), self.manager.pool().is_in_memory());
        let (start, row) = (self.len(), layout.row_bytes());
        let kept = self.undo.limit().min(count);
        let undo = (kept > 0).then(|| Undo::new(layout, start + count - kept, kept)).transpose()?;
        self.undo.reserve()?;
        let mut layers = alloc::with_capacity("staged layers", layout.layers.len())?;
        for (i, l) in layout.layers.iter().enumerate() {
            let main_before = alloc::with_capacity("rollback states", kept * l.main_state)?;
            let index_before = alloc::with_capacity("rollback states", kept * l.index_state)?;
            if is_in_memory {
                layers.push(StagedLayer { main_before, index_before, ..Default::default() });
                continue;
            }
            let (main_state, index_state) = self.state.compressors(layout, i)?;
            let rows = alloc::zeroed("staged window rows", count * row)?;
            let mut staged =
                StagedLayer { rows, main_state, index_state, main_before, index_before, ..Default::default() };
            if l.kind != LayerKind::Window {
                let completed = (start + count) / l.kind.ratio() - start / l.kind.ratio();
                staged.entries = alloc::with_capacity("staged entries", completed * row)?;
                if l.kind == LayerKind::C4a {
                    staged.keys = alloc::with_capacity("staged index keys", completed * layout.key_bytes())?;
                }
            }
            layers.push(staged);
        }
        Ok(Staged { start, count, layers, undo, kept, kept_bytes: kept * layout.layers.len() * row })
    }

    /// Has everything that `count` more tokens will write in pages that nobody else uses.
    fn own(&mut self, count: usize) -> Result<()> {
        let before = self.blocks.len();
        let needed = (self.len() + count).div_ceil(BLOCK_TOKENS);
        alloc::reserve("block table", &mut self.blocks, needed.saturating_sub(before))?;
        let result = self.own_pages(needed);
        if result.is_err() {
            self.blocks.truncate(before);
        }
        result
    }

    fn own_pages(&mut self, needed: usize) -> Result<()> {
        if let Some(last) = self.blocks.get_mut(self.state.position() / BLOCK_TOKENS)
            && Arc::get_mut(last).is_none()
        {
            *last = Arc::new(last.copy(&self.manager)?);
            self.version = new_version();
            self.manager.count_copy();
        }
        self.own_state()?;
        self.own_fresh()?;
        while self.blocks.len() < needed {
            self.blocks.push(Arc::new(Block::new(&self.manager)?));
        }
        Ok(())
    }

    fn own_state(&mut self) -> Result<()> {
        if Arc::get_mut(&mut self.state).is_some() {
            return Ok(());
        }
        match self.state.copy(&self.manager) {
            Ok(copy) => self.state = Arc::new(copy),
            // the mark that shared it may be what had to make room
            Err(error) if Arc::get_mut(&mut self.state).is_none() => return Err(error),
            Err(_) => {}
        }
        Ok(())
    }

    /// In a page memory, has a second set of pages for compressor states.
    fn own_fresh(&mut self) -> Result<()> {
        if self.fresh.is_none() && self.manager.pool().is_in_memory() {
            self.fresh = Some(Compressors::unset(&self.manager)?);
        }
        Ok(())
    }

    /// Takes a finished step over. `staged` comes from [`Self::stage`] with no other change in between.
    pub fn commit(&mut self, mut staged: Staged) {
        let end = staged.start + staged.count;
        if staged.kept > 0 {
            match self.finish_undo(&mut staged) {
                Some(undo) => self.undo.push(undo, end),
                None => self.undo.clear(),
            }
        }
        if !self.manager.pool().is_in_memory() {
            for (index, step) in staged.layers.iter().enumerate() {
                self.commit_layer(index, staged.start, step);
            }
        } else if let Some(fresh) = self.fresh.as_mut().filter(|_| staged.count > 0) {
            debug_assert_eq!(staged.start, self.state.position(), "a step is committed to the state it was staged on");
            Arc::get_mut(&mut self.state).expect("stage made the state our own").swap_compressors(fresh);
        }
        self.set_position(end);
    }

    /// The undo of a step that is about to be committed, if everything was kept.
    fn finish_undo(&self, staged: &mut Staged) -> Option<Undo> {
        let mut undo = staged.undo.take()?;
        let layout = self.manager.layout();
        let end = staged.start + staged.count;
        if !self.manager.pool().is_in_memory() {
            for position in end - staged.kept..end {
                for layer in 0..layout.layers.len() {
                    // before the window is full, what lies in the slot is never read, whatever it is
                    let overwritten = position.saturating_sub(layout.window);
                    undo.keep_row(self.view(layer, staged).window_row(overwritten));
                }
            }
        }
        for (i, layer) in staged.layers.iter_mut().enumerate() {
            undo.keep_states(i, layer);
        }
        undo.is_complete(layout, staged.kept).then_some(undo)
    }

    /// Takes over one layer of a step that ran only that layer; for [`crate::engine::research`].
    pub(crate) fn commit_partial(&mut self, staged: &Staged, layer: usize) {
        self.commit_layer(layer, staged.start, &staged.layers[layer]);
        self.set_position(staged.start + staged.count);
    }

    fn set_position(&mut self, position: usize) {
        Arc::get_mut(&mut self.state).expect("stage made the state our own").set_position(position);
    }

    fn commit_layer(&mut self, index: usize, start: usize, step: &StagedLayer) {
        debug_assert_eq!(start, self.len(), "a step is committed to the state it was staged on");
        let layout = self.manager.layout();
        let state = Arc::get_mut(&mut self.state).expect("stage made the state our own");
        state.advance(layout, index, start, &step.rows, &step.main_state, &step.index_state);
        let ratio = layout.layers[index].kind.ratio();
        if ratio == 0 {
            return;
        }
        let (first, per_block) = (start / ratio, BLOCK_TOKENS / ratio);
        for (i, entry) in step.entries.chunks_exact(layout.row_bytes()).enumerate() {
            let block = Arc::get_mut(&mut self.blocks[(first + i) / per_block]).expect("stage made the block our own");
            block.set_entry(index, (first + i) % per_block, entry);
        }
        for (i, key) in step.keys.chunks_exact(layout.key_bytes()).enumerate() {
            let block = Arc::get_mut(&mut self.blocks[(first + i) / per_block]).expect("stage made the block our own");
            block.set_key(index, (first + i) % per_block, key);
        }
    }

    /// Forgets everything and starts an empty sequence; takes new pages only where the state is shared, or where a page
    /// memory needs a second set of compressor states. On error nothing changes.
    pub fn clear(&mut self) -> Result<()> {
        self.own_fresh()?;
        match Arc::get_mut(&mut self.state) {
            Some(state) => state.reset(&self.manager, self.fresh.as_mut())?,
            None => self.state = Arc::new(State::new(&self.manager)?),
        }
        self.truncate_blocks(0);
        self.undo.clear();
        Ok(())
    }

    /// A number that changes whenever the table of blocks changes other than by blocks at its end, and that no other
    /// sequence of the process has: while it stays, a device's copy of the table is only to be continued.
    pub fn version(&self) -> u64 {
        // versions stay below 2^40 for longer than any process lives
        self.version | self.manager.pool().compactions() << 40
    }

    /// Numbers in the page memory of the pages of the window ring of `layer`: row p at slot p mod window, 64 slots a page.
    /// As with all the numbers below, there are none for pages on the host.
    pub fn ring_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        ids(self.state.ring(layer))
    }

    /// Numbers of the pages of the main compressor's state of `layer`.
    pub fn main_state_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        ids(self.state.compressor_pages().main(layer))
    }

    /// Numbers of the pages of the index compressor's state of `layer`.
    pub fn index_state_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        ids(self.state.compressor_pages().index(layer))
    }

    /// Numbers of the pages that a step writes the main compressor's new state of `layer` to.
    pub fn fresh_main_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        self.fresh.iter().flat_map(move |fresh| ids(fresh.main(layer)))
    }

    /// Numbers of the pages that a step writes the index compressor's new state of `layer` to.
    pub fn fresh_index_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        self.fresh.iter().flat_map(move |fresh| ids(fresh.index(layer)))
    }

    /// Blocks in the table: those of the tokens, and those that the step at work has staged.
    pub fn table_len(&self) -> usize {
        self.blocks.len()
    }

    /// Numbers of the pages of compressed entries of `layer`, one a block.
    pub fn entry_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        self.entry_ids_from(layer, 0)
    }

    /// As [`Self::entry_ids`], from block `first` on.
    pub fn entry_ids_from(&self, layer: usize, first: usize) -> impl Iterator<Item = u32> + '_ {
        self.blocks.iter().skip(first).filter_map(move |block| block.entry_id(layer))
    }

    /// Numbers of the pages of index keys of `layer`, one a block.
    pub fn key_ids(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        self.key_ids_from(layer, 0)
    }

    /// As [`Self::key_ids`], from block `first` on.
    pub fn key_ids_from(&self, layer: usize, first: usize) -> impl Iterator<Item = u32> + '_ {
        self.blocks.iter().skip(first).filter_map(move |block| block.key_id(layer))
    }

    /// One layer as a step in flight sees it: what is committed, then what `staged` adds.
    pub fn view<'a>(&'a self, index: usize, staged: &'a Staged) -> LayerView<'a> {
        LayerView { cache: self, index, staged }
    }
}

fn ids(pages: &[Page]) -> impl Iterator<Item = u32> + '_ {
    pages.iter().filter_map(Page::id)
}

/// Read access to one layer during a step, of pages on the host.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    cache: &'a SequenceCache,
    index: usize,
    staged: &'a Staged,
}

impl<'a> LayerView<'a> {
    /// Layout of the rows and keys.
    pub fn layout(&self) -> &'a CacheLayout {
        self.cache.layout()
    }

    /// Encoded window row of `position`, which lies within the window of the step's tokens.
    pub fn window_row(&self, position: usize) -> &'a [u8] {
        let row = self.layout().row_bytes();
        match position.checked_sub(self.staged.start) {
            Some(i) => &self.staged.layers[self.index].rows[i * row..(i + 1) * row],
            None => self.cache.state.window_row(self.layout(), self.index, position),
        }
    }

    /// Encoded compressed entry `j`.
    pub fn entry(&self, j: usize) -> &'a [u8] {
        let row = self.layout().row_bytes();
        let ratio = self.layout().layers[self.index].kind.ratio();
        if let Some(i) = j.checked_sub(self.staged.start / ratio) {
            return &self.staged.layers[self.index].entries[i * row..(i + 1) * row];
        }
        let per_block = BLOCK_TOKENS / ratio;
        self.cache.blocks[j / per_block].entry(self.index, j % per_block, row)
    }

    /// Encoded index key `j` of a c4a layer.
    pub fn key(&self, j: usize) -> &'a [u8] {
        let bytes = self.layout().key_bytes();
        if let Some(i) = j.checked_sub(self.staged.start / 4) {
            return &self.staged.layers[self.index].keys[i * bytes..(i + 1) * bytes];
        }
        let per_block = BLOCK_TOKENS / 4;
        self.cache.blocks[j / per_block].key(self.index, j % per_block, bytes)
    }
}
