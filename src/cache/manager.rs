//! The cache of one engine: its pages, its prefix index, its limits and its figures.
//!
//! Sessions take pages here. When the limit is reached, blocks that only the prefix index holds make room, the longest
//! unused first; a block in use is never taken. They go to the tiers, if there are any. Lock order: index, then pool;
//! the tiers' lock is taken alone.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::alloc;
use crate::error::{Error, ErrorKind, Result};

use super::block::Block;
use super::layout::CacheLayout;
use super::memory::PageMemory;
use super::pool::{Bucket, Page, PagePool, PoolUsage};
use super::prefix::{Checkpoint, Evicted, Hit, LookupEnd, PrefixIndex, PrefixKey};
use super::sequence::BLOCK_TOKENS;
use super::state::State;
use super::tier::{TierStats, Tiers};

/// Where checkpoints are kept, so that later prompts with the same beginning can start there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointPolicy {
    /// Nowhere: prefixes are not reused.
    None,
    /// At the last multiple of 256 tokens at or below the end of each prompt, and at each multiple reached by decoding.
    Boundary,
    /// At every multiple of this many tokens, itself a multiple of 256.
    Every(usize),
}

/// Limits and policies of an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Most bytes of pages, sessions and reusable prefixes together.
    pub limit: u64,
    /// Most bytes of checkpoints kept for prefix reuse; part of `limit`.
    pub checkpoint_limit: u64,
    /// Where checkpoints are kept.
    pub policy: CheckpointPolicy,
    /// Fill freed pages with NaN bytes, so that a stale read shows.
    pub poison: bool,
}

impl CacheOptions {
    /// Nothing is limited and nothing is reused.
    pub const PRIVATE: Self =
        Self { limit: u64::MAX, checkpoint_limit: 0, policy: CheckpointPolicy::None, poison: false };
}

/// Figures of an engine's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Most bytes of pages.
    pub limit_bytes: u64,
    /// Pages in use and free.
    pub pool: PoolUsage,
    /// Blocks in the prefix index.
    pub prefix_blocks: u64,
    /// Of these, blocks that no session uses.
    pub evictable_blocks: u64,
    /// Checkpoints in the prefix index.
    pub checkpoints: u64,
    /// Tokens that went through the model, in all sessions.
    pub computed_tokens: u64,
    /// Tokens that lookups asked for.
    pub lookup_tokens: u64,
    /// Of these, tokens that were reused instead of computed.
    pub hit_tokens: u64,
    /// Lookups that ended because the next block was not there.
    pub ended_no_block: u64,
    /// Lookups that ended because no checkpoint was there.
    pub ended_no_checkpoint: u64,
    /// Prefix blocks dropped to make room.
    pub evicted_blocks: u64,
    /// Checkpoints dropped to make room.
    pub evicted_checkpoints: u64,
    /// Sessions forked.
    pub forks: u64,
    /// Shared partial blocks copied before writing.
    pub copies_on_write: u64,
    /// The tiers behind the pages.
    pub tiers: TierStats,
}

#[derive(Default)]
struct Counters {
    computed_tokens: AtomicU64,
    lookup_tokens: AtomicU64,
    hit_tokens: AtomicU64,
    ended_no_block: AtomicU64,
    ended_no_checkpoint: AtomicU64,
    evicted_blocks: AtomicU64,
    evicted_checkpoints: AtomicU64,
    forks: AtomicU64,
    copies_on_write: AtomicU64,
}

/// Pages, prefix index and figures of one engine; shared by its sessions.
pub struct CacheManager {
    layout: CacheLayout,
    options: CacheOptions,
    root: PrefixKey,
    pool: Arc<PagePool>,
    index: Mutex<PrefixIndex>,
    counters: Counters,
    tiers: Option<Tiers>,
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

impl CacheManager {
    /// A cache for rows of `layout`. `context` is what makes equal tokens mean equal rows.
    pub fn new(layout: CacheLayout, options: CacheOptions, context: &[u8]) -> Arc<Self> {
        Self::with_tiers(layout, options, context, None)
    }

    /// As [`Self::new`], with tiers for what is evicted.
    pub fn with_tiers(layout: CacheLayout, options: CacheOptions, context: &[u8], tiers: Option<Tiers>) -> Arc<Self> {
        Self::with_memory(layout, options, context, tiers, None)
    }

    /// As [`Self::with_tiers`], with pages in `memory`, if it is given: then the limit is at most its length.
    pub fn with_memory(
        layout: CacheLayout,
        options: CacheOptions,
        context: &[u8],
        tiers: Option<Tiers>,
        memory: Option<Arc<dyn PageMemory>>,
    ) -> Arc<Self> {
        let pool = PagePool::new(layout.page_bytes(), options.limit, options.poison, memory);
        let root = PrefixKey::root(context);
        Arc::new(Self { layout, options, root, pool, index: Mutex::default(), counters: Counters::default(), tiers })
    }

    /// Sizes of rows and pages.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Limits and policies.
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// Key of the empty prefix.
    pub fn root(&self) -> PrefixKey {
        self.root
    }

    /// Bytes of the pages of a block.
    pub fn block_bytes(&self) -> u64 {
        let (entries, keys) = self.layout.block_bytes();
        entries + keys
    }

    /// Bytes of the pages of a sequence of `tokens` tokens that shares nothing.
    pub fn sequence_bytes(&self, tokens: usize) -> u64 {
        let (windows, states) = self.layout.fixed_page_bytes();
        let states = if self.pool.is_in_memory() { 2 * states } else { states };
        (tokens.div_ceil(BLOCK_TOKENS) as u64).saturating_mul(self.block_bytes()).saturating_add(windows + states)
    }

    /// Most bytes of pages, and those in use, by sessions or reusable prefixes.
    pub fn limit_and_used(&self) -> (u64, u64) {
        (self.pool.limit(), self.pool.usage().used_bytes)
    }

    /// Bytes of pages that can be had without taking any from a session: those not in use, and those that eviction frees.
    /// It looks at every reusable block.
    pub fn room(&self) -> u64 {
        let (windows, states) = self.layout.fixed_page_bytes();
        let evictable = self.index().evictable_bytes(self.block_bytes(), windows + states);
        let free = self.pool.limit().saturating_sub(self.pool.usage().used_bytes);
        free.saturating_add(evictable)
    }

    /// How often `state` is kept as a checkpoint, of a prefix or of one session, that eviction lets go of.
    pub(super) fn kept(&self, state: &Arc<State>) -> usize {
        self.index().kept(state)
    }

    /// Where pages come from.
    pub(super) fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// A page, for which unused prefixes are evicted if need be.
    ///
    /// # Errors
    /// `NoBlocks` with the counts when everything is in use, `OutOfMemory` when the system refuses.
    pub fn take(&self, bucket: Bucket) -> Result<Page> {
        loop {
            match self.pool.take(bucket) {
                Err(error) if error.kind() == ErrorKind::NoBlocks => {
                    if !self.evict() {
                        return Err(self.explain(&error));
                    }
                }
                result => return result,
            }
        }
    }

    /// In a page memory, makes what is free between used pages of one size usable for the others; returns how many bytes
    /// that are. Worth a try, while no step is at work on the device, before `NoBlocks` is taken for an answer: pages change
    /// their numbers, and sequences their [versions](super::SequenceCache::version). [`Self::take`] never does it by itself.
    ///
    /// # Errors
    /// Those of the page memory, and `OutOfMemory`; all pages are then where they were.
    pub fn compact(&self) -> Result<u64> {
        self.pool.compact()
    }

    /// Several pages of one bucket.
    pub fn take_many(&self, bucket: Bucket, pages: usize) -> Result<Vec<Page>> {
        let mut taken = alloc::with_capacity("cache page list", pages)?;
        for _ in 0..pages {
            taken.push(self.take(bucket)?);
        }
        Ok(taken)
    }

    /// Frees something that only the index holds; false if there is nothing.
    pub fn evict(&self) -> bool {
        let mut index = self.index();
        if index.evict_mark() {
            return true;
        }
        // where every leaf is in use, checkpoints of theirs may not be
        let evicted = index.evict_block().or_else(|| index.evict_checkpoint());
        drop(index);
        evicted.map(|evicted| self.offload(&evicted)).is_some()
    }

    /// Counts what had to make room, and hands it to the tiers.
    fn offload(&self, evicted: &Evicted) {
        let Evicted { parent, key, tokens, block, checkpoint } = evicted;
        let counter = if block.is_some() { &self.counters.evicted_blocks } else { &self.counters.evicted_checkpoints };
        count(counter, 1);
        let Some(tiers) = &self.tiers else { return };
        if let Some(block) = block {
            tiers.offload_block(*parent, *key, tokens, block);
        }
        if let Some(checkpoint) = checkpoint {
            tiers.offload_checkpoint(*parent, *key, tokens, checkpoint);
        }
    }

    /// Moves every reusable block that no session uses to the tiers, and from host memory to the directory; returns when
    /// all is written.
    pub fn flush(&self) {
        let Some(tiers) = &self.tiers else { return };
        loop {
            let evicted = self.index().evict_block();
            let Some(evicted) = evicted else { break };
            self.offload(&evicted);
        }
        tiers.flush();
    }

    fn explain(&self, error: &Error) -> Error {
        let usage = self.pool.usage();
        let [wide, index, narrow] = usage.used;
        Error::new(
            ErrorKind::NoBlocks,
            format!(
                "{}; {wide} wide, {index} index and {narrow} narrow pages are used by sessions, nothing is evictable; \
                 a block of {BLOCK_TOKENS} tokens takes {} bytes; raise cache_bytes (--cache-bytes), or free or clear a \
                 session",
                error.message(),
                self.layout.block_bytes().0 + self.layout.block_bytes().1
            ),
        )
    }

    /// The longest reusable prefix of `tokens` behind `from`. If it is all of them, its checkpoint has the logits.
    pub fn lookup(&self, from: PrefixKey, tokens: &[u32]) -> Result<Hit> {
        let held = self.tiers.as_ref().map(|tiers| self.promote(tiers, from, tokens));
        let hit = self.index().lookup(from, tokens);
        drop(held);
        hit
    }

    /// Counts a lookup of `asked` tokens, of which the session took `used` over.
    pub fn count_lookup(&self, asked: usize, used: usize, end: LookupEnd) {
        count(&self.counters.lookup_tokens, asked);
        count(&self.counters.hit_tokens, used);
        match end {
            LookupEnd::Complete => {}
            LookupEnd::NoBlock => count(&self.counters.ended_no_block, 1),
            LookupEnd::NoCheckpoint => count(&self.counters.ended_no_checkpoint, 1),
        }
    }

    /// The block of `tokens` that has `key`, if it is in the index.
    pub fn block(&self, key: PrefixKey, tokens: &[u32]) -> Option<Arc<Block>> {
        self.index().block(key, tokens)
    }

    /// Makes a full block findable; returns an equal one that is there already, to be used instead.
    pub fn publish(&self, parent: PrefixKey, tokens: &[u32], block: &Arc<Block>) -> Result<Option<Arc<Block>>> {
        self.index().insert(parent, tokens, block)
    }

    /// Keeps `checkpoint` at the end of block `key`, within the checkpoints' byte limit.
    pub fn keep_checkpoint(&self, key: PrefixKey, checkpoint: Checkpoint) {
        let (windows, states) = self.layout.fixed_page_bytes();
        let (size, logits) = (windows + states, size_of_val(&*checkpoint.logits) as u64);
        if size + logits > self.options.checkpoint_limit {
            return;
        }
        let mut evicted = Vec::new();
        let mut index = self.index();
        let bytes = |index: &PrefixIndex| index.len().1 as u64 * size + index.logit_bytes();
        while bytes(&index) + size + logits > self.options.checkpoint_limit {
            let Some(oldest) = index.evict_checkpoint() else { break };
            evicted.push(oldest);
        }
        index.add_checkpoint(key, checkpoint);
        drop(index);
        evicted.iter().for_each(|evicted| self.offload(evicted));
    }

    /// The checkpoint at the end of block `key`, if it is kept.
    pub fn checkpoint(&self, key: PrefixKey) -> Option<Checkpoint> {
        self.index().checkpoint(key)
    }

    pub(super) fn add_mark(&self, checkpoint: Checkpoint) -> u64 {
        self.index().add_mark(checkpoint)
    }

    pub(super) fn mark(&self, id: u64) -> Option<Checkpoint> {
        self.index().mark(id)
    }

    pub(super) fn remove_mark(&self, id: u64) {
        drop(self.index().remove_mark(id));
    }

    /// Counts tokens that went through the model.
    pub fn count_computed(&self, tokens: usize) {
        count(&self.counters.computed_tokens, tokens);
    }

    /// Counts a fork.
    pub fn count_fork(&self) {
        count(&self.counters.forks, 1);
    }

    /// Counts a copy of a shared block.
    pub(super) fn count_copy(&self) {
        count(&self.counters.copies_on_write, 1);
    }

    /// Figures now.
    pub fn stats(&self) -> CacheStats {
        let index = self.index();
        let (blocks, checkpoints) = index.len();
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheStats {
            limit_bytes: self.pool.limit(),
            pool: self.pool.usage(),
            prefix_blocks: blocks as u64,
            evictable_blocks: index.evictable() as u64,
            checkpoints: checkpoints as u64,
            computed_tokens: of(&self.counters.computed_tokens),
            lookup_tokens: of(&self.counters.lookup_tokens),
            hit_tokens: of(&self.counters.hit_tokens),
            ended_no_block: of(&self.counters.ended_no_block),
            ended_no_checkpoint: of(&self.counters.ended_no_checkpoint),
            evicted_blocks: of(&self.counters.evicted_blocks),
            evicted_checkpoints: of(&self.counters.evicted_checkpoints),
            forks: of(&self.counters.forks),
            copies_on_write: of(&self.counters.copies_on_write),
            tiers: self.tiers.as_ref().map(Tiers::stats).unwrap_or_default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, PrefixIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
