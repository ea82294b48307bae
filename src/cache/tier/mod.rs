//! Tiers behind the pages: reusable blocks and checkpoints that had to make room go to host memory, from there to a
//! directory, and come back when a prompt begins with them.
//!
//! * An evicted block or checkpoint becomes a *record*: its bytes, the tokens and the key of the prefix before it.
//! * The host tier (`host.rs`) holds records up to a limit in bytes; what was used longest ago goes on to the directory.
//! * The directory (`disk.rs`) has one file per record, shared between processes and kept between runs.
//! * All reading and writing of files happens on one thread, `dsv4-io`, which ends with the last owner. Steps never wait
//!   for it; a prompt waits for what it wants to reuse, up to a timeout, and then computes.
//!
//! Invariant: nothing here is needed for a result. Whatever is lost, late, refused or damaged is computed again.
#![forbid(unsafe_code)]

mod disk;
mod host;
mod info;
mod io;
mod park;
mod promote;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block::Block;
use super::file::Identity;
use super::layout::CacheLayout;
use super::manager::CacheManager;
use super::prefix::{Checkpoint, PrefixKey};
use super::sequence::BLOCK_TOKENS;
use super::state::State;
use crate::alloc;
use crate::error::Result;

pub use info::TierFileInfo;
pub use park::{Parked, ParkingLot};

use disk::Disk;
use io::Shared;

/// How far ahead of their use blocks are read from the directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// Not at all: each is read when it is waited for.
    Off,
    /// While one is taken over, the next ones are read: [`TierOptions::prefetch_depth`] of them.
    #[default]
    Next,
    /// As soon as a prompt is known, all that it can reuse is read, up to [`TierOptions::AGGRESSIVE`] times as many.
    Aggressive,
}

/// Limits of the tiers. By default there are none: what is evicted is gone.
///
/// ```
/// use dsv4::cache::tier::TierOptions;
/// use dsv4::{Engine, EngineOptions, Model};
/// # let folder = std::env::temp_dir().join(format!("dsv4-doc-tier-{}", std::process::id()));
/// let tiers = TierOptions {
///     host_bytes: 64 << 20,
///     directory: Some(folder.clone()),
///     disk_bytes: 1 << 30,
///     session_bytes: 64 << 20, // idle sessions may give their pages up for others
///     ..TierOptions::default()
/// };
/// let model = Model::open("examples/models/tiny-v4")?;
/// let engine = Engine::new(&model, EngineOptions { tiers, ..EngineOptions::default() })?;
/// // before an orderly end: another process then finds the beginnings of this one
/// engine.flush_cache();
/// # drop(engine);
/// # std::fs::remove_dir_all(folder).expect("it was made");
/// # Ok::<(), dsv4::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierOptions {
    /// Most bytes of records in host memory, beyond the cache's own limit. With a directory, up to 256 MB more are on their
    /// way to it.
    pub host_bytes: u64,
    /// Folder of the disk tier, which is made if it is not there. Engines and processes may share one.
    pub directory: Option<PathBuf>,
    /// Most bytes of files in the folder; 0 is no limit. What was used longest ago is deleted first.
    pub disk_bytes: u64,
    /// Most bytes written to the folder per second, on average; 0 is no limit. What would exceed it is dropped.
    pub disk_write_rate: u64,
    /// Most bytes written to the folder by this engine; 0 is no limit.
    pub disk_write_total: u64,
    /// Reading ahead.
    pub prefetch: Prefetch,
    /// Blocks that are read ahead, at least 1.
    pub prefetch_depth: usize,
    /// How long a prompt waits for the tiers in all, before it computes what is missing.
    pub timeout: Duration,
    /// Most bytes of host memory for sessions that give their pages up for others, beyond the limits above; 0 is no
    /// preemption. A session that finds no room there is computed again from its tokens.
    pub session_bytes: u64,
}

impl Default for TierOptions {
    fn default() -> Self {
        Self {
            host_bytes: 0,
            directory: None,
            disk_bytes: 0,
            disk_write_rate: 0,
            disk_write_total: 0,
            prefetch: Prefetch::Next,
            prefetch_depth: 4,
            timeout: Duration::from_secs(2),
            session_bytes: 0,
        }
    }
}

impl TierOptions {
    /// Factor on the depth for [`Prefetch::Aggressive`].
    pub const AGGRESSIVE: usize = 16;

    /// Whether there is any tier.
    pub fn is_on(&self) -> bool {
        self.host_bytes > 0 || self.directory.is_some()
    }

    /// Records that are asked for at once.
    fn window(&self) -> usize {
        match self.prefetch {
            Prefetch::Off => 1,
            Prefetch::Next => 1 + self.prefetch_depth,
            Prefetch::Aggressive => 1 + Self::AGGRESSIVE * self.prefetch_depth,
        }
    }
}

/// Figures of the tiers since the engine's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Records in host memory now.
    pub host_records: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Bytes of evicted blocks and checkpoints that went to the tiers.
    pub offload_bytes: u64,
    /// Nanoseconds of copying them out of pages.
    pub offload_nanos: u64,
    /// Bytes written to files.
    pub written_bytes: u64,
    /// Nanoseconds of writing them, on the I/O thread.
    pub write_nanos: u64,
    /// Bytes read from files.
    pub read_bytes: u64,
    /// Nanoseconds of reading them, on the I/O thread.
    pub read_nanos: u64,
    /// Nanoseconds that prompts waited for the tiers.
    pub wait_nanos: u64,
    /// Blocks and checkpoints that came back from host memory.
    pub host_hits: u64,
    /// Blocks and checkpoints that came back from files.
    pub disk_hits: u64,
    /// Of these, those that had been read ahead when they were asked for.
    pub prefetched: u64,
    /// Prompts that stopped waiting.
    pub timeouts: u64,
    /// Records that the write limits kept from the folder.
    pub limited_writes: u64,
    /// Records that were lost because memory or disk were full, or writing was too slow.
    pub dropped: u64,
    /// Files that were deleted to make room for others.
    pub deleted_files: u64,
    /// Files that were damaged or not ours, and were deleted.
    pub damaged_files: u64,
    /// Failures of the file system.
    pub io_errors: u64,
}

/// What a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Block,
    Checkpoint,
}

/// Name of a record: the prefix that it ends, and what of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RecordKey {
    pub(super) prefix: PrefixKey,
    pub(super) kind: Kind,
}

/// A block or a checkpoint outside of pages.
pub(super) struct Record {
    /// The prefix before the block.
    parent: PrefixKey,
    /// The block's tokens. With the parent they make the key.
    tokens: Vec<u32>,
    /// Rows and keys of a block; windows and compressor states of a checkpoint.
    content: Vec<u8>,
    /// Of a checkpoint: tokens it stands behind.
    position: u64,
    /// Of a checkpoint: logits behind the last token, if they are known.
    logits: Arc<[f32]>,
}

impl Record {
    fn bytes(&self) -> u64 {
        (self.content.len() + 4 * self.tokens.len() + 4 * self.logits.len()) as u64
    }

    fn new(
        parent: PrefixKey,
        tokens: &[u32],
        bytes: u64,
        export: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        let mut content = alloc::with_capacity("offloaded block", bytes as usize)?;
        export(&mut |part| {
            content.extend_from_slice(part);
            Ok(())
        })?;
        let tokens = alloc::copied("offloaded block", tokens)?;
        Ok(Self { parent, tokens, content, position: 0, logits: Arc::default() })
    }

    fn block(&self, manager: &CacheManager) -> Result<Block> {
        let mut content = self.content.as_slice();
        Block::import(manager, BLOCK_TOKENS, &mut |out| take(&mut content, out))
    }

    fn checkpoint(&self, manager: &CacheManager) -> Result<Checkpoint> {
        let mut content = self.content.as_slice();
        let state = State::import(manager, self.position as usize, &mut |out| take(&mut content, out))?;
        Ok(Checkpoint { state: Arc::new(state), logits: Arc::clone(&self.logits) })
    }
}

/// Moves bytes from the front of `content` to `out`; a record's length was compared with the layout's.
fn take(content: &mut &[u8], out: &mut [u8]) -> Result<()> {
    let (front, rest) = content.split_at(out.len());
    out.copy_from_slice(front);
    *content = rest;
    Ok(())
}

/// The tiers of one engine.
pub struct Tiers {
    options: TierOptions,
    layout: CacheLayout,
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Tiers {
    /// Tiers for what `identity` describes; starts the I/O thread if there is a directory.
    ///
    /// # Errors
    /// `Io` if the directory cannot be made or read, or the thread cannot be started.
    pub fn new(options: TierOptions, identity: Identity) -> Result<Self> {
        let layout = identity.layout.clone();
        let disk = options.directory.as_ref().map(|folder| Disk::open(folder, &options, identity)).transpose()?;
        let shared = Arc::new(Shared::new(&options, disk.as_ref().map(Disk::names)));
        let thread = disk.map(|disk| io::start(Arc::clone(&shared), disk)).transpose()?;
        Ok(Self { options, layout, shared, thread })
    }

    /// Takes an evicted block over.
    pub(super) fn offload_block(&self, parent: PrefixKey, key: PrefixKey, tokens: &[u32], block: &Block) {
        let bytes = self.layout.block_content(BLOCK_TOKENS);
        self.offload(RecordKey { prefix: key, kind: Kind::Block }, || {
            Record::new(parent, tokens, bytes, |sink| block.export(&self.layout, BLOCK_TOKENS, sink))
        });
    }

    /// Takes an evicted checkpoint over, of the block with `tokens`.
    pub(super) fn offload_checkpoint(
        &self,
        parent: PrefixKey,
        key: PrefixKey,
        tokens: &[u32],
        checkpoint: &Checkpoint,
    ) {
        let (bytes, Checkpoint { state, logits }) = (self.layout.state_content(), checkpoint);
        self.offload(RecordKey { prefix: key, kind: Kind::Checkpoint }, || {
            let record = Record::new(parent, tokens, bytes, |sink| state.export(&self.layout, sink))?;
            Ok(Record { position: state.position() as u64, logits: Arc::clone(logits), ..record })
        });
    }

    fn offload(&self, key: RecordKey, record: impl FnOnce() -> Result<Record>) {
        if self.shared.touch(key) {
            return;
        }
        let start = Instant::now();
        match record() {
            Ok(record) => {
                self.shared.count(|stats| {
                    stats.offload_bytes += record.bytes();
                    stats.offload_nanos += nanos(start);
                });
                self.shared.insert(key, Arc::new(record));
            }
            Err(_) => self.shared.count(|stats| stats.dropped += 1),
        }
    }

    /// Hands everything in host memory to the directory and waits until it is written.
    pub(super) fn flush(&self) {
        self.shared.flush();
    }

    /// Figures now.
    pub(super) fn stats(&self) -> TierStats {
        self.shared.stats()
    }
}

impl Drop for Tiers {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            // a panic there has cost only what this cache may always lose
            drop(thread.join());
        }
    }
}

fn nanos(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
