//! Read-only shared mapping of a whole file, memory of our own, and advice to the system: the only unsafe code of `weights`.
//!
//! Invariant: a [`Mapping`] covers exactly the bytes the file had when it was mapped. If another process shrinks the
//! file afterwards, touching a page that is gone raises SIGBUS, as for every user of `mmap`; [`Mapping::populate`] and
//! the size checks of [`super::Checkpoint::check_sizes`] report it as an error where they are called first.

use std::fs::File;
use std::io;
use std::ops::Range;

/// The bytes of a mapped file.
#[derive(Debug)]
pub(super) struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps `len` bytes of `file`, read-only and shared, so that no memory is reserved for them.
    pub(super) fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: the mapping is private to this struct, never written through, and lives as long as every slice of it.
        // Bytes that another process changes while mapped are a documented limit: they are only ever read as plain
        // numbers, never as lengths or pointers, since headers are read with `read` before.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(file)? };
        Ok(Self(map))
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Reads the pages of `range` in, and reports what touching them would make a signal of: a hole in a full tmpfs, a
    /// file that shrank, a disk error. Does nothing on kernels without `MADV_POPULATE_READ` (before Linux 5.14).
    #[cfg(target_os = "linux")]
    pub(super) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        match self.0.advise_range(memmap2::Advice::PopulateRead, range.start, range.len()) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result,
        }
    }

    /// Does nothing on this system.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn populate(&self, _range: Range<usize>) -> io::Result<()> {
        Ok(())
    }
}

/// Memory of our own: zeroed, aligned to pages, counted by the system where it was touched, given back when dropped.
#[derive(Debug)]
pub(super) struct Anonymous(memmap2::MmapMut);

impl Anonymous {
    /// `len` bytes, which is not 0.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let map = memmap2::MmapMut::map_anon(len)?;
        // direct reads hold every page that they write to; without huge pages, which are only a wish, there are many
        #[cfg(target_os = "linux")]
        drop(map.advise(memmap2::Advice::HugePage));
        Ok(Self(map))
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// All bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Tells the system that `len` bytes of `file` from `position` on were read for the last time, so that they do not push
/// other files out of its page cache. Whether it listens does not matter.
#[cfg(target_os = "linux")]
pub(super) fn forget(file: &File, position: u64, len: u64) {
    use std::os::fd::AsRawFd;
    if let (Ok(position), Ok(len)) = (i64::try_from(position), i64::try_from(len)) {
        // SAFETY: a plain system call on an open descriptor; it changes no memory of ours.
        unsafe { libc::posix_fadvise64(file.as_raw_fd(), position, len, libc::POSIX_FADV_DONTNEED) };
    }
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub(super) fn forget(_: &File, _: u64, _: u64) {}
