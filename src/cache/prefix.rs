//! The prefix index: which token prefixes are in the cache, as a tree of blocks keyed by a hash chain.
//!
//! A node is one block of 256 tokens behind a given prefix. Some nodes have a checkpoint, the state at the block's end:
//! only there can a sequence go on. A hash finds a node and its stored tokens confirm it, so a collision cannot give a
//! wrong hit. Eviction takes unused leaves in order of last use, so a parent never goes before its child.
//!
//! Complexity: lookup and insertion are a hash and a map access per block, eviction and touch a step in an ordered map, and
//! passing over a leaf in use costs that once.
#![forbid(unsafe_code)]

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use crate::alloc;
use crate::error::Result;

use super::block::Block;
use super::sequence::BLOCK_TOKENS;
use super::state::State;

/// Identity of a token prefix that is a whole number of blocks long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixKey(u128);

impl PrefixKey {
    /// The empty prefix under `context`: everything that makes equal tokens mean equal rows (model, numerics, row
    /// format, the user's salt).
    pub fn root(context: &[u8]) -> Self {
        Self(xxh3_128(context))
    }

    /// As a number, for names.
    pub(super) fn number(self) -> u128 {
        self.0
    }

    /// The key that [`Self::number`] gave.
    pub(super) fn from_number(number: u128) -> Self {
        Self(number)
    }

    /// This prefix and one more block of tokens.
    pub fn extend(self, tokens: &[u32]) -> Self {
        let mut bytes = [0u8; 16 + 4 * BLOCK_TOKENS];
        bytes[..16].copy_from_slice(&self.0.to_le_bytes());
        for (out, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            out.copy_from_slice(&token.to_le_bytes());
        }
        Self(xxh3_128(&bytes))
    }
}

/// Why a lookup went no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupEnd {
    /// Every whole block that may be reused was.
    Complete,
    /// The next block is not in the index.
    NoBlock,
    /// Blocks go on, but none of them has a checkpoint.
    NoCheckpoint,
}

/// What a lookup found.
pub struct Hit {
    /// Blocks behind the prefix that was asked from, up to the checkpoint.
    pub blocks: Vec<Arc<Block>>,
    /// Their keys.
    pub keys: Vec<PrefixKey>,
    /// The checkpoint at their end; `None` if there is none at all.
    pub checkpoint: Option<Checkpoint>,
    /// Why it went no further.
    pub end: LookupEnd,
}

/// A place in a prefix where a sequence can go on.
#[derive(Clone)]
pub struct Checkpoint {
    /// The state behind the prefix.
    pub state: Arc<State>,
    /// Logits `[vocab]` behind its last token; empty if nobody asked for them. A prompt that ends here needs them.
    pub logits: Arc<[f32]>,
}

impl Checkpoint {
    /// A checkpoint for prompts that go on behind it.
    pub fn new(state: Arc<State>) -> Self {
        Self { state, logits: Arc::default() }
    }

    fn logit_bytes(&self) -> u64 {
        size_of_val(&*self.logits) as u64
    }
}

struct Node {
    parent: PrefixKey,
    tokens: Vec<u32>,
    block: Arc<Block>,
    checkpoint: Option<Checkpoint>,
    children: u32,
    /// Time of last use; its place in `leaves` and `checkpoints`.
    tick: u64,
}

/// What had to make room.
pub(super) struct Evicted {
    pub(super) parent: PrefixKey,
    pub(super) key: PrefixKey,
    pub(super) tokens: Vec<u32>,
    pub(super) block: Option<Arc<Block>>,
    pub(super) checkpoint: Option<Checkpoint>,
}

/// The tree. Not thread-safe by itself.
#[derive(Default)]
pub(super) struct PrefixIndex {
    nodes: HashMap<PrefixKey, Node>,
    /// Nodes without children by last use.
    leaves: BTreeMap<u64, PrefixKey>,
    /// Nodes with a checkpoint by last use.
    checkpoints: BTreeMap<u64, PrefixKey>,
    /// Bytes of the checkpoints' logits.
    logit_bytes: u64,
    /// Children of prefixes that are not in the index: the empty one, and blocks whose sequence lost their pages and went on
    /// elsewhere, so that they went before what it added behind them.
    orphans: HashMap<PrefixKey, u32>,
    /// Checkpoints that single sessions come back to, by the time they were made. They count in no other figure.
    marks: BTreeMap<u64, Checkpoint>,
    clock: u64,
}

impl PrefixIndex {
    /// Number of blocks and of checkpoints in the index.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.nodes.len(), self.checkpoints.len())
    }

    /// Bytes of the logits that checkpoints hold.
    pub(super) fn logit_bytes(&self) -> u64 {
        self.logit_bytes
    }

    /// The longest reusable run of blocks of `tokens` behind `from`: whole blocks that end at a checkpoint. If they are
    /// all of `tokens`, the checkpoint has logits.
    pub(super) fn lookup(&mut self, from: PrefixKey, tokens: &[u32]) -> Result<Hit> {
        let (asked, whole) = (tokens.len(), tokens.len() / BLOCK_TOKENS);
        let mut hit = Hit {
            blocks: alloc::with_capacity("prefix hit", whole)?,
            keys: alloc::with_capacity("prefix hit", whole)?,
            checkpoint: None,
            end: LookupEnd::Complete,
        };
        let (mut key, mut usable) = (from, 0);
        for tokens in tokens.chunks_exact(BLOCK_TOKENS) {
            key = key.extend(tokens);
            let Some(node) = self.nodes.get(&key).filter(|n| n.tokens == tokens) else {
                hit.end = LookupEnd::NoBlock;
                break;
            };
            hit.blocks.push(Arc::clone(&node.block));
            hit.keys.push(key);
            let goes_on = hit.blocks.len() * BLOCK_TOKENS < asked;
            if let Some(checkpoint) = node.checkpoint.as_ref().filter(|c| goes_on || !c.logits.is_empty()) {
                usable = hit.blocks.len();
                hit.checkpoint = Some(checkpoint.clone());
            }
        }
        if usable < hit.blocks.len() {
            hit.end = LookupEnd::NoCheckpoint;
        }
        hit.blocks.truncate(usable);
        hit.keys.truncate(usable);
        // the deepest first: a leaf is then older than its parents and goes before them
        for i in (0..usable).rev() {
            self.touch(hit.keys[i]);
        }
        Ok(hit)
    }

    /// Adds `block` of `tokens` behind `parent`. If an equal block is there already, returns it, to be used instead.
    pub(super) fn insert(
        &mut self,
        parent: PrefixKey,
        tokens: &[u32],
        block: &Arc<Block>,
    ) -> Result<Option<Arc<Block>>> {
        let key = parent.extend(tokens);
        if let Some(node) = self.nodes.get(&key) {
            let existing = (node.tokens == tokens).then(|| Arc::clone(&node.block));
            self.touch(key);
            return Ok(existing);
        }
        let tokens = alloc::copied("prefix tokens", tokens)?;
        let tick = self.next_tick();
        let children = self.orphans.remove(&key).unwrap_or(0);
        let node = Node { parent, tokens, block: Arc::clone(block), checkpoint: None, children, tick };
        self.nodes.insert(key, node);
        if children == 0 {
            self.leaves.insert(tick, key);
        }
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.children += 1;
            self.leaves.remove(&parent.tick);
        } else {
            *self.orphans.entry(parent).or_insert(0) += 1;
        }
        Ok(None)
    }

    /// The block of `tokens` that has `key`.
    pub(super) fn block(&self, key: PrefixKey, tokens: &[u32]) -> Option<Arc<Block>> {
        self.nodes.get(&key).filter(|n| n.tokens == tokens).map(|n| Arc::clone(&n.block))
    }

    /// Keeps `checkpoint` at the end of block `key`, if that is in the index and has none, or one without logits.
    pub(super) fn add_checkpoint(&mut self, key: PrefixKey, checkpoint: Checkpoint) {
        let Some(node) = self.nodes.get_mut(&key) else { return };
        if node.checkpoint.as_ref().is_some_and(|known| !known.logits.is_empty() || checkpoint.logits.is_empty()) {
            return;
        }
        self.logit_bytes += checkpoint.logit_bytes();
        node.checkpoint = Some(checkpoint);
        self.checkpoints.insert(node.tick, key);
    }

    /// The checkpoint at the end of block `key`.
    pub(super) fn checkpoint(&self, key: PrefixKey) -> Option<Checkpoint> {
        self.nodes.get(&key)?.checkpoint.clone()
    }

    /// Takes the checkpoint out that was used longest ago.
    pub(super) fn evict_checkpoint(&mut self) -> Option<Evicted> {
        let (_, key) = self.checkpoints.pop_first()?;
        let node = self.nodes.get_mut(&key)?;
        let checkpoint = node.checkpoint.take();
        self.logit_bytes -= checkpoint.as_ref().map_or(0, Checkpoint::logit_bytes);
        Some(Evicted { parent: node.parent, key, tokens: node.tokens.clone(), block: None, checkpoint })
    }

    /// Keeps a session's mark; returns its number.
    pub(super) fn add_mark(&mut self, checkpoint: Checkpoint) -> u64 {
        let tick = self.next_tick();
        self.marks.insert(tick, checkpoint);
        tick
    }

    /// The mark of a number.
    pub(super) fn mark(&self, id: u64) -> Option<Checkpoint> {
        self.marks.get(&id).cloned()
    }

    /// Drops a mark, if it is still there.
    pub(super) fn remove_mark(&mut self, id: u64) -> Option<Checkpoint> {
        self.marks.remove(&id)
    }

    /// Drops the oldest mark if it is older than any leaf that could go; false if there is none.
    pub(super) fn evict_mark(&mut self) -> bool {
        let leaf = self.oldest_unused_leaf().and_then(|key| self.nodes.get(&key)).map_or(u64::MAX, |node| node.tick);
        let Some(mark) = self.marks.first_entry().filter(|mark| *mark.key() < leaf) else { return false };
        mark.remove();
        true
    }

    /// Takes the leaf out that was used longest ago and that no sequence uses.
    pub(super) fn evict_block(&mut self) -> Option<Evicted> {
        let key = self.oldest_unused_leaf()?;
        let Node { parent, tokens, block, checkpoint, tick, .. } = self.nodes.remove(&key)?;
        self.leaves.remove(&tick);
        if let Some(checkpoint) = &checkpoint {
            self.checkpoints.remove(&tick);
            self.logit_bytes -= checkpoint.logit_bytes();
        }
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children -= 1;
            if node.children == 0 {
                self.leaves.insert(node.tick, parent);
            }
        } else if let Entry::Occupied(mut orphans) = self.orphans.entry(parent) {
            *orphans.get_mut() -= 1;
            if *orphans.get() == 0 {
                orphans.remove();
            }
        }
        Some(Evicted { parent, key, tokens, block: Some(block), checkpoint })
    }

    fn oldest_unused_leaf(&mut self) -> Option<PrefixKey> {
        for _ in 0..self.leaves.len() {
            let (_, &key) = self.leaves.first_key_value()?;
            if self.nodes.get(&key).is_some_and(|n| Arc::strong_count(&n.block) == 1) {
                return Some(key);
            }
            // in use is used now: it goes behind all others, so that the next search does not meet it
            self.touch(key);
        }
        None
    }

    /// Blocks that no sequence uses: those that eviction can free sooner or later.
    pub(super) fn evictable(&self) -> usize {
        self.nodes.values().filter(|n| Arc::strong_count(&n.block) == 1).count()
    }

    /// Bytes of pages that eviction can free, where blocks and states take so many.
    pub(super) fn evictable_bytes(&self, block: u64, state: u64) -> u64 {
        let blocks = self.nodes.values().filter(|n| Arc::strong_count(&n.block) == 1).count() as u64 * block;
        let kept = self.marks.len() + self.checkpoints.len();
        // too little is a safe answer
        let Ok(mut states) = alloc::with_capacity("list of checkpoints", kept) else { return blocks };
        states.extend(self.checkpoints().map(|c| &c.state));
        // a mark and a checkpoint of the index may be one and the same state
        states.sort_unstable_by_key(|state| Arc::as_ptr(state) as usize);
        let alone = states.chunk_by(|a, b| Arc::ptr_eq(a, b)).filter(|same| Arc::strong_count(same[0]) == same.len());
        blocks + alone.count() as u64 * state
    }

    /// How often `state` is kept.
    pub(super) fn kept(&self, state: &Arc<State>) -> usize {
        self.checkpoints().filter(|kept| Arc::ptr_eq(&kept.state, state)).count()
    }

    /// Those of single sessions, then those of prefixes.
    fn checkpoints(&self) -> impl Iterator<Item = &Checkpoint> {
        self.marks.values().chain(self.nodes.values().filter_map(|node| node.checkpoint.as_ref()))
    }

    fn touch(&mut self, key: PrefixKey) {
        let tick = self.next_tick();
        let Some(node) = self.nodes.get_mut(&key) else { return };
        let before = std::mem::replace(&mut node.tick, tick);
        if self.leaves.remove(&before).is_some() {
            self.leaves.insert(tick, key);
        }
        if self.checkpoints.remove(&before).is_some() {
            self.checkpoints.insert(tick, key);
        }
    }

    fn next_tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
