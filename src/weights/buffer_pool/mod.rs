//! Tensors in a bounded number of frames of our own memory, read from their files when they are asked for: for checkpoints
//! larger than the memory that they may take.
//!
//! Tensors that are used together are a *piece*, and pieces that are asked for together belong to one *group*. A few
//! threads read pieces into *frames*, around the system's page cache where it lets us. What is asked for stays until it was
//! used; otherwise [`state`] says what has to go.
//!
//! Invariant: a piece that [`BufferPool::fetch`] hands out has the bytes that the file had, and keeps them until the work
//! with it is done. A file that cannot be read, or has become shorter, is an error for those who ask for what it holds, and
//! for nobody else; the next time it is read anew. What the tensors mean is not known here.

#![forbid(unsafe_code)]

mod source;
mod state;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use self::source::{ALIGN, Arrangement, Source};
pub use self::source::{FailRead, fail_nth_read};
use self::state::State;
use super::Tensor;
use super::mmap::Anonymous;
use crate::alloc;
use crate::error::{Error, ErrorKind, Result};

/// Threads that read. A disk is fast with a few large requests in its queue.
const READERS: usize = 4;

/// Figures of a buffer pool since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Pieces that were in memory when they were asked for.
    pub hits: u64,
    /// Pieces that had to be read, or were still being read.
    pub misses: u64,
    /// Reads of pieces before they were asked for.
    pub read_ahead: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Nanoseconds that somebody waited for reads.
    pub wait_nanos: u64,
    /// Bytes of memory of all frames.
    pub frame_bytes: u64,
    /// Frames that hold a piece now.
    pub used_frames: u64,
    /// Frames.
    pub frames: u64,
}

/// The tensors of all pieces.
pub(crate) struct Pieces {
    tensors: Vec<Tensor>,
    of_piece: usize,
    of_group: usize,
}

impl Pieces {
    /// Pieces of `of_piece` tensors each, and `of_group` pieces of a group; `None` if a tensor is in memory already.
    ///
    /// # Panics
    /// If the numbers do not fit.
    pub(crate) fn new(tensors: Vec<Tensor>, of_piece: usize, of_group: usize) -> Option<Self> {
        assert!(!tensors.is_empty() && tensors.len().is_multiple_of(of_piece * of_group), "whole groups of pieces");
        tensors.iter().all(|tensor| tensor.shard.file().is_some()).then_some(Self { tensors, of_piece, of_group })
    }

    /// Number of pieces.
    pub(crate) fn len(&self) -> usize {
        self.tensors.len() / self.of_piece
    }

    /// Bytes of a frame, in which each of the pieces has room.
    pub(crate) fn frame_bytes(&self) -> usize {
        self.tensors.chunks_exact(self.of_piece).map(|piece| Arrangement::new(piece).len).max().unwrap_or(ALIGN)
    }

    fn piece(&self, piece: usize) -> &[Tensor] {
        &self.tensors[piece * self.of_piece..][..self.of_piece]
    }
}

/// A number of frames, and who reads into them.
pub(crate) struct BufferPool {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    /// The process that has the readers.
    process: u32,
}

/// What askers and readers share.
struct Shared {
    pieces: Pieces,
    sources: Vec<Source>,
    state: Mutex<State>,
    /// There is something to read, or nothing ever again.
    work: Condvar,
    /// Something was read, or could not be.
    done: Condvar,
}

/// A piece in memory.
pub(crate) struct Loaded {
    memory: Anonymous,
    places: Vec<Range<usize>>,
}

impl Loaded {
    /// The bytes of the piece's tensor `i`.
    pub(crate) fn bytes(&self, i: usize) -> &[u8] {
        &self.memory.bytes()[self.places[i].clone()]
    }
}

/// A member of the group that was asked for, ready for use.
pub(crate) type Ready = (usize, Arc<Loaded>);

impl BufferPool {
    /// A pool of `frames` frames, at least one.
    ///
    /// # Errors
    /// `OutOfMemory` with the bytes of all frames; `Unavailable` if no thread can be started.
    pub(crate) fn new(pieces: Pieces, frames: usize) -> Result<Self> {
        let frame_bytes = pieces.frame_bytes();
        let what = "the weights of experts in host memory";
        let total = frames.saturating_mul(frame_bytes);
        alloc::probe(what, total)?;
        let mut memory = alloc::with_capacity(what, frames)?;
        for _ in 0..frames {
            memory.push(Anonymous::new(frame_bytes).map_err(|_| Error::out_of_memory(what, total as u64))?);
        }
        let stats = PoolStats { frames: frames as u64, frame_bytes: total as u64, ..PoolStats::default() };
        let state = State::new(pieces.len(), pieces.of_group, memory, stats)?;
        let mut sources: Vec<Source> = Vec::new();
        for tensor in &pieces.tensors {
            if !sources.iter().any(|source| Arc::ptr_eq(source.shard(), &tensor.shard)) {
                sources.push(Source::new(&tensor.shard));
            }
        }
        let (work, done) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { pieces, sources, state: Mutex::new(state), work, done });
        let mut pool = Self { shared, readers: Vec::new(), process: std::process::id() };
        for i in 0..READERS {
            let shared = Arc::clone(&pool.shared);
            let reader = thread::Builder::new().name(format!("dsv4-read-{i}")).spawn(move || shared.read());
            let failed =
                |e| Error::new(ErrorKind::Unavailable, format!("cannot start a thread that reads weights: {e}"));
            pool.readers.push(reader.map_err(failed)?);
        }
        Ok(pool)
    }

    /// Calls `work` with `members` of `group`, in parts: at once with those that are in memory, perhaps none, then with
    /// more as they have been read, each member once. At most as many as there are frames are in a part.
    ///
    /// # Errors
    /// The first of `work`; `Io` and `Corrupt` of what cannot be read, naming file, tensor, position and sizes.
    pub(crate) fn fetch(
        &self,
        group: usize,
        members: &[usize],
        work: &mut dyn FnMut(&[Ready]) -> Result<()>,
    ) -> Result<()> {
        let mut fetch = Fetch::new(&self.shared, group, members)?;
        let mut ready = fetch.take_ready(&mut self.shared.lock())?;
        loop {
            work(&ready)?;
            ready.clear();
            fetch.release();
            if fetch.remaining.is_empty() {
                return Ok(());
            }
            ready = fetch.wait()?;
        }
    }

    /// Tells that `members` of `group` will be asked for soon: they are read while readers have nothing else to do, the
    /// first ones if there are not frames for all.
    pub(crate) fn expect(&self, group: usize, members: &[usize]) {
        let mut state = self.shared.lock();
        for &member in members {
            if !state.expect(group, member) {
                break;
            }
        }
        drop(state);
        self.shared.work.notify_all();
    }

    /// Figures now.
    pub(crate) fn stats(&self) -> PoolStats {
        self.shared.lock().stats()
    }
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        // in a fork the readers are not there, and nobody knows who had the lock
        if self.process != std::process::id() {
            return self.readers.drain(..).for_each(std::mem::forget);
        }
        self.shared.lock().close();
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            // one that panicked has told those who waited for it
            drop(reader.join());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a reader does.
    fn read(&self) {
        let mut state = self.lock();
        loop {
            let Some((frame, piece, mut memory)) = state.next_read() else {
                if state.is_closing() {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let read = catch_unwind(AssertUnwindSafe(|| self.load(piece, memory.bytes_mut())));
            let read =
                read.unwrap_or_else(|_| Err(Error::new(ErrorKind::Panic, "a thread that reads weights panicked")));
            state = self.lock();
            state.finish(frame, memory, read);
            self.done.notify_all();
            self.work.notify_all();
        }
    }

    /// Reads a piece: the places of its tensors, and the bytes read.
    fn load(&self, piece: usize, memory: &mut [u8]) -> Result<(Vec<Range<usize>>, u64)> {
        let tensors = self.pieces.piece(piece);
        let Arrangement { runs, places, .. } = Arrangement::new(tensors);
        let mut bytes = 0;
        for run in &runs {
            let source = self.sources.iter().find(|source| Arc::ptr_eq(source.shard(), &tensors[run.first].shard));
            bytes += source.expect("every shard of a piece has its source").read(run, tensors, memory)?;
        }
        Ok((places, bytes))
    }
}

/// What somebody asked for and has not used yet; pinned until this goes.
struct Fetch<'a> {
    shared: &'a Shared,
    group: usize,
    /// Members that were not handed out.
    remaining: Vec<usize>,
    /// Members that are in use.
    leased: Vec<usize>,
}

impl<'a> Fetch<'a> {
    fn new(shared: &'a Shared, group: usize, members: &[usize]) -> Result<Self> {
        let remaining = alloc::copied("experts of a step", members)?;
        let leased = alloc::with_capacity("experts of a step", members.len())?;
        shared.lock().ask(group, members);
        shared.work.notify_all();
        Ok(Self { shared, group, remaining, leased })
    }

    /// Those that are in memory, in ascending order; none is an answer.
    fn take_ready(&mut self, state: &mut State) -> Result<Vec<Ready>> {
        let mut ready = alloc::with_capacity("experts of a step", self.remaining.len())?;
        let (group, leased) = (self.group, &mut self.leased);
        self.remaining.retain(|&member| {
            let Some(loaded) = state.loaded(group, member) else { return true };
            ready.push((member, loaded));
            leased.push(member);
            false
        });
        Ok(ready)
    }

    /// Those that are in memory, as soon as there is one.
    fn wait(&mut self) -> Result<Vec<Ready>> {
        let since = Instant::now();
        let mut state = self.shared.lock();
        let result = loop {
            match self.take_ready(&mut state) {
                Ok(ready) if ready.is_empty() => {}
                result => break result,
            }
            if let Some(failure) = self.remaining.iter().find_map(|&member| state.failure(self.group, member)) {
                break Err(failure);
            }
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.count_wait(since.elapsed());
        result
    }

    /// What was handed out is not in use any more.
    fn release(&mut self) {
        if !self.leased.is_empty() {
            self.shared.lock().unpin(self.group, &self.leased);
            self.leased.clear();
            self.shared.work.notify_all();
        }
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.release();
        if !self.remaining.is_empty() {
            self.shared.lock().unpin(self.group, &self.remaining);
            self.shared.work.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;
