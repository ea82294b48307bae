//! Which pages of one memory are free: places for pages of three sizes over one range of bytes.
//!
//! The memory is cut into slabs of the least common multiple of the page sizes, and a slab belongs to one bucket while any
//! of its pages is used. So page `id` of every bucket lies at `id * page_bytes`, over one base. The fullest slab is used
//! first, of equally full ones the lowest, so that the others empty again and can serve any bucket.
//!
//! Invariant: pages in use never overlap. A page can be had exactly if its bucket has a free place in a slab of its own or
//! a slab is free; what lies free in slabs of the other buckets cannot be had. Knows no memory, only numbers.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::pool::{Bucket, PoolUsage};
use crate::alloc;
use crate::error::Result;

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

struct Slab {
    free: u32,
    /// One bit a page, set while it is used.
    used: Vec<u64>,
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
    pub(super) fn take(&mut self, bucket: Bucket) -> Result<Option<u32>> {
        let b = bucket as usize;
        let known = self.partial[b].pop_first().map(|(_, slab)| slab);
        let Some(number) = known.map_or_else(|| self.open(b), |slab| Ok(Some(slab)))? else { return Ok(None) };
        let slab = &mut self.slabs[number as usize];
        let place = slab.take();
        if slab.free > 0 {
            self.partial[b].insert((slab.free, number));
        }
        self.usage.used[b] += 1;
        self.usage.free[b] -= 1;
        self.usage.used_bytes += self.page_bytes[b];
        Ok(Some(number * self.per_slab[b] + place))
    }

    /// Gives a slab without pages to bucket `b`.
    fn open(&mut self, b: usize) -> Result<Option<u32>> {
        let pages = self.per_slab[b];
        let slab = Slab { free: pages, used: alloc::zeroed("page table", pages.div_ceil(u64::BITS) as usize)? };
        let number = match self.empty.pop_first() {
            Some(number) => number,
            None if (self.slabs.len() as u32) < self.limit => {
                alloc::reserve("page table", &mut self.slabs, 1)?;
                self.slabs.push(Slab { free: 0, used: Vec::new() });
                self.slabs.len() as u32 - 1
            }
            None => return Ok(None),
        };
        self.slabs[number as usize] = slab;
        self.usage.free[b] += u64::from(pages);
        self.usage.held_bytes += self.slab_bytes;
        Ok(Some(number))
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
        slab.used = Vec::new();
        self.empty.insert(number);
        self.usage.free[b] -= u64::from(pages);
        self.usage.held_bytes -= self.slab_bytes;
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
        self.free += 1;
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

    fn check(slabs: &Slabs, held: &[(Bucket, u32)], limit: u64) {
        let ranges = ranges(held);
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "pages overlap: {ranges:?}");
        assert!(ranges.last().is_none_or(|&(_, end)| end <= limit), "a page lies outside");
        let mut owner = std::collections::BTreeMap::new();
        for &(bucket, id) in held {
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

    #[test]
    fn pages_in_use_never_overlap_whatever_the_order_of_takes_and_puts() {
        for seed in 0..40 {
            let limit = SLAB * (1 + seed % 12);
            let (mut slabs, mut held, mut random) = (Slabs::new(SIZES, limit + seed), Vec::new(), Random(seed));
            // phases in which one bucket is asked for more often than others, and more or less is given back
            for step in 0..3000 {
                let (favourite, giving) = (step / 300 % 3, 1 + step / 500 % 3);
                if random.below(5) < giving && !held.is_empty() {
                    let (bucket, id) = held.swap_remove(random.below(held.len()));
                    slabs.put(bucket, id);
                } else {
                    let bucket = Bucket::ALL[if random.below(2) == 0 { favourite } else { random.below(3) }];
                    let before = slabs.usage();
                    let is_there = before.free[bucket as usize] > 0 || before.held_bytes + SLAB <= limit;
                    let page = slabs.take(bucket).unwrap();
                    assert_eq!(page.is_some(), is_there, "seed {seed}, step {step}");
                    held.extend(page.map(|id| (bucket, id)));
                }
                if step % 7 == 0 {
                    check(&slabs, &held, limit);
                }
            }
            for (bucket, id) in held.drain(..) {
                slabs.put(bucket, id);
            }
            check(&slabs, &[], limit);
            assert_eq!(slabs.usage(), PoolUsage::default());
        }
    }

    #[test]
    fn the_fullest_slab_is_used_first_so_that_others_empty() {
        let mut slabs = Slabs::new(SIZES, 4 * SLAB);
        let wide: Vec<u32> = (0..9).map(|_| slabs.take(Bucket::Wide).unwrap().unwrap()).collect();
        assert_eq!(wide, (0..9).collect::<Vec<_>>());
        for id in [0, 1, 4, 8] {
            slabs.put(Bucket::Wide, id);
        }
        // slab 0 has one page, slab 1 and slab 2 have two
        assert_eq!(slabs.take(Bucket::Wide).unwrap(), Some(4));
        assert_eq!(slabs.take(Bucket::Wide).unwrap(), Some(8));
        slabs.put(Bucket::Wide, 2);
        assert_eq!(slabs.take(Bucket::Narrow).unwrap(), Some(0), "slab 0 serves another bucket now");
    }

    #[test]
    fn what_is_less_than_a_slab_holds_no_page() {
        for bucket in Bucket::ALL {
            assert_eq!(Slabs::new(SIZES, SLAB - 1).take(bucket).unwrap(), None);
        }
    }

    #[test]
    fn a_memory_beyond_all_numbers_is_used_as_far_as_they_reach() {
        let slabs = Slabs::new([64 * 584, 64 * 68, 2 * 584], u64::MAX);
        assert!(u64::from(slabs.limit) * 544 <= u64::from(u32::MAX));
        assert!(u64::from(slabs.limit) * 635_392 > 1 << 42);
    }
}
