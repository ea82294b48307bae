//! Pages of three sizes and their ids.
#![forbid(unsafe_code)]

use crate::alloc;
use crate::error::Result;

/// The three page sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// c4a KV rows.
    Wide,
    /// Index keys.
    Index,
    /// c128a KV rows.
    Narrow,
}

/// A page: its bucket is known from where the id is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageId(u64);

/// Memory for pages. Ids are 64-bit and are reused after [`Pages::free`]; a free page of a bucket serves any kind.
pub struct Pages {
    buckets: [BucketPages; 3],
}

struct BucketPages {
    page_bytes: usize,
    memory: Vec<Vec<u8>>,
    free: Vec<PageId>,
}

impl Pages {
    /// Pages of the given sizes (`wide`, `index`, `narrow`) in bytes; none is allocated yet.
    pub fn new(page_bytes: [usize; 3]) -> Self {
        Self { buckets: page_bytes.map(|page_bytes| BucketPages { page_bytes, memory: Vec::new(), free: Vec::new() }) }
    }

    /// Takes a page; its content is undefined.
    pub fn take(&mut self, bucket: Bucket) -> Result<PageId> {
        let bucket = &mut self.buckets[bucket as usize];
        if let Some(id) = bucket.free.pop() {
            return Ok(id);
        }
        let page = alloc::zeroed("cache page", bucket.page_bytes)?;
        // room on the free list too, so that giving the page back cannot fail
        alloc::reserve("cache page table", &mut bucket.memory, 1)?;
        let lacking = (bucket.memory.len() + 1).saturating_sub(bucket.free.len());
        alloc::reserve("cache free list", &mut bucket.free, lacking)?;
        bucket.memory.push(page);
        Ok(PageId(bucket.memory.len() as u64 - 1))
    }

    /// Gives a page back.
    pub fn free(&mut self, bucket: Bucket, id: PageId) {
        self.buckets[bucket as usize].free.push(id);
    }

    /// A page's bytes.
    pub fn get(&self, bucket: Bucket, id: PageId) -> &[u8] {
        &self.buckets[bucket as usize].memory[id.0 as usize]
    }

    /// A page's bytes, to write.
    pub fn get_mut(&mut self, bucket: Bucket, id: PageId) -> &mut [u8] {
        &mut self.buckets[bucket as usize].memory[id.0 as usize]
    }

    /// Bytes held, and of these bytes in free pages.
    pub fn bytes(&self) -> (u64, u64) {
        let sum =
            |count: fn(&BucketPages) -> usize| self.buckets.iter().map(|b| b.page_bytes as u64 * count(b) as u64).sum();
        (sum(|b| b.memory.len()), sum(|b| b.free.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_page_is_reused_within_its_bucket_only() {
        let mut pages = Pages::new([64, 32, 16]);
        let wide = pages.take(Bucket::Wide).unwrap();
        pages.free(Bucket::Wide, wide);
        let narrow = pages.take(Bucket::Narrow).unwrap();
        assert_eq!(pages.get(Bucket::Narrow, narrow).len(), 16);
        assert_eq!(pages.bytes(), (64 + 16, 64));
        assert_eq!(pages.take(Bucket::Wide).unwrap(), wide);
        assert_eq!(pages.bytes(), (64 + 16, 0));
    }
}
