//! Room in the cache: who gets pages when there are not enough for all.
//!
//! What no session uses is evicted first (`cache`). Then, where sessions have a place in host memory, those that are idle
//! give their pages up, and those in the queue that rank behind: [`Room::make_way`]; an empty one needs no such place. What
//! is left are calls that wait, in
//! order of priority and age: one that begins does so behind those that wait already, one that has begun goes on ahead of
//! them, for only its end makes room, until they have waited for [`OVERDUE`] steps; then all line up behind them.
//!
//! If all that hold blocks wait, nobody will free any: the last of them is refused ([`Room::is_stuck`]).
//!
//! Order of locks, for the whole engine. A lock is taken only while those after it are not held by the same thread:
//! 1. the turn of a session's readers to have it brought back, by its owner;
//! 2. the slots of a step, by its leader in order of rank; all others' only by trying;
//! 3. the batcher's queue, in which pressure and room are asked for;
//! 4. the list of slots; nothing is locked, and no slot is dropped, under it;
//! 5. the parking lot, alone;
//! 6. the prefix index, then the pool of pages; the tiers' and the meter's, each alone.
#![forbid(unsafe_code)]

mod admit;
mod pressure;
mod slot;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::cache::tier::ParkingLot;
use crate::cache::{CacheManager, SequenceCache};
use crate::error::{Error, ErrorKind, Result};

pub(crate) use admit::Plan;
pub(crate) use pressure::Pressure;
pub(crate) use slot::{Inside, Pin, Place, Rank, Slot};

/// Steps that a call waits for room before all others line up behind it.
const OVERDUE: u32 = 256;
/// Looks, one in some milliseconds, after which those who wait for each other are taken to do so for good.
const STUCK: u64 = 8;
/// How long a session is idle before calls that can wait take its pages: longer than a decoding host needs between tokens.
const IDLE: Duration = Duration::from_millis(20);

/// Who holds pages, and who waits for them.
pub(crate) struct Room {
    cache: Arc<CacheManager>,
    lot: Option<Arc<ParkingLot>>,
    slots: Mutex<BTreeMap<u64, Weak<Slot>>>,
    /// Calls that wait.
    waiting: AtomicU64,
    /// Looks in a row at which all waited for each other.
    stuck: AtomicU64,
    pressure: Pressure,
    begun: Instant,
    figures: Figures,
}

/// Counts since the engine's beginning.
#[derive(Default)]
struct Figures {
    preemptions: AtomicU64,
    recomputed: AtomicU64,
    restored: AtomicU64,
    waits: AtomicU64,
    refused_admissions: AtomicU64,
    refused: AtomicU64,
}

/// Figures of the room; see [`EngineMetrics`](super::EngineMetrics).
pub(crate) struct RoomFigures {
    pub(crate) sessions: u64,
    pub(crate) waiting: u64,
    pub(crate) preemptions: u64,
    pub(crate) recomputed: u64,
    pub(crate) restored: u64,
    pub(crate) waits: u64,
    pub(crate) refused_admissions: u64,
    pub(crate) refused: u64,
    pub(crate) parked_bytes: u64,
}

/// The best of those who wait.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    rank: Rank,
    number: u64,
    is_overdue: bool,
}

impl Line {
    /// Whether it is the call of `slot`.
    pub(crate) fn is_of(&self, slot: &Slot) -> bool {
        self.number == slot.number()
    }
}

impl Room {
    /// The room of `cache`, with a place of `parking` bytes for sessions that give their pages up.
    pub(crate) fn new(cache: &Arc<CacheManager>, parking: u64) -> Arc<Self> {
        Arc::new(Self {
            cache: Arc::clone(cache),
            lot: (parking > 0).then(|| ParkingLot::new(parking)),
            slots: Mutex::default(),
            waiting: AtomicU64::new(0),
            stuck: AtomicU64::new(0),
            pressure: Pressure::default(),
            begun: Instant::now(),
            figures: Figures::default(),
        })
    }

    /// A place for `cache`, known as `number`; without one, for an empty sequence that gets pages when it needs them.
    pub(crate) fn slot(self: &Arc<Self>, number: u64, cache: Option<SequenceCache>, rollback: usize) -> Arc<Slot> {
        let slot = Arc::new(Slot::new(self, number, cache, rollback));
        self.list().insert(number, Arc::downgrade(&slot));
        slot
    }

    fn remove(&self, number: u64) {
        self.list().remove(&number);
    }

    /// Brings the sequence of `inside` into pages: whether it is what it was, and not empty because it was lost.
    ///
    /// # Errors
    /// `NoBlocks`, `OutOfMemory`, and those of the page memory; it is where it was then.
    pub(crate) fn bring(&self, slot: &Slot, inside: &mut Inside) -> Result<bool> {
        let (cache, is_whole) = match &inside.place {
            Place::Here(_) => return Ok(true),
            Place::Parked(parked) => {
                let (needed, room) = (parked.page_bytes(&self.cache), self.cache.room());
                if needed > room {
                    // a look is cheaper than to copy most of it in vain
                    let tokens = parked.position();
                    return Err(self.is_full(format_args!("{tokens} tokens of a preempted session"), needed, room));
                }
                (SequenceCache::unpark(&self.cache, parked)?, true)
            }
            Place::Lost => (SequenceCache::new(&self.cache, slot.rollback())?, false),
        };
        slot.put(inside, Place::Here(cache));
        if is_whole {
            self.figures.restored.fetch_add(1, Ordering::Relaxed);
        }
        Ok(is_whole)
    }

    /// Takes the pages of one sequence for `asking`, or for somebody new: an idle one, of low priority and long unused
    /// before others; else one in the queue that ranks behind. False if there is none. One that `can_wait` leaves those
    /// alone that may be back soon. Without a place for sessions, only empty ones give their pages to calls that wait.
    pub(crate) fn make_way(&self, asking: Option<&Slot>, can_wait: bool) -> bool {
        if self.lot.is_none() && !can_wait {
            return false;
        }
        let rank = asking.map(Slot::rank);
        let now = self.now();
        let ripe = |slot: &Slot| !can_wait || now.saturating_sub(slot.idle_since()) >= IDLE.as_nanos() as u64;
        let mut victims: Vec<_> = Vec::new();
        for slot in self.slots() {
            let is_own = asking.is_some_and(|asking| asking.number() == slot.number());
            let is_empty = slot.held() == 0;
            if is_own || !slot.is_here() || (self.lot.is_none() && !is_empty) {
                continue;
            }
            let other = slot.rank();
            if !slot.is_used() {
                if is_empty || ripe(&slot) {
                    victims.push(((0, i64::from(other.0.0), slot.idle_since()), slot));
                }
            } else if let Some(rank) = rank
                && slot.is_queued()
                && (other.0 > rank.0 || (slot.is_waiting() && other > rank))
            {
                // the last in order first
                victims.push(((1, i64::from(other.0.0), u64::MAX - other.1), slot));
            }
        }
        victims.sort_by_key(|(order, _)| *order);
        victims.iter().any(|(_, slot)| self.preempt(slot))
    }

    /// Takes the pages of `slot`; false if it holds none or is in use after all.
    fn preempt(&self, slot: &Slot) -> bool {
        let Some(mut inside) = slot.try_lock() else { return false };
        let Place::Here(cache) = &inside.place else { return false };
        if slot.is_used() && !slot.is_queued() {
            return false;
        }
        if cache.is_empty() {
            slot.put(&mut inside, Place::Lost);
            return true;
        }
        let Some(lot) = &self.lot else { return false };
        // whatever keeps it from being copied, it can be computed again
        let place = match cache.park(lot) {
            Ok(Some(parked)) => Place::Parked(parked),
            Ok(None) | Err(_) => {
                self.figures.recomputed.fetch_add(1, Ordering::Relaxed);
                Place::Lost
            }
        };
        slot.put(&mut inside, place);
        slot.count_preemption();
        self.figures.preemptions.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The call of `slot` begins to wait, or goes on with it.
    pub(crate) fn wait(&self, slot: &Slot) {
        if slot.wait() {
            self.figures.waits.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The best of those who wait, all of whom have now seen one more step.
    pub(crate) fn line(&self) -> Option<Line> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let waiting = self.slots().into_iter().filter(|slot| slot.is_waiting());
        let lines = waiting.map(|slot| Line {
            rank: slot.rank(),
            number: slot.number(),
            is_overdue: slot.waited.fetch_add(1, Ordering::Relaxed) >= OVERDUE,
        });
        lines.min_by_key(|line| line.rank)
    }

    /// Whether nobody can go on or will free anything: all who hold blocks wait for more. It takes [`STUCK`] looks in a row,
    /// since a session that is being made holds pages before it is known.
    pub(crate) fn is_stuck(&self) -> bool {
        if self.slots().iter().all(|slot| slot.is_waiting() || (!slot.is_used() && slot.held() == 0)) {
            return self.stuck.fetch_add(1, Ordering::Relaxed) + 1 >= STUCK;
        }
        self.stuck.store(0, Ordering::Relaxed);
        false
    }

    /// Counts a call that ends for want of room; whether it was a prompt that was not admitted.
    pub(crate) fn count_refused(&self, is_admission: bool) {
        self.figures.refused.fetch_add(1, Ordering::Relaxed);
        self.figures.refused_admissions.fetch_add(u64::from(is_admission), Ordering::Relaxed);
    }

    /// Bytes that can be had; no limit is given while sessions are idle that can be asked for theirs.
    pub(crate) fn within_reach(&self) -> u64 {
        let ripe = |slot: &Arc<Slot>| {
            !slot.is_used() && slot.is_here() && self.now().saturating_sub(slot.idle_since()) >= IDLE.as_nanos() as u64
        };
        if self.lot.is_some() && self.slots().iter().any(ripe) { u64::MAX } else { self.cache.room() }
    }

    /// Why a call that lines up behind others gets nothing now.
    pub(crate) fn lines_up(&self) -> Error {
        Error::new(ErrorKind::NoBlocks, "the cache is full, and others wait for room before this call")
    }

    pub(crate) fn pressure(&self) -> &Pressure {
        &self.pressure
    }

    /// Figures now.
    pub(crate) fn figures(&self) -> RoomFigures {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RoomFigures {
            sessions: self.list().len() as u64,
            waiting: of(&self.waiting),
            preemptions: of(&self.figures.preemptions),
            recomputed: of(&self.figures.recomputed),
            restored: of(&self.figures.restored),
            waits: of(&self.figures.waits),
            refused_admissions: of(&self.figures.refused_admissions),
            refused: of(&self.figures.refused),
            parked_bytes: self.lot.as_ref().map_or(0, |lot| lot.used()),
        }
    }

    fn is_full(&self, what: std::fmt::Arguments<'_>, needed: u64, room: u64) -> Error {
        let (block, limit) = (self.cache.block_bytes().max(1), self.cache.limit_and_used().0);
        let slots = self.slots();
        let (held, waiting) =
            (slots.iter().map(|slot| slot.held()).sum::<usize>(), self.waiting.load(Ordering::SeqCst));
        Error::new(
            ErrorKind::NoBlocks,
            format!(
                "the cache is full: {what} need {needed} bytes, {} blocks of 256 tokens; {room} bytes, {} blocks, are free or \
                 evictable of {limit}; {} sessions hold {held} blocks, {waiting} calls wait; raise cache_bytes \
                 (--cache-bytes), or free or clear a session",
                needed.div_ceil(block),
                room / block,
                slots.len(),
            ),
        )
    }

    /// Nanoseconds since the beginning.
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// All slots. They are dropped by the caller, not under the list's lock, which their end takes.
    fn slots(&self) -> Vec<Arc<Slot>> {
        self.list().values().filter_map(Weak::upgrade).collect()
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
