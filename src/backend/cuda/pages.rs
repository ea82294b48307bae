//! The cache's pages in device memory.
//!
//! A stream of its own carries them, beside the step's. Every call waits for what it queued: what it wrote is there for
//! any stream afterwards, and it sees what a step wrote that has been waited for.

use cudarc::driver::sys;

use super::device::Gpu;
use super::memory::Buffer;
use super::stream::Stream;
use crate::cache::{PageMemory, PageMove};
use crate::error::{Error, ErrorKind, Result};

/// The pages of all three buckets in one buffer.
pub(crate) struct DevicePages {
    memory: Buffer<u8>,
    stream: Stream,
}

impl DevicePages {
    /// Pages in `memory`. A length that is a multiple of [`slab_bytes`](crate::cache::CacheLayout::slab_bytes) leaves
    /// nothing unused and is one of every page size.
    pub(crate) fn new(gpu: &Gpu, memory: Buffer<u8>) -> Result<Self> {
        Ok(Self { memory, stream: Stream::new(gpu)? })
    }

    /// The base that page numbers count from.
    pub(crate) fn memory(&self) -> &Buffer<u8> {
        &self.memory
    }

    fn part(&self, at: u64, len: u64) -> Result<Buffer<u8>> {
        let size = |bytes: u64| {
            usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::InvalidArgument, format!("page byte {bytes}")))
        };
        self.memory.slice(size(at)?..size(at.saturating_add(len))?)
    }

    /// Waits for what was queued, also after a refusal: pages must not change any more when the call has returned.
    fn finish(&self, queued: Result<()>) -> Result<()> {
        let waited = self.stream.synchronize();
        queued.and(waited)
    }
}

impl PageMemory for DevicePages {
    fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let from = self.part(at, out.len() as u64)?;
        let gpu = self.stream.gpu();
        let current = gpu.enter()?;
        // SAFETY: both sides have this many bytes, and the host side lives until the wait below.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from.address(), out.len(), self.stream.raw()) };
        let queued = gpu.check("copying pages from the device", status);
        drop(current);
        self.finish(queued)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.stream.write(&self.part(at, bytes.len() as u64)?, bytes)
    }

    fn copy(&self, moves: &[PageMove]) -> Result<()> {
        let queued =
            moves.iter().try_for_each(|m| self.stream.copy(&self.part(m.from, m.len)?, &self.part(m.to, m.len)?));
        self.finish(queued)
    }

    fn fill(&self, at: u64, len: u64, byte: u8) -> Result<()> {
        let queued = self.part(at, len).and_then(|part| self.stream.fill(&part, byte));
        self.finish(queued)
    }
}
