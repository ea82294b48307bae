//! Read-only shared mapping of a whole file: the only unsafe code of `weights`.
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
