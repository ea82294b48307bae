//! Memory of the cache: pages of three sizes under one limit in bytes.
//!
//! Invariant: a page belongs to whoever holds its [`Page`] and returns to the pool when that is dropped. Free pages of
//! one bucket are given up when another bucket needs the room, so no sequence of takes and drops can strand memory:
//! while `used + page <= limit`, a page can be had.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::alloc;
use crate::error::{Result, bail};

/// The three page sizes. Every kind of content lives in one of them, and a freed page serves any kind of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// 64 KV rows: c4a entries, window rows, state of the main c4a compressor.
    Wide,
    /// 64 index keys: keys, state of the index compressor.
    Index,
    /// 2 KV rows: c128a entries, state of the c128a compressor.
    Narrow,
}

impl Bucket {
    /// All buckets, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Wide, Self::Index, Self::Narrow];
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wide => "wide",
            Self::Index => "index",
            Self::Narrow => "narrow",
        })
    }
}

/// Number of a page within its bucket; never reused for another memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageId(u64);

/// Byte that fills freed pages of a poisoning pool: NaN in E4M3, bf16 and float32.
const POISON: u8 = 0xFF;

/// Pages in use and free, by bucket, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Pages that somebody holds: wide, index, narrow.
    pub used: [u64; 3],
    /// Pages that wait for reuse.
    pub free: [u64; 3],
    /// Bytes of the used pages.
    pub used_bytes: u64,
    /// Bytes of all pages, the free ones included.
    pub held_bytes: u64,
}

/// The pages of one engine. Shared by its sessions and its prefix index.
pub struct PagePool {
    page_bytes: [usize; 3],
    limit: u64,
    poison: bool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    free: [Vec<(PageId, Vec<u8>)>; 3],
    next_id: [u64; 3],
    usage: PoolUsage,
}

/// One page, held exclusively; dropping it gives it back.
pub struct Page {
    id: PageId,
    bucket: Bucket,
    bytes: Vec<u8>,
    pool: Arc<PagePool>,
}

impl PagePool {
    /// A pool of pages of the given sizes in bytes, which holds at most `limit` bytes. With `poison`, freed pages are
    /// filled with 0xFF, so that a stale read shows as NaN.
    pub fn new(page_bytes: [usize; 3], limit: u64, poison: bool) -> Arc<Self> {
        Arc::new(Self { page_bytes, limit, poison, inner: Mutex::default() })
    }

    /// Bytes of a page of `bucket`.
    pub fn page_bytes(&self, bucket: Bucket) -> usize {
        self.page_bytes[bucket as usize]
    }

    /// Most bytes the pool may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// What is in use and free now.
    pub fn usage(&self) -> PoolUsage {
        self.lock().usage
    }

    /// Takes a page; its content is undefined (poison, in a poisoning pool).
    ///
    /// # Errors
    /// `NoBlocks` with the counts if the limit is reached by pages in use, `OutOfMemory` if the system refuses.
    pub fn take(self: &Arc<Self>, bucket: Bucket) -> Result<Page> {
        let (b, size) = (bucket as usize, self.page_bytes[bucket as usize] as u64);
        let mut inner = self.lock();
        if let Some((id, bytes)) = inner.free[b].pop() {
            inner.usage.free[b] -= 1;
            inner.count_used(b, size);
            return Ok(Page { id, bucket, bytes, pool: Arc::clone(self) });
        }
        if inner.usage.used_bytes + size > self.limit {
            bail!(
                NoBlocks,
                "the cache is full: a {bucket} page of {size} bytes is needed, {} of {} bytes are in use",
                inner.usage.used_bytes,
                self.limit
            );
        }
        self.make_room(&mut inner, size);
        let id = PageId(inner.next_id[b]);
        inner.next_id[b] += 1;
        inner.usage.held_bytes += size;
        inner.count_used(b, size);
        drop(inner);
        let fill = if self.poison { POISON } else { 0 };
        match alloc::filled("cache page", size as usize, fill) {
            Ok(bytes) => Ok(Page { id, bucket, bytes, pool: Arc::clone(self) }),
            Err(error) => {
                let mut inner = self.lock();
                inner.usage.held_bytes -= size;
                inner.usage.used_bytes -= size;
                inner.usage.used[b] -= 1;
                Err(error)
            }
        }
    }

    /// Gives free pages back to the system until `size` more bytes fit under the limit.
    fn make_room(&self, inner: &mut Inner, size: u64) {
        for b in 0..3 {
            while inner.usage.held_bytes + size > self.limit && inner.free[b].pop().is_some() {
                inner.usage.free[b] -= 1;
                inner.usage.held_bytes -= self.page_bytes[b] as u64;
            }
        }
    }

    fn give_back(&self, id: PageId, bucket: Bucket, mut bytes: Vec<u8>) {
        if self.poison {
            bytes.fill(POISON);
        }
        let (b, size) = (bucket as usize, bytes.len() as u64);
        let mut inner = self.lock();
        inner.usage.used[b] -= 1;
        inner.usage.used_bytes -= size;
        // a list that cannot grow loses the page to the system: memory is short anyway
        if inner.free[b].try_reserve(1).is_ok() {
            inner.free[b].push((id, bytes));
            inner.usage.free[b] += 1;
        } else {
            inner.usage.held_bytes -= size;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn count_used(&mut self, b: usize, size: u64) {
        self.usage.used[b] += 1;
        self.usage.used_bytes += size;
    }
}

impl Page {
    /// Its number within its bucket.
    pub fn id(&self) -> PageId {
        self.id
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its content, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Its bucket.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pool.give_back(self.id, self.bucket, std::mem::take(&mut self.bytes));
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} page {}", self.bucket, self.id.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const SIZES: [usize; 3] = [640, 96, 24];

    #[test]
    fn no_interleaving_of_takes_and_drops_strands_memory() {
        let limit = 20_000u64;
        for seed in 0..50u64 {
            let pool = PagePool::new(SIZES, limit, true);
            let mut held: Vec<Page> = Vec::new();
            let mut state = seed;
            for _ in 0..2000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let r = (state >> 33) as usize;
                if r % 5 < 2 && !held.is_empty() {
                    held.swap_remove(r / 5 % held.len());
                    continue;
                }
                let bucket = Bucket::ALL[r / 5 % 3];
                let used = pool.usage().used_bytes;
                let fits = used + SIZES[bucket as usize] as u64 <= limit;
                match pool.take(bucket) {
                    Ok(page) => {
                        assert!(fits, "seed {seed}: a page beyond the limit");
                        assert!(page.bytes().iter().all(|&b| b == POISON), "a page's old content shows");
                        held.push(page);
                        let last = held.len() - 1;
                        held[last].bytes_mut().fill(7);
                    }
                    Err(error) => {
                        assert!(!fits && error.kind() == ErrorKind::NoBlocks, "seed {seed}: {error} with {used} used");
                    }
                }
                let usage = pool.usage();
                assert!(usage.held_bytes <= limit);
                assert_eq!(usage.used_bytes, held.iter().map(|p| p.bytes().len() as u64).sum::<u64>());
            }
            drop(held);
            assert_eq!(pool.usage().used_bytes, 0);
        }
    }

    #[test]
    fn ids_are_unique_while_pages_live() {
        let pool = PagePool::new(SIZES, u64::MAX, false);
        let pages: Vec<Page> = (0..100).map(|_| pool.take(Bucket::Narrow).unwrap()).collect();
        let mut ids: Vec<u64> = pages.iter().map(|p| p.id().0).collect();
        ids.dedup();
        assert_eq!(ids.len(), 100);
    }
}
