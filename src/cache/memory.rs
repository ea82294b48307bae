//! What a backend supplies where pages do not lie in host memory.
//!
//! One range of bytes for the pages of all three buckets. Only whole pages and parts of pages are moved; whether the
//! bytes lie on a GPU or elsewhere, and how they travel, is the backend's affair. A call may cost as much as the copy of a
//! page, so what belongs together goes in one.
#![forbid(unsafe_code)]

use crate::error::Result;

/// A copy of `len` bytes within a [`PageMemory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageMove {
    /// First byte that is read.
    pub from: u64,
    /// First byte that is written.
    pub to: u64,
    /// Bytes.
    pub len: u64,
}

/// Memory for pages, addressed by bytes from its beginning.
///
/// Every call returns when the bytes are there, and sees what earlier calls, of any thread, left. A call that fails may
/// have written any part of what it was to write and nothing else. A range that does not lie within is an error.
pub trait PageMemory: Send + Sync {
    /// Bytes of the memory, all buckets together.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes from `at` on to the host.
    ///
    /// # Errors
    /// Those of the backend.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// Copies bytes from the host to `at`.
    ///
    /// # Errors
    /// Those of the backend.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Copies within the memory, all `moves` with one wait. Nothing that one of them writes is read or written by another.
    ///
    /// # Errors
    /// Those of the backend.
    fn copy(&self, moves: &[PageMove]) -> Result<()>;

    /// Sets `len` bytes from `at` on.
    ///
    /// # Errors
    /// Those of the backend.
    fn fill(&self, at: u64, len: u64, byte: u8) -> Result<()>;
}
