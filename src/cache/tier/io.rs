//! The state that prompts, evictions and the I/O thread share, and that thread.
//!
//! Reads go before writes. A record is in at most one of: host memory, the queue of reads, the queue of writes.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};

use super::disk::{Disk, Names, Stored};
use super::host::Host;
use super::{Record, RecordKey, TierOptions, TierStats, nanos};

/// Most bytes that wait to be written.
const MOST_QUEUED: u64 = 256 << 20;

/// What is shared.
pub(super) struct Shared {
    host_limit: u64,
    write_rate: u64,
    write_total: u64,
    /// Names of the files, if there is a directory.
    names: Option<Names>,
    state: Mutex<State>,
    /// There is something for the I/O thread.
    work: Condvar,
    /// The I/O thread has finished something.
    done: Condvar,
}

#[derive(Default)]
struct State {
    host: Host,
    reads: VecDeque<RecordKey>,
    /// In the queue of reads, or being read, and somebody waits for it.
    reading: HashSet<RecordKey>,
    writes: VecDeque<RecordKey>,
    /// In the queue of writes, or being written.
    writing: HashMap<RecordKey, Arc<Record>>,
    writing_bytes: u64,
    /// Bytes handed over for writing, for the limit in all.
    accepted: u64,
    /// Bytes that may be written now, and since when they grow.
    allowance: Option<(f64, Instant)>,
    is_closing: bool,
    stats: TierStats,
}

enum Work {
    Read(RecordKey),
    Write(RecordKey, Arc<Record>),
}

impl Shared {
    pub(super) fn new(options: &TierOptions, names: Option<Names>) -> Self {
        Self {
            host_limit: options.host_bytes,
            write_rate: options.disk_write_rate,
            write_total: options.disk_write_total,
            names,
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut TierStats)) {
        change(&mut self.lock().stats);
    }

    pub(super) fn stats(&self) -> TierStats {
        let state = self.lock();
        TierStats { host_records: state.host.len() as u64, host_bytes: state.host.bytes(), ..state.stats }
    }

    /// Whether a record is anywhere, as far as can be told without reading it.
    pub(super) fn has(&self, key: RecordKey) -> bool {
        let state = self.lock();
        if state.host.contains(key) || state.writing.contains_key(&key) {
            return true;
        }
        drop(state);
        self.names.as_ref().is_some_and(|names| names.path(key).exists())
    }

    /// Marks a record in host memory as used; false if it is not there.
    pub(super) fn touch(&self, key: RecordKey) -> bool {
        self.lock().host.touch(key)
    }

    /// Takes an evicted record into host memory, and moves older ones on.
    pub(super) fn insert(&self, key: RecordKey, record: Arc<Record>) {
        let mut state = self.lock();
        state.host.insert(key, record, false);
        self.trim(&mut state);
    }

    /// Moves records on until host memory is within its limit.
    fn trim(&self, state: &mut State) {
        while state.host.bytes() > self.host_limit {
            let Some((key, item)) = state.host.pop_oldest() else { return };
            if !item.is_on_disk {
                self.queue_write(state, key, item.record);
            }
        }
    }

    fn queue_write(&self, state: &mut State, key: RecordKey, record: Arc<Record>) {
        let bytes = record.bytes();
        if self.names.is_none() || state.writing_bytes + bytes > MOST_QUEUED {
            state.stats.dropped += 1;
            return;
        }
        if !self.may_write(state, bytes) {
            state.stats.limited_writes += 1;
            return;
        }
        if state.writing.insert(key, record).is_none() {
            state.writing_bytes += bytes;
            state.writes.push_back(key);
            self.work.notify_one();
        }
    }

    /// Whether the write limits allow `bytes` more; counts them.
    fn may_write(&self, state: &mut State, bytes: u64) -> bool {
        if self.write_total > 0 && state.accepted + bytes > self.write_total {
            return false;
        }
        if self.write_rate > 0 {
            // what one second allows may be saved up, but at least one record
            let (most, now) = ((self.write_rate.max(bytes)) as f64, Instant::now());
            let (before, since) = state.allowance.unwrap_or((most, now));
            let allowed = (before + (now - since).as_secs_f64() * self.write_rate as f64).min(most);
            if allowed < bytes as f64 {
                state.allowance = Some((allowed, now));
                return false;
            }
            state.allowance = Some((allowed - bytes as f64, now));
        }
        state.accepted += bytes;
        true
    }

    /// Waits for the first record of `ahead` and has the others read meanwhile. `None` if it is not there, or not before
    /// `deadline`.
    pub(super) fn fetch(&self, ahead: &[RecordKey], deadline: Instant) -> Option<Arc<Record>> {
        let key = *ahead.first()?;
        let mut state = self.lock();
        let was_here = state.host.contains(key);
        for &key in ahead {
            self.queue_read(&mut state, key);
        }
        loop {
            if let Some(record) = state.writing.get(&key) {
                let record = Arc::clone(record);
                state.stats.host_hits += 1;
                return Some(record);
            }
            if let Some((record, is_on_disk)) = state.host.get(key) {
                let hits = if is_on_disk { &mut state.stats.disk_hits } else { &mut state.stats.host_hits };
                *hits += 1;
                state.stats.prefetched += u64::from(is_on_disk && was_here);
                return Some(record);
            }
            if !state.reading.contains(&key) {
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.stats.timeouts += 1;
                return None;
            }
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn queue_read(&self, state: &mut State, key: RecordKey) {
        let is_here = state.host.contains(key) || state.writing.contains_key(&key);
        if self.names.is_some() && !is_here && !state.is_closing && state.reading.insert(key) {
            state.reads.push_back(key);
            self.work.notify_one();
        }
    }

    /// Forgets what was asked for but not read yet, drops `taken`, and moves on what was read ahead in vain.
    pub(super) fn settle(&self, wanted: &[RecordKey], taken: usize) {
        let mut state = self.lock();
        for &key in &wanted[..taken] {
            state.host.remove(key);
        }
        let State { reads, reading, .. } = &mut *state;
        for key in wanted {
            reading.remove(key);
        }
        reads.retain(|key| reading.contains(key));
        self.trim(&mut state);
    }

    /// Has everything in host memory written, and waits for it.
    pub(super) fn flush(&self) {
        let mut state = self.lock();
        while let Some((key, item)) = state.host.pop_oldest() {
            if !item.is_on_disk {
                self.queue_write(&mut state, key, item.record);
            }
            while state.writing_bytes > MOST_QUEUED / 2 && !state.is_closing {
                state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        while !state.writing.is_empty() && !state.is_closing {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the I/O thread after what it is doing now.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.work.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_work(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if state.is_closing {
                return None;
            }
            if let Some(key) = state.reads.pop_front() {
                return Some(Work::Read(key));
            }
            if let Some(key) = state.writes.pop_front() {
                let record = state.writing.get(&key).map(Arc::clone);
                return record.map(|record| Work::Write(key, record));
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish_read(&self, key: RecordKey, start: Instant, read: Result<Option<Arc<Record>>>) {
        let mut state = self.lock();
        let is_wanted = state.reading.remove(&key);
        state.stats.read_nanos += nanos(start);
        match read {
            Ok(Some(record)) => {
                state.stats.read_bytes += record.bytes();
                // beyond the limit for as long as a prompt waits for it; see `settle`
                state.host.insert(key, record, true);
                if !is_wanted {
                    self.trim(&mut state);
                }
            }
            Ok(None) => {}
            Err(e) => count_error(&mut state.stats, &e),
        }
        self.done.notify_all();
    }

    fn finish_write(&self, key: RecordKey, start: Instant, written: Result<Stored>) {
        let mut state = self.lock();
        if let Some(record) = state.writing.remove(&key) {
            state.writing_bytes -= record.bytes();
        }
        state.stats.write_nanos += nanos(start);
        match written {
            Ok(Stored::Written { bytes, deleted }) => {
                state.stats.written_bytes += bytes;
                state.stats.deleted_files += deleted;
            }
            Ok(Stored::Known) => {}
            Ok(Stored::TooLarge) => state.stats.dropped += 1,
            Err(e) => count_error(&mut state.stats, &e),
        }
        self.done.notify_all();
    }
}

fn count_error(stats: &mut TierStats, error: &Error) {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::Mismatch | ErrorKind::Unsupported => stats.damaged_files += 1,
        ErrorKind::OutOfMemory => stats.dropped += 1,
        _ => stats.io_errors += 1,
    }
    tracing::warn!("a cached prefix is lost: {error}");
}

/// Starts the thread that reads and writes files until [`Shared::close`].
pub(super) fn start(shared: Arc<Shared>, mut disk: Disk) -> Result<JoinHandle<()>> {
    let run = move || {
        // a prompt that waits when the thread ends, however it ends, stops waiting
        let _end = End(Arc::clone(&shared));
        while let Some(work) = shared.next_work() {
            let start = Instant::now();
            match work {
                Work::Read(key) => shared.finish_read(key, start, disk.read(key)),
                Work::Write(key, record) => shared.finish_write(key, start, disk.write(key, &record)),
            }
        }
    };
    let thread = std::thread::Builder::new().name("dsv4-io".to_owned()).spawn(run);
    thread.map_err(|e| Error::new(ErrorKind::Io, format!("starting the thread dsv4-io: {e}")))
}

struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_closing = true;
        state.reads.clear();
        state.reading.clear();
        drop(state);
        self.0.done.notify_all();
    }
}
