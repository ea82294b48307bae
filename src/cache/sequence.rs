//! One sequence's block table, window rings and compressor states.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;
use crate::model::config::LayerKind;

use super::layout::CacheLayout;
use super::pages::{Bucket, PageId, Pages};

/// Native tokens per block-table entry, for all layers.
pub const BLOCK_TOKENS: usize = 256;

/// Pages of one layer in one block.
#[derive(Clone, Copy)]
enum BlockPages {
    None,
    C4a { entries: PageId, keys: PageId },
    C128a { entries: PageId },
}

struct Block {
    layers: Vec<BlockPages>,
}

struct LayerState {
    /// Ring of the last `window` rows; row of position p at slot p mod window.
    ring: Vec<u8>,
    main: Vec<f32>,
    index: Vec<f32>,
}

/// Bytes of one sequence's cache by kind.
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
    layout: CacheLayout,
    len: usize,
    blocks: Vec<Block>,
    pages: Pages,
    layers: Vec<LayerState>,
}

/// What one step adds to one layer, not yet part of the cache.
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
}

/// What one step adds to a sequence, not yet part of the cache.
pub struct Staged {
    /// Position of the step's first token.
    pub start: usize,
    /// Tokens of the step.
    pub count: usize,
    /// One entry a trunk layer.
    pub layers: Vec<StagedLayer>,
}

impl SequenceCache {
    /// An empty cache. The window rings and states are allocated here; pages come with the tokens.
    pub fn new(layout: CacheLayout) -> Result<Self> {
        let (row, key) = (layout.row_bytes(), layout.key_bytes());
        let pages = Pages::new([BLOCK_TOKENS / 4 * row, BLOCK_TOKENS / 4 * key, BLOCK_TOKENS / 128 * row]);
        let mut layers = alloc::with_capacity("cache layers", layout.layers.len())?;
        for l in &layout.layers {
            let mut state = LayerState {
                ring: alloc::zeroed("window ring", layout.window * row)?,
                main: alloc::zeroed("compressor state", l.main_state)?,
                index: alloc::zeroed("index compressor state", l.index_state)?,
            };
            reset_state(l.kind, layout.head_dim, &mut state.main);
            reset_state(l.kind, layout.index_dim, &mut state.index);
            layers.push(state);
        }
        Ok(Self { layout, len: 0, blocks: Vec::new(), pages, layers })
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is in the cache.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The layout it was made with.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Bytes held now.
    pub fn bytes(&self) -> CacheBytes {
        let sum = |f: fn(&LayerState) -> usize| self.layers.iter().map(|l| f(l) as u64).sum();
        CacheBytes {
            window: sum(|l| l.ring.len()),
            state: sum(|l| 4 * (l.main.len() + l.index.len())),
            pages: self.pages.bytes().0,
        }
    }

    /// Makes sure that `count` more tokens have pages, and stages a step of that many. On error the cache is as before.
    pub fn stage(&mut self, count: usize) -> Result<Staged> {
        let blocks = (self.len + count).div_ceil(BLOCK_TOKENS);
        while self.blocks.len() < blocks {
            self.add_block()?;
        }
        let row = self.layout.row_bytes();
        let mut layers = alloc::with_capacity("staged layers", self.layers.len())?;
        for (state, l) in self.layers.iter().zip(&self.layout.layers) {
            let mut staged =
                StagedLayer { rows: alloc::zeroed("staged window rows", count * row)?, ..Default::default() };
            if l.kind != LayerKind::Window {
                let completed = (self.len + count) / l.kind.ratio() - self.len / l.kind.ratio();
                staged.entries = alloc::with_capacity("staged entries", completed * row)?;
                staged.main_state = alloc::copied("compressor state", &state.main)?;
                if l.kind == LayerKind::C4a {
                    staged.keys = alloc::with_capacity("staged index keys", completed * self.layout.key_bytes())?;
                    staged.index_state = alloc::copied("index compressor state", &state.index)?;
                }
            }
            layers.push(staged);
        }
        Ok(Staged { start: self.len, count, layers })
    }

    /// Takes a finished step over. `staged` comes from [`Self::stage`] with no other commit in between.
    pub fn commit(&mut self, staged: Staged) {
        debug_assert_eq!(staged.start, self.len, "a step is committed to the state it was staged on");
        for (index, step) in staged.layers.into_iter().enumerate() {
            self.commit_layer(index, staged.start, staged.count, step);
        }
        self.len += staged.count;
    }

    /// Takes over one layer of a step that ran only that layer; for [`crate::engine::research`].
    pub(crate) fn commit_partial(&mut self, mut staged: Staged, layer: usize) {
        let step = std::mem::take(&mut staged.layers[layer]);
        self.commit_layer(layer, staged.start, staged.count, step);
        self.len += staged.count;
    }

    fn commit_layer(&mut self, index: usize, start: usize, count: usize, step: StagedLayer) {
        let (row, key, window) = (self.layout.row_bytes(), self.layout.key_bytes(), self.layout.window);
        let ratio = self.layout.layers[index].kind.ratio();
        for i in count.saturating_sub(window)..count {
            let slot = (start + i) % window;
            self.layers[index].ring[slot * row..(slot + 1) * row].copy_from_slice(&step.rows[i * row..(i + 1) * row]);
        }
        if ratio == 0 {
            return;
        }
        let per_block = BLOCK_TOKENS / ratio;
        let first = start / ratio;
        for (i, entry) in step.entries.chunks_exact(row).enumerate() {
            let (block, slot) = ((first + i) / per_block, (first + i) % per_block);
            let (bucket, page) = match self.blocks[block].layers[index] {
                BlockPages::C4a { entries, .. } => (Bucket::Wide, entries),
                BlockPages::C128a { entries } => (Bucket::Narrow, entries),
                BlockPages::None => unreachable!("a compressed layer has pages in every block"),
            };
            self.pages.get_mut(bucket, page)[slot * row..(slot + 1) * row].copy_from_slice(entry);
        }
        for (i, bytes) in step.keys.chunks_exact(key).enumerate() {
            let (block, slot) = ((first + i) / per_block, (first + i) % per_block);
            if let BlockPages::C4a { keys, .. } = self.blocks[block].layers[index] {
                self.pages.get_mut(Bucket::Index, keys)[slot * key..(slot + 1) * key].copy_from_slice(bytes);
            }
        }
        self.layers[index].main = step.main_state;
        self.layers[index].index = step.index_state;
    }

    /// Forgets everything and starts an empty sequence; memory is kept for reuse.
    pub fn clear(&mut self) {
        while let Some(block) = self.blocks.pop() {
            self.free_block(&block);
        }
        for (state, l) in self.layers.iter_mut().zip(&self.layout.layers) {
            reset_state(l.kind, self.layout.head_dim, &mut state.main);
            reset_state(l.kind, self.layout.index_dim, &mut state.index);
        }
        self.len = 0;
    }

    fn add_block(&mut self) -> Result<()> {
        alloc::reserve("block table", &mut self.blocks, 1)?;
        let mut block = Block { layers: alloc::with_capacity("block table", self.layout.layers.len())? };
        for l in &self.layout.layers {
            match take_pages(&mut self.pages, l.kind) {
                Ok(pages) => block.layers.push(pages),
                Err(error) => {
                    self.free_block(&block);
                    return Err(error);
                }
            }
        }
        self.blocks.push(block);
        Ok(())
    }

    fn free_block(&mut self, block: &Block) {
        for pages in &block.layers {
            match *pages {
                BlockPages::None => {}
                BlockPages::C4a { entries, keys } => {
                    self.pages.free(Bucket::Wide, entries);
                    self.pages.free(Bucket::Index, keys);
                }
                BlockPages::C128a { entries } => self.pages.free(Bucket::Narrow, entries),
            }
        }
    }

    /// One layer as a step in flight sees it: what is committed, then what `staged` adds.
    pub fn view<'a>(&'a self, index: usize, staged: &'a Staged) -> LayerView<'a> {
        LayerView { cache: self, index, staged }
    }
}

fn take_pages(pages: &mut Pages, kind: LayerKind) -> Result<BlockPages> {
    match kind {
        LayerKind::Window => Ok(BlockPages::None),
        LayerKind::C128a => Ok(BlockPages::C128a { entries: pages.take(Bucket::Narrow)? }),
        LayerKind::C4a => {
            let entries = pages.take(Bucket::Wide)?;
            match pages.take(Bucket::Index) {
                Ok(keys) => Ok(BlockPages::C4a { entries, keys }),
                Err(error) => {
                    pages.free(Bucket::Wide, entries);
                    Err(error)
                }
            }
        }
    }
}

/// Empty compressor state: values 0, gates minus infinity. See [`CacheLayout::new`] for the order of the parts.
fn reset_state(kind: LayerKind, dim: usize, state: &mut [f32]) {
    state.fill(0.0);
    match kind {
        LayerKind::Window => {}
        LayerKind::C4a if state.is_empty() => {}
        LayerKind::C4a => {
            state[4 * dim..8 * dim].fill(f32::NEG_INFINITY);
            state[16 * dim..].fill(f32::NEG_INFINITY);
        }
        LayerKind::C128a => state.iter_mut().take(dim).for_each(|v| *v = f32::NEG_INFINITY),
    }
}

/// Read access to one layer during a step.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    cache: &'a SequenceCache,
    index: usize,
    staged: &'a Staged,
}

impl<'a> LayerView<'a> {
    /// Layout of the rows and keys.
    pub fn layout(&self) -> &'a CacheLayout {
        &self.cache.layout
    }

    /// Encoded window row of `position`, which lies within the window of the step's tokens.
    pub fn window_row(&self, position: usize) -> &'a [u8] {
        let row = self.cache.layout.row_bytes();
        let step = &self.staged.layers[self.index];
        match position.checked_sub(self.staged.start) {
            Some(i) => &step.rows[i * row..(i + 1) * row],
            None => {
                let slot = position % self.cache.layout.window;
                &self.cache.layers[self.index].ring[slot * row..(slot + 1) * row]
            }
        }
    }

    /// Encoded compressed entry `j`.
    pub fn entry(&self, j: usize) -> &'a [u8] {
        let row = self.cache.layout.row_bytes();
        let ratio = self.cache.layout.layers[self.index].kind.ratio();
        let committed = self.staged.start / ratio;
        if let Some(i) = j.checked_sub(committed) {
            return &self.staged.layers[self.index].entries[i * row..(i + 1) * row];
        }
        let per_block = BLOCK_TOKENS / ratio;
        let slot = j % per_block;
        let page = match self.cache.blocks[j / per_block].layers[self.index] {
            BlockPages::C4a { entries, .. } => self.cache.pages.get(Bucket::Wide, entries),
            BlockPages::C128a { entries } => self.cache.pages.get(Bucket::Narrow, entries),
            BlockPages::None => unreachable!("only compressed layers have entries"),
        };
        &page[slot * row..(slot + 1) * row]
    }

    /// Encoded index key `j` of a c4a layer.
    pub fn key(&self, j: usize) -> &'a [u8] {
        let bytes = self.cache.layout.key_bytes();
        let committed = self.staged.start / 4;
        if let Some(i) = j.checked_sub(committed) {
            return &self.staged.layers[self.index].keys[i * bytes..(i + 1) * bytes];
        }
        let per_block = BLOCK_TOKENS / 4;
        let slot = j % per_block;
        let BlockPages::C4a { keys, .. } = self.cache.blocks[j / per_block].layers[self.index] else {
            unreachable!("only c4a layers have index keys");
        };
        &self.cache.pages.get(Bucket::Index, keys)[slot * bytes..(slot + 1) * bytes]
    }
}
