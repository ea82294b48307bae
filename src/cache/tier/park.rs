//! Sequences that gave their pages up: all they need to go on, in host memory.
//!
//! Unlike the records of the other tiers, what is here belongs to a session and stays until that goes on or ends; so the
//! place has a limit of its own, and a sequence that finds no room here is lost and computed again. What several
//! sequences share is kept once, and whoever comes back while a block still has pages somewhere shares those.
//!
//! Invariant: a sequence comes back with the bytes it left with. A block that is remembered here by a [`Weak`] is never
//! written in place, since it does not look unshared to its owner.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::alloc;
use crate::cache::block::Block;
use crate::cache::manager::CacheManager;
use crate::cache::rollback::UndoLog;
use crate::cache::sequence::{BLOCK_TOKENS, SequenceCache};
use crate::cache::state::State;
use crate::error::Result;

use super::take;

/// Host memory for sequences without pages. Its lock is taken alone.
pub struct ParkingLot {
    limit: u64,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    used: u64,
    /// What is kept of full blocks, by the address that they had: a [`Kept`] holds on to that address.
    blocks: HashMap<usize, Weak<Kept>>,
}

/// Bytes of the lot; dropping it gives them back.
struct Space {
    lot: Arc<ParkingLot>,
    bytes: u64,
}

/// The content of a block.
struct Kept {
    /// Where it has pages, as long as somebody uses those. Nowhere for a partial block, which its owner would have to copy
    /// before it writes on.
    origin: Mutex<Weak<Block>>,
    tokens: usize,
    content: Vec<u8>,
    space: Space,
}

/// A sequence without pages.
pub struct Parked {
    blocks: Vec<Arc<Kept>>,
    position: usize,
    state: Vec<u8>,
    undo: UndoLog,
    _space: Space,
}

impl ParkingLot {
    /// A place for `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, inside: Mutex::default() })
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    fn space(self: &Arc<Self>, bytes: u64) -> Option<Space> {
        let mut inside = self.lock();
        let used = inside.used.checked_add(bytes).filter(|&used| used <= self.limit)?;
        inside.used = used;
        Some(Space { lot: Arc::clone(self), bytes })
    }

    /// What is kept of a full block; `None` if there is no room.
    fn keep(self: &Arc<Self>, manager: &CacheManager, block: &Arc<Block>, tokens: usize) -> Result<Option<Arc<Kept>>> {
        let address = Arc::as_ptr(block) as usize;
        if tokens == BLOCK_TOKENS {
            let known = self.lock().blocks.get(&address).and_then(Weak::upgrade);
            if let Some(kept) = known.filter(|kept| kept.is_of(block)) {
                return Ok(Some(kept));
            }
        }
        let layout = manager.layout();
        let bytes = layout.block_content(tokens);
        let Some(space) = self.space(bytes) else { return Ok(None) };
        let mut content = alloc::with_capacity("preempted session", bytes as usize)?;
        block.export(layout, tokens, &mut |part| {
            content.extend_from_slice(part);
            Ok(())
        })?;
        let kept = Arc::new(Kept { origin: Mutex::default(), tokens, content, space });
        kept.settle(block);
        Ok(Some(kept))
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn is_of(&self, block: &Arc<Block>) -> bool {
        self.origin().as_ptr() == Arc::as_ptr(block)
    }

    /// The block in pages: those it has elsewhere, or new ones.
    fn block(self: &Arc<Self>, manager: &CacheManager) -> Result<Arc<Block>> {
        let known = self.origin().upgrade();
        if let Some(block) = known {
            return Ok(block);
        }
        let mut content = self.content.as_slice();
        let block = Arc::new(Block::import(manager, self.tokens, &mut |out| take(&mut content, out))?);
        self.settle(&block);
        Ok(block)
    }

    /// Takes note that it has the pages of `block`, by whose address it is found from now on, if it is full.
    fn settle(self: &Arc<Self>, block: &Arc<Block>) {
        if self.tokens < BLOCK_TOKENS {
            return;
        }
        let before = std::mem::replace(&mut *self.origin(), Arc::downgrade(block));
        let mut inside = self.space.lot.lock();
        let address = before.as_ptr() as usize;
        if inside.blocks.get(&address).is_some_and(|kept| kept.as_ptr() == Arc::as_ptr(self)) {
            inside.blocks.remove(&address);
        }
        inside.blocks.insert(Arc::as_ptr(block) as usize, Arc::downgrade(self));
    }

    fn origin(&self) -> MutexGuard<'_, Weak<Block>> {
        self.origin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let address = self.origin().as_ptr() as usize;
        let mut inside = self.space.lot.lock();
        if inside.blocks.get(&address).is_some_and(|kept| kept.strong_count() == 0) {
            inside.blocks.remove(&address);
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.lot.lock().used -= self.bytes;
    }
}

impl Parked {
    /// Tokens of the sequence.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Most bytes of pages that coming back takes.
    pub fn page_bytes(&self, manager: &CacheManager) -> u64 {
        let away = self.blocks.iter().filter(|kept| kept.origin().strong_count() == 0).count() as u64;
        manager.sequence_bytes(0) + away * manager.block_bytes()
    }
}

impl SequenceCache {
    /// Copies the sequence into `lot`, so that its pages can be dropped; `None` if there is no room. What a step staged and
    /// did not commit is not part of it.
    ///
    /// # Errors
    /// `OutOfMemory`, and those of the page memory.
    pub fn park(&self, lot: &Arc<ParkingLot>) -> Result<Option<Parked>> {
        let (manager, position) = (self.manager(), self.len());
        let bytes = manager.layout().state_content();
        let Some(space) = lot.space(bytes) else { return Ok(None) };
        let mut blocks = alloc::with_capacity("preempted session", position.div_ceil(BLOCK_TOKENS))?;
        for (i, block) in self.blocks().iter().take(position.div_ceil(BLOCK_TOKENS)).enumerate() {
            let tokens = BLOCK_TOKENS.min(position - i * BLOCK_TOKENS);
            let Some(kept) = lot.keep(manager, block, tokens)? else { return Ok(None) };
            blocks.push(kept);
        }
        let mut state = alloc::with_capacity("preempted session", bytes as usize)?;
        self.checkpoint().export(manager.layout(), &mut |part| {
            state.extend_from_slice(part);
            Ok(())
        })?;
        Ok(Some(Parked { blocks, position, state, undo: self.undo().fork()?, _space: space }))
    }

    /// The sequence that `parked` was, in pages of `manager`.
    ///
    /// # Errors
    /// `NoBlocks`, `OutOfMemory`, and those of the page memory.
    pub fn unpark(manager: &Arc<CacheManager>, parked: &Parked) -> Result<Self> {
        let mut content = parked.state.as_slice();
        let state = State::import(manager, parked.position, &mut |out| take(&mut content, out))?;
        let mut blocks = alloc::with_capacity("block table", parked.blocks.len())?;
        for kept in &parked.blocks {
            blocks.push(kept.block(manager)?);
        }
        Ok(Self::from_parts_and_undo(manager, blocks, Arc::new(state), parked.undo.fork()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheLayout, CacheOptions, KvFormat, LayerLayout};
    use crate::model::config::LayerKind;

    fn manager() -> Arc<CacheManager> {
        let layer = LayerLayout { kind: LayerKind::C4a, main_state: 24, index_state: 24 };
        let layout = CacheLayout {
            format: KvFormat::Bf16,
            head_dim: 1,
            rope_dim: 0,
            index_dim: 1,
            window: 128,
            layers: vec![layer],
        };
        CacheManager::new(layout, CacheOptions::PRIVATE, b"park")
    }

    fn grow(cache: &mut SequenceCache, tokens: usize) {
        let staged = cache.stage(tokens).unwrap();
        cache.commit(staged);
    }

    fn park(cache: SequenceCache, lot: &Arc<ParkingLot>) -> Parked {
        let parked = cache.park(lot).unwrap().unwrap();
        drop(cache);
        parked
    }

    #[test]
    fn what_two_share_is_kept_once_also_when_one_of_them_has_been_back() {
        let (manager, lot) = (manager(), ParkingLot::new(u64::MAX));
        let mut one = SequenceCache::new(&manager, 0).unwrap();
        grow(&mut one, 600);
        let other = one.fork().unwrap();
        let (one, other) = (park(one, &lot), park(other, &lot));
        let used = lot.used();
        let back = SequenceCache::unpark(&manager, &one).unwrap();
        drop(one);
        let one = park(back, &lot);
        assert_eq!(lot.used(), used);
        let both = [&one, &other].map(|parked| SequenceCache::unpark(&manager, parked).unwrap());
        for (a, b) in both[0].full_blocks().iter().zip(both[1].full_blocks()) {
            assert!(Arc::ptr_eq(a, b), "its pages are shared again");
        }
        drop((one, other));
        assert_eq!((lot.used(), lot.lock().blocks.len()), (0, 0));
    }

    #[test]
    fn a_block_that_is_kept_is_counted_among_those_that_a_step_copies() {
        let (manager, lot) = (manager(), ParkingLot::new(u64::MAX));
        let mut one = SequenceCache::new(&manager, 0).unwrap();
        grow(&mut one, 300);
        let (earlier, mut other) = (one.checkpoint(), one.fork().unwrap());
        let parked = park(one, &lot);
        let copies = || manager.stats().copies_on_write;
        let (windows, states) = manager.layout().fixed_page_bytes();
        assert_eq!(other.needs(1), windows + states, "a partial block is its owner's alone");
        grow(&mut other, 212);
        assert_eq!(copies(), 0);
        let again = park(other.fork().unwrap(), &lot);
        other.rewind(earlier);
        assert_eq!(other.needs(1), manager.block_bytes());
        grow(&mut other, 1);
        assert_eq!(copies(), 1);
        drop((parked, again));
    }
}
