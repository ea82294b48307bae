//! Where a session's sequence is: in pages, in host memory because others needed the pages, or lost and to be computed
//! again.
//!
//! The owner, whoever leads a step, and whoever needs room reach it through one lock. Whoever has the lock takes the pages
//! only of a sequence that its owner does not [use](Slot::pin) or has in the queue; it leaves the queue with its result,
//! under the lock. So an owner that has pinned its sequence and seen it in pages keeps it there until it queues it.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::cache::SequenceCache;
use crate::cache::tier::Parked;

use super::Room;

/// Order among those who want room: higher priority first, then the older call. The smaller goes first.
pub(crate) type Rank = (Reverse<i32>, u64);

/// Place of a sequence among those of its engine.
pub(crate) struct Slot {
    room: Arc<Room>,
    number: u64,
    rollback: usize,
    inside: Mutex<Inside>,
    /// Held by the call of the owner that has the sequence brought back.
    returning: Mutex<()>,
    /// Calls of the owner that are using the sequence.
    uses: AtomicU32,
    /// When the last of them ended, in nanoseconds of the room's clock.
    idle_since: AtomicU64,
    /// Of the session's last call.
    priority: AtomicI32,
    since: AtomicU64,
    /// It is in the queue or in a step.
    is_queued: AtomicBool,
    /// It is in the queue because there is no room.
    is_waiting: AtomicBool,
    /// Steps that were made since.
    pub(super) waited: AtomicU32,
    /// Tokens that room was promised for, those that have blocks included.
    promised: AtomicUsize,
    /// Whether it is in pages, and the blocks in its table.
    is_here: AtomicBool,
    held: AtomicUsize,
    preemptions: AtomicU64,
    recomputed: AtomicU64,
}

/// What the lock guards.
pub(crate) struct Inside {
    pub(crate) place: Place,
    /// When the last result left.
    pub(crate) left: Option<Instant>,
}

/// Where a sequence is.
pub(crate) enum Place {
    Here(SequenceCache),
    Parked(Parked),
    /// Nowhere: it is an empty sequence whose owner knows the tokens.
    Lost,
}

/// A use by the owner.
pub(crate) struct Pin(Arc<Slot>);

/// The sequence of a slot, in pages. When it goes, the slot knows how many blocks there are.
pub(crate) struct Sequence<'a> {
    slot: &'a Slot,
    inside: MutexGuard<'a, Inside>,
}

const HERE: &str = "the owner brings its sequence back before it uses it, and holds it";

impl Slot {
    /// A slot for `cache`; without one, for an empty sequence that gets pages when it needs them.
    pub(super) fn new(room: &Arc<Room>, number: u64, cache: Option<SequenceCache>, rollback: usize) -> Self {
        Self {
            room: Arc::clone(room),
            number,
            rollback,
            is_here: AtomicBool::new(cache.is_some()),
            held: AtomicUsize::new(cache.as_ref().map_or(0, SequenceCache::table_len)),
            inside: Mutex::new(Inside { place: cache.map_or(Place::Lost, Place::Here), left: None }),
            returning: Mutex::default(),
            uses: AtomicU32::new(0),
            idle_since: AtomicU64::new(room.now()),
            priority: AtomicI32::new(0),
            since: AtomicU64::new(u64::MAX),
            is_queued: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
            waited: AtomicU32::new(0),
            promised: AtomicUsize::new(0),
            preemptions: AtomicU64::new(0),
            recomputed: AtomicU64::new(0),
        }
    }

    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Tokens that can be taken back without computing.
    pub(super) fn rollback(&self) -> usize {
        self.rollback
    }

    /// Begins a use by the owner, which ends with the pin: meanwhile the sequence is not idle.
    pub(crate) fn pin(self: &Arc<Self>) -> Pin {
        self.uses.fetch_add(1, Ordering::SeqCst);
        Pin(Arc::clone(self))
    }

    /// Waits until no other call of the owner has the sequence brought back; none does while the guard lives.
    pub(crate) fn begin_return(&self) -> MutexGuard<'_, ()> {
        self.returning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is inside; waits for whoever has it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is inside, if nobody has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Inside>> {
        match self.inside.try_lock() {
            Ok(inside) => Some(inside),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The sequence, for its owner, who has pinned it and seen that it is in pages.
    pub(crate) fn sequence(&self) -> Sequence<'_> {
        Sequence { slot: self, inside: self.lock() }
    }

    /// Whether the owner called again within `patience` of the last result; at first it is taken to be one who does.
    pub(crate) fn is_prompt(&self, patience: Duration) -> bool {
        self.lock().left.is_none_or(|left| left.elapsed() <= patience)
    }

    /// Has the sequence empty and without pages.
    pub(crate) fn lose(&self) {
        self.put(&mut self.lock(), Place::Lost);
    }

    /// Changes where the sequence is. Without pages, nothing is promised.
    pub(super) fn put(&self, inside: &mut Inside, place: Place) {
        let blocks = if let Place::Here(cache) = &place { Some(cache.table_len()) } else { None };
        inside.place = place;
        self.is_here.store(blocks.is_some(), Ordering::Relaxed);
        self.settle(blocks.unwrap_or(0));
        if blocks.is_none() {
            self.forget_promise();
        }
    }

    /// How often its pages were taken.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions.load(Ordering::Relaxed)
    }

    pub(super) fn count_preemption(&self) {
        self.preemptions.fetch_add(1, Ordering::Relaxed);
    }

    /// Tokens that were computed again.
    pub(crate) fn recomputed(&self) -> u64 {
        self.recomputed.load(Ordering::Relaxed)
    }

    /// Counts tokens that were computed again.
    pub(crate) fn count_recomputed(&self, tokens: usize) {
        self.recomputed.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Its place among those who want room.
    pub(crate) fn rank(&self) -> Rank {
        (Reverse(self.priority.load(Ordering::Relaxed)), self.since.load(Ordering::Relaxed))
    }

    /// The sequence goes into the queue, as call `since`.
    pub(crate) fn enqueue(&self, priority: i32, since: u64) {
        self.priority.store(priority, Ordering::Relaxed);
        self.since.store(since, Ordering::Relaxed);
        self.is_queued.store(true, Ordering::SeqCst);
    }

    /// The sequence has left the queue; said by who holds the lock, or by an owner who looks again before it uses it.
    pub(crate) fn leave(&self) {
        self.is_queued.store(false, Ordering::SeqCst);
        self.stop_waiting();
    }

    pub(super) fn is_used(&self) -> bool {
        self.uses.load(Ordering::SeqCst) > 0
    }

    pub(super) fn idle_since(&self) -> u64 {
        self.idle_since.load(Ordering::Relaxed)
    }

    pub(super) fn is_queued(&self) -> bool {
        self.is_queued.load(Ordering::SeqCst)
    }

    /// Whether it is in pages.
    pub(super) fn is_here(&self) -> bool {
        self.is_here.load(Ordering::Relaxed)
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::SeqCst)
    }

    /// Begins to wait for room; whether it did not before.
    pub(super) fn wait(&self) -> bool {
        let is_new = !self.is_waiting.swap(true, Ordering::SeqCst);
        if is_new {
            self.waited.store(0, Ordering::Relaxed);
            self.room.waiting.fetch_add(1, Ordering::SeqCst);
        }
        is_new
    }

    /// Waits for room no more.
    pub(crate) fn stop_waiting(&self) {
        if self.is_waiting.swap(false, Ordering::SeqCst) {
            self.room.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Tokens that room was promised for.
    pub(crate) fn promised(&self) -> usize {
        self.promised.load(Ordering::Relaxed)
    }

    /// Promises room for the first `tokens` tokens.
    pub(super) fn promise(&self, tokens: usize) {
        self.promised.store(tokens, Ordering::Relaxed);
    }

    /// Takes the promise back.
    pub(crate) fn forget_promise(&self) {
        self.promise(0);
    }

    /// Blocks in the table, if it is in pages.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Takes note of the blocks in the table.
    pub(crate) fn settle(&self, blocks: usize) {
        self.held.store(blocks, Ordering::Relaxed);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.stop_waiting();
        self.room.remove(self.number);
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.idle_since.store(self.0.room.now(), Ordering::Relaxed);
        self.0.uses.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Sequence<'_> {
    fn drop(&mut self) {
        if let Place::Here(cache) = &self.inside.place {
            self.slot.settle(cache.table_len());
        }
    }
}

impl Deref for Sequence<'_> {
    type Target = SequenceCache;

    fn deref(&self) -> &SequenceCache {
        match &self.inside.place {
            Place::Here(cache) => cache,
            _ => panic!("{HERE}"),
        }
    }
}

impl DerefMut for Sequence<'_> {
    fn deref_mut(&mut self) -> &mut SequenceCache {
        match &mut self.inside.place {
            Place::Here(cache) => cache,
            _ => panic!("{HERE}"),
        }
    }
}
