//! Which pages of one memory are free: places for pages of three sizes over one range of bytes.
//!
//! The memory is cut into slabs of the least common multiple of the page sizes, and a slab belongs to one bucket while any
//! of its pages is used. So page `id` of every bucket lies at `id * page_bytes`, over one base. The fullest slab is used
//! first, of equally full ones the lowest, so that the others empty again and can serve any bucket.
//!
//! Invariant: pages in use never overlap. A page can be had exactly if its bucket has a free place in a slab of its own or
//! a slab is free; what lies free in slabs of the other buckets cannot be had. After [`Slabs::gather`] that is less than two
//! slabs. Knows no memory, only numbers.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::pool::{Bucket, PoolUsage};
use crate::alloc;
use crate::error::Result;

/// Number of a page in use; [`Slabs::settle`] changes it.
pub(super) type PageNumber = Arc<AtomicU32>;

/// Places in use and free.
pub(super) struct Slabs {
    page_bytes: [u64; 3],
    slab_bytes: u64,
    /// Pages of each bucket in a slab.
    per_slab: [u32; 3],
    /// Most slabs.
    limit: u32,
    /// Those that were ever given to a bucket.
    slabs: Vec<Slab>,
    /// Of these, those without a page in use.
    empty: BTreeSet<u32>,
    /// Slabs with free and used pages, as (free pages, slab).
    partial: [BTreeSet<(u32, u32)>; 3],
    usage: PoolUsage,
}

#[derive(Default)]
struct Slab {
    free: u32,
    /// One bit a page, set while it is used.
    used: Vec<u64>,
    /// The numbers of the used pages.
    numbers: Vec<Option<PageNumber>>,
}

/// A page that is to lie elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) bucket: Bucket,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Slabs {
    /// Places in a memory of `bytes` bytes, whose end is not used if it is less than a slab.
    pub(super) fn new(page_bytes: [usize; 3], bytes: u64) -> Self {
        let slab_bytes = slab_bytes(page_bytes);
        let page_bytes = page_bytes.map(|size| size.max(1) as u64);
        let per_slab = page_bytes.map(|size| (slab_bytes / size) as u32);
        let limit = (bytes / slab_bytes).min(u64::from(u32::MAX / per_slab.into_iter().max().unwrap_or(1)));
        Self {
            page_bytes,
            slab_bytes,
            per_slab,
            limit: limit as u32,
            slabs: Vec::new(),
            empty: BTreeSet::new(),
            partial: Default::default(),
            usage: PoolUsage::default(),
        }
    }

    /// Pages in use and free; the free ones are those in slabs of their bucket.
    pub(super) fn usage(&self) -> PoolUsage {
        self.usage
    }

    /// A free page of `bucket`, if there is one.
    ///
    /// # Errors
    /// `OutOfMemory` if the system refuses memory for the tables.
    pub(super) fn take(&mut self, bucket: Bucket) -> Result<Option<PageNumber>> {
        let b = bucket as usize;
        if self.partial[b].is_empty() && !self.open(b)? {
            return Ok(None);
        }
        let Some(id) = self.take_place(b) else { return Ok(None) };
        let number = Arc::new(AtomicU32::new(id));
        *self.number(b, id) = Some(Arc::clone(&number));
        Ok(Some(number))
    }

    /// Gives a slab without pages to bucket `b`; false if there is none.
    fn open(&mut self, b: usize) -> Result<bool> {
        let pages = self.per_slab[b];
        let mut numbers = alloc::with_capacity("page table", pages as usize)?;
        numbers.resize_with(pages as usize, || None);
        let used = alloc::zeroed("page table", pages.div_ceil(u64::BITS) as usize)?;
        let number = match self.empty.pop_first() {
            Some(number) => number,
            None if (self.slabs.len() as u32) < self.limit => {
                alloc::reserve("page table", &mut self.slabs, 1)?;
                self.slabs.push(Slab::default());
                self.slabs.len() as u32 - 1
            }
            None => return Ok(false),
        };
        self.slabs[number as usize] = Slab { free: pages, used, numbers };
        self.partial[b].insert((pages, number));
        self.usage.free[b] += u64::from(pages);
        self.usage.held_bytes += self.slab_bytes;
        Ok(true)
    }

    /// A place in the fullest slab of bucket `b` that has one.
    fn take_place(&mut self, b: usize) -> Option<u32> {
        let (_, number) = self.partial[b].pop_first()?;
        let slab = &mut self.slabs[number as usize];
        let place = slab.take();
        if slab.free > 0 {
            self.partial[b].insert((slab.free, number));
        }
        self.usage.used[b] += 1;
        self.usage.free[b] -= 1;
        self.usage.used_bytes += self.page_bytes[b];
        Some(number * self.per_slab[b] + place)
    }

    fn number(&mut self, b: usize, id: u32) -> &mut Option<PageNumber> {
        &mut self.slabs[(id / self.per_slab[b]) as usize].numbers[(id % self.per_slab[b]) as usize]
    }

    /// Takes page `id` of `bucket` back.
    pub(super) fn put(&mut self, bucket: Bucket, id: u32) {
        let b = bucket as usize;
        let (pages, number) = (self.per_slab[b], id / self.per_slab[b]);
        let slab = &mut self.slabs[number as usize];
        self.partial[b].remove(&(slab.free, number));
        slab.put(id % pages);
        self.usage.used[b] -= 1;
        self.usage.free[b] += 1;
        self.usage.used_bytes -= self.page_bytes[b];
        if slab.free < pages {
            self.partial[b].insert((slab.free, number));
            return;
        }
        *slab = Slab::default();
        self.empty.insert(number);
        self.usage.free[b] -= u64::from(pages);
        self.usage.held_bytes -= self.slab_bytes;
    }

    /// Which pages must move, and where to, so that no bucket has more than one slab that is not full. The places they go
    /// to are taken until [`Self::settle`], before which nothing else may be done.
    ///
    /// # Errors
    /// `OutOfMemory`; nothing is taken then.
    pub(super) fn gather(&mut self) -> Result<Vec<Move>> {
        let slabs = self.partial.iter().zip(self.per_slab);
        let most: u32 = slabs.flat_map(|(slabs, pages)| slabs.iter().map(move |(free, _)| pages - free)).sum();
        let mut moves = alloc::with_capacity("page moves", most as usize)?;
        for bucket in Bucket::ALL {
            let b = bucket as usize;
            let mut room: u32 = self.partial[b].iter().map(|(free, _)| free).sum();
            let mut emptied = Vec::new();
            // the emptiest slab goes into the others as long as they have room for all of it
            while let Some(&(free, number)) = self.partial[b].last()
                && room >= self.per_slab[b]
            {
                self.partial[b].pop_last();
                emptied.push((free, number));
                room -= self.per_slab[b];
                for place in self.slabs[number as usize].places() {
                    let Some(to) = self.take_place(b) else { break };
                    moves.push(Move { bucket, from: number * self.per_slab[b] + place, to });
                }
            }
            self.partial[b].extend(emptied);
        }
        Ok(moves)
    }

    /// Ends [`Self::gather`]: the pages lie where they were to go, or, if that was not `done`, where they were.
    pub(super) fn settle(&mut self, moves: &[Move], done: bool) {
        for &Move { bucket, from, to } in moves {
            let b = bucket as usize;
            if !done {
                self.put(bucket, to);
                continue;
            }
            let number = self.number(b, from).take();
            number.iter().for_each(|number| number.store(to, Ordering::Relaxed));
            *self.number(b, to) = number;
            self.put(bucket, from);
        }
    }
}

impl Slab {
    /// The lowest free place; there is one.
    fn take(&mut self) -> u32 {
        let full = self.used.iter().take_while(|&&word| word == u64::MAX).count();
        let bit = self.used[full].trailing_ones();
        self.used[full] |= 1 << bit;
        self.free -= 1;
        full as u32 * u64::BITS + bit
    }

    fn put(&mut self, place: u32) {
        let (word, bit) = ((place / u64::BITS) as usize, 1 << (place % u64::BITS));
        debug_assert!(self.used[word] & bit != 0, "a page is given back once");
        self.used[word] &= !bit;
        self.numbers[place as usize] = None;
        self.free += 1;
    }

    /// The used places.
    fn places(&self) -> Vec<u32> {
        (0..self.numbers.len() as u32).filter(|&place| self.numbers[place as usize].is_some()).collect()
    }
}

/// Bytes of a slab: the least common multiple of the page sizes.
pub(super) fn slab_bytes(page_bytes: [usize; 3]) -> u64 {
    page_bytes.into_iter().map(|size| size.max(1) as u64).fold(1, |a, b| a / common_divisor(a, b) * b)
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 3] = [640, 96, 24];
    /// 3 wide, 20 index or 80 narrow pages.
    const SLAB: u64 = 1920;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % n
        }
    }

    fn id(number: &PageNumber) -> u32 {
        number.load(Ordering::Relaxed)
    }

    /// First byte and end of each page, in order of place.
    fn ranges(held: &[(Bucket, u32)]) -> Vec<(u64, u64)> {
        let mut ranges: Vec<_> = held
            .iter()
            .map(|&(bucket, id)| {
                let size = SIZES[bucket as usize] as u64;
                (u64::from(id) * size, (u64::from(id) + 1) * size)
            })
            .collect();
        ranges.sort_unstable();
        ranges
    }

    fn check(slabs: &Slabs, held: &[(Bucket, PageNumber)], limit: u64) {
        let held: Vec<_> = held.iter().map(|(bucket, number)| (*bucket, id(number))).collect();
        let ranges = ranges(&held);
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "pages overlap: {ranges:?}");
        assert!(ranges.last().is_none_or(|&(_, end)| end <= limit), "a page lies outside");
        let mut owner = std::collections::BTreeMap::new();
        for &(bucket, id) in &held {
            let slab = u64::from(id) * SIZES[bucket as usize] as u64 / SLAB;
            assert_eq!(*owner.entry(slab).or_insert(bucket), bucket, "slab {slab} serves two buckets");
        }
        let usage = slabs.usage();
        assert_eq!(usage.held_bytes, owner.len() as u64 * SLAB, "held is the slabs with a page in use");
        for bucket in Bucket::ALL {
            let b = bucket as usize;
            let used = held.iter().filter(|(of, _)| *of == bucket).count() as u64;
            let places = owner.values().filter(|of| **of == bucket).count() as u64 * SLAB / SIZES[b] as u64;
            assert_eq!((usage.used[b], usage.free[b]), (used, places - used), "{bucket}");
        }
        assert_eq!(usage.used_bytes, ranges.iter().map(|(start, end)| end - start).sum::<u64>());
    }

    #[test]
    fn slabs_of_the_releases_hold_whole_pages_of_each_size() {
        let fp8 = [64 * 584, 64 * 68, 2 * 584];
        assert_eq!(slab_bytes(fp8), 635_392);
        assert_eq!(Slabs::new(fp8, 10 * 635_392).per_slab, [17, 146, 544]);
        assert_eq!(slab_bytes([64 * 1024, 64 * 256, 2 * 1024]), 65_536, "bf16");
    }

    /// Moves pages together, or finds that they cannot be moved.
    fn gather(slabs: &mut Slabs, held: &[(Bucket, PageNumber)], works: bool) {
        let (before, usage): (Vec<u32>, _) = (held.iter().map(|(_, number)| id(number)).collect(), slabs.usage());
        let moves = slabs.gather().unwrap();
        slabs.settle(&moves, works);
        if !works {
            assert_eq!(before, held.iter().map(|(_, number)| id(number)).collect::<Vec<_>>());
            assert_eq!(slabs.usage(), usage);
            return;
        }
        for ((bucket, number), before) in held.iter().zip(before) {
            let to = moves.iter().find(|m| (m.bucket, m.from) == (*bucket, before)).map_or(before, |m| m.to);
            assert_eq!(id(number), to, "a page is where its content went");
        }
        let usage = slabs.usage();
        for (free, size) in usage.free.iter().zip(SIZES) {
            assert!(free * (size as u64) < SLAB, "more than one slab is not full: {usage:?}");
        }
    }

    #[test]
    fn pages_in_use_never_overlap_whatever_the_order_of_takes_and_puts() {
        for seed in 0..40 {
            let limit = SLAB * (1 + seed % 12);
            let (mut slabs, mut held, mut random) = (Slabs::new(SIZES, limit + seed), Vec::new(), Random(seed));
            // phases in which one bucket is asked for more often than others, and more or less is given back
            for step in 0..3000 {
                let (favourite, giving) = (step / 300 % 3, 1 + step / 500 % 3);
                if random.below(5) < giving && !held.is_empty() {
                    let (bucket, number) = held.swap_remove(random.below(held.len()));
                    slabs.put(bucket, id(&number));
                } else {
                    let bucket = Bucket::ALL[if random.below(2) == 0 { favourite } else { random.below(3) }];
                    let before = slabs.usage();
                    let is_there = before.free[bucket as usize] > 0 || before.held_bytes + SLAB <= limit;
                    let page = slabs.take(bucket).unwrap();
                    assert_eq!(page.is_some(), is_there, "seed {seed}, step {step}");
                    held.extend(page.map(|number| (bucket, number)));
                }
                if step % 97 == 0 {
                    gather(&mut slabs, &held, step % 2 == 0);
                }
                if step % 7 == 0 {
                    check(&slabs, &held, limit);
                }
            }
            for (bucket, number) in held.drain(..) {
                slabs.put(bucket, id(&number));
            }
            check(&slabs, &[], limit);
            assert_eq!(slabs.usage(), PoolUsage::default());
        }
    }

    #[test]
    fn the_fullest_slab_is_used_first_so_that_others_empty() {
        let mut slabs = Slabs::new(SIZES, 4 * SLAB);
        let take = |slabs: &mut Slabs, bucket| slabs.take(bucket).unwrap().map(|number| id(&number));
        let wide: Vec<u32> = (0..9).filter_map(|_| take(&mut slabs, Bucket::Wide)).collect();
        assert_eq!(wide, (0..9).collect::<Vec<_>>());
        for id in [0, 1, 4, 8] {
            slabs.put(Bucket::Wide, id);
        }
        // slab 0 has one page, slab 1 and slab 2 have two
        assert_eq!(take(&mut slabs, Bucket::Wide), Some(4));
        assert_eq!(take(&mut slabs, Bucket::Wide), Some(8));
        slabs.put(Bucket::Wide, 2);
        assert_eq!(take(&mut slabs, Bucket::Narrow), Some(0), "slab 0 serves another bucket now");
    }

    #[test]
    fn what_is_free_between_pages_can_be_had_by_all_after_gathering() {
        let mut slabs = Slabs::new(SIZES, 6 * SLAB);
        let narrow: Vec<_> = (0..480).filter_map(|_| slabs.take(Bucket::Narrow).unwrap()).collect();
        // two pages stay in each of the six slabs
        narrow.iter().enumerate().filter(|(i, _)| i % 40 != 7).for_each(|(_, number)| {
            slabs.put(Bucket::Narrow, id(number));
        });
        assert!(slabs.take(Bucket::Wide).unwrap().is_none());
        let moves = slabs.gather().unwrap();
        assert_eq!(moves.len(), 10);
        slabs.settle(&moves, true);
        let wide = (0..).map_while(|_| slabs.take(Bucket::Wide).unwrap()).count();
        assert_eq!(wide, 5 * 3, "all slabs but the one with twelve narrow pages");
    }

    #[test]
    fn what_is_less_than_a_slab_holds_no_page() {
        for bucket in Bucket::ALL {
            assert!(Slabs::new(SIZES, SLAB - 1).take(bucket).unwrap().is_none());
        }
    }

    /// Pitfall 50.
    #[test]
    fn a_memory_beyond_all_numbers_is_used_as_far_as_they_reach() {
        let slabs = Slabs::new([64 * 584, 64 * 68, 2 * 584], u64::MAX);
        assert!(u64::from(slabs.limit) * 544 <= u64::from(u32::MAX));
        assert!(u64::from(slabs.limit) * 635_392 > 1 << 42);
    }
}
