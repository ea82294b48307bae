//! Memory of the cache: pages of three sizes under one limit in bytes.
//!
//! Pages lie in host memory, each in an allocation of its own, or side by side in a [`PageMemory`], where they have
//! numbers.
//!
//! Invariant: a page belongs to whoever holds its [`Page`] and returns to the pool when that is dropped. On the host, free
//! pages of one bucket are given up when another bucket needs the room, so no sequence of takes and drops can strand
//! memory: while `used + page <= limit`, a page can be had. In a page memory that holds for whole slabs: what is free
//! between used pages serves their bucket alone, until [`PagePool::compact`] moves them together.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use super::memory::{PageMemory, PageMove};
use super::slabs::{PageNumber, Slabs};
use crate::alloc;
use crate::error::{Error, ErrorKind, Result};

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

/// Byte that fills freed pages of a poisoning pool: NaN in E4M3, bf16 and float32.
const POISON: u8 = 0xFF;

/// Pages in use and free, by bucket, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Pages that somebody holds: wide, index, narrow.
    pub used: [u64; 3],
    /// Pages that wait for reuse. In a page memory, those in slabs of their bucket.
    pub free: [u64; 3],
    /// Bytes of the used pages.
    pub used_bytes: u64,
    /// Bytes of all pages, the free ones included. In a page memory, bytes of the slabs with a page in use.
    pub held_bytes: u64,
}

/// The pages of one engine. Shared by its sessions and its prefix index.
pub struct PagePool {
    page_bytes: [usize; 3],
    limit: u64,
    poison: bool,
    home: Home,
}

/// Where pages lie.
enum Home {
    /// Each in an allocation of its own.
    Host(Mutex<HostPages>),
    /// In a backend's memory, side by side.
    Memory(MemoryPages),
}

struct MemoryPages {
    memory: Arc<dyn PageMemory>,
    slabs: Mutex<Slabs>,
    /// Read by whoever uses a page's number, written by who changes numbers. Taken before `slabs`.
    numbers: RwLock<()>,
    /// How often numbers have changed.
    compactions: AtomicU64,
}

#[derive(Default)]
struct HostPages {
    free: [Vec<Vec<u8>>; 3],
    usage: PoolUsage,
}

/// One page, held exclusively; dropping it gives it back.
pub struct Page {
    bucket: Bucket,
    /// Its bytes, if it lies on the host.
    bytes: Vec<u8>,
    /// Its number, if it lies in a page memory.
    number: Option<PageNumber>,
    pool: Arc<PagePool>,
}

impl PagePool {
    /// A pool of pages of the given sizes in bytes, which holds at most `limit` bytes, in `memory` or on the host. With
    /// `poison`, freed pages are filled with 0xFF, so that a stale read shows as NaN.
    pub fn new(page_bytes: [usize; 3], limit: u64, poison: bool, memory: Option<Arc<dyn PageMemory>>) -> Arc<Self> {
        let (limit, home) = match memory {
            None => (limit, Home::Host(Mutex::default())),
            Some(memory) => {
                let limit = limit.min(memory.len());
                let slabs = Mutex::new(Slabs::new(page_bytes, limit));
                let (numbers, compactions) = (RwLock::new(()), AtomicU64::new(0));
                (limit, Home::Memory(MemoryPages { memory, slabs, numbers, compactions }))
            }
        };
        Arc::new(Self { page_bytes, limit, poison, home })
    }

    /// Bytes of a page of `bucket`.
    pub fn page_bytes(&self, bucket: Bucket) -> usize {
        self.page_bytes[bucket as usize]
    }

    /// Most bytes the pool may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether pages lie in a [`PageMemory`].
    pub fn is_in_memory(&self) -> bool {
        matches!(self.home, Home::Memory(..))
    }

    /// What is in use and free now.
    pub fn usage(&self) -> PoolUsage {
        match &self.home {
            Home::Host(pages) => lock(pages).usage,
            Home::Memory(home) => lock(&home.slabs).usage(),
        }
    }

    /// Takes a page; its content is undefined (poison, in a poisoning pool).
    ///
    /// # Errors
    /// `NoBlocks` with the counts if the limit is reached by pages in use, `OutOfMemory` if the system refuses, and those
    /// of the page memory.
    pub fn take(self: &Arc<Self>, bucket: Bucket) -> Result<Page> {
        let (bytes, number) = match &self.home {
            Home::Host(pages) => (self.take_on_host(pages, bucket)?, None),
            Home::Memory(home) => (Vec::new(), Some(self.take_in_memory(&home.slabs, bucket)?)),
        };
        let page = Page { bucket, bytes, number, pool: Arc::clone(self) };
        if let Home::Memory(home) = &self.home {
            let _stays = home.stay();
            page.poison(home)?;
        }
        Ok(page)
    }

    fn take_on_host(&self, pages: &Mutex<HostPages>, bucket: Bucket) -> Result<Vec<u8>> {
        let (b, size) = (bucket as usize, self.page_bytes(bucket) as u64);
        let mut inner = lock(pages);
        if let Some(bytes) = inner.free[b].pop() {
            inner.usage.free[b] -= 1;
            inner.count_used(b, size);
            return Ok(bytes);
        }
        if inner.usage.used_bytes + size > self.limit {
            return Err(self.is_full(bucket, inner.usage));
        }
        self.make_room(&mut inner, size);
        inner.usage.held_bytes += size;
        inner.count_used(b, size);
        drop(inner);
        let fill = if self.poison { POISON } else { 0 };
        alloc::filled("cache page", size as usize, fill).inspect_err(|_| {
            let mut inner = lock(pages);
            inner.usage.held_bytes -= size;
            inner.count_unused(b, size);
        })
    }

    fn take_in_memory(&self, slabs: &Mutex<Slabs>, bucket: Bucket) -> Result<PageNumber> {
        let mut slabs = lock(slabs);
        match slabs.take(bucket)? {
            Some(number) => Ok(number),
            None => Err(self.is_full(bucket, slabs.usage())),
        }
    }

    fn is_full(&self, bucket: Bucket, usage: PoolUsage) -> Error {
        let (size, used, limit) = (self.page_bytes(bucket), usage.used_bytes, self.limit);
        let free: u64 = usage.free.iter().zip(self.page_bytes).map(|(&pages, size)| pages * size as u64).sum();
        let elsewhere = match self.home {
            Home::Memory(..) if free > 0 => format!(" and {free} are free between pages of other sizes"),
            _ => String::new(),
        };
        Error::new(
            ErrorKind::NoBlocks,
            format!(
                "the cache is full: a {bucket} page of {size} bytes is needed, {used} of {limit} bytes are in use{elsewhere}"
            ),
        )
    }

    /// Gives free pages back to the system until `size` more bytes fit under the limit.
    fn make_room(&self, inner: &mut HostPages, size: u64) {
        for b in 0..3 {
            while inner.usage.held_bytes + size > self.limit && inner.free[b].pop().is_some() {
                inner.usage.free[b] -= 1;
                inner.usage.held_bytes -= self.page_bytes[b] as u64;
            }
        }
    }

    /// Copies whole pages of this pool, in a page memory with one call. Both pages of a pair (to, from) are of one bucket. On
    /// error, the content of those that are written is undefined.
    ///
    /// # Errors
    /// Those of the page memory, and `OutOfMemory`; on the host none.
    pub(super) fn copy<'a>(&self, pairs: impl Iterator<Item = (&'a mut Page, &'a Page)>) -> Result<()> {
        let Home::Memory(home) = &self.home else {
            pairs.for_each(|(to, from)| to.bytes_mut().copy_from_slice(from.bytes()));
            return Ok(());
        };
        let _stay = home.stay();
        let mut moves = Vec::new();
        for (to, from) in pairs {
            alloc::reserve("page copies", &mut moves, 1)?;
            moves.push(PageMove { from: from.address(), to: to.address(), len: from.len() as u64 });
        }
        if moves.is_empty() { Ok(()) } else { home.memory.copy(&moves) }
    }

    /// In a page memory, moves pages together: of what is free, less than two slabs then cannot be had by a bucket.
    /// Their numbers change: no step may be at work. Returns the bytes that have become free for all buckets.
    ///
    /// # Errors
    /// Those of the page memory, and `OutOfMemory`; all pages are then where they were.
    pub fn compact(&self) -> Result<u64> {
        let Home::Memory(home) = &self.home else { return Ok(0) };
        let _alone = home.numbers.write().unwrap_or_else(PoisonError::into_inner);
        let mut slabs = lock(&home.slabs);
        let (held, places) = (slabs.usage().held_bytes, slabs.gather()?);
        if places.is_empty() {
            return Ok(0);
        }
        let moved = alloc::with_capacity("page moves", places.len()).and_then(|mut moves| {
            moves.extend(places.iter().map(|place| {
                let len = self.page_bytes(place.bucket) as u64;
                PageMove { from: u64::from(place.from) * len, to: u64::from(place.to) * len, len }
            }));
            home.memory.copy(&moves)
        });
        slabs.settle(&places, moved.is_ok());
        moved?;
        home.compactions.fetch_add(1, Ordering::Relaxed);
        Ok(held - slabs.usage().held_bytes)
    }

    /// How often the numbers of pages have changed.
    pub(super) fn compactions(&self) -> u64 {
        match &self.home {
            Home::Host(_) => 0,
            Home::Memory(home) => home.compactions.load(Ordering::Relaxed),
        }
    }
}

impl MemoryPages {
    /// While the guard lives, pages keep their numbers.
    fn stay(&self) -> RwLockReadGuard<'_, ()> {
        self.numbers.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostPages {
    fn count_used(&mut self, b: usize, size: u64) {
        self.usage.used[b] += 1;
        self.usage.used_bytes += size;
    }

    fn count_unused(&mut self, b: usize, size: u64) {
        self.usage.used[b] -= 1;
        self.usage.used_bytes -= size;
    }

    fn put(&mut self, bucket: Bucket, bytes: Vec<u8>) {
        let (b, size) = (bucket as usize, bytes.len() as u64);
        self.count_unused(b, size);
        // a list that cannot grow loses the page to the system: memory is short anyway
        if self.free[b].try_reserve(1).is_ok() {
            self.free[b].push(bytes);
            self.usage.free[b] += 1;
        } else {
            self.usage.held_bytes -= size;
        }
    }
}

impl Page {
    /// Its number in the page memory, where it lies at `number * page_bytes`; `None` on the host. It changes when the pool
    /// is [compacted](PagePool::compact).
    pub fn id(&self) -> Option<u32> {
        self.number.as_ref().map(|number| number.load(Ordering::Relaxed))
    }

    /// Its bucket.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Its bytes. Of a page in a page memory, none.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its bytes, to write. Of a page in a page memory, none.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Number of its bytes, wherever they are.
    pub(super) fn len(&self) -> usize {
        self.pool.page_bytes(self.bucket)
    }

    /// Shows `use_bytes` the bytes of `range`, wherever they are.
    ///
    /// # Errors
    /// That of `use_bytes`, of the page memory, or `OutOfMemory`.
    pub(super) fn read(&self, range: Range<usize>, use_bytes: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
        let Home::Memory(home) = &self.pool.home else { return use_bytes(&self.bytes[range]) };
        if range.is_empty() {
            return use_bytes(&[]);
        }
        let mut bytes = alloc::zeroed("part of a page", range.len())?;
        let stays = home.stay();
        home.memory.read(self.address() + range.start as u64, &mut bytes)?;
        drop(stays);
        use_bytes(&bytes)
    }

    /// Writes what `fill` makes of the bytes of `range`, wherever they are. `fill` sets all of them.
    ///
    /// # Errors
    /// That of `fill`, and on the host no other; those of the page memory, or `OutOfMemory`. The bytes are then undefined.
    pub(super) fn write(&mut self, range: Range<usize>, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let Home::Memory(home) = &self.pool.home else { return fill(&mut self.bytes[range]) };
        if range.is_empty() {
            return fill(&mut []);
        }
        let mut bytes = alloc::zeroed("part of a page", range.len())?;
        fill(&mut bytes)?;
        let _stays = home.stay();
        home.memory.write(self.address() + range.start as u64, &bytes)
    }

    /// First byte in the page memory, while it stays there.
    fn address(&self) -> u64 {
        u64::from(self.id().unwrap_or(0)) * self.len() as u64
    }

    /// In a poisoning pool, fills a page in the page memory, while it stays there.
    fn poison(&self, home: &MemoryPages) -> Result<()> {
        if self.pool.poison { home.memory.fill(self.address(), self.len() as u64, POISON) } else { Ok(()) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        match &self.pool.home {
            Home::Host(pages) => {
                let mut bytes = std::mem::take(&mut self.bytes);
                if self.pool.poison {
                    bytes.fill(POISON);
                }
                lock(pages).put(self.bucket, bytes);
            }
            Home::Memory(home) => {
                let _stays = home.stay();
                // a memory that refuses this is broken, and says so to whoever uses it next
                drop(self.poison(home));
                if let Some(id) = self.id() {
                    lock(&home.slabs).put(self.bucket, id);
                }
            }
        }
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id() {
            None => write!(f, "{} page", self.bucket),
            Some(id) => write!(f, "{} page {id}", self.bucket),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            let pool = PagePool::new(SIZES, limit, true, None);
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
}
