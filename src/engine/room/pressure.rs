//! What steps and new sessions do when little room is left: they become smaller before anything is refused.
//!
//! The measure is the room that is free or evictable. To find that out takes a look at every reusable block, so it is done
//! once in [`EVERY`] steps, and only where the pages are nearly all in use.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::{BLOCK_TOKENS, CacheManager};

/// Steps that one look serves.
const EVERY: u64 = 16;
/// Tokens of a step and sequences in it, however little room there is.
const LEAST_ROWS: usize = 16;
const LEAST_SEQUENCES: usize = 8;

/// What was seen at the last look.
#[derive(Default)]
pub(crate) struct Pressure {
    /// Steps until the next look.
    fresh: AtomicU64,
    room: AtomicU64,
    /// Room in 1024ths of the limit, below 1024; 0 is none.
    used: AtomicU64,
}

impl Pressure {
    /// Looks, if the last look is too old.
    pub(crate) fn look(&self, cache: &CacheManager) {
        let used = |v: u64| self.fresh.store(v, Ordering::Relaxed);
        match self.fresh.load(Ordering::Relaxed) {
            0 => used(EVERY),
            left => return used(left - 1),
        }
        let (limit, used) = cache.limit_and_used();
        match limit.saturating_sub(used) {
            free if free >= limit / 2 => self.set(limit, free),
            _ => self.look_now(cache),
        }
    }

    /// Looks at every reusable block.
    pub(crate) fn look_now(&self, cache: &CacheManager) {
        self.set(cache.limit_and_used().0, cache.room());
    }

    fn set(&self, limit: u64, room: u64) {
        let share = (u128::from(limit.saturating_sub(room)) * 1024 / u128::from(limit.max(1))) as u64;
        self.room.store(room, Ordering::Relaxed);
        self.used.store(share, Ordering::Relaxed);
    }

    /// Percent of the cache that sessions hold.
    pub(crate) fn load(&self) -> u64 {
        self.used.load(Ordering::Relaxed) * 100 / 1024
    }

    /// 0 while a quarter of the cache and more is left, then 1, below an eighth 2, below a sixteenth 3.
    pub(crate) fn level(&self) -> u32 {
        match 1024 - self.used.load(Ordering::Relaxed).min(1024) {
            256.. => 0,
            128.. => 1,
            64.. => 2,
            _ => 3,
        }
    }

    /// Most tokens and sequences of a step: a quarter of the blocks that are left, and twice as many sequences as there are
    /// blocks.
    pub(crate) fn squeeze(&self, block_bytes: u64, rows: usize, sequences: usize) -> (usize, usize) {
        if self.level() == 0 {
            return (rows, sequences);
        }
        let blocks = (self.room.load(Ordering::Relaxed) / block_bytes.max(1)).min(1 << 30) as usize;
        (rows.min((blocks * BLOCK_TOKENS / 4).max(LEAST_ROWS)), sequences.min((2 * blocks).max(LEAST_SEQUENCES)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(room: u64, limit: u64) -> Pressure {
        let pressure = Pressure::default();
        pressure.room.store(room, Ordering::Relaxed);
        pressure.used.store((limit - room) * 1024 / limit, Ordering::Relaxed);
        pressure
    }

    #[test]
    fn steps_shrink_with_the_room_that_is_left_and_never_vanish() {
        let block = 1000;
        let squeezed = |room| at(room, 100_000).squeeze(block, 2048, 64);
        assert_eq!(squeezed(90_000), (2048, 64));
        assert_eq!(squeezed(25_000), (2048, 64));
        assert_eq!(squeezed(20_000), (1280, 40));
        assert_eq!(squeezed(5_000), (320, 10));
        assert_eq!(squeezed(0), (LEAST_ROWS, LEAST_SEQUENCES));
        let levels = [90_000, 20_000, 10_000, 1_000].map(|room| at(room, 100_000).level());
        assert_eq!(levels, [0, 1, 2, 3]);
        assert_eq!(at(20_000, 100_000).load(), 79);
    }
}
