//! How tensors come from a file into a frame.
//!
//! Reads begin and end at multiples of [`ALIGN`] bytes, as reads around the page cache must, so a tensor lies in its frame
//! where it lies in the file, modulo that. Tensors that are neighbours in the file come with one read.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::weights::mmap::forget;
use crate::weights::{Shard, Tensor};

/// Bytes to which direct reads are aligned; no disk in use asks for more.
pub(super) const ALIGN: usize = 4096;

/// Reads until the injected failure, counting it; 0 when none is armed.
static COUNTDOWN: AtomicU64 = AtomicU64::new(0);
/// Held by the one [`FailRead`] that may exist.
static INJECTION: Mutex<()> = Mutex::new(());

/// Has the `n`th read of weights into a buffer pool from now (1 is the next one) fail as a broken disk does; later ones
/// succeed again. For tests; process-wide, so a second call waits until the first guard is dropped.
pub fn fail_nth_read(n: u64) -> FailRead {
    let lock = INJECTION.lock().unwrap_or_else(PoisonError::into_inner);
    COUNTDOWN.store(n, Ordering::SeqCst);
    FailRead { _lock: lock }
}

/// An armed failure of a read; dropping it disarms.
#[derive(Debug)]
pub struct FailRead {
    _lock: MutexGuard<'static, ()>,
}

impl FailRead {
    /// Whether the failure has happened.
    pub fn fired(&self) -> bool {
        COUNTDOWN.load(Ordering::SeqCst) == 0
    }
}

impl Drop for FailRead {
    fn drop(&mut self) {
        COUNTDOWN.store(0, Ordering::SeqCst);
    }
}

fn is_broken() -> bool {
    COUNTDOWN.load(Ordering::Relaxed) != 0
        && COUNTDOWN.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1)
}

/// How the tensors of a piece lie in a frame.
pub(super) struct Arrangement {
    /// The reads that bring them there.
    pub(super) runs: Vec<Run>,
    /// The bytes of each.
    pub(super) places: Vec<Range<usize>>,
    /// Bytes of the frame that are used.
    pub(super) len: usize,
}

/// Bytes of one file that are read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first of the tensors in it.
    pub(super) first: usize,
    /// Where it begins in the file, a multiple of [`ALIGN`].
    start: u64,
    /// Where the last tensor ends in the file.
    end: u64,
    /// Where it begins in the frame, a multiple of [`ALIGN`].
    at: usize,
}

impl Run {
    /// Bytes that are read.
    fn len(&self) -> usize {
        // tensors are mapped, so their sizes fit
        ((self.end - self.start) as usize).next_multiple_of(ALIGN)
    }
}

impl Arrangement {
    pub(super) fn new(tensors: &[Tensor]) -> Self {
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| (tensors[i].shard.path(), tensors[i].file_range().start));
        let (mut runs, mut places, mut len): (Vec<Run>, _, _) = (Vec::new(), vec![0..0; tensors.len()], 0);
        for i in order {
            let Range { start, end } = tensors[i].file_range();
            let is_near = |run: &Run| {
                let is_same = Arc::ptr_eq(&tensors[run.first].shard, &tensors[i].shard);
                is_same && start <= run.end.next_multiple_of(ALIGN as u64)
            };
            if !runs.last().is_some_and(is_near) {
                runs.push(Run { first: i, start: start - start % ALIGN as u64, end, at: len });
            }
            let run = runs.last_mut().expect("one was just there, or was pushed");
            run.end = end;
            let place = run.at + (start - run.start) as usize;
            places[i] = place..place + (end - start) as usize;
            len = run.at + run.len();
        }
        Self { runs, places, len }
    }
}

/// A file that is read from.
pub(super) struct Source {
    shard: Arc<Shard>,
    /// The same file, opened for reads around the page cache.
    direct: Option<File>,
    /// Whether such reads are possible, as far as is known.
    is_direct: AtomicBool,
}

impl Source {
    pub(super) fn new(shard: &Arc<Shard>) -> Self {
        let direct = shard.file().and_then(|file| open_direct(shard.path(), file));
        let is_direct = AtomicBool::new(direct.is_some());
        Self { shard: Arc::clone(shard), direct, is_direct }
    }

    pub(super) fn shard(&self) -> &Arc<Shard> {
        &self.shard
    }

    /// Reads `run`, in which some of `tensors` are, into its place in `frame`; the bytes read.
    ///
    /// # Errors
    /// `Io` of the system, `Corrupt` if the file is shorter than it was; both name the file, the tensor and the bytes.
    pub(super) fn read(&self, run: &Run, tensors: &[Tensor], frame: &mut [u8]) -> Result<u64> {
        let Some(file) = self.shard.file() else { unreachable!("pieces in memory are refused") };
        let into = &mut frame[run.at..][..run.len()];
        let needed = (run.end - run.start) as usize;
        if let Some(direct) = self.direct.as_ref().filter(|_| self.is_direct.load(Ordering::Relaxed)) {
            match fill(&mut |into, position| read_at(direct, into, position), run.start, needed, into) {
                // the file system does not do it, or not so
                Err((error, _)) if error.kind() == io::ErrorKind::InvalidInput => {
                    self.is_direct.store(false, Ordering::Relaxed);
                }
                result => return result.map_err(|(error, done)| self.failure(run, tensors, done, &error)),
            }
        }
        let result = fill(&mut |into, position| read_at(file, into, position), run.start, needed, into);
        forget(file, run.start, into.len() as u64);
        result.map_err(|(error, done)| self.failure(run, tensors, done, &error))
    }

    /// What is told of a read that stopped behind `done` bytes.
    fn failure(&self, run: &Run, tensors: &[Tensor], done: usize, error: &io::Error) -> Error {
        let (path, at) = (self.shard.path().display(), run.start + done as u64);
        let missed = tensors.iter().filter(|tensor| Arc::ptr_eq(&tensor.shard, &self.shard));
        let missed = missed.filter(|tensor| tensor.file_range().end > at.max(run.start));
        let tensor = missed.min_by_key(|tensor| tensor.file_range().start).unwrap_or(&tensors[run.first]);
        let Range { start, end } = tensor.file_range();
        let what = format!("tensor {} of {} bytes at {start}", tensor.name(), end - start);
        let opened = self.shard.declared_bytes();
        match self.shard.current_bytes() {
            Ok(now) if now < run.end => Error::new(
                ErrorKind::Corrupt,
                format!("{path}: cannot read {what}: the file has {now} bytes; it had {opened} when it was opened"),
            ),
            _ => Error::new(ErrorKind::Io, format!("{path}: cannot read {what}, at {at} of {opened} bytes: {error}")),
        }
    }
}

/// Has at least the first `needed` bytes of `into` filled from `position` on; the bytes read, or an error and the bytes in
/// front of it. `read` is the system's: interrupted, or with less than was asked for; then it goes on at a multiple of
/// [`ALIGN`].
fn fill(
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
    position: u64,
    needed: usize,
    into: &mut [u8],
) -> Result<u64, (io::Error, usize)> {
    let (mut done, mut bytes) = (0, 0);
    while done < needed {
        let from = done / ALIGN * ALIGN;
        match read(&mut into[from..], position + from as u64) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err((error, done)),
            Ok(count) if from + count <= done => return Err((io::ErrorKind::UnexpectedEof.into(), done)),
            Ok(count) => {
                done = from + count;
                bytes += count as u64;
            }
        }
    }
    Ok(bytes)
}

fn read_at(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    if is_broken() {
        return Err(io::Error::other("injected read error"));
    }
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, into, position);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, into, position);
}

/// The file that is open as `file`, around the page cache; `None` where it is not at `path` any more or the system does not
/// do it.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path, file: &File) -> Option<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let direct = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
    let (this, that) = (file.metadata().ok()?, direct.metadata().ok()?);
    ((this.dev(), this.ino()) == (that.dev(), that.ino())).then_some(direct)
}

/// Not on this system.
#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Path, _: &File) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads of a file of `len` bytes whose byte `i` is `i % 251`, at most `most` at a time, every other one interrupted.
    fn reads(len: usize, most: usize) -> impl FnMut(&mut [u8], u64) -> io::Result<usize> {
        let mut calls = 0;
        move |into, position| {
            calls += 1;
            if calls % 2 == 1 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let count = into.len().min(most).min(len.saturating_sub(position as usize));
            into[..count].iter_mut().enumerate().for_each(|(i, byte)| *byte = ((position as usize + i) % 251) as u8);
            Ok(count)
        }
    }

    #[test]
    fn short_and_interrupted_reads_go_on_where_they_stopped() {
        for most in [ALIGN, ALIGN + 1000, 3 * ALIGN, usize::MAX] {
            let mut into = vec![0; 4 * ALIGN];
            // the file ends within the last page
            let len = 5 * ALIGN - 10;
            let bytes = fill(&mut reads(len, most), ALIGN as u64, 4 * ALIGN - 10, &mut into).unwrap();
            assert!(bytes >= 4 * ALIGN as u64 - 10);
            assert!((0..4 * ALIGN - 10).all(|i| into[i] == ((ALIGN + i) % 251) as u8), "{most} at a time");
        }
    }

    #[test]
    fn a_file_that_ends_too_early_is_an_error_with_what_was_there() {
        let mut into = vec![0; 2 * ALIGN];
        let (error, done) = fill(&mut reads(ALIGN + 5, usize::MAX), 0, 2 * ALIGN, &mut into).unwrap_err();
        assert_eq!((error.kind(), done), (io::ErrorKind::UnexpectedEof, ALIGN + 5));
    }
}
